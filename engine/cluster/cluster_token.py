"""Finds the secret that the hosts of a cluster share (`--cluster-token`)."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.engine.cluster.network import LOOPBACK, is_loopback
from quire.engine.config.options import EngineOptions
from quire.engine.config.parallel_config import accepts_hosts, local_replicas
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError

ENVIRONMENT = "QUIRE_CLUSTER_TOKEN"
_MIN_LENGTH = 16


def with_cluster_token(options: EngineOptions, *, is_headless: bool = False) -> EngineOptions:
    """Return the options with the cluster token, from the flags or the environment, if this host communicates with
    others.

    If there is none, the first host makes one, and prints the command for the other hosts. If another host has none, or
    a token is too short, raises `ConfigError`. No token is needed at a loopback address.
    """
    if options.nnodes > 1:
        flag, address = "--master-addr", options.master_addr
        is_first = options.node_rank == 0
    else:
        flag, address = "--data-parallel-address", options.data_parallel_address or LOOPBACK
        start = options.data_parallel_start_rank
        is_first = not (is_headless or start)
        is_alone = start is not None and not is_headless and not options.enable_expert_parallel
        has_all = len(local_replicas(options)) == options.data_parallel_size and not is_headless
        if is_alone or (has_all and not accepts_hosts(options)):
            return _replace(options, _given(options))  # Ray may use it
    token = _given(options)
    if token is None and not is_loopback(address):
        if not is_first:
            raise ConfigError(
                f"this host needs the --cluster-token of the host at {flag} {address}: set {ENVIRONMENT}, or use "
                "--cluster-token-file; if you have none, start that host first, which prints one"
            )
        token = secrets.token_hex(32)
        log.print_text(
            f"no --cluster-token: made one for this run; start the other host{'s' * (_num_others(options) > 1)} with\n"
            f"  {ENVIRONMENT}={token} {other_command(options, sys.argv)}"
        )
    return _replace(options, token)


def other_command(options: EngineOptions, arguments: Sequence[str]) -> str:
    """Return the command line that starts a host other than the first, whose command line is `arguments`. It has no
    secrets.
    """
    of_this_host = ["--node-rank"] if options.nnodes > 1 else ["--data-parallel-start-rank", "-dpr"]
    num_values = {**dict.fromkeys([*of_this_host, "--cluster-token"], 1), "--api-key": len(arguments)}
    kept, program = [], os.path.basename(arguments[0])
    num_dropped = 0
    for argument in arguments[1:]:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            num_dropped = 0 if equals else num_values.get(name, 0)
            if name in num_values:
                continue
        if num_dropped:
            num_dropped -= 1
        else:
            kept.append(argument)
    if options.nnodes > 1:
        kept += ["--node-rank", "1" if options.nnodes == 2 else "R", *["--headless"] * (kept[:1] != ["doctor"])]
    else:
        first, local = local_replicas(options).stop, options.data_parallel_size_local or 1
        kept += ["--data-parallel-start-rank", str(first) if first + local >= options.data_parallel_size else "R"]
        kept += ["--headless"] * (options.data_parallel_start_rank is None)
    return shlex.join([program, *kept])


def _num_others(options: EngineOptions) -> int:
    return options.nnodes - 1 or options.data_parallel_size - len(local_replicas(options))


def _replace(options: EngineOptions, token: str | None) -> EngineOptions:
    return replace(options, cluster_token=token, cluster_token_file=None)


def _given(options: EngineOptions) -> str | None:
    """Return the token of the flags or the environment."""
    source, token = "--cluster-token", options.cluster_token
    if token is None and options.cluster_token_file is not None:
        source = f"--cluster-token-file {options.cluster_token_file}"
        try:
            token = Path(options.cluster_token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot read the file: {error}") from None
    if token is None and (token := os.environ.get(ENVIRONMENT, "").strip() or None) is not None:
        source = ENVIRONMENT
    if token is not None and len(token) < _MIN_LENGTH:
        raise ConfigError(
            f"{source}: the token has {len(token)} characters; use at least {_MIN_LENGTH} that nobody can guess, such "
            "as those of `openssl rand -hex 32`"
        )
    return token
