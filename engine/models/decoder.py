"""One pipeline stage of a decoder. The `ModelSpec` describes what differs between families."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture import attention_spec, model_spec, spec_parts
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.attention import Attention, Batch, LayerCache, Selection, by_chunks, with_entries
from quire.engine.layers.compressed import CompressedAttention
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.from_spec import FromSpec
from quire.engine.layers.layer_input import LayerInput, LayerInputs
from quire.engine.layers.mla import MLA
from quire.engine.layers.mlp import MLP
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.layers.ngrams import NGrams
from quire.engine.layers.norm import Norm, RMSNorm, make_norm
from quire.engine.layers.recurrent import make_mixer
from quire.engine.layers.residual import (
    AltUp,
    GatedHead,
    HyperHead,
    Laurel,
    StreamProjections,
    make_connection,
    make_merger,
)
from quire.engine.layers.rotary import Rotary
from quire.engine.layers.shared_block import SharedBlock, attention_adapter, feed_forward_adapter
from quire.engine.layers.weight import Weight, whole


class DecoderLayer(nn.Module):
    """Attention, a recurrent state or both, and a feed-forward layer, sequential or parallel, added to the residual
    stream."""

    def __init__(
        self,
        spec: model_spec.LayerSpec,
        hidden_size: int,
        parallel: Parallel,
        experts: ExpertGroup | None = None,
        block: SharedBlock | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.block = spec, block
        self.attention_norm = _norm(spec.attention_norm, hidden_size)
        own_attention, own_feed_forward = (spec.attention, spec.feed_forward) if block is None else (None, None)
        self.attention = _attention(own_attention, hidden_size, parallel)
        self.state = None if spec.state is None else make_mixer(spec.state, hidden_size, parallel)
        self.attention_post_norm = _norm(spec.attention_post_norm, hidden_size)
        self.feed_forward_norm = _norm(spec.feed_forward_norm, hidden_size)
        self.feed_forward = _feed_forward(own_feed_forward, hidden_size, parallel, experts)
        if spec.block is not None:
            assert isinstance(spec.attention, attention_spec.AttentionSpec)
            assert isinstance(spec.feed_forward, model_spec.MLPSpec)
            own = FromSpec(spec.block.parameters(hidden_size, spec.attention, spec.feed_forward), parallel)
            self.attention_adapter = attention_adapter(spec.block, own)
            self.feed_forward_adapter = feed_forward_adapter(spec.block, own)
            self.block_output = own.column_parallel("block_output")
        self.feed_forward_post_norm = _norm(spec.feed_forward_post_norm, hidden_size)
        self.layer_input = None if spec.layer_input is None else LayerInput(spec.layer_input, hidden_size)
        self.alt_up = None if spec.alt_up is None else AltUp(spec.alt_up, hidden_size)
        self.attention_connection, self.feed_forward_connection = (
            None if spec.hyper is None else make_connection(spec.hyper, hidden_size) for _ in range(2)
        )
        self.ngrams = None if spec.ngrams is None else NGrams(spec.ngrams, hidden_size, parallel)
        self.laurel = None if spec.laurel is None else Laurel(spec.laurel, hidden_size)
        self.scalar = Weight((1,), whole(1)) if spec.has_scalar else None
        has_one_reader = not spec.is_parallel or self.feed_forward_norm is not None
        if has_one_reader and spec.normed_residuals is None:
            if self.state is None and self.laurel is None and not spec.reads_embedding:
                _feed(self.attention_norm, self.attention)
            _feed(self.feed_forward_norm, self.feed_forward)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor | None,
        cache: LayerCache,
        layer_input: Tensor | None = None,
        last_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer. `x` is not yet added to `residual`, in the arguments as in the result. `layer_input` is the
        layer's own, or the embedded token if the layer reads it. With several residual streams, they are in `x`, and
        `residual` is None.

        With `last_tokens`, the indices of the requests' last tokens, only these are returned: the model's last layer
        needs only keys and values of the others.
        """
        if self.block is not None:
            return self._with_block(x if residual is None else residual + x, batch, cos_sin, cache, layer_input)
        if self.attention_connection is not None:
            assert last_tokens is None  # all tokens' streams are merged after the last layer
            (x,) = _interleave([self._with_streams(x, batch, cos_sin, cache)])
            return x, None
        predicted = None
        if self.alt_up is not None:
            predicted = self.alt_up.predict(x)
            x = predicted[:, self.alt_up.active].contiguous()
        beside = layer_input if self.spec.reads_embedding else None
        normed, mixed, residual = self._attend(x, residual, batch, cos_sin, cache, last_tokens, beside)
        if self.feed_forward is None:
            return mixed, residual
        is_mixture = isinstance(self.feed_forward, MixtureOfExperts)
        x = self.feed_forward(normed, batch) if is_mixture else self.feed_forward(normed)
        if layer_input is not None and last_tokens is not None:
            layer_input = layer_input[last_tokens]
        if self.alt_up is None:
            return self._finish(x, mixed, residual, layer_input)
        assert self.layer_input is not None
        assert layer_input is not None
        assert predicted is not None
        predicted = predicted if last_tokens is None else predicted[last_tokens]
        streams = self.alt_up.correct(predicted, residual + _apply(self.feed_forward_post_norm, x))
        added = self.layer_input(self.alt_up.scaled(streams[:, self.alt_up.active]), layer_input)
        streams[:, 1:] += added[:, None]
        return streams.flatten(1), None

    def _with_block(
        self, x: Tensor, batch: Batch, cos_sin: Tensor | None, cache: LayerCache, embedded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Like `forward`, for a layer with a shared block."""
        assert self.block is not None
        assert self.state is not None
        assert embedded is not None
        place = batch.for_group(cache.group), cos_sin, cache.memory
        block = self.block(torch.cat((x, embedded), dim=-1), *place, self.attention_adapter, self.feed_forward_adapter)
        normed = _apply(self.attention_norm, x + self.block_output(block))
        return self.state(normed, batch.for_group(cache.state_group), cache.state), x

    def _with_streams(
        self, x: Tensor, batch: Batch, cos_sin: Tensor | None, cache: LayerCache
    ) -> Generator[None, None, Tensor]:
        """All residual streams after the layer, with hyper-connections, yielding as `in_phases` does."""
        assert self.attention_connection is not None
        assert self.feed_forward_connection is not None
        assert self.feed_forward is not None
        if self.ngrams is not None:
            assert cache.state is not None
            x = x + self.ngrams(x, batch.token_ids, batch.for_group(cache.state_group), cache.state)
        collapsed, mixing = self.attention_connection.before(x)
        mixed = self._mix(_apply(self.attention_norm, collapsed), batch, cos_sin, cache)
        collapsed, mixing = self.feed_forward_connection.before(self.attention_connection.after(mixed, mixing))
        normed = _apply(self.feed_forward_norm, collapsed)
        if not isinstance(self.feed_forward, MixtureOfExperts):
            return self.feed_forward_connection.after(self.feed_forward(normed), mixing)
        in_flight = self.feed_forward.dispatch(normed, batch)
        yield
        in_flight = self.feed_forward.compute(in_flight)
        yield
        return self.feed_forward_connection.after(self.feed_forward.combine(in_flight), mixing)

    def in_phases(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor | None,
        cache: LayerCache,
        layer_input: Tensor | None = None,
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Like `forward`, but yield whenever tokens are in transit to or from experts."""
        if self.attention_connection is not None:
            return (yield from self._with_streams(x, batch, cos_sin, cache)), None
        normed, mixed, residual = self._attend(x, residual, batch, cos_sin, cache)
        if isinstance(self.feed_forward, MixtureOfExperts):
            in_flight = self.feed_forward.dispatch(normed, batch)
            yield
            in_flight = self.feed_forward.compute(in_flight)
            yield
            x = self.feed_forward.combine(in_flight)
        elif self.feed_forward is None:
            return mixed, residual
        else:
            x = self.feed_forward(normed)
        return self._finish(x, mixed, residual, layer_input)

    def _attend(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor | None,
        cache: LayerCache,
        last_tokens: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> tuple[Tensor | kernels.RoundedRows, Tensor, Tensor]:
        """The input of the feed-forward layer, the output of the mixers, and the residual stream. Without a
        feed-forward layer the first is the second. The mixers read `beside` before their normalized input."""
        if not self.spec.mixers:
            if last_tokens is not None:
                x, residual = x[last_tokens], None if residual is None else residual[last_tokens]
            normed, residual = _add(self.feed_forward_norm, x, residual)
            return normed, x, residual
        normed, residual = _add(self.attention_norm, x, residual)
        factors = self.spec.normed_residuals
        if factors is not None:
            assert isinstance(normed, Tensor)
            residual = normed * factors[0]
        if beside is not None:
            assert isinstance(normed, Tensor)
            normed = torch.cat((beside, normed), dim=-1)
        mixed = self._mix(normed, batch, cos_sin, cache, last_tokens)
        if last_tokens is not None:
            normed, residual = normed[last_tokens], residual[last_tokens]
        mixed = self._scaled(_apply(self.attention_post_norm, mixed))
        if self.laurel is not None:
            assert isinstance(normed, Tensor)
            mixed, residual = (mixed + self.laurel(normed)) * 0.5**0.5, residual * 0.5**0.5
        if self.feed_forward is None:
            return mixed, mixed, residual
        if self.spec.is_parallel:
            normed = normed if self.feed_forward_norm is None else self.feed_forward_norm(residual)
        else:
            normed, residual = _add(self.feed_forward_norm, mixed, residual)
            if factors is not None:
                assert isinstance(normed, Tensor)
                residual = normed * factors[1]
        return normed, mixed, residual

    def _mix(
        self,
        normed: Tensor | kernels.RoundedRows,
        batch: Batch,
        cos_sin: Tensor | None,
        cache: LayerCache,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """The sum of the mixers' outputs; see `forward`."""
        outputs = []
        if self.attention is not None:
            place = batch.for_group(cache.group), cos_sin, cache.for_attention
            last = () if last_tokens is None else (last_tokens,)
            outputs.append(self.attention(normed, *place, *last))
        if self.state is not None:
            outputs.append(self.state(normed, batch.for_group(cache.state_group), cache.state))
        mixed: Tensor = outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]
        return mixed

    def _finish(self, x: Tensor, mixed: Tensor, residual: Tensor, layer_input: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of the feed-forward layer, plus that of a parallel attention, and the residual stream."""
        x = self._scaled(_apply(self.feed_forward_post_norm, x))
        x = x + mixed if self.spec.is_parallel else x
        if self.layer_input is not None and layer_input is not None:
            residual = residual + x
            x = self.layer_input(residual, layer_input)
        return (x, residual) if self.scalar is None else (x * self.scalar, residual * self.scalar)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.spec.residual_multiplier == 1.0 else x * self.spec.residual_multiplier


def _norm(spec: spec_parts.NormSpec | None, hidden_size: int) -> Norm | None:
    return None if spec is None else make_norm(spec, hidden_size)


def _feed(norm: Norm | None, layer: nn.Module | None) -> None:
    """Let a norm round for a layer that does nothing but multiply its input, or for the experts of a mixture."""
    reader = layer.reads_input if isinstance(layer, Attention | MLA | CompressedAttention | MLP) else None
    if isinstance(norm, RMSNorm) and isinstance(layer, MixtureOfExperts):
        norm.feed(layer, keeps=True)
    elif isinstance(norm, RMSNorm) and reader is not None:
        norm.feed(reader)


def _add(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor | kernels.RoundedRows, Tensor]:
    """`residual + x`, normalized and as it is."""
    if norm is not None and residual is not None:
        return norm.add(x, residual)
    residual = x if residual is None else residual + x
    return _apply(norm, residual), residual


def _apply(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


def _attention(
    spec: attention_spec.AnyAttentionSpec | None, hidden_size: int, parallel: Parallel
) -> Attention | MLA | CompressedAttention | None:
    match spec:
        case None:
            return None
        case attention_spec.AttentionSpec():
            return Attention(spec, hidden_size, parallel)
        case attention_spec.MLASpec():
            return MLA(spec, hidden_size, parallel)
        case attention_spec.CompressedAttentionSpec():
            return CompressedAttention(spec, hidden_size, parallel)


def _feed_forward(
    spec: model_spec.MLPSpec | model_spec.MoESpec | None,
    hidden_size: int,
    parallel: Parallel,
    experts: ExpertGroup | None,
) -> MLP | MixtureOfExperts | None:
    match spec:
        case None:
            return None
        case model_spec.MLPSpec():
            return MLP(spec, hidden_size, parallel)
        case model_spec.MoESpec():
            return MixtureOfExperts(spec, hidden_size, parallel, experts)


def _blocks(arch: ModelSpec, layers: range, parallel: Parallel) -> dict[int, SharedBlock]:
    """The block of each layer that has a shared one."""
    found: dict[int, SharedBlock] = {}
    by_source: dict[int, SharedBlock] = {}
    for number in layers:
        spec = arch.layers[number]
        if spec.block is None:
            continue
        assert isinstance(spec.attention, attention_spec.AttentionSpec)
        assert isinstance(spec.feed_forward, model_spec.MLPSpec)
        if spec.block.source not in by_source:
            block = SharedBlock(spec.block, spec.attention, spec.feed_forward, arch.hidden_size, parallel)
            by_source[spec.block.source] = block
        found[number] = by_source[spec.block.source]
    return found


class PositionEmbedding(nn.Module):
    """Learned position embeddings; replicated on all ranks."""

    def __init__(self, count: int, hidden_size: int, offset: int) -> None:
        super().__init__()
        self._offset = offset
        self.weight = Weight((count, hidden_size), whole(count, hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        """`[tokens]` → `[tokens, hidden_size]`"""
        return F.embedding(positions + self._offset, self.weight)


class Sinusoids(nn.Module):
    """Sines, then cosines, of a position times frequencies from 1 down to 1/10000, as in tensor2tensor."""

    def __init__(self, size: int, offset: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # see `Rotary`
            exponents = torch.arange(size // 2, dtype=torch.float32) * -(math.log(10000.0) / (size // 2 - 1))
            frequencies = exponents.exp()
        self._frequencies, self._offset = frequencies.to(torch.get_default_device()), offset
        self._dtype, self._padding = torch.get_default_dtype(), size % 2

    def forward(self, positions: Tensor) -> Tensor:
        """`[tokens]` → `[tokens, size]`"""
        angles = (positions + self._offset)[:, None] * self._frequencies
        return F.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, self._padding)).to(self._dtype)


class Decoder(nn.Module):
    """The layers `layers` of a model, with the embedding if they include the first one, and norm and head if they
    include the last.

    Layers are named by their number in the complete model. Parameters are uninitialized. `experts` is the group that
    whole experts are distributed over; without it, each rank of the stage has a slice of each expert.
    """

    def __init__(
        self,
        arch: ModelSpec,
        layers: range,
        max_length: int,
        parallel: Parallel,
        experts: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        self._arch = arch
        first, last = layers.start == 0, layers.stop == arch.num_layers
        width, vocabulary = arch.hidden_size, (arch.vocab_size, arch.hidden_size, parallel)
        attentions = {arch.layers[number].attention for number in layers}
        self._rotary = {rope: Rotary(rope, max_length) for rope in {each.rope for each in attentions if each}}
        self.embedding = VocabParallelEmbedding(*vocabulary) if first else None
        self.positions: PositionEmbedding | Sinusoids | None = None
        if first and arch.position_embeddings:
            self.positions = PositionEmbedding(arch.position_embeddings, width, arch.position_offset)
        elif first and arch.has_sinusoids:
            self.positions = Sinusoids(width, arch.position_offset)
        self.embedding_norm = _norm(arch.embedding_norm, width) if first else None
        self.layer_inputs = None
        if first and arch.layer_input is not None:
            self.layer_inputs = LayerInputs(arch.layer_input, arch.num_layers, width, parallel)
        blocks = _blocks(arch, layers, parallel)
        self.layers = nn.ModuleDict(
            {
                str(number): DecoderLayer(arch.layers[number], width, parallel, experts, blocks.get(number))
                for number in layers
            }
        )
        self._is_last = last
        self.expansion: StreamProjections | None = None
        self.merger: StreamProjections | HyperHead | GatedHead | None = None
        if arch.alt_up is not None:
            self.expansion, self.merger = (
                StreamProjections(arch.alt_up, width, is_last=is_last) if is_here else None
                for is_last, is_here in ((False, first), (True, last))
            )
        elif arch.hyper is not None and last:
            self.merger = make_merger(arch.hyper, width)
        self._is_sparse = any(isinstance(each, attention_spec.MLASpec) and each.top_k for each in attentions)
        mixers = enumerate(arch.layers[number].attention for number in layers)
        self._chunks = {
            index: spec.window
            for index, spec in mixers
            if isinstance(spec, attention_spec.AttentionSpec) and spec.is_chunked and spec.window is not None
        }
        """The chunks of the layers with chunked attention, by their number in this stage."""
        self._aux = [number - layers.start for number in arch.aux_layers]
        """The layers whose inputs are kept, by their number in this stage; the output of the last one may follow."""
        self.supports_logits_indices_only = (
            last
            and not arch.aux_layers
            and arch.hyper is None
            and all(isinstance(mixer, attention_spec.AttentionSpec) for mixer in arch.layers[layers.stop - 1].mixers)
        )
        """Whether batches may set `logits_indices_only`."""
        if last:
            tied = self.embedding if arch.tie_embeddings else None
            self.norm = _norm(arch.norm, width)
            self.head = ParallelLMHead(*vocabulary, tied, bias=arch.head_bias)

    def forward(self, x: Tensor | None, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """The output of this stage, given that of the previous one: `[tokens, stage_width]`, or after the last stage
        the residual stream `[tokens, hidden_size]`, with the inputs of `aux_layers` behind it.

        The first stage takes None and starts from the batch's token ids. `caches` are those of the layers. With the
        batch's `logits_indices_only`, the output has only each request's last token.
        """
        if x is None:
            x = self._embed(batch)
        if batch.micro_batches:
            parts = x.split_with_sizes([len(half.positions) for half in batch.micro_batches])
            runs = [self._in_phases(part, half, caches) for part, half in zip(parts, batch.micro_batches, strict=True)]
            return torch.cat(_interleave(runs))
        residual, batch = None, self._prepared(batch, caches)
        given, (x, inputs) = x, self._divided(x)
        cos_sin = self._cos_sin(batch)
        last_tokens, last = batch.query_starts[1:] - 1 if batch.logits_indices_only else None, len(self.layers) - 1
        kept: dict[int, Tensor] = {}
        for number, (layer, own, cache) in enumerate(zip(self.layers.values(), inputs, caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            if number in self._aux:
                kept[number] = x if residual is None else residual + x
            turns = None if layer.spec.attention is None else cos_sin[layer.spec.attention.rope]
            x, residual = layer(x, residual, batch, turns, cache, own, last_tokens if number == last else None)
        assert x is not None
        x = x if residual is None else residual + x
        kept[len(self.layers)] = x
        return self._joined(x, given, kept)

    def _in_phases(self, x: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> Generator[None, None, Tensor]:
        """All layers, yielding as `DecoderLayer.in_phases` does."""
        assert not self._arch.aux_layers
        residual, batch = None, self._prepared(batch, caches)
        given, (x, inputs) = x, self._divided(x)
        cos_sin = self._cos_sin(batch)
        for layer, own, cache in zip(self.layers.values(), inputs, caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            turns = None if layer.spec.attention is None else cos_sin[layer.spec.attention.rope]
            x, residual = yield from layer.in_phases(x, residual, batch, turns, cache, own)
        return self._joined(x if residual is None else residual + x, given, {})

    def _divided(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The residual streams, and the own input of each of the stage's layers, of `[tokens, stage_width]`."""
        arch = self._arch
        if arch.layer_input is None and not arch.passes_embedding:
            return x[:, : arch.stream_width].contiguous() if arch.aux_layers else x, [None] * len(self.layers)
        x, inputs, _ = x.tensor_split((arch.stream_width, arch.stage_width - arch.passed_aux_width), dim=-1)
        if self._arch.layer_input is None:
            return x.contiguous(), [inputs] * len(self.layers)
        own = inputs.chunk(self._arch.num_layers, dim=-1)
        return x.contiguous(), [own[int(number)] for number in self.layers]

    def _joined(self, x: Tensor, given: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
        """What this stage passes on: the residual streams with what goes beside them in what it was given, and the
        inputs of `aux_layers` that are among those it has `kept`, by their number in this stage."""
        arch = self._arch
        end = arch.stage_width - arch.passed_aux_width
        if self._is_last:
            x = x if self.merger is None else self.merger.merge(x)
        elif end > arch.stream_width:
            x = torch.cat((x, given[:, arch.stream_width : end]), dim=-1)
        if not arch.aux_layers:
            return x
        numbers = [own for number, own in zip(arch.aux_layers, self._aux, strict=True) if number < arch.num_layers]
        passed = given[:, end:].split_with_sizes([arch.stream_width] * len(numbers), dim=-1)
        found = {**dict(zip(numbers, passed, strict=True)), **kept}
        return torch.cat((x, *(found[number] for number in (self._aux if self._is_last else numbers))), -1)

    def _prepared(self, batch: Batch, caches: Sequence[LayerCache]) -> Batch:
        """The batch with what the layers of this forward pass share."""
        if self._is_sparse:
            batch = replace(batch, selection=Selection())
        batch = with_entries(batch, caches)
        if not self._chunks:
            return batch
        groups, tokens = [replace(batch, other_groups=()), *batch.other_groups], len(batch.positions)
        for number, chunk in self._chunks.items():
            memory, group = caches[number].memory, caches[number].group
            if groups[group].chunks is None:
                assert memory is not None
                groups[group] = replace(groups[group], chunks=by_chunks(groups[group], tokens, chunk, memory.shape[3]))
        return replace(groups[0], other_groups=tuple(groups[1:]))

    def _cos_sin(self, batch: Batch) -> dict[spec_parts.RopeSpec | None, Tensor]:
        return {rope: rotary(batch.positions) for rope, rotary in self._rotary.items()}

    def _embed(self, batch: Batch) -> Tensor:
        assert self.embedding is not None
        x: Tensor = self.embedding(batch.token_ids)
        if self._arch.embedding_multiplier != 1.0:
            x = x * x.new_full((), self._arch.embedding_multiplier)  # rounded to the type of `x`
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        x = _apply(self.embedding_norm, x)
        if self._arch.passes_embedding:
            x = torch.cat((x, x), dim=-1)
        elif self._arch.hyper is not None:
            x = x.repeat(1, self._arch.hyper.num_streams)
        elif self.layer_inputs is not None:
            inputs = self.layer_inputs(batch.token_ids, x)
            x = torch.cat((x if self.expansion is None else self.expansion.expand(x), inputs), dim=-1)
        return F.pad(x, (0, self._arch.passed_aux_width)) if self._arch.aux_layers else x

    def features(self, x: Tensor) -> Tensor:
        """Normalize the last stage's `[rows, hidden_size]`, or the part of its output that is that: the input of the
        head and of pooling."""
        return _apply(self.norm, x[:, : self._arch.hidden_size].contiguous() if self._arch.aux_layers else x)

    def logits(self, x: Tensor) -> Tensor:
        """The last stage's `[rows, hidden_size]` → float32 `[rows, vocab_size]`, the same on every rank."""
        return self.logits_of(self.features(x))

    def logits_of(self, features: Tensor) -> Tensor:
        """The same of what is normalized."""
        arch = self._arch
        out: Tensor = self.head(features)
        if arch.logit_multiplier != 1.0:
            out = out * arch.logit_multiplier
        return out if not arch.logit_softcap else (out / arch.logit_softcap).tanh() * arch.logit_softcap


def _interleave(runs: list[Generator[None, None, Tensor]]) -> list[Tensor]:
    """Run all generators to their ends, alternating at each yield: while one's tokens are in transit, the next
    computes."""
    results: list[Tensor] = []
    while len(results) < len(runs):
        for run in runs:
            try:
                next(run)
            except StopIteration as end:
                results.append(end.value)
    return results
