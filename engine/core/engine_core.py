"""The engine-core process: one busy loop and two I/O threads.

`launch.start_core` starts it, under a supervisor (`quire.engine.process.supervisor`): it exits when the supervisor
does."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

import msgspec
import zmq

from quire.engine.cluster.network import own_address
from quire.engine.cluster.security import Dropped, Security, join, split
from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.heartbeats import Heartbeats
from quire.engine.core.kv_event_publisher import KVEventPublisher
from quire.engine.core.launch import CoreArgs, Endpoints
from quire.engine.core.media_files import keep_open, raise_limit
from quire.engine.core.profiler import CoreProfiler
from quire.engine.core.request_list import list_requests
from quire.engine.core.wave import Wave
from quire.engine.executor import factory
from quire.engine.executor.base import Executor, StepFuture, WorkerError, step_timeout
from quire.engine.executor.local_ranks import ranks_text
from quire.engine.process import current_process, log
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import HEARTBEAT_SECONDS, SupervisorConnection
from quire.engine.protocol.adapters import AdapterPrepared
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Join,
    KVStoreState,
    ListRequests,
    PinAdapters,
    PrefixCacheReset,
    PrepareAdapter,
    PreparedAdapter,
    Probe,
    ProbeReply,
    ReplicaFailed,
    RequestList,
    ResetPrefixCache,
    StartWave,
    ToCore,
    ToServer,
)
from quire.engine.protocol.errors import UNDECODABLE, ConfigError
from quire.engine.protocol.kv_events import FollowKVEvents, GetKVEvents, KVEventsState
from quire.engine.protocol.kv_store import (
    FoundKV,
    FromStore,
    GrantedKV,
    KVCleared,
    KVCopied,
    KVStoreOpened,
    KVStoreStats,
    KVTiersChanged,
    LoadedKV,
    ToStore,
)
from quire.engine.protocol.profile import ClockPing, ClockReply, StartProfile, StopProfile
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.runner_output import LOST_REPLICAS
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import EngineStats, ExpertLoad
from quire.engine.protocol.supervision import Failed, Ready, Reload, SetLogLevel, Shutdown
from quire.engine.scheduler.grammar import GrammarError
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.scheduler.structured_output import StartedGrammar, reject

logger = logging.getLogger("quire.engine.core.engine_core")

_STATS_SECONDS = 1.0
_LOST_MEDIA = "the processed images of the request have been deleted, as their process has ended; send it again"
_UNREADABLE = "the processed images of the request cannot be read now"
_STORE_OUT = "inproc://kv-store-out"
"""Where messages for the KV store pass from the sending thread to the one that has the store's socket."""
_COPY_WAIT = 0.01
"""Seconds for which the loop waits for a message while nothing can run until copies of KV have ended."""
_COMPILE_THREADS = 8
"""Threads that compile grammars: more than there are processors, so that fast grammars do not wait for slow ones."""
_COMPILE_STACK = 2**26
"""Bytes of their stacks. Compiling is recursive. A grammar that overflows the stack ends the process that checks it,
whose stack has 8 MiB, and must not end this one."""
_STOP_TIMEOUT = 5.0
"""Seconds for which a stopping core keeps stepping without work, for the replicas that share its experts."""
_STORE_TIMEOUT = 1.0
"""Seconds for which a stopping core keeps copying to the KV store what has been computed."""
_CAUSE_TIMEOUT = 4.0
"""Seconds for which a core waits for the other cores to report why the replicas lost their connection."""
_SHUTDOWN_GRACE = 10.0
"""Seconds after which an orphaned core is killed if it has not exited, even if it is still loading the model."""
_STEP_MARGIN = 15.0
"""Seconds within which an executor reports a step that hangs, with its cause."""
_USUAL_MARGIN = 0.25
_USUALLY_SLOWER = 3.0
"""Steps in flight usually take at most this many times the predicted durations, and `_USUAL_MARGIN` seconds."""
_MIN_UNPREDICTED = 1.0
"""Least predicted duration of a step that the step-time model cannot predict, in seconds."""
_LONGEST_HALF_LIFE = 60.0
"""Seconds after which the longest step counts for half."""


