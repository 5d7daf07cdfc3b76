// node browser.mjs NODE_MODULES CHROMIUM ADDRESS [SCREENSHOT] < requests: uses the page in headless Chromium.
// Prints one object: {"about", "status", "answers": [{"tokens": {"plain", "speculative"}, "plain", "speculative",
// "accepted", "status"}], "requests": [..], "errors": [..]}. A request is a line {"app", "prompt"}.

import { readFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, executablePath, address, screenshot] = process.argv.slice(2);
const { chromium } = await import(pathToFileURL(join(resolve(modules), "playwright-core/index.mjs")));
const asked = (await readFile("/dev/stdin", "utf8")).split("\n").filter(Boolean).map((line) => JSON.parse(line));

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
try {
  const page = await browser.newPage({ viewport: { width: 900, height: 560 } });
  const [requests, errors] = [[], []];
  page.context().on("request", (request) => requests.push(request.url()));
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(address);
  const status = page.locator("#status");
  await page.waitForFunction(
    () => document.querySelector("#status.error") || document.querySelector("fieldset:not([disabled])"),
    null,
    { timeout: 120_000 },
  );
  const found = { about: await page.textContent("#about"), status: await status.textContent(), answers: [] };
  for (const { app, prompt } of asked) {
    await page.selectOption("#app", app);
    await page.fill("#prompt", prompt);
    await page.click("text=Compare");
    await page.waitForSelector("#status[data-tokens], #status.error", { timeout: 120_000 });
    found.answers.push({
      tokens: JSON.parse((await status.getAttribute("data-tokens")) ?? "null"),
      plain: await page.textContent("#plain output"),
      speculative: await page.textContent("#speculative output"),
      accepted: await page.locator("#speculative output .accepted").count(),
      speeds: await page.locator(".speed").allTextContents(),
      status: await status.textContent(),
    });
  }
  if (screenshot) await page.screenshot({ path: screenshot });
  console.log(JSON.stringify({ ...found, requests, errors }));
} finally {
  await browser.close();
}
