// Reads and edits an ONNX file as bytes: its metadata, and the part of an eval graph that inference needs.
// The numbers are those of the fields in onnx.proto.

const MODEL = { graph: 7, metadata: 14 };
const GRAPH = { node: 1, initializer: 5, input: 11, output: 12, valueInfo: 13 };
const NODE = { input: 1, output: 2, attribute: 5 };
const ATTRIBUTE = { graph: 6, graphs: 11 };
const TENSOR = { dims: 1, dataType: 2, name: 8, rawData: 9 };
const DATA_TYPES = { float32: 1, int32: 6, int64: 7, bool: 9, float16: 10 };
const BYTES = 2; // the wire type of texts, bytes and nested messages

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** The fields of a message, in order: number, wire type, content, and all bytes with the field's own head. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      if (byte === undefined) throw new Error("The ONNX file is cut off.");
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const start = at;
    const tag = Number(varint());
    const wire = tag & 7;
    let content = null;
    if (wire === 0) content = varint();
    else if (wire === 1) at += 8;
    else if (wire === 5) at += 4;
    else if (wire === BYTES) {
      const length = Number(varint());
      content = bytes.subarray(at, (at += length));
    } else throw new Error(`The ONNX file has a field of wire type ${wire}.`);
    if (at > bytes.length) throw new Error("The ONNX file is cut off.");
    yield { number: tag >> 3, content, whole: bytes.subarray(start, at) };
  }
}

const parts = (bytes, number) => [...fields(bytes)].filter((field) => field.number === number).map((f) => f.content);
const texts = (bytes, number) => parts(bytes, number).map((content) => decoder.decode(content));
const nameOf = (valueInfo) => texts(valueInfo, 1)[0];

/** The model's metadata as an object of texts. */
export function readMetadata(model) {
  const entries = parts(model, MODEL.metadata).map((entry) => [texts(entry, 1)[0], texts(entry, 2)[0] ?? ""]);
  return Object.fromEntries(entries);
}

/**
 * The eval graph up to the named outputs as a model of its own.
 *
 * @param {Uint8Array} model - the eval graph; its parameters are inputs.
 * @param {Map<string, {type: string, dims: number[], data: ArrayBufferView}>} parameters - their values.
 * @param {string[]} outputs - names among the graph's outputs.
 * @returns {Uint8Array} an ONNX file.
 */
export function exportForInference(model, parameters, outputs) {
  const kept = [...fields(model)].filter((field) => field.number !== MODEL.metadata);
  return join(
    kept.map((field) =>
      field.number === MODEL.graph ? block(MODEL.graph, cut(field.content, parameters, outputs)) : field.whole,
    ),
  );
}

function cut(graph, parameters, outputs) {
  const all = [...fields(graph)];
  const nodes = all.filter((field) => field.number === GRAPH.node);
  const needed = new Set(outputs);
  const used = new Set();
  for (const node of nodes.toReversed()) {
    if (!texts(node.content, NODE.output).some((name) => needed.has(name))) continue;
    used.add(node);
    for (const name of reads(node.content)) needed.add(name);
  }
  const stays = (field) => {
    if (field.number === GRAPH.node) return used.has(field);
    if (field.number === GRAPH.initializer) return needed.has(texts(field.content, TENSOR.name)[0]);
    if (field.number === GRAPH.output) return outputs.includes(nameOf(field.content));
    if (field.number !== GRAPH.input) return field.number !== GRAPH.valueInfo;
    return needed.has(nameOf(field.content)) && !parameters.has(nameOf(field.content));
  };
  const given = parts(graph, GRAPH.output).map(nameOf);
  const unknown = outputs.filter((name) => !given.includes(name));
  if (unknown.length) throw new Error(`The graph has no output ${unknown.join(", ")}, only ${given.join(", ")}.`);
  const weights = [...parameters].filter(([name]) => needed.has(name));
  return join([
    ...all.filter(stays).map((field) => field.whole),
    ...weights.map(([name, tensor]) => block(GRAPH.initializer, tensorProto(name, tensor))),
  ]);
}

/** The names that a node reads, those inside its subgraphs too. */
function reads(node) {
  const names = texts(node, NODE.input);
  for (const attribute of parts(node, NODE.attribute)) {
    for (const graph of [...parts(attribute, ATTRIBUTE.graph), ...parts(attribute, ATTRIBUTE.graphs)]) {
      for (const inner of parts(graph, GRAPH.node)) names.push(...reads(inner));
      names.push(...parts(graph, GRAPH.output).map(nameOf));
    }
  }
  return names;
}

function tensorProto(name, { type, dims, data }) {
  const dataType = DATA_TYPES[type];
  if (!dataType) throw new Error(`The parameter ${name} has the type ${type}, which cannot be exported.`);
  return join([
    ...dims.map((size) => number(TENSOR.dims, size)),
    number(TENSOR.dataType, dataType),
    block(TENSOR.name, encoder.encode(name)),
    block(TENSOR.rawData, new Uint8Array(data.buffer, data.byteOffset, data.byteLength)),
  ]);
}

function varintBytes(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return [...bytes, value];
}

const number = (field, value) => Uint8Array.from([...varintBytes(field * 8), ...varintBytes(value)]);

function block(field, content) {
  return join([Uint8Array.from([...varintBytes(field * 8 + BYTES), ...varintBytes(content.length)]), content]);
}

function join(pieces) {
  const result = new Uint8Array(pieces.reduce((length, piece) => length + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    result.set(piece, at);
    at += piece.length;
  }
  return result;
}
