"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): rounds the columns of a weight one after the other, and
corrects the columns that follow for the error that each makes in the layer's outputs on given texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import NeededTensor
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.checkpoints.checkpoint_files import Checkpoint
from quire.engine.checkpoints.loader import needed_tensors
from quire.engine.checkpoints.quantized_tensors.writers import rounding_of
from quire.engine.config.engine_config import EngineConfig
from quire.engine.layers.batch import Batch, KVBlocks
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.layers.linear import GatedLinear, Linear
from quire.engine.layers.moe import Experts
from quire.engine.protocol.errors import ConfigError
from quire.kernels import quantized
from quire.kernels.linear import PackedGatedLinear, PackedLinear
from quire.kernels.quantized import QuantizedWeight, Rounding, choose_factors, nearest_codes

logger = logging.getLogger(__name__)

_DAMPING = 0.01
"""Fraction of the mean of the diagonal that is added to the diagonal."""
_COLUMNS = 128
"""Columns whose errors are corrected together in the columns after them."""
_BLOCK_SIZE, _BATCH_TOKENS = 16, 4096


def quantize(weight: Tensor, rounding: Rounding, moments: Tensor, largest: Tensor | None = None) -> QuantizedWeight:
    """Round a weight `[out, in]`, given the sums of products of its inputs, float32 `[in, in]`. Factors are chosen when
    the first column of their group is reached; `largest` is as for `quantized.choose_factors`."""
    rest, columns = weight.float().clone(), weight.shape[1]
    group, moments = rounding.group or columns, moments.clone()
    diagonal = moments.diagonal()
    diagonal += _DAMPING * diagonal.mean() + (diagonal == 0)
    try:
        inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise ConfigError("GPTQ: the inputs of a layer are too much alike; use more and longer texts") from None
    codes, factors = torch.empty_like(weight, dtype=torch.uint8), list[tuple[Tensor, Tensor | None]]()
    step = min(group, _COLUMNS)
    for start in range(0, columns, step):
        end = min(start + step, columns)
        if start % group == 0:
            chosen = choose_factors(rest[:, start : start + group].to(weight.dtype), rounding, largest)
            factors.append(chosen)
        errors = torch.empty(len(weight), end - start)
        for column in range(start, end):
            own = rest[:, column : column + 1]
            codes[:, column : column + 1] = nearest_codes(own, rounding, *chosen)
            one = QuantizedWeight(rounding.values, torch.float32, codes[:, column : column + 1], *chosen)
            error = (own - one.dequantize()) / inverse[column, column]
            rest[:, column:end] -= error * inverse[column, column:end]
            errors[:, column - start] = error[:, 0]
        rest[:, end:] -= errors @ inverse[start:end, end:]
    scales = torch.cat([scales for scales, _ in factors], dim=1)
    offsets = [each for _, each in factors if each is not None]
    return QuantizedWeight(rounding.values, weight.dtype, codes, scales, torch.cat(offsets, dim=1) if offsets else None)


LoadStage = Callable[[EngineConfig, int], nn.Module]
"""Loads a stage of a decoder, not packed, on the CPU."""
Moments = Callable[[int], Tensor | None]
"""The sums of products of the inputs of a weight, or of an expert of a stack; None: there are too few inputs."""


