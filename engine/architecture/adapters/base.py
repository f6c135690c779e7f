"""The base of an adapter: the names by which adapters call the parts of its checkpoint's tensors.

An adapter names modules as the library that trained it does, which may differ from the checkpoint: transformers 5
renames and stacks the parts of some models, matrices may be one there and several here, and models that take images
have other prefixes. The family's table of names gives all of these; the few names that do not follow from it are
`_RENAMED`, which applies to the names of both sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from quire.engine.architecture.adapter_spec import Runs, length
from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families import family_of
from quire.engine.architecture.families.family import Family
from quire.engine.architecture.families.tensors import StoredTensor, expert_numbers, model_parameters, stored_tensor
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec, TransformersModelSpec
from quire.engine.architecture.spec_parts import Shape

T = TypeVar("T")

_WHOLES = ("base_model", "model", "language_model", "text_model", "backbone", "transformer", "vlm", "_orig_mod")
"""Modules that contain a whole model, so that names may lack them, or have them in another order."""
_RENAMED = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.input_linear\b", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\b", ".mlp.experts.down_proj"),
        (r"\.router\.layer\b", ".router"),
        (r"\.mlp\.gate(?=\.weight$|\.bias$|$)", ".mlp.router"),
        (r"\.(experts\.\d+|shared_experts)\.w1\b", r".\1.gate_proj"),
        (r"\.(experts\.\d+|shared_experts)\.w2\b", r".\1.down_proj"),
        (r"\.(experts\.\d+|shared_experts)\.w3\b", r".\1.up_proj"),
        (r"\.forget_gate\.", "."),
        (r"\.(?:attn|attention)\.", ".self_attn."),
        (r"\.self_attn\.dense\b", ".self_attn.o_proj"),
        (r"\.self_attn\.(?:g_proj|linear_gate)\b", ".self_attn.gate_proj"),
        (r"\.self_attn\.index_([qk])_proj\b", r".self_attn.indexer.\1_proj"),
        (r"\.self_attn(\.indexer)?\.w([qo]_[ab])\b", r".self_attn\1.\2_proj"),
        (r"\.w(kv|gate)\b", r".\1_proj"),
        (r"\.compressor\.indexer\.(?:scorer\.(?=weights_proj)|(?=q_b_proj))", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.ffn\.", ".mlp."),
        (r"^(?:embed|word_embeddings)(?=\.|$)", "embed_tokens"),
        (r"^(?:head|embed_out)(?=\.|$)", "lm_head"),
        (r"^(?:vision_model|vit)\.", "vision_tower."),
        (r"^vision_tower\.vision_model\.", "vision_tower."),
        (r"^vision_tower\.encoder\.layers\.", "vision_tower.layers."),
        (r"\.mlp\.dense_h_to_4h\b", ".mlp.fc1"),
        (r"\.mlp\.dense_4h_to_h\b", ".mlp.fc2"),
        (r"^vision_tower\.perceive\.", "vision_tower.patch_merger."),
        (r"^patch_merge_mlp\.linear_", "multi_modal_projector.merge_linear_"),
        (r"^mlp_AR\.", "projector."),
        (r"^(?:projector\.layers|vit_large_projector)(?=\.\w+$|$)", "multi_modal_projector"),
        (r"^mm_projector\.in_proj\b", "mm_projector.proj.0"),
        (r"^mm_projector\.out_proj\b", "mm_projector.proj.2"),
        (r"^(resampler_model\.\w+_linear)\.fc1\b", r"\1.0"),
        (r"^(resampler_model\.\w+_linear)\.fc2\b", r"\1.2"),
        (r"^(resampler_model\.\w+_linear)\.ln\b", r"\1.3"),
        (r"^vision_tower\.(?:embeddings\.proj|conv1)\b", "vision_tower.embeddings.patch_embedding"),
        (r"^vision_tower\.ln_pre\b", "vision_tower.pre_layernorm"),
        (r"^vision_tower\.sam_encoder\.patch_embed\.projection\b", "sam_model.patch_embed.proj"),
    )
]
_FUSED = {("q", "k", "v"): "qkv_proj", ("gate", "up"): "gate_up_proj"}
"""The usual name of a matrix with these parts; a part has its own name before `_proj`."""
_INTERLEAVED_BY_LAYOUT = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures whose queries and keys have neighbouring rotary pairs only in GGUF and in Mistral's own layout."""


class Slot(NamedTuple):
    """Rows of a matrix `[out, in]` in a tensor of the checkpoint; for a convolution, `in` are the values under it."""

    tensor: str
    shape: Shape
    """The tensor's."""
    rows: Runs
    is_transposed: bool = False
    """The last two dimensions are `[in, out]`."""
    expert: int | None = None
    """The index of the matrix in a stack."""
    heads: int = 0
    """Heads of queries or keys that rotate, of a matrix that has nothing else."""

    @property
    def columns(self) -> int:
        shape = self.shape if self.expert is None else self.shape[1:]
        return shape[0] if self.is_transposed else math.prod(shape[1:])


