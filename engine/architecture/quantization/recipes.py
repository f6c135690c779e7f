"""The schemes of `quire quantize`, by the names of compressed-tensors' presets, and their settings in config.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization.online import linear_modules, with_stars
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """The parts of `quantization_config` that differ."""

    layout: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None


_INTS = {"type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_FLOATS = {"type": "float", "symmetric": True}
_EXPONENTS, _EIGHTHS = (
    dict.fromkeys(("scale_dtype", "zp_dtype"), dtype) for dtype in ("torch.uint8", "torch.float8_e4m3fn")
)
_TOKENS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
RECIPES: dict[str, Recipe] = {
    "w4a16": Recipe("pack-quantized", {"num_bits": 4, **_INTS}),
    "w4a16_asym": Recipe("pack-quantized", {"num_bits": 4, **_INTS, "symmetric": False}),
    "w8a16": Recipe("pack-quantized", {"num_bits": 8, **_INTS}),
    "w8a8": Recipe(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {"type": "int", **_TOKENS},
    ),
    "fp8_dynamic": Recipe(
        "float-quantized", {"num_bits": 8, "strategy": "channel", **_FLOATS}, {"type": "float", **_TOKENS}
    ),
    "fp8_block": Recipe(
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128], **_FLOATS},
        {"type": "float", **_TOKENS, "strategy": "group", "group_size": 128},
    ),
    "mxfp4a16": Recipe(
        "mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, **_FLOATS, **_EXPONENTS}
    ),
    "nvfp4a16": Recipe(
        "nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, **_FLOATS, **_EIGHTHS}
    ),
}


def settings(name: str, arch: ModelSpec, group_size: int | None = None, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of a model with this scheme: its linear layers and experts are quantized. All other
    matrices are ignored, and so are the modules that `ignored` names (`re:…`: an expression that matches from the
    start).

    Raises `ConfigError` if the scheme has no groups of this size.
    """
    recipe = RECIPES[name]
    weights = {"dynamic": False, "actorder": None, **recipe.weights}
    if group_size is not None:
        if weights["type"] != "int" or weights["strategy"] != "group":
            raise ConfigError(f"--group-size {group_size}: scheme {name} has no groups of other sizes; omit it")
        if group_size not in (-1, 32, 64, 128, 256):
            raise ConfigError(f"--group-size {group_size} is not supported; use 32, 64, 128, 256, or -1 (one group)")
        weights |= {"group_size": group_size} if group_size > 0 else {"strategy": "channel", "group_size": None}
    needed = checkpoint_tensors(arch, has_head=True)
    matrices = {each.removesuffix(".weight") for each, tensor in needed.items() if len(tensor.shape) > 1}
    names = [_known(each, matrices, FAMILIES[arch.name].prefix) for each in ignored]
    others = {with_stars(each) for each in matrices} - linear_modules(arch) | {"lm_head"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": recipe.inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": recipe.layout}},
        "ignore": [*sorted(map(_pattern, others)), *names],
        "kv_cache_scheme": None,
    }


def without_prefix(ignored: Sequence[str], prefix: str) -> list[str]:
    """The modules that are ignored, and the same in a model whose modules lack the prefix."""
    start = re.compile(rf"^(re:)?{re.escape(prefix.removesuffix('.'))}\\?\.")
    return list(dict.fromkeys([*ignored, *(start.sub(r"\1", each) for each in ignored)]))


def _known(ignored: str, modules: Collection[str], prefix: str) -> str:
    """The ignored name, with the prefix that files may lack if needed. Raises `ConfigError` if it names no module."""
    start, name = ("re:", ignored[3:]) if ignored.startswith("re:") else ("", ignored)
    for each in (ignored, start + (re.escape(prefix) if start else prefix) + name):
        if any(_names(each, module) for module in modules):
            return each
    raise ConfigError(f"--ignore {ignored}: no module has this name; modules are such as {min(modules)}")


def _names(target: str, module: str) -> bool:
    """Whether a target of compressed-tensors names a module. Invalid expressions are refused elsewhere."""
    try:
        return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module
    except re.error:
        return True


def _pattern(module: str) -> str:
    """The target of compressed-tensors for modules with a star in place of numbers."""
    return f"re:{re.escape(module).replace(re.escape('*'), '[0-9]+')}$" if "*" in module else module
