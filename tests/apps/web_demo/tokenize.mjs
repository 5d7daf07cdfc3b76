// node tokenize.mjs SOURCES NODE_MODULES TOKENIZER < texts: {"ids", "text"} of every text in a JSON list; the text is
// what a stream gives for the ids, one by one.

import { readFileSync } from "node:fs";
import { load, modules, sources } from "./load.mjs";

const { encode, openTokenizer, TextStream } = await load(sources, "text.js");
const { Tokenizer } = await load(modules, "@huggingface/tokenizers/dist/tokenizers.mjs");

const tokenizer = openTokenizer(Tokenizer, readFileSync(process.argv[4]));
const found = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  const ids = encode(tokenizer, text);
  const stream = new TextStream(tokenizer);
  return { ids, text: ids.map((id) => stream.push(id)).join("") + stream.flush() };
});
console.log(JSON.stringify(found));
