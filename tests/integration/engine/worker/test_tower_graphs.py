"""Captured layers of towers: replayed with padding, in any order, features are those of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.parallel_state import connect
from quire.engine.models.decoder import Decoder
from quire.engine.models.tower import Tower, send_arrays
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker import graph_recorders
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.tower_graphs import TowerGraphs, _TowerRows
from quire.kernels import OneAdapter
from tests.fakes.adapter_pools import SLOTS, add_pools, merge
from tests.fakes.late_device import GPU, DeviceTensor, late_device, move_parameters
from tests.fakes.media_prompts import Picture, generate, media_prompt, write_media_model
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.ranks import on_ranks
from tests.fakes.recorder import CallAgain
from tests.integration.engine.models import test_image_towers as images
from tests.integration.engine.models import test_towers as grids
from tests.integration.engine.models.test_towers import check_close, tower_of

SIZES = (64, 128, 640)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    config = configure(folder, max_model_len=64, **options)
    return replace(config, graphs=replace(config.graphs, tower_sizes=SIZES))


def captured(tower: Tower, config: EngineConfig, parallel: Parallel | None = None) -> TowerGraphs:
    graphs = TowerGraphs(tower, config, CPU, parallel or Parallel())
    assert graphs.capture()
    return graphs


def encode(tower: Tower, arrays: Mapping[str, Tensor], item: MediaItem) -> Tensor:
    with torch.inference_mode():
        return tower(arrays, item)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With windows."""
    folder = tmp_path_factory.mktemp("model")
    return folder, grids.write("Qwen2.5-VL", folder)


@pytest.fixture(autouse=True)
def prepared() -> None:
    """Op replay needs compiled kernels."""
    kernels.prepare(CPU)()


@pytest.mark.parametrize("case", ["Qwen2.5-VL", "Qwen3-VL", "ERNIE 4.5 VL", "MiniMax-M3"])
def test_features_of_grids_are_those_of_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same whatever was replayed before. There is no room for many small frames, which run without, nor
    for large pictures."""
    folder, model = tmp_path, grids.write(case, tmp_path)
    config = config_of(folder)
    captured(tower := tower_of(config, Parallel()), config)
    replayed, features = list[bool](), list[Tensor]()
    for layer in tower.layers.values():
        monkeypatch.setattr(layer, "replay", recording(layer.replay, replayed))
    kinds = [("image", (1, 4, 4)), ("image", (1, 26, 22)), ("video", (2, 4, 6)), ("video", (6, 2, 2))]
    for kind, sizes in [*kinds, *kinds, ("image", (1, 36, 18))]:
        arrays, item = grids.item_of(model, sizes, kind)
        features.append(encode(tower, arrays, item))
        check_close(features[-1], grids.features_of(model, arrays, kind))
    assert all(torch.equal(*pair) for pair in zip(features[:4], features[4:8], strict=True))
    has_room, count = tower._spec.is_joint, len(tower.layers)
    assert replayed == 2 * ([True] * 3 * count + [has_room] * count) + [False] * count


def recording(replay: Callable[..., bool], found: list[bool]) -> Callable[..., bool]:
    def record(*args: Any) -> bool:
        found.append(replay(*args))
        return found[-1]

    return record


@pytest.mark.parametrize("name", ["LLaVA", "Pixtral", "Granite Vision", "Gemma 4, clipped, standardized", "Kimi K2.5"])
def test_features_of_images_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With a class token, positions along two axes, outputs of several layers, and frames that attend to each other."""
    folder, case = tmp_path, images.CASES[name]
    model = images.write(case, tmp_path)
    config = config_of(folder)
    captured(tower := tower_of(config, Parallel()), config)
    for arrays in case.images(model.config):
        kind: Any = "video" if "pixel_values_videos" in arrays else "image"
        features = encode(tower, arrays, MediaItem(b"", kind, 0, 1, (MediaRun(0, 1),)))
        check_close(features, images.features_of(model, arrays))


def test_items_take_turns(qwen: tuple[Path, Any]) -> None:
    """After each step, one in the memory of the other."""
    folder, model = qwen
    captured(tower := tower_of(config := config_of(folder), Parallel()), config)
    some = [grids.item_of(model, sizes, "image") for sizes in ((1, 10, 12), (1, 12, 10), (1, 4, 4))]
    expected = [encode(tower, *each) for each in some]
    with torch.inference_mode():
        begun = [tower.encode(*each) for each in some]
        found = [None] * len(some)
        for outputs in zip_longest(*begun):
            found = [new if old is None else old for old, new in zip(found, outputs, strict=True)]
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_an_item_with_an_adapter_is_not_replayed(qwen: tuple[Path, Any]) -> None:
    """Captured layers know of none. Others are, as before."""
    folder, model = qwen
    captured(tower := tower_of(config := config_of(folder), Parallel()), config)
    item = grids.item_of(model, (1, 4, 4), "image")
    before = encode(tower, *item)
    add_pools(tower)
    merge(other := tower_of(config, Parallel(), pack=False), 2)
    with torch.inference_mode():
        check_close(tower(*item, OneAdapter(2, SLOTS)), other(*item))
    assert torch.equal(encode(tower, *item), before)


