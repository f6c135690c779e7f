"""Finds places for the ranks in a Ray cluster, or reports in one line, within seconds, why there are none.

Ray itself retries for a long time and reports problems in its log only. Therefore a child process connects to it
(`python -m quire.engine.cluster.ray_cluster`: options on standard input, a `ClusterReport` on standard output); its
output is read as it arrives, and it is killed after a timeout. This process does not import Ray.

This stays apart from the control plane, because it runs before any options are resolved: the nodes, and their devices,
are part of the resolution.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.engine.cluster import handshake, network
from quire.engine.cluster.handshake import Hello
from quire.engine.cluster.placement import ClusterNode, NodeShare, place, split_stages
from quire.engine.config import context_parallel, devices
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig, RayPlacement
from quire.engine.config.options import EngineOptions
from quire.engine.config.parallel_config import for_prefill, layout, without_others
from quire.engine.config.resolve import resolve as config_resolve
from quire.engine.process.version import DISTRIBUTION
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_folder

Kind = Literal["cpu", "cuda"]

CONNECT_SECONDS = 12.0
"""Timeout for connecting to the cluster."""
NODES_SECONDS = 60.0
"""Timeout for the reports of all nodes, which may have to download the model's small files."""
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""The file to which `ray start` writes the address of this host's cluster."""
_CONNECTED = b"quire: connected\n"
_COMMAND = (sys.executable, "-P", "-m", "quire.engine.cluster.ray_cluster")
_START = "scripts/run_cluster.sh (or `ray start --head`, and `ray start --address HEAD:6379` on the other nodes)"
_TOKEN_REMEDY = "give every node and this process the same RAY_AUTH_TOKEN, or all of them RAY_AUTH_MODE=disabled"

logger = logging.getLogger(__name__)


class ReplicaReport(msgspec.Struct, kw_only=True):
    """Places for the ranks of a replica."""

    nodes: list[tuple[str, str]]
    """Id and address of each node that has ranks, in the order of ranks."""
    ranks_per_node: list[int]
    bundles: list[int] = []
    """Bundle of each rank in the placement group, if one is given."""


class ClusterReport(msgspec.Struct, kw_only=True):
    """Places for the ranks, or an error."""

    error: str | None = None
    address: str = ""
    """Address of Ray's control store."""
    head: str = ""
    """Address of this host, as Ray knows it."""
    kind: Kind = "cpu"
    replicas: list[ReplicaReport] = []
    memory: dict[str, int] = {}
    """Free bytes of the smallest device of each node (CPU: of the host), by id."""
    split_stages: list[int] = []
    """Stages whose ranks are on several nodes, of any replica."""


def resolve(options: EngineOptions) -> EngineConfig:
    """Resolve all options, with a Ray cluster's devices if it is to run the ranks. See `config.resolve.resolve`."""
    return config_resolve(options, find=find)


