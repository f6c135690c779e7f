"""Loads the parameters of a stage's model from a checkpoint; each rank loads only its own slices."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from quire import kernels
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import NeededTensor
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.architecture.quantization.form import Form, form_of
from quire.engine.architecture.quantization.method import FLOATS
from quire.engine.checkpoints.checkpoint import StoredSlice, find
from quire.engine.checkpoints.checkpoint_files import Checkpoint, open_files
from quire.engine.checkpoints.packed_cache import PackedCache
from quire.engine.checkpoints.staging import PinnedStaging
from quire.engine.checkpoints.surplus import listed
from quire.engine.config.checkpoint_tensors import by_needed_name
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.pooling import Dense, Norm
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import ExpertStack
from quire.engine.layers.quantized import Quantizable, keep_quantized
from quire.engine.layers.weight import Shard, Weight, without_memory
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_DUMMY_DEVIATION = 0.02
_DUMMY_ELEMENTS = 1 << 20
_READERS, _GPU_READERS = 4, 8
_UNCALIBRATED = 6 * 448 / 64
"""The global scale of inputs in NVFP4 of an expert whose own is missing or 0, as no token reached it when the publisher
measured: inputs may be up to 64. It must not depend on the experts that this rank has."""
_AHEAD_SHARE, _AHEAD_BYTES = 32, 1 << 30
"""Parameters that are loaded but not yet packed take at most this fraction of the rank's weights, and at most this
number of bytes."""

Place = tuple[Weight, Shard, StoredSlice]
"""A slice of a checkpoint tensor: the parameter, the shard in it, and the location in the checkpoint."""
Places = dict[nn.Parameter, list[Place]]
"""The slices of each parameter, one for each of its shards, in their order."""


def load_parameters(
    module: nn.Module,
    model: ModelConfig,
    device: torch.device,
    *,
    num_local_ranks: int = 1,
    pack: bool = True,
    bar: bool = False,
    warns: bool = False,
    cache: PackedCache | None = None,
    report: Callable[[set[str]], None] | None = None,
) -> None:
    """Load the parameters of `module`, a stage of the model, a draft head or a part of one, on `device`.

    Only the rank's own slices are read, directly into the parameters, several at a time. A parameter gets its memory
    when it is read, and a linear layer is packed (and quantized) as soon as it is complete, so that only a few layers
    are in memory in both forms; `pack=False` skips this. `report` gets the names of all tensors of the checkpoint
    before one is read. Raises `ConfigError` naming the tensors that are missing or have another shape.
    """
    places: Places = defaultdict(list)
    for place in _places(module, model):
        places[place[0]].append(place)
    checkpoint = None if model.load_format == "dummy" else _open(model, places)
    if checkpoint is not None:
        places = _quantized_places(places, checkpoint)
        if pack:
            _keep_quantized(module, model, places, checkpoint)
    if pack:
        _store_narrow(module, model, places, checkpoint, warns=warns and checkpoint is not None)
    units = _units(module, model, places, pack=pack)
    if checkpoint is None:
        return _fill(units, partial(_fill_randomly, model.seed), readers=1, bar=False)
    if report is not None:
        report(checkpoint.names)
    if cache is not None and cache.restore(module):
        return None
    staging, readers = None, _READERS
    if device.type != "cpu":
        staging = PinnedStaging(device)
        readers = max(_READERS, min(_GPU_READERS, len(os.sched_getaffinity(0)) // num_local_ranks))
    _fill(units, partial(_read, checkpoint, staging=staging), readers=readers, bar=bar)
    if cache is not None:
        cache.save(module)


def _open(model: ModelConfig, places: Places) -> Checkpoint:
    """The checkpoint that these slices are in. Raises `ConfigError` naming those that are missing or do not fit."""
    is_built = isinstance(model.architecture, TransformersModelSpec)
    needed = dict[str, NeededTensor]()
    for weight, _, stored in chain(*places.values()):
        is_integer = not weight.is_floating_point()
        needed.setdefault(stored.name, NeededTensor(stored.shape, stored.is_transposed, is_integer))
    return Checkpoint(model, "" if is_built else FAMILIES[model.architecture.name].prefix, needed)


def load_dense(model: ModelConfig, module: Dense | Norm, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a module after the pooling, in float32; the weight of a dense one is `[out, in]`."""
    shapes, size = module.tensors, module.size if isinstance(module, Norm) else module.out_features
    if model.load_format == "dummy":
        weight = torch.ones(size)
        if isinstance(module, Dense):
            generator = torch.Generator().manual_seed(model.seed)
            weight = torch.randn(size, module.in_features, generator=generator) * _DUMMY_DEVIATION
        return weight.to(device), torch.zeros(size, device=device) if module.bias else None
    place = module.folder if isinstance(module, Dense) else ""
    folder = model.path / place
    files = open_files(folder, model.load_format)
    headers = files.headers
    if not place:
        headers = by_needed_name(headers, FAMILIES[model.architecture.name].prefix, shapes)
    for name, shape in shapes.items():
        if name not in headers or headers[name].shape != shape:
            problem = f"has the shape {list(headers[name].shape)}" if name in headers else "is missing"
            raise ConfigError(f"{folder}: {name} {problem}, expected {list(shape)}")
        if headers[name].dtype not in FLOATS:
            raise ConfigError(f"{folder}: {name} is quantized, which is not supported for what follows the pooling")
    weight, *bias = [files.view(headers[name]) for name in shapes]
    if isinstance(module, Dense) and module.rows:
        weight = weight[list(module.rows)].float()
        weight = weight[1:] - weight[:1] if module.is_difference else weight
    return weight.to(device, torch.float32, copy=True), bias[0].to(device, torch.float32, copy=True) if bias else None


