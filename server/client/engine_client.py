"""The connection to the engine cores: sends requests, receives outputs, resumes the requests of dead cores."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.cluster.security import Dropped, Security, join
from quire.engine.config.engine_config import CacheConfig, KVEventsConfig, KVStoreConfig
from quire.engine.core.launch import Endpoints
from quire.engine.process import log
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Join,
    KVStoreState,
    ListRequests,
    PinAdapters,
    PrefixCacheReset,
    RequestInfo,
    ToCore,
    ToServer,
)
from quire.engine.protocol.errors import UNDECODABLE, InvalidParameter
from quire.engine.protocol.kv_events import KVEventsNews, KVEventsState
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import (
    EngineFailed,
    EngineState,
    ReplicaDraining,
    ReplicaLost,
    ReplicaRemoved,
    ReplicaRole,
    ReplicaRoles,
    ReplicaStarting,
    ReplicaUp,
)
from quire.server.client import replica_calls
from quire.server.client.admission import Admission
from quire.server.client.fair_share import SHARE
from quire.server.client.handovers import HandOvers
from quire.server.client.kv_view import KVViews
from quire.server.client.media_content import with_content
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import DEADLINE, EngineUnavailable, OutputStream
from quire.server.client.replica import Replica, ReplicaInfo, problem_of
from quire.server.client.replica_calls import ReplicaCalls
from quire.server.client.router import ReplicaPlace, Router
from quire.server.client.running_request import PromptRequests, RunningRequest
from quire.server.client.silence import CHECK_SECONDS, SilenceCheck, must_move
from quire.server.client.suspects import Suspects
from quire.server.client.tracing import TRACE

SHUTTING_DOWN = "the server is shutting down"
"""The reason of a regular shutdown."""

RANK_HEADER = "X-data-parallel-rank"
DATA_PARALLEL_RANK: ContextVar[int | None] = ContextVar("data_parallel_rank", default=None)
"""The replica that the current task's request has chosen for itself; None: the router chooses."""

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NEWS_BYTES = 1 << 16
"""KV events that are taken without a look at the other work of the loop, in milliseconds."""


class OpenRequests(NamedTuple):
    """Unfinished requests."""

    requests: list[tuple[RequestInfo, int | None]]
    """The oldest ones, and their replicas; None: they wait for one."""
    total: int
    """Number of all of them."""
    silent: list[int]
    """Replicas that have not answered. Requests of other API processes on these are not known."""