class RankEnded:
    """Sent to the loop by the executor: a rank has exited."""


@dataclass(frozen=True)
class GrammarCompiled:
    """Sent to the loop by the thread that compiled a request's grammar: the grammar, or the error that ends it."""

    request: EngineCoreRequest
    grammar: StartedGrammar | EngineCoreOutput


Inbound = ToCore | FromStore | RankReport | GrammarCompiled | RankEnded | SetLogLevel | Reload | Shutdown | Exception


class EngineCoreIO:
    """The sockets of the core, each owned by one thread; the loop uses two queues."""

    def __init__(
        self, endpoints: Endpoints, replica: int = 0, token: str = "", incarnation: int = 0, *, has_store: bool = False
    ) -> None:
        """`token` is the cluster's. `has_store`: the host's KV store is used, if it has one."""
        self.peers = tuple(number for number in endpoints.requests if number != replica)
        """The numbers of the other replicas."""
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self._endpoints = endpoints
        self._outbox: SimpleQueue[tuple[str, ToServer | ToStore | StartWave | ReplicaFailed] | None] = SimpleQueue()
        """(address, message) pairs to send."""
        self._context = zmq.Context()
        self._security = Security(self._context, token)
        self.num_clients = len(endpoints.responses)
        self._replica, self._incarnation = replica, incarnation
        threading.Thread(target=self._receive, args=(endpoints.requests[replica],), daemon=True, name="wire-in").start()
        self._sender = threading.Thread(target=self._send, name="wire-out")
        self.has_store = has_store and bool(endpoints.kv_store)
        if self.has_store:
            outgoing, name = self._context.socket(zmq.PULL), f"{replica}.{incarnation}"
            outgoing.set_hwm(0)
            outgoing.bind(_STORE_OUT)
            arguments = endpoints.kv_store, name.encode(), outgoing
            threading.Thread(target=self._exchange, args=arguments, daemon=True, name="wire-store").start()
        self._sender.start()

    def send(self, client: int, message: ToServer) -> None:
        self._outbox.put((self._endpoints.responses[client], message))

    def send_peers(self, message: StartWave | ReplicaFailed) -> None:
        """Send a message to the cores of all other replicas."""
        for replica in self.peers:
            self._outbox.put((self._endpoints.requests[replica], message))

    def send_store(self, message: ToStore) -> None:
        """Send a message to the KV store; it is dropped if there is no connection."""
        self._outbox.put((_STORE_OUT, message))

    def close(self) -> None:
        """Send all queued messages, then stop."""
        self._outbox.put(None)
        self._sender.join()

    def _receive(self, address: str) -> None:
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        try:
            self._security.bind(socket, address)
        except zmq.ZMQError as error:
            return self.inbox.put(ConfigError(f"cannot bind {address} to receive requests: {error.strerror}"))
        decode = msgspec.msgpack.Decoder(ToCore).decode
        dropped = Dropped("dropped a message to this core that could not be decoded")
        while True:
            try:
                message = decode(join(socket.recv_multipart()))
                if isinstance(message, ClockPing):  # not a matter of the loop, which may be in a step
                    reply = ClockReply(message.call_id, self._replica, message.incarnation, time.time_ns())
                    self.send(message.client, reply)
                else:
                    self.inbox.put(message)
            except UNDECODABLE as error:
                dropped.add(error)

    def _exchange(self, address: str, name: bytes, outgoing: zmq.Socket[bytes]) -> None:
        """Exchange messages with the KV store. A store that was started again gets none that was meant for another."""
        store = self._context.socket(zmq.DEALER)
        store.set_hwm(0)
        store.setsockopt(zmq.IDENTITY, name)
        store.setsockopt(zmq.IMMEDIATE, 1)
        store.setsockopt(zmq.LINGER, 0)
        store.connect(address)
        poller, decode = zmq.Poller(), msgspec.msgpack.Decoder(FromStore).decode
        for socket in (outgoing, store):
            poller.register(socket, zmq.POLLIN)
        dropped = Dropped("dropped a message of the KV store that could not be decoded")
        while True:
            for socket, _ in poller.poll():
                frames = socket.recv_multipart()
                if socket is outgoing:
                    with contextlib.suppress(zmq.Again):
                        store.send_multipart([join(frames)], zmq.NOBLOCK)
                    continue
                try:
                    message = decode(join(frames))
                    if isinstance(message, KVStoreStats):  # the loop may be in a long step
                        for client in range(self.num_clients):
                            self.send(client, KVStoreState(message, self._replica, self._incarnation))
                    self.inbox.put(message)
                except UNDECODABLE as error:
                    dropped.add(error)

    def _send(self) -> None:
        sockets: dict[str, zmq.Socket[bytes]] = {}
        encode = msgspec.msgpack.Encoder().encode
        while (entry := self._outbox.get()) is not None:
            address, message = entry
            if (socket := sockets.get(address)) is None:
                socket = sockets[address] = self._context.socket(zmq.PUSH)
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 2000)
                self._security.connect(socket, address)
            socket.send_multipart(split(encode(message)))
        for socket in sockets.values():
            socket.close()


