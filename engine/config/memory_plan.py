"""The memory of each rank, computed before weights are read: weights, workspace, graphs and KV cache. No torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from quire.engine.architecture.attention_spec import GATHERED_AT_ONCE, MLASpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.feed_forward_spec import ExpertParallelMoESpec, MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization.form import INT4_GROUPS, Form, form_of
from quire.engine.architecture.residual_spec import ConnectionSpec, SharedBlockSpec
from quire.engine.architecture.spec_parts import MatrixShape
from quire.engine.config import cuda_graph_sizes, parallel_config
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import (
    DTYPE_BYTES,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
)
from quire.engine.config.kv_cache_groups import (
    KVCacheShape,
    block_bytes,
    cached_layers,
    count_planes,
    recent_layers,
)
from quire.engine.protocol.errors import ConfigError

_CPU_KV_CACHE_BYTES = 4 << 30
"""Default limit of the KV cache of all ranks together on CPU, without --kv-cache-memory-bytes."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank, in bytes; tuples have one entry per stage."""

    weights: tuple[int, ...]
    kv_block: tuple[int, ...]
    workspace: int
    """Activations and logits of the largest step, estimated."""
    graphs: int
    """CUDA graphs, or op replay on CPU, estimated."""
    media: tuple[int, ...]
    """Features of images and videos that are kept, activations of the tower beyond `workspace`, and its CUDA graphs,
    estimated."""
    adapters: int = 0
    """On CPUs, also those that are ready to be swapped in."""
    kv_store: int = 0
    """On CPUs, a rank's share of the host's memory for KV that leaves the device. With Ray, of ranks on the host of the
    core, if there are some: all ranks have as many blocks as the ones with the least memory."""
    recent: tuple[int, ...] = ()
    """Keys and values that are not quantized yet; empty: there are none."""

    @property
    def fixed(self) -> list[int]:
        """Bytes of each stage besides its KV cache."""
        stages = zip(self.weights, self.media, self.recent or [0] * len(self.weights), strict=True)
        shared = self.workspace + self.graphs + self.adapters + self.kv_store
        return [weights + media + recent + shared for weights, media, recent in stages]

    @staticmethod
    def of(config: EngineConfig) -> MemoryPlan:
        """The plan, with the model that guesses tokens on the last stage."""
        model, cache = config.model, config.cache
        stages = range(config.parallel.pipeline_parallel_size)
        specs, _ = cached_layers(model, config.parallel, config.scheduler.speculative, cache.block_size)
        weights = [_weight_bytes(model, config.parallel, stage) for stage in stages]
        workspace, graphs = _workspace(config), _graphs(config)
        if (drafter := config.drafter) is not None:
            weights[-1] += _weight_bytes(drafter.model, drafter.parallel, 0)
            weights[-1] += _copied_embedding_bytes(config, drafter.model.architecture)
            target, tokens = model.architecture, config.scheduler.max_num_batched_tokens
            read = tokens * target.output_width
            if isinstance(head := drafter.model.architecture, DraftHeadSpec) and (again := head.num_heads - 1):
                # the inputs of several heads, and what they keep of them
                read += (tokens + 4 * again * config.scheduler.max_num_seqs) * head.stream_width
            read *= DTYPE_BYTES[model.dtype]
            workspace = max(workspace, _workspace(drafter) + read)
            has_graphs = config.parallel.device == "cpu" and not isinstance(drafter.model.architecture, DraftHeadSpec)
            graphs += _graphs(drafter) if has_graphs else 0
        return MemoryPlan(
            weights=tuple(weights),
            kv_block=tuple(
                sum(
                    count * block_bytes(shape, cache.block_size, cache.dtype)
                    for shape, count in count_planes(specs, cache.groups, stage).items()
                )
                for stage in stages
            ),
            workspace=workspace,
            graphs=graphs,
            media=(_media(config, workspace), *[0] * (len(stages) - 1)),
            adapters=_adapters(config),
            kv_store=_kv_store(config),
            recent=_recent(config),
        )


