"""The tensors that a model reads from its checkpoint, by name and shape. No torch here.

`checkpoint_tensors` lists those of the complete model, so that a checkpoint can be checked before anything starts; the
modules in `quire.engine.layers` have the same parameters, and a test compares both for every family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.architecture.attention_spec import AttentionSpec, CompressedAttentionSpec, GroupIndexerSpec, MLASpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.families import FAMILIES, family_of
from quire.engine.architecture.families.family import Family
from quire.engine.architecture.model_spec import (
    GatedConnectionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SharedBlockSpec,
    TransformersModelSpec,
)
from quire.engine.architecture.recurrent_spec import (
    GatedDeltaNetSpec,
    GroupedMambaSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MLSTMSpec,
    RGLRUSpec,
    RWKVSpec,
    ShortConvSpec,
)
from quire.engine.architecture.spec_parts import NormSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """How the checkpoint stores a parameter, or a part of it."""

    name: str
    """May contain `{layer}`, `{previous}` and `{expert}`; see `named`."""
    shape: Shape
    joint: tuple[str, ...]
    """The parts that this tensor has."""
    is_transposed: bool
    is_stacked: bool
    """All experts are stacked in this tensor."""
    is_grid: bool
    """It has a dimension for heads, or one of size 1, which our parameter does not have."""

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

    `parts` are the shapes of all the parameter's parts; those of experts are of a single expert.
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
    if layer is not None and module.startswith("layers.feed_forward.experts."):
        assert isinstance(layer.feed_forward, MoESpec)
        if is_stacked := "{expert}" not in name:
            shape = (layer.feed_forward.num_experts, *shape)
    is_grid = f"{module}.{kind}" in family.leading_ones
    shape = (1, *shape) if is_grid else shape
    if layer is not None and isinstance(layer.attention, AttentionSpec) and layer.attention.qk_norm_over == "each head":
        is_grid = module in ("layers.attention.query_norm", "layers.attention.key_norm")
        shape = (shape[0] // layer.attention.head_dim, layer.attention.head_dim) if is_grid else shape
    return StoredTensor(name, shape, joint, is_transposed, is_stacked, is_grid)


def _of_block(name: str, layer: LayerSpec | None) -> str:
    """The name with what it says of the layer's block: `{block}`, its first layer, `{use}`, the layer's number among
    those with a block, and `{beside_block.}`, for a module that is in another one if there is a block."""
    if layer is None:
        return name
    if (block := layer.block) is None:
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
    for number, layer, module, kind, parts in _parameters(arch, has_head):
        for part in parts:
            stored = stored_tensor(family, arch, layer, module, kind, part, parts)
            experts = range(1)
            if layer is not None and isinstance(layer.feed_forward, MoESpec) and "{expert}" in stored.name:
                experts = range(layer.feed_forward.num_experts)
            for expert in experts:
                found[stored.named(arch, number, expert)] = NeededTensor(
                    stored.shape, stored.is_transposed, kind == "table"
                )
    return found


class StackSlice(NamedTuple):
    """Where a stack has a matrix, or a bias, of an expert."""

    stack: str
    shape: Shape
    """Of the stack, with the experts first; the file may have them and their rows in one dimension."""
    expert: int
    rows: tuple[range, ...]
    """Of the expert."""
    is_transposed: bool


def stacked_experts(arch: ModelSpec) -> dict[str, StackSlice]:
    """The tensors that a checkpoint with separate experts has instead of stacks, by name."""
    family, found = FAMILIES[arch.name], dict[str, StackSlice]()
    for number, layer, module, kind, parts in _parameters(arch, has_head=False):
        if layer is None or not module.startswith("layers.feed_forward.experts."):
            continue
        assert isinstance(layer.feed_forward, MoESpec)
        start = 0
        for part, (size, *_) in parts.items():
            stack = stored_tensor(family, arch, layer, module, kind, part, parts)
            own = stored_tensor(family.with_separate_experts(), arch, layer, module, kind, part, parts)
            rows = tuple(family.rows(layer, module, part) or (range(start, start + size),))
            start += size if len(stack.joint) > 1 else 0
            for expert in range(layer.feed_forward.num_experts if stack.is_stacked else 0):
                found[own.named(arch, number, expert)] = StackSlice(
                    stack.named(arch, number), stack.shape, expert, rows, stack.is_transposed
                )
    return found


def weight_names(arch: ModelSpec) -> dict[tuple[int | None, str], list[str]]:
    """The checkpoint's names, without `.weight`, of what each module with a matrix combines, such as q, k and v; of
    experts those of the first one. Modules are given by the number of their layer, None outside the layers, and their
    path."""
    if isinstance(arch, TransformersModelSpec):  # whose paths are transformers' own
        outer = [(None, each.module) for each in arch.outer_matrices(1)]
        inner = [(number, each.module) for number, layer in enumerate(arch.layers) for each in layer.linears]
        return {(number, module): [module] for number, module in (*outer, *inner)}
    family, found = family_of(arch), dict[tuple[int | None, str], list[str]]()
    for number, layer, module, kind, parts in _parameters(arch, has_head=True):
        if kind == "weight" and all(len(shape) == 2 for shape in parts.values()):
            tensors = {part: stored_tensor(family, arch, layer, module, kind, part, parts) for part in parts}
            names = [one.named(arch, number, 0) for one in tensors.values()]
            path = module.removeprefix("layers.")
            found[number, path] = [name.removesuffix(".weight") for name in dict.fromkeys(names)]
    return found


_Parameters = Iterator[tuple[str, str, Mapping[str, Shape]]]
"""A module, the parameter's name in it, and the shapes of the parameter's parts."""


def _parameters(
    arch: ModelSpec, has_head: bool
) -> Iterator[tuple[int | None, LayerSpec | None, str, str, Mapping[str, Shape]]]:
    """All parameters, with the number and the description of their layer."""
    for parameter in _outer(arch, has_head):
        yield None, None, *parameter
    if isinstance(arch, DraftHeadSpec):
        for number in range(arch.num_heads):
            for parameter in _around_layers(arch):
                yield number, arch.layers[number], *parameter
    for number, layer in enumerate(arch.layers):
        for parameter in _inner(layer, arch.hidden_size):
            yield number, layer, *parameter


def _outer(arch: ModelSpec, has_head: bool) -> _Parameters:
    """The parameters before and after the layers."""
    width = arch.hidden_size
    if isinstance(arch, DraftHeadSpec):
        if arch.has_embedding or arch.is_in_target:  # it may need a copy of the target's
            yield from _linear("embedding", {"": arch.vocab_size}, width)
        return
    yield from _linear("embedding", {"": arch.vocab_size}, width)
    if arch.position_embeddings:
        yield from _linear("positions", {"": arch.position_embeddings}, width)
    yield from _norm("embedding_norm", arch.embedding_norm, width)
    if (spec := arch.layer_input) is not None:
        inputs = arch.num_layers * spec.size
        yield from _linear("layer_inputs.embedding", {"": spec.vocab_size}, inputs)
        yield from _linear("layer_inputs.projection", {"": inputs}, width)
        yield from _norm("layer_inputs.norm", spec.norm, spec.size)
    if arch.alt_up is not None:
        projections = {str(number): width for number in range(arch.alt_up.num_streams - 1)}
        yield from _linear("expansion", projections, width)
        yield from _linear("merger", projections, width)
    yield from _merger("merger", arch)
    yield from _norm("norm", arch.norm, width)
    if isinstance(arch, EncoderSpec):
        if arch.token_types:
            yield from _linear("token_types", {"": arch.token_types}, width)
        if arch.relative_buckets:
            yield from _linear("distance_bias", {"": arch.relative_buckets}, arch.num_heads)
    elif has_head:
        yield from _linear("head", {"": arch.vocab_size}, width, bias=arch.head_bias)


def _around_layers(arch: DraftHeadSpec) -> _Parameters:
    """What each head that drafts has before and after its layers."""
    yield from _norm("heads.embedding_norm", arch.embedding_norm, arch.hidden_size)
    yield from _norm("heads.hidden_norm", arch.hidden_norm, arch.hidden_size)
    if arch.projection_inputs:
        inputs, bias = arch.projection_inputs, arch.projection_bias
        yield from _linear("heads.projection", {"": arch.hidden_size}, inputs, bias=bias)
    if arch.joins == "sum":
        yield from _linear("heads.embedding_projection", {"": arch.hidden_size}, arch.hidden_size)
    yield from _merger("heads.merger", arch)
    yield from _norm("heads.norm", arch.norm, arch.hidden_size)
    if arch.has_head:
        yield from _linear("heads.head", {"": arch.draft_vocab_size}, arch.hidden_size)


def _merger(name: str, arch: ModelSpec) -> _Parameters:
    """What makes one of the residual streams with hyper-connections after the layers."""
    if isinstance(arch.hyper, GatedConnectionSpec):
        yield from _gated_connection(name, arch.hyper, arch.hidden_size)
    elif arch.hyper is not None and not arch.hyper.averages:
        yield from _connection(name, arch.hyper.num_streams, 1, arch.stream_width)


def _inner(layer: LayerSpec, width: int) -> _Parameters:
    """The parameters of a layer."""
    for name in ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm"):
        yield from _norm(f"layers.{name}", getattr(layer, name), width)
    if layer.has_scalar:
        yield "layers", "scalar", {"": (1,)}
    if layer.layer_input is not None:
        yield from _linear("layers.layer_input.gate", {"": layer.layer_input.size}, width)
        yield from _linear("layers.layer_input.projection", {"": width}, layer.layer_input.size)
        yield from _norm("layers.layer_input.norm", layer.layer_input.norm, width)
    if (alt_up := layer.alt_up) is not None:
        count = alt_up.num_streams
        yield from _norm("layers.alt_up.norm", alt_up.norm, width)
        for name, rows, columns in (
            ("router", count, width),
            ("prediction", count**2, count),
            ("correction", count, count),
        ):
            yield from _linear(f"layers.alt_up.{name}", {"": rows}, columns)
        if alt_up.scales_output:
            yield "layers.alt_up", "scale", {"": (width,)}
    if layer.hyper is not None:
        streams = layer.hyper.num_streams
        for name in ("attention", "feed_forward"):
            if isinstance(layer.hyper, GatedConnectionSpec):
                yield from _gated_connection(f"layers.{name}_connection", layer.hyper, width)
                yield from _linear(f"layers.{name}_connection.outputs", {"": streams}, streams * width)
                continue
            sizes = layer.hyper.num_weights, layer.hyper.num_scales, streams * width
            yield from _connection(f"layers.{name}_connection", *sizes)
    if (ngrams := layer.ngrams) is not None:
        yield from _linear("layers.ngrams.embedding", ngrams.part_rows, ngrams.head_dim)
        yield from _linear("layers.ngrams.key", {"": ngrams.num_streams * width}, ngrams.size)
        yield from _linear("layers.ngrams.value", {"": width}, ngrams.size)
        for name in ("key_norm", "query_norm", "conv_norm"):
            yield from _norm(f"layers.ngrams.{name}", ngrams.norm, ngrams.num_streams * width)
        yield "layers.ngrams", "conv", {"": (ngrams.num_streams * width, 1, ngrams.conv_size)}
    if layer.laurel is not None:
        yield from _linear("layers.laurel.down", {"": layer.laurel.rank}, width)
        yield from _linear("layers.laurel.up", {"": width}, layer.laurel.rank)
        yield from _norm("layers.laurel.norm", layer.laurel.norm, width)
    if layer.block is not None:
        yield from _block(layer, layer.block, width)
    elif isinstance(layer.attention, MLASpec):
        yield from _mla(layer.attention, width)
    elif isinstance(layer.attention, CompressedAttentionSpec):
        yield from _compressed_attention(layer.attention, width)
    elif isinstance(layer.attention, AttentionSpec):
        yield from _attention(layer.attention, width)
    match layer.state:
        case GatedDeltaNetSpec():
            yield from _gated_delta_net(layer.state, width)
        case ShortConvSpec():
            yield from _short_conv(layer.state, width)
        case Mamba2Spec():
            yield from _mamba2(layer.state, width)
        case KimiDeltaSpec():
            yield from _kimi_delta(layer.state, width)
        case LightningSpec():
            yield from _lightning(layer.state, width)
        case MLSTMSpec():
            yield from _mlstm(layer.state, width)
        case GroupedMambaSpec():
            yield from _grouped_mamba(layer.state, width)
        case MambaSpec():
            yield from _mamba(layer.state, width)
        case RGLRUSpec():
            yield from _rg_lru(layer.state, width)
        case RWKVSpec():
            yield from _rwkv(layer.state, width)
    if isinstance(layer.feed_forward, MoESpec):
        yield from _mixture(layer.feed_forward, width)
    elif layer.feed_forward is not None and layer.block is None:
        yield from _mlp("layers.feed_forward", layer.feed_forward, width)


def _block(layer: LayerSpec, block: SharedBlockSpec, width: int) -> _Parameters:
    """The parameters of a block, and those of the layer's own that go with it."""
    attention, mlp, rank = layer.attention, layer.feed_forward, block.rank
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    for module, kind, parts in (*_attention(attention, width), *_mlp("layers.feed_forward", mlp, width)):
        yield module.replace("layers.", "layers.block."), kind, parts
    yield from _norm("layers.block.attention_norm", block.norm, attention.input_size)
    yield from _norm("layers.block.feed_forward_norm", block.norm, width)
    yield from _linear("layers.block_output", {"": width}, width)
    if not rank:
        return
    gate_up = dict.fromkeys(("gate", "up"), mlp.intermediate_size)
    yield from _linear("layers.feed_forward_adapter.down", {"gate_up": rank}, width)
    yield from _linear("layers.feed_forward_adapter.up.gate_up", gate_up, rank)
    if block.adapts_attention:
        yield from _linear("layers.attention_adapter.down", dict.fromkeys("qkv", rank), attention.input_size)
        heads = attention.num_heads, *[attention.num_kv_heads] * 2
        for part, number in zip("qkv", heads, strict=True):
            yield from _linear(f"layers.attention_adapter.up.{part}", {"": number * attention.head_dim}, rank)


