"""What a Ray cluster has to run on, asked within seconds, and refused in one line where it will not do.

Ray itself retries for long and tells its troubles to the log, so it is asked by a process of its own (`python -m
quire.engine.cluster.ray_cluster`: options on its standard input, a `ClusterReport` on its standard output),
which is read as it goes and ended when its time is over. Nothing else here imports Ray.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.engine.cluster import control_plane, network
from quire.engine.cluster.control_plane import Hello
from quire.engine.cluster.placement import ClusterNode, NodeShare, cut_stages, place
from quire.engine.config import devices, model_files
from quire.engine.config.devices import Devices
from quire.engine.config.options import EngineOptions, RayPlacement
from quire.engine.protocol.errors import ConfigError

Kind = Literal["cpu", "cuda"]

CONNECT_SECONDS = 12.0
"""To be connected to the cluster."""
NODES_SECONDS = 60.0
"""For all nodes to tell what they have; the files of a model that is not there yet are downloaded meanwhile."""
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the address of the cluster that runs on this host."""
_CONNECTED = b"quire: connected\n"
_COMMAND = (sys.executable, "-P", "-m", "quire.engine.cluster.ray_cluster")
_START = "scripts/run_cluster.sh (or `ray start --head`, and `ray start --address HEAD:6379` on the other nodes)"
_TOKEN_REMEDY = "give every node and this process the same RAY_AUTH_TOKEN, or all of them RAY_AUTH_MODE=disabled"

logger = logging.getLogger(__name__)


class ClusterReport(msgspec.Struct, kw_only=True):
    """Where it can run, or why it cannot."""

    error: str | None = None
    address: str = ""
    """Of Ray's control store."""
    head: str = ""
    """Address of this host, as Ray knows it."""
    kind: Kind = "cpu"
    nodes: list[tuple[str, str]] = []
    """Id and address of each node that has ranks, in the order of ranks."""
    shares: list[int] = []
    """Ranks of each."""
    bundles: list[int] = []
    """Of each rank, in the placement group that was asked for."""
    memory: list[int] = []
    """Bytes that are free on the smallest device of each node (cpu: on the host)."""
    cut: list[int] = []
    """Stages whose ranks are on several nodes."""


def find(options: EngineOptions) -> tuple[RayPlacement, Devices] | None:
    """Return where the Ray cluster has room for the ranks, or None if Ray is not to run them.

    The devices are one per rank, each as large as the smallest of all nodes. Raises `ConfigError` if Ray is requested
    and cannot run them.
    """
    if not (is_asked := options.distributed_executor_backend == "ray") and not _should_use_ray(options):
        return None
    if importlib.util.find_spec("ray") is None:
        if is_asked:
            raise ConfigError("--distributed-executor-backend ray: Ray is not installed; pip install 'quire[ray]'")
        return None
    for name, count in (("nnodes", options.nnodes), ("data-parallel-size", options.data_parallel_size)):
        if count > 1:
            remedy = "leave it out" if name == "nnodes" else "start each replica as a server of its own, and a balancer"
            raise ConfigError(f"--{name} {count} goes without --distributed-executor-backend ray; {remedy}")
    group = _current_group()
    try:
        report = ask(options, group)
    except ConfigError as error:
        if is_asked or group is not None:
            raise
        logger.warning("Ray is not used: %s", error)
        return None
    if not is_asked and group is None and report.kind == "cpu":
        return None  # its nodes have nothing that this host has not
    if report.cut:
        logger.warning(
            "stage%s %s of tensor parallel %d %s on several nodes, since none has so many devices: every layer waits "
            "for the network; --tensor-parallel-size %d with a larger --pipeline-parallel-size would not",
            "s" * (len(report.cut) > 1),
            ", ".join(map(str, report.cut)),
            options.tensor_parallel_size,
            "are" if len(report.cut) > 1 else "is",
            max(n for n in range(1, max(report.shares) + 1) if options.tensor_parallel_size % n == 0),
        )
    # Memory of a host is shared by its ranks; that of a device is one rank's.
    per_rank = [
        free // share if report.kind == "cpu" else free
        for free, share in zip(report.memory, report.shares, strict=True)
    ]
    model, nodes, counts = _absolute(options.model), tuple(report.nodes), tuple(report.shares)
    on_nodes = replace(options, model=model, device=report.kind, master_addr=report.head, master_port=0)
    placement = RayPlacement(report.address, report.head, group, nodes, counts, tuple(report.bundles), on_nodes)
    return placement, Devices(report.kind, sum(counts), min(per_rank))


