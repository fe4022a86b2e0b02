"""Results as lines while they come, and as tables at the end."""

import importlib.metadata
import json
import platform
from dataclasses import asdict

import ours

PACKAGES = ["torch", "transformers", "optimum", "gptqmodel", "compressed-tensors", "llmcompressor"]


def versions():
    found = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return f"{ours.version()}; Python {platform.python_version()}, {', '.join(found)}; CPU"


def version(program):
    """Of one of the programs, with its name; their packages are called like them, in small letters."""
    package = program.lower().replace("-compressor", "compressor")
    return f"{program} {importlib.metadata.version(package)}"


def number(value, form):
    return "" if value is None else format(value, form)


def cells(result):
    start = [result.model, result.format, result.scheme, result.loader]
    if result.refused:
        return [*start, result.refused, "", "", ""]
    state = "FAILED: " if result.failed else ""
    if result.wide is None:
        return [*start, f"{state}{result.layers}", "", "", ""]
    return [
        *start, f"{state}{result.layers}",
        number(result.wide, ".1e"), number(result.own, ".2g"), number(100 * result.agree, ".1f"),
    ]  # fmt: skip


def tell(result):
    """A line as soon as it is known."""
    print(" | ".join(result.cells() if hasattr(result, "cells") else cells(result)), flush=True)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows])


HEAD = ["model", "format", "scheme", "loader", "layers", "in f32", "as loaded", "same token, %"]
LEGEND = (
    "Largest difference of logits from Halftone's own of the same file: of the loader's modules computing in f32, "
    "and as the loader computes by itself (16 bits); and the share of tokens whose likeliest successor is the same."
)


class Document:
    def __init__(self, work):
        self.work, self.parts, self.results = work, [], []

    def schemes(self, results):
        self.add("Formats and schemes", LEGEND, HEAD, [cells(result) for result in results], results)

    def families(self, results):
        self.add("Families", LEGEND, HEAD, [cells(result) for result in results], results)

    def theirs(self, results):
        head = ["model", "made by", "scheme", "perplexity here", "there", "in f32", "text here"]
        self.add("Other programs' files read by Halftone", "", head, [result.cells() for result in results], results)

    def broken(self, results):
        text = "A copy with one fault of each kind, and the line that `halftone inspect --check` prints about it."
        self.add("Broken checkpoints", text, ["of", "what is wrong", "said"], [r.cells() for r in results], results)

    def quality(self, legend, table, outcomes):
        failed = "".join(f"\n\nFAILED: {one.what}: {one.said}" for one in outcomes if one.failed)
        self.parts.append(f"## Loss on the same tokens\n\n{legend}\n\n{table}{failed}\n")
        self.results += outcomes

    def add(self, title, text, head, rows, results):
        self.parts.append(f"## {title}\n\n{text}\n\n{table(head, rows)}\n")
        self.results += results

    @property
    def count(self):
        return len(self.results)

    @property
    def failed(self):
        return sum(result.failed for result in self.results)

    def write(self):
        text = f"# Peers\n\n{versions()}\n\n" + "\n".join(self.parts)
        (self.work / "results.md").write_text(text)
        numbers = json.dumps([asdict(result) for result in self.results], indent=1)
        (self.work / "results.json").write_text(numbers + "\n")
