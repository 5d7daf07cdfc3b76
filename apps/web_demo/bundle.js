/** A bundle of `ssdevice export --target onnx`: nothing in it is used before it was compared with the manifest. */

export const MANIFEST = "manifest.json";
const SCHEMA_VERSION = 1;
const CAPACITY_MULTIPLE = 32;
/** Those that choose tokens greedily, and those for a host that chooses. */
const GREEDY = ["prefill", "step", "step_plain", "step_short"];
const CHOOSING = ["prefill", "verify", "verify_plain", "draft"];
/** The array of each type of a cache, as onnxruntime-web has it: without Float16Array, it has the bits of halves. */
export const ARRAYS = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };
const PATH = /^\w[\w.+=@-]*(\/\w[\w.+=@-]*)*$/;

/** What is wrong with a bundle, in one line for the person who made it. */
export class BundleError extends Error {}

/**
 * Where a bundle's files come from, and where they are kept by sha256.
 * @typedef {object} Source
 * @property {(path: string, size?: number) => Promise<Uint8Array<ArrayBuffer>>} fetch
 * @property {(sha256: string) => Promise<Uint8Array<ArrayBuffer> | undefined>} kept
 * @property {(sha256: string, bytes: Uint8Array<ArrayBuffer>) => Promise<void>} keep
 * @typedef {{name: string, instruction: string, files: string[], functions: Record<string, string>}} App
 * @typedef {{size: number, sha256: string}} Entry
 * @typedef {object} Manifest  what a host needs of `manifest.json`
 * @property {number} schema_version
 * @property {string} target
 * @property {string} precision
 * @property {string | null} mode  of the streams; null without: drafts only repeat the text
 * @property {string} cache
 * @property {keyof typeof ARRAYS} cache_dtype
 * @property {{model_type: string, parameters: number, sha256: string}} model
 * @property {{layers: number, kv_heads: number, head_dim: number, vocab: number, gamma: number, k: number,
 *   tree: number[][], context: number, chunk: number, hidden?: number, short?: number}} geometry
 * @property {{name: string}[]} functions
 * @property {{stop_ids: number[], frames?: import("./frames.js").Frames | null}} chat
 * @property {import("./sampling.js").Sampling & {do_sample?: boolean} | null} [sampling]  what the model recommends
 * @property {App[]} apps
 * @property {string} default_app
 * @property {Record<string, string>} roles
 * @property {Record<string, Entry>} files
 */

export class Bundle {
  /**
   * @param {Manifest} manifest
   * @param {Source} source
   */
  constructor(manifest, source) {
    this.manifest = manifest;
    this.source = source;
  }

  /**
   * Reads the manifest. Throws BundleError for a bundle that this host cannot run.
   * @param {Source} source
   */
  static async open(source) {
    const text = new TextDecoder().decode(await source.fetch(MANIFEST));
    /** @type {Manifest} */
    let manifest;
    try {
      manifest = JSON.parse(text);
    } catch {
      throw new BundleError(`${MANIFEST} is not JSON`);
    }
    const { schema_version: schema, target, precision, cache_dtype: dtype } = manifest;
    if (schema !== SCHEMA_VERSION) throw new BundleError(`schema ${schema}: this page reads ${SCHEMA_VERSION}`);
    if (target !== "onnx") throw new BundleError(`a bundle for ${target}; export one with --target onnx`);
    if (precision === "int4") throw new BundleError("INT4 has no fast kernel in browsers; export with --quant int8");
    if (!Object.hasOwn(ARRAYS, dtype)) {
      throw new BundleError(`a cache of ${dtype}; browsers need float32 or float16`);
    }
    manifest.roles ??= {};
    for (const app of manifest.apps) Object.assign(app, { instruction: "", files: [], functions: {}, ...app });
    const unsafe = Object.keys(manifest.files).find((path) => !PATH.test(path));
    if (unsafe !== undefined) throw new BundleError(`the path ${JSON.stringify(unsafe)} leaves the bundle`);
    return new Bundle(manifest, source);
  }

  /** Rows of the KV cache: `contract.Geometry.capacity`. */
  get capacity() {
    const { context, chunk, tree, hidden } = this.manifest.geometry;
    const written = 1 + (hidden ? tree.length : Math.max(0, ...tree.map((path) => path.length)));
    return Math.ceil((context + Math.max(written, chunk)) / CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE;
  }

  /**
   * Sampling as asked for; what is not, as the model's `generation_config.json` recommends; else at temperature 1.
   * @param {import("./sampling.js").Sampling} asked
   * @returns {import("./sampling.js").Sampling}
   */
  sampling(asked) {
    const { do_sample, ...recommended } = this.manifest.sampling ?? {};
    const named = Object.fromEntries(Object.entries(recommended).filter(([, value]) => value !== null));
    return { temperature: 1, ...named, ...asked };
  }

  /** @param {string} name */
  app(name) {
    const app = this.manifest.apps.find((each) => each.name === name);
    if (!app) throw new BundleError(`no app ${name}; the bundle has ${this.manifest.apps.map((each) => each.name)}`);
    return app;
  }

  /**
   * The graphs of an app by the contract's name of the function. Throws BundleError if `samples` and there are none for it.
   * @param {App} app
   * @param {boolean} samples whether the host chooses tokens
   * @returns {Record<string, string>}
   */
  functions(app, samples) {
    const own = Object.keys(app.functions).length
      ? Object.entries(app.functions)
      : this.manifest.functions.map(({ name }) => [name, name]);
    if (samples && !own.some(([name]) => name === "verify_plain")) {
      throw new BundleError("the bundle chooses tokens greedily; to sample, export it with --choose host");
    }
    return Object.fromEntries(own.filter(([name]) => (samples ? CHOOSING : GREEDY).includes(name)));
  }

  /** @param {string} name a role, or a path */
  path(name) {
    return this.manifest.roles[name] ?? name;
  }

  /**
   * The content of a file. Throws BundleError unless it has the manifest's size and sha256.
   * @param {string} name a role, or a path
   */
  async read(name) {
    const path = this.path(name);
    const entry = this.manifest.files[path];
    if (!entry) throw new BundleError(`no file ${path}`);
    const kept = await this.source.kept(entry.sha256);
    if (kept && (await matches(kept, entry))) return kept;
    const bytes = await this.source.fetch(path, entry.size);
    if (!(await matches(bytes, entry))) {
      throw new BundleError(`${path} is damaged: its sha256 is not the one in ${MANIFEST}`);
    }
    await this.source.keep(entry.sha256, bytes);
    return bytes;
  }
}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @param {Entry} entry
 */
async function matches(bytes, { size, sha256 }) {
  if (bytes.length !== size) return false;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return sha256 === Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
