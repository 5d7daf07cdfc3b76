// Where the page's modules are, and the packages that it needs: the first two arguments of every script here.

import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

export const [sources, modules] = process.argv.slice(2, 4).map((path) => resolve(path));
export const load = (...path) => import(pathToFileURL(join(...path)));
