"""Hashes of blocks that other languages can compute: vLLM's `sha256_cbor`, for KV events.

The hash of a block is the SHA-256 of the CBOR (RFC 8949) array of the parent's hash, the array of the block's tokens,
and the array of its extra keys or null. The parent of the first block is the SHA-256 of the CBOR text `hash_seed`.
Extra keys, each an array, in this order:

- `"lora"`, the adapter's name, the adapter's digest in hex: blocks that the adapter changes;
- `"mm"`, the digest of an image or video in hex, the place of its first token relative to the block: blocks with its
  tokens;
- `"cache_salt"`, the salt of the chain in hex: the first block;
- `"lora_start"`, the place in the block from which the adapter changes it, if that is not the first one.

An event has the adapter's name, the pair of digest and place, the salt, and the place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import repeat
from operator import attrgetter
from typing import Any

from quire.engine.protocol.engine_core import EngineCoreRequest

_END = attrgetter("end")


@lru_cache(1 << 18)
def _cbor_head(kind: int, number: int) -> bytes:
    """The head of a CBOR item of a major type: its length or value, in the shortest form."""
    if number < 24:
        return bytes([kind << 5 | number])
    size = next(size for size in range(4) if number < 1 << (8 << size))
    return bytes([kind << 5 | 24 + size]) + number.to_bytes(1 << size)


def cbor(value: Any) -> bytes:
    """Encode integers, bytes, texts, sequences and None in canonical CBOR."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            return _cbor_head(3, len(encoded := value.encode())) + encoded
    return _cbor_head(4, len(value)) + b"".join(map(cbor, value))


@dataclass(slots=True, weakref_slot=True, eq=False)
class EventBlock:
    """A block of tokens, as routers know it."""

    digest: bytes
    """32 bytes."""
    parent: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None

    @property
    def number(self) -> int:
        """Its hash in events: the last 64 bits."""
        return int.from_bytes(self.digest[-8:])


def root_hash(seed: str) -> bytes:
    """Return the parent of first blocks."""
    return sha256(cbor(seed)).digest()


def event_block(
    parent: EventBlock | None, root: bytes, given: EngineCoreRequest, token_ids: Sequence[int], start: int, salt: bytes
) -> EventBlock:
    """Return the block of a request with the tokens from `start` on. `salt` is what its hash chain starts from."""
    end = start + len(token_ids)
    tagged: list[tuple[Any, ...]] = []
    name = None
    if given.adapter is not None and given.adapter_start < end:
        name = given.adapter_name
        tagged.append(("lora", name, given.adapter.digest.hex()))
    for item in given.media[bisect_right(given.media, start, key=_END) :]:
        if item.offset >= end:
            break
        tagged.append(("mm", item.digest.hex(), item.offset - start))
    if salt and not start:
        tagged.append(("cache_salt", salt.hex()))
    if name is not None and given.adapter_start > start:
        tagged.append(("lora_start", given.adapter_start - start))
    tokens = _cbor_head(4, len(token_ids)) + b"".join(map(_cbor_head, repeat(0), token_ids))
    content = _cbor_head(4, 3) + cbor(root if parent is None else parent.digest) + tokens + cbor(tagged or None)
    digest = sha256(content).digest()
    extra_keys = tuple(key[1:] if key[0] == "mm" else key[1] for key in tagged)
    return EventBlock(digest, None if parent is None else parent.number, name, extra_keys or None)
