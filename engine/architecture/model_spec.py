"""A decoder's description: the parts of each layer, and their requirements on a rank. No torch here.

`quire.engine.architecture.families` derives a `ModelSpec` from Hugging Face's `config.json`; `quire.engine.models`
builds the modules. Each layer has its own description (equal ones are one object), so that windows, dense first layers
and layers without positions are not special cases. Sizes are in features and parameters; `hidden` is the model's hidden
size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from quire.engine.architecture.attention_spec import AnyAttentionSpec, AttentionSpec
from quire.engine.architecture.feed_forward_spec import ExpertParallelMoESpec, MLPSpec, MoESpec
from quire.engine.architecture.media_spec import MediaSpec, TransformersTowerSpec
from quire.engine.architecture.recurrent_spec import RecurrentSpec
from quire.engine.architecture.residual_spec import (
    AltUpSpec,
    ConnectionSpec,
    GatedConnectionSpec,
    LayerInputSpec,
    NGramSpec,
    ResidualSpec,
    ScaledResidualSpec,
    SharedBlockSpec,
)
from quire.engine.architecture.spec_parts import (
    MatrixShape,
    NormSpec,
    Parameter,
    Parameters,
    Units,
    layout_errors,
    linear,
    matrices,
    norm,
    without_number,
)
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Mixers of tokens (attention, a recurrent state, or both in parallel) and a feed-forward layer, each with norms
    before and after (None: none), added to the residual stream. Either may be missing."""

    attention: AnyAttentionSpec | None
    state: RecurrentSpec | None = None
    feed_forward: MLPSpec | MoESpec | None
    attention_norm: NormSpec | None
    """Applied before the mixers."""
    attention_post_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None
    feed_forward_post_norm: NormSpec | None = None
    is_parallel: bool = False
    """Both read the same residual stream; without a feed_forward_norm, they read the same normalized one."""
    residual_multiplier: float = 1.0
    """Factor on the layer's additions to the residual stream."""
    residual: ResidualSpec | None = None
    """The residual path, if it is not the plain residual stream."""

    def __post_init__(self) -> None:
        assert self.residual is None or not self.is_parallel
        assert self.ngrams is None or self.state is not None  # the state keeps what they read of earlier tokens

    @property
    def ngrams(self) -> NGramSpec | None:
        return self.residual.ngrams if isinstance(self.residual, GatedConnectionSpec) else None

    @property
    def kv_source(self) -> int | None:
        """See `AttentionSpec`."""
        return self.attention.kv_source if isinstance(self.attention, AttentionSpec) else None

    @property
    def mixers(self) -> list[AnyAttentionSpec | RecurrentSpec]:
        return [each for each in (self.attention, self.state) if each is not None]

    @property
    def parts(self) -> list[AnyAttentionSpec | RecurrentSpec | MLPSpec | MoESpec]:
        return [*self.mixers, *([] if self.feed_forward is None else [self.feed_forward])]

    def parameters(self, hidden: int) -> Parameters:
        """All parameters, with paths in the layer. A block that layers share counts in the layer that holds it."""
        for name in ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm"):
            yield from norm(name, getattr(self, name), hidden)
        parts, residual = self.parts, self.residual
        if isinstance(residual, SharedBlockSpec):
            assert isinstance(self.attention, AttentionSpec)
            assert isinstance(self.feed_forward, MLPSpec)
            yield from residual.parameters(hidden, self.attention, self.feed_forward)
            parts = [part for part in parts if part is self.state]
        elif isinstance(residual, ScaledResidualSpec | AltUpSpec | ConnectionSpec):
            yield from residual.parameters(hidden)
        for part in parts:
            yield from part.parameters(hidden)

    def matrices(self, hidden: int, tp: int) -> Sequence[MatrixShape]:
        """The weights of linear layers on one rank that may be quantized."""
        return _sizes(self, hidden, tp)[0]

    def num_parameters(self, hidden: int, tp: int) -> int:
        """Parameters on one rank."""
        return _sizes(self, hidden, tp)[1]


