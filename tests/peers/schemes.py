"""Every scheme and format: quantized by Halftone, loaded by others, logits compared."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import ours
from loaders import LOADERS, load, said

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
        return not self.refused and (self.wide is None or not self.wide <= LIMIT)




@dataclass
class Known:
    """Something that a loader cannot do, which is no failure of ours but must be told."""

    what: str
    # A part of the loader's own message; nothing where it loads without a word what it cannot read.
    message: str
    applies: Callable[[Result, dict], bool]


KNOWN = [
    Known(
        "GPTQModel takes asymmetric grids in the first format of no other program (gptq_v2 it takes)",
        "is only supported if produced by gptqmodel",
        lambda result, quant: result.loader == "GPTQModel" and result.format == "gptq" and not quant["sym"],
    ),
    Known(
        "compressed-tensors has given up actorder \"group\" (static groups it takes)",
        "actorder",
        lambda result, quant: result.format == "compressed-tensors" and '"group"' in json.dumps(quant),
    ),
    Known(
        "Transformers does not read \"dynamic\", what differs from layer to layer (GPTQModel does)",
        "",
        lambda result, quant: result.loader == "Transformers" and bool(quant.get("dynamic")),
    ),
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
        except Exception as error:  # whatever a loader raises is its answer
            result.layers = said(error)
            judge(result, f"{type(error).__name__}: {' '.join(str(error).split())}", quant)
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
                # A group that does not divide a layer is refused before any work, as it should be.
                known = f"known: {refused}" if "does not divide" in str(refused) else ""
                new = [Result(name, format, scheme, "–", layers=str(refused), refused=known)]
            else:
                new = by_all_loaders(name, out, format, scheme, rows["evaluation"], rows_file, scratch)
            for result in new:
                tell(result)
            results += new
    return results
