"""The steps of a tower of published size: what each computes, without computing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quire.engine.architecture import media_spec
from quire.engine.architecture.families import from_hf_config, of_text
from quire.engine.architecture.tower_spec import VisionTowerSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.make_tower import make_tower
from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes.families import CASES as FAMILIES
from tests.fakes.families import RENAMED, SIZES
from tests.integration.engine.models.test_towers import CASES

_SIDE = 64
"""Patches along the side of a picture with 896 x 896 pixels."""
_SIZES: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {"embed_dim": 768, "num_heads": 12, "mlp_ratio": 4},
    "Qwen2.5-VL": {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    "Qwen3-VL": {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16},
}
_SAM = {
    "width": 768,
    "layers": 3,
    "heads": 12,
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2],
}
_CLIP = {"width": 1024, "layers": 2, "heads": 16, "image_size": 224, "patch_size": 14}
_SAM_2: dict[str, dict[str, Any]] = {
    "sam_config": {"hidden_size": 768, "mlp_dim": 3072, "num_hidden_layers": 3, "num_attention_heads": 12}
    | {"image_size": 1024, "window_size": 14, "output_channels": 256, "downsample_channels": [512, 896]}
    | {"global_attn_indexes": [2]},
    "encoder_config": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", _SIZES)
def test_steps_have_the_multiplications_that_the_spec_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step has many more than the others, whatever the number of patches: text streams wait for it."""
    architecture, settings = CASES[name]
    spec = tower_spec(architecture, settings | {"vision_config": settings["vision_config"] | _SIZES[name]})
    item = MediaItem(b"", "image", 0, _SIDE**2 // 4, (MediaRun(0, _SIDE**2 // 4, (1, _SIDE // 2, _SIDE // 2)),))
    pixels = torch.empty(_SIDE**2, spec.patch.pixels, device="meta")
    arrays = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]])}
    found, slice_of_queries = check_steps(spec, arrays, item, monkeypatch)
    assert not found[-1]
    assert max(found) <= 2 * slice_of_queries


@pytest.mark.parametrize("name", ["DeepSeek-OCR", "DeepSeek-OCR 2"])
def test_steps_of_sam_have_the_multiplications_that_the_spec_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step before the four convolutions and the two readers has many more than the others."""
    if name == "DeepSeek-OCR":
        architecture, _, settings, own = RENAMED[name]
        vision = {"model_name": "deeplip_b_l", "width": {"clip-l-14-224": _CLIP, "sam_vit_b": _SAM}}
        spec = tower_spec(architecture, SIZES | settings | own | {"vision_config": vision, "image_token_index": 120})
    else:
        architecture, settings = FAMILIES[name]
        vision = {kind: settings["vision_config"][kind] | sizes for kind, sizes in _SAM_2.items()}
        spec = tower_spec(architecture, settings | {"vision_config": vision})
    num_features = (16 + (name == "DeepSeek-OCR")) * 16 + 1
    item = MediaItem(b"", "image", 0, num_features, (MediaRun(0, num_features),))
    arrays = {"pixel_values": torch.empty(1, 3, 1024, 1024, device="meta")}
    # The spec counts 16 patches for a feature that separates others, too.
    found, slice_of_queries = check_steps(spec, arrays, item, monkeypatch, rel=num_features / 256 - 1 + 0.02)
    assert max(found[: -(4 + 2 * 2 + 1)]) <= 2 * slice_of_queries


def tower_spec(architecture: str, settings: dict[str, Any]) -> VisionTowerSpec:
    media = from_hf_config(of_text({"architectures": [architecture], **settings})).media
    assert media is not None
    assert isinstance(media.tower, VisionTowerSpec)
    return media.tower


def check_steps(
    spec: VisionTowerSpec,
    arrays: dict[str, torch.Tensor],
    item: MediaItem,
    monkeypatch: pytest.MonkeyPatch,
    rel: float = 0.02,
) -> tuple[Sequence[int], float]:
    """Return the multiplications of each step, and those that the spec says for a slice of queries, keys and values."""
    for limits in (media_spec._SLICE_ROWS, media_spec._SLICE_KEYS):
        monkeypatch.setitem(limits, "meta", limits["cpu"])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    with torch.device("meta"):
        tower = make_tower(spec, Parallel())
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        counts = [counter.get_total_flops() // 2 for _ in tower.encode(arrays, item)]
    found = np.diff(counts, prepend=0).tolist()
    expected = [work for work, count in spec.steps(item, "meta") for _ in range(count)]
    assert len(found) == len(expected) + 1
    copying, positions = 0, 1 + spec.num_slices(item, "meta")
    for number, (multiplications, work) in enumerate(zip(found, expected, strict=False)):
        if number not in (copying, positions):
            assert multiplications == pytest.approx(sum(work), rel=rel), number
    return found, expected[positions + 1].linear