class EngineClient:
    """An API process's connection to the engine's replicas. All methods run on the event loop that created it.

    A supervisor reports the state of the replicas (`update`), which may be added and removed. `Router` chooses the
    replica of a request. If that dies, or is removed before the request has ended, the request goes on elsewhere, or
    waits until a replica is back, and resumes after the tokens delivered so far: the streams are the same as if nothing
    had happened. Requests also leave a replica that is silent (`_check_silence`). A request fails if the engine has
    failed for good, or if it seems to cause the deaths (`Suspects`).

    With `max_queue`, requests are rejected beyond `max_num_seqs` per replica plus `max_queue`. The number of requests
    of other API processes comes from the engine's stats (see `Admission`).
    """

    def __init__(
        self,
        endpoints: Endpoints,
        metrics: Metrics,
        index: int = 0,
        *,
        awaited: Collection[int] | None = None,
        roles: Mapping[int, ReplicaRole] | None = None,
        max_num_seqs: int = 1,
        max_queue: int | None = None,
        cache: CacheConfig | None = None,
        kv_events: KVEventsConfig | None = None,
        kv_store: KVStoreConfig | None = None,
        media: MediaSpec | None = None,
        num_adapters: int = 0,
        is_pooling: bool = False,
        token: str = "",
        on_drained: Callable[[int], None] = lambda replica: None,
    ) -> None:
        """`index` is the number of this API process, `token` the cluster's. Requests are accepted when the `awaited`
        replicas (None: all) have been up. `is_pooling`: they are answered with vectors. `roles` as in `ReplicaRoles`,
        `num_adapters` as in `Router`. Each host has a `kv_store`, if that is not None. With `kv_events`, the replicas
        say what they have cached; `media` is how the model takes images.
        """
        self.loop = asyncio.get_running_loop()
        self.index = index
        self.on_drained = on_drained
        """Called when no more requests are on a replica that drains, once."""
        self._max_num_seqs, self._admission = max_num_seqs, Admission(max_num_seqs, max_queue)
        self._metrics = metrics
        self._running: dict[str, RunningRequest] = {}
        self._handovers = HandOvers(self._running, metrics, self._send, self._peer_between)
        self._suspects = Suspects(max_num_seqs)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._ready: asyncio.Future[ReplicaUp] = self.loop.create_future()
        self._failed: asyncio.Future[EngineUnavailable] = self.loop.create_future()
        self._last_up: ReplicaUp | None = None
        self._context = zmq.Context()
        self._security = Security(self._context, token)
        self._dropped = Dropped("dropped a message to this API process that could not be decoded")
        self._responses = self._context.socket(zmq.PULL)
        self._responses.setsockopt(zmq.LINGER, 0)
        self._responses.set_hwm(0)
        self._security.bind(self._responses, endpoints.responses[index])
        self._cache, self._kv_store, self._num_adapters = cache, kv_store, num_adapters
        self._is_pooling, self._has_hosts = is_pooling, bool(token)
        self._views = KVViews(cache, kv_events, media, index) if cache is not None and kv_events is not None else None
        """What the replicas have cached; None: they do not say it."""
        self._router: Router | None = None
        """None: there has been only one replica."""
        self._silence: SilenceCheck | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        """Of the check for silence, which is made if there is a router."""
        self._replicas: dict[int, Replica] = {}
        self._roles: Mapping[int, ReplicaRole] = roles or {}
        """As in `ReplicaRoles`; it may name replicas that this process does not know yet."""
        self._pinned_adapters: list[bytes] = []
        self.calls = ReplicaCalls(index, self._replicas, self._subject, self._check_up)
        for number, address in endpoints.requests.items():
            self._add(number, address)
        self._awaited = set(endpoints.requests if awaited is None else awaited)
        """Replicas that have never been up."""
        self.loop.add_reader(self._responses.FD, self._receive)

    async def ready(self) -> ReplicaUp:
        """Wait until every awaited replica has been up, and return the last one's report.

        Raises `EngineUnavailable` with the reason if the model cannot be loaded.
        """
        await asyncio.wait((self._ready, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise self._failed.result()
        return self._ready.result()

    def check(self) -> None:
        """Raise `EngineUnavailable` if no request can be accepted now."""
        if self._failed.done():
            raise self._failed.result()
        if self._is_loading:
            raise EngineUnavailable("the model is still loading", "loading")

    def _check_up(self) -> list[int]:
        """Return the replicas that get requests; raises `EngineUnavailable` if requests would wait for one."""
        self.check()
        if not (live := self._live_replicas()):
            reasons = {replica.reason for replica in self._replicas.values() if replica.reason}
            raise EngineUnavailable(": ".join(["the engine is restarting", *sorted(reasons)[:1]]))
        return live

    @property
    def num_open(self) -> int:
        """Number of this process's unfinished requests."""
        return len(self._running)

    def admit(self) -> None:
        """Raise `EngineUnavailable` if no request can be accepted now, and `QueueFull` if no more may wait."""
        self.check()
        if self._running:
            draining = [replica.number for replica in self._replicas.values() if replica.state == "draining"]
            self._admission.check(len(self._running), self._stats(self._live_replicas() + draining).values())

    async def probe(self) -> None:
        """Return when the engine loop and every rank of a replica have answered; raises `EngineUnavailable` if none
        does.

        All live replicas are probed. One that does not answer gets no new requests while there are others.
        """
        asked = [self._start_task(self.calls.probe(self._replicas[number])) for number in self._check_up()]
        waiting: set[asyncio.Future[Any]] = {self._failed, *asked}
        while len(waiting) > 1 and not self._failed.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task in done and task.result() for task in asked):
                return
            waiting.add(self._failed)
        self._check_up()
        raise EngineUnavailable(f"the engine has not answered for {replica_calls.PROBE_SECONDS:g} seconds")

    def submit(
        self,
        requests: Sequence[tuple[str, list[int], SamplingParams]],
        priority: int = 0,
        cache_salt: bytes = b"",
        n: int = 1,
        second_segments: Sequence[int] = (),
        media: Sequence[Sequence[MediaItem]] = (),
        lease: object = None,
        adapter: AdapterRef | None = None,
        adapter_starts: Sequence[int | None] = (),
        adapter_name: str = "",
        kv_peer: str | None = None,
    ) -> OutputStream:
        """Submit requests (id, prompt, params) with a common output stream: `n` in a row for each prompt. No id may be
        used twice. `second_segments`, if given, has one for each request, and `media` the items of each prompt. The
        `adapter` changes each prompt from its start on; None: it does not change this one. `adapter_name` is for
        metrics and KV events. The data of items and of the adapter remains until nothing refers to `lease`. `kv_peer`
        is the address of the KV store that has the prompts; empty: another server continues, so they are stored early.

        `DATA_PARALLEL_RANK` chooses the replica that they start on. Raises `EngineUnavailable` and `QueueFull`, and
        `InvalidParameter` if there is no such replica; then none was submitted.
        """
        self.admit()
        if (rank := DATA_PARALLEL_RANK.get()) is not None:
            self._check_rank(rank)
        stream = OutputStream(self.abort, [request_id for request_id, _, _ in requests])
        now, share, trace = time.monotonic(), SHARE.get(), TRACE.get()
        self._admission.add(share, len(requests))
        for number, (request_id, prompt_ids, params) in enumerate(requests):
            if number % n == 0:
                prompt = PromptRequests(n, num_open=n)
                start = adapter_starts[number // n] if adapter_starts else None
            submit = EngineCoreRequest(
                client=self.index,
                request_id=request_id,
                prompt_token_ids=prompt_ids,
                params=params,
                priority=priority,
                cache_salt=cache_salt,
                share=share.key,
                weight=share.weight,
                label="" if stream.record is None else stream.record.key,
                arrived=now,
                second_segment=second_segments[number] if second_segments else 0,
                media=list(media[number // n]) if media else [],
                adapter=None if start is None else adapter,
                adapter_start=start or 0,
                adapter_name="" if start is None else adapter_name,
                hands_over=kv_peer == "" and params.max_tokens == 1,
                kv_peer=kv_peer or "",
            )
            running = self._running[request_id] = RunningRequest(stream, now, submit, prompt, lease, adapter_name)
            if adapter_name:
                self._metrics.adapters.add(adapter_name)
            if trace is not None and (added := trace.add(number, len(prompt_ids), now)) is not None:
                running.trace = stream.traces[request_id] = added
            self._place(running, submit, rank)
        if (deadline := DEADLINE.get()) is not None:
            stream.end_at(deadline)
        return stream

    async def open_requests(
        self, limit: int, seconds: float, *, part: str = "", label: str | None = None
    ) -> OpenRequests:
        """Return the oldest `limit` unfinished requests, of all API processes, whose engine ids contain `part`, of
        the API key with the name `label`, or of all.

        Of replicas that do not answer within `seconds`, and of requests that wait for a replica, only this process's
        are known.
        """
        call = ListRequests(self.index, 0, limit, part, label)
        present = [replica for replica in self._replicas.values() if replica.state in ("up", "draining")]
        asked = [each for each in present if not each.is_unresponsive]
        replies = await asyncio.gather(*(self.calls.list_requests(each, call, seconds) for each in asked))
        answers = {reply.replica: reply for reply in replies if reply is not None}
        own = {
            request_id: running
            for request_id, running in self._running.items()
            if running.replica not in answers and call.selects(running.submit)
        }
        found: dict[str, tuple[RequestInfo, int | None]]
        found = {info.request_id: (info, number) for number, each in answers.items() for info in each.requests}
        found |= {request_id: (running.info, running.replica) for request_id, running in own.items()}
        oldest = sorted(found.values(), key=lambda each: each[0].arrived)[:limit]
        silent = [replica.number for replica in present if replica.number not in answers]
        return OpenRequests(oldest, sum(each.total for each in answers.values()) + len(own), silent)

    def abort_open(self, requests: Iterable[tuple[str, int | None]]) -> None:
        """Abort unfinished requests of any API process, given by their engine ids and replicas. Their readers get
        `RequestAborted`."""
        others: dict[int, list[str]] = {}
        for request_id, replica in requests:
            if (running := self._running.get(request_id)) is not None:
                running.stream.abort()
            elif replica in self._replicas:
                others.setdefault(replica, []).append(request_id)
        for replica, ids in others.items():
            self._send(AbortRequests(ids), replica)

    def pin_adapters(self, digests: list[bytes]) -> None:
        """Let all replicas keep these adapters in memory once they have read them, and no others."""
        self._pinned_adapters = digests
        for replica in self._replicas.values():
            replica.send(PinAdapters(self.index, digests))

    def _check_rank(self, rank: int) -> None:
        """Raise an error if the chosen replica is not up."""
        if rank not in self._replicas:
            ranks = ", ".join(map(str, sorted(self._replicas)))
            raise InvalidParameter(f"{RANK_HEADER}: there is no replica {rank}; choose one of: {ranks}", RANK_HEADER)
        if (state := self._replicas[rank].state) != "up":
            raise EngineUnavailable(f"{RANK_HEADER}: replica {rank} is {state}; omit it to use another replica")

    def _place(self, running: RunningRequest, request: EngineCoreRequest, rank: int | None = None) -> None:
        """Send a request to this replica, or to the best one; without one that is up, it waits (see `_on_up`).

        If the router wants it to continue elsewhere after its first token, that replica is told to expect it.
        """
        live = [each for each in (self._live_replicas() if rank is None else [rank]) if each not in running.leaving]
        successor: int | None = None
        if not live:
            running.replica = running.placed = None
            return self._handovers.expect(running, None)
        if self._router is None:
            running.replica = live[0]
        else:
            running.replica = self._router.place(request, self._stats(live), self._places(live))
            successor = self._router.successor(request.request_id)
        if successor is not None:
            request = msgspec.structs.replace(request, hands_over=True)
        self._send_placed(running, request, running.replica)
        self._handovers.expect(running, successor)

    def _send_placed(self, running: RunningRequest, request: EngineCoreRequest, replica: int) -> None:
        """Send a request to the replica that was chosen for it."""
        running.replica = running.last_replica = replica
        running.stream.kv_peer = self._replicas[replica].kv_peer
        if running.trace is not None:
            running.trace.place(replica)
        running.placed = request
        if request.media and self._has_hosts:
            self._start_task(self._send_with_content(running, request, replica))
        else:
            self._send(request, replica)

    def _places(self, replicas: Sequence[int]) -> dict[int, ReplicaPlace] | None:
        """The roles of these replicas, and the KV stores of their hosts; None: they have no roles."""
        present = [self._replicas[number] for number in replicas]
        if all(replica.role == "any" for replica in present):
            return None
        up = {store: stats for store, (stats, is_up) in self._metrics.stores().items() if is_up}
        readable = frozenset(each.kv_peer for each in present if each.kv_peer in up)
        nowhere = ReplicaPlace()
        stores = {store: ReplicaPlace(store=store, reads=readable & {*up[store].peers_up}) for store in up}
        return {each.number: stores.get(each.store, nowhere)._replace(role=each.role) for each in present}

    def _peer_between(self, first: int, second: int) -> str:
        """Where the KV store of a replica is read by that of another one; empty: they have the same, or it is not
        known."""
        one, other = self._replicas[first], self._replicas[second]
        return "" if one.store == other.store else one.kv_peer

    def _hand_over(self, running: RunningRequest, replica: int, now: float) -> None:
        """Let a request go on where it is expected, whose prompt this replica has computed. If that has died, or is
        silent or to be removed, it goes on elsewhere, or stays."""
        successor = running.successor
        if running.trace is not None:
            running.trace.leave("handed_over", f"{self._subject(replica)} has computed the prompt")
        if successor is None or successor not in self._live_replicas():
            self._resume(running)
        else:
            self._send_placed(running, self._handovers.take(running), successor)
        self._handovers.on_handed_over(running, replica, now)

    async def _send_with_content(self, running: RunningRequest, request: EngineCoreRequest, replica: int) -> None:
        """Send a request with the bytes of its items, unless it has ended or moved meanwhile."""

        def is_wanted() -> bool:
            return self._running.get(request.request_id) is running and running.placed is request

        try:
            if (whole := await with_content(request, is_wanted)) is not None:
                self._send(whole, replica)
        except OSError as error:
            text = f"the processed images of the request cannot be read now: {error.strerror}"
            self._give_up(running, text, is_unavailable=True)
            self._check_drained()

    def _give_up(self, running: RunningRequest, error: str, *, is_unavailable: bool = False) -> None:
        """End a request that is not in the engine. `is_unavailable` as in `EngineCoreOutput`."""
        request_id = running.submit.request_id
        del self._running[request_id]
        logger.error("request %s: %s", request_id, error)
        output = EngineCoreOutput(request_id, [], finish_reason="error", error=error, is_unavailable=is_unavailable)
        running.stream.put(output)
        if running.trace is not None:
            running.trace.error = error
        self._on_finished(request_id, running, "error")

    def abort(self, request_ids: set[str], reason: FinishReason) -> None:
        """Free these requests in the engine and forget them; they count as finished with `reason`."""
        ended: dict[int, list[str]] = {}
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._on_finished(request_id, running, reason)
                if running.replica is not None:
                    ended.setdefault(running.replica, []).append(request_id)
        for replica, ids in ended.items():
            self._send(AbortRequests(ids), replica)
        if ended:
            self._check_drained()

    def _on_finished(self, request_id: str, running: RunningRequest, reason: FinishReason) -> None:
        """Update router, queue and metrics for a request that has left `_running`."""
        if running.last_output is None:
            self._admission.start(running.share)
        self._count_finished(running, reason)
        self._handovers.expect(running, None)
        if self._router is not None:
            self._router.on_finished(request_id, running.delivered)
        self._run_suspect(self._suspects.clear(request_id))

    def _count_finished(self, running: RunningRequest, reason: FinishReason) -> None:
        """Add a finished request to the metrics of its last replica, or of the first one if it had none."""
        replica = min(self._replicas, default=0) if running.last_replica is None else running.last_replica
        running.finish(reason, self._metrics, replica, is_pooling=self._is_pooling)

    def fail(self, reason: str) -> None:
        """Fail all open requests, abort them in the engine, and accept no new ones."""
        if self._failed.done():
            return
        for number in self._replicas:
            if ids := [i for i, each in self._running.items() if number in (each.replica, each.successor)]:
                self._send(AbortRequests(ids), number)
        failure = EngineUnavailable(reason, "draining" if reason == SHUTTING_DOWN else "unavailable")
        self._failed.set_result(failure)
        for running in self._running.values():
            if running.trace is not None:
                running.trace.error = reason
            self._count_finished(running, "error")
            running.stream.fail(failure)
        self._running.clear()
        self._admission.clear()
        self._suspects.forget()

    async def close(self) -> None:
        """Close the connections."""
        self.fail(SHUTTING_DOWN)
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.loop.remove_reader(self._responses.FD)
        for task in self._tasks.copy():
            task.cancel()
        for replica in self._replicas.values():
            replica.close()
        self._responses.close()
        self._context.term()

    # --- coming and going of replicas -------------------------------------------------------------------------

    @property
    def up_replicas(self) -> list[int]:
        """The replicas that are up."""
        return [replica.number for replica in self._replicas.values() if replica.state == "up"]

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """The replicas that exist."""
        return [replica.info(self._metrics) for _, replica in sorted(self._replicas.items())]

    @property
    def _is_loading(self) -> bool:
        """Whether an awaited replica has never been up. One that is restarting has been, maybe before this process
        started.
        """
        return bool(self._awaited)

    @property
    def problem(self) -> tuple[str, str] | None:
        """Why new requests would not run at once: a state, and its reason. None: a replica is up and responds."""
        if self._failed.done():
            return "failed", str(self._failed.result())
        return problem_of(self.replicas, is_loading=self._is_loading)

    def update(self, state: EngineState) -> None:
        """Handle a change that the supervisor reports. Unknown replicas are ignored."""
        match state:
            case EngineFailed(reason):
                self.fail(reason)
            case ReplicaRoles(roles):
                self._roles = roles
                for number, replica in self._replicas.items():
                    replica.role = roles.get(number, "any")
            case ReplicaStarting(number, address):
                self._add(number, address)
            case ReplicaUp(number) if number in self._replicas:
                self._on_up(self._replicas[number], state)
            case ReplicaLost(number) if number in self._replicas:
                self._on_lost(self._replicas[number], state)
            case ReplicaDraining(number, seconds) if number in self._replicas:
                self._on_draining(self._replicas[number], seconds)
            case ReplicaRemoved(number) if number in self._replicas:
                self._on_removed(self._replicas.pop(number))

    def _add(self, number: int, address: str) -> None:
        """Add a replica that is starting, or note the address at which one starts again."""
        replica = self._replicas.get(number)
        if replica is None:
            replica = self._replicas[number] = Replica(number, address, self._context, self._security)
            replica.role = self._roles.get(number, "any")
            if self._router is None and len(self._replicas) > 1:
                self._router = self._handovers.router = Router(
                    list(self._replicas),
                    cache=self._cache,
                    num_adapters=self._num_adapters,
                    max_num_seqs=self._max_num_seqs,
                    first=self.index,
                    caches=self._views,
                    store=self._kv_store,
                )
                for each in self._replicas.values():
                    self._follow(each)
                self._silence = SilenceCheck(self._replicas, self.loop.time())
                self._check_timer = self.loop.call_later(CHECK_SECONDS, self._check_silence)
            return
        if replica.state == "up":  # its death was not noticed
            self._on_lost(replica, ReplicaLost(number, "it was restarted", returns=True))
        replica.address, replica.reason = address, None
        replica.state = "loading" if replica.state == "dead" else replica.state

    def _on_draining(self, replica: Replica, seconds: float) -> None:
        """Send no new requests to a replica, and move its running ones after a while."""
        replica.state, replica.heard_at = "draining", replica.heard_at or self.loop.time()
        self._awaited.discard(replica.number)
        self._update_ready()
        replica.move_timer = self.loop.call_later(seconds, self._move, replica)
        self._handovers.forget_successor(replica.number)
        self._check_drained()

    def _move(self, replica: Replica) -> None:
        """Let the requests of a replica that drains go on elsewhere."""
        moved = {i: running for i, running in self._running.items() if running.replica == replica.number}
        self._leave(replica, moved, "is to be removed")
        where = "go on elsewhere" if self._live_replicas() else "wait until another is up"
        logger.info("%s is to be removed; %d requests %s", self._subject(replica.number), len(moved), where)
        self._check_drained()

    def _leave(self, replica: Replica, moved: Mapping[str, RunningRequest], reason: str) -> None:
        """Move requests from a replica that lives to others."""
        if moved:
            self._send(AbortRequests(list(moved)), replica.number)
        for running in moved.values():
            running.leaving.add(replica.number)
            if running.trace is not None:
                running.trace.leave("moved", f"{self._subject(replica.number)} {reason}")
            self._resume(running)

    def _check_silence(self) -> None:
        """Move requests from replicas that have been silent for too long to replicas that have not."""
        self._check_timer = self.loop.call_later(CHECK_SECONDS, self._check_silence)
        assert self._silence is not None
        silences = self._silence.update(self.loop.time())
        present = [replica for replica in self._replicas.values() if replica.state in ("up", "draining")]
        self._metrics.unresponsive = frozenset(replica.number for replica in present if replica.is_unresponsive)
        live = {replica.number for replica in present if replica.state == "up"} - self._metrics.unresponsive
        for number, silence in silences.items() if live else ():
            moved = {
                request_id: running
                for request_id, running in self._running.items()
                if running.replica == number and must_move(running, silence) and live - running.leaving
            }
            for running in moved.values():
                running.num_moves += 1
            self._leave(self._replicas[number], moved, "does not respond")
            if moved:
                logger.warning("%d requests of %s go on elsewhere", len(moved), self._subject(number))
        self._check_drained()

    def _check_drained(self) -> None:
        """Report replicas that drain and have no more requests."""
        for replica in self._replicas.values():
            if replica.state == "draining" and not replica.is_drained:
                replica.is_drained = all(running.replica != replica.number for running in self._running.values())
                if replica.is_drained:
                    replica.cancel_move()
                    self.on_drained(replica.number)

    def _on_removed(self, replica: Replica) -> None:
        """Disconnect from a replica that has no requests."""
        self._disconnect(replica)
        self._awaited.discard(replica.number)
        self._update_ready()
        if self._router is not None:
            self._router.on_replica_removed(replica.number)
            self._follow_stores()

    def _disconnect(self, replica: Replica) -> None:
        """Close the connection to a replica, which will no longer answer."""
        replica.close()
        self.calls.on_lost(replica.number)

    def _forget_leaving(self, replica: Replica) -> None:
        """Nothing of an earlier core will arrive from a replica any more."""
        for running in self._running.values():
            running.leaving.discard(replica.number)

    def _on_up(self, replica: Replica, up: ReplicaUp) -> None:
        """Connect to a replica, and send it the requests that wait for one."""
        if self._failed.done() or (replica.state, replica.incarnation) == ("up", up.incarnation):
            return
        if replica.state == "up":  # its death was not noticed
            self._on_lost(replica, ReplicaLost(replica.number, "it was restarted", returns=True))
        replica.state, replica.incarnation = "up", up.incarnation
        replica.tensor_parallel_size, replica.stages, replica.kv_peer = up.tensor_parallel_size, up.stages, up.kv_peer
        replica.prefill_context_parallel_size = up.prefill_context_parallel_size
        self._metrics.stage_ranks[replica.number] = up.tensor_parallel_size * up.prefill_context_parallel_size
        replica.is_silent = replica.has_failed_probe = False
        replica.reason, replica.heard_at = None, self.loop.time()
        self._forget_leaving(replica)
        self._awaited.discard(replica.number)
        replica.open()
        self._send(Join(self.index), replica.number)
        if self._pinned_adapters:
            self._send(PinAdapters(self.index, self._pinned_adapters), replica.number)
        if up.stats is not None:
            self._metrics.take(replica.number, up.stats)
        if self._router is not None:
            self._router.on_replica_ready(replica.number)
            self._follow(replica)
        self._last_up = up
        self._update_ready()
        waiting = [
            (i, each) for i, each in self._running.items() if each.replica is None and not self._suspects.waits(i)
        ]
        for _, running in waiting:
            self._resume(running)
        if waiting:
            logger.info("%s is up; %d requests go on", self._subject(replica.number), len(waiting))

    def _follow(self, replica: Replica) -> None:
        """Ask a replica what it has cached, now and from now on."""
        if self._views is not None:
            replica.send(self._views.follow(replica.number, replica.store))

    def _follow_stores(self) -> None:
        """Ask for what all stores have, after the replica that was asked has gone."""
        if self._views is not None and (silent := self._views.silent_stores()):
            for store, replica in {each.store: each for each in self._replicas.values() if each.state == "up"}.items():
                if store in silent:
                    self._follow(replica)

    def _update_ready(self) -> None:
        """Become ready when a replica has been up and none is still loading for the first time."""
        if not self._ready.done() and not self._is_loading and self._last_up is not None:
            self._ready.set_result(self._last_up)

    def _on_lost(self, replica: Replica, lost: ReplicaLost) -> None:
        """Resume the requests of a dead replica on others, or when a replica is back."""
        if replica.state == "dead" or self._failed.done():
            return
        replica.state, replica.reason = "restarting" if lost.returns else "dead", lost.reason
        self._awaited.discard(replica.number)
        self._disconnect(replica)
        self._update_ready()
        moved = {i: running for i, running in self._running.items() if running.replica == replica.number}
        self._handovers.forget_successor(replica.number)
        for request_id, running in moved.items():
            running.replica = None
            if self._router is not None:
                self._router.on_finished(request_id, [])
            if running.trace is not None:
                running.trace.leave("replica_lost", f"{self._subject(replica.number)} has died: {lost.reason}")
        cause = self._suspects.on_death(moved, time.monotonic()) if lost.may_be_caused_by_request else None
        if cause is not None:
            self._give_up(
                cause,
                f"the engine died {cause.num_deaths} times while it ran this request, which is given up: {lost.reason}",
            )
        for request_id, running in moved.items():
            if request_id in self._running and running.replica is None and not self._suspects.waits(request_id):
                self._resume(running)
        # Last, as the tokens of finished requests are added to the replica's cache.
        if self._router is not None:
            self._router.on_replica_dead(replica.number)
            self._follow_stores()
        if moved:
            where = "go on elsewhere" if self._live_replicas() else "wait until it is back"
            logger.warning("%s has died; %d requests %s", self._subject(replica.number), len(moved), where)

    def _run_suspect(self, request_id: str | None) -> None:
        """Let the next suspect run, if another one may."""
        if request_id is not None:
            self._resume(self._running[request_id])

    def _resume(self, running: RunningRequest) -> None:
        """Let a request go on after the tokens delivered so far."""
        request, running.num_resumed = running.resume_request, len(running.delivered)
        running.num_repeated = 0 if request.output_token_ids else running.num_scored_tokens
        if self._router is not None:
            self._router.on_finished(request.request_id, [])
        self._place(running, request)

    def _live_replicas(self) -> list[int]:
        """The replicas that get requests. Unresponsive ones are included only if there are no others."""
        up = [replica for replica in self._replicas.values() if replica.state == "up"]
        return [replica.number for replica in up if not replica.is_unresponsive] or [replica.number for replica in up]

    def _stats(self, replicas: Sequence[int] | None = None) -> dict[int, EngineStats]:
        """The latest stats of these replicas, or of the replicas that get requests."""
        return {number: self._metrics.of(number) for number in replicas or self._live_replicas()}

    def _subject(self, replica: int) -> str:
        """The subject of log messages about a replica."""
        return "the engine" if self._router is None else f"replica {replica}"

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
        """Process all received messages. ZMQ_FD is edge-triggered: it signals new messages, not unread ones. After many
        KV events, other work of the loop goes first."""
        if self._responses.closed:
            return
        now, num_bytes = self.loop.time(), 0
        try:
            while num_bytes <= _NEWS_BYTES:
                frames = self._responses.recv_multipart(zmq.NOBLOCK)
                try:
                    message = self._decoder.decode(join(frames))
                except UNDECODABLE as error:
                    self._dropped.add(error)
                    continue
                replica = self._replicas.get(message.replica)
                if replica is None or replica.state not in ("up", "draining"):
                    continue
                if replica.incarnation != message.incarnation:
                    continue  # a late message of a replica that has died
                if isinstance(message, KVStoreState):  # says nothing about the replica
                    self._metrics.take_store(message.replica, replica.host, message.stats, replica.store)
                    continue
                if isinstance(message, KVEventsNews):  # of a thread of its own, too
                    if self._views is not None and (answer := self._views.take(message)) is not None:
                        replica.send(answer)
                    num_bytes += len(message.batch)
                    continue
                replica.is_silent, replica.heard_at = False, now
                if isinstance(message, EngineCoreOutputs):
                    if message.stats is not None or message.outputs or message.request_ids:  # not a pulse
                        replica.has_failed_probe = False
                        self._deliver(message)
                else:
                    replica.has_failed_probe = False
                    if isinstance(message, PrefixCacheReset) and self._router is not None:
                        self._router.on_reset(message.replica)
                    num_bytes += len(message.events) if isinstance(message, KVEventsState) else 0
                    self.calls.on_message(message)
            self.loop.call_soon(self._receive)
        except zmq.Again:
            pass
        except Exception as error:  # a bug here must not leave requests waiting forever
            logger.error("the connection to the engine failed", exc_info=error)
            self.loop.remove_reader(self._responses.FD)
            self.fail(f"the connection to the engine failed: {error!r}")

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """Deliver a step's outputs, except for requests that are unknown or have moved."""
        now = time.monotonic()
        if self._router is not None:
            self._router.on_output(outputs.replica)
        if outputs.stats is not None:
            self._metrics.take(outputs.replica, outputs.stats)
        if outputs.expert_load is not None:
            self._metrics.expert_load = outputs.expert_load
        if outputs.rank_stats is not None:
            self._metrics.rank_stats[outputs.replica] = outputs.rank_stats
        for record in outputs.warnings:
            record.replica = outputs.replica
            log.RECENT.records.append(record)
        earlier: list[float] = []
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            running = self._running.get(request_id)
            if running is not None and running.replica == outputs.replica:
                if running.last_output is not None:
                    earlier.append(running.last_output)
                running.last_output = now
                running.delivered.append(token_id)
                if running.num_deaths:
                    self._run_suspect(self._suspects.on_tokens(request_id, running))
                running.stream.put_token(request_id, token_id)
        for last_output, count in Counter(earlier).items():  # most requests had their last output in the same step
            self._metrics.observe(outputs.replica, "inter_token_latency_seconds", now - last_output, count)
        for output in outputs.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if running.replica != outputs.replica:
                if output.finish_reason is not None or output.is_handed_over:
                    running.leaving.discard(outputs.replica)
                    if running.replica is None and not self._suspects.waits(output.request_id):
                        self._resume(running)
                continue
            self._handovers.on_output(running, output, outputs.replica, now)
            self._record_progress(running, output)
            if running.trace is not None:
                running.trace.receive(output, now)
            if running.first_output is None and (output.token_ids or output.vector is not None):
                running.first_output, running.prefill_seconds = now, output.running_seconds
                if running.adapter:
                    self._metrics.adapters.start(running.adapter, now - running.arrived)
                running.queue_seconds = max(0.0, now - running.arrived - output.running_seconds)
                self._metrics.observe(outputs.replica, "request_queue_time_seconds", running.queue_seconds)
                self._metrics.observe(outputs.replica, "request_prefill_time_seconds", output.running_seconds)
            if output.token_ids:
                if running.last_output is None:
                    self._metrics.observe(outputs.replica, "time_to_first_token_seconds", now - running.arrived)
                    self._admission.start(running.share)
                else:
                    since = now - running.last_output
                    self._metrics.observe(outputs.replica, "inter_token_latency_seconds", since)
                running.last_output = now
            if output.finish_reason is not None:
                del self._running[output.request_id]
                self._on_finished(output.request_id, running, output.finish_reason)
            running.stream.put(output)
            if output.is_handed_over:
                self._hand_over(running, outputs.replica, now)
        if self._replicas[outputs.replica].state == "draining":
            self._check_drained()

    def _record_progress(self, running: RunningRequest, output: EngineCoreOutput) -> None:
        """Store the state for resuming the request elsewhere, and remove outputs that a previous replica has
        delivered."""
        if self._router is not None and (output.token_ids or output.vector is not None):
            self._router.on_first_token(output.request_id, output.running_seconds)
        if (scores := output.prompt_logprobs) is not None:
            repeated = min(running.num_repeated, len(scores))
            running.num_repeated -= repeated
            running.num_scored_tokens += len(scores) - repeated
            output.prompt_logprobs = scores.after(repeated) if repeated < len(scores) else None
        if output.token_ids:
            if running.num_cached_tokens is None:
                running.num_cached_tokens = output.num_cached_tokens
                running.num_loaded_tokens = output.num_loaded_tokens
            output.num_cached_tokens = running.num_cached_tokens
            output.num_loaded_tokens = running.num_loaded_tokens
            running.delivered += output.token_ids
            if running.num_deaths:
                self._run_suspect(self._suspects.on_tokens(output.request_id, running))
