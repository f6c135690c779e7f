"""Copies between a rank and the arena of a KV store on another host (`quire.engine.protocol.kv_ranks`)."""

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
"""Time for one batch of copies, in addition to the time for its bytes."""
_LEAST_BANDWIDTH = 8 << 20
"""Bytes per second that determine the time for the bytes."""
BATCH_BYTES = 8 << 20
"""Bytes of a batch, if the store is never late."""
_GROWTH = 1 / 16
"""After the batch size has shrunk, it grows by this share of the bytes that are copied in time."""
_MAX_DOUBLINGS = 4
"""A store that is late repeatedly is not asked for 1, 2, 4, 8, and then 16 seconds."""

_decode = msgspec.msgpack.Decoder(KVAnswer).decode
_encode = msgspec.msgpack.Encoder().encode


class ArenaTransfer(NamedTuple):
    """A copy of bytes of an entry from or to `memory`, where they are contiguous."""

    place: msgspec.Raw
    """A `RankPlace`."""
    memory: memoryview

    @staticmethod
    def of(place: RankPlace, memory: memoryview) -> ArenaTransfer:
        return ArenaTransfer(msgspec.Raw(_encode(place)), memory)


class ArenaLink:
    """The connection of one rank to an arena. Belongs to one thread."""

    def __init__(
        self,
        remote: RemoteArena,
        rank: int,
        token: str,
        max_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token` is the cluster token; no call of `copy` takes longer than `max_seconds`."""
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
        """Before this time, all copies fail at once."""
        self.batch_bytes = BATCH_BYTES
        """Maximum bytes of the next batch. Halved each time that the store is late, so that slow links, and links that
        many ranks share, can be used."""

    def copy(self, transfers: Sequence[ArenaTransfer], *, is_store: bool) -> dict[int, str]:
        """Write to entries, or read from them, within `SECONDS` plus the time that their bytes take at
        `_LEAST_BANDWIDTH`. Returns the indexes of the transfers that failed, with the reasons."""
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
            self._disconnect()  # nothing that is still sent on it may be used
            self._retry_at = self._clock() + 2.0 ** min(self._num_late, _MAX_DOUBLINGS)
            self.batch_bytes //= 2
        else:
            self.batch_bytes = min(self.batch_bytes + math.ceil(size * _GROWTH), BATCH_BYTES)
        self._num_late = self._num_late + 1 if unanswered else 0
        return failed

    def _exchange(
        self, transfers: Sequence[ArenaTransfer], deadline: float, *, is_store: bool
    ) -> tuple[dict[int, str], set[int]]:
        """Returns the indexes of the transfers that failed, with the reasons, and of those not answered by
        `deadline`."""
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
                    failed[number] = "the data was damaged in transit"
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
