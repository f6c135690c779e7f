"""KV from the host's store changes no token: in every layout, for every kind of cache, and where another layout stored
it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import zmq

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.engine_config import EngineConfig, KVStoreConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.config.options import DEMO_MODEL
from quire.engine.kv_store.rank_server import RankServer
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler import kv_load_choice
from quire.engine.scheduler.kv_load_choice import Rates
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.scheduler.token_budget import TokenBudget
from quire.engine.worker import arena_link
from quire.engine.worker.kv_copies import KVStaging
from tests.fakes.core_with_ranks import LocalStore, Ranks
from tests.fakes.draft_heads import HEAD, write_eagle3
from tests.fakes.drafts import Always, Guesser
from tests.fakes.families import write
from tests.fakes.lora import write_lora
from tests.fakes.model_logits import configure
from tests.fakes.threads import ThreadExecutor

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MIN_TOKENS = 16
STORE = KVStoreConfig(memory_bytes=64 << 20, min_tokens=MIN_TOKENS)


@pytest.fixture(autouse=True)
def _loads_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the small models are."""
    monkeypatch.setattr(TokenBudget, "prompt_seconds", lambda self, start, end: None)


def configured(folder: Path, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    plain = {"max_model_len": 256, "max_num_seqs": 8, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    return replace(configure(folder, **plain | options), kv_store=STORE)


def requests(vocabulary: int = 100) -> list[tuple[list[int], SamplingParams]]:
    """Of mixed lengths; two start alike."""
    rng = random.Random(0)
    shared = rng.choices(range(3, vocabulary), k=70)
    prompts = [rng.choices(range(3, vocabulary), k=length) for length in (5, 33, 90)]
    return [(prompt, PARAMS) for prompt in (*prompts, [*shared, 5, 6], [*shared, 7, 8, 9])]


def scarce(config: EngineConfig) -> int:
    """Hardly more blocks than the longest of the requests needs."""
    cache, page = config.cache, config.cache.blocks_per_page
    least = cache.max_blocks(110, config.scheduler.max_num_batched_tokens)
    return min(cache.num_blocks, -(-least // page) * page + 2 * page)


@pytest.mark.parametrize(
    ("tp", "pp", "dtype"), [(1, 1, "auto"), (2, 1, "auto"), (1, 2, "auto"), (2, 2, "auto"), (2, 1, "int4")]
)
def test_one_layout_reads_what_it_stored(tp: int, pp: int, dtype: str) -> None:
    """Each run begins with an empty prefix cache: then in few blocks, in chunks, ahead of the device, with drafts."""
    config = configured(DEMO_MODEL, tp, pp, kv_cache_dtype=dtype)
    asked = requests()
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(asked, enable_prefix_caching=False)
        ranks.store = LocalStore(config)
        assert ranks.tokens(asked) == expected
        assert ranks.stats.kv_loaded_memory_tokens == 0
        assert ranks.stats.kv_stored_blocks > 0
        for settings in ({}, {"num_blocks": scarce(config)}, {"max_num_batched_tokens": 16}, {"depth": pp + 1}):
            assert ranks.tokens(asked, **settings) == expected
            assert ranks.stats.kv_loaded_memory_tokens > 100
        ranks.store.close()


FAMILIES = ("Gemma 3", "DeepSeek V2", "Qwen3-Next", "DeepSeek V4")
"""Windows beside all tokens; latent vectors; states beside all tokens; windows in pages, and entries of all tokens."""
SLOW = (
    *(
        "Mistral, windows",
        "Qwen2, some windows",
        "gpt-oss",
        "MiMo-V2-Flash",
        "Llama 4",
        "OLMo 3",
        "Falcon, one KV head",
    ),
    *("Gemma 4, layer inputs, shared keys and values", "Gemma 3n", "Step 3.7", "Phi-3, longrope", "MPT", "DBRX"),
    *("DeepSeek V3.2", "GLM-5, shared selection", "MiniMax-M3", "GLM-5.3", "Qwen4-Exp", "Kimi Linear", "Ling hybrid"),
    *("OLMo hybrid", "Mamba-2", "Mamba", "Jamba", "Bamba", "Falcon-H1", "Nemotron-H", "Zamba2", "MiniMax", "LFM2"),
    *("RecurrentGemma", "xLSTM", "RWKV-4", "LFM3", "Granite 4, experts", "DeepSeek V4, rates as published"),
)


@pytest.mark.parametrize(
    ("family", "writer", "reader"),
    [
        *((family, (2, 1), (1, 1)) for family in FAMILIES),
        *(pytest.param(family, (1, 1), (2, 2), marks=pytest.mark.slow) for family in FAMILIES + SLOW[::2]),
        *(pytest.param(family, (2, 2), (1, 2), marks=pytest.mark.slow) for family in FAMILIES + SLOW[1::2]),
    ],
    ids=str,
)
def test_another_layout_reads_it(family: str, writer: tuple[int, int], reader: tuple[int, int], tmp_path: Path) -> None:
    write(family, tmp_path)
    stored, config = configured(tmp_path, *writer), configured(tmp_path, *reader)
    assert kv_layout(stored).signature == kv_layout(config).signature
    asked, store = requests(), LocalStore(stored)
    with Ranks(stored, ThreadExecutor(stored), store) as ranks:
        expected = ranks.tokens(asked)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        assert ranks.tokens(asked, enable_prefix_caching=False) == expected
        ranks.store = store
        assert ranks.tokens(asked) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 50
        assert ranks.tokens(asked, num_blocks=scarce(config), max_num_batched_tokens=32) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 0
    store.close()


class RemoteStore(LocalStore):
    """Ranks of the second host reach it by a socket."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._poller, self.is_closed = zmq.Poller(), False
        self.server = self.ranks = RankServer(self.of_ranks, "127.0.0.1", "", self._poller)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self.is_closed:
            ready = dict(self._poller.poll(20))
            with self._lock:
                self.server.run(ready)

    def close(self) -> None:
        self.is_closed = True
        self._thread.join()
        self.server.close()
        super().close()


Receive = Callable[[Sequence[bytes]], list[bytes | memoryview]]


def damaging(receive: Receive) -> Receive:
    """Flip a bit of the bytes that ranks write or read, every now and then."""
    rng = random.Random(0)

    def flipped(frames: Sequence[bytes | memoryview]) -> list[bytes]:
        whole = [*map(bytes, frames)]
        if len(whole) > 1 and not rng.randrange(4):
            at, last = rng.randrange(len(whole[-1])), whole[-1]
            whole[-1] = last[:at] + bytes([last[at] ^ 1 << rng.randrange(8)]) + last[at + 1 :]
        return whole

    return lambda frames: [*flipped(receive(flipped(frames)))]


@pytest.fixture
def staged(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the copies of one model go through pinned memory, as on a GPU, whose streams and events do nothing here."""
    if family == "Llama":
        for name in ("Event", "Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(KVStaging, "of", lambda config, rank, device: KVStaging(32 << 20, device))


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        ("Llama", 2, 1),
        ("Qwen3-Next", 2, 2),
        pytest.param("Gemma 3", 1, 2, marks=pytest.mark.slow),
        pytest.param("DeepSeek V2", 2, 1, marks=pytest.mark.slow),
        pytest.param("DeepSeek V4", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_another_host_copy_by_way_of_the_first(
    family: str, tp: int, pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the ranks are there; then all are on one host, which reads what they have stored. Then every fourth
    message is damaged on its way, and at last the store does not answer."""
    monkeypatch.setattr(arena_link, "SECONDS", 10.0)
    write(family, tmp_path)
    one_host, asked = configured(tmp_path, tp, pp), requests()
    config = replace(one_host, parallel=replace(one_host.parallel, nodes=2))
    store = RemoteStore(config)
    with Ranks(config, ThreadExecutor(config), store) as ranks:
        expected = ranks.tokens(asked)
        assert ranks.tokens(asked) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 50
        assert ranks.tokens(asked, num_blocks=scarce(config), max_num_batched_tokens=32) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 0
        with Ranks(one_host, ThreadExecutor(one_host)) as others:
            assert others.tokens(asked, enable_prefix_caching=False) == expected
            others.store = store
            store.forget_replica(0)  # the incarnations of its cores are counted from the beginning
            assert others.tokens(asked) == expected
            assert others.stats.kv_loaded_memory_tokens > 50
        monkeypatch.setattr(store.server, "receive", damaging(store.server.receive))
        num_failed = 0
        for blocks in (None, scarce(config), None):
            assert ranks.tokens(asked, num_blocks=blocks) == expected
            num_failed += ranks.stats.kv_failed_load_tokens
            assert ranks.stats.kv_failed_copies > 0
        assert num_failed > 0
        monkeypatch.setattr(arena_link, "SECONDS", 0.1)
        monkeypatch.setattr(store.server, "receive", lambda frames: [])
        assert ranks.tokens(asked) == expected
        assert ranks.stats.kv_failed_load_tokens > 0
        assert ranks.stats.kv_loaded_memory_tokens == 0
    store.close()


def test_drafts_change_nothing(tmp_path: Path) -> None:
    """Neither n-grams nor those of a head, whose KV is stored with the model's."""
    write_eagle3("Llama", tmp_path)
    options = {"method": "eagle3", "model": str(tmp_path / HEAD), "num_speculative_tokens": 3}
    config = configured(tmp_path, speculative_config=options)
    asked, store = requests(), LocalStore(config)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        ranks.config = replace(config, kv_store=None)
        expected = ranks.tokens(asked, speculative=None)
        ranks.config, ranks.store = config, store
        for number, depth in enumerate((1, 2, 1)):
            assert ranks.tokens(asked, depth=depth, speculation=Always(3, 32)) == expected
            assert (ranks.stats.kv_loaded_memory_tokens > 100) == (number > 0)
            assert ranks.stats.num_draft_tokens > 0
        wrong = Guesser(lambda known, rng: rng.randrange(3, 100), 3, 64)
        assert ranks.tokens(asked, num_blocks=scarce(config), speculation=wrong) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 100
    store.close()


def test_each_adapter_and_salt_has_its_own(tmp_path: Path) -> None:
    write("Qwen3", tmp_path / "base")
    config = configured(tmp_path / "base", enable_lora=True, max_loras=2)
    names = [name for name in checkpoint_tensors(config.model.architecture, has_head=True) if "_proj.weight" in name]
    adapters = [None, *(write_lora(tmp_path / str(seed), config.model, names, seed, size=0.3) for seed in (1, 2))]
    asked = [request for request in requests()[2:] for _ in adapters]
    given, store = adapters * (len(asked) // len(adapters)), LocalStore(config)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(asked, adapters=given, enable_prefix_caching=False)
        assert expected[0] != expected[1] != expected[2] != expected[0]
        ranks.store = store
        for _ in range(2):
            assert ranks.tokens(asked, adapters=given) == expected
        assert ranks.stats.kv_loaded_memory_tokens > 300
    store.close()


def test_damaged_entries_are_computed_again() -> None:
    """Every third is not what it was: each is found, and only time is lost."""
    config = configured(DEMO_MODEL)
    asked, store, rng = requests(), LocalStore(config), random.Random(0)
    with Ranks(config, ThreadExecutor(config), store) as ranks:
        expected = ranks.tokens(asked)
        for _ in range(3):
            for entry in [*store.index][::3]:
                store.memory[entry.offset + rng.randrange(kv_layout(config).kinds[0].size)] ^= 1 << rng.randrange(8)
            assert ranks.tokens(asked) == expected
            assert ranks.stats.kv_failed_load_tokens > 0
            assert store.stats().wrong_checksums > 0
    store.close()


@pytest.mark.parametrize("family", ["Llama", *FAMILIES])
def test_both_ends_of_a_prefix_meet(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests compute the beginning of what the store brings."""
    write(family, tmp_path)
    config = configured(tmp_path)
    rng, num_met = random.Random(0), 0
    asked = [(rng.choices(range(3, 100), k=length), PARAMS) for length in (230, 200, 170)]

    def count(scheduler: Scheduler) -> None:
        take_met = scheduler.kv_loads.take_met

        def counting() -> list[Request]:
            nonlocal num_met
            num_met += len(met := take_met())
            return met

        scheduler.kv_loads.take_met = counting  # type: ignore[method-assign]

    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(asked, enable_prefix_caching=False)
        ranks.store = LocalStore(config)
        assert ranks.tokens(asked) == expected
        monkeypatch.setattr(TokenBudget, "prompt_seconds", lambda self, start, end: (end - start) / 100)
        monkeypatch.setattr(Rates, "seconds", lambda self, work: 1.0)
        monkeypatch.setattr(kv_load_choice, "_CLEARLY", 10.0)
        for settings in ({}, {"depth": 2}, {"max_num_batched_tokens": 64}):
            assert ranks.tokens(asked, prepare=count, **settings) == expected
            assert ranks.stats.kv_loaded_memory_tokens > 100
        assert num_met >= 3
        ranks.store.close()
