"""Load a GPTQ checkpoint in Transformers and measure its perplexity there.

    pip install torch transformers optimum gptqmodel
    python scripts/load_gptq.py OUT_DIR rows.jsonl

`rows.jsonl` has one {"input_ids": [...]} a line, as `halftone eval OUT_DIR --text rows.jsonl` takes it too.
The two figures differ by what bf16 arithmetic in Transformers rounds away.

This is a check from outside: nothing else in the repository uses it.
"""

import json
import math
import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cpu")
total, count = 0.0, 0
with torch.no_grad():
    for line in open(sys.argv[2], encoding="utf-8"):
        ids = torch.tensor(json.loads(line)["input_ids"])
        logits = model(ids[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
layers = sorted({type(layer).__name__ for layer in model.modules() if hasattr(layer, "qweight")})
print(f"perplexity {math.exp(total / count):.4f} over {count} predicted tokens, layers as {', '.join(layers)}")