def _workspace(config: EngineConfig) -> int:
    """Bytes of activations and logits of the largest step."""
    model, tp = config.model, config.parallel.tensor_parallel_size
    arch = parallel_config.rank_spec(model.architecture, config.parallel)
    attention = max(each.workspace(model.max_model_len, tp) for layer in arch.layers for each in layer.mixers)
    logits = config.scheduler.max_sampled_tokens * arch.vocab_size * 4 * 4
    logits *= model.pooling is None
    activations = (_activations(config, arch) + attention) * DTYPE_BYTES[model.dtype]
    activations += _gathered_bytes(config, arch) + _exchanged_bytes(config, arch)
    return activations + logits + _selection_bytes(config, arch) + _eplb_buffer_bytes(config, arch)


def _gathered_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of attention among ranks that divide tokens: the queries of all of them, and results in the model's type
    and in float32; for MLA, also all rows of a sequence, before and after they are put in order."""
    model, tp, context = (
        config.model,
        config.parallel.tensor_parallel_size,
        config.parallel.decode_context_parallel_size,
    )
    if context == 1:
        return 0
    most, width = 0, DTYPE_BYTES[model.dtype]
    for attention in {layer.attention for layer in arch.layers if layer.attention is not None}:
        row = attention.kv_shape(tp)[2]
        elements = config.scheduler.max_num_batched_tokens * attention.num_heads // tp * context * row
        if isinstance(attention, MLASpec):
            elements = min(elements, GATHERED_AT_ONCE)
        rows = 2 * model.max_model_len * row * isinstance(attention, MLASpec)
        most = max(most, elements * (2 * width + 4) + rows * width)
    return most


def _exchanged_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of what ranks that divide the tokens of a step gather: the cache's rows of a layer, before and after they
    are put in order, or the same of the last layer's output."""
    if config.parallel.prefill_context_parallel_size == 1:
        return 0
    tp, dtype, output = config.parallel.tensor_parallel_size, config.cache.dtype, arch.output_width
    shapes = [KVCacheShape(*layer.attention.kv_shape(tp)) for layer in arch.layers if layer.attention is not None]
    rows = max((block_bytes(shape, 1, dtype) for shape in shapes), default=0)
    each = max(rows, output * DTYPE_BYTES[config.model.dtype])
    return 3 * config.scheduler.max_num_batched_tokens * each


def _media(config: EngineConfig, workspace: int) -> int:
    """Bytes of `MemoryPlan.media` on the first stage, for the largest item."""
    spec, media = config.model.architecture.media, config.media
    if spec is None or media is None:
        return 0
    width, kept = DTYPE_BYTES[config.model.dtype], media.encoder_cache_features
    tokens = media.max_item_features * spec.tower.patches_per_feature
    # While other steps run, the state of an item between two steps of its tower is kept.
    state = tokens * spec.tower.state_width
    more = max(0, int(tokens * spec.tower.layer_values) * width - workspace)
    return (kept * spec.tower.feature_width + state) * width + more + cuda_graph_sizes.estimate_tower(config)


def _adapters(config: EngineConfig) -> int:
    """Bytes of `MemoryPlan.adapters`."""
    if (lora := config.lora) is None:
        return 0
    return lora.device_bytes + lora.host_bytes * (config.parallel.device == "cpu")


def _kv_store(config: EngineConfig) -> int:
    """Bytes of `MemoryPlan.kv_store`."""
    parallel = config.parallel
    if config.kv_store is None or parallel.device != "cpu":
        return 0
    if not parallel.ray:
        return config.kv_store.memory_bytes // max(1, parallel.memory_shares)
    nodes = {own for each in parallel.ray for own in zip(each.nodes, each.all_ranks_per_node, strict=True)}
    beside = sum(ranks for (_, address), ranks in nodes if address == parallel.master[0])
    return config.kv_store.memory_bytes // beside if beside else 0  # a node has no store, and the core's has no ranks


