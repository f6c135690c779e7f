"""Compares a checkpoint's headers with the tensors that the model needs, before any weight is read. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import NeededTensor, checkpoint_tensors, weight_names
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.architecture.quantization.method import FLOATS, INTEGERS, Method, Scheme
from quire.engine.architecture.quantization.online import Online, OnlineScheme
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.pooling import Norm
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files
from quire.engine.repository.model_files import TensorInfo

_NAMED_PROBLEMS = 8
T = TypeVar("T")


class StoredWeight(NamedTuple):
    """A quantized weight of a checkpoint."""

    scheme: Scheme
    module: str
    tensors: dict[str, TensorInfo]
    """The tensors that the checkpoint has, by the scheme's names."""


def check_model(model: ModelConfig, headers: Mapping[str, TensorInfo]) -> None:
    """Raise `ConfigError` naming the tensors of one of Quire's own models that are missing or do not fit."""

    def check(arch: ModelSpec) -> None:
        needed = checkpoint_tensors(arch, has_head=model.pooling is None)
        needed |= {name: NeededTensor(shape) for name, shape in classifier_tensors(model).items()}
        named = by_needed_name(headers, FAMILIES[arch.name].prefix, needed)
        check_tensors(model, needed, with_stacks(named, needed))

    try:
        check(model.architecture)
    except ConfigError as error:
        if model.architecture.media is None:
            raise
        check(replace(model.architecture, media=None))
        raise ConfigError(f"{error}; use --language-model-only to take only text") from None


def with_stacks(headers: Mapping[str, TensorInfo], needed: Mapping[str, NeededTensor]) -> dict[str, TensorInfo]:
    """The headers, where stacks of experts that are stored as one matrix, `[experts * rows, columns]`, have the shape
    of a stack (DBRX)."""

    def stacked(name: str, info: TensorInfo) -> TensorInfo:
        shape = needed[name].shape if name in needed else ()
        is_flat = len(shape) == 3 and info.shape == (shape[0] * shape[1], shape[2])
        return replace(info, shape=shape) if is_flat else info

    return {name: stacked(name, info) for name, info in headers.items()}


