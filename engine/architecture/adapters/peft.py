"""Reads PEFT's adapters: the names and shapes of their tensors → `AdapterSpec`. No torch here.

Source: peft/tuners/lora/layer.py and peft/utils/save_and_load.py of github.com/huggingface/peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.engine.architecture.adapter_spec import AdapterSpec, LowRank, Piece, Runs, TensorChange, length
from quire.engine.architecture.adapters.base import Base, Module, Slot, num_rows
from quire.engine.architecture.adapters.settings import LoraSettings
from quire.engine.architecture.spec_parts import Shape
from quire.engine.protocol.errors import ConfigError

_PREFIX = "base_model.model."
_LORA = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.(weight|bias))?"
)
_KINDS = {
    ("lora_A", "weight"): "A",
    ("lora_B", "weight"): "B",
    ("lora_B", "bias"): "bias",
    ("lora_embedding_A", None): "embedding A",
    ("lora_embedding_B", None): "embedding B",
    ("lora_magnitude_vector", None): "magnitude",
    ("lora_magnitude_vector", "weight"): "magnitude",
}
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")


@dataclass
class _Layer:
    """The tensors of a module's low-rank change, by their kind."""

    path: str
    tensors: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    """Wrappers around the module that this one is inside of: modules with several stacks have one for each."""


class Builder:
    """Collects the changes of an adapter's tensors."""

    def __init__(self, base: Base, shapes: Mapping[str, Shape]) -> None:
        self._base, self._shapes = base, shapes
        self.changes: dict[str, TensorChange] = {}

    def piece(self, tensor: str, **changes: object) -> Piece:
        """All of a tensor, as a matrix."""
        shape = self._shapes[tensor]
        rows, columns = (1, 1) if not shape else (shape[0], math.prod(shape[1:]))
        return replace(Piece(tensor, (range(rows),), (range(columns),)), **changes)  # type: ignore[arg-type]

    def add(self, module: Module, change: LowRank, *, has_pairs: bool = False) -> None:
        """Add a change of a module's rows, in their order; `has_pairs` if they are those of GGUF.

        Raises `ConfigError` naming the tensors if they have other sizes than the module, or change rows twice.
        """
        up, down, magnitude, bias = change.up, change.down, change.magnitude, change.bias
        rows, columns, rank = num_rows(module), module[0].columns, down.shape[0]
        for piece, expected in ((up, (rows, rank)), (down, (rank, columns))):
            if piece.shape != expected:
                found = list(self._shapes[piece.tensor])
                raise ConfigError(
                    f"{piece.tensor} has the shape {found}, which does not fit {list(expected)} for {module[0].tensor}"
                )
        if not 0 < rank <= max(rows, columns):
            raise ConfigError(f"{down.tensor} has the rank {rank}, but {module[0].tensor} is only {rows} x {columns}")
        norms = columns if change.has_column_norms else rows
        for vector, size in ((magnitude, norms), (bias, rows)):
            if vector is not None and vector.shape != (size, 1):
                raise ConfigError(f"{vector.tensor} has {vector.shape[0]} numbers, expected {size}")
        start = 0
        for slot in module:
            count = length(slot.rows)
            own, order = _cut((range(rows),), start, start + count), slot.rows
            if slot.heads and has_pairs != self._base.has_pairs:
                pairs = _pairs(slot.heads, count)
                if self._base.has_pairs:
                    order = pairs
                else:
                    own = _shift(pairs, start)
            start += count
            part = replace(
                change,
                up=_rows_of(up, own),
                rows=order,
                expert=slot.expert,
                magnitude=magnitude if magnitude is None or change.has_column_norms else _rows_of(magnitude, own),
                bias=None if bias is None else _rows_of(bias, own),
            )
            before = self.changes.get(slot.tensor, TensorChange(slot.shape, slot.is_transposed))
            for other in before.low_rank:
                if other.expert == slot.expert and _overlap(other.rows, order):
                    raise ConfigError(f"{up.tensor} and {other.up.tensor} change the same rows of {slot.tensor}")
            shape = before.shape if before.replacement is not None else slot.shape
            self.changes[slot.tensor] = replace(
                before, shape=shape, is_transposed=slot.is_transposed, low_rank=(*before.low_rank, part)
            )

    def spec(self, setting: str, tokens: tuple[int, ...], vocab_size: int | None = None) -> AdapterSpec:
        """What was collected; `setting` has the invocation tokens. Raises `ConfigError` for tokens that no prompt can
        contain."""
        size = vocab_size or self._base.shapes.get(self._base.embedding, (0,))[0]  # 0: it is not known
        if size and (outside := [each for each in tokens if each >= size]):
            raise ConfigError(f"{setting} has {outside[0]}, but the vocabulary has {size} tokens")
        return AdapterSpec(self.changes, vocab_size, tokens)


