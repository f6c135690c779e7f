"""The parent process of `quire serve`: starts and watches the engine cores, the media process and API processes.

    quire (parent) ─┬─ quire-core-R      one per replica on this host ── quire-rank-N
                    ├─ quire-media       for models that take images or videos
                    └─ quire-api-I       one per --api-server-count

Every process is replaced when it dies or hangs (`quire.engine.process.supervisor`). When the parent dies, all others
exit."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import current_process, log
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.service_manager import ServiceManager
from quire.engine.process.supervisor import Process, SupervisedProcess, start_process
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import (
    AdapterSeen,
    ChangeAdapter,
    Drain,
    Drained,
    EngineFailed,
    EngineState,
    Failed,
    LogLevel,
    NamedAdapter,
    Ready,
    Reload,
    ReplicaLost,
    Resize,
    ResizeReply,
    SetLogLevel,
    Shutdown,
)
from quire.server.cli.adapters import AdapterDirectory
from quire.server.cli.listen import address
from quire.server.cli.takeover import Offer, Predecessor
from quire.server.client.dp_coordinator import DPCoordinator
from quire.server.client.engine_manager import ApiProcessInfo, EngineManager
from quire.server.config.server_options import ServerOptions
from quire.server.media.service import MediaService
from quire.server.media.types import MediaSettings

_FAILURE_SECONDS = 2.0
"""Time for which /health reports why the engine died, before the server exits."""
_EXIT_SECONDS = 10.0
"""Time for an API process to exit after its requests have ended."""
_STOP_SECONDS = 30.0
"""Time for all processes to exit after that, for a service manager."""
_QUICK_EXIT_SECONDS = 0.5
"""Time for every process to exit after a second signal."""
_RESTART_SECONDS = 10.0
"""Longest delay before an API process that failed to start is started again."""
_MAX_FAILED_STARTS = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ApiProcessArgs:
    """The arguments of an API process."""

    config: EngineConfig
    options: ServerOptions
    names: tuple[str, ...]
    process_info: ApiProcessInfo
    listener: int
    """File descriptor of the inherited socket."""
    has_predecessor: bool
    """Whether another server accepts connections until this one can answer."""
    states: tuple[EngineState, ...]
    """The present state of the engine."""
    media_path: str
    """The socket of the media process; empty: the model takes only text."""
    adapters: tuple[NamedAdapter, ...]
    adapter_folder: str
    """For copies of adapters; empty: requests may have none."""
    download_dir: str | None
    """Where adapters are downloaded to; None: Hugging Face's cache."""


class _ApiProcess(SupervisedProcess):
    """An API process, which is restarted whenever it dies."""

    def __init__(self, server: Server, index: int) -> None:
        super().__init__(f"API process {index}")
        self.index = index
        self.seconds: dict[str, float] | None = None
        """Duration of each phase of its first start-up."""
        self._server = server
        self._num_failed_starts = 0

    def start(self) -> Process:
        return self._server.start_api_process(self.index)

    def on_ready(self, ready: Ready) -> None:
        if self.seconds is not None:
            logger.info("%s is ready again", self.name)
        self.seconds = ready.seconds
        self._num_failed_starts = 0

    def on_message(self, message: Drained | Resize | SetLogLevel | ChangeAdapter | AdapterSeen) -> None:
        manager = self._server.manager
        match message:
            case Drained(replica):
                manager.drained(self.index, replica)
            case Resize(count, drain_seconds, prefill, decode):
                error = ""
                try:
                    manager.resize(count, drain_seconds, prefill, decode)
                except (ConfigError, OSError) as problem:  # OSError: as when no files can be opened
                    error = str(problem)
                self.send(ResizeReply(error))
            case SetLogLevel(level):
                self._server.set_log_level(level)
            case ChangeAdapter():
                self._server.adapters.change(self, message, self._server.api_processes)
            case AdapterSeen(version):
                self._server.adapters.seen(self, version)

    def on_exit(self, failure: Failed) -> float | None:
        for replica in self._server.manager.draining:  # its requests there have ended with it
            self._server.manager.drained(self.index, replica)
        self._server.adapters.exited(self)
        num_cut = self._server.manager.metrics.count_cut(self.index)
        self._num_failed_starts += not self.is_ready
        # A file that was valid at the start, such as a certificate, can be mended.
        is_hopeless = self.seconds is None if failure.user_error else self._num_failed_starts > _MAX_FAILED_STARTS
        if is_hopeless and not self._server.is_serving:
            self._server.failure = self._server.failure or failure
            return None
        lost = f"; its connections are lost (requests cut: {num_cut})" if self.is_ready else ""
        logger.error("%s%s; restarting it", failure.reason, lost)
        return min(2.0 ** min(self._num_failed_starts, _MAX_FAILED_STARTS) - 1.0, _RESTART_SECONDS)