def find(options: EngineOptions) -> tuple[tuple[RayPlacement, ...], Devices] | None:
    """Return where the Ray cluster has room for the ranks of each replica, or None if Ray is not to run them.

    The devices are one per rank, each as large as the smallest of all nodes. Raises `ConfigError` if Ray is requested
    and cannot run them.
    """
    if not (is_requested := options.distributed_executor_backend == "ray") and not _should_use_ray(options):
        return None
    if importlib.util.find_spec("ray") is None:
        if is_requested:
            raise ConfigError("--distributed-executor-backend ray: Ray is not installed; pip install 'quire-llm[ray]'")
        return None
    context_parallel.check_options(replace(options, distributed_executor_backend="ray"))
    with_replicas = {
        "nnodes": options.nnodes if options.nnodes > 1 else None,
        "data_parallel_size_local": options.data_parallel_size_local,
        "data_parallel_start_rank": options.data_parallel_start_rank,
    }
    for name, value in with_replicas.items():
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is not supported with --distributed-executor-backend ray, which "
                "places all replicas; omit it"
            )
    if options.enable_expert_parallel and options.data_parallel_size > 1:
        raise ConfigError(
            "--enable-expert-parallel: replicas that share experts are not supported with "
            "--distributed-executor-backend ray; omit it, or use --nnodes instead of Ray"
        )
    if layout(for_prefill(options)) != layout(options):
        raise ConfigError(
            "--prefill-tensor-parallel-size, --prefill-pipeline-parallel-size: replicas that "
            "--distributed-executor-backend ray places have the same layout; omit them"
        )
    group = _current_group()
    try:
        report = _query(options, group)
    except ConfigError as error:
        if is_requested or group is not None:
            raise
        logger.warning("Ray is not used: %s", error)
        return None
    if not is_requested and group is None and report.kind == "cpu":
        return None  # its nodes have no GPUs either
    if report.split_stages:
        largest = [count for each in report.replicas for count in each.ranks_per_node]
        logger.warning(
            "stage%s %s of tensor parallel %d %s on several nodes, because none has that many devices: every layer "
            "waits for the network; prefer --tensor-parallel-size %d with a larger --pipeline-parallel-size",
            "s" * (len(report.split_stages) > 1),
            ", ".join(map(str, report.split_stages)),
            options.tensor_parallel_size,
            "are" if len(report.split_stages) > 1 else "is",
            max(n for n in range(1, max(largest) + 1) if options.tensor_parallel_size % n == 0),
        )
    ranks = Counter[str]()
    for each in report.replicas:
        ranks.update({node: count for (node, _), count in zip(each.nodes, each.ranks_per_node, strict=True)})
    # A host's ranks share its memory; a device's memory belongs to one rank.
    per_rank = [free // ranks[node] if report.kind == "cpu" else free for node, free in report.memory.items()]
    model = _absolute(options.model)
    on_nodes = replace(options, model=model, device=report.kind, master_addr=report.head, master_port=0)
    placements = tuple(
        RayPlacement(
            address=report.address,
            group=group,
            nodes=tuple(each.nodes),
            ranks_per_node=tuple(each.ranks_per_node),
            all_ranks_per_node=tuple(ranks[node] for node, _ in each.nodes),
            bundles=tuple(each.bundles),
            options=on_nodes,
        )
        for each in report.replicas
    )
    return placements, Devices(report.kind, ranks.total(), min(per_rank))


def place_again(config: EngineConfig) -> EngineConfig:
    """Return the configuration with other places for the ranks of its replica; raises `ConfigError`."""
    parallel, former = config.parallel, config.parallel.placement
    assert former is not None
    found = find(replace(without_others(former.options), distributed_executor_backend="ray"))
    assert found is not None
    placed = replace(found[0][0], options=former.options)
    ray = (*parallel.ray[: parallel.replica], placed, *parallel.ray[parallel.replica + 1 :])
    return replace(config, parallel=replace(parallel, ray=ray).of_replica(parallel.replica))


def _query(options: EngineOptions, group: str | None) -> ClusterReport:
    """Run the child process; raises `ConfigError` within seconds if the cluster does not answer or has no room."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address}: a Ray client is outside the cluster; run quire on one of its nodes, with "
            "RAY_ADDRESS=HEAD:6379 or none"
        )
    where = f"RAY_ADDRESS={address}" if address else "this host"
    if address:
        _check_reachable(address, where)
    with subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(pickle.dumps((replace(options, model=_absolute(options.model)), group)))
        child.stdin.close()
        try:
            report = msgspec.json.decode(_read_output(child, where), type=ClusterReport)
        finally:
            child.kill()
    if report.error is not None:
        raise ConfigError(report.error)
    return report


def _absolute(model: str) -> str:
    """Return the model's absolute path, if it is a folder."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model


def _check_reachable(address: str, where: str) -> None:
    """Raise `ConfigError` if nothing listens at the address, to which Ray would try to connect for a long time."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS / 2).close()
        except OSError as error:
            raise ConfigError(_no_cluster(where, f"({(error.strerror or str(error)).lower()})")) from None


def _no_cluster(where: str, why: str) -> str:
    return (
        f"no Ray cluster ({where}) could be joined {why}: check that it runs, on this host too; start one with "
        f"{_START}, or set RAY_ADDRESS to the head's HOST:PORT"
    )


def _read_output(child: subprocess.Popen[bytes], where: str) -> bytes:
    """Return the child's report; raises `ConfigError` as soon as its log shows a known error, and on a timeout."""
    assert child.stdout is not None
    assert child.stderr is not None
    texts = {child.stdout: b"", child.stderr: b""}
    deadline = time.monotonic() + CONNECT_SECONDS
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                text = os.read(key.fd, 1 << 16)
                if not text:
                    selector.unregister(key.fileobj)
                was_connected = _CONNECTED in texts[child.stdout]
                texts[key.fileobj] += text  # type: ignore[index]
                if not was_connected and _CONNECTED in texts[child.stdout]:
                    deadline = time.monotonic() + NODES_SECONDS + CONNECT_SECONDS
            if b"InvalidAuthToken" in texts[child.stderr]:
                raise ConfigError(f"the Ray cluster ({where}) does not accept this process's token; {_TOKEN_REMEDY}")
            if not ready:
                if _CONNECTED in texts[child.stdout]:
                    raise ConfigError(
                        f"the Ray cluster ({where}) accepts connections but does not respond; see `ray status`"
                    )
                raise ConfigError(_no_cluster(where, f"within {CONNECT_SECONDS:.0f} s"))
    report = texts[child.stdout].removeprefix(_CONNECTED)
    if not report:
        last = texts[child.stderr].decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ConfigError(f"the Ray cluster ({where}) could not be queried: {last[0]}")
    return report


def _should_use_ray(options: EngineOptions) -> bool:
    """Whether `auto` means Ray: inside a placement group, or if this host has too few GPUs and a cluster is there."""
    are_elsewhere = options.data_parallel_size_local is not None or options.data_parallel_start_rank is not None
    are_coupled = options.data_parallel_size > 1 and options.enable_expert_parallel
    if options.distributed_executor_backend != "auto" or options.nnodes > 1 or are_elsewhere or are_coupled:
        return False
    if _current_group() is not None:
        return True
    if options.prefill_context_parallel_size > 1:
        return False  # not supported
    if options.device == "cpu" or not (os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER.exists()):
        return False
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
    return devices.count_gpus() < ranks and not devices.may_share_gpus()


def _current_group() -> str | None:
    """Return the id, in hex, of the placement group of the Ray actor or task that this process runs."""
    ray: Any = sys.modules.get("ray")  # Ray's own processes have imported it
    if ray is None or not ray.is_initialized():
        return None
    group = ray.util.get_current_placement_group()
    return None if group is None else str(group.id.hex())


def group_of(ray: Any, name: str) -> Any:
    """Return the placement group with this id, in hex; it may be another driver's."""
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(ray.PlacementGroupID.from_hex(name))


def connect(ray: Any, address: str, *, log_to_driver: bool = False) -> None:
    """Join the cluster as a driver; raises `ConfigError` with Ray's error."""
    try:
        ray.init(
            address=address,
            logging_level="ERROR",
            log_to_driver=log_to_driver,
            configure_logging=False,
            _node_ip_address=_address_towards(address),
        )
    except Exception as error:
        raise ConfigError(_explain(ray, address, error)) from None


def _address_towards(address: str) -> str | None:
    """Return this host's address as the cluster sees it. Ray would take the address on the route to the Internet."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or (_CURRENT_CLUSTER.read_text() if _CURRENT_CLUSTER.exists() else "")
    host, _, port = address.strip().rpartition(":")
    if not port.isdigit():
        return None
    try:
        own = network.source_address(host.strip("[]"))
    except OSError:
        return None
    return None if own.startswith("127.") else own


def _explain(ray: Any, address: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    where = "" if address == "auto" else f" at {address}"
    if isinstance(error, ray.exceptions.AuthenticationError):
        return f"the Ray cluster{where} requires a token, and this process has none; {_TOKEN_REMEDY}"
    if "Version mismatch" in text:
        return f"the Ray cluster{where} has other versions than this process; install the same on every host: {text}"
    if isinstance(error, ConnectionError):
        return (
            f"there is no Ray cluster{where or ' on this host'}; start one with {_START}, or set RAY_ADDRESS to the "
            "head's HOST:PORT"
        )
    return f"the Ray cluster{where} cannot be joined: {text}"


def _make_report(options: EngineOptions, group: str | None, on_connected: Callable[[], object]) -> ClusterReport:
    """Find places for the ranks; runs in the child."""
    import ray as typed
    from ray._private import state

    ray: Any = typed
    available: Any = state.available_resources_per_node
    connect(ray, "auto")
    on_connected()
    context = ray.get_runtime_context()
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available()
    wants_gpus = options.device == "cuda" or (
        options.device == "auto" and any(node["Resources"].get("GPU") for node in alive)
    )
    unit = "GPU" if wants_gpus else "CPU"
    nodes = [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(free.get(node["NodeID"], {}).get(unit, 0)),
            int(node["Resources"].get(unit, 0)),
        )
        for node in alive
    ]
    here = context.get_node_id()
    nodes.sort(key=lambda node: node.id != here)  # prefer this host among equals
    bundles: dict[str, list[int]] = {}
    if group is not None:
        bundles = _bundles(ray, group, unit)
        counts = {name: len(numbers) for name, numbers in bundles.items()}
        nodes = [replace(node, free=counts[node.id], total=counts[node.id]) for node in nodes if node.id in counts]
    owner = "the Ray cluster" if group is None else "the placement group"
    tp, pp, replicas = options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size
    placed = place(nodes, tp, pp, unit, owner, replicas)
    kind: Kind = "cuda" if wants_gpus else "cpu"
    memory = _check_nodes(ray, options, [share for shares in placed for share in shares], kind, here)
    reports = []
    for shares in placed:
        taken = {share.node.id: len(share.ranks) for share in shares}
        own = [number for name, count in taken.items() for number in bundles.get(name, [])[:count]]
        bundles = {name: numbers[taken.get(name, 0) :] for name, numbers in bundles.items()}
        named = [(share.node.id, share.node.address) for share in shares]
        reports.append(ReplicaReport(nodes=named, ranks_per_node=list(taken.values()), bundles=own))
    return ClusterReport(
        address=context.gcs_address,
        head=next(node["NodeManagerAddress"] for node in alive if node["NodeID"] == here),
        kind=kind,
        replicas=reports,
        memory=memory,
        split_stages=sorted({stage for shares in placed for stage in split_stages(shares, tp)}),
    )


def _bundles(ray: Any, group: str, unit: str) -> dict[str, list[int]]:
    """Bundles of a placement group that have a device, by node."""
    table = ray.util.placement_group_table(group_of(ray, group))
    if (state := table.get("state")) != "CREATED":
        raise ConfigError(f"the placement group {group} is {str(state).lower()}; wait until it is ready")
    found: dict[str, list[int]] = {}
    for number, bundle in sorted(table["bundles"].items()):
        if bundle.get(unit, 0) > 1 and unit == "GPU":
            raise ConfigError(
                f"bundle {number} of the placement group has {bundle[unit]:g} GPUs; each rank needs a bundle with one"
            )
        if bundle.get(unit, 0) >= 1:
            found.setdefault(table["bundles_to_node_id"][number], []).append(number)
    return found


def _check_nodes(
    ray: Any, options: EngineOptions, shares: Sequence[NodeShare], kind: Kind, here: str
) -> dict[str, int]:
    """Check that every node can run its ranks; returns the free memory of each, by id."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def describe(model: str, revision: str | None, download_dir: str | None, kind: Kind, ranks: int) -> dict[str, Any]:
        """Runs on a node, where Quire may be missing or different, and is therefore sent by value."""
        import os
        import platform

        own = {"address": os.environ.get("QUIRE_HOST_IP", ""), "error": "", "versions": {}, "model": {}, "memory": 0}
        try:
            from quire.engine.cluster import ray_cluster
        except ImportError as error:
            missing = f"not installed ({error})"
            return {**own, "versions": {"python": ".".join(platform.python_version_tuple()[:2]), DISTRIBUTION: missing}}
        return {**own, **ray_cluster.describe(model, revision, download_dir, kind, ranks)}

    remote = ray.remote(num_cpus=0, max_retries=0)(describe)
    model = handshake.fingerprint(model_folder.locate(options.model, options.revision, options.download_dir))
    local = Hello(name="this host", number=0, versions=handshake.versions(), model=model)
    used = {share.node.id: share.node for share in shares}
    ranks = {name: sum(len(share.ranks) for share in shares if share.node.id == name) for name in used}
    tasks = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote(
            options.model, options.revision, options.download_dir, kind, ranks[name]
        ): node
        for name, node in used.items()
    }
    reported, silent = ray.wait(list(tasks), num_returns=len(tasks), timeout=NODES_SECONDS)
    if silent:
        late = ", ".join(tasks[each].address for each in silent)
        raise ConfigError(f"the Ray node {late} did not answer within {NODES_SECONDS:.0f} s; see `ray status`")
    memory: dict[str, int] = {}
    for each in reported:
        node = tasks[each]
        name = f"the Ray node {node.address}"
        try:
            own = ray.get(each)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"{name} cannot run a task: {' '.join(str(error).split())[:500]}") from None
        variable = own["address"] or (os.environ.get("QUIRE_HOST_IP", "") if node.id == here else "")
        if variable and variable != node.address:
            raise ConfigError(
                f"{name} has QUIRE_HOST_IP={variable}: Ray and Quire must use the same address; start Ray there with "
                f"--node-ip-address {variable}, or set QUIRE_HOST_IP={node.address}"
            )
        handshake.compare(
            local, Hello(name=name, number=0, versions=own["versions"], model=own["model"], error=own["error"])
        )
        memory[node.id] = own["memory"]
    return memory


def describe(model: str, revision: str | None, download_dir: str | None, kind: Kind, ranks: int) -> dict[str, Any]:
    """Return this node's versions, hashes of the model's files, and free memory; or `error`."""
    found: dict[str, Any] = {"versions": handshake.versions()}
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from tasks that request none
    try:
        found["model"] = handshake.fingerprint(model_folder.locate(model, revision, download_dir))
        found["memory"] = devices.find(kind, (1,) * ranks).memory
    except ConfigError as error:
        found["error"] = str(error)
    return found


def main() -> None:
    """Run the child process, which exits without waiting for the cluster."""
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print to standard output
    try:
        options, group = pickle.load(sys.stdin.buffer)
        report = _make_report(options, group, lambda: os.write(output, _CONNECTED))
    except ConfigError as error:
        report = ClusterReport(error=str(error))
    os.write(output, msgspec.json.encode(report))
    os._exit(0)


if __name__ == "__main__":
    main()
