/**
 * The choice of tokens from logits: `ssdevice/runtime/sampling` in JavaScript. For a seed every host chooses the same tokens, so
 * precisions are part of the definition: processors and the division by the temperature round to float32 (`Math.fround`,
 * and what a Float32Array does), the rest is in float64.
 */

import { BundleError } from "./bundle.js";

const GROUP = 256; // tokens whose smallest exponential number is known without the others
const TIE = 1e-12; // surprises are as far from the entropy, a rounded sum, if they differ by less

/**
 * What may be asked, as in Python; what is missing has no effect. `seed` has 64 bits.
 * @typedef {object} Sampling
 * @property {number} [temperature]
 * @property {number} [top_k]
 * @property {number} [top_p]
 * @property {number} [min_p]
 * @property {number} [typical_p]
 * @property {number} [repetition_penalty]
 * @property {number} [presence_penalty]
 * @property {number} [frequency_penalty]
 * @property {number} [no_repeat_ngram_size]
 * @property {number} [min_new_tokens]
 * @property {number} [min_length]
 * @property {Record<string, number>} [logit_bias]
 * @property {number[]} [suppress]
 * @property {number[]} [begin_suppress]
 * @property {number[][]} [bad_words]
 * @property {bigint} [seed]
 * @typedef {{ids: Int32Array, scores: Float32Array}} Candidates  ids ascending
 */

/**
 * Options that are numbers, and their ranges, in which scores are finite for logits up to 1e30; what messages say where that
 * is not the two bounds.
 */
const RANGES = /** @type {const} */ ([
  ["temperature", 0, 100],
  ["top_k", 0, 2 ** 31],
  ["top_p", Number.MIN_VALUE, 1, "above 0, at most 1"],
  ["min_p", 0, 1],
  ["typical_p", Number.MIN_VALUE, 1, "above 0, at most 1"],
  ["repetition_penalty", 0.01, 100],
  ["presence_penalty", -100, 100],
  ["frequency_penalty", -100, 100],
  ["no_repeat_ngram_size", 0, 2 ** 31],
  ["min_new_tokens", 0, 2 ** 31],
  ["min_length", 0, 2 ** 31],
]);
const LEAST_TEMPERATURE = 1e-6; // of sampling
const LARGEST_BIAS = 1e30;

/**
 * Throws RangeError for a value outside of its range, or a token that the model does not have.
 * @param {Sampling} sampling
 * @param {number} vocab
 */
function check(sampling, vocab) {
  for (const [name, least, most, expected = `${least} to ${most}`] of RANGES) {
    const value = sampling[name] ?? least;
    if (!(value >= least && value <= most)) throw new RangeError(`${name} is ${value}, expected ${expected}`);
  }
  const { temperature = 0, seed = 0n, logit_bias = {}, suppress = [], begin_suppress = [], bad_words = [] } = sampling;
  if (temperature > 0 && temperature < LEAST_TEMPERATURE) {
    throw new RangeError(`temperature is ${temperature}, expected 0 (greedy), or 1e-6 to 100`);
  }
  if (seed < 0n || seed >= 1n << 64n) throw new RangeError(`seed is ${seed}, expected 0 to 2^64 - 1`);
  if (bad_words.some((word) => !word.length)) throw new RangeError("bad_words has a sequence without tokens");
  const ids = [...Object.keys(logit_bias).map(Number), ...suppress, ...begin_suppress, ...bad_words.flat()];
  const wrong = ids.find((id) => !(Number.isInteger(id) && id >= 0 && id < vocab));
  if (wrong !== undefined) throw new RangeError(`token ${wrong} is not one of the model's ${vocab}`);
  for (const [token, bias] of Object.entries(logit_bias)) {
    if (Math.abs(bias) <= LARGEST_BIAS || bias === -Infinity) continue;
    throw new RangeError(`logit_bias of token ${token} is no number from -1e30 to 1e30, nor -inf, which bans it`);
  }
}

