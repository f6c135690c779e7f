"""Layers that read the keys and values of another: they have no cache of their own, and its pipeline stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.config import floors
from quire.engine.config.machine import describe
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load_model
from quire.engine.protocol.errors import ConfigError
from quire.engine.worker.kv_caches import allocate_caches
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.model_logits import configure

CASE = "Gemma 4, layer inputs, shared keys and values"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    architecture, changes = CASES[CASE]
    write_model(architecture, SIZES | changes, tmp_path)
    return tmp_path


def test_they_take_no_memory(folder: Path) -> None:
    """Layer 2 is the last one without a window that has keys and values of its own, layer 3 the last one with a window;
    4 to 6 read theirs."""
    config = configure(folder, max_model_len=64)
    sources = [layer.kv_source for layer in config.model.architecture.layers]
    assert sources == [None] * 4 + [2, 3, 2]
    assert sorted(layer for group in config.cache.groups for layer in group.layers[0]) == [0, 1, 2, 3]
    caches = allocate_caches(config, 0, torch.device("cpu"))
    memories = [cache.memory for cache in caches if cache.memory is not None]
    for number, source in enumerate(sources):
        assert memories[number].data_ptr() == memories[number if source is None else source].data_ptr()
        assert caches[number].group == caches[number if source is None else source].group
    (bytes_of_block,) = MemoryPlan.of(config).kv_block
    assert bytes_of_block == sum(
        memory[:, 0].nbytes for memory in {each.data_ptr(): each for each in memories}.values()
    )


def test_they_are_in_the_stage_of_their_source(folder: Path) -> None:
    for stages, starts in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
        parallel = configure(folder, pipeline_parallel_size=stages, max_model_len=64).parallel
        assert [stage.start for stage in parallel.stages] == starts
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 4: a stage cannot start .* layers 0, 1, 2$"):
        configure(folder, pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match=r"--pipeline-layer-partition 4,3: a stage cannot start"):
        configure(folder, pipeline_parallel_size=2, pipeline_layer_partition="4,3")


def test_uneven_stages_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, pipeline_parallel_size=2, max_model_len=64)
    assert "--pipeline-parallel-size 2: the stages have 2, 5 layers, because" in caplog.text


def test_each_layer_reads_them(folder: Path) -> None:
    """The keys that a token at 40 tokens attends to count in each layer, whichever layer owns them."""
    config = configure(folder, max_model_len=64)
    arch, parts = config.model.architecture, floors._Floors(config, describe("H100", 1, 50.0))
    read = [layer.attention for layer in arch.layers if layer.kv_source is not None]
    assert all(isinstance(each, AttentionSpec) for each in read)
    expected = 0
    for each in read:
        assert isinstance(each, AttentionSpec)
        expected += 2 * min(40, each.window or 40) * each.num_kv_heads * each.head_dim * 4
    assert len(read) == 3
    assert parts._read_again(0, 1, 40) == pytest.approx(expected)


def test_a_source_must_exist(tmp_path: Path) -> None:
    architecture, changes = CASES[CASE]
    write_model(architecture, SIZES | changes, tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_kv_shared_layers": 3', '"num_kv_shared_layers": 6'))
    with pytest.raises(ConfigError, match=r"num_kv_shared_layers 6: no layer before"):
        configure(tmp_path, model_impl="quire")


def test_what_checkpoints_have_of_their_keys_and_values_is_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own = {name: each for name, each in tensors.items() if "layers.2.self_attn.k_" in name}
    assert own
    tensors |= {name.replace("layers.2.", "layers.4."): each.clone() for name, each in own.items()}
    save_file(tensors, path, {"format": "pt"})
    load_model(configure(folder, max_model_len=64), 0, Parallel(), torch.device("cpu"))
    assert "self_attn" not in caplog.text
