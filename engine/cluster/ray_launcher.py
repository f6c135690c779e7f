"""Starts the nodes of a replica on a Ray cluster. Ray only places and starts processes, and reports when they exit.

Each rank's device is a bundle of one placement group, reserved by an actor. The first actor of each node runs the
node's process (`quire.engine.executor.nodes`), which joins the core as without Ray. The process exits with its actor,
because its standard input closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from quire.engine.cluster import ray_cluster
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.parallel_config import without_others
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError

GROUP_SECONDS = 15.0
"""Timeout for a placement group whose devices were free a moment ago."""
ACTORS_SECONDS = 60.0
"""Timeout for starting all actors."""
_CLOSE_SECONDS = 5.0
_FORWARDED = ("NCCL_", "GLOO_", "QUIRE_", "HF_TOKEN", "OMP_NUM_THREADS")
"""Environment variables of this process that are set on nodes too, unless already set there."""
_NOT_FORWARDED = (
    *("QUIRE_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("QUIRE_API_KEY", "QUIRE_ADMIN_KEY", "QUIRE_METRICS_KEY", "QUIRE_CLUSTER_TOKEN"),
)
"""Exceptions to `_FORWARDED`."""

logger = logging.getLogger(__name__)


class NodesGone(ConfigError):
    """A node that was to have ranks is not in the cluster any more."""


class ActorInfo(NamedTuple):
    """An actor's report about the place where it runs."""

    node: str
    """Ray's id of its node."""
    gpu: str
    """Name of its GPU in CUDA_VISIBLE_DEVICES; empty: none."""


class RankActor:
    """An actor, which holds the device of one rank."""

    def describe(self) -> ActorInfo:
        import ray

        context: Any = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return ActorInfo(context.get_node_id(), gpus[0] if gpus else "")

    def run_node(self, stdin: bytes, env: dict[str, str], visible: str | None) -> tuple[int, str]:
        """Run the node's process until it exits; returns its exit code and the last line of its output."""
        import ray

        # On the node, OMP_NUM_THREADS is set by Ray, not by the user.
        own = env | {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        address: Any = ray.util.get_node_ip_address
        own["QUIRE_HOST_IP"] = address()
        if visible is not None:
            own["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-P", "-m", "quire.engine.executor.nodes"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=own) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(stdin)
            process.stdin.flush()
            last = ""
            for line in process.stderr:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
                last = line.decode(errors="replace").strip() or last
            return process.wait(), log.error_of(last)


class RayLauncher:
    """Starts the processes of one engine's nodes, which then join."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        parallel = config.parallel
        assert parallel.placement is not None
        self._placement, self._log_level = parallel.placement, log_level
        self._cluster_token = parallel.cluster_token
        self._store_gib = None if config.kv_store is None else config.kv_store.memory_bytes / (1 << 30)
        self._resource = "GPU" if parallel.device == "cuda" else "CPU"
        self._node_of = [node for node in range(1, parallel.nodes) for _ in parallel.ranks_of(node)]
        """Node number of each rank."""
        self._ray: Any = None
        self._own_group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self, port: int, on_exit: Callable[[int, str], None]) -> None:
        """Start the processes, for a leader at `port`. `on_exit` is called, in any thread, when one of them exits.

        Raises `NodesGone`, and `ConfigError` if Ray does not start the actors in time."""
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # each line names its node
        import ray

        self._ray = ray
        ray_cluster.connect(ray, self._placement.address, log_to_driver=True)
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if gone := [node for node, (name, _) in enumerate(self._placement.nodes, 1) if name not in alive]:
            raise NodesGone(f"{self._name(gone[0])}: Ray says that the node has died")
        infos = self._start_actors()
        env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
        }
        for node in range(1, len(self._placement.nodes) + 1):
            options = replace(
                without_others(self._placement.options),
                node_rank=node,
                master_port=port,
                cluster_token=self._cluster_token,
                kv_offloading_size=self._store_gib,
            )
            gpus = [info.gpu for info, its in zip(infos, self._node_of, strict=True) if its == node]
            visible = ",".join(gpus) if self._resource == "GPU" else None
            stdin = pickle.dumps((options, self._log_level, self._placement, False))
            run = self._actors[self._node_of.index(node)].run_node.remote(stdin, env, visible)
            self._runs.append(run)
            threading.Thread(target=self._watch, args=(node, run, on_exit), daemon=True).start()

    def close(self) -> None:
        """Stop all actors and release the devices, without waiting for an unreachable cluster."""
        if self._ray is not None:
            thread = threading.Thread(target=self._close, daemon=True, name="ray-close")
            thread.start()
            thread.join(_CLOSE_SECONDS)

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_CLOSE_SECONDS / 2)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._own_group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._own_group)
        self._ray.shutdown()

    def _start_actors(self) -> list[ActorInfo]:
        """Start an actor for each rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, placement, size = self._ray, self._placement, len(self._node_of)
        if placement.group is not None:
            group, bundles = ray_cluster.group_of(ray, placement.group), list(placement.bundles)
        else:
            group, bundles = self._make_group(), list(range(size))
        resources = {"num_cpus": 0, "num_gpus": 1} if self._resource == "GPU" else {"num_cpus": 1}
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, **resources)(RankActor)
        self._actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in bundles
        ]
        described = [actor.describe.remote() for actor in self._actors]
        _, silent = ray.wait(described, num_returns=size, timeout=ACTORS_SECONDS)
        if silent:
            late = sorted({self._name(self._node_of[described.index(each)]) for each in silent})
            whose = "of the placement group may be in use" if placement.group else "may have been lost"
            raise ConfigError(
                f"Ray did not start {len(silent)} of {size} workers within {ACTORS_SECONDS:.0f} s, on "
                f"{', '.join(late)}: bundles {whose}; see `ray status`"
            )
        infos: list[ActorInfo] = []
        for node, each in zip(self._node_of, described, strict=True):
            try:
                infos.append(ray.get(each))
            except ray.exceptions.RayError as error:
                raise ConfigError(f"{self._name(node)}: Ray could not start a worker: {_one_line(error)}") from None
            assert infos[-1].node == placement.nodes[node - 1][0]
        return infos

    def _make_group(self) -> Any:
        """Create a placement group whose bundles are on the chosen nodes."""
        nodes = self._placement.nodes
        ids = [nodes[node - 1][0] for node in self._node_of]
        group = self._own_group = self._ray.util.placement_group(
            [{self._resource: 1} for _ in ids], bundle_label_selector=[{"ray.io/node-id": name} for name in ids]
        )
        if not group.wait(GROUP_SECONDS):
            requested = ", ".join(
                f"{self._node_of.count(node)} {self._resource} on {address}"
                for node, (_, address) in enumerate(nodes, 1)
            )
            raise ConfigError(
                f"Ray did not give {requested} within {GROUP_SECONDS:.0f} s, although they were free; somebody else "
                "may have taken them: see `ray status`"
            )
        return group

    def _watch(self, node: int, run: Any, on_exit: Callable[[int, str], None]) -> None:
        try:
            code, last = self._ray.get(run)
            reason = f"ended with exit code {code}" + f": {last}" * bool(last)
        except Exception as error:
            text = _one_line(error)
            reason = "was lost: " + (
                "Ray says that the node has died" if "node has died" in text else f"its Ray actor died ({text[:300]})"
            )
        on_exit(node, f"{self._name(node)} {reason}")

    def _name(self, node: int) -> str:
        """Return the name of a node in error messages."""
        return f"node {node} ({self._placement.nodes[node - 1][1]})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
