"""The engine-core process: two I/O threads around one loop.

Started by `launch.start_core` as `python -m quire.engine.core.engine_core`, it reads its configuration from standard
input and ends when standard input closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import zmq

from quire.engine import log, process
from quire.engine.config.options import EngineConfig
from quire.engine.core.launch import Endpoints
from quire.engine.core.wave import Wave
from quire.engine.executor import factory
from quire.engine.executor.base import Executor, StepFuture, WorkerError
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.messages import (
    LOST_REPLICAS,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    EngineStats,
    ExpertLoad,
    Join,
    Probe,
    ProbeReply,
    ReplicaFailed,
    SchedulerOutput,
    Shutdown,
    StartWave,
    ToCore,
    ToServer,
)
from quire.engine.scheduler.grammar import Grammar, GrammarError
from quire.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire.engine.core.engine_core")

_STATS_SECONDS = 1.0
_COMPILERS = 8
"""Threads that compile grammars: more than there are processors, so that quick ones do not wait for slow ones."""
_LEAVE_SECONDS = 5.0
"""Longest that a core which is to stop steps on without work, for replicas that share its experts."""
_HEAR_SECONDS = 4.0
"""Longest that a core waits to hear from the others why the replicas have lost touch."""
_SHUTDOWN_GRACE = 10.0
"""Seconds that an orphaned core may take to end by itself, a model half loaded included."""


class RankEnded:
    """To the loop, from the executor's watch."""


@dataclass(frozen=True)
class GrammarCompiled:
    """To the loop, from the thread that compiled a request's grammar; or could not, and this is why."""

    submit: EngineCoreRequest
    grammar: Grammar | str


Inbound = ToCore | GrammarCompiled | RankEnded | Exception


class EngineCoreIO:
    """The sockets of the core, each owned by one thread; the loop sees two queues."""

    def __init__(self, endpoints: Endpoints, replica: int = 0) -> None:
        self.peers = tuple(number for number in range(len(endpoints.requests)) if number != replica)
        """The other replicas, whose cores may be written to."""
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self._endpoints = endpoints
        self._outbox: SimpleQueue[tuple[str, ToServer | StartWave | ReplicaFailed] | None] = SimpleQueue()
        """Addresses, and what is for them."""
        self._context = zmq.Context()
        self.num_clients = len(endpoints.responses)
        threading.Thread(target=self._receive, args=(endpoints.requests[replica],), daemon=True, name="wire-in").start()
        self._sender = threading.Thread(target=self._send, name="wire-out")
        self._sender.start()

    def send(self, client: int, message: ToServer) -> None:
        self._outbox.put((self._endpoints.responses[client], message))

    def send_peers(self, message: StartWave | ReplicaFailed) -> None:
        """To the cores of all other replicas."""
        for replica in self.peers:
            self._outbox.put((self._endpoints.requests[replica], message))

    def broadcast(self, message: ToServer) -> None:
        for client in range(self.num_clients):
            self.send(client, message)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._outbox.put(None)
        self._sender.join()

    def _receive(self, address: str) -> None:
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            return self.inbox.put(ConfigError(f"requests cannot be taken at {address}: {error.strerror}"))
        decode = msgspec.msgpack.Decoder(ToCore).decode
        while True:
            try:
                self.inbox.put(decode(socket.recv()))
            except msgspec.DecodeError as error:
                self.inbox.put(error)

    def _send(self) -> None:
        sockets: dict[str, zmq.Socket[bytes]] = {}
        encode = msgspec.msgpack.Encoder().encode
        while (entry := self._outbox.get()) is not None:
            address, message = entry
            if (socket := sockets.get(address)) is None:
                socket = sockets[address] = self._context.socket(zmq.PUSH)
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 2000)
                socket.connect(address)
            socket.send(encode(message))
        for socket in sockets.values():
            socket.close()


