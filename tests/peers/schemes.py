"""Every scheme and format: quantized by Halftone, loaded by others, logits compared."""

import shutil
from dataclasses import dataclass, field

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
    notes: list = field(default_factory=list)

    @property
    def failed(self):
        return not self.refused and (self.wide is None or not self.wide <= LIMIT)


# What loaders cannot load, by a part of their own message, with what is to be known about it. Anything
# else that they refuse is a failure.
KNOWN = {
    "does not divide": "refused by Halftone before any work, as it should be",
}


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
    results = []
    for name, loader in LOADERS[format]:
        result = Result(model, format, scheme, name)
        try:
            compared(result, want, *load(loader, directory, format, rows))
        except Exception as error:  # whatever a loader raises is its answer
            result.layers = said(error)
            if any(part in str(error) for part in KNOWN):
                result.refused = result.layers
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
                message = str(refused)
                known = any(part in message for part in KNOWN)
                new = [Result(name, format, scheme, "–", layers=message, refused=message if known else "")]
            else:
                new = by_all_loaders(name, out, format, scheme, rows["evaluation"], rows_file, scratch)
            for result in new:
                tell(result)
            results += new
    return results
