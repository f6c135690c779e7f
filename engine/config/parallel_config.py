"""Resolves the parallel layout (`EngineOptions` → `ParallelConfig`): the ranks, the replicas, and their hosts."""

from __future__ import annotations

import logging
import math
import secrets
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from quire.engine.architecture.attention_spec import MLASpec
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import ModelSpec, TransformersModelSpec
from quire.engine.config import topology
from quire.engine.config.devices import SHARE, Devices
from quire.engine.config.engine_config import ExpertParallelConfig, ParallelConfig, RayPlacement
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_REPLICAS = 1024
"""Maximum number of replicas."""


def for_prefill(options: EngineOptions) -> EngineOptions:
    """Return the options of prefill replicas, as those of a server that has no others.

    With a layout of their own, their ranks do not divide the tokens of blocks: --decode-context-parallel-size may not
    be possible for them. So how many do follows from `layout`.
    """
    tp = options.prefill_tensor_parallel_size or options.tensor_parallel_size
    has_own = tp != options.tensor_parallel_size or options.prefill_context_parallel_size > 1
    return replace(
        options,
        tensor_parallel_size=tp,
        decode_context_parallel_size=1 if has_own else options.decode_context_parallel_size,
        pipeline_parallel_size=options.prefill_pipeline_parallel_size or options.pipeline_parallel_size,
        prefill_tensor_parallel_size=None,
        prefill_pipeline_parallel_size=None,
    )


def for_decode(options: EngineOptions) -> EngineOptions:
    """Return the options of the other replicas: --prefill-context-parallel-size is for prefill replicas, if there are
    some."""
    return replace(options, prefill_context_parallel_size=1) if options.prefill_replicas else options


def of_replica(options: EngineOptions, replica: int) -> EngineOptions:
    """Return the options with the layout of a replica that the server starts with."""
    return for_prefill(options) if replica < (options.prefill_replicas or 0) else for_decode(options)


def without_others(options: EngineOptions) -> EngineOptions:
    """Return the options of one of several replicas with the same layout, as those of a server that has no others."""
    return replace(
        options,
        data_parallel_size=1,
        prefill_replicas=None,
        decode_replicas=None,
        prefill_tensor_parallel_size=None,
        prefill_pipeline_parallel_size=None,
    )


def local_layouts(options: EngineOptions) -> list[EngineOptions]:
    """Return the options of each layout of this host's replicas: one, or two if those for prompts, the last, have their
    own."""
    owns = [of_replica(options, replica) for replica in reversed(local_replicas(options))] or [for_decode(options)]
    return list({layout(own): own for own in owns}.values())


def layout(options: EngineOptions) -> tuple[int, int, int]:
    """The ranks of each layer, how many times a stage has them, and the stages."""
    return options.tensor_parallel_size, options.prefill_context_parallel_size, options.pipeline_parallel_size


def stage_ranks(options: EngineOptions) -> int:
    """The ranks of each stage."""
    return options.tensor_parallel_size * options.prefill_context_parallel_size


def _product_text(options: EngineOptions) -> str:
    """The flags whose values are the factors of `layout`."""
    return " × ".join(
        f"--{name}-parallel-size {size}"
        for name, size in zip(("tensor", "prefill-context", "pipeline"), layout(options), strict=True)
        if size > 1 or name != "prefill-context"
    )


