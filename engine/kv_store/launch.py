"""Starts the process of a host's KV store. No torch: the server imports this module."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.cluster.network import LOOPBACK, own_address, tcp_url
from quire.engine.config.engine_config import EngineConfig
from quire.engine.process.supervisor import Process, start_process


@dataclass(frozen=True)
class KVStoreArgs:
    """The arguments of the process."""

    config: EngineConfig
    """The configuration of the host, with a `kv_store`."""
    address: str
    """The address of its Unix socket: `Endpoints.kv_store`."""
    folder: str
    """The server's folder for temporary files."""
    log_level: str
    peer_address: str = ""
    """Where other stores read from this one (`HOST:PORT`); empty: nowhere."""
    peers: tuple[str, ...] = ()
    """Addresses of other stores."""
    rank_host: str = ""
    """A host with ranks that need the memory: they reach it at the address of this host that leads there
    (`address_towards`). Empty: there are none."""


def peer_address(config: EngineConfig) -> str:
    """Return where stores of other servers read this host's store (`HOST:PORT`): without a token, at a loopback
    address; empty: nowhere."""
    if config.kv_store is None or not config.kv_store.peer_port:
        return ""
    host = own_address() if config.parallel.cluster_token else LOOPBACK
    return tcp_url(host, config.kv_store.peer_port).removeprefix("tcp://")


def start_kv_store(args: KVStoreArgs) -> Process:
    """Start the process that serves the engine cores of this host."""
    return start_process("quire.engine.kv_store.process", args)
