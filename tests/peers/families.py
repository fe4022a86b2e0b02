"""A small model of each family, quantized by Halftone into every format and loaded by others."""

import shutil

import texts
from ours import ROOT
from schemes import FORMATS, of_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GOLDENS = ROOT / "tests" / "goldens" / "models"

SCHEMES = {
    "4 bits, group 32": ["--group-size", "32"],
    "4 bits, group 32, asym": ["--group-size", "32", "--asym"],
}
# A head that is a matrix of its own may be quantized too; this model has one.
WITH_HEAD = {
    "4 bits, group 32, lm_head": ["--group-size", "32", "--quantize-lm-head"],
    "4 bits, group 32, lm_head 8 bits": ["--group-size", "32", "--quantize-lm-head", "--override", "lm_head=bits:8"],
}


def with_tokenizer(golden, copy):
    """The golden models have none, but loaders want one: a word for each id."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / name, copy)
    words = {f"t{id}": id for id in range(texts.vocabulary(golden))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    return copy


def rows_of(model):
    vocabulary = texts.vocabulary(model)
    return {
        "calibration": texts.random_rows(vocabulary, 16, 64, 1),
        "evaluation": texts.random_rows(vocabulary, 2, 40, 2),
    }


def all(scratch, only, tell):
    results = []
    for golden in sorted(path for path in GOLDENS.iterdir() if path.is_dir() and only in path.name):
        model = with_tokenizer(golden, scratch / "model")
        rows = rows_of(model)
        schemes = SCHEMES | (WITH_HEAD if golden.name == "llama" else {})
        results += of_model(model, golden.name, rows, scratch, schemes, FORMATS, tell)
    return results