def check_roles(options: EngineOptions) -> None:
    """Raise `ConfigError` if replicas cannot have the roles, or the layouts, that the options give them."""
    prefill, decode = options.prefill_replicas, options.decode_replicas
    if prefill is None and decode is None:
        for name in ("prefill_tensor_parallel_size", "prefill_pipeline_parallel_size"):
            if (value := getattr(options, name)) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} {value} needs --prefill-replicas and --decode-replicas")
        return
    if prefill is None or decode is None:
        given, missing = ("--decode-replicas", "--prefill-replicas")[:: 1 if prefill is None else -1]
        raise ConfigError(f"{given} {prefill or decode} needs {missing}, which the other replicas are for; give both")
    if layout(own := for_prefill(options)) == layout(for_decode(options)):
        return
    stages, own_stages = options.pipeline_parallel_size, own.pipeline_parallel_size
    if options.enable_expert_parallel:
        raise ConfigError(
            "--enable-expert-parallel: replicas that share experts have the same layout; omit "
            "--prefill-tensor-parallel-size and --prefill-pipeline-parallel-size"
        )
    if options.pipeline_layer_partition is not None and stages != own_stages:
        raise ConfigError(
            f"--pipeline-layer-partition {options.pipeline_layer_partition} is for all replicas, which have {stages} "
            f"and {own_stages} stages (--prefill-pipeline-parallel-size); omit one of them"
        )


