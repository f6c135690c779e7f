"""Two ranks that divide the tokens of KV blocks compared with two ranks that both have all: capacity, decodes, prompts.
With --shares, two ranks that divide the tokens of a step, and two that divide the layers, compared with one rank: in
time of the processor, so that the machine need not be idle. Waiting hardly counts; communicating does.

.venv/bin/python benchmarks/context_parallel.py --contexts 1000 8000 --prompts 1000
.venv/bin/python benchmarks/context_parallel.py --shares --contexts 1000 --prompts 256 1000 4000

The models have random weights: one KV head for 14 heads of 64, and latent attention (MLA) of 16 heads in the shape of
DeepSeek-V2-Lite. Each rank has one thread. All layouts are loaded at once and alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace
from tensor_parallel import BLOCK, SHAPE, Layout, prefill, requests

from quire.engine.protocol.scheduler_output import CachedRequestData

SHAPES = {
    "one KV head": SHAPE | {"num_key_value_heads": 1, "max_position_embeddings": 16384},
    "MLA": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 704,
        "first_k_dense_replace": 100,
        "vocab_size": 32000,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


def decode(layout: Layout, rows: int, steps: int, context: int) -> float:
    """The median seconds of a step in which each of `rows` requests decodes one token, behind an empty `context`."""
    new = [replace(each, num_computed_tokens=context) for each in requests(rows, context + 1, context + 1 + steps)]
    layout.seconds(new, [CachedRequestData(row, 1, [], []) for row in range(rows)], [])
    spent = [layout.seconds([], [CachedRequestData(row, 1, [9], []) for row in range(rows)], []) for _ in range(steps)]
    layout.seconds([], [], list(range(rows)))
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000], help="tokens of each request")
    parser.add_argument("--rows", type=int, default=4, help="requests that decode at the same time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000], help="tokens per prompt")
    parser.add_argument("--shares", action="store_true", help="divide the tokens of a step (-pcp 2), not of blocks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps per round")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    engine = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 16384,
        "max_num_seqs": options.rows,
        "max_num_batched_tokens": max(options.prompts),
        "kv_cache_memory_bytes": 1 << 30,
    }
    names = ("1 rank", "-tp 2", "-pcp 2") if options.shares else ("whole", "divided")
    print(f"ms{' of the processor' * options.shares} of the slowest rank: {', '.join(names)}")
    print("medians of the rounds; × is to the first")
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            folder = Path(place)
            (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": options.layers}))
            if options.shares:
                alone = {"tensor_parallel_size": 1}
                degrees = [(1, alone), (2, {}), (2, alone | {"prefill_context_parallel_size": 2})]
            else:
                degrees = [(2, {"decode_context_parallel_size": size}) for size in (1, 2)]
            layouts = [Layout(folder, ranks, 1, engine | given) for ranks, given in degrees]
            for layout in layouts:
                stack.callback(layout.close)
                layout.counts_work = options.shares
            held = [layout.config.cache.num_blocks * BLOCK for layout in layouts]
            print(f"{name}: 1 GiB per rank holds {', '.join(f'{tokens:,}' for tokens in held)} tokens")
            cases = [("decode", each) for each in options.contexts] + [("prompt", each) for each in options.prompts]
            for kind, count in cases:
                rounds = [
                    [
                        1e3 * prefill(layout, count)
                        if kind == "prompt"
                        else 1e3 * decode(layout, options.rows, options.steps, count)
                        for layout in layouts
                    ]
                    for _ in range(options.rounds + 1)
                ][1:]
                found = [statistics.median(each) for each in zip(*rounds, strict=True)]
                ratios = " ".join(f"{each / found[0]:6.2f} ×" for each in found[1:])
                what = f"{kind} of {count:,}" + f" × {options.rows}" * (kind == "decode")
                print(f"  {what:20} {' '.join(f'{each:8.1f}' for each in found)} {ratios}", flush=True)


if __name__ == "__main__":
    main()