def read(
    settings: LoraSettings, shapes: Mapping[str, Shape], base: Base, digests: Mapping[str, bytes] | None = None
) -> AdapterSpec:
    """Map the tensors of adapter_model.safetensors to changes of the base's tensors; every tensor is used, but for
    second copies, which have equal `digests`, and those that a trained module has replaced.

    Raises `ConfigError` that names a tensor which the base has no place for, or which does not fit.
    """
    builder = Builder(base, shapes)
    layers, tokens, others = _sorted_out(shapes, digests or {})
    settings.check_steps(path for path, _ in layers)
    vocab_size = _replace_tensors(others, builder, shapes, base)
    for name in settings.modules_to_save:
        ends = re.compile(rf"(?:.*\.)?{re.escape(name)}\.[^.]+")
        if any(map(ends.fullmatch, base.shapes)) and not any(map(ends.fullmatch, others)):
            raise ConfigError(f"modules_to_save has {name}, but there is no tensor of it")
    for path, tensor in tokens.items():
        _add_tokens(path, tensor, {*tokens}, settings, builder, shapes, base)
    if settings.token_indices and not tokens:
        raise ConfigError("trainable_token_indices: there are no trainable_tokens_delta tensors")
    resized = {name: change.shape for name, change in builder.changes.items() if change.replacement is not None}
    for (path, _), layer in layers.items():
        _check_complete(layer, settings)
        if "embedding A" in layer.tensors:
            _add_embedding(layer, settings, builder, base, resized)
        elif (module := base.module(path)) is not None and not layer.depth:
            down, up = builder.piece(layer.tensors["A"]), builder.piece(layer.tensors["B"])
            module = tuple(_resized(slot, resized) for slot in module)
            builder.add(module, _low_rank(layer, path, up, down, settings, builder))
        elif stacks := base.stacks(path):
            siblings = [other for other in layers.values() if other.path == path]
            name, experts = _stack_of(layer, siblings, stacks, settings, shapes)
            _add_stack(layer, ".".join(filter(None, (path, name))), experts, settings, builder, shapes)
        else:
            raise ConfigError(f"{next(iter(layer.tensors.values()))}: the base has no module {path}")
    spec = builder.spec("alora_invocation_tokens", settings.invocation_tokens, vocab_size)
    if settings.invocation_tokens:
        _check_invoked(spec)
    return spec


def _check_invoked(spec: AdapterSpec) -> None:
    """PEFT switches low-rank products on behind an invocation; other changes of such an adapter always apply."""
    for change in spec.changes.values():
        others = [change.replacement, *(change.new_rows or ())[1:], *(each.magnitude for each in change.low_rank)]
        if found := next((piece for piece in others if isinstance(piece, Piece)), None):
            raise ConfigError(
                f"{found.tensor}: alora_invocation_tokens are supported with low-rank changes alone; "
                "train the adapter without modules_to_save, biases, tokens and DoRA"
            )