def local_ranks(options: EngineOptions) -> tuple[int, ...]:
    """Number of ranks on this host, of each of its replicas. Raises `ConfigError` for layouts that are not possible."""
    if not 0 <= options.node_rank < options.nnodes:
        raise ConfigError(
            f"--node-rank {options.node_rank} is out of range: with --nnodes {options.nnodes} it must be from 0 to "
            f"{options.nnodes - 1}"
        )
    nodes = nodes_per_replica(options)
    for own in (for_decode(options), for_prefill(options)):
        if (ranks := math.prod(layout(own))) % nodes:
            whose = f"the {nodes} hosts of a replica" if options.data_parallel_size > 1 else "hosts"
            raise ConfigError(
                f"--nnodes {options.nnodes}: {ranks} ranks ({_product_text(own)}) cannot be divided evenly among "
                f"{whose}"
            )
    if options.nnodes > 1:
        for name in ("data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} with --nnodes {options.nnodes}: --node-rank says which replicas a "
                    "host has, and --master-addr where it joins; omit it"
                )
    if options.data_parallel_start_rank is not None and options.data_parallel_size_local == 0:
        raise ConfigError(
            "--data-parallel-size-local 0 (the host runs only the API) cannot be combined with "
            "--data-parallel-start-rank; omit one of them"
        )
    if nodes > 1 and options.data_parallel_size > 1 and options.enable_expert_parallel:
        raise ConfigError(
            f"--enable-expert-parallel: replicas that share experts cannot span hosts, and each of the "
            f"{options.data_parallel_size} (--data-parallel-size) has {nodes} of the {options.nnodes} (--nnodes); omit "
            f"it, or use a --data-parallel-size that is a multiple of {options.nnodes}"
        )
    return tuple(math.prod(layout(of_replica(options, replica))) // nodes for replica in local_replicas(options))


def nodes_per_replica(options: EngineOptions) -> int:
    """Return the number of hosts of each replica; 1 if hosts have whole replicas. Raises `ConfigError`."""
    nodes, replicas = options.nnodes, max(1, options.data_parallel_size)
    if nodes % replicas and replicas % nodes:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {replicas}: replicas have whole hosts, or hosts whole "
            "replicas; one number must be a multiple of the other"
        )
    return max(1, nodes // replicas)


def is_first_of_replica(options: EngineOptions) -> bool:
    """Whether this host has the engine core of a replica."""
    return options.node_rank % nodes_per_replica(options) == 0


def local_group_sizes(options: EngineOptions, placement: RayPlacement | None = None) -> tuple[int, ...]:
    """Sizes of this host's tensor-parallel groups, in rank order. Raises like `local_ranks`."""
    if placement is not None:
        return group_sizes(placement.ranks_of(options.node_rank), stage_ranks(options))
    place, sizes = options.node_rank % nodes_per_replica(options), list[int]()
    for replica, ranks in zip(local_replicas(options), local_ranks(options), strict=True):
        here = range(place * ranks, (place + 1) * ranks)
        sizes += group_sizes(here, stage_ranks(of_replica(options, replica)))
    return tuple(sizes)


def group_sizes(ranks: range, stage_ranks: int) -> tuple[int, ...]:
    """Sizes of the groups of `ranks`, ranks of a replica on one host, that are in the same stage."""
    return tuple(Counter(rank // stage_ranks for rank in ranks).values())


def resolve(
    options: EngineOptions,
    arch: ModelSpec,
    available: Devices,
    placements: tuple[RayPlacement, ...] = (),
    server: EngineOptions | None = None,
) -> ParallelConfig:
    """Return the layout. `placements` say where Ray places the ranks of each replica, if it does; `server` are the
    options of all replicas, if these are those of some (`of_replica`).

    Raises `ConfigError`.
    """
    world_size, server = math.prod(layout(options)), server or options
    executor = "ray" if placements else choose_executor(options)
    ranks = () if placements else local_ranks(server)
    replicas = local_replicas(options)
    if available.kind == "cuda" and sum(ranks) > available.count:
        _check_sharing(options, sum(ranks), replicas, available)
    parallel = ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        prefill_context_parallel_size=options.prefill_context_parallel_size,
        stages=partition_layers(arch, options),
        executor=executor,
        device=available.kind,
        nnodes=options.nnodes,
        nodes=len(placements[0].nodes) + 1 if placements else nodes_per_replica(options),
        first_node=0 if placements else options.node_rank - options.node_rank % nodes_per_replica(options),
        node=options.node_rank,
        master=(options.master_addr, options.master_port),
        devices=available.order,
        ray=placements,
        timeout=options.distributed_timeout_seconds,
        watchdog_seconds=options.watchdog_seconds,
        # Ray's nodes get it with their options.
        cluster_token=options.cluster_token or (secrets.token_hex(32) if placements else ""),
        cluster_timeout=options.cluster_timeout_seconds,
        trust_weights=options.trust_weights,
        custom_all_reduce=not options.disable_custom_all_reduce,
        replicas=options.data_parallel_size,
        replica=replicas.start,
        local_replicas=replicas,
        coordinator=(options.master_addr, options.master_port)
        if options.nnodes > 1
        else (options.data_parallel_address or "127.0.0.1", options.data_parallel_rpc_port),
        accepts_hosts=accepts_hosts(options) and not placements,
        external_lb=options.data_parallel_start_rank is not None,
        experts=_experts(options, arch, options.data_parallel_size * world_size // options.pipeline_parallel_size),
        prefill_replicas=options.prefill_replicas or 0,
        local_ranks=ranks if len(set(ranks)) > 1 else (),
    )
    alike = [each for each in replicas if layout(of_replica(server, each)) == layout(options)]
    return replace(parallel, links=_links(parallel, alike, available))


def _check_sharing(options: EngineOptions, ranks: int, replicas: range, available: Devices) -> None:
    """Raise `ConfigError` unless this many ranks, more than there are GPUs, are allowed to share them."""
    of_replicas = f" × {len(replicas)} replicas (--data-parallel-size)" * (len(replicas) > 1)
    needs = f"{_product_text(options)}{of_replicas} needs {ranks} GPUs on this host, but {available.count} are visible"
    if not available.order:
        raise ConfigError(f"{needs} (to test a layout, {SHARE}=1 lets ranks share a GPU; this is slow)")
    if options.nnodes > 1 or len(replicas) < options.data_parallel_size:
        raise ConfigError(f"{needs}; {SHARE} is supported only on a single host; omit the other hosts")
    if options.data_parallel_size > 1 and not options.enable_expert_parallel:
        raise ConfigError(
            f"{needs}; {SHARE} is not supported with --data-parallel-size {options.data_parallel_size} without "
            "--enable-expert-parallel: independent replicas cannot agree on their shares of a GPU's memory"
        )


def _links(parallel: ParallelConfig, replicas: list[int], available: Devices) -> topology.SlowestLinks:
    """Return the slowest links that tensor and pipeline parallelism use in these replicas of this host."""
    network = topology.fast_network() if parallel.nodes > 1 else None
    if not available.order or parallel.ranks_per_device > 1:
        return topology.SlowestLinks(network=network)
    ranks = parallel.ranks_of(parallel.node)
    groups = group_sizes(ranks, parallel.stage_ranks)
    order = [parallel.of_replica(replica).device_of(rank) for replica in replicas for rank in ranks]
    slowest = topology.slowest_links(available.links, order, groups * len(replicas), len(groups))
    return replace(slowest, network=network)


def choose_executor(options: EngineOptions) -> Literal["uni", "mp", "ray"]:
    """Return how the ranks of a replica are started; a single rank runs in the engine core by default."""
    world_size = math.prod(layout(options))
    match options.distributed_executor_backend:
        case "uni" if world_size > 1:
            raise ConfigError(f"--distributed-executor-backend uni supports one rank, not {world_size}; use mp")
        case "auto":
            return "uni" if world_size == 1 else "mp"
        case backend:
            return backend


def local_replicas(options: EngineOptions) -> range:
    """Return the numbers of this host's replicas. Raises `ConfigError`."""
    replicas, start, count = (
        options.data_parallel_size,
        options.data_parallel_start_rank,
        options.data_parallel_size_local,
    )
    if replicas > MAX_REPLICAS:
        raise ConfigError(f"--data-parallel-size {replicas}: at most {MAX_REPLICAS} replicas are supported")
    if options.nnodes > 1:
        start, count = options.node_rank * replicas // options.nnodes, max(1, replicas // options.nnodes)
    if count is None:
        count = replicas if start is None else 1
    local = range(start or 0, (start or 0) + count)
    if not 0 <= local.start <= local.stop <= replicas:
        raise ConfigError(
            f"--data-parallel-start-rank {local.start} with --data-parallel-size-local {count}: there are "
            f"{replicas} replicas (--data-parallel-size), numbered from 0"
        )
    return local


def accepts_hosts(options: EngineOptions) -> bool:
    """Whether hosts can join a server that has all its replicas on this host."""
    is_independent = options.data_parallel_start_rank is None and not options.enable_expert_parallel
    return options.data_parallel_address is not None and is_independent and options.nnodes == 1


def for_headless(options: EngineOptions) -> EngineOptions:
    """Return the options of a host that joins an API with replicas of its own.

    It need not know how many there are in all, unless they share experts.
    """
    if options.enable_expert_parallel or options.data_parallel_start_rank is None:
        return options
    count = 1 if options.data_parallel_size_local is None else options.data_parallel_size_local
    size = max(options.data_parallel_size, options.data_parallel_start_rank + count)
    decode = None if options.decode_replicas is None else size - (options.prefill_replicas or 0)
    return replace(options, data_parallel_size=size, decode_replicas=decode)


def _experts(options: EngineOptions, arch: ModelSpec, ranks: int) -> ExpertParallelConfig | None:
    """Resolve expert parallelism; `ranks` is the number of ranks that a layer's experts are distributed over."""
    if not options.enable_expert_parallel:
        if options.enable_eplb:
            raise ConfigError("--enable-eplb needs --enable-expert-parallel")
        return None
    if isinstance(arch, TransformersModelSpec):
        raise ConfigError(
            f"--enable-expert-parallel is not supported with transformers' implementation (--model-impl) of "
            f"{arch.name}; omit it"
        )
    counts = {layer.feed_forward.num_experts for layer in arch.layers if isinstance(layer.feed_forward, MoESpec)}
    if not counts:
        raise ConfigError(f"--enable-expert-parallel: {arch.name} has no experts; omit the flag")
    if options.enable_eplb and any(
        isinstance(layer.feed_forward, MoESpec) and layer.feed_forward.media_size for layer in arch.layers
    ):
        raise ConfigError(
            f"--enable-eplb is not supported for {arch.name}, whose experts for images have another size than others; "
            "omit it, or use --language-model-only"
        )
    if options.num_redundant_experts and not options.enable_eplb:
        raise ConfigError("--num-redundant-experts needs --enable-eplb, which chooses the experts to copy")
    for count in counts:
        if options.num_redundant_experts > count * (ranks - 1):
            raise ConfigError(
                f"--num-redundant-experts {options.num_redundant_experts}: {count} experts over {ranks} "
                f"rank{'s' * (ranks > 1)} (--data-parallel-size × --tensor-parallel-size) have at most "
                f"{count * (ranks - 1)} copies: one of each expert per rank"
            )
        if (count + options.num_redundant_experts) % ranks:
            missing = math.ceil(count / ranks) * ranks - count
            raise ConfigError(
                f"--enable-expert-parallel: {count} experts"
                + f" and {options.num_redundant_experts} copies" * bool(options.num_redundant_experts)
                + f" cannot be distributed evenly over {ranks} ranks (--data-parallel-size × --tensor-parallel-size); "
                f"use --enable-eplb --num-redundant-experts {missing}, or another number of ranks"
            )
    return ExpertParallelConfig(
        placement=options.expert_placement_strategy,
        all2all_backend=options.all2all_backend,
        enable_eplb=options.enable_eplb,
        num_redundant_experts=options.num_redundant_experts,
        step_interval=options.eplb_step_interval,
    )


def rank_spec(arch: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """Return the architecture with the sizes of one rank: with expert parallelism, its experts only."""
    if parallel.experts is None:
        return arch
    return arch.with_expert_parallelism(parallel.expert_ranks, parallel.experts.num_redundant_experts)


def partition_layers(arch: ModelSpec, options: EngineOptions) -> tuple[range, ...]:
    """Return the layers of each stage. By default the first stages get the remainder.

    A layer that uses an earlier layer's selection, or its keys and values, is on the same stage as that layer.
    """
    stages, text, num_layers = options.pipeline_parallel_size, options.pipeline_layer_partition, arch.num_layers
    places = stage_starts(arch)
    if text is None:
        if stages > num_layers:
            raise ConfigError(f"--pipeline-parallel-size {stages} is more than the model's {num_layers} layers")
        counts = [num_layers // stages + (s < num_layers % stages) for s in range(stages)]
    else:
        try:
            counts = [int(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--pipeline-layer-partition {text}: expected numbers, as in 3,2,1") from None
        if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
            raise ConfigError(
                f"--pipeline-layer-partition {text}: expected {stages} positive numbers with the sum {num_layers} "
                f"(--pipeline-parallel-size {stages}, the model has {num_layers} layers)"
            )
    starts = [sum(counts[:s]) for s in range(stages)]
    if not set(starts[1:]) <= set(places):
        if text is not None or stages - 1 > len(places):
            raise ConfigError(
                f"--pipeline-{'parallel-size' if text is None else 'layer-partition'} {text or stages}: a stage cannot "
                "start between a layer and one that shares its selected tokens (indexer_types) or its keys and values "
                f"(num_kv_shared_layers); stages can start with the layers {', '.join(map(str, [0, *places]))}"
            )
        for stage in range(1, stages):  # the nearest place that leaves one for each stage after it
            first = bisect_right(places, starts[stage - 1])
            left = places[first : len(places) - (stages - 1 - stage)]
            starts[stage] = min(left, key=lambda place: abs(place - starts[stage]))
        sizes = [end - start for start, end in pairwise([*starts, num_layers])]
        if max(sizes) > max(counts):
            logger.warning(
                "--pipeline-parallel-size %s: the stages have %s layers, because a stage cannot start between a layer "
                "and one that shares its selected tokens or its keys and values; steps take the time of the largest",
                stages,
                ", ".join(map(str, sizes)),
            )
    return tuple(range(start, end) for start, end in pairwise([*starts, num_layers]))


def stage_starts(arch: ModelSpec) -> list[int]:
    """The layers that a stage after the first can start with."""
    sources = [_source(arch, number) for number in range(arch.num_layers)]
    return [number for number in range(1, arch.num_layers) if min(sources[number:]) >= number]


def _source(arch: ModelSpec, number: int) -> int:
    """The first layer that must be in the stage of this one."""
    attention, source = arch.layers[number].attention, arch.layers[number].kv_source
    if source is None:
        return number - (isinstance(attention, MLASpec) and attention.shares_selection)
    return source
