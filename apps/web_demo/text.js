/** Text to tokens, and an answer as text while its tokens arrive: pieces that never change again. */

/** @typedef {import("@huggingface/tokenizers").Tokenizer} Tokenizer */

const UNDECODED = "\ufffd";
const LONGEST_CHARACTER = 4; // bytes, so tokens, that one character can span

/**
 * The tokenizer in a `tokenizer.json`. The package takes only ASCII for digits, so their step becomes an equal one.
 * @param {new (json: object, config: object) => Tokenizer} Kind
 * @param {Uint8Array} bytes
 */
export function openTokenizer(Kind, bytes) {
  const json = JSON.parse(new TextDecoder().decode(bytes), (_, step) => {
    if (step?.type !== "Digits") return step;
    const Regex = step.individual_digits ? "\\p{N}" : "\\p{N}+";
    return { type: "Split", pattern: { Regex }, behavior: "Isolated", invert: false };
  });
  return new Kind(json, {});
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
  /** @param {Tokenizer} tokenizer */
  constructor(tokenizer) {
    this.tokenizer = tokenizer;
    this.special = new Set(
      [...tokenizer.get_added_tokens_decoder()].filter(([, token]) => token.special).map(([id]) => id),
    );
    /** @type {number[]} the last settled piece, which decides whether a word begins with a space, and what follows */
    this.window = [];
    this.settled = 0;
  }

  /**
   * The text that this further id settles, often empty.
   * @param {number} id
   */
  push(id) {
    if (this.special.has(id)) return "";
    this.window.push(id);
    const whole = this.#decode(this.window);
    if (whole.endsWith(UNDECODED) && this.window.length - this.settled < LONGEST_CHARACTER) return "";
    return this.#settle(whole);
  }

  /** The rest, a broken character as U+FFFD. */
  flush() {
    return this.#settle(this.#decode(this.window));
  }

  /** @param {string} whole */
  #settle(whole) {
    const piece = whole.slice(this.#decode(this.window.slice(0, this.settled)).length);
    this.window = this.window.slice(this.settled);
    this.settled = this.window.length;
    return piece;
  }

  /** @param {number[]} ids */
  #decode(ids) {
    if (!ids.length) return "";
    return this.tokenizer.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  }
}
