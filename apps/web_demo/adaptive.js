/** Speculative decoding where it pays: `runtime/adaptive.py` in JavaScript, which has the reasons for the numbers. */

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
  /** @type {boolean[]} by kind: whether there was such a call; here and below, 1 is a step and 0 a plain call */
  #opened = [false, false];
  #before = { kind: 0, seconds: 0 }; // the last call; 0 seconds if it opened a graph
  /** @type {number[]} of neighbouring calls */
  #ratios = [];
  #cost = 0; // of a step, in plain calls; 0: not known yet
  #emitted = CREDIT; // tokens since the last pause
  #count = 0; // steps since the last pause
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
    const clear = this.#emitted > (this.#cost + CLEAR) * this.#count;
    const until = !this.#cost ? 1 : clear ? RARELY : STEPS * this.#ratios.length;
    if (this.#steps >= until) [this.#steps, this.#probes] = [0, PROBE];
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
    this.#time(1, start);
    this.#steps++;
    if (!this.#cost) return tokens;
    this.#lost = Math.max(0, this.#lost + this.#cost - tokens.length);
    if (this.#steps > 1) this.#judge(tokens.length); // the first draft after a plain call is an old one
    return tokens;
  }

  /** @param {number} tokens */
  #judge(tokens) {
    this.#emitted += tokens;
    this.#count++;
    const won = this.#emitted - this.#cost * this.#count;
    const error = Math.sqrt(Math.max(0, this.#cost - 1) * this.#count);
    if (won < -DOUBT * error || this.#lost > MOST) {
      this.#paused = won > 0 ? SHORT : Math.floor((this.#cost - 1 - won) / SHARE);
      [this.#emitted, this.#count, this.#lost] = [0, 0, 0];
    }
  }

  /** @param {0 | 1} kind @param {number} start */
  #time(kind, start) {
    const seconds = this.#opened[kind] ? this.#clock() - start : 0;
    const before = this.#before;
    this.#opened[kind] = true;
    this.#before = { kind, seconds };
    if (before.kind === kind || !seconds || !before.seconds) return;
    this.#ratios = [...this.#ratios, kind ? seconds / before.seconds : before.seconds / seconds].slice(-PAIRS);
    const sorted = this.#ratios.toSorted((a, b) => a - b);
    const half = sorted.length / 2;
    if (sorted.length >= ENOUGH) this.#cost = (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
  }
}