# Planning asks for the same few layers again and again.
@cache
def _parameters(layer: LayerSpec, hidden: int) -> Sequence[Parameter]:
    return tuple(layer.parameters(hidden))


@cache
def _sizes(layer: LayerSpec, hidden: int, tp: int) -> tuple[Sequence[MatrixShape], int]:
    """The matrices, and the number of parameters."""
    parameters = _parameters(layer, hidden)
    return tuple(matrices(parameters, tp)), sum(each.elements(tp) for each in parameters)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes that determine every shape of a decoder."""

    name: str
    """The name in config.json's `architectures`."""
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    """Applied before the head."""
    tie_embeddings: bool
    position_embeddings: int = 0
    """Learned positions (0: none); the first `position_offset` are unused."""
    position_offset: int = 0
    has_sinusoids: bool = False
    """Positions, counted from `position_offset` on, are added to embedded tokens as sines and cosines, which are
    computed (Vaswani et al. 2017)."""
    embedding_norm: NormSpec | None = None
    """Applied after the embedding."""
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    head_bias: bool = False
    separate_experts: bool = False
    """The checkpoint has the experts one by one, where others of the architecture stack them."""
    aux_layers: tuple[int, ...] = ()
    """Layers whose input, all residual streams, a head that drafts reads (EAGLE-3); `num_layers` stands for the output
    of the last one. Inputs travel to the last stage beside what the stages pass on."""
    media: MediaSpec | None = None
    """How the model takes images and videos; None: it does not. The first stage has the tower."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("num_hidden_layers must be at least 1")
        # `streams` and `layer_input`, which pass between layers, are read from the first one.
        paths = [each.residual for each in self.layers]
        assert len({(getattr(path, "num_streams", 1), getattr(path, "layer_input", None)) for path in paths}) == 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_rope_sections(self) -> bool:
        """Whether tokens have rotary positions along several axes."""
        ropes = (layer.attention.rope for layer in self.layers if layer.attention is not None)
        return any(rope is not None and rope.sections for rope in ropes)

    @property
    def streams(self) -> AltUpSpec | ConnectionSpec | None:
        """The residual path of all layers, if it has several streams."""
        residual = self.layers[0].residual
        return residual if isinstance(residual, AltUpSpec | ConnectionSpec) else None

    @property
    def layer_input(self) -> LayerInputSpec | None:
        """The layers' own input, if they have one; it is the same for all layers."""
        residual = self.layers[0].residual
        return residual.layer_input if isinstance(residual, ScaledResidualSpec | AltUpSpec) else None

    @property
    def stream_width(self) -> int:
        """Features of a token in the residual streams between layers."""
        return self.hidden_size * (1 if self.streams is None else self.streams.num_streams)

    @property
    def stage_width(self) -> int:
        """Features of a token that a stage passes to the next one: the residual streams, the layers' own inputs, the
        embedded token if layers read it, and `passed_aux_width`."""
        passed = 0 if self.layer_input is None else self.num_layers * self.layer_input.size
        return self.stream_width + passed + self.passes_embedding * self.hidden_size + self.passed_aux_width

    @property
    def output_width(self) -> int:
        """Features of a token in the output of the last stage, and in the inputs of `aux_layers`, which follow them."""
        return self.hidden_size + len(self.aux_layers) * self.stream_width

    @property
    def passed_aux_width(self) -> int:
        """Features of the inputs of `aux_layers` that stages pass on: only the last one has the last layer's output."""
        return sum(number < self.num_layers for number in self.aux_layers) * self.stream_width

    @property
    def passes_embedding(self) -> bool:
        """Whether layers read the embedded tokens."""
        return any(isinstance(layer.residual, SharedBlockSpec) for layer in self.layers)

    def held_layers(self, stage: range) -> list[tuple[int, LayerSpec]]:
        """The layers of a stage by their number. If layers share a block, the first one holds it."""
        found, blocks = [], set[int]()
        for number in stage:
            layer = self.layers[number]
            if isinstance(block := layer.residual, SharedBlockSpec):
                layer = replace(layer, residual=replace(block, is_held=block.source not in blocks))
                blocks.add(block.source)
            found.append((number, layer))
        return found

    def with_expert_parallelism(self, ranks: int, num_redundant_experts: int) -> ModelSpec:
        """The same model with the experts of each layer, and copies of some, distributed evenly over `ranks`."""

        def of(layer: LayerSpec) -> LayerSpec:
            mixture = layer.feed_forward
            if not isinstance(mixture, MoESpec):
                return layer
            count = (mixture.num_experts + num_redundant_experts) // ranks
            return replace(layer, feed_forward=ExpertParallelMoESpec(**vars(mixture), num_local_experts=count))

        changed = {layer: of(layer) for layer in set(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def outer_matrices(self, tp: int) -> tuple[MatrixShape, MatrixShape]:
        """The weights of the embedding and of the head on one rank; the module of a tied head is the embedding."""
        embedding = next(self.parameters_before()).matrix(tp)
        return embedding, embedding if self.tie_embeddings else embedding._replace(module="head")

    def parameters_before(self) -> Parameters:
        """All parameters before the layers, from the embedding's on."""
        hidden, rows = self.hidden_size, Units(self.vocab_size, "tokens", "padding")
        yield from linear("embedding", self.vocab_size, hidden, rows_of=rows)
        if self.position_embeddings:
            yield from linear("positions", self.position_embeddings, hidden)
        yield from norm("embedding_norm", self.embedding_norm, hidden)
        if self.layer_input is not None:
            yield from self.layer_input.outer_parameters(hidden, self.num_layers)
        if isinstance(self.streams, AltUpSpec):
            yield from self.streams.projections("expansion", hidden)
        if self.media is not None:
            tower = self.media.tower
            for each in tower.parameters():
                units = {part: own._replace(spare="whole") for part, own in each.units.items()}
                yield each._replace(module=f"tower.{each.module}", units={} if tower.divides_items else units)

    def tower_matrices(self, tp: int) -> Iterator[tuple[int | None, MatrixShape]]:
        """The weights of the tower's linear layers on one rank, each with the number of its layer in the tower."""
        for each in self.parameters_before():
            if each.is_quantizable and each.module.startswith("tower."):
                module, number = without_number(each.module)
                yield number, each.matrix(tp)._replace(module=module)

    def parameters_after(self, *, has_head: bool = True) -> Parameters:
        """All parameters after the layers; a tied head is the embedding."""
        hidden, rows = self.hidden_size, Units(self.vocab_size, "tokens", "padding")
        if isinstance(self.streams, AltUpSpec):
            yield from self.streams.projections("merger", hidden)
        elif self.streams is not None:
            yield from self.streams.last_parameters("merger", hidden)
        yield from norm("norm", self.norm, hidden)
        if has_head:
            yield from linear("head", self.vocab_size, hidden, rows_of=rows, bias=self.head_bias)

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters on one rank of a stage; a tied head is stored again if the first and last stage differ."""
        is_first, is_last = stage == 0, stage == len(stages) - 1
        count = sum(layer.num_parameters(self.hidden_size, tp) for _, layer in self.held_layers(stages[stage]))
        if is_first:
            count += sum(each.elements(tp) for each in self.parameters_before())
        for each in self.parameters_after() if is_last else ():
            is_embedding = (each.module, each.kind) == ("head", "weight") and self.tie_embeddings
            count += 0 if is_embedding and is_first else each.elements(tp)
        return count

    def embedded_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        """Parameters on one rank of a stage that are embeddings of tokens, other than the model's."""
        layers = (_parameters(self.layers[number], self.hidden_size) for number in stages[stage])
        before = self.parameters_before() if stage == 0 else ()
        return sum(each.elements(tp) for each in chain(before, *layers) if each.module.endswith(".embedding"))

    def num_float32_parameters(self, stages: Sequence[range], stage: int) -> int:
        """Parameters on one rank of a stage that have 32 bits, whatever the model's type."""
        layers = (_parameters(self.layers[number], self.hidden_size) for number in stages[stage])
        after = self.parameters_after() if stage == len(stages) - 1 else ()
        return sum(each.elements(1) for each in chain(*layers, after) if each.is_float32)

    def layout_errors(self, tp: int) -> list[str]:
        """The units that `tp` ranks cannot divide."""
        errors: dict[str, None] = {}
        for layer in dict.fromkeys(self.layers):
            errors |= layout_errors(_parameters(layer, self.hidden_size), tp)
        return list(errors)

    def check_divides(self, tp: int) -> None:
        """Reject a tensor-parallel size that does not divide heads and feed-forward layers evenly."""
        if problems := self.layout_errors(tp):
            most = max(mixer.num_heads for layer in self.layers for mixer in layer.mixers)
            fits = [str(size) for size in range(1, most + 1) if not self.layout_errors(size)]
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not divide this model's {' and '.join(problems)}; "
                f"sizes that do: {', '.join(fits)}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformersLayerSpec(LayerSpec):
    """A layer as transformers builds it. Sizes are per rank, in the layout in which it was measured."""

    attention_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    linears: tuple[MatrixShape, ...]
    others: int
    """Parameters other than the linear layers' matrices."""

    def matrices(self, hidden: int, tp: int) -> Sequence[MatrixShape]:
        return self.linears

    def num_parameters(self, hidden: int, tp: int) -> int:
        return sum(each.elements for each in self.linears) + self.others


@dataclass(frozen=True, kw_only=True)
class TransformersModelSpec(ModelSpec):
    """A model as transformers builds it, measured in one tensor-parallel layout. Sizes are per rank."""

    layers: tuple[TransformersLayerSpec, ...]
    embedding: MatrixShape
    """The embedding's weight, if its vocabulary is sharded as Quire does; else empty."""
    head: MatrixShape
    before: int
    """Parameters before the layers on a rank, including the embedding's."""
    after: int
    """Parameters after the layers."""
    read_directly: frozenset[str] = frozenset()
    """Linear layers whose weights the model reads directly, with `*` for layer numbers: they are not packed."""
    attention_calls: tuple[int, ...]
    """The layers whose caches the calls of attention in a step use, in order. A layer that runs several times, or that
    calls attention several times, is as many layers here; the first of them has the weights."""
    has_key_biases: bool = False
    """Scores have biases by key, which are among the features of the keys in the KV cache."""
    continues_by_token: bool = False
    """Layers with recurrent states read them only if they get one token, so a request is continued one token at a
    time."""
    has_axes: bool = False
    """Tokens have rotary positions along several axes."""

    @property
    def has_rope_sections(self) -> bool:
        return self.has_axes

    def outer_matrices(self, tp: int) -> tuple[MatrixShape, MatrixShape]:
        return self.embedding, self.head

    def stage_parameters(self, stages: Sequence[range], stage: int, tp: int) -> int:
        count = sum(self.layers[number].num_parameters(self.hidden_size, tp) for number in stages[stage])
        if stage == 0:
            count += self.before
            if self.media is not None:
                assert isinstance(self.media.tower, TransformersTowerSpec)
                count += self.media.tower.num_parameters
        if stage == len(stages) - 1:
            count += self.after + (self.tie_embeddings and stage > 0) * self.head.elements
        return count

    def layout_errors(self, tp: int) -> list[str]:
        """None: layouts that do not fit were rejected when the model was measured."""
        return []
