"""`quire serve --headless` on a host with the engine core of a replica: run these replicas, for an API elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from quire.engine.cluster import ray_cluster
from quire.engine.cluster.control_plane import Rejected
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights
from quire.engine.process import current_process, log
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import EngineState, Failed, Reload, ReplicaLost, ReplicaUp
from quire.server.client.dp_coordinator import DPMember, ReplicaDied
from quire.server.client.engine_manager import EngineManager
from quire.server.config.server_options import ServerOptions

_REJOIN_SECONDS = 1.0
"""Interval at which a host that was lost tries to join again."""

logger = logging.getLogger(__name__)


def serve_replicas(options: EngineOptions, server: ServerOptions) -> int:
    """Run this host's replicas until the API exits (0), a signal arrives (0), or something fails (1, or 2 if the
    configuration proves wrong).
    """
    if options.data_parallel_start_rank is None and options.nnodes == 1:
        raise ConfigError(
            "--headless: say which replicas this host has (--data-parallel-start-rank, --data-parallel-size-local), or "
            "which of the --nnodes hosts it is (--node-rank)"
        )
    config = ray_cluster.resolve(options)
    current_process.set_name("quire-replicas")
    log.print_text(plan_text(config))
    fetch_weights(options, config)
    stop = threading.Event()
    membership: DPMember | None = None
    drain_seconds = 0.0

    def on_signal(number: int, frame: object) -> None:
        nonlocal drain_seconds
        if stop.is_set():
            os._exit(130)
        drain_seconds = server.drain_seconds(is_interrupt=number == signal.SIGINT)
        stop.set()
        if membership is None:
            raise KeyboardInterrupt  # nothing else ends the wait for the leader

    def on_start(manager: EngineManager) -> None:
        def reload() -> None:
            if server.log_config_file is not None:
                level = manager.changed_log_level or server.log_level
                manager.reload(Reload(log.read_again(server.log_config_file, level), level))

        signal.signal(signal.SIGHUP, lambda number, frame: manager.supervisor.call(reload))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    deadline, has_run = 0.0, False
    try:
        while not stop.is_set():  # a signal may also arrive while the replicas of a lost leader end
            try:
                membership = DPMember(config, is_headless=True)
            except ConfigError as error:
                if (isinstance(error, Rejected) and not has_run) or time.monotonic() >= deadline:
                    raise
                time.sleep(_REJOIN_SECONDS)  # the leader has not noticed the loss yet
                continue
            problem = run_replicas(config, server, membership, stop, lambda: drain_seconds, on_start)
            if problem is None:
                return 0
            has_run |= membership.has_run
            if membership.ended is None or (problem.user_error and not has_run) or not server.restart:
                log.print_error(problem.reason)
                return 2 if problem.user_error else 1
            logger.error("%s; joining it again (--no-restart: exit instead)", problem.reason)
            membership, deadline = None, time.monotonic() + config.parallel.timeout
    except KeyboardInterrupt:
        pass
    logger.info("shutting down")
    return 0


def run_replicas(
    config: EngineConfig,
    server: ServerOptions,
    membership: DPMember,
    stop: threading.Event,
    drain_seconds: Callable[[], float] = lambda: 0.0,
    on_start: Callable[[EngineManager], None] = lambda manager: None,
) -> Failed | None:
    """Run this host's replicas until `stop` is set or the API exits. Returns a description of the problem, if there was
    one.

    After `stop`, unless they share experts, requests there end or move within `drain_seconds`.
    """
    manager = EngineManager(config, name="", log_level=server.log_level, hosts=membership, policy=server.restart_policy)

    def report(state: EngineState) -> None:
        match state:
            case ReplicaUp(replica, _, _, seconds):
                where = ", ".join(f"{part} {count:.2f} s" for part, count in seconds.items())
                logger.info("replica %d is ready (%s)", replica, where)
                membership.report(replica, state)
            case ReplicaLost(replica, reason):
                membership.report(replica, ReplicaDied(reason))

    manager.on_change = report
    on_start(manager)
    reason, leaves = "", False
    try:
        manager.run(lambda: stop.is_set() or manager.failure is not None or membership.ended is not None)
        if membership.ended is not None:
            reason = membership.ended.reason
            logger.info("%s has exited%s", membership.leader, f": {reason}" if reason else "")
        elif manager.failure is not None:
            reason = manager.failure.reason
        else:
            leaves = not config.parallel.is_coupled
            logger.info("shutting down%s", f" within {drain_seconds():g} s" * leaves)
    finally:
        manager.close(reason, together=leaves, drain_seconds=drain_seconds())
    is_final = membership.ended is not None and membership.ended.is_final
    return Failed(reason, manager.is_user_error or is_final) if reason else None
