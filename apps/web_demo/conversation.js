/** The contract's functions (`ssdevice/contract.py`) of one app on a KV cache that the host holds. */

import { readAdapter } from "./adapter.js";
import { Adaptive } from "./adaptive.js";
import { ARRAYS, BundleError } from "./bundle.js";
import { PHRASES, Phrases } from "./phrases.js";

const PREFILL = "prefill";
const STEP = "step";
const PLAIN = "step_plain";
const STEP_SHORT = "step_short";
const VERIFY = "verify";
const VERIFY_PLAIN = "verify_plain";
const DRAFT = "draft";
const WEIGHTS = "weights";
const PAST = /^past_(keys|values)\.(\d+)$/;
const [BUCKET, LANES] = [32, 16]; // see `visible`

/**
 * @typedef {typeof import("onnxruntime-web")} Ort
 * @typedef {import("onnxruntime-web").InferenceSession} InferenceSession
 * @typedef {import("onnxruntime-web").Tensor} Tensor
 */

/** The graphs of a bundle, which its apps share, each opened when the first app needs it. */
export class Engine {
  /**
   * @param {Ort} ort
   * @param {import("./bundle.js").Bundle} bundle
   */
  constructor(ort, bundle) {
    const { cache_dtype: dtype, geometry } = bundle.manifest;
    const { layers, kv_heads: heads, head_dim: size } = geometry;
    this.ort = ort;
    this.bundle = bundle;
    this.width = heads * size;
    /** Rows `[2 * layers, capacity, width]`: keys of layer 0, values of layer 0, keys of layer 1, .. */
    this.rows = new ARRAYS[dtype](2 * layers * bundle.capacity * this.width);
    this.dtype = dtype;
    /** @type {Map<string, InferenceSession>} */
    this.sessions = new Map();
    /** @type {Map<string, Conversation>} */
    this.conversations = new Map();
    /** @type {Conversation | null} whose rows are in the cache */
    this.used = null;
  }

  /**
   * The conversation of an app. Those of all apps use the same memory, so they take turns.
   * @param {string} name
   * @param {boolean} [samples] whether the host chooses tokens, which takes other graphs
   */
  async use(name, samples = false) {
    const app = this.bundle.app(name);
    const functions = this.bundle.functions(app, samples);
    await this.#open(Object.values(functions));
    /** @type {Record<string, InferenceSession>} */
    const sessions = {};
    for (const [contract, own] of Object.entries(functions)) {
      sessions[contract] = /** @type {InferenceSession} */ (this.sessions.get(own));
    }
    const conversation = this.conversations.get(name) ?? (await this.#begun(app));
    Object.assign(conversation.sessions, sessions);
    if (this.used !== conversation) conversation.length = 0;
    this.used = conversation;
    return conversation;
  }

  /** @param {import("./bundle.js").App} app */
  async #begun(app) {
    /** @type {Record<string, Tensor>} */
    const adapter = {};
    for (const file of app.files) {
      for (const [input, value] of readAdapter(await this.bundle.read(file), this.bundle.manifest.model.sha256)) {
        adapter[input] = new this.ort.Tensor(/** @type {any} */ (value.type), value.data, value.dims);
      }
    }
    const opened = new Conversation(this, {}, adapter);
    const { roles, geometry } = this.bundle.manifest;
    if (!opened.streams && PHRASES in roles) {
      opened.phrases = Phrases.read(await this.bundle.read(PHRASES), geometry.vocab);
    }
    this.conversations.set(app.name, opened);
    return opened;
  }

  /** @param {string[]} graphs */
  async #open(graphs) {
    const missing = graphs.filter((graph) => !this.sessions.has(graph));
    if (!missing.length) return;
    const externalData = [{ path: this.bundle.path(WEIGHTS), data: await this.bundle.read(WEIGHTS) }];
    for (const graph of missing) {
      const model = await this.bundle.read(graph);
      const options = { executionProviders: ["wasm"], externalData };
      this.sessions.set(graph, await this.ort.InferenceSession.create(model, options));
    }
  }
}

/**
 * One KV cache and the functions on it. `length`: committed rows; going back means lowering it. The functions write
 * their rows from `length` on; only `prefill` raises it.
 */
