"""Finds the layouts of a model that fit a machine, best first: each is resolved as `serve` would. No torch."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config import model_config
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.floors import Estimate, estimate
from quire.engine.config.machine import Machine
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError

Goal = Literal["throughput", "latency"]
DEGREES = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
_EXPERTS = "enable_expert_parallel"
_DEFAULT_INPUT_LEN = 1024
_NOT_PLANNED = ("data_parallel_size_local", "data_parallel_start_rank", "prefill_replicas")


@dataclass(frozen=True)
class Layout:
    """A layout that fits."""

    options: Mapping[str, Any]
    """The fields of `EngineOptions` that make it."""
    config: EngineConfig
    estimate: Estimate

    @property
    def flags(self) -> str:
        """The flags as they are on the command line."""
        return layout_flags(self.options)


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that is not possible, and the error of `serve`."""

    options: Mapping[str, Any]
    error: ConfigError

    @property
    def flags(self) -> str:
        """The flags as they are on the command line."""
        return layout_flags(self.options)

    @property
    def reason(self) -> str:
        """The error without its remedy and details."""
        text, count = str(self.error), 1
        while count:
            text, count = re.subn(r" \([^()]*\)", "", text)
        return text.partition("; ")[0]


def layout_flags(options: Mapping[str, Any]) -> str:
    """Return the flags of a layout."""
    degrees = [f"{flag} {options[name]}" for name, flag in DEGREES.items()]
    return " ".join([*degrees, *["--enable-expert-parallel"] * options[_EXPERTS]])


def layouts(
    options: EngineOptions,
    machine: Machine,
    *,
    given: Collection[str] = (),
    input_len: int | None = None,
    goal: Goal = "throughput",
) -> tuple[list[Layout], list[RefusedLayout]]:
    """Return the layouts over all devices that fit, best first, and the layouts that are not possible.

    `given` are the fields of `options` that the user has set: a degree, or the use of expert parallelism, stays as it
    is. Decodes are estimated at `input_len` tokens, and TTFT for a prompt of that length; None: 1,024, or half of the
    model's length. Raises `ConfigError` if no layout of the model can be planned.
    """
    for name in _NOT_PLANNED:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: only layouts of all replicas can be planned; omit it")
    options = replace(options, nnodes=machine.nodes)
    single = replace(options, nnodes=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    single = replace(single, prefill_context_parallel_size=1)
    model = model_config.resolve(single, machine.devices(single))
    if model.pooling is not None:
        raise ConfigError(f"{model.architecture.name}: layouts of embedding models cannot be planned; give -tp and -dp")
    if input_len is None:
        input_len = max(1, min(_DEFAULT_INPUT_LEN, model.max_model_len // 2))
    elif not 1 <= input_len < model.max_model_len:
        raise ConfigError(
            f"--input-len {input_len}: must be from 1 to {model.max_model_len - 1}, below --max-model-len"
        )
    has_experts = any(isinstance(layer.feed_forward, MoESpec) for layer in model.architecture.layers)
    local = replace(options, model=str(model.path))
    # Models that transformers builds are measured in each layout.
    shared = None if isinstance(model.architecture, TransformersModelSpec) else model
    fits, refused = [], []
    logging.disable(logging.WARNING)  # each layout would repeat the warnings about the model
    try:
        for sizes in candidates(options, machine.count * machine.nodes, given, has_experts=has_experts):
            candidate = replace(local, **sizes)
            try:
                config = resolve(candidate, described=machine.devices(candidate), model=shared)
                if input_len >= (length := config.model.max_model_len):
                    raise ConfigError(f"the KV cache holds {length:,} tokens, too few for --input-len {input_len}")
            except ConfigError as error:
                refused.append(RefusedLayout(sizes, error))
            else:
                fits.append(Layout(sizes, config, estimate(config, machine, input_len)))
    finally:
        logging.disable(logging.NOTSET)
    return sorted(fits, key=lambda layout: _cost(layout.estimate, goal)), refused


def best_layout(
    options: EngineOptions, machine: Machine, *, given: Collection[str] = (), goal: Goal = "throughput"
) -> tuple[Layout, list[Layout]]:
    """Return the best layout and the others that fit. Raises `ConfigError` with a reason if none does."""
    fits, refused = layouts(options, machine, given=given, goal=goal)
    if not fits:
        raise nothing_fits(refused)
    return fits[0], fits[1:]


def nothing_fits(refused: list[RefusedLayout]) -> ConfigError:
    """Return the error if all layouts are refused: their common error, or the error of the one with the most ranks in a
    replica."""
    if len({str(layout.error) for layout in refused}) == 1 < len(refused):
        return refused[0].error
    largest = min(refused, key=lambda layout: (layout.options["data_parallel_size"], layout.options[_EXPERTS]))
    others = f", nor are {len(refused) - 1} others" * (len(refused) > 1)
    return ConfigError(f"{largest.flags} is not possible{others}: {largest.error}")


def candidates(
    options: EngineOptions, count: int, given: Collection[str], *, has_experts: bool
) -> Iterator[dict[str, Any]]:
    """Every layout over `count` devices with the given degrees, which may leave some devices idle."""
    free = [name for name in DEGREES if name not in given]
    taken = math.prod(getattr(options, name) for name in DEGREES if name in given)
    taken *= options.prefill_context_parallel_size
    devices = max(1, count // max(1, taken))
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    for sizes in itertools.product(divisors, repeat=len(free)):
        if free and math.prod(sizes) != devices:
            continue
        degrees = {name: getattr(options, name) for name in DEGREES} | dict(zip(free, sizes, strict=True))
        is_shared = degrees["tensor_parallel_size"] * degrees["data_parallel_size"] > 1
        uses = [False, True] if has_experts and is_shared else [False]
        for use in [getattr(options, _EXPERTS)] if _EXPERTS in given else uses:
            yield {**degrees, _EXPERTS: use}


def _cost(floors: Estimate, goal: Goal) -> tuple[float, ...]:
    """Sort key: the best layout has the smallest."""
    throughput, latency = -floors.tokens_per_second, (floors.decode_one.seconds, floors.ttft.seconds)
    return (throughput, *latency) if goal == "throughput" else (*latency, throughput)
