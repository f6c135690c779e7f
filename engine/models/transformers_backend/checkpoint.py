"""Maps the parameters of a model that transformers builds to a checkpoint's tensors.

transformers renames and converts some checkpoints while loading them (`transformers/conversion_mapping.py`); its own
rules determine the names here. Only conversions that work on slices are supported: stacking experts, concatenating or
chunking tensors along a dimension, taking rows of them, and transposing matrices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from quire.engine.checkpoints.checkpoint import StoredSlice
from quire.engine.layers.weight import Shard, Weight
from quire.engine.models.transformers_backend.experts import PlannedExperts
from quire.engine.models.transformers_backend.sharding import PlannedLinear
from quire.engine.protocol.errors import ConfigError

_WITH_SCALES = frozenset(("Inkling2LoopDequantizeExperts",))
"""Operations that change nothing where the checkpoint has weights without scales."""


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
    model: Any, tied: dict[str, str], names: CheckpointNames | None
) -> Iterator[tuple[Weight, Shard, StoredSlice]]:
    """The checkpoint slices of `model`'s parameters; without a checkpoint, each tensor has the name and shape of
    transformers' parameter."""
    renamed, transposed = differences(model)
    shapes = {path: weight.shards[0].shape for path, weight in model.named_parameters() if isinstance(weight, Weight)}
    for path, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        own = renamed.get(path, path)
        name = tied.get(own, own)
        sources = [] if names is None else names.sources.get(name) or names.sources.get(own, [])
        if not sources or sources[0].converter is None:
            stored = sources[0].name if sources else name
            for shard in weight.shards:
                yield weight, shard, _slice_of(stored, weight, shard, path in transposed)
        else:
            vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
            converted = list(_converted(name, weight, sources, path in transposed, shapes, vocab_size))
            weight.shards = tuple(shard for shard, _ in converted)
            yield from ((weight, shard, stored) for shard, stored in converted)


def differences(model: nn.Module) -> tuple[dict[str, str], set[str]]:
    """transformers' names of parameters that have another one in our layers, and the parameters that are transposed."""
    renamed, transposed = dict[str, str](), set[str]()
    for path, module in model.named_modules():
        if isinstance(module, PlannedExperts):
            renamed |= {f"{path}.{ours}": f"{path}.{name}" for ours, name in module.names.items()}
            if module.is_transposed:
                transposed |= {f"{path}.gate_up.weight", f"{path}.down.weight"}
        elif isinstance(module, PlannedLinear) and module.is_transposed:
            transposed.add(f"{path}.weight")
    return renamed, transposed


def _slice_of(name: str, weight: Weight, shard: Shard, is_transposed: bool) -> StoredSlice:
    """A shard's slice of a tensor that has all experts, if it is one of an expert's matrix."""
    shape = shard.shape[::-1] if is_transposed else shard.shape
    if shard.expert is not None:
        shape = (len(weight), *shape)
    return StoredSlice(name, shape, is_transposed=is_transposed, expert=shard.expert)


