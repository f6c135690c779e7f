"""Starts this host's engine cores, restarts those that die, and reports the state of every replica.

It handles no requests. It runs in the parent process of `quire serve`, in that of `--headless` hosts, and in a thread
for `LLM`. Each API process gets the states and resumes its own requests (`EngineClient`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.plan_text import cache_text
from quire.engine.core.launch import (
    CoreArgs,
    Endpoints,
    local_endpoints,
    replica_config,
    start_core,
)
from quire.engine.protocol.supervision import EngineFailed, EngineState, Failed, Ready, ReplicaLost, ReplicaUp, Shutdown
from quire.engine.runtime_folder import RuntimeFolder
from quire.engine.supervisor import Process, SupervisedProcess, Supervisor
from quire.server.config import RestartPolicy
from quire.server.frontend.dp_coordinator import DPCoordinator
from quire.server.frontend.metrics import Metrics

RESTART_SECONDS = (0.1, 60.0)
"""Delay from the death of a replica to its restart: the first delay, and the longest one if it dies repeatedly."""
RESTART_WINDOW = 600.0
"""See `RestartPolicy.max_restarts`, in seconds."""
_MAX_DOUBLINGS = 16
_MIN_UP_SECONDS = 10.0
"""A replica that dies sooner is restarted later each time."""
SHUTDOWN_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiProcessInfo:
    """The addresses that the API processes share, and the number of this process."""

    endpoints: Endpoints
    metrics: str
    """The file with the metrics."""
    replicas: tuple[int, ...]
    """The replicas that the API serves."""
    index: int = 0

    @property
    def count(self) -> int:
        return len(self.endpoints.responses)


class _Core(SupervisedProcess):
    """The engine core of one replica."""

    def __init__(self, manager: EngineManager, replica: int) -> None:
        super().__init__("the engine core")
        self.replica = replica
        self.incarnation = 0
        self.up_at = 0.0
        """When it was last ready, on the monotonic clock."""
        self.deaths: deque[float] = deque()
        """Times of its deaths in the last `RESTART_WINDOW` seconds."""
        self.num_quick_deaths = 0
        """Deaths in a row that came within `_MIN_UP_SECONDS`."""
        self._manager = manager

    def start(self) -> Process:
        self.incarnation = time.time_ns()
        return self._manager.start_core(self.replica, self.incarnation)

    def on_ready(self, ready: Ready) -> None:
        self.up_at = time.monotonic()
        self._manager.on_state(ReplicaUp(self.replica, self.incarnation, ready.stats, ready.seconds))

    def on_exit(self, failure: Failed) -> float | None:
        now = time.monotonic()
        self.deaths.append(now)
        while now - self.deaths[0] > RESTART_WINDOW:
            self.deaths.popleft()
        self.num_quick_deaths = 0 if self.is_ready and now - self.up_at > _MIN_UP_SECONDS else self.num_quick_deaths + 1
        return self._manager.on_core_exit(self, failure)


class EngineManager:
    """The replicas of an engine, as their supervisor sees them. Its methods belong to the thread that runs
    `supervisor`, except those of other hosts' notices.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        log_level: str = "info",
        num_clients: int = 1,
        hosts: DPCoordinator | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Start the cores. `num_clients` is the number of API processes; `name` is a label of the metrics.

        `hosts` are the hosts of other replicas (`quire.server.frontend.dp_coordinator.connect_hosts`), which are closed
        with the manager.
        """
        parallel = config.parallel
        self.supervisor = Supervisor(parallel.watchdog_seconds)
        self.states: dict[int, ReplicaUp | ReplicaLost] = {}
        """The newest state of each replica that has been up."""
        self.failure: EngineFailed | None = None
        """Why the engine is gone for good."""
        self.is_user_error = False
        """Whether that is an error of the configuration."""
        self.on_change: Callable[[EngineState], None] = lambda state: None
        """Called with every new state."""
        self.has_several = parallel.replicas > 1
        self._config, self._log_level, self._hosts = config, log_level, hosts
        self._policy = policy or RestartPolicy()
        self._is_stopping = self._leave_together = False
        self._folder = RuntimeFolder()
        endpoints = local_endpoints(parallel, self._folder.path, num_clients)
        if hosts is not None:
            endpoints = Endpoints(hosts.requests, hosts.responses or endpoints.responses)
        self.replicas = tuple(parallel.api_replicas)
        self.endpoints, self._metrics_path = endpoints, f"{self._folder.path}/metrics"
        self.metrics = Metrics(name, self._metrics_path, 0, num_clients, self.replicas)
        self._num_group_starts = 0
        self._cores = [_Core(self, replica) for replica in parallel.local_replicas]
        self._lost_since: float | None = None
        """Since when no replica is up, although some were."""
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="engine-manager")
        for core in self._cores:
            self.supervisor.add(core)
        if hosts is not None:
            hosts.watch(self)

    def process_info(self, index: int) -> ApiProcessInfo:
        """Return what API process `index` must know of the others."""
        return ApiProcessInfo(self.endpoints, self._metrics_path, self.replicas, index)

    def start_core(self, replica: int, incarnation: int) -> Process:
        """Start the core of a replica."""
        # Ranks of coupled replicas rendezvous at another place each time.
        init_method = f"file://{self._folder.path}/rendezvous-{self._num_group_starts}"
        config = replica_config(self._config, replica, self._hosts.init_method if self._hosts else init_method)
        return start_core(CoreArgs(config, self.endpoints, self._log_level, incarnation), self._folder.path)

    @property
    def is_settled(self) -> bool:
        """Whether every replica has been up, or the engine has failed."""
        return self.failure is not None or all(replica in self.states for replica in self.replicas)

    def on_state(self, state: EngineState) -> None:
        """Record a new state and pass it on."""
        match state:
            case ReplicaUp(replica, stats=stats):
                if replica in self.states:
                    logger.info("%s is up again", f"replica {replica}" if self.has_several else "the engine core")
                elif stats is not None and stats.kv_blocks != self._config.cache.num_blocks:
                    logger.info("%s%s", self._prefix(replica), cache_text(self._config.with_blocks(stats.kv_blocks)))
                self.states[replica] = state
                self.metrics.state(replica, "up")
            case ReplicaLost(replica):
                self.states[replica] = state
                self.metrics.state(replica, "loading" if state.returns else "dead")
                self.metrics.count_death(replica)
            case EngineFailed():
                if self.failure is not None:
                    return
                self.failure = state
        up = any(isinstance(each, ReplicaUp) for each in self.states.values())
        self._lost_since = None if up else self._lost_since or time.monotonic()
        self.on_change(state)

    def on_core_exit(self, core: _Core, failure: Failed) -> float | None:
        """Decide what follows from the exit of a core; returns the seconds after which to start it again."""
        if self.failure is not None:
            return None
        reason, policy = f"{self._prefix(core.replica)}{failure.reason}", self._policy
        if core.replica not in self.states:  # it has never been up
            self.is_user_error = failure.user_error
            self.on_state(EngineFailed(reason))
            return None
        others = [state for replica, state in self.states.items() if replica != core.replica]
        is_coupled = self._config.parallel.is_coupled
        is_last = is_coupled or not any(isinstance(state, ReplicaUp) for state in others)
        is_over = is_last and len(core.deaths) > policy.max_restarts
        returns = policy.is_enabled and not is_over and not (is_coupled and self._hosts is not None)
        if is_last and not returns:
            deaths = f" (death {len(core.deaths)} within {RESTART_WINDOW / 60:.0f} minutes; see --max-restarts)"
            self.on_state(EngineFailed(reason + deaths * (is_over and policy.is_enabled)))
            return None
        logger.error("%s; %s", reason, "restarting it" if returns else "it is not restarted (--no-restart)")
        self.on_state(ReplicaLost(core.replica, failure.reason, returns))
        least, most = RESTART_SECONDS
        delay = min(most, least * 2 ** min(core.num_quick_deaths, _MAX_DOUBLINGS))
        return None if not returns else self._restart_group(delay) if is_coupled else delay

    def _restart_group(self, delay: float) -> float | None:
        """Restart replicas that share experts, once all have exited: one that is still exiting would fail the others.

        Returns the delay of the one that has just exited.
        """
        running = [core for core in self._cores if core.process is not None]
        for core in running:
            core.send(Shutdown())
            core.kill_at = min(core.kill_at, time.monotonic() + SHUTDOWN_SECONDS)
        if running:
            return None
        self._num_group_starts += 1
        for core in self._cores:
            core.restart_at = time.monotonic() + delay
        return delay

    # --- notices of other hosts, from any thread ----------------------------------------------------------------

    def replica_died(self, replica: int, reason: str) -> None:
        """Report that a replica on another host has died."""

        def handle() -> None:
            if replica in self.states:
                if isinstance(self.states[replica], ReplicaUp):
                    logger.error("%s%s", self._prefix(replica), reason)
                    self.on_state(ReplicaLost(replica, reason, returns=True))
            else:
                self.on_state(EngineFailed(f"{self._prefix(replica)}{reason}"))

        self.supervisor.call(handle)

    def replica_up(self, state: ReplicaUp) -> None:
        """Report that a replica on another host is up."""
        self.supervisor.call(lambda: self.on_state(state))

    def fail(self, reason: str) -> None:
        """Report that the engine is gone for good."""
        self.supervisor.call(lambda: self.on_state(EngineFailed(reason)))

    # --- running and stopping -----------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Supervise the processes until `until` returns true."""

        def is_over() -> bool:
            timeout = self._config.parallel.timeout
            if any(core.process is not None for core in self._cores):  # it is being started: its end will be noticed
                self._lost_since = self._lost_since and time.monotonic()
            if self._lost_since is not None and self.states and time.monotonic() - self._lost_since > timeout:
                self.on_state(EngineFailed(f"no replica has been up for {timeout:g} s"))
            return until()

        self.supervisor.run(is_over)

    def run_in_thread(self) -> None:
        """Supervise the processes in a thread, until `stop_thread`."""
        self._thread.start()

    def stop_thread(self, *, together: bool = False) -> threading.Thread:
        """Let the thread close the manager and end (see `close`), and return it."""
        self._is_stopping, self._leave_together = True, together
        self.supervisor.call(lambda: None)  # wakes the thread
        return self._thread

    def _run_thread(self) -> None:
        self.run(lambda: self._is_stopping)
        self.close(together=self._leave_together)

    def close(self, reason: str = "", *, together: bool = False) -> None:
        """Stop the cores, disconnect from the other hosts, with the reason if it is an error, and remove all files.

        `together`: unless an error occurs, keep the cores running until no other host needs their experts.
        """
        hosts = self._hosts
        if hosts is not None and together and not reason and self.failure is None:
            hosts.request_shutdown()
            self.run(lambda: hosts.can_shut_down or self.failure is not None)
        reason = reason or (self.failure.reason if self.failure is not None else "")
        if hosts is not None:
            hosts.close(reason)
        self.supervisor.stop(self._cores, Shutdown(), SHUTDOWN_SECONDS)
        self._folder.remove()

    def _prefix(self, replica: int) -> str:
        """The prefix of log messages about a replica, if there are several."""
        return f"replica {replica}: " if self.has_several else ""
