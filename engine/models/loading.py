"""Building a stage's model and filling its parameters, each rank with its own slices only."""

from __future__ import annotations

import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from quire import kernels
from quire.engine import encoder, model_files
from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.families import FAMILIES
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import Experts
from quire.engine.layers.weight import Shard, Weight
from quire.engine.model_files import TensorInfo
from quire.engine.models.checkpoint import Stored, find
from quire.engine.models.decoder import Decoder
from quire.engine.models.encoder import Encoder
from quire.engine.parallel import Parallel
from quire.engine.pooling import Dense

logger = logging.getLogger(__name__)

_DTYPES = ("F32", "BF16", "F16")
_NAMED_PROBLEMS = 8
_DUMMY_DEVIATION = 0.02
_DUMMY_ELEMENTS = 1 << 20

Needed = dict[str, list[tuple[Weight, Shard, Stored]]]
"""Checkpoint tensor → where its slices go, and how they lie in it."""


def load(config: EngineConfig, rank: int, parallel: Parallel, device: torch.device, *, pack: bool = True) -> Decoder:
    """As `load_model`, of a decoder."""
    decoder = load_model(config, rank, parallel, device, pack=pack)
    assert isinstance(decoder, Decoder)
    return decoder


def load_model(
    config: EngineConfig, rank: int, parallel: Parallel, device: torch.device, *, pack: bool = True
) -> Decoder | Encoder:
    """The model of this rank's stage on `device`, with its weights.

    Only the rank's own slices are read, straight into the parameters. A linear layer is packed (and quantized) as soon
    as it is whole, so that no more than a few are held in both forms; `pack=False` leaves that out. Rank 0 shows a
    progress bar and warns of tensors that no rank needs. Raises `ConfigError` that names the
    tensors missing or of another shape.
    """
    model, stage = config.model, config.parallel.stages[config.parallel.stage_of(rank)]
    with _defaults(device, getattr(torch, model.dtype)):
        decoder = build(model, stage, parallel)
    needed = needed_tensors(decoder, model)
    missing = Counter({id(weight): len(weight.shards) for weight, _, _ in chain(*needed.values())})
    owners = defaultdict(list)
    for layer in decoder.modules():
        if isinstance(layer, Linear | Experts):
            for weight in layer.parameters():
                owners[id(weight)].append(layer)

    def on_put(weight: Weight) -> None:
        missing[id(weight)] -= 1
        for layer in owners[id(weight)] if pack and not missing[id(weight)] else ():
            if not any(missing[id(other)] for other in layer.parameters()):
                layer.pack(model.quantization)

    if model.load_format == "dummy":
        _fill_randomly(needed, model.seed, on_put)
    else:
        headers = _by_needed_name(model_files.read_headers(model.path), needed, model)
        _check(needed, headers, model)
        if rank == 0:
            _warn_of_surplus(headers, model)
        _read(needed, headers, on_put, bar=rank == 0)
    return decoder


def build(model: ModelConfig, layers: range, parallel: Parallel) -> Decoder | Encoder:
    """The model, or a stage of it, uninitialized; where it makes vectors, without a head."""
    arch = model.architecture
    if isinstance(arch, encoder.Encoder):
        return Encoder(arch, parallel)
    decoder = Decoder(arch, layers, model.max_model_len, parallel)
    if model.pooling is not None and hasattr(decoder, "head"):
        del decoder.head
    return decoder


