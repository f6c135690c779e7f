"""Starts the engine-core process. No torch: the server imports this module."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import NoReturn

from quire.engine.config.engine_config import EngineConfig, ParallelConfig
from quire.engine.config.options import EngineOptions

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoints:
    """ZMQ addresses. The core of replica `r` binds `requests[r]`, API process `i` binds `responses[i]` (both PULL).

    The address of a replica that this host does not use is "". Frames are msgpack of `ToCore` and `ToServer`
    (`quire.engine.protocol.engine_core`).
    """

    requests: tuple[str, ...]
    responses: tuple[str, ...]


def local_endpoints(parallel: ParallelConfig, folder: str, count: int) -> Endpoints:
    """Return Unix socket addresses in `folder` for the replicas of this host and `count` API processes."""
    return Endpoints(
        tuple(f"ipc://{folder}/requests-{r}" if r in parallel.local_replicas else "" for r in range(parallel.replicas)),
        tuple(f"ipc://{folder}/responses-{index}" for index in range(count)),
    )


def reserve_ports(address: str, count: int) -> list[socket.socket]:
    """Bind free TCP ports of an IPv4 `address`, which reserves them until the sockets are closed.

    Programs that set SO_REUSEADDR, as ZMQ and torch do, can listen on them meanwhile. Raises `OSError` if the address
    does not belong to this host.
    """
    reserved = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for port in reserved:
            port.bind((address, 0))
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        for port in reserved:
            port.close()
        raise
    return reserved


def socket_port(reserved: socket.socket) -> int:
    return int(reserved.getsockname()[1])


def replica_config(config: EngineConfig, replica: int, master: tuple[str, int] | None) -> EngineConfig:
    """Return the configuration of one replica; `master` is the rendezvous address of coupled replicas' ranks."""
    parallel = config.parallel
    return replace(config, parallel=replace(parallel, replica=replica, master=master or parallel.master))


def start_core(config: EngineConfig, endpoints: Endpoints, log_level: str = "info") -> subprocess.Popen[bytes]:
    """Start the core as a separate process (not a fork: the caller's `__main__` is not imported again).

    It exits when this process does, because its standard input closes. It sends `EngineReady`, or `EngineDead` with
    the reason, to every API process.
    """
    # -P: imports nothing from the current folder.
    command = [sys.executable, "-P", "-m", "quire.engine.core.engine_core"]
    core = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert core.stdin is not None
    core.stdin.write(pickle.dumps((config, endpoints, log_level)))
    core.stdin.flush()
    return core


def exec_node(options: EngineOptions, log_level: str) -> NoReturn:
    """Replace this process by that of a node other than node 0 (see `quire.engine.executor.nodes.main`)."""
    reader, writer = os.pipe()
    os.write(writer, pickle.dumps((options, log_level, None)))
    os.close(writer)
    os.dup2(reader, 0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "quire.engine.executor.nodes"])
