"""Models at their real sizes, without weights: every slice of every rank, and whether 16 devices hold them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.checkpoints.checkpoint import StoredSlice
from quire.engine.checkpoints.loader import needed_tensors
from quire.engine.config import devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.weight import Shard
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.errors import ConfigError
from tests.integration.engine.models.real_models import REAL, Real

TP, PP, GIB = 8, 2, 1 << 30
MANY = ("DeepSeek-R1", "Qwen3-235B-A22B")
"""They have 350,000 slices each."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free memory on each of 16 devices."""
    free = [80 * GIB] * TP * PP
    monkeypatch.setattr(devices, "free_gpu_memory", lambda: free)
    return free


def configure(real: Real, folder: Path, **options: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(real.config))
    options |= {"tensor_parallel_size": TP, "pipeline_parallel_size": PP, "device": "cuda"}
    return resolve(EngineOptions(model=str(folder), **options))


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_as_many_as_are_published(name: str) -> None:
    arch = from_hf_config(REAL[name].config)
    assert arch.stage_parameters((range(arch.num_layers),), 0, 1) == REAL[name].parameters


class Covered:
    """Counts how many ranks hold each row or column of a checkpoint tensor, or of an expert's part of it."""

    def __init__(self) -> None:
        self.dim = -1
        self.counts = np.zeros(0, np.int8)
        self.wholes = 0

    def add(self, shard: Shard, stored: StoredSlice) -> None:
        size = shard.shape[shard.dim] if stored.rows is None or shard.dim else math.prod(rows_of(stored))
        if not len(self.counts):
            self.dim, self.counts = shard.dim, np.zeros(size, np.int8)
        assert (self.dim, len(self.counts)) == (shard.dim, size)
        if stored.rows is None or shard.dim == 1:
            if shard.dim == 1 and stored.rows is not None:
                assert sorted(stored.rows) == list(range(shard.shape[0]))
            self.counts[shard.start : shard.start + shard.length] += 1
        else:
            self.counts[stored.rows[shard.start : shard.start + shard.length]] += 1  # none twice


def rows_of(stored: StoredSlice) -> tuple[int, ...]:
    """The checkpoint tensor's rows as they are numbered."""
    shape = stored.shape if stored.expert is None else stored.shape[1:]
    return shape if stored.is_grid else (shape[-1] if stored.is_transposed else shape[0],)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MANY)) for name in REAL])
def test_the_ranks_hold_every_element_of_the_checkpoint(name: str, memory: list[int], tmp_path: Path) -> None:
    """Each once, except for elements that every rank has, and KV heads if there are fewer than ranks."""
    memory[:] = [160 * GIB] * TP * PP
    config, real = configure(REAL[name], tmp_path), REAL[name]
    arch, stages = config.model.architecture, config.parallel.stages
    sizes: dict[str, int] = {}
    checked = 0
    for stage, layers in enumerate(stages):
        covered: dict[tuple[str, int | None], Covered] = defaultdict(Covered)
        for rank in range(TP):
            parallel = Parallel()
            parallel.rank, parallel.size = rank, TP
            with torch.device("meta"):
                decoder = Decoder(arch, layers, config.model.max_model_len, parallel)
            parameters = dict(decoder.named_parameters())
            assert sum(weight.numel() for weight in parameters.values()) == arch.stage_parameters(stages, stage, TP)
            for path in real.shapes.keys() & parameters.keys():
                assert parameters[path].shape == real.shapes[path]
                checked += rank == 0
            for tensor, places in needed_tensors(decoder, config.model).items():
                sizes[tensor] = math.prod(places[0][2].shape)
                for _, shard, stored in places:
                    covered[tensor, stored.expert].add(shard, stored)
        for (tensor, _), found in covered.items():
            copies = next((count for part, count in real.copies.items() if part in tensor), 1)
            is_everywhere = bool((found.counts == TP).all())
            assert is_everywhere or bool((found.counts == copies).all()), tensor
            assert not is_everywhere or re.search(r"norm|ln|bias$|gate\.|router|position|_a_proj", tensor), tensor
    assert checked == len(real.shapes)
    assert sum(sizes.values()) == real.parameters


@pytest.mark.parametrize("name", REAL)
def test_16_devices_hold_it(name: str, memory: list[int], tmp_path: Path) -> None:
    real = REAL[name]
    config = configure(real, tmp_path)
    text = plan_text(config)
    weights = [float(size) * GIB for size in re.findall(r"per rank weights ([\d.]+) GiB", text)]
    size = sum(weights) * TP
    if real.stored:  # gpt-oss on 8 ranks has factors for groups of 8
        assert real.stored <= size <= 1.25 * real.stored
    else:
        assert size == pytest.approx(2 * real.parameters, rel=0.03)  # norms, routers and KV heads repeat
    held = int(re.search(r"KV cache holds ([\d,]+) tokens", text)[1].replace(",", ""))  # type: ignore[index]
    if real.kv_numbers:
        left = (0.9 * memory[0] - max(weights)) / (2 * real.kv_numbers)
        most = config.scheduler.max_num_seqs * config.model.max_model_len
        assert held == pytest.approx(min(left, most), rel=0.15)  # the workspace takes some, and no stage is even
        assert held <= left
    print(f"\n{name}\n{text}")


@pytest.mark.parametrize("name", REAL)
def test_whole_experts_take_as_much_as_slices_of_them(name: str, memory: list[int], tmp_path: Path) -> None:
    memory[:] = [160 * GIB] * TP * PP
    config = {key: value for key, value in REAL[name].config.items() if key != "quantization_config"}
    real = replace(REAL[name], config=config)  # slices of quantized experts have more scales
    mixtures = [layer.feed_forward for layer in from_hf_config(real.config).layers]
    if not any(isinstance(mixture, MoESpec) for mixture in mixtures):
        with pytest.raises(ConfigError, match="has no experts; omit the flag"):
            configure(real, tmp_path, enable_expert_parallel=True)
        return
    sliced, spread = (MemoryPlan.of(configure(real, tmp_path, enable_expert_parallel=whole)) for whole in (False, True))
    assert spread.weights == pytest.approx(sliced.weights, rel=0.001)  # but for biases that every rank has of a slice
    assert spread.kv_block == sliced.kv_block
