// node prompts.mjs SOURCES NODE_MODULES < cases: prompts of the page. A case is a line {"frames", "messages"}, its answer
// the prompt, or null if it is refused.

import { createInterface } from "node:readline";
import { load, sources } from "./load.mjs";

const { BundleError } = await load(sources, "bundle.js");
const { prompt } = await load(sources, "frames.js");

for await (const line of createInterface({ input: process.stdin })) {
  const { frames, messages } = JSON.parse(line);
  try {
    console.log(JSON.stringify(prompt(frames, messages)));
  } catch (error) {
    if (!(error instanceof BundleError)) throw error;
    console.log("null");
  }
}
