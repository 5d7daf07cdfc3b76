// node run.mjs SOURCES NODE_MODULES < calls: a call is a line {"model": FILE, "feeds": {name: {dims, data}}} of float32
// tensors, its answer the data of the first output.

import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { load, modules } from "./load.mjs";

const ort = await load(modules, "onnxruntime-web/dist/ort.node.min.mjs");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";

for await (const line of createInterface({ input: process.stdin })) {
  const { model, feeds } = JSON.parse(line);
  const session = await ort.InferenceSession.create(new Uint8Array(await readFile(model)), {
    executionProviders: ["wasm"],
  });
  const tensors = Object.entries(feeds).map(([name, { dims, data }]) => [
    name,
    new ort.Tensor("float32", Float32Array.from(data), dims),
  ]);
  const out = await session.run(Object.fromEntries(tensors));
  console.log(JSON.stringify(Array.from(out[session.outputNames[0]].data)));
  await session.release();
}