class _HasPlaces(Protocol):
    """A model that knows where its parameters are in the checkpoint, as models built by transformers do."""

    places: list[Place]


def _places(module: nn.Module, model: ModelConfig) -> Iterator[Place]:
    """The slices of the checkpoint that fill the parameters of a stage, or of a part of it."""
    if isinstance(model.architecture, TransformersModelSpec):
        yield from cast("_HasPlaces", module).places
        return
    for path, weight in module.named_parameters():
        assert isinstance(weight, Weight)
        for shard, stored in find(path, weight, model.architecture):
            yield weight, shard, stored


def needed_tensors(module: nn.Module, model: ModelConfig) -> dict[str, list[Place]]:
    """The slices that a stage, or a part of it, needs, by the name of the checkpoint tensor."""
    needed = defaultdict[str, list[Place]](list)
    for place in _places(module, model):
        needed[place[2].name].append(place)
    return needed


def _quantized_places(places: Places, checkpoint: Checkpoint) -> Places:
    """The places, with the location of each quantized tensor as its reader gives it."""
    return {
        parameter: [
            (weight, shard, stored if checkpoint.scheme(stored.name) is None else stored.quantized())
            for weight, shard, stored in own
        ]
        for parameter, own in places.items()
    }


def _matrices(layer: nn.Module) -> list[Quantizable]:
    """The weights of a layer that may stay quantized as in the checkpoint; they are packed together."""
    if isinstance(layer, ExpertStack):
        return [layer.gate_up, layer.down]
    is_one = isinstance(layer, VocabParallelEmbedding) or (isinstance(layer, Linear) and layer.may_be_quantized)
    return [cast("Quantizable", layer)] if is_one else []