def _sorted_out(
    shapes: Mapping[str, Shape], digests: Mapping[str, bytes]
) -> tuple[dict[tuple[str, int], _Layer], dict[str, str], dict[str, str]]:
    """The low-rank changes, by the path of their module and depth, new rows by their module, and whole tensors by
    their name in the model."""
    layers: dict[tuple[str, int], _Layer] = {}
    tokens, others = dict[str, str](), dict[str, str]()
    trained = {tensor.replace(".modules_to_save.default.", ".modules_to_save.") for tensor in shapes}
    for tensor in shapes:
        if ".original_module." in tensor and tensor.replace(".original_module.", ".modules_to_save.") in trained:
            continue  # PEFT saves all of an embedding or head that was resized
        name = tensor.removeprefix(_PREFIX)
        if found := _LORA.fullmatch(name):
            kind = _KINDS.get((found[2], found[3]))
            path = found[1]
            while path.endswith(".base_layer"):
                path = path.removesuffix(".base_layer")
            depth = (len(found[1]) - len(path)) // len(".base_layer")
            own = layers.setdefault((path, depth), _Layer(path, depth=depth)).tensors
        elif found := _TOKENS.fullmatch(name):
            own, kind = tokens, found[1]
        else:
            own, kind = others, re.sub(r"\.modules_to_save(\.default)?\.|\.base_layer(?=\.[^.]+$)\.", ".", name)
            kind = None if re.search(r"\.(lora_|original_module\.|token_adapter\.|ranknum\b)", name) else kind
        if kind is None:
            raise ConfigError(f"{tensor} is no tensor of a LoRA adapter that is supported")
        if kind in own and digests.get(tensor, tensor) != digests.get(own[kind], own[kind]):
            raise ConfigError(f"{own[kind]} and {tensor} are the same tensor of the model")
        own[kind] = tensor
    return layers, tokens, others


def _check_complete(layer: _Layer, settings: LoraSettings) -> None:
    """Refuse missing halves, and vectors that the settings do not mention."""
    first, kinds = next(iter(layer.tensors.values())), layer.tensors.keys()
    pair = ("embedding A", "embedding B") if kinds & {"embedding A", "embedding B"} else ("A", "B")
    needed = {*pair} | ({"magnitude"} if settings.use_dora else set())
    needed |= {"bias"} if settings.lora_bias and pair == ("A", "B") else set()
    if missing := sorted(needed - kinds):
        raise ConfigError(f"{first}: the {missing[0]} of {layer.path} is missing")
    if surplus := sorted(kinds - needed):
        why = {"magnitude": "use_dora is not true", "bias": "lora_bias is not true"}
        raise ConfigError(f"{layer.tensors[surplus[0]]}: {why.get(surplus[0], 'it has two kinds of matrices')}")


def _low_rank(layer: _Layer, path: str, up: Piece, down: Piece, settings: LoraSettings, builder: Builder) -> LowRank:
    """The change of a module with these matrices."""
    if (rank := down.shape[0]) != (expected := settings.rank_of(path)):
        raise ConfigError(f"{down.tensor} has the rank {rank}, but adapter_config.json says {expected}")
    vectors = {
        kind: builder.piece(layer.tensors[kind]) if kind in layer.tensors else None for kind in ("magnitude", "bias")
    }
    vectors = {kind: each if each is None else _as_column(each) for kind, each in vectors.items()}
    return LowRank(up, down, settings.scaling(path), (), magnitude=vectors["magnitude"], bias=vectors["bias"])


def _as_column(piece: Piece) -> Piece:
    """A vector that is stored with further dimensions of 1, such as a convolution's magnitude."""
    return replace(piece, is_transposed=True) if piece.shape[0] == 1 and piece.shape[1] > 1 else piece


def _add_embedding(
    layer: _Layer, settings: LoraSettings, builder: Builder, base: Base, resized: Mapping[str, Shape]
) -> None:
    """An embedding `[tokens, features]` has A `[rank, tokens]` and B `[features, rank]`."""
    if (module := base.module(layer.path)) is None:
        raise ConfigError(f"{layer.tensors['embedding A']}: the base has no module {layer.path}")
    up = builder.piece(layer.tensors["embedding A"], is_transposed=True)
    down = builder.piece(layer.tensors["embedding B"], is_transposed=True)
    change = _low_rank(layer, layer.path, up, down, settings, builder)
    module = tuple(_resized(slot, resized) for slot in module)
    builder.add(module, replace(change, has_column_norms=change.magnitude is not None))


def _resized(slot: Slot, resized: Mapping[str, Shape]) -> Slot:
    """The rows of a tensor that has another number of them now."""
    shape = resized.get(slot.tensor, slot.shape)
    return slot if shape == slot.shape else slot._replace(shape=shape, rows=(range(shape[0]),))


