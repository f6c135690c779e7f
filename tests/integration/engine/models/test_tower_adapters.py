"""Towers whose linear layers are changed by adapters, against the same towers with the changes in their weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.kernels import OneAdapter
from tests.fakes.adapter_pools import SLOTS, Pool, add_pools, change_norms, merge, merge_norms
from tests.fakes.late_device import encode
from tests.fakes.model_logits import configure
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models import test_deepseek_ocr
from tests.integration.engine.models import test_image_towers as images
from tests.integration.engine.models import test_towers as grids
from tests.integration.engine.models.test_adapters import slow
from tests.integration.engine.models.test_towers import check_close, tower_of

KINDS = (
    *("Qwen2.5-VL", "GLM-4.5V", "ERNIE 4.5 VL", "Pixtral", "Gemma 4, clipped, standardized", "DeepSeek-OCR 2"),
    *("Granite Vision 4", "Hunyuan VL", "Step 3.7", "Kimi K2.5", "DeepSeek-OCR"),
)
"""Cases with all kinds of towers; the others are slow tests."""
SHARDED = ("Qwen2.5-VL", "Gemma 4, clipped, standardized", "Granite Vision 4")
CASES = (*grids.CASES, *images.CASES, "DeepSeek-OCR")


def write(case: str, folder: Path) -> list[tuple[dict[str, Tensor], MediaItem]]:
    """A model, and some of what its tower encodes."""
    if case in grids.CASES:
        model = grids.write(case, folder)
        return [grids.item_of(model, (1, 10, 12), "image"), grids.item_of(model, (2, 4, 6), "video")]
    if case == "DeepSeek-OCR":
        test_deepseek_ocr.Reference(folder)
        last = test_deepseek_ocr.images()[-1]
    else:
        model = images.write(images.CASES[case], folder)
        *_, last = images.CASES[case].images(model.config)
    kind: Any = "video" if "pixel_values_videos" in last else "image"
    return [(last, MediaItem(b"", kind, 0, 1, (MediaRun(0, 1),)))]


@pytest.fixture(autouse=True)
def several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TowerSpec, "num_slices", lambda *_: 3)
    monkeypatch.setattr(TowerSpec, "num_query_slices", lambda *_: 5)


@pytest.mark.parametrize("case", [*KINDS, *slow(CASES, KINDS)])
def test_features_are_those_of_changed_weights(case: str, tmp_path: Path) -> None:
    """Two adapters and none take turns between two steps. The features without one are to the last bit those of a tower
    that no adapter changes. All layers that adapters may change read their pools."""
    items = write(case, tmp_path)
    config = configure(tmp_path, max_model_len=64)
    with torch.no_grad():
        tower = tower_of(config, Parallel())
        plain = [tower(*each) for each in items]
        pools = add_pools(tower)
        change_norms(tower)
        merged = {slot: tower_of(config, Parallel(), pack=False) for slot in (0, 2)}
        for slot, other in merged.items():
            merge(other, slot)
            merge_norms(other, slot)
        for each, expected in zip(items, plain, strict=True):
            adapters = [OneAdapter(0, SLOTS), None, OneAdapter(2, SLOTS)]
            *_, found = zip(*(tower.encode(*each, adapter) for adapter in adapters), strict=True)
            assert found[1].equal(expected)
            for slot, features in zip((0, 2), found[::2], strict=True):
                check_close(features, merged[slot](*each))
                assert (features - expected).abs().max() >= 1e-2 * expected.abs().max()
        unread = [name for name, pool in pools.items() if id(pool) not in Pool.used]
        assert not unread


def test_a_tower_with_an_adapter_never_waits_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item, *_ = write("Qwen2.5-VL", tmp_path)
    tower, merged = (tower_of(configure(tmp_path, max_model_len=64), Parallel(), pack=False) for _ in range(2))
    add_pools(tower)
    merge(merged, 2)
    with torch.no_grad():
        check_close(encode(tower, *item, monkeypatch, OneAdapter(2, SLOTS)), merged(*item))


@pytest.mark.parametrize("case", [*SHARDED, *slow(KINDS, SHARDED)])
def test_ranks_change_their_own_slices(case: str, tmp_path: Path) -> None:
    """Also with factors and biases, which are added once; and ranks that divide items have all of a tower."""
    items = write(case, tmp_path)

    def run(parallel: Parallel, **options: Any) -> list[Tensor]:
        tower = tower_of(configure(tmp_path, max_model_len=64, tensor_parallel_size=parallel.size, **options), parallel)
        add_pools(tower, has_scale=True)
        change_norms(tower)
        with torch.no_grad():
            return [tower(*each, OneAdapter(2, SLOTS)) for each in items]

    (alone,) = on_ranks(1, run)
    for result in (*on_ranks(2, run), *on_ranks(2, partial(run, mm_encoder_tp_mode="data"))):
        for found, expected in zip(result, alone, strict=True):
            check_close(found, expected)
