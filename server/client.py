"""The wire to the engine core: requests out, outputs in, and whether the other end is alive."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from quire.engine.errors import InvalidParameter
from quire.engine.launch import Endpoints
from quire.engine.messages import (
    Abort,
    Alive,
    Dead,
    FinishReason,
    Join,
    Outputs,
    Probe,
    Ready,
    RequestOutput,
    SamplingParams,
    Shutdown,
    Submit,
    ToCore,
    ToServer,
)
from quire.server.metrics import Metrics

PROBE_SECONDS = 30.0
"""A step may be long, on a CPU above all."""
SHUTDOWN_SECONDS = 10.0
LOADING_SHUTDOWN_SECONDS = 1.0
"""A core that is still loading reads no messages."""
WATCH_SECONDS = 0.2

logger = logging.getLogger(__name__)


class EngineUnavailable(RuntimeError):
    """The engine is still loading, has died, or is shutting down; the text says which, and why."""


class QueueFull(RuntimeError):
    """More requests wait for the engine than may."""


class RequestFailed(RuntimeError):
    """The engine gave up on one request; the others go on."""


class RequestTimedOut(RequestFailed):
    """The request has taken as long as one may."""


class Deadline(NamedTuple):
    """When a request must have ended, on the event loop's clock, and how long it may take in all."""

    at: float
    seconds: float


DEADLINE: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
"""Of the request that the running task serves; what it submits is aborted then."""


class Stream:
    """The outputs of the engine requests that belong together. Unread outputs of a request merge into one."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._unread: dict[str, RequestOutput] = {}
        self._failure: EngineUnavailable | RequestTimedOut | None = None
        self._reader: asyncio.Future[None] | None = None
        """Who waits in `get`."""
        self._timer: asyncio.TimerHandle | None = None

    async def get(self) -> list[RequestOutput]:
        """What has come since the last call, at most one output for each request; waits for the first.

        Raises `EngineUnavailable` and `RequestTimedOut` when nothing will come any more.
        """
        while not self._unread and self._failure is None:
            self._reader = self._client.loop.create_future()
            await self._reader
        if self._failure is not None:
            raise self._failure
        unread, self._unread = self._unread, {}
        return list(unread.values())

    def stop(self, request_id: str) -> None:
        """End a request whose stop string was found."""
        self._abort({request_id}, "stop")

    def close(self) -> None:
        """Abort all that still runs."""
        self._abort(self._open.copy(), "abort")
        if self._timer is not None:
            self._timer.cancel()

    def end_at(self, deadline: Deadline) -> None:
        """Abort what still runs then; the reader is told with `RequestTimedOut`."""
        self._timer = self._client.loop.call_at(deadline.at, self._time_out, deadline.seconds)

    def _time_out(self, seconds: float) -> None:
        if self._open:
            self._abort(self._open.copy(), "abort")
            self.fail(RequestTimedOut(f"the request has taken the {seconds:g} seconds that one may take here"))

    def _abort(self, request_ids: set[str], reason: FinishReason) -> None:
        self._client.abort(request_ids & self._open, reason)
        self._open -= request_ids
        for request_id in request_ids:
            self._unread.pop(request_id, None)

    def put(self, output: RequestOutput) -> None:
        """Called by the client, in the order of the wire."""
        earlier = self._unread.get(output.request_id)
        if earlier is None:
            self._unread[output.request_id] = output
        else:
            earlier.token_ids += output.token_ids
            if output.logprobs is not None:
                earlier.logprobs = (earlier.logprobs or []) + output.logprobs
            if earlier.prompt_logprobs is None:
                earlier.prompt_logprobs = output.prompt_logprobs
            elif output.prompt_logprobs is not None:
                earlier.prompt_logprobs.extend(output.prompt_logprobs)
            earlier.finish_reason = output.finish_reason
            earlier.stop_token_id = output.stop_token_id
            earlier.error = output.error
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._wake()

    def put_token(self, request_id: str, token_id: int) -> None:
        """The same for an output that is one token and nothing else."""
        earlier = self._unread.get(request_id)
        if earlier is None:
            self._unread[request_id] = RequestOutput(request_id, [token_id])
        else:
            earlier.token_ids.append(token_id)
        self._wake()

    def fail(self, failure: EngineUnavailable | RequestTimedOut) -> None:
        """Called by the client when the engine is gone: readers wake up with this."""
        self._failure = failure
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True)
class _Running:
    """A request on the engine's side of the wire, and its times (`time.monotonic`)."""

    stream: Stream
    arrived: float
    last_output: float | None = None


