// Reads and writes a checkpoint of onnxtrain: one safetensors file (docs/training-api.md has the layout).

const TYPES = {
  F32: ["float32", Float32Array],
  F16: ["float16", Uint16Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};
const CODES = Object.fromEntries(Object.entries(TYPES).map(([code, [type]]) => [type, code]));

/**
 * @param {ArrayBuffer} buffer - the file.
 * @returns {{tensors: Map<string, {type: string, dims: number[], data: ArrayBufferView}>, metadata: object}}
 */
export function readSafetensors(buffer) {
  const length = buffer.byteLength < 8 ? Infinity : Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error("The checkpoint is cut off, or no checkpoint.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [type, TypedArray] = TYPES[entry.dtype] ?? [];
    if (!type) throw new Error(`The tensor ${name} has the type ${entry.dtype}, which this page cannot read.`);
    const [start, end] = entry.data_offsets.map((offset) => offset + 8 + length);
    if (end > buffer.byteLength) throw new Error("The checkpoint is cut off.");
    tensors.set(name, { type, dims: entry.shape, data: new TypedArray(buffer.slice(start, end)) });
  }
  return { tensors, metadata: header.__metadata__ ?? {} };
}

/**
 * @param {Map<string, {type: string, dims: number[], data: ArrayBufferView}>} tensors
 * @param {Object<string, string>} metadata
 * @returns {Uint8Array} the file.
 */
export function writeSafetensors(tensors, metadata) {
  const header = { __metadata__: metadata };
  let offset = 0;
  for (const [name, { type, dims, data }] of tensors) {
    header[name] = { dtype: CODES[type], shape: dims, data_offsets: [offset, (offset += data.byteLength)] };
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (new TextEncoder().encode(text).length % 8)) % 8);
  const head = new TextEncoder().encode(text);
  const file = new Uint8Array(8 + head.length + offset);
  new DataView(file.buffer).setBigUint64(0, BigInt(head.length), true);
  file.set(head, 8);
  let at = 8 + head.length;
  for (const { data } of tensors.values()) {
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return file;
}
