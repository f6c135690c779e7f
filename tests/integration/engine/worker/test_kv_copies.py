"""Entries of the KV store that real ranks write in one layout and read in another."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.engine.config.engine_config import EngineConfig, KVStoreConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.kv_store.arena import Arena
from quire.engine.protocol.kv_store import KVCopied, KVCopy, KVCopyPlan, RemoteArena
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.kv_cache_manager import extend_hashes
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.worker.kv_caches import KVCaches
from quire.engine.worker.kv_copies import KVCopies, KVStaging
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import write
from tests.fakes.model_logits import CPU, configure
from tests.fakes.threads import ThreadExecutor
from tests.fakes.waiting import until

Entries = dict[tuple[bytes, int], npt.NDArray[np.uint8]]
"""The bytes of entries, by their links and kinds."""
Answer = tuple[list[int], list[float]]
"""Tokens and log-probabilities."""
PROMPT = [random.Random(5).randrange(3, 130) for _ in range(100)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


class CopyingRanks(Ranks):
    """Ranks whose copies are planned by hand."""

    def __init__(self, config: EngineConfig, arena: Path) -> None:
        config = replace(config, kv_store=KVStoreConfig(memory_bytes=1))
        super().__init__(config, ThreadExecutor(config))
        self.layout, self._arena, self._numbers = kv_layout(config), arena, count()
        self._reports = SimpleQueue[RankReport]()

    def answer(self, prepare: Callable[[Scheduler], None] = lambda scheduler: None) -> Answer:
        """Serve the prompt. A state is kept after its last full block, and in others if rows end there."""
        (outputs,) = self.run([(PROMPT, PARAMS)], max_num_batched_tokens=32, prepare=prepare)
        logprobs = [each.logprob for output in outputs for each in output.logprobs or []]
        return [token for output in outputs for token in output.token_ids], logprobs

    def chain(self) -> list[list[bytes]]:
        """The hashes of the prompt's blocks, of each group."""
        groups, hashes = len(self.config.cache.groups), list[bytes]()
        extend_hashes(hashes, PROMPT, self.config.cache.block_size, num_groups=groups)
        return [hashes[at : at + groups] for at in range(0, len(hashes), groups)]

    def stored(self) -> Entries:
        """The entries of the prompt in the prefix cache, as the ranks copy them to an arena of other bytes."""
        assert self.scheduler is not None
        found, known = dict[tuple[bytes, int], list[int]](), self.scheduler.kv._block_of
        for hashes in self.chain():
            for number, kind in enumerate(self.layout.kinds):
                blocks = [known.get(hashes[group]) for group in kind.groups]
                if None not in blocks:
                    found[hashes[0], number] = [block for block in blocks if block is not None]
        sizes = [self.layout.kinds[kind].size for _, kind in found]
        arena = self._make_arena(b"\xa5" * sum(sizes))
        self._copy(arena, [(kind, blocks) for (_, kind), blocks in found.items()], "stores")
        parts = np.split(np.frombuffer(arena.read_bytes(), np.uint8), np.cumsum(sizes)[:-1])
        return dict(zip(found, parts, strict=True))

    def load(self, entries: Entries, scheduler: Scheduler) -> None:
        """Copy entries to the last pages, and publish them."""
        kv, size, chain, copies = scheduler.kv, self.config.cache.blocks_per_page, dict[bytes, list[bytes]](), []
        chain = {hashes[0]: hashes for hashes in self.chain()}
        page = kv.num_free
        for link, kind in entries:
            blocks = []
            for group in self.layout.kinds[kind].groups:
                page -= 1
                kv._num_used[page] = size
                blocks.append(page * size)
                kv.publish(page * size, chain[link][group])
            copies.append((kind, blocks))
        self._copy(self._make_arena(b"".join(each.tobytes() for each in entries.values())), copies, "loads")

    def _make_arena(self, content: bytes) -> Path:
        """Another arena, instead of the last one."""
        self._arena.unlink(missing_ok=True)
        self._arena = self._arena.with_suffix(f".{next(self._numbers)}")
        self._arena.write_bytes(content)
        return self._arena

    def _copy(self, arena: Path, entries: list[tuple[int, list[int]]], direction: str) -> None:
        """Copy entries, given by kind and blocks, that follow each other in the arena."""
        copies, offset = [], 0
        for number, (kind, blocks) in enumerate(entries):
            copies.append(KVCopy(number, kind, offset, blocks))
            offset += self.layout.kinds[kind].size
        self.executor.on_report, planned = self._reports.put, KVCopyPlan(str(arena))
        setattr(planned, direction, copies)
        plan = SchedulerOutput(0, [], [], [], kv_copies=planned)
        self.executor.submit(plan, 60.0).result()
        missing = {(rank, each.number) for rank in range(self.config.parallel.world_size) for each in copies}
        while missing:
            report = self._reports.get(timeout=60)
            assert isinstance(report, KVCopied)
            assert not report.failed
            missing -= {(report.rank, number) for number in report.numbers}


