"""Maps the parameters of a model that transformers builds to a checkpoint's tensors.

transformers renames and converts some checkpoints while loading them (`transformers/conversion_mapping.py`); its own
rules determine the names here. Only conversions that work on slices are supported: stacking experts, concatenating or
chunking tensors along a dimension, and transposing matrices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from quire.engine.layers.weight import Shard, Weight
from quire.engine.models.checkpoint import StoredSlice
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint tensor that a parameter is made of, and how transformers converts it."""

    name: str
    converter: Any = None
    part: int = 0
    """Index of the converter's source pattern that its name matches."""


class CheckpointNames:
    """The parameters of `model`, and their sources in a checkpoint with the tensors `stored`."""

    def __init__(self, model: Any, names: Collection[str], stored: Collection[str], rules: Sequence[Any]) -> None:
        """`names` are the complete model's parameters; `rules` are transformers' conversion rules."""
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        known = dict.fromkeys(names, True)
        self._ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        self.sources: dict[str, list[TensorSource]] = {}
        self.surplus: list[str] = []
        for key in sorted(stored, key=_in_order):
            target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            converter = (
                None if pattern is None else next(each for each in converters if pattern in each.source_patterns)
            )
            if converter is None or pattern is None:
                self._add(target, TensorSource(key), names)
            else:
                part = converter.source_patterns.index(pattern)
                for each in self._targets(target, converter):
                    self._add(each, TensorSource(key, converter, part), names)

    def _add(self, target: str, source: TensorSource, names: Collection[str]) -> None:
        if target in names:
            self.sources.setdefault(target, []).append(source)
        elif not any(re.search(pattern, source.name) for pattern in self._ignored):
            self.surplus.append(source.name)

    @staticmethod
    def _targets(target: str, converter: Any) -> Iterator[str]:
        """All targets of a converter; `target` is the first."""
        first = converter.target_patterns[0]
        for pattern in converter.target_patterns:
            yield target.replace(first, pattern)


def _in_order(name: str) -> list[tuple[int, str]]:
    """A sort key that orders experts by number."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def needed(
    model: nn.Module, tied: dict[str, str], names: CheckpointNames | None
) -> Iterator[tuple[Weight, Shard, StoredSlice]]:
    """The checkpoint slices of `model`'s parameters; without a checkpoint, each tensor has its parameter's name and
    shape."""
    for path, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        name = tied.get(path, path)
        sources = [] if names is None else names.sources.get(name) or names.sources.get(path, [])
        if not sources or sources[0].converter is None:
            stored = sources[0].name if sources else name
            yield from ((weight, shard, StoredSlice(stored, shard.shape)) for shard in weight.shards)
        else:
            converted = list(_converted(name, weight, sources))
            weight.shards = tuple(shard for shard, _ in converted)
            yield from ((weight, shard, stored) for shard, stored in converted)


def _converted(name: str, weight: Weight, sources: list[TensorSource]) -> Iterator[tuple[Shard, StoredSlice]]:
    """The shards of a parameter that transformers makes from `sources`, as slices of these."""
    converter = sources[0].converter
    kinds = [type(operation).__name__ for operation in converter.operations]
    dims = [getattr(operation, "dim", 0) for operation in converter.operations]
    unsupported = ConfigError(
        f"{name} is converted from {sources[0].name} by {', then '.join(kinds)}, which is not supported"
    )
    shape = weight.shards[0].shape
    groups = [[each for each in sources if each.part == part] for part in range(len(converter.source_patterns))]
    groups = [group for group in groups if group]
    parts = len(groups)
    match kinds:
        case ["MergeModulelist"] | ["MergeModulelist", "Concatenate"] if dims[0] == 0 and len(shape) > 1:
            joined = dims[1] if len(kinds) == 2 else 0
            experts = len(groups[0])
            if experts != shape[0] or any(len(group) != experts for group in groups) or (parts > 1) != (joined > 0):
                raise unsupported
            for shard in weight.shards:
                for number, group in enumerate(groups):
                    for place, source in enumerate(group):
                        yield from _of_expert(shard, source, place, number, parts, joined, unsupported)
        case ["Concatenate"] if len(sources) == parts:
            for shard in weight.shards:
                if shard.dim != dims[0]:
                    if shard.length != shard.shape[shard.dim]:
                        raise unsupported
                    shard = replace(shard, dim=dims[0], start=0, length=shape[dims[0]])
                for number, (source,) in enumerate(groups):
                    if (cut := _within(shard, number, parts)) is not None:
                        yield cut, StoredSlice(source.name, cut.shape)
        case ["Chunk"] if len(sources) == 1:
            count = len(converter.target_patterns)
            number = next(i for i, pattern in enumerate(converter.target_patterns) if pattern in name)
            for shard in weight.shards:
                if shard.dim != dims[0] and shard.length != shard.shape[shard.dim]:
                    raise unsupported
                size = shape[dims[0]]
                start, length = (shard.start, shard.length) if shard.dim == dims[0] else (0, size)
                whole = (*shape[: dims[0]], size * count, *shape[dims[0] + 1 :])
                cut = replace(shard, shape=whole, dim=dims[0], start=number * size + start, length=length)
                yield cut, StoredSlice(sources[0].name, whole)
        case ["Transpose"] if len(shape) == 2 and len(sources) == 1:
            for shard in weight.shards:
                yield shard, StoredSlice(sources[0].name, shape[::-1], is_transposed=True)
        case _:
            raise unsupported


def _within(shard: Shard, number: int, parts: int) -> Shard | None:
    """The overlap of a shard with part `number` of `parts` equal parts along its dimension, as a shard of that part."""
    size = shard.shape[shard.dim] // parts
    low, high = max(shard.start, number * size), min(shard.start + shard.length, (number + 1) * size)
    if low >= high:
        return None
    shape = (*shard.shape[: shard.dim], size, *shard.shape[shard.dim + 1 :])
    offset = shard.offset + low - shard.start
    return replace(shard, shape=shape, start=low - number * size, length=high - low, offset=offset, part=str(number))


def _of_expert(
    shard: Shard, source: TensorSource, place: int, number: int, parts: int, joined: int, unsupported: ConfigError
) -> Iterator[tuple[Shard, StoredSlice]]:
    """The slice of one expert's tensor for a shard of the stack."""
    if shard.dim == 0:  # whole experts
        if shard.length != shard.shape[0]:
            raise unsupported
        dim = joined or 1
        shard = replace(shard, dim=dim, start=0, length=shard.shape[dim], offset=0)
    if parts > 1 and shard.dim != joined:
        raise unsupported
    cut = _within(shard, number, parts) if parts > 1 else shard
    if cut is not None:
        cut = replace(cut, shape=cut.shape[1:], dim=cut.dim - 1, expert=place, local_expert=place)
        yield cut, StoredSlice(source.name, cut.shape)
