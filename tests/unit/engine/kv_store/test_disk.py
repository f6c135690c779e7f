"""The disk tier, with every fault that a disk, another server or a killed writer can cause."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config.kv_layout import KVLayout
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.kv_store import disk
from quire.engine.kv_store.checksum import checksum
from quire.engine.kv_store.disk import DiskTier
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.kv_store import KVEntry
from tests.fakes.disk_faults import FailingCalls, damage
from tests.fakes.frames import DEEP
from tests.fakes.kv_store import SIGNATURE, Clock

SIZES = (40, 25)
LARGE = 1 << 20


def entry(number: int, kind: int = 0) -> KVEntry:
    return KVEntry(number.to_bytes(16, "big"), kind)


def content_of(each: KVEntry) -> bytes:
    """What any server would compute."""
    return random.Random(each.link + bytes([each.kind])).randbytes(SIZES[each.kind])


class Server:
    """A tier, as the store uses it."""

    def __init__(self, path: Path, limit: int = LARGE, signature: bytes = SIGNATURE) -> None:
        self.clock = Clock(1000.0)
        self.disk = DiskTier(path, limit, signature, SIZES, model="a model", clock=self.clock)
        self.scan()

    def scan(self) -> None:
        while self.disk.scan():
            pass
        self.disk.check_integrity()

    def write(self, *entries: KVEntry) -> bool:
        contents = [content_of(each) for each in entries]
        done = self.disk.write(entries, [memoryview(each) for each in contents], [*map(checksum, contents)])
        self.disk.check_integrity()
        return done

    def read(self, *entries: KVEntry) -> list[bool]:
        """Whether each was there. What has its checksum must be right, and others are dropped."""
        buffers = [bytearray(SIZES[each.kind]) for each in entries]
        found = self.disk.read(entries, [memoryview(each) for each in buffers])
        for each, buffer, expected in zip(entries, buffers, found, strict=True):
            if expected == checksum(buffer):
                assert buffer == content_of(each)
            elif expected is not None:
                self.disk.drop(each)
        self.disk.check_integrity()
        return [expected == checksum(buffer) for buffer, expected in zip(buffers, found, strict=True)]

    def has(self, *entries: KVEntry) -> list[bool]:
        return [each in self.disk for each in entries]


@pytest.fixture(autouse=True)
def lists_at_once() -> Iterator[None]:
    """However long that takes on a machine that is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_LISTING_SHARE", 0)
        yield


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "tier")


def files(server: Server, pattern: str = "*/*.kv") -> list[Path]:
    return sorted(server.disk._path.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def age(path: Path, seconds: float) -> None:
    used = time.time() - seconds
    os.utime(path, (used, used))


def write_old(server: Server, *numbers: int) -> None:
    """Write a file for each entry, the first one being the oldest."""
    for number in numbers:
        assert server.write(entry(number))
        file = server.disk._places[entry(number)]
        age(file.path, 1000 - number)
        file.used = file.path.stat().st_mtime_ns


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Let a function of `os` fail from now on."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, function)


def test_a_server_that_starts_again_finds_what_was_written(server: Server, tmp_path: Path) -> None:
    assert server.write(entry(1), entry(1, 1), entry(2))
    assert server.write(entry(2), entry(3))  # 2 is there
    assert server.write(entry(3))
    assert (server.disk.num_entries, len(files(server))) == (4, 2)
    assert server.disk.used_bytes == server.disk.written_bytes == sum(file.stat().st_size for file in files(server))
    assert server.read(entry(3), entry(1, 1), entry(4), entry(1), entry(2)) == [True, True, False, True, True]
    again = Server(tmp_path / "tier")
    assert again.has(entry(1), entry(1, 1), entry(2), entry(2, 1), entry(3)) == [True, True, True, False, True]
    assert again.read(entry(1), entry(2), entry(3)) == [True] * 3
    assert again.disk.used_bytes == server.disk.used_bytes
    other = Server(tmp_path / "tier", signature=b"another model's.")
    assert other.has(entry(1)) == [False]
    assert not any(server.disk._path.stat().st_mode & 0o77 for _ in "x")
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(server))


def test_headers_are_read_in_slices_and_the_newest_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(server, 0, 1, 2, 3)
    again = DiskTier(server.disk._path, LARGE, SIGNATURE, SIZES, model="")
    monkeypatch.setattr(disk, "_SLICE_SECONDS", 0.0)
    seen = []
    while again.scan():
        seen.append([number for number in range(4) if entry(number) in again])
    assert seen[:3] == [[3], [2, 3], [1, 2, 3]]
    assert entry(0) in again


