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

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from operator import attrgetter
from typing import Any

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.protocol.engine_core import EngineCoreRequest

_END = attrgetter("end")


def _cbor_head(kind: int, number: int) -> bytes:
    """The head of a CBOR item of a major type: its length or value, in the shortest form."""
    if number < 24:
        return bytes([kind << 5 | number])
    size = next(size for size in range(4) if number < 1 << (8 << size))
    return bytes([kind << 5 | 24 + size]) + number.to_bytes(1 << size)


class _Tokens(dict[int, bytes]):
    """The CBOR of the tokens that have been seen."""

    def __missing__(self, token: int) -> bytes:
        found = self[token] = _cbor_head(0, token)
        return found


_TOKENS = _Tokens()
_PARENT = _cbor_head(4, 3) + _cbor_head(2, 32)
"""Before the hash of the parent: an array of three, and a byte string."""


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
    token_ids: list[int]

    @property
    def number(self) -> int:
        """As `event_number`."""
        return event_number(self.digest)


def event_number(digest: bytes) -> int:
    """Return the hash that a block with this digest has in events: the last 64 bits."""
    return int.from_bytes(digest[-8:])


def root_hash(seed: str) -> bytes:
    """Return the parent of first blocks."""
    return sha256(cbor(seed)).digest()


def chain_salt(given: EngineCoreRequest, media: MediaSpec | None) -> bytes:
    """Return what the hash chain of a request starts from. `media`: how the model takes images."""
    salt, adapter = given.cache_salt, b"" if given.adapter is None else given.adapter.digest
    if media is not None and media.is_one_run(given.media):  # each block depends on the whole prompt
        parts = [salt, array("q", given.prompt_token_ids).tobytes()]
        parts += [item.digest + item.offset.to_bytes(8) for item in given.media]
        parts += [adapter + given.adapter_start.to_bytes(8)] * bool(adapter)
        salt = blake2b(b"".join(len(part).to_bytes(8) + part for part in parts), digest_size=16).digest()
    return salt


def event_block(
    parent: EventBlock | None, root: bytes, given: EngineCoreRequest, token_ids: list[int], start: int, salt: bytes
) -> EventBlock:
    """Return the block of a request with the tokens from `start` on. `salt` is what its hash chain starts from."""
    tagged = _extra_keys(given, start, start + len(token_ids), salt)
    digest = _digest(root if parent is None else parent.digest, token_ids, tagged)
    name = next((key[1] for key in tagged if key[0] == "lora"), None)
    extra_keys = tuple(key[1:] if key[0] == "mm" else key[1] for key in tagged)
    return EventBlock(digest, None if parent is None else parent.number, name, extra_keys or None, token_ids)


def extend_digests(
    digests: list[bytes], root: bytes, given: EngineCoreRequest, token_ids: list[int], block_size: int, salt: bytes
) -> None:
    """Append the missing digests of the full blocks of a request; arguments as in `event_block`."""
    is_plain = given.adapter is None and not given.media
    while (end := (len(digests) + 1) * block_size) <= len(token_ids):
        start = end - block_size
        tagged = _extra_keys(given, start, end, salt) if not is_plain or not start else ()
        digests.append(_digest(digests[-1] if digests else root, token_ids[start:end], tagged))


def _extra_keys(given: EngineCoreRequest, start: int, end: int, salt: bytes) -> list[tuple[Any, ...]]:
    tagged: list[tuple[Any, ...]] = []
    has_adapter = given.adapter is not None and given.adapter_start < end
    if given.adapter is not None and has_adapter:
        tagged.append(("lora", given.adapter_name, given.adapter.digest.hex()))
    for item in given.media[bisect_right(given.media, start, key=_END) :]:
        if item.offset >= end:
            break
        tagged.append(("mm", item.digest.hex(), item.offset - start))
    if salt and not start:
        tagged.append(("cache_salt", salt.hex()))
    if has_adapter and given.adapter_start > start:
        tagged.append(("lora_start", given.adapter_start - start))
    return tagged


def _digest(parent: bytes, token_ids: list[int], tagged: Sequence[tuple[Any, ...]]) -> bytes:
    """`parent` has 32 bytes."""
    tokens = b"".join(map(_TOKENS.__getitem__, token_ids))
    extra_keys = cbor(tagged) if tagged else b"\xf6"
    return sha256(_PARENT + parent + _cbor_head(4, len(token_ids)) + tokens + extra_keys).digest()
