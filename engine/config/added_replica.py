"""The configuration of a replica that is added to a running server. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from quire.engine.config import devices, kv_events_config, parallel_config, topology
from quire.engine.config.engine_config import EngineConfig, ParallelConfig
from quire.engine.config.memory_plan import MemoryPlan, format_bytes
from quire.engine.protocol.errors import ConfigError


def check_resizable(parallel: ParallelConfig) -> None:
    """Raise `ConfigError` if the number of replicas cannot change while the server runs."""
    if parallel.experts is not None:
        raise ConfigError(
            "with --enable-expert-parallel replicas share experts, and their number is fixed; restart the server with "
            "another --data-parallel-size"
        )
    if parallel.executor == "ray" or parallel.nnodes > 1:
        raise ConfigError(
            "the number of replicas on several --nnodes, or that Ray starts, is fixed; restart the server with another "
            "--data-parallel-size, or use --data-parallel-address instead of --nnodes"
        )


def added_replica(
    config: EngineConfig, replica: int, used: Collection[int], others: Sequence[int], num_loading: int = 0
) -> EngineConfig:
    """Return the configuration of replica number `replica` on this host, with the layout of `config`.

    `others` are the numbers of ranks of the other replicas here, and `used` their devices; `num_loading` of these
    replicas do not have all their memory yet.
    Raises `ConfigError` if there are no devices, or not enough memory, for it, or no ports for its KV events.
    """
    parallel = config.parallel
    if not parallel.local_replicas:
        raise ConfigError(
            "this host has no replicas (--data-parallel-size-local 0), so that none can be added to it; start another "
            "host with --headless"
        )
    if (events := config.kv_events) is not None:
        kv_events_config.check_endpoints(events.endpoint, events.replay_endpoint, replica + 1)
    available = devices.find(parallel.device, ())
    order: tuple[int, ...] = ()
    if parallel.device == "cuda":
        unused = [device for device in range(available.count) if device not in used]
        if len(unused) < parallel.world_size:
            raise ConfigError(
                f"replica {replica} needs {parallel.world_size} more GPU{'s' * (parallel.world_size > 1)}, and "
                f"{len(unused)} of the {available.count} that are visible are unused"
            )
        links = tuple(tuple(available.links[one][other] for other in unused) for one in unused)
        groups = parallel_config.group_sizes(parallel.ranks_of(parallel.node), parallel.stage_ranks)
        order = tuple(unused[place] for place in topology.assign_devices(links, groups))
    else:
        sizes = MemoryPlan.of(replace(config, kv_store=None))  # the host has its store already
        needed = sum(
            fixed + block * config.cache.num_blocks for fixed, block in zip(sizes.fixed, sizes.kv_block, strict=True)
        )
        needed *= parallel.stage_ranks
        usable = int(available.memory * config.cache.gpu_memory_utilization)
        if needed > (memory := max(0, usable - needed * num_loading)):
            raise ConfigError(
                f"Not enough memory for replica {replica}: needs {format_bytes(needed)}, "
                f"{format_bytes(memory)} available"
            )
    # The first of the replicas here, as the others have devices of their own.
    here = range(replica, replica + 1 + len(others))
    ranks = (parallel.ranks_per_node, *others)
    added = replace(
        parallel,
        replicas=max(parallel.replicas, here.stop),
        local_replicas=here,
        local_ranks=ranks if len(set(ranks)) > 1 else (),
        devices=order,
    )
    return replace(config, parallel=added)