def _keep_quantized(module: nn.Module, model: ModelConfig, places: Places, checkpoint: Checkpoint) -> None:
    """Give layers that can be computed from quantized tensors codes and factors in place of a weight, also in
    `places`."""
    num_unscaled = 0
    for path, layer in module.named_modules():
        matrices = _matrices(layer) if model.keeps_quantized(path) else []
        forms = [_form(places.get(matrix.weight, []), checkpoint) for matrix in matrices]
        for matrix, form in zip(matrices, forms, strict=True) if None not in forms else ():
            assert form is not None
            own = places.pop(matrix.weight)
            order = _order(own, checkpoint) if form.has_order else None
            rounding = _rounding(own, checkpoint) if form.has_rounding else None
            global_scale = _global_scale(own, checkpoint) if form.activations == "fp4" else None
            num_unscaled += matrix.weight.is_cuda and form.activations == "fp4" and global_scale is None
            with without_memory():
                kept = keep_quantized(matrix, form, order, rounding, global_scale)
            for part, weight in kept.parts():
                places[weight] = [
                    (weight, shard, stored.quantized(part, form.group))
                    for shard, (_, _, stored) in zip(weight.shards, own, strict=True)
                ]
    if num_unscaled:
        logger.info("%d NVFP4 matrices have no scale of inputs; their activations are not rounded", num_unscaled)


def _store_narrow(
    module: nn.Module, model: ModelConfig, places: Places, checkpoint: Checkpoint | None, *, warns: bool
) -> None:
    """Let embeddings, and layers whose products widen their weights, load these in 16 bits if the checkpoint stores
    them in 16 bits. Without a checkpoint, dummy weights are as planned."""
    if model.stored_dtype is None:
        return
    if not kernels.widens_weights():
        if warns:
            logger.warning(
                "Quire's CPU kernels are not compiled: weights that are stored in %s take 4 bytes each, twice as much "
                "as planned; install a C++ compiler, or use --dtype %s",
                model.stored_dtype,
                model.stored_dtype,
            )
        return
    wide = set[str]()
    for layer in module.modules():
        matrices = _matrices(layer)
        whole = [places.get(matrix.weight, []) for matrix in matrices if matrix.quantized is None]
        own = {stored.name for _, _, stored in chain(*whole)}
        types = {checkpoint.dtype(name) for name in own} if checkpoint is not None else {model.stored_dtype}
        if len(types) == 1 and types <= {"bfloat16", "float16"}:
            (dtype,) = types
            for matrix in matrices:
                matrix.weight.store_as(getattr(torch, dtype))
        elif "quantized" not in types:
            wide |= own
    if wide and warns:
        text = "%s: of weights planned in %s, some are float32, which takes more memory %s"
        logger.warning(text, model.path, model.stored_dtype, listed(sorted(wide)))


def _form(places: list[Place], checkpoint: Checkpoint) -> Form | None:
    """How a rank keeps a weight; None: dequantized."""
    if not places:
        return None
    cuts = {(shard.start, shard.length) if shard.dim == 1 else (0, shard.shape[-1]) for _, shard, _ in places}
    (start, length), *others = cuts
    names = dict.fromkeys(stored.name for _, _, stored in places)
    _, first, _ = places[0]
    form = None if others else form_of([checkpoint.scheme(name) for name in names], start, length, first.shape[-1])
    if form is None or not form.has_order:
        return form
    orders: dict[int | None, list[Tensor | None]] = defaultdict(list)
    for expert, name, shape in {(shard.expert, stored.name, stored.shape) for _, shard, stored in places}:
        orders[expert].append(checkpoint.reader(name, shape).order())
    if all(each is None for each in chain(*orders.values())):
        return replace(form, has_order=False)
    return form if all(map(_are_equal, orders.values())) else None


def _are_equal(orders: list[Tensor | None]) -> bool:
    first, *others = orders
    return first is not None and all(each is not None and each.equal(first) for each in others)


def _order(places: list[Place], checkpoint: Checkpoint) -> Tensor:
    """The group of each of the rank's columns, `[columns]` or `[experts, columns]`."""
    found: dict[int, Tensor] = {}
    for _, shard, stored in places:
        if shard.local_expert not in found:
            order = checkpoint.reader(stored.name, stored.shape).order()
            assert order is not None
            found[shard.local_expert] = order if shard.dim == 0 else order[shard.start : shard.start + shard.length]
    orders = torch.stack([found[expert] for expert in sorted(found)])
    return orders[0] if places[0][1].expert is None else orders