/** @param {Sampling} sampling whether every token is the likeliest of the model's own logits, which graphs can choose as well */
export function isGreedy({ temperature = 0, top_k, top_p, min_p, typical_p, seed, ...processors }) {
  const { repetition_penalty = 1, logit_bias = {}, ...rest } = processors;
  const asked = [...Object.values(rest), Object.keys(logit_bias)];
  return temperature === 0 && repetition_penalty === 1 && asked.every((value) => (Array.isArray(value) ? !value.length : !value));
}

/**
 * The 32-bit words of Philox 4x32-10 for the counter (number, position, kind, 0).
 * @param {number} number
 * @param {number} position
 * @param {number} kind
 * @param {bigint} seed
 */
export function philox(number, position, kind, seed) {
  let [a, b, c, d] = [number, position, kind, 0];
  let [key, other] = [Number(seed & 0xffffffffn), Number(seed >> 32n)];
  for (let round = 0; round < 10; round++) {
    const [p, q] = [0xd2511f53, 0xcd9e8d57];
    [a, b, c, d] = [high(q, c) ^ b ^ key, Math.imul(q, c), high(p, a) ^ d ^ other, Math.imul(p, a)].map((x) => x >>> 0);
    [key, other] = [(key + 0x9e3779b9) >>> 0, (other + 0xbb67ae85) >>> 0];
  }
  return [a, b, c, d];
}

/** @param {number} a @param {number} b the upper half of the product of two 32-bit numbers */
function high(a, b) {
  return Math.floor((a * (b >>> 16) + Math.floor((a * (b & 0xffff)) / 65536)) / 65536);
}

/** @param {number} word @param {number} next */
function exponential(word, next) {
  return -Math.log((word * 2 ** 20 + (next >>> 12) + 0.5) / 2 ** 52);
}

/** The Gumbel numbers of all tokens at a position; `ssdevice/runtime/sampling/noise.py` says what they are and why. */
export class Noise {
  /**
   * @param {bigint} seed
   * @param {number} position
   */
  constructor(seed, position) {
    this.seed = seed;
    this.position = position;
    /** @type {{smallest: number, most: number, lucky: number}[]} those that are known */
    this.groups = [];
  }

  /**
   * The largest number of a group, `most`, and the token that has it, which may lie beyond the last group's tokens.
   * @param {number} number
   */
  group(number) {
    if (this.groups[number]) return this.groups[number];
    const words = philox(number, this.position, 0, this.seed);
    const smallest = exponential(words[0], words[1]) / GROUP;
    const lucky = number * GROUP + (words[2] % GROUP);
    return (this.groups[number] = { smallest, most: -Math.log(smallest), lucky });
  }

  /** @param {number} token */
  of(token) {
    const { smallest, most, lucky } = this.group(Math.floor(token / GROUP));
    if (token === lucky) return most;
    const words = philox(token >>> 1, this.position, 1, this.seed);
    const at = 2 * (token & 1);
    return -Math.log(smallest + exponential(words[at], words[at + 1]));
  }
}

/** Chooses the tokens of one answer. */
export class Chooser {
  /**
   * Throws RangeError for what cannot be asked.
   * @param {Sampling} sampling
   * @param {number[]} prompt
   * @param {Iterable<number>} stops
   * @param {number} vocab
   */
  constructor(sampling, prompt, stops, vocab) {
    check(sampling, vocab);
    this.sampling = sampling;
    this.stops = [...stops];
    this.prompt = prompt.length;
    this.text = [...prompt];
    this.seen = new Set(prompt);
    /** @type {Map<number, number>} how often the answer has a token */
    this.counts = new Map();
    /** @type {Float32Array} what truncation left for the last choice */
    this.kept = new Float32Array();
  }