Module = tuple[Slot, ...]
"""The rows of a matrix as an adapter names it, one slot after another."""


class Base:
    """The parts of a model's checkpoint, by the names that adapters use."""

    def __init__(
        self, arch: ModelSpec | None, others: Mapping[str, Shape] | None = None, *, has_head: bool = True
    ) -> None:
        """`others` are further tensors that an adapter may change, such as a classifier's head; without an `arch`, all
        of the checkpoint's. A model that only embeds texts has no head."""
        self.shapes: dict[str, Shape] = {}
        """Of the checkpoint's tensors."""
        self._prefix = ""
        self._modules: dict[str, Module | None] = {}
        self._stacks: dict[str, tuple[Module, ...] | None] = {}
        """Modules of all experts, by the names of parameters that stack them."""
        self._tensors: dict[str, str | None] = {}
        self.embedding, self.head, self.tie_embeddings = "", "", False
        """Names of the tensors of embedding and head, which has its own name if it is tied to the embedding."""
        self.has_pairs = False
        """Queries and keys have neighbouring rotary pairs, unlike the model as it was published."""
        if arch is not None and not isinstance(arch, TransformersModelSpec):
            self._add_model(arch, has_head=has_head)
        for name, shape in (others or {}).items():
            if name not in self.shapes:
                self._add_tensor(name, shape)
                if len(shape) > 1:
                    path = name.removesuffix(".weight")
                    self._set(self._modules, path, (Slot(name, shape, (range(shape[0]),)),))

    def module(self, path: str) -> Module | None:
        """The matrix of a module; None: the model has none of this name."""
        return self._find(self._modules, path)

    def stacks(self, path: str) -> dict[str, tuple[Module, ...]]:
        """The parameters of a module, or the module's only parameter, that stack the matrices of experts, in order."""
        if (own := self._find(self._stacks, path)) is not None:
            return {"": own}
        start = f"{self.canonical(path)}."
        found = {name: each for name, each in self._stacks.items() if name.startswith(start) and each is not None}
        return {name.removeprefix(start): each for name, each in found.items() if "." not in name.removeprefix(start)}

    def tensor(self, name: str) -> str | None:
        """The checkpoint's name of a tensor; None: it has none of this name."""
        return self._find(self._tensors, name)

    def canonical(self, name: str) -> str:
        """A name without what differs between libraries."""
        while True:
            first, _, rest = name.partition(".")
            if first in _WHOLES and rest:
                name = rest
            elif self._prefix and name.startswith(self._prefix):
                name = name.removeprefix(self._prefix)
            else:
                break
        for pattern, new in _RENAMED:
            name = pattern.sub(new, name)
        return name

    def _find(self, names: Mapping[str, T | None], name: str) -> T | None:
        return names.get(f"={name}") or names.get(self.canonical(name))

    def _set(self, names: dict[str, T | None], name: str, value: T) -> None:
        """Note a value under a name; names that others share once they are canonical must be exact."""
        names[f"={name}"] = value
        short = self.canonical(name)
        names[short] = value if names.setdefault(short, value) == value else None

    def _add_tensor(self, name: str, shape: Shape) -> None:
        self.shapes[name] = shape
        self._set(self._tensors, name, name)

    def _add_model(self, arch: ModelSpec, *, has_head: bool) -> None:
        family = family_of(arch)
        self._prefix, self.tie_embeddings = family.prefix, arch.tie_embeddings
        ropes = [each.attention.rope for each in arch.layers if isinstance(each.attention, AttentionSpec)]
        is_interleaved = any(rope is not None and rope.is_interleaved for rope in ropes)
        self.has_pairs = arch.name in _INTERLEAVED_BY_LAYOUT and is_interleaved
        for number, layer, module, kind, parts in model_parameters(arch, has_head):
            stored = {part: stored_tensor(family, arch, layer, module, kind, part, parts) for part in parts}
            experts = expert_numbers(layer, module)
            for each in dict.fromkeys(stored.values()):
                for expert in (experts if experts is not None and not each.is_stacked else None) or [None]:
                    self._add_tensor(each.named(arch, number, expert), each.shape)
            if kind == "weight" and all(len(shape) > 1 for shape in parts.values()):
                for path, slots in _modules(family, arch, number, layer, module, parts, stored):
                    self._set(self._modules, path, slots)
                if experts is not None:
                    for path, stack in _stacks(family, arch, number, layer, module, parts, stored):
                        self._set(self._stacks, path, stack)
        self.embedding = self._outer(family, arch, "embedding")
        if has_head:
            self.head = self._outer(family, replace(arch, tie_embeddings=False), "head")
            if arch.tie_embeddings:
                shape = self.shapes[self.embedding]
                self._add_tensor(self.head, shape)
                path = self.head.removesuffix(".weight")
                self._set(self._modules, path, (Slot(self.head, shape, (range(shape[0]),)),))

    def _outer(self, family: Family, arch: ModelSpec, module: str) -> str:
        """The tensor of the embedding or of the head."""
        shape = (arch.vocab_size, arch.hidden_size)
        return stored_tensor(family, arch, None, module, "weight", "", {"": shape}).name