class _Observed(PackedLinear):
    """A plain matmul that sums the products of its inputs."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._moments = weight, torch.zeros(weight.shape[1], weight.shape[1])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self._moments.addmm_(x.T, x)
        return F.linear(x, self._weight, bias)

    def moments(self, _: int) -> Tensor:
        return self._moments


def _observed(decoder: nn.Module) -> dict[int, Moments]:
    """Let the layers observe their inputs; returns the moments of each weight, by its id."""
    found: dict[int, Moments] = {}
    for layer in decoder.modules():
        if isinstance(layer, Experts):
            found |= _observed_experts(layer)
        elif isinstance(layer, Linear) and layer.may_be_quantized:
            layer._product = product = _Observed(layer.weight.data)
            found[id(layer.weight)] = product.moments
            if isinstance(layer, GatedLinear):
                layer._product = PackedGatedLinear(product, layer._activation)
    return found


def _observed_experts(experts: Experts) -> dict[int, Moments]:
    """Keep the tokens that are routed to the experts, as the moments of all experts take more memory."""
    routed: list[tuple[Tensor, Tensor]] = []
    hook = experts.register_forward_pre_hook(lambda _, inputs: routed.append((inputs[0], inputs[2])))

    def inputs(expert: int) -> Tensor:
        hook.remove()  # the layer runs once more when it is rounded
        return torch.cat([x[(ids == expert).any(1)] for x, ids in routed])

    def of_gate_up(expert: int) -> Tensor | None:
        return _enough(inputs(expert))

    def of_down(expert: int) -> Tensor | None:  # gate and up may be rounded by now
        weight, bias = experts.gate_up.weight.data[expert], experts.gate_up.bias
        inner = F.linear(inputs(expert), weight, None if bias is None else bias.data[expert])
        activate = kernels.act_mul if experts._spec.is_gated else kernels.activate
        return _enough(activate(inner, experts._spec.activation))

    return {id(experts.gate_up.weight): of_gate_up, id(experts.down.weight): of_down}


def _enough(x: Tensor) -> Tensor | None:
    return x.T @ x if len(x) >= x.shape[1] else None


def layers(
    config: EngineConfig,
    schemes: Mapping[str, Scheme],
    texts: Sequence[Sequence[int]],
    load: LoadStage,
    largest: Callable[[str], Tensor | None] = lambda name: None,
) -> Iterator[dict[str, QuantizedWeight]]:
    """The quantized weights of each stage, by the names of their tensors. A stage reads the outputs of the quantized
    stages before it for the texts, and an expert the tokens that are routed to it; an expert's weights with more inputs
    than tokens are rounded to the nearest. `config` is in float32, with a stage for each layer if possible. `largest`
    returns the largest magnitude of a weight and of the weights that share its scale, if scales depend on it."""
    if any(isinstance(layer.attention, CompressedAttentionSpec) for layer in config.model.architecture.layers):
        raise ConfigError(
            f"GPTQ is not supported for {config.model.architecture.name}, whose attention is compressed; use "
            "--method rtn"
        )
    kernels.prepare("cpu")()
    batches = list(_batches(texts))
    hidden: list[Tensor | None] = [None] * len(batches)
    total = num_nearest = 0
    for stage in range(len(config.parallel.stages)):
        decoder = load(config, stage)
        moments = _observed(decoder)
        for batch, state in zip(batches, hidden, strict=True):
            _forward(config, decoder, stage, batch, state)
        found, nearest = _rounded(config, schemes, decoder, moments, largest)
        total, num_nearest = total + len(found), num_nearest + nearest
        if stage + 1 < len(config.parallel.stages):
            hidden = [_forward(config, decoder, stage, *each) for each in zip(batches, hidden, strict=True)]
        del decoder, moments  # before the next ones are loaded
        yield found
    if num_nearest:
        logger.warning(
            "%d of %d matrices are rounded to the nearest: fewer tokens of the texts were routed to these experts than "
            "they have inputs; use more texts",
            num_nearest,
            total,
        )


def _rounded(
    config: EngineConfig,
    schemes: Mapping[str, Scheme],
    decoder: nn.Module,
    moments: Mapping[int, Moments],
    largest: Callable[[str], Tensor | None],
) -> tuple[dict[str, QuantizedWeight], int]:
    """The weights of a stage by the names of their tensors, and how many of them are rounded to the nearest; the
    decoder has the rounded ones from then on."""
    needed = needed_tensors(decoder, config.model)
    shapes = {name: NeededTensor(places[0][2].shape) for name, places in needed.items()}
    checkpoint = Checkpoint(config.model, FAMILIES[config.model.architecture.name].prefix, shapes)
    found, nearest = dict[str, QuantizedWeight](), 0
    for name, places in needed.items():
        file_name = checkpoint.headers[name].name
        if file_name not in schemes:
            continue
        weight, first, whole = places[0]
        stored = checkpoint[whole][tuple(slice(0, size) for size in whole.shape)]
        rounding, own = rounding_of(schemes[file_name]), moments[id(weight)](first.local_expert)
        nearest += own is None
        most = largest(file_name)
        found[file_name] = (
            quantized.quantize(stored, rounding, most, search=True)
            if own is None
            else quantize(stored, rounding, own, most)
        )
        rounded = found[file_name].dequantize().float()
        for target, shard, place in places:
            target.data[shard.target] = place.arranged(shard, rounded[place.slice(shard)])
    return found, nearest


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Batches of as many texts as fit in _BATCH_TOKENS tokens."""
    together: list[Sequence[int]] = []
    for text in (*texts, ()):
        if together and (not text or sum(map(len, together)) + len(text) > _BATCH_TOKENS):
            lengths = torch.tensor([len(each) for each in together])
            blocks = -(-int(lengths.max()) // _BLOCK_SIZE)
            tables = torch.arange(len(together) * blocks).view(-1, blocks)
            positions = torch.cat([torch.arange(len(each)) for each in together])
            starts, none = F.pad(lengths.cumsum(0), (1, 0)), torch.full((len(together),), -1)
            firsts = tables[:, 0].repeat_interleave(lengths) * _BLOCK_SIZE
            segments = kernels.StateSegments(starts, torch.arange(len(starts)), none, none)
            yield Batch(
                token_ids=torch.tensor(list(chain(*together))),
                positions=positions,
                sequence_lengths=lengths,
                query_starts=starts,
                logits_indices=torch.zeros(1, dtype=torch.int64),
                groups={0: KVBlocks(firsts + positions, tables), 1: segments},
            )
            together = []
        together.append(text)


def _forward(config: EngineConfig, decoder: nn.Module, stage: int, batch: Batch, hidden: Tensor | None) -> Tensor:
    """The hidden states `[tokens, hidden_size]` after a stage."""
    caches: list[LayerCache] = []
    layers = config.parallel.stages[stage]
    for number in layers:
        layer, memory, keys, state = config.model.architecture.layers[number], None, None, None
        if layer.attention is not None:
            source = layer.kv_source
            memory = (
                _plane(batch, layer.attention.kv_shape(1)) if source is None else caches[layers.index(source)].memory
            )
            if (index_shape := layer.attention.index_shape()) is not None:
                keys = _plane(batch, index_shape)
        if layer.state is not None:  # no state is kept
            matrices, inputs, *others = (
                torch.zeros(1, *shape)
                for shape in (layer.state.state_shape(1), layer.state.input_shape(1), *layer.state.other_inputs)
            )
            state = kernels.RecurrentState(matrices, inputs, tuple(others))
        caches.append(LayerCache(memory, state=state, state_group=1, keys=keys))
    with torch.inference_mode():
        out: Tensor = decoder(hidden, batch, caches)
    return out


def _plane(batch: Batch, shape: tuple[int, int, int]) -> Tensor:
    """The cache of a layer with `(tensors, KV heads, elements of a row)`."""
    num_tensors, kv_heads, row = shape
    return kernels.allocate_kv_cache(
        layers=1,
        num_blocks=batch.attention(0).block_tables.numel(),
        kv_heads=kv_heads,
        block_size=_BLOCK_SIZE,
        head_dim=row,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_tensors=num_tensors,
    )[0]