def check(folder: Path, tmp_path: Path, layouts: Sequence[Mapping[str, Any]], tolerance: float = 1e-3) -> None:
    """Check that all layouts store the same numbers, and that each reads what the first has stored."""
    written: tuple[bytes, Entries, Answer] | None = None
    for number, options in enumerate(layouts):
        config = configure(folder, max_model_len=256, **options)
        with CopyingRanks(config, tmp_path / f"arena-{number}") as ranks:
            answer, entries = ranks.answer(), ranks.stored()
            assert {kind for _, kind in entries} == {*range(len(ranks.layout.kinds))}
            if written is None:
                written = ranks.layout.signature, entries, answer
            signature, stored, expected = written
            assert signature == ranks.layout.signature
            assert entries.keys() == stored.keys()
            for key, own in entries.items() if config.cache.dtype == "float32" else ():
                mine, other = own.view(np.float32), stored[key].view(np.float32)
                assert np.abs(mine - other).max() <= 1e-3 * np.abs(other).max(), key[1]
            again = ranks.answer(partial(ranks.load, stored))
            assert ranks.stats.prefix_hit_tokens == len(PROMPT) // 16 * 16
            assert again[0] == expected[0]
            assert again[1] == pytest.approx(expected[1], abs=tolerance)
            loaded = ranks.stored()
            assert all(np.array_equal(loaded[key], stored[key]) for key in stored)


def layout(tp: int, pp: int, **options: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **options}


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[tuple[KVCopies, SimpleQueue[KVCopied], threading.Event]]:
    """The copies of a rank with 8 blocks, their ends, and an event that lets the thread go on after each."""
    write_checkpoint("qwen2", tmp_path)
    config = configure(tmp_path, max_model_len=64).with_blocks(8)
    memory = KVCaches(config, 0, CPU).memory
    ends, goes_on = SimpleQueue[KVCopied](), threading.Event()
    goes_on.set()

    def on_copied(report: KVCopied) -> None:
        ends.put(report)
        goes_on.wait(60)

    found = KVCopies(config, 0, memory, CPU, None, on_copied)
    yield found, ends, goes_on
    goes_on.set()
    found.close()