def test_every_prefix_of_a_file_is_found_bad(server: Server, tmp_path: Path) -> None:
    """As after a crash of a system whose disk has not kept the order of writes."""
    server.write(entry(1), entry(2, 1))
    (file,) = files(server)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert disk.find_damage(file, lambda _: None), length
        again = Server(tmp_path / "tier")
        assert again.has(entry(1), entry(2, 1)) == [False, False]
        assert not file.exists()
        file.write_bytes(whole)  # shorter after it has been opened
        again.scan()
        file.write_bytes(whole[:length])
        assert again.read(entry(1), entry(2, 1)) == [False, False]
        assert not file.exists()
    file.write_bytes(whole + b"\0")
    assert Server(tmp_path / "tier").has(entry(1)) == [False]


def test_every_changed_byte_is_found(server: Server) -> None:
    server.write(entry(1), entry(2, 1))
    (file,) = files(server)
    whole = bytearray(file.read_bytes())
    for number in range(len(whole)):
        whole[number] ^= 1 << number % 8
        file.write_bytes(whole)
        assert disk.find_damage(file, lambda _: None), number
        server.scan()
        assert not all(server.read(entry(1), entry(2, 1))), number
        assert not file.exists()
        whole[number] ^= 1 << number % 8
    file.write_bytes(whole)
    server.scan()
    assert server.read(entry(1), entry(2, 1)) == [True, True]


def test_a_header_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    header = msgspec.msgpack.encode([SIGNATURE, [], DEEP])
    (path := tmp_path / "0.kv").write_bytes(disk._PREFIX.pack(disk._MAGIC, len(header), checksum(header)) + header)
    assert "its header is not valid" in str(disk.find_damage(path, lambda _: None))


@pytest.mark.parametrize("chunk", [1, 97])
def test_a_writer_that_is_killed_leaves_nothing_that_is_read(server: Server, tmp_path: Path, chunk: int) -> None:
    """At each call that it makes, of which each writes a chunk."""
    server.write(entry(1))
    left = 0

    def counted(name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KeyboardInterrupt  # also of what would clean up
            return real[name](arguments[0], arguments[1][:chunk]) if name == "write" else real[name](*arguments)

        return function

    real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "unlink")}
    for calls in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            left = calls
            for name in real:
                patch.setattr(os, name, counted(name))
            Server(tmp_path / "tier").write(entry(2), entry(3, 1))
        is_done = left > 0
        again = Server(tmp_path / "tier")
        assert again.read(entry(1), entry(2), entry(3, 1)) == [True, is_done, is_done]
        if is_done:
            break
        (left_over,) = files(again, "*/*.tmp")
        age(left_over, 599)
        Server(tmp_path / "tier")
        assert left_over.exists()  # it may be another server's
        age(left_over, 601)
        Server(tmp_path / "tier")
        assert not left_over.exists()
    assert calls > (100 if chunk == 1 else 3)


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    server = Server(tmp_path, limit=500)
    write_old(server, 1, 2, 3)
    size = server.disk.used_bytes // 3
    assert 125 < size < 166  # the limit is three files
    assert server.read(entry(1)) == [True]  # and so it is used now
    assert server.write(entry(4))
    assert server.has(*map(entry, range(1, 5))) == [True, False, True, True]
    assert server.disk.evicted_entries == 1
    server.scan()
    other = Server(tmp_path, 500, b"another model's.")  # which has the same limit for all
    assert other.write(entry(1))
    server.scan()
    assert server.has(*map(entry, range(1, 5))) == [True, False, False, True]
    assert server.disk.used_bytes == 3 * size
    assert Server(tmp_path, 2 * size).disk.used_bytes == 2 * size  # a server with a lower limit
    assert Server(tmp_path, 0).disk.used_bytes == 0


