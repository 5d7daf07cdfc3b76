/** The page's worker: the bundle, the engine and the answers. What it receives and posts are `Request` and `Reply`. */

import { answer } from "./answer.js";
import { Bundle, BundleError, MANIFEST } from "./bundle.js";
import { Engine } from "./conversation.js";
import { changed, prompt as framed, userContent } from "./frames.js";
import * as ort from "./runtime/ort.wasm.bundle.min.mjs";
import { Tokenizer } from "./runtime/tokenizers.min.mjs";
import { encode, openForWords } from "./text.js";

/**
 * @typedef {{app: string, prompt: string, maxTokens: number, modes: Mode[], temperature?: number, seed?: string}} Request
 *   null stops the answer; without a temperature, or with 0, the likeliest tokens are chosen
 * @typedef {import("./loop.js").Mode} Mode
 * @typedef {{type: "open", about: string, threads: number, apps: string[], app: string}
 *   | {type: "progress", path: string, done: number, total: number}
 *   | {type: "begin", mode: Mode}
 *   | {type: "run", mode: Mode, pieces: import("./answer.js").Piece[], speed: import("./answer.js").Speed}
 *   | {type: "end", stopped: boolean, tokens: Partial<Record<Mode, number[]>>}
 *   | {type: "error", message: string}} Reply
 */

const CACHE = "ssdevice";
const BUNDLE = "bundle/";
const MOST_THREADS = 4; // steps are too short for more

/** @param {Reply} reply */
const reply = (reply) => postMessage(reply);
/** @param {string} path */
const address = (path) => new URL(path, import.meta.url);
/** @param {string} sha256 */
const keptAt = (sha256) => address(`kept/${sha256}`);

/**
 * The content of a file of this origin, with progress if its size is known.
 * @param {string} path
 * @param {number} [size]
 */
async function download(path, size) {
  const response = await fetch(address(path), { cache: "no-cache" });
  if (!response.ok || !response.body) throw new BundleError(`${path}: ${response.status} ${response.statusText}`);
  if (size === undefined) return new Uint8Array(await response.arrayBuffer());
  const bytes = new Uint8Array(size);
  let done = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { value } = await reader.read();
    if (!value) break;
    if (done + value.length > size) throw new BundleError(`${path} is larger than ${MANIFEST} says`);
    bytes.set(value, done);
    done += value.length;
    reply({ type: "progress", path, done, total: size });
  }
  return bytes.slice(0, done);
}

/** @type {import("./bundle.js").Source} */
const source = {
  fetch: (path, size) => download(BUNDLE + path, size),
  kept: async (sha256) => {
    const found = await (await caches.open(CACHE)).match(keptAt(sha256));
    return found && new Uint8Array(await found.arrayBuffer());
  },
  keep: async (sha256, bytes) => {
    try {
      await (await caches.open(CACHE)).put(keptAt(sha256), new Response(bytes));
    } catch (error) {
      console.warn(`not kept for the next visit: ${error}`); // the browser grants too little room
    }
  },
};

/**
 * What earlier bundles left in the cache.
 * @param {Bundle} bundle
 */
async function forgetOthers(bundle) {
  const wanted = new Set(Object.values(bundle.manifest.files).map(({ sha256 }) => keptAt(sha256).href));
  const cache = await caches.open(CACHE);
  for (const request of await cache.keys()) {
    if (!wanted.has(request.url)) await cache.delete(request);
  }
}

async function open() {
  if (!isSecureContext) throw new BundleError("open this page through https or on localhost: it has to check hashes");
  ort.env.logLevel = "error";
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency) : 1;
  const bundle = await Bundle.open(source);
  await forgetOthers(bundle);
  const { tokenizer, named } = openForWords(Tokenizer, await bundle.read("tokenizer"));
  const { frames } = bundle.manifest.chat;
  if (!frames) throw new BundleError("no prompt frames: the bundle is of an older version, or its chat template needs jinja2");
  const { model, precision, apps, default_app: app } = bundle.manifest;
  const engine = new Engine(ort, bundle);
  await engine.use(app);
  reply({
    type: "open",
    about: `${model.model_type}, ${(model.parameters / 1e6).toFixed(0)} M parameters, ${precision.toUpperCase()}`,
    threads: ort.env.wasm.numThreads,
    apps: apps.map(({ name }) => name),
    app,
  });
  return { bundle, engine, frames: changed(frames, named), tokenizer, named };
}

/** @type {Request | null} what is to be decoded; null: nothing, or nothing more */
let current = null;
const { port1: here, port2: there } = new MessageChannel();
/** Lets the messages in that came during a call: a call of the wasm module blocks this thread. */
const breathe = () =>
  new Promise((resolve) => {
    here.onmessage = resolve;
    there.postMessage(null);
  });

/** @param {Request} request */
async function decodeAll(request) {
  const { app, prompt, maxTokens, modes, temperature = 0, seed = "0" } = request;
  const { bundle, engine, frames, tokenizer, named } = await opened;
  const sampling = temperature > 0 ? bundle.sampling({ temperature, seed: BigInt(seed) }) : undefined;
  const conversation = await engine.use(app, sampling !== undefined);
  const content = userContent(named(bundle.app(app).instruction), prompt);
  const ids = encode(tokenizer, framed(frames, [{ role: "user", content }]));
  const stopIds = new Set(bundle.manifest.chat.stop_ids);
  const continues = !frames.answer && !frames.first.after; // as ssdevice/text/tokenizer.py says
  /** @type {Partial<Record<Mode, number[]>>} */
  const answers = {};
  for (const mode of modes) {
    if (current !== request) break;
    if (mode !== "plain" && !conversation.speculates(sampling !== undefined)) {
      throw new BundleError(`the app ${app} verifies no drafts: choose plain decoding`);
    }
    conversation.length = 0; // so that each mode's time until the first token is that of a whole prompt
    reply({ type: "begin", mode });
    /** @type {number[]} */
    const tokens = (answers[mode] = []);
    for await (const run of answer(conversation, tokenizer, ids, { mode, maxTokens, stopIds, sampling, continues })) {
      tokens.push(...run.tokens);
      reply({ type: "run", mode, pieces: run.pieces, speed: run.speed });
      await breathe();
      if (current !== request) break;
    }
  }
  reply({ type: "end", stopped: current !== request, tokens: answers });
}

/** @param {unknown} error */
function report(error) {
  const [line] = (error instanceof Error ? error.message : String(error)).split("\n");
  reply({ type: "error", message: line });
}

const opened = open();
opened.catch(report);
/** @param {MessageEvent<Request | null>} event */
self.onmessage = async ({ data: request }) => {
  current = request;
  if (request) await decodeAll(request).catch(report);
};