def ask(options: EngineOptions, group: str | None = None) -> ClusterReport:
    """Have the cluster looked at; raises `ConfigError` within seconds, whatever is wrong with it."""
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
            report = msgspec.json.decode(_read(child, where), type=ClusterReport)
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
    """Raise `ConfigError` at once where nobody listens, which Ray would try for long."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS / 2).close()
        except OSError as error:
            raise ConfigError(_no_cluster(where, f"({(error.strerror or str(error)).lower()})")) from None


def _no_cluster(where: str, why: str) -> str:
    return (
        f"no Ray cluster ({where}) could be joined {why}: see that it runs, on this host too; start one with {_START}, "
        "or set RAY_ADDRESS to the head's HOST:PORT"
    )


def _read(child: subprocess.Popen[bytes], where: str) -> bytes:
    """What the child prints last; raises `ConfigError` as soon as its log shows trouble, or when its time is over."""
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
                    raise ConfigError(f"the Ray cluster ({where}) is there, but does nothing; see `ray status`")
                raise ConfigError(_no_cluster(where, f"within {CONNECT_SECONDS:.0f} s"))
    report = texts[child.stdout].removeprefix(_CONNECTED)
    if not report:
        last = texts[child.stderr].decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(f"the Ray cluster ({where}) could not be asked: {last[0]}")
    return report


def _should_use_ray(options: EngineOptions) -> bool:
    """For `auto`: inside a placement group, or with a cluster at hand where this host's devices are too few."""
    if options.distributed_executor_backend != "auto" or options.nnodes > 1 or options.data_parallel_size > 1:
        return False
    if _current_group() is not None:
        return True
    if options.device == "cpu" or not (os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER.exists()):
        return False
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    return devices.count_gpus() < ranks and not devices.may_share_gpus()


def _current_group() -> str | None:
    """The placement group that this process runs in, as a part of a Ray actor or task; in hex."""
    ray: Any = sys.modules.get("ray")  # in such a process it is imported
    if ray is None or not ray.is_initialized():
        return None
    group = ray.util.get_current_placement_group()
    return None if group is None else str(group.id.hex())


def group_of(ray: Any, name: str) -> Any:
    """The placement group with this id, in hex; that of another driver, too."""
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(ray.PlacementGroupID.from_hex(name))


def connect(ray: Any, address: str, *, log_to_driver: bool = False) -> None:
    """Join the cluster as a driver; raises `ConfigError` for what Ray says is wrong."""
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
    """This host's address as the cluster sees it. Ray would ask for the way to the Internet, which there may not be."""
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
        return f"the Ray cluster{where} wants a token, and this process has none; {_TOKEN_REMEDY}"
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
    nodes.sort(key=lambda node: node.id != here)  # this host first, where it makes no difference
    bundles: dict[str, list[int]] = {}
    if group is not None:
        bundles = _bundles(ray, group, unit)
        counts = {name: len(numbers) for name, numbers in bundles.items()}
        nodes = [replace(node, free=counts[node.id], total=counts[node.id]) for node in nodes if node.id in counts]
    owner = "the Ray cluster" if group is None else "the placement group"
    shares = place(nodes, options.tensor_parallel_size, options.pipeline_parallel_size, unit, owner)
    kind: Kind = "cuda" if wants_gpus else "cpu"
    memory = _check_nodes(ray, options, shares, kind, here)
    return ClusterReport(
        address=context.gcs_address,
        head=next(node["NodeManagerAddress"] for node in alive if node["NodeID"] == here),
        kind=kind,
        nodes=[(share.node.id, share.node.address) for share in shares],
        shares=[len(share.ranks) for share in shares],
        bundles=[number for share in shares for number in bundles.get(share.node.id, [])[: len(share.ranks)]],
        memory=memory,
        cut=cut_stages(shares, options.tensor_parallel_size),
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
                f"bundle {number} of the placement group has {bundle[unit]:g} GPUs; a rank takes a bundle of one"
            )
        if bundle.get(unit, 0) >= 1:
            found.setdefault(table["bundles_to_node_id"][number], []).append(number)
    return found


