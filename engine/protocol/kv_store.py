"""KV outside the devices: messages between an engine core and the KV store of its host, and what ranks copy. No torch.

An *entry* is what the cache holds of one block of tokens in the layers of one kind (`quire.engine.config.kv_layout`):
keys and values, the window of a compressed attention, or the recurrent states after the block. It is known by the
block's link in the hash chain (`quire.engine.scheduler.kv_cache_manager.extend_hashes`) and the number of its kind. Its
bytes do not depend on how layers and heads are divided between ranks. The store has entries in an *arena*, a file in
shared memory that the ranks of the host map, and writes them to disk and reads them from there.

    core                           store
    OpenKVStore     ──▶
                    ◀──  KVStoreOpened
    LookUpKV        ──▶
                    ◀──  FoundKV           the tiers of each link
    LoadKV          ──▶
                    ◀──  LoadedKV …        offsets in the arena that stay as they are until ReleaseKV
    ReleaseKV …     ──▶                entries that have been copied
    OfferKV         ──▶
                    ◀──  GrantedKV         offsets that only the ranks of this core write
    StoredKV        ──▶

Each core has one connection. Messages of a core are processed in order. A grant belongs to its core until `StoredKV`,
or until another incarnation of its replica sends `OpenKVStore`, which is when all ranks of the earlier one have ended.
"""

from __future__ import annotations

import msgspec

LINK_BYTES = 16

NO_TIER, MEMORY, DISK = 0, 1, 2
"""Where an entry is: `FoundKV.tiers`."""


class KVEntry(msgspec.Struct, array_like=True, frozen=True):
    """Identifies an entry."""

    link: bytes
    """`LINK_BYTES` bytes."""
    kind: int


class OpenKVStore(msgspec.Struct, tag=True, array_like=True):
    """The first message of a core's incarnation. What an earlier one of the replica was granted or has loaded ends."""

    replica: int
    incarnation: int


class LookUpKV(msgspec.Struct, tag=True, array_like=True):
    """Ask which entries of a chain the store has. Beyond a block that is in no tier for a kind without a window, it
    looks no further."""

    call_id: int
    links: list[bytes]


class LoadKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for entries in the arena."""

    call_id: int
    """Not in use by another `LoadKV` of this core."""
    entries: list[KVEntry]
    parents: list[bytes] = []
    """For each entry, the link before its own, empty for the first of a chain. Empty list: they are not known."""


class ReleaseKV(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `LoadKV` are no longer read. A load that is larger than the memory goes on when earlier entries have
    been released."""

    call_id: int
    numbers: list[int] = []
    """Indexes in `LoadKV.entries` of some that have been loaded. Empty: the load ends. If it has not been answered in
    full, no other `LoadedKV` comes."""


class OfferKV(msgspec.Struct, tag=True, array_like=True):
    """Full blocks that the ranks have. The store grants those that it lacks and has room for, and answers each offer
    once, in order."""

    entries: list[KVEntry]
    parents: list[bytes] = []
    """As in `LoadKV`. The store forgets the ends of chains before their beginnings."""


class StoredKV(msgspec.Struct, tag=True, array_like=True):
    """What became of grants."""

    offsets: list[int]
    """All ranks have written these."""
    abandoned: list[int]
    """No rank writes these any more; the content is arbitrary."""
    arena: str
    """Where they are. What became of places in another arena is ignored: its store has ended."""


class ClearKV(msgspec.Struct, tag=True, array_like=True):
    """Forget all entries, in memory and on disk, except those that are being loaded; these when they are released."""

    call_id: int


ToStore = OpenKVStore | LookUpKV | LoadKV | ReleaseKV | OfferKV | StoredKV | ClearKV


class KVStoreOpened(msgspec.Struct, tag=True, array_like=True):
    """The arena. Its offsets have a meaning only with this path: a store that is started again has another one. It is
    also the answer to any message of a core that it does not know, which is dropped: the core sends `OpenKVStore`."""

    path: str
    size: int
    """Bytes."""


class FoundKV(msgspec.Struct, tag=True, array_like=True):
    """The answer to `LookUpKV`."""

    call_id: int
    tiers: list[bytes]
    """By kind: a byte for each link, the fastest tier that has the entry."""


class LoadedKV(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `LoadKV` whose fate is known. Each entry is in one such message, in one of the lists."""

    call_id: int
    numbers: list[int]
    """Indexes in `LoadKV.entries`."""
    offsets: list[int]
    """Where they are in the arena, checked against their checksums."""
    failed: list[int]
    """Indexes of entries that the store no longer has, or whose checksum was wrong."""


class GrantedKV(msgspec.Struct, tag=True, array_like=True):
    """The part of an `OfferKV` that the store wants: where the ranks write each entry."""

    entries: list[KVEntry]
    offsets: list[int]


class KVCleared(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ClearKV`."""

    call_id: int
    num_entries: int
    error: str = ""
    """Why some entries may be left on disk; empty: none is."""


class KVStoreStats(msgspec.Struct, tag=True, array_like=True):
    """Gauges, and counters since the store's start. It sends them to all cores every second."""

    memory_bytes: int = 0
    """In use, of entries."""
    memory_capacity: int = 0
    disk_bytes: int = 0
    disk_capacity: int = 0
    memory_entries: int = 0
    disk_entries: int = 0
    stored_bytes: int = 0
    """Written to memory."""
    loaded_memory_bytes: int = 0
    loaded_disk_bytes: int = 0
    written_disk_bytes: int = 0
    evicted_memory_entries: int = 0
    evicted_disk_entries: int = 0
    wrong_checksums: int = 0
    """Entries dropped because their bytes were not what had been stored."""
    failed_disk: int = 0
    """Reads and writes that failed."""
    disk_error: str = ""
    """Why the disk tier is not in use at present; empty: it is, or there is none."""


FromStore = KVStoreOpened | FoundKV | LoadedKV | GrantedKV | KVCleared | KVStoreStats


# --- ranks ------------------------------------------------------------------------------------------------------------


class KVCopy(msgspec.Struct, array_like=True):
    """An entry that each rank copies: its own part of it."""

    number: int
    """Of this copy, among all of the core."""
    kind: int
    offset: int
    """In the arena."""
    blocks: list[int]
    """The blocks of the device: one in each group of the kind, in the order of the groups."""


class KVCopyPlan(msgspec.Struct, array_like=True):
    """Copies that ranks begin beside the steps, also in steps that are skipped after a failure. They answer each with
    `KVCopied`. Until all ranks have answered, no plan writes the blocks of `stores`, nor reads or writes those of
    `loads`. All plans that write the blocks of `stores` have run; earlier plans, which may still run, may read the
    blocks of `loads`.
    """

    arena: str
    """Path of the arena. Ranks do not keep another one mapped; without copies it is empty: the store has ended."""
    stores: list[KVCopy] = []
    """From the device to the arena."""
    loads: list[KVCopy] = []
    """From the arena to the device."""


class KVCopied(msgspec.Struct, tag=True, array_like=True):
    """A rank's copies have ended."""

    rank: int
    numbers: list[int]
    failed: list[int] = []
    """Those of `numbers` that the rank could not copy."""