class EngineCore:
    """The loop of one replica: requests in, plans to the workers, outputs out."""

    def __init__(
        self, config: EngineConfig, executor: Executor, wire: EngineCoreIO, ready: EngineReady | None = None
    ) -> None:
        self.replica = config.parallel.replica
        self.ready = ready or EngineReady({}, self.replica)
        self.scheduler = Scheduler(config)
        self.ready.stats = self.snapshot()
        self.executor = executor
        self.wire = wire
        self.depth = config.scheduler.depth
        self.in_flight: deque[tuple[SchedulerOutput, StepFuture, float]] = deque()
        """Plans in their order, and when they were handed out (`time.perf_counter`)."""
        self.result_taken = 0.0
        self.outputs: dict[int, EngineCoreOutputs] = {}
        """Outputs of this turn, by API process."""
        self.stats_sent = time.monotonic()
        self.expert_load: ExpertLoad | None = None
        """The newest, until it is sent with the stats."""
        self.probes: list[Probe] = []
        self.compiling: dict[str, EngineCoreRequest] = {}
        """Requests whose grammar is not there yet; they join the scheduler with it."""
        self._compilers = ThreadPoolExecutor(_COMPILERS, "compile")
        self.wave = Wave(self.depth) if config.parallel.is_coupled else None
        """None: this replica steps by itself."""
        self.stopping = False
        self.leave_at = 0.0

    def run(self) -> None:
        """Serve until `Shutdown`; raises `WorkerError` when a rank fails."""
        while not (self.stopping and self.may_leave):
            self.receive()
            plan = self.schedule()
            if plan is not None:
                begun = time.perf_counter()
                self.in_flight.append((plan, self.executor.submit(plan), begun))
            if self.in_flight and (len(self.in_flight) == self.depth or plan is None):
                self.take_result()
                self.answer_probes()
            self.send()

    def take_result(self) -> None:
        """The oldest plan's. Its step took the time since it was handed out, or since the one before it ended."""
        is_full = len(self.in_flight) == self.depth
        plan, pending, begun = self.in_flight.popleft()
        result = pending.result()
        self.expert_load = result.expert_load or self.expert_load
        now = time.perf_counter()
        # A pipeline that fills or drains shows no stage's time.
        shows = (is_full or self.scheduler.stages == 1) and not result.failure
        self.scheduler.token_budget.learn(plan, now - max(begun, self.result_taken) if shows else None)
        self.result_taken = now
        if self.wave is not None:
            self.wave.take(is_active=result.is_wave_active)
        self.deliver(self.scheduler.update(plan, result))

    def schedule(self) -> SchedulerOutput | None:
        """The next plan; with nothing to run, a sign of life if somebody asks for one."""
        if self.wave is not None:
            return self.schedule_together(self.wave)
        plan = self.scheduler.schedule()
        if plan is None and self.probes and not self.in_flight:
            plan = self.scheduler.heartbeat()
        return plan

    def schedule_together(self, wave: Wave) -> SchedulerOutput | None:
        """The next plan of the wave, without rows if there is nothing to run; None while none is under way."""
        has_work = self.scheduler.has_requests and not self.stopping
        if wave.begin(has_work=has_work or bool(self.probes)):
            self.wire.send_peers(StartWave(wave.number))
        if not wave.goes_on:
            return None
        wave.hand_out()
        plan = (self.scheduler.schedule() if has_work else None) or self.scheduler.heartbeat()
        plan.has_work = has_work
        return plan

    @property
    def may_leave(self) -> bool:
        """Whether nobody waits for this replica's steps; or has waited too long for the others' end."""
        return self.wave is None or self.wave.is_asleep or time.monotonic() > self.leave_at

    def receive(self) -> None:
        """Take in all that has arrived; with nothing to do, wait for something."""
        idle = not (self.in_flight or self.scheduler.has_requests or self.probes)
        if self.wave is not None:
            idle = idle and self.wave.is_asleep
        with contextlib.suppress(Empty):
            while not self.stopping or self.wave is not None:
                self.handle(self.wire.inbox.get(block=idle))
                idle = False

    def handle(self, message: Inbound) -> None:
        match message:
            case EngineCoreRequest() if message.params.structured_outputs is not None:
                self.compile(message)
            case EngineCoreRequest():
                self.add(message)
            case GrammarCompiled(submit=submit):
                if self.compiling.get(submit.request_id) is submit:
                    del self.compiling[submit.request_id]
                    self.add(submit, message.grammar)
            case AbortRequests():
                self.abort(message.request_ids)
            case Join():
                self.abort([submit.request_id for submit in self.submits() if submit.client == message.client])
                self.outputs.pop(message.client, None)  # nobody is there any more to hear it
                self.wire.send(message.client, msgspec.structs.replace(self.ready, stats=self.snapshot()))
            case Probe():
                self.probes.append(message)
            case StartWave(wave=number):
                assert self.wave is not None
                self.wave.wake(number)
            case ReplicaFailed():
                self.wire.inbox.put(message)  # for `first_cause`
                raise WorkerError(LOST_REPLICAS)
            case Shutdown():
                self.stopping = True
                self.leave_at = time.monotonic() + _LEAVE_SECONDS
            case RankEnded():
                self.executor.check()
            case Exception():
                raise message  # somebody waits for an answer to what could not be read

    def add(self, submit: EngineCoreRequest, grammar: Grammar | str | None = None) -> None:
        """Hand a request to the scheduler; a grammar that could not be compiled ends it."""
        if isinstance(grammar, str):
            refusal: EngineCoreOutput | None = EngineCoreOutput(
                submit.request_id, [], finish_reason="error", error=grammar
            )
        else:
            refusal = self.scheduler.add(submit, grammar)
        if refusal is not None:
            self.tell(submit.client, refusal)

    def compile(self, submit: EngineCoreRequest) -> None:
        """Have a request's grammar compiled in a thread, while the others go on."""
        outputs, grammars, inbox = submit.params.structured_outputs, self.scheduler.grammars, self.wire.inbox
        assert outputs is not None
        if submit.request_id in self.compiling:
            return self.add(submit, f"request id {submit.request_id!r} is in use")
        self.compiling[submit.request_id] = submit

        def work() -> None:
            try:
                inbox.put(GrammarCompiled(submit, grammars.compile(outputs)))
            except GrammarError as error:
                inbox.put(GrammarCompiled(submit, f"structured output: {error}"))
            except BaseException as error:  # the client waits for an answer
                inbox.put(GrammarCompiled(submit, f"structured output: {type(error).__name__}: {error}"))

        self._compilers.submit(work)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests, those that wait for their grammar included; unknown ids are ignored."""
        for request_id in request_ids:
            if (submit := self.compiling.pop(request_id, None)) is not None:
                self.tell(submit.client, EngineCoreOutput(request_id, [], finish_reason="abort"))
            ended = self.scheduler.abort(request_id)
            if ended is not None:
                self.tell(ended[0].client, ended[1])

    def submits(self) -> list[EngineCoreRequest]:
        """Every request that has had no terminal message yet."""
        return [*(request.submit for request in self.scheduler.requests.values()), *self.compiling.values()]

    def tell(self, client: int, output: EngineCoreOutput) -> None:
        self.outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)

    def deliver(self, news: dict[int, EngineCoreOutputs]) -> None:
        """The outputs of a step, beside what this turn has told already."""
        for client, outputs in news.items():
            if (earlier := self.outputs.get(client)) is not None:
                outputs.outputs = earlier.outputs + outputs.outputs
            self.outputs[client] = outputs

    def answer_probes(self) -> None:
        for probe in self.probes:
            self.wire.send(probe.client, ProbeReply(probe.probe_id, self.replica))
        self.probes.clear()

    def send(self) -> None:
        """One message for each API process that has outputs, however many requests they are of.

        Every `_STATS_SECONDS` of work all get the stats, outputs or not.
        """
        now = time.monotonic()
        if now - self.stats_sent >= _STATS_SECONDS:
            self.stats_sent = now
            for client in range(self.wire.num_clients):
                self.outputs.setdefault(client, EngineCoreOutputs()).expert_load = self.expert_load
            self.expert_load = None
        if self.outputs:
            stats = self.snapshot()
            for client, outputs in self.outputs.items():
                outputs.stats, outputs.replica = stats, self.replica
                self.wire.send(client, outputs)
            self.outputs = {}

    def snapshot(self) -> EngineStats:
        """The scheduler's numbers, which it changes no more."""
        return msgspec.structs.replace(self.scheduler.snapshot())

    def end(self, reason: str) -> None:
        """Give every request its terminal message."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for submit in self.submits():
            self.tell(submit.client, EngineCoreOutput(submit.request_id, [], finish_reason="error", error=reason))
        self.send()


def serve(config: EngineConfig, endpoints: Endpoints, log_level: str) -> int:
    """Run the core; returns the exit code. Whatever goes wrong reaches every API process as `EngineDead`."""
    age, started = process.age(), time.perf_counter()
    replica = config.parallel.replica
    wire = EngineCoreIO(endpoints, replica)
    threading.Thread(target=_watch_stdin, args=(wire,), daemon=True, name="stdin-watch").start()
    executor: Executor | None = None
    core: EngineCore | None = None
    problem: str | None = None
    try:
        executor = factory.start(config, log_level, on_end=lambda: wire.inbox.put(RankEnded()))
        seconds = {"start engine": age, **executor.seconds}
        core = EngineCore(executor.config, executor, wire, EngineReady(seconds, replica))
        gc.collect()
        gc.freeze()
        seconds["engine in all"] = time.perf_counter() - started + age
        wire.broadcast(core.ready)
        core.run()
    except (ConfigError, WorkerError) as error:
        problem = str(error)
    except Exception as error:
        logger.error("engine core failed:\n%s", traceback.format_exc())
        problem = f"engine core failed: {type(error).__name__}: {error}"
    if problem is not None and config.parallel.is_coupled:
        problem = first_cause(problem, wire, replica)
    if core is not None and (problem is None or config.parallel.replicas == 1):
        core.end(problem or "the engine was shut down")  # else `EngineDead` alone: what runs here may go on at another
    if problem is not None:
        wire.broadcast(EngineDead(problem, replica))
    wire.close()
    if executor is not None:
        executor.close(problem or "")
    return 0 if problem is None else 1


def first_cause(problem: str, wire: EngineCoreIO, replica: int) -> str | None:
    """What has ended the replicas that share experts, as all are told; None if they are being shut down.

    The one with the cause says it to the others, which have only lost touch. Whoever says nothing has it.
    """
    wire.send_peers(ReplicaFailed(replica, problem))
    if LOST_REPLICAS not in problem:
        return f"replica {replica}: {problem}"
    silent, deadline = set(wire.peers), time.monotonic() + _HEAR_SECONDS
    while silent and (seconds := deadline - time.monotonic()) > 0:
        with contextlib.suppress(Empty):
            match wire.inbox.get(timeout=seconds):
                case ReplicaFailed(replica=other, reason=reason):
                    if LOST_REPLICAS not in reason:
                        return f"replica {other}: {reason}"
                    silent.discard(other)
                case Shutdown():
                    return None
    if not silent:
        return f"replica {replica}: {problem}"
    return f"replica{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))} ended or hung: {problem}"


def _watch_stdin(wire: EngineCoreIO) -> None:
    """Standard input closes when the starting process ends, however it ends."""
    while os.read(0, 4096):
        pass
    wire.inbox.put(WorkerError("the server process has ended"))
    time.sleep(_SHUTDOWN_GRACE)
    os._exit(1)


def main() -> None:
    # The terminal's Ctrl-C is for the API process, which then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.share_cores()
    config, endpoints, log_level = pickle.load(sys.stdin.buffer)
    replica = config.parallel.replica if config.parallel.replicas > 1 else None
    process.set_name("quire-core" if replica is None else f"quire-core-{replica}")
    log.setup(log_level, "core" if replica is None else f"core {replica}")
    sys.exit(serve(config, endpoints, log_level))


if __name__ == "__main__":
    main()
