// node compare.mjs SOURCES NODE_MODULES CHROMIUM ADDRESS < {"arms", "prompts", "rounds", "max_tokens", "app"}: answers
// prompts in headless Chromium with workers that take turns. An arm is {"name", "worker", "mode"}. Prints a line
// {"arm", "tokens", "steps", "first", "seconds"} for each answer; its first token is not in "seconds".

import { readFileSync } from "node:fs";
import { load, modules, sources } from "./load.mjs";

const [executablePath, address] = process.argv.slice(4);
const { prompt: framed, userContent } = await load(sources, "frames.js");
const { chromium } = await load(modules, "playwright-core/index.mjs");
const { arms, prompts, rounds, max_tokens: maxTokens, app } = JSON.parse(readFileSync(0, "utf8"));
const timeout = 300_000;

/** In the browser: opens a worker, or asks it. The page times its replies, in the same way for all arms. */
const asked = ({ worker, request }) =>
  new Promise((resolve, reject) => {
    self.workers ??= {};
    const sent = performance.now();
    const runs = []; // when the tokens of each step came
    const started = (self.workers[worker] ??= new Worker(worker, { type: "module" }));
    started.onerror = (event) => reject(new Error(`${worker}: ${event.message}`));
    started.onmessage = ({ data: reply }) => {
      if (reply.type === "error") reject(new Error(`${worker}: ${reply.message}`));
      if (reply.type === "open" && !request) resolve();
      if (reply.type === "run") runs[reply.speed.steps] ??= performance.now() / 1000; // not the end of the text
      if (reply.type !== "end") return;
      const [tokens, first, last] = [...Object.values(reply.tokens), runs[0], runs.at(-1)];
      resolve({ tokens, steps: runs.length - 1, first: first - sent / 1000, seconds: last - first });
    };
    if (request) started.postMessage(request);
  });

const browser = await chromium.launch({ executablePath, chromiumSandbox: false, timeout });
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(timeout);
  await page.goto(`${address}bundle/manifest.json`); // of this origin, and without a worker of its own
  const { isolated, manifest } = await page.evaluate(() => ({
    isolated: crossOriginIsolated,
    manifest: JSON.parse(document.body.textContent),
  }));
  if (!isolated) throw new Error("no threads: the page is not cross-origin isolated");
  const answer = async ({ worker, mode }, prompt) => {
    await new Promise((resolve) => setTimeout(resolve, 200)); // until the threads of the last arm sleep
    const { instruction } = manifest.apps.find(({ name }) => name === app);
    const content = userContent(instruction, prompt);
    const text = framed(manifest.chat.frames, [{ role: "user", content }]);
    return page.evaluate(asked, { worker, request: { app, prompt, text, maxTokens, modes: [mode] } });
  };
  for (const worker of new Set(arms.map((arm) => arm.worker))) await page.evaluate(asked, { worker });
  for (const arm of arms) await answer(arm, prompts[0]); // the first answer allocates
  for (let round = 0; round < rounds; round++) {
    for (const [number, prompt] of prompts.entries()) {
      for (let turn = 0; turn < arms.length; turn++) {
        const arm = arms[(turn + number + round) % arms.length];
        console.log(JSON.stringify({ arm: arm.name, ...(await answer(arm, prompt)) }));
      }
    }
  }
} finally {
  await browser.close();
}
