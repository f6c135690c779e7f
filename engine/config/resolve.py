"""`EngineOptions` → `EngineConfig`: computes every size, and rejects what does not fit, before weights are read."""

from __future__ import annotations

import importlib.util
import logging
import math
import typing
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.engine.config import cuda_graph_sizes, devices, model_files, parallel_config, pooling
from quire.engine.config.devices import Devices
from quire.engine.config.kv_cache_groups import KVCacheShape, cache_specs, count_planes, group_layers
from quire.engine.config.options import (
    DTYPE_BYTES,
    INT4_GROUPS,
    CacheConfig,
    EngineConfig,
    EngineOptions,
    ModelConfig,
    ParallelConfig,
    RayPlacement,
    SchedulerConfig,
)
from quire.engine.config.pooling import Pooling
from quire.engine.models.encoder_spec import EncoderSpec
from quire.engine.models.families import FAMILIES, from_hf_config, transformers_backend
from quire.engine.models.families.quantized import quantized
from quire.engine.models.model_spec import ExpertParallelMoESpec, MatrixShape, ModelSpec, MoESpec, TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

_HOST_OPTIONS = frozenset(
    {
        *("model", "tokenizer", "revision", "node_rank", "master_addr", "master_port", "distributed_timeout_seconds"),
        *("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes"),
    }
)
"""Options that may differ between hosts."""

logger = logging.getLogger(__name__)

_MAX_TUNED_TOKENS = {"cpu": 512, "cuda": 8192}
"""Maximum tokens of a step with automatic size, for which the workspace is sized. Larger steps are hardly cheaper per
token."""
_FP8_CAPABILITY = (8, 9)
"""First compute capability of NVIDIA GPUs with instructions to read 8-bit floats."""
_CPU_KV_CACHE_BYTES = 4 << 30
"""Default limit of the KV cache of all ranks together on CPU, without --kv-cache-memory-bytes."""


def resolve(options: EngineOptions, placement: RayPlacement | None = None) -> EngineConfig:
    """Resolve all options. Raises `ConfigError` with numbers and a remedy if the configuration is not supported.

    `placement` is given on nodes of a Ray cluster: another node has already determined where the ranks are.
    """
    _check_ranges(options)
    devices_elsewhere: Devices | None = None
    if placement is None:
        from quire.engine.cluster import ray_cluster  # imported here so that client commands need not

        placement, devices_elsewhere = ray_cluster.find(options) or (None, None)
        options = options if placement is None else placement.options
    available = devices_elsewhere or devices.find(options.device, parallel_config.local_group_sizes(options, placement))
    model = _resolve_model(options, available)
    parallel = parallel_config.resolve(options, model.architecture, available, placement)
    rank_arch = parallel_config.rank_spec(model.architecture, parallel)
    rank_arch.check_divides(options.tensor_parallel_size)
    _check_quantization(model, rank_arch, options.tensor_parallel_size, available)
    _check_attention(options, model, available)
    scheduler = _resolve_scheduler(options, model, available)
    kv_dtype: str = options.kv_cache_dtype
    if kv_dtype == "auto":
        # The rounding is negligible compared with that of the quantized weights, and decodes read half as much.
        kv_dtype = "bfloat16" if model.quantization and model.dtype == "float32" else model.dtype
    kv_dtype = kv_dtype.removesuffix("_e4m3")
    if available.kind == "cuda" and devices_elsewhere is None:
        _check_kv_cache_dtype(options, kv_dtype, available)
    specs = cache_specs(model.architecture, parallel.tensor_parallel_size, model.max_model_len)
    max_len, row, size = model.max_model_len, scheduler.max_num_batched_tokens, options.block_size
    cache = CacheConfig(
        block_size=options.block_size,
        num_blocks=0,
        dtype=kv_dtype,
        enable_prefix_caching=options.enable_prefix_caching and _supports_prefix_caching(model),
        groups=group_layers(specs, parallel.stages, lambda group: group.max_blocks(max_len, row, size)),
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
    )
    graphs = cuda_graph_sizes.resolve(options, model, parallel, scheduler)
    config = EngineConfig(model=model, parallel=parallel, cache=cache, scheduler=scheduler, graphs=graphs)
    cache = replace(cache, num_blocks=_count_blocks(config, available))
    return replace(config, cache=cache, shared_settings=shared_settings(options, config))