def classifier_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of the model's checkpoint that belong to a classifier's head, by name."""
    modules = [] if model.pooling is None else model.pooling.weighted
    layers = [module for module in modules if isinstance(module, Norm) or not module.folder]
    return {name: shape for layer in layers for name, shape in layer.tensors.items()}


def check_tensors(
    model: ModelConfig, needed: Mapping[str, NeededTensor], headers: Mapping[str, TensorInfo]
) -> dict[str, StoredWeight]:
    """Return the needed tensors that are stored quantized. Raises `ConfigError` unless the headers have all tensors."""
    problems: list[str] = []
    quantized: dict[str, StoredWeight] = {}
    for name, tensor in needed.items():
        if (weight := _quantized_weight(model.quantized, name, tensor, headers)) is None:
            problems += _plain_problems(name, tensor, headers)
        else:
            quantized[name] = weight
            problems += _quantized_problems(name, tensor, weight.scheme, headers)
    if problems:
        more = f"; and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
        raise ConfigError(
            f"{model.path}: the weights do not match config.json: {'; '.join(problems[:_NAMED_PROBLEMS])}{more}"
        )
    return quantized


def _quantized_weight(
    method: Method | None, name: str, tensor: NeededTensor, headers: Mapping[str, TensorInfo]
) -> StoredWeight | None:
    """The weight as the settings say that it is stored; None if it is not quantized."""
    module = name.removesuffix(".weight")
    if tensor.has_integers:
        return None
    before = None
    if isinstance(method, Online):
        before = _quantized_weight(method.stored, name, tensor, headers)
        if not method.is_rounded(module):
            return before
    if method is None or len(tensor.shape) < 2 or (scheme := method.scheme(module)) is None:
        return None
    if isinstance(scheme, OnlineScheme):
        if before is not None:
            return before._replace(scheme=replace(scheme, stored=before.scheme))
        scheme = replace(scheme, is_transposed=tensor.is_transposed)
    is_possible = scheme.problem(tensor.weight_shape) is None
    stored = scheme.tensors(module, tensor.weight_shape) if is_possible else {}
    names = {each: found for each, info in stored.items() if (found := info.name_in(headers, each))}
    is_plain = name in headers and headers[name].dtype in FLOATS and not isinstance(scheme, OnlineScheme)
    if is_plain and not set(names.values()) - {name}:
        return None
    return StoredWeight(scheme, module, {each: headers[found] for each, found in names.items()})


def _plain_problems(name: str, tensor: NeededTensor, headers: Mapping[str, TensorInfo]) -> Iterator[str]:
    if name not in headers:
        yield f"{name} is missing"
    elif headers[name].shape != tensor.shape:
        yield f"{name} has the shape {list(headers[name].shape)}, expected {list(tensor.shape)}"
    elif tensor.has_integers:
        if headers[name].dtype not in INTEGERS:
            yield f"{name} is of type {headers[name].dtype}, expected {' or '.join(INTEGERS)}"
    elif headers[name].dtype not in FLOATS:
        yield f"{name} is of type {headers[name].dtype}, which is not supported without a quantization_config"


def _quantized_problems(
    name: str, tensor: NeededTensor, scheme: Scheme, headers: Mapping[str, TensorInfo]
) -> Iterator[str]:
    if (problem := scheme.problem(tensor.weight_shape)) is not None:
        yield f"{name}: {problem}"
        return
    for each, expected in scheme.tensors(name.removesuffix(".weight"), tensor.weight_shape).items():
        if (found := expected.name_in(headers, each)) is None:
            if not expected.is_optional:
                yield f"{' or '.join((each, *expected.other_names))} is missing"
        elif expected.shapes and headers[found].shape not in expected.shapes:
            shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
            yield f"{found} has the shape {list(headers[found].shape)}, expected {shapes}"
        elif headers[found].dtype not in expected.dtypes:
            yield f"{found} is of type {headers[found].dtype}, expected {' or '.join(expected.dtypes)}"


_INNER = re.compile(
    r"^vlm\.(?:model\.)?(language_model\.|visual\.|vision_tower\.|multi_modal_projector\.)?(?:model\.|vision_model\.)?"
)
"""What stands before the names of a part of a model that another one contains: older checkpoints contain the model with
its head, and parts that are whole models."""


_KIND = re.compile(r"\.(weight\..*|[^.]*)$")
"""What stands behind the name of a module."""


def by_needed_name(headers: Mapping[str, T], prefix: str, needed: Collection[str]) -> dict[str, T]:
    """The headers, by names of tensors, under the names that are needed: a checkpoint of the model without its head
    lacks their prefix; in BERT's first checkpoints, converted from TensorFlow, norms have a gamma and a beta; in older
    checkpoints of models that take images, the language model has its own prefixes and head, CLIP and SigLIP are a part
    of the tower, and ColQwen2 and ColPali have a model with a head; and transformers writes DeepSeek V4 by some names
    of its own. A quantized weight's tensors have the name of the module that needs the weight."""
    is_bare = not any(name.startswith(prefix) for name in headers)
    is_older = any(name.startswith("language_model.") for name in needed)  # so are the names of other stages
    modules = {_KIND.sub("", name) for name in needed}

    def needed_name(name: str) -> str:
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        other = prefix + name if is_bare else name
        if name.startswith("language_model."):
            other = name.removeprefix("language_model.")
            if is_older:
                other = name
            elif not other.startswith("lm_head."):
                other = f"model.language_model.{other.removeprefix('model.')}"
        written = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
        written = written.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        flat = new.replace("vision_tower.vision_model.", "vision_tower.")
        inner = _INNER.sub(lambda found: f"vlm.{found[1] or 'language_model.'}", name)
        names = (name, new, prefix + new, flat, prefix + flat, written, inner)
        found = next((each for each in names if each in needed), None)
        return found or next((each for each in names if _KIND.sub("", each) in modules), other)

    return {needed_name(name): info for name, info in headers.items()}


