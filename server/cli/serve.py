"""`quire serve`: serve one model with the OpenAI API."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from quire.engine import log, process
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.core.launch import exec_node
from quire.engine.protocol.errors import ConfigError
from quire.server.cli import flags
from quire.server.cli.listen import address, listen
from quire.server.config import ServerOptions
from quire.server.http.api_keys import ApiKeys

if TYPE_CHECKING:
    from quire.server.cli.api_process import ApiProcesses
    from quire.server.frontend.dp_coordinator import DPCoordinator
    from quire.server.frontend.frontend import Frontend

DEMO_NAME = "quire-demo"
"""Name of the bundled model if no other is set."""
_PORT_VARIABLE = "AIP_HTTP_PORT"
"""Vertex AI sets the server's port here; see quire.server.http.sagemaker_vertex."""
_FAILURE_SECONDS = 2.0
"""How long /health reports why the engine died, before the process exits."""

logger = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model with the OpenAI API",
        description="Serve one model with the OpenAI API.",
        usage="quire serve [MODEL] [flags]",
        allow_abbrev=False,
    )
    flags.add_model(parser)
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with flags; the command line takes precedence")
    flags.add_flags(parser.add_argument_group("server"), ServerOptions)
    flags.add_flags(parser.add_argument_group("engine"), EngineOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until a signal arrives (0) or the engine has failed (1)."""
    seconds = {"imports": process.age()}
    begun = time.monotonic()
    options, server = read_options(parsed)
    log.setup(server.log_level, "api")
    if process.hide_arguments(server.api_key or ()):
        logger.warning("--api-key: ps has shown the keys to all users; use --api-key-file or QUIRE_API_KEY")
    server.check()
    if server.headless and options.nnodes == 1:
        from quire.server.cli.headless import serve_replicas

        return serve_replicas(options, server)
    if options.nnodes > 1:
        _check_node(options, server)
    if server.headless:
        exec_node(options, server.log_level)
    ApiKeys.load(server)
    name = DEMO_NAME if options.model == EngineOptions.model else options.model
    process.set_name("quire-api")
    # Not at the top, because the parsers of all commands import this module.
    from quire.engine.config.plan_text import plan_text
    from quire.engine.config.resolve import fetch_weights, resolve
    from quire.server.frontend.dp_coordinator import connect_hosts

    with listen(server) as listener:
        config = resolve(options)
        print(plan_text(config), flush=True)
        fetch_weights(options, config)
        seconds["resolve"] = time.monotonic() - begun
        hosts = connect_hosts(config, server.api_server_count)

        import uvloop

        # transformers, where it is needed for a tokenizer, imports torch if it can. This process must not load torch.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from quire.server.frontend.output_stream import EngineUnavailable

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(config, server, server.served_model_name or (name,), listener, seconds, hosts))
        except EngineUnavailable as failure:
            print(f"quire: error: {failure}", file=sys.stderr)
            return 1


def _check_node(options: EngineOptions, server: ServerOptions) -> None:
    """Raise `ConfigError` if node 0 is headless, or another node is not."""
    from quire.engine.config.parallel_config import count_local_ranks

    if server.headless and options.node_rank == 0:
        raise ConfigError(
            "--headless with --node-rank 0: node 0 runs the API; omit --headless, or set this node's rank"
        )
    if not server.headless and options.node_rank != 0:
        raise ConfigError(f"--node-rank {options.node_rank}: only node 0 runs the API; start this node with --headless")
    count_local_ranks(options)


def read_options(parsed: argparse.Namespace) -> tuple[EngineOptions, ServerOptions]:
    """Read the options from the command line, then the `--config` file, then the environment (the port only)."""
    if parsed.config is not None:
        arguments = flags.read_config(parsed.config, (ServerOptions, EngineOptions))
        parsed = argparse.Namespace(**{**vars(parsed.parser.parse_args(arguments)), **vars(parsed)})
    if (port := os.environ.get(_PORT_VARIABLE)) and not hasattr(parsed, "port"):
        if not port.isdigit():
            raise ConfigError(f"environment variable {_PORT_VARIABLE}={port}: expected a port number")
        parsed.port = int(port)
    return flags.collect(parsed, EngineOptions), flags.collect(parsed, ServerOptions)


async def _serve(
    config: EngineConfig,
    options: ServerOptions,
    names: tuple[str, ...],
    listener: socket.socket,
    seconds: dict[str, float],
    hosts: DPCoordinator | None,
) -> int:
    from quire.server.frontend.chat_formats import ChatFormats
    from quire.server.frontend.engine_client import SHUTTING_DOWN
    from quire.server.frontend.frontend import Frontend

    frontend = await Frontend.start(
        config,
        name=names[0],
        formats=ChatFormats.of(options),
        log_level=options.log_level,
        count=options.api_server_count,
        max_queue=options.queue_limit,
        hosts=hosts,
    )
    # The engine core starts while the rest is imported.
    from quire.server.cli.api_process import ApiProcesses, http_server

    http = http_server(frontend, options, names)
    api_processes = ApiProcesses(frontend, config, options, names, listener)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)  # second signal; the core exits when this process does
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(http.serve([listener]))
    engine = asyncio.create_task(
        _watch_engine(frontend, api_processes, seconds, f"{', '.join(names)} on {address(listener, options.is_tls)}")
    )
    try:
        await asyncio.wait((stopping, serving, engine), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return engine.result() if engine.done() else 0
    finally:
        if stop.is_set():
            logger.info("shutting down")
        engine.cancel()
        stopping.cancel()
        frontend.client.fail(SHUTTING_DOWN)
        http.should_exit = True
        try:
            await asyncio.gather(serving, api_processes.close())
        finally:
            await frontend.close()


async def _watch_engine(frontend: Frontend, api_processes: ApiProcesses, seconds: dict[str, float], what: str) -> int:
    """Log the start-up times and, if the engine dies, the reason; returns the exit code.

    Raises `EngineUnavailable` if the model cannot be loaded.
    """
    spent = await frontend.ready()
    failed = asyncio.create_task(frontend.client.failed())
    await asyncio.wait((failed, asyncio.create_task(api_processes.ready())), return_when=asyncio.FIRST_COMPLETED)
    gc.collect()
    gc.freeze()
    where = ", ".join(f"{part} {count:.2f} s" for part, count in (seconds | spent).items())
    logger.info("ready %.2f s after the start (%s)", process.age(), where)
    logger.info("serving %s", what)
    failure = await failed
    logger.error("the engine has failed: %s", failure)
    api_processes.report_failure(str(failure))
    await asyncio.sleep(_FAILURE_SECONDS)
    return 1
