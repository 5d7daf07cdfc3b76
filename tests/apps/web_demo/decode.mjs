// node decode.mjs SOURCES NODE_MODULES BUNDLE < requests: decodes in Node with the modules of the page.
// A request is a line {"app", "before", "after", "prompt", "max_tokens"}; so is its answer
// {"ids", "plain", "speculative", "text", "steps"}. What goes wrong is a line on stderr, and the exit code 1.

import { readFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [sources, modules, folder] = process.argv.slice(2).map((path) => resolve(path));
const load = (...path) => import(pathToFileURL(join(...path)));
const { answer, promptIds } = await load(sources, "answer.js");
const { Bundle } = await load(sources, "bundle.js");
const { Engine } = await load(sources, "conversation.js");
const ort = await load(modules, "onnxruntime-web/dist/ort.node.min.mjs");
const { Tokenizer } = await load(modules, "@huggingface/tokenizers/dist/tokenizers.mjs");

ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const source = {
  fetch: async (path) => new Uint8Array(await readFile(join(folder, path))),
  kept: async () => undefined,
  keep: async () => {},
};

try {
  const bundle = await Bundle.open(source);
  const tokenizer = new Tokenizer(JSON.parse(new TextDecoder().decode(await bundle.read("tokenizer"))), {});
  const engine = new Engine(ort, bundle);
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    const ids = promptIds(tokenizer, request, request.prompt);
    const said = { ids };
    const conversation = await engine.use(request.app);
    for (const mode of conversation.speculates ? ["plain", "speculative"] : ["plain"]) {
      const options = {
        speculate: mode === "speculative",
        maxTokens: request.max_tokens,
        stopIds: new Set(bundle.manifest.chat.stop_ids),
      };
      [said[mode], said.text] = [[], ""];
      for await (const { tokens, pieces, speed } of answer(conversation, tokenizer, ids, options)) {
        said[mode].push(...tokens);
        said.text += pieces.map((piece) => piece.text).join("");
        said[`${mode}_speed`] = speed;
      }
    }
    console.log(JSON.stringify(said));
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
