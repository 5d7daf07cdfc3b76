// node vectors.mjs SOURCES NODE_MODULES FILE: the answers in test vectors (tests/vectors) by the page's sampler. Prints each
// case that differs, then {"cases"}.

import { readFileSync } from "node:fs";
import { load, sources } from "./load.mjs";
import { rowOf } from "./rows.mjs";

const { Chooser, Noise, philox } = await load(sources, "sampling.js");
const vectors = JSON.parse(readFileSync(process.argv[4], "utf8"));

const logitsOf = (vocab, step) => Float32Array.from(rowOf(vocab, step % 3));
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const near = (one, other) => Math.abs(one - other) <= 1e-14 * Math.max(1, Math.abs(other));

let cases = 0;
const expect = (right, given) => {
  cases++;
  if (!right) console.log(JSON.stringify(given));
};
for (const given of vectors.philox) {
  expect(same(philox(given.number, given.position, given.kind, BigInt(given.seed)), given.words), given);
}
for (const given of vectors.noise) {
  const noise = new Noise(BigInt(given.seed), given.position);
  expect(given.ids.every((id, i) => near(noise.of(id), given.noise[i])), given);
}
for (const given of vectors.logits) expect(same(Array.from(logitsOf(5, given.step)), given.first), given);
for (const given of vectors.choices) {
  const chooser = new Chooser({ ...given.sampling, seed: BigInt(given.seed) }, given.prompt, given.stops, given.vocab);
  const [tokens, left] = [[], []];
  for (let step = 0; step < given.tokens.length; step++) {
    tokens.push(chooser.choose(logitsOf(given.vocab, step)));
    if (given.sampling.temperature) left.push(chooser.kept.filter(Number.isFinite).length);
  }
  expect(same(tokens, given.tokens) && same(left, given.left), given);
}
/** The token of a case of one choice, or who is at fault for none. */
const outcomeOf = ({ sampling, seed, prompt, stops, logits }) => {
  const chooser = new Chooser({ ...sampling, seed: BigInt(seed) }, prompt, stops, logits.length);
  try {
    return chooser.choose(Float32Array.from(logits, Number));
  } catch ({ message }) {
    if (message.startsWith("the request forbids every token")) return "request";
    return message.startsWith("the model returned logits that are not") ? "model" : message;
  }
};
for (const given of vectors.rows) expect(outcomeOf(given) === (given.token ?? given.refused), given);
for (const given of vectors.options) {
  let said = "";
  try {
    new Chooser(given.sampling, [1], [0], 4);
  } catch ({ message }) {
    said = message;
  }
  expect(said.includes(given.message), given);
}
console.log(JSON.stringify({ cases }));
