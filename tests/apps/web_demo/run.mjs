// node run.mjs SOURCES NODE_MODULES < calls: a call is a line {"model": FILE, "feeds": {name: {type, dims, bytes}}}, with
// the bytes of a tensor in base64; its answer is the data of the first output.

import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { load, modules, sources } from "./load.mjs";

const { ARRAYS } = await load(sources, "bundle.js");
const ort = await load(modules, "onnxruntime-web/dist/ort.node.min.mjs");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

for await (const line of createInterface({ input: process.stdin })) {
  const { model, feeds } = JSON.parse(line);
  const session = await ort.InferenceSession.create(new Uint8Array(await readFile(model)), {
    executionProviders: ["wasm"],
  });
  const tensors = Object.entries(feeds).map(([name, { type, dims, bytes }]) => [
    name,
    new ort.Tensor(type, new ARRAYS[type](Uint8Array.from(Buffer.from(bytes, "base64")).buffer), dims),
  ]);
  const out = await session.run(Object.fromEntries(tensors));
  console.log(JSON.stringify(Array.from(out[session.outputNames[0]].data)));
  await session.release();
}
