"""A model whose packed weights come from a file computes the same bits, and does not read its checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.checkpoints import loader, packed_cache
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load_model
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.families import write
from tests.fakes.model_logits import CPU, configure, logits

TOKENS = torch.arange(3, 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_PACKED_CACHE", str(tmp_path / "packed"))
    return tmp_path / "packed"


def run(config: EngineConfig) -> torch.Tensor:
    """The logits; returns when the file is written."""
    found = logits(config, TOKENS, Parallel())
    for thread in threading.enumerate():
        if thread.name == "packed-cache":
            thread.join()
    return found


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("case", ["Gemma", "GPT-2", "Qwen2 MoE", "DeepSeek V4"])
def test_the_bits_are_the_same(
    case: str, options: dict[str, Any], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(case, folder)
    expected = run(configure(folder, packed_cache="off", **options))
    assert not cache.exists()
    config = configure(folder, packed_cache=1.0, **options)
    assert torch.equal(run(config), expected)
    if not cache.exists():
        pytest.skip("on this processor, the weights are in a format of oneDNN's")
    monkeypatch.setattr(loader, "_fill", None)  # would raise
    assert torch.equal(run(config), expected)
    monkeypatch.undo()
    assert len(list(cache.iterdir())) == 1


def test_a_file_belongs_to_a_checkpoint_a_rank_and_a_processor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint("llama", tmp_path / "model")

    def key(rank: int = 0, **options: Any) -> str:
        return packed_cache._key(configure(folder, packed_cache=1.0, **options), rank)

    keys = {key(), key(quantization="int8"), key(dtype="bfloat16"), key(max_model_len=32)}
    keys |= {key(rank, tensor_parallel_size=2) for rank in range(2)}
    keys |= {key(rank, pipeline_parallel_size=2) for rank in range(2)}
    assert len(keys) == 8
    assert key(max_num_seqs=3, block_size=4) == key()
    monkeypatch.setattr(packed_cache, "_platform", lambda: "another processor")
    assert key() not in keys
    monkeypatch.undo()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    assert key() not in keys


def test_ranks_have_files_of_their_own(cache: Path, tmp_path: Path) -> None:
    folder = write_checkpoint("llama", tmp_path / "model")
    config = configure(folder, packed_cache=1.0, tensor_parallel_size=2)
    for _ in range(2):
        for rank in range(2):
            parallel = Parallel()
            parallel.rank, parallel.size = rank, 2
            load_model(config, rank, parallel, CPU)
            for thread in threading.enumerate():
                if thread.name == "packed-cache":
                    thread.join()
    assert len(list(cache.glob("*.safetensors"))) == 2


def test_weights_that_move_between_ranks_are_not_kept(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write("Mixtral", folder)
    config = configure(folder, packed_cache=1.0, enable_expert_parallel=True, enable_eplb=True)
    assert packed_cache.PackedCache.of(config, 0) is None