def test_a_time_in_the_future_does_not_keep_a_file(tmp_path: Path) -> None:
    """As of a server whose clock was wrong."""
    server = Server(tmp_path, limit=500)
    write_old(server, 1, 2, 3)
    age(server.disk._places[entry(1)].path, -1e6)
    server.disk._places[entry(1)].used = 0
    assert server.write(entry(4))  # it is used now, as far as is known
    assert server.has(*map(entry, range(1, 5))) == [True, False, True, True]
    server.scan()
    assert files(server)[-1].stat().st_mtime < time.time() + 1
    for number in (5, 6, 7):
        server.write(entry(number))
    assert server.has(*map(entry, range(1, 8))) == [False] * 4 + [True] * 3


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    first, second = Server(tmp_path, 500), Server(tmp_path, 500)
    write_old(first, 1, 2, 3)
    assert second.has(entry(1)) == [False]
    second.scan()
    assert second.read(entry(1)) == [True]
    second.disk.use([entry(2), entry(4)])
    second.scan()  # and so the first one can know
    assert first.write(entry(4))
    assert first.has(entry(1), entry(2), entry(3)) == [True, True, False]  # the second has used the others
    assert second.has(entry(3)) == [True]
    assert second.read(entry(3), entry(1)) == [False, True]
    assert second.has(entry(3)) == [False]
    assert second.disk.failed == 0
    assert second.write(entry(5))  # and removes one of four, of which it knows three
    second.scan()
    assert (second.disk.num_entries, len(files(second))) == (3, 3)
    assert first.disk.clear() == (3, "")
    assert files(first) == []
    assert second.read(entry(1), entry(5)) == [False, False]
    second.scan()
    assert (second.disk.num_entries, second.disk.used_bytes) == (0, 0)
    both = [server.write(entry(6)) for server in (first, second)]
    assert both == [True, True]
    for server in (first, second):
        server.scan()
    first.disk._places[entry(6)].path.unlink()
    for server in (first, second):
        server.scan()
        assert server.read(entry(6)) == [True]  # the second one's


def test_files_that_are_not_the_tiers_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / SIGNATURE.hex()
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(1000))
    name = "0" * 32
    (tmp_path / "notes").mkdir()
    (tmp_path / ("f" * 32)).write_bytes(b"not a folder")
    for path in (
        folder / "notes.txt",
        folder / f"{name}.safetensors",
        folder / "1.kv",
        tmp_path / "notes" / f"{name}.kv",
    ):
        path.write_bytes(b"precious")
    (folder / f"{name}.kv").symlink_to(precious)
    (folder / f"{'1' * 32}.kv").mkdir()
    before = sorted(tmp_path.rglob("*"))
    server = Server(tmp_path, limit=100)
    assert server.disk.used_bytes == 0
    server.disk.clear()
    assert sorted(tmp_path.rglob("*")) == before
    (folder / f"{'2' * 32}.kv").write_bytes(b"has the name of a file of the tier")
    server.scan()
    assert sorted(tmp_path.rglob("*")) == before
    server = Server(tmp_path)
    server.write(entry(1))
    file = server.disk._places[entry(1)].path
    other = tmp_path / b"another model's.".hex()
    other.mkdir()
    file.rename(other / file.name)
    assert Server(tmp_path, signature=b"another model's.").has(entry(1)) == [False]


