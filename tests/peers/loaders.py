"""Other programs load a checkpoint and say what logits it has.

Each loader is asked twice: as it loads the model by itself, in 16 bits, and with its modules computing in
32 bits and attention as the model's own code writes it out, so that what differs from Halftone's is the reading of
the file and no rounding.
"""

import json
import multiprocessing
import os
import pathlib
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait are no good beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Compiling each layer takes longer than running it once.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
THREADS = os.cpu_count() or 1
# GPTQModel 7.7 divides the processors among threads and fails with fewer than three.
if THREADS < 3:
    os.cpu_count = lambda: 3

import torch  # noqa: E402  (after the settings above)
import transformers  # noqa: E402

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
# One thread here: threads of this process would not be there in those that it forks.
torch.set_num_threads(1)


# Attention by PyTorch's own function, which is what they take by themselves, leaves out the soft caps of gemma2.
WRITTEN_OUT = {"attn_implementation": "eager"}


def transformers_loads(directory, kind, wide):
    """AutoModelForCausalLM: GPTQ through optimum and GPTQModel's kernels, or compressed-tensors."""
    options = {"dtype": "auto"} | (WRITTEN_OUT if wide else {})
    if kind == "compressed-tensors":
        # It turns codes into weights while it loads, in the type it loads as.
        options["dtype"] = torch.float32 if wide else "auto"
    else:
        # The kernel of plain PyTorch. Others for CPUs round activations or weights to fewer bits.
        config = json.loads(pathlib.Path(directory, "config.json").read_text())["quantization_config"]
        options["quantization_config"] = transformers.GPTQConfig(
            bits=config["bits"], group_size=config["group_size"], desc_act=config["desc_act"], backend="gptq_torch"
        )
    return transformers.AutoModelForCausalLM.from_pretrained(directory, device_map="cpu", **options)


def gptqmodel_loads(directory, kind, wide):
    """GPTQModel itself, which reads "dynamic" too."""
    from gptqmodel import BACKEND, GPTQModel

    # It rounds the file's scales, which are f16, to the type it loads as.
    options = {"dtype": torch.float16} | WRITTEN_OUT if wide else {}
    return GPTQModel.load(str(directory), backend=BACKEND.GPTQ_TORCH, device="cpu", **options).model


LOADERS = {
    "gptq": [("Transformers", transformers_loads), ("GPTQModel", gptqmodel_loads)],
    "gptq_v2": [("Transformers", transformers_loads), ("GPTQModel", gptqmodel_loads)],
    "compressed-tensors": [("Transformers", transformers_loads)],
}


def kinds(model):
    """What the linear layers became, and how many of each."""
    counts = {}
    for module in model.modules():
        if hasattr(module, "qweight"):
            kind = f"{type(module).__name__} {module.bits} bits"
        elif getattr(module, "quantization_scheme", None) is not None:
            kind = f"{type(module).__name__} {module.quantization_scheme.weights.num_bits} bits"
        elif isinstance(module, torch.nn.Linear):
            kind = "dense"
        else:
            continue
        counts[kind] = counts.get(kind, 0) + 1
    return counts


@torch.no_grad()
def logits_of(model, rows):
    """[tokens, vocabulary] in f32, row after row."""
    return torch.cat([model(torch.tensor([row])).logits[0].float() for row in rows])


def widen(model):
    """The same modules, with their scales, norms and embeddings in f32; codes stay what they are."""
    torch.nn.Module.float(model)  # models of Transformers refuse to do it themselves
    for module in model.modules():
        for clear in ("clear_weight_cache", "_stream_reset_cache"):
            if hasattr(module, clear):
                getattr(module, clear)()
    return model


class Refused(Exception):
    """What a loader raised, as text."""


def load(loader, directory, kind, rows):
    """(layers, logits as loaded, logits in f32). Raises Refused with what the loader raised."""
    return apart(load_here, loader, directory, kind, rows)


def load_here(loader, directory, kind, rows):
    model = loader(directory, kind, False).eval()
    found, own = kinds(model), logits_of(model, rows)
    del model
    return found, own, logits_of(widen(loader(directory, kind, True).eval()), rows)


def apart(work, *arguments, limit=3600):
    """What `work` returns, from a process of its own.

    GPTQModel changes classes of Transformers while it loads some models, and another loader after it would load
    what it cannot load by itself.
    """
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        process = multiprocessing.get_context("fork").Process(target=answer_to, args=(file.name, work, arguments))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            raise Refused(f"it was not done after {limit / 60:.0f} minutes")
        if process.exitcode != 0:
            raise Refused(f"its process ended with {process.exitcode}")
        raised, answer = torch.load(file.name)
    if raised:
        raise Refused(answer)
    return answer


def answer_to(file, work, arguments):
    # What they print goes nowhere; what they raise is told.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(THREADS)
    try:
        answer = (False, work(*arguments))
    except Exception as error:  # whatever a loader raises is its answer
        answer = (True, f"{type(error).__name__}: {' '.join(str(error).split()) or 'without a word'}")
    torch.save(answer, file)
    # Their threads are not waited for.
    os._exit(0)
