"""Every scheme and format: quantized by Halftone, loaded by others, logits compared."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import ours
from loaders import LOADERS, Refused, load

FORMATS = ["gptq", "gptq_v2", "compressed-tensors"]

# What a scheme is called in the table, and the options that make it.
SCHEMES = {
    "4 bits, group 128": [],
    "4 bits, group 64": ["--group-size", "64"],
    "4 bits, group 32": ["--group-size", "32"],
    "4 bits, rows": ["--group-size", "-1"],
    "4 bits, group auto": ["--group-size", "auto"],
    "4 bits, group 64, asym": ["--group-size", "64", "--asym"],
    "4 bits, rows, asym": ["--group-size", "-1", "--asym"],
    "8 bits, group 64": ["--bits", "8", "--group-size", "64"],
    "8 bits, rows, asym": ["--bits", "8", "--group-size", "-1", "--asym"],
    "3 bits, group 64": ["--bits", "3", "--group-size", "64"],
    "3 bits, group 32, asym": ["--bits", "3", "--group-size", "32", "--asym"],
    "2 bits, group 32": ["--bits", "2", "--group-size", "32"],
    "2 bits, group 32, asym": ["--bits", "2", "--group-size", "32", "--asym"],
    "4 bits, group 32, rtn": ["--group-size", "32", "--preset", "rtn"],
    "4 bits, group 64, reference": ["--group-size", "64", "--preset", "reference"],
    "4 bits, group 64, desc_act, static groups": [
        "--group-size", "64", "--preset", "reference", "--desc-act", "--static-groups",
    ],
    "4 bits, group 64, desc_act (g_idx)": ["--group-size", "64", "--preset", "reference", "--desc-act"],
    "4 bits, group 32, asym, desc_act (g_idx)": [
        "--group-size", "32", "--preset", "reference", "--desc-act", "--asym",
    ],
    "4 bits, group 64, down_proj 8 bits of 32, o_proj left": [
        "--group-size", "64", "--override", "down_proj=bits:8,group_size:32", "--skip", "o_proj",
    ],
}  # fmt: skip

# The largest difference of logits in f32 that reading the same file can make.
LIMIT = 2e-3
LIMIT_ROUNDED = 2e-2

# Small models with experts.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@dataclass
class Result:
    """One row of the table."""

    model: str
    format: str
    scheme: str
    loader: str
    # How loaded layers are called there, or what was said instead of loading.
    layers: str = ""
    # Largest |difference| of logits, in f32 and as the loader computes by itself.
    wide: float | None = None
    own: float | None = None
    # Largest |logit|, to judge the differences by.
    largest: float | None = None
    # Share of tokens with the same likeliest next one, in f32.
    agree: float | None = None
    # Not a fault of ours: known and told, in the words of who refused.
    refused: str = ""

    @property
    def failed(self):
        # Transformers turns compressed experts into weights of the scales' type, bf16, whatever it loads as.
        rounded = self.format == "compressed-tensors" and self.model in MIXTURES
        limit = LIMIT_ROUNDED if rounded else LIMIT
        return not self.refused and (self.wide is None or not self.wide <= limit)




@dataclass
class Known:
    """Something that a loader cannot do, which is no failure of ours but must be told."""

    what: str
    # A part of the loader's own message; nothing where it loads without a word what it cannot read.
    message: str
    applies: Callable[[Result, dict], bool]


def is_gptq(result):
    return result.format != "compressed-tensors"


KNOWN = [
    Known(
        "GPTQModel takes asymmetric grids in the first format of no other program (gptq_v2 it takes)",
        "is only supported if produced by gptqmodel",
        lambda result, quant: result.loader == "GPTQModel" and result.format == "gptq" and not quant["sym"],
    ),
    Known(
        "compressed-tensors has given up actorder \"group\" (static groups it takes)",
        "actorder",
        lambda result, quant: not is_gptq(result) and '"group"' in json.dumps(quant),
    ),
    Known(
        "Transformers does not read \"dynamic\", what differs from layer to layer (GPTQModel does)",
        "",
        lambda result, quant: result.loader == "Transformers" and bool(quant.get("dynamic")),
    ),
    Known(
        "Transformers leaves a GPTQ head unread (GPTQModel and compressed-tensors read it)",
        "",
        lambda result, quant: result.loader == "Transformers" and bool(quant.get("lm_head")),
    ),
    Known(
        "Transformers 5 keeps the experts of a layer in one tensor, and optimum replaces none of them by GPTQ layers "
        "(compressed-tensors does)",
        "",
        lambda result, quant: result.loader == "Transformers" and is_gptq(result) and result.model in MIXTURES,
    ),
    Known(
        "Transformers 5 leaves out the zero points of experts when it takes them together (symmetric ones it loads)",
        "automatic conversion of the weights",
        lambda result, quant: not is_gptq(result) and result.model in MIXTURES and "asym" in result.scheme,
    ),
    Known(
        "Transformers cannot fill the weights of GPTQ layers of this family (GPTQModel loads them)",
        "has no attribute 'normal_'",
        lambda result, quant: result.loader == "Transformers" and result.model == "gpt2",
    ),
    Known(
        "GPTQModel 7.7 loads this family by names that only its own files have: mlp.experts.N.gate_proj, or phi3's "
        "gate and up apart (Transformers loads phi3)",
        "Missing required quantized weights",
        lambda result, quant: result.loader == "GPTQModel" and result.model in ("mixtral", "phi3", "phi3_longrope"),
    ),
    Known(
        "GPTQModel 7.7 looks for this family's head under another name than its files have, embed_out, and leaves it "
        "unfilled (Transformers loads it)",
        "",
        lambda result, quant: result.loader == "GPTQModel" and result.model == "gpt_neox",
    ),
    Known(
        "GPTQModel 7.7 leaves the block without experts among those with them unfilled",
        "",
        lambda result, quant: result.loader == "GPTQModel" and result.model == "qwen3_moe",
    ),
]

# What Halftone itself refuses before any work, as it should.
REFUSED = [
    # A group that does not divide a layer.
    "does not divide",
    # Layers that loaders of compressed-tensors do not replace.
    "has Conv1D layers, which compressed-tensors does not replace",
]


def judge(result, message, quant):
    """Notes a known refusal, or a known wrong reading."""
    for known in KNOWN:
        if known.message in message and known.applies(result, quant):
            result.refused = f"known: {known.what}. {message}"[:400]
            return


def compared(result, want, found, own, wide):
    result.layers = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
    result.largest = want.abs().max().item()
    result.wide = (wide - want).abs().max().item()
    result.own = (own - want).abs().max().item()
    result.agree = (wide.argmax(1) == want.argmax(1)).float().mean().item()
    return result


def by_all_loaders(model, directory, format, scheme, rows, rows_file, scratch):
    """A result for each loader of the format."""
    try:
        want, _ = ours.logits(directory, rows_file, scratch)
    except ours.Refused as refused:
        return [Result(model, format, scheme, "Halftone itself", layers=str(refused))]
    quant = json.loads((directory / "config.json").read_text())["quantization_config"]
    results = []
    for name, loader in LOADERS[format]:
        result = Result(model, format, scheme, name)
        try:
            compared(result, want, *load(loader, directory, format, rows))
            if result.failed:
                judge(result, "", quant)
        except Refused as refused:
            result.layers = str(refused)[:250]
            judge(result, str(refused), quant)
        results.append(result)
    return results


def of_model(model, name, rows, scratch, schemes=SCHEMES, formats=FORMATS, tell=print):
    """Quantizes `model` by every scheme into every format."""
    calibration = ours.write_rows(scratch / "calibration.jsonl", rows["calibration"])
    rows_file = ours.write_rows(scratch / "rows.jsonl", rows["evaluation"])
    results = []
    for scheme, options in schemes.items():
        for format in formats:
            out = scratch / "quantized"
            shutil.rmtree(out, ignore_errors=True)
            try:
                ours.quantize(model, out, calibration, [*options, "--format", format])
            except ours.Refused as refused:
                known = f"known: {refused}" if any(part in str(refused) for part in REFUSED) else ""
                new = [Result(name, format, scheme, "–", layers=str(refused), refused=known)]
            else:
                new = by_all_loaders(name, out, format, scheme, rows["evaluation"], rows_file, scratch)
            for result in new:
                tell(result)
            results += new
    return results
