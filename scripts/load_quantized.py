"""Load a quantized checkpoint in Transformers and measure its perplexity there.

    pip install torch transformers optimum gptqmodel    # for the GPTQ formats
    pip install torch transformers compressed-tensors   # for compressed-tensors
    python scripts/load_quantized.py OUT_DIR rows.jsonl [dtype]

`rows.jsonl` has one {"input_ids": [...]} a line, as `halftone eval OUT_DIR --text rows.jsonl` takes it too.
The two figures differ by what 16-bit arithmetic in Transformers rounds away; with `float32`, where the loader
takes it, they agree to four digits or so.

This is a check from outside: nothing else in the repository uses it.
"""

import json
import math
import pathlib
import sys

import torch

dtype = getattr(torch, sys.argv[3]) if len(sys.argv) > 3 else "auto"
config = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())["quantization_config"]
if config.get("dynamic"):
    # Transformers does not read what differs from layer to layer in GPTQ; GPTQModel itself does.
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(sys.argv[1], backend=BACKEND.TORCH, device="cpu", dtype=dtype).model
else:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cpu", dtype=dtype)
total, count = 0.0, 0
with torch.no_grad():
    for line in open(sys.argv[2], encoding="utf-8"):
        ids = torch.tensor(json.loads(line)["input_ids"])
        logits = model(ids[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
kinds = {}
for layer in model.modules():
    if hasattr(layer, "qweight"):
        kind = f"{type(layer).__name__} of {layer.bits} bits"
    elif getattr(layer, "quantization_scheme", None) is not None:
        kind = f"compressed {type(layer).__name__} of {layer.quantization_scheme.weights.num_bits} bits"
    elif isinstance(layer, torch.nn.Linear):
        kind = "dense Linear"
    else:
        continue
    kinds[kind] = kinds.get(kind, 0) + 1
layers = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
print(f"perplexity {math.exp(total / count):.4f} over {count} predicted tokens; layers: {layers}")
