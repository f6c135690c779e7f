"""`EngineOptions` → `ParallelConfig`: how many ranks there are, of how many replicas, and which host has which."""

from __future__ import annotations

import math
from typing import Literal

from quire.engine.architecture import Architecture, Experts
from quire.engine.config import EngineOptions, ExpertParallelConfig, ParallelConfig
from quire.engine.devices import Devices
from quire.engine.errors import ConfigError


def ranks_here(options: EngineOptions) -> int:
    """Ranks of this host, of all its replicas; raises `ConfigError` for what cannot be shared out."""
    ranks, nodes = options.tensor_parallel_size * options.pipeline_parallel_size, options.nnodes
    if ranks % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: {ranks} ranks (--tensor-parallel-size {options.tensor_parallel_size} × "
            f"--pipeline-parallel-size {options.pipeline_parallel_size}) cannot be shared out evenly"
        )
    if not 0 <= options.node_rank < nodes:
        raise ConfigError(f"--node-rank {options.node_rank}: with --nnodes {nodes} it is from 0 to {nodes - 1}")
    if nodes > 1 and options.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {options.data_parallel_size}: a replica over several hosts is "
            "started by itself, as a server of its own; put a balancer before them"
        )
    return ranks // nodes * len(_local_replicas(options))


def resolve(options: EngineOptions, arch: Architecture, found: Devices) -> ParallelConfig:
    """The grid; raises `ConfigError`."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    executor = choose_executor(options)
    here = ranks_here(options)
    if found.kind == "cuda" and executor != "ray" and here > found.count:
        raise ConfigError(
            f"--tensor-parallel-size {options.tensor_parallel_size} × --pipeline-parallel-size "
            f"{options.pipeline_parallel_size} needs {here} GPUs on this host; it shows {found.count}"
        )
    replicas = _local_replicas(options)
    return ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        stages=_cut_layers(arch.num_layers, options),
        executor=executor,
        device=found.kind,
        nodes=options.nnodes,
        node=options.node_rank,
        master=(options.master_addr, options.master_port),
        timeout=options.distributed_timeout_seconds,
        replicas=options.data_parallel_size,
        replica=replicas.start,
        local_replicas=replicas,
        experts=_experts(options, arch, options.data_parallel_size * world_size // options.pipeline_parallel_size),
    )


def choose_executor(options: EngineOptions) -> Literal["uni", "mp", "ray"]:
    """Who runs the ranks: this process where there is only one, and nobody to step together with."""
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    match options.distributed_executor_backend:
        case "ray":
            raise ConfigError("--distributed-executor-backend ray is not served yet; mp runs the ranks on this host")
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


def _experts(options: EngineOptions, arch: Architecture, ranks: int) -> ExpertParallelConfig | None:
    """`ranks` are those that a layer's experts are spread over."""
    if not options.enable_expert_parallel:
        for name in ("enable_eplb", "enable_dbo"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} is about --enable-expert-parallel, which is not given")
        return None
    counts = {layer.feed_forward.num_experts for layer in arch.layers if isinstance(layer.feed_forward, Experts)}
    if not counts:
        raise ConfigError(f"--enable-expert-parallel: {arch.name} has no experts; leave it out")
    if options.num_redundant_experts and not options.enable_eplb:
        raise ConfigError("--num-redundant-experts needs --enable-eplb, which decides what is doubled")
    for count in counts:
        if (count + options.num_redundant_experts) % ranks:
            least = math.ceil(count / ranks) * ranks - count
            raise ConfigError(
                f"--enable-expert-parallel: {count} experts"
                + f" and {options.num_redundant_experts} copies" * bool(options.num_redundant_experts)
                + f" cannot be spread evenly over {ranks} ranks (--data-parallel-size × --tensor-parallel-size); "
                f"--enable-eplb --num-redundant-experts {least} would make them even"
            )
    return ExpertParallelConfig(
        placement=options.expert_placement_strategy,
        all2all=options.all2all_backend,
        is_balanced=options.enable_eplb,
        redundant=options.num_redundant_experts,
        step_interval=options.eplb_step_interval,
        split_tokens=options.dbo_token_threshold if options.enable_dbo else None,
    )


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
