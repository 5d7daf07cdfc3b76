/** Text to tokens, and an answer as text while its tokens arrive: pieces that never change again. */

/** @typedef {import("@huggingface/tokenizers").Tokenizer} Tokenizer */

const UNDECODED = "\ufffd";
const OF_BYTE = /^<0x[0-9A-F]{2}>$/; // models write unknown characters with these
const LONGEST_CHARACTER = 4; // bytes, so tokens, that one character can span

/**
 * The tokenizer in a `tokenizer.json`. The package takes only ASCII for digits, so their step becomes an equal one.
 * @param {new (json: object, config: object) => Tokenizer} Kind
 * @param {Uint8Array} bytes
 */
export function openTokenizer(Kind, bytes) {
  return new Kind(parsed(bytes), {});
}

/** @param {Uint8Array} bytes */
function parsed(bytes) {
  return JSON.parse(new TextDecoder().decode(bytes), (_, step) => {
    if (step?.type !== "Digits") return step;
    const Regex = step.individual_digits ? "\\p{N}" : "\\p{N}+";
    return { type: "Split", pattern: { Regex }, behavior: "Isolated", invert: false };
  });
}

/**
 * The tokenizer with other names of its special tokens, which nobody can write, so that a prompt's words are text whatever
 * they say; and `named`, which puts these names into texts of the bundle. As `ssdevice/text/marks.py` does.
 * @param {new (json: object, config: object) => Tokenizer} Kind
 * @param {Uint8Array} bytes
 */
export function openForWords(Kind, bytes) {
  const json = parsed(bytes);
  const secret = Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("");
  /** @type {{id: number, content: string, special: boolean}[]} */
  const added = json.added_tokens;
  const special = added.filter(({ content, special }) => special && content && !OF_BYTE.test(content));
  const names = new Map(special.map(({ id, content }) => [content, `q${secret}x${id}q`]));
  const name = (/** @type {string} */ piece) => names.get(piece) ?? piece;
  for (const token of special) token.content = name(token.content);
  json.added_tokens = added.filter(({ content }) => !OF_BYTE.test(content));
  // Pieces and merges, too: some would join the old names from letters.
  const { model } = json;
  if (Array.isArray(model.vocab)) model.vocab = model.vocab.map((/** @type {[string, number]} */ [piece, score]) => [name(piece), score]);
  else model.vocab = Object.fromEntries(Object.entries(model.vocab).map(([piece, id]) => [name(piece), id]));
  if (model.unk_token) model.unk_token = name(model.unk_token);
  model.merges = model.merges?.filter((/** @type {string | [string, string]} */ merge) => {
    const [left, right] = typeof merge === "string" ? merge.split(" ") : merge;
    return ![left, right, left + right].some((piece) => names.has(piece));
  });
  const longest = [...names.keys()].sort((one, other) => other.length - one.length);
  const escaped = longest.map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const written = names.size ? new RegExp(escaped.join("|"), "g") : /(?!)/g;
  return { tokenizer: new Kind(json, {}), named: (/** @type {string} */ text) => text.replace(written, name) };
}

/**
 * The ids of a text, no special tokens added.
 * @param {Tokenizer} tokenizer
 * @param {string} text
 */
export function encode(tokenizer, text) {
  return tokenizer.encode(text, { add_special_tokens: false }).ids;
}

/** Text of a growing sequence of ids, special tokens left out. Characters that span tokens appear whole. */
export class TextStream {
  /**
   * @param {Tokenizer} tokenizer
   * @param {number[]} [after] the tokens of the text that the ids continue: there, tokenizers keep a first word's space
   */
  constructor(tokenizer, after = []) {
    this.tokenizer = tokenizer;
    this.special = new Set(
      [...tokenizer.get_added_tokens_decoder()].filter(([, token]) => token.special).map(([id]) => id),
    );
    /** @type {number[]} the last settled piece, which decides whether a word begins with a space, and what follows */
    this.window = after.filter((id) => !this.special.has(id)).slice(-1);
    this.settled = this.window.length;
  }

  /**
   * The text that this further id settles, often empty.
   * @param {number} id
   */
  push(id) {
    if (this.special.has(id)) return "";
    this.window.push(id);
    const end = this.window.length;
    if (!this.#decode(this.window).endsWith(UNDECODED)) return this.#settle(end);
    if (end - this.settled < LONGEST_CHARACTER) return "";
    // Fewer tokens may still begin a character. A cut within one would leave two broken parts, so more text.
    const parts = (/** @type {number} */ cut) => this.#decode(this.window.slice(0, cut)) + this.#decode(this.window.slice(cut));
    let best = end - 1;
    for (let cut = end - 2; cut > end - LONGEST_CHARACTER; cut--) if (parts(cut).length < parts(best).length) best = cut;
    return this.#settle(best);
  }

  /** The rest, a broken character as U+FFFD. */
  flush() {
    return this.#settle(this.window.length);
  }

  /** @param {number} end the tokens before it are settled, whose text no later one can change */
  #settle(end) {
    const piece = this.#decode(this.window.slice(0, end)).slice(this.#decode(this.window.slice(0, this.settled)).length);
    this.window = this.window.slice(this.settled);
    this.settled = end - this.settled;
    return piece;
  }

  /** @param {number[]} ids */
  #decode(ids) {
    if (!ids.length) return "";
    return this.tokenizer.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  }
}
