"""Cores of replicas that share experts, each in a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.engine_core import EngineCore, Inbound
from quire.engine.executor.base import Executor
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Probe,
    ProbeReply,
    ReplicaFailed,
    StartWave,
    ToServer,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import Shutdown
from tests.fakes.outputs import each

WAIT = 60.0


class LinkedWire:
    """The wire of one core among others; every answer goes to one queue."""

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica, self.num_clients, self.has_store = replica, 1, False
        self.peers = tuple(number for number in range(replicas) if number != replica)
        self.wires: list[LinkedWire] = []
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.sent: SimpleQueue[ToServer] = SimpleQueue()
        self.num_wakes = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def send(self, client: int, message: ToServer) -> None:
        self.sent.put(message)

    def send_peers(self, message: StartWave | ReplicaFailed) -> None:
        self.num_wakes += isinstance(message, StartWave)
        for peer in self.peers:
            self.wires[peer].inbox.put(message)

    def answer(self, request_id: str) -> list[int]:
        """Its tokens, once it has ended."""
        while request_id not in self.ended:
            message = self.sent.get(timeout=WAIT)
            for output in each(message) if isinstance(message, EngineCoreOutputs) else ():
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    assert output.finish_reason == "length", output.error
                    self.ended.add(output.request_id)
        return self.tokens[request_id]


@dataclass
class Replicas:
    wires: list[LinkedWire]
    cores: list[EngineCore]

    def submit(
        self, replica: int, request_id: str, prompt: list[int], max_tokens: int, adapter: AdapterRef | None = None
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.wires[replica].inbox.put(EngineCoreRequest(0, request_id, prompt, params, adapter=adapter))

    def probe(self, replica: int) -> None:
        wire = self.wires[replica]
        wire.inbox.put(Probe(0, 5))
        while not isinstance(wire.sent.get(timeout=WAIT), ProbeReply):
            pass


@contextmanager
def serving(
    config: EngineConfig,
    executors: Sequence[Executor],
    on_failure: Callable[[], None] = lambda: None,
    prepare: Callable[[EngineCore], None] = lambda core: None,
) -> Iterator[Replicas]:
    """A core for each executor, which all end by themselves, with nothing under way, once they are to stop. `prepare`
    is called with each before it runs."""
    wires = [LinkedWire(replica, len(executors)) for replica in range(len(executors))]
    cores, failures = [], []
    for replica, (wire, executor) in enumerate(zip(wires, executors, strict=True)):
        wire.wires = wires
        executor.on_report = wire.inbox.put
        parallel = replace(config.parallel, replica=replica)
        cores.append(EngineCore(replace(config, parallel=parallel), executor, wire))  # type: ignore[arg-type]
        prepare(cores[-1])

    def run(core: EngineCore) -> None:
        try:
            core.run()
        except BaseException as error:
            failures.append(error)
            on_failure()

    threads = [threading.Thread(target=run, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    try:
        yield Replicas(wires, cores)
    finally:
        for wire in wires:
            wire.inbox.put(Shutdown())
        for thread in threads:
            thread.join(WAIT)
        assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    for core in cores:
        core.scheduler.check_integrity()
        assert not core.in_flight