class EngineCore:
    """The busy loop of one replica: receives requests, sends plans to the workers, returns outputs."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        io: EngineCoreIO,
        *,
        incarnation: int = 0,
        expect: Callable[[float, float], None] = lambda seconds, usually: None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """`expect` is called with the number of seconds within which it will be called again, unless the loop hangs,
        and the number of seconds within which it will usually be called again. `kv_events` publishes the scheduler's.
        """
        self.config = config
        self.replica = config.parallel.replica
        self.incarnation = incarnation
        self.expect = expect
        self.scheduler = Scheduler(config)
        self.executor = executor
        self.io = io
        self.depth = config.scheduler.depth
        self.in_flight: deque[tuple[SchedulerOutput, StepFuture, float, float]] = deque()
        """Plans in order, when they were submitted (`time.perf_counter`), and the seconds that each usually takes."""
        self.last_result_at = 0.0
        self.longest_step = config.parallel.watchdog_seconds / _USUALLY_SLOWER
        """Seconds of the longest recent step; until some have been measured, longer than that."""
        self.outputs: dict[int, EngineCoreOutputs] = {}
        """Outputs to send in this iteration, by API process."""
        self.last_stats_at = time.monotonic()
        self.expert_load: ExpertLoad | None = None
        """The latest value, until it is sent with the stats."""
        self.probes: list[Probe] = []
        self.profiler = CoreProfiler(self.replica, incarnation, io.send)
        self.kv_events = kv_events
        self.compiling: dict[str, EngineCoreRequest] = {}
        """Requests whose grammar is being compiled; they are added to the scheduler with it."""
        """The store's latest stats, until they are sent with the core's."""
        if config.kv_store is not None and io.has_store:
            self.scheduler.kv_transfers.connect(io.send_store, self.replica, incarnation)
        self.clearing: dict[int, ResetPrefixCache] = {}
        """The calls that wait for the KV store, by the number of its call."""
        self.preparing: dict[bytes, list[PrepareAdapter]] = {}
        """The calls for each adapter that wait for the ranks."""
        threading.stack_size(_COMPILE_STACK)  # of all threads started from now on; only used pages take memory
        self._compile_pool = ThreadPoolExecutor(_COMPILE_THREADS, "compile")
        self.wave = Wave(self.depth) if config.parallel.is_coupled else None
        """None: this replica steps independently."""
        self.could_run = True
        """False: when the last plan was to be made, nothing could run, and nothing was in flight."""
        self.stopping = False
        self.stop_reason = ""
        self.stop_deadline = 0.0

    def run(self) -> None:
        """Run until `Shutdown`; raises `WorkerError` when a rank fails."""
        call = self.profiler.call
        while not (self.stopping and self.may_stop):
            call("receive", self.receive)
            plan = call("schedule", self.schedule)
            if plan is not None:
                plan.profile, self.profiler.command = self.profiler.command, None
                predicted = self.scheduler.token_budget.predict(plan)
                limit = step_timeout(plan, self.config, predicted)
                usual = min(limit, self.usual_seconds(plan, predicted))
                in_flight = sum(seconds for *_, seconds in self.in_flight)
                self.expect(limit * self.depth + _STEP_MARGIN, in_flight + usual + _USUAL_MARGIN)
                submitted_at = time.perf_counter()
                self.in_flight.append((plan, call("submit", self.executor.submit, plan, limit), submitted_at, usual))
            if self.in_flight and (len(self.in_flight) == self.depth or plan is None):
                call("wait for result", self.process_result)
                self.answer_probes()
            self.add_outputs(self.scheduler.process_structured(is_idle=not self.in_flight))
            call("send", self.send)

    def usual_seconds(self, plan: SchedulerOutput, predicted: float | None) -> float:
        """Return the seconds that a step usually takes at most; infinite if it may wait for other replicas, or write a
        trace, or encodes images or places adapters at an unknown cost.
        """
        is_unusual = plan.encodes or plan.places_adapters
        if self.wave is not None or plan.profile is not None or (predicted is None and is_unusual):
            return math.inf
        return _USUALLY_SLOWER * (max(_MIN_UNPREDICTED, self.longest_step) if predicted is None else predicted)

    def process_result(self) -> None:
        """Wait for the oldest plan's result and process it.

        The step time is counted from the later of the plan's submission and the previous result.
        """
        is_full = len(self.in_flight) == self.depth
        plan, future, submitted_at, _ = self.in_flight.popleft()
        result = future.result()
        self.expert_load = result.expert_load or self.expert_load
        now = time.perf_counter()
        # While a pipeline fills or drains, the time between results is not the time of a stage.
        is_representative = (is_full or self.scheduler.stages == 1) and not result.failure and not result.has_captured
        seconds = now - max(submitted_at, self.last_result_at)
        self.scheduler.token_budget.learn(plan, seconds if is_representative else None)
        faded = self.longest_step * 0.5 ** ((now - (self.last_result_at or now)) / _LONGEST_HALF_LIFE)
        self.longest_step = max(seconds, faded)
        self.last_result_at = now
        if plan.profile is not None:
            self.profiler.on_result(plan.profile)
        if self.wave is not None:
            self.wave.on_result(is_active=result.is_wave_active)
        self.add_outputs(self.profiler.call("update", self.scheduler.update, plan, result))

    def schedule(self) -> SchedulerOutput | None:
        """Return the next plan; with nothing to run, a heartbeat if there is an unanswered call."""
        if self.wave is not None:
            return self.schedule_wave(self.wave)
        if self.stopping:  # nobody waits for rows, but ranks copy what is to be stored
            self.scheduler.kv_transfers.poll()
            plan = self.scheduler.heartbeat() if self.scheduler.kv_transfers.has_changes else None
        else:
            plan = self.scheduler.schedule()
        if plan is None and self.has_calls and not self.in_flight:
            plan = self.scheduler.heartbeat()
        self.could_run = plan is not None or bool(self.in_flight)
        return plan

    def schedule_wave(self, wave: Wave) -> SchedulerOutput | None:
        """Return the next plan of the wave, without rows if there is nothing to run; None if no wave is running."""
        self.scheduler.kv_transfers.poll()  # a wave may go on without work of this replica
        has_work = self.scheduler.has_work and not self.stopping
        if wave.start(has_work=has_work or self.has_calls):
            self.io.send_peers(StartWave(wave.number))
        if not wave.is_running:
            return None
        wave.on_submit()
        plan = (self.scheduler.schedule() if has_work else None) or self.scheduler.heartbeat()
        plan.has_work = has_work
        return plan

    @property
    def has_calls(self) -> bool:
        """Whether somebody waits for a step of all ranks, even without rows."""
        return bool(self.probes) or self.profiler.command is not None

    @property
    def may_stop(self) -> bool:
        """Whether no other replica needs this one's steps, and the KV store has what it is to get; or the deadline for
        that has passed."""
        transfers = self.scheduler.kv_transfers
        is_done = not (transfers.is_open and transfers.is_storing) if self.wave is None else self.wave.is_idle
        return is_done or time.monotonic() > self.stop_deadline

    def check_copies(self) -> None:
        """Raise `WorkerError` if ranks have stopped copying KV, whose blocks would be missing forever."""
        seconds = self.config.parallel.watchdog_seconds
        if silent := self.scheduler.kv_transfers.hung_ranks(seconds):
            raise WorkerError(f"{ranks_text(silent)} did not copy KV for {seconds:g} s (--watchdog-seconds)")

    def receive(self) -> None:
        """Handle all received messages; when idle, check the ranks, as no step does, and wait up to a second for one.
        Then end what waits for adapters that take too long to read."""
        transfers, timeout = self.scheduler.kv_transfers, HEARTBEAT_SECONDS
        idle = not (self.in_flight or self.scheduler.has_work or self.has_calls)
        if self.wave is not None:
            idle = idle and self.wave.is_idle
        elif self.stopping:
            idle, timeout = not (self.in_flight or transfers.has_changes), _COPY_WAIT
        elif not (idle or self.could_run or self.has_calls) and transfers.holds_blocks and not transfers.has_changes:
            idle, timeout = True, _COPY_WAIT
        if idle:
            self.executor.check()
            self.expect(self.config.parallel.watchdog_seconds, 2 * HEARTBEAT_SECONDS)
        while not (self.stopping and self.may_stop):
            try:
                limit = min(timeout, transfers.seconds_left()) if idle else None
                self.handle(self.io.inbox.get(block=idle, timeout=limit))
                idle = False
            except Empty:
                for answer in self.scheduler.adapters.overdue():
                    self.on_adapter(answer)
                transfers.poll()
                self.check_copies()
                return

    def handle(self, message: Inbound) -> None:
        match message:
            case EngineCoreRequest(is_expected=True):
                self.scheduler.expect(message)
            case EngineCoreRequest() if message.params.structured_outputs is not None:
                self.compile(message)
            case EngineCoreRequest():
                self.add(message)
            case GrammarCompiled(request=request):
                if self.compiling.get(request.request_id) is request:
                    del self.compiling[request.request_id]
                    self.add(request, message.grammar)
            case AbortRequests():
                self.abort(message.request_ids)
            case Join():
                known = (*self.scheduler.requests.values(), *self.scheduler.expected.values())
                requests = (*(each.core_request for each in known), *self.compiling.values())
                self.abort([request.request_id for request in requests if request.client == message.client])
                self.outputs.pop(message.client, None)  # the process that they were for has ended
                for digest, calls in self.preparing.items():
                    self.preparing[digest] = [call for call in calls if call.client != message.client]
                self.clearing = {at: call for at, call in self.clearing.items() if call.client != message.client}
                self.scheduler.adapters.pin_all(message.client, [])
            case Probe():
                self.probes.append(message)
            case ListRequests(client, call_id):
                listed = list_requests(message, self.scheduler.requests.values(), self.compiling.values())
                self.io.send(client, RequestList(call_id, *listed, self.replica, self.incarnation))
            case PrepareAdapter(adapter=adapter):
                if (outcome := self.scheduler.adapters.prepare(adapter)) is None:
                    self.preparing.setdefault(adapter.digest, []).append(message)
                else:
                    self.answer_prepared(message, *outcome)
            case PinAdapters(client, digests):
                self.scheduler.adapters.pin_all(client, digests)
            case AdapterPrepared():
                self.on_adapter(message)
            case GetKVEvents(client, call_id):
                if self.kv_events is not None:
                    self.publish()
                    self.kv_events.answer(message)
                else:
                    state = KVEventsState(call_id, None, replica=self.replica, incarnation=self.incarnation)
                    self.io.send(client, state)
            case FollowKVEvents():
                if self.kv_events is not None:
                    self.publish()
                    self.kv_events.answer(message)
            case ResetPrefixCache():
                self.reset_prefix_cache(message)
            case KVCleared(number, _, error):
                self.answer_reset(number, error)
            case KVStoreOpened() | FoundKV() | LoadedKV() | GrantedKV() | KVTiersChanged() | KVStoreStats():
                if isinstance(message, KVStoreOpened) and message.path != self.scheduler.kv_transfers.arena:
                    for number in [*self.clearing]:
                        self.answer_reset(number, "the KV store was started again meanwhile")
                self.scheduler.kv_transfers.on_message(message)
            case KVCopied():
                self.scheduler.kv_transfers.on_copied(message)
            case StartProfile() | StopProfile():
                self.profiler.handle(message)
            case StartWave(wave=number):
                assert self.wave is not None
                self.wave.wake(number)
            case ReplicaFailed():
                self.io.inbox.put(message)  # `root_cause` reads it
                raise WorkerError(LOST_REPLICAS)
            case Shutdown(reason):
                self.stopping, self.stop_reason = True, reason
                self.stop_deadline = time.monotonic() + (_STORE_TIMEOUT if self.wave is None else _STOP_TIMEOUT)
            case SetLogLevel(level):
                self.executor.set_log_level(level)
            case Reload():
                self.executor.reload_logs(message)
            case RankEnded():
                self.executor.check()
            case Exception():
                raise message

    def add(self, request: EngineCoreRequest, grammar: StartedGrammar | EngineCoreOutput | None = None) -> None:
        """Add a request to the scheduler. `grammar` is the started grammar, or the error that ends the request."""
        if isinstance(grammar, EngineCoreOutput):
            rejection: EngineCoreOutput | None = grammar
        else:
            try:  # a rank that does not find a file fails, and this request, which has come from there, the next one
                request.media = [*map(keep_open, request.media)]
            except OSError as error:
                reason = _LOST_MEDIA if isinstance(error, FileNotFoundError) else f"{_UNREADABLE}: {error.strerror}"
                rejection = EngineCoreOutput(
                    request.request_id, [], finish_reason="error", error=reason, is_unavailable=True
                )
            else:
                rejection = self.scheduler.add(request, grammar)
        if rejection is not None:
            self.scheduler.expect_no_more(request.request_id)
            self.add_output(request.client, rejection)

    def compile(self, request: EngineCoreRequest) -> None:
        """Compile a request's grammar in a thread; other requests keep running."""
        start_grammar, inbox = self.scheduler.start_grammar, self.io.inbox
        failed = EngineCoreOutput(request.request_id, [], finish_reason="error")
        if request.request_id in self.compiling:
            failed.error = f"request id {request.request_id!r} is in use"
            return self.add(request, failed)
        self.compiling[request.request_id] = request

        def work() -> None:
            try:
                inbox.put(GrammarCompiled(request, start_grammar(request)))
            except GrammarError as error:
                reject(failed, error)
                inbox.put(GrammarCompiled(request, failed))
            except BaseException as error:  # the client waits for an answer
                failed.error = f"structured output: {type(error).__name__}: {error}"
                inbox.put(GrammarCompiled(request, failed))

        self._compile_pool.submit(work)

    def abort(self, request_ids: list[str]) -> None:
        """Abort these requests, including those whose grammar is being compiled, and those that are expected; unknown
        ids are ignored."""
        for request_id in request_ids:
            ended = self.scheduler.abort(request_id)
            if (request := self.compiling.pop(request_id, None)) is not None:
                self.add_output(request.client, EngineCoreOutput(request_id, [], finish_reason="abort"))
            elif ended is not None:
                self.add_output(ended[0].client, ended[1])

    def on_adapter(self, answer: AdapterPrepared) -> None:
        """End the requests with an adapter that a rank cannot use, and answer the calls if all ranks have answered."""
        error, ended = self.scheduler.on_adapter(answer)
        for request, output in ended:
            self.add_output(request.client, output)
        if error is not None:
            for call in self.preparing.pop(answer.digest, ()):
                self.answer_prepared(call, error, answer.is_invalid)

    def reset_prefix_cache(self, call: ResetPrefixCache) -> None:
        """Forget the prefix cache, and let the KV store forget everything, if the call says so."""
        self.scheduler.kv_transfers.reset()
        self.scheduler.kv.unpublish_all()
        for client in range(self.io.num_clients):
            if client != call.client:  # its router has had the cache in its books, too
                self.io.send(client, PrefixCacheReset(-1, "", self.replica, self.incarnation))
        number = time.monotonic_ns()  # of no earlier call
        self.clearing[number] = call
        if not call.clears_store or self.config.kv_store is None:
            self.answer_reset(number)
        elif self.scheduler.kv_transfers.is_open:
            self.scheduler.kv_transfers.clear(number)
        else:
            self.answer_reset(number, "the KV store is not up")

    def answer_reset(self, number: int, error: str = "") -> None:
        if (call := self.clearing.pop(number, None)) is not None:
            self.io.send(call.client, PrefixCacheReset(call.call_id, error, self.replica, self.incarnation))

    def answer_prepared(self, call: PrepareAdapter, error: str, is_invalid: bool) -> None:
        if call.pins and not error:
            error, is_invalid = self.scheduler.adapters.pin(call.adapter.digest)
        self.io.send(call.client, PreparedAdapter(call.call_id, error, is_invalid, self.replica, self.incarnation))

    def add_output(self, client: int, output: EngineCoreOutput) -> None:
        self.outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)

    def add_outputs(self, step_outputs: dict[int, EngineCoreOutputs]) -> None:
        """Append these outputs to this iteration's."""
        for client, outputs in step_outputs.items():
            if (earlier := self.outputs.get(client)) is not None:
                outputs.outputs = earlier.outputs + outputs.outputs
                outputs.request_ids = earlier.request_ids + outputs.request_ids
                outputs.token_ids = earlier.token_ids + outputs.token_ids
            self.outputs[client] = outputs

    def answer_probes(self) -> None:
        for probe in self.probes:
            self.io.send(probe.client, ProbeReply(probe.call_id, self.replica, self.incarnation))
        self.probes.clear()

    def send(self) -> None:
        """Send one message with all new outputs to each API process.

        Every `_STATS_SECONDS`, all API processes get the stats, even without outputs.
        """
        self.publish()
        now = time.monotonic()
        if now - self.last_stats_at >= _STATS_SECONDS:
            self.last_stats_at = now
            rank_stats, warnings = self.executor.rank_stats(), log.RECENT.take()
            for client in range(self.io.num_clients):
                outputs = self.outputs.setdefault(client, EngineCoreOutputs())
                outputs.expert_load, outputs.rank_stats = self.expert_load, rank_stats
                outputs.warnings = warnings
            self.expert_load = None
        if self.outputs:
            stats = self.snapshot()
            for client, outputs in self.outputs.items():
                outputs.stats, outputs.replica, outputs.incarnation = stats, self.replica, self.incarnation
                self.io.send(client, outputs)
            self.outputs = {}

    def publish(self) -> None:
        """Publish the new KV events."""
        listener = self.scheduler.kv.listener
        if self.kv_events is None or listener is None or self.kv_events.is_full:
            return
        events, tier_news = listener.take()
        if events:
            self.kv_events.publish(events)
        if tier_news:
            self.kv_events.publish_tiers(tier_news)

    def snapshot(self) -> EngineStats:
        """Return a copy of the scheduler's stats."""
        stats = self.scheduler.snapshot()
        return msgspec.structs.replace(
            stats,
            iteration_tokens=stats.iteration_tokens.copy(),
            accepted_per_position=stats.accepted_per_position.copy(),
        )

    def close(self) -> None:
        """Compile no more grammars. The API processes end the remaining requests, or move them to other replicas."""
        self._compile_pool.shutdown(wait=False, cancel_futures=True)
        if self.kv_events is not None:
            self.kv_events.close()


