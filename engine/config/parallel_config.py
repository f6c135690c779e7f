"""`EngineOptions` → `ParallelConfig`: how many ranks there are, of how many replicas, and which host has which."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Literal

from quire.engine.config import topology
from quire.engine.config.devices import SHARE, Devices
from quire.engine.config.options import EngineOptions, ExpertParallelConfig, ParallelConfig, RayPlacement
from quire.engine.models.model_spec import ModelSpec, MoESpec, TransformersModelSpec
from quire.engine.protocol.errors import ConfigError


def count_local_ranks(options: EngineOptions) -> int:
    """Ranks of this host, of all its replicas; raises `ConfigError` for what cannot be shared out."""
    ranks, nodes = options.tensor_parallel_size * options.pipeline_parallel_size, options.nnodes
    if ranks % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: {ranks} ranks (--tensor-parallel-size {options.tensor_parallel_size} × "
            f"--pipeline-parallel-size {options.pipeline_parallel_size}) cannot be shared out evenly"
        )
    if not 0 <= options.node_rank < nodes:
        raise ConfigError(f"--node-rank {options.node_rank}: with --nnodes {nodes} it is from 0 to {nodes - 1}")
    if options.data_parallel_start_rank is not None and options.data_parallel_size_local == 0:
        raise ConfigError(
            "--data-parallel-size-local 0 is for the host with the API of all replicas, which has no "
            "--data-parallel-start-rank; leave one of them out"
        )
    if nodes > 1 and options.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {options.data_parallel_size}: a replica over several hosts is "
            "started by itself, as a server of its own; put a balancer before them"
        )
    return ranks // nodes * len(_local_replicas(options))


def groups_here(options: EngineOptions, placement: RayPlacement | None = None) -> tuple[int, ...]:
    """Sizes of the tensor-parallel groups of this host, in the order of ranks; raises as `count_local_ranks`."""
    tp, node = options.tensor_parallel_size, options.node_rank
    if placement is not None:
        return groups_of(placement.ranks_of(node), tp)
    replicas = len(_local_replicas(options))
    ranks = count_local_ranks(options) // max(1, replicas)
    return groups_of(range(node * ranks, (node + 1) * ranks), tp) * replicas


def groups_of(ranks: range, tp: int) -> tuple[int, ...]:
    """Sizes of the groups of a replica's ranks on one host that share layers."""
    return tuple(Counter(rank // tp for rank in ranks).values())


def resolve(
    options: EngineOptions, arch: ModelSpec, available: Devices, placement: RayPlacement | None = None
) -> ParallelConfig:
    """The grid; `placement` says where Ray has the ranks, if it runs them. Raises `ConfigError`."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    executor = "ray" if placement is not None else choose_executor(options)
    local_ranks = count_local_ranks(options) if placement is None else 0
    replicas = _local_replicas(options)
    if available.kind == "cuda" and local_ranks > available.count:
        _check_sharing(options, local_ranks, replicas, available)
    parallel = ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        stages=_cut_layers(arch.num_layers, options),
        executor=executor,
        device=available.kind,
        nodes=options.nnodes if placement is None else len(placement.nodes) + 1,
        node=options.node_rank,
        master=(options.master_addr, options.master_port),
        devices=available.order,
        ray=placement,
        timeout=options.distributed_timeout_seconds,
        custom_all_reduce=not options.disable_custom_all_reduce,
        replicas=options.data_parallel_size,
        replica=replicas.start,
        local_replicas=replicas,
        coordinator=(options.data_parallel_address, options.data_parallel_rpc_port),
        external_lb=options.data_parallel_start_rank is not None,
        experts=_experts(options, arch, options.data_parallel_size * world_size // options.pipeline_parallel_size),
    )
    return replace(parallel, links=_links(parallel, available))


def _check_sharing(options: EngineOptions, ranks: int, replicas: range, available: Devices) -> None:
    """Raise `ConfigError` unless so many ranks, more than there are GPUs, may share them, and know of each other."""
    of_replicas = f" × {len(replicas)} replicas (--data-parallel-size)" * (len(replicas) > 1)
    needs = (
        f"--tensor-parallel-size {options.tensor_parallel_size} × --pipeline-parallel-size "
        f"{options.pipeline_parallel_size}{of_replicas} needs {ranks} GPUs on this host; it shows {available.count}"
    )
    if not available.order:
        raise ConfigError(f"{needs} (to try the layout out, and not to serve, {SHARE}=1 has ranks share a GPU)")
    if options.nnodes > 1 or len(replicas) < options.data_parallel_size:
        raise ConfigError(f"{needs}; {SHARE} is for the ranks of a single host: leave the other hosts out")
    if options.data_parallel_size > 1 and not options.enable_expert_parallel:
        raise ConfigError(
            f"{needs}; {SHARE} is not for --data-parallel-size {options.data_parallel_size} without "
            "--enable-expert-parallel: such replicas could not agree on how much of a GPU's memory each has"
        )


def _links(parallel: ParallelConfig, available: Devices) -> topology.CrossedLinks:
    network = topology.fast_network() if parallel.nodes > 1 else None
    if not available.order or parallel.ranks_per_device > 1:
        return topology.CrossedLinks(network=network)
    groups = groups_of(parallel.ranks_of(parallel.node), parallel.tensor_parallel_size)
    all_groups = groups * len(parallel.local_replicas)
    return replace(topology.crossed(available.links, available.order, all_groups, len(groups)), network=network)


def plan_lines(parallel: ParallelConfig, arch: ModelSpec) -> list[str]:
    """The grid as `serve` prints it: hosts, what each group crosses, replicas and experts; nothing of a single rank."""
    return [
        *_hosts_text(parallel),
        *_sharing_text(parallel),
        *_links_text(parallel),
        *_replicas_text(parallel),
        *_experts_text(parallel, arch),
    ]


def _hosts_text(parallel: ParallelConfig) -> list[str]:
    if parallel.nodes == 1:
        return []
    parts = [
        f"{_numbers('rank', ranks)} on host {node}{_host_suffix(parallel, node)}"
        for node in range(parallel.nodes)
        if (ranks := parallel.ranks_of(node))
    ]
    return [f"  {len(parts)} hosts: {', '.join(parts)}"]


def _host_suffix(parallel: ParallelConfig, node: int) -> str:
    if parallel.ray is not None:
        return f" ({parallel.ray.nodes[node - 1][1]})"  # node 0 is the core's
    return " (this one)" * (node == parallel.node)


def _sharing_text(parallel: ParallelConfig) -> list[str]:
    if parallel.ranks_per_device == 1:
        return []
    ranks, gpus = len(parallel.devices), len(set(parallel.devices))
    which = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return [f"  {ranks} ranks share {which} ({SHARE}), by gloo: to try a layout out, and slow"]


def _links_text(parallel: ParallelConfig) -> list[str]:
    """Which links tensor and pipeline parallelism cross, and a warning where that is too slow."""
    tp, links, is_cpu = parallel.tensor_parallel_size, parallel.links, parallel.device == "cpu"
    shared = " through its memory" * (parallel.ranks_per_device > 1)
    network = f"over {links.network}" if links.network else "over the network"
    hosts = [ranks for node in range(parallel.nodes) if (ranks := parallel.ranks_of(node))]
    is_cut = any(ranks.start % tp or ranks.stop % tp for ranks in hosts)
    parts, warnings = [], []
    if tp > 1:
        inside = " over shared memory" if is_cpu else shared or _over_link(links.tensor)
        parts.append(f"tensor parallel {f'across hosts {network}' if is_cut else f'inside a host{inside}'}")
        if is_cut and not links.network:
            suggested = max(size for size in range(1, tp) if not any(n % size for n in (tp, *map(len, hosts))))
            warnings.append(
                f"warning: tensor parallel crosses hosts, in every layer, and no fast network (InfiniBand, RoCE) is "
                f"active here: use --tensor-parallel-size {suggested} --pipeline-parallel-size "
                f"{parallel.world_size // suggested}"
            )
        if not is_cut and links.tensor is topology.LinkType.SOCKETS:
            warnings.append(
                "warning: tensor parallel crosses the link between processors, in every layer: a smaller "
                "--tensor-parallel-size with more --pipeline-parallel-size may be faster"
            )
    if parallel.pipeline_parallel_size > 1:
        inside = " over loopback" if is_cpu else shared or _over_link(links.pipeline)
        parts.append(f"pipeline {f'across hosts {network}' if len(hosts) > 1 else f'inside a host{inside}'}")
    return [f"  {'; '.join(parts)}"] * bool(parts) + warnings


def _over_link(link: topology.LinkType | None) -> str:
    return "" if link is None else f" over {link.text}"


def _replicas_text(parallel: ParallelConfig) -> list[str]:
    if parallel.replicas == 1:
        return []
    local_ranks, step = parallel.local_replicas, "step together" if parallel.is_coupled else "run free of each other"
    on_host = _numbers("replica", local_ranks) if len(local_ranks) else "none"
    return [f"  {parallel.replicas} replicas, which {step}: {on_host} on this host, each with the ranks below"]


def _experts_text(parallel: ParallelConfig, arch: ModelSpec) -> list[str]:
    """How experts lie on the ranks."""
    if (experts := parallel.experts) is None:
        return []
    ranks = parallel.replicas * parallel.tensor_parallel_size
    counts = sorted(
        {layer.feed_forward.num_experts for layer in arch.layers if isinstance(layer.feed_forward, MoESpec)}
    )
    copies = f" and {experts.redundant} copies" * bool(experts.redundant)
    which = f" ({parallel.replicas} replicas × {parallel.tensor_parallel_size})" * parallel.is_coupled
    text = [
        f"{' or '.join(map(str, counts))} experts a layer{copies} over {ranks} rank{'s' * (ranks > 1)}{which}, "
        f"{' or '.join(str((count + experts.redundant) // ranks) for count in counts)} each, {experts.placement}"
    ]
    if parallel.is_coupled:
        across = " across hosts" * (len(parallel.local_replicas) < parallel.replicas)
        text.append(f"tokens reach them by {experts.all2all}{across}")
    if experts.is_balanced:
        text.append(f"moved every {experts.step_interval:,} steps")
    if experts.split_tokens is not None:
        text.append(f"steps of {experts.split_tokens} tokens or more are cut in two")
    return [f"  {'; '.join(text)}"]


def _numbers(name: str, numbers: range) -> str:
    """rank 0, ranks 0-3"""
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]}-{numbers[-1]}"


def choose_executor(options: EngineOptions) -> Literal["uni", "mp", "ray"]:
    """Who runs the ranks of a replica: its engine core where there is only one."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    match options.distributed_executor_backend:
        case "uni" if world_size > 1:
            raise ConfigError(f"--distributed-executor-backend uni runs one rank, not {world_size}; use mp")
        case "auto":
            return "uni" if world_size == 1 else "mp"
        case backend:
            return backend


def _local_replicas(options: EngineOptions) -> range:
    replicas, start, count = (
        options.data_parallel_size,
        options.data_parallel_start_rank,
        options.data_parallel_size_local,
    )
    if count is None:
        count = replicas if start is None else 1
    local = range(start or 0, (start or 0) + count)
    if not 0 <= local.start <= local.stop <= replicas:
        raise ConfigError(
            f"--data-parallel-start-rank {local.start} with --data-parallel-size-local {count}: there are "
            f"{replicas} replicas (--data-parallel-size), numbered from 0"
        )
    return local


def _experts(options: EngineOptions, arch: ModelSpec, ranks: int) -> ExpertParallelConfig | None:
    """`ranks` are those that a layer's experts are spread over."""
    if not options.enable_expert_parallel:
        for name in ("enable_eplb", "enable_dbo"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} is about --enable-expert-parallel, which is not given")
        return None
    if isinstance(arch, TransformersModelSpec):
        raise ConfigError(
            f"--enable-expert-parallel: {arch.name} is run by transformers' implementation (--model-impl), which keeps "
            "its experts to itself; leave it out"
        )
    counts = {layer.feed_forward.num_experts for layer in arch.layers if isinstance(layer.feed_forward, MoESpec)}
    if not counts:
        raise ConfigError(f"--enable-expert-parallel: {arch.name} has no experts; leave it out")
    if options.enable_dbo and options.data_parallel_size == 1:
        raise ConfigError(
            "--enable-dbo hides the exchange of tokens between replicas, and there is one (--data-parallel-size); "
            "leave it out"
        )
    if options.num_redundant_experts and not options.enable_eplb:
        raise ConfigError("--num-redundant-experts needs --enable-eplb, which decides what is doubled")
    for count in counts:
        if options.num_redundant_experts > count * (ranks - 1):
            raise ConfigError(
                f"--num-redundant-experts {options.num_redundant_experts}: {count} experts, each once on each of "
                f"{ranks} rank{'s' * (ranks > 1)} (--data-parallel-size × --tensor-parallel-size), have at most "
                f"{count * (ranks - 1)} copies"
            )
        if (count + options.num_redundant_experts) % ranks:
            missing = math.ceil(count / ranks) * ranks - count
            raise ConfigError(
                f"--enable-expert-parallel: {count} experts"
                + f" and {options.num_redundant_experts} copies" * bool(options.num_redundant_experts)
                + f" cannot be spread evenly over {ranks} ranks (--data-parallel-size × --tensor-parallel-size); "
                f"--enable-eplb --num-redundant-experts {missing} would make them even"
            )
    return ExpertParallelConfig(
        placement=options.expert_placement_strategy,
        all2all=options.all2all_backend,
        is_balanced=options.enable_eplb,
        redundant=options.num_redundant_experts,
        step_interval=options.eplb_step_interval,
        split_tokens=options.dbo_token_threshold if options.enable_dbo else None,
    )


def on_a_rank(arch: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """The architecture whose sizes, for the ranks of a stage, are those of a rank of this grid."""
    if parallel.experts is None:
        return arch
    return arch.spread(parallel.expert_ranks, parallel.experts.redundant)


def _cut_layers(num_layers: int, options: EngineOptions) -> tuple[range, ...]:
    """Layer ranges of the stages; without a partition the first stages take the remainder."""
    stages, text = options.pipeline_parallel_size, options.pipeline_layer_partition
    if text is None:
        if stages > num_layers:
            raise ConfigError(f"--pipeline-parallel-size {stages} is more than the model's {num_layers} layers")
        counts = [num_layers // stages + (s < num_layers % stages) for s in range(stages)]
    else:
        try:
            counts = [int(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--pipeline-layer-partition {text}: numbers are expected, as in 3,2,1") from None
        if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
            raise ConfigError(
                f"--pipeline-layer-partition {text}: {stages} positive numbers with the sum {num_layers} are "
                f"expected (--pipeline-parallel-size {stages}, the model has {num_layers} layers)"
            )
    starts = [sum(counts[:s]) for s in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
