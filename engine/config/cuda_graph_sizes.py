"""Batch sizes of the decode steps that are captured (CUDA graphs, or op replay on CPU), sizes of pictures for which the
layers of a tower are, and their memory. No torch."""

from __future__ import annotations

from quire.engine.architecture import spec_parts
from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.architecture.tower_spec import GridTowerSpec, VisionTowerSpec
from quire.engine.architecture.vit_spec import ViTSpec
from quire.engine.config.engine_config import (
    DTYPE_BYTES,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_STEPS = ((8, 64), (16, 128), (32, 256), (64, 1024), (128, 1 << 20))
"""(step, end): distance between sizes up to `end`. A row of padding costs little compared with reading the weights;
capturing a size takes 40 to 80 ms for a model of 32 layers on an H100."""
_LAYER_BYTES = 256 << 10
"""Approximate memory of the driver for one layer of one graph."""
_REPLAY_LAYER_BYTES = 4 << 10
"""Approximate memory of op replay for one layer of one size."""
_MAX_REPLAYED = 256
"""Maximum batch size of op replay on CPU: in larger steps the overhead of Python is negligible."""
_TOWER_SIZES = (256, 384, 512, 768, 1024, 1536, 2048)
"""Patches for which a tower is captured. Smaller pictures take as long as the first: their kernels are short."""
_LAUNCHED_MULTIPLICATIONS = 30e9
"""As many as a GPU computes (at 400 TFLOP/s) while a layer's kernels are launched one by one (30 of 5 µs). With more,
there is little to gain: launches overlap with computations."""
_MAX_SPLITS = 32
"""Maximum splits of a decode's keys, each with its own partial result (kernels/triton/attention.py)."""


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig
) -> GraphConfig:
    """Return the sizes to capture, or why there are none. Raises `ConfigError` for invalid sizes."""
    largest, towers = scheduler.max_sampled_tokens, _tower_sizes(options, model, parallel)
    sizes = _parse_sizes(options.cuda_graph_sizes, scheduler.max_num_seqs) or _default_sizes(largest)
    if reason := _disabled_reason(options, model, parallel):
        return GraphConfig(disabled_reason=reason, tower_sizes=towers)
    if parallel.device == "cpu":  # a size costs almost nothing, but a row of padding costs as much as a request
        sizes = tuple(range(1, min(largest, _MAX_REPLAYED) + 1))
    return GraphConfig(sizes=sizes, tower_sizes=towers)


def _tower_sizes(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Return those of `_TOWER_SIZES` for which it pays, for towers that consist of layers of one kind."""
    tower = None if model.architecture.media is None else model.architecture.media.tower
    if options.enforce_eager or parallel.device != "cuda" or parallel.ranks_per_device > 1:
        return ()
    if not isinstance(tower, GridTowerSpec | ViTSpec):
        return ()
    per_patch = sum(each.elements(1) for each in tower.layers[0].parameters(tower.width))
    return tuple(size for size in _TOWER_SIZES if size * per_patch <= _LAUNCHED_MULTIPLICATIONS)


def _disabled_reason(options: EngineOptions, model: ModelConfig, parallel: ParallelConfig) -> str:
    """Return why nothing is captured, or an empty string."""
    if options.enforce_eager:
        return "--enforce-eager"
    if isinstance(model.architecture, EncoderSpec) or model.pooling is not None:
        return "embedding models have no decode steps"
    if isinstance(model.architecture, TransformersModelSpec):
        return "transformers' implementation of a model may wait for the device"
    if parallel.is_coupled:
        return "replicas that share experts exchange tokens in numbers that differ from step to step"
    if parallel.ranks_per_device > 1:
        return "ranks that share a GPU exchange through the host, which waits for it"
    return ""


def _parse_sizes(text: str | None, max_size: int) -> tuple[int, ...]:
    """Parse --cuda-graph-sizes; returns the sizes in ascending order, empty without the flag."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--cuda-graph-sizes must be positive numbers separated by commas, got {text!r}")
    sizes = tuple(sorted({int(part) for part in parts}))
    if sizes[-1] > max_size:
        raise ConfigError(
            f"--cuda-graph-sizes {sizes[-1]} is more than the {max_size} requests of --max-num-seqs; omit it"
        )
    return sizes


def _default_sizes(max_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, … and `max_size` itself."""
    sizes, last = [1, 2, 4], 0
    for step, until in _STEPS:
        sizes += range(last + step, min(until, max_size) + 1, step)
        last = until
    return tuple(sorted({*(size for size in sizes if size < max_size), max_size}))


def estimate(config: EngineConfig, arch: ModelSpec) -> int:
    """Estimate the bytes of a rank's graphs: inputs, activations of the largest graph, and memory of the driver.

    `arch` has the sizes of a rank. Op replay needs no activations of its own. Of steps with adapters, too, the largest
    is captured first, in the memory of those without: what their low-rank products add is little.
    """
    if not config.graphs.sizes:
        return 0
    model, cache, tp, max_size = (
        config.model,
        config.cache,
        config.parallel.tensor_parallel_size,
        config.graphs.sizes[-1],
    )
    tables = len(cache.groups) * -(-model.max_model_len // cache.block_size) * 8
    layers = len(config.graphs.sizes) * max(map(len, config.parallel.stages))
    layers *= 1 if config.lora is None else 2  # steps with adapters are captured, too
    if config.parallel.device == "cpu":
        return max_size * tables + layers * _REPLAY_LAYER_BYTES
    attentions = [layer.attention for layer in arch.layers if layer.attention is not None]
    heads = max((each.num_heads for each in attentions), default=0) // tp
    row = max((each.kv_shape(tp)[2] for each in attentions), default=0)
    activations = _activations(arch, tp) * DTYPE_BYTES[model.dtype]
    return max_size * (tables + activations + heads * _MAX_SPLITS * row * 4) + layers * _LAYER_BYTES


def estimate_tower(config: EngineConfig) -> int:
    """Estimate the bytes of a rank's graphs of a tower: inputs and activations of the largest, and memory of the
    driver."""
    media, sizes = config.model.architecture.media, config.graphs.tower_sizes
    if media is None or not sizes:
        return 0
    tower = media.tower
    assert isinstance(tower, VisionTowerSpec)
    values = sizes[-1] * (2 * tower.state_width + tower.layer_values)
    return int(values) * DTYPE_BYTES[config.model.dtype] + len(sizes) * len(tower.layers) * _LAYER_BYTES


def _activations(arch: ModelSpec, tp: int) -> int:
    """Values of a request in the largest graph: the residual streams and the values that pass between stages, and the
    inputs and results of the largest mixers and of the largest feed-forward layer, which do not find room in each
    other's memory.
    """
    layers = dict.fromkeys(arch.layers)
    mixers = max(
        sum(
            each.rows + each.columns
            for mixer in layer.mixers
            for each in spec_parts.matrices(mixer.parameters(arch.hidden_size), tp)
        )
        for layer in layers
    )
    inner = (layer.feed_forward.activations(tp) for layer in layers if layer.feed_forward is not None)
    passed = max(arch.stage_width, arch.output_width)
    return arch.hidden_size + 2 * arch.stream_width + passed + mixers + max(inner, default=0)
