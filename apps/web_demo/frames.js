/** Prompts from a bundle's prompt frames, the texts around messages, as `ssdevice/text/frames.py` joins them. */

import { BundleError } from "./bundle.js";

/**
 * @typedef {{role: string, content: string}} Message
 * @typedef {{before: string, after: string, trim?: "none" | "space" | "left" | "right" | "both"}} Frame
 * @typedef {object} Frames  null: the chat format takes no such message; without `user` they are for one question
 * @property {Frame} first
 * @property {Frame | null} system
 * @property {Frame | null} after_system
 * @property {Frame | null} user
 * @property {Frame | null} assistant
 * @property {string} answer
 * @property {boolean} [empty_system]
 */

const BLANK = "[\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"; // Python's
const LEADING = new RegExp(`^${BLANK}+`);
const WORD = new RegExp(`(?!${BLANK})[^]`);

/**
 * The prompt for the answer to the last message. Throws BundleError for a message that has no place where it stands.
 * @param {Frames} frames
 * @param {Message[]} messages
 */
export function prompt(frames, messages) {
  let text = "";
  /** @type {Record<string, Frame | null>} */
  let places = { system: frames.system, user: frames.first };
  for (const { role, content } of messages) {
    const frame = Object.hasOwn(places, role) ? places[role] : null;
    if (!frame) throw new BundleError(`the chat format takes no ${role} message there`);
    if (role === "user" && !WORD.test(content)) throw new BundleError("the prompt is empty");
    if (role === "system" && !content && frames.empty_system === false) {
      places = { user: frames.first };
      continue;
    }
    text += frame.before + trimmed(content, frame.trim) + frame.after;
    if (role === "user") places = { assistant: frames.assistant };
    else places = { user: role === "system" ? frames.after_system : frames.user };
  }
  if (messages.at(-1)?.role === "system") throw new BundleError("a conversation does not end with its system message");
  return text + frames.answer;
}

/**
 * The same frames with other texts.
 * @param {Frames} frames
 * @param {(text: string) => string} change
 * @returns {Frames}
 */
export function changed(frames, change) {
  const around = (/** @type {Frame | null} */ frame) =>
    frame && { ...frame, before: change(frame.before), after: change(frame.after) };
  const { first, system, after_system, user, assistant, answer } = frames;
  return {
    ...frames,
    first: { ...first, before: change(first.before), after: change(first.after) },
    system: around(system),
    after_system: around(after_system),
    user: around(user),
    assistant: around(assistant),
    answer: change(answer),
  };
}

/**
 * The content of a user's message: the app's instruction on a line of its own, then the prompt.
 * @param {string} instruction
 * @param {string} prompt
 */
export function userContent(instruction, prompt) {
  return instruction ? `${instruction}\n${prompt}` : prompt;
}

/**
 * @param {string} content
 * @param {Frame["trim"]} trim
 */
function trimmed(content, trim) {
  if (trim === "space") return content.replace(/^ /, "");
  const kept = trim === "left" || trim === "both" ? content.replace(LEADING, "") : content;
  if (trim !== "right" && trim !== "both") return kept;
  let end = kept.length; // a pattern for the end of a text takes quadratic time
  while (end && !WORD.test(kept[end - 1])) end--;
  return kept.slice(0, end);
}
