"""A client between sockets, and cores whose messages the test sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.core.launch import Endpoints
from quire.engine.protocol.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Join,
    ProbeReply,
    ToCore,
    ToServer,
)
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import ReplicaLost, ReplicaUp
from quire.server.client.engine_client import EngineClient
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import OutputStream
from tests.fakes.waiting import until_async

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def endpoints(folder: Path, replicas: int, clients: int = 1) -> Endpoints:
    return Endpoints(
        {number: f"ipc://{folder}/requests-{number}" for number in range(replicas)},
        tuple(f"ipc://{folder}/responses-{number}" for number in range(clients)),
    )


async def whole(stream: OutputStream) -> EngineCoreOutput:
    """All outputs of a request up to its end, merged into one. Raises the error that ends it otherwise."""
    outputs: list[EngineCoreOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += await stream.get()
    merged = OutputStream(None, [])  # type: ignore[arg-type]
    for output in outputs:
        merged.put(output)
    (one,) = merged._unread.values()
    return one


class Script:
    """A core whose messages the test sends."""

    def __init__(self, replica: int, ends: Endpoints, incarnation: int = 1) -> None:
        self.replica, self.incarnation = replica, incarnation
        self._context = zmq.Context()
        self._address = ends.requests[replica]
        self._requests = self._context.socket(zmq.PULL)
        self._requests.bind(self._address)
        self._responses = [self._context.socket(zmq.PUSH) for _ in ends.responses]
        for socket, address in zip(self._responses, ends.responses, strict=True):
            socket.connect(address)

    def say(self, message: ToServer, client: int = 0) -> None:
        message.replica, message.incarnation = self.replica, self.incarnation
        self._responses[client].send(msgspec.msgpack.encode(message))

    def tell(self, *outputs: EngineCoreOutput, stats: EngineStats | None = None) -> None:
        self.say(EngineCoreOutputs(list(outputs), stats))

    async def hear(self, kind: Any) -> Any:
        """The next message, which is of this kind."""
        await until_async(lambda: self._requests.poll(0))
        decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        message = decoder.decode(self._requests.recv())
        assert isinstance(message, kind), message
        return message

    @property
    def is_quiet(self) -> bool:
        return not self._requests.poll(50)

    def close(self) -> None:
        self._context.destroy(linger=200)


def stop_checks(client: EngineClient) -> None:
    """Let the client look for silent replicas only when the test does."""
    if client._check_timer is not None:
        client._check_timer.cancel()


@dataclass
class Scripted:
    client: EngineClient
    metrics: Metrics
    ends: Endpoints
    cores: list[Script]

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams = LONG) -> OutputStream:
        return self.client.submit([(request_id, prompt, params)])

    def up(self, core: Script) -> None:
        up = ReplicaUp(core.replica, core.incarnation, tensor_parallel_size=1, stages=[(0, 1)])
        self.client.update(up)

    async def lost(self, core: Script, reason: str, *, returns: bool = False) -> None:
        """The supervisor's report of a death, after the client has read all that the core has sent."""
        read = self.client.calls.waiting[core.replica, -1] = asyncio.get_running_loop().create_future()
        core.say(ProbeReply(-1))
        await read
        del self.client.calls.waiting[core.replica, -1]
        self.client.update(ReplicaLost(core.replica, reason, returns))

    def check_silence(self, core: Script, seconds: float) -> None:
        """Let the client look for silent replicas: nothing has come from this core for so long, but from the others."""
        now, silence = self.client.loop.time(), self.client._silence
        assert silence is not None
        silence.checked_at = now  # however long the test has taken
        for replica in self.client._replicas.values():
            replica.is_silent, replica.heard_at = False, now - seconds * (replica.number == core.replica)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.client.loop, "time", lambda: now)
            self.client._check_silence()
        stop_checks(self.client)

    async def of(self, request_id: str) -> Script:
        """The core that a request was sent to; its `EngineCoreRequest` is taken out there."""
        replica = self.client._running[request_id].replica
        assert replica is not None
        core = self.cores[replica]
        assert (await core.hear(EngineCoreRequest)).request_id == request_id
        return core


@asynccontextmanager
async def scripted(folder: Path, count: int = 2, **options: Any) -> AsyncIterator[Scripted]:
    ends = endpoints(folder, count)
    metrics = Metrics("m")
    client = EngineClient(ends, metrics, **options)
    stop_checks(client)  # the cores speak when the test lets them
    cores = [Script(number, ends) for number in range(count)]
    engine = Scripted(client, metrics, ends, cores)
    try:
        for core in cores:
            engine.up(core)
            metrics.state(core.replica, "up")
            await core.hear(Join)
        await client.ready()
        yield engine
    finally:
        await client.close()
        for core in cores:
            core.close()
