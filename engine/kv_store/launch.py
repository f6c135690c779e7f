"""Starts the process of a host's KV store. No torch: the server imports this module."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process.supervisor import Process, start_process


@dataclass(frozen=True)
class KVStoreArgs:
    """The arguments of the process."""

    config: EngineConfig
    """That of the host, which has a `kv_store`."""
    address: str
    """The Unix socket that it binds: `Endpoints.kv_store`."""
    folder: str
    """The server's folder for temporary files."""
    log_level: str


def start_kv_store(args: KVStoreArgs) -> Process:
    """Start the process, which serves the engine cores of this host."""
    return start_process("quire.engine.kv_store.process", args)
