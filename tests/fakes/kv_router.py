"""A router outside the server that follows KV events, written down from the schemas that llm-d and Dynamo read.

It knows nothing of the server's code: a batch is the msgpack array [time, events, data-parallel rank], and an event a
map with its name under `type`, or an array that begins with it. Of `BlockStored` it needs block_hashes (64-bit
numbers), parent_block_hash, token_ids (block_size for each hash: llm-d ignores others) and medium; a hash occurs once,
and differs from the parent's (Dynamo drops the event otherwise).
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

Key = tuple[str, int, int]
"""Medium, group of layers, and hash."""

END = (-1).to_bytes(8, "big", signed=True)


class KVRouter:
    """The blocks of one replica."""

    def __init__(self, endpoint: str = "", replay_endpoint: str = "", topic: bytes = b"") -> None:
        self.blocks: dict[Key, tuple[int | None, tuple[int, ...], str | None, Any]] = {}
        """Of each block: its parent, its tokens, the adapter, and what else its hash includes."""
        self.sequence = -1
        self.num_live = 0
        self._topic, self._replay = topic, replay_endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        if endpoint:
            self._socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(0)

    def start(self, sequence: int, events: list[dict[str, Any]]) -> None:
        """Begin with a snapshot."""
        self.blocks.clear()
        for event in events:
            self.apply(event)
        self.sequence = sequence

    def poll(self, milliseconds: int) -> bool:
        """Process a batch, if one arrives; one that does not follow the last is left to a replay."""
        if not self._socket.poll(milliseconds):
            return False
        topic, number, payload = self._socket.recv_multipart()
        assert topic.startswith(self._topic)
        sequence = int.from_bytes(number)
        if sequence == self.sequence + 1:
            self.num_live += 1
            self.take(sequence, payload)
        elif sequence > self.sequence:
            self.replay()
        return True

    def replay(self) -> int:
        """Ask for the batches after the last one; returns the number of batches."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay)
        socket.send_multipart((b"", (self.sequence + 1).to_bytes(8)))
        count = 0
        while True:
            assert socket.poll(10_000), "the replay stopped"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                socket.close(0)
                return count
            assert topic.startswith(self._topic)
            self.take(int.from_bytes(number), payload)
            count += 1

    def take(self, sequence: int, payload: bytes) -> None:
        time, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(time, float)
        assert isinstance(rank, int)
        for event in events:
            self.apply(event)
        self.sequence = sequence

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                size, hashes, parent = event["block_size"], event["block_hashes"], event["parent_block_hash"]
                tokens, keys = event["token_ids"], event["extra_keys"]
                assert len(tokens) == size * len(hashes)
                assert len(keys) == len(hashes)
                assert len({parent, *hashes}) == len(hashes) + 1
                assert all(0 <= number < 1 << 64 for number in hashes)
                for at, (number, key) in enumerate(zip(hashes, keys, strict=True)):
                    place = event["medium"], event["group_idx"], number
                    own = tuple(tokens[at * size : (at + 1) * size])
                    self.blocks[place] = parent, own, event["lora_name"], None if key is None else tuple(key)
                    parent = number
            case "BlockRemoved":
                for number in event["block_hashes"]:
                    del self.blocks[event["medium"], event["group_idx"], number]
            case "AllBlocksCleared":
                self.blocks.clear()
            case other:
                raise AssertionError(other)