class Server:
    """The parent process: it starts and watches the engine cores and API processes. It handles no requests itself."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        media: MediaSettings | None,
        names: tuple[str, ...],
        listener: socket.socket,
        seconds: dict[str, float],
        hosts: DPCoordinator,
        predecessor: Predecessor | None = None,
        adapters: Sequence[NamedAdapter] = (),
        download_dir: str | None = None,
    ) -> None:
        """Start all processes. `media` are the settings for images and videos; None: the model takes only text.
        `adapters` are those that have names from the start, and `download_dir` is where others are downloaded to.
        `seconds` are the durations of earlier phases of the start-up. A `predecessor` serves until this one is
        ready.
        """
        self.failure: Failed | None = None
        """The reason why no API process can be started."""
        if predecessor is not None and config.kv_events is not None:
            config = replace(config, kv_events=replace(config.kv_events, waits_for_ports=True))
        self._config, self._options, self._names, self._listener = config, options, names, listener
        self._seconds = seconds
        self._predecessor = predecessor
        self._offer: Offer | None = None
        self._has_successor = False
        """Whether another server accepts new connections."""
        self._service = ServiceManager()
        self._service.notify(f"STATUS=loading {names[0]}")
        self._signals: list[int] = []
        """The signals that have arrived."""
        self._wake: Callable[[], None] = lambda: None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self.manager = EngineManager(
            config,
            name=names[0],
            log_level=options.log_level,
            num_clients=options.api_server_count,
            hosts=hosts,
            policy=options.restart_policy,
        )
        self._media = None if media is None else MediaService(self.manager, media)
        self.adapters, self._download_dir = AdapterDirectory(adapters), download_dir
        self._adapter_folder = None if config.lora is None else RuntimeFolder()
        self.api_processes = [_ApiProcess(self, index) for index in range(options.api_server_count)]
        self.manager.on_change = self._on_engine_state
        self.manager.supervisor.on_step = self._service.beat
        self._wake = lambda: self.manager.supervisor.call(self._check_signals)
        signal.signal(signal.SIGHUP, lambda number, frame: self.manager.supervisor.call(self._reload))
        for each in self.api_processes:
            self.manager.supervisor.add(each)
        if predecessor is None:
            self._offer = Offer(listener, self._on_taken)

    def start_api_process(self, index: int) -> Process:
        """Start an API process."""
        manager = self.manager
        args = ApiProcessArgs(
            config=self._config,
            options=self._options,
            names=self._names,
            process_info=manager.process_info(index),
            listener=self._listener.fileno(),
            has_predecessor=self._predecessor is not None,
            states=(*manager.states.values(), *([] if manager.failure is None else [manager.failure])),
            media_path="" if self._media is None else self._media.path,
            adapters=self.adapters.adapters,
            adapter_folder="" if self._adapter_folder is None else self._adapter_folder.path,
            download_dir=self._download_dir,
        )
        return start_process("quire.server.cli.api_process", args, pass_fds=(self._listener.fileno(),))

    def set_log_level(self, level: LogLevel) -> None:
        """Show log messages of at least this level, in all processes that know how, and in their successors."""
        log.set_level(level)
        self._options = replace(self._options, log_level=level)
        self.manager.set_log_level(level)
        for each in self.api_processes:
            each.send(SetLogLevel(level))

    def _reload(self) -> None:
        """Read keys, certificates and the configuration of the logs again, in all processes."""
        if self._is_running:
            self._service.reloading()
        path, level = self._options.log_config_file, self._options.log_level
        message = Reload("" if path is None else log.read_again(path, level), level)
        logger.info("SIGHUP: reading the files of keys, certificates and the logs' configuration again")
        self.manager.reload(message)
        for each in self.api_processes:
            each.send(message)
        if self._is_running:
            self._service.notify("READY=1")

    def run(self) -> int:
        """Serve until a signal arrives (0), the engine has failed (1), or the configuration proves wrong (2)."""
        try:
            self.manager.run(lambda: self._is_started or self._is_over)
            if not self._is_over:
                if self._predecessor is not None:
                    self._predecessor.end()
                    self._predecessor, self._offer = None, Offer(self._listener, self._on_taken)
                self.manager.is_started = True
                self._report_started()
                self.manager.run(lambda: self._is_over)
                if self.manager.failure is not None:  # /health reports it for a while
                    until = time.monotonic() + _FAILURE_SECONDS
                    self.manager.run(lambda: time.monotonic() > until or bool(self._signals))
            if self._signals or self._has_successor:
                self._drain()
                return 0
            return self._report_failure()
        finally:
            if self._offer is not None:
                self._offer.close()
            self._stop_api_processes(Shutdown(), _EXIT_SECONDS)
            self.manager.close("" if self.failure is None else self.failure.reason)
            if self._adapter_folder is not None:
                self._adapter_folder.remove()

    def _report_failure(self) -> int:
        """Print why the server ends, and return the exit code."""
        if self.failure is not None:
            reason, is_user_error = self.failure.reason, self.failure.user_error
        else:
            assert self.manager.failure is not None
            reason, is_user_error = self.manager.failure.reason, self.manager.is_user_error
        self._service.notify("STOPPING=1", f"STATUS={reason}")
        log.print_error(reason)
        return 2 if is_user_error else 1

    @property
    def is_serving(self) -> bool:
        """Whether an API process serves."""
        return any(each.is_ready and each.process is not None for each in self.api_processes)

    @property
    def _is_started(self) -> bool:
        # Texts do not need the media process, but a predecessor serves until this server can do all that it can.
        has_media = self._media is None or self._media.has_been_ready or self._predecessor is None
        return self.manager.is_settled and has_media and all(each.seconds is not None for each in self.api_processes)

    @property
    def _is_running(self) -> bool:
        return self._is_started and not self._is_over

    @property
    def _is_over(self) -> bool:
        return (
            bool(self._signals) or self._has_successor or self.failure is not None or self.manager.failure is not None
        )

    def _report_started(self) -> None:
        first = self.api_processes[0].seconds or {}
        where = ", ".join(f"{part} {count:.2f} s" for part, count in (self._seconds | first).items())
        logger.info("ready %.2f s after the start (%s)", current_process.age(), where)
        logger.info("%s", self._serving)
        self._service.notify("READY=1", f"STATUS={self._status}")

    @property
    def _serving(self) -> str:
        match self.adapters.adapters:
            case ():
                more = ""
            case (only,):
                more = f" and the adapter {only.name}"
            case several:
                more = f" and {len(several)} adapters"
        return f"serving {', '.join(self._names)}{more} on {address(self._listener, self._options.is_tls)}"

    @property
    def _status(self) -> str:
        """What the server does, in one line."""
        lost = [
            f"; replica {each.replica}: {each.reason}"
            for each in self.manager.states.values()
            if isinstance(each, ReplicaLost)
        ]
        return self._serving + "".join(lost)

    def _on_engine_state(self, state: EngineState) -> None:
        if isinstance(state, EngineFailed) and self._is_started:
            logger.error("the engine has failed: %s", state.reason)
        if self._is_running:
            self._service.notify(f"STATUS={self._status}")
        for each in self.api_processes:
            each.send(state)

    def _on_taken(self) -> None:
        """Called from a thread."""

        def handle() -> None:
            self._has_successor = True

        self.manager.supervisor.call(handle)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        self._wake()
        if len(self._signals) > 2:
            os._exit(130)  # the other processes end with this one

    def _drain(self) -> None:
        """Let running requests finish, for as long as the options allow."""
        seconds = self._options.drain_seconds(is_interrupt=self._signals[:1] == [signal.SIGINT])
        logger.info("%sshutting down", "another server has taken over; " * self._has_successor)
        microseconds = round((seconds + _STOP_SECONDS) * 1e6)
        status = f"STATUS=shutting down; running requests have {seconds:g} s"
        self._service.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={microseconds}", status)
        self._stop_api_processes(Drain(seconds, self._has_successor), seconds + _EXIT_SECONDS)

    def _check_signals(self) -> None:
        """End at once after a second signal."""
        if len(self._signals) > 1:
            for each in self.api_processes:
                each.send(Shutdown())
            self.manager.supervisor.hurry(_QUICK_EXIT_SECONDS)

    def _stop_api_processes(self, message: Drain | Shutdown, seconds: float) -> None:
        self.manager.supervisor.stop(self.api_processes, message, seconds)
        self.api_processes = []
