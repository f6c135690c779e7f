"""Pictures in models that transformers builds: what a model's processor makes of them, and what its tower needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.architecture.families.transformers_backend import DescribeRequest
from quire.engine.models.transformers_backend import build
from quire.engine.models.transformers_backend.shrink import VOCABULARY, shrink, shrink_tower
from quire.engine.models.transformers_backend.tower import TransformersTower
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.repository.processors import load_processor

_SIZES = ((96, 64), (64, 320), (1024, 1024), (2000, 1000))
"""Of pictures, in pixels."""
_FIRST_ID = 100
"""The first of a small model's tokens that stand for those of a picture; the others are text."""
_TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_SCORES = 3
"""Tensors of attention scores in memory at once, where torch computes attention step by step."""


@dataclass(frozen=True)
class Picture:
    """A picture as a model's processor gives it."""

    tokens: Sequence[int]
    """The tokens of a prompt with nothing else."""
    runs: tuple[MediaRun, ...]
    """Those that features replace."""
    arrays: Mapping[str, Tensor]

    @property
    def places(self) -> list[int]:
        """The indices of the tokens that features replace."""
        return [run.start + number for run in self.runs for number in range(run.length)]

    @property
    def item(self) -> MediaItem:
        """The item of a prompt that begins with it."""
        return MediaItem(bytes(16), "image", 0, len(self.tokens), self.runs)


def image_token(config: Any) -> int:
    """The token that a feature replaces."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise ConfigError("its config has no image_token_id")


def examples(config: Any, request: DescribeRequest) -> list[Picture]:
    """Pictures of several sizes. Raises `ConfigError` if the model's processor does not work without torchvision."""
    image_id = image_token(config)
    try:
        processor = load_processor(str(request.path))
        return [processed(processor, image_id, Image.new("RGB", size, (200, 100, 50))) for size in _SIZES]
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"images are not supported: its processor does not work without torchvision ({reason}); "
            "--language-model-only serves text alone"
        ) from None


def processed(processor: Any, image_id: int, image: Image.Image) -> Picture:
    """A picture as `processor` gives it, with the features' token `image_id`."""
    found = dict(processor(images=[image], text=[processor.image_token], return_tensors="pt"))
    tokens = found["input_ids"][0].tolist()
    arrays = {name: torch.as_tensor(value) for name, value in found.items() if name not in _TEXT_ARRAYS}
    places = [place for place, token in enumerate(tokens) if token == image_id]
    groups = groupby(enumerate(places), lambda each: each[1] - each[0])  # of consecutive places
    stretches = [[place for _, place in group] for _, group in groups]
    if not stretches:
        raise ConfigError(f"it puts no token {image_id} for a picture")
    grid = (0, 0, 0)
    if (patches := arrays.get("image_grid_thw")) is not None:
        merge = int(processor.image_processor.merge_size)
        ((time, height, width),) = patches.tolist()
        grid = (time, height // merge, width // merge)
    return Picture(tokens, tuple(MediaRun(each[0], len(each), grid) for each in stretches), arrays)


def shrink_with_tower(config: Any, picture: Picture, ranks: int) -> tuple[dict[str, Any], Picture]:
    """A small config of the same kind, whose tower has all its layers; and the picture with the small one's tokens."""
    values = config.to_dict()
    text = config.get_text_config(decoder=True)
    small = shrink(values, ranks)
    for name in build.media_parts(config):
        if isinstance(values.get(name), dict):
            small[name] = shrink_tower(values[name], text.hidden_size, ranks)
    named = {name: each for name, each in values.items() if re.search(r"token_(id|index|ids)$", name)}
    listed = {each for value in named.values() for each in (value if isinstance(value, list) else [value])}
    special = sorted({*picture.tokens} & {each for each in listed if isinstance(each, int)})
    if len(special) > VOCABULARY - _FIRST_ID:
        raise ConfigError("its pictures have too many special tokens")
    own = {token: _FIRST_ID + number for number, token in enumerate(special)}
    for name, value in named.items():
        if isinstance(value, list):
            small[name] = [own.get(each, 3) for each in value]
        elif value in own:
            small[name] = own[value]
    tokens = [own.get(token, 4 + token % (_FIRST_ID - 4)) for token in picture.tokens]
    return small, Picture(tokens, picture.runs, picture.arrays)


@dataclass(frozen=True)
class TowerRun:
    """What ran when a small model computed the features of a picture."""

    modules: tuple[str, ...]
    """See `TransformersTowerSpec`."""
    features: Tensor
    tokens: Mapping[str, int]
    """Of each linear layer, by path in the base."""
    scores: int
    """Scores of attention, if torch computes attention step by step."""


def run_tower(model: Any, arrays: Mapping[str, Tensor]) -> TowerRun:
    """Compute the features of a picture in transformers' `model`, and see what runs."""
    base: Any = build.base_of(model)
    children = {id(module): name for name, module in base.named_children()}
    ran, tokens, handles = dict[str, None](), defaultdict[str, int](int), []

    def enter(path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if id(module) in children:
            ran[children[id(module)]] = None
        if isinstance(module, nn.Linear):
            tokens[path] = max(tokens[path], inputs[0].numel() // inputs[0].shape[-1])

    for path, module in base.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, path)))
    with torch.inference_mode(), _Scores() as seen:  # type: ignore[no-untyped-call]
        found = TransformersTower(base, torch.float32, torch.device("cpu")).features(arrays)
    for handle in handles:
        handle.remove()
    return TowerRun(tuple(ran), found, dict(tokens), seen.numel)


class _Scores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the results of softmax."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "softmax" in str(func):
            self.numel = max(self.numel, result.numel())
        return result


def values_per_feature(base: nn.Module, run: TowerRun, heads: float) -> float:
    """See `TransformersTowerSpec`, for the model `base`, whose tower has `heads` times as many heads as that of the
    small model that ran."""
    linears = (
        count * (2 * module.in_features + module.out_features)
        for path, count in run.tokens.items()
        if isinstance(module := base.get_submodule(path), nn.Linear)
    )
    return max(*linears, _SCORES * run.scores * heads) / len(run.features)


def heads_ratio(config: Any, small: Any) -> float:
    """Heads of a tower for each one of the small model's."""
    found = (
        (getattr(getattr(each, part, None), name, None) for each in (config, small))
        for part in build.media_parts(config)
        for name in ("num_attention_heads", "num_heads")
    )
    return max((ours / theirs for ours, theirs in found if ours and theirs), default=1.0)
