"""An API process: an event loop, an HTTP server, a tokenizer and an engine client.

All API processes inherit the listening socket; any idle one accepts the next connection. Their parent supervises them
and reports the state of the engine (`quire.server.cli.parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from quire.engine.process import current_process, log
from quire.engine.process.supervisor import HEARTBEAT_SECONDS, SupervisorConnection
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import (
    AdapterChanged,
    AdapterReply,
    AdapterSeen,
    ChangeAdapter,
    Drain,
    Drained,
    Failed,
    NamedAdapter,
    Ready,
    Reload,
    Resize,
    ResizeReply,
    SetLogLevel,
    Shutdown,
    ToProcess,
    UseKVPeers,
)
from quire.server.cli.parent import ApiProcessArgs
from quire.server.client import history
from quire.server.client.engine_client import SHUTTING_DOWN
from quire.server.client.output_stream import EngineUnavailable
from quire.server.config.server_options import ServerOptions
from quire.server.serving.adapters import AdapterSettings
from quire.server.serving.frontend import Frontend
from quire.server.text.chat_formats import ChatFormats

if TYPE_CHECKING:
    from quire.server.http.state import ServedModel
    from quire.server.http.tracing import Tracing

_CLOSE_SECONDS = 5
"""Time for responses to be sent after their requests have ended."""
_POLL_SECONDS = 0.05
_HANDSHAKE_SECONDS = 2.0
"""Time for TLS handshakes of accepted connections, which the HTTP server does not know of yet."""

logger = logging.getLogger(__name__)


def http_server(
    frontend: Frontend, options: ServerOptions, names: tuple[str, ...], tracing: Tracing | None = None
) -> tuple[uvicorn.Server, ServedModel]:
    """Create the HTTP server of a frontend, the same in every API process, and the state of its endpoints. The caller
    handles signals.
    """
    with current_process.imports():
        from quire.server.app import create_app
        from quire.server.http import access, connection
        from quire.server.http.state import ServedModel

    state = ServedModel(frontend, names)
    http = uvicorn.Server(
        uvicorn.Config(
            create_app(state, options, tracing),
            log_config=None,
            access_log=False,  # see quire.server.http.access
            http=connection.protocol(options, access.Recorder(frontend.metrics.http, options)),  # type: ignore[arg-type]  # a class, for uvicorn
            reset_contextvars=True,  # pipelined requests would inherit the previous request's
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            timeout_keep_alive=options.timeout_keep_alive,
        )
    )
    http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    http.config.load()
    if options.is_tls:
        from quire.server.http.certificates import Certificates  # imports ssl

        certificates = Certificates(options)
        http.config.ssl = certificates.context
        state.watched_files.append(certificates.files)
    return http, state


class ApiProcess:
    """The server of this process, and its connection to the supervisor."""

    def __init__(self, args: ApiProcessArgs, connection: SupervisorConnection) -> None:
        """Must be created on the event loop."""
        options, self._connection = args.options, connection
        self._loop = asyncio.get_running_loop()
        self._frontend = Frontend(
            args.config,
            args.process_info,
            name=args.names[0],
            formats=ChatFormats.of(options),
            max_queue=options.queue_limit,
            vllm_metrics=options.vllm_metrics,
            on_drained=lambda replica: connection.send(Drained(replica)),
            ask_resize=self._resize,
            set_log_level=lambda level: connection.send(SetLogLevel(level)),
            media_path=args.media_path,
            adapters=AdapterSettings.of(
                options, args.names, args.adapter_folder, args.download_dir, options.chat_template
            ),
            change_adapter=self._change_adapter,
        )
        self._adapter_numbers = itertools.count()
        self._adapter_calls: dict[int, asyncio.Future[bool]] = {}
        """Calls of `_change_adapter` without an answer, by number."""
        for adapter in args.adapters:
            self._frontend.adapters.set(adapter.name, adapter)
        self._checks_adapters = args.process_info.index == 0 and not args.states
        self._resizes: deque[asyncio.Future[str]] = deque()
        """Calls of `_resize` without an answer, in order."""
        for state in args.states:
            self._frontend.update(state)
        self._tracing: Tracing | None = None
        if options.otlp_traces_endpoint is not None:
            from quire.server.http.tracing import Tracing  # imports OpenTelemetry

            self._tracing = Tracing.to_collector(options.otlp_traces_endpoint)
        self._http, self._state = http_server(self._frontend, options, args.names, self._tracing)
        self._listener = socket.socket(fileno=args.listener)
        self._stopping: asyncio.Task[None] | None = None
        self._is_restart, self._has_page = bool(args.states), options.ui
        self._may_accept = asyncio.Event()
        if not args.has_predecessor:
            self._may_accept.set()
        self._is_over = False
        """Whether messages come too late."""
        self._failure: Exception | None = None
        """The reason why requests can never be served."""

    async def run(self) -> None:
        """Serve until the supervisor ends it; raises `ConfigError` and others if requests can never be served."""
        self._beat()
        if self._has_page:
            self._sample()
        self._connection.listen(self._receive)
        starting = asyncio.create_task(self._report_ready())
        try:
            if self._is_restart:  # clients wait in the listener's queue meanwhile, instead of being rejected
                with contextlib.suppress(Exception):  # see `_report_ready`
                    await self._frontend.loaded()
            await self._may_accept.wait()
            if not self._http.should_exit:
                await self._http.serve([self._listener])
            if self._failure is not None:
                raise self._failure
        finally:
            starting.cancel()
            self._is_over = True
            await self._frontend.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _report_ready(self) -> None:
        """Report that requests can be served; end `run` if they never can."""
        try:
            if self._checks_adapters:  # while the engine loads
                await self._frontend.adapters.check()
            seconds = await self._frontend.ready()
        except EngineUnavailable:
            return  # the supervisor knows why
        except Exception as error:
            self._failure = error
            self._exit()
            return
        gc.collect()
        gc.freeze()
        self._connection.send(Ready(seconds))
        self._may_accept.set()
        if self._frontend.media is not None:
            _ = self._state.bodies  # it starts its process, as bodies with images are large
        await asyncio.to_thread(self._frontend.input_processor.start)
        await asyncio.to_thread(self._frontend.adapters.start)

    def _beat(self) -> None:
        self._connection.beat()
        self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    def _sample(self) -> None:
        """Record what the page shows."""
        self._loop.call_later(history.SAMPLE_SECONDS, self._sample)
        self._frontend.history.sample(time.time(), time.monotonic())

    def _receive(self, message: ToProcess) -> None:
        if self._is_over:
            return
        match message:
            case Drain(seconds, has_successor):
                self._stop(seconds, has_successor)
            case Shutdown():
                self._stop(0.0)
            case SetLogLevel(level):
                log.set_level(level)
            case Reload(log_config, level):
                log.reload(log_config, level)
                for each in self._state.watched_files:
                    each.check(again=True)
            case ResizeReply(error):
                self._resizes.popleft().set_result(error)
            case AdapterChanged(version, name, adapter):
                unused = self._frontend.adapters.set(name, adapter)
                if unused is None:
                    self._connection.send(AdapterSeen(version))
                else:
                    unused.add_done_callback(lambda _: self._connection.send(AdapterSeen(version)))
            case AdapterReply(number, has_changed):
                self._adapter_calls.pop(number).set_result(has_changed)
            case UseKVPeers():
                pass  # for KV stores
            case state:
                self._frontend.update(state)

    async def _resize(self, asked: Resize) -> None:
        """Ask the supervisor for other replicas; raises `ConfigError`."""
        answer = self._loop.create_future()
        self._resizes.append(answer)
        self._connection.send(asked)
        if error := await asyncio.shield(answer):
            raise ConfigError(error)

    async def _change_adapter(self, name: str, old: NamedAdapter | None, new: NamedAdapter | None) -> bool:
        """Ask the supervisor for another meaning of a name; see `adapters.Change`."""
        answer = self._adapter_calls[number := next(self._adapter_numbers)] = self._loop.create_future()
        self._connection.send(ChangeAdapter(number, name, old, new))
        return await asyncio.shield(answer)

    def _stop(self, seconds: float, has_successor: bool = False) -> None:
        """Reject new requests, and exit when the running ones have ended, or after `seconds`. With a successor, which
        gets the new connections, exit when the present ones have ended.
        """
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(self._drain(seconds, has_successor))

    async def _drain(self, seconds: float, has_successor: bool) -> None:
        deadline = self._loop.time() + seconds
        if has_successor:
            await self._end_connections(deadline)
        self._frontend.is_draining = True
        if requests := set(self._http.server_state.tasks):
            await asyncio.wait(requests, timeout=max(0.0, deadline - self._loop.time()))
        while self._frontend.client.num_open and self._loop.time() < deadline:  # responses in the background
            await asyncio.sleep(_POLL_SECONDS)
        if self._frontend.client.num_open:
            logger.warning("%d requests did not finish in time and fail", self._frontend.client.num_open)
        self._frontend.client.fail(SHUTTING_DOWN)
        self._exit()

    async def _end_connections(self, deadline: float) -> None:
        """Accept no more connections, and let each end after its next response, until the deadline. None is closed
        while a client may be sending a request.
        """
        for server in self._http.servers:
            server.close()
        last: list[tuple[bytes, bytes]] = [(b"connection", b"close")]
        self._http.config.encoded_headers = [*self._http.config.encoded_headers, *last]
        self._http.server_state.default_headers = [*self._http.server_state.default_headers, *last]
        connecting = self._loop.time() + _HANDSHAKE_SECONDS * (self._http.config.ssl is not None)
        await asyncio.sleep(_POLL_SECONDS)
        while self._loop.time() < min(deadline, connecting) or self._http.server_state.connections:
            if self._loop.time() >= deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _exit(self) -> None:
        self._http.should_exit = True
        self._may_accept.set()


async def _serve(args: ApiProcessArgs, connection: SupervisorConnection) -> int:
    try:
        await ApiProcess(args, connection).run()
    except ConfigError as error:
        connection.send(Failed(str(error), user_error=True))
        return 2
    except Exception as error:
        logger.exception("the API process failed")
        connection.send(Failed(f"the API process failed: {type(error).__name__}: {error}"))
        return 1
    return 0


def main() -> None:
    # transformers, where it is needed for a tokenizer, imports torch if it can. This process must not load torch.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    connection = SupervisorConnection()
    args: ApiProcessArgs = connection.receive_args()
    suffix = str(args.process_info.index) if args.process_info.count > 1 else ""
    current_process.set_name(f"quire-api-{suffix}".rstrip("-"))
    log.setup(args.options.log_level, f"api {suffix}".rstrip())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_serve(args, connection)))
