"""Messages between the KV stores of several hosts. No torch.

    reader                         owner
    HelloPeer       ──▶                    every second
                    ◀──  PeerReady
    AskPeer         ──▶
                    ◀──  PeerHas           which entries of a chain it has, in memory or on disk
    FetchKV         ──▶
                    ◀──  PeerPiece …       each followed by a frame with the bytes
                    ◀──  PeerLacks         entries that it no longer has

Each store is both. Entries are those of `quire.engine.protocol.kv_store`. Besides their links, their bytes depend on
the *signature* (`quire.engine.kv_store.disk.signature_of`), which each question contains: a store with another
signature has nothing for it. No store asks another one on behalf of a third, or names a third: each reads only from the
stores that its server names.
"""

from __future__ import annotations

import msgspec

from quire.engine.protocol.kv_store import KVEntry

PIECE_BYTES = 1 << 20
"""Maximum bytes of an entry in one message."""
FETCH_BYTES = 8 << 20
"""Maximum bytes of the entries of a `FetchKV`, unless it has only one."""
MAX_FETCHES = 2
"""Maximum `FetchKV` of a reader that have not been answered in full. Further ones are answered with `PeerLacks`."""
GRANT_SECONDS = 0.5
"""Time that an owner waits for entries that its cores are writing; less than a reader waits for the owner."""
LEAST_RATE = 1 << 20
"""Minimum bytes per second of a fetch; a reader gives up slower ones."""


class HelloPeer(msgspec.Struct, tag=True, array_like=True):
    """Announces a reader."""

    signature: bytes


class AskPeer(msgspec.Struct, tag=True, array_like=True):
    """Ask which entries of a chain the store has, like `LookUpKV`. This does not count as a use of them."""

    signature: bytes
    call_id: int
    links: list[bytes]
    counts_granted: bool = False


class FetchKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for the bytes of entries. The owner waits up to `GRANT_SECONDS` for entries that its cores are writing."""

    signature: bytes
    call_id: int
    entries: list[KVEntry]


ToPeer = HelloPeer | AskPeer | FetchKV


class PeerReady(msgspec.Struct, tag=True, array_like=True):
    """The answer to `HelloPeer`."""

    store: bytes
    """Random bytes by which a reader recognizes itself, if it was given its own address."""
    error: str = ""
    """Why the store has nothing for the reader; empty: it may have something."""
    address: str = ""
    """The address at which it is read (`HOST:PORT`). Requests name it so (`LookUpKV.peer`), even if the reader uses
    another address."""


class PeerHas(msgspec.Struct, tag=True, array_like=True):
    """The answer to `AskPeer`."""

    call_id: int
    has: list[bytes]
    """By kind, a byte for each link: not 0 if the store has the entry."""


class PeerPiece(msgspec.Struct, tag=True, array_like=True):
    """Bytes of an entry, in the next frame. The pieces of an entry come in order."""

    call_id: int
    number: int
    """Index in `FetchKV.entries`."""
    start: int
    """Offset of these bytes in the entry."""
    checksum: bytes
    """Checksum of the whole entry, its link and its kind (`quire.engine.kv_store.checksum.bind`)."""


class PeerLacks(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `FetchKV` that will not come."""

    call_id: int
    numbers: list[int]


FromPeer = PeerReady | PeerHas | PeerPiece | PeerLacks