def _converted(
    name: str,
    weight: Weight,
    sources: list[TensorSource],
    is_transposed: bool,
    shapes: Mapping[str, tuple[int, ...]],
    vocab_size: int,
) -> Iterator[tuple[Shard, StoredSlice]]:
    """The shards of a parameter that transformers makes from `sources`, as slices of these. `shapes` are those of all
    parameters."""
    converter = sources[0].converter
    groups = [[each for each in sources if each.part == part] for part in range(len(converter.source_patterns))]
    groups = [group for group in groups if group]
    parts = len(groups)
    operations = [each for each in converter.operations if parts > 1 or type(each).__name__ not in _WITH_SCALES]
    kinds = [type(operation).__name__ for operation in operations]
    unsupported = ConfigError(
        f"{name} is converted from {sources[0].name} by {', then '.join(kinds)}, which is not supported"
    )
    is_stack = weight.shards[0].expert is not None
    of_matrix = 1 if is_stack else 0
    """The number of dimensions before those of a shard."""
    dims = [getattr(operation, "dim", 0) - of_matrix for operation in operations]
    dim = dims[-1] if dims else 0
    dim = 1 - dim if is_transposed else dim
    match kinds:
        case [] if len(sources) == 1:
            for shard in weight.shards:
                yield shard, _slice_of(sources[0].name, weight, shard, is_transposed)
        case ["MergeModulelist"] | ["MergeModulelist", "Concatenate"] if is_stack and dims[0] == -1:
            has_all = all(len(group) == len(weight) for group in groups)
            if not has_all or (parts > 1) != (len(kinds) == 2 and dims[1] >= 0):
                raise unsupported
            for shard in weight.shards:
                if parts > 1 and shard.dim != dim:
                    raise unsupported
                for number, group in enumerate(groups):
                    if (cut := _within(shard, number, parts)) is not None:
                        assert shard.expert is not None
                        stored = cut.shape[::-1] if is_transposed else cut.shape
                        yield cut, StoredSlice(group[shard.expert].name, stored, is_transposed=is_transposed)
        case ["Concatenate"] if len(sources) == parts and dims[0] >= 0:
            for shard in weight.shards:
                whole = _along(shard, dim, unsupported)
                for number, (source,) in enumerate(groups):
                    if (cut := _within(whole, number, parts)) is not None:
                        yield cut, _slice_of(source.name, weight, cut, is_transposed)
        case ["Chunk" | "Split"] if len(sources) == 1 and dims[0] >= 0:
            targets = converter.target_patterns
            number = next(i for i, pattern in enumerate(targets) if pattern in name)
            for shard in weight.shards:
                part = _along(shard, dim, unsupported)
                sizes = [part.shape[dim]] * len(targets)
                if kinds == ["Split"]:
                    sizes = [shapes[name.replace(targets[number], target)][dim] for target in targets]
                shape = (*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :])
                cut = replace(part, shape=shape, start=sum(sizes[:number]) + part.start)
                yield cut, _slice_of(sources[0].name, weight, cut, is_transposed)
        case ["Interleave"] | ["Interleave", "Chunk"] if len(sources) == 1 and {*dims} == {0} and not is_transposed:
            if operations[0].inverse:
                raise unsupported
            targets = converter.target_patterns
            number = next(i for i, pattern in enumerate(targets) if pattern in name)
            for shard in weight.shards:  # pairs of rows that follow each other are half of the rows apart
                count, total = shard.shape[0], len(targets) * shard.shape[0]
                rows = np.arange(total).reshape(-1, 2).T.flatten()[number * count : (number + 1) * count]
                joint = replace(shard, shape=(total, *shard.shape[1:]))
                yield shard, replace(_slice_of(sources[0].name, weight, joint, False), rows=rows)
        case ["Inkling2UnpadVocab"] if len(sources) == 1 and not (is_stack or is_transposed):
            for shard in weight.shards:
                shape = vocab_size, *shard.shape[1:]
                yield shard, StoredSlice(sources[0].name, shape, rows=np.arange(shard.shape[0]))
        case ["Inkling2LoopMergeMessageQueries"] if is_stack and parts == 2 == len(sources):
            (queries,), (of_keys,) = groups
            for shard in weight.shards:  # of a layer: of queries, of keys and values, and of the MLP
                assert shard.expert is not None
                rows, shape = 2 * shard.expert + np.arange(2), (2 * len(weight), *shard.shape[1:])
                for offset, source, start, length in ((0, queries, 0, 1), (1, of_keys, 0, 2), (3, queries, 1, 1)):
                    cut = replace(shard, shape=(2, *shape[1:]), start=start, length=length, offset=offset)
                    yield cut, StoredSlice(source.name, shape, rows=rows)
        case ["Transpose"] if len(weight.shape) - of_matrix == 2 and len(sources) == 1:
            (operation,) = operations
            if operation.check_dims or {operation.dim0 - of_matrix, operation.dim1 - of_matrix} != {0, 1}:
                raise unsupported
            for shard in weight.shards:
                yield shard, _slice_of(sources[0].name, weight, shard, not is_transposed)
        case _:
            raise unsupported


def _along(shard: Shard, dim: int, unsupported: ConfigError) -> Shard:
    """The same shard, as one along a dimension."""
    if shard.dim == dim:
        return shard
    if shard.length != shard.shape[shard.dim]:
        raise unsupported
    return replace(shard, dim=dim, start=0, length=shard.shape[dim])


def _within(shard: Shard, number: int, parts: int) -> Shard | None:
    """The overlap of a shard with part `number` of `parts` equal parts along its dimension, as a shard of that part."""
    if parts == 1:
        return shard
    size = shard.shape[shard.dim] // parts
    low, high = max(shard.start, number * size), min(shard.start + shard.length, (number + 1) * size)
    if low >= high:
        return None
    shape = (*shard.shape[: shard.dim], size, *shard.shape[shard.dim + 1 :])
    offset = shard.offset + low - shard.start
    return replace(shard, shape=shape, start=low - number * size, length=high - low, offset=offset, part=str(number))
