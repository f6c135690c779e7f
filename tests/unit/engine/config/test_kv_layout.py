"""Entries of the KV store of published models, at their real sizes, in several layouts."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.engine.architecture.media_spec import TransformersTowerSpec
from quire.engine.config import devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_layout import KVSlices, kv_layout, rank_copies
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from tests.fakes.published import FOLDER


@pytest.fixture(autouse=True)
def _large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1 << 43)


def configured(name: str, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    options = {"load_format": "dummy", "block_size": 16, "dtype": "bfloat16", **options}
    options |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    return resolve(EngineOptions(model=str(FOLDER / name), device="cpu", **options))


def pieces(slices: list[KVSlices]) -> list[tuple[int, int]]:
    """The first byte of each slice in an entry, and the one after its last."""
    return [
        (start, start + each.size)
        for each in slices
        for layer in range(each.layers.number)
        for row in range(each.rows.number)
        for start in [each.entry_start + layer * each.layers.entry + row * each.rows.entry]
    ]


SIZES = {
    "Qwen3-0.6B": [28 * 2 * 8 * 16 * 128 * 2],
    "gemma-3-27b-it": [10 * 2 * 16 * 16 * 128 * 2, 52 * 2 * 16 * 16 * 128 * 2],  # all tokens, windows
    "DeepSeek-V2-Lite": [27 * 16 * 576 * 2],
    "DeepSeek-V3.2": [61 * 16 * (576 + 128) * 2],
    # 48 layers, one of 4 with keys and values; the convolution keeps 3 tokens
    "Qwen3-Next-80B-A3B-Instruct": [12 * 2 * 2 * 16 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)],
    "Nemotron-H-8B-Base-8K": [4 * 2 * 8 * 16 * 128 * 2, 24 * (128 * 64 * 128 * 4 + 3 * 10240 * 2)],
    "mamba-130m-hf": [24 * (1536 * 16 * 4 + 3 * 1536 * 2)],
    # Entries of 4 tokens, with an indexer's keys, in 21 layers, and of 128 tokens in 20; then windows, in all layers,
    # with what entries are computed from
    "DeepSeek-V4-Flash": [
        2 * (21 * 4 * (512 + 128) + 20 * 512),
        2 * 16 * (43 * 512 + 21 * 2 * 2 * (512 + 128) + 20 * 2 * 512),
    ],
}


DIVIDED = {"DeepSeek-V2-Lite": [(8, 1, 4)], "DeepSeek-V3.2": [(8, 2, 8)], "Qwen3-Next-80B-A3B-Instruct": [(8, 2, 2)]}
"""Layouts in which ranks divide the tokens of blocks."""


@pytest.mark.parametrize("name", SIZES)
def test_ranks_store_each_byte_once(name: str) -> None:
    one = kv_layout(configured(name))
    assert [kind.size for kind in one.kinds] == SIZES[name]
    for tp, pp, context in ((1, 1, 1), (1, 3, 1), (2, 2, 1), (8, 1, 1), *DIVIDED.get(name, ())):
        config = configured(name, tp, pp, decode_context_parallel_size=context)
        layout, ranks = kv_layout(config), [rank_copies(config, rank) for rank in range(tp * pp)]
        assert layout.signature == one.signature
        for number, kind in enumerate(layout.kinds):
            assert kind.size == one.kinds[number].size
            stored = sorted(piece for copies in ranks for piece in pieces(copies[number].stores))
            assert [0, *(end for _, end in stored)] == [*(start for start, _ in stored), kind.size]
            for copies in ranks:
                assert {*pieces(copies[number].stores)} <= {*pieces(copies[number].loads)}


def test_the_signature_has_what_changes_the_bytes() -> None:
    def signature(**options: Any) -> bytes:
        return kv_layout(configured("Qwen3-0.6B", **options)).signature

    plain = signature()
    assert plain == signature(max_model_len=1000, max_num_seqs=3, enable_prefix_caching=False, tp=4)
    others: list[dict[str, Any]] = [
        {"block_size": 32},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_dtype": "float32"},
        {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
        {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 10.0}},
        {"seed": 1},
    ]
    assert len({plain, *(signature(**each) for each in others)}) == 1 + len(others)


def test_the_signature_has_how_weights_are_stored_and_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((FOLDER / "Qwen3-0.6B" / "config.json").read_bytes())
    settings = {"bits": 4, "group_size": 128, "desc_act": False}
    configs = []
    for form in ("gptq", "gptq_v2"):  # some tools write the settings in a file beside config.json
        (tmp_path / "quantize_config.json").write_text(json.dumps({**settings, "checkpoint_format": form}))
        configs.append(configured(str(tmp_path), load_format="safetensors"))
    one = configs[0]
    media = Mock(tower=Mock(TransformersTowerSpec))
    configs += [
        replace(one, model=replace(one.model, rounded_types=("int8", "fp8"))),
        replace(one, model=replace(one.model, quantized_outer=frozenset(["lm_head"]))),
        replace(one, parallel=replace(one.parallel, device="cuda")),
        replace(one, model=replace(one.model, architecture=replace(one.model.architecture, media=media))),
    ]
    signatures = [kv_layout(each).signature for each in configs]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "another")
    assert [kv_layout(each).signature == own for each, own in zip(configs, signatures, strict=True)] == [
        *[True] * 5,
        False,  # transformers computes a part of it
    ]
    assert len({*signatures}) == len(configs)