def fetch_weights(options: EngineOptions, config: EngineConfig) -> None:
    """Check that the weights are complete; downloads those of a Hugging Face repository, with a progress bar.

    Separate from `resolve`, so that everything else is checked, and the plan printed, before a large download.
    """
    if (load_format := config.model.load_format) != "dummy":
        pooler = config.model.pooling
        inner = [dense.folder for dense in pooler.dense] if pooler is not None else []
        model_files.fetch_weights(options.model, options.revision, config.model.path, load_format, inner)
        for folder in ("", *inner):
            model_files.check_weights(config.model.path / folder, load_format)


def shared_settings(options: EngineOptions, config: EngineConfig) -> dict[str, str]:
    """Return what must be the same on every host: value by flag, resolved where the flag's value may be automatic.

    A host without replicas resolves for no device, and has no resolved values.
    """
    model, parallel = config.model, config.parallel
    resolved = {
        "runner": "generate" if model.pooling is None else "pooling",
        "device": parallel.device,
        "pipeline_layer_partition": ",".join(str(len(layers)) for layers in parallel.stages),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "load_format": model.load_format,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kv_cache_dtype": config.cache.dtype,
    }
    settings = {name: value for name, value in vars(options).items() if name not in _HOST_OPTIONS | resolved.keys()}
    if parallel.local_replicas:
        settings |= resolved
    return {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}


@dataclass(frozen=True)
class Sizes:
    """Memory of one rank, in bytes; tuples have one entry per stage."""

    weights: tuple[int, ...]
    kv_block: tuple[int, ...]
    workspace: int
    """Activations and logits of the largest step, estimated."""
    graphs: int
    """CUDA graphs, or op replay on CPU, estimated."""

    @staticmethod
    def of(config: EngineConfig) -> Sizes:
        model, scheduler, cache, tp = config.model, config.scheduler, config.cache, config.parallel.tensor_parallel_size
        arch = parallel_config.rank_spec(model.architecture, config.parallel)
        stages = range(config.parallel.pipeline_parallel_size)
        specs = cache_specs(arch, tp, model.max_model_len)
        attention = max(layer.attention.workspace(model.max_model_len, tp) for layer in arch.layers)
        logits = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * arch.vocab_size * 4 * 4
        logits *= model.pooling is None
        return Sizes(
            weights=tuple(_weight_bytes(model, config.parallel, stage) for stage in stages),
            kv_block=tuple(_kv_block_bytes(cache, count_planes(specs, cache.groups, stage)) for stage in stages),
            workspace=(_activations(config, arch) + attention) * DTYPE_BYTES[model.dtype]
            + logits
            + _eplb_buffer_bytes(config, arch),
            graphs=cuda_graph_sizes.estimate(config, arch),
        )


def _activations(config: EngineConfig, arch: ModelSpec) -> int:
    """Number of activation values on a rank in the largest step; its experts may get tokens of every replica."""
    parallel, tokens, tp = (
        config.parallel,
        config.scheduler.max_num_batched_tokens,
        config.parallel.tensor_parallel_size,
    )
    incoming = tokens * parallel.replicas if parallel.is_coupled else tokens
    inner = max(
        each.width(tp) * (incoming if isinstance(each, ExpertParallelMoESpec) else tokens)
        for each in {layer.feed_forward for layer in arch.layers}
    )
    count = 6 * tokens * arch.hidden_size + 3 * inner
    if parallel.is_coupled:
        max_top_k = max(layer.feed_forward.top_k for layer in arch.layers if isinstance(layer.feed_forward, MoESpec))
        outgoing = (
            tokens // tp * min(max_top_k, parallel.expert_ranks)
        )  # each token goes to every rank with one of its experts
        count += 8 * max(incoming, outgoing) * arch.hidden_size
    return count


