"""Checkpoints that GPTQModel and llm-compressor write themselves, read by Halftone."""

import math
import os
import shutil
import time
from dataclasses import dataclass

import families
import loaders
import ours
import torch
from schemes import LIMIT

PROMPT = "The whale"


@dataclass
class Result:
    """One row of the table."""

    model: str
    maker: str
    scheme: str
    layers: str = ""
    perplexity: float | None = None
    # Of the loader's logits in f32, and their largest difference from Halftone's.
    theirs: float | None = None
    wide: float | None = None
    text: str = ""
    refused: str = ""

    @property
    def failed(self):
        return not self.refused and (self.wide is None or not self.wide <= LIMIT or not self.text)

    def cells(self):
        start = [self.model, self.maker, self.scheme]
        if self.wide is None:
            return [*start, f"{'FAILED: ' if self.failed else ''}{self.refused or self.layers}", "", "", ""]
        state = "FAILED: " if self.failed else ""
        return [
            *start, f"{state}{self.perplexity:.4f}", f"{self.theirs:.4f}", f"{self.wide:.1e}", self.text,
        ]  # fmt: skip


class Clock:
    """What has passed since it was made: seconds, and seconds of this process on all processors."""

    def __init__(self):
        self.start = time.monotonic(), time.process_time()

    def read(self):
        return time.monotonic() - self.start[0], time.process_time() - self.start[1]


def by_gptqmodel(model, out, rows, options):
    """What the clock says from the model's directory to the saved result."""
    from gptqmodel import GPTQModel, QuantizeConfig

    # It leaves a folder of logs where it runs.
    os.chdir(out.parent)
    clock = Clock()
    quantizer = GPTQModel.load(str(model), QuantizeConfig(**options), device="cpu")
    quantizer.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    quantizer.save(str(out))
    return clock.read()


def by_llm_compressor(model, out, rows, options):
    """What the clock says from the model's directory to the saved result."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    clock = Clock()
    options = dict(options)
    actorder = options.pop("actorder", "static")
    weights = QuantizationArgs(type="int", strategy="group", **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"], actorder=actorder)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(
        model=dense, dataset=data, recipe=recipe, max_seq_length=len(rows[0]), num_calibration_samples=len(rows)
    )
    dense.save_pretrained(out, save_compressed=True)
    return clock.read()


MADE = [
    ("GPTQModel", by_gptqmodel, "4 bits, group 64", {"bits": 4, "group_size": 64}),
    ("GPTQModel", by_gptqmodel, "4 bits, group 64, desc_act (g_idx)",
     {"bits": 4, "group_size": 64, "desc_act": True, "act_group_aware": False}),
    ("GPTQModel", by_gptqmodel, "4 bits, group 32, asym", {"bits": 4, "group_size": 32, "sym": False}),
    ("GPTQModel", by_gptqmodel, "4 bits, group 32, asym, gptq_v2",
     {"bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2"}),
    ("GPTQModel", by_gptqmodel, "3 bits, group 64", {"bits": 3, "group_size": 64}),
    ("GPTQModel", by_gptqmodel, "8 bits, rows", {"bits": 8, "group_size": -1, "act_group_aware": False}),
    ("llm-compressor", by_llm_compressor, "4 bits, group 64, sym",
     {"num_bits": 4, "group_size": 64, "symmetric": True}),
    ("llm-compressor", by_llm_compressor, "4 bits, group 64, asym",
     {"num_bits": 4, "group_size": 64, "symmetric": False}),
    ("llm-compressor", by_llm_compressor, "8 bits, group 128, sym",
     {"num_bits": 8, "group_size": 128, "symmetric": True}),
]  # fmt: skip


def perplexity(logits, rows):
    """exp of the mean of -ln p over what each row predicts."""
    total, count, start = 0.0, 0, 0
    for row in rows:
        of_row = logits[start : start + len(row) - 1]
        total += torch.nn.functional.cross_entropy(of_row, torch.tensor(row[1:]), reduction="sum").item()
        count += len(row) - 1
        start += len(row)
    return math.exp(total / count)


def one(result, make, options, model, rows, rows_file, scratch):
    out = scratch / "theirs"
    shutil.rmtree(out, ignore_errors=True)
    loaders.apart(make, model.resolve(), out.resolve(), rows["calibration"], options)
    # Neither writes everything that the model came with.
    for path in model.iterdir():
        if path.name.startswith("tokenizer") and not (out / path.name).exists():
            shutil.copy(path, out)
    want, result.perplexity = ours.logits(out, rows_file, scratch)
    said = ours.halftone(
        "generate", out, "--prompt", PROMPT, "--greedy", "--max-tokens", 12, "--device", "cpu"
    )
    result.text = " ".join(said.split())
    kind, loader = (
        ("gptq", loaders.gptqmodel_loads)
        if make is by_gptqmodel
        else ("compressed-tensors", loaders.transformers_loads)
    )
    found, _, wide = loaders.load(loader, out, kind, rows["evaluation"])
    result.layers = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
    result.theirs = perplexity(wide, rows["evaluation"])
    result.wide = (wide - want).abs().max().item()


# Small models whose tensors GPTQModel calls otherwise than their files do.
RENAMED = ["phi3", "mixtral", "qwen2_moe"]


def told(result, make, options, model, rows, scratch, tell):
    rows_file = ours.write_rows(scratch / "rows.jsonl", rows["evaluation"])
    try:
        one(result, make, options, model, rows, rows_file, scratch)
    except Exception as error:  # whatever either says is the answer
        result.layers = f"{type(error).__name__}: {' '.join(str(error).split())}"[:250]
    tell(result)
    return result


def all(model, name, rows, scratch, tell):
    results = [
        told(Result(name, maker, scheme), make, options, model, rows, scratch, tell)
        for maker, make, scheme, options in MADE
    ]
    maker, make, scheme, options = MADE[0]
    options = options | {"group_size": 32}
    for name in RENAMED:
        small = families.with_tokenizer(families.GOLDENS / name, scratch / "model")
        rows = families.rows_of(small)
        result = Result(name, maker, "4 bits, group 32")
        results.append(told(result, make, options, small, rows, scratch, tell))
    return results
