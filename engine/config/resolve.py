"""`EngineOptions` → `EngineConfig`: every size is known, and every misfit refused, before a weight is read."""

from __future__ import annotations

import importlib.util
import logging
import math
import typing
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    SchedulerConfig,
)
from quire.engine.config.pooling import Pooling
from quire.engine.models.encoder_spec import EncoderSpec
from quire.engine.models.families import FAMILIES, from_hf_config, transformers_backend
from quire.engine.models.families.quantized import quantized
from quire.engine.models.model_spec import ExpertParallelMoESpec, MatrixShape, ModelSpec, MoESpec, TransformersModelSpec
from quire.engine.protocol.errors import ConfigError

if TYPE_CHECKING:
    from quire.engine.cluster.ray_cluster import RayResources

logger = logging.getLogger(__name__)

_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
"""The most that a tuned step computes, and what its workspace is made for: larger steps are hardly cheaper by token."""
_FP8_CAPABILITY = (8, 9)
"""Compute capability from which on NVIDIA GPUs have instructions to read 8-bit floats."""
_CPU_KV_CACHE_BYTES = 4 << 30
"""On CPU the KV cache of all ranks together stops here unless --kv-cache-memory-bytes asks for more."""


def resolve(options: EngineOptions, placed: RayResources | None = None) -> EngineConfig:
    """Fix every open choice; raises `ConfigError` with numbers and a remedy for what cannot be served.

    `placed` is for a node of a Ray cluster: where the ranks are has been found on another.
    """
    _check_ranges(options)
    if placed is None:
        from quire.engine.cluster import ray_cluster  # which the commands that ask a running server do without

        placed = ray_cluster.find(options)
    found = placed.devices if placed is not None else None
    found = found or devices.find(options.device, parallel_config.groups_here(options, placed))
    model = _resolve_model(options, found)
    parallel = parallel_config.resolve(options, model.architecture, found, placed)
    held = parallel_config.on_a_rank(model.architecture, parallel)
    held.check_divides(options.tensor_parallel_size)
    _check_quantization(model, held, options.tensor_parallel_size, found)
    _check_attention(options, model, found)
    scheduler = _resolve_scheduler(options, model, found)
    kv_dtype: str = options.kv_cache_dtype
    if kv_dtype == "auto":
        # Beside quantized weights, its rounding is not to be seen, and decodes read half as much.
        kv_dtype = "bfloat16" if model.quantization and model.dtype == "float32" else model.dtype
    kv_dtype = kv_dtype.removesuffix("_e4m3")
    if found.kind == "cuda" and (placed is None or placed.devices is None):
        _check_cache(options, kv_dtype, found)
    specs = cache_specs(model.architecture, parallel.tensor_parallel_size, model.max_model_len)
    longest, row, size = model.max_model_len, scheduler.max_num_batched_tokens, options.block_size
    cache = CacheConfig(
        block_size=options.block_size,
        num_blocks=0,
        dtype=kv_dtype,
        enable_prefix_caching=options.enable_prefix_caching and _may_reuse_prefixes(model),
        groups=group_layers(specs, parallel.stages, lambda group: group.most_blocks(longest, row, size)),
    )
    graphs = cuda_graph_sizes.resolve(options, model, parallel, scheduler)
    config = EngineConfig(
        model=model, parallel=parallel, cache=cache, scheduler=scheduler, graphs=graphs, options=options
    )
    return replace(config, cache=replace(cache, num_blocks=_count_blocks(options, config, found)))


