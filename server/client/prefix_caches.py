"""What the prefix caches of the replicas have, estimated from the requests that were sent to them.

The hash chains of prompts (and of outputs, after they finish), most recently used first, as many blocks as the replica
has; another salt makes another chain, and so does another adapter from the first block on that it changes. With KV
events, `KVViews` knows instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.engine.config.engine_config import CacheConfig
from quire.engine.protocol.engine_core import EngineCoreRequest


@dataclass(slots=True)
class _CacheEstimate:
    """The cache of one replica."""

    blocks: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    """Hashes of blocks, in order of last use."""
    capacity: int = 0
    """KV blocks of the replica; 0: not known yet."""


class PrefixCaches:
    """The caches of all replicas, for the router of one API process."""

    def __init__(self, cache: CacheConfig | None) -> None:
        """Without `cache`, or without prefix caching, nothing is cached."""
        self.block_size = cache.block_size if cache else 0
        self.num_groups = len(cache.groups) if cache else 1
        self._num_blocks = cache.num_blocks if cache else 0
        self._is_enabled = cache is not None and cache.enable_prefix_caching
        self._estimates: dict[int, _CacheEstimate] = {}

    def hashes(self, request: EngineCoreRequest) -> list[Any]:
        """Return the hashes of the full blocks of a request."""
        hashes: list[Any] = []
        if self._is_enabled:
            self._extend(hashes, request, request.prompt_token_ids + request.output_token_ids)
        return hashes

    def num_cached(self, replica: int, hashes: list[Any]) -> int:
        """Return the tokens of a chain that a replica has on its device."""
        cached, known = 0, self._estimate(replica).blocks
        for digest in hashes:
            if digest not in known:
                break
            cached += self.block_size
        return cached

    def num_saved(self, replica: int, hashes: list[Any], num_cached: int) -> int:
        """Return the tokens of a chain that a replica need not compute, given those on its device. Tokens that it loads
        count as far as that saves time."""
        return num_cached

    def on_placed(self, replica: int, hashes: list[Any], num_blocks: int) -> None:
        """Record that a request with this chain was sent to a replica, which has `num_blocks`; 0: not known."""
        estimate = self._estimate(replica)
        estimate.capacity = num_blocks or estimate.capacity
        self._record(estimate, hashes)

    def on_finished(self, replica: int, request: EngineCoreRequest, hashes: list[Any], output: list[int]) -> None:
        """Record that a request with this chain, and this output, has left its replica."""
        if self._is_enabled and output:
            # The KV of the last token is not computed.
            self._extend(hashes, request, (request.prompt_token_ids + output)[:-1])
            self._record(self._estimate(replica), hashes)

    def forget(self, replica: int) -> None:
        """Record that a replica has lost its cache, or was removed."""
        self._estimates.pop(replica, None)

    def on_reset(self, replica: int) -> None:
        """Record that a replica has forgotten its prefix cache, as it was told to."""
        self._estimates.pop(replica, None)

    def _estimate(self, replica: int) -> _CacheEstimate:
        return self._estimates.setdefault(replica, _CacheEstimate())

    def _extend(self, hashes: list[Any], request: EngineCoreRequest, tokens: list[int]) -> None:
        """Append the missing hashes of a chain: one for each full block, over its tokens and all tokens before it."""
        if request.media:  # the tokens of all images are the same
            tokens = tokens.copy()
            for item in request.media:
                tokens[item.offset] = int.from_bytes(item.digest)
        adapter, size = b"" if request.adapter is None else request.adapter.digest, self.block_size
        while (end := (len(hashes) + 1) * size) <= len(tokens):
            own = adapter if end > request.adapter_start else b""
            hashes.append(hash((hashes[-1] if hashes else request.cache_salt, own, *tokens[end - size : end])))

    def _record(self, estimate: _CacheEstimate, hashes: Iterable[Any]) -> None:
        """Record these blocks as cached, the first of the chain most recently; evict the least recently used."""
        for digest in reversed([*hashes]):
            estimate.blocks[digest] = None
            estimate.blocks.move_to_end(digest)
        total = estimate.capacity or self._num_blocks
        while total and len(estimate.blocks) > max(1, total // self.num_groups):
            estimate.blocks.popitem(last=False)