def test_copies_that_are_not_possible_are_reported(
    copies: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, ends, _ = copies
    arena, short = tmp_path / "arena", tmp_path / "short"
    arena.write_bytes(bytes(1 << 20))
    short.write_bytes(bytes(16))
    for number, (path, failed) in enumerate(((tmp_path / "none", True), (arena, False), (short, True), (arena, False))):
        made.begin(KVCopyPlan(str(path), stores=[KVCopy(number, 0, 0, [3])]))
        assert ends.get(timeout=60) == KVCopied(0, [number], [number] * failed)
    made.begin(KVCopyPlan(str(tmp_path / "none"), stores=[KVCopy(4, 0, 0, [3])]))
    assert ends.get(timeout=60).failed == [4]
    assert caplog.text.count("FileNotFoundError") == 1, "the log does not grow with what fails"


def test_a_rank_of_another_host_reports_after_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it gets on for the watchdog, also while only parts of entries have been copied."""
    write_checkpoint("qwen2", tmp_path)
    config = configure(tmp_path, max_model_len=64, tensor_parallel_size=2).with_blocks(8)
    config = replace(config, parallel=replace(config.parallel, nodes=2))
    remote, ends, link = RemoteArena("127.0.0.1:1", 0, 5), SimpleQueue[KVCopied](), MagicMock()
    link.remote, link.batch_bytes, link.copy.return_value = remote, 1, {}
    monkeypatch.setattr("quire.engine.worker.kv_copies.ArenaLink", lambda *_: link)
    made = KVCopies(config, 1, KVCaches(config, 0, CPU).memory, CPU, None, ends.put)
    plan = KVCopyPlan("arena", step_stores=[KVCopy(number, 0, 0, [number]) for number in range(3)], remote=remote)
    on_layer = made.begin(plan)
    assert on_layer is not None
    on_layer(0)
    assert ends.get(timeout=60) == KVCopied(1, [])
    for number in range(1, 6):
        on_layer(number)
    made.end_step()
    assert [ends.get(timeout=60).numbers for _ in range(10)] == [[]] * 9 + [[0, 1, 2]]
    made.close()


def test_an_arena_whose_store_has_ended_is_not_kept(copies: Any) -> None:
    """The last mapping of it keeps its memory. A plan of another arena, or of none, ends it, without copies as well."""
    made, ends, _ = copies
    arena = Arena(1 << 20, [made._kinds[0].size])
    made.begin(KVCopyPlan(arena.path, stores=[KVCopy(0, 0, 0, [3])]))
    assert ends.get(timeout=60) == KVCopied(0, [0])
    name = arena.path.partition("#")[2]
    assert name in Path("/proc/self/maps").read_text()
    del arena.memory
    made.begin(KVCopyPlan(""))
    until(lambda: name not in Path("/proc/self/maps").read_text())
    made.begin(KVCopyPlan(arena.path + "0", stores=[KVCopy(1, 0, 0, [3])]))  # of a process with the same number
    assert ends.get(timeout=60) == KVCopied(0, [1], [1])
    arena.close()


def test_loads_come_before_stores(copies: Any, tmp_path: Path) -> None:
    made, ends, goes_on = copies
    (tmp_path / "arena").write_bytes(bytes(1 << 20))
    goes_on.clear()
    for number in range(4):
        plan = KVCopyPlan(str(tmp_path / "arena"))
        (plan.loads if number > 1 else plan.stores).append(KVCopy(number, 0, 0, [number]))
        made.begin(plan)
        if number == 0:
            assert ends.get(timeout=60).numbers == [0]  # the thread waits from now on
    goes_on.set()
    assert [ends.get(timeout=60).numbers for _ in range(2)] == [[2, 3], [1]]


def test_what_a_step_computes_is_copied_layer_by_layer(copies: Any, tmp_path: Path) -> None:
    """Beside the step; it is reported when all of it has been copied."""
    made, ends, _ = copies
    (memory,), arena, size = made._memory.values(), tmp_path / "arena", made._kinds[0].size
    memory.copy_(torch.randint(1, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    entries = [KVCopy(number, 0, number * size, [block]) for number, block in enumerate((5, 2))]
    arena.write_bytes(bytes(2 * size))
    made.begin(KVCopyPlan(str(arena), stores=entries))
    assert ends.get(timeout=60) == KVCopied(0, [0, 1])
    whole = arena.read_bytes()
    arena.write_bytes(bytes(2 * size))
    on_layer = made.begin(KVCopyPlan(str(arena), step_stores=entries))
    for number in range(3):
        on_layer(number)
    half = b"".join(whole[at : at + size // 2] + bytes(size // 2) for at in (0, size))  # three of six layers
    until(lambda: arena.read_bytes() == half)
    assert ends.empty()
    for number in range(3, 6):
        on_layer(number)
    until(lambda: arena.read_bytes() == whole)  # before a drafter runs
    assert ends.empty()
    made.end_step()
    assert ends.get(timeout=60) == KVCopied(0, [0, 1])
    assert arena.read_bytes() == whole
    on_layer = made.begin(KVCopyPlan(str(tmp_path / "none"), step_stores=entries[:1]))
    on_layer(0)
    until(lambda: made._failed)
    made.end_step()
    assert ends.get(timeout=60) == KVCopied(0, [0], [0])
    assert not made._failed


def test_parts_of_entries_fill_batches(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = copies
    made.close()
    made._is_closed, size = False, made._kinds[0].size
    monkeypatch.setattr("quire.engine.worker.kv_copies._BATCH_BYTES", size)
    made.begin(KVCopyPlan("arena", step_stores=[KVCopy(number, 0, number * size, [number]) for number in range(8)]))
    made._on_layer(0)  # one of six layers
    assert [len(made._next()) for _ in range(2)] == [6, 2]
    made.end_step()
    assert len(made._next()) == 1


def test_copies_through_pinned_memory_are_the_same(
    copies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: its streams and events do nothing."""
    made, ends, _ = copies
    (memory,) = made._memory.values()
    memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    size = made._kinds[0].size
    entries = [KVCopy(number, 0, number * size, [block]) for number, block in enumerate((5, 2, 7))]

    def copied(name: str, direction: str) -> bytes:
        arena, plan = tmp_path / name, KVCopyPlan(str(tmp_path / name))
        setattr(plan, direction, entries)
        if direction == "stores":
            arena.write_bytes(bytes(3 * size))
        made.begin(plan)
        assert ends.get(timeout=60) == KVCopied(0, [0, 1, 2])
        return arena.read_bytes()

    plain = copied("plain", "stores")
    with monkeypatch.context() as patch:
        for name in ("Event", "Stream", "current_stream"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(made, "_staging", KVStaging(3 * size, CPU))
        assert copied("staged", "stores") == plain
        memory.zero_()
        copied("staged", "loads")
    assert copied("again", "stores") == plain


@pytest.mark.parametrize("case", ["Qwen3", "Qwen3-Next"])
def test_layouts_read_what_others_have_stored(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    check(tmp_path, tmp_path, [layout(1, 1), layout(2, 2)])


KINDS = (
    *("Gemma 2", "Llama 4", "Gemma 4, layer inputs, shared keys and values", "MiMo-V2-Flash", "gpt-oss", "Gemma 3n"),
    *("DeepSeek V3", "DeepSeek V3.2", "GLM-5.3", "dots3-note", "MiniMax-M3", "Qwen4-Exp", "DeepSeek V4", "LFM3"),
    *("Kimi Linear", "MiniMax", "Ling hybrid", "LFM2", "Mamba", "Mamba-2", "Falcon-H1", "Nemotron-H", "Zamba"),
    *("Jamba", "RecurrentGemma", "xLSTM", "RWKV-4", "Zamba2"),
)
"""Cases that keep what others do not."""


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_layouts_read_all_kinds(case: str, tmp_path: Path) -> None:
    write(case, tmp_path)
    check(tmp_path, tmp_path, [layout(1, 1), layout(2, 2), layout(4, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_layouts_read_quantized_rows(dtype: str, tmp_path: Path) -> None:
    write("Qwen3", tmp_path)
    layouts = [layout(1, 1), layout(4, 1), layout(1, 2)]
    check(tmp_path, tmp_path, [each | {"kv_cache_dtype": dtype} for each in layouts], tolerance=0.05)


@pytest.mark.slow
def test_layouts_read_what_drafters_have_stored(tmp_path: Path) -> None:
    write("Qwen3", tmp_path)

    def drafting(tp: int, pp: int, ranks: int) -> dict[str, Any]:
        drafter = {"model": str(tmp_path), "num_speculative_tokens": 2, "draft_tensor_parallel_size": ranks}
        return layout(tp, pp, speculative_config=drafter)

    check(tmp_path, tmp_path, [drafting(1, 1, 1), drafting(2, 1, 1), drafting(2, 2, 2), drafting(1, 2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[layout(1, 1), layout(1, 2)], [layout(2, 1)]])
def test_layouts_read_states_of_the_transformers_backend(layouts: list[dict[str, Any]], tmp_path: Path) -> None:
    """It is not known how its ranks divide states: those of another number of ranks have another signature."""
    write("Qwen3-Next", tmp_path)
    check(tmp_path, tmp_path, [each | {"model_impl": "transformers"} for each in layouts])
