/** What is on the screen. Everything else is in the worker. */

/**
 * @typedef {import("./worker.js").Mode} Mode
 * @typedef {import("./worker.js").Reply} Reply
 * @typedef {import("./worker.js").Request} Request
 */

/**
 * @template {HTMLElement} T
 * @param {string} selector
 * @param {new () => T} kind
 */
function find(selector, kind) {
  const found = document.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`the page has no ${selector}`);
  return found;
}

const form = find("form", HTMLFormElement);
const app = find("#app", HTMLSelectElement);
const prompt = find("#prompt", HTMLTextAreaElement);
const maxTokens = find("#max-tokens", HTMLInputElement);
const temperature = find("#temperature", HTMLInputElement);
const seed = find("#seed", HTMLInputElement);
const controls = find("fieldset", HTMLFieldSetElement);
const stop = find("#stop", HTMLButtonElement);
const progress = find("progress", HTMLProgressElement);
const status = find("#status", HTMLElement);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });

/** @param {boolean} running */
function running(running) {
  controls.disabled = running;
  stop.disabled = !running;
}

/** @param {number} bytes */
const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

/** @param {import("./answer.js").Speed} speed */
function told({ tokens, steps, seconds, firstToken }) {
  const first = `first token after ${(firstToken * 1000).toFixed(0)} ms`;
  if (!steps) return first;
  return `${(tokens / seconds).toFixed(1)} tokens/s, ${(tokens / steps).toFixed(2)} tokens per step, ${first}`;
}

/** @param {Partial<Record<Mode, number[]>>} tokens */
function verdict({ plain, speculative }) {
  if (!plain || !speculative) return "Done.";
  const first = plain.findIndex((token, i) => token !== speculative[i]);
  return first < 0 ? "Both answers have the same tokens." : `The answers differ from token ${first + 1} on.`;
}

/** @param {MessageEvent<Reply>} event */
worker.onmessage = ({ data: reply }) => {
  if (reply.type === "open") {
    const threads = reply.threads > 1 ? `${reply.threads} threads` : "1 thread";
    find("#about", HTMLElement).textContent = `${reply.about}, ${threads}`;
    app.replaceChildren(...reply.apps.map((name) => new Option(name, name, false, name === reply.app)));
    progress.hidden = true;
    status.textContent = "Ready.";
    running(false);
  } else if (reply.type === "progress") {
    progress.hidden = false;
    [progress.value, progress.max] = [reply.done, reply.total];
    status.textContent = `${reply.path}: ${megabytes(reply.done)} of ${megabytes(reply.total)} MB`;
  } else if (reply.type === "begin") {
    progress.hidden = true;
    status.textContent = `Decoding: ${reply.mode}`;
    find(`#${reply.mode} output`, HTMLElement).replaceChildren();
  } else if (reply.type === "run") {
    const spans = reply.pieces
      .filter((piece) => piece.text)
      .map(({ text, accepted }) => {
        const span = document.createElement("span");
        span.className = accepted && reply.mode === "speculative" ? "accepted" : "";
        span.textContent = text;
        return span;
      });
    find(`#${reply.mode} output`, HTMLElement).append(...spans);
    find(`#${reply.mode} .speed`, HTMLElement).textContent = told(reply.speed);
  } else if (reply.type === "end") {
    status.textContent = reply.stopped ? "Stopped." : verdict(reply.tokens);
    status.dataset.tokens = JSON.stringify(reply.tokens);
    running(false);
  } else {
    progress.hidden = true;
    status.textContent = reply.message;
    status.classList.add("error");
    running(false);
  }
};
worker.onerror = (event) => {
  status.textContent = event.message ?? "the worker did not start";
  status.classList.add("error");
};

form.onsubmit = (event) => {
  event.preventDefault();
  const chosen = /** @type {HTMLButtonElement} */ (event.submitter).value;
  const modes = /** @type {Mode[]} */ (chosen.split(" "));
  for (const mode of modes) {
    find(`#${mode} output`, HTMLElement).replaceChildren();
    find(`#${mode} .speed`, HTMLElement).textContent = "";
  }
  delete status.dataset.tokens;
  status.classList.remove("error");
  running(true);
  /** @type {Request} */
  const request = {
    app: app.value,
    prompt: prompt.value,
    maxTokens: maxTokens.valueAsNumber,
    modes,
    temperature: temperature.valueAsNumber,
    seed: seed.value,
  };
  worker.postMessage(request);
};
stop.onclick = () => worker.postMessage(null);
