"""Real ranks, driven by the real core in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self

import msgspec
import torch

from quire.engine.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.core.engine_core import EngineCore, EngineCoreIO, Inbound
from quire.engine.executor import factory
from quire.engine.executor.base import Executor
from quire.engine.kv_store.store import KVStore
from quire.engine.protocol.adapters import AdapterPlan, AdapterRef
from quire.engine.protocol.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Probe,
    ProbeReply,
    ToServer,
)
from quire.engine.protocol.kv_store import FromStore, OpenKVStore, ToStore
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import Shutdown
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.scheduler.speculation import SpeculationManager
from tests.fakes.outputs import each


class CountingWire(EngineCoreIO):
    """Takes outputs in. Once every request has ended, it makes the core tell the workers, and stops it."""

    def __init__(self, submits: list[EngineCoreRequest]) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.num_clients, self.has_store = 1, False
        self.outputs: dict[str, list[EngineCoreOutput]] = {submit.request_id: [] for submit in submits}
        self._open = len(submits)
        for submit in submits:
            self.inbox.put(submit)

    def on_output(self, output: EngineCoreOutput) -> None:
        """Called for each output."""

    def send(self, client: int, message: ToServer) -> None:
        match message:
            case ProbeReply(call_id):  # the first may be the answer of a plan made before the last request ended
                self.inbox.put(Shutdown() if call_id else Probe(0, 1))
            case EngineCoreOutputs():
                for output in each(message):
                    self.outputs[output.request_id].append(output)
                    self._open -= output.finish_reason is not None or output.is_handed_over
                    self.on_output(output)
                if not self._open:
                    self.inbox.put(Probe(0, 0))


class LocalStore(KVStore):
    """Of cores in threads."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_store is not None
        self.inboxes: dict[bytes, SimpleQueue[Inbound]] = {}
        self._lock = threading.Lock()
        super().__init__(kv_layout(config).kinds, config.kv_store.memory_bytes, self._reply)

    def exchange(self, client: bytes, message: ToStore) -> None:
        """Handle a message of a core, and check the books."""
        with self._lock:
            self.handle(client, message)
            self.check_integrity()

    def _reply(self, client: bytes, message: FromStore) -> None:
        self.inboxes[client].put(message)


class StoreWire(CountingWire):
    """Has a KV store in the same process. Requests arrive when it is open, and the core is stopped when it has nothing
    to store any more."""

    core: EngineCore

    def __init__(self, submits: list[EngineCoreRequest], store: LocalStore, replica: int = 0) -> None:
        super().__init__(submits)
        self.has_store, self._store, self._submits, self.inbox = True, store, submits, SimpleQueue()
        self._num_opened, self._replica = 0, replica
        store.inboxes[b"%d" % replica] = self.inbox

    def send_store(self, message: ToStore) -> None:
        if isinstance(message, OpenKVStore):
            message.replica = self._replica
        self._store.exchange(b"%d" % self._replica, message)
        if isinstance(message, OpenKVStore):
            self._num_opened += 1
            for submit in self._submits if self._num_opened == 2 else ():  # the first time, the arena is new
                self.inbox.put(submit)

    def send(self, client: int, message: ToServer) -> None:
        if isinstance(message, ProbeReply) and message.call_id and self.core.scheduler.kv_transfers.is_busy:
            self.inbox.put(Probe(0, 1))
        else:
            super().send(client, message)


class PrefillWire(StoreWire):
    """Has prompts computed: their requests continue at another replica."""

    def __init__(self, submits: list[EngineCoreRequest], store: LocalStore, decode: StoreWire) -> None:
        super().__init__([msgspec.structs.replace(each, hands_over=True) for each in submits], store, 1)
        self._decode, self._all = decode, {each.request_id: each for each in submits}

    def on_output(self, output: EngineCoreOutput) -> None:
        assert output.is_handed_over
        submit = msgspec.structs.replace(self._all[output.request_id], output_token_ids=output.token_ids)
        self._decode.inbox.put(submit)


class CheckedCore(EngineCore):
    """Checks the books after every step."""

    def send(self) -> None:
        self.scheduler.check_integrity()
        super().send()


