"""The messages of cores, and faults: memory and disk that change bytes, cores that die, no room."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest

from quire.engine.config.kv_layout import KVKind
from quire.engine.kv_store import entries as module
from quire.engine.kv_store import loads
from quire.engine.kv_store.entries import WRITE_SECONDS
from quire.engine.kv_store.store import CLEAR_SECONDS
from quire.engine.protocol.kv_store import (
    DISK,
    MEMORY,
    NO_TIER,
    ClearKV,
    GrantedKV,
    KVCleared,
    KVEntry,
    KVStoreOpened,
    KVStoreStats,
    LookUpKV,
    StoredKV,
)
from tests.fakes.kv_store import Clock, FakeDisk, Host, Jobs, StoreCore, chain, number_of, parents

KINDS = (KVKind((0,), 96), KVKind((1,), 40, window=64), KVKind((2,), 1000, window=2))
SIZES = [kind.size for kind in KINDS]
ROOM = 16 * 4096


def entries(links: list[bytes], *kinds: int) -> list[KVEntry]:
    return [KVEntry(link, kind) for link in links for kind in kinds or range(len(KINDS))]


def test_stored_entries_are_found_and_loaded_by_another_core() -> None:
    host = Host(KINDS, ROOM)
    writer, reader, links = host.core(0), host.core(1), chain(1, 2, 3)
    assert reader.look_up(links) == [[NO_TIER] * 3] * 3
    writer.offer(links[:2], kinds=[0, 1])
    assert reader.look_up(links) == [[NO_TIER] * 3] * 3, "it is not there before it is written"
    writer.finish()
    writer.store(links[:2])  # what it has is not granted again
    assert reader.look_up(links) == [[MEMORY, MEMORY, NO_TIER]] * 3
    call = reader.load(entries(links))
    assert [number for number, offset in reader.loaded[call].items() if offset is None] == [6, 7, 8]
    host.store.check_integrity()
    reader.release(call)
    host.store.check_integrity()
    stats = host.store.stats()
    assert (stats.memory_entries, stats.memory_bytes) == (6, 2 * sum(SIZES))
    assert stats.stored_bytes == stats.loaded_memory_bytes == 2 * sum(SIZES)


def test_a_look_up_ends_where_a_chain_ends() -> None:
    """At a block whose entry of all tokens is nowhere; entries of windows may be missing."""
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1, 2, 3, 4)
    core.store(links, [0])
    core.store(links[2:], [1])
    core.flip(KVEntry(links[1], 0))
    core.load(entries(links[1:2], 0))
    assert core.look_up(links) == [[MEMORY, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    core.store(links, [0])
    assert core.look_up(links) == [[MEMORY] * 4, [0, 0, MEMORY, MEMORY], [0, 0, 0, 0]]


def test_cores_are_told_what_the_tiers_have() -> None:
    host, disk = Host(KINDS[:1], 4096), FakeDisk()
    first, links = host.core(0), chain(1, 2, 3, 4)

    def told(core: StoreCore) -> set[tuple[int, int]]:
        host.store.tick()
        host.deliver()
        assert core.announced == host.tiers
        return {(tier, number) for tier, _, number in core.announced}

    def numbers(tier: int, *at: int) -> set[tuple[int, int]]:
        return {(tier, number_of(links[each])) for each in at}

    first.offer(links[:2])
    assert not told(first), "it is not there before it is written"
    first.finish()
    assert told(first) == numbers(MEMORY, 0, 1)
    late = host.core(1)
    assert told(late) == numbers(MEMORY, 0, 1)
    host.store.use_disk(disk)
    host.store.entries.write(all_now=True)
    assert told(first) == numbers(MEMORY, 0, 1) | numbers(DISK, 0, 1)
    first.store(chain(*range(100, 140)))
    first.store(chain(*range(150, 190)))
    assert told(late) >= numbers(DISK, 0, 1)
    assert not told(late) & numbers(MEMORY, 0, 1)
    disk.drop(KVEntry(links[0], 0))
    assert not told(first) & numbers(DISK, 0)
    assert told(first) >= numbers(DISK, 1)
    late.load(entries(links[1:2], 0))
    assert told(first) >= numbers(MEMORY, 1)
    host.store.handle(b"0.1", ClearKV(1))
    late.release(1)
    assert not told(first)
    assert not told(late)
    for _ in range(2):
        host.store.tick()
    assert not host.store._events.num_described


def test_every_offer_is_answered_and_what_has_no_room_is_not_granted() -> None:
    """The beginning of a chain that is larger than the memory is kept."""
    host = Host(KINDS[:1], 64 * 128)
    core, links = host.core(), chain(*range(100))
    core.store(links)
    found = core.look_up(links)[0]
    assert 0 < sum(found) < 100
    assert found == sorted(found, reverse=True)
    core.parents |= parents(links)
    for at in range(90, 100):  # nor the end of it, for which there would be room in place of its middle
        core.offer_entries(entries(links[at : at + 1], 0))
        assert core.received[-1] == GrantedKV([], [])
    assert core.look_up(links)[0] == found
    other = chain(101, 102)
    core.store(other)  # a chain that is in use now is worth more than the end of the other
    assert core.look_up(other) == [[MEMORY, MEMORY]]
    host.store.check_integrity()


def test_the_disk_has_more_of_a_chain_than_memory() -> None:
    """What is on disk leaves memory, although other blocks of its chain stay, and what is not keeps its place."""
    host, disk = Host(KINDS[:1], 64 * 128), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(*range(200))
    core.parents |= parents(links)
    for start in range(0, 200, 10):
        if start == 180:
            assert NO_TIER not in core.look_up(links[:180])[0]
            disk.stored.clear()
        core.offer_entries(entries(links[start : start + 10], 0))
        core.finish()
        host.store.entries.write(all_now=True)
        host.store.check_integrity()
    assert not disk.stored


def test_the_disk_is_written_within_its_budget() -> None:
    clock, disk = Clock(), FakeDisk()
    host = Host(KINDS[:1], ROOM, clock=clock)
    host.store.use_disk(disk, bandwidth=SIZES[0])
    core = host.core()
    for number in range(60):
        core.store(chain(number, 1))  # twice as much
        clock.now += 1.0
        host.store.tick()
        written = sum(map(len, disk.files[:-1]))
        assert written <= clock.now
    assert written > 20


def test_a_budget_for_several_files_a_second_is_used() -> None:
    """The process calls `write` again when `seconds_left` has passed."""
    clock, disk = Clock(), FakeDisk()
    host = Host([KVKind((0,), 4000)], ROOM, clock=clock)
    host.store.use_disk(disk, bandwidth=ROOM)
    host.core().store(chain(*range(12)))
    while (seconds := host.store.entries.seconds_left()) < 1.0:
        assert clock.now < 1.0
        clock.now += seconds
        host.store.entries.write()
    assert len(disk.files) > 2


def test_what_is_being_written_again_is_not_read() -> None:
    host, disk = Host(KINDS[:1], ROOM), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(1)
    disk.stored[KVEntry(links[0], 0)] = bytes(SIZES[0]), bytes(16)
    core.offer(links)
    assert core.look_up(links) == [[NO_TIER]]


def test_the_end_of_a_chain_whose_beginning_it_never_had_is_stored() -> None:
    """As of a prompt whose beginning has been on the device since before the store was started again."""
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1, 2, 3)
    core.parents |= parents(links)
    core.offer_entries(entries(links[1:], 2, 0))
    core.finish()
    assert core.look_up(links[1:]) == [[MEMORY, MEMORY], [NO_TIER, NO_TIER], [MEMORY, MEMORY]]


def test_another_kind_gets_memory_that_one_had() -> None:
    """Chains of one kind fill the memory, then others of another kind."""
    host = Host(KINDS, ROOM)
    core = host.core()
    for number in range(200):
        core.store(chain(number, 1, 2), [0])
        host.store.check_integrity()
    for number in range(100):
        core.store(chain(number, 3), [0, 2])
        host.store.check_integrity()
    assert core.look_up(chain(99, 3)) == [[MEMORY] * 2, [NO_TIER] * 2, [MEMORY] * 2]
    assert host.store.stats().memory_bytes > 0.8 * ROOM


def test_a_flipped_bit_in_memory_is_found() -> None:
    """Of the entry that has it, every time that it is loaded; the others are good. A copy on disk is used."""
    host, disk = Host(KINDS, ROOM), FakeDisk()
    core, links = host.core(), chain(1, 2)
    core.store(links)
    core.flip(KVEntry(links[0], 0))
    core.flip(KVEntry(links[1], 0), byte=SIZES[0] - 1)
    call = core.load(entries(links))
    assert {number for number, offset in core.loaded[call].items() if offset is None} == {0, 3}
    assert core.look_up(links)[0] == [NO_TIER, NO_TIER]
    assert host.store.stats().wrong_checksums == 2
    host.store.check_integrity()
    core.release(call)
    host.store.use_disk(disk)
    core.store(links)
    host.store.entries.write(all_now=True)
    assert disk.num_entries == 6
    core.flip(KVEntry(links[1], 2))
    assert None not in core.loaded[core.load(entries(links))].values()
    assert host.store.stats().wrong_checksums == 3
    assert host.store.stats().loaded_disk_bytes == SIZES[2]
    host.store.check_integrity()


def test_a_flipped_bit_on_disk_is_found() -> None:
    host, disk = Host(KINDS, ROOM), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(1, 2)
    core.store(links)
    host.store.entries.write(all_now=True)
    restarted = Host(KINDS, ROOM)
    restarted.store.use_disk(disk)
    core = restarted.core()
    disk.damage(KVEntry(links[1], 2))
    assert core.look_up(links) == [[DISK, DISK]] * 3
    call = core.load(entries(links))
    assert [number for number, offset in core.loaded[call].items() if offset is None] == [5]
    assert core.look_up(links)[2] == [MEMORY, NO_TIER]
    assert restarted.store.stats().wrong_checksums == 1
    restarted.store.check_integrity()


def test_reads_that_fail_are_failed_loads() -> None:
    host, disk = Host(KINDS, ROOM), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(1, 2)
    core.store(links)
    host.store.entries.write(all_now=True)
    core = (other := Host(KINDS, ROOM)).core()
    other.store.use_disk(disk)
    disk.is_broken = True
    call = core.load(entries(links))
    assert set(core.loaded[call].values()) == {None}
    other.store.check_integrity()
    assert other.store.stats().memory_entries == 0
    disk.is_broken = False
    call = core.load(entries(links))
    assert None not in core.loaded[call].values()


def test_an_entry_is_read_once_for_all_who_wait() -> None:
    """And one that is being summed is not read at all; who has released it meanwhile gets no answer."""
    jobs, disk = Jobs(), FakeDisk()
    host = Host(KINDS[:1], ROOM, jobs)
    core, other, links = host.core(0), host.core(1), chain(1, 2, 3)
    core.store(links)
    early = other.load(entries(links, 0))
    jobs.run()
    host.deliver()
    assert None not in other.loaded[early].values()
    assert len(other.loaded[early]) == 3
    host.store.use_disk(disk)
    host.store.entries.write(all_now=True)
    jobs.run()

    host = Host(KINDS[:1], ROOM, jobs)
    host.store.use_disk(disk)
    cores = [host.core(replica) for replica in range(3)]
    calls = [core.load(entries(links, 0)) for core in cores]
    assert len(jobs.waiting) == 1
    cores[1].release(calls[1])
    count = len(cores[1].received)
    host.store.check_integrity()
    jobs.run()
    host.deliver()
    assert len(cores[1].received) == count
    assert cores[0].loaded[calls[0]] == cores[2].loaded[calls[2]]
    assert host.store.stats().loaded_disk_bytes == 2 * 3 * SIZES[0]
    host.store.check_integrity()


def test_a_core_dies_with_grants_and_loads() -> None:
    """Its places are taken back when its next incarnation comes, or when the replica is removed, and not before."""
    jobs = Jobs()
    host = Host(KINDS, ROOM, jobs)
    dead, other, links = host.core(0, incarnation=1), host.core(1), chain(1, 2, 3)
    dead.store(links)
    jobs.run()
    dead.load(entries(links))
    dead.offer(chain(1, 2, 4, 5))
    late = list(dead.grants)
    again = host.core(0, incarnation=2)
    host.store.check_integrity()
    assert other.look_up(chain(1, 2, 4)) == [[MEMORY, MEMORY, NO_TIER]] * 3
    jobs.run()
    host.deliver()
    again.store(chain(1, 2, 4))
    jobs.run()
    for message in (StoredKV(late, [], host.store.path), LookUpKV(1, links)):  # what it had sent
        host.store.handle(b"0.1", message)
        host.store.check_integrity()
    host.deliver()
    assert isinstance(dead.received[-1], KVStoreOpened)
    assert again.look_up(chain(1, 2, 4)) == [[MEMORY] * 3] * 3
    host.core(0, incarnation=1)  # what it had sent, too
    assert again.look_up(links) == [[MEMORY] * 3] * 3
    again.load(entries(links))
    again.offer(chain(9))
    host.store.forget_replica(0)
    jobs.run()
    host.store.check_integrity()
    assert not any(entry.pins for entry in host.store.index)


def test_nobody_waits_for_a_core_that_has_ended() -> None:
    """What it was granted is stored by others, at other places as long as its ranks may write."""
    host = Host(KINDS[:1], ROOM)
    dead, other, reader, links = host.core(0, incarnation=1), host.core(1), host.core(2), chain(1, 2)
    dead.offer(links)
    late = list(dead.grants)
    call, again = reader.load(entries(links, 0)), reader.load(entries(links, 0), waits=True)
    host.store.lose_replica(0)
    host.deliver()
    host.store.check_integrity()
    assert (reader.loaded[call], reader.loaded[again]) == ({0: None, 1: None}, {})
    assert other.look_up(links) == [[NO_TIER] * 2]
    other.offer(links)
    assert not {*late} & {*other.grants}
    other.finish()
    host.deliver()
    assert len(reader.loaded[again]) == 2
    host.core(0, incarnation=2)
    host.store.check_integrity()
    assert host.store.arena.used() == {(0, offset) for offset in reader.loaded[again].values()}


def test_nothing_is_left_of_a_core_that_is_forgotten() -> None:
    """Without the garbage collector, which the process does not run."""
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1)
    core.store(links)
    core.load(entries(links))
    left = weakref.ref(host.store._cores[0])
    gc.disable()
    try:
        host.store.forget_replica(0)
        assert left() is None
    finally:
        gc.enable()


def test_a_core_that_opens_again_keeps_what_it_has() -> None:
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1, 2)
    core.offer(links)
    core.open()
    core.finish()
    assert core.look_up(links) == [[MEMORY, MEMORY]] * 3
    host.store.check_integrity()


def test_a_core_that_the_store_does_not_know_is_told_the_arena() -> None:
    """A store that was started again; offsets of the earlier one mean nothing."""
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1)
    core.offer(links)
    old, host.store = host.store, Host(KINDS, ROOM).store
    told = []
    host.store._send = lambda client, message: told.append((client, message))
    core.finish()
    assert told == [(b"0.1", KVStoreOpened(host.store.path, ROOM))]
    assert host.store.path != old.path
    host.store.check_integrity()
    assert not host.store.stats().memory_entries


def test_a_load_waits_for_what_others_store() -> None:
    """Until it is settled: then what nobody is writing fails at once, and the rest when that is known."""
    host = Host(KINDS[:1], ROOM)
    writer, reader, links = host.core(0), host.core(1), chain(1, 2, 3, 4, 5)
    writer.store(links[:1])
    call = reader.load(entries(links, 0), waits=True)
    assert [*reader.loaded[call]] == [0]
    writer.offer(links[:4])
    second, third, fourth = writer.grants
    host.store.check_integrity()
    writer.finish([second])
    writer.abandon([fourth])
    assert [*reader.loaded[call]] == [0, 1]
    reader.release_loaded(call)
    reader.settle(call)
    host.store.check_integrity()
    assert {number for number, offset in reader.loaded[call].items() if offset is None} == {3, 4}
    writer.abandon([third])
    assert reader.loaded[call][2] is None
    reader.release(call)
    again = reader.load(entries(links, 0), waits=True)
    reader.release(again)
    host.store.check_integrity()
    writer.store(links)
    assert again not in reader.loaded, "it was released"


def test_abandoned_grants_are_not_found() -> None:
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1, 2)
    core.offer(links)
    core.abandon(list(core.grants)[:4])
    core.finish()
    assert core.look_up(links) == [[NO_TIER, NO_TIER]] * 3
    assert host.store.stats().memory_entries == 2
    host.store.check_integrity()


def test_what_became_of_another_arena_is_ignored() -> None:
    """A core may not know yet that a store was started again, and that the new one has granted the same places."""
    host = Host(KINDS, ROOM)
    core, links = host.core(), chain(1, 2, 3)
    core.offer(links)
    host.store.handle(b"0.1", StoredKV(list(core.grants), [], "another"))
    host.store.handle(b"0.1", StoredKV([], list(core.grants), "another"))
    assert core.look_up(links) == [[NO_TIER] * 3] * 3
    core.finish()
    assert core.look_up(links) == [[MEMORY] * 3] * 3
    host.store.check_integrity()


def test_what_is_in_use_is_not_evicted() -> None:
    """Loaded entries and grants keep their bytes under pressure; what then has no room fails at once."""
    host, disk = Host(KINDS[:1], 64 * 128), FakeDisk()
    host.store.use_disk(disk)
    core, links, stored = host.core(), chain(*range(32)), chain(50, 51)
    core.store(links)
    core.store(stored)
    host.store.entries.write(all_now=True)
    call = core.load(entries(links, 0))
    loaded = dict(core.loaded[call])
    core.store(chain(*range(100, 200)))
    for number, offset in loaded.items():
        assert offset is not None
        core.check(core.loads[call][number], offset)
    core.offer(chain(*range(200, 240), *range(40)))
    assert len(core.grants) == host.store.arena.size // 128 - 32
    again = core.load(entries(stored, 0))
    assert set(core.loaded[again].values()) == {None}
    host.store.check_integrity()
    core.release(call)
    core.release(again)
    assert None not in core.loaded[core.load(entries(stored, 0))].values()
    host.store.check_integrity()


def test_a_load_that_is_larger_than_memory_goes_on_as_it_is_released() -> None:
    """Also if memory has its end, and others store what they have meanwhile."""
    host, disk = Host(KINDS[:1], 64 * 128), FakeDisk()
    host.store.use_disk(disk)
    core, other, links = host.core(0), host.core(1), chain(*range(200))
    core.parents |= parents(links)
    for start in range(0, 200, 10):
        core.offer_entries(entries(links[start : start + 10], 0))
        core.finish()
        host.store.entries.write(all_now=True)
    call = core.load(entries(links, 0))
    rounds = 0
    while len(core.loaded[call]) < len(links):
        other.offer(chain(201, rounds))
        core.release_loaded(call)
        host.store.check_integrity()
        rounds += 1
    assert None not in core.loaded[call].values()
    assert rounds < 10
    other.finish()


def test_a_small_memory_is_written_before_it_is_needed() -> None:
    """No entry is lost when more is stored at once than memory has, as long as the disk keeps up."""
    host, disk = Host(KINDS, ROOM), FakeDisk()
    host.store.use_disk(disk)
    core = host.core()
    for number in range(100):
        core.store(chain(number, 1, 2))
    assert host.store.stats().evicted_memory_entries > 0
    assert core.look_up(chain(0, 1, 2)) == [[DISK] * 3] * 3
    assert disk.num_entries > 9 * 90


def test_a_load_that_is_released_is_not_read() -> None:
    jobs, disk = Jobs(), FakeDisk()
    host = Host(KINDS, ROOM, jobs)
    host.store.use_disk(disk)
    core, links = host.core(), chain(1, 2)
    core.store(links)
    jobs.run()
    host.store.entries.write(all_now=True)
    jobs.run()
    other = Host(KINDS, ROOM, jobs)
    other.store.use_disk(disk)
    core = other.core()
    core.release(core.load(entries(links)))
    disk.read = None  # type: ignore[assignment, method-assign]
    jobs.run()
    assert other.store.stats().memory_entries == 0
    other.store.check_integrity()


def test_a_long_load_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "JOB_BYTES", 1)
    jobs, disk = Jobs(), FakeDisk()
    host = Host(KINDS[:1], ROOM, jobs)
    host.store.use_disk(disk)
    core, links, other = host.core(), chain(*range(40)), chain(50)
    core.store(links)
    core.store(other)
    jobs.run()
    host.store.entries.write(all_now=True)
    jobs.run()
    host = Host(KINDS[:1], ROOM, jobs)
    host.store.use_disk(disk)
    core = host.core()
    long, short = core.load(entries(links, 0)), core.load(entries(other, 0))
    while len(core.loaded[short]) == 0:
        jobs.run(random.Random(0))
        host.deliver()
        host.store.check_integrity()
    assert len(core.loaded[long]) < 10
    core.release(long)  # before some of its entries have a job
    host.store.check_integrity()
    jobs.run()
    host.store.check_integrity()
    assert host.store.stats().memory_entries < 10


def test_files_of_what_is_looked_up_in_memory_are_used() -> None:
    host, disk = Host(KINDS, ROOM), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(1, 2)
    core.store(links)
    core.look_up([*links[:1], *chain(9)])
    assert disk.used == set(entries(links[:1]))


def test_what_is_used_is_written_again_when_its_file_was_evicted() -> None:
    host, disk = Host(KINDS, ROOM), FakeDisk()
    host.store.use_disk(disk)
    core, links = host.core(), chain(1)
    core.store(links)
    host.store.entries.write(all_now=True)
    disk.stored.clear()
    host.store.entries.write(all_now=True)
    assert not disk.stored
    core.load(entries(links))
    host.store.entries.write(all_now=True)
    assert list(disk.stored) == entries(links)


def test_entries_are_written_by_chains() -> None:
    """Some seconds after they came, or as soon as they fill a file; and once."""
    clock, disk = Clock(), FakeDisk()
    host = Host(KINDS, ROOM, clock=clock)
    host.store.use_disk(disk)
    core, first, second = host.core(), chain(1, 2, 3, 4), chain(5, 6, 7)
    for length in range(1, 5):
        core.store(first[:length])
        core.store(second[:length])
    host.store.tick()
    assert not disk.files
    clock.now = WRITE_SECONDS
    host.store.tick()
    assert disk.files == [entries(first) + entries(second)]
    core.store(first)
    clock.now *= 3
    host.store.tick()
    assert len(disk.files) == 1
    assert host.store.entries.num_unwritten == 0


def test_a_full_file_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 10 * SIZES[0])
    jobs, disk = Jobs(), FakeDisk()
    host = Host(KINDS[:1], ROOM, jobs)
    host.store.use_disk(disk)
    core, first, second = host.core(), chain(*range(12)), chain(*range(20, 28))
    for length in range(1, 9):
        core.store(first[:length])
        core.store(second[:length])
    core.store(first)
    jobs.run()
    assert disk.files == [entries(first[:5] + second[:5], 0), entries(first[5:] + second[5:], 0)]
    host.store.check_integrity()


def test_a_small_disk_has_small_files() -> None:
    """Of which it evicts some, not all that it has."""
    disk = FakeDisk()
    disk.capacity = 80 * SIZES[0]
    host = Host(KINDS[:1], ROOM)
    host.store.use_disk(disk)
    host.core().store(chain(*range(40)))
    host.store.entries.write(all_now=True)
    assert [len(each) for each in disk.files] == [10] * 4


def test_entries_wait_for_a_disk_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", sum(SIZES))  # enough waits to be written, again and again
    clock, disk = Clock(), FakeDisk()
    host = Host(KINDS, ROOM, clock=clock)
    core, links = host.core(), chain(1, 2)
    core.store(links)  # before the tier is known
    host.store.use_disk(disk)
    disk.error = "disk full"
    clock.now = WRITE_SECONDS
    host.store.tick()
    host.deliver()
    host.store.check_integrity()
    assert isinstance(stats := core.received[-1], KVStoreStats)
    assert stats.disk_error == "disk full"
    disk.error = ""
    clock.now *= 2
    host.store.tick()
    assert disk.files == [entries(links[1:]), entries(links[:1])]


@pytest.mark.parametrize("has_disk", [False, True])
def test_clear(has_disk: bool) -> None:
    """Everything is forgotten: also what is being written, read or summed at that moment; loads keep what they have."""
    jobs, disk = Jobs(), FakeDisk()
    host = Host(KINDS, ROOM, jobs)
    if has_disk:
        host.store.use_disk(disk)
    core, links, written = host.core(), chain(1, 2, 3), chain(6)
    core.store(links)
    jobs.run()
    host.store.entries.write(all_now=True)
    jobs.run()
    core.store(written)
    jobs.run()
    host.store.entries.write(all_now=True)
    loading = core.load(entries(links))
    core.offer(chain(4))
    summed = chain(5)
    core.offer(summed)
    core.finish([offset for offset, entry in core.grants.items() if entry.link == summed[0]])
    host.store.handle(b"0.1", ClearKV(7))
    host.store.check_integrity()
    assert core.look_up(links) == [[NO_TIER] * 3] * 3
    jobs.run()
    host.deliver()
    core.finish()
    jobs.run()
    host.store.check_integrity()
    assert KVCleared(7, 21 if has_disk else 18) in core.received  # those that are being written count twice
    assert None not in core.loaded[loading].values()
    for each in (links, written, chain(4), summed):
        assert core.look_up(each[:1]) == [[NO_TIER]] * 3
    core.release(loading)
    host.store.check_integrity()
    assert host.store.stats().memory_bytes == 0
    assert not disk.stored


def test_a_clear_is_answered_although_the_disk_cannot_be_cleared() -> None:
    """Before the tier is known, which is cleared later, while it hangs, and when files cannot be removed."""
    jobs, disk, clock = Jobs(), FakeDisk(), Clock()
    host = Host(KINDS, ROOM, jobs, clock)
    core, links = host.core(), chain(1)
    disk.stored = {entry: (bytes(SIZES[entry.kind]), b"") for entry in entries(links)}

    def answer(call_id: int) -> KVCleared:
        jobs.run()
        host.deliver()
        return next(each for each in core.received if isinstance(each, KVCleared) and each.call_id == call_id)

    host.store.disk_error = "no digest yet"
    host.store.handle(b"0.1", ClearKV(1))
    assert answer(1).error == "the disk tier has not been cleared yet: no digest yet"
    host.store.use_disk(disk)
    assert core.look_up(links) == [[NO_TIER]] * 3
    jobs.run()
    assert not disk.stored
    host.store.handle(b"0.1", ClearKV(2))
    clock.now = CLEAR_SECONDS + 1
    disk.error = "it hangs"
    host.store.tick()
    host.deliver()
    assert KVCleared(2, 0, "the disk tier has not been cleared yet: it hangs") in core.received
    disk.clear = lambda: (3, "1 file")  # type: ignore[method-assign]
    host.store.handle(b"0.1", ClearKV(3))
    assert answer(3) == KVCleared(3, 3, "the disk tier has not been cleared yet: 1 file")
    assert [each.call_id for each in core.received if isinstance(each, KVCleared)] == [1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    """Cores that store, load, die and come back; a memory that is far too small; flipped bits in memory and on disk;
    jobs that end in any order. Nobody ever gets a wrong byte, and every load is answered."""
    choose, jobs, disk, clock = random.Random(seed), Jobs(), FakeDisk(), Clock()
    kinds = choose.choice([KINDS, KINDS[:1], KINDS[:2], KINDS[1:]])
    host = Host(kinds, choose.choice([5, 8, 30]) * 4096, jobs, clock, doubling=choose.choice([2, math.inf]))
    if choose.random() < 0.7:
        host.store.use_disk(disk)
    cores = [host.core(replica) for replica in range(3)]
    chains = [
        chain(*([1] * choose.randrange(6) + [choose.randrange(4) for _ in range(choose.randrange(1, 20))]))
        for _ in range(30)
    ]
    num_loaded = num_failed = 0

    def act(core: StoreCore) -> None:
        nonlocal num_loaded, num_failed
        links = choose.choice(chains)
        match choose.randrange(12):
            case 0 | 1 | 2:
                core.offer(links[: choose.randrange(len(links)) + 1])
            case 3 | 4 | 5 if core.grants:
                core.finish(choose.sample(sorted(core.grants), choose.randrange(len(core.grants)) + 1))
            case 6 if core.grants:
                core.abandon(choose.sample(sorted(core.grants), choose.randrange(len(core.grants)) + 1))
            case 7 | 8:
                core.parents |= dict(zip(links, [b"", *links], strict=False))
                core.look_up(links)
                found = [KVEntry(link, kind) for link in links for kind in range(len(kinds))]
                core.load(choose.sample(found, choose.randrange(1, len(found) + 1)), waits=choose.random() < 0.3)
            case 9 if core.loads:
                choose.choice([core.release_loaded, core.settle])(choose.choice(sorted(core.loads)))
            case 10 if core.loads:
                call = choose.choice(sorted(core.loads))
                num_loaded += sum(offset is not None for offset in core.loaded[call].values())
                num_failed += sum(offset is None for offset in core.loaded[call].values())
                core.release(call)
            case 11 if choose.random() < 0.1:
                replica, incarnation = core.replica, core.incarnation + 1
                cores[replica] = host.core(replica, incarnation)

    for _ in range(600):
        act(choose.choice(cores))
        host.store.check_integrity()
        clock.now += choose.random()
        match choose.randrange(40):
            case 0:
                host.store.tick()
            case 1 if disk.stored:
                disk.damage(choose.choice(sorted(disk.stored, key=lambda entry: (entry.link, entry.kind))))
            case 2:
                jobs.run()  # what is summed or has been checked already must not change
                host.deliver()
                offset = choose.randrange(host.store.arena.size)
                if not any(
                    start is not None and start <= offset < start + 1000
                    for core in cores
                    for loaded in core.loaded.values()
                    for start in loaded.values()
                ):
                    cores[0].memory[offset] ^= 16
            case 3 if choose.random() < 0.1:
                host.store.handle(b"0." + str(cores[0].incarnation).encode(), ClearKV(1))
            case 4:
                disk.is_broken = not disk.is_broken
            case 5:
                disk.error = "" if disk.error else "full"
        while jobs.waiting and choose.random() < 0.7:
            jobs.run(choose)
            host.store.check_integrity()
        host.deliver()
    jobs.run()
    for _ in range(3):
        host.store.tick()
        jobs.run()
        host.deliver()
    host.store.check_integrity()
    assert [core.announced for core in cores] == [host.tiers] * 3
    for core in cores:
        core.abandon(list(core.grants))
    for core in cores:
        for call_id, wanted in core.loads.items():
            core.settle(call_id)
            for _ in wanted:
                core.release_loaded(call_id)
                jobs.run()
                host.deliver()
            host.store.check_integrity()
            assert len(core.loaded[call_id]) == len(wanted)
        for call_id in list(core.loads):
            core.release(call_id)
    host.store.check_integrity()
    assert not any(entry.pins for entry in host.store.index)
    assert num_loaded > 50
    assert num_failed > 50