def _rounding(places: list[Place], checkpoint: Checkpoint) -> Tensor:
    """How inputs are rounded, `[2]` or `[experts, 2]`. Raises `ConfigError` if it is not the same for weights that are
    multiplied together."""
    found: dict[int, Tensor] = {}
    for _, shard, stored in places:
        own = checkpoint.reader(stored.name, stored.shape).rounding()
        assert own is not None
        if not (first := found.setdefault(shard.local_expert, own)).equal(own):
            raise ConfigError(
                f"{stored.name}: input_scale and input_zero_point {own.tolist()} differ from those of weights with the "
                f"same inputs, {first.tolist()}, which is not supported; use --quantization int8"
            )
    roundings = torch.stack([found[expert] for expert in sorted(found)])
    return roundings[0] if places[0][1].expert is None else roundings


def _global_scale(places: list[Place], checkpoint: Checkpoint) -> Tensor | None:
    """The factor that inputs are multiplied by before they are rounded to 4 bits, `[]` or `[experts]`: the least of the
    factors of weights that are multiplied together, so that the largest inputs of all of them fit. None: the factor of
    a layer other than experts is missing from the checkpoint, or is not a positive number."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for _, shard, stored in places:
        own = checkpoint.reader(stored.name, stored.shape).global_scale()
        if own is not None:
            own = own.float().flatten()
            own = own[0 if len(own) == 1 else shard.expert or 0]
        if own is None or not 0 < own < torch.inf:
            if shard.expert is None:
                return None
            own = torch.tensor(_UNCALIBRATED)
        found[shard.local_expert].append(own)
    scales = torch.stack([torch.stack(found[expert]).min() for expert in sorted(found)])
    return scales[0] if places[0][1].expert is None else scales


@dataclass
class _Unit:
    """Parameters that are loaded together: all parameters of a layer that is then packed, or a single parameter outside
    such layers."""

    places: list[Place]
    size: int
    """Bytes of its parameters."""
    pack: Callable[[], None] | None = None


def _units(module: nn.Module, model: ModelConfig, places: Places, *, pack: bool) -> list[_Unit]:
    """All units of the model. Those that exist in two forms for a while come first, the largest at the front."""
    packed, taken = list[_Unit](), set[nn.Parameter]()
    for path, layer in module.named_modules() if pack else ():
        if isinstance(layer, Linear | ExpertStack) or (
            isinstance(layer, VocabParallelEmbedding) and layer.quantized is not None
        ):
            own = [weight for weight in layer.parameters() if weight in places and weight not in taken]
            taken.update(own)
            size = sum(weight.nbytes for weight in own)
            pack_layer = partial(layer.pack, model.quantization_of(path))
            packed.append(_Unit([*chain(*map(places.__getitem__, own))], size, pack_layer))
    others = [_Unit(own, weight.nbytes) for weight, own in places.items() if weight not in taken]
    return sorted(packed, key=lambda unit: -unit.size) + others


def _fill(units: list[_Unit], fill: Callable[[Place], None], *, readers: int, bar: bool) -> None:
    """Load the units' parameters in a few threads, and pack each unit in this thread while the next ones load."""
    most = min(sum(unit.size for unit in units) // _AHEAD_SHARE, _AHEAD_BYTES)
    ahead: deque[tuple[_Unit, list[Future[None]]]] = deque()
    total = sum(_size(place) for unit in units for place in unit.places)
    threads = torch.get_num_threads()
    with (
        tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not bar or None) as progress,
        ThreadPoolExecutor(readers, "reader", partial(torch.set_num_threads, 1 if readers > 1 else threads)) as pool,
    ):

        def finish() -> None:
            unit, places = ahead.popleft()
            for place, filled in zip(unit.places, places, strict=True):
                filled.result()
                progress.update(_size(place))
            if unit.pack is not None:
                unit.pack()

        for unit in units:
            while ahead and sum(other.size for other, _ in ahead) + unit.size > most:
                finish()
            for weight, _, _ in unit.places:
                weight.allocate()
            ahead.append((unit, [pool.submit(fill, place) for place in unit.places]))
        while ahead:
            finish()
    torch.set_num_threads(threads)  # new threads inherit the last value