def fetch_weights(options: EngineOptions, config: EngineConfig) -> None:
    """See that the weights are there and whole; those of a Hugging Face repository are downloaded, with a bar.

    Apart from `resolve`, so that everything else is checked, and the plan shown, before a large download.
    """
    if (load_format := config.model.load_format) != "dummy":
        pools = config.model.pooling
        inner = [dense.folder for dense in pools.dense] if pools is not None else []
        model_files.fetch_weights(options.model, options.revision, config.model.path, load_format, inner)
        for folder in ("", *inner):
            model_files.check_weights(config.model.path / folder, load_format)


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank of each stage."""

    weights: tuple[int, ...]
    kv_block: tuple[int, ...]
    workspace: int
    """Activations and logits of the largest step, estimated."""
    graphs: int
    """CUDA graphs, or a CPU's tapes, estimated."""

    @staticmethod
    def of(config: EngineConfig) -> Sizes:
        model, scheduler, cache, tp = config.model, config.scheduler, config.cache, config.parallel.tensor_parallel_size
        arch = parallel_config.on_a_rank(model.architecture, config.parallel)
        stages = range(config.parallel.pipeline_parallel_size)
        specs = cache_specs(arch, tp, model.max_model_len)
        attending = max(layer.attention.workspace(model.max_model_len, tp) for layer in arch.layers)
        logits = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * arch.vocab_size * 4 * 4
        logits *= model.pooling is None
        return Sizes(
            weights=tuple(_weight_bytes(model, config.parallel, stage) for stage in stages),
            kv_block=tuple(_kv_block_bytes(cache, count_planes(specs, cache.groups, stage)) for stage in stages),
            workspace=(_activations(config, arch) + attending) * DTYPE_BYTES[model.dtype]
            + logits
            + _moving_bytes(config, arch),
            graphs=cuda_graph_sizes.estimate(config, arch),
        )


def _activations(config: EngineConfig, arch: ModelSpec) -> int:
    """Numbers that a rank holds of the largest step's tokens; its experts may be those of every replica's tokens."""
    parallel, tokens, tp = (
        config.parallel,
        config.scheduler.max_num_batched_tokens,
        config.parallel.tensor_parallel_size,
    )
    coming = tokens * parallel.replicas if parallel.is_coupled else tokens
    inner = max(
        each.width(tp) * (coming if isinstance(each, ExpertParallelMoESpec) else tokens)
        for each in {layer.feed_forward for layer in arch.layers}
    )
    count = 6 * tokens * arch.hidden_size + 3 * inner
    if parallel.is_coupled:
        most = max(layer.feed_forward.top_k for layer in arch.layers if isinstance(layer.feed_forward, MoESpec))
        leaving = tokens // tp * min(most, parallel.expert_ranks)  # each token to every rank where it has an expert
        count += 8 * max(coming, leaving) * arch.hidden_size
    return count


def _moving_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Room for the experts of a layer that change places: one that leaves, one that comes, one laid beside."""
    if config.parallel.experts is None or not config.parallel.experts.is_balanced:
        return 0
    alone = {
        replace(each.feed_forward, shared=None, places=1)
        for each in arch.layers
        if isinstance(each.feed_forward, ExpertParallelMoESpec)
    }
    width, quantization = DTYPE_BYTES[config.model.dtype], config.model.quantization
    return 3 * max(
        sum(packed_bytes(*each[:2], quantization, width) for each in one.matrices(arch.hidden_size, 1)) for one in alone
    )


def _kv_block_bytes(cache: CacheConfig, planes: Counter[KVCacheShape]) -> int:
    """Bytes of a block: room for the layers of any group."""
    width = DTYPE_BYTES.get(cache.dtype, 1)
    scale = 0 if cache.dtype in DTYPE_BYTES else 4
    rows = {shape: shape.sides * shape.heads * cache.block_size for shape in planes}
    return sum(count * rows[shape] * (shape.numbers * width + scale) for shape, count in planes.items())


def _weight_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of one rank's weights as they are held: linear layers and head packed, the rest in the model's type."""
    arch, stages, tp = (
        parallel_config.on_a_rank(model.architecture, parallel),
        parallel.stages,
        parallel.tensor_parallel_size,
    )
    width, last = DTYPE_BYTES[model.dtype], stage == len(stages) - 1
    matrices = [each for number in stages[stage] for each in arch.layers[number].matrices(arch.hidden_size, tp)]
    head = MatrixShape(arch.vocab_per_rank(tp), arch.hidden_size)
    embedded = stage == 0 and arch.tie_embeddings
    kept = arch.stage_parameters(stages, stage, tp) - sum(math.prod(each) for each in matrices)
    kept -= math.prod(head) * (last and not embedded)
    packed = sum(each.number * packed_bytes(*each[:2], model.quantization, width) for each in matrices)
    # Vectors are made without a head; on CUDA a tied one needs no copy.
    if last and model.pooling is None and not (embedded and parallel.device == "cuda"):
        packed += packed_bytes(*head[:2], model.quantization and "int8", width)
    mixtures = [arch.layers[n].feed_forward for n in stages[stage]]
    wide = sum(mixture.wide(arch.hidden_size) for mixture in mixtures if isinstance(mixture, MoESpec))
    return kept * width + wide * (4 - width) + packed


