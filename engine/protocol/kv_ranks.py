"""Messages between ranks and the KV store of another host, in place of the copies that ranks of the store's host make
from and to its arena. No torch.

    rank                           store
    WriteKV         ──▶                    followed by frames with the bytes
    ReadKV          ──▶
                    ◀──  KVAnswer …        for a read, followed by frames with the bytes

A rank has one connection at a time, and makes another one when an answer is late. Once a later connection has used an
entry, the store takes nothing from an earlier one, so that late bytes never overwrite newer ones.
"""

from __future__ import annotations

import msgspec


class KVRuns(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of an entry: `layers × rows` runs of `size` bytes, which follow each other in a message."""

    start: int
    """Offset of the first run in the entry."""
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
    """The place of an entry, and the runs of it that a rank copies."""

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
    """Higher than the numbers of the rank's earlier connections."""


class WriteKV(msgspec.Struct, tag=True, array_like=True):
    """Write bytes of an entry that the rank's core has been granted."""

    sender: KVRank
    call_id: int
    place: msgspec.Raw
    """A `RankPlace`."""
    checksum: bytes
    """Checksum of the encoded place and the bytes."""


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
    """For a read: checksum of the encoded place and the bytes."""
