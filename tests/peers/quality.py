"""What GPTQModel, llm-compressor and Halftone lose on the same tokens, in their defaults and in their best settings.

Every program is given the token ids that `halftone tokens` prints for a seed, and every result is judged by
`halftone eval` on the same text, so that nothing differs but the quantization. Each outcome is a line of
quality.jsonl as soon as it is known, and quality.md the table of what is: a run that was stopped goes on where it was,
a line that is deleted is measured again, and so are Halftone's own when the program is another.
"""

import hashlib
import json
import pathlib
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import loaders
import ours
import report
import theirs

CLOCKS = ("seconds", "cpu_seconds")
# A process of theirs that takes longer is given up.
LIMIT_SECONDS = 4 * 3600


@dataclass
class Method:
    """A program with options, which are those of its own `make`."""

    program: str
    setting: str
    make: Callable
    options: dict | list

    @property
    def is_ours(self):
        return self.make is by_halftone


@dataclass
class Outcome:
    """What was measured, and what came of it."""

    what: str
    said: str
    failed: bool = False

    def cells(self):
        return [self.what, f"{'FAILED: ' if self.failed else ''}{self.said}"]


def by_halftone(model, out, rows_file, bits, group, options):
    """Seconds of the whole process, and its seconds on all processors."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ours.quantize(model, out, rows_file, ["--bits", bits, "--group-size", group, *options])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - start, busy


def gptqmodel(model, out, rows, bits, group, options):
    return theirs.by_gptqmodel(model, out, rows, {"bits": bits, "group_size": group} | options)


def llm_compressor(model, out, rows, bits, group, options):
    scheme = {"num_bits": bits, "group_size": group, "symmetric": True}
    return theirs.by_llm_compressor(model, out, rows, scheme | options)


BEST = {"mse": 2.4, "desc_act": True, "act_group_aware": False, "damp_percent": 0.01}

METHODS = [
    Method("Halftone", "rtn", by_halftone, ["--preset", "rtn"]),
    Method("Halftone", "fast", by_halftone, ["--preset", "fast"]),
    Method("Halftone", "default", by_halftone, []),
    Method("GPTQModel", "default", gptqmodel, {}),
    Method("GPTQModel", "mse 2.4, desc_act, damp 0.01", gptqmodel, BEST),
    Method("GPTQModel", "mse 2.4, desc_act, damp 0.01, gptaq", gptqmodel, BEST | {"gptaq": {"alpha": 0.25}}),
    Method("llm-compressor", "default", llm_compressor, {}),
    Method("llm-compressor", "observer mse", llm_compressor, {"observer": "mse"}),
    Method("llm-compressor", "observer imatrix_mse", llm_compressor, {"observer": "imatrix_mse"}),
]


class Lines:
    """The file of outcomes, each a line of its own."""

    def __init__(self, path):
        self.path = path
        text = path.read_text() if path.exists() else ""
        # A line that was cut when the machine went down is measured again.
        self.known = [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def find(self, **key):
        return [line for line in self.known if key.items() <= line.items()]

    def add(self, line):
        self.known.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:12]


class Grid:
    """One model with one set of texts and sizes."""

    def __init__(self, arguments, name, scratch):
        self.model, self.scratch = arguments.model, scratch
        self.arguments = arguments
        self.lines = Lines(arguments.work / "quality.jsonl")
        self.file = arguments.work / "quality.md"
        # What must be equal of two outcomes that stand in one table.
        self.place = {
            "model": name, "group_size": arguments.group_size,
            "samples": arguments.samples, "seq_len": arguments.seq_len,
            "calibration": digest(arguments.calibration), "evaluation": digest(arguments.evaluation),
        }  # fmt: skip
        self.build = digest(ours.PROGRAM)
        self.bits = [int(bits) for bits in arguments.bits.split(",")]
        self.seeds = [int(seed) for seed in arguments.seeds.split(",")]

    def key(self, method, bits, seed):
        key = self.place | {"program": method.program, "setting": method.setting, "bits": bits, "seed": seed}
        return key | {"build": self.build} if method.is_ours else key

    def judge(self, directory):
        """(perplexity, tokens that were judged)"""
        arguments = self.arguments
        said = ours.halftone(
            "eval", directory, "--text", arguments.evaluation, "--seq-len", arguments.seq_len, "--device", "cpu",
            "--json",
        )  # fmt: skip
        said = json.loads(said)
        return said["perplexity"], said["tokens"]

    def dense(self):
        """The 16-bit model's outcome."""
        key = self.place | {"program": "16 bits"}
        if not self.lines.find(**key):
            perplexity, tokens = self.judge(self.model)
            self.lines.add(key | {"perplexity": perplexity, "tokens": tokens})
        return self.lines.find(**key)[0]

    def rows_of(self, seed):
        """The file of rows of token ids that everyone gets, and the rows."""
        arguments = self.arguments
        said = ours.halftone(
            "tokens", self.model, "--calibration", arguments.calibration, "--samples", arguments.samples,
            "--seq-len", arguments.seq_len, "--seed", seed,
        )  # fmt: skip
        file = self.scratch / "calibration.jsonl"
        file.write_text(said)
        return file, [json.loads(line)["input_ids"] for line in said.splitlines()]

    def measure(self, method, bits, seed, tokens):
        """One outcome as a line; `tokens` is what everyone must have been judged on."""
        rows_file, rows = self.rows_of(seed)
        out = self.scratch / "quantized"
        shutil.rmtree(out, ignore_errors=True)
        common = (bits, self.arguments.group_size, method.options)
        if method.is_ours:
            clock, version = method.make(self.model, out, rows_file, *common), ours.version()
        else:
            call = (method.make, self.model.resolve(), out.resolve(), rows, *common)
            clock = loaders.apart(*call, limit=LIMIT_SECONDS)
            version = report.version(method.program)
            # They write tokenizers of their own making.
            for path in self.model.glob("tokenizer*"):
                shutil.copy(path, out)
        perplexity, judged = self.judge(out)
        if judged != tokens:
            raise ValueError(f"{judged} tokens were judged, and {tokens} of the 16-bit model")
        key = self.key(method, bits, seed)
        seconds, busy = (round(value, 1) for value in clock)
        return key | {"perplexity": perplexity, "seconds": seconds, "cpu_seconds": busy, "version": version}

    def run(self, only, tell):
        """Measures what is not known yet. Returns all outcomes."""
        tokens, outcomes = self.dense()["tokens"], []
        for seed in self.seeds:
            for bits in self.bits:
                for method in METHODS:
                    name = f"{method.program}, {method.setting}"
                    # Rounding looks at no sample.
                    once = method.setting == "rtn" and seed != self.seeds[0]
                    if only in name and not once:
                        what = f"{self.place['model']}, {bits} bits, seed {seed}, {name}"
                        outcomes.append(self.one(what, method, bits, seed, tokens))
                        tell(outcomes[-1])
                        self.file.write_text(f"{self.legend()}\n\n{self.table()}\n")
        return outcomes

    def one(self, what, method, bits, seed, tokens):
        """An outcome, measured unless it is known."""
        found = self.lines.find(**self.key(method, bits, seed))
        if not found:
            try:
                found = [self.measure(method, bits, seed, tokens)]
            except Exception as error:  # whatever either says is the answer
                return Outcome(what, f"{type(error).__name__}: {' '.join(str(error).split())}"[:400], failed=True)
            self.lines.add(found[0])
        return Outcome(what, f"{found[0]['perplexity']:.4f} in {found[0]['seconds']:.0f} s ({found[0]['cpu_seconds']:.0f} of CPU)")

    def known(self, method, bits):
        """Perplexity and seconds by seed, of all seeds that were ever measured."""
        key = self.key(method, bits, None)
        del key["seed"]
        return {line["seed"]: line for line in self.lines.find(**key)}

    def table(self):
        dense = self.dense()["perplexity"]
        compared = [method for method in METHODS if method.is_ours and method.setting != "rtn"]
        head = ["bits", "program", "setting", "seeds", "perplexity", "±", "from 16 bits", "seconds", "CPU seconds"]
        head += [f"{method.setting} / it" for method in compared]
        rows = [["16", "", "", "", f"{dense:.4f}", "", "", "", "", *("" for _ in compared)]]
        for bits in sorted({line["bits"] for line in self.lines.find(**self.place) if "bits" in line}, reverse=True):
            for method in METHODS:
                found = self.known(method, bits)
                if not found:
                    continue
                values = [line["perplexity"] for line in found.values()]
                rows.append([
                    str(bits), method.program, method.setting, str(len(found)),
                    f"{statistics.mean(values):.4f}", f"{spread(values):.4f}",
                    f"{statistics.mean(values) - dense:.4f}",
                    *(f"{statistics.mean(line[name] for line in found.values()):.0f}" for name in CLOCKS),
                    *("" if method.is_ours else self.ratio(ours, found, bits, dense) for ours in compared),
                ])  # fmt: skip
        return report.table(head, rows)

    def ratio(self, method, found, bits, dense):
        """Ours over theirs, of distances to 16 bits, seed by seed: mean ± spread."""
        own = self.known(method, bits)
        ratios = [
            (own[seed]["perplexity"] - dense) / (line["perplexity"] - dense)
            for seed, line in found.items()
            if seed in own
        ]
        return f"{statistics.mean(ratios):.3f} ± {spread(ratios):.3f}" if ratios else ""

    def legend(self):
        made = sorted({line["version"] for line in self.lines.find(**self.place) if "version" in line})
        place = self.place
        return (
            f"{place['model']}, group {place['group_size']}, {place['samples']} × {place['seq_len']} tokens to calibrate "
            f"on (`{self.arguments.calibration.name}`, the same ids for all), perplexity by `halftone eval` on "
            f"`{self.arguments.evaluation.name}` in windows of {place['seq_len']}. Symmetric codes. Mean over seeds of "
            "the samples with the sample standard deviation; seconds from the 16-bit directory to the saved result, "
            "without Python's imports, and those of all processors together; the last columns are Halftone's distance to 16 bits as a share of the row's, "
            f"seed by seed. Made by {', '.join(made)}."
        )


def spread(values):
    """Sample standard deviation, 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def all(arguments, name, scratch, tell):
    """(legend, table, outcomes)"""
    grid = Grid(arguments, name, scratch)
    outcomes = grid.run(arguments.only, tell)
    return grid.legend(), grid.table(), outcomes