def _as_stored(model: ModelConfig, parallel: ParallelConfig) -> str:
    """How the checkpoint is quantized; for fp8, about what a rank would hold if that could be served."""
    assert model.quantized is not None
    if model.quantized.method != "fp8":
        return model.quantized.method
    kept = replace(model, quantization="int8")
    most = max(_weight_bytes(kept, parallel, stage) for stage in range(len(parallel.stages)))
    return f"fp8 (which would be {human(most)} a rank, and is not served as it is)"


def packed_bytes(rows: int, columns: int, quantization: str | None, width: int) -> int:
    """Bytes of a weight `[rows, columns]` as `kernels.pack_linear` keeps it."""
    match quantization:
        case "int8":
            return rows * columns + 8 * rows
        case "int4":
            group = next(size for size in INT4_GROUPS if columns % size == 0)
            return rows * columns // 2 + 8 * rows * columns // group
    return rows * columns * width


def plan_text(config: EngineConfig) -> str:
    """The resolved plan as `serve` prints it."""
    model, parallel, cache = config.model, config.parallel, config.cache
    arch, sizes = model.architecture, Sizes.of(config)
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    kv_type = "" if cache.dtype == model.dtype else f" in {cache.dtype}"
    stored = f", dequantized from {_as_stored(model, parallel)} while loading," if model.quantized else ""
    weights = f" with {model.quantization} weights" if model.quantization else ""
    limits = (
        f"at most {config.scheduler.max_num_seqs} run at once, "
        f"{'up to ' * config.scheduler.is_tuned}{config.scheduler.max_num_batched_tokens:,} tokens a step"
    )
    lines = [
        f"{arch.name} from {model.path}{', by transformers' * isinstance(arch, TransformersModelSpec)}",
        f"{model.dtype}{stored}{weights} on {parallel.device}, tensor parallel {tp} × pipeline parallel {pp} "
        f"= {parallel.world_size} rank{'s' * (parallel.world_size > 1)} ({parallel.executor})",
        *parallel_config.lines(parallel, arch),
    ]
    if not parallel.local_replicas:
        return f"{lines[0]}\n  {parallel.replicas} replicas, none of them on this host"
    if model.pooling is not None:
        length = f"{model.max_model_len:,} tokens"
        lines.append(f"embeds prompts of up to {length} (--runner pooling): {model.pooling.text()}")
    if not cache.num_blocks:
        lines.append(f"  layers 0-{arch.num_layers - 1}, per rank weights {human(sizes.weights[0])}, no KV cache")
        return "\n".join([*lines, limits])
    for stage, layers in enumerate(parallel.stages):
        first = stage * tp
        ranks = f"rank {first}" if tp == 1 else f"ranks {first}-{first + tp - 1}"
        lines.append(
            f"  stage {stage} ({ranks}): layers {layers.start}-{layers.stop - 1}, per rank weights "
            f"{human(sizes.weights[stage])}, KV cache {human(sizes.kv_block[stage] * cache.num_blocks)} "
            f"in {cache.num_blocks:,} blocks of {cache.block_size} tokens{kv_type}"
        )
    if graphs := cuda_graph_sizes.text(config, human(sizes.graphs)):
        lines.append(f"  {graphs}")
    windows = Counter(group.window for group in cache.groups)
    if any(windows):
        kept = [
            f"{number} for layers that keep {'all' if window is None else f'a window of {window:,}'} tokens"
            for window, number in windows.items()
        ]
        lines.append(f"  block tables: {', '.join(kept)}")
    about = ", about, until it has been measured what the rest takes" * (parallel.device == "cuda")
    lines.append(f"{cache_text(config)}{about}; {limits}")
    return "\n".join(lines)


def cache_text(config: EngineConfig) -> str:
    """How much the KV cache holds."""
    tokens, longest = _tokens_held(config), config.model.max_model_len
    return f"KV cache holds {tokens:,} tokens: {tokens / longest:.1f} requests at the full length of {longest:,}"


