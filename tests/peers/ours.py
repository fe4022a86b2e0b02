"""The program under test: runs it, and reads the logits that it writes."""

import json
import os
import pathlib
import subprocess

from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("HALFTONE") or str(
    pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "halftone"
)


class Refused(Exception):
    """The program said no; the message is its own."""


def halftone(*args, ok=(0,)):
    """Its standard output. Raises Refused with what it said where its exit code is none of `ok`."""
    done = subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True)
    if done.returncode in ok:
        return done.stdout
    said = [line for line in done.stderr.splitlines() if line.startswith(("halftone:", "error:"))]
    raise Refused(said[-1] if said else f"exit code {done.returncode}: {' '.join(done.stderr[-300:].split())}")


def version():
    return halftone("--version").strip()


def write_rows(path, rows):
    """Rows of token ids as calibration or evaluation text."""
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def quantize(model, out, rows, options):
    """`rows` is a file of rows of token ids."""
    halftone("quantize", model, "--out", out, "--calibration", rows, "--device", "cpu", "--json", *options)


def logits(directory, rows, scratch):
    """[tokens, vocabulary] for a file of rows, and the perplexity."""
    file = scratch / "logits.safetensors"
    said = halftone("eval", directory, "--text", rows, "--logits", file, "--device", "cpu", "--json")
    return load_file(file)["logits"], json.loads(said)["perplexity"]