def serve(args: CoreArgs, connection: SupervisorConnection, imports: float) -> int:
    """Run the core; returns the exit code. The supervisor is told of any failure. The imports have taken `imports`
    seconds since the start of the process."""
    started = time.perf_counter()
    config = args.config
    io = EngineCoreIO(
        args.endpoints,
        config.parallel.replica,
        config.parallel.cluster_token,
        args.incarnation,
        has_store=config.kv_store is not None,
    )
    threading.Thread(target=_listen, args=(connection, io), daemon=True, name="supervisor").start()

    def on_stall(reason: str) -> None:
        connection.send(Failed(reason))
        os._exit(1)

    def pulse() -> None:
        for client in range(io.num_clients):
            io.send(client, EngineCoreOutputs(replica=config.parallel.replica, incarnation=args.incarnation))

    heartbeats = Heartbeats(connection, on_stall, pulse)
    executor: Executor | None = None
    core: EngineCore | None = None
    failure: Failed | None = None
    try:
        executor = factory.start(config, args.log_level, on_end=lambda: io.inbox.put(RankEnded()))
        kv_events = None
        if config.kv_events is not None:
            number, reached = config.parallel.replica, urlsplit(args.endpoints.requests[config.parallel.replica])
            address = reached.hostname if reached.scheme == "tcp" and reached.hostname else own_address()
            kv_events = KVEventPublisher(
                config.kv_events, number, address, io.send, io.inbox.put, incarnation=args.incarnation
            )
        core = EngineCore(
            *(executor.config, executor, io),
            incarnation=args.incarnation,
            expect=heartbeats.expect,
            kv_events=kv_events,
        )
        executor.on_trace = core.profiler.send_piece
        executor.on_report = io.inbox.put
        gc.collect()
        gc.freeze()
        seconds = {
            "start engine": imports,
            **executor.seconds,
            "engine in all": time.perf_counter() - started + imports,
        }
        connection.send(Ready(seconds, core.snapshot()))
        core.run()
    except ConfigError as error:
        failure = Failed(str(error), user_error=True)
    except WorkerError as error:
        failure = Failed(str(error))
    except Exception as error:
        logger.error("engine core failed:\n%s", traceback.format_exc())
        failure = Failed(f"engine core failed: {type(error).__name__}: {error}")
    heartbeats.expect(_STOP_TIMEOUT + _CAUSE_TIMEOUT + _SHUTDOWN_GRACE)
    if failure is not None and config.parallel.is_coupled:
        cause = root_cause(failure.reason, io, config.parallel.replica)
        failure = None if cause is None else Failed(cause, failure.user_error)
    if failure is not None:
        connection.send(failure)
    if core is not None:
        core.close()
    io.close()
    if executor is not None:
        executor.close(failure.reason if failure is not None else core.stop_reason if core is not None else "")
    return 0 if failure is None else 1


