"""The shared-memory ring between real processes."""

from __future__ import annotations

import os
from fcntl import F_DUPFD_CLOEXEC, fcntl
from multiprocessing.connection import Connection

import pytest

from quire.engine.distributed.shm_broadcast import Semaphore, ShmBroadcast
from tests.fakes.processes import CONTEXT


def echo(ring: ShmBroadcast, reader: int, pipe: Connection) -> None:
    while message := ring.read(reader):
        pipe.send_bytes(message)


def test_every_reader_gets_every_message_of_any_size() -> None:
    ring = ShmBroadcast(CONTEXT, readers=2, slots=4, slot_bytes=64)
    messages = [bytes([size % 251]) * size for size in (1, 58, 59, 60, 118, 2, 5000, 64, 3)]
    pipes, processes = [], []
    for reader in range(2):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=echo, args=(ring, reader, sender), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    for message in [*messages, b""]:
        ring.write(message, while_waiting=lambda: None)
    for pipe in pipes:
        assert [pipe.recv_bytes() for _ in messages] == messages
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_a_full_ring_asks_whether_the_readers_live() -> None:
    ring = ShmBroadcast(CONTEXT, readers=1, slots=2, slot_bytes=64)

    def nobody_reads() -> None:
        raise ConnectionError("reader is gone")

    ring.write(b"1", nobody_reads, poll=0.01)
    ring.write(b"2", nobody_reads, poll=0.01)
    with pytest.raises(ConnectionError, match="reader is gone"):
        ring.write(b"3", nobody_reads, poll=0.01)
    assert ring.read(0) == b"1"


def test_a_semaphore_works_with_a_high_descriptor_and_closes_it() -> None:
    semaphore = Semaphore(1)
    low, high = semaphore._fd, fcntl(semaphore._fd, F_DUPFD_CLOEXEC, 2000)
    os.close(low)
    semaphore._fd = high
    assert semaphore.acquire(timeout=0.01)
    assert not semaphore.acquire(timeout=0.01)
    del semaphore
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(high)
