"""What the prefix cache tells routers outside the server: blocks that are stored and removed, in vLLM's terms.

A block is announced when the step that writes it has run, and withdrawn when it leaves the cache; one that leaves
before is never announced. So the announced blocks are, at every moment, those that a new request would find.

Internally, blocks have the hashes of `kv_cache_manager.extend_hashes`. Blocks for which these are equal are one for
routers, too: adapters with two names and the same weights are announced under one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.protocol.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.engine.scheduler.event_hashes import EventBlock, event_block, root_hash
from quire.engine.scheduler.request import Request


@dataclass(slots=True)
class _Unwritten:
    """A block in the prefix cache that a step in flight writes."""

    step: int
    block: EventBlock
    group: int
    token_ids: list[int]


class KVEvents:
    """Collects the events of one replica's prefix cache, on the thread of the scheduler."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        self._block_size, self._kinds = block_size, config.kinds
        self._root = root_hash(config.hash_seed)
        self._known: WeakValueDictionary[bytes, EventBlock] = WeakValueDictionary()
        """Blocks of running requests and of the cache, by their links."""
        self._announced: dict[bytes, tuple[EventBlock, int]] = {}
        """By the hash in the cache: the block and the group."""
        self._unwritten: dict[bytes, _Unwritten] = {}
        """The same for those that are not announced yet."""
        self._of_step: dict[int, list[bytes]] = {}
        self._news: list[KVEvent] = []

    def describe(self, request: Request, num_blocks: int, salt: bytes) -> None:
        """Describe the first blocks of a request, which have hashes. `salt` is what its hash chain starts from."""
        blocks, size = request.event_blocks, self._block_size
        for at in range(len(blocks), num_blocks):
            link = request.hashes[at * len(self._kinds)]
            if (block := self._known.get(link)) is None:
                parent, tokens = blocks[-1] if blocks else None, request.token_ids[at * size : (at + 1) * size]
                block = event_block(parent, self._root, request.core_request, tokens, at * size, salt)
                self._known[link] = block
            blocks.append(block)

    def stored(self, request: Request, index: int, step: int | None) -> None:
        """A described block was added to the prefix cache, which is number `index` of the request's, of all groups.
        `step` is the step that writes it, if it has not run yet."""
        at, group = divmod(index, len(self._kinds))
        tokens = request.token_ids[at * self._block_size : (at + 1) * self._block_size]
        digest, block = request.hashes[index], request.event_blocks[at]
        if step is None:
            self._announce([(digest, _Unwritten(-1, block, group, tokens))])
        else:
            self._unwritten[digest] = _Unwritten(step, block, group, tokens)
            self._of_step.setdefault(step, []).append(digest)

    def written(self, step: int) -> None:
        """A step has run, or was given up: announce what it has written."""
        if (digests := self._of_step.pop(step, None)) is not None:
            unwritten = self._unwritten
            mine = dict.fromkeys(each for each in digests if each in unwritten and unwritten[each].step == step)
            self._announce([(each, unwritten.pop(each)) for each in mine])

    def removed(self, digest: bytes) -> None:
        """A block has left the prefix cache."""
        if self._unwritten.pop(digest, None) is not None:
            return
        block, group = self._announced.pop(digest)
        last = self._news[-1] if self._news else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(block.number)
        else:
            self._news.append(BlockRemoved([block.number], GPU, group))

    def cleared(self) -> None:
        """All blocks have left the prefix cache."""
        self._announced.clear()
        self._unwritten.clear()
        self._of_step.clear()
        self._news = [AllBlocksCleared()]

    def take(self) -> list[KVEvent]:
        """Return the events since the last call."""
        news, self._news = self._news, []
        return news

    def _announce(self, found: list[tuple[bytes, _Unwritten]]) -> None:
        last: BlockStored | None = None
        for digest, new in sorted(found, key=lambda each: each[1].group):
            block, group = new.block, new.group
            self._announced[digest] = block, group
            kind, window = self._kinds[group]
            event = BlockStored(
                [block.number],
                block.parent,
                new.token_ids,
                self._block_size,
                None,
                GPU,
                block.lora_name,
                [block.extra_keys],
                group,
                kind,
                window,
            )
            if last is None or not last.append(event):
                self._news.append(event)
                last = event

    def check_integrity(self, cached: Iterable[bytes]) -> None:
        """Assert that the blocks are those of the cache."""
        assert not self._announced.keys() & self._unwritten.keys(), "a block is announced before it is written"
        assert self._announced.keys() | self._unwritten.keys() == set(cached), "events differ from the cache"
        steps = {digest: step for step, digests in sorted(self._of_step.items()) for digest in digests}
        assert all(steps[each] >= new.step for each, new in self._unwritten.items()), "a block is never announced"
