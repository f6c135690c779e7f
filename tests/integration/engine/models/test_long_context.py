"""Contexts of 32k tokens in models with recurrent states and with compressed attention, and of 16k with other kinds of
sparse attention."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import CASES, write
from tests.fakes.threads import ThreadExecutor

STEPS = 16
_M3: dict[str, Any] = {
    "num_hidden_layers": 2,
    "moe_layer_freq": [0, 1],
    "sparse_attention_config": CASES["MiniMax-M3"][1]["sparse_attention_config"]
    | {"sparse_block_size": 32, "sparse_topk_blocks": 8, "sparse_attention_freq": [1, 1]},
}
_V4 = {
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "index_topk": 64,
    "sliding_window": 128,
    "initializer_range": 0.1,
}


def generate(folder: Path, prompt: list[int], chunk: int, attention: str) -> list[int]:
    """Greedy tokens of transformers, which reads the prompt in chunks: whole it may need more memory than there is."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name)
    model: Any = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    cache = transformers.DynamicCache(config=model.config)
    tokens: list[int] = []
    with torch.inference_mode():
        for piece in torch.split(torch.tensor(prompt), chunk):
            logits = model(piece[None], cache=cache, use_cache=True, logits_to_keep=1).logits
        while len(tokens) < STEPS:
            tokens.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True).logits
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "settings", "length", "chunk", "attention"),
    [
        ("Qwen3-Next", {}, 32768, 32768, "sdpa"),
        ("Granite 4, dense", {}, 32768, 32768, "sdpa"),
        # With few heads of an indexer, many of its scores are 0, and transformers does not say which it takes.
        ("DeepSeek V3.2", {"num_hidden_layers": 2, "index_topk": 256}, 16384, 256, "eager"),
        ("MiniMax-M3", _M3, 16384, 256, "eager"),
        ("DeepSeek V4, rates as published", _V4, 32768, 1024, "eager"),
    ],
)
def test_tokens_are_those_of_transformers(
    case: str, settings: dict[str, Any], length: int, chunk: int, attention: str, tmp_path: Path
) -> None:
    write(case, tmp_path, max_position_embeddings=2 * length, **settings)
    rng = random.Random(0)
    prompt = [rng.randrange(3, 130) for _ in range(length)]
    options = EngineOptions(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        max_model_len=length + STEPS,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 28,
        packed_cache="off",
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    config = resolve(options)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        (tokens,) = ranks.tokens([(prompt, params)])
    assert tokens == generate(tmp_path, prompt, chunk, attention)
