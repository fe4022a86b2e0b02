"""Rows of token ids: what models are calibrated on and asked about."""

import json
import pathlib

from tokenizers import Tokenizer

from ours import ROOT

DEMO = ROOT / "web" / "demo"


def windows(tokenizer, file, count, length):
    text = (DEMO / file).read_text(encoding="utf-8")[: 40 * count * length]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) >= count * length, f"{file} is too short"
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def rows_of(model):
    """Of a model with a tokenizer: 4 x 64 tokens to calibrate on, 2 x 64 others to ask about."""
    tokenizer = Tokenizer.from_file(str(pathlib.Path(model, "tokenizer.json")))
    return {
        "calibration": windows(tokenizer, "calibration.txt", 4, 64),
        "evaluation": windows(tokenizer, "evaluation.txt", 2, 64),
    }


def random_rows(vocabulary, count, length, seed):
    """Of a model of random weights: numbers of a small generator."""
    state = seed
    rows = []
    for _ in range(count):
        row = []
        for _ in range(length):
            state = (1664525 * state + 1013904223) % 2**32
            row.append((state >> 8) % vocabulary)
        rows.append(row)
    return rows


def vocabulary(model):
    config = json.loads(pathlib.Path(model, "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]
