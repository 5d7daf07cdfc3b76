/** An answer as text while its tokens arrive: pieces that never change again. */

const UNDECODED = "\ufffd";
const LONGEST_CHARACTER = 4; // bytes, so tokens, that one character can span

/** Text of a growing sequence of ids, special tokens left out. Characters that span tokens appear whole. */
export class TextStream {
  /** @param {import("@huggingface/tokenizers").Tokenizer} tokenizer */
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
   *
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