def _stack_of(
    layer: _Layer,
    siblings: Sequence[_Layer],
    stacks: Mapping[str, tuple[Module, ...]],
    settings: LoraSettings,
    shapes: Mapping[str, Shape],
) -> tuple[str, tuple[Module, ...]]:
    """The parameter of a module that a wrapper is for: the innermost wrapper is for the module's first parameter."""
    first = layer.tensors["A"]
    if [*sorted(each.depth for each in siblings)] != [*range(len(siblings))]:
        raise ConfigError(f"{first}: the wrappers around or in it are missing")
    names = [*stacks]
    if len(siblings) < len(names):
        ends = tuple(f".{each}" for each in settings.target_parameters)
        named = [name for name in names if not name or f".{layer.path}.{name}".endswith(ends) or len(names) == 1]
        names = named or [name for name in names if _fits(stacks[name], layer, shapes)]
    if len(names) != len(siblings):
        raise ConfigError(
            f"{first}: it is not known which of {', '.join(stacks)} it is for; target_parameters does not say it"
        )
    name = names[len(names) - 1 - layer.depth]
    return name, stacks[name]


def _fits(experts: tuple[Module, ...], layer: _Layer, shapes: Mapping[str, Shape]) -> bool:
    (_, inputs), (outputs, _) = shapes[layer.tensors["A"]], shapes[layer.tensors["B"]]
    return {inputs, outputs} == {experts[0][0].columns, num_rows(experts[0])}


def _add_stack(
    layer: _Layer,
    path: str,
    experts: tuple[Module, ...],
    settings: LoraSettings,
    builder: Builder,
    shapes: Mapping[str, Shape],
) -> None:
    """A stack of experts has A `[experts * rank, in]`, one expert after another, and B `[out, rank * experts]`, whose
    columns take turns. Older PEFT takes the stack's second dimension for the inputs, whichever it is."""
    a, b, count = layer.tensors["A"], layer.tensors["B"], len(experts)
    for name in (a, b):
        if len(shapes[name]) != 2:
            raise ConfigError(f"{name} has the shape {list(shapes[name])}, expected a matrix")
    (rows, inputs), (outputs, columns) = shapes[a], shapes[b]
    if rows != columns or rows % count or not rows:
        raise ConfigError(f"{a} and {b} have {rows} and {columns} ranks, which are not those of {count} experts")
    own_inputs, own_outputs = experts[0][0].columns, num_rows(experts[0])
    is_swapped = (inputs, outputs) == (own_outputs, own_inputs)
    if is_swapped and own_inputs == own_outputs and not experts[0][0].is_transposed:
        if settings.swaps_square_stacks is None:
            raise ConfigError(
                f"{a}: it is not known whether it is for inputs or outputs: peft_version is missing, or a development "
                "version"
            )
        is_swapped = settings.swaps_square_stacks
    elif own_inputs == own_outputs:
        is_swapped = False
    rank, change = rows // count, None
    for number, module in enumerate(experts):
        of_a = builder.piece(a, rows=(range(number * rank, (number + 1) * rank),))
        of_b = builder.piece(b, columns=(range(number, columns, count),))
        up, down = of_b, of_a
        if is_swapped:
            up, down = replace(of_a, is_transposed=True), replace(of_b, is_transposed=True)
        change = change or _low_rank(layer, path, up, down, settings, builder)
        builder.add(module, replace(change, up=up, down=down))


