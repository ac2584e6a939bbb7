// Trains the page's artifacts in Node, with onnxruntime-node or with the browser's onnxruntime-web.
//
//   node examples/web/node/train.js build/web/artifacts [--steps 100] [--runtime node|web]
//        [--from untrained.safetensors] [--out trained.onnx] [--checkpoint trained.safetensors]
//
// Prints one line of JSON: the loss of each step, the accuracy on the digits that were not trained on, and the memory.

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";

import { accuracy, readDigits } from "../page/digits.js";
import { trainInOrder } from "../page/in_order.js";
import { Training } from "../page/training.js";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    steps: { type: "string", default: "100" },
    runtime: { type: "string", default: "node" },
    from: { type: "string", default: "untrained.safetensors" },
    out: { type: "string" },
    checkpoint: { type: "string" },
  },
});
const [folder] = positionals;
const ort = await import(options.runtime === "web" ? "onnxruntime-web" : "onnxruntime-node");
const read = async (name) => new Uint8Array(await readFile(join(folder, name)));
const files = {
  training: await read("training_model.onnx"),
  eval: await read("eval_model.onnx"),
  optimizer: await read("optimizer_model.onnx"),
  checkpoint: (await read(options.from)).buffer,
};
const training = await Training.open(ort, files, options.runtime === "web" ? "wasm" : "cpu");
const digits = readDigits((await read("digits.bin")).buffer);

const losses = [];
const memory = []; // megabytes after each 100 steps
for await (const loss of trainInOrder(training, digits.training)) {
  losses.push(loss);
  if (losses.length % 100 === 0) memory.push(Math.round(process.memoryUsage().rss / 1e6));
  if (losses.length >= Number(options.steps)) break;
}
if (options.out) await writeFile(options.out, await training.exportModel(["logits"]));
if (options.checkpoint) await writeFile(options.checkpoint, await training.checkpoint());
console.log(JSON.stringify({ losses, accuracy: await accuracy(training, digits.test), memory }));
