// A worker of compare.mjs: transformers.js with the messages of the page's worker.js. Its address says what it opens:
// peer.js?model=FOLDER&dtype=q8

import { AutoModelForCausalLM, AutoTokenizer, BaseStreamer, env } from "./transformers/transformers.min.js";

const { model: name, dtype } = Object.fromEntries(new URL(import.meta.url).searchParams);
const runtime = (kind) => new URL(`transformers/ort-wasm-simd-threaded.asyncify.${kind}`, import.meta.url).href;
Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/peers/" });
Object.assign(env, { useBrowserCache: false, useWasmCache: false });
Object.assign(env.backends.onnx.wasm, {
  wasmPaths: { mjs: runtime("mjs"), wasm: runtime("wasm") },
  numThreads: Math.min(4, navigator.hardwareConcurrency), // as in worker.js
});

class Runs extends BaseStreamer {
  tokens = null;
  put([ids]) {
    if (this.tokens) {
      this.tokens.push(...ids.map(Number));
      postMessage({ type: "run", speed: { steps: this.tokens.length - 1 } });
    }
    this.tokens ??= []; // the first ids are the prompt's
  }
  end() {}
}

async function open() {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await AutoModelForCausalLM.from_pretrained(name, { dtype, device: "wasm" });
  postMessage({ type: "open" });
  return { tokenizer, model };
}

const report = (error) => postMessage({ type: "error", message: error.message ?? String(error) });
const opened = open();
opened.catch(report);
self.onmessage = async ({ data: { text, maxTokens, modes } }) => {
  try {
    const { tokenizer, model } = await opened;
    const streamer = new Runs();
    const inputs = tokenizer(text, { add_special_tokens: false });
    await model.generate({ ...inputs, max_new_tokens: maxTokens, do_sample: false, streamer });
    postMessage({ type: "end", tokens: { [modes[0]]: streamer.tokens } });
  } catch (error) {
    report(error);
  }
};
