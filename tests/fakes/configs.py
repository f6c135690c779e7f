"""Engine configurations for tests that need no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec, RopeSpec
from quire.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    KVCacheGroup,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

Windows = tuple[int | Literal["state"] | None, ...]
"""Kinds of the groups of layers: the number of the last tokens that a token sees (None: all), or recurrent states."""

NORM = NormSpec(eps=1e-6)
TINY_ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=4, scale=0.5, rope=RopeSpec(theta=10000.0, dim=4))
TINY_FEED_FORWARD = MLPSpec(intermediate_size=64)
TINY_LAYER = LayerSpec(
    attention=TINY_ATTENTION,
    attention_norm=NORM,
    feed_forward=TINY_FEED_FORWARD,
    feed_forward_norm=NORM,
)
TINY = ModelSpec(
    name="LlamaForCausalLM",
    hidden_size=32,
    vocab_size=97,
    max_position=512,
    layers=(TINY_LAYER,) * 6,
    norm=NORM,
    tie_embeddings=False,
)


def engine_config(
    *,
    stages: int = 1,
    depth: int | None = None,
    block_size: int = 4,
    num_blocks: int = 256,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    chunked: bool = True,
    prefix: bool = True,
    windows: Windows = (None,),
    policy: Literal["fcfs", "priority"] = "fcfs",
    max_model_len: int = 128,
    eos: tuple[int, ...] = (),
    **model: Any,
) -> EngineConfig:
    """A small configuration; `stages` of one rank each, by default one plan in flight for each.

    `windows` are the windows of the cache groups. With states, and with -9, a window of 9 whose blocks fill pages, a
    page has three blocks.
    """
    layers = TINY.num_layers // stages
    of_stages = tuple(tuple(range(s * layers, (s + 1) * layers)) for s in range(stages))
    return EngineConfig(
        model=ModelConfig(
            **{
                "path": Path("/nonexistent"),
                "tokenizer": Path("/nonexistent"),
                "architecture": TINY,
                "dtype": "float32",
                "quantization": None,
                "max_model_len": max_model_len,
                "load_format": "dummy",
                "eos_token_ids": eos,
                "trust_remote_code": False,
                "seed": 0,
                **model,
            }
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=1,
            pipeline_parallel_size=stages,
            stages=tuple(range(s * layers, (s + 1) * layers) for s in range(stages)),
            executor="uni" if stages == 1 else "mp",
            device="cpu",
        ),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            dtype="float32",
            enable_prefix_caching=prefix,
            groups=tuple(
                KVCacheGroup(is_state=True, layers=of_stages)
                if window == "state"
                else KVCacheGroup(window=abs(window), layers=of_stages, fills_pages=window < 0)
                if window
                else KVCacheGroup(layers=of_stages)
                for window in windows
            ),
            blocks_per_page=3 if any(each == "state" or (each or 0) < 0 for each in windows) else 1,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=chunked,
            policy=policy,
            depth=stages if depth is None else depth,
        ),
    )
