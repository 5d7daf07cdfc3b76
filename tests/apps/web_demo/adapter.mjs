// node adapter.mjs SOURCES NODE_MODULES FILE SHA256: the tensors of an adapter, {name: {"type", "dims", "data"}}.

import { readFileSync } from "node:fs";
import { load, sources } from "./load.mjs";

const { readAdapter } = await load(sources, "adapter.js");

try {
  const found = readAdapter(new Uint8Array(readFileSync(process.argv[4])), process.argv[5]);
  const shown = [...found].map(([name, { type, dims, data }]) => [name, { type, dims, data: Array.from(data, Number) }]);
  console.log(JSON.stringify(Object.fromEntries(shown)));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
