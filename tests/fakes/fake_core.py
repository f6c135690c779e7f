"""A stand-in for the engine core: the same messages, with an echo instead of a model.

It answers a request with the prompt's own tokens, one a step, and the end-of-sequence token; with `ignore_eos` it
starts over until `max_tokens`. Special tokens in the prompt (tests.fakes.tokenizers.COMMANDS) are not echoed but
obeyed. It is a thread (`start`) or a process of its own (`start_process`). The mode `dead` reports a death instead
of starting, `loading` never gets ready, `stubborn` gets ready and then does nothing, nor does it stop; `lingering`
reports a death then and does not end; `one at a time` lets the others wait; `slow` takes 10 ms for a step; `held until
PATH` lets requests that have got `HELD_AT` tokens wait until this file exists. For a model that embeds, the vector of a
prompt is `vector` of its tokens. With an adapter, an answer begins with `adapter_token`, and then with the token from
which on the adapter changes the prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.engine.core.heartbeats import PULSE_SECONDS
from quire.engine.core.launch import CoreArgs
from quire.engine.process import supervisor
from quire.engine.process.trace import Event, compress, process_id
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Join,
    ListRequests,
    PinAdapters,
    PrefixCacheReset,
    PrepareAdapter,
    PreparedAdapter,
    Probe,
    ProbeReply,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
    ToCore,
    ToServer,
)
from quire.engine.protocol.kv_events import GetKVEvents, KVEventSource, KVEventsState
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.profile import (
    CORE,
    ClockPing,
    ClockReply,
    ProfileReply,
    StartProfile,
    StopProfile,
    TracePiece,
    TraceSummary,
)
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import Failed, FromProcess, Heartbeat, Ready, Shutdown, ToProcess
from tests.fakes.outputs import prompt_logprobs

HELD_AT = 10
MAX_PINNED = 2
MAX_MODEL_LEN = 128
EOS = 2
DIE, VANISH, FAIL, HANG, MUTE = range(3, 8)
FAILURE: dict[str, Any] = {"error": "the KV cache is too small"}
"""How requests fail."""


class CoreThread(threading.Thread):
    """A fake core as a thread; to its supervisor it is a process."""

    def __init__(self, args: CoreArgs, mode: str) -> None:
        super().__init__(name=f"fake-core-{args.config.parallel.replica}", daemon=True)
        self.connection, self._own = Pipe()
        self._args, self._mode = args, mode
        self.returncode: int | None = None
        self._killed = threading.Event()
        self.start()

    def run(self) -> None:
        code = 0
        try:
            serve(self._args, self._mode, self._own, self._killed)
        except SystemExit as ended:
            code = int(ended.code or 0)
        self.returncode = -signal.SIGKILL if self._killed.is_set() else code
        self._own.close()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._killed.set()

    def kill_session(self) -> None:
        """It has started nothing."""


def start(args: CoreArgs, folder: str, mode: str = "") -> CoreThread:
    """Replaces `quire.engine.core.launch.start_core`: starts a core in a thread."""
    return CoreThread(args, mode)


def start_process(args: CoreArgs, folder: str, mode: str = "") -> supervisor.Process:
    """The same in a process."""
    return supervisor.start_process("tests.fakes.fake_core", (args, mode), env={"PYTHONPATH": os.getcwd()})


def adapter_token(adapter: AdapterRef) -> int:
    """The token with which answers by an adapter begin."""
    return 20 + adapter.digest[0] % 64


def vector(tokens: list[int], size: int) -> list[float]:
    """No other prompt's."""
    return [
        float((sum(token * (at + place + 1) for at, token in enumerate(tokens)) % 101) - 50) for place in range(size)
    ]