  /**
   * The token after the text so far, which it then belongs to. Throws BundleError for logits that are not numbers, or
   * of which the best score is not finite, and if every token is forbidden.
   * @param {Float32Array} logits of which -Infinity rules a token out
   */
  choose(logits) {
    const { temperature = 0, seed = 0n } = this.sampling;
    const scores = this.#processed(logits);
    const best = largest(scores);
    if (best === -Infinity && logits.some((logit) => logit !== -Infinity)) {
      throw new BundleError("the request forbids every token that the model could choose");
    }
    const divisor = Math.fround(temperature);
    if (!Number.isFinite(temperature > 0 ? Math.fround(best / divisor) : best)) {
      throw new BundleError("the model returned logits that are not numbers, or too large to choose from");
    }
    let token = scores.indexOf(best);
    if (temperature > 0) {
      for (let i = 0; i < scores.length; i++) scores[i] /= divisor;
      const kept = truncated(scores, this.sampling);
      this.kept = kept.scores;
      token = sample(kept, new Noise(seed, this.text.length));
    }
    this.text.push(token);
    this.seen.add(token);
    this.counts.set(token, (this.counts.get(token) ?? 0) + 1);
    return token;
  }

  /** @param {Float32Array} logits */
  #processed(logits) {
    const { logit_bias: bias = {}, repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0 } = this.sampling;
    const scores = logits.slice();
    for (const [token, value] of Object.entries(bias)) scores[Number(token)] += Math.fround(value);
    const penalty = Math.fround(repetition_penalty);
    for (const token of repetition_penalty === 1 ? [] : this.seen) {
      scores[token] = scores[token] < 0 ? scores[token] * penalty : scores[token] / penalty;
    }
    const [presence, frequency] = [Math.fround(presence_penalty), Math.fround(frequency_penalty)];
    for (const [token, count] of presence || frequency ? this.counts : []) {
      scores[token] -= Math.fround(presence + Math.fround(frequency * count));
    }
    for (const token of this.#banned()) scores[token] = -Infinity;
    return scores;
  }

  #banned() {
    const { suppress = [], begin_suppress = [], min_new_tokens = 0, min_length = 0 } = this.sampling;
    const { no_repeat_ngram_size: size = 0, bad_words = [] } = this.sampling;
    const { stops, text } = this;
    const answered = text.length - this.prompt;
    const banned = [...suppress];
    if (!answered) banned.push(...begin_suppress);
    if (answered < min_new_tokens || text.length < min_length) banned.push(...stops);
    for (let end = size - 1; size && end < text.length; end++) {
      if (repeats(text, end, text.slice(text.length - size + 1))) banned.push(text[end]);
    }
    for (const word of bad_words) {
      if (word.length === 1 && stops.includes(word[0])) continue; // or no answer would end
      if (repeats(text, text.length, word.slice(0, -1))) banned.push(word[word.length - 1]);
    }
    return banned;
  }
}

/** @param {number[]} text @param {number} end @param {number[]} part whether it is what the text has before `end` */
function repeats(text, end, part) {
  return part.length <= end && part.every((token, i) => text[end - part.length + i] === token);
}

/** @param {Float32Array} scores NaN if one is */
function largest(scores) {
  let most = -Infinity;
  for (const score of scores) {
    if (Number.isNaN(score)) return NaN;
    if (score > most) most = score;
  }
  return most;
}

/** @param {Float32Array} scores @param {number} n */
function nthLargest(scores, n) {
  if (n > GROUP) return scores.slice().sort()[scores.length - n];
  const found = scores.slice(0, n).sort(); // the n largest so far, ascending
  for (let i = n; i < scores.length; i++) {
    if (scores[i] <= found[0]) continue;
    let place = 0;
    for (; place + 1 < n && found[place + 1] < scores[i]; place++) found[place] = found[place + 1];
    found[place] = scores[i];
  }
  return found[0];
}

