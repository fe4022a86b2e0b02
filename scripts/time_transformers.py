"""How fast Transformers reads a prompt and generates on the CPU, beside `halftone bench decode`.

    python scripts/time_transformers.py MODEL [--prompt-tokens 512] [--tokens 64] [--threads 2]

Greedy, with its own cache of keys and values, in bfloat16 and float32. As there, the first token belongs to
the prompt, and the best of some rounds counts.
"""

import argparse
import json
import time

import torch
import transformers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model")
parser.add_argument("--prompt-tokens", type=int, default=512)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()

torch.set_num_threads(args.threads)
rows = []
for dtype in [torch.bfloat16, torch.float32]:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    vocab = model.config.vocab_size
    prefill, decode = 0.0, 0.0
    for turn in range(args.rounds):
        ids = torch.tensor([[(i * 2654435761 + turn) % vocab for i in range(args.prompt_tokens)]])
        with torch.inference_mode():
            begun = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            cache, next_id = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            first = time.perf_counter()
            for _ in range(args.tokens - 1):
                out = model(next_id, past_key_values=cache, use_cache=True)
                next_id = out.logits[:, -1].argmax(-1, keepdim=True)
            end = time.perf_counter()
        prefill = max(prefill, args.prompt_tokens / (first - begun))
        decode = max(decode, (args.tokens - 1) / (end - first))
    rows.append({
        "program": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": args.threads,
        "prompt": args.prompt_tokens,
        "tokens": args.tokens,
        "prefill tokens/s": round(prefill, 1),
        "decode tokens/s": round(decode, 1),
    })
print(json.dumps(rows, indent=2))