def _size(place: Place) -> int:
    weight, shard, _ = place
    return shard.elements * weight.element_size()


def _read(checkpoint: Checkpoint, place: Place, staging: PinnedStaging | None = None) -> None:
    weight, shard, stored = place
    if not shard.length:  # there is only padding
        return _put(weight, shard, weight.data[shard.target], staging)
    _put(weight, shard, stored.arranged(shard, checkpoint[stored][stored.slice(shard)]), staging)
    loaded = weight.data[shard.target]
    if stored.part == "codes":
        scheme = checkpoint.scheme(stored.name)
        is_finite = scheme is None or scheme.values != "fp8" or not (loaded & 0x7F == 0x7F).any()
    elif not stored.shape:  # a bound, which may be infinite
        is_finite = not bool(loaded.isnan())
    else:  # The sum is a fraction of the cost of reading; in float16 it may overflow, which needs a second look.
        is_finite = math.isfinite(loaded.sum()) or bool(loaded.isfinite().all())
    if not is_finite:
        remedy = "use --dtype bfloat16, or " * (loaded.dtype == torch.float16)
        raise ConfigError(
            f"{checkpoint.file(stored.name)}: {stored.name} has values that are NaN or infinite in "
            f"{str(loaded.dtype).removeprefix('torch.')}; {remedy}download it again"
        )


def _put(weight: Weight, shard: Shard, values: Tensor, staging: PinnedStaging | None = None) -> None:
    """Store the shard's values; the padding after the last shard becomes zero."""
    target = weight.data[shard.target]
    if staging is None:
        target.copy_(values)
    else:
        staging.copy(target, values)
    if shard is weight.shards[-1] and shard.expert is None:
        end = shard.offset + shard.length
        weight.data.narrow(shard.dim, end, weight.shape[shard.dim] - end).zero_()


def _fill_randomly(seed: int, place: Place) -> None:
    """Dummy weights: an element depends only on seed, tensor name and position, so that the ranks' slices agree."""
    weight, shard, stored = place
    if len(shard.shape) == 1 and stored.name.endswith("weight"):  # a norm's weight
        _put(weight, shard, torch.ones(()))
        return
    if not weight.is_floating_point():  # a table of experts, which differ within a row
        _put(weight, shard, torch.arange(shard.shape[-1]).expand(shard.shape)[shard.source].to(weight.dtype))
        return
    key = (seed << 32 ^ zlib.crc32(f"{stored.name} {shard.part} {stored.expert}".encode())) & (1 << 63) - 1
    _put(weight, shard, _random(key, shard, weight))


def _random(key: int, shard: Shard, like: Tensor) -> Tensor:
    """The shard's slice of a random matrix or vector, with the type of `like`, computed in chunks of rows."""
    if len(shard.shape) > 2:  # stacked matrices: concatenate the rows
        rows_of_all = math.prod(shard.shape[:-1])
        below = Shard((rows_of_all, shard.shape[-1]), 0, rows_of_all)
        return _random(key, below, like).view(shard.shape)[shard.source]
    shape = (*shard.shape, 1)[:2]
    rows, columns = (
        torch.arange(size, device=like.device)[index]
        for size, index in zip(shape, (*shard.source, slice(None)), strict=False)
    )
    values = like.new_empty(len(rows), len(columns))
    step = max(1, _DUMMY_ELEMENTS // len(columns))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        noise = kernels.uniform_noise(torch.full_like(part, key), part, columns.int())
        values[start : start + step] = ((noise - 0.5) * (_DUMMY_DEVIATION * 12**0.5)).to(values.dtype)
    return values[:, 0] if len(shard.shape) == 1 else values