def _attention(spec: AttentionSpec, hidden: int) -> _Parameters:
    width = spec.input_size or hidden
    module, queries, keys = "layers.attention", spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    values = spec.num_kv_heads * spec.value_dim
    own = {} if spec.kv_source is not None else {"k": keys} | ({} if spec.values_are_keys else {"v": values})
    rest = {"gate": spec.num_heads * spec.gate_dim} if spec.output_gate else {}
    yield from _linear(f"{module}.qkv", {"q": queries, **own, **rest}, width, bias=spec.qkv_bias)
    yield from _linear(f"{module}.output", {"": hidden}, spec.num_heads * spec.value_dim, bias=spec.output_bias)
    if (indexer := spec.indexer) is not None:
        if isinstance(indexer, GroupIndexerSpec):
            sizes = {"q": indexer.num_heads * indexer.head_dim, "k": indexer.head_dim}
            yield from _linear(f"{module}.indexer.inputs", sizes, width)
        else:
            yield from _linear(f"{module}.indexer.query", {"": spec.num_kv_heads * indexer.head_dim}, width)
            yield from _linear(f"{module}.indexer.key", {"": indexer.head_dim}, width)
        yield from _norm(f"{module}.indexer.query_norm", indexer.norm, indexer.head_dim)
        yield from _norm(f"{module}.indexer.key_norm", indexer.norm, indexer.head_dim)
    if spec.has_sinks:
        yield module, "sinks", {"": (spec.num_heads,)}
    for name, part, size in (("query_norm", "q", queries), ("key_norm", "k", keys))[: 1 + bool(own)]:
        if spec.qk_norm is not None and spec.qk_norm_over == "head":
            yield from _norm(f"{module}.{name}", spec.qk_norm, spec.head_dim)
        elif spec.qk_norm is not None:
            yield f"{module}.{name}", "weight", {part: (size,)}


