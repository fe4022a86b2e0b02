"""A broken copy of each kind, and what `halftone inspect --check` says of it: a transcript.

Each copy differs from a healthy result in one thing that some loader trips over.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import ours
import torch
from safetensors.torch import load_file, save_file


@dataclass
class Result:
    """One kind of damage."""

    kind: str
    healthy: str
    said: str = ""
    # The words that must be there, and whether they were.
    words: str = ""
    found: bool = False

    refused = ""

    @property
    def failed(self):
        return not self.found

    def cells(self):
        state = "" if self.found else f"FAILED, does not say {self.words!r}: "
        return [self.healthy, self.kind, state + self.said]


class Copy:
    """A checkpoint in one file, to be changed."""

    def __init__(self, directory):
        self.directory = directory
        self.tensors = load_file(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())
        self.metadata = {"format": "pt"}

    @property
    def quant(self):
        return self.config["quantization_config"]

    def write(self):
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, self.directory / "model.safetensors", self.metadata)
        (self.directory / "config.json").write_text(json.dumps(self.config, indent=2))
        # Where it is there it repeats the config; only one kind is about that.
        if (self.directory / "quantize_config.json").exists():
            (self.directory / "quantize_config.json").write_text(json.dumps(self.quant, indent=2))

    def of(self, part):
        return [name for name in self.tensors if name.endswith(f".{part}")]


LAYER = "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


def zeros_of_v2(copy):
    for name in copy.of("qzeros"):
        copy.tensors[name].fill_(-0x77777778)  # 0x88888888


def ordered_groups(copy):
    g_idx = copy.tensors[f"{LAYER}.g_idx"]
    copy.tensors[f"{LAYER}.g_idx"] = g_idx.flip(0)


def group_beyond(copy):
    copy.tensors[f"{LAYER}.g_idx"][3] = 99


def cut(part, dimension):
    def change(copy):
        name = f"{LAYER}.{part}"
        copy.tensors[name] = copy.tensors[name].narrow(dimension, 0, copy.tensors[name].shape[dimension] // 2)

    return change


def without(name):
    return lambda copy: copy.tensors.pop(name)


def infinite(part):
    def change(copy):
        copy.tensors[f"{LAYER}.{part}"][0, 0] = float("inf")

    return change


def setting(key, value):
    def change(copy):
        copy.quant[key] = value

    return change


def in_scheme(key, value):
    def change(copy):
        copy.quant["config_groups"]["group_0"]["weights"][key] = value

    return change


def dense(module):
    """Another layer in 16 bits, which no rule leaves alone."""

    def change(copy):
        for name in [name for name in copy.tensors if name.startswith(f"{module}.")]:
            copy.tensors.pop(name)
        copy.tensors[f"{module}.weight"] = torch.zeros(256, 768, dtype=torch.bfloat16)

    return change


def left_alone(copy):
    copy.quant["dynamic"] = {"-:.*down_proj": {}}


def head_twice(copy):
    copy.tensors["lm_head.weight"] = copy.tensors["model.embed_tokens.weight"].clone()


def no_metadata(copy):
    copy.metadata = {}


def other_float(copy):
    copy.tensors[f"{LAYER}.scales"] = copy.tensors[f"{LAYER}.scales"].float()


def not_symmetric(copy):
    copy.tensors[f"{LAYER}.qzeros"].fill_(0x66666666)


def zero_of_zero(copy):
    copy.tensors[f"{LAYER}.qzeros"][0, 0] = -1  # eight zero points of 0, stored as 15


def needless_zero_points(copy):
    packed = copy.tensors[f"{LAYER}.weight_scale"]
    shape = (packed.shape[0] // 8, packed.shape[1])
    copy.tensors[f"{LAYER}.weight_zero_point"] = torch.zeros(shape, dtype=torch.int32)


def wrong_shape_tensor(copy):
    copy.tensors[f"{LAYER}.weight_shape"] = torch.tensor([256, 512])


def renamed_order(copy):
    in_scheme("actorder", "static")(copy)


def ignored_missing(copy):
    copy.quant["ignore"] = []
    dense(LAYER)(copy)


def other_bits(module):
    """A member of a fused group with a scheme of its own."""

    def change(copy):
        # Words of 8-bit codes from words of 4 bits are twice as many.
        for part in ("qweight", "qzeros"):
            tensor = copy.tensors[f"{module}.{part}"]
            copy.tensors[f"{module}.{part}"] = tensor.repeat(2, 1) if part == "qweight" else tensor.repeat(1, 2)
        copy.tensors[f"{module}.qzeros"].fill_(0x7F7F7F7F)
        copy.quant["dynamic"] = {f"+:^{module.replace('.', chr(92) + '.')}$": {"bits": 8}}

    return change


def unfinished(directory):
    (directory / "halftone-journal.json").write_text("{}")


def left_over(directory):
    (directory / "model-00001-of-00002.safetensors.part").write_bytes(b"")


def stale_index(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    tensors = load_file(directory / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    weight_map["model.layers.9.mlp.up_proj.qweight"] = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def no_index(directory):
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors")


def missing_shard(directory):
    stale_index(directory)
    (directory / "model-00001-of-00001.safetensors").unlink()


def cut_file(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def other_small_config(directory):
    file = directory / "quantize_config.json"
    quant = json.loads(file.read_text())
    quant["bits"] = 8
    file.write_text(json.dumps(quant))


def no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


@dataclass
class Kind:
    what: str
    # Of which healthy result.
    healthy: str
    # What must be said.
    words: str
    tensors: Callable | None = None
    files: Callable | None = None


GPTQ, ASYM, COMPRESSED, SMALL = "gptq", "gptq, asym", "compressed-tensors", "gptq, 3 bits, group 16"

KINDS = [
    Kind("zero points 0x88888888 in a v1 file", GPTQ, "stored as gptq_v2 stores them", zeros_of_v2),
    Kind("v1 zero points under \"gptq_v2\"", GPTQ, "stored as gptq stores them", setting("checkpoint_format", "gptq_v2")),
    Kind("sym true, zero points elsewhere", GPTQ, "not in the middle", not_symmetric),
    Kind("a zero point of 0 in a v1 file", ASYM, "zero points of 0", zero_of_zero),
    Kind("g_idx of an order, desc_act false", GPTQ, "does not say so", ordered_groups),
    Kind("g_idx with a group too many", GPTQ, "the group index has group 99", group_beyond),
    Kind("qweight cut", GPTQ, "error: ", cut("qweight", 1)),
    Kind("qzeros cut", GPTQ, "error: ", cut("qzeros", 1)),
    Kind("scales cut", GPTQ, "error: ", cut("scales", 0)),
    Kind("scales missing", GPTQ, "scales", without(f"{LAYER}.scales")),
    Kind("scales in f32", GPTQ, "GPTQ loaders expect F16", other_float),
    Kind("a scale of infinity", GPTQ, "a scale is inf", infinite("scales")),
    Kind("bits 8 in the config, 4 in the words", GPTQ, "error: ", setting("bits", 8)),
    Kind("group_size 128 in the config, 64 in the scales", GPTQ, "error: ", setting("group_size", 128)),
    Kind("lm_head true, head not quantized", GPTQ, "\"lm_head\" is true", setting("lm_head", True)),
    Kind("\"dynamic\" leaves quantized layers alone", GPTQ, "the config leaves it alone", left_alone),
    Kind("a layer in 16 bits that no rule names", GPTQ, "\"dynamic\" does not leave it alone", dense(LAYER)),
    Kind("q_proj of 8 bits, k_proj of 4", GPTQ, "have different schemes", other_bits(Q)),
    Kind("tied head stored too", GPTQ, "stored twice", head_twice),
    Kind("a norm missing", GPTQ, "the tensor is missing", without("model.norm.weight")),
    Kind("metadata without format", GPTQ, "\"format\": \"pt\"", no_metadata),
    Kind("quantize_config.json of other bits", GPTQ, "\"bits\" is 8, but 4", files=other_small_config),
    Kind("a run not finished", GPTQ, "is not finished", files=unfinished),
    Kind("a .part file left over", GPTQ, "left over", files=left_over),
    Kind("tokenizer.json absent", GPTQ, "no tokenizer", files=no_tokenizer),
    Kind("an index that names a tensor too many", GPTQ, "is not in it", files=stale_index),
    Kind("several files without an index", GPTQ, "no model.safetensors.index.json", files=no_index),
    Kind("a shard absent", GPTQ, "shards are absent", files=missing_shard),
    Kind("a file cut short", GPTQ, "error: ", files=cut_file),
    Kind("sizes that fast kernels refuse", SMALL, "fast kernels (Marlin) do not take 3 bits, groups of 16"),
    Kind("sizes that tensor parallelism cannot cut", GPTQ, "tensor parallel over 8 devices does not divide"),
    Kind("weight_packed cut", COMPRESSED, "error: ", cut("weight_packed", 1)),
    Kind("weight_shape of another layer", COMPRESSED, "error: ", wrong_shape_tensor),
    Kind("zero points of a symmetric grid", COMPRESSED, "the grid is symmetric", needless_zero_points),
    Kind("a layer in 16 bits that \"ignore\" does not name", COMPRESSED, "\"ignore\" does not name it", ignored_missing),
    Kind("strategy channel with an actorder", COMPRESSED, "strategy is \"channel\"", in_scheme("strategy", "channel")),
    Kind("actorder group", COMPRESSED, "compressed-tensors 0.19 and later refuse", in_scheme("actorder", "group")),
    Kind("actorder by its new name", COMPRESSED, "earlier loaders refuse", renamed_order),
    Kind("an unknown key in a scheme", COMPRESSED, "is refused by loaders", in_scheme("symetric", True)),
    Kind("a scale of infinity", COMPRESSED, "a scale is inf", infinite("weight_scale")),
]  # fmt: skip

HEALTHY = {
    GPTQ: ["--group-size", "64"],
    ASYM: ["--group-size", "64", "--asym"],
    COMPRESSED: ["--group-size", "64", "--format", "compressed-tensors"],
    SMALL: ["--bits", "3", "--group-size", "16"],
}


def all(model, rows, scratch, tell):
    calibration = ours.write_rows(scratch / "calibration.jsonl", rows["calibration"])
    results = []
    for kind in KINDS:
        healthy = scratch / f"healthy {kind.healthy}".replace(",", "")
        if not healthy.exists():
            ours.quantize(model, healthy, calibration, HEALTHY[kind.healthy])
            ours.halftone("inspect", "--check", healthy)
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(healthy, copy)
        if kind.tensors:
            changed = Copy(copy)
            kind.tensors(changed)
            changed.write()
        if kind.files:
            kind.files(copy)
        result = Result(kind.what, kind.healthy, words=kind.words)
        said = ours.halftone("inspect", "--check", copy, ok=(0, 3)).splitlines()
        lines = [line for line in said if kind.words in line]
        result.found = bool(lines)
        result.said = (lines or said[:1] or ["nothing"])[0].replace(str(copy), "…")
        tell(result)
        results.append(result)
    return results