export class Conversation {
  /**
   * @param {Engine} engine
   * @param {Record<string, InferenceSession>} sessions by the contract's name
   * @param {Record<string, Tensor>} adapter by graph input
   * @param {() => number} [clock] of adaptive mode, in seconds
   */
  constructor(engine, sessions, adapter, clock = () => performance.now() / 1000) {
    const { geometry, mode } = engine.bundle.manifest;
    this.engine = engine;
    this.sessions = sessions;
    this.adapter = adapter;
    this.geometry = geometry;
    this.context = geometry.context;
    this.capacity = engine.bundle.capacity;
    this.length = 0;
    /** @type {number[]} the tokens of the committed rows; what follows them is undefined */
    this.text = [];
    /** What the next step verifies, γ rows of k ids. */
    this.drafts = new Int32Array(geometry.gamma * geometry.k);
    /** How many drafts the last step verified. */
    this.verified = 0;
    /** Whether the graphs draft; otherwise drafts only repeat the text, or are phrases. */
    this.streams = mode !== null;
    /** @type {Phrases | null} what the model says often, if the bundle has it */
    this.phrases = null;
    /** @type {import("./sampling.js").Chooser | null} chooses the tokens; without it the graphs do, greedily */
    this.chooser = null;
    /** Ranks of the drafts on the way to each node of the tree, the root first. */
    this.nodes = [[], ...geometry.tree];
    this.adaptives = { greedy: new Adaptive(clock), chosen: new Adaptive(clock) };
  }

  /** What decides between steps and plain calls: a step costs another time where the host chooses. */
  get adaptive() {
    return this.chooser ? this.adaptives.chosen : this.adaptives.greedy;
  }

  /** How many drafts a short step verifies; 0 without one. */
  get short() {
    return STEP_SHORT in this.sessions ? (this.geometry.short ?? 0) : 0;
  }

  /** @param {boolean} samples whether the host chooses tokens */
  speculates(samples) {
    return (samples ? VERIFY : STEP) in this.sessions;
  }

  /**
   * Throws RangeError for a prompt that does not fit, or has tokens that the model does not have.
   * @param {number[]} prompt
   */
  check(prompt) {
    const { context } = this;
    if (!prompt.length || prompt.length > context) {
      throw new RangeError(`the prompt has ${prompt.length} tokens, expected 1 to ${context}`);
    }
    if (!this.#known(prompt)) throw new RangeError("the prompt has tokens that the model does not have");
  }

  /**
   * How many tokens that a prompt begins with are committed. The last one must be computed, to predict the next.
   * @param {number[]} prompt
   */
  shared(prompt) {
    const most = Math.max(0, Math.min(this.length, prompt.length - 1));
    const other = prompt.slice(0, most).findIndex((token, i) => token !== this.text[i]);
    return other < 0 ? most : other;
  }

  /**
   * Drafts a token `depth` places after the next one; the candidate that it replaces becomes the next best.
   * @param {number} depth
   * @param {number} token
   */
  propose(depth, token) {
    const { k } = this.geometry;
    const row = this.drafts.subarray(depth * k, (depth + 1) * k);
    row.set([token, ...row.filter((other) => other !== token)].slice(0, k));
  }

  /**
   * Commits a prompt and returns the token that is likeliest after it.
   * @param {number[]} prompt
   */
  async prefill(prompt) {
    const { geometry } = this;
    let token = 0;
    for (let start = 0; start < prompt.length; start += geometry.chunk) {
      const ids = prompt.slice(start, start + geometry.chunk);
      const chunk = new Int32Array(geometry.chunk);
      chunk.set(ids);
      const out = await this.#call(PREFILL, { chunk, valid: Int32Array.of(ids.length) });
      token = this.#commit(out, [out.next_root.data[0]], ids.length)[0];
      this.text.splice(this.length, Infinity, ...ids);
      this.length += ids.length;
    }
    return token;
  }

  /**
   * Verifies the drafts after the token `last` and returns the 1 to A tokens that follow it.
   * @param {number} last
   * @param {boolean} [short] verifies the first drafts only, where the graphs choose
   */
  async step(last, short = false) {
    const root = Int32Array.of(last);
    const { k } = this.geometry;
    const drafts = short && !this.chooser ? this.drafts.subarray(0, this.short * k) : this.drafts;
    this.verified = drafts.length / k;
    const out = await this.#call(this.chooser ? VERIFY : short ? STEP_SHORT : STEP, { root, drafts });
    const tokens = this.chooser ? await this.#choose(this.chooser, out) : this.#accepted(out);
    this.text.splice(this.length, Infinity, last, ...tokens.slice(0, -1));
    return tokens;
  }

  /**
   * The token after `last`. Does not change the drafts.
   * @param {number} last
   */
  async stepPlain(last) {
    const out = await this.#call(this.chooser ? VERIFY_PLAIN : PLAIN, { root: Int32Array.of(last) });
    const token = this.chooser ? this.chooser.choose(out.logits.data) : out.tokens.data[0];
    this.#commit(out, [token], 1);
    this.text.splice(this.length, Infinity, last);
    return token;
  }

  /** @param {Record<string, any>} out of `step` */
  #accepted(out) {
    const count = out.count.data[0];
    return this.#commit(out, Array.from(out.tokens.data.subarray(0, count)), count);
  }

