/** Speculative decoding where it pays: `runtime/adaptive.py` in JavaScript, which has the reasons for the numbers. */

import { Lookup } from "./lookup.js";

const [BUDGET, TRIAL] = [12, 4]; // plain calls that may be lost before a pause
const [FIRST_PAUSE, LONGEST_PAUSE, GROWTH] = [32, 1024, 4];
const MOST = 2 * BUDGET;
const [CALIBRATED, STALE] = [4, 64];
const [CLEAR, LONGER] = [0.5, 4];
const [TIMES, ENOUGH] = [8, 3];

/** Seconds of a kind of call: the median of the last ones, without the very first, which opens a graph. */
class Cost {
  /** @type {number[]} */
  #times = [];
  #opened = false;
  seconds = 0;

  get known() {
    return this.#times.length >= ENOUGH;
  }

  /** @param {number} seconds */
  add(seconds) {
    if (this.#opened) {
      this.#times = [...this.#times, seconds].slice(-TIMES);
      const sorted = this.#times.toSorted((a, b) => a - b);
      const half = sorted.length / 2;
      this.seconds = (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
    }
    this.#opened = true;
  }
}

/**
 * Measures what steps and plain calls cost and what steps emit, and pauses steps while they lose. It serves one answer
 * after another and remembers what it learned.
 */
export class Adaptive {
  lookup = new Lookup();
  #plain = new Cost();
  #step = new Cost();
  #lost = 0; // plain calls that steps have lost since their best moment
  #won = 0; // plain calls that they have won in the end, or lost
  #steps = 0; // since the last plain call
  #gained = 0; // plain calls that these steps have won, or lost
  #pause = FIRST_PAUSE;
  #paused = 0; // tokens to decode plainly from now on
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
    const clear = this.#gained > CLEAR * this.#steps;
    const until = !this.#plain.known ? CALIBRATED : clear ? LONGER * STALE : STALE;
    if (!this.#paused && this.#steps < until) {
      const tokens = await this.#byStep(conversation, last);
      return tokens.length ? tokens : this.#plainly(conversation, last);
    }
    const tokens = await this.#plainly(conversation, last);
    this.#paused = Math.max(0, this.#paused - 1);
    if (this.#plain.known) [this.#steps, this.#gained] = [0, 0];
    return tokens;
  }

  /** @param {import("./conversation.js").Conversation} conversation @param {number} last */
  async #plainly(conversation, last) {
    const start = this.#clock();
    const token = await conversation.stepPlain(last);
    this.#plain.add(this.#clock() - start);
    // What follows the draft's first tokens still fits, if that is what the model said.
    conversation.drafts.copyWithin(0, conversation.geometry.k);
    return [token];
  }

  /** @param {import("./conversation.js").Conversation} conversation @param {number} last */
  async #byStep(conversation, last) {
    const start = this.#clock();
    const tokens = await this.lookup.step(conversation, last);
    if (!tokens.length) return tokens;
    this.#step.add(this.#clock() - start);
    this.#steps++;
    if (!this.#plain.known || this.#steps === 1) return tokens; // the first draft after a plain call is an old one
    const gained = tokens.length - this.#step.seconds / this.#plain.seconds;
    this.#gained += gained;
    this.#lost = Math.max(0, this.#lost - gained);
    this.#won = Math.max(-MOST, Math.min(MOST, this.#won + gained));
    if (this.#won > 0) this.#pause = FIRST_PAUSE;
    if (this.#lost > (this.#pause === FIRST_PAUSE ? BUDGET : TRIAL)) {
      [this.#lost, this.#paused] = [0, this.#pause];
      this.#pause = Math.min(GROWTH * this.#pause, LONGEST_PAUSE);
    }
    return tokens;
  }
}