def _mla(spec: MLASpec, width: int) -> _Parameters:
    module, row = "layers.attention", spec.kv_lora_rank + spec.rope.dim
    latents = {"kv": row} if spec.q_lora_rank is None else {"q": spec.q_lora_rank, "kv": row}
    yield from _linear(f"{module}.down", latents, width, bias=spec.bias)
    if spec.q_lora_rank is not None:
        yield from _norm(f"{module}.query_norm", spec.norm, spec.q_lora_rank)
    yield from _linear(f"{module}.query", {"": spec.num_heads * spec.query_dim}, spec.query_inputs(width))
    yield from _norm(f"{module}.latent_norm", spec.norm, spec.kv_lora_rank)
    yield from _norm(f"{module}.rotary_norm", spec.rotary_norm, spec.rope.dim)
    up = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    yield from _linear(f"{module}.up", {"": up}, spec.kv_lora_rank)
    if (indexer := spec.indexer) is not None:
        queries = {"": indexer.num_heads * indexer.head_dim}
        yield from _linear(f"{module}.indexer.query", queries, spec.q_lora_rank or width)
        yield from _linear(f"{module}.indexer.key", {"": indexer.head_dim}, width)
        if indexer.pool > 1:
            yield from _linear(f"{module}.indexer.gate", {"": indexer.head_dim}, width)
            yield f"{module}.indexer", "position_bias", {"": (indexer.pool, indexer.head_dim)}
        yield from _norm(f"{module}.indexer.key_norm", indexer.norm, indexer.head_dim)
        yield from _linear(f"{module}.indexer.weights", {"": indexer.num_heads}, width)
    if spec.gate_dim:
        yield from _linear(f"{module}.gate", {"": spec.num_heads * spec.gate_dim}, width)
    if spec.has_sinks:
        yield module, "sinks", {"": (spec.num_heads,)}
    yield from _linear(f"{module}.output", {"": width}, spec.num_heads * spec.v_head_dim, bias=spec.bias)


