"""KV outside the devices: messages between an engine core and the KV store of its host, and the copies that ranks make.
No torch.

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
    SettleKV        ──▶                entries that nobody is writing by now fail
    ReleaseKV …     ──▶                entries that have been copied
    OfferKV         ──▶
                    ◀──  GrantedKV         offsets that only the ranks of this core write
    StoredKV        ──▶
    DescribeKV      ──▶
                    ◀──  KVTiersChanged    for KV events: entries that have come to a tier or left it
    HeardKVTiers    ──▶

Each core has one connection, and its messages are processed in order. A grant belongs to its core until `StoredKV`, or
until the next incarnation of its replica sends `OpenKVStore`, by which time all ranks of the earlier one have ended. As
soon as a core has ended, nobody waits for entries that it was granted.
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
    """The first message of a core's incarnation. Grants and loads of the replica's earlier incarnation end."""

    replica: int
    incarnation: int
    has_events: bool = False
    """Whether the core is told which entries the tiers have (`KVTiersChanged`), starting with all of them."""


class LookUpKV(msgspec.Struct, tag=True, array_like=True):
    """Ask which entries of a chain the store has. It stops at the first block that is missing in some kind without a
    window."""

    call_id: int
    links: list[bytes]
    counts_granted: bool = False
    """Entries that a core of this host is still writing count as in memory."""
    peer: str = ""
    """Address of the other store to load from, if several have an entry. It has just computed the prompt, so entries
    that its cores are still writing count."""


class LoadKV(msgspec.Struct, tag=True, array_like=True):
    """Ask for entries in the arena. Entries that a core is still writing are loaded when they are written."""

    call_id: int
    """Not in use by another `LoadKV` of this core."""
    entries: list[KVEntry]
    parents: list[bytes] = []
    """For each entry, the link before its own; empty for the first of a chain. An empty list: not known."""
    waits: bool = False
    """Entries that the store does not have do not fail; they are loaded once a core has stored them."""
    peer: str = ""
    """Address of the store of another host whose cores store them; empty: those of this host do."""


class SettleKV(msgspec.Struct, tag=True, array_like=True):
    """End the waiting of a `LoadKV` with `waits`: entries that nobody is writing fail."""

    call_id: int
    gives_up: bool = False
    """Entries that a core is writing fail, too."""


class ReleaseKV(msgspec.Struct, tag=True, array_like=True):
    """Ranks no longer read these entries of a `LoadKV`. A load that is larger than the memory continues when earlier
    entries have been released."""

    call_id: int
    numbers: list[int] = []
    """Indexes in `LoadKV.entries` of loaded entries. Empty: the load ends, and if it was not answered in full, no
    further `LoadedKV` follows."""


class OfferKV(msgspec.Struct, tag=True, array_like=True):
    """Offer full blocks that the ranks have, or will have. The store grants those that it lacks and has room for. It
    answers each offer once, in order."""

    entries: list[KVEntry]
    parents: list[bytes] = []
    """As in `LoadKV`. The store evicts the ends of chains before their beginnings."""


class StoredKV(msgspec.Struct, tag=True, array_like=True):
    """The outcome of grants."""

    offsets: list[int]
    """All ranks have written these."""
    abandoned: list[int]
    """No rank writes these any more; the content is arbitrary."""
    arena: str
    """The arena of these offsets. Messages about another arena are ignored: its store has ended."""


class DescribedBlock(msgspec.Struct, array_like=True):
    """The fields of a block in KV events."""

    parent: int | None
    token_ids: list[int]
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class DescribeKV(msgspec.Struct, tag=True, array_like=True):
    """Describe blocks for KV events: blocks that the core offers, has written (sent before `StoredKV`), or has loaded.
    The store announces their entries to all cores."""

    links: list[bytes]
    numbers: list[int]
    """Their hashes in events."""
    blocks: list[bytes]
    """A `DescribedBlock` each, in msgpack."""


class HeardKVTiers(msgspec.Struct, tag=True, array_like=True):
    """Acknowledge all `KVTiersChanged` up to this number; sent after every `TIERS_HEARD`th. A core with many
    unacknowledged messages gets no more until it has caught up, and then everything from the beginning."""

    number: int


class ClearKV(msgspec.Struct, tag=True, array_like=True):
    """Forget all entries, in memory and on disk. Entries that are being loaded stay in memory until they are
    released."""

    call_id: int


ToStore = (
    OpenKVStore | LookUpKV | LoadKV | SettleKV | ReleaseKV | OfferKV | StoredKV | DescribeKV | HeardKVTiers | ClearKV
)


class KVStoreOpened(msgspec.Struct, tag=True, array_like=True):
    """The arena of the store. Offsets are valid only together with its path: a store that restarts has a new one. This
    is also the answer to any message of a core that the store does not know; the message is dropped, and the core must
    send `OpenKVStore`."""

    path: str
    size: int
    """Bytes."""
    address: str = ""
    """Where ranks on other hosts can read and write it (`quire.engine.protocol.kv_ranks`), as `HOST:PORT`; empty:
    nowhere."""


class FoundKV(msgspec.Struct, tag=True, array_like=True):
    """The answer to `LookUpKV`."""

    call_id: int
    tiers: list[bytes]
    """By kind, a byte for each link: the fastest tier that has the entry."""


class LoadedKV(msgspec.Struct, tag=True, array_like=True):
    """Entries of a `LoadKV` that are loaded or have failed. Each entry is in exactly one such message."""

    call_id: int
    numbers: list[int]
    """Indexes in `LoadKV.entries`."""
    offsets: list[int]
    """Their places in the arena. Their checksums have been verified."""
    failed: list[int]
    """Indexes of entries that the store no longer has, or whose checksum was wrong."""


class GrantedKV(msgspec.Struct, tag=True, array_like=True):
    """The entries of an `OfferKV` that the store wants, and where the ranks must write them."""

    entries: list[KVEntry]
    offsets: list[int]


class KVCleared(msgspec.Struct, tag=True, array_like=True):
    """The answer to `ClearKV`."""

    call_id: int
    num_entries: int
    error: str = ""
    """Why entries may be left on disk; empty: none are."""


class KVTiersChanged(msgspec.Struct, tag=True, array_like=True):
    """Entries of described blocks that have come to a tier or left it. Entries that came and went between two messages
    may be missing, and messages may repeat each other."""

    stored: list[tuple[int, int, int, bytes]]
    """Tier, kind, number in events, and `DescribedBlock` in msgpack."""
    removed: list[tuple[int, int, int]]
    """Tier, kind, and number in events."""
    is_first: bool = False
    """All earlier messages are void."""
    number: int = 0
    """Number of the message since the core opened the store, from 1 on."""


class KVStoreStats(msgspec.Struct, tag=True, array_like=True):
    """Gauges, and counters since the store's start. It sends them to all cores every second."""

    memory_bytes: int = 0
    """Bytes of entries."""
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
    """A copy of an entry, of which each rank copies its own part."""

    number: int
    """Of this copy, among all of the core."""
    kind: int
    offset: int
    """In the arena."""
    blocks: list[int]
    """The blocks of the device: one in each group of the kind, in the order of the groups."""