def _eplb_buffer_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of the buffers in which EPLB moves experts: one sent, one received, one staged."""
    if config.parallel.experts is None or not config.parallel.experts.enable_eplb:
        return 0
    layouts = {
        replace(each.feed_forward, shared=None, num_local_experts=1)
        for each in arch.layers
        if isinstance(each.feed_forward, ExpertParallelMoESpec)
    }
    width, quantization = DTYPE_BYTES[config.model.dtype], config.model.quantization
    return 3 * max(
        sum(packed_bytes(*each[:2], quantization, width) for each in one.matrices(arch.hidden_size, 1))
        for one in layouts
    )


def _kv_block_bytes(cache: CacheConfig, planes: Counter[KVCacheShape]) -> int:
    """Bytes of a block, which has room for the layers of any group."""
    width = DTYPE_BYTES.get(cache.dtype, 1)
    scale = 0 if cache.dtype in DTYPE_BYTES else 4
    rows = {shape: shape.num_tensors * shape.num_heads * cache.block_size for shape in planes}
    return sum(count * rows[shape] * (shape.head_dim * width + scale) for shape, count in planes.items())


def _weight_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of one rank's weights: linear layers and head packed, the rest in the model's data type."""
    arch, stages, tp = (
        parallel_config.rank_spec(model.architecture, parallel),
        parallel.stages,
        parallel.tensor_parallel_size,
    )
    width, last = DTYPE_BYTES[model.dtype], stage == len(stages) - 1
    matrices = [each for number in stages[stage] for each in arch.layers[number].matrices(arch.hidden_size, tp)]
    head = MatrixShape(arch.vocab_per_rank(tp), arch.hidden_size)
    embedded = stage == 0 and arch.tie_embeddings
    unpacked = arch.stage_parameters(stages, stage, tp) - sum(math.prod(each) for each in matrices)
    unpacked -= math.prod(head) * (last and not embedded)
    packed = sum(each.number * packed_bytes(*each[:2], model.quantization, width) for each in matrices)
    # Embedding models have no head; on CUDA a tied head needs no copy.
    if last and model.pooling is None and not (embedded and parallel.device == "cuda"):
        packed += packed_bytes(*head[:2], model.quantization and "int8", width)
    mixtures = [arch.layers[n].feed_forward for n in stages[stage]]
    wide = sum(mixture.num_float32_parameters(arch.hidden_size) for mixture in mixtures if isinstance(mixture, MoESpec))
    return unpacked * width + wide * (4 - width) + packed


