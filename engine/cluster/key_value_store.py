"""The key-value store that the ranks of several hosts rendezvous with, at their leader. No torch.

`quire.engine.distributed.link_store.LinkStore` is the ranks' side. torch's own store, TCPStore, listens on every
interface and answers everybody. Calls do not wait: a rank that waits for a key asks again.
"""

from __future__ import annotations

import msgspec

STORE = b"S"
"""Kind of the messages of the store."""


class Call(msgspec.Struct, array_like=True):
    """A call of a method of torch.distributed's Store."""

    number: int
    """Repeated in the result."""
    method: str
    keys: list[str] = []
    values: list[bytes] = []
    amount: int = 0


class StoreReply(msgspec.Struct, array_like=True):
    """The result of a call."""

    number: int
    values: list[bytes] | None = None
    """None: not all keys exist."""
    count: int = 0


class KeyValueStore:
    """Values by key, with the methods of torch.distributed's Store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def answer(self, body: bytes) -> bytes:
        """Run an encoded call, and return the encoded result. Raises `msgspec.DecodeError` if there is no such call."""
        call = msgspec.msgpack.decode(body, type=Call)
        result, stored = StoreReply(call.number), self._values
        match call:
            case Call(method="set", keys=keys, values=values):
                stored.update(zip(keys, values, strict=False))
            case Call(method="get", keys=keys):
                if stored.keys() >= set(keys):
                    result.values = [stored[key] for key in keys]
            case Call(method="add", keys=[key], amount=amount) if stored.get(key, b"0").removeprefix(b"-").isdigit():
                result.count = int(stored.get(key, b"0")) + amount
                stored[key] = b"%d" % result.count
            case Call(method="append", keys=[key], values=[value]):
                stored[key] = stored.get(key, b"") + value
            case Call(method="compare_set", keys=[key], values=[expected, desired]):
                current = stored.get(key)
                if current == expected or (current is None and not expected):
                    stored[key] = current = desired
                result.values = [expected if current is None else current]
            case Call(method="delete_key", keys=[key]):
                result.count = int(stored.pop(key, None) is not None)
            case Call(method="num_keys"):
                result.count = len(stored)
            case _:
                raise msgspec.ValidationError(f"the store has no method {call.method!r} with such arguments")
        return msgspec.msgpack.encode(result)
