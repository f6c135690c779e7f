"""The options of `quire serve`, which `quire plan` takes, too."""

from __future__ import annotations

import argparse
import os

from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.server.config import flags, vllm
from quire.server.config.server_options import ServerOptions

_PORT_VARIABLE = "AIP_HTTP_PORT"
"""Vertex AI sets the server's port here; see quire.server.http.sagemaker_vertex."""
_HOST_VARIABLE = "QUIRE_HOST"
"""The images set it: a server that listens on its loopback interface only is of no use in a container."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config, which `read_options` needs."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="YAML file with flags, Quire's or vLLM's; the command line takes precedence",
    )


def read_options(parsed: argparse.Namespace) -> tuple[EngineOptions, ServerOptions]:
    """Read the options from the command line, then the `--config` file, then the environment
    (Quire's, Vertex AI's and vLLM's).

    `notes` of `parsed` then names the options without effect, and `given` has the options that are set, by name.
    """
    from_file = flags.read_config(parsed.config, parsed.parser) if parsed.config is not None else []
    file = parsed.parser.parse_args(from_file)
    given, notes = vars(file) | vars(parsed), [*file.notes, *parsed.notes]
    from_environment, of_environment = vllm.read_environment(
        parsed.parser, lambda: flags.runs_on_cpu(given.get("device", EngineOptions.device))
    )
    if port := os.environ.get(_PORT_VARIABLE):
        if not port.isdigit():
            raise ConfigError(f"environment variable {_PORT_VARIABLE}={port}: expected a port number")
        from_environment["port"] = int(port)
    if host := os.environ.get(_HOST_VARIABLE):
        from_environment["host"] = host
    parsed.notes = list(dict.fromkeys([*of_environment, *notes]))
    found = argparse.Namespace(**(from_environment | given))
    parsed.given = vars(found)
    return flags.collect(found, EngineOptions), flags.collect(found, ServerOptions)
