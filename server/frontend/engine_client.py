"""The connection to the engine cores: sends requests, receives outputs, resumes and restarts what died."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq

from quire.engine.config.engine_config import CacheConfig
from quire.engine.core.launch import Endpoints
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    FinishReason,
    Join,
    Probe,
    ProbeReply,
    ToCore,
    ToServer,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.server.frontend.core_connection import CoreConnection
from quire.server.frontend.metrics import Metrics
from quire.server.frontend.output_stream import DEADLINE, EngineUnavailable, OutputStream
from quire.server.frontend.router import Router

PROBE_SECONDS = 30.0
"""Timeout of a probe. A step can take long, especially on a CPU."""
RESTART_SECONDS = (1.0, 60.0)
"""Delay from the death of a replica to its restart: the first delay, and the longest one if it dies repeatedly."""
MAX_RESUMES = 2
"""How many lost replicas a request may survive: it may itself be the cause of their deaths."""
SHUTTING_DOWN = "the server is shutting down"
"""The reason of a regular shutdown."""
NOTIFY_SECONDS = 2.0
"""How long to try to notify the other API processes of a death. A process that starts later asks for the state."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """Too many requests are waiting for the engine."""


@dataclass(slots=True)
class _RunningRequest:
    """A request in the engine, and its times (`time.monotonic`)."""

    stream: OutputStream
    arrived: float
    last_output: float | None = None
    replica: int = 0
    submit: EngineCoreRequest | None = None
    """The original request, if another replica may resume it; the other fields hold the state to resume from."""
    delivered: list[int] = field(default_factory=list)
    num_scored_tokens: int = 0
    """Prompt tokens whose log-probabilities have been delivered."""
    num_repeated: int = 0
    """How many of these the replica that resumed the request will send again."""
    num_cached_tokens: int | None = None
    """The value of the first output, repeated with the output of the replica that resumed the request."""
    num_resumes: int = 0

    @property
    def resume_request(self) -> EngineCoreRequest:
        """Return the request to send to another replica."""
        assert self.submit is not None
        return msgspec.structs.replace(self.submit, output_token_ids=self.delivered)


class EngineClient:
    """An API process's connection to the engine's replicas. All methods run on the event loop that created it.

    `Router` chooses the replica of a request. If that dies, another replica resumes the request after the tokens
    delivered so far: the streams are the same as if nothing had happened. The request fails if no replica is left, or
    if it has lost more than `MAX_RESUMES` of them.

    With `max_queue`, requests are rejected beyond `max_num_seqs` per replica plus `max_queue`. The number of requests
    of other API processes comes from the engine's stats (see `admit`).
    """

    def __init__(
        self,
        endpoints: Endpoints,
        cores: Mapping[int, subprocess.Popen[bytes]] | None,
        metrics: Metrics,
        index: int = 0,
        *,
        replicas: Sequence[int] = (0,),
        max_num_seqs: int = 1,
        max_queue: int | None = None,
        cache: CacheConfig | None = None,
        restart: Callable[[int], subprocess.Popen[bytes]] | None = None,
        are_coupled: bool = False,
    ) -> None:
        """`index` is the number of this API process.

        `cores` maps replicas to the cores that this process watches, stops and, with `restart`, restarts; None: another
        process runs the engine, which is already up. `replicas` are those that may get requests, whether in `cores` or
        not. If they `are_coupled`, the loss of one ends all.
        """
        self.loop = asyncio.get_running_loop()
        self.index = index
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._is_owner = cores is not None
        self._restart = restart
        self._are_coupled = are_coupled
        self._metrics = metrics
        self._running: dict[str, _RunningRequest] = {}
        self._probes: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._probe_ids = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._ready: asyncio.Future[EngineReady] = self.loop.create_future()
        self._failed: asyncio.Future[EngineUnavailable] = self.loop.create_future()
        self._endpoints = endpoints
        self._context = zmq.Context()
        self._responses = self._context.socket(zmq.PULL)
        self._responses.setsockopt(zmq.LINGER, 0)
        self._responses.set_hwm(0)
        self._responses.bind(endpoints.responses[index])
        self._replicas = {
            number: CoreConnection(number, endpoints.requests[number], self._context) for number in replicas
        }
        self._single_replica = replicas[0] if len(replicas) == 1 else None
        """The replica if there is only one: no choice, and no other replica to resume a request."""
        self._router = Router(replicas, cache=cache, max_num_seqs=max_num_seqs, first=index)
        self.loop.add_reader(self._responses.FD, self._receive)
        if cores is None:
            for replica in self._replicas.values():
                replica.send(Join(index))
        for number, core in (cores or {}).items():
            self._replicas[number].core = core
            self._start_task(self._supervise(self._replicas[number]))

    async def ready(self) -> EngineReady:
        """Wait until the model is loaded; raises `EngineUnavailable` with the reason if that fails.

        The process that starts the replicas waits for all of them, and returns what the last one sent.
        """
        await asyncio.wait((self._ready, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()
        return self._ready.result()

    async def failed(self) -> EngineUnavailable:
        """Wait until the engine is gone, and return why."""
        return await asyncio.shield(self._failed)

    def check(self) -> None:
        """Raise `EngineUnavailable` if no request can be accepted now."""
        if self._failed.done():
            raise self._failed.result()
        if not self._ready.done():
            raise EngineUnavailable("the model is still loading")
        if not self._live_replicas():
            raise EngineUnavailable("no replica is available; others are still loading")

    @property
    def num_open(self) -> int:
        """Number of this process's unfinished requests."""
        return len(self._running)

    def admit(self) -> None:
        """Raise `EngineUnavailable` if no request can be accepted now, and `QueueFull` if no more may wait.

        A request counts as waiting if its replica's newest stats do not count it as running. If these stats count none
        as waiting, each free place in the running batch admits one more. The queue is never full while this process has
        no open requests, as the stats may be outdated then.

        Each API process counts its own open requests, and takes those of the others from the stats that the engine last
        sent to any of them. So several processes may accept more requests between two steps than one would.
        """
        self.check()
        if self._max_queue is None or not self._running:
            return
        stats = self._stats().values()
        # The second sum includes other processes' requests.
        num_open = max(len(self._running), sum(each.running + each.waiting for each in stats))
        num_waiting = num_open - sum(each.running if each.waiting else self._max_num_seqs for each in stats)
        if num_waiting >= self._max_queue:
            raise QueueFull(f"{max(0, num_waiting)} requests are waiting already, the maximum is {self._max_queue}")

    async def probe(self) -> None:
        """Return when the engine loop and every rank of a replica have answered; raises `EngineUnavailable` if none
        does.

        All live replicas are probed. One that does not answer gets no new requests while there are others.
        """
        self.check()
        asked = [self._start_task(self._probe(self._replicas[number])) for number in self._live_replicas()]
        waiting: set[asyncio.Future[Any]] = {self._failed, *asked}
        while len(waiting) > 1 and not self._failed.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task in done and task.result() for task in asked):
                return
            waiting.add(self._failed)
        self.check()
        raise EngineUnavailable(f"the engine has not answered for {PROBE_SECONDS:g} seconds")

    async def _probe(self, replica: CoreConnection) -> bool:
        """Return whether the replica has answered in time; False also if it has died."""
        key = replica.number, next(self._probe_ids)
        answer = self._probes[key] = self.loop.create_future()
        self._send(Probe(self.index, key[1]), replica.number)
        try:
            await asyncio.wait((answer,), timeout=PROBE_SECONDS)
        finally:
            del self._probes[key]
        if not answer.done() and replica.state == "up":
            replica.is_unresponsive = True
            logger.warning("%shas not answered for %g seconds", self._name(replica) or "the engine ", PROBE_SECONDS)
        return answer.done() and not answer.cancelled()

    def submit(
        self,
        requests: Sequence[tuple[str, list[int], SamplingParams]],
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> OutputStream:
        """Submit requests (id, prompt, params) with a common output stream. No id may be used twice.

        Raises `EngineUnavailable` and `QueueFull`; then none was submitted.
        """
        self.admit()
        stream = OutputStream(self.abort, [request_id for request_id, _, _ in requests])
        now = time.monotonic()
        for request_id, prompt_ids, params in requests:
            running = self._running[request_id] = _RunningRequest(stream, now)
            submit = EngineCoreRequest(self.index, request_id, prompt_ids, params, priority, cache_salt)
            if self._single_replica is not None:
                running.replica = self._single_replica
            else:
                running.submit = submit
                running.replica = self._router.place(submit, self._stats())
            self._send(submit, running.replica)
        if (deadline := DEADLINE.get()) is not None:
            stream.end_at(deadline)
        return stream

    def abort(self, request_ids: set[str], reason: FinishReason) -> None:
        """Free these requests in the engine and forget them; they count as finished with `reason`."""
        ended: dict[int, list[str]] = {}
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._on_finished(request_id, running, reason)
                ended.setdefault(running.replica, []).append(request_id)
        if not self._failed.done():
            for replica, ids in ended.items():
                self._send(AbortRequests(ids), replica)

    def _on_finished(self, request_id: str, running: _RunningRequest, reason: FinishReason) -> None:
        """Update router and metrics for a request that has left `_running`."""
        self._metrics.finished(reason, time.monotonic() - running.arrived)
        if running.submit is not None:
            self._router.on_finished(request_id, running.delivered)

    def fail(self, reason: str) -> None:
        """Fail all open requests, abort them in the engine, and accept no new ones."""
        if self._failed.done():
            return
        for number in {running.replica for running in self._running.values()}:
            self._send(AbortRequests([i for i, running in self._running.items() if running.replica == number]), number)
        failure = EngineUnavailable(reason)
        self._failed.set_result(failure)
        now = time.monotonic()
        for running in self._running.values():
            self._metrics.finished("error", now - running.arrived)
            running.stream.fail(failure)
        self._running.clear()

    async def close(self) -> None:
        """Close the connections, and stop the cores that this process started; kill those that do not exit in time."""
        self.fail(SHUTTING_DOWN)
        self.loop.remove_reader(self._responses.FD)
        for task in self._tasks.copy():
            task.cancel()
        await asyncio.gather(*(replica.end() for replica in self._replicas.values()))
        for replica in self._replicas.values():
            replica.close()
        self._responses.close()
        self._context.term()

    # --- death and restart of replicas ------------------------------------------------------------------------

    def replica_died(self, replica: int, reason: str) -> None:
        """Handle the death of a replica, on the event loop, and notify the other API processes."""
        if self._replicas[replica].state != "dead" and self._is_owner:
            self._notify_clients(EngineDead(reason, replica))
        self._on_dead(self._replicas[replica], reason)

    def _on_dead(self, replica: CoreConnection, reason: str) -> None:
        """Resume the requests of a dead replica on others, or fail them with the reason."""
        if replica.state == "dead" or self._failed.done():
            return
        replica.state = "dead"
        replica.close()
        self._metrics.lost(replica.number)
        if self._is_owner:
            self._metrics.state(replica.number, replica.state)
        for (number, _), answer in self._probes.items():
            if number == replica.number:
                answer.cancel()
        reason = f"{self._name(replica)}{reason}"
        is_left = any(other.state == "up" or self._is_first_load(other) for other in self._replicas.values())
        is_starting = self._is_owner and not self._ready.done()
        if not is_left or self._are_coupled or is_starting:  # report a failure to load immediately
            return self.fail(reason)
        self._update_ready()
        moved = [(i, running) for i, running in self._running.items() if running.replica == replica.number]
        lost = [i for i, running in moved if not self._resume(running)]
        for request_id in lost:
            running = self._running.pop(request_id)
            self._on_finished(request_id, running, "error")
            lost_too_many = f"it has lost {running.num_resumes} replicas already"
            cause = lost_too_many if self._live_replicas() else "no other replica is available"
            error = f"{reason}; the request cannot go on, as {cause}"
            running.stream.put(EngineCoreOutput(request_id, [], finish_reason="error", error=error))
        # Last, as the tokens of finished requests are added to the replica's cache.
        self._router.on_replica_dead(replica.number)
        logger.error("%s; %d requests resumed on other replicas, %d failed", reason, len(moved) - len(lost), len(lost))

    def _is_first_load(self, replica: CoreConnection) -> bool:
        """Return whether the replica is loading for the first time, so that the service need not fail yet."""
        return replica.state == "loading" and not replica.has_been_ready

    def _resume(self, running: _RunningRequest) -> bool:
        """Resume a request on another replica; returns False if that is impossible."""
        assert running.submit is not None
        running.num_resumes += 1
        if running.num_resumes > MAX_RESUMES or not (among := self._stats()):
            return False
        resume_request = running.resume_request
        running.num_repeated = 0 if resume_request.output_token_ids else running.num_scored_tokens
        self._router.on_finished(resume_request.request_id, [])
        running.replica = self._router.place(resume_request, among)
        self._send(resume_request, running.replica)
        return True

    def _on_ready(self, replica: CoreConnection, ready: EngineReady) -> None:
        """Handle a replica that has finished loading, or that this process has just learned of."""
        if replica.state == "up" or self._failed.done():
            return
        if replica.has_been_ready:
            logger.info("%sis ready again", self._name(replica))
        replica.state, replica.has_been_ready, replica.is_unresponsive = "up", True, False
        replica.open()
        self._router.on_replica_ready(replica.number)
        if self._is_owner:
            self._metrics.state(replica.number, replica.state)
        self._ready_message = ready
        if ready.stats is not None:
            self._metrics.take(replica.number, ready.stats)
        self._update_ready()

    def _update_ready(self) -> None:
        """Become ready once all replicas are up, or once one is up if another process runs the engine."""
        is_settled = not (self._is_owner and any(map(self._is_first_load, self._replicas.values())))
        if is_settled and self._live_replicas() and not self._ready.done():
            self._ready.set_result(self._ready_message)

    def _live_replicas(self) -> list[int]:
        """The replicas that get requests. Unresponsive ones are included only if there are no others."""
        up = [replica for replica in self._replicas.values() if replica.state == "up"]
        return [replica.number for replica in up if not replica.is_unresponsive] or [replica.number for replica in up]

    def _stats(self) -> dict[int, EngineStats]:
        """The latest stats of the replicas that get requests."""
        return {number: self._metrics.of(number) for number in self._live_replicas()}

    def _notify_clients(self, message: EngineDead) -> None:
        """Notify all other API processes. Those that are not connected within `NOTIFY_SECONDS` miss it."""
        frame = msgspec.msgpack.encode(message)
        for index, address in enumerate(self._endpoints.responses):
            if index != self.index:
                with self._context.socket(zmq.PUSH) as socket:
                    socket.setsockopt(zmq.LINGER, int(NOTIFY_SECONDS * 1000))
                    socket.connect(address)
                    socket.send(frame)

    async def _supervise(self, replica: CoreConnection) -> None:
        """Watch a core's process, and restart it after it exits, if it has been ready before."""
        least, most = RESTART_SECONDS
        delay = least
        while True:
            begun = time.monotonic()
            how = await replica.wait_exit()
            self.replica_died(replica.number, f"the engine core {how}")
            if self._restart is None or not replica.has_been_ready or self._failed.done():
                return
            delay = least if time.monotonic() - begun > most else delay
            await asyncio.sleep(delay)
            delay = min(2 * delay, most)
            logger.info("%sis restarting", self._name(replica))
            try:
                replica.core = self._restart(replica.number)
            except Exception as error:
                logger.error("%scannot start: %s", self._name(replica), error)
                continue
            replica.state = "loading"
            replica.open()
            self._metrics.state(replica.number, replica.state)

    def _name(self, replica: CoreConnection) -> str:
        """The prefix of log messages about this replica, if there are several."""
        return "" if self._single_replica is not None else f"replica {replica.number}: "

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a background task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- messages ---------------------------------------------------------------------------------------------

    def _send(self, message: ToCore, replica: int) -> None:
        self._replicas[replica].send(message)

    def _receive(self) -> None:
        """Process all received messages. ZMQ_FD is edge-triggered: it signals new messages, not unread ones."""
        try:
            while True:
                message = self._decoder.decode(self._responses.recv(zmq.NOBLOCK))
                if isinstance(message, EngineCoreOutputs):
                    self._deliver(message)
                else:
                    self._handle(message)
        except zmq.Again:
            pass
        except Exception as error:  # a bug here must not leave requests waiting forever
            logger.error("the connection to the engine failed", exc_info=error)
            self.loop.remove_reader(self._responses.FD)
            self.fail(f"the connection to the engine failed: {error!r}")

    def _handle(self, message: EngineReady | EngineDead | ProbeReply) -> None:
        """Process a message about a replica's state. Unknown replicas are ignored."""
        replica = self._replicas.get(message.replica)
        match message:
            case ProbeReply(probe_id) if replica is not None:
                replica.is_unresponsive = False
                if (answer := self._probes.get((message.replica, probe_id))) is not None and not answer.done():
                    answer.set_result(None)
            case EngineReady() as ready if replica is not None:
                self._on_ready(replica, ready)
            case EngineDead(reason) if replica is not None:
                self._on_dead(replica, reason)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """Deliver a step's outputs. Drop those of a dead replica, and of requests that are unknown or have moved."""
        replica = self._replicas.get(outputs.replica)
        if replica is None or replica.state == "dead":
            return
        replica.is_unresponsive = False
        now = time.monotonic()
        if outputs.stats is not None:
            self._metrics.take(outputs.replica, outputs.stats)
        if outputs.expert_load is not None:
            self._metrics.expert_load = outputs.expert_load
        earlier: list[float] = []
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            running = self._running.get(request_id)
            if running is not None and running.replica == outputs.replica:
                if running.last_output is not None:
                    earlier.append(running.last_output)
                running.last_output = now
                if running.submit is not None:
                    running.delivered.append(token_id)
                running.stream.put_token(request_id, token_id)
        for last_output, count in Counter(earlier).items():  # most had their last output in the same step
            self._metrics.inter_token_latency.observe(now - last_output, count)
        for output in outputs.outputs:
            running = self._running.get(output.request_id)
            if running is None or running.replica != outputs.replica:
                continue
            if running.submit is not None:
                self._record_progress(running, output)
            if output.token_ids:
                if running.last_output is None:
                    self._metrics.time_to_first_token.observe(now - running.arrived)
                else:
                    self._metrics.inter_token_latency.observe(now - running.last_output)
                running.last_output = now
            if output.finish_reason is not None:
                del self._running[output.request_id]
                self._on_finished(output.request_id, running, output.finish_reason)
            running.stream.put(output)

    def _record_progress(self, running: _RunningRequest, output: EngineCoreOutput) -> None:
        """Store the state for resuming the request elsewhere, and remove what a previous replica has delivered."""
        if (scores := output.prompt_logprobs) is not None:
            repeated = min(running.num_repeated, len(scores))
            running.num_repeated -= repeated
            running.num_scored_tokens += len(scores) - repeated
            output.prompt_logprobs = scores.after(repeated) if repeated < len(scores) else None
        if output.token_ids:
            if running.num_cached_tokens is None:
                running.num_cached_tokens = output.num_cached_tokens
            output.num_cached_tokens = running.num_cached_tokens
            running.delivered += output.token_ids
            self._router.on_first_token(output.request_id)