def _recent(config: EngineConfig) -> tuple[int, ...]:
    """Bytes of `MemoryPlan.recent`."""
    cache, scheduler = config.cache, config.scheduler
    if (recent := cache.recent) is None:
        return ()
    return tuple(
        sum(
            recent.number(scheduler.max_num_seqs, len(layers)) * block_bytes(shape, cache.block_size, recent.dtype)
            for shape, layers in recent_layers(config, stage)
        )
        for stage in range(config.parallel.pipeline_parallel_size)
    )


def _copied_embedding_bytes(config: EngineConfig, drafter: ModelSpec) -> int:
    """Bytes of the target's embedding on the last stage, if a head reads it there and it is on another one."""
    if not isinstance(drafter, DraftHeadSpec) or drafter.has_embedding or len(config.parallel.stages) == 1:
        return 0
    embedding, _ = config.model.architecture.outer_matrices(config.parallel.tensor_parallel_size)
    return embedding_bytes(config.model, config.parallel.device, embedding)


def _graphs(config: EngineConfig) -> int:
    return cuda_graph_sizes.estimate(config, parallel_config.rank_spec(config.model.architecture, config.parallel))


def _activations(config: EngineConfig, arch: ModelSpec) -> int:
    """Number of activation values on a rank in the largest step; its experts may get tokens of every replica."""
    parallel, tp = config.parallel, config.parallel.tensor_parallel_size
    tokens = config.scheduler.max_num_batched_tokens
    if all(layer.state is None for layer in arch.layers):  # recurrent layers compute all tokens
        tokens = -(-tokens // parallel.prefill_context_parallel_size)
    incoming = tokens * parallel.replicas if parallel.is_coupled else tokens
    inner = max(
        (
            each.activations(tp) * (incoming if isinstance(each, ExpertParallelMoESpec) else tokens)
            for each in {layer.feed_forward for layer in arch.layers}
            if each is not None
        ),
        default=0,
    )
    count = tokens * (arch.hidden_size + 3 * arch.stream_width + 2 * max(arch.stage_width, arch.output_width)) + inner
    count += 4 * tokens * arch.stream_width * isinstance(arch.streams, ConnectionSpec)  # in float32
    if parallel.is_coupled:
        max_top_k = max(layer.feed_forward.top_k for layer in arch.layers if isinstance(layer.feed_forward, MoESpec))
        # Each token goes to every rank with one of its experts.
        outgoing = tokens // tp * min(max_top_k, parallel.expert_ranks)
        count += 8 * max(incoming, outgoing) * arch.hidden_size
    return count


def _selection_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of the slots that sparse attention selects in the largest step: for a layer, and for the layer before
    it."""
    counts = (each.top_k or 0 for layer in arch.layers for each in layer.mixers if isinstance(each, MLASpec))
    top_k = max(counts, default=0)
    return 2 * 8 * config.scheduler.max_num_batched_tokens * top_k if config.model.max_model_len > top_k else 0


def _eplb_buffer_bytes(config: EngineConfig, arch: ModelSpec) -> int:
    """Bytes of the buffers in which EPLB moves experts: one sent, one received, one staged."""
    if config.parallel.experts is None or not config.parallel.experts.enable_eplb:
        return 0
    layouts = {
        replace(each.feed_forward, shared=None, num_local_experts=1): number
        for number, each in enumerate(arch.layers)
        if isinstance(each.feed_forward, ExpertParallelMoESpec)
    }
    model, device = config.model, config.parallel.device
    return 3 * max(
        sum(matrix_bytes(model, device, number, each) for each in one.expert_matrices(arch.hidden_size, 1))
        for one, number in layouts.items()
    )


def _weight_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of one rank's weights: linear layers and head packed, the rest but embeddings in the model's data type."""
    arch = parallel_config.rank_spec(model.architecture, parallel)
    stages, tp = parallel.stages, parallel.tensor_parallel_size
    width, first, last = DTYPE_BYTES[model.dtype], stage == 0, stage == len(stages) - 1
    held = arch.held_layers(stages[stage])
    layers = [(number, each) for number, layer in held for each in layer.matrices(arch.hidden_size, tp)]
    tower = [*arch.tower_matrices(tp)] if first else []
    embedding, head = arch.outer_matrices(tp)
    is_shared = first and arch.tie_embeddings
    unpacked = arch.stage_parameters(stages, stage, tp) - sum(each.elements for _, each in (*layers, *tower))
    unpacked -= embedding.elements * first + head.elements * (last and not is_shared)
    packed = sum(matrix_bytes(model, parallel.device, number, each) for number, each in (*layers, *tower))
    packed += embedding_bytes(model, parallel.device, embedding) * first
    is_stored = form_of_matrix(model, parallel.device, None, head) is not None
    # Embedding models have no head; on CUDA, or kept as the checkpoint stores it, a tied head needs no copy.
    if last and model.pooling is None and not (is_shared and (is_stored or parallel.device == "cuda")):
        packed += (
            matrix_bytes(model, parallel.device, None, head)
            if is_stored
            else packed_bytes(head.rows, head.columns, model.quantization and "int8", _width(model, None, head))
        )
    embedded = arch.embedded_parameters(stages, stage, tp)
    unpacked, packed = unpacked - embedded, packed + embedded * DTYPE_BYTES[model.weight_dtype]
    return unpacked * width + arch.num_float32_parameters(stages, stage) * (4 - width) + packed


def embedding_bytes(model: ModelConfig, device: str, embedding: MatrixShape) -> int:
    """Bytes of an embedding's weight on a rank, which `--quantization` leaves as it is."""
    if form_of_matrix(model, device, None, embedding) is None:
        return embedding.elements * _width(model, None, embedding)
    return matrix_bytes(model, device, None, embedding)


def read_bytes(config: EngineConfig, arch: ModelSpec, stage: int, weights: int, num_tokens: int) -> float:
    """Bytes of a rank's `weights` that a step reads with `num_tokens` tokens of all replicas that share experts.

    It reads few rows of an embedding, and only the experts that tokens choose, if the choice is uniform. A block that
    layers share is read once for each of them: the weights of the layers between do not fit in a cache. `arch` has
    the sizes of a rank.
    """
    model, parallel = config.model, config.parallel
    tp, read = parallel.tensor_parallel_size, float(weights)
    embedding, _ = arch.outer_matrices(tp)
    has_copy = parallel.device == "cpu" and form_of_matrix(model, parallel.device, None, embedding) is None
    is_head = arch.tie_embeddings and len(parallel.stages) == 1 and not has_copy
    read -= arch.embedded_parameters(parallel.stages, stage, tp) * DTYPE_BYTES[model.weight_dtype]
    if stage == 0:
        read -= 0 if is_head else embedding_bytes(model, parallel.device, embedding)
    for number in parallel.stages[stage]:
        if isinstance(mixture := arch.layers[number].feed_forward, MoESpec):
            for each in mixture.expert_matrices(arch.hidden_size, tp):
                unread = (1 - mixture.top_k / mixture.num_experts) ** num_tokens
                unread = 1.0 if each.module.startswith("feed_forward.media_experts.") else unread
                read -= unread * matrix_bytes(model, parallel.device, number, each)
    for number, layer in arch.held_layers(parallel.stages[stage]):
        if isinstance(block := layer.residual, SharedBlockSpec) and not block.is_held:
            whole = arch.layers[number].matrices(arch.hidden_size, tp)
            shared = [each for each in whole if each.module.startswith("block.")]
            read += sum(matrix_bytes(model, parallel.device, number, each) for each in shared)
    return read


def matrix_bytes(model: ModelConfig, device: str, number: int | None, matrix: MatrixShape) -> int:
    """Bytes of weights of layer `number`, or outside the layers, as a rank has them in memory."""
    form = form_of_matrix(model, device, number, matrix)
    if form is not None:
        return matrix.number * form.packed_bytes(matrix.rows, matrix.columns, device)
    quantization = model.quantization_of(matrix.module)
    return matrix.number * packed_bytes(matrix.rows, matrix.columns, quantization, _width(model, number, matrix))


def _width(model: ModelConfig, number: int | None, matrix: MatrixShape) -> int:
    """Bytes per element of a weight that is not quantized, or is dequantized."""
    return DTYPE_BYTES[_dtype(model, number, matrix)]


def _dtype(model: ModelConfig, number: int | None, matrix: MatrixShape) -> str:
    is_dequantized = any(model.schemes.get((number, matrix.module), ()))
    return model.dtype if is_dequantized else model.weight_dtype


def form_of_matrix(model: ModelConfig, device: str, number: int | None, matrix: MatrixShape) -> Form | None:
    """How weights of layer `number`, or outside the layers, are kept as the checkpoint stores them; None: in the
    model's type. `activations` is a type that the device rounds them to."""
    form, (path, _, name) = _stored_form(model, number, matrix), matrix.module.rpartition(".")
    if form is None or not path.endswith("experts") or not re.fullmatch(r"(gate_up|down)(_proj)?", name):
        return form
    # Both matrices of experts are kept, and their inputs rounded, or neither.
    is_first = name.startswith("gate_up")
    assert number is not None
    mixture = model.architecture.layers[number].feed_forward
    has_gates = not isinstance(mixture, MoESpec) or mixture.is_gated
    columns = matrix.rows // (1 + has_gates) if is_first else matrix.rows
    other_name = name.replace("gate_up", "down") if is_first else name.replace("down", "gate_up")
    other = _stored_form(model, number, matrix._replace(columns=columns, module=f"{path}.{other_name}"))
    is_rounded = other is not None and other.rounds_inputs(columns, device) and other.bits == form.bits
    return other and (form if is_rounded else replace(form, activations=None))


def matrix_forms(config: EngineConfig) -> Iterator[tuple[int | None, MatrixShape, Form | None]]:
    """The layer, the matrix on a rank, and `form_of_matrix`, of all linear layers, those of the tower included, and of
    embedding and head if they are kept as the checkpoint stores them."""
    arch = parallel_config.rank_spec(config.model.architecture, config.parallel)
    for each in dict.fromkeys(arch.outer_matrices(config.parallel.tensor_parallel_size)):
        if (form := form_of_matrix(config.model, config.parallel.device, None, each)) is not None:
            yield None, each, form
    for number, layer in enumerate(arch.layers):
        for each in layer.matrices(arch.hidden_size, config.parallel.tensor_parallel_size):
            yield number, each, form_of_matrix(config.model, config.parallel.device, number, each)
    for place, each in arch.tower_matrices(config.parallel.tensor_parallel_size):
        yield place, each, form_of_matrix(config.model, config.parallel.device, place, each)


def _stored_form(model: ModelConfig, number: int | None, matrix: MatrixShape) -> Form | None:
    schemes = model.schemes.get((number, matrix.module)) if model.keeps_quantized(matrix.module) else None
    if not schemes:
        return None
    form = form_of(schemes, 0, matrix.columns, matrix.inputs or matrix.columns)
    return form if form is None or form.activations in model.rounded_types else replace(form, activations=None)


def packed_bytes(rows: int, columns: int, quantization: str | None, width: int) -> int:
    """Bytes of a weight `[rows, columns]` as packed by `kernels.pack_linear`."""
    match quantization:
        case "int8":
            return rows * columns + 8 * rows
        case "int4":
            group = next(size for size in INT4_GROUPS if columns % size == 0)
            return rows * columns // 2 + 8 * rows * columns // group
    return rows * columns * width


def with_cache(config: EngineConfig, available: Devices) -> EngineConfig:
    """Return the configuration with as many KV blocks as fit and, unless the user has set the model's length, with the
    longest one that they are enough for. Raises `ConfigError` as `count_blocks`."""
    model, cache, row = config.model, config.cache, config.scheduler.max_num_batched_tokens
    needed = cache.max_blocks(model.max_model_len, row)
    try:
        blocks = count_blocks(config, available)
        if not model.min_model_len or not blocks or blocks >= needed:
            return config.with_blocks(blocks)
    except ConfigError:
        if not 0 < model.min_model_len < model.max_model_len:
            raise
    # Tables and workspace grow with the length: those of the least one leave room for too long a request, and those of
    # that for one that fits.
    length = model.min_model_len
    blocks = count_blocks(replace(config, model=model.with_length(length)), available)
    longest = cache.max_length(blocks, row, model.max_model_len)
    with suppress(ConfigError):
        blocks = count_blocks(replace(config, model=model.with_length(longest)), available)
        length = cache.max_length(blocks, row, longest)
    return config.with_blocks(cache.max_blocks(length, row))


def count_blocks(config: EngineConfig, available: Devices) -> int:
    """Return the KV blocks of each rank: as many as fit into memory, up to the number that all requests at full length
    can use. They may be too few for a request at full length if that may be reduced.

    Returns 0 on a host without replicas.
    """
    model, parallel, cache, scheduler = config.model, config.parallel, config.cache, config.scheduler
    if not parallel.local_replicas:
        return 0
    sizes, row = MemoryPlan.of(config), scheduler.max_num_batched_tokens
    blocks_per_request = cache.max_blocks(model.max_model_len, row)
    here = parallel.memory_shares
    sharing = max(1, here) if available.kind == "cpu" else parallel.ranks_per_device
    per_rank = available.memory // sharing
    budget_bytes = int(per_rank * cache.gpu_memory_utilization)
    fixed = sizes.fixed
    if max(fixed) > budget_bytes:
        quantize = " or --quantization" * (not model.is_quantized_online)
        stored = f" ({quantized_text(config)})" if model.quantized else ""
        more = "more ranks (-tp, -pp)"
        if here > parallel.ranks_per_node and available.kind == "cpu":
            more = "fewer replicas on this host (--data-parallel-size, --data-parallel-size-local)"
        replayed = "op replay" if available.kind == "cpu" else "CUDA graphs"
        raise ConfigError(
            f"Not enough memory: needs {format_bytes(max(fixed))} per rank (weights "
            f"{format_bytes(max(sizes.weights))}{stored} + workspace {format_bytes(sizes.workspace)}"
            f"{f' + {replayed} {format_bytes(sizes.graphs)}' * (sizes.graphs > 0)}"
            f"{f' + images {format_bytes(sizes.media[0])}' * (sizes.media[0] > 0)}"
            f"{f' + adapters {format_bytes(sizes.adapters)}' * (sizes.adapters > 0)}"
            f"{f' + KV store {format_bytes(sizes.kv_store)}' * (sizes.kv_store > 0)}"
            f"{f' + KV in {cache.recent.dtype} {format_bytes(max(sizes.recent))}' if cache.recent else ''}), "
            f"{format_bytes(budget_bytes)} "
            f"available ({cache.gpu_memory_utilization:g} of {format_bytes(available.memory)} free"
            f"{f' over {sharing} ranks' * (sharing > 1)}); use {more}, a smaller --dtype{quantize}, or a lower "
            f"--max-num-batched-tokens{' or --encoder-cache-size' * (sizes.media[0] > 0)}"
            f"{' or --max-loras, --max-lora-rank or --lora-memory' * (sizes.adapters > 0)}"
            f"{' or --kv-offloading-size' * (sizes.kv_store > 0)}{' or --max-num-seqs' * bool(sizes.recent)}"
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
        stages = zip(fixed, sizes.kv_block, strict=True)
        blocks = min((budget_bytes - used) // block for used, block in stages if block)
        if available.kind == "cpu":
            capped = _CPU_KV_CACHE_BYTES // sharing // max(sizes.kv_block)
            blocks = min(blocks, max(capped, blocks_per_request))
    return limit_blocks(config, blocks, max(sizes.kv_block))


def limit_blocks(config: EngineConfig, blocks: int, block_bytes: int, where: str = "") -> int:
    """Limit `blocks` to the number that all requests at full length can use, unless --kv-cache-memory-bytes is given.

    Raises `ConfigError` if they are too few for one request, of the least length if it may be reduced; `where` is added
    to its text.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    row, requested = scheduler.max_num_batched_tokens, cache.kv_cache_memory_bytes
    least_len = model.min_model_len or model.max_model_len
    least = cache.max_blocks(least_len, row)
    if blocks < least:
        max_len = cache.max_length(blocks, row, least_len)
        chunked = cache.max_blocks(least_len, 1) < least
        raise ConfigError(
            f"a KV cache of {format_bytes(max(0, blocks) * block_bytes if requested is None else requested)} per rank "
            f"holds {max_len:,} tokens, less than one request of {least_len:,} "
            f"({format_bytes(least * block_bytes)}){where}; use --max-model-len {max(1, max_len)} or "
            f"less, {f'--max-num-batched-tokens below {row}, ' * chunked}more memory (--kv-cache-memory-bytes, "
            "--gpu-memory-utilization), or more ranks (-tp, -pp)"
        )
    if requested is None:
        blocks = min(blocks, scheduler.max_num_seqs * cache.max_blocks(model.position_len, row))
    return blocks // cache.blocks_per_page * cache.blocks_per_page


def length_text(model: ModelConfig) -> str:
    """Return a log message about a length that was reduced."""
    return (
        f"requests have at most {model.max_model_len:,} tokens instead of the model's {model.position_len:,}: the KV "
        "cache holds no more. --max-model-len sets the length; more memory (--gpu-memory-utilization, --kv-cache-dtype "
        "fp8) or more ranks (-tp, -pp) leave room for longer ones"
    )


def tokens_in_cache(config: EngineConfig) -> int:
    """Capacity of the KV cache, in tokens of requests at full length.

    Tokens outside a request's windows take no blocks. One prompt chunk per step takes additional blocks.
    """
    max_len, cache, row = config.model.max_model_len, config.cache, config.scheduler.max_num_batched_tokens
    one = cache.max_blocks(max_len, 1)
    chunk = cache.max_blocks(max_len, row) - one
    return (cache.num_blocks - chunk) * -(-max_len // cache.block_size) * cache.block_size // one


def quantized_text(config: EngineConfig) -> str:
    """Say how the weights of a quantized checkpoint are kept and multiplied, and in which layers, if they differ. If
    only a tower keeps its weights, the text is about these."""
    assert config.model.quantized is not None
    name, is_kept = config.model.quantized.name, config.model.keeps_quantized()
    sizes, layers = Counter[str](), defaultdict[tuple[str, str], set[int | None]](set)
    for number, each, form in matrix_forms(config):
        if form is None and not is_kept:
            continue
        text = _form_text(form, each.columns, _dtype(config.model, number, each), config.parallel.device)
        path = each.module.rpartition(".")[0] if number is not None else each.module
        part = path.rpartition(".")[2].replace("_", " ")
        if each.module.startswith("tower."):
            part = "tower's " + each.module.split(".")[1].replace("_", " ")
        sizes[text] += each.elements
        layers[text, part].add(number)
        layers["", part].add(number)

    def parts(text: str) -> str:
        found = {part: own for (of, part), own in layers.items() if of == text}
        whole = (part if own == layers["", part] else f"{part} of {len(own)} layers" for part, own in found.items())
        return f" ({', '.join(whole)})" if len(sizes) > 1 else ""

    texts = "; ".join(text + parts(text) for text, _ in sizes.most_common())
    if is_kept:
        return f"{name}: {texts}"
    return f"requantized from {name}" + f" (not the tower: {texts})" * bool(texts)


def _form_text(form: Form | None, columns: int, dtype: str, device: str) -> str:
    if form is None:
        return f"{dtype} weights"
    is_multiplied = form.rounds_inputs(columns, device)
    how = f"multiplied as {form.values}" if is_multiplied else "widened in registers"
    by = ", by inputs rounded to int8" if form.has_rounding or (is_multiplied and form.values == "int4") else ""
    return f"{form.values} weights, {how}{by}"


def format_bytes(count: int) -> str:
    """Format a number of bytes: 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
