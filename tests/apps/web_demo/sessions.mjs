// node sessions.mjs SOURCES NODE_MODULES FILE: repeats recorded sessions (tests/vectors/sessions.py) with the page's loop. Prints the
// first difference of each session, then {"sessions"}.

import { readFileSync } from "node:fs";
import { load, sources } from "./load.mjs";
import { rowOf } from "./rows.mjs";

const { Conversation } = await load(sources, "conversation.js");
const { decode } = await load(sources, "loop.js");
const { Bundle } = await load(sources, "bundle.js");
const { Phrases } = await load(sources, "phrases.js");
const { sessions } = JSON.parse(readFileSync(process.argv[4], "utf8"));

class Tensor {
  constructor(type, data, dims) {
    Object.assign(this, { type, data, dims });
  }
}

function expect(what, wanted, found) {
  const [one, other] = [JSON.stringify(wanted), JSON.stringify(found)];
  if (one !== other) throw new Error(`${what}: expected ${one}, found ${other}`);
}

async function repeat({ geometry, functions, streams, stop_ids, phrases, answers }) {
  let [calls, now] = [[], 0];
  const manifest = { geometry, mode: streams ? "shared" : null };
  const bundle = new Bundle(manifest, null);
  const rows = new Float32Array(2 * geometry.layers * bundle.capacity); // each has the node of the call that wrote it
  const engine = { ort: { Tensor }, bundle, rows, dtype: "float32", width: 1 };
  const depth = Math.max(0, ...geometry.tree.map((path) => path.length));
  const written = { step: 1 + depth, step_short: 1 + geometry.short, verify: 1 + geometry.tree.length };

  const session = (name) => {
    const inputs = {
      step: ["root", "drafts", "length"],
      prefill: ["chunk", "valid", "length"],
      step_plain: ["root", "length"],
      step_short: ["root", "drafts", "length"],
      verify: ["root", "drafts", "length"],
      verify_plain: ["root", "length"],
      draft: ["token", "last_state", "length"],
    };
    const run = async (feeds) => {
      const call = calls.shift();
      if (!call) throw new Error("one call too many");
      expect("function", call.function, name);
      for (const input of inputs[name]) expect(`${name}'s ${input}`, call.inputs[input], Array.from(feeds[input].data));
      if (call.inputs.path) {
        const { length: [length], path } = call.inputs;
        expect("committed nodes before a draft", path, Array.from(rows.subarray(length - path.length, length)));
      }
      now += call.seconds;
      const out = {};
      for (const [output, values] of Object.entries(call.outputs)) {
        if (output === "logits") out[output] = { data: Float32Array.from(values.flatMap((n) => rowOf(geometry.vocab, n))) };
        else if (output === "states") out[output] = { data: Float32Array.from(values), dims: [0, geometry.hidden] };
        else out[output] = { data: Int32Array.from(values) };
      }
      const nodes = { prefill: geometry.chunk, step_plain: 1, verify_plain: 1, draft: 0, ...written }[name];
      const arrays = 2 * geometry.layers;
      const data = Float32Array.from({ length: arrays * nodes }, (_, i) => i % nodes);
      if (nodes) out.rows = { dims: [arrays, nodes, 1], data };
      return out;
    };
    return { inputNames: inputs[name], run };
  };

  const conversation = new Conversation(engine, Object.fromEntries(functions.map((name) => [name, session(name)])), {}, () => now);
  if (phrases) conversation.phrases = new Phrases(Uint32Array.from(phrases), geometry.vocab);
  for (const { prompt, mode, max_tokens: maxTokens, sampling: asked, seed, runs, calls: recorded } of answers) {
    calls = [...recorded];
    const sampling = asked && { ...asked, seed: BigInt(seed) };
    const found = [];
    for await (const run of decode(conversation, prompt, { mode, maxTokens, stopIds: new Set(stop_ids), sampling })) found.push(run);
    expect("runs", runs, found);
    expect("calls that are left", 0, calls.length);
  }
}

for (const session of sessions) {
  try {
    await repeat(session);
  } catch (error) {
    console.log(`${session.what}: ${error.message}`);
  }
}
console.log(JSON.stringify({ sessions: sessions.length }));
