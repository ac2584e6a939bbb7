// Trains off the page's own thread, so that drawing stays smooth. Messages come and go one at a time, in order.

import { accuracy, asBatch, guess, rasterize, readDigits, redrawn } from "./digits.js";
import { Training } from "./training.js";

const BATCH = 32; // half of it drawings, drawn anew each time; half digits of the data set, so that those stay known
const REPORT_EVERY = 10; // steps
const LEARNING_RATE = 1e-3;
const ARTIFACTS = { training: "training_model.onnx", eval: "eval_model.onnx", optimizer: "optimizer_model.onnx" };
const RUNTIMES = { wasm: "./ort/ort.wasm.min.mjs", webgpu: "./ort/ort.webgpu.min.mjs" };

let training;
let checkpoint;
let digits;
let examples = [];
let running = false;
let queue = Promise.resolve();

/** onnxruntime runs one thing at a time: all that uses it waits for its turn. */
function inTurn(action) {
  queue = queue.then(action).catch((error) => {
    running = false;
    postMessage({ type: "error", text: String(error.message ?? error) });
  });
  return queue;
}

async function fetched(name) {
  const response = await fetch(new URL(`./artifacts/${name}`, import.meta.url));
  if (!response.ok) throw new Error(`${name} cannot be read (${response.status}).`);
  return response.arrayBuffer();
}

const actions = {
  async open({ backend }) {
    const ort = await import(RUNTIMES[backend]);
    ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
    ort.env.wasm.numThreads = 1; // such a small model is not faster with more
    const files = {};
    for (const [kind, name] of Object.entries(ARTIFACTS)) files[kind] = new Uint8Array(await fetched(name));
    checkpoint ??= await fetched("checkpoint.safetensors");
    digits ??= readDigits(await fetched("digits.bin"));
    // What was learned goes along to the other backend.
    const state = training ? (await training.checkpoint()).buffer : checkpoint;
    training?.release();
    training = await Training.open(ort, { ...files, checkpoint: state }, backend);
    training.learningRate = LEARNING_RATE;
    await report();
    postMessage({ type: "ready", backend });
  },

  async examples({ list }) {
    examples = list.map(({ strokes, label }) => ({ strokes, label, pixels: rasterize(strokes) }));
    await report();
  },

  async guess({ strokes, id }) {
    const [{ probabilities }] = await guess(training, [{ pixels: rasterize(strokes), label: 0 }]);
    postMessage({ type: "guess", id, probabilities });
  },

  async reset() {
    training.restore(checkpoint);
    training.learningRate = LEARNING_RATE;
    await report();
  },

  async model() {
    const bytes = await training.exportModel(["logits"]);
    postMessage({ type: "model", bytes }, [bytes.buffer]);
  },
};

async function report() {
  const test = await accuracy(training, digits.test);
  const reads = examples.length ? await guess(training, examples) : [];
  postMessage({ type: "report", test, reads: reads.map(({ digit }) => digit), step: training.steps });
}

function batch() {
  const pick = (list) => list[Math.floor(Math.random() * list.length)];
  return Array.from({ length: BATCH }, (_, index) => {
    if (index % 2) return pick(digits.training);
    const { strokes, label } = pick(examples);
    return { pixels: redrawn(strokes, Math.random), label };
  });
}

async function step() {
  const start = performance.now();
  const loss = await training.trainStep(asBatch(training, batch()));
  await training.optimizerStep();
  training.lazyResetGrad();
  postMessage({ type: "step", step: training.steps, loss, milliseconds: performance.now() - start });
  if (training.steps % REPORT_EVERY === 0) await report();
}

async function train() {
  running = true;
  while (running && examples.length) {
    await inTurn(step);
    await new Promise((resolve) => setTimeout(resolve)); // lets messages in
  }
  running = false;
  await inTurn(report);
  postMessage({ type: "paused" });
}

addEventListener("message", ({ data }) => {
  if (data.type === "train") {
    if (!running) train();
  } else if (data.type === "pause") running = false;
  else inTurn(() => actions[data.type](data));
});
