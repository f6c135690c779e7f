"""Builds a model with transformers from its config, and replaces its layers by ours."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.weight import Weight, whole
from quire.engine.models.transformers_backend.experts import PlannedExperts, can_replace
from quire.engine.models.transformers_backend.sharding import (
    WHOLE,
    PlannedEmbedding,
    PlannedLinear,
    ShardingPlan,
    hook,
    planned_parameter,
)
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import read_json, with_overrides

_QUIET = {
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
    "pretraining_tp": 1,
}

NO_INTERFACE = "its attention does not use transformers' attention interface, which is not supported"

_building = threading.Lock()
_logging: Any = transformers.logging
_logging.set_verbosity_error()


def sees(config: Any) -> bool:
    """Whether config.json names a class of transformers that takes images beside text."""
    auto: Any = AutoModelForImageTextToText
    built = auto._model_mapping.get(type(config), None)
    return built is not None and bool(media_parts(config)) and built.__name__ in (config.architectures or ())


def media_parts(config: Any) -> list[str]:
    """The names of a config's parts for something else than text."""
    return [name for name in config.sub_configs if re.search("vision|audio|image|video", name)]


def from_config(config: Any, **options: Any) -> Any:
    """transformers' model of text, or of images and text, as the config says."""
    auto: Any = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    return auto.from_config(config, **options)


def read_config(path: Path, trust_remote_code: bool, overrides: Mapping[str, Any]) -> Any:
    """The config as transformers reads it, with --hf-overrides; transformers' errors are passed on."""
    values = with_overrides(read_json(path / "config.json"), overrides)
    is_remote = trust_remote_code and bool(values.get("auto_map"))
    try:
        if "model_type" in overrides and not is_remote and values["model_type"] in CONFIG_MAPPING:
            return CONFIG_MAPPING[values["model_type"]].from_dict(values)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        return type(config).from_dict(values) if overrides else config
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ConfigError("it requires its own Python code, which needs --trust-remote-code") from None


def build_model(config: Any, dtype: torch.dtype, implementation: str, trust_remote_code: bool) -> Any:
    """transformers' model, with its weights on the meta device and its buffers allocated."""
    for part in {id(each): each for each in (config, config.get_text_config(decoder=True))}.values():
        for name, value in _QUIET.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    options = {
        "experts_implementation": "eager",  # the others require sizes that are multiples of some number
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    with _building, _parameters_on_meta():
        try:
            if sees(config):
                model = _build_with_tower(config, implementation, options)
            else:
                model = from_config(config, attn_implementation=implementation, **options)
        except KeyError as error:
            if error.args == (implementation,):
                raise ConfigError(NO_INTERFACE) from None
            raise
    _keep_float32(model, dtype)
    return model.eval().requires_grad_(requires_grad=False)


def _build_with_tower(config: Any, implementation: str, options: Mapping[str, Any]) -> Any:
    """The model with this implementation of attention in its text part, and torch's in the others if they can."""
    text = config.get_text_config(decoder=True)
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    if not names:
        raise ConfigError("its text part has no config of its own, which is not supported")
    for others in ("sdpa", "eager"):
        chosen = dict.fromkeys(("", *config.sub_configs), others) | {names[0]: implementation}
        try:
            return from_config(config, attn_implementation=chosen, **options)
        except ValueError:
            if others == "eager":
                raise
    raise AssertionError


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Release parameters' memory as soon as they are created; buffers that are computed, such as frequencies, are
    kept."""
    modules: Any = nn.Module
    register, thread = modules.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        register(module, name, parameter)

    modules.register_parameter = on_meta
    try:
        yield
    finally:
        modules.register_parameter = register


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Convert the parameters that transformers keeps in float32 in a half-precision model."""
    patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if any(pattern in name.split(".") or pattern in name for pattern in patterns):
            parameter.data = parameter.data.float()


def base_of(model: Any) -> nn.Module:
    """The model without its head."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
    if not isinstance(base, nn.Module):
        raise ConfigError("it has no base model separate from its head, which is not supported")
    return base


def text_of(model: Any) -> tuple[nn.Module, str]:
    """The module that has the text part of a model, and its name there: the model itself has its base, or the base of
    images and text a part."""
    base: Any = base_of(model)
    if not sees(model.config):
        return model, model.base_model_prefix
    text = base.get_decoder()
    for name, module in base.named_children():
        if module is text:
            return base, name
    raise ConfigError("its text part is not a module of its own, which is not supported")


def keep_tower(model: Any, paths: Collection[str] | None) -> list[nn.Module]:
    """Remove the modules beside the text part but for `paths`; None: keep all. Returns those that are kept."""
    parent, name = text_of(model)
    if parent is model:
        return []
    kept = []
    for path, module in list(parent.named_children()):
        if path == name:
            continue
        if paths is None or path in paths:
            kept.append(module)
        else:
            setattr(parent, path, MissingLayer())
    return kept


def replace_layers(
    model: Any, parallel: Parallel, device: torch.device, tower: Collection[nn.Module] = ()
) -> dict[str, str]:
    """Replace linear layers, experts, embedding and parameters by ours, uninitialized on `device` and sharded. The
    modules `tower` keep transformers' layers, with parameters of ours, which every rank has whole.

    Returns the parameters that take another's values: head → embedding, if they are tied but not shared in memory.
    """
    plan = ShardingPlan(model.tp_plan, parallel.size)
    embedding = model.get_input_embeddings()
    whole_modules = {each for module in tower for each in module.modules()}
    with device:
        for path, module in list(model.named_modules()):
            style = plan[path]
            if isinstance(module, MissingLayer):
                continue
            if module in whole_modules:
                _replace_parameters(path, module, ShardingPlan({}, 1), parallel, is_stack_whole=True)
            elif type(module) in (nn.Linear, Conv1D):
                model.set_submodule(path, PlannedLinear(path, module, style, parallel))
            elif can_replace(module):
                experts = PlannedExperts(path, module, plan, parallel)
                model.set_submodule(path, experts)
                hook(path, experts, style, parallel)
            elif module is embedding and type(module) is nn.Embedding and style in ("", "embedding_rowwise"):
                model.set_submodule(path, PlannedEmbedding(module, parallel if style else Parallel()))
            else:
                _replace_parameters(path, module, plan, parallel)
                hook(path, module, style, parallel)
    if device.type != "meta":
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
    return _tie(model)


def _replace_parameters(
    path: str, module: nn.Module, plan: ShardingPlan, parallel: Parallel, *, is_stack_whole: bool = False
) -> None:
    """`is_stack_whole`: parameters with three dimensions are not stacks of experts' matrices."""
    is_stack_whole |= isinstance(module, nn.Conv1d)
    prefix = f"{path}." if path else ""
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, Weight):
            style = plan[prefix + name]
            if is_stack_whole and style in ("", *WHOLE):
                module._parameters[name] = Weight(
                    tuple(parameter.shape), whole(*parameter.shape), dtype=parameter.dtype
                )
            else:
                module._parameters[name] = planned_parameter(prefix + name, parameter, style, parallel)
    for name, buffer in list(module._buffers.items()):
        # Routers have their correction biases in buffers, which the checkpoint contains.
        is_stored = name not in module._non_persistent_buffers_set
        if buffer is not None and is_stored and buffer.is_floating_point() and buffer.ndim:
            del module._buffers[name]
            module.register_parameter(name, planned_parameter(prefix + name, buffer, plan[prefix + name], parallel))