/** @param {number} count @param {(i: number) => boolean} good the numbers below `count` for which it is true */
function places(count, good) {
  const found = [];
  for (let i = 0; i < count; i++) if (good(i)) found.push(i);
  return found;
}

/**
 * What top-k, top-p, min-p and typical-p leave.
 * @param {Float32Array} all
 * @param {Sampling} sampling
 * @returns {Candidates}
 */
function truncated(all, { top_k = 0, top_p = 1, min_p = 0, typical_p = 1 }) {
  let kept = { ids: new Int32Array(all.length).map((_, i) => i), scores: all };
  /** @param {number[]} left by index in what was left so far, ascending */
  const keep = (left) => {
    kept = { ids: Int32Array.from(left, (i) => kept.ids[i]), scores: Float32Array.from(left, (i) => kept.scores[i]) };
  };
  if (top_k > 0 && top_k < all.length) {
    const least = nthLargest(all, top_k);
    keep(places(all.length, (i) => all[i] >= least));
  }
  if (top_p < 1) keep(nucleus(kept.scores, top_p));
  const { scores } = kept;
  const lowest = largest(scores) + Math.log(min_p);
  if (min_p > 0) keep(places(scores.length, (i) => scores[i] >= lowest));
  if (typical_p < 1) keep(typical(kept.scores, typical_p));
  return kept;
}

/** @param {Float32Array} scores how far they are below the largest, what tokens weigh, and all together */
function weigh(scores) {
  const most = largest(scores);
  const below = Float64Array.from(scores, (score) => score - most);
  const weights = below.map(Math.exp);
  return { below, weights, total: weights.reduce((sum, weight) => sum + weight, 0) };
}

/** @param {Float32Array} scores @param {number} mass the fewest likeliest tokens that have it together */
function nucleus(scores, mass) {
  const { weights, total } = weigh(scores);
  const lowest = ((1 - mass) / scores.length) * total; // all tokens below together have less than 1 - mass
  const falling = places(scores.length, (i) => weights[i] >= lowest).sort((i, j) => scores[j] - scores[i] || i - j);
  return falling.slice(0, 1 + border(falling, weights, mass * total)).sort((i, j) => i - j);
}

/** @param {Float32Array} scores @param {number} mass the tokens whose surprise is nearest to the entropy that have it together */
function typical(scores, mass) {
  const { below, weights, total } = weigh(scores);
  const mean = weights.reduce((sum, weight, i) => (weight ? sum + (weight / total) * below[i] : sum), 0);
  const far = below.map((each) => Math.abs(each - mean)); // surprises differ from the entropy by as much
  const order = places(scores.length, (i) => weights[i] > 0).sort((i, j) => far[i] - far[j]);
  const farthest = far[order[border(order, weights, mass * total)]] + TIE;
  return places(scores.length, (i) => weights[i] > 0 && far[i] <= farthest);
}

/**
 * The place in an order of tokens where those so far weigh a mass; at most the last one.
 * @param {number[]} order
 * @param {Float64Array} weights
 * @param {number} mass
 */
function border(order, weights, mass) {
  let reached = 0;
  const found = order.findIndex((i) => (reached += weights[i]) >= mass);
  return found < 0 ? order.length - 1 : found;
}

/**
 * The token with the largest score plus noise; ties go to the lowest id. The noise of most tokens need not be known.
 * @param {Candidates} candidates
 * @param {Noise} noise
 */
function sample({ ids, scores }, noise) {
  let [token, most] = [-1, -Infinity];
  /** @param {number} i by index in `ids` */
  const consider = (i) => {
    if (scores[i] + noise.group(Math.floor(ids[i] / GROUP)).most < most - 1e-6) return;
    const total = scores[i] + noise.of(ids[i]);
    if (total > most || (total === most && ids[i] < token)) [token, most] = [ids[i], total];
  };
  consider(scores.indexOf(largest(scores)));
  for (let i = 0; i < ids.length; i++) consider(i);
  return token;
}