def as_stored(arch: ModelSpec, folder: Path, load_format: str) -> ModelSpec:
    """The architecture with `separate_experts` if the files here, or an index beside config.json, have them so."""
    family = None if isinstance(arch, TransformersModelSpec) else FAMILIES.get(arch.name)
    if family is None or not family.stacks_experts(arch):
        return arch
    names = model_files.tensor_names(folder, load_format) or ()
    return replace(arch, separate_experts=any(".experts.0." in name for name in names))


def quantized_outer(folder: Path, load_format: str, arch: ModelSpec, method: Method | None) -> frozenset[str]:
    """Which of embedding and head (`ModelSpec.outer_matrices`) and of the tower's modules are stored quantized, by the
    names of the checkpoint's tensors. While these are not known, the settings decide, and towers are not quantized."""
    if method is None:
        return frozenset()
    embedding, head = arch.outer_matrices(1)
    if isinstance(method, Online):
        return quantized_outer(folder, load_format, arch, method.stored) | {head.module for _ in method.heads}
    names: Collection[str] | None = model_files.tensor_names(folder, load_format)
    of_modules, found = weight_names(arch), set[str]()
    if names is not None and arch.name in FAMILIES:
        needed = {f"{name}.weight" for own in of_modules.values() for name in own}
        names = by_needed_name(dict.fromkeys(names), FAMILIES[arch.name].prefix, needed).keys()
    for module, is_told in {head.module: method.names_heads, embedding.module: method.names_embeddings}.items():
        for name in of_modules.get((None, module), ()):
            scheme = method.scheme(name)
            if scheme is not None and (is_told if names is None else _stored_names(scheme, name, names)):
                found.add(module)
    for (_, module), own in of_modules.items():
        if module.startswith("tower.") and names is not None:
            schemes = {name: method.scheme(name) for name in own}
            if all(scheme is not None and _stored_names(scheme, name, names) for name, scheme in schemes.items()):
                found.add(module)
    return frozenset(found)


def logical_names(names: Collection[str], method: Method | None) -> set[str]:
    """The names of a checkpoint's tensors, in which a quantized weight's tensors are replaced by the weight."""
    found = set(names)
    if isinstance(method, Online) and method.stored is not None:
        return logical_names(names, method.stored)
    if method is None:
        return found
    for module in {name.rpartition(".")[0] for name in names}:
        _replace_stored(found, module, method)
    stacks = [name for name in found if not name.rpartition(".")[2].startswith(("weight", "_weight", "bias"))]
    for module in {part for name in stacks for part in (name, name.rpartition("_")[0])}:
        _replace_stored(found, module, method)
    return found


def _replace_stored(found: set[str], module: str, method: Method) -> None:
    """Replace a module's tensors by its weight, if it is quantized."""
    if (scheme := method.scheme(module)) is not None and (own := _stored_names(scheme, module, found)):
        found -= own
        found.add(f"{module}.weight" if any(name.startswith(f"{module}.") for name in own) else module)


def _stored_names(scheme: Scheme, module: str, names: Collection[str]) -> set[str]:
    """The names of a quantized weight's tensors in a checkpoint; empty if one of them is missing."""
    own = set()
    for endings, is_optional in _endings(scheme):
        name = next((name for ending in endings if (name := module + ending) in names), None)
        if name is not None:
            own.add(name)
        elif not is_optional:
            return set()
    return own


@cache
def _endings(scheme: Scheme) -> list[tuple[tuple[str, ...], bool]]:
    """The suffixes of stored tensors after the module's name, and whether a tensor is optional."""
    shape = _ANY_STACK if scheme.problem(_ANY_STACK) is None else _ANY_STACK[1:]
    stored = scheme.tensors("", shape)
    return [((name, *info.other_names), info.is_optional) for name, info in stored.items()]


_ANY_STACK = (2, 1024, 2048)
"""Names of tensors do not depend on sizes, and a stack has all names that a matrix has."""
