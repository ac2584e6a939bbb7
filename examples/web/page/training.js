// The training API on onnxruntime-web and onnxruntime-node: the same artifacts and steps as onnxtrain.api in Python.

import { exportForInference, readMetadata } from "./onnx_file.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";

const ENTRY = "onnxtrain";
const GRADIENT = (name) => `${name}_grad.accumulation.buffer`;
const MOMENT = (state, name) => `onnxtrain:optimizer/${state}/${name}`;
const ARRAYS = { float32: Float32Array, float64: Float64Array };

/** A model in training: its parameters, gradients and optimizer state, and the three graphs that work on them. */
export class Training {
  /**
   * @param {object} ort - the module of onnxruntime-web or onnxruntime-node.
   * @param {{training: Uint8Array, eval: Uint8Array, optimizer: Uint8Array, checkpoint: ArrayBuffer}} files
   * @param {string} provider - "wasm", "webgpu" or "cpu".
   */
  static async open(ort, files, provider) {
    const training = new Training(ort, files);
    for (const kind of ["training", "eval", "optimizer"]) {
      training.graphs[kind] = await openGraph(ort, files[kind], kind, provider);
    }
    training.restore(files.checkpoint);
    return training;
  }

  constructor(ort, files) {
    this.ort = ort;
    this.files = files;
    this.graphs = {};
    this.learningRate = 1e-3;
  }

  /** Takes parameters, optimizer state and counters from a checkpoint. */
  restore(checkpoint) {
    const { tensors, metadata } = readSafetensors(checkpoint);
    const entry = JSON.parse(metadata[ENTRY]);
    const { training, optimizer } = this.graphs;
    this.release();
    this.values = new Map(); // each graph input that is not the user's → ort.Tensor
    for (const name of [...training.facts.trainable, ...training.facts.frozen, ...training.facts.buffers]) {
      const tensor = tensors.get(name);
      if (!tensor) throw new Error(`The checkpoint lacks the parameter ${name}.`);
      this.values.set(name, this.tensor(tensor.type, tensor.data, tensor.dims));
    }
    for (const name of training.facts.trainable) {
      const { type, dims } = tensors.get(name);
      this.values.set(GRADIENT(name), this.zeros(type, dims));
      for (const state of optimizer.facts.state) {
        const saved = tensors.get(MOMENT(state, name));
        const fresh = () => this.zeros(optimizer.facts.state_dtype[name], dims);
        this.values.set(`${name}.${state}`, saved ? this.tensor(saved.type, saved.data, saved.dims) : fresh());
      }
    }
    Object.assign(this, { resetDue: true, steps: entry.step ?? 0, seed: entry.seed, draws: entry.draws, entry });
    this.learningRate = entry.learning_rate ?? this.learningRate;
  }

  /** Computes the loss, and adds its gradients to those since the last reset. */
  async trainStep(inputs) {
    const { facts } = this.graphs.training;
    const feeds = { ...inputs, lazy_reset_grad: this.tensor("bool", Uint8Array.of(this.resetDue ? 1 : 0), [1]) };
    if (facts.draws) feeds.random_seed = this.int64(this.seed + this.draws);
    const results = await this.run("training", feeds);
    this.resetDue = false;
    this.draws += 1;
    return results[facts.outputs[0]].data[0];
  }

  /** Changes the parameters along the gradients. */
  async optimizerStep() {
    const rate = this.tensor("float32", Float32Array.of(this.learningRate), [1]);
    await this.run("optimizer", { learning_rate: rate, step: this.int64(this.steps) });
    this.steps += 1;
  }

  /** Makes the next training step start the gradients anew. */
  lazyResetGrad() {
    this.resetDue = true;
  }

  /** Runs the eval graph for the named outputs; all user inputs are needed. */
  evaluate(inputs, outputs) {
    return this.run("eval", inputs, outputs);
  }

  /** The model for inference as an ONNX file. */
  async exportModel(outputs) {
    return exportForInference(this.files.eval, await this.read(this.parameterNames()), outputs);
  }

  /** All of the state as a checkpoint that Python reads too. */
  async checkpoint() {
    const { facts } = this.graphs.optimizer;
    const tensors = await this.read(this.parameterNames());
    for (const state of facts.state) {
      const values = await this.read(facts.trainable.map((name) => `${name}.${state}`));
      for (const name of facts.trainable) tensors.set(MOMENT(state, name), values.get(`${name}.${state}`));
    }
    const counters = { step: this.steps, learning_rate: this.learningRate, seed: this.seed, draws: this.draws };
    return writeSafetensors(tensors, { [ENTRY]: JSON.stringify({ ...this.entry, ...counters }) });
  }

  /** Gives the memory on the GPU back. */
  release() {
    for (const tensor of this.values?.values() ?? []) tensor.dispose();
  }

  tensor(type, data, dims) {
    return new this.ort.Tensor(type, data, dims);
  }

  int64(value) {
    return this.tensor("int64", BigInt64Array.of(BigInt(value)), [1]);
  }

  zeros(type, dims) {
    return this.tensor(type, new ARRAYS[type](dims.reduce((a, b) => a * b, 1)), dims);
  }

  parameterNames() {
    const { trainable, frozen, buffers } = this.graphs.training.facts;
    return [...trainable, ...frozen, ...buffers];
  }

  async read(names) {
    const result = new Map();
    for (const name of names) {
      const tensor = this.values.get(name);
      result.set(name, { type: tensor.type, dims: [...tensor.dims], data: await tensor.getData() });
    }
    return result;
  }

  async run(kind, feeds, outputs) {
    const { session, facts } = this.graphs[kind];
    const all = { ...feeds };
    for (const name of session.inputNames) {
      // The optimizer reads what the training graph has summed.
      const own = kind === "optimizer" && name.endsWith("_grad") ? `${name}.accumulation.buffer` : name;
      if (!(name in all)) all[name] = inChunks(facts, name) ? asOneChunk(this.values.get(own)) : this.values.get(own);
    }
    const results = await session.run(all, outputs ?? [...facts.outputs, ...Object.keys(facts.updates)]);
    // onnxruntime-web does not write into tensors that are given to it: the new ones take the place of the old.
    for (const [output, name] of outputs ? [] : Object.entries(facts.updates)) {
      const { dims } = this.values.get(name);
      this.values.get(name).dispose();
      this.values.set(name, inChunks(facts, name) ? results[output].reshape(dims) : results[output]);
    }
    return results;
  }
}

/** Whether a large parameter, its gradient or its state goes into the optimizer as [chunks, elements]. */
function inChunks(facts, name) {
  return facts.in_chunks.some((parameter) => name === parameter || name === `${parameter}_grad` || facts.state.some((state) => name === `${parameter}.${state}`));
}

function asOneChunk(tensor) {
  return tensor.reshape([1, tensor.size]);
}

async function openGraph(ort, bytes, kind, provider) {
  const text = readMetadata(bytes)[ENTRY];
  if (!text) throw new Error(`The ${kind} graph was not made by onnxtrain.`);
  const facts = { outputs: [], buffers: [], state: [], in_chunks: [], updates: {}, ...JSON.parse(text) };
  if (facts.kind !== kind) throw new Error(`This is the ${facts.kind} graph, and not the ${kind} graph.`);
  const onGpu = Object.fromEntries(Object.keys(facts.updates).map((output) => [output, "gpu-buffer"]));
  const session = await ort.InferenceSession.create(bytes, {
    executionProviders: [provider],
    logSeverityLevel: 3, // errors only
    ...(provider === "webgpu" ? { preferredOutputLocation: onGpu } : {}),
  });
  return { session, facts };
}
