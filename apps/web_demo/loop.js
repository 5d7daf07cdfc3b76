/** The decoding loop: everything a host does besides calling the contract's functions and showing text. */

import { Chooser } from "./sampling.js";

/**
 * @typedef {{speculate: boolean, maxTokens: number, stopIds: Set<number>,
 *   sampling?: import("./sampling.js").Sampling}} Options  without `sampling` the graphs choose, greedily
 */

/**
 * The answer to a prompt, call by call; the first run is prefill's token, or with sampling those of a call after the
 * prompt's last. Whenever this generator is suspended, all tokens that it has given but the last are in the cache.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {number[]} prompt
 * @param {Options} options
 * @returns {AsyncGenerator<number[], void>}
 */
export async function* decode(conversation, prompt, { speculate, maxTokens, stopIds, sampling }) {
  conversation.length = 0;
  conversation.chooser = sampling ? new Chooser(sampling, prompt, stopIds) : null;
  /** @param {number} last */
  const advance = async (last) => (speculate ? conversation.step(last) : [await conversation.stepPlain(last)]);
  conversation.check(prompt);
  const committed = sampling ? prompt.slice(0, -1) : prompt;
  const likeliest = committed.length ? await conversation.prefill(committed) : 0;
  let run = sampling ? await advance(prompt[prompt.length - 1]) : [likeliest];
  run = run.slice(0, Math.min(maxTokens, conversation.context - prompt.length + 1));
  for (let emitted = 0; ; ) {
    const stop = run.findIndex((token) => stopIds.has(token));
    if (stop >= 0) run = run.slice(0, stop + 1);
    emitted += run.length;
    conversation.length = prompt.length + emitted - 1; // the next call overwrites the rows of tokens that do not count
    yield run;
    const room = Math.min(maxTokens - emitted, conversation.context - conversation.length);
    if (stop >= 0 || room <= 0) return;
    run = (await advance(run[run.length - 1])).slice(0, room);
  }
}
