// Trains on the digits in their order in headless Chromium, and prints the losses as JSON.
//
//   node examples/web/node/in_browser.js http://localhost:8000/ [--steps 30] [--backend wasm|webgpu]

import { parseArgs } from "node:util";

import { open, within } from "./browser.js";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    steps: { type: "string", default: "30" },
    backend: { type: "string", default: "wasm" },
    artifacts: { type: "string", default: "artifacts" },
    chromium: { type: "string", default: "/usr/bin/chromium" },
  },
});
const { browser, page } = await open(options.chromium, options.backend);
try {
  await page.goto(new URL("style.css", positionals[0]).href); // the same origin, and no script of the page's own
  const opened = page.evaluate(async ({ backend, artifacts }) => {
    const ort = await import(`/ort/ort.${backend}.min.mjs`);
    const { Training } = await import("/training.js");
    const { readDigits } = await import("/digits.js");
    const { trainInOrder } = await import("/in_order.js");
    ort.env.wasm.wasmPaths = new URL("/ort/", location.href).href;
    ort.env.wasm.numThreads = 1;
    const read = async (name) => new Uint8Array(await (await fetch(`/${artifacts}/${name}`)).arrayBuffer());
    const files = {
      training: await read("training_model.onnx"),
      eval: await read("eval_model.onnx"),
      optimizer: await read("optimizer_model.onnx"),
      checkpoint: (await read("untrained.safetensors")).buffer,
    };
    const training = await Training.open(ort, files, backend);
    const digits = readDigits((await read("digits.bin")).buffer);
    globalThis.steps = trainInOrder(training, digits.training);
  }, options);
  await within(opened, "opening the graphs");
  const losses = [];
  while (losses.length < Number(options.steps)) {
    const step = page.evaluate(async () => (await globalThis.steps.next()).value);
    losses.push(await within(step, `step ${losses.length + 1}`));
  }
  console.log(JSON.stringify({ losses }));
} finally {
  await browser.close();
}
