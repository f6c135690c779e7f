"""Starts the engine-core process. No torch: the server imports this module."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from quire.engine.process.supervisor import Process, StartedProcess, start_imports

if TYPE_CHECKING:  # `prepared_core` is called before the command imports much
    from quire.engine.config.engine_config import EngineConfig, ParallelConfig
    from quire.engine.config.options import EngineOptions

_CORE, _WORKER = "quire.engine.core.engine_core", "quire.engine.worker.worker"
_prepared: list[StartedProcess] = []
"""Processes that `prepared_core` has started and `start_core` has not taken."""


@dataclass(frozen=True)
class Endpoints:
    """ZMQ addresses. The core of replica `r` binds `requests[r]`, API process `i` binds `responses[i]` (both PULL).

    `requests` has the replicas that this process has to do with. Frames are msgpack of `ToCore` and `ToServer`
    (`quire.engine.protocol.engine_core`).
    """

    requests: dict[int, str]
    responses: tuple[str, ...]
    kv_store: str = ""
    """Address of this host's KV store, which binds a ROUTER socket; empty: there is none. Frames are msgpack of
    `ToStore` and `FromStore` (`quire.engine.protocol.kv_store`)."""


def request_address(folder: str, replica: int) -> str:
    """Return a Unix socket address in `folder`."""
    return f"ipc://{folder}/requests-{replica}"


def local_endpoints(parallel: ParallelConfig, folder: str, count: int) -> Endpoints:
    """Return Unix socket addresses in `folder` for the replicas of this host and `count` API processes."""
    return Endpoints(
        {replica: request_address(folder, replica) for replica in parallel.local_replicas},
        tuple(f"ipc://{folder}/responses-{index}" for index in range(count)),
    )


def reserve_ports(address: str, count: int) -> list[socket.socket]:
    """Bind free TCP ports of an IP `address`, which reserves them until the sockets are closed.

    Programs that set SO_REUSEADDR, as ZMQ does, can listen on them meanwhile. Raises `OSError` if the address does not
    belong to this host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reserved = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
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


def replica_config(
    config: EngineConfig, replica: int, init_method: str, master: tuple[str, int] | None = None
) -> EngineConfig:
    """Return the configuration of one replica.

    `init_method` is where the ranks of coupled replicas rendezvous, `master` where the other hosts of this one join.
    """
    parallel = config.parallel
    rendezvous = init_method if parallel.is_coupled else None
    own = parallel.of_replica(replica)
    return replace(config, parallel=replace(own, init_method=rendezvous, master=master or own.master))


@dataclass(frozen=True)
class CoreArgs:
    """The arguments of an engine-core process."""

    config: EngineConfig
    endpoints: Endpoints
    log_level: str
    incarnation: int
    """The number of this start of the replica, which all its outputs have."""


@contextlib.contextmanager
def prepared_core(options: EngineOptions) -> Iterator[None]:
    """Start the process of an engine core before its configuration is known, so that it imports torch meanwhile.

    `start_core` takes it; if nothing has when the context ends, it is ended.
    """
    if options.data_parallel_size_local == 0:
        yield  # this host runs only the API
        return
    backend = options.distributed_executor_backend
    ranks = (options.prefill_tensor_parallel_size or options.tensor_parallel_size) * (  # of replica 0
        options.prefill_pipeline_parallel_size or options.pipeline_parallel_size
    )
    ranks *= options.prefill_context_parallel_size
    has_model = ranks == 1 and backend in ("auto", "uni")
    _prepared.append(start_imports(_CORE, *[_WORKER] * has_model))
    try:
        yield
    finally:
        for process in _prepared:
            _end(process)
        _prepared.clear()


def start_core(args: CoreArgs, folder: str) -> Process:
    """Start an engine core. It creates temporary files in `folder` only, so that none are left when it is killed."""
    if _prepared:
        process = _prepared.pop()
        with contextlib.suppress(BrokenPipeError):
            process.give((args, folder))
            return process
        _end(process)  # it died while it imported; a new one tells why, if it does, too
    process = start_imports(_CORE)
    process.give((args, folder))
    return process


def _end(process: StartedProcess) -> None:
    process.kill()
    process.wait()
    process.connection.close()


def exec_node(options: EngineOptions, log_level: str, *, may_rejoin: bool) -> NoReturn:
    """Replace this process by a node's without a core (see `quire.engine.executor.nodes.main`)."""
    reader, writer = os.pipe()
    os.write(writer, pickle.dumps((options, log_level, None, may_rejoin)))
    os.close(writer)
    os.dup2(reader, 0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "quire.engine.executor.nodes"])