def _slots(
    family: Family,
    arch: ModelSpec,
    number: int | None,
    layer: LayerSpec | None,
    module: str,
    parts: Mapping[str, Shape],
    stored: Mapping[str, StoredTensor],
    expert: int | None,
) -> dict[str, Slot]:
    """The rows of each part of a parameter, of one expert if it has experts."""
    found: dict[str, Slot] = {}
    attention = None if layer is None else layer.attention
    for part, tensor in stored.items():
        size = parts[part][0]
        before = sum(parts[each][0] for each in tensor.joint[: tensor.joint.index(part)])
        runs = None if layer is None else family.rows(layer, module, part)
        is_alone = len(tensor.joint) == 1
        heads = 0
        if isinstance(attention, AttentionSpec) and module == "layers.attention.qkv" and is_alone:
            heads = {"q": attention.num_heads, "k": attention.num_kv_heads}.get(part, 0)
        found[part] = Slot(
            tensor.named(arch, number, expert),
            tensor.shape,
            (range(size),) if is_alone else tuple(runs) if runs is not None else (range(before, before + size),),
            tensor.is_transposed,
            (expert or 0) - (expert_numbers(layer, module) or range(1)).start if tensor.is_stacked else None,
            heads,
        )
    return found


def _modules(
    family: Family,
    arch: ModelSpec,
    number: int | None,
    layer: LayerSpec | None,
    module: str,
    parts: Mapping[str, Shape],
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, Module]]:
    """The matrices of a parameter: as the checkpoint has them, its parts alone, all of its parts, and those of each
    expert."""
    experts = expert_numbers(layer, module)
    usual = family.with_separate_experts() if experts is not None else family
    for expert in [None] if experts is None else experts:
        slots = _slots(family, arch, number, layer, module, parts, stored, expert)
        paths = {}
        for part, slot in slots.items():
            own = stored[part]
            if own.is_stacked:  # the names that separate experts would have
                own = stored_tensor(usual, arch, layer, module, "weight", part, parts)
                yield own.named(arch, number, expert).removesuffix(".weight"), (slot,)
            elif len(own.joint) == 1:
                yield slot.tensor.removesuffix(".weight"), (slot,)
            else:
                out = slot.shape[-1] if slot.is_transposed else slot.shape[0]
                yield slot.tensor.removesuffix(".weight"), (slot._replace(rows=(range(out),)),)
            paths[part] = own.named(arch, number, expert).removesuffix(".weight")
        parent = next(iter(paths.values())).rpartition(".")[0]
        if (fused := _FUSED.get(tuple(parts))) is not None:
            if len({*paths.values()}) == 1:
                yield from ((f"{parent}.{part}_proj", (slot,)) for part, slot in slots.items())
            elif all(len(own.joint) == 1 for own in stored.values()) or experts is not None:
                yield f"{parent}.{fused}", tuple(slots.values())


def _stacks(
    family: Family,
    arch: ModelSpec,
    number: int | None,
    layer: LayerSpec | None,
    module: str,
    parts: Mapping[str, Shape],
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, tuple[Module, ...]]]:
    """The parameters with the matrices of all experts: of the checkpoint, or as transformers stacks separate ones."""
    experts = expert_numbers(layer, module)
    assert experts is not None
    of_experts = [_slots(family, arch, number, layer, module, parts, stored, expert) for expert in experts]
    for part, own in stored.items():
        if own.is_stacked and own.joint[0] == part:
            out = own.shape[-1] if own.is_transposed else own.shape[1]
            whole = tuple((slots[part]._replace(rows=(range(out),)),) for slots in of_experts)
            yield own.named(arch, number).removesuffix(".weight"), whole
    if not any(own.is_stacked for own in stored.values()):
        first = next(iter(stored.values()))
        parent = replace(first, name=first.name.partition("{expert}")[0]).named(arch, number)
        name = "down_proj" if module.endswith("down") else _FUSED.get(tuple(parts), "up_proj")
        yield f"{parent}{name}", tuple(tuple(slots.values()) for slots in of_experts)


def num_rows(module: Module) -> int:
    return sum(length(slot.rows) for slot in module)