class Ranks:
    """Workers that are loaded once, and serve under any scheduler settings afterwards."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None, store: LocalStore | None = None) -> None:
        """`store` is used by all runs, if `config.kv_store` is set."""
        self.config, self.store = config, store
        self._num_runs = 0
        self.executor = executor or factory.start(config, "warning", on_end=lambda: None)
        torch.set_num_threads(1)  # for a rank in this process: its matrices are too small to be shared
        self.stats = EngineStats()
        """The stats of the last `run`."""
        self.scheduler: Scheduler | None = None
        """The scheduler of the last `run`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.close()

    def run(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        *,
        reported: list[list[int]] | None = None,
        second_segments: list[int] | None = None,
        media: list[list[MediaItem]] | None = None,
        adapters: list[AdapterRef | None] | None = None,
        num_blocks: int | None = None,
        speculation: SpeculationManager | None = None,
        prepare: Callable[[Scheduler], None] = lambda scheduler: None,
        **settings: Any,
    ) -> list[list[EngineCoreOutput]]:
        """Serve the requests all at once; `settings` are of `SchedulerConfig` and `CacheConfig`.

        `reported` is earlier output of each from another replica; the second text of each pair starts at
        `second_segments`; `media` are the images and videos of each, `adapters` their adapters. `speculation`
        makes the drafts. `prepare` is called before they run.
        """
        config = self.configured(num_blocks, **settings)
        blocks = config.cache.num_blocks
        submits = [
            EngineCoreRequest(
                0,
                str(i),
                prompt,
                params,
                output_token_ids=reported[i] if reported else [],
                second_segment=second_segments[i] if second_segments else 0,
                media=media[i] if media else [],
                adapter=adapters[i] if adapters else None,
            )
            for i, (prompt, params) in enumerate(requests)
        ]
        wire = CountingWire(submits) if self.store is None else StoreWire(submits, self.store)
        core = self.core(config, wire)
        core.scheduler.speculation = speculation or core.scheduler.speculation
        self.scheduler = core.scheduler
        prepare(core.scheduler)
        core.run()
        self.stats = core.scheduler.snapshot()
        if adapters and config.lora is not None:  # the next core knows of none
            plan, digests = core.scheduler.heartbeat(), {each.digest for each in adapters if each is not None}
            plan.adapters = AdapterPlan(dropped=[*digests], freed=[*range(config.lora.num_slots)])
            self.executor.submit(plan, 60.0).result()
        assert not core.scheduler.requests
        assert (
            core.scheduler.kv.num_free_blocks == blocks // config.cache.blocks_per_page * config.cache.blocks_per_page
        )
        for outputs in wire.outputs.values():
            assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
        return list(wire.outputs.values())

    def configured(self, num_blocks: int | None = None, **settings: Any) -> EngineConfig:
        """Return the configuration with these settings, see `run`."""
        scheduler = {k: v for k, v in settings.items() if k in SchedulerConfig.__dataclass_fields__}
        cache = {k: v for k, v in settings.items() if k in CacheConfig.__dataclass_fields__}
        assert scheduler.keys() | cache.keys() == settings.keys()
        if "max_num_batched_tokens" in scheduler:
            scheduler.setdefault("dynamic_chunking", False)  # as if the user had given a number
        blocks = num_blocks or self.config.cache.num_blocks
        assert blocks <= self.config.cache.num_blocks
        return replace(
            self.config,
            scheduler=replace(self.config.scheduler, **scheduler),
            cache=replace(self.config.cache, num_blocks=blocks, **cache),
        )

    def core(self, config: EngineConfig, wire: CountingWire) -> CheckedCore:
        """Return a core for these ranks."""
        self.executor.on_report = wire.inbox.put
        self._num_runs += 1
        core = CheckedCore(config, self.executor, wire, incarnation=self._num_runs)
        if isinstance(wire, StoreWire):
            wire.core = core
        return core

    def continued(
        self,
        prefill: Ranks,
        requests: list[tuple[list[int], SamplingParams]],
        *,
        is_expected: bool = True,
        **settings: Any,
    ) -> list[list[EngineCoreOutput]]:
        """Let other ranks compute the prompts, with `settings` (see `run`), and these ranks continue; returns the
        outputs of both. `is_expected`: these ranks load what the others store meanwhile."""
        assert self.store is not None
        submits = [EngineCoreRequest(0, str(i), prompt, params) for i, (prompt, params) in enumerate(requests)]
        wire = StoreWire(submits, self.store)
        first = PrefillWire(submits, self.store, wire)
        wire._submits = [msgspec.structs.replace(each, is_expected=True) for each in submits if is_expected]
        cores = self.core(self.config, wire), prefill.core(prefill.configured(**settings), first)
        with ThreadPoolExecutor(2) as pool:
            for ended in [pool.submit(core.run) for core in cores]:
                ended.result(60.0)
        for core in cores:
            assert not core.scheduler.requests
            assert not core.scheduler.expected
        self.stats, prefill.stats = (core.scheduler.snapshot() for core in cores)
        return [first.outputs[each.request_id] + wire.outputs[each.request_id] for each in submits]

    def tokens(self, requests: list[tuple[list[int], SamplingParams]], **settings: Any) -> list[list[int]]:
        """The same, but only the tokens of the outputs."""
        return [[t for output in outputs for t in output.token_ids] for outputs in self.run(requests, **settings)]
