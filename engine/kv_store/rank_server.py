"""Lets ranks on other hosts write and read the arena (`quire.engine.protocol.kv_ranks`), for replicas that span hosts.

A rank may write entries that its core has been granted and has not reported as stored, and read entries that are pinned
for loads. Ranks of this host map the arena and do the same unchecked; here it is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from quire.engine.cluster.network import resolve_address, tcp_url
from quire.engine.cluster.security import Dropped, Security, join, split
from quire.engine.kv_store.checksum import placed_checksum
from quire.engine.protocol.errors import UNDECODABLE, ConfigError
from quire.engine.protocol.kv_ranks import FromKVRank, KVAnswer, KVRank, KVRuns, RankPlace, WriteKV

_BURST = 16
"""Messages taken before everything else gets its turn."""
_MAX_RUNS = 1 << 16
"""Maximum runs in a message, many times as many as an entry has. Millions would take seconds, and much memory."""
_GONE = "the entry is not granted to this rank's core, or not loaded for it"

_decode = msgspec.msgpack.Decoder[FromKVRank](FromKVRank).decode
_decode_place = msgspec.msgpack.Decoder(RankPlace).decode
_encode = msgspec.msgpack.Encoder().encode


class OfRanks(Protocol):
    """`KVStore.of_ranks`."""

    def __call__(self, sender: KVRank, place: RankPlace, /, *, writes: bool) -> memoryview | None: ...


class RankServer:
    """The store's side."""

    def __init__(self, of_ranks: OfRanks, host: str, token: str, poller: zmq.Poller) -> None:
        """Listen at a port of `host`, an address of this host. Raises `ConfigError` if it is not one."""
        self._of_ranks, self._rubbish = of_ranks, Dropped("dropped a message of a rank")
        self.copied_bytes = 0
        """Bytes written and read since the start."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):  # ranks wait for answers, which bounds what is queued
            self._socket.setsockopt(option, 0)
        try:
            Security(self._context, token).bind(self._socket, tcp_url(resolve_address(host), 0))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"it cannot listen at {host}: {str(error).lower()}; QUIRE_HOST_IP, if set, must be an address of this "
                "host"
            ) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        poller.register(self._socket, zmq.POLLIN)

    def run(self, ready: dict[zmq.Socket[bytes], int]) -> None:
        """Answer what has arrived."""
        if self._socket not in ready:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                if answer := self.receive(frames):
                    self._socket.send_multipart([name, *answer], zmq.NOBLOCK)

    def receive(self, frames: Sequence[bytes]) -> list[bytes | memoryview]:
        """Take a message; returns the frames of the answer. Invalid messages get none."""
        try:
            message = _decode(frames[0])
            content, writes = join(frames[1:]) if frames[1:] else b"", isinstance(message, WriteKV)
            place = _decode_place(message.place)
            view = self._of_ranks(message.sender, place, writes=writes)
            runs = [] if view is None else _ranges(place.runs, len(view))
        except (IndexError, ValueError, *UNDECODABLE) as reason:
            self._rubbish.add(repr(reason))
            return []
        if view is None:
            return [_encode(KVAnswer(message.call_id, _GONE))]
        size = sum(end - start for start, end in runs)
        if not isinstance(message, WriteKV):
            self.copied_bytes += size
            found = b"".join([view[start:end] for start, end in runs])
            return [_encode(KVAnswer(message.call_id, "", placed_checksum(message.place, found))), *split(found)]
        if len(content) != size or placed_checksum(message.place, content) != message.checksum:
            return [_encode(KVAnswer(message.call_id, "the data was damaged in transit"))]
        self.copied_bytes += size
        at = 0
        for start, end in runs:
            view[start:end] = content[at : at + end - start]
            at += end - start
        return [_encode(KVAnswer(message.call_id))]

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _ranges(runs: Sequence[KVRuns], size: int) -> list[tuple[int, int]]:
    """Return where runs begin and end in an entry of `size` bytes. Raises `ValueError` if they do not fit into it."""
    if any(min(msgspec.structs.astuple(each)) < 0 for each in runs):
        raise ValueError("negative numbers")
    if not all(each.num_bytes for each in runs):
        raise ValueError("runs without bytes")
    if sum(each.layers * each.rows for each in runs) > _MAX_RUNS:
        raise ValueError("too many runs")
    if sum(each.num_bytes for each in runs) > size:
        raise ValueError("more bytes than the entry has")
    ranges = [(start, start + each.size) for each in runs for start in each.starts()]
    if any(end > size for _, end in ranges):
        raise ValueError("bytes beyond the entry")
    return ranges
