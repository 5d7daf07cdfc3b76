/** The decoding loop: everything a host does besides calling the contract's functions and showing text. */

import { Chooser, isGreedy } from "./sampling.js";

/**
 * Speculative decoding where it pays, always, never, and never but with the graph of a step, whose first token does not
 * depend on drafts. The tokens are the same.
 * @typedef {"adaptive" | "speculative" | "plain" | "plain_step"} Mode
 * @typedef {{mode: Mode, maxTokens: number, stopIds: Set<number>,
 *   sampling?: import("./sampling.js").Sampling}} Options  without `sampling` the graphs choose, greedily
 */

/**
 * The answer to a prompt, call by call; the first run is prefill's token, or with sampling those of a call after the
 * prompt's last. What the prompt begins with and the cache holds is not computed again. Whenever this generator is
 * suspended, all tokens that it has given but the last are in the cache.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {number[]} prompt
 * @param {Options} options
 * @returns {AsyncGenerator<number[], void>}
 */
export async function* decode(conversation, prompt, { mode, maxTokens, stopIds, sampling }) {
  conversation.check(prompt);
  const { vocab } = conversation.geometry;
  conversation.chooser = sampling && !isGreedy(sampling) ? new Chooser(sampling, prompt, stopIds, vocab) : null;
  conversation.length = conversation.shared(prompt);
  conversation.adaptive.lookup.begin();
  const rest = prompt.slice(conversation.length);
  /** @type {number[]} */
  let run;
  if (conversation.chooser) {
    if (rest.length > 1) await conversation.prefill(rest.slice(0, -1));
    run = await advance(conversation, mode, prompt[prompt.length - 1]);
  } else {
    run = [await conversation.prefill(rest)];
  }
  run = run.slice(0, Math.min(maxTokens, conversation.context - prompt.length + 1));
  for (let emitted = 0; ; ) {
    const stop = run.findIndex((token) => stopIds.has(token));
    if (stop >= 0) run = run.slice(0, stop + 1);
    emitted += run.length;
    conversation.length = prompt.length + emitted - 1; // the next call overwrites the rows of tokens that do not count
    yield run;
    const room = Math.min(maxTokens - emitted, conversation.context - conversation.length);
    if (stop >= 0 || room <= 0) return;
    run = (await advance(conversation, mode, run[run.length - 1])).slice(0, room);
  }
}

/**
 * The tokens after `last`.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {Mode} mode
 * @param {number} last
 */
async function advance(conversation, mode, last) {
  if (mode === "adaptive") return conversation.adaptive.next(conversation, last);
  if (mode === "plain") return [await conversation.stepPlain(last)];
  const tokens = await conversation.step(last);
  return mode === "plain_step" ? tokens.slice(0, 1) : tokens;
}
