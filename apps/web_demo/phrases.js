/** Phrases that a model says often: `ssdevice/runtime/phrases.py` in JavaScript, which describes their table. */

import { BundleError } from "./bundle.js";

/** The role of the table's file. */
export const PHRASES = "phrases";
const [FEWEST, MOST] = [2, 4];
const MOST_BYTES = 4 << 17;

export class Phrases {
  #entries;
  #vocab;
  #bits; // of an entry: its token

  /**
   * @param {Uint32Array} entries as many as a power of two
   * @param {number} vocab the model's tokens
   */
  constructor(entries, vocab) {
    this.#entries = entries;
    this.#vocab = vocab;
    this.#bits = 32 - Math.clz32(vocab);
  }

  /**
   * The table in a file. Throws BundleError for one that is none.
   * @param {Uint8Array<ArrayBuffer>} bytes
   * @param {number} vocab the model's tokens
   */
  static read(bytes, vocab) {
    const { length } = bytes;
    if (length < 4 || length > MOST_BYTES || length & (length - 1)) {
      throw new BundleError(`${length} bytes are no table of phrases`);
    }
    const view = new DataView(bytes.buffer, bytes.byteOffset, length);
    return new Phrases(Uint32Array.from({ length: length / 4 }, (_, i) => view.getUint32(4 * i, true)), vocab);
  }

  /**
   * The token that mostly follows the longest phrase at the end of a text. The table is not trusted: it may name any.
   * @param {number[]} text
   */
  after(text) {
    const [entries, bits] = [this.#entries, this.#bits];
    let [found, state] = [/** @type {number | undefined} */ (undefined), 0];
    for (let length = 1; length <= Math.min(MOST, text.length); length++) {
      state = Math.imul(state ^ text[text.length - length], 0x01000193);
      state ^= state >>> 15;
      if (length < FEWEST) continue;
      const entry = entries[state & (entries.length - 1)];
      const token = (entry & ((1 << bits) - 1)) - 1;
      const check = Math.imul(state, 0x9e3779b1);
      if (token >= 0 && token < this.#vocab && entry >>> bits === check >>> bits) found = token;
    }
    return found;
  }
}
