#!/usr/bin/env python3
"""Decodes a GPTQ checkpoint with numpy alone, independently of Halftone's own reader.

    pip install numpy safetensors
    python scripts/decode_gptq.py QUANTIZED_DIR DENSE_DIR

DENSE_DIR then holds the same model with every quantized layer as an f32 weight. Evaluating both with
`halftone eval` must give the same perplexity to the last digit: the file says what the run used.
"""
import json
import pathlib
import shutil
import sys

import numpy as np
from safetensors import safe_open

source, target = map(pathlib.Path, sys.argv[1:3])
config = json.loads((source / "config.json").read_text())
quant = config.pop("quantization_config")
bits = quant["bits"]
assert quant["quant_method"] == "gptq" and quant["checkpoint_format"] == "gptq"


def unpack(words, count):
    """[rows, words] of 32 bits as a little-endian bit stream along each row -> [rows, count] codes."""
    stream = (words.view(np.uint32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    stream = stream.reshape(words.shape[0], -1)[:, : count * bits].reshape(words.shape[0], count, bits)
    return (stream << np.arange(bits, dtype=np.uint32)).sum(axis=2).astype(np.int32)


# Everything that is not quantized is copied as bytes: numpy knows no bfloat16.
raw, tensors, quantized = {}, {}, set()
for path in sorted(source.glob("*.safetensors")):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, info in header.items():
        begin, end = info["data_offsets"]
        raw[name] = (info["dtype"], info["shape"], data[8 + length + begin : 8 + length + end])
    with safe_open(path, "np") as file:
        for name in header:
            if name.endswith((".qweight", ".qzeros", ".scales", ".g_idx")):
                tensors[name] = file.get_tensor(name)
                quantized.add(name.rsplit(".", 1)[0])

out = {name: part for name, part in raw.items() if name not in tensors}
for module in sorted(quantized):
    part = {key: tensors[f"{module}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")}
    inputs, outputs = part["g_idx"].shape[0], part["scales"].shape[1]
    codes = unpack(np.ascontiguousarray(part["qweight"].T), inputs)  # [outputs, inputs]
    zeros = unpack(part["qzeros"], outputs) + 1  # format v1 stores zero - 1; [groups, outputs]
    scales = part["scales"].astype(np.float32)
    group = part["g_idx"]
    weight = scales.T[:, group] * (codes - zeros.T[:, group]).astype(np.float32)
    out[f"{module}.weight"] = ("F32", list(weight.shape), weight.astype("<f4").tobytes())

target.mkdir(parents=True)
for path in source.iterdir():
    if path.suffix not in (".safetensors", ".csv") and "quantize_config" not in path.name:
        shutil.copy(path, target)
(target / "config.json").write_text(json.dumps(config, indent=2))
for name in ("model.safetensors.index.json",):
    (target / name).unlink(missing_ok=True)
header, offset = {"__metadata__": {"format": "pt"}}, 0
for name, (dtype, shape, data) in out.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
    offset += len(data)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(target / "model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for _, _, data in out.values():
        file.write(data)
print(f"{len(quantized)} layers of {bits} bits decoded into {target}")
