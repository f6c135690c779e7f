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

from quire.engine.checkpoints.checkpoint import Rows, StoredSlice
from quire.engine.layers.weight import Shard, Weight
from quire.engine.models.transformers_backend.experts import PlannedExperts
from quire.engine.models.transformers_backend.sharding import PlannedLinear
from quire.engine.protocol.errors import ConfigError

_WITH_SCALES = frozenset(("Inkling2LoopDequantizeExperts",))
"""Operations that change nothing where the checkpoint has weights without scales."""
_JOINING = frozenset(("Concatenate", "Inkling2LoopMergeMessageQueries"))
"""Operations that take the tensors of several source patterns."""


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
    vocab_size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    for path, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        own = renamed.get(path, path)
        name = tied.get(own, own)
        sources = [] if names is None else names.sources.get(name) or names.sources.get(own, [])
        is_transposed = path in transposed
        if not sources or sources[0].converter is None:
            stored = sources[0].name if sources else name
            for shard in weight.shards:
                yield weight, shard, _Cut(shard, is_transposed, shard.expert).stored(stored, len(weight))
        else:
            conversion = _Conversion(name, len(weight), sources, shapes, vocab_size)
            slices = [each for shard in weight.shards for each in conversion.slices(shard, is_transposed)]
            weight.shards = tuple(shard for shard, _ in slices)
            yield from ((weight, *each) for each in slices)


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


@dataclass(frozen=True)
class _Cut:
    """A shard as a slice of a tensor that an operation of transformers returns or takes."""

    shard: Shard
    is_transposed: bool
    """Whether the tensor has inputs before outputs, unlike the shard."""
    expert: int | None
    """Its index in the tensor, if that is a stack of experts' matrices."""
    source: int = 0
    """Index of the tensor's source pattern."""
    item: int | None = None
    """Index in a list of tensors."""
    rows: Rows | None = None
    """As in `StoredSlice`."""
    num_rows: int | None = None
    """Rows of the tensor; None: as many as in the shard's tensor."""

    def dim(self, number: int) -> int:
        """The shard's dimension for dimension `number` of the tensor; -1: the dimension of experts."""
        dim = number - (self.expert is not None)
        return 1 - dim if self.is_transposed and dim >= 0 else dim

    def stored(self, name: str, num_experts: int) -> StoredSlice:
        rows, *columns = self.shard.shape
        shape = (self.num_rows or rows, *columns)
        shape = shape[::-1] if self.is_transposed else shape
        shape = shape if self.expert is None else (num_experts, *shape)
        return StoredSlice(name, shape, self.rows, self.is_transposed, self.expert)


class _Conversion:
    """How transformers makes the parameter `name`, of `num_experts` if it is a stack, from `sources`. `shapes` are the
    shapes of all parameters."""

    def __init__(
        self,
        name: str,
        num_experts: int,
        sources: Sequence[TensorSource],
        shapes: Mapping[str, tuple[int, ...]],
        vocab_size: int | None,
    ) -> None:
        self._name, self._num_experts, self._shapes, self._vocab_size = name, num_experts, shapes, vocab_size
        converter = sources[0].converter
        groups = [
            [each.name for each in sources if each.part == part] for part in range(len(converter.source_patterns))
        ]
        self._groups = [group for group in groups if group]
        self._targets: list[str] = converter.target_patterns
        self._operations = [
            each for each in converter.operations if len(self._groups) > 1 or type(each).__name__ not in _WITH_SCALES
        ]
        kinds = [type(each).__name__ for each in self._operations]
        self._unsupported = ConfigError(
            f"{name} is converted from {sources[0].name} by {', then '.join(kinds)}, which is not supported"
        )
        if len(self._groups) > 1 and not _JOINING & {*kinds}:
            raise self._unsupported

    def slices(self, shard: Shard, is_transposed: bool) -> Iterator[tuple[Shard, StoredSlice]]:
        """The parts of a shard, as slices of the sources: the operations are followed backwards."""
        cuts = [_Cut(shard, is_transposed, shard.expert)]
        for operation in reversed(self._operations):
            cuts = [each for cut in cuts for each in self._before(operation, cut)]
        for cut in cuts:
            names = self._groups[cut.source]
            if len(names) != (1 if cut.item is None else self._num_experts):
                raise self._unsupported
            yield cut.shard, cut.stored(names[cut.item or 0], self._num_experts)

    def _before(self, operation: Any, cut: _Cut) -> Iterator[_Cut]:
        """The slices of the operation's inputs that make up this slice of its output."""
        kind, shard, dim = type(operation).__name__, cut.shard, cut.dim(getattr(operation, "dim", 0))
        if cut.item is not None or (cut.rows is not None and kind != "MergeModulelist"):
            raise self._unsupported
        along = _along(shard, dim)
        match kind:
            case "MergeModulelist" if dim == -1 and cut.expert is not None:
                yield replace(cut, expert=None, item=cut.expert)
            case "Concatenate" if along is not None:  # parts of the same size
                for number in range(len(self._groups)):
                    if (own := _within(along, number, len(self._groups))) is not None:
                        yield replace(cut, shard=own, source=number)
            case "Chunk" | "Split" if along is not None:
                if not (found := [number for number, pattern in enumerate(self._targets) if pattern in self._name]):
                    raise self._unsupported
                number = found[0]
                sizes = [along.shape[dim]] * len(self._targets)
                if kind == "Split":
                    names = [self._name.replace(self._targets[number], target) for target in self._targets]
                    sizes = [self._shapes[name][dim] for name in names]
                shape = (*along.shape[:dim], sum(sizes), *along.shape[dim + 1 :])
                yield replace(cut, shard=replace(along, shape=shape, start=sum(sizes[:number]) + along.start))
            case "Interleave" if dim == 0 and not operation.inverse:  # neighbors are half of the rows apart
                yield replace(cut, rows=np.arange(shard.shape[0]).reshape(-1, 2).T.flatten())
            case "Transpose" if not operation.check_dims and len(shard.shape) == 2:
                if {cut.dim(operation.dim0), cut.dim(operation.dim1)} != {0, 1}:
                    raise self._unsupported
                yield replace(cut, is_transposed=not cut.is_transposed)
            case "Inkling2UnpadVocab" if dim == 0:
                yield replace(cut, rows=np.arange(shard.shape[0]), num_rows=self._vocab_size)
            case "Inkling2LoopMergeMessageQueries" if cut.expert is not None:
                # Of a layer: of queries, of keys and values, and of the MLP. The second source has the second kind.
                both = replace(cut, expert=None, rows=2 * cut.expert + np.arange(2), num_rows=2 * self._num_experts)
                for source, start, length, offset in ((0, 0, 1, 0), (1, 0, 2, 1), (0, 1, 1, 3)):
                    part = replace(shard, shape=(2, *shard.shape[1:]), start=start, length=length, offset=offset)
                    yield replace(both, shard=part, source=source)
            case _:
                raise self._unsupported


def _along(shard: Shard, dim: int) -> Shard | None:
    """The same shard, as one along a dimension; None: it is a slice along another one."""
    if shard.dim == dim:
        return shard
    is_whole = dim >= 0 and shard.length == shard.shape[shard.dim]
    return replace(shard, dim=dim, start=0, length=shard.shape[dim]) if is_whole else None


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