def _compressed_attention(spec: CompressedAttentionSpec, width: int) -> _Parameters:
    module, heads = "layers.attention", spec.num_heads * spec.head_dim
    yield from _linear(f"{module}.down", {"q": spec.q_lora_rank, "kv": spec.head_dim}, width)
    yield from _norm(f"{module}.query_norm", spec.norm, spec.q_lora_rank)
    yield from _linear(f"{module}.query", {"": heads}, spec.q_lora_rank)
    yield from _norm(f"{module}.key_norm", spec.norm, spec.head_dim)
    yield module, "sinks", {"": (spec.num_heads,)}
    inner = spec.output_groups * spec.output_rank
    yield from _linear(f"{module}.group_output", {"": inner}, heads // spec.output_groups)
    yield from _linear(f"{module}.output", {"": width}, inner)
    compressors = {module: spec.head_dim}
    if spec.indexer is not None:
        compressors[f"{module}.indexer"] = spec.indexer.head_dim
        yield from _linear(
            f"{module}.indexer.query", {"": spec.indexer.num_heads * spec.indexer.head_dim}, spec.q_lora_rank
        )
        yield from _linear(f"{module}.indexer.weights", {"": spec.indexer.num_heads}, width)
    if (compressor := spec.compressor) is None:
        return
    for owner, size in compressors.items():
        features = compressor.width(size)
        yield from _linear(f"{owner}.compressor.inputs", dict.fromkeys(("kv", "gate"), features), width)
        yield f"{owner}.compressor", "position_bias", {"": (compressor.ratio, features)}
        yield from _norm(f"{owner}.compressor.norm", compressor.norm, size)


def _gated_delta_net(spec: GatedDeltaNetSpec, width: int) -> _Parameters:
    module, heads = "layers.state", {"": (spec.num_heads,)}
    keys, values = spec.num_key_heads * spec.key_head_dim, spec.num_value_heads * spec.value_head_dim
    convolved = {"q": keys, "k": keys, "v": values}
    gates = {"b": spec.num_heads, "a": spec.num_heads}
    inputs = {**convolved, "z": values, **(gates if spec.has_joint_input else {})}
    yield from _linear(f"{module}.input", inputs, width)
    if not spec.has_joint_input:
        yield from _linear(f"{module}.gates", gates, width)
    yield from _conv(convolved, spec.conv_size)
    yield module, "decay", heads
    yield module, "step_bias", heads
    yield from _norm(f"{module}.norm", spec.norm, spec.value_head_dim)
    yield from _linear(f"{module}.output", {"": width}, values)


def _short_conv(spec: ShortConvSpec, width: int) -> _Parameters:
    yield from _linear("layers.state.input", dict.fromkeys("bcx", spec.width), width, bias=spec.bias)
    yield from _conv({"": spec.width}, spec.conv_size, bias=spec.bias)
    yield from _linear("layers.state.output", {"": width}, spec.width, bias=spec.bias)


def _mamba2(spec: Mamba2Spec, width: int) -> _Parameters:
    module, keys = "layers.state", spec.groups * spec.state_size
    convolved = {"x": spec.width, "b": keys, "c": keys}
    parts = {"z": spec.width, **convolved, "dt": spec.num_heads}
    yield from _linear(f"{module}.input", parts, width, bias=spec.input_bias)
    yield from _conv(convolved, spec.conv_size, bias=spec.conv_bias)
    for name in ("decay", "skip", "step_bias"):
        yield module, name, {"": (spec.num_heads,)}
    if spec.norm is not None:
        yield from _norm(f"{module}.norm", spec.norm, spec.width)
    yield from _linear(f"{module}.output", {"": width}, spec.width, bias=spec.output_bias)


def _kimi_delta(spec: KimiDeltaSpec, width: int) -> _Parameters:
    module, heads = "layers.state", spec.num_heads
    gates = dict.fromkeys("fg", spec.width) if spec.rank is None else dict.fromkeys(("f_a", "g_a"), spec.rank)
    yield from _linear(f"{module}.input", {**dict.fromkeys("qkv", spec.width), "b": heads, **gates}, width)
    if spec.rank is not None:
        yield from _linear(f"{module}.decay_up", {"": spec.width}, spec.rank)
        yield from _linear(f"{module}.gate_up", {"": spec.width}, spec.rank)
    yield from _conv(dict.fromkeys("qkv", spec.width), spec.conv_size)
    yield module, "decay", {"": (1, 1, heads, 1) if spec.has_rate_grid else (heads,)}
    yield module, "step_bias", {"": (spec.width,)}
    yield from _norm(f"{module}.norm", spec.norm, spec.value_head_dim)
    yield from _linear(f"{module}.output", {"": width}, spec.width)


def _lightning(spec: LightningSpec, width: int) -> _Parameters:
    yield from _linear("layers.state.input", dict.fromkeys(("q", "k", "v", "gate"), spec.width), width)
    yield from _norm("layers.state.norm", spec.norm, spec.width)
    yield from _linear("layers.state.output", {"": width}, spec.width)


def _mlstm(spec: MLSTMSpec, width: int) -> _Parameters:
    module, keys = "layers.state", spec.num_heads * spec.key_head_dim
    yield from _linear(f"{module}.input", {"q": keys, "k": keys, "v": spec.width, "ogate_preact": spec.width}, width)
    yield from _linear(f"{module}.gates", dict.fromkeys("if", spec.num_heads), width, bias=True)
    yield f"{module}.norm", "weight", {"": (spec.width,)}
    yield from _linear(f"{module}.output", {"": width}, spec.width)


def _mamba(spec: MambaSpec, width: int) -> _Parameters:
    module, channels = "layers.state", {"": spec.width}
    yield from _linear(f"{module}.input", dict.fromkeys("xz", spec.width), width, bias=spec.bias)
    yield from _conv(channels, spec.conv_size, bias=spec.conv_bias)
    yield from _linear(f"{module}.select", {"": spec.rank + 2 * spec.state_size}, spec.width)
    for name, size in (("step", spec.rank), ("key", spec.state_size), ("query", spec.state_size)):
        yield from _norm(f"{module}.{name}_norm", spec.norm, size)
    yield from _linear(f"{module}.step", channels, spec.rank, bias=True)
    yield module, "decay", {"": (spec.width, spec.state_size)}
    yield module, "skip", {"": (spec.width,)}
    yield from _linear(f"{module}.output", {"": width}, spec.width, bias=spec.bias)


def _grouped_mamba(spec: GroupedMambaSpec, width: int) -> _Parameters:
    module, size, keys = "layers.state", spec.group_width, spec.state_size
    yield from _linear(f"{module}.input", dict.fromkeys("xz", spec.width), width, bias=spec.bias)
    yield from _conv({"": spec.width}, spec.conv_size, bias=spec.conv_bias)
    yield f"{module}.select", "weight", {"": (spec.groups, spec.rank + 2 * keys, size)}
    yield f"{module}.step", "weight", {"": (spec.groups, size, spec.rank)}
    for name, shape in {"step_bias": (size,), "decay": (size, keys), "skip": (size,)}.items():
        yield module, name, {"": (spec.groups, *shape)}
    yield from _linear(f"{module}.output", {"": width}, spec.width, bias=spec.bias)


def _rg_lru(spec: RGLRUSpec, width: int) -> _Parameters:
    module, size = "layers.state", spec.block_width
    yield from _linear(f"{module}.input", dict.fromkeys("xy", spec.width), width, bias=True)
    yield from _conv({"": spec.width}, spec.conv_size, bias=True)
    for name in ("input", "decay"):
        yield f"{module}.{name}_gate", "weight", {"": (spec.blocks, size, size)}
        yield module, f"{name}_bias", {"": (spec.blocks, size)}
    yield module, "decay", {"": (spec.width,)}
    yield from _linear(f"{module}.output", {"": width}, spec.width, bias=True)


def _rwkv(spec: RWKVSpec, width: int) -> _Parameters:
    module = "layers.state"
    for name in ("norm", "inner_norm"):
        yield from _norm(f"{module}.{name}", spec.norm, width)
    for name in ("mix_key", "mix_value", "mix_receptance", "inner_mix_key", "inner_mix_receptance"):
        yield module, name, {"": (1, 1, width)}
    for name in ("decay", "bonus"):
        yield module, name, {"": (spec.width,)}
    for name in ("key", "value", "receptance"):
        yield from _linear(f"{module}.{name}", {"": spec.width}, width)
    yield from _linear(f"{module}.output", {"": width}, spec.width)
    yield from _linear(f"{module}.inner_key", {"": spec.inner_size}, width)
    yield from _linear(f"{module}.inner_receptance", {"": width}, width)
    yield from _linear(f"{module}.inner_value", {"": width}, spec.inner_size)


def _conv(channels: Mapping[str, int], size: int, *, bias: bool = False) -> _Parameters:
    yield "layers.state.conv", "weight", {part: (number, 1, size) for part, number in channels.items()}
    if bias:
        yield "layers.state.conv", "bias", {part: (number,) for part, number in channels.items()}


def _mlp(module: str, spec: MLPSpec, width: int) -> _Parameters:
    size = spec.intermediate_size
    gate_up = {"gate": size, "up": size} if spec.is_gated else {"up": size}
    yield from _linear(f"{module}.gate_up", gate_up, width, bias=spec.bias)
    yield from _linear(f"{module}.down", {"": width}, size, bias=spec.has_output_bias)


def _mixture(spec: MoESpec, width: int) -> _Parameters:
    module, size = "layers.feed_forward", spec.intermediate_size
    yield from _linear(f"{module}.router", {"": spec.num_experts}, width, bias=spec.router_bias)
    for name in ("correction_bias", "expert_scale"):
        if getattr(spec, name):
            yield f"{module}.router", name, {"": (spec.num_experts,)}
    if spec.table_size:
        yield f"{module}.router", "table", {"": (spec.table_size, spec.top_k)}
    for name in ("router.norm", "input_norm", "output_norm", "shared_input_norm", "shared_output_norm"):
        yield from _norm(f"{module}.{name}", spec.norm, width)
    inputs, parts = spec.latent_size or width, {"gate": size, "up": size} if spec.is_gated else {"up": size}
    yield from _linear(f"{module}.experts.gate_up", parts, inputs, bias=spec.bias)
    yield from _linear(f"{module}.experts.down", {"": inputs}, size, bias=spec.bias)
    if spec.latent_size:
        yield from _linear(f"{module}.latent_down", {"": inputs}, width)
        yield from _linear(f"{module}.latent_up", {"": width}, inputs)
    if spec.shared is not None:
        yield from _mlp(f"{module}.shared", spec.shared, width)
    if spec.shared_gate:
        yield from _linear(f"{module}.shared_gate", {"": 1}, width)


def _connection(module: str, weights: int, scales: int, columns: int) -> _Parameters:
    """A connection of residual streams."""
    for name, shape in (("function", (weights, columns)), ("base", (weights,)), ("scale", (scales,))):
        yield module, name, {"": shape}


def _gated_connection(module: str, spec: GatedConnectionSpec, hidden: int) -> _Parameters:
    """What computes gates of residual streams."""
    width = spec.num_streams * hidden
    yield from _norm(f"{module}.norm", spec.norm, width)
    yield from _linear(f"{module}.down", {"": spec.rank}, width)
    yield from _linear(f"{module}.up", {"": width}, spec.rank)


def _linear(module: str, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> _Parameters:
    yield module, "weight", {part: (size, columns) for part, size in rows.items()}
    if bias:
        yield module, "bias", {part: (size,) for part, size in rows.items()}


def _norm(module: str, spec: NormSpec | None, size: int) -> _Parameters:
    if spec is not None:
        if spec.gate_rank:
            yield from _linear(f"{module}.gate_down", {"": spec.gate_rank}, size)
            yield from _linear(f"{module}.gate_up", {"": size}, spec.gate_rank)
            module = f"{module}.norm"
        if spec.has_weight:
            yield module, "weight", {"": (size,)}
        if spec.bias and spec.kind == "layer":
            yield module, "bias", {"": (size,)}