def root_cause(failure: str, io: EngineCoreIO, replica: int) -> str | None:
    """Return why the replicas that share experts failed; None if they are being shut down.

    The replica that failed first reports the cause to the others, which have only lost the connection. If a replica
    does not report, it is the cause.
    """
    io.send_peers(ReplicaFailed(replica, failure))
    if LOST_REPLICAS not in failure:
        return f"replica {replica}: {failure}"
    silent, deadline = set(io.peers), time.monotonic() + _CAUSE_TIMEOUT
    while silent and (seconds := deadline - time.monotonic()) > 0:
        with contextlib.suppress(Empty):
            match io.inbox.get(timeout=seconds):
                case ReplicaFailed(replica=other, reason=reason):
                    if LOST_REPLICAS not in reason:
                        return f"replica {other}: {reason}"
                    silent.discard(other)
                case Shutdown():
                    return None
    if not silent:
        return f"replica {replica}: {failure}"
    return f"replica{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))} ended or hung: {failure}"


def _listen(connection: SupervisorConnection, io: EngineCoreIO) -> None:
    """Pass on the messages of the supervisor; stop the core when it exits."""
    with contextlib.suppress(EOFError):
        while True:
            match connection.receive():
                case Shutdown() as message:
                    io.inbox.put(message)
                case SetLogLevel(level) as message:
                    log.set_level(level)
                    io.inbox.put(message)  # for the ranks
                case Reload(log_config, level) as message:
                    log.reload(log_config, level)
                    io.inbox.put(message)
    io.inbox.put(WorkerError("the server process has ended"))
    time.sleep(_SHUTDOWN_GRACE)
    os._exit(1)


def main() -> None:
    imports, connection = current_process.age(), SupervisorConnection()
    args: CoreArgs
    args, folder = connection.receive_args()
    raise_limit()
    RuntimeFolder(folder)  # this process may outlive the one that made it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    replica = args.config.parallel.replica if args.config.parallel.replicas > 1 else None
    current_process.set_name("quire-core" if replica is None else f"quire-core-{replica}")
    log.setup(args.log_level, "core" if replica is None else f"core {replica}")
    sys.exit(serve(args, connection, imports))
