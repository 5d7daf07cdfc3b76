// node words.mjs SOURCES NODE_MODULES TOKENIZER < cases: for every [before, words, after] of a JSON list the ids of a prompt
// whose words are text, and for every [ids, ids] under "follow" the text of the second after the first.

import { readFileSync } from "node:fs";
import { load, modules, sources } from "./load.mjs";

const { encode, openForWords, TextStream } = await load(sources, "text.js");
const { Tokenizer } = await load(modules, "@huggingface/tokenizers/dist/tokenizers.mjs");

const { tokenizer, named } = openForWords(Tokenizer, readFileSync(process.argv[4]));
const { prompts, follow } = JSON.parse(readFileSync(0, "utf8"));
const ids = prompts.map(([before, words, after]) => encode(tokenizer, named(before) + words + named(after)));
const texts = follow.map(([before, after]) => {
  const stream = new TextStream(tokenizer, before);
  return after.map((id) => stream.push(id)).join("") + stream.flush();
});
console.log(JSON.stringify({ ids, texts }));
