"""The tensors that a model reads from its checkpoint, by name and shape. No torch here.

`checkpoint_tensors` lists the tensors of the complete model, so that a checkpoint can be checked before anything
starts; the modules in `quire.engine.layers` have the same parameters, and a test compares both for every family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.families import FAMILIES, family_of
from quire.engine.architecture.families.family import Family
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec, TransformersModelSpec
from quire.engine.architecture.residual_spec import SharedBlockSpec
from quire.engine.architecture.spec_parts import Shape, without_number


@dataclass(frozen=True)
class StoredTensor:
    """How the checkpoint stores a parameter, or a part of it."""

    name: str
    """May contain `{layer}`, `{previous}` and `{expert}`; see `named`."""
    shape: Shape
    joint: tuple[str, ...]
    """The parts that this tensor contains."""
    is_transposed: bool
    is_stacked: bool
    """All experts are stacked in this tensor."""
    is_grid: bool
    """It has a dimension for heads, or one of size 1, which our parameter does not have, or none at all."""

    def named(self, arch: ModelSpec, number: int | None, expert: int | None = None) -> str:
        """The name with the numbers of the layer, which is `number` in the model, the one before it, and the expert."""
        first = arch.first_layer if isinstance(arch, DraftHeadSpec) else 0
        layer = None if number is None else first + number
        return self.name.format(layer=layer, previous=None if layer is None else layer - 1, expert=expert)


def stored_tensor(
    family: Family,
    arch: ModelSpec,
    layer: LayerSpec | None,
    module: str,
    kind: str,
    part: str,
    parts: Mapping[str, Shape],
) -> StoredTensor:
    """Locate the `part` of the parameter `kind` of a module (a path without layer numbers).

    `parts` are the shapes of all the parameter's parts; for experts, of a single expert.
    """
    if module == "head" and kind == "weight" and arch.tie_embeddings:
        module = "embedding"
    names = family.names_of(arch)
    name = _of_block(_name(names, module, part, kind), layer)
    joint = tuple(each for each in parts if each == part or _of_block(_name(names, module, each, kind), layer) == name)
    shape: Shape = (sum(parts[each][0] for each in joint), *parts[part][1:])
    if is_transposed := len(shape) > 1 and family.is_transposed(module):
        shape = (*shape[:-2], shape[-1], shape[-2])
    is_stacked = False
    if (experts := expert_numbers(layer, module)) is not None and (is_stacked := "{expert}" not in name):
        shape = (len(experts), *shape)
    is_grid = f"{module}.{kind}" in family.leading_ones
    shape = (len(joint), shape[0] // len(joint), *shape[1:]) if is_grid else shape
    if f"{module}.{kind}" in family.scalars:
        is_grid, shape = True, ()
    if layer is not None and isinstance(layer.attention, AttentionSpec) and layer.attention.qk_norm_over == "each head":
        is_grid = module in ("layers.attention.query_norm", "layers.attention.key_norm")
        shape = (shape[0] // layer.attention.head_dim, layer.attention.head_dim) if is_grid else shape
    return StoredTensor(name, shape, joint, is_transposed, is_stacked, is_grid)


def _of_block(name: str, layer: LayerSpec | None) -> str:
    """Fill in what the name says of the layer's block: `{block}`, its first layer, `{use}`, the layer's number among
    layers with a block, and `{beside_block.}`, for a module that is in another one if there is a block."""
    if layer is None:
        return name
    if not isinstance(block := layer.residual, SharedBlockSpec):
        return re.sub(r"\{beside_(\w+)\}", "", name)
    name = re.sub(r"\{beside_(\w+)\}", r"\1.", name)
    return name.replace("{block}", str(block.source)).replace("{use}", str(block.use))


def _name(names: Mapping[str, str], module: str, part: str, kind: str) -> str:
    """The name of the tensor with a part, still to be formatted with the numbers of layer and expert."""
    for key, rest in ((f"{module}.{part}.{kind}", ""), (f"{module}.{part}", f".{kind}")):
        if part and key in names:
            return names[key] + rest
    whole = f"{module}.{kind}"
    name = names[whole] if whole in names else f"{names[module]}.{kind}"
    return name.replace("{part}", part)


class NeededTensor(NamedTuple):
    """A tensor that a model needs, as an unquantized checkpoint stores it."""

    shape: Shape
    is_transposed: bool = False
    has_integers: bool = False

    @property
    def weight_shape(self) -> Shape:
        """`[out, in]` or `[experts, out, in]`."""
        *lead, rows, columns = self.shape
        return (*lead, columns, rows) if self.is_transposed else self.shape


def checkpoint_tensors(arch: ModelSpec, *, has_head: bool) -> dict[str, NeededTensor]:
    """Return the tensors that the model needs by their names in the checkpoint."""
    family, found = family_of(arch), dict[str, NeededTensor]()
    for number, layer, module, kind, parts in model_parameters(arch, has_head):
        for part in parts:
            stored = stored_tensor(family, arch, layer, module, kind, part, parts)
            for expert in expert_numbers(layer, module) or range(1):
                found[stored.named(arch, number, expert)] = NeededTensor(
                    stored.shape, stored.is_transposed, kind == "table"
                )
    return found


class StackSlice(NamedTuple):
    """Where a stack contains an expert's matrix or bias."""

    stack: str
    shape: Shape
    """The stack's shape, with the experts first; the file may have them and their rows in one dimension."""
    expert: int
    rows: tuple[range, ...]
    """The expert's rows."""
    is_transposed: bool


