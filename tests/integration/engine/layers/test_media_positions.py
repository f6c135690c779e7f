"""Positions along time, height and width against transformers' `get_rope_index`."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.layers.media_positions import media_positions
from quire.engine.protocol.media import MediaItem, MediaKind, MediaRun

MERGE = 2
TOKENS_PER_SECOND = 2.0


def expected(family: str, tokens: Tensor, types: Tensor, images: list[Any], videos: list[Any], **more: Any) -> Tensor:
    """`[3, tokens]`; `images` and `videos` are grids before merging."""
    import transformers

    kinds: dict[str, Any] = {
        "qwen2_vl": transformers.Qwen2VLModel,
        "qwen2_5_vl": transformers.Qwen2_5_VLModel,
        "qwen3_vl": transformers.Qwen3VLModel,
    }
    kind = kinds[family]
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *args, **named: kind.get_vision_position_ids(model, *args, **named)
    grids = [torch.tensor(each) if each else None for each in (images, videos)]
    positions, delta = kind.get_rope_index(model, tokens[None], types[None], *grids, **more)
    assert delta.item() == positions.max() + 1 - len(tokens)
    return positions[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("seed", range(8))
def test_random_layouts(family: str, seed: int) -> None:
    """Text between up to four items; videos of Qwen3-VL have text before each frame. Videos are no longer than they are
    high or wide: see `media_positions`."""
    rng = random.Random(seed)
    types: list[int] = []
    items: list[MediaItem] = []
    images: list[list[int]] = []
    videos: list[list[int]] = []
    seconds: list[float] = []
    for _ in range(rng.randrange(5)):
        types += [0] * rng.randrange(1, 6)
        is_video = rng.random() < 0.5
        high, wide = rng.randrange(1, 7), rng.randrange(1, 7)
        frames = rng.randrange(1, max(high, wide) + 1) if is_video else 1
        apart = rng.choice([0.25, 0.3, 0.5]) if is_video else 0.0
        (videos if is_video else images).append([frames, high * MERGE, wide * MERGE])
        seconds += [apart] * is_video
        grid, offset, runs = (frames, high, wide), len(types), []
        for _ in range(frames if family == "qwen3_vl" else 1):
            runs_grid = (1, high, wide) if family == "qwen3_vl" else grid
            types += [0] * (family == "qwen3_vl" and is_video) * 3
            count = runs_grid[0] * high * wide
            runs.append(MediaRun(len(types) - offset, count, runs_grid))
            types += [2 if is_video else 1] * count
        kind: MediaKind = "video" if is_video else "image"
        items.append(MediaItem(bytes(16), kind, offset, len(types) - offset, tuple(runs), apart))
    types += [0] * rng.randrange(4 if items else 9)
    more = {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" and seconds else {}
    tokens = torch.arange(len(types))
    found = media_positions(items, len(types), TOKENS_PER_SECOND if family == "qwen2_5_vl" else 0.0)
    assert torch.equal(torch.from_numpy(found), expected(family, tokens, torch.tensor(types), images, videos, **more))


def test_text_behind_a_long_video_is_behind_its_last_frame() -> None:
    item = MediaItem(bytes(16), "video", 2, 6, (MediaRun(1, 4, (4, 1, 1)),), seconds_per_frame=1.5)
    along_time, along_height, along_width = media_positions([item], 10, tokens_per_second=1.0).tolist()
    assert along_time == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert along_height == along_width == [0, 1, 2, 3, 3, 3, 3, 8, 9, 10]


def test_features_without_a_grid_are_positioned_as_text() -> None:
    item = MediaItem(bytes(16), "image", 1, 5, (MediaRun(1, 3),))
    assert media_positions([item], 8).tolist() == [[*range(8)]] * 3
