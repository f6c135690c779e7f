"""DeepSeek-OCR as published, which transformers does not have: against its parts there, the layers of SAM and the
decoder of version 2, and CLIP's layers."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.media import MediaItem, MediaRun
from tests.fakes import late_device
from tests.fakes.families import CASES, RENAMED, SIZES, write_model
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models.test_towers import check_close, tower_of

pytestmark = pytest.mark.slow
IMAGE = 120
"""The token."""
_SAM: dict[str, Any] = {
    "width": 32,
    "layers": 3,
    "heads": 2,
    "downsample_channels": [16, 24],
    "global_attn_indexes": [1],
}
_SAM |= {"window_size": 3, "output_channels": 12, "image_size": 128}
_CLIP = {"width": 24, "layers": 2, "heads": 4, "image_size": 56, "patch_size": 14}
_VISION = {"model_name": "deeplip_b_l", "width": {"clip-l-14-224": _CLIP, "sam_vit_b": _SAM}}


class Reference:
    """The model, of parts."""

    def __init__(self, folder: Path) -> None:
        """Write it to the folder, too."""
        architecture, same, settings, own = RENAMED["DeepSeek-OCR"]
        sam = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "initializer_range": 0.2}
        sam |= {key: _SAM[key] for key in _SAM.keys() - {"width", "layers", "heads"}}
        vision = CASES["DeepSeek-OCR 2"][1]["vision_config"] | {"sam_config": sam}
        vision["encoder_config"] = vision["encoder_config"] | {"hidden_size": 24, "num_hidden_layers": 1}
        self.model = write_model(same, settings | {"vision_config": vision}, folder)
        torch.manual_seed(1)
        clip: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2}
        clip |= {"num_attention_heads": 4, "image_size": 56, "patch_size": 14, "hidden_act": "quick_gelu"}
        self.clip = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**clip)).train(False)
        with torch.no_grad():
            for parameter in self.clip.parameters():
                parameter.normal_(std=0.2)
        self.projector = torch.nn.Linear(48, SIZES["hidden_size"])
        self.newline, self.separator = torch.randn(SIZES["hidden_size"]), torch.randn(SIZES["hidden_size"])
        config = own | {"architectures": [architecture], "vision_config": _VISION, "image_token_index": IMAGE}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: each for name, each in tensors.items() if "qwen2_model" not in name}
        tensors |= {f"model.vision_model.{name}": each for name, each in self._clip_as_published().items()}
        tensors |= {f"model.projector.layers.{name}": each for name, each in self.projector.state_dict().items()}
        tensors |= {"model.image_newline": self.newline, "model.view_seperator": self.separator}
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")

    def _clip_as_published(self) -> dict[str, Tensor]:
        own, found = self.clip.state_dict(), dict[str, Tensor]()
        for name, tensor in own.items():
            published = name.replace("encoder.layers.", "transformer.layers.")
            if ".q_proj." in name:
                parts = [own[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
                found[published.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
            elif not any(part in name for part in (".k_proj.", ".v_proj.", "post_layernorm")):
                found[published] = tensor
        return found

    def view(self, pixels: Tensor) -> Tensor:
        """`[tiles, 3, side, side]` → `[tiles, rows, columns, hidden_size]`"""
        shrunk = self.model.model.vision_tower.sam_encoder(pixels).last_hidden_state  # [tiles, 24, rows, columns]
        side, patches = shrunk.shape[-1], shrunk.flatten(2).transpose(1, 2)
        positions = self.clip.embeddings.position_embedding.weight
        places = positions[1:].T.view(1, 24, 4, 4)
        places = F.interpolate(places, (side, side), mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
        first = (self.clip.embeddings.class_embedding + positions[0]).expand(len(pixels), 1, -1)
        x = self.clip.pre_layrnorm(torch.cat((first, patches + places), dim=1))
        read = self.clip.encoder(inputs_embeds=x).last_hidden_state[:, 1:]
        features: Tensor = self.projector(torch.cat((read, patches), dim=-1))
        return torch.unflatten(features, 1, (side, side))

    def features(self, arrays: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            lines = []
            if "pixel_values_local" in arrays:
                columns, rows = arrays["tile_grid"][0].tolist()
                tiles = torch.unflatten(self.view(arrays["pixel_values_local"][0]), 0, (rows, columns))
                for row in tiles:
                    lines += [torch.cat((*line, self.newline[None])) for line in row.transpose(0, 1)]
            (whole,) = self.view(arrays["pixel_values"])
            lines += [torch.cat((line, self.newline[None])) for line in whole]
            return torch.cat((*lines, self.separator[None]))


def images() -> list[dict[str, Tensor]]:
    """One alone, of the side that CLIP's positions have; one of another side with tiles of a third."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    tiles = {"pixel_values_local": random(1, 6, 3, 96, 96), "tile_grid": torch.tensor([[3, 2]])}
    counts = {"num_local_patches": torch.tensor([6])}
    return [{"pixel_values": random(1, 3, 256, 256)}, {"pixel_values": random(1, 3, 128, 128), **tiles, **counts}]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("model")
    return folder, Reference(folder)


def test_features_are_those_of_the_parts(
    written: tuple[Path, Reference], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of two ranks, and of a device that the tower never waits for. All tensors of the checkpoint are used, but
    for the patches of CLIP's own."""
    folder, reference = written

    def work(parallel: Parallel) -> list[Tensor]:
        config = configure(folder, max_model_len=64, tensor_parallel_size=parallel.size)
        tower, item = tower_of(config, parallel), MediaItem(b"", "image", 0, 1, (MediaRun(0, 1),))
        with torch.inference_mode():
            return [tower(arrays, item) for arrays in images()]

    with caplog.at_level(logging.WARNING):
        found = [work(Parallel()), *on_ranks(2, work)]
    assert "does not use" not in caplog.text
    for each in found:
        for features, arrays in zip(each, images(), strict=True):
            check_close(features, reference.features(arrays))
    tower, arrays = tower_of(configure(folder, max_model_len=64), Parallel(), pack=False), images()[1]
    item = MediaItem(b"", "image", 0, 1, (MediaRun(0, 1),))
    check_close(late_device.encode(tower, arrays, item, monkeypatch), reference.features(arrays))


def test_logits_are_those_of_the_parts(written: tuple[Path, Reference]) -> None:
    """Of one rank, and of two stages of two ranks."""
    folder, reference = written
    tokens, items, features = [5, 6, 7], [], [reference.features(arrays) for arrays in images()]
    for number, each in enumerate(features):
        items.append(MediaItem(bytes([number] * 16), "image", len(tokens), len(each), (MediaRun(0, len(each)),)))
        tokens += [IMAGE] * len(each) + [8, 9]
    with torch.inference_mode():
        embedded = reference.model.get_input_embeddings()(torch.tensor(tokens))
        embedded[torch.tensor(tokens) == IMAGE] = torch.cat(features)
        hidden = reference.model.model.language_model(inputs_embeds=embedded[None]).last_hidden_state
        expected = reference.model.lm_head(hidden)[0]
    for layout in ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        config = configure(folder, max_model_len=256, **layout)
        work = partial(logits, config, torch.tensor(tokens), media=[*zip(images(), items, strict=True)])
        for found in on_ranks(config.parallel.tensor_parallel_size, work):
            assert (found - expected).norm() <= 1e-4 * expected.norm()