def _checkpoint_format(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Return the checkpoint's quantization method; for fp8 also the size of its weights on a rank."""
    assert model.quantized is not None
    if model.quantized.method != "fp8":
        return model.quantized.method
    unpacked = replace(model, quantization="int8")
    max_bytes = max(_weight_bytes(unpacked, parallel, stage) for stage in range(len(parallel.stages)))
    return f"fp8 (which would be {format_bytes(max_bytes)} per rank; running fp8 weights directly is not supported)"


def packed_bytes(rows: int, columns: int, quantization: str | None, width: int) -> int:
    """Bytes of a weight `[rows, columns]` as packed by `kernels.pack_linear`."""
    match quantization:
        case "int8":
            return rows * columns + 8 * rows
        case "int4":
            group = next(size for size in INT4_GROUPS if columns % size == 0)
            return rows * columns // 2 + 8 * rows * columns // group
    return rows * columns * width


def plan_text(config: EngineConfig) -> str:
    """Return the resolved plan as `serve` prints it."""
    model, parallel, cache = config.model, config.parallel, config.cache
    arch, sizes = model.architecture, Sizes.of(config)
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    kv_type = "" if cache.dtype == model.dtype else f" in {cache.dtype}"
    stored = f", dequantized from {_checkpoint_format(model, parallel)} while loading," if model.quantized else ""
    weights = f" with {model.quantization} weights" if model.quantization else ""
    limits = (
        f"at most {config.scheduler.max_num_seqs} run at once, "
        f"{'up to ' * config.scheduler.dynamic_chunking}{config.scheduler.max_num_batched_tokens:,} tokens a step"
    )
    lines = [
        f"{arch.name} from {model.path}{', by transformers' * isinstance(arch, TransformersModelSpec)}",
        f"{model.dtype}{stored}{weights} on {parallel.device}, tensor parallel {tp} × pipeline parallel {pp} "
        f"= {parallel.world_size} rank{'s' * (parallel.world_size > 1)} ({parallel.executor})",
        *parallel_config.plan_lines(parallel, arch),
    ]
    if not parallel.local_replicas:
        return f"{lines[0]}\n  {parallel.replicas} replicas, none of them on this host"
    if model.pooling is not None:
        length = f"{model.max_model_len:,} tokens"
        lines.append(f"embeds prompts of up to {length} (--runner pooling): {model.pooling.text()}")
    if not cache.num_blocks:
        lines.append(
            f"  layers 0-{arch.num_layers - 1}, per rank weights {format_bytes(sizes.weights[0])}, no KV cache"
        )
        return "\n".join([*lines, limits])
    for stage, layers in enumerate(parallel.stages):
        first = stage * tp
        ranks = f"rank {first}" if tp == 1 else f"ranks {first}-{first + tp - 1}"
        lines.append(
            f"  stage {stage} ({ranks}): layers {layers.start}-{layers.stop - 1}, per rank weights "
            f"{format_bytes(sizes.weights[stage])}, KV cache {format_bytes(sizes.kv_block[stage] * cache.num_blocks)} "
            f"in {cache.num_blocks:,} blocks of {cache.block_size} tokens{kv_type}"
        )
    if graphs := cuda_graph_sizes.text(config, format_bytes(sizes.graphs)):
        lines.append(f"  {graphs}")
    windows = Counter(group.window for group in cache.groups)
    if any(windows):
        unpacked = [
            f"{number} for layers that keep {'all' if window is None else f'a window of {window:,}'} tokens"
            for window, number in windows.items()
        ]
        lines.append(f"  block tables: {', '.join(unpacked)}")
    about = ", about, until it has been measured what the rest takes" * (parallel.device == "cuda")
    lines.append(f"{cache_text(config)}{about}; {limits}")
    return "\n".join(lines)


def cache_text(config: EngineConfig) -> str:
    """Return a line about the capacity of the KV cache."""
    tokens, max_len = _tokens_in_cache(config), config.model.max_model_len
    return f"KV cache holds {tokens:,} tokens: {tokens / max_len:.1f} requests at the full length of {max_len:,}"


def _tokens_in_cache(config: EngineConfig) -> int:
    """Capacity of the KV cache, in tokens of requests at full length.

    Tokens outside a request's windows take no blocks. One prompt chunk per step takes additional blocks.
    """
    max_len, cache, row = config.model.max_model_len, config.cache, config.scheduler.max_num_batched_tokens
    one = cache.max_blocks(max_len, 1)
    chunk = cache.max_blocks(max_len, row) - one
    return (cache.num_blocks - chunk) * -(-max_len // cache.block_size) * cache.block_size // one


def format_bytes(count: int) -> str:
    """Format a number of bytes: 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _check_ranges(options: EngineOptions) -> None:
    for name, hint in typing.get_type_hints(EngineOptions).items():
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is Literal]
        value = getattr(options, name)
        if kinds and isinstance(value, str) and value not in typing.get_args(kinds[0]):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be one of {', '.join(typing.get_args(kinds[0]))}, got {value}"
            )
    for name, low in (
        ("tensor_parallel_size", 1),
        ("pipeline_parallel_size", 1),
        ("nnodes", 1),
        ("data_parallel_size", 1),
        ("data_parallel_size_local", 0),
        ("num_redundant_experts", 0),
        ("eplb_step_interval", 1),
        ("dbo_token_threshold", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("block_size", 1),
        ("max_model_len", 1),
        ("kv_cache_memory_bytes", 1),
        ("max_logprobs", -1),
    ):
        value = getattr(options, name)
        if value not in (None, "auto") and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if options.itl_target_ms is not None and not options.itl_target_ms > 0.0:
        raise ConfigError(f"--itl-target-ms must be above 0, got {options.itl_target_ms}")
    if not options.distributed_timeout_seconds > 0.0:
        raise ConfigError(f"--distributed-timeout-seconds must be above 0, got {options.distributed_timeout_seconds}")
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got {options.gpu_memory_utilization}"
        )


def _resolve_model(options: EngineOptions, available: Devices) -> ModelConfig:
    path = model_files.locate(options.model, options.revision)
    hf_config = model_files.read_json(path / "config.json")
    arch, pooler = _architecture(options, path, hf_config)
    tokenizer = path
    if options.tokenizer is not None:
        tokenizer = model_files.locate(options.tokenizer, None)
    return ModelConfig(
        path=path,
        tokenizer=tokenizer,
        architecture=arch,
        dtype=_choose_dtype(options, available, hf_config),
        quantization=options.quantization,
        max_model_len=_choose_max_model_len(options, arch, pooler),
        load_format="safetensors" if options.load_format == "auto" else options.load_format,
        quantized=None if options.load_format == "dummy" else quantized(hf_config),
        eos_token_ids=_eos_token_ids(path, hf_config),
        trust_remote_code=options.trust_remote_code,
        seed=options.seed,
        max_logprobs=options.max_logprobs,
        attention_backend=options.attention_backend,
        pooling=pooler,
    )


def _architecture(options: EngineOptions, path: Path, hf_config: dict[str, Any]) -> tuple[ModelSpec, Pooling | None]:
    """Return the model's architecture, and its pooling if it is an embedding model."""
    names = hf_config.get("architectures") or []
    # AutoModel saves a decoder without its head under a name such as Qwen3Model.
    full_names = [f"{name.removesuffix('Model')}ForCausalLM" for name in names if name.endswith("Model")]
    is_headless = not any(name in FAMILIES for name in names) and any(name in FAMILIES for name in full_names)
    arch = _model_spec(options, path, {**hf_config, "architectures": full_names} if is_headless else hf_config)
    if isinstance(arch, EncoderSpec):
        if options.runner == "generate":
            raise ConfigError(f"{arch.name} is an encoder and cannot generate text; omit --runner generate")
        if options.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {options.pipeline_parallel_size}: pipeline parallelism is not supported for "
                f"encoders such as {arch.name}; use --tensor-parallel-size"
            )
        return arch, pooling.read(path, hf_config, arch.hidden_size, default="mean")
    if options.runner == "generate" and is_headless:
        raise ConfigError(f"{', '.join(names)} has no head to generate text; use it with --runner pooling")
    if options.runner == "generate" or (
        options.runner == "auto" and not is_headless and not (path / pooling.MODULES).exists()
    ):
        return arch, None
    if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention"):
        raise ConfigError(f"{arch.name}: bidirectional attention in decoders (is_causal false) is not supported")
    return arch, pooling.read(path, hf_config, arch.hidden_size, default="lasttoken")


def _model_spec(options: EngineOptions, path: Path, hf_config: dict[str, Any]) -> ModelSpec:
    """Return the model's spec for Quire's own implementation, or else for transformers'."""
    native_error = None
    names = hf_config.get("architectures") or []
    if options.model_impl != "transformers":
        try:
            return from_hf_config(hf_config)
        except ConfigError as error:
            if options.model_impl == "quire":
                raise
            native_error = error
    quantized(hf_config)
    request = transformers_backend.DescribeRequest(
        path=path,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        length=options.max_model_len,
        trust_remote_code=options.trust_remote_code,
    )
    try:
        arch = transformers_backend.describe(request)
    except ConfigError as error:
        reason = f"{', '.join(names) or 'it'} is not supported by transformers' implementation: {error}"
        raise ConfigError(reason if native_error is None else f"{native_error}; and {reason}") from None
    if native_error is not None:
        reason = f"{native_error}" if arch.name in FAMILIES else f"{arch.name} has no implementation of Quire's own"
        logger.warning("%s; using transformers' implementation (--model-impl transformers)", reason)
    return arch


def _supports_prefix_caching(model: ModelConfig) -> bool:
    """Whether the model can use the prefix cache; pooling may need the hidden states of all tokens."""
    if isinstance(model.architecture, EncoderSpec):
        return False
    return model.pooling is None or not model.pooling.needs_all_tokens


def _check_attention(options: EngineOptions, model: ModelConfig, available: Devices) -> None:
    """Check what can be checked of --attention-backend before the ranks start."""
    backend = options.attention_backend
    if backend == "auto":
        return
    requested = f"--attention-backend {backend}"
    if isinstance(model.architecture, EncoderSpec):
        raise ConfigError(f"{requested} is not supported for encoders, which have a single implementation; omit it")
    if available.kind == "cpu" and backend != "reference":
        raise ConfigError(f"{requested} needs a GPU; omit it to use the CPU kernels")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            f"{requested}: flashinfer is not installed; run pip install 'quire[flashinfer]', or omit the flag"
        )


