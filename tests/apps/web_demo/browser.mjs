// node browser.mjs SOURCES NODE_MODULES CHROMIUM ADDRESS [SCREENSHOT] < requests: uses the page in headless Chromium,
// then opens it once more. A request is a line {"app", "prompt"} or {"app", "prompt", "stop": true}, with "temperature" and "seed" (texts) to sample. Prints
// {"about", "status", "answers": [{"tokens", "plain", "speculative", "accepted", "speeds", "status"}],
// "requests", "again", "errors"}; "requests" and "again" are what the first and the second visit asked for.

import { readFileSync } from "node:fs";
import { load, modules } from "./load.mjs";

const [executablePath, address, screenshot] = process.argv.slice(4);
const { chromium } = await load(modules, "playwright-core/index.mjs");
const timeout = 300_000;

const browser = await chromium.launch({ executablePath, chromiumSandbox: false, timeout });
try {
  const page = await browser.newPage({ viewport: { width: 900, height: 520 } });
  page.setDefaultTimeout(timeout);
  let [requests, errors] = [[], []];
  page.context().on("request", (request) => requests.push(request.url()));
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  const text = (selector) => page.textContent(selector);
  const visit = async () => {
    await page.goto(address);
    await page.waitForSelector("fieldset:not([disabled]), #status.error", { state: "attached" });
  };
  await visit();
  const found = { about: await text("#about"), status: await text("#status"), answers: [] };
  for (const { app, prompt, stop, temperature = "0", seed = "0" } of readFileSync(0, "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line))) {
    await page.selectOption("#app", app);
    await page.fill("#prompt", prompt);
    await page.fill("#temperature", temperature);
    await page.fill("#seed", seed);
    if (stop) {
      await page.evaluate(() => {
        document.querySelector("button[value='plain speculative']").click();
        document.querySelector("#stop").click();
      });
    } else {
      await page.click("text=Compare");
    }
    await page.waitForSelector("#status[data-tokens], #status.error");
    found.answers.push({
      tokens: JSON.parse(await page.getAttribute("#status", "data-tokens")),
      plain: await text("#plain output"),
      speculative: await text("#speculative output"),
      accepted: await page.locator("#speculative output .accepted").count(),
      speeds: await page.locator(".speed").allTextContents(),
      status: await text("#status"),
    });
    if (screenshot) await page.screenshot({ path: screenshot });
  }
  const first = requests;
  requests = [];
  await visit();
  console.log(JSON.stringify({ ...found, requests: first, again: requests, errors }));
} finally {
  await browser.close();
}
