"""The tensors of a checkpoint that nothing uses, and the log messages about them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.config.checkpoint_tensors import classifier_tensors
from quire.engine.config.engine_config import ModelConfig

logger = logging.getLogger(__name__)

_NAMED_PROBLEMS = 8
_CACHE_FACTORS = re.compile(r"\.([kqv]|kv)_(scale|zero_point)$|\.([kqv]|qkv)_proj\.output_(scale|zero_point)$")
"""Ends of names of KV cache scales in checkpoints of compressed-tensors, ModelOpt, Quark and others."""
_INPUT_FACTORS = (".input_scale", ".input_scale_ub", ".input_scale_2", ".input_global_scale", ".input_zero_point")
"""Suffixes of the factors with which publishers round inputs; here inputs are rounded with scales of their own, or not
at all."""


def unused_names(names: set[str], model: ModelConfig) -> list[str]:
    """The tensors that no stage uses, such as biases that config.json does not mention."""
    arch, family = model.architecture, FAMILIES[model.architecture.name]
    known = set(checkpoint_tensors(arch, has_head=model.pooling is None))
    tower = known.difference(checkpoint_tensors(replace(arch, media=None), has_head=model.pooling is None))
    known.update(_of_media_experts(arch))
    known.update({"lm_head.weight"} if arch.tie_embeddings or model.pooling is not None else ())
    known.update(classifier_tensors(model))
    # The prefixes of a tower's tensors are ignored only if it is not built.
    ignored = tuple(each for each in family.ignored_prefixes if not any(name.startswith(each) for name in tower))
    return sorted(
        name for name in names - known if not re.search(family.ignored_pattern, name) and not name.startswith(ignored)
    )


def _of_media_experts(arch: ModelSpec) -> set[str]:
    """The tensors of experts that are left out, as the model takes only text."""

    def of(layer: LayerSpec) -> LayerSpec:
        mixture = layer.feed_forward
        if not isinstance(mixture, MoESpec) or mixture.media_size != 0:
            return layer
        return replace(layer, feed_forward=replace(mixture, media_size=1))

    whole = replace(arch, layers=tuple(map(of, arch.layers)))
    return set() if whole == arch else {*checkpoint_tensors(whole, has_head=False)}


def report(surplus: list[str], model: ModelConfig) -> None:
    """Log the tensors that no stage uses."""
    arch = model.architecture
    after = FAMILIES[arch.name].after_layers if arch.name in FAMILIES else ""
    behind = [name for name in surplus if after and layer_of(name) >= arch.num_layers]
    if behind:
        logger.info("%s: the checkpoint's %s is not used %s", model.path, after, listed(behind))
    scales = [name for name in surplus if name not in behind and _CACHE_FACTORS.search(name)]
    if scales:
        why = "are not used, since a quantized KV cache has a scale for each token and head"
        logger.info("%s: the checkpoint's scales of keys and values %s %s", model.path, why, listed(scales))
    inputs = [name for name in surplus if model.quantized is not None and name.endswith(_INPUT_FACTORS)]
    others = [name for name in surplus if name not in {*behind, *scales, *inputs}]
    if others:
        logger.warning("%s: tensors that %s does not use %s", model.path, arch.name, listed(others))


def layer_of(name: str) -> int:
    number = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if number is None else int(number[1])


def listed(names: list[str]) -> str:
    return f"({len(names)}): {', '.join(names[:_NAMED_PROBLEMS])}{', …' * (len(names) > _NAMED_PROBLEMS)}"
