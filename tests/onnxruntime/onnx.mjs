// The few messages of ONNX's protobuf format that a chain of MatMulNBits takes (onnx.proto3 has the numbers).

const bytes = (...parts) => Buffer.concat(parts.map((part) => (typeof part === 'number' ? varint(part) : part)));

function varint(value) {
  const out = [];
  do {
    out.push(value > 127 ? (value % 128) + 128 : value);
    value = Math.floor(value / 128);
  } while (value > 0);
  return Buffer.from(out);
}

const whole = (field, value) => bytes(field * 8, value);
const nested = (field, content) => bytes(field * 8 + 2, content.length, content);
const text = (field, value) => nested(field, Buffer.from(value));

const FLOAT = 1;
const UINT8 = 2;

const attribute = (name, value) => nested(5, bytes(text(1, name), whole(3, value), whole(20, 2)));

const tensor = (name, type, dims, data) => nested(5, bytes(
  ...dims.map((dim) => whole(1, dim)), whole(2, type), text(8, name), nested(9, Buffer.from(data.buffer, data.byteOffset, data.byteLength))));

const value = (field, name, dims) => nested(field, bytes(text(1, name), nested(2, nested(1, bytes(
  whole(1, FLOAT), nested(2, bytes(...dims.map((dim) => nested(1, whole(1, dim))))))))));

/**
 * A model x → y of `nodes` products, `layers` in turn: `{n, k, group, packed, scales}` with codes as MatMulNBits has
 * them, uint8 [n, groups, group / 2], and scales [n, groups]; the last group may be shorter.
 */
export function chain(layers, rows, nodes) {
  const initializers = layers.flatMap(({ n, k, group, packed, scales }, at) => [
    tensor(`w${at}`, UINT8, [n, Math.ceil(k / group), group / 2], packed),
    tensor(`s${at}`, FLOAT, [n, Math.ceil(k / group)], scales)]);
  const product = (node) => {
    const at = node % layers.length;
    const { n, k, group } = layers[at];
    return nested(1, bytes(
      text(1, node === 0 ? 'x' : `h${node}`), text(1, `w${at}`), text(1, `s${at}`), text(2, node === nodes - 1 ? 'y' : `h${node + 1}`),
      text(3, `node${node}`), text(4, 'MatMulNBits'), attribute('K', k), attribute('N', n), attribute('bits', 4),
      // 1: multiplied and summed in float32.
      attribute('block_size', group), attribute('accuracy_level', 1), text(7, 'com.microsoft')));
  };
  const graph = bytes(
    ...Array.from({ length: nodes }, (_, node) => product(node)), text(2, 'chain'), ...initializers,
    value(11, 'x', [rows, layers[0].k]), value(12, 'y', [rows, layers[(nodes - 1) % layers.length].n]));
  const opset = (domain, version) => nested(8, bytes(text(1, domain), whole(2, version)));
  return bytes(whole(1, 9), text(2, 'halftone'), nested(7, graph), opset('', 17), opset('com.microsoft', 1));
}
