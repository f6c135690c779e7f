"""`quire serve`: serve one model with the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import time
from collections.abc import Sequence

from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.core.launch import exec_node, prepared_core
from quire.engine.process import current_process, log, native_output
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import NamedAdapter
from quire.server.cli.serve_options import add_config, read_options
from quire.server.config import flags, lazy
from quire.server.config.server_options import AdapterOptions, ServerOptions

logger = logging.getLogger(__name__)

DEMO_NAME = "quire-demo"
"""Name of the bundled model if no other is set."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model with the OpenAI API",
        description="Serve one model with the OpenAI API.",
        usage="quire serve [MODEL] [flags]",
        allow_abbrev=False,
        takes_vllm_flags=True,
    )
    flags.add_model(parser)
    add_config(parser)
    flags.add_flags(parser, ServerOptions)
    flags.add_flags(parser, EngineOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until a signal arrives (0) or the engine has failed (1)."""
    for number in (signal.SIGHUP, signal.SIGUSR1):  # as long as nothing handles them
        signal.signal(number, signal.SIG_IGN)
    seconds = {"imports": current_process.age()}
    lazy.configure_log(vars(parsed).get("log_format"), parsed.config)  # for errors in the options
    options, server = read_options(parsed)
    log.configure(server.log_format, server.log_config_file)
    if log.is_json():
        native_output.wrap()
    log.setup(server.log_level, "serve")
    for note in parsed.notes:
        logger.warning("%s", note)
    keys = [key for given in (server.api_key, server.admin_key, server.metrics_key) for key in given or ()]
    if current_process.hide_arguments((*keys, options.cluster_token or "")):
        logger.warning(
            "ps has shown the secrets of the command line to all users; use --api-key-file, or QUIRE_API_KEY, "
            "QUIRE_ADMIN_KEY and QUIRE_METRICS_KEY, and --cluster-token-file or QUIRE_CLUSTER_TOKEN"
        )
    server.check()
    if server.auto:
        from quire.server.cli.plan import choose

        options = choose(options, parsed.given, server.optimize)
    return _run_headless(options, server) if server.headless else _serve(options, server, seconds)


# Both import their modules here: the parsers of all commands import this module, and a core imports torch meanwhile.


def _run_headless(options: EngineOptions, server: ServerOptions) -> int:
    from quire.engine.cluster.cluster_token import with_cluster_token
    from quire.engine.config.parallel_config import for_headless, is_first_of_replica

    options = with_cluster_token(for_headless(options), is_headless=True)
    if options.nnodes > 1:
        _check_node(options, server)
    if is_first_of_replica(options):
        from quire.server.cli.headless import serve_replicas

        return serve_replicas(options, server)
    exec_node(options, server.log_level, may_rejoin=server.restart)


def _serve(options: EngineOptions, server: ServerOptions, seconds: dict[str, float]) -> int:
    """`seconds` are the durations of earlier phases."""
    with contextlib.ExitStack() as stack:
        with prepared_core(options):
            begun = time.monotonic()
            from quire.engine.cluster import ray_cluster
            from quire.engine.cluster.cluster_token import with_cluster_token
            from quire.engine.config.plan_text import plan_text
            from quire.engine.config.resolve import fetch_weights
            from quire.server.cli.listen import listen
            from quire.server.cli.parent import Server
            from quire.server.client.dp_coordinator import connect_hosts
            from quire.server.http.api_keys import ApiKeys
            from quire.server.media.service import check_addresses, media_settings

            options = with_cluster_token(options)
            if options.nnodes > 1:
                _check_node(options, server)
            ApiKeys.load(server)
            check_addresses(server)
            name = DEMO_NAME if options.model == EngineOptions.model else options.model
            current_process.set_name("quire-serve")
            listener, predecessor = stack.enter_context(listen(server))
            config = ray_cluster.resolve(options)
            names = server.served_model_name or (name,)
            adapters = first_adapters(server, options, names, is_enabled=config.lora is not None)
            log.print_text(plan_text(config))
            media = media_settings(config, server)
            fetch_weights(options, config)
            seconds["resolve"] = time.monotonic() - begun
            hosts = connect_hosts(config, server.api_server_count)
            running = Server(
                *(config, server, media, names, listener, seconds, hosts, predecessor),
                adapters=adapters,
                download_dir=options.download_dir,
            )
        return running.run()


def first_adapters(
    options: AdapterOptions, engine: EngineOptions, names: Sequence[str], *, is_enabled: bool
) -> list[NamedAdapter]:
    """Return the adapters that have names from the start: of the command line, and those that come with the bundled
    model. `names` are the base's. Raises `ConfigError`.
    """
    options.check_adapters(names, is_enabled=is_enabled)
    adapters = options.adapters()
    if is_enabled and engine.model == EngineOptions.model:
        known = {*names, *(each.name for each in adapters)}
        folders = sorted(each.parent for each in DEMO_MODEL.with_name("demo_adapters").glob("*/adapter_config.json"))
        adapters += [NamedAdapter(each.name, str(each), int(time.time())) for each in folders if each.name not in known]
    return adapters


def _check_node(options: EngineOptions, server: ServerOptions) -> None:
    """Raise `ConfigError` if this node's rank is not possible, node 0 is headless, or another node is not."""
    from quire.engine.config.parallel_config import local_ranks

    local_ranks(options)
    if server.headless and options.node_rank == 0:
        raise ConfigError(
            "--headless with --node-rank 0: node 0 runs the API; omit --headless, or set this node's rank"
        )
    if not server.headless and options.node_rank != 0:
        raise ConfigError(f"--node-rank {options.node_rank}: only node 0 runs the API; start this node with --headless")
