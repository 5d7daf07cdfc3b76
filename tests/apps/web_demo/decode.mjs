// node decode.mjs SOURCES NODE_MODULES BUNDLE < requests: decodes in Node with the modules of the page.
// A request is a line {"app", "prompt" or "ids", "max_tokens"}, with "sampling" and "seed" (as text) if the host chooses, and "sample":
// true for what the model recommends beside them; its answer is {"ids", "text", "steps"} and tokens by mode.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { load, modules, sources } from "./load.mjs";

const { answer } = await load(sources, "answer.js");
const { Bundle } = await load(sources, "bundle.js");
const { Engine } = await load(sources, "conversation.js");
const { prompt } = await load(sources, "frames.js");
const { encode, openTokenizer } = await load(sources, "text.js");
const ort = await load(modules, "onnxruntime-web/dist/ort.node.min.mjs");
const { Tokenizer } = await load(modules, "@huggingface/tokenizers/dist/tokenizers.mjs");

ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const source = {
  fetch: async (path) => new Uint8Array(await readFile(join(process.argv[4], path))),
  kept: async () => undefined,
  keep: async () => {},
};

try {
  const bundle = await Bundle.open(source);
  const tokenizer = openTokenizer(Tokenizer, await bundle.read("tokenizer"));
  const engine = new Engine(ort, bundle);
  const stopIds = new Set(bundle.manifest.chat.stop_ids);
  for await (const line of createInterface({ input: process.stdin })) {
    const { app, prompt: content, ids, max_tokens: maxTokens, sampling: asked, seed, sample } = JSON.parse(line);
    const named = asked && { ...asked, seed: BigInt(seed) };
    const sampling = sample ? bundle.sampling(named) : named;
    const conversation = await engine.use(app, sampling !== undefined);
    const said = { ids: ids ?? encode(tokenizer, prompt(bundle.manifest.chat.frames, [{ role: "user", content }])) };
    const modes = sampling ? ["plain", "adaptive", "speculative"] : ["plain", "plain_step", "adaptive", "speculative"];
    for (const mode of conversation.speculates(sampling !== undefined) ? modes : ["plain"]) {
      [said[mode], said.text] = [[], ""];
      const options = { mode, maxTokens, stopIds, sampling };
      for await (const { tokens, pieces, speed } of answer(conversation, tokenizer, said.ids, options)) {
        said[mode].push(...tokens);
        said.text += pieces.map((piece) => piece.text).join("");
        said.steps = speed.steps;
        said[`${mode}_speed`] = speed;
      }
    }
    console.log(JSON.stringify(said));
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
