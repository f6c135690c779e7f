"""The arena of a KV store on another host, as a rank copies from and to it (`quire.engine.protocol.kv_ranks`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq

from quire.engine.cluster.security import Security, join, split
from quire.engine.kv_store.checksum import placed_checksum
from quire.engine.protocol.kv_ranks import KVAnswer, KVRank, RankPlace, ReadKV, WriteKV
from quire.engine.protocol.kv_store import RemoteArena

SECONDS = 1.0
"""Time for the copies that are made together, beside that for their bytes."""
_LEAST_BANDWIDTH = 8 << 20
"""Bytes per second for which there is time: as much longer as these take."""
BATCH_BYTES = 8 << 20
"""Bytes that are best copied together, if the store is never late."""
_GROWTH = 1 / 16
"""Of that, after it has shrunk: this share of what was copied in time."""
_MAX_DOUBLINGS = 4
"""A store that is late again and again is not asked for 1, 2, … 16 seconds each time."""

_decode = msgspec.msgpack.Decoder(KVAnswer).decode
_encode = msgspec.msgpack.Encoder().encode


class ArenaTransfer(NamedTuple):
    """Bytes of an entry, which are in `memory` one after another, or come there."""

    place: msgspec.Raw
    """A `RankPlace`."""
    memory: memoryview

    @staticmethod
    def of(place: RankPlace, memory: memoryview) -> ArenaTransfer:
        return ArenaTransfer(msgspec.Raw(_encode(place)), memory)


class ArenaLink:
    """Belongs to one thread."""

    def __init__(
        self,
        remote: RemoteArena,
        rank: int,
        token: str,
        max_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token` is the cluster's; no `copy` takes longer than `max_seconds`."""
        self.remote, self._rank, self._token = remote, rank, token
        self._max_seconds, self._clock = max_seconds, clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = Security(self._context, token)
        self._socket: zmq.Socket[bytes] | None = None
        self._sender = KVRank(remote.replica, remote.incarnation, rank, 0)
        self._last_call = 0
        self._num_late = 0
        """How often in a row the store has been late."""
        self._retry_at = 0.0
        """Before this time, everything fails at once."""
        self.batch_bytes = BATCH_BYTES
        """Bytes to be copied together: half as many after each time that the store was late, so that links may be slow,
        and shared by many ranks."""

    def copy(self, transfers: Sequence[ArenaTransfer], *, is_store: bool) -> dict[int, str]:
        """Write to entries, or read from them, in `SECONDS` and what `_LEAST_BANDWIDTH` adds; returns the indexes of
        those that failed, and why."""
        if not transfers:
            return {}
        if self._clock() < self._retry_at:
            return dict.fromkeys(range(len(transfers)), "it has been late")
        size = sum(len(each.memory) for each in transfers)
        seconds = min(SECONDS + size / _LEAST_BANDWIDTH, self._max_seconds)
        try:
            failed, unanswered = self._exchange(transfers, self._clock() + seconds, is_store=is_store)
        except BaseException:
            self._disconnect()
            raise
        if unanswered:
            failed |= dict.fromkeys(unanswered, f"it did not answer within {seconds:.3g} s")
            self._disconnect()  # what it may still send, or receive, belongs to nothing any more
            self._retry_at = self._clock() + 2.0 ** min(self._num_late, _MAX_DOUBLINGS)
            self.batch_bytes //= 2
        else:
            self.batch_bytes = min(self.batch_bytes + math.ceil(size * _GROWTH), BATCH_BYTES)
        self._num_late = self._num_late + 1 if unanswered else 0
        return failed

    def _exchange(
        self, transfers: Sequence[ArenaTransfer], deadline: float, *, is_store: bool
    ) -> tuple[dict[int, str], set[int]]:
        """Returns the indexes of what has failed, and why, and of what has not been answered by then."""
        failed, socket = dict[int, str](), self._connected()
        first, self._last_call = self._last_call + 1, self._last_call + len(transfers)
        for call_id, (place, memory) in enumerate(transfers, first):
            if is_store:
                message = _encode(WriteKV(self._sender, call_id, place, placed_checksum(place, memory)))
                socket.send_multipart([message, *split(memory)])
            else:
                socket.send(_encode(ReadKV(self._sender, call_id, place)))
        unanswered = {*range(len(transfers))}
        while unanswered and socket.poll(max(0, math.ceil((deadline - self._clock()) * 1000))):
            header, *frames = socket.recv_multipart()
            answer = _decode(header)
            number = answer.call_id - first
            unanswered.remove(number)
            if answer.error:
                failed[number] = answer.error
            elif not is_store:
                place, memory = transfers[number]
                content = join(frames) if frames else b""
                if len(content) != len(memory) or placed_checksum(place, content) != answer.checksum:
                    failed[number] = "it was damaged on its way"
                else:
                    memory[:] = content
        return failed, unanswered

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            remote = self.remote
            self._sender = KVRank(remote.replica, remote.incarnation, self._rank, time.monotonic_ns())
            self._socket = self._context.socket(zmq.DEALER)
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                self._socket.setsockopt(option, 0)
            self._security.connect(self._socket, f"tcp://{remote.address}")
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._disconnect()
        self._context.term()
