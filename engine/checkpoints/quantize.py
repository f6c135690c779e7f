"""Quantizes a checkpoint to a folder, as `quire quantize` asks. Reads a request from standard input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from quire.engine.architecture import quantization
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import checkpoint_tensors, weight_names
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization import recipes
from quire.engine.architecture.quantization.method import FLOATS, Scheme
from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.architecture.quantization.online import with_stars
from quire.engine.checkpoints import gptq
from quire.engine.checkpoints.checkpoint_files import open_model
from quire.engine.checkpoints.output_folder import output_folder
from quire.engine.checkpoints.quantized_tensors.writers import rounding_of, stored_tensors
from quire.engine.config.checkpoint_tensors import by_needed_name
from quire.engine.config.quantize_request import QuantizeRequest
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import TensorInfo, read_json
from quire.kernels.quantized import QuantizedWeight, quantize

_AT_ONCE = 1 << 24
"""Weights that are widened to float32 at once."""


class Source:
    """The tensors of the checkpoint, and the schemes of those that are quantized."""

    def __init__(self, request: QuantizeRequest) -> None:
        """Raises `ConfigError` naming a tensor that cannot be quantized."""
        model, self.settings = request.config.model, dict(request.settings)
        arch, method = replace(model.architecture, media=None), quantization.read(request.settings)
        assert method is not None
        self._files = open_model(model)
        needed = checkpoint_tensors(arch, has_head=model.pooling is None)
        prefix = FAMILIES[arch.name].prefix
        named = by_needed_name(self._files.headers, prefix, needed)
        self.headers = {info.name: info for info in named.values()}
        self.schemes: dict[str, Scheme] = {}
        """Scheme of each quantized tensor, by the tensor's name."""
        surplus = [name for name, info in named.items() if name not in needed and len(info.shape) > 1]
        self.settings["ignore"] += [name.removesuffix(".weight") for name in surplus]
        if prefix and any(name == prefix + info.name for name, info in named.items()):
            self.settings["ignore"] = recipes.without_prefix(self.settings["ignore"], prefix)
        for name, tensor in needed.items():
            if name not in named or len(tensor.shape) == 1:
                continue
            if (scheme := method.scheme(name.removesuffix(".weight"))) is None:
                continue
            self.schemes[named[name].name] = scheme
            group, columns, problem = rounding_of(scheme).group, tensor.shape[-1], ""
            if tensor.is_transposed:
                problem = (
                    "is stored with inputs before outputs, which transformers does not read quantized; use "
                    "quire serve -q fp8"
                )
            elif group and columns % group:
                problem = (
                    f"has {columns} inputs, which are not whole groups of {group}; use another --scheme or --group-size"
                )
            elif named[name].dtype not in FLOATS:
                problem = f"is of type {named[name].dtype}, which is not supported; use 16-bit weights"
            if problem:
                raise ConfigError(f"{name} {problem}, or --ignore")
        if not self.schemes:
            raise ConfigError("--ignore names all of the model's linear layers: nothing is left to quantize")
        self._fused = _fused_modules(arch)
        self._file_names = {name: info.name for name, info in named.items()}
        self._needed_names = {file_name: name for name, file_name in self._file_names.items()}
        self._largest: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._files.view(self.headers[name])

    def largest(self, name: str) -> Tensor | None:
        """The largest magnitude in the layers that are multiplied together with this one, if they share a scale."""
        if not isinstance(self.schemes[name], NvFp4):
            return None
        name = self._needed_names[name]
        starred, numbers = with_stars(name), re.findall(r"(?<=\.)\d+(?=\.)", name)
        pieces = [f"{each}.weight".split("*") for each in self._fused[starred.removesuffix(".weight")]]
        names = tuple("".join(chain(*zip(each, [*numbers, ""], strict=True))) for each in pieces)
        if names not in self._largest:
            self._largest[names] = (
                torch.stack([self[self._file_names[each]].abs().max().float() for each in names]).max().view(1, 1)
            )
        return self._largest[names]

    def stored(self, name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        """A quantized weight's tensors by name."""
        scheme, module = self.schemes[name], name.removesuffix(".weight")
        return {module + suffix: each for suffix, each in stored_tensors(scheme, weight, self.largest(name)).items()}

    def rounded(self, name: str) -> QuantizedWeight:
        """The weight, rounded to the nearest numbers, a few rows at a time."""
        scheme, weight = self.schemes[name], self[name]
        rounding = rounding_of(scheme)
        step = -(-_AT_ONCE // (weight.shape[1] * rounding.rows)) * rounding.rows
        parts = [quantize(rows, rounding, self.largest(name), search=True) for rows in torch.split(weight, step)]
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return QuantizedWeight(
            rounding.values,
            weight.dtype,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(offsets) if offsets else None,
        )


def _fused_modules(arch: ModelSpec) -> dict[str, list[str]]:
    """The names of the modules that are multiplied together, with stars for numbers, by the name of each module."""
    fused, found = dict[str, list[str]](), weight_names(arch)
    for number, layer in enumerate(arch.layers):
        for each in layer.matrices(arch.hidden_size, 1):
            if each.module:
                names = [with_stars(name) for name in found[number, each.module]]
                fused.update(dict.fromkeys(names, names))
    return fused


def run(request: QuantizeRequest, load: gptq.LoadStage) -> None:
    """Write the folder. It has its name, and config.json, only when it is complete.

    Raises `ConfigError` if something cannot be quantized, or is not a number.
    """
    source, path = Source(request), request.config.model.path
    with output_folder(request.out, path, "quire quantize") as part:
        _write_weights(source, part, request, load)
        config = read_json(path / "config.json") | {"quantization_config": source.settings}
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(source: Source, folder: Path, request: QuantizeRequest, load: gptq.LoadStage) -> None:
    shards: list[list[str]] = []
    size = 0
    for number, shard in enumerate(_shards(source, request, load)):
        save_file(shard, folder / f"{number}.safetensors", {"format": "pt"})
        shards.append(list(shard))
        size += sum(tensor.nbytes for tensor in shard.values())
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(source: Source, request: QuantizeRequest, load: gptq.LoadStage) -> Iterator[dict[str, Tensor]]:
    """The tensors to write: first the tensors of each stage that GPTQ has quantized, then the other tensors of each
    file."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in source.headers.values():
        files.setdefault(info.file, []).append(info)
    with tqdm(total=len(source.headers), desc="quantize", unit=" tensors", disable=None) as bar:
        done = set[str]()
        for layer in (
            gptq.layers(request.config, source.schemes, request.texts, load, source.largest) if request.texts else ()
        ):
            yield dict(chain(*(source.stored(name, weight).items() for name, weight in layer.items())))
            done.update(layer)
            bar.update(len(layer))
        for infos in files.values():
            shard: dict[str, Tensor] = {}
            for name in (info.name for info in infos if info.name not in done):
                shard |= source.stored(name, _finite(name, source)) if name in source.schemes else {name: source[name]}
                bar.update()
            if shard:
                yield dict(_separate(shard))


def _separate(shard: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, contiguous and each with memory of its own, as a file has them: tied ones may be the same."""
    seen = set[int]()
    for name, tensor in shard.items():
        own = tensor.contiguous()
        yield name, own.clone() if own.data_ptr() in seen else own
        seen.add(own.data_ptr())


def _finite(name: str, source: Source) -> QuantizedWeight:
    weight = source.rounded(name)
    if not weight.scales.isfinite().all():
        raise ConfigError(f"{source.headers[name].file}: {name} has values that are NaN or infinite; download it again")
    return weight
