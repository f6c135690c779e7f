"""KV events, by which a router outside the server learns which blocks a replica has, and the calls about them. No
torch.

The events and their batch have vLLM's wire format (0.32): a batch is a msgpack array, an event a map with its name
under `type`, and fields with their default values are left out, in the order of the definitions here. Read by llm-d
(`pkg/kvevents/engineadapter`) and Dynamo (`lib/kv-router/src/zmq_wire`).
"""

from __future__ import annotations

from typing import Any

import msgspec

GPU = "GPU"
"""vLLM's name of the medium that blocks on the device are on, whatever the device is."""
CPU, STORAGE = "CPU", "STORAGE"
"""Those of the memory and the disks of a KV store."""
NEWS_HEARD, BYTES_HEARD = 16, 1 << 18
"""`KVEventsNews`, and bytes of them, after which an API process says that it has taken them."""
NOTHING_SENT = -1
"""The sequence number before that of the first batch."""
END_OF_REPLAY = NOTHING_SENT.to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of one chain are in the prefix cache from now on, in one group of layers."""

    block_hashes: list[int]
    """The last 64 bits of each block's hash (`quire.engine.scheduler.kv_events`)."""
    parent_block_hash: int | None
    """The hash of the block before the first one; None: that is the first of the chain."""
    token_ids: list[int]
    """The tokens of all these blocks."""
    block_size: int
    """Tokens of a block."""
    lora_id: int | None
    """Always None: adapters have no numbers."""
    medium: str | None
    lora_name: str | None
    """The adapter's name."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """What each block's hash includes beside its tokens; None: nothing."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def append(self, following: BlockStored) -> bool:
        """Add the blocks of another event if they continue the chain; returns whether they do."""
        if (following.parent_block_hash, following.medium, following.group_idx, following.lora_name) != (
            *(self.block_hashes[-1], self.medium),
            *(self.group_idx, self.lora_name),
        ):
            return False
        assert self.extra_keys is not None
        assert following.extra_keys is not None
        self.block_hashes += following.block_hashes
        self.token_ids += following.token_ids
        self.extra_keys += following.extra_keys
        return True


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks have left the prefix cache of a group of layers."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The prefix cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A message to subscribers: its frames are the topic, the sequence number as 8 bytes (big-endian), and this."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class KVEventSource(msgspec.Struct):
    """Where a replica publishes its events: vLLM's `KVEventsConfig`, resolved."""

    endpoint: str
    """What subscribers connect to, or a host on which one listens."""
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"


class GetKVEvents(msgspec.Struct, tag=True, array_like=True):
    """Ask where a replica publishes its events, and with `has_blocks`, which blocks it has. Answered with
    `KVEventsState`."""

    client: int
    call_id: int
    has_blocks: bool


class FollowKVEvents(msgspec.Struct, tag=True, array_like=True):
    """Send an API process what a replica has, and then each batch that it publishes, as `KVEventsNews`; nothing if it
    publishes none."""

    client: int
    has_tiers: bool = False
    """Also what the KV store of the replica's host has. All replicas of a host publish the same of that."""
    heard: int = NOTHING_SENT
    """Number of the last news that the process has taken, of those that it gets already: to be told after `NEWS_HEARD`
    or `BYTES_HEARD`, as only so many are sent ahead. `NOTHING_SENT`: begin with what the replica has."""


class KVEventsNews(msgspec.Struct, tag=True, array_like=True):
    """A part of what a replica has, or a batch that it has published, for an API process that follows its events."""

    number: int
    """Of all news for this process, without a gap."""
    batch: bytes
    """A `KVEventBatch` in msgpack. In parts of what the replica has, blocks are without tokens and parents."""
    is_first: bool = False
    """Whatever earlier news have said is void: the replica has this, and what follows."""
    has_more: bool = False
    """The next one is another part of what the replica has."""
    replica: int = 0
    incarnation: int = 0


class KVEventsState(msgspec.Struct, tag=True, array_like=True):
    """The answer to `GetKVEvents`, or a part of it."""

    call_id: int
    source: KVEventSource | None
    """None: it publishes nothing."""
    sequence: int = NOTHING_SENT
    """Number of the last batch that it has published."""
    events: bytes = b""
    """Items of a JSON array, `BlockStored`: the blocks after this batch, parents before their children."""
    has_more: bool = False
    """The next answer to the same call has further items."""
    replica: int = 0
    incarnation: int = 0