def stacked_experts(arch: ModelSpec) -> dict[str, StackSlice]:
    """The tensors that a checkpoint with separate experts has instead of stacks, by name."""
    family, found = FAMILIES[arch.name], dict[str, StackSlice]()
    for number, layer, module, kind, parts in model_parameters(arch, has_head=False):
        if (experts := expert_numbers(layer, module)) is None:
            continue
        assert layer is not None
        start = 0
        for part, (size, *_) in parts.items():
            stack = stored_tensor(family, arch, layer, module, kind, part, parts)
            own = stored_tensor(family.with_separate_experts(), arch, layer, module, kind, part, parts)
            rows = tuple(family.rows(layer, module, part) or (range(start, start + size),))
            start += size if len(stack.joint) > 1 else 0
            for expert in experts if stack.is_stacked else ():
                found[own.named(arch, number, expert)] = StackSlice(
                    stack.named(arch, number), stack.shape, expert, rows, stack.is_transposed
                )
    return found


def weight_names(arch: ModelSpec) -> dict[tuple[int | None, str], list[str]]:
    """The checkpoint's names, without `.weight`, of the weights that each module with a matrix combines, such as q, k
    and v; for experts, only the first expert's names. Modules are given by the number of their layer, None outside the
    layers, and their path."""
    if isinstance(arch, TransformersModelSpec):  # its paths are transformers' own
        outer = [(None, each.module) for each in arch.outer_matrices(1)]
        inner = [(number, each.module) for number, layer in enumerate(arch.layers) for each in layer.linears]
        return {(number, module): [module] for number, module in (*outer, *inner)}
    family, found = family_of(arch), dict[tuple[int | None, str], list[str]]()
    for number, layer, module, kind, parts in model_parameters(arch, has_head=True):
        if kind == "weight" and all(len(shape) == 2 for shape in parts.values()):
            tensors = {part: stored_tensor(family, arch, layer, module, kind, part, parts) for part in parts}
            first, *_ = expert_numbers(layer, module) or [0]
            names = [one.named(arch, number, first) for one in tensors.values()]
            path = module.removeprefix("layers.")
            found[number, path] = [name.removesuffix(".weight") for name in dict.fromkeys(names)]
    return found


def expert_numbers(layer: LayerSpec | None, module: str) -> range | None:
    """The numbers of the experts that a module has; None: it has none."""
    mixture = None if layer is None else layer.feed_forward
    return mixture.expert_numbers(module.removeprefix("layers.")) if isinstance(mixture, MoESpec) else None


def model_parameters(
    arch: ModelSpec, has_head: bool
) -> Iterator[tuple[int | None, LayerSpec | None, str, str, Mapping[str, Shape]]]:
    """All parameters, with the number and the description of their layer: their modules, names and parts."""
    if isinstance(arch, DraftHeadSpec):
        for each in arch.parameters_before():
            yield None, None, each.module, each.kind, each.parts
        for number in range(arch.num_heads):
            for each in arch.head_parameters():
                yield number, arch.layers[number], each.module, each.kind, each.parts
    else:
        for each in chain(arch.parameters_before(), arch.parameters_after(has_head=has_head)):
            module, layer_of_tower = without_number(each.module)
            yield layer_of_tower, None, module, each.kind, each.parts
    for number, layer in enumerate(arch.layers):
        for each in layer.parameters(arch.hidden_size):
            yield number, layer, f"layers.{each.module}".rstrip("."), each.kind, each.parts
