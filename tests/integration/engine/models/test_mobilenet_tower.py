"""Gemma 3n with pictures against transformers, whose part for timm's tower is `tests.fakes.mobilenet_v5`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.mobilenet_spec import MobileNetSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.mobilenet_tower import MobileNetTower
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes import late_device
from tests.fakes.families import CASES
from tests.fakes.mobilenet_v5 import END_TOKEN, IMAGE_TOKEN, write_gemma3n
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models.test_image_towers import encode, features_of
from tests.integration.engine.models.test_towers import check_close, tower_of

_, SETTINGS = CASES["Gemma 3n, its text part"]


@pytest.mark.slow
def test_features_and_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one rank, and of two stages of two ranks; and the embedding of the token behind an image. No tensor of the
    checkpoint is unused but those for sound."""
    model = write_gemma3n(tmp_path, SETTINGS["text_config"], monkeypatch)
    picture, larger = (
        {"pixel_values": torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(side))}
        for side in (256, 512)
    )
    with caplog.at_level(logging.WARNING):
        config = configure(tmp_path, max_model_len=512)
        tower = tower_of(config, Parallel())
    assert "does not use" not in caplog.text
    for arrays in (picture, larger):
        check_close(encode(config, tower, arrays), features_of(model, arrays))
    item = MediaItem(bytes(16), "image", 2, 256, (MediaRun(0, 256),))
    plain = tower_of(config, Parallel(), pack=False)
    check_close(late_device.encode(plain, picture, item, monkeypatch), features_of(model, picture))  # never waits
    tokens = torch.tensor([5, 6, *[IMAGE_TOKEN] * 256, END_TOKEN, 7, 8, 9])
    with torch.inference_mode():
        expected = model(tokens[None], **picture, attention_mask=torch.ones_like(tokens)[None]).logits[0]
    for layout in ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        config = configure(tmp_path, max_model_len=512, **layout)
        work = partial(logits, config, tokens, media=[(picture, item)])
        for found in on_ranks(config.parallel.tensor_parallel_size, work):
            assert (found - expected).norm() <= 1e-4 * expected.norm(), config.parallel


def test_the_published_tower_has_its_number_of_parameters() -> None:
    """And its steps have the multiplications that the spec says, about as many each."""
    config = SETTINGS | SETTINGS["text_config"] | {"architectures": ["Gemma3nForConditionalGeneration"]}
    media = from_hf_config(config | {"vision_config": {}}).media
    assert media is not None
    assert isinstance(media.tower, MobileNetSpec)
    parameters = media.tower.parameters()
    assert sum(each.elements(1) for each in parameters if each.module.startswith(("ends", "stage", "fusion"))) == (
        294_126_912
    )
    with torch.device("meta"):
        tower = MobileNetTower(media.tower)
        item, pixels = MediaItem(b"", "image", 0, 256, (MediaRun(0, 256),)), torch.empty(1, 3, 768, 768)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        counts = [counter.get_total_flops() for _ in tower.encode({"pixel_values": pixels}, item)]
    steps = np.diff(counts, prepend=0)[:-1] / 2
    works = [sum(work) for work, count in media.tower.steps(item, "cpu") for _ in range(count)]
    assert len(steps) == len(works)
    assert steps == pytest.approx(works, rel=0.1)
    assert max(steps) < 2.5 * steps.mean()
    with pytest.raises(ConfigError, match=r"mobilenetv5_base.*language-model-only"):
        from_hf_config(config | {"vision_config": {"architecture": "mobilenetv5_base"}})
