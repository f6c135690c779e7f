"""Reads the adapters of llama.cpp: names and shapes of their tensors → `AdapterSpec`. No torch here.

Source: convert_lora_to_gguf.py and src/llama-adapter.cpp of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.adapter_spec import AdapterSpec, LowRank, Piece
from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.adapters.peft import Builder
from quire.engine.architecture.spec_parts import Shape
from quire.engine.protocol.errors import ConfigError

_ALPHA, _TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_KNOWN = {"adapter.type", _ALPHA, _TOKENS}


def digested(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that an adapter's digest covers: all that may change what it computes, by name."""
    own = {name: each for name, each in sorted(metadata.items()) if name.startswith("adapter.")}
    return {"general.architecture": metadata.get("general.architecture"), **own}


def read(
    metadata: Mapping[str, Any], modules: Mapping[str, str], shapes: Mapping[str, Shape], base: Base
) -> AdapterSpec:
    """Map the tensors to changes of the base's tensors; every tensor is used.

    `modules` are the paths of the modules in the published model by the names of tensors of the GGUF model, without
    their ends `.lora_a` and `.lora_b`; that of an expert contains `{expert}`. Shapes are the reverse of ggml's. Raises
    `ConfigError` that names a setting or tensor that does not fit.
    """
    if unknown := sorted(name for name in metadata if name.startswith("adapter.") and name not in _KNOWN):
        raise ConfigError(f"{unknown[0]} is not supported")
    alpha, tokens = metadata.get(_ALPHA, 0.0), metadata.get(_TOKENS, [])
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise ConfigError(f"{_ALPHA} {alpha!r} is not a finite number")
    if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
        raise ConfigError(f"{_TOKENS} must be a list of token ids")
    builder, has_pairs = Builder(base, shapes), metadata.get("general.architecture") == "llama"
    for tensor in shapes:
        if tensor.removesuffix(".lora_a").removesuffix(".lora_b") == tensor:
            raise ConfigError(f"{tensor} is no tensor of a low-rank adapter; whole tensors are not supported in GGUF")
    for name in dict.fromkeys(re.sub(r"\.lora_[ab]$", "", tensor) for tensor in shapes):
        a, b = f"{name}.lora_a", f"{name}.lora_b"
        if missing := [each for each in (a, b) if each not in shapes]:
            raise ConfigError(f"{missing[0]} is missing")
        path, is_stack = modules[name], "{expert}" in modules[name]
        for each in (a, b):
            if len(shapes[each]) != (3 if is_stack else 2):
                raise ConfigError(f"{each} has the shape {list(shapes[each])}, which is not that of such a tensor")
        if is_stack and shapes[a][0] != shapes[b][0]:
            raise ConfigError(f"{a} has {shapes[a][0]} experts, but {b} has {shapes[b][0]}")
        rank = shapes[b][-1]
        if not rank:
            raise ConfigError(f"{b} has the rank 0")
        scaling = alpha / rank if alpha else 1.0
        for expert in range(shapes[a][0]) if is_stack else (None,):
            own = path.format(expert=expert)
            if (module := base.module(own)) is None:
                raise ConfigError(f"{a}: the base has no module {own}")
            up, down = _matrix(b, shapes[b], expert), _matrix(a, shapes[a], expert)
            if name.startswith("token_embd."):  # [tokens, rank] and [features, rank]
                rows, columns = up.rows, up.columns
                up, down = down, Piece(b, rows, columns, is_transposed=True)
            builder.add(module, LowRank(up, down, scaling, ()), has_pairs=has_pairs)
        if is_stack and base.module(path.format(expert=shapes[a][0])) is not None:
            raise ConfigError(f"{a} has {shapes[a][0]} experts, the base has more")
    return builder.spec(_TOKENS, tuple(tokens))


def _matrix(tensor: str, shape: Shape, index: int | None) -> Piece:
    rows, columns = shape[-2:]
    return Piece(tensor, (range(rows),), (range(columns),), index)
