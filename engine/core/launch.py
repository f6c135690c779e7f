"""Starting the engine-core process. No torch here: this is all that the server knows of it."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import NoReturn

from quire.engine.config.options import EngineConfig, EngineOptions, ParallelConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoints:
    """ZMQ addresses. The core of replica `r` binds `requests[r]`, API process `i` binds `responses[i]` (PULL, both).

    Replicas that nobody here talks to have no address (""). Frames are msgpack of `messages.ToCore` and
    `messages.ToServer`.
    """

    requests: tuple[str, ...]
    responses: tuple[str, ...]


def local_endpoints(parallel: ParallelConfig, folder: str, count: int) -> Endpoints:
    """Unix sockets in `folder`, for the replicas of this host and `count` API processes."""
    return Endpoints(
        tuple(f"ipc://{folder}/requests-{r}" if r in parallel.local_replicas else "" for r in range(parallel.replicas)),
        tuple(f"ipc://{folder}/responses-{index}" for index in range(count)),
    )


def reserve_ports(address: str, count: int) -> list[socket.socket]:
    """Free TCP ports of an IPv4 `address`, kept from others until the sockets are closed.

    Whoever sets SO_REUSEADDR, as ZMQ and torch do, may listen on them meanwhile. Raises `OSError` when the address is
    none of this host.
    """
    held = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for port in held:
            port.bind((address, 0))
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        for port in held:
            port.close()
        raise
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def replica_config(config: EngineConfig, replica: int, master: tuple[str, int] | None) -> EngineConfig:
    """Of one replica of a host's; `master` is where the ranks of coupled ones meet."""
    parallel = config.parallel
    return replace(config, parallel=replace(parallel, replica=replica, master=master or parallel.master))


def start_core(config: EngineConfig, endpoints: Endpoints, log_level: str = "info") -> subprocess.Popen[bytes]:
    """Start the core as a process of its own (not a fork: the caller's `__main__` is not imported again).

    It ends by itself when this process does, because its standard input closes. It sends `EngineReady`, or `EngineDead`
    with the reason, to every API process.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "quire.engine.core.engine_core",
    ]  # -P: nothing is imported from the current folder
    core = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert core.stdin is not None
    core.stdin.write(pickle.dumps((config, endpoints, log_level)))
    core.stdin.flush()
    return core


def become_node(options: EngineOptions, log_level: str) -> NoReturn:
    """Turn this process into that of another node than 0 (see `quire.engine.executor.nodes.main`)."""
    reader, writer = os.pipe()
    os.write(writer, pickle.dumps((options, log_level)))
    os.close(writer)
    os.dup2(reader, 0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "quire.engine.executor.nodes"])
