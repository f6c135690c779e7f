"""One pipeline stage of a decoder. The `ModelSpec` describes what differs between families."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.architecture import attention_spec, spec_parts
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.residual_spec import AltUpSpec, ConnectionSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.layers.batch import Batch, SharedResults
from quire.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.layer_input import LayerInputs
from quire.engine.layers.residual import GatedHead, HyperHead, StreamProjections, make_merger
from quire.engine.layers.rotary import Rotary
from quire.engine.layers.weight import Weight, whole
from quire.engine.models.decoder_layer import DecoderLayer, LayerStep, apply, norm_of
from quire.engine.models.make_layers import make_layers
from quire.engine.models.make_tower import make_tower
from quire.kernels import AdapterRows


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
        self.embedding_norm = norm_of(arch.embedding_norm, width) if first else None
        self.layer_inputs = None
        if first and arch.layer_input is not None:
            self.layer_inputs = LayerInputs(arch.layer_input, arch.num_layers, width, parallel)
        self.layers = nn.ModuleDict(
            {str(number): layer for number, layer in make_layers(arch, layers, parallel, experts)}
        )
        self.tower = make_tower(arch.media.tower, parallel) if first and arch.media is not None else None
        targets = () if arch.media is None else arch.media.tower.targets
        self._levels = {number: level for level, number in enumerate(targets, start=1)}
        """Which part of features is added to the output of a layer."""
        self._is_causal_without_window = arch.media is not None and arch.media.is_causal_without_window
        self._is_last = last
        self.expansion: StreamProjections | None = None
        self.merger: StreamProjections | HyperHead | GatedHead | None = None
        if isinstance(arch.streams, AltUpSpec):
            self.expansion = StreamProjections(arch.streams, width, is_last=False) if first else None
            self.merger = StreamProjections(arch.streams, width, is_last=True) if last else None
        elif arch.streams is not None and last:
            self.merger = make_merger(arch.streams, width)
        self._aux = [number - layers.start for number in arch.aux_layers]
        """The layers whose inputs are kept, by their number in this stage; the output of the last one may follow."""
        self.supports_logits_indices_only = (
            last
            and not arch.aux_layers
            and not isinstance(arch.streams, ConnectionSpec)
            and arch.num_layers - 1 not in targets
            and all(isinstance(mixer, attention_spec.AttentionSpec) for mixer in arch.layers[layers.stop - 1].mixers)
        )
        """Whether batches may set `logits_indices_only`."""
        if last:
            tied = self.embedding if arch.tie_embeddings else None
            self.norm = norm_of(arch.norm, width)
            self.head = ParallelLMHead(*vocabulary, tied, bias=arch.head_bias)

    def forward(self, x: Tensor | None, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """The output of this stage, given the previous stage's: `[tokens, stage_width]`, or after the last stage
        the residual stream `[tokens, hidden_size]`, with the inputs of `aux_layers` behind it.

        The first stage takes None and starts from the batch's token ids. `caches` are the layers'. With the
        batch's `logits_indices_only`, the output has only each request's last token.
        """
        residual, batch = None, replace(batch, shared=SharedResults())
        features: Sequence[Tensor] = ()  # of images and videos, for the embedding and for the first layers' outputs
        if batch.media_features is not None:
            features = batch.media_features.split_with_sizes([self._arch.hidden_size] * (1 + len(self._levels)), dim=-1)
        given = self._embed(batch, features) if x is None else x
        x, inputs = self._divided(given)
        cos_sin = self._cos_sin(batch)
        causal = batch if batch.key_ends is None else replace(batch, key_ends=None)
        last_tokens, last = batch.query_starts[1:] - 1 if batch.logits_indices_only else None, len(self.layers) - 1
        kept: dict[int, Tensor] = {}
        for number, (layer, own, cache) in enumerate(zip(self.layers.values(), inputs, caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            if number in self._aux:
                kept[number] = x if residual is None else residual + x
            turns = None if layer.spec.attention is None else cos_sin[layer.spec.attention.rope]
            is_causal = self._is_causal_without_window and not getattr(layer.spec.attention, "window", None)
            step = LayerStep(causal if is_causal else batch, turns, cache, own, last_tokens if number == last else None)
            x, residual = layer(x, residual, step)
            if batch.media_tokens is not None and features and number in self._levels:
                x = x.index_add(0, batch.media_tokens, features[self._levels[number]])
            if batch.on_layer is not None:
                batch.on_layer(number)
        x = x if residual is None else residual + x
        kept[len(self.layers)] = x
        return self._joined(x, given, kept)

    def _divided(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Split `[tokens, stage_width]` into the residual streams and the own input of each of the stage's layers."""
        arch = self._arch
        if arch.layer_input is None and not arch.passes_embedding:
            return x[:, : arch.stream_width].contiguous() if arch.aux_layers else x, [None] * len(self.layers)
        x, inputs, _ = x.tensor_split((arch.stream_width, arch.stage_width - arch.passed_aux_width), dim=-1)
        if self._arch.layer_input is None:
            return x.contiguous(), [inputs] * len(self.layers)
        own = inputs.chunk(self._arch.num_layers, dim=-1)
        return x.contiguous(), [own[int(number)] for number in self.layers]

    def _joined(self, x: Tensor, given: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
        """The output of this stage: the residual streams, with the columns beside them in `given`, and the inputs of
        `aux_layers`, from `given` and from those that this stage has `kept`, by their number in this stage."""
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

    def _cos_sin(self, batch: Batch) -> dict[spec_parts.RopeSpec | None, Tensor]:
        along_axes = batch.positions if batch.rope_positions is None else batch.rope_positions
        return {
            rope: rotary(along_axes if rope is not None and rope.sections else batch.positions)
            for rope, rotary in self._rotary.items()
        }

    def _embed(self, batch: Batch, features: Sequence[Tensor]) -> Tensor:
        assert self.embedding is not None
        token_ids, media = batch.token_ids, self._arch.media
        if batch.media_tokens is not None:  # their own embeddings are not used, and there may be none
            token_ids = token_ids.index_fill(0, batch.media_tokens, 0)
        x: Tensor = self.embedding(token_ids, batch.adapters_of())
        if self._arch.embedding_multiplier != 1.0:
            x = x * x.new_full((), self._arch.embedding_multiplier)  # rounded to the type of `x`
        if media is not None and (own := media.own_tokens) is not None:
            assert self.tower is not None
            numbers = token_ids - own.start
            is_own = (numbers >= 0) & (numbers < len(own))
            x = torch.where(is_own[:, None], self.tower.embedded(numbers.clamp(0, len(own) - 1)), x)
        if batch.media_tokens is not None:
            x = x.index_copy(0, batch.media_tokens, features[0])
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        x = apply(self.embedding_norm, x)
        if self._arch.passes_embedding:
            x = torch.cat((x, x), dim=-1)
        elif isinstance(self._arch.streams, ConnectionSpec):
            x = x.repeat(1, self._arch.streams.num_streams)
        elif self.layer_inputs is not None:
            token_ids = batch.token_ids
            if batch.media_tokens is not None and media is not None and media.layer_input_token_id is not None:
                token_ids = token_ids.index_fill(0, batch.media_tokens, media.layer_input_token_id)
            inputs = self.layer_inputs(token_ids, x)
            x = torch.cat((x if self.expansion is None else self.expansion.expand(x), inputs), dim=-1)
        return F.pad(x, (0, self._arch.passed_aux_width)) if self._arch.aux_layers else x

    def features(self, x: Tensor) -> Tensor:
        """Normalize the last stage's hidden states `[rows, hidden_size]`, without the inputs of `aux_layers` that may
        be behind them in its output: the input of the head and of pooling."""
        return apply(self.norm, x[:, : self._arch.hidden_size].contiguous() if self._arch.aux_layers else x)

    def logits(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """The last stage's `[rows, hidden_size]` → float32 `[rows, vocab_size]`, the same on every rank."""
        return self.logits_of(self.features(x), adapters)

    def logits_of(self, features: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Like `logits`, for normalized `features`."""
        arch = self._arch
        out: Tensor = self.head(features, adapters)
        if arch.logit_multiplier != 1.0:
            out = out * arch.logit_multiplier
        return out if not arch.logit_softcap else (out / arch.logit_softcap).tanh() * arch.logit_softcap
