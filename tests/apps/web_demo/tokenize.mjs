// node tokenize.mjs SOURCES NODE_MODULES TOKENIZER < texts: {"ids", "text"} of every text in a JSON list, or of its ids;
// the text is what a stream gives for the ids, one by one.

import { readFileSync } from "node:fs";
import { load, modules, sources } from "./load.mjs";

const { encode, openTokenizer, TextStream } = await load(sources, "text.js");
const { Tokenizer } = await load(modules, "@huggingface/tokenizers/dist/tokenizers.mjs");

const tokenizer = openTokenizer(Tokenizer, readFileSync(process.argv[4]));
const found = JSON.parse(readFileSync(0, "utf8")).map((given) => {
  const ids = typeof given === "string" ? encode(tokenizer, given) : given;
  const stream = new TextStream(tokenizer);
  return { ids, text: ids.map((id) => stream.push(id)).join("") + stream.flush() };
});
console.log(JSON.stringify(found));
