"""The additional API processes. They share the port and the engine of the first one, and exit with it.

Each has its own event loop, tokenizer and engine client. All inherit the listening socket; any idle process accepts the
next connection. On standard input a process receives its configuration from the first process, then the reason if the
engine dies; at end of file it exits. It writes one byte to standard output when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace

import uvicorn
import uvloop

from quire.engine import log, process
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.server.config import ServerOptions
from quire.server.frontend.chat_formats import ChatFormats
from quire.server.frontend.engine_client import SHUTTING_DOWN
from quire.server.frontend.frontend import ApiProcessInfo, Frontend
from quire.server.frontend.output_stream import EngineUnavailable

_SHUTDOWN_SECONDS = 10.0
_RESTART_SECONDS = 1.0
"""Minimum interval between two starts of the same process."""

logger = logging.getLogger(__name__)


def http_server(frontend: Frontend, options: ServerOptions, names: tuple[str, ...]) -> uvicorn.Server:
    """Create the HTTP server of a frontend, the same in every API process. The caller handles signals."""
    from quire.server.app import create_app
    from quire.server.http import connection
    from quire.server.http.state import ServedModel

    http = uvicorn.Server(
        uvicorn.Config(
            create_app(ServedModel(frontend, names), options),
            log_config=None,
            access_log=options.log_level == "debug",
            http=connection.protocol(options),  # type: ignore[arg-type]  # a class, for uvicorn
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=options.timeout_keep_alive,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
        )
    )
    http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    return http


@dataclass(frozen=True)
class _ApiProcessArgs:
    """The configuration of an API process, sent to it when it starts."""

    config: EngineConfig
    options: ServerOptions
    names: tuple[str, ...]
    process_info: ApiProcessInfo
    listener: int
    """File descriptor of the inherited socket."""


class ApiProcesses:
    """The additional API processes, as managed by the first one, which restarts those that die."""

    def __init__(
        self,
        frontend: Frontend,
        config: EngineConfig,
        options: ServerOptions,
        names: tuple[str, ...],
        listener: socket.socket,
    ) -> None:
        self._args = _ApiProcessArgs(config, options, names, frontend.process_info, listener.fileno())
        indexes = range(1, frontend.process_info.count)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready = {index: asyncio.Event() for index in indexes}
        self._supervisors = [asyncio.create_task(self._supervise(index)) for index in indexes]

    async def ready(self) -> None:
        """Wait until each process has been ready once."""
        for ready in self._ready.values():
            await ready.wait()

    def report_failure(self, failure: str) -> None:
        """Send the processes the reason why the engine has failed."""
        for one in self._processes.values():
            assert one.stdin is not None
            one.stdin.write(failure.replace("\n", " ").encode() + b"\n")

    async def close(self) -> None:
        """Stop the processes; kill those that do not exit in time."""
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for one in self._processes.values():
            assert one.stdin is not None
            one.stdin.close()
        for index, one in self._processes.items():
            try:
                await asyncio.wait_for(one.wait(), _SHUTDOWN_SECONDS)
            except TimeoutError:
                logger.warning(
                    "API process %d did not stop within %g seconds and will be killed", index, _SHUTDOWN_SECONDS
                )
                one.kill()
                await one.wait()

    async def _supervise(self, index: int) -> None:
        """Start the process with this index, and restart it whenever it exits."""
        while True:
            begun = time.monotonic()
            one = self._processes[index] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "quire.server.cli.api_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(self._args.listener,),
                start_new_session=True,
            )
            assert one.stdin is not None
            assert one.stdout is not None
            args = replace(self._args, process_info=replace(self._args.process_info, index=index))
            one.stdin.write(pickle.dumps(args))
            if await one.stdout.read(1):
                if self._ready[index].is_set():
                    logger.info("API process %d is ready again", index)
                self._ready[index].set()
            code = await one.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            logger.error("API process %d %s; its connections are lost; restarting it", index, how)
            await asyncio.sleep(max(0.0, begun + _RESTART_SECONDS - time.monotonic()))


async def _serve(args: _ApiProcessArgs) -> None:
    options, process_info = args.options, args.process_info
    formats = ChatFormats.of(options)
    frontend = await Frontend.join(
        args.config, process_info, name=args.names[0], formats=formats, max_queue=options.queue_limit
    )
    http = http_server(frontend, options, args.names)
    stop = asyncio.Event()
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), frontend, stop), daemon=True).start()
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(frontend.ready())
    await asyncio.wait((stopping, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        with contextlib.suppress(
            ConfigError, EngineUnavailable
        ):  # the first process gets the same error and reports it
            if not stop.is_set():
                await ready
                gc.collect()
                gc.freeze()
                serving = asyncio.create_task(http.serve([socket.socket(fileno=args.listener)]))
                os.write(sys.stdout.fileno(), b"!")
                await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
                frontend.client.fail(SHUTTING_DOWN)
                http.should_exit = True
                await serving
        await stopping
    finally:
        ready.cancel()
        await frontend.close()


def _listen(loop: asyncio.AbstractEventLoop, frontend: Frontend, stop: asyncio.Event) -> None:
    """Read messages of the first process until end of file."""
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(frontend.client.fail, line.decode().strip())
    loop.call_soon_threadsafe(stop.set)
    time.sleep(_SHUTDOWN_SECONDS)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the first process handles Ctrl-C
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as in the first process
    args: _ApiProcessArgs = pickle.load(sys.stdin.buffer)
    process.set_name(f"quire-api-{args.process_info.index}")
    log.setup(args.options.log_level, f"api {args.process_info.index}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args))


if __name__ == "__main__":
    main()