def test_files_vanish_under_a_reader(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write(entry(1), entry(2))
    server.write(entry(3))
    first, _ = files(server)
    real = os.preadv

    def reading(*arguments: Any) -> int:
        first.unlink(missing_ok=True)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", reading)
    assert server.read(entry(1), entry(2), entry(3)) == [True] * 3  # it was open
    assert server.read(entry(1), entry(2), entry(3)) == [False, False, True]
    assert (server.has(entry(1)), server.disk.failed) == ([False], 0)


def test_a_disk_that_is_full_keeps_what_it_has(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(server, 1, 2, 3)
    had = server.disk.used_bytes
    failing(monkeypatch, "write", errno.ENOSPC)
    assert not server.write(entry(4))
    assert "cannot be written: No space left on device" in server.disk.error
    assert (server.disk.failed, files(server, "*/*.tmp")) == (1, [])
    assert server.read(entry(1), entry(4)) == [True, False]
    monkeypatch.undo()
    assert not server.write(entry(4))  # not yet again
    server.clock.now += 31
    assert server.write(entry(4))
    assert server.disk.error == ""
    assert server.has(*map(entry, (1, 2, 3, 4))) == [True, False, True, True]
    assert server.disk.used_bytes == had
    server.clock.now += 601
    assert server.write(entry(5))
    assert server.disk.used_bytes > had


def test_files_that_cannot_be_removed_take_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, limit=500)
    write_old(server, 1, 2, 3)
    failing(monkeypatch, "unlink", errno.EACCES)
    assert not server.write(entry(4))
    assert "cannot be written: files that cannot be removed take up the space" in server.disk.error
    assert server.disk.clear()[1]
    assert sum("kv cannot be removed" in text for text in caplog.messages) == 1  # of thousands of files, too
    monkeypatch.undo()
    for file in files(server):  # by somebody else
        file.unlink()
    server.clock.now += 31
    server.scan()
    assert server.write(entry(4))
    assert server.disk.error == ""


def test_each_kind_of_failure_is_logged_every_30_seconds(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often files fail meanwhile, and whatever else fails."""
    for number in (1, 2, 3, 4):
        server.write(entry(number))
    failing(monkeypatch, "open", errno.EIO)
    failing(monkeypatch, "unlink", errno.EACCES)
    for number in (1, 2, 3):
        server.read(entry(number))
        server.clock.now += 20
    server.disk.drop(entry(4))
    assert [text.partition(" cannot be ")[2] for text in caplog.messages if " cannot be " in text] == [
        "read, and is not used for some time: Input/output error",
        "read, and is not used for some time: Input/output error",
        "removed: Permission denied",
    ]


def test_a_file_with_damaged_entries_is_named_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """By the tier, whose callers say nothing: a file has hundreds of entries."""
    server.write(entry(1), entry(2))
    (file,) = files(server)
    content = file.read_bytes()
    size = SIZES[entry(1).kind] + SIZES[entry(2).kind]
    file.write_bytes(content[:-size] + bytes(size))
    assert server.read(entry(1), entry(2)) == [False, False]
    assert caplog.messages == [f"{file} is damaged: an entry has a wrong checksum; removing it"]


def test_a_folder_vanishes_while_a_file_is_written(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write(entry(1))
    fsync = os.fsync

    def removing(descriptor: int) -> None:
        monkeypatch.undo()
        fsync(descriptor)
        shutil.rmtree(server.disk._folder)

    monkeypatch.setattr(os, "fsync", removing)
    assert server.write(entry(2))
    assert server.disk.error == ""
    assert server.read(entry(1), entry(2)) == [False, True]


def test_a_disk_that_is_read_only_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write(entry(1))
    server.write(entry(2))
    first, _ = files(server)
    first.write_bytes(b"damaged")
    for name in ("open", "unlink", "utime", "mkdir", "rename"):
        real = getattr(os, name)

        def function(path: Any, *arguments: Any, name: str = name, real: Any = real, **keywords: Any) -> Any:
            if name == "open" and not arguments[0] & (os.O_WRONLY | os.O_CREAT):
                return real(path, *arguments, **keywords)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(os, name, function)
    again = Server(server.disk._path)
    assert again.read(entry(1), entry(2)) == [False, True]
    again.scan()
    assert again.read(entry(1), entry(2)) == [False, True]
    assert not again.write(entry(3))
    assert "cannot be written: Read-only file system" in again.disk.error
    assert again.has(entry(1), entry(2), entry(3)) == [False, True, False]
    count, error = again.disk.clear()
    assert (count, "2 files in" in error, "cannot be removed" in error) == (1, True, True)
    again.scan()
    assert again.has(entry(2)) == [False]


def test_a_read_that_fails_is_tried_again_later(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write(entry(1))
    failing(monkeypatch, "preadv", errno.EIO)
    assert server.read(entry(1)) == [False]
    assert (server.disk.failed, server.has(entry(1))) == (1, [False])
    server.clock.now += 29
    server.scan()
    assert (server.disk.failed, server.has(entry(1))) == (1, [False])
    server.clock.now += 2
    server.scan()
    assert (server.disk.failed, server.has(entry(1))) == (2, [False])
    monkeypatch.undo()
    server.clock.now += 31
    server.scan()
    assert server.read(entry(1)) == [True]


def test_a_folder_that_may_not_be_read_is_out_of_use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a superuser it may, so the calls are made to fail."""
    server.write(entry(1))
    forbidden, real = {server.disk._folder}, os.scandir

    def listing(path: Any) -> Any:
        if Path(path) in forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "scandir", listing)
    server.scan()
    assert server.disk.error == f"{server.disk._path} cannot be read: Permission denied"
    assert server.has(entry(1)) == [False]
    assert not server.write(entry(2))
    forbidden.clear()
    server.scan()
    assert server.disk.error == ""
    assert server.read(entry(1)) == [True]
    other = server.disk._path / ("a" * 32)
    other.mkdir()
    forbidden.add(other)  # another user's
    server.scan()
    assert server.disk.error == ""


@pytest.mark.parametrize("name", [".", SIGNATURE.hex()])
def test_a_folder_that_others_may_write_is_out_of_use(server: Server, name: str) -> None:
    """They could put entries in it that answer as they like."""
    server.write(entry(1))
    folder = server.disk._path / name
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert not server.write(entry(2))
    server.scan()
    assert server.disk.error == (
        f"others can write to {folder}, and could change answers; use chmod go-w {folder}, or a new folder in it"
    )
    assert server.has(entry(1)) == [False]
    folder.chmod(0o755)
    server.clock.now += 31
    server.scan()
    assert server.has(entry(1)) == [True]
    assert server.write(entry(2))


def test_a_file_that_is_larger_than_the_tier_is_a_failure(tmp_path: Path) -> None:
    server = Server(tmp_path, limit=100)
    assert not server.write(entry(1))
    assert "is larger than the tier" in server.disk.error


@pytest.mark.parametrize(
    ("call", "function", "text"),
    [
        (lambda server: server.read(entry(1)) == [True], "preadv", "a read takes more than"),
        (lambda server: server.write(entry(3)), "fsync", "a write takes more than"),
        (lambda server: server.scan() is None, "scandir", "a listing takes more than"),
        (lambda server: server.disk.clear() == (2, ""), "unlink", "removing a file takes more than"),
    ],
)
def test_a_disk_that_hangs_is_out_of_use_until_it_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: Callable[[Server], bool], function: str, text: str
) -> None:
    server.write(entry(1), entry(2))
    entered, release, real = threading.Event(), threading.Event(), getattr(os, function)

    def hanging(*arguments: Any, **keywords: Any) -> Any:
        entered.set()
        release.wait()
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, function, hanging)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(call(server)))
    thread.start()
    entered.wait()
    try:
        assert server.has(entry(2)) == [True]
        monkeypatch.setattr(disk, "_HANGING_SECONDS", 0.0)
        assert server.has(entry(2)) == [False]
        assert text in server.disk.error
    finally:
        release.set()
        thread.join()
    assert found == [True]
    assert (server.has(entry(2)), server.disk.error) == ([function != "unlink"], "")