class RemoteArena(msgspec.Struct, array_like=True, frozen=True):
    """How ranks on other hosts reach the store's arena."""

    address: str
    """As in `KVStoreOpened`."""
    replica: int
    incarnation: int
    """Of the core whose ranks they are."""


class KVCopyPlan(msgspec.Struct, array_like=True):
    """Copies that ranks begin beside the steps, even in steps that are skipped after a failure. Ranks answer with
    `KVCopied`. Until all ranks have answered a copy, no later plan writes its blocks, nor reads them if it is a load.
    All plans that write the blocks of `stores` have run; this plan is the last one that writes the blocks of
    `step_stores`; earlier plans, which may still run, may read the blocks of `loads`.
    """

    arena: str
    """Path of the arena. Ranks unmap any other one. Empty, without copies: the store has ended."""
    stores: list[KVCopy] = []
    """From the device to the arena."""
    step_stores: list[KVCopy] = []
    """The same for blocks that this step computes. If the step fails, the content is arbitrary."""
    loads: list[KVCopy] = []
    """From the arena to the device."""
    remote: RemoteArena | None = None
    """How ranks on other hosts reach the arena; None: there are none."""


class KVCopied(msgspec.Struct, tag=True, array_like=True):
    """A rank has finished copies; without numbers, parts of some, which shows progress."""

    rank: int
    numbers: list[int]
    failed: list[int] = []
    """Those of `numbers` that the rank could not copy."""