def _tie(model: Any) -> dict[str, str]:
    """Share tied weights that are sharded alike; for the others, return which checkpoint parameter each one reads."""
    read: dict[str, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in model.all_tied_weights_keys.items():
        ours, theirs = parameters.get(target), parameters.get(source)
        module = model.get_submodule(target.rpartition(".")[0])
        if ours is None:
            continue
        if (
            isinstance(theirs, Weight)
            and isinstance(module, PlannedLinear)
            and target.endswith(".weight")
            and (ours.shards, ours.shape, ours.dtype) == (theirs.shards, theirs.shape, theirs.dtype)
        ):
            owner = model.get_submodule(source.rpartition(".")[0])
            if not isinstance(owner, PlannedLinear):
                module.share(theirs, owner if isinstance(owner, PlannedEmbedding) else None)
            elif owner.bias is module.bias is None:  # layers share it, packed as well
                model.set_submodule(target.rpartition(".")[0], owner)
            else:
                read[target] = source
        else:
            read[target] = source
    return read


class MissingLayer(nn.Module):
    """Stands for a layer on another stage: returns its input."""

    def forward(self, x: Tensor, *others: object, **more: object) -> Tensor:
        return x


def keep_stage(model: Any, layers: range, total: int) -> None:
    """Remove the layers of other stages, by the model's pipeline plan, as transformers does."""
    text: Any = getattr(*text_of(model))
    names = {name.rpartition(".")[2] for name in model.pp_plan} - {"lm_head"}
    stack = getattr(text, "layers", None)
    if not {"embed_tokens", "layers", "norm"} <= names or not isinstance(stack, nn.ModuleList) or len(stack) != total:
        raise ConfigError("--pipeline-parallel-size: transformers has no pipeline plan for this model")
    for number in range(total):
        if number not in layers:
            stack[number] = MissingLayer()
    if layers.start:
        text.embed_tokens = MissingLayer()
    if layers.stop < total:
        text.norm = MissingLayer()
        drop_head(model)


def drop_head(model: Any) -> None:
    """Remove everything but the base model."""
    base = base_of(model)
    for name, module in list(model.named_children()):
        if module is not base:
            setattr(model, name, MissingLayer())


def fix_frequencies(model: Any, max_length: int) -> None:
    """Compute rotary frequencies that depend on the length once, for `max_length`.

    Otherwise they would depend on the longest request of a step, and a sequence's keys would change while it grows.
    """
    longest = torch.tensor([[max_length - 1]])
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = {None: kinds} if isinstance(kinds, str) else kinds
        if not isinstance(named, dict):
            continue
        for layer_type, kind in named.items():
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                module(torch.zeros(1), longest, **({} if layer_type is None else {"layer_type": layer_type}))
        if isinstance(kinds, str):
            module.rope_type = "default"
        else:
            module.rope_type = dict.fromkeys(named, "default")