class EngineClient:
    """One API process's end of the wire to one engine core; its methods belong to the event loop that made it.

    With `max_queue`, requests beyond those that the engine runs at once (`max_num_seqs`) and so many more are refused.
    Of the requests of other API processes it knows what the engine tells (see `check_queue`).
    """

    def __init__(
        self,
        endpoints: Endpoints,
        core: subprocess.Popen[bytes] | None,
        metrics: Metrics,
        index: int = 0,
        *,
        max_num_seqs: int = 1,
        max_queue: int | None = None,
    ) -> None:
        """`index` is the API process's place among all; the first alone has the core, which it watches and ends."""
        self.loop = asyncio.get_running_loop()
        self.index = index
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._core = core
        self._metrics = metrics
        self._running: dict[str, _Running] = {}
        self._probes: dict[int, asyncio.Future[None]] = {}
        self._probe_ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._ready: asyncio.Future[Ready] = self.loop.create_future()
        self._failed: asyncio.Future[EngineUnavailable] = self.loop.create_future()
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._responses = self._context.socket(zmq.PULL)
        for socket in (self._requests, self._responses):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
        self._requests.connect(endpoints.requests[0])
        self._responses.bind(endpoints.responses[index])
        self.loop.add_reader(self._responses.FD, self._receive)
        if core is None:
            self._send(Join(index))
        else:
            self._watching = asyncio.create_task(self._watch(core))

    async def ready(self) -> Ready:
        """Wait until the model is loaded; raises `EngineUnavailable` with the reason when it cannot be."""
        await asyncio.wait((self._ready, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()
        return self._ready.result()

    async def failed(self) -> EngineUnavailable:
        """Wait until the engine is gone, for whatever reason."""
        return await asyncio.shield(self._failed)

    def check(self) -> None:
        """Raise `EngineUnavailable` when no request could be served now."""
        if self._failed.done():
            raise self._failed.result()
        if not self._ready.done():
            raise EngineUnavailable("the model is still loading")

    @property
    def num_open(self) -> int:
        """Requests of this process that have not ended."""
        return len(self._running)

    def check_queue(self) -> None:
        """Raise `QueueFull` when no more requests may wait.

        A request waits when the engine's newest stats do not count it as running; as long as they tell of none that
        waits, each free place in the running batch is good for one more. Never raised where no request is open here,
        as the stats may be old then.

        Each API process counts what it has open itself and, of the others', what the stats tell that the engine has
        last sent to any of them. What several take in between two steps may so be more than one would have taken.
        """
        if self._max_queue is None or not self._running:
            return
        stats = self._metrics.stats
        num_open = max(len(self._running), stats.running + stats.waiting)  # the second, too, are other processes'
        num_waiting = num_open - (stats.running if stats.waiting else self._max_num_seqs)
        if num_waiting >= self._max_queue:
            raise QueueFull(f"{max(0, num_waiting)} requests wait already, and no more than {self._max_queue} may")

    async def probe(self) -> None:
        """Return once the loop and every rank have answered; raises `EngineUnavailable` when they do not."""
        self.check()
        probe_id = next(self._probe_ids)
        answer = self._probes[probe_id] = self.loop.create_future()
        self._send(Probe(self.index, probe_id))
        try:
            await asyncio.wait((answer, self._failed), timeout=PROBE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._probes[probe_id]
        self.check()
        if not answer.done():
            raise EngineUnavailable(f"the engine has not answered for {PROBE_SECONDS:g} seconds")

    def submit(
        self,
        requests: Sequence[tuple[str, list[int], SamplingParams]],
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Stream:
        """Send requests (id, prompt, params) that one reader waits for.

        Raises `EngineUnavailable`, `QueueFull` (for none or all of them), and `InvalidParameter` when an id is in use.
        """
        self.check()
        self.check_queue()
        stream = Stream(self, [request_id for request_id, _, _ in requests])
        if taken := next((request_id for request_id, _, _ in requests if request_id in self._running), None):
            raise InvalidParameter(f"a request with the id {taken} is running", "request_id")
        now = time.monotonic()
        for request_id, prompt_ids, params in requests:
            self._running[request_id] = _Running(stream, now)
            self._send(Submit(self.index, request_id, prompt_ids, params, priority, cache_salt))
        if (deadline := DEADLINE.get()) is not None:
            stream.end_at(deadline)
        return stream

    def abort(self, request_ids: set[str], reason: FinishReason) -> None:
        """Free these requests in the engine and forget them; they count as ended for `reason`."""
        ended = [(self._running.pop(i), i) for i in request_ids if i in self._running]
        for running, _ in ended:
            self._metrics.finished(reason, time.monotonic() - running.arrived)
        if ended and not self._failed.done():
            self._send(Abort([request_id for _, request_id in ended]))

    def fail(self, reason: str) -> None:
        """Give every open request a terminal error and take no new ones; what runs in the engine is aborted."""
        if self._failed.done():
            return
        if self._running:
            self._send(Abort(list(self._running)))
        failure = EngineUnavailable(reason)
        self._failed.set_result(failure)
        now = time.monotonic()
        for running in self._running.values():
            self._metrics.finished("error", now - running.arrived)
            running.stream.fail(failure)
        self._running.clear()

    async def close(self) -> None:
        """Stop the core, where it is ours, by force if it does not end in time, and close the wire."""
        self.fail("the server is shutting down")
        self.loop.remove_reader(self._responses.FD)
        if self._core is not None:
            self._watching.cancel()
            await self._end(self._core)
        self._requests.close()
        self._responses.close()
        self._context.term()

    async def _end(self, core: subprocess.Popen[bytes]) -> None:
        self._send(Shutdown())
        patience = SHUTDOWN_SECONDS if self._ready.done() else LOADING_SHUTDOWN_SECONDS
        deadline = time.monotonic() + patience
        while core.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if core.poll() is None:
            logger.warning("the engine core did not stop within %g seconds and is killed", patience)
            core.kill()
            core.wait()
        if core.stdin is not None:
            core.stdin.close()

    def _send(self, message: ToCore) -> None:
        self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Take in all that has arrived: the descriptor tells that more came, not that some is left (ZMQ_FD)."""
        try:
            while True:
                self._take(self._decoder.decode(self._responses.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        except Exception as error:  # a bug of ours must not leave requests waiting for ever
            logger.error("the wire to the engine broke", exc_info=error)
            self.loop.remove_reader(self._responses.FD)
            self.fail(f"the wire to the engine broke: {error!r}")

    def _take(self, message: ToServer) -> None:
        match message:
            case Outputs() as outputs:
                self._deliver(outputs)
            case Alive(probe_id):
                if (answer := self._probes.get(probe_id)) is not None and not answer.done():
                    answer.set_result(None)
            case Ready() as ready if not self._ready.done():  # one that joins may be told twice
                self._ready.set_result(ready)
            case Dead(reason):
                self.fail(reason)

    def _deliver(self, news: Outputs) -> None:
        """Hand a step's outputs out. Those of forgotten requests are dropped."""
        now = time.monotonic()
        if news.stats is not None:
            self._metrics.stats = news.stats
        if news.expert_load is not None:
            self._metrics.expert_load = news.expert_load
        earlier: list[float] = []
        for request_id, token_id in zip(news.request_ids, news.token_ids, strict=True):
            running = self._running.get(request_id)
            if running is not None:
                if running.last_output is not None:
                    earlier.append(running.last_output)
                running.last_output = now
                running.stream.put_token(request_id, token_id)
        for last_output, count in Counter(earlier).items():  # most had their last output in the same step
            self._metrics.inter_token_latency.observe(now - last_output, count)
        for output in news.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if output.token_ids:
                if running.last_output is None:
                    self._metrics.time_to_first_token.observe(now - running.arrived)
                else:
                    self._metrics.inter_token_latency.observe(now - running.last_output)
                running.last_output = now
            if output.finish_reason is not None:
                del self._running[output.request_id]
                self._metrics.finished(output.finish_reason, now - running.arrived)
            running.stream.put(output)

    async def _watch(self, core: subprocess.Popen[bytes]) -> None:
        """Notice a core that ended without a word."""
        while (code := core.poll()) is None:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(WATCH_SECONDS)  # its last message may still be on the way
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.fail(f"the engine core {how}")
