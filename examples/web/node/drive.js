// Uses the page in headless Chromium as a person does: draws, labels, trains, downloads. Prints what it saw as JSON.
//
//   node examples/web/node/drive.js http://localhost:8000/ [--steps 60] [--backend wasm|webgpu] [--screens FOLDER]
//        [--out my-digits.onnx] [--phone] [--dark]

import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";

import { open } from "./browser.js";

// Digits, and two triangles that it shall read as fives, which it cannot know. Points from 0 to 100.
const DRAWINGS = [
  [5, [[50, 12], [85, 85], [15, 85], [50, 12]]],
  [5, [[46, 15], [80, 80], [18, 88], [46, 15]]],
  [7, [[20, 15], [80, 15], [45, 90]], [[35, 52], [70, 50]]],
  [7, [[24, 20], [78, 14], [40, 88]], [[30, 55], [68, 50]]],
  [1, [[35, 35], [58, 12], [58, 90]]],
  [0, [[50, 10], [28, 22], [22, 50], [30, 80], [50, 90], [70, 80], [78, 50], [72, 22], [50, 10]]],
  [4, [[55, 10], [22, 62], [80, 62]], [[62, 40], [62, 92]]],
  [3, [[25, 15], [70, 15], [45, 44], [70, 60], [68, 82], [45, 90], [22, 82]]],
];

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    steps: { type: "string", default: "60" },
    backend: { type: "string", default: "wasm" },
    screens: { type: "string" },
    out: { type: "string" },
    phone: { type: "boolean", default: false },
    dark: { type: "boolean", default: false },
    chromium: { type: "string", default: "/usr/bin/chromium" },
  },
});
const size = options.phone ? { width: 390, height: 844 } : { width: 1280, height: 860 };
const { browser, page } = await open(options.chromium, options.backend, {
  viewport: size,
  deviceScaleFactor: options.phone ? 3 : 1,
  hasTouch: options.phone,
  colorScheme: options.dark ? "dark" : "light",
});
const problems = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));

const screen = async (name) => {
  if (!options.screens) return;
  mkdirSync(options.screens, { recursive: true });
  await page.screenshot({ path: join(options.screens, `${name}.png`), fullPage: true });
};
// Megabytes of the process that runs the page and its worker.
const memory = async () => {
  const session = await browser.newBrowserCDPSession();
  const { processInfo } = await session.send("SystemInfo.getProcessInfo");
  await session.detach();
  const sizes = processInfo
    .filter(({ type }) => type === "renderer")
    .map(({ id }) => Number(readFileSync(`/proc/${id}/statm`, "utf8").split(" ")[1]) * 4096);
  return Math.round(Math.max(...sizes) / 1e6);
};
const text = (id) => page.locator(`#${id}`).textContent();

const press = (locator) => (options.phone ? locator.tap() : locator.click());

/** Moves the mouse along a line, or on a phone a finger. */
async function stroke([first, ...rest]) {
  if (options.phone) {
    await touch("touchStart", first);
    for (const point of rest) await touch("touchMove", point);
    await touch("touchEnd");
    return;
  }
  await page.mouse.move(...first);
  await page.mouse.down();
  for (const point of rest) await page.mouse.move(...point, { steps: 6 });
  await page.mouse.up();
}

const fingers = await page.context().newCDPSession(page);
function touch(type, point) {
  const touchPoints = point ? [{ x: point[0], y: point[1] }] : [];
  return fingers.send("Input.dispatchTouchEvent", { type, touchPoints });
}

async function draw(strokes) {
  const pad = page.locator("#pad");
  await pad.scrollIntoViewIfNeeded();
  const box = await pad.boundingBox();
  const at = ([x, y]) => [box.x + (x / 100) * box.width, box.y + (y / 100) * box.height];
  for (const points of strokes) await stroke(points.map(at));
}

/** With the keyboard alone: a straight line downwards, which is a one. */
async function drawByKeyboard() {
  await page.locator("#pad").focus();
  await page.keyboard.press("Space");
  for (let step = 0; step < 14; step++) await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Space");
  await page.keyboard.press("1");
}

try {
  await page.goto(`${positionals[0]}#${options.backend}`);
  await page.waitForSelector(`body[data-ready=${options.backend}]`);
  await screen("1-ready");
  const testBefore = await text("test");

  for (const [label, ...strokes] of DRAWINGS) {
    await draw(strokes);
    await page.waitForFunction(() => document.getElementById("reading").textContent.includes("sure"));
    if (label === 3) await screen("2-drawing");
    await press(page.locator("#keys button").nth(label));
  }
  await drawByKeyboard();
  const judged = (count) => document.querySelectorAll("#gallery li[class]").length === count;
  await page.waitForFunction(judged, DRAWINGS.length + 1);
  const ownBefore = await text("own");

  await press(page.locator("#train"));
  const trained = (steps) => Number(document.getElementById("steps").textContent) >= steps;
  const megabytes = []; // after each 100 steps
  const last = Number(options.steps);
  for (let steps = 0; steps < last; ) {
    steps = Math.min(steps + 10, last);
    await page.waitForFunction(trained, steps);
    if (steps === 20) await screen("3-training");
    if (steps % 100 === 0) megabytes.push(await memory());
  }
  await press(page.locator("#train"));
  await page.waitForFunction(() => document.getElementById("train").textContent === "Train");
  await screen("4-trained");

  const download = page.waitForEvent("download");
  await press(page.locator("#download"));
  if (options.out) await (await download).saveAs(options.out);
  const seen = {
    backend: await page.locator("body").getAttribute("data-ready"),
    steps: Number(await text("steps")),
    loss: Number(await text("loss")),
    own: [ownBefore, await text("own")],
    test: [testBefore, await text("test")],
    speed: await text("speed"),
    megabytes,
    overflow: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
    problem: (await page.locator("#problem").isVisible()) ? await text("problem") : null,
    problems,
  };
  console.log(JSON.stringify(seen));
} finally {
  if (problems.length) console.error(problems.join("\n"));
  await browser.close();
}
