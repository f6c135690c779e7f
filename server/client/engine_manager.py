"""Starts this host's engine cores, restarts cores that die, and reports the state of every replica.

It handles no requests. It runs in the parent process of `quire serve`, also on `--headless` hosts, and in a thread
for `LLM`. Each API process gets the states and resumes its own requests (`EngineClient`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Literal

from quire.engine.config.added_replica import added_replica, check_resizable
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.parallel_config import MAX_REPLICAS
from quire.engine.config.plan_text import cache_text
from quire.engine.core.launch import (
    CoreArgs,
    Endpoints,
    local_endpoints,
    replica_config,
    request_address,
    start_core,
)
from quire.engine.kv_store.launch import KVStoreArgs, peer_address, start_kv_store
from quire.engine.process import log
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import Process, SupervisedProcess, Supervisor
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import (
    EngineFailed,
    EngineState,
    Failed,
    LogLevel,
    Ready,
    Reload,
    ReplicaDraining,
    ReplicaLost,
    ReplicaRemoved,
    ReplicaRole,
    ReplicaRoles,
    ReplicaStarting,
    ReplicaUp,
    SetLogLevel,
    Shutdown,
    UseKVPeers,
)
from quire.server.client.dp_coordinator import DPCoordinator
from quire.server.client.helper_process import HelperProcess
from quire.server.client.metrics import Metrics
from quire.server.client.replica_roles import host_of, hosts_with_one_role, role_changes, wanted_roles
from quire.server.config.server_options import RestartPolicy

RESTART_SECONDS = (0.1, 60.0)
"""Delay from the death of a replica to its restart: the first delay, and the longest one if it dies repeatedly."""
RESTART_WINDOW = 600.0
"""See `RestartPolicy.max_restarts`, in seconds."""
_MAX_DOUBLINGS = 16
_MIN_UP_SECONDS = 10.0
"""A replica that dies sooner is restarted later each time."""
SHUTDOWN_SECONDS = 10.0
_QUICK_SHUTDOWN_SECONDS = 0.5
"""The same after an interrupt at the end of a script."""
_FIRST = 100
"""Exit priority of stopping the cores: before all other tasks of the exit, to which the cores may still respond."""

_ROLE_TEXTS: dict[ReplicaRole, str] = {"any": "all requests", "prefill": "prompts", "decode": "decodes"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiProcessInfo:
    """The addresses that the API processes share, and the number of this process."""

    endpoints: Endpoints
    metrics: str
    """The file with the metrics."""
    awaited: frozenset[int]
    """The replicas that have to be up before the API accepts requests, and have not been yet."""
    roles: dict[int, ReplicaRole]
    """As in `ReplicaRoles`."""
    index: int = 0

    @property
    def count(self) -> int:
        return len(self.endpoints.responses)


class _Core(SupervisedProcess):
    """The engine core of one replica."""

    def __init__(self, manager: EngineManager, replica: int, config: EngineConfig) -> None:
        super().__init__("the engine core")
        self.replica = replica
        self.config = config
        self.incarnation = 0
        self.up_at = 0.0
        """Time at which it was last ready, on the monotonic clock."""
        self.deaths: deque[float] = deque()
        """Times of its deaths in the last `RESTART_WINDOW` seconds."""
        self.num_quick_deaths = 0
        """Deaths in a row that came within `_MIN_UP_SECONDS`."""
        self._manager = manager

    def start(self) -> Process:
        self.incarnation = time.time_ns()
        return self._manager.start_core(self)

    def on_ready(self, ready: Ready) -> None:
        self.up_at = time.monotonic()
        if (level := self._manager.changed_log_level) is not None:
            self.send(SetLogLevel(level))  # its nodes may have been started with another one
        if self.is_stopping or not self._manager.group_runs:
            return  # it was asked to stop in the meantime
        blocks = 0 if ready.stats is None else ready.stats.kv_blocks
        parallel = self.config.parallel
        up = ReplicaUp(
            self.replica,
            self.incarnation,
            ready.stats,
            ready.seconds,
            max_model_len=self.config.with_blocks(blocks).model.max_model_len,
            tensor_parallel_size=parallel.tensor_parallel_size,
            stages=[(layers.start, layers.stop - 1) for layers in parallel.stages],
            kv_peer=self._manager.kv_peer,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        )
        self._manager.on_up(up)

    def on_stopped(self) -> None:
        self._manager.tell_kv_store(ReplicaRemoved(self.replica))

    def on_exit(self, failure: Failed) -> float | None:
        # Before its requests go on elsewhere: they would wait for what it has not stored.
        self._manager.tell_kv_store(ReplicaLost(self.replica, failure.reason, returns=False))
        now = time.monotonic()
        self.deaths.append(now)
        while now - self.deaths[0] > RESTART_WINDOW:
            self.deaths.popleft()
        self.num_quick_deaths = 0 if self.is_ready and now - self.up_at > _MIN_UP_SECONDS else self.num_quick_deaths + 1
        return self._manager.on_core_exit(self, failure)


class _KVStore(HelperProcess):
    """The KV store of this host. Cores connect to whatever process has its address."""

    def __init__(self, manager: EngineManager) -> None:
        super().__init__("the KV store", manager, "Engine cores compute what they would load")
        self._manager = manager

    def start(self) -> Process:
        return self._manager.start_kv_store()

    def on_state(self, state: Literal["up", "down", "failed"]) -> None:
        """Do nothing: cores notice it."""


class EngineManager:
    """The replicas of an engine, as their supervisor sees them. Its methods belong to the thread that runs
    `supervisor`, except the methods for other hosts' notices and `drained`.
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

        `hosts` are the hosts of other replicas (`quire.server.client.dp_coordinator.connect_hosts`), which are closed
        with the manager.
        """
        parallel = config.parallel
        self.supervisor = Supervisor(parallel.watchdog_seconds)
        self.states: dict[int, ReplicaUp | ReplicaLost | ReplicaDraining] = {}
        """The newest state of each replica that has been up or has died."""
        self.failure: EngineFailed | None = None
        """The reason why the engine has failed for good."""
        self.is_user_error = False
        """Whether the reason is an error of the configuration."""
        self.is_started = False
        """Whether requests are accepted. From then on, no process ends the engine that some requests do not need."""
        self.on_change: Callable[[EngineState], None] = lambda state: None
        """Called with every new state."""
        self._config, self._hosts = config, hosts or DPCoordinator()
        self.log_level = log_level
        """The level of log messages of new processes."""
        self.changed_log_level: LogLevel | None = None
        """The level of log messages, if it is not the one of the start."""
        self._policy = policy or RestartPolicy()
        self._is_stopping = self._leave_together = False
        self._folder = RuntimeFolder()
        local = local_endpoints(parallel, self._folder.path, num_clients)
        self._endpoints = Endpoints(
            requests=self._hosts.requests or local.requests,
            responses=self._hosts.responses or local.responses,
            kv_store="" if config.kv_store is None else f"ipc://{self._folder.path}/kv-store",
        )
        self.metrics_path = f"{self._folder.path}/metrics"
        """The file of the metrics, which all processes of this host share."""
        self.requests = {replica: self._endpoints.requests[replica] for replica in parallel.api_replicas}
        """The replicas of the API, and the address of each."""
        self.roles: dict[int, ReplicaRole] = {
            replica: role for replica in self.requests if (role := parallel.role_of(replica)) != "any"
        }
        """As in `ReplicaRoles`."""
        self._with_one_role: dict[str, ReplicaRole] = {}
        """Of which the log has told (`hosts_with_one_role`)."""
        self._awaited = set(self.requests)
        """Replicas of the start that have not been up yet."""
        self._has_been_up: set[int] = set()
        self._unverified: dict[int, ReplicaUp] = {}
        """Replicas that are up, and whose weights are still compared with other hosts'."""
        self._drained: dict[int, set[int]] = {}
        """The replicas that drain, and the API processes that have no more requests on them."""
        self.metrics = Metrics(name, self.metrics_path, 0, num_clients)
        for replica in self.requests:
            self.metrics.state(replica, "loading")
        self._num_group_starts = 0
        self.group_runs = True
        """Whether replicas that share experts have been started, and none has died since."""
        self._running_elsewhere = set[int]()
        """Replicas of other hosts that have not exited while the group is being stopped."""
        self._cores = [
            _Core(self, replica, config.of_role(parallel.role_of(replica))) for replica in parallel.local_replicas
        ]
        self._others: dict[SupervisedProcess, Callable[[], object]] = {}
        """The processes that are no engine cores, and what to call when they have ended."""
        self._lost_since: float | None = None
        """Time since which no replica is up, although some were."""
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="engine-manager")
        self._kv_store = None if config.kv_store is None else _KVStore(self)
        if self._kv_store is not None:
            self.add_process(self._kv_store)
        for core in self._cores:
            self.supervisor.add(core)
        self._hosts.watch(self)

    def add_process(self, other: SupervisedProcess, on_end: Callable[[], object] = lambda: None) -> None:
        """Start a process on this host that is no engine core. It is told about changes of the logs, and is stopped
        after the cores; then `on_end` is called.
        """
        self._others[other] = on_end
        self.supervisor.add(other)

    def process_info(self, index: int) -> ApiProcessInfo:
        """Return the information about the other processes that API process `index` needs."""
        endpoints = replace(self._endpoints, requests=dict(self.requests))
        return ApiProcessInfo(endpoints, self.metrics_path, frozenset(self._awaited), dict(self.roles), index)

    def start_core(self, core: _Core) -> Process:
        """Start the core of a replica."""
        # Ranks of coupled replicas rendezvous at another place each time.
        local = f"file://{self._folder.path}/rendezvous-{self._num_group_starts}"
        init_method = self._hosts.init_method or local
        config = replica_config(core.config, core.replica, init_method, self._hosts.masters.get(core.replica))
        endpoints = replace(self._endpoints, requests=self._endpoints.requests | self.requests)
        return start_core(CoreArgs(config, endpoints, self.log_level, core.incarnation), self._folder.path)

    def tell_kv_store(self, state: ReplicaLost | ReplicaRemoved) -> None:
        """Tell the KV store that a replica stores nothing any more, or that none of its ranks reads or writes there."""
        if self._kv_store is not None:
            self._kv_store.send(state)

    @property
    def kv_peer(self) -> str:
        """Where others read from the KV store of this host; empty: nowhere."""
        return self._hosts.kv_peer or peer_address(self._config)

    def start_kv_store(self) -> Process:
        """Start the process of the KV store."""
        assert self._config.kv_store is not None
        own, parallel = (self._endpoints.kv_store, self._folder.path, self.log_level), self._config.parallel
        master, _ = self._hosts.masters.get(parallel.replica, parallel.master)
        rank_host = master if parallel.nodes > 1 else ""
        return start_kv_store(KVStoreArgs(self._config, *own, self.kv_peer, self._kv_peers, rank_host))

    @property
    def _kv_peers(self) -> tuple[str, ...]:
        """From where the KV store of this host reads."""
        return (*(() if (store := self._config.kv_store) is None else store.peers), *self._hosts.kv_peers)

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level, in the engine cores and ranks of all hosts that this one leads, and
        in their successors.
        """
        self.log_level = self.changed_log_level = level
        for each in (*self._cores, *self._others):
            each.send(SetLogLevel(level))
        self._hosts.set_log_level(level)

    def reload(self, message: Reload) -> None:
        """Let this host's processes read the configuration of the logs again."""
        if message.log_config:
            for each in (*self._cores, *self._others):
                each.send(message)

    @property
    def is_settled(self) -> bool:
        """Whether every replica has been up, or the engine has failed."""
        return self.failure is not None or not self._awaited

    def on_up(self, state: ReplicaUp) -> None:
        """Record that a replica is up, once it may answer."""
        if self._hosts.may_answer(state.replica):
            self.on_state(state)
        else:
            logger.info(
                "%sloaded; waiting for the comparison of all bytes of the weights (--trust-weights omits it)",
                self._prefix(state.replica),
            )
            self._unverified[state.replica] = state

    def on_state(self, state: EngineState) -> None:
        """Record a new state and pass it on."""
        if not isinstance(state, EngineFailed | ReplicaRoles):
            self._unverified.pop(state.replica, None)
        match state:
            case ReplicaStarting(replica, address):
                self.requests[replica] = address
                self.states.pop(replica, None)
                self.metrics.state(replica, "loading")
            case ReplicaUp(replica, stats=stats):
                if replica in self._has_been_up:
                    logger.info("%s is up again", f"replica {replica}" if self._has_several else "the engine core")
                elif replica not in self._awaited:
                    logger.info("replica %d is up", replica)
                elif stats is not None:
                    config = next((core.config for core in self._cores if core.replica == replica), self._config)
                    if stats.kv_blocks != config.cache.num_blocks:
                        logger.info("%s%s", self._prefix(replica), cache_text(config.with_blocks(stats.kv_blocks)))
                self._has_been_up.add(replica)
                self._awaited.discard(replica)
                self.states[replica] = state
                self.metrics.state(replica, "up")
                self._check_hosts()
            case ReplicaLost(replica, reason):
                self.states[replica] = state
                self.metrics.state(replica, "restarting" if state.returns else "dead")
                self.metrics.count_death(replica, reason)
            case ReplicaDraining(replica):
                self.states[replica] = state
                self.metrics.state(replica, "draining")
            case ReplicaRemoved(replica):
                del self.requests[replica]
                for known in (self._awaited, self._has_been_up):
                    known.discard(replica)
                for table in (self.states, self._drained, self.roles):
                    table.pop(replica, None)
                self.metrics.state(replica, "removed")
            case ReplicaRoles(roles):
                self.roles = roles
            case EngineFailed():
                if self.failure is not None:
                    return
                self.failure = state
        up = any(isinstance(each, ReplicaUp | ReplicaDraining) for each in self.states.values())
        self._lost_since = None if up else self._lost_since or time.monotonic()
        self.on_change(state)

    def on_core_exit(self, core: _Core, failure: Failed) -> float | None:
        """Handle the exit of a core; returns the seconds after which to start it again."""
        self._unverified.pop(core.replica, None)
        if self.failure is not None:
            return None
        reason, policy = f"{self._prefix(core.replica)}{failure.reason}", self._policy
        if core.replica in self._awaited and self.group_runs:
            is_killed = core.failure is None  # by somebody else, which need not happen again
            if is_killed and len(core.deaths) == 1 and policy.is_enabled and not self._config.parallel.is_coupled:
                logger.error("%s; starting it again", reason)
                return RESTART_SECONDS[0]
            self.is_user_error = failure.user_error
            self.on_state(EngineFailed(reason))
            return None
        is_coupled = self._config.parallel.is_coupled
        if core.replica not in self._has_been_up and not is_coupled:  # it was added
            logger.error("%s; it is not started again", reason)
            self.on_state(ReplicaLost(core.replica, failure.reason, returns=False))
            return None
        if core.replica in self._drained:
            logger.error("%s; its requests go on elsewhere", reason)
            self._remove_lost(core.replica, failure.reason)
            return None
        others = [state for replica, state in self.states.items() if replica != core.replica]
        is_last = is_coupled or not any(isinstance(state, ReplicaUp) for state in others)
        is_over = is_last and len(core.deaths) > policy.max_restarts
        is_fixed = is_coupled and not self._hosts.restarts_group
        returns = policy.is_enabled and not is_over and not is_fixed
        if is_last and not returns:
            deaths = f" (death {len(core.deaths)} within {RESTART_WINDOW / 60:.0f} minutes; see --max-restarts)"
            self.on_state(EngineFailed(reason + deaths * (is_over and policy.is_enabled)))
            return None
        least, most = RESTART_SECONDS
        delay = min(most, least * 2 ** min(core.num_quick_deaths, _MAX_DOUBLINGS))
        if is_coupled:
            self._stop_group(reason, failure.reason, core.replica)
            if not self._hosts.leads:  # its leader counts the cores that have exited
                self.on_state(ReplicaLost(core.replica, failure.reason, returns))
            self._start_group_if_stopped(delay)
            return None
        logger.error("%s; %s", reason, "restarting it" if returns else "it is not restarted (--no-restart)")
        self.on_state(ReplicaLost(core.replica, failure.reason, returns))
        return delay if returns else None

    # --- restarting replicas that share experts -----------------------------------------------------------------

    def _stop_group(self, message: str, reason: str, died: int | None = None) -> None:
        """Stop all replicas, also on other hosts, as one has died: `died`, or one whose host was lost."""
        if self.group_runs:
            self.group_runs = False
            self._unverified.clear()
            logger.error("%s; restarting all replicas, which share experts", message)
            if self._hosts.leads:
                self._running_elsewhere = self._elsewhere
                self._hosts.stop_group()
                # All at once: a request that went on at another one would be suspected of that one's death, too.
                for replica in [each for each, state in self.states.items() if isinstance(state, ReplicaUp)]:
                    self.on_state(ReplicaLost(replica, reason, returns=True, may_be_caused_by_request=replica == died))
        for core in self._cores:
            core.restart_at = None
            if core.process is not None:
                core.send(Shutdown())
                core.kill_at = min(core.kill_at, time.monotonic() + SHUTDOWN_SECONDS)

    def _start_group_if_stopped(self, delay: float) -> None:
        """Start all replicas again, once all have exited: one that is still exiting would fail the others."""
        if self.group_runs or self._running_elsewhere or any(core.process is not None for core in self._cores):
            return
        if not self._hosts.leads:
            return  # see `group_starts`
        if all(map(self._hosts.is_joined, self._elsewhere)):
            self._hosts.start_group(self.requests)
            self._start_group(delay)

    @property
    def _elsewhere(self) -> set[int]:
        """The replicas of other hosts."""
        return self.requests.keys() - {core.replica for core in self._cores}

    def _start_group(self, delay: float = 0.0) -> None:
        self.group_runs = True
        self._num_group_starts += 1
        for core in self._cores:
            core.restart_at = time.monotonic() + delay

    def group_stops(self) -> None:
        """Report that a replica on another host has died, which shares experts with this one's; from any thread."""
        reason = "a replica on another host has died"

        def handle() -> None:
            starting = [core for core in self._cores if core.restart_at is not None]
            self._stop_group(reason, reason)
            for core in starting:  # its leader takes it for running
                self.on_state(ReplicaLost(core.replica, reason, returns=True))

        self.supervisor.call(handle)

    def group_starts(self, requests: dict[int, str]) -> None:
        """Report that all replicas that share experts start again, at these addresses; from any thread."""

        def handle() -> None:
            self._endpoints = replace(self._endpoints, requests=requests)
            self._start_group()

        self.supervisor.call(handle)

    # --- adding and removing replicas ----------------------------------------------------------------------------

    def resize(
        self, count: int | None, drain_seconds: float, prefill: int | None = None, decode: int | None = None
    ) -> None:
        """Start replicas on this host, drain some of its replicas, or give replicas other roles, so that there are as
        many as `wanted_roles` says, 1 to `MAX_REPLICAS`; does not wait for them.

        Replicas that are not up are removed first, then the replicas with the highest numbers, both if their role has
        too many. New ones have the layout of their role; a replica that gets another role is not restarted, and keeps
        its layout. Dead ones that stay are started again. Raises `ConfigError`, and changes nothing, if that is not
        possible.
        """
        if not self.is_settled or self.failure is not None:
            raise ConfigError("the engine is not running yet, or has failed")
        config = self._config
        roles: dict[int, ReplicaRole] = {
            each: self.roles.get(each, "any") for each in sorted(self.requests.keys() - self._drained.keys())
        }
        have = Counter(roles.values())
        want = wanted_roles(have, count, prefill, decode)
        if count is not None or want.total() != have.total():
            check_resizable(config.parallel)
        if want.total() > MAX_REPLICAS:
            raise ConfigError(f"{want.total()} replicas: at most {MAX_REPLICAS} are supported")
        if want["prefill"] and (config.model.pooling is not None or not self._may_hand_over):
            raise ConfigError(
                "replicas for prompts hand over KV by way of the host's memory, and this server keeps none there; "
                "restart it with --prefill-replicas and --decode-replicas, or with --kv-offloading-size"
            )
        here = {core.replica: core for core in self._cores if not core.is_stopping}
        removable = sorted(
            (each for each in roles if not self._hosts.is_joined(each)),
            key=lambda replica: (isinstance(self.states.get(replica), ReplicaUp), -replica),
        )
        suited = {
            role: [each for each, core in here.items() if core.config.has_layout_of(config.of_role(role))]
            for role in want
        }
        new = role_changes(roles, want, removable, suited)
        if len(new.removed) < have.total() - want.total():
            raise ConfigError(
                f"there are {have.total() - len(removable)} replicas on other hosts, so that {want.total()} are too "
                "few; stop them there, by SIGTERM"
            )
        self._cores = [core for core in self._cores if core.process is not None or not core.is_stopping]
        taken = self.requests.keys() | {core.replica for core in self._cores}  # also cores that are exiting
        unused = (number for number in range(MAX_REPLICAS) if number not in taken)
        added, addresses = list[_Core](), dict[int, str]()
        for number, role in zip(unused, new.added, strict=False):
            others = [*self._cores, *added]
            used = {device for core in others for device in self._devices(core)}
            num_loading = sum(not core.is_ready for core in others)
            ranks = [core.config.parallel.ranks_per_node for core in others]
            its_config = added_replica(config.of_role(role), number, used, ranks, num_loading)
            added.append(_Core(self, number, its_config))
            addresses[number] = self._hosts.added_address(number) or request_address(self._folder.path, number)
        self._set_roles({**new.changed, **{core.replica: role for core, role in zip(added, new.added, strict=True)}})
        for replica in new.removed:
            logger.info("replica %d is to be removed, and drains for up to %g s", replica, drain_seconds)
            self._drain(replica, drain_seconds)
        for replica in roles.keys() - set(new.removed):
            if (core := here.get(replica)) is not None and core.process is None and core.restart_at is None:
                self._announce(core, self.requests[replica])
                core.restart_at = time.monotonic()
        for core in added:
            self._cores.append(core)
            self._announce(core, addresses[core.replica])
            self.supervisor.add(core)
        self._check_hosts()

    @property
    def _may_hand_over(self) -> bool:
        """Whether hosts with replicas have a KV store; of others, this one may know nothing."""
        return self._config.kv_store is not None or not self._config.parallel.local_replicas

    def _set_roles(self, changed: Mapping[int, ReplicaRole]) -> None:
        """Give these replicas a role, and report it if it is another one."""
        roles = self.roles.copy()
        for replica, role in changed.items():
            if roles.get(replica, "any") != role:
                logger.info("replica %d is for %s from now on", replica, _ROLE_TEXTS[role])
            roles[replica] = role
            if role == "any":
                del roles[replica]
        if roles != self.roles:
            self.on_state(ReplicaRoles(roles))

    def _check_hosts(self) -> None:
        """Tell of hosts whose requests change hosts, and warn of those whose requests cannot."""
        up = {replica: state for replica, state in self.states.items() if isinstance(state, ReplicaUp)}
        known = {host_of(self.requests[replica]): state.kv_peer for replica, state in up.items()}
        one_role = hosts_with_one_role(self.requests, self.roles)
        found = {host: role for host, role in one_role.items() if host in known}
        for host, role in found.items() - self._with_one_role.items():
            if known[host]:
                logger.info("all replicas of %s are for %s: their requests may change hosts", host, _ROLE_TEXTS[role])
                continue
            only = "compute their prompts, too" if role == "decode" else "get requests only if there are no others"
            logger.warning(
                "all replicas of %s are for %s, and it has no KV store that other hosts read: these replicas %s; set "
                "--kv-offloading-size there, or give each host replicas of both roles",
                *(host, _ROLE_TEXTS[role], only),
            )
        self._with_one_role = found

    def _devices(self, core: _Core) -> list[int]:
        parallel = replica_config(core.config, core.replica, "").parallel
        return [parallel.device_of(rank) for rank in parallel.ranks_of(parallel.node)]

    def _announce(self, core: _Core, address: str) -> None:
        """Report that a core is about to be started."""
        logger.info("replica %d is being started", core.replica)
        self._hosts.local_replicas |= {core.replica}
        self.on_state(ReplicaStarting(core.replica, address))

    @property
    def draining(self) -> list[int]:
        """The replicas that drain."""
        return list(self._drained)

    def drained(self, client: int, replica: int) -> None:
        """Report that an API process has no more requests on a replica that drains; from any thread."""

        def handle() -> None:
            if (clients := self._drained.get(replica)) is not None:
                clients.add(client)
                if len(clients) == len(self._endpoints.responses):
                    self._remove(replica)

        self.supervisor.call(handle)

    def _drain(self, replica: int, seconds: float) -> None:
        """Remove a replica when its requests have ended or have moved, which they do after `seconds`."""
        if isinstance(self.states.get(replica), ReplicaUp):
            self._drained[replica] = set()
            self.on_state(ReplicaDraining(replica, seconds))
        elif replica not in self._drained:
            self._remove(replica)

    def _remove(self, replica: int) -> None:
        """Forget a replica that has no requests, and stop it."""
        logger.info("replica %d has been removed", replica)
        self.on_state(ReplicaRemoved(replica))
        for core in self._cores:
            if core.replica == replica and not core.is_stopping:
                self.supervisor.end(core, Shutdown(), SHUTDOWN_SECONDS)
        self._hosts.local_replicas -= {replica}
        self._hosts.dismiss(replica)

    def _remove_lost(self, replica: int, reason: str) -> None:
        """Forget a replica that has died while it was draining; its requests are moved."""
        self.on_state(ReplicaLost(replica, reason, returns=False))
        self._remove(replica)

    # --- notices of other hosts, from any thread ----------------------------------------------------------------

    def replica_joined(self, replica: int, address: str) -> None:
        """Report that the host of a replica has joined, and loads the model."""

        def handle() -> None:
            if any(core.replica == replica and not core.is_stopping for core in self._cores):  # both at the same moment
                self._hosts.dismiss(replica, f"replica {replica} is on the host with the API")
            else:
                if self.roles and replica not in self.roles:
                    role = self._config.parallel.role_of(replica)
                    self._set_roles({replica: "decode" if role == "any" else role})
                self.on_state(ReplicaStarting(replica, address))
                if self._config.parallel.is_coupled and not self.group_runs:
                    self._running_elsewhere.discard(replica)
                    self._start_group_if_stopped(0.0)

        self.supervisor.call(handle)

    def replica_leaves(self, replica: int, seconds: float) -> None:
        """Report that the host of a replica shuts down, when the requests there have ended or have moved."""

        def handle() -> None:
            if replica in self.requests:
                logger.info("replica %d leaves, and drains for up to %g s", replica, seconds)
                self._drain(replica, seconds)

        self.supervisor.call(handle)

    def replica_died(self, replica: int, reason: str, *, is_host_lost: bool = False, user_error: bool = False) -> None:
        """Report that a replica on another host has died, or that the host was lost (`is_host_lost`)."""

        def handle() -> None:
            self._unverified.pop(replica, None)
            is_coupled = self._config.parallel.is_coupled
            if replica in self._awaited or (is_coupled and not self._policy.is_enabled):
                self.is_user_error |= user_error
                self.on_state(EngineFailed(f"{self._prefix(replica)}{reason}"))
            elif is_coupled:
                self._stop_group(f"{self._prefix(replica)}{reason}", reason, None if is_host_lost else replica)
                self._running_elsewhere.discard(replica)
                self._start_group_if_stopped(RESTART_SECONDS[0])
            elif replica not in self.requests or isinstance(self.states.get(replica), ReplicaLost):
                return  # it has left, or this is known
            elif replica in self._has_been_up and replica not in self._drained:
                logger.error("%s%s", self._prefix(replica), reason)
                self.on_state(ReplicaLost(replica, reason, returns=True, may_be_caused_by_request=not is_host_lost))
            else:
                logger.error("%s%s; it is removed", self._prefix(replica), reason)
                self._remove_lost(replica, reason)

        self.supervisor.call(handle)

    def replica_up(self, state: ReplicaUp) -> None:
        """Report that a replica on another host is up."""

        def handle() -> None:
            if state.replica in self.requests and state.replica not in self._drained:
                self.on_up(state)

        self.supervisor.call(handle)

    def weights_compared(self) -> None:
        """Report that a host has the same weights as the leader."""

        def handle() -> None:
            for state in list(self._unverified.values()):
                self.on_up(state)

        self.supervisor.call(handle)

    def log_level_changed(self, level: LogLevel) -> None:
        """Report that the host with the API has another level of log messages, which this host takes over."""

        def handle() -> None:
            log.set_level(level)
            self.set_log_level(level)

        self.supervisor.call(handle)

    def kv_peers_changed(self) -> None:
        """Report that the KV stores of other hosts are read elsewhere; from any thread."""

        def handle() -> None:
            if self._kv_store is not None:
                self._kv_store.send(UseKVPeers(self._kv_peers))

        self.supervisor.call(handle)

    def fail(self, reason: str, *, user_error: bool = False) -> None:
        """Report that the engine has failed for good."""

        def handle() -> None:
            self.is_user_error |= user_error
            self.on_state(EngineFailed(reason))

        self.supervisor.call(handle)

    # --- running and stopping -----------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Supervise the processes until `until` returns true."""

        def is_over() -> bool:
            timeout = self._config.parallel.timeout
            if any(core.process is not None for core in self._cores):  # it is being started: its end will be noticed
                self._lost_since = self._lost_since and time.monotonic()
            if not self._folder.exists:
                where = f"{self._folder.path} with the sockets of this server"
                self.on_state(EngineFailed(f"the folder {where} was removed; set TMPDIR to a safe place"))
            if self._lost_since is not None and self.states and time.monotonic() - self._lost_since > timeout:
                self.on_state(EngineFailed(f"no replica has been up for {timeout:g} s"))
            return until()

        self.supervisor.run(is_over)

    def run_in_thread(self) -> None:
        """Supervise the processes in a thread, until `stop_thread` or the end of this process."""
        self._thread.start()
        # Not atexit, which a child process of multiprocessing skips, and a fork of this process does not.
        self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=_FIRST)

    def stop_thread(self, *, together: bool = False) -> threading.Thread:
        """Let the thread close the manager and end (see `close`), and return it."""
        self._is_stopping, self._leave_together = True, together
        self.supervisor.call(lambda: None)  # wakes the thread
        return self._thread

    def _stop_at_exit(self) -> None:
        try:
            self.stop_thread(together=True).join()
        except KeyboardInterrupt:
            self.supervisor.call(lambda: self.supervisor.hurry(_QUICK_SHUTDOWN_SECONDS))
            self._thread.join()

    def _run_thread(self) -> None:
        try:
            self.run(lambda: self._is_stopping)
        except Exception as error:  # otherwise the client would wait for ever
            logger.exception("the engine manager failed")
            self.on_state(EngineFailed(f"the engine manager failed: {type(error).__name__}: {error}"))
        self.close(together=self._leave_together)
        self._at_exit.cancel()

    def close(self, reason: str = "", *, together: bool = False, drain_seconds: float = 0.0) -> None:
        """Stop the cores, disconnect from the other hosts, with the reason if it is an error, and remove all files.

        `together`: unless an error occurs, keep the cores running until no other host needs them. Requests of an API on
        another host move to other replicas after `drain_seconds`.
        """
        hosts = self._hosts
        if together and not reason and self.failure is None and not hosts.can_shut_down:
            hosts.request_shutdown(drain_seconds)
            self.run(lambda: hosts.can_shut_down or self.failure is not None)
        reason = reason or (self.failure.reason if self.failure is not None else "")
        hosts.close(reason, user_error=self.is_user_error)
        self.supervisor.stop(self._cores, Shutdown(reason), SHUTDOWN_SECONDS)
        self.supervisor.stop([*self._others], Shutdown(), SHUTDOWN_SECONDS)
        for on_end in self._others.values():
            on_end()
        self._folder.remove()

    def _prefix(self, replica: int) -> str:
        """The prefix of log messages about a replica, if there are several."""
        return f"replica {replica}: " if self._has_several else ""

    @property
    def _has_several(self) -> bool:
        return self._config.parallel.replicas > 1 or len(self.requests) > 1
