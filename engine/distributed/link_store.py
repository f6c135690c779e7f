"""The ranks' side of the key-value store at their leader (`quire.engine.cluster.key_value_store`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist
import zmq
from torch.distributed.distributed_c10d import Store

from quire.engine.cluster.key_value_store import STORE, Call, StoreReply
from quire.engine.cluster.security import Security, join, split

_RETRY_SECONDS = (0.001, 0.1)
"""Interval at which a rank that waits for a key asks again: the first, and the longest one."""


class LinkStore(Store):
    """torch.distributed's rendezvous over a connection to the leader, secured by the cluster token.

    Methods may be called from any thread. They raise `dist.DistStoreError` if the leader does not answer, or a key does
    not exist, before the store's timeout.
    """

    def __init__(self, url: str, token: str, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._url, self._token, self._timeout = url, token, timeout
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        Security(self._context, token).connect(self._socket, url)
        self._lock = threading.Lock()
        """Held during a call; its number is the last one's plus one."""
        self._number = 0

    def clone(self) -> LinkStore:
        return LinkStore(self._url, self._token, self._timeout)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._context.term()

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], [_encode(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call("set", list(keys), [_encode(value) for value in values])

    def get(self, key: str) -> bytes:
        return self._wait([key], self._timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("get", list(keys)).values is not None

    def add(self, key: str, amount: int) -> int:
        return self._call("add", [key], amount=amount).count

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", [key], [_encode(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = self._call("compare_set", [key], [_encode(expected), _encode(desired)]).values
        assert values is not None
        return values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", [key]).count)

    def num_keys(self) -> int:
        return self._call("num_keys").count

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        interval, longest = _RETRY_SECONDS
        while (values := self._call("get", list(keys)).values) is None:
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(
                    f"wait timeout after {timeout.total_seconds():g} s: the keys {', '.join(keys)} were not all set"
                )
            time.sleep(interval)
            interval = min(2 * interval, longest)
        return values

    def _call(self, method: str, keys: list[str] = [], values: list[bytes] = [], amount: int = 0) -> StoreReply:  # noqa: B006
        deadline = time.monotonic() + self._timeout.total_seconds()
        with self._lock:
            self._number += 1
            call = msgspec.msgpack.encode(Call(self._number, method, keys, values, amount))
            self._socket.send_multipart((STORE, *split(call)))
            while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                _, *frames = self._socket.recv_multipart()
                result = msgspec.msgpack.decode(join(frames), type=StoreReply)
                if result.number == self._number:
                    return result
        raise dist.DistStoreError(f"the store at {self._url} did not answer within {self._timeout.total_seconds():g} s")


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