class FakeCore:
    def __init__(self, args: CoreArgs, channel: Connection[bytes, bytes]) -> None:
        self.replica = replica = args.config.parallel.replica
        self.incarnation = args.incarnation
        self.channel = channel
        """The connection to the supervisor."""
        self.milliseconds = 1
        """Minimum duration of a step."""
        self.width: int | None = None
        """Requests that run at once; None: all."""
        self.gate: Path | None = None
        """Requests get `HELD_AT` tokens until this file exists."""
        self.size = 0
        """Numbers in a vector; 0: text is generated."""
        self.context = zmq.Context()
        self.requests = self.context.socket(zmq.PULL)
        self.requests.bind(args.endpoints.requests[replica])
        self.responses = [self.context.socket(zmq.PUSH) for _ in args.endpoints.responses]
        for socket, address in zip(self.responses, args.endpoints.responses, strict=True):
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.connect(address)
        self.decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self.running: dict[str, Iterator[EngineCoreOutput]] = {}
        self.clients: dict[str, int] = {}
        """The API process of each request."""
        self.asked: dict[str, EngineCoreRequest] = {}
        events = args.config.kv_events
        self.kv_source: KVEventSource | None = None
        if events is not None:
            self.kv_source = KVEventSource(f"tcp://192.0.2.7:{5557 + replica}", None, 1, 2, 3, events.topic)
        self.pins: dict[int, set[bytes]] = {}
        """Up to `MAX_PINNED`."""
        self.reported: set[str] = set()
        """Requests whose first output, with the numbers that stand only there, has been sent."""
        self.stats = EngineStats(kv_blocks=100)
        self.is_mute = self.is_profiling = False

    def send(self, client: int, message: ToServer) -> None:
        self.responses[client].send(msgspec.msgpack.encode(message))

    def report(self, message: FromProcess) -> None:
        """Send the supervisor a message."""
        with contextlib.suppress(OSError):
            self.channel.send_bytes(msgspec.msgpack.encode(message))

    def run(self, killed: threading.Event) -> None:
        next_beat = next_pulse = 0.0
        while not killed.is_set():
            while self.requests.poll(self.milliseconds if self.running else 50):
                self.take(self.decoder.decode(self.requests.recv()))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 1.0
                self.report(Heartbeat())
            if time.monotonic() >= next_pulse:
                next_pulse = time.monotonic() + PULSE_SECONDS
                for client in range(len(self.responses)):
                    self.tell_client(client, [])
            if is_shutdown(self.channel):
                return
            self.step()

    def take(self, message: ToCore) -> None:
        match message:
            case EngineCoreRequest(request_id=request_id):
                self.running[request_id] = self.echo(message)
                self.clients[request_id], self.asked[request_id] = message.client, message
                self.stats.prompt_tokens += len(message.prompt_token_ids)
            case AbortRequests(request_ids):
                self.abort(request_ids)
            case Join(client):
                self.abort([i for i in self.running if self.clients[i] == client])
            case Probe(client, call_id) if not self.is_mute:
                self.send(client, ProbeReply(call_id, self.replica, self.incarnation))
            case ListRequests(client, call_id, limit):
                found = [self.asked[i] for i in self.running if message.selects(self.asked[i])]
                infos = [
                    RequestInfo(each.request_id, each.label, each.arrived, "prefill", len(each.prompt_token_ids))
                    for each in found[:limit]
                ]
                if not self.is_mute:
                    self.send(client, RequestList(call_id, infos, len(found), self.replica, self.incarnation))
            case GetKVEvents(client, call_id, has_blocks):
                for has_more in (True, False) if has_blocks else (False,):
                    content, own = b'{"type": "BlockStored"}' * has_blocks, (self.replica, self.incarnation)
                    state = KVEventsState(call_id, self.kv_source, 7 + self.replica, content, has_more, *own)
                    self.send(client, state)
            case ResetPrefixCache(client, call_id, clears_store):
                error = "the KV store is not up" if clears_store else ""
                self.send(client, PrefixCacheReset(call_id, error, self.replica, self.incarnation))
            case PrepareAdapter(client, call_id, adapter, pins):
                name = Path(adapter.paths[-1]).name.encode()
                error = "the adapter is bad" if b"bad" in name else "no memory left" if b"unlucky" in name else ""
                is_invalid = b"unlucky" not in name
                if pins and not error:
                    assert adapter.digest in self.pins[client]
                    error = "too many are pinned" if len(set.union(*self.pins.values())) > MAX_PINNED else ""
                self.send(client, PreparedAdapter(call_id, error, is_invalid, self.replica, self.incarnation))
            case PinAdapters(client, digests):
                self.pins[client] = {*digests}
            case ClockPing(client, call_id, incarnation):
                self.send(client, ClockReply(call_id, self.replica, incarnation, time.time_ns()))
            case StartProfile() | StopProfile():
                self.profile(message)

    def profile(self, message: StartProfile | StopProfile) -> None:
        """Record nothing, and tell so as the core and one rank."""
        is_start = isinstance(message, StartProfile)
        error = "" if is_start != self.is_profiling else "running already" if is_start else "no profile is running"
        reply = ProfileReply(message.call_id, self.replica, self.incarnation, error)
        self.send(message.client, reply)
        self.is_profiling = is_start
        if isinstance(message, StopProfile) and not error and not message.discard:
            for rank in (CORE, 0):
                pid = process_id(self.replica, rank)
                piece = compress([Event("X", "work", pid, 1, 1.0, 1.0)])
                summary = TraceSummary(f"replica {self.replica}, rank {rank}", pid, 1, message.clock)
                for data, last in ((piece, None), (b"", summary)):
                    place = self.replica, self.incarnation
                    self.send(message.client, TracePiece(message.client, message.call_id, rank, data, last, *place))

    def abort(self, request_ids: list[str]) -> None:
        ended = [i for i in request_ids if self.running.pop(i, None) is not None]
        self.tell([EngineCoreOutput(i, [], finish_reason="abort") for i in ended])

    def step(self) -> None:
        outputs = [
            output for request in list(self.running.values())[: self.width] if (output := next(request)) is not None
        ]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.request_id]
        outputs = [output for output in outputs if output.token_ids or output.finish_reason or output.prompt_logprobs]
        outputs = outputs[::-1] if self.size else outputs  # vectors may come in any order
        if outputs:
            self.tell(outputs)

    def tell(self, outputs: list[EngineCoreOutput]) -> None:
        self.stats.steps += 1
        self.stats.running = len(list(self.running)[: self.width])
        self.stats.waiting = len(self.running) - self.stats.running
        self.stats.generated_tokens += sum(len(output.token_ids) for output in outputs)
        for client in {self.clients[output.request_id] for output in outputs}:
            self.tell_client(client, [output for output in outputs if self.clients[output.request_id] == client])

    def tell_client(self, client: int, outputs: list[EngineCoreOutput]) -> None:
        plain = [output for output in outputs if output.token_ids and not output.logprobs and not output.finish_reason]
        full = [output for output in outputs if output not in plain]
        first = [output for output in plain if output.request_id not in self.reported]
        columns = [output for output in plain if output.request_id in self.reported]
        self.reported.update(output.request_id for output in first)
        ids, tokens = [output.request_id for output in columns], [output.token_ids[0] for output in columns]
        step = EngineCoreOutputs(first + full, self.stats, ids, tokens, self.replica, incarnation=self.incarnation)
        self.send(client, step)

    def echo(self, request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        """The outputs of a request after its earlier ones, one for each step; outputs without tokens are not sent."""
        prompt, params = request.prompt_token_ids, request.params
        room = MAX_MODEL_LEN - len(prompt)
        limit = min(params.max_tokens or room, room)
        script = [token for token in prompt[request.adapter_start :] if token > MUTE] + [EOS]
        if request.adapter is not None:
            script.insert(0, adapter_token(request.adapter))
        tokens = itertools.cycle(script[:-1]) if params.ignore_eos else iter(script)
        for command in (token for token in prompt if DIE <= token <= MUTE):
            yield from self.obey(command, request.request_id)
        if self.size:
            numbers = array("f", vector(prompt, self.size)).tobytes()
            yield EngineCoreOutput(request.request_id, [], finish_reason="stop", num_cached_tokens=1, vector=numbers)
        if params.prompt_logprobs is not None and not request.output_token_ids:
            for chunk in (prompt[1:4], prompt[4:]):
                yield EngineCoreOutput(
                    request.request_id, [], prompt_logprobs=self.score(chunk, params.prompt_logprobs)
                )
        for count, token in itertools.islice(enumerate(tokens, 1), len(request.output_token_ids), None):
            while count > HELD_AT and self.gate is not None and not self.gate.exists():
                yield EngineCoreOutput(request.request_id, [])
            is_stop = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
            reason: FinishReason | None = "stop" if is_stop else "length" if count == limit else None
            logprobs = None
            if params.logprobs is not None:
                top = [token, token + 1, token + 2][: params.logprobs]
                logprobs = [TokenLogprobs(-0.5, 1, top, [-0.5, -1.5, float("-inf")][: params.logprobs])]
            yield EngineCoreOutput(
                request.request_id, [token], logprobs, reason, token if is_stop else None, num_cached_tokens=1
            )

    def score(self, tokens: list[int], k: int) -> PromptLogprobs:
        """Each token is the second likeliest, behind the one before it in the vocabulary."""
        tops = ([token - 1, token, token + 1][:k] for token in tokens)
        rows = [(-1.0, 2, top, [-0.5, -1.0, float("-inf")][:k]) for top in tops]
        return prompt_logprobs(rows, min(k, 3))

    def obey(self, command: int, request_id: str) -> Iterator[EngineCoreOutput]:
        match command:
            case int() if command == DIE:
                self.report(Failed("rank 1 was killed by SIGKILL"))
                sys.exit(1)
            case int() if command == VANISH:
                sys.exit(3)
            case int() if command == FAIL:
                yield EngineCoreOutput(request_id, [], finish_reason="error", **FAILURE)
            case int() if command == HANG:
                while True:
                    yield EngineCoreOutput(request_id, [])
            case _:
                self.is_mute = True


def is_shutdown(channel: Connection[bytes, bytes]) -> bool:
    """Whether the supervisor has asked for the end, or has ended itself; a real core checks this in a thread."""
    try:
        return channel.poll(0) and isinstance(msgspec.msgpack.decode(channel.recv_bytes(), type=ToProcess), Shutdown)
    except (EOFError, OSError):
        return True


def serve(args: CoreArgs, mode: str, channel: Connection[bytes, bytes], killed: threading.Event) -> None:
    """Be a core until the supervisor stops it, or a prompt ends it by `SystemExit`."""
    core = FakeCore(args, channel)
    core.width = 1 if mode == "one at a time" else None
    core.milliseconds = 10 if mode == "slow" else 1
    if mode.startswith("held until "):
        core.gate = Path(mode.removeprefix("held until "))
    pooling = args.config.model.pooling
    core.size = pooling.size if pooling is not None else 0
    try:
        match mode:
            case "dead":
                core.report(Failed("the weights do not fit"))
            case "stubborn" | "lingering":
                core.report(Ready({"engine in all": 0.0}, core.stats))
                if mode == "lingering":
                    core.report(Failed("rank 0 hangs"))
                while not killed.wait(0.5):
                    core.report(Heartbeat())
            case "loading":
                core.run(killed)
            case _:
                core.report(Ready({"engine in all": 0.0}, None if core.size else core.stats))
                core.run(killed)
    finally:
        core.context.destroy(linger=5000)


def main() -> None:
    own = Connection(os.dup(0))
    args, mode = pickle.loads(own.recv_bytes())
    serve(args, mode, own, threading.Event())
