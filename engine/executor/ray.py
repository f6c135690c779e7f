"""The executor for Ray clusters. Ray only places and starts the ranks, and reports when they die.

Each rank's device is a bundle of one placement group, reserved by an actor. One actor per node runs the node's process,
which joins the leader as without Ray (`quire.engine.executor.nodes`) and gets plans and sends results that way. The
process exits with its actor, because its standard input closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine import log, process
from quire.engine.cluster import ray_cluster
from quire.engine.cluster.ray_cluster import RayResources
from quire.engine.config.options import EngineConfig, RayPlacement
from quire.engine.executor.nodes import MultiNodeExecutor, NodeLost, serve_node
from quire.engine.protocol.errors import ConfigError

GROUP_SECONDS = 15.0
"""Timeout for a placement group whose devices were free a moment ago."""
ACTORS_SECONDS = 60.0
"""Timeout for starting all actors."""
_CLOSE_SECONDS = 5.0
_FORWARDED = ("NCCL_", "GLOO_", "QUIRE_", "HF_TOKEN", "OMP_NUM_THREADS")
"""Environment variables of this process that are set on nodes too, unless already set there."""
_NOT_FORWARDED = ("QUIRE_HOST_IP", "QUIRE_API_KEY", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Exceptions to `_FORWARDED`."""

logger = logging.getLogger(__name__)


class _ActorInfo(NamedTuple):
    """Information about an actor."""

    node: str
    """Ray's id of its node."""
    gpu: str
    """Name of its GPU in CUDA_VISIBLE_DEVICES; empty: none."""
    port: int
    """A free port on its node."""


class RayExecutor(MultiNodeExecutor):
    """Runs the ranks of a replica on nodes of a Ray cluster. Node 0 is the core and has no ranks."""

    def __init__(self, config: EngineConfig, log_level: str, on_end: Callable[[], None]) -> None:
        place = config.parallel.ray
        assert place is not None
        self._actors = Actors(config)
        options = replace(config.options, master_addr=place.head, master_port=0)
        if Path(options.model).expanduser().is_dir():
            options = replace(options, model=str(Path(options.model).expanduser().absolute()))
        parallel = replace(config.parallel, master=(place.head, 0))
        try:
            super().__init__(replace(config, options=options, parallel=parallel), log_level, on_end)
        except BaseException:
            self._actors.close()
            raise

    def _start_nodes(self, config: EngineConfig, log_level: str) -> None:
        parallel = config.parallel
        assert parallel.ray is not None
        for node in range(1, parallel.nodes):
            options = replace(config.options, node_rank=node, master_port=self._leader.port, device=parallel.device)
            placed = RayResources(parallel.ray, parallel.shares, None)
            self._actors.run(node, (options, log_level, placed), self._node_ended)

    def _init_method(self, config: EngineConfig) -> str:
        return self._actors.init_method

    def _node_ended(self, node: int, reason: str) -> None:
        self._leader.fail(node, reason)
        self._put(node, NodeLost(reason))

    def close(self, reason: str = "") -> None:
        self._actors.is_closing = True  # nodes end with the leader
        super().close(reason)
        self._actors.close()