def _check_kv_cache_dtype(options: EngineOptions, dtype: str, available: Devices) -> None:
    """Check that this host's GPUs support the data type of the KV cache; ranks on other hosts check theirs."""
    if dtype != "fp8" or options.attention_backend == "reference":
        return
    for number, (major, minor) in enumerate(devices.gpu_capabilities()):
        if (major, minor) < _FP8_CAPABILITY and (not available.order or number in available.order):
            minimum = "{}.{}".format(*_FP8_CAPABILITY)
            raise ConfigError(
                f"--kv-cache-dtype {options.kv_cache_dtype} needs GPUs of compute capability {minimum} or higher, but "
                f"GPU {number} has {major}.{minor}; use --kv-cache-dtype int8 or auto"
            )


def _check_quantization(model: ModelConfig, arch: ModelSpec, tp: int, available: Devices) -> None:
    """Check --quantization; `arch` has the sizes of a rank."""
    if model.quantization is None:
        return
    if available.kind != "cpu":
        raise ConfigError(f"--quantization {model.quantization} is only supported on CPU; omit it")
    for _, columns, _ in {each for layer in set(arch.layers) for each in layer.matrices(arch.hidden_size, tp)}:
        if model.quantization == "int4" and columns % INT4_GROUPS[-1]:
            raise ConfigError(
                f"--quantization int4 needs linear layers whose input size is a multiple of {INT4_GROUPS[-1]}; with "
                f"--tensor-parallel-size {tp} a layer of this model has {columns}; use int8"
            )