  /**
   * Walks through the tree of drafts: a child that holds the chosen token is entered, the lowest node first; where none
   * does, the path ends. Commits its rows, and drafts after it.
   * @param {import("./sampling.js").Chooser} chooser
   * @param {Record<string, any>} out of `verify`
   */
  async #choose(chooser, out) {
    const { k, vocab } = this.geometry;
    const { drafts, nodes } = this;
    const [path, tokens] = [[0], /** @type {number[]} */ ([])];
    for (let node = 0; node >= 0; ) {
      const ranks = nodes[node];
      const token = chooser.choose(out.logits.data.subarray(node * vocab, (node + 1) * vocab));
      tokens.push(token);
      node = nodes.findIndex(
        (other) =>
          other.length === ranks.length + 1 &&
          ranks.every((rank, i) => rank === other[i]) &&
          drafts[ranks.length * k + other[ranks.length]] === token,
      );
      if (node >= 0) path.push(node);
    }
    this.#commit(out, tokens, path.length, path);
    if (!(DRAFT in this.sessions)) return tokens;
    const [size, end] = [out.states.dims[1], path[path.length - 1]];
    const state = out.states.data.slice(end * size, (end + 1) * size);
    const token = Int32Array.of(tokens[tokens.length - 1]);
    const next = await this.#call(DRAFT, { token }, this.length + path.length, { last_state: state });
    if (!this.#known(Array.from(next.next_drafts.data))) throw new BundleError("a graph returned drafts that are no tokens");
    this.drafts = next.next_drafts.data;
    return tokens;
  }

  /**
   * @param {string} name
   * @param {Record<string, Int32Array>} integers
   * @param {number} [length] rows that the graph may see
   * @param {Record<string, Float32Array>} [floats] inputs of one row
   * @returns {Promise<Record<string, any>>}
   */
  async #call(name, integers, length = this.length, floats = {}) {
    const { ort, dtype, rows, width } = this.engine;
    const session = this.sessions[name];
    if (!session) throw new BundleError(`the app has no ${name}`);
    const visible = this.#visible(length);
    /** @type {Record<string, Int32Array>} */
    const given = { ...integers, length: Int32Array.of(length) };
    /** @type {Record<string, Tensor>} */
    const feeds = {};
    for (const input of session.inputNames) {
      const past = PAST.exec(input);
      if (past) {
        const start = (2 * Number(past[2]) + (past[1] === "values" ? 1 : 0)) * this.capacity * width;
        const shown = rows.subarray(start, start + visible * width);
        feeds[input] = new ort.Tensor(/** @type {any} */ (dtype), shown, [visible, width]);
      } else if (input in given) {
        const [{ length: size }, { k }] = [given[input], this.geometry];
        const dims = input === "drafts" ? [size / k, k] : [size];
        feeds[input] = new ort.Tensor("int32", given[input], dims);
      } else if (input in floats) {
        feeds[input] = new ort.Tensor("float32", floats[input], [1, floats[input].length]);
      } else {
        feeds[input] = this.adapter[input];
      }
    }
    return session.run(feeds);
  }

  /**
   * Rows to show a graph, as in ssdevice/runtime/onnx/cache.py: congruent to the length modulo LANES, so that a sum over rows
   * adds the same numbers in the same order whether a token was drafted or decoded plainly.
   * @param {number} length
   */
  #visible(length) {
    const { capacity } = this;
    const remainder = (/** @type {number} */ n) => ((n % LANES) + LANES) % LANES;
    let shown = Math.ceil(Math.max(length, 1) / BUCKET) * BUCKET;
    shown += remainder(length - shown);
    return shown <= capacity ? shown : capacity - remainder(capacity - length);
  }

  /** @param {number[]} ids */
  #known(ids) {
    return ids.every((id) => id >= 0 && id < this.geometry.vocab);
  }

  /**
   * Keeps the result of a call; a damaged graph may return anything, and then nothing is kept.
   * @param {Record<string, any>} out
   * @param {number[]} tokens
   * @param {number} count rows that count
   * @param {number[]} [path] those of which nodes; without it, the first ones
   */
  #commit(out, tokens, count, path) {
    if (!tokens.length || !this.#known([...tokens, ...(out.next_drafts?.data ?? [])])) {
      throw new BundleError("a graph returned tokens that the model does not have");
    }
    if (out.next_drafts) this.drafts = out.next_drafts.data;
    const { rows, width } = this.engine;
    const [arrays, written] = out.rows.dims;
    const nodes = path ?? Array.from({ length: count }, (_, i) => i);
    for (let i = 0; i < arrays; i++) {
      for (const [at, node] of nodes.entries()) {
        const start = (i * written + node) * width;
        rows.set(out.rows.data.subarray(start, start + width), (i * this.capacity + this.length + at) * width);
      }
    }
    return tokens;
  }
}