class Actors:
    """The actors of one engine, each with a device; the first one on each node runs the node's process."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the actors; raises `ConfigError` if Ray does not within `GROUP_SECONDS` and `ACTORS_SECONDS`."""
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # each line names its node
        import ray

        self._ray: Any = ray
        parallel = config.parallel
        assert parallel.ray is not None
        self._place: RayPlacement = parallel.ray
        self._resource = "GPU" if parallel.device == "cuda" else "CPU"
        self._node_of = [node for node in range(1, parallel.nodes) for _ in parallel.ranks_of(node)]
        """Node number of each rank."""
        self._own_group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self.is_closing = False
        """Whether the end of a node is expected."""
        ray_cluster.connect(ray, self._place.address, log_to_driver=True)
        try:
            self._reported = self._start()
        except BaseException:
            self.close()
            raise

    @property
    def init_method(self) -> str:
        """Address with a free port on the host of rank 0, for torch.distributed."""
        address = self._place.nodes[0][1]
        return f"tcp://{f'[{address}]' if ':' in address else address}:{self._reported[0].port}"

    def name(self, node: int) -> str:
        """Return the name of a node in error messages."""
        return f"node {node} ({self._place.nodes[node - 1][1]})"

    def run(self, node: int, body: object, on_end: Callable[[int, str], None]) -> None:
        """Run `main` with `body` in the node's process; `on_end` is called, in any thread, when it has exited."""
        first = self._node_of.index(node)
        env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
        }
        gpus = [reported.gpu for reported, its in zip(self._reported, self._node_of, strict=True) if its == node]
        visible = ",".join(gpus) if self._resource == "GPU" else None
        run = self._actors[first].run.remote(pickle.dumps(body), env, visible)
        self._runs.append(run)
        threading.Thread(target=self._watch, args=(node, run, on_end), daemon=True, name=f"ray-node-{node}").start()

    def close(self) -> None:
        """Stop all actors and release the devices, without waiting for an unreachable cluster."""
        self.is_closing = True
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

    def _start(self) -> list[_ActorInfo]:
        """Start an actor for each rank; returns their information."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        size = len(self._node_of)
        if self._place.group is not None:
            group, bundles = ray_cluster.group_of(ray, self._place.group), list(self._place.bundles)
        else:
            group, bundles = self._make_group(), list(range(size))
        takes = {"num_cpus": 0, "num_gpus": 1} if self._resource == "GPU" else {"num_cpus": 1}
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, **takes)(_actor_class())
        self._actors = [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in bundles
        ]
        reported = [actor.describe.remote() for actor in self._actors]
        _, silent = ray.wait(reported, num_returns=size, timeout=ACTORS_SECONDS)
        if silent:
            late = sorted({self.name(self._node_of[reported.index(each)]) for each in silent})
            whose = "of the placement group may be in use" if self._place.group else "may have been lost"
            raise ConfigError(
                f"Ray did not start {len(silent)} of {size} workers within {ACTORS_SECONDS:.0f} s, on "
                f"{', '.join(late)}: bundles {whose}; see `ray status`"
            )
        answers = []
        for rank, each in enumerate(reported):
            try:
                answers.append(_ActorInfo(*ray.get(each)))
            except ray.exceptions.RayError as error:
                raise ConfigError(
                    f"{self.name(self._node_of[rank])}: Ray could not start a worker: {_one_line(error)}"
                ) from None
            assert answers[rank].node == self._place.nodes[self._node_of[rank] - 1][0]
        return answers

    def _make_group(self) -> Any:
        """Create a placement group whose bundles are on the chosen nodes."""
        ray = self._ray
        ids = [self._place.nodes[node - 1][0] for node in self._node_of]
        group = self._own_group = ray.util.placement_group(
            [{self._resource: 1} for _ in ids], bundle_label_selector=[{"ray.io/node-id": name} for name in ids]
        )
        if not group.wait(GROUP_SECONDS):
            asked = ", ".join(
                f"{self._node_of.count(node)} {self._resource} on {address}"
                for node, (_, address) in enumerate(self._place.nodes, 1)
            )
            raise ConfigError(
                f"Ray did not give {asked} within {GROUP_SECONDS:.0f} s, although they were free; somebody else may "
                "have taken them: see `ray status`"
            )
        return group

    def _watch(self, node: int, run: Any, on_end: Callable[[int, str], None]) -> None:
        try:
            code, last = self._ray.get(run)
            reason = f"ended with exit code {code}" + f": {last}" * bool(last)
        except Exception as error:
            if self.is_closing:
                return
            text = _one_line(error)
            reason = "was lost: " + (
                "Ray says that the node has died" if "node has died" in text else f"its Ray actor died ({text[:300]})"
            )
        if not self.is_closing:
            on_end(node, f"{self.name(node)} {reason}")


def _actor_class() -> type:
    """Return the actors' class, which Ray sends by value, so that nodes need only Ray and Quire."""

    class NodeActor:
        def describe(self) -> tuple[str, str, int]:
            """As `_ActorInfo`."""
            import socket

            import ray

            context: Any = ray.get_runtime_context()
            gpus = context.get_accelerator_ids().get("GPU", [])
            with socket.socket() as free:
                free.bind(("", 0))
                return context.get_node_id(), gpus[0] if gpus else "", free.getsockname()[1]

        def run(self, body: bytes, env: dict[str, str], visible: str | None) -> tuple[int, str]:
            """Run the node's process until it exits; returns its exit code and the last line of its output."""
            import os
            import subprocess
            import sys

            import ray

            # On the node, OMP_NUM_THREADS is set by Ray, not by the user.
            own = env | {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            address: Any = ray.util.get_node_ip_address
            own["QUIRE_HOST_IP"] = address()
            if visible is not None:
                own["CUDA_VISIBLE_DEVICES"] = visible
            command = [sys.executable, "-P", "-m", "quire.engine.executor.ray"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=own) as process:
                assert process.stdin is not None
                assert process.stderr is not None
                process.stdin.write(body)
                process.stdin.flush()
                last = ""
                for line in process.stderr:
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()
                    last = line.decode(errors="replace").strip() or last
                return process.wait(), last.removeprefix("quire: error: ")

    return NodeActor


def main() -> int:
    """Run a node's process, whose standard input is held open by an actor."""
    options, log_level, placed = pickle.load(sys.stdin.buffer)
    log.setup(log_level, f"node {options.node_rank}")
    process.set_name(f"quire-node-{options.node_rank}")
    threading.Thread(target=_end_with_actor, daemon=True, name="stdin-watch").start()
    try:
        return serve_node(options, log_level, placed)
    except ConfigError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 2


def _end_with_actor() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