def _choose_dtype(options: EngineOptions, available: Devices, hf_config: dict[str, Any]) -> str:
    if options.dtype != "auto":
        return options.dtype
    if available.kind == "cpu":
        return "float32"
    checkpoint_dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return checkpoint_dtype if checkpoint_dtype in DTYPE_BYTES else "bfloat16"


def _choose_max_model_len(options: EngineOptions, arch: ModelSpec, pooler: Pooling | None) -> int:
    """Return --max-model-len, or else the model's length; for embedding models, the length they were trained for."""
    requested = options.max_model_len
    if requested is not None and requested > arch.max_position:
        raise ConfigError(f"--max-model-len {requested} is more than the model's {arch.max_position} positions")
    trained_length = pooler.max_length if pooler is not None else None
    length = requested or min(arch.max_position, trained_length or arch.max_position)
    if pooler is None and length < 2:
        raise ConfigError(f"--max-model-len {length} has no room for a prompt and an output token; use 2 or more")
    return length


def _eos_token_ids(path: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of config.json."""
    generation = path / "generation_config.json"
    eos = model_files.read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = hf_config.get("eos_token_id") if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _resolve_scheduler(options: EngineOptions, model: ModelConfig, available: Devices) -> SchedulerConfig:
    # Tokens of an encoder attend to the whole prompt, which therefore must be in one step.
    is_chunked = options.enable_chunked_prefill and not isinstance(model.architecture, EncoderSpec)
    minimum = 1 if is_chunked else model.max_model_len
    requested = options.max_num_batched_tokens
    budget = max(_MAX_TUNED_TOKENS[available.kind], minimum) if requested == "auto" else requested
    if budget < minimum:
        why = "an encoder" if isinstance(model.architecture, EncoderSpec) else "--no-enable-chunked-prefill"
        raise ConfigError(
            f"{why} needs --max-num-batched-tokens of at least the model length ({minimum}), "
            f"got {budget}; or lower --max-model-len"
        )
    is_tuned = requested == "auto" and is_chunked
    if options.itl_target_ms is not None and not is_tuned:
        raise ConfigError(
            "--itl-target-ms needs --max-num-batched-tokens auto and chunked prefill, because it sizes prompt chunks"
        )
    return SchedulerConfig(
        max_num_seqs=min(options.max_num_seqs, budget),  # so that all decodes fit into every step
        max_num_batched_tokens=budget,
        enable_chunked_prefill=is_chunked,
        policy=options.scheduling_policy,
        depth=_choose_depth(options, available),
        dynamic_chunking=is_tuned,
        itl_target=None if options.itl_target_ms is None else options.itl_target_ms / 1000,
    )


def _choose_depth(options: EngineOptions, available: Devices) -> int:
    """Return the number of plans in flight: one per stage; with a single stage one more, to schedule ahead.

    With several stages the plans in flight already hide the core's work. A single rank on CPU runs in the core's
    process and uses all processors, so scheduling ahead in a thread gains nothing (measured with models of 1 to 100 ms
    per step: 0.83 to 1.10 times the throughput, mostly below 1).
    """
    stages = options.pipeline_parallel_size
    if stages > 1:
        return stages
    in_process = parallel_config.choose_executor(options) == "uni"
    return 1 if in_process and available.kind == "cpu" else 2


def _count_blocks(config: EngineConfig, available: Devices) -> int:
    """Return the KV blocks of each rank: what fits into memory, but no more than all requests at full length can use.

    Returns 0 on a host without replicas.
    """
    model, parallel, cache, scheduler = config.model, config.parallel, config.cache, config.scheduler
    if not parallel.local_replicas:
        return 0
    sizes, row = Sizes.of(config), scheduler.max_num_batched_tokens
    blocks_per_request = cache.max_blocks(model.max_model_len, row)
    sharing = max(1, parallel.num_local_ranks) if available.kind == "cpu" else parallel.ranks_per_device
    per_rank = available.memory // sharing
    budget_bytes = int(per_rank * cache.gpu_memory_utilization)
    fixed = [weights + sizes.workspace + sizes.graphs for weights in sizes.weights]
    if max(fixed) > budget_bytes:
        quantize = " or --quantization" * (available.kind == "cpu" and model.quantization is None)
        stored = f" ({model.dtype}, dequantized from {_checkpoint_format(model, parallel)})" if model.quantized else ""
        replayed = "op replay" if available.kind == "cpu" else "CUDA graphs"
        raise ConfigError(
            f"Not enough memory: needs {format_bytes(max(fixed))} per rank (weights "
            f"{format_bytes(max(sizes.weights))}{stored} + workspace {format_bytes(sizes.workspace)}"
            f"{f' + {replayed} {format_bytes(sizes.graphs)}' * (sizes.graphs > 0)}), {format_bytes(budget_bytes)} "
            f"available ({cache.gpu_memory_utilization:g} of {format_bytes(available.memory)} free"
            f"{f' over {sharing} ranks' * (sharing > 1)}); use more ranks (-tp, -pp), a smaller "
            f"--dtype{quantize}, or a lower --max-num-batched-tokens"
        )
    if not max(sizes.kv_block):
        return 0
    requested = cache.kv_cache_memory_bytes
    if requested is not None:
        if requested > per_rank - max(fixed):
            raise ConfigError(
                f"--kv-cache-memory-bytes {requested} ({format_bytes(requested)}) does not fit: "
                f"{format_bytes(per_rank - max(fixed))} per rank is available after weights and workspace; use a "
                "smaller value, or more ranks (-tp, -pp)"
            )
        blocks = requested // max(sizes.kv_block)
    else:
        blocks = min((budget_bytes - used) // block for used, block in zip(fixed, sizes.kv_block, strict=True))
        if available.kind == "cpu":
            capped = _CPU_KV_CACHE_BYTES // sharing // max(sizes.kv_block)
            blocks = min(blocks, max(capped, blocks_per_request))
    return limit_blocks(config, blocks, max(sizes.kv_block))


def limit_blocks(config: EngineConfig, blocks: int, block_bytes: int, where: str = "") -> int:
    """Limit `blocks` to what all requests at full length can use, unless --kv-cache-memory-bytes is given.

    Raises `ConfigError` if they are too few for one request; `where` is added to its text.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    row, requested = scheduler.max_num_batched_tokens, cache.kv_cache_memory_bytes
    blocks_per_request = cache.max_blocks(model.max_model_len, row)
    if blocks < blocks_per_request:
        lengths = range(1, model.max_model_len)
        max_len = bisect_right(lengths, blocks, key=lambda length: cache.max_blocks(length, row))
        chunked = cache.max_blocks(model.max_model_len, 1) < blocks_per_request
        raise ConfigError(
            f"a KV cache of {format_bytes(max(0, blocks) * block_bytes if requested is None else requested)} per rank "
            f"holds {max_len:,} tokens, less than one request of {model.max_model_len:,} "
            f"({format_bytes(blocks_per_request * block_bytes)}){where}; use --max-model-len {max(1, max_len)} or "
            f"less, {f'--max-num-batched-tokens below {row}, ' * chunked}more memory (--kv-cache-memory-bytes, "
            "--gpu-memory-utilization), or more ranks (-tp, -pp)"
        )
    return blocks if requested is not None else min(blocks, scheduler.max_num_seqs * blocks_per_request)