@pytest.mark.parametrize("seed", range(2))
def test_no_faults_give_wrong_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Three servers on a folder, of which two have the same model. `Server.read` checks what it gets."""
    chance = random.Random(seed)
    calls = FailingCalls(monkeypatch, chance)
    servers = [Server(tmp_path, 2000), Server(tmp_path, 2000), Server(tmp_path, 1500, b"another model's.")]
    hits = 0
    for _ in range(300):
        server = chance.choice(servers)
        server.clock.now += chance.choice((0, 1, 40))
        entries = [entry(chance.randrange(12), chance.randrange(2)) for _ in range(chance.randrange(1, 5))]
        calls.rate = chance.choice((0, 0, 0, 0, 0.02, 0.2))
        action = chance.randrange(20)
        if action < 8:
            hits += sum(server.read(*dict.fromkeys(entries)))
        elif action < 14:
            server.write(*dict.fromkeys(entries))
        elif action < 18:
            server.scan()
        elif action == 18:
            calls.rate = 0
            damage(tmp_path, chance)
        elif chance.random() < 0.1:
            server.disk.clear()
    calls.rate = 0
    assert hits > 5
    for number, server in enumerate(servers):  # and all come back
        server.clock.now += 1000
        server.scan()
        assert server.write(entry(1000 + number))
        assert server.read(entry(1000 + number)) == [True]
        assert server.disk.error == ""
        assert server.disk.used_bytes <= server.disk.capacity


def test_the_signature_depends_on_layout_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "commit", str)
    config = resolve(EngineOptions(device="cpu", kv_cache_memory_bytes=1 << 26))
    layouts = [KVLayout(kinds=(), signature=each) for each in (b"one", b"two")]
    one, two = (disk.signature_of(config, layout) for layout in layouts)
    assert len(one) == 16
    assert one == disk.signature_of(config, layouts[0]) != two


def test_code_of_another_repository_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "commit", str)
    monkeypatch.setattr(disk, "weights_digest", lambda path, load_format: b"")
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "code.C", "AutoModel": ["some/one--code.M"]}}')
    config = resolve(EngineOptions(device="cpu", kv_cache_memory_bytes=1 << 26))
    model = replace(config.model, path=tmp_path, architecture=Mock(TransformersModelSpec))
    layout = KVLayout(kinds=(), signature=b"")
    disk.signature_of(replace(config, model=model), layout)  # which does not run the code
    with pytest.raises(ConfigError, match="code is in another repository, some/one; copy"):
        disk.signature_of(replace(config, model=replace(model, trust_remote_code=True)), layout)
