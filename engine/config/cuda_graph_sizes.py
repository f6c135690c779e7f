"""Which decode steps are captured, as CUDA graphs or on tapes, and what these take. No torch here."""

from __future__ import annotations

from quire.engine.config.kv_cache_groups import cache_specs
from quire.engine.config.options import (
    DTYPE_BYTES,
    EngineConfig,
    EngineOptions,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.engine.models.encoder_spec import EncoderSpec
from quire.engine.models.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

_STEPS = ((8, 64), (16, 128), (32, 256), (64, 1024), (128, 1 << 20))
"""From one size to the next, up to a size. A row of padding costs little beside the weights, which are read anyway;
a size takes 40 to 80 ms to capture for a model of 32 layers on an H100."""
_LAYER_BYTES = 256 << 10
"""What the driver keeps of one layer of one graph, about."""
_TAPE_LAYER_BYTES = 4 << 10
"""What a tape keeps of one layer, about."""
_MOST_TAPED = 256
"""Requests of the decode steps that a CPU tapes: with more, what Python takes of a step is little."""
_PARTS = 32
"""That a decode's keys are cut into at most, each with a result of its own (kernels/triton/attention.py)."""


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig
) -> GraphConfig:
    """The sizes to capture, or why none are. Raises `ConfigError` for sizes that are none."""
    sizes = _asked(options.cuda_graph_sizes, scheduler.max_num_seqs) or _usual(scheduler.max_num_seqs)
    if reason := _reason(options, model, parallel):
        return GraphConfig(why_none=reason)
    if parallel.device == "cpu":  # where a size costs next to nothing, and a row of padding its whole time
        sizes = tuple(range(1, min(scheduler.max_num_seqs, _MOST_TAPED) + 1))
    return GraphConfig(sizes=sizes)


def _reason(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> str:
    """Why nothing is captured; empty: it is."""
    if options.enforce_eager:
        return "--enforce-eager"
    if isinstance(model.architecture, EncoderSpec) or model.pooling is not None:
        return "a model that embeds has no decode steps"
    if isinstance(model.architecture, TransformersModelSpec):
        return "transformers' implementation of a model may wait for the device"
    if parallel.is_coupled:
        return "replicas that share experts exchange tokens in numbers that differ from step to step"
    if parallel.ranks_per_device > 1:
        return "ranks that share a GPU exchange through the host, which waits for it"
    return ""


def _asked(text: str | None, most: int) -> tuple[int, ...]:
    """--cuda-graph-sizes, rising; empty: left out."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--cuda-graph-sizes must be numbers above 0 with commas between them, got {text!r}")
    sizes = tuple(sorted({int(part) for part in parts}))
    if sizes[-1] > most:
        raise ConfigError(
            f"--cuda-graph-sizes {sizes[-1]} is more than the {most} requests that run at once (--max-num-seqs); "
            "leave it out"
        )
    return sizes


def _usual(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, … and `most` itself."""
    sizes, last = [1, 2, 4], 0
    for step, until in _STEPS:
        sizes += range(last + step, min(until, most) + 1, step)
        last = until
    return tuple(sorted({*(size for size in sizes if size < most), most}))


def estimate(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of a rank's graphs, about: their inputs, what the largest one computes in, and what the driver keeps.

    `arch` is that of a rank. A tape computes where any step does.
    """
    if not config.graphs.sizes:
        return 0
    model, cache, tp, most = config.model, config.cache, config.parallel.tensor_parallel_size, config.graphs.sizes[-1]
    tables = len(cache.groups) * -(-model.max_model_len // cache.block_size) * 8
    layers = len(config.graphs.sizes) * max(map(len, config.parallel.stages))
    if config.parallel.device == "cpu":
        return most * tables + layers * _TAPE_LAYER_BYTES
    heads = max(layer.attention.num_heads for layer in arch.layers) // tp
    row = max(spec.shape.numbers for spec in cache_specs(arch, tp, model.max_model_len))
    inner = max(layer.feed_forward.width(tp) for layer in arch.layers)
    activations = (8 * arch.hidden_size + 3 * inner) * DTYPE_BYTES[model.dtype]
    return most * (tables + activations + heads * _PARTS * row * 4) + layers * _LAYER_BYTES


def text(config: EngineConfig, size: str) -> str:
    """A line of the plan; empty on CPU. `size` is what they take."""
    graphs = config.graphs
    if config.parallel.device == "cpu":
        return ""
    if graphs.why_none:
        return f"no CUDA graphs: {graphs.why_none}"
    if not graphs.sizes:
        return ""
    count = len(graphs.sizes)
    return (
        f"{count} CUDA graph{'s' * (count > 1)} for decodes of up to {graphs.sizes[-1]} requests, about {size} a rank"
    )