def _tokens_held(config: EngineConfig) -> int:
    """Tokens that the KV cache holds of requests at full length.

    Behind their windows they hold nothing; a chunk of a prompt takes its room besides, but only one of a step.
    """
    longest, cache, row = config.model.max_model_len, config.cache, config.scheduler.max_num_batched_tokens
    one = cache.most_blocks(longest, 1)
    chunk = cache.most_blocks(longest, row) - one
    return (cache.num_blocks - chunk) * -(-longest // cache.block_size) * cache.block_size // one


def human(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
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


def _resolve_model(options: EngineOptions, found: Devices) -> ModelConfig:
    path = model_files.locate(options.model, options.revision)
    hf_config = model_files.read_json(path / "config.json")
    arch, pools = _architecture(options, path, hf_config)
    tokenizer = path
    if options.tokenizer is not None:
        tokenizer = model_files.locate(options.tokenizer, None)
    return ModelConfig(
        path=path,
        tokenizer=tokenizer,
        architecture=arch,
        dtype=_choose_dtype(options, found, hf_config),
        quantization=options.quantization,
        max_model_len=_choose_length(options, arch, pools),
        load_format="safetensors" if options.load_format == "auto" else options.load_format,
        quantized=None if options.load_format == "dummy" else quantized(hf_config),
        eos_token_ids=_eos_token_ids(path, hf_config),
        trust_remote_code=options.trust_remote_code,
        seed=options.seed,
        max_logprobs=options.max_logprobs,
        pooling=pools,
    )


def _architecture(options: EngineOptions, path: Path, hf_config: dict[str, Any]) -> tuple[ModelSpec, Pooling | None]:
    """What the model is, and how it embeds if it does."""
    names = hf_config.get("architectures") or []
    # A decoder without its head, as AutoModel saves it, is named so: Qwen3Model.
    whole = [f"{name.removesuffix('Model')}ForCausalLM" for name in names if name.endswith("Model")]
    is_headless = not any(name in FAMILIES for name in names) and any(name in FAMILIES for name in whole)
    arch = _implementation(options, path, {**hf_config, "architectures": whole} if is_headless else hf_config)
    if isinstance(arch, EncoderSpec):
        if options.runner == "generate":
            raise ConfigError(f"{arch.name} is an encoder and cannot generate text; leave --runner generate out")
        if options.pipeline_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {options.pipeline_parallel_size}: {arch.name} is an encoder, whose layers "
                "are not cut into stages; use --tensor-parallel-size"
            )
        return arch, pooling.read(path, hf_config, arch.hidden_size, default="mean")
    if options.runner == "generate" and is_headless:
        raise ConfigError(f"{', '.join(names)} has no head to generate text with; it can embed (--runner pooling)")
    if options.runner == "generate" or (
        options.runner == "auto" and not is_headless and not (path / pooling.MODULES).exists()
    ):
        return arch, None
    if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention"):
        raise ConfigError(f"{arch.name}: a decoder whose tokens see those behind them (is_causal false) is not served")
    return arch, pooling.read(path, hf_config, arch.hidden_size, default="lasttoken")


def _implementation(options: EngineOptions, path: Path, hf_config: dict[str, Any]) -> ModelSpec:
    """The model by our own families, or as transformers builds it."""
    ours = None
    names = hf_config.get("architectures") or []
    if options.model_impl != "transformers":
        try:
            return from_hf_config(hf_config)
        except ConfigError as error:
            if options.model_impl == "quire":
                raise
            ours = error
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
        theirs = f"{', '.join(names) or 'it'} is not served by transformers' implementation: {error}"
        raise ConfigError(theirs if ours is None else f"{ours}; and {theirs}") from None
    if ours is not None:
        reason = f"{ours}" if arch.name in FAMILIES else f"{arch.name} has no implementation of Quire's own"
        logger.warning("%s; transformers' serves it (--model-impl transformers)", reason)
    return arch


def _may_reuse_prefixes(model: ModelConfig) -> bool:
    """Whether what the prefix cache spares is not needed: pooling may want the hidden states of all tokens."""
    if isinstance(model.architecture, EncoderSpec):
        return False
    return model.pooling is None or not model.pooling.needs_all_tokens


def _check_attention(options: EngineOptions, model: ModelConfig, found: Devices) -> None:
    """What is known of --attention-backend before a rank tries it."""
    backend = options.attention_backend
    if backend == "auto":
        return
    asked = f"--attention-backend {backend}"
    if isinstance(model.architecture, EncoderSpec):
        raise ConfigError(f"{asked}: encoders, which keep no KV, have one implementation of attention; leave it out")
    if found.kind == "cpu" and backend != "reference":
        raise ConfigError(f"{asked} needs a GPU; leave it out for the CPU's own kernels, or compare with reference")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(f"{asked}: it is not installed; pip install 'quire[flashinfer]', or leave it out")


def _check_cache(options: EngineOptions, dtype: str, found: Devices) -> None:
    """That this host's GPUs read the KV cache's type; those of other hosts are for their ranks to check."""
    if dtype != "fp8" or options.attention_backend == "reference":
        return
    for number, (major, minor) in enumerate(devices.gpu_capabilities()):
        if (major, minor) < _FP8_CAPABILITY and (not found.order or number in found.order):
            least = "{}.{}".format(*_FP8_CAPABILITY)
            raise ConfigError(
                f"--kv-cache-dtype {options.kv_cache_dtype} needs GPUs of compute capability {least} or more, and GPU "
                f"{number} has {major}.{minor}; use --kv-cache-dtype int8, or auto"
            )


def _check_quantization(model: ModelConfig, arch: ModelSpec, tp: int, found: Devices) -> None:
    """`arch` is that of a rank."""
    if model.quantization is None:
        return
    if found.kind != "cpu":
        raise ConfigError(f"--quantization {model.quantization} is served on CPU only so far; leave it out")
    for _, columns, _ in {each for layer in set(arch.layers) for each in layer.matrices(arch.hidden_size, tp)}:
        if model.quantization == "int4" and columns % INT4_GROUPS[-1]:
            raise ConfigError(
                f"--quantization int4 needs linear layers whose input is a multiple of {INT4_GROUPS[-1]}; with "
                f"--tensor-parallel-size {tp} one of this model's has {columns}; use int8"
            )


def _choose_dtype(options: EngineOptions, found: Devices, hf_config: dict[str, Any]) -> str:
    if options.dtype != "auto":
        return options.dtype
    if found.kind == "cpu":
        return "float32"
    named = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return named if named in DTYPE_BYTES else "bfloat16"


def _choose_length(options: EngineOptions, arch: ModelSpec, pools: Pooling | None) -> int:
    """The model's own length, unless a shorter one is asked for; for vectors, what they are made for."""
    asked = options.max_model_len
    if asked is not None and asked > arch.max_position:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {arch.max_position} positions")
    made_for = pools.max_length if pools is not None else None
    length = asked or min(arch.max_position, made_for or arch.max_position)
    if pools is None and length < 2:
        raise ConfigError(f"--max-model-len {length} has no room for a prompt and a token behind it; use 2 or more")
    return length


def _eos_token_ids(path: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json before config.json."""
    generation = path / "generation_config.json"
    eos = model_files.read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = hf_config.get("eos_token_id") if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _resolve_scheduler(options: EngineOptions, model: ModelConfig, found: Devices) -> SchedulerConfig:
    # The tokens of an encoder see all of their prompt, which therefore goes into one step.
    is_chunked = options.enable_chunked_prefill and not isinstance(model.architecture, EncoderSpec)
    least = 1 if is_chunked else model.max_model_len
    asked = options.max_num_batched_tokens
    budget = max(_STEP_TOKENS[found.kind], least) if asked == "auto" else asked
    if budget < least:
        why = "an encoder" if isinstance(model.architecture, EncoderSpec) else "--no-enable-chunked-prefill"
        raise ConfigError(
            f"{why} needs --max-num-batched-tokens of at least the model length ({least}), "
            f"got {budget}; or lower --max-model-len"
        )
    is_tuned = asked == "auto" and is_chunked
    if options.itl_target_ms is not None and not is_tuned:
        raise ConfigError(
            "--itl-target-ms sizes prompt chunks: it needs --max-num-batched-tokens auto and chunked prefill"
        )
    return SchedulerConfig(
        max_num_seqs=min(options.max_num_seqs, budget),  # so that every decode finds room in every step
        max_num_batched_tokens=budget,
        enable_chunked_prefill=is_chunked,
        policy=options.scheduling_policy,
        depth=_choose_depth(options, found),
        is_tuned=is_tuned,
        itl_target=None if options.itl_target_ms is None else options.itl_target_ms / 1000,
    )


def _choose_depth(options: EngineOptions, found: Devices) -> int:
    """Plans in flight: one for each stage; on a single stage one more, so that it never waits for the core.

    With several stages the plans in flight hide the core already. A single rank on CPU lives in the core's process and
    computes with every core that there is: the core has none to hide on, and a thread brought nothing (measured with
    models of 1 to 100 ms a step: 0.83 to 1.10, most below 1).
    """
    stages = options.pipeline_parallel_size
    if stages > 1:
        return stages
    in_process = parallel_config.choose_executor(options) == "uni"
    return 1 if in_process and found.kind == "cpu" else 2


def _count_blocks(options: EngineOptions, config: EngineConfig, found: Devices) -> int:
    """KV blocks of each rank: what memory leaves, but no more than all requests at full length can use.

    A host without replicas has none, whatever fits there.
    """
    model, parallel, cache, scheduler = config.model, config.parallel, config.cache, config.scheduler
    if not parallel.local_replicas:
        return 0
    sizes, row = Sizes.of(config), scheduler.max_num_batched_tokens
    blocks_per_request = cache.most_blocks(model.max_model_len, row)
    sharing = max(1, parallel.ranks_here) if found.kind == "cpu" else parallel.ranks_per_device
    whole = found.memory // sharing
    share = int(whole * options.gpu_memory_utilization)
    fixed = [weights + sizes.workspace + sizes.graphs for weights in sizes.weights]
    if max(fixed) > share:
        quantize = " or --quantization" * (found.kind == "cpu" and model.quantization is None)
        stored = f" ({model.dtype}, dequantized from {_as_stored(model, parallel)})" if model.quantized else ""
        kept = "tapes" if found.kind == "cpu" else "CUDA graphs"
        raise ConfigError(
            f"the model does not fit: weights {human(max(sizes.weights))}{stored} + workspace {human(sizes.workspace)} "
            f"{f'+ {kept} {human(sizes.graphs)} ' * (sizes.graphs > 0)}per rank, and {human(share)} there "
            f"({options.gpu_memory_utilization:g} of {human(found.memory)} free"
            f"{f' over {sharing} ranks' * (sharing > 1)}); use more ranks (-tp, -pp), a smaller "
            f"--dtype{quantize}, or a lower --max-num-batched-tokens"
        )
    if not max(sizes.kv_block):
        return 0
    asked = options.kv_cache_memory_bytes
    if asked is not None:
        if asked > whole - max(fixed):
            raise ConfigError(
                f"--kv-cache-memory-bytes {asked} ({human(asked)}) does not fit: {human(whole - max(fixed))} is left "
                f"per rank beside weights and workspace; ask for less, or use more ranks (-tp, -pp)"
            )
        blocks = asked // max(sizes.kv_block)
    else:
        blocks = min((share - taken) // block for taken, block in zip(fixed, sizes.kv_block, strict=True))
        if found.kind == "cpu":
            modest = _CPU_KV_CACHE_BYTES // sharing // max(sizes.kv_block)
            blocks = min(blocks, max(modest, blocks_per_request))
    return limit_blocks(config, blocks, max(sizes.kv_block))


def limit_blocks(config: EngineConfig, blocks: int, block_bytes: int, beside: str = "") -> int:
    """Of the `blocks` that there is room for, no more than all requests at full length can use, unless asked for.

    Raises `ConfigError` where one request has not enough; the text says what the room is left `beside`.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    row, asked = scheduler.max_num_batched_tokens, config.options.kv_cache_memory_bytes
    blocks_per_request = cache.most_blocks(model.max_model_len, row)
    if blocks < blocks_per_request:
        fitting = range(1, model.max_model_len)
        longest = bisect_right(fitting, blocks, key=lambda length: cache.most_blocks(length, row))
        chunked = cache.most_blocks(model.max_model_len, 1) < blocks_per_request
        raise ConfigError(
            f"a KV cache of {human(max(0, blocks) * block_bytes if asked is None else asked)} per rank holds "
            f"{longest:,} tokens, less than one request of {model.max_model_len:,} "
            f"({human(blocks_per_request * block_bytes)}){beside}; use --max-model-len {max(1, longest)} or less, "
            f"{f'--max-num-batched-tokens below {row}, ' * chunked}more memory (--kv-cache-memory-bytes, "
            "--gpu-memory-utilization), or more ranks (-tp, -pp)"
        )
    return blocks if asked is not None else min(blocks, scheduler.max_num_seqs * blocks_per_request)
