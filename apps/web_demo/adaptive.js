/** Speculative decoding where it pays: `ssdevice/runtime/adaptive.py` in JavaScript, which has the reasons for the numbers. */

import { Lookup } from "./lookup.js";

const [DOUBT, MOST] = [1.5, 24];
const CREDIT = 8;
const [SHARE, SHORT] = [0.02, 32];
const [PAIRS, ENOUGH] = [32, 4];
const [PROBE, STEPS] = [2, 3];
const [CLEAR, RARELY] = [0.5, 256];

/**
 * Measures what a step costs, in plain calls, and how many tokens steps emit, and pauses steps while they lose. It serves
 * one answer after another and remembers what it learned.
 */
export class Adaptive {
  lookup = new Lookup();
  /** @type {Set<number>} kinds of calls that were made; here and below, the drafts that it verifies */
  #opened = new Set();
  #before = { kind: 0, seconds: 0 }; // the last call; 0 seconds if it opened a graph
  /** @type {number[]} of drafts, by neighbouring calls */
  #prices = [];
  /** @type {number | null} of a draft, in plain calls, null: not known yet; a step costs one plus this */
  #price = null;
  #emitted = CREDIT; // tokens since the last pause
  #count = 0; // steps since the last pause
  #drafted = 0; // drafts of these steps
  #lost = 0; // plain calls that they have lost since their best moment
  #paused = 0; // tokens to decode plainly from now on
  #steps = 0; // since the last plain call
  #probes = 0; // plain calls to make from now on
  #clock;

  /** @param {() => number} clock in seconds */
  constructor(clock) {
    this.#clock = clock;
  }

  /**
   * The tokens after `last`, from a step or from a plain call.
   * @param {import("./conversation.js").Conversation} conversation
   * @param {number} last
   */
  async next(conversation, last) {
    const rarely = this.#won > CLEAR * this.#count ? RARELY : STEPS * this.#prices.length;
    if (this.#steps >= (this.#price === null ? 1 : rarely)) [this.#steps, this.#probes] = [0, PROBE];
    if (!this.#paused && !this.#probes) {
      const tokens = await this.#byStep(conversation, last);
      return tokens.length ? tokens : this.#plainly(conversation, last);
    }
    const tokens = await this.#plainly(conversation, last);
    this.#probes = Math.max(0, this.#probes - 1);
    if (this.#paused) [this.#paused, this.#steps] = [this.#paused - 1, 0];
    return tokens;
  }

  /** @param {import("./conversation.js").Conversation} conversation @param {number} last */
  async #plainly(conversation, last) {
    const start = this.#clock();
    const token = await conversation.stepPlain(last);
    this.#time(0, start);
    // What follows the draft's first tokens still fits, if that is what the model said.
    conversation.drafts.copyWithin(0, conversation.geometry.k);
    return [token];
  }

  /** @param {import("./conversation.js").Conversation} conversation @param {number} last */
  async #byStep(conversation, last) {
    const start = this.#clock();
    const tokens = await this.lookup.step(conversation, last);
    if (!tokens.length) {
      this.#steps = Math.min(this.#steps, 1);
      return tokens;
    }
    const drafts = conversation.verified;
    this.#time(drafts, start);
    this.#steps++;
    if (this.#price === null) return tokens;
    const paid = this.#price * drafts;
    this.#lost = Math.max(0, this.#lost + 1 + paid - tokens.length);
    if (this.#steps > 1) this.#judge(tokens.length, drafts, paid); // the first draft after a plain call is an old one
    return tokens;
  }

  /** Plain calls that steps have saved since the last pause. */
  get #won() {
    return this.#emitted - this.#count - (this.#price ?? 0) * this.#drafted;
  }

  /** @param {number} tokens @param {number} drafts @param {number} paid */
  #judge(tokens, drafts, paid) {
    this.#emitted += tokens;
    this.#count++;
    this.#drafted += drafts;
    const won = this.#won;
    const error = Math.sqrt(Math.max(0, (this.#price ?? 0) * this.#drafted));
    if (won < -DOUBT * error || this.#lost > MOST) {
      this.#paused = won > 0 ? SHORT : Math.floor((paid - won) / SHARE);
      [this.#emitted, this.#count, this.#drafted, this.#lost] = [0, 0, 0, 0];
    }
  }

  /** @param {number} kind @param {number} start */
  #time(kind, start) {
    const seconds = this.#opened.has(kind) ? this.#clock() - start : 0;
    const before = this.#before;
    this.#opened.add(kind);
    this.#before = { kind, seconds };
    if (!seconds || !before.seconds || (kind === 0) === (before.kind === 0)) return;
    const ratio = kind ? seconds / before.seconds : before.seconds / seconds;
    this.#prices = [...this.#prices, (ratio - 1) / (kind || before.kind)].slice(-PAIRS);
    const sorted = this.#prices.toSorted((a, b) => a - b);
    const half = sorted.length / 2;
    if (sorted.length >= ENOUGH) this.#price = (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
  }
}
