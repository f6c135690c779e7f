"""`quire serve --headless` with `--data-parallel-start-rank`: run this host's replicas, for an API elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack

import msgspec
import zmq

from quire.engine import process
from quire.engine.cluster.security import join
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.core.launch import Endpoints, replica_config, start_core
from quire.engine.protocol.engine_core import EngineCoreOutputs, EngineDead, EngineReady, ToServer
from quire.engine.protocol.errors import ConfigError
from quire.server.config import ServerOptions
from quire.server.frontend.dp_coordinator import DPMember

_WATCH_MS = 200
_RESTART_SECONDS = 1.0
"""Minimum interval between two starts of the same replica."""
_SHUTDOWN_SECONDS = 12.0
"""A little more than an engine core takes at most to shut down by itself."""
_EXIT_REASON_SECONDS = 2.0
"""How long to wait for the last message of a core that has exited by itself. A core that was killed sends none."""

logger = logging.getLogger(__name__)


def serve_replicas(options: EngineOptions, server: ServerOptions) -> int:
    """Run this host's replicas until the API exits (0), a signal arrives (0), or something fails (1)."""
    if options.data_parallel_start_rank is None:
        raise ConfigError(
            "--headless: say which replicas this host has (--data-parallel-start-rank, --data-parallel-size-local), or "
            "which of the --nnodes hosts it is (--node-rank)"
        )
    config = resolve(options)
    process.set_name("quire-replicas")
    print(plan_text(config), flush=True)
    fetch_weights(options, config)
    stop = threading.Event()
    with ExitStack() as stack:
        membership = DPMember(config, is_headless=True)
        reason = ""
        stack.callback(lambda: membership.close(reason))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(130) if stop.is_set() else stop.set())
        replicas = stack.enter_context(HeadlessReplicas(config, membership, server.log_level))
        problem = replicas.run(stop)
        reason = problem or ""
    if problem is None:
        return 0
    print(f"quire: error: {problem}", file=sys.stderr)
    return 1


class HeadlessReplicas:
    """The engine cores of a host. A core that dies after it was ready is restarted, unless the replicas are coupled.

    On a host with an API, `EngineClient` does this; it also has requests to resume, and runs on an event loop.
    """

    def __init__(self, config: EngineConfig, membership: DPMember, log_level: str) -> None:
        self._config, self._membership, self._log_level = config, membership, log_level
        self._folder = tempfile.mkdtemp(prefix="quire-")
        messages = f"ipc://{self._folder}/messages"
        # This process also receives what the cores send to every API process.
        self._endpoints = Endpoints(membership.requests, (*membership.responses, messages))
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PULL)
        self._messages.set_hwm(0)
        self._messages.bind(messages)
        self._decode = msgspec.msgpack.Decoder(ToServer).decode
        self._loaded: set[int] = set()
        self._exit_reasons: dict[int, tuple[str, float]] = {}
        """By replica: why its core exits, and when it sent that."""
        self._started: dict[int, float] = {}
        """Start times, on the monotonic clock."""
        self._to_restart: set[int] = set()
        """Replicas to restart."""
        self._cores: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> HeadlessReplicas:
        return self

    def __exit__(self, *error: object) -> None:
        for core in self._cores.values():
            assert core.stdin is not None
            core.stdin.close()  # this makes the core exit
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for replica, core in self._cores.items():
            try:
                core.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("the engine core of replica %d did not stop and will be killed", replica)
                core.kill()
                core.wait()
        self._messages.close(0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, stop: threading.Event) -> str | None:
        """Run until `stop` is set or the API exits. Returns what went wrong, if anything did."""
        for replica in self._config.parallel.local_replicas:
            self._start(replica)
        while not stop.is_set():
            if self._membership.ended is not None:
                reason = self._membership.ended.reason
                logger.info("%s has exited%s", self._membership.leader, f": {reason}" if reason else "")
                return reason or None
            if self._messages.poll(_WATCH_MS):
                self._receive()
            for replica, core in self._cores.items():
                if replica not in self._to_restart and (problem := self._check_core(replica, core)) is not None:
                    return problem
            for replica in [r for r in self._to_restart if time.monotonic() - self._started[r] >= _RESTART_SECONDS]:
                self._start(replica)
        logger.info("shutting down")
        return None

    def _start(self, replica: int) -> None:
        self._to_restart.discard(replica)
        self._started[replica] = time.monotonic()
        config = replica_config(self._config, replica, self._membership.init_method)
        self._cores[replica] = start_core(config, self._endpoints, self._log_level)

    def _receive(self) -> None:
        while self._messages.poll(0):
            match self._decode(join(self._messages.recv_multipart())):
                case EngineReady(seconds, replica):
                    self._loaded.add(replica)
                    where = ", ".join(f"{part} {count:.2f} s" for part, count in seconds.items())
                    logger.info("replica %d is ready (%s)", replica, where)
                case EngineDead(reason, replica):
                    self._exit_reasons[replica] = reason, time.monotonic()
                case EngineCoreOutputs():  # only the engine's stats, sent to every API process
                    pass

    def _check_core(self, replica: int, core: subprocess.Popen[bytes]) -> str | None:
        """Check whether a core has exited, and return why the others cannot continue, if so. Kill a core that announced
        its exit but is still running.
        """
        code = core.poll()
        if code is None:
            _, received_at = self._exit_reasons.get(replica, ("", time.monotonic()))
            if time.monotonic() - received_at > _SHUTDOWN_SECONDS:
                core.kill()
            return None
        deadline = time.monotonic() + _EXIT_REASON_SECONDS * (code >= 0)
        while replica not in self._exit_reasons and (left := deadline - time.monotonic()) > 0:
            self._messages.poll(int(left * 1000) + 1)
            self._receive()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        reason, _ = self._exit_reasons.pop(replica, (f"the engine core of replica {replica} {how}", 0.0))
        self._membership.report_death(replica, reason)
        if replica not in self._loaded or self._config.parallel.is_coupled:
            return reason
        assert core.stdin is not None
        core.stdin.close()
        logger.error("%s; restarting replica %d", reason, replica)
        self._to_restart.add(replica)
        return None
