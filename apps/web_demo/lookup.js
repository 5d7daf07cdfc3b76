/** Drafts that repeat the text: `ssdevice/runtime/lookup.py` in JavaScript, which has the reasons for the numbers. */

const [SHORTEST, ALONE, LONGEST, CERTAIN, RECENT] = [3, 2, 16, 8, 8];
const [START, MOST] = [-2, 8];
const [FAR, REST] = [-16, 1024];

/** Makes steps whose drafts may repeat the text of their conversation. */
export class Lookup {
  #lead = START; // how much more often lookup was right than the first candidate of a stream, where the two differed
  #rest = 0;
  /** @type {Map<string, number[]>} where the shortest match ends and another token follows */
  #ends = new Map();
  #shortest = SHORTEST; // tokens that must have occurred before
  #indexed = 0; // tokens of the text whose matches are in there
  #longest = 0; // tokens of the last match
  #matched = 0; // and of that of the first draft
  /** @type {{depth: number, found: number, streamed: number} | null} the first draft that is not the streams' */
  #differing = null;

  /** Another prompt is answered. What was learned lasts. */
  begin() {
    this.#ends.clear();
    this.#indexed = 0;
  }

  /**
   * The tokens after `last`, from a step; none, without a step, if the model has no streams, the text does not repeat itself, and it
   * ends with no phrase. Without streams a short step is enough unless a long match makes drafts likely to be right.
   * @param {import("./conversation.js").Conversation} conversation
   * @param {number} last
   * @returns {Promise<number[]>}
   */
  async step(conversation, last) {
    if (!conversation.streams) {
      [this.#lead, this.#shortest] = [MOST, ALONE];
      conversation.drafts.fill(0); // where the host chooses tokens, those of the step before
      this.#draft(conversation, last);
      const short = conversation.short > 0 && this.#matched < CERTAIN;
      return this.#differing?.depth === 0 ? conversation.step(last, short) : [];
    }
    if (this.#rest) {
      this.#rest--;
      return conversation.step(last);
    }
    this.#draft(conversation, last);
    const tokens = await conversation.step(last);
    if (this.#differing && this.#differing.depth < tokens.length) {
      const { depth, found, streamed } = this.#differing;
      const lead = this.#lead + Number(found === tokens[depth]) - Number(streamed === tokens[depth]);
      this.#lead = Math.min(MOST, lead);
      if (lead <= FAR) [this.#lead, this.#rest] = [START, REST];
    }
    return tokens;
  }

  /** @param {import("./conversation.js").Conversation} conversation @param {number} last */
  #draft(conversation, last) {
    const { drafts } = conversation;
    const { gamma, k } = conversation.geometry;
    const text = [...conversation.text.slice(0, conversation.length), last];
    for (let end = Math.max(this.#indexed, this.#shortest); end < text.length; end++) {
      const key = before(text, end, this.#shortest);
      const ends = this.#ends.get(key);
      if (ends) ends.push(end);
      else this.#ends.set(key, [end]);
    }
    this.#indexed = text.length;
    this.#differing = null;
    for (let depth = 0; depth < gamma; depth++) {
      let best = drafts[depth * k];
      const found = this.#next(text) ?? conversation.phrases?.after(text);
      if (depth === 0) this.#matched = this.#longest;
      if (found !== undefined && found !== best) {
        this.#differing ??= { depth, found, streamed: best };
        if (this.#lead > 0) conversation.propose(depth, (best = found));
      }
      text.push(best);
    }
  }

  /** @param {number[]} text the token that followed the longest match of its end; the last occurrence wins a tie */
  #next(text) {
    const ends = this.#ends.get(before(text, text.length, this.#shortest)) ?? [];
    let [best, longest] = [/** @type {number | undefined} */ (undefined), 0];
    for (const end of ends.slice(-RECENT).reverse()) {
      let size = 0;
      while (size < Math.min(end, LONGEST) && text[end - 1 - size] === text[text.length - 1 - size]) size++;
      if (size > longest) [best, longest] = [text[end], size];
    }
    this.#longest = longest;
    return best;
  }
}

/** @param {number[]} text @param {number} end @param {number} count a name for so many tokens before it */
function before(text, end, count) {
  return text.slice(Math.max(0, end - count), end).join();
}