def load_dense(model: ModelConfig, dense: Dense, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weight `[out, in]` and bias of a dense module behind the pooling, in float32."""
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes["linear.bias"] = (dense.out_features,)
    if model.load_format == "dummy":
        generator = torch.Generator().manual_seed(model.seed)
        weight = torch.randn(shapes["linear.weight"], generator=generator) * _DUMMY_DEVIATION
        return weight.to(device), torch.zeros(dense.out_features, device=device) if dense.bias else None
    folder = model.path / dense.folder
    headers = model_files.read_headers(folder)
    for name, shape in shapes.items():
        if name not in headers or headers[name].shape != shape:
            found = f"has the shape {list(headers[name].shape)}" if name in headers else "is missing"
            raise ConfigError(f"{folder}: {name} {found}, expected {list(shape)}")
    tensors = []
    for name in shapes:
        with safe_open(headers[name].file, framework="pt") as file:
            tensors.append(file.get_tensor(name).float().to(device))
    return tensors[0], tensors[1] if dense.bias else None


def needed_tensors(decoder: Decoder | Encoder, model: ModelConfig) -> Needed:
    """The checkpoint tensors that this stage is made of."""
    needed: Needed = defaultdict(list)
    for path, weight in decoder.named_parameters():
        assert isinstance(weight, Weight)
        for shard in weight.shards:
            stored = find(path, weight, shard, model.architecture)
            needed[stored.name].append((weight, shard, stored))
    return needed


def _by_needed_name(headers: dict[str, TensorInfo], needed: Needed, model: ModelConfig) -> dict[str, TensorInfo]:
    """The headers under the names that are needed: a checkpoint of the model without its head lacks their prefix, and
    in the first ones of BERT, converted from TensorFlow, norms have a gamma and a beta."""
    prefix = FAMILIES[model.architecture.name].prefix
    is_bare = not any(name.startswith(prefix) for name in headers)

    def needed_name(name: str) -> str:
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return next((each for each in (name, new, prefix + new) if each in needed), prefix + name if is_bare else name)

    return {needed_name(name): info for name, info in headers.items()}


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _check(needed: Needed, headers: dict[str, TensorInfo], model: ModelConfig) -> None:
    problems = []
    for name, slices in needed.items():
        expected = slices[0][2].shape
        if name not in headers:
            problems.append(f"{name} is missing")
        elif headers[name].shape != expected:
            problems.append(f"{name} has the shape {list(headers[name].shape)}, expected {list(expected)}")
        elif headers[name].dtype not in _DTYPES:
            problems.append(f"{name} is of type {headers[name].dtype}, which is not served")
    if problems:
        more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
        raise ConfigError(
            f"{model.path}: the weights do not fit config.json: {'; '.join(problems[:_NAMED_PROBLEMS])}{more}"
        )


def _warn_of_surplus(headers: dict[str, TensorInfo], model: ModelConfig) -> None:
    """Name the tensors that no stage needs, such as biases that config.json does not announce."""
    arch = model.architecture
    with torch.device("meta"):
        everything = build(model, range(arch.num_layers), Parallel())
    known = set(needed_tensors(everything, model))
    known.update({"lm_head.weight"} if arch.tie_embeddings or model.pooling is not None else ())
    unused = FAMILIES[arch.name].unused
    surplus = sorted(
        name
        for name in headers.keys() - known
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(unused)
    )
    if surplus:
        logger.warning(
            "%s: tensors that %s does not use (%d): %s%s",
            model.path,
            arch.name,
            len(surplus),
            ", ".join(surplus[:_NAMED_PROBLEMS]),
            ", …" * (len(surplus) > _NAMED_PROBLEMS),
        )


def _read(needed: Needed, headers: dict[str, TensorInfo], on_put: Callable[[Weight], None], *, bar: bool) -> None:
    by_file = defaultdict(list)
    total = 0
    for name, slices in needed.items():
        by_file[headers[name].file].append(name)
        total += sum(shard.elements * weight.element_size() for weight, shard, _ in slices)
    with tqdm(total=total, desc="weights", unit="B", unit_scale=True, disable=not bar) as progress:
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    source = tensors.get_slice(headers[name].name)
                    for weight, shard, stored in needed[name]:
                        _put(weight, shard, stored.arranged(shard, source[stored.slice(shard)]))
                        on_put(weight)
                        progress.update(shard.elements * weight.element_size())


def _put(weight: Weight, shard: Shard, values: Tensor) -> None:
    """Fill the shard's place; the padding after the last shard becomes zero."""
    weight.data[shard.target].copy_(values)
    if shard is weight.shards[-1] and shard.expert is None:
        end = shard.offset + shard.length
        weight.data.narrow(shard.dim, end, weight.shape[shard.dim] - end).zero_()


def _fill_randomly(needed: Needed, seed: int, on_put: Callable[[Weight], None]) -> None:
    """Dummy weights: an element depends on seed, tensor name and place alone, so that the ranks' slices agree."""
    for name, slices in needed.items():
        for weight, shard, stored in slices:
            key = seed << 32 ^ zlib.crc32(f"{name} {shard.part} {stored.expert}".encode())
            _put(weight, shard, torch.ones(()) if len(shard.shape) == 1 else _random(key, shard, weight))
            on_put(weight)


def _random(key: int, shard: Shard, like: Tensor) -> Tensor:
    """The shard's slice of a random matrix, of the type of `like`, some rows at a time."""
    rows, columns = (
        torch.arange(size, device=like.device)[index]
        for size, index in zip(shard.shape, (*shard.source, slice(None)), strict=False)
    )
    values = like.new_empty(len(rows), len(columns))
    step = max(1, _DUMMY_ELEMENTS // len(columns))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        noise = kernels.uniform_noise(torch.full_like(part, key), part, columns.int())
        values[start : start + step] = ((noise - 0.5) * (_DUMMY_DEVIATION * 12**0.5)).to(values.dtype)
    return values
