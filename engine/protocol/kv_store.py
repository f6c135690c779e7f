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
    SettleKV        ──▶                what is not being written by now will not come
    ReleaseKV …     ──▶                entries that have been copied
    OfferKV         ──▶
                    ◀──  GrantedKV         offsets that only the ranks of this core write
    StoredKV        ──▶
    DescribeKV      ──▶
                    ◀──  KVTiersChanged    for KV events: what the tiers have, and no longer have
    HeardKVTiers    ──▶

Each core has one connection. Messages of a core are processed in order. A grant belongs to its core until `StoredKV`,
or until another incarnation of its replica sends `OpenKVStore`, which is when all ranks of the earlier one have ended.
As soon as a core has ended, nobody waits for what it was granted.
"""

from __future__ import annotations

from typing import Any

import msgspec

LINK_BYTES = 16
TIERS_HEARD = 16

NO_TIER, MEMORY, DISK, PEER = 0, 1, 2, 3
"""Where an entry is: `FoundKV.tiers`. `PEER`: in the memory of another host's store."""


class KVEntry(msgspec.Struct, array_like=True, frozen=True):
    """Identifies an entry."""

    link: bytes
    """`LINK_BYTES` bytes."""
    kind: int


class OpenKVStore(msgspec.Struct, tag=True, array_like=True):
    """The first message of a core's incarnation. What an earlier one of the replica was granted or has loaded ends."""

    replica: int
    incarnation: int
    has_events: bool = False
    """Whether the core is told what the tiers have (`KVTiersChanged`), from the beginning again."""


class LookUpKV(msgspec.Struct, tag=True, array_like=True):
    """Ask which entries of a chain the store has. Beyond a block that is in no tier for a kind without a window, it
    looks no further."""

    call_id: int
    links: list[bytes]
    counts_granted: bool = False
    """Entries that some core of this host is writing count as in memory."""
    peer: str = ""
    """Address of the other store to load from, if several have the same. Its prompt has been computed, so what some
    core of it is writing will soon be there."""


class LoadKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for entries in the arena. Those that some core is writing are loaded when it has written them."""

    call_id: int
    """Not in use by another `LoadKV` of this core."""
    entries: list[KVEntry]
    parents: list[bytes] = []
    """For each entry, the link before its own, empty for the first of a chain. Empty list: they are not known."""
    waits: bool = False
    """Entries that the store does not have do not fail: they are loaded when some core has stored them."""
    peer: str = ""
    """Address of the store of another host whose cores store them; empty: those of this host do."""


class SettleKV(msgspec.Struct, tag=True, array_like=True):
    """A `LoadKV` that `waits` waits no longer for entries that nobody is writing: they fail."""

    call_id: int
    gives_up: bool = False
    """It does not wait either for entries that some core is writing."""


class ReleaseKV(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `LoadKV` are no longer read. A load that is larger than the memory goes on when earlier entries have
    been released."""

    call_id: int
    numbers: list[int] = []
    """Indexes in `LoadKV.entries` of some that have been loaded. Empty: the load ends. If it has not been answered in
    full, no other `LoadedKV` comes."""


class OfferKV(msgspec.Struct, tag=True, array_like=True):
    """Full blocks that the ranks have, or will have. The store grants those that it lacks and has room for, and answers
    each offer once, in order."""

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


class DescribedBlock(msgspec.Struct, array_like=True):
    """What KV events say of a block."""

    parent: int | None
    token_ids: list[int]
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class DescribeKV(msgspec.Struct, tag=True, array_like=True):
    """How KV events name blocks that the core offers, has had written (sent before `StoredKV`), or has loaded. The
    store tells all cores of their entries."""

    links: list[bytes]
    numbers: list[int]
    """Their hashes in events."""
    blocks: list[bytes]
    """A `DescribedBlock` each, in msgpack."""


class HeardKVTiers(msgspec.Struct, tag=True, array_like=True):
    """The core has taken all `KVTiersChanged` up to this number, as it says after every `TIERS_HEARD`th. One that has
    not taken many gets no more until then, and then all from the beginning."""

    number: int


class ClearKV(msgspec.Struct, tag=True, array_like=True):
    """Forget all entries, in memory and on disk, except those that are being loaded; these when they are released."""

    call_id: int


ToStore = (
    OpenKVStore | LookUpKV | LoadKV | SettleKV | ReleaseKV | OfferKV | StoredKV | DescribeKV | HeardKVTiers | ClearKV
)


class KVStoreOpened(msgspec.Struct, tag=True, array_like=True):
    """The arena. Its offsets have a meaning only with this path: a store that is started again has another one. It is
    also the answer to any message of a core that it does not know, which is dropped: the core sends `OpenKVStore`."""

    path: str
    size: int
    """Bytes."""
    address: str = ""
    """Where ranks on other hosts read and write it (`quire.engine.protocol.kv_ranks`): `HOST:PORT`; empty: nowhere."""


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


class KVTiersChanged(msgspec.Struct, tag=True, array_like=True):
    """Some of the entries of described blocks that have come to a tier or have left it. What came and went meanwhile
    may be missing, and what is said may have been said before."""

    stored: list[tuple[int, int, int, bytes]]
    """Tier, kind, number in events, and `DescribedBlock` in msgpack."""
    removed: list[tuple[int, int, int]]
    """Tier, kind, and number in events."""
    is_first: bool = False
    """Whatever earlier messages have said is void."""
    number: int = 0
    """Of all of them since the core has opened the store, from 1 on."""


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
    loaded_peer_bytes: int = 0
    sent_peer_bytes: int = 0
    """To the stores of other hosts."""
    peers: int = 0
    """Stores of other hosts that this one reads from."""
    peers_up: list[str] = []
    """Addresses (`LookUpKV.peer`) of those of them that answer."""
    failed_peers: int = 0
    """Questions to them that were answered late or wrong."""
    copied_rank_bytes: int = 0
    """Written and read by ranks on other hosts."""


FromStore = KVStoreOpened | FoundKV | LoadedKV | GrantedKV | KVCleared | KVTiersChanged | KVStoreStats


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


class RemoteArena(msgspec.Struct, array_like=True, frozen=True):
    """How ranks on other hosts than the store reach its arena."""

    address: str
    """As in `KVStoreOpened`."""
    replica: int
    incarnation: int
    """Of the core whose ranks they are."""


class KVCopyPlan(msgspec.Struct, array_like=True):
    """Copies that ranks begin beside the steps, also in steps that are skipped after a failure. They answer each with
    `KVCopied`. Until all ranks have answered, no later plan writes the blocks of `stores` and `step_stores`, nor reads
    or writes those of `loads`. All plans that write the blocks of `stores` have run, and this plan is the last one that
    writes those of `step_stores`; earlier plans, which may still run, may read the blocks of `loads`.
    """

    arena: str
    """Path of the arena. Ranks do not keep another one mapped; without copies it is empty: the store has ended."""
    stores: list[KVCopy] = []
    """From the device to the arena."""
    step_stores: list[KVCopy] = []
    """The same, of what this step computes. If the step fails, the content is arbitrary."""
    loads: list[KVCopy] = []
    """From the arena to the device."""
    remote: RemoteArena | None = None
    """For ranks on other hosts; None: there are none."""


class KVCopied(msgspec.Struct, tag=True, array_like=True):
    """A rank's copies have ended; without numbers, parts of some: the rank gets on."""

    rank: int
    numbers: list[int]
    failed: list[int] = []
    """Those of `numbers` that the rank could not copy."""
