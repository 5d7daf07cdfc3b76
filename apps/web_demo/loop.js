/** The decoding loop: everything a host does besides calling the contract's functions and showing text. */

/** @typedef {{speculate: boolean, maxTokens: number, stopIds: Set<number>}} Options */

/**
 * The answer to a prompt, call by call; the first run is prefill's token. Whenever this generator is suspended, all
 * tokens that it has given but the last are in the cache.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {number[]} prompt
 * @param {Options} options
 * @returns {AsyncGenerator<number[], void>}
 */
export async function* decode(conversation, prompt, { speculate, maxTokens, stopIds }) {
  conversation.length = 0;
  let run = [await conversation.prefill(prompt)];
  for (let emitted = 0; ; ) {
    const stop = run.findIndex((token) => stopIds.has(token));
    if (stop >= 0) run = run.slice(0, stop + 1);
    emitted += run.length;
    conversation.length = prompt.length + emitted - 1; // the next call overwrites the rows of tokens that do not count
    yield run;
    const room = Math.min(maxTokens - emitted, conversation.context - conversation.length);
    if (stop >= 0 || room <= 0) return;
    const last = run[run.length - 1];
    run = (speculate ? await conversation.step(last) : [await conversation.stepPlain(last)]).slice(0, room);
  }
}