def _check_nodes(ray: Any, options: EngineOptions, shares: Sequence[NodeShare], kind: Kind, here: str) -> list[int]:
    """See that every node can run its ranks as this host would; returns the free memory of each."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def describe(model: str, revision: str | None, kind: Kind, ranks: int) -> dict[str, Any]:
        """On a node, where Quire may be another or missing: this function travels as it is."""
        import os
        import platform

        own = {"address": os.environ.get("QUIRE_HOST_IP", ""), "error": "", "versions": {}, "model": {}, "memory": 0}
        try:
            from quire.engine.cluster import ray_cluster
        except ImportError as error:
            missing = f"not there ({error})"
            return {**own, "versions": {"python": ".".join(platform.python_version_tuple()[:2]), "quire": missing}}
        return {**own, **ray_cluster.describe(model, revision, kind, ranks)}

    remote = ray.remote(num_cpus=0, max_retries=0)(describe)
    ids = {share.node.id: share for share in shares}
    local = Hello(name="this host", number=0, versions=control_plane.versions())
    path = model_files.locate(options.model, options.revision)
    local.model = control_plane.fingerprint(path)
    asked = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote(
            options.model, options.revision, kind, len(share.ranks)
        ): share
        for name, share in ids.items()
    }
    reported, silent = ray.wait(list(asked), num_returns=len(asked), timeout=NODES_SECONDS)
    if silent:
        late = ", ".join(asked[each].node.address for each in silent)
        raise ConfigError(f"the Ray node {late} did not answer within {NODES_SECONDS:.0f} s; see `ray status`")
    memory: dict[str, int] = {}
    for each in reported:
        node = asked[each].node
        name = f"the Ray node {node.address}"
        try:
            own = ray.get(each)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"{name} cannot run a task: {' '.join(str(error).split())[:500]}") from None
        variable = own["address"] or (os.environ.get("QUIRE_HOST_IP", "") if node.id == here else "")
        if variable and variable != node.address:
            raise ConfigError(
                f"{name} has QUIRE_HOST_IP={variable}: Ray and Quire are to use one address; start Ray there with "
                f"--node-ip-address {variable}, or set QUIRE_HOST_IP={node.address}"
            )
        control_plane.compare(
            local, Hello(name=name, number=0, versions=own["versions"], model=own["model"] or local.model)
        )
        if own["error"]:
            raise ConfigError(f"{name}: {own['error']}")
        control_plane.compare(
            local, Hello(name=name, number=0, versions=own["versions"], model=own["model"], error=own["error"])
        )
        memory[node.id] = own["memory"]
    return [memory[share.node.id] for share in shares]


def describe(model: str, revision: str | None, kind: Kind, ranks: int) -> dict[str, Any]:
    """On a node: its versions, what it has of the model, and free memory; `error` is what it lacks."""
    found: dict[str, Any] = {"versions": control_plane.versions()}
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray shows a task without GPUs none
    try:
        found["model"] = control_plane.fingerprint(model_files.locate(model, revision))
        found["memory"] = devices.find(kind, (1,) * ranks).memory
    except ConfigError as error:
        found["error"] = str(error)
    return found


def main() -> None:
    """Answer, and leave the cluster without waiting for it."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the report
    try:
        options, group = pickle.load(sys.stdin.buffer)
        report = _make_report(options, group, lambda: os.write(answers, _CONNECTED))
    except ConfigError as error:
        report = ClusterReport(error=str(error))
    os.write(answers, msgspec.json.encode(report))
    os._exit(0)


if __name__ == "__main__":
    main()