def _replace_tensors(
    others: Mapping[str, str], builder: Builder, shapes: Mapping[str, Shape], base: Base
) -> int | None:
    """Replace whole tensors; the size of the vocabulary is returned if it is another one."""
    sizes: dict[str, int] = {}
    bias = f"{base.head.removesuffix('weight')}bias" if base.head else ""
    for name, tensor in others.items():
        found = base.tensor(name)
        if found is None:
            raise ConfigError(f"{tensor}: the base has no tensor {name}")
        if found in builder.changes:
            raise ConfigError(f"{tensor} replaces {found}, which another tensor replaces, too")
        shape, own = shapes[tensor], base.shapes[found]
        if found in (base.embedding, base.head, bias) and shape[1:] == own[1:] and len(shape) == len(own):
            sizes[found] = shape[0]
        elif shape != own:
            raise ConfigError(f"{tensor} has the shape {list(shape)}, but {found} has {list(own)}")
        module = base.module(name.removesuffix(".weight"))
        if base.has_pairs and module is not None and module[0].heads:
            raise ConfigError(f"{tensor} replaces queries or keys that are in GGUF's order, which is not supported")
        is_transposed = module is not None and module[0].tensor == found and module[0].is_transposed
        builder.changes[found] = TensorChange(shape, is_transposed, builder.piece(tensor))
    before = base.shapes.get(base.embedding, (0,))[0]
    if not any(size != before for size in sizes.values()):
        return None
    for name in (base.embedding, base.head, bias):
        if name in base.shapes and sizes.get(name, before) != max(sizes.values()):
            raise ConfigError(f"{name} has {sizes.get(name, before)} tokens, another tensor has {max(sizes.values())}")
    return max(sizes.values())


def _add_tokens(
    path: str,
    tensor: str,
    paths: set[str],
    settings: LoraSettings,
    builder: Builder,
    shapes: Mapping[str, Shape],
    base: Base,
) -> None:
    """New values of some tokens' rows; they are the head's, too, if it is tied to the embedding."""
    indices = settings.token_indices
    if isinstance(indices, Mapping):
        indices = next((each for key, each in indices.items() if path == key or path.endswith(f".{key}")), ())
    if (name := base.tensor(f"{path}.weight")) is None:
        raise ConfigError(f"{tensor}: the base has no tensor {path}.weight")
    shape = base.shapes[name]
    if len(shape) != 2 or shapes[tensor] != (len(indices), shape[1]) or len({*indices}) != len(indices):
        raise ConfigError(
            f"{tensor} has the shape {list(shapes[tensor])}, expected {[len(indices), *shape[1:]]} for the "
            f"{len(indices)} different trainable_token_indices"
        )
    if outside := [each for each in indices if each >= shape[0]]:
        raise ConfigError(f"{tensor}: trainable_token_indices has {outside[0]}, but {name} has {shape[0]} rows")
    is_tied = base.tie_embeddings and name == base.embedding and len(paths) == 1
    for each in (name, base.head) if is_tied and base.head else (name,):
        if each in builder.changes:
            raise ConfigError(f"{tensor} changes {each}, which another tensor replaces")
        builder.changes[each] = TensorChange(shape, new_rows=(indices, builder.piece(tensor)))


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    """The elements from `start` to `stop` of the elements of the ranges."""
    found, at = [], 0
    for run in runs:
        own = run[max(start - at, 0) : max(stop - at, 0)]
        if len(own):
            found.append(own)
        at += len(run)
    return tuple(found)


def _shift(runs: Runs, by: int) -> Runs:
    return tuple(range(run.start + by, run.stop + by, run.step) for run in runs)


def _rows_of(piece: Piece, rows: Runs) -> Piece:
    """Some rows of a piece, in their order."""
    of_file = piece.columns if piece.is_transposed else piece.rows
    own = tuple(part for run in rows for part in _steps(of_file, run))
    return replace(piece, columns=own) if piece.is_transposed else replace(piece, rows=own)


def _steps(runs: Runs, run: range) -> Runs:
    """The elements of the ranges at these places."""
    if len(runs) == 1:
        return (runs[0][run.start : run.stop : run.step],)
    every = [each for one in runs for each in one]
    return tuple(range(every[place], every[place] + 1) for place in run)


def _pairs(heads: int, rows: int) -> Runs:
    """In heads whose rotary pairs are neighbours, the places of the first features, and then of the second ones."""
    size = rows // heads
    return tuple(range(head * size + half, (head + 1) * size, 2) for head in range(heads) for half in (0, 1))


def _overlap(first: Runs, second: Runs) -> bool:
    if len(first) == len(second) == 1 and first[0].step == second[0].step == 1:
        return max(first[0].start, second[0].start) < min(first[0].stop, second[0].stop)
    return bool({each for run in first for each in run} & {each for run in second for each in run})