def test_rows_behind_a_picture_stay_finite(qwen: tuple[Path, Any]) -> None:
    """Whatever is left there of earlier ones: NaN in memory of keys and values that is used again would spread."""
    folder, model = qwen
    graphs = captured(tower := tower_of(config := config_of(folder), Parallel()), config)
    rows = graphs._rows[SIZES[0]].x
    rows.fill_(torch.inf)
    encode(tower, *grids.item_of(model, (1, 4, 4), "image"))
    assert rows.isfinite().all()


def test_ranks_that_share_a_tower_replay_it(qwen: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = qwen
    config = config_of(folder, tensor_parallel_size=2)
    arrays, item = grids.item_of(model, (1, 10, 12), "image")
    made: list[CallAgain] = []

    def make_recorder(*place: object) -> CallAgain:
        made.append(CallAgain())
        return made[-1]

    monkeypatch.setattr(graph_recorders, "make_recorder", make_recorder)

    def work(parallel: Parallel) -> Tensor:
        tower = tower_of(config, parallel, pack=False)
        captured(tower, config, parallel)
        return encode(tower, arrays, item)

    for features in on_ranks(2, work):
        check_close(features, grids.features_of(model, arrays, "image"))
    assert [each.replayed for each in made] == [3, 3]


class Refusing(CallAgain):
    def capture(self, step: Callable[[], None]) -> graph_recorders.Replay:
        if self.captured == 4:  # layers
            raise RuntimeError("out of memory\nand more")
        return super().capture(step)


@pytest.mark.parametrize("place", ["attention", "capture"])
def test_a_tower_that_cannot_be_captured_is_logged_and_runs(
    place: str, qwen: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that gives other results on this device is not used."""
    folder, model = qwen
    tower = tower_of(config := config_of(folder), Parallel())
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *_: Refusing())
    if place == "attention":
        attention = kernels.paged_attention
        monkeypatch.setattr(kernels, "paged_attention", lambda *given, ends, **more: attention(*given, **more))
    graphs = TowerGraphs(tower, config, CPU, Parallel())
    with caplog.at_level(logging.INFO):
        assert not graphs.capture()
    reasons = {"attention": "attention differs: AssertionError: Tensor-likes are not close", "capture": "out of memory"}
    assert f"images are encoded without CUDA graphs: capturing a step failed: {reasons[place]}" in caplog.text
    monkeypatch.undo()
    arrays, item = grids.item_of(model, (1, 10, 12), "image")
    assert torch.equal(encode(tower, arrays, item), encode(tower_of(config, Parallel()), arrays, item))


def test_an_error_in_an_exchange_of_ranks_is_raised(qwen: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait there until this one ends."""

    class Broken(CallAgain):
        def warm_up(self, step: Callable[[], None]) -> str:
            raise RuntimeError("no kernel for it")

    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *_: Broken())
    monkeypatch.setattr(_TowerRows, "compare", lambda *_: "")
    parallel = Parallel()
    parallel.size = 2
    graphs = TowerGraphs(tower_of(config := config_of(qwen[0]), Parallel()), config, CPU, parallel)
    with pytest.raises(RuntimeError, match="no kernel for it"):
        graphs.capture()


def test_a_replay_does_not_wait_for_the_device(qwen: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = qwen
    tower = tower_of(config := config_of(folder), Parallel(), pack=False)
    arrays, item = grids.item_of(model, (2, 10, 12), "video")
    recorder = CallAgain()
    monkeypatch.setattr(graph_recorders, "make_recorder", lambda *_: recorder)
    monkeypatch.setattr(_TowerRows, "compare", lambda *_: "")
    with monkeypatch.context() as context, late_device(context), torch.inference_mode():
        move_parameters(tower)
        assert TowerGraphs(tower, config, GPU, Parallel()).capture()
        found = tower(send_arrays(arrays, GPU), item)
    assert isinstance(found, DeviceTensor)
    check_close(found.held, grids.features_of(model, arrays, "video"))
    assert recorder.replayed == len(tower.layers)


def test_a_rank_captures_its_tower_before_requests_come(tmp_path: Path) -> None:
    model = write_media_model("Qwen2-VL", tmp_path)
    prompt = media_prompt(model, [3, Picture((1, 8, 6)), 4])
    config = config_of(tmp_path, block_size=4, max_num_seqs=8)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    assert isinstance(runner._model, Decoder)
    assert runner._model.tower is not None
    runner.finalize()
    layers: list[Any] = [*runner._model.tower.get_submodule("layers").children()]
    replayed = list[bool]()
    for layer in layers:
        layer.replay = recording(layer.replay, replayed)
    request = Request(prompt.token_ids, SamplingParams(temperature=0.0), media=prompt.items)
    Driver(executing(runner), 8, config.cache.num_blocks, 4).decode([request], 8, 1000)
    assert request.output == generate(model, prompt, 8)
    assert replayed == [True] * len(layers)
    runner.close()
    assert [layer.replay for layer in layers] == [None] * len(layers)
