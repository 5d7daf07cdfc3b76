/** Prompts in, pieces of text and speed out. */

import { decode } from "./loop.js";
import { TextStream } from "./text.js";

/**
 * @typedef {{text: string, accepted: boolean}} Piece accepted: from a draft, not from the model's own choice
 * @typedef {{tokens: number, steps: number, seconds: number, firstToken: number}} Speed prefill and its token left out
 */

/**
 * One answer, call by call. The text is the same in every mode.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {import("./text.js").Tokenizer} tokenizer
 * @param {number[]} prompt
 * @param {import("./loop.js").Options & {continues?: boolean}} options  `continues`: the answer goes on with the
 *   prompt's text, since no template is between them
 * @returns {AsyncGenerator<{tokens: number[], pieces: Piece[], speed: Speed}, void>}
 */
export async function* answer(conversation, tokenizer, prompt, options) {
  const text = new TextStream(tokenizer, options.continues ? prompt : []);
  const speed = { tokens: 0, steps: 0, seconds: 0, firstToken: 0 };
  const runs = decode(conversation, prompt, options);
  for (let first = true; ; first = false) {
    const clock = performance.now();
    const { value: tokens, done } = await runs.next();
    const seconds = (performance.now() - clock) / 1000;
    if (!tokens || done) break;
    if (first) {
      speed.firstToken = seconds;
    } else {
      speed.seconds += seconds;
      speed.tokens += tokens.length;
      speed.steps += 1;
    }
    const pieces = tokens.map((token, i) => ({ text: text.push(token), accepted: i < tokens.length - 1 }));
    yield { tokens, pieces, speed };
  }
  yield { tokens: [], pieces: [{ text: text.flush(), accepted: false }], speed };
}
