"""Messages between ranks and the KV store of another host: what those of its own host copy from and to its arena. No
torch.

    rank                           store
    WriteKV         ──▶                    followed by frames with the bytes
    ReadKV          ──▶
                    ◀──  KVAnswer …        of one that reads, followed by frames with the bytes

A rank has one connection at a time, and makes another one when an answer is late. The store takes nothing from an
earlier connection once a later one has used an entry, so that late bytes are never written after those that follow.
"""

from __future__ import annotations

import msgspec


class KVRuns(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of an entry: `layers × rows` runs of `size` bytes, which follow each other in a message."""

    start: int
    """Of the first, in the entry."""
    layers: int
    layer_step: int
    """Bytes from a layer's first run to the next layer's."""
    rows: int
    row_step: int
    size: int

    @property
    def num_bytes(self) -> int:
        return self.layers * self.rows * self.size

    def starts(self) -> list[int]:
        """Where the runs begin in the entry."""
        return [
            self.start + layer * self.layer_step + row * self.row_step
            for layer in range(self.layers)
            for row in range(self.rows)
        ]


class RankPlace(msgspec.Struct, array_like=True, frozen=True):
    """What a rank copies of an entry, and where the entry is."""

    arena: str
    kind: int
    offset: int
    runs: list[KVRuns]


class KVRank(msgspec.Struct, array_like=True, frozen=True):
    """Identifies a connection."""

    replica: int
    incarnation: int
    rank: int
    number: int
    """Higher than those of the rank's earlier connections."""


class WriteKV(msgspec.Struct, tag=True, array_like=True):
    """Write bytes of an entry that the rank's core has been granted."""

    sender: KVRank
    call_id: int
    place: msgspec.Raw
    """A `RankPlace`."""
    checksum: bytes
    """Of the place, as it is encoded, and the bytes."""


class ReadKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for bytes of an entry that has been loaded for the rank's core."""

    sender: KVRank
    call_id: int
    place: msgspec.Raw
    """A `RankPlace`."""


FromKVRank = WriteKV | ReadKV


class KVAnswer(msgspec.Struct, array_like=True):
    """The answer to either."""

    call_id: int
    error: str = ""
    """Why nothing was written or read."""
    checksum: bytes = b""
    """Of the place and the bytes that were read."""
