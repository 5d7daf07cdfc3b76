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
