/** `.onnx_adapter` files: the tensors of an app by graph input, in ONNX Runtime's own format, a FlatBuffer. */

import { BundleError } from "./bundle.js";

const IDENTIFIER = "TORT";
const ADAPTER_VERSION = 1;
const SCALE = ".int8_scale"; // with int8 tensors, see ssdevice/adapters/storage.py
const FLOAT16 = 10; // types as ONNX numbers them
/** @type {Record<number, [string, new (data: ArrayBuffer) => ArrayBufferView]>} */
const TYPES = {
  1: ["float32", Float32Array],
  2: ["uint8", Uint8Array],
  3: ["int8", Int8Array],
  6: ["int32", Int32Array],
  7: ["int64", BigInt64Array],
};

/** @typedef {{type: string, data: ArrayBufferView, dims: number[]}} Values */

/**
 * The tensors of an adapter, floats widened to float32.
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @param {string} base the sha256 of the weights that it must be for
 * @returns {Map<string, Values>}
 */
export function readAdapter(bytes, base) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (text(bytes, 4, 4) !== IDENTIFIER) throw new BundleError("an adapter that is not ONNX Runtime's");
  const root = at(view, 0);
  const version = integer(view, field(view, root, 1));
  if (version !== ADAPTER_VERSION) throw new BundleError(`adapter version ${version}, expected ${ADAPTER_VERSION}`);
  const model = integer(view, field(view, root, 2));
  if (model !== (parseInt(base.slice(0, 8), 16) & 0x7fffffff)) throw new BundleError("an adapter for another base");
  /** @type {Map<string, Parameter>} */
  const found = new Map();
  const list = at(view, field(view, root, 3));
  for (let i = 0; i < integer(view, list); i++) {
    const parameter = readParameter(view, bytes, at(view, list + 4 + 4 * i));
    found.set(parameter.name, parameter);
  }
  const plain = [...found].filter(([name]) => !name.endsWith(SCALE));
  return new Map(plain.map(([name, parameter]) => [name, restored(parameter, found.get(name + SCALE))]));
}

/** @typedef {{name: string, type: number, dims: number[], data: ArrayBuffer}} Parameter */

/**
 * @param {DataView} view
 * @param {Uint8Array} bytes
 * @param {number} table
 * @returns {Parameter}
 */
function readParameter(view, bytes, table) {
  const [name, dims, data] = [0, 1, 3].map((index) => at(view, field(view, table, index)));
  const sizes = Array.from({ length: integer(view, dims) }, (_, i) => Number(view.getBigInt64(dims + 4 + 8 * i, true)));
  const start = data + 4;
  return {
    name: text(bytes, name + 4, integer(view, name)),
    type: integer(view, field(view, table, 2)),
    dims: sizes,
    data: bytes.slice(start, start + integer(view, data)).buffer,
  };
}

/**
 * @param {Parameter} parameter
 * @param {Parameter} [scale] one float a column, for int8
 * @returns {Values}
 */
function restored({ name, type, dims, data }, scale) {
  if (type === FLOAT16) return { type: "float32", data: Float32Array.from(new Uint16Array(data), half), dims };
  if (!(type in TYPES)) throw new BundleError(`an adapter with ${name} of type ${type}`);
  const [named, Values] = TYPES[type];
  if (!scale) return { type: named, data: new Values(data), dims };
  const scales = new Float32Array(scale.data);
  const [rows, columns] = dims.slice(-2);
  const column = (/** @type {number} */ i) => Math.floor(i / (rows * columns)) * columns + (i % columns);
  return { type: "float32", data: Float32Array.from(new Int8Array(data), (v, i) => v * scales[column(i)]), dims };
}

/** @param {number} bits a float16 */
function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 1 + fraction / 1024 : fraction / 512;
  return (bits & 0x8000 ? -1 : 1) * size * 2 ** (exponent - 15);
}

// FlatBuffers: a field's place is in its table's list of offsets; tables, vectors and strings are behind an offset.

/** @param {DataView} view @param {number} place */
function at(view, place) {
  return place + view.getUint32(place, true);
}

/** @param {DataView} view @param {number} place 0: the field has its default, 0 */
function integer(view, place) {
  return place ? view.getInt32(place, true) : 0;
}

/** @param {DataView} view @param {number} table @param {number} index */
function field(view, table, index) {
  const offsets = table - view.getInt32(table, true);
  const entry = 4 + 2 * index;
  const offset = entry < view.getUint16(offsets, true) ? view.getUint16(offsets + entry, true) : 0;
  return offset && table + offset;
}

/** @param {Uint8Array} bytes @param {number} start @param {number} size */
function text(bytes, start, size) {
  return new TextDecoder().decode(bytes.subarray(start, start + size));
}
