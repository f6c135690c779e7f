"""Messages between the KV stores of several hosts. No torch.

    reader                         owner
    HelloPeer       ──▶                    every second
                    ◀──  PeerReady
    AskPeer         ──▶
                    ◀──  PeerHas           which entries of a chain it has, in memory or on disk
    FetchKV         ──▶
                    ◀──  PeerPiece …       each followed by a frame with the bytes
                    ◀──  PeerLacks         entries that it has no longer

Each store is both. Entries are those of `quire.engine.protocol.kv_store`. Their bytes depend on the *signature* beside
their links (`quire.engine.kv_store.disk.signature_of`), which each question has: a store with another one has nothing.
Nobody asks a store on behalf of a third one, nor tells of one: each reads from those that its server names.
"""

from __future__ import annotations

import msgspec

from quire.engine.protocol.kv_store import KVEntry

PIECE_BYTES = 1 << 20
"""Most bytes of an entry in one message."""
FETCH_BYTES = 8 << 20
"""Most bytes of the entries of a `FetchKV`, unless it has one only."""
MAX_FETCHES = 2
"""`FetchKV` of a reader that have not been answered in full. More are answered with `PeerLacks`."""
GRANT_SECONDS = 0.5
"""Time that an owner waits for what its cores are writing; less than that after which a reader finds it late."""
LEAST_RATE = 1 << 20
"""Bytes per second at which a reader gets what it has asked for, or it gives up."""


class HelloPeer(msgspec.Struct, tag=True, array_like=True):
    """A reader is there."""

    signature: bytes


class AskPeer(msgspec.Struct, tag=True, array_like=True):
    """Ask which entries of a chain the store has; as `LookUpKV`. Nothing is younger for it."""

    signature: bytes
    call_id: int
    links: list[bytes]
    counts_granted: bool = False


class FetchKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for the bytes of entries. Those that cores are writing are waited for, for `GRANT_SECONDS`."""

    signature: bytes
    call_id: int
    entries: list[KVEntry]


ToPeer = HelloPeer | AskPeer | FetchKV


class PeerReady(msgspec.Struct, tag=True, array_like=True):
    """The answer to `HelloPeer`."""

    store: bytes
    """Random bytes by which a reader knows itself, if it was given its own address."""
    error: str = ""
    """Why the store has nothing for the reader; empty: it may have something."""
    address: str = ""
    """Where it is read from (`HOST:PORT`): by this name requests know it (`LookUpKV.peer`), also if the reader knows it
    by another."""


class PeerHas(msgspec.Struct, tag=True, array_like=True):
    """The answer to `AskPeer`."""

    call_id: int
    has: list[bytes]
    """By kind: a byte for each link, other than 0 if the store has the entry."""


class PeerPiece(msgspec.Struct, tag=True, array_like=True):
    """Bytes of an entry, which are the next frame. Those of one entry come in order."""

    call_id: int
    number: int
    """Index in `FetchKV.entries`."""
    start: int
    """Of these bytes, in those of the entry."""
    checksum: bytes
    """Of the whole entry, its link and its kind (`quire.engine.kv_store.checksum.bind`)."""


class PeerLacks(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `FetchKV` that do not come."""

    call_id: int
    numbers: list[int]


FromPeer = PeerReady | PeerHas | PeerPiece | PeerLacks
