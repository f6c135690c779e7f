"""The text side of a model, which HTTP, `LLM` and `AsyncLLM` use: renderer, engine client, output processors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType

import msgspec

from quire.engine.config.engine_config import EngineConfig
from quire.engine.core.launch import (
    LOOPBACK,
    Endpoints,
    local_endpoints,
    replica_config,
    reserve_ports,
    socket_port,
    start_core,
)
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.frontend.dp_coordinator import DPCoordinator
from quire.server.frontend.engine_client import SHUTTING_DOWN, EngineClient
from quire.server.frontend.metrics import Metrics
from quire.server.frontend.output_processor import OutputProcessor, TextDelta
from quire.server.frontend.output_stream import EngineUnavailable, OutputStream, RequestFailed
from quire.server.frontend.renderer import ChatFormats, Renderer
from quire.server.parsers.output_parser import OutputFormat

logger = logging.getLogger(__name__)

_NO_PARAMS = SamplingParams()
"""Used where nothing is sampled."""
_LEAVE_SECONDS = 0.05
"""Polling interval of hosts that shut down together."""
_LONGEST_FOLDER = 90
"""In bytes. The path of a Unix socket inside must be shorter than 108 bytes (unix(7))."""


class Generation:
    """One request: prompts × n sequences, numbered prompt by prompt.

    Iterating yields lists of `TextDelta`s until each sequence has its finish reason; raises `RequestFailed` and
    `EngineUnavailable`. As a context manager, it aborts what is still running on exit.
    """

    def __init__(self, stream: OutputStream, sequences: dict[str, OutputProcessor]) -> None:
        self._stream = stream
        self._sequences = sequences

    @property
    def is_open(self) -> bool:
        """Whether part of it may still be running."""
        return bool(self._sequences)

    def close(self) -> None:
        """Abort what is still running in the engine."""
        self._sequences.clear()
        self._stream.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        while self._sequences:
            deltas = []
            for output in await self._stream.get():
                if output.finish_reason in ("error", "abort"):
                    raise RequestFailed(output.error or "the engine aborted the request")
                delta = self._sequences[output.request_id].feed(output)
                if delta.finish_reason is not None:
                    del self._sequences[output.request_id]
                    if output.finish_reason is None:
                        self._stream.stop(output.request_id)
                if delta.token_ids or delta.finish_reason is not None:  # otherwise only part of the prompt was scored
                    deltas.append(delta)
            if deltas:
                yield deltas


class Embedding:
    """One request for the vectors of one or more prompts. As a context manager, it aborts what is still running on
    exit.
    """

    def __init__(self, stream: OutputStream, request_ids: Sequence[str]) -> None:
        self._stream = stream
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}

    @property
    def is_open(self) -> bool:
        """Whether part of it may still be running."""
        return bool(self._places)

    async def vectors(self) -> list[EngineCoreOutput]:
        """Return the engine's outputs, which contain the vectors, in the order of the prompts.

        Raises `RequestFailed` and `EngineUnavailable`.
        """
        found: dict[int, EngineCoreOutput] = {}
        while self._places:
            for output in await self._stream.get():
                if output.finish_reason in ("error", "abort"):
                    raise RequestFailed(output.error or "the engine aborted the request")
                assert output.vector is not None
                found[self._places.pop(output.request_id)] = output
        return [found[place] for place in sorted(found)]

    def close(self) -> None:
        """Abort what is still running in the engine."""
        self._places.clear()
        self._stream.close()

    def __enter__(self) -> Embedding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class ApiProcessInfo:
    """The addresses that the API processes share, and the number of this process."""

    folder: str
    """Contains the sockets and the metrics."""
    endpoints: Endpoints
    replicas: tuple[int, ...]
    """The replicas that the API serves."""
    index: int = 0

    @property
    def count(self) -> int:
        return len(self.endpoints.responses)

    @property
    def metrics(self) -> str:
        return f"{self.folder}/metrics"

    @property
    def suffix(self) -> str:
        """Makes request ids of the engine unique across processes."""
        return f"@{self.index}" if self.index else ""


class Frontend:
    """The running replicas and their text side. Call `start`, await `ready`, then `close`, all on one event loop."""

    def __init__(
        self, config: EngineConfig, client: EngineClient, metrics: Metrics, place: ApiProcessInfo, formats: ChatFormats
    ) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.place = place
        self._serials = itertools.count()
        self._generations: weakref.WeakValueDictionary[str, Generation | Embedding] = weakref.WeakValueDictionary()
        """By the caller's id."""
        self._seeds = random.Random(f"{config.model.seed}/{place.index}" if place.index else config.model.seed)
        self._remove_folder: weakref.finalize[[str], Frontend] | None = None
        self._hosts: DPCoordinator | None = None
        self._ports: list[socket.socket] = []
        self._seconds: dict[str, float] = {}
        self._renderer = asyncio.create_task(asyncio.to_thread(self._load_renderer, formats))

    @staticmethod
    async def start(
        config: EngineConfig,
        *,
        name: str,
        formats: ChatFormats | None = None,
        log_level: str = "info",
        count: int = 1,
        max_queue: int | None = None,
        hosts: DPCoordinator | None = None,
    ) -> Frontend:
        """Start this host's engine cores, and load the tokenizer meanwhile. `name` is a label of the metrics.

        `count` is the number of API processes; the others call `join`. With `max_queue`, `check` and `generate` raise
        `QueueFull` when that many requests are waiting. `hosts` are the hosts of other replicas
        (`quire.server.frontend.dp_coordinator.connect_hosts`), which are closed with the frontend.
        """
        folder = tempfile.mkdtemp(prefix="quire-")
        if len(folder) > _LONGEST_FOLDER:
            os.rmdir(folder)
            raise ConfigError(
                f"the path in TMPDIR is too long for Unix sockets: {os.path.dirname(folder)}; set a shorter one"
            )
        endpoints = local_endpoints(config.parallel, folder, count)
        if hosts is not None:
            endpoints = Endpoints(hosts.requests, hosts.responses or endpoints.responses)
        place = ApiProcessInfo(folder, endpoints, tuple(config.parallel.api_replicas))
        metrics = Metrics(name, place.metrics, 0, count, place.replicas)
        ports = reserve_ports(LOOPBACK, 1) if config.parallel.is_coupled and hosts is None else []
        master = (LOOPBACK, socket_port(ports[0])) if ports else None if hosts is None else hosts.master

        def start_replica(replica: int) -> subprocess.Popen[bytes]:
            return start_core(replica_config(config, replica, master), endpoints, log_level)

        cores = {replica: start_replica(replica) for replica in config.parallel.local_replicas}
        restart = None if config.parallel.is_coupled else start_replica  # coupled replicas end together
        service = Frontend._of(config, cores, metrics, place, formats or ChatFormats(), max_queue, restart)
        service._ports = ports
        service._remove_folder = weakref.finalize(service, shutil.rmtree, folder, ignore_errors=True)
        if hosts is not None:
            service._hosts = hosts
            hosts.watch(service.client)
        return service

    @staticmethod
    async def join(
        config: EngineConfig, place: ApiProcessInfo, *, name: str, formats: ChatFormats, max_queue: int | None = None
    ) -> Frontend:
        """Create the text side for an engine that another process has started; `max_queue` as in `start`."""
        metrics = Metrics(name, place.metrics, place.index, place.count, place.replicas)
        return Frontend._of(config, None, metrics, place, formats, max_queue)

    @staticmethod
    def _of(
        config: EngineConfig,
        cores: Mapping[int, subprocess.Popen[bytes]] | None,
        metrics: Metrics,
        place: ApiProcessInfo,
        formats: ChatFormats,
        max_queue: int | None,
        restart: Callable[[int], subprocess.Popen[bytes]] | None = None,
    ) -> Frontend:
        client = EngineClient(
            place.endpoints,
            cores,
            metrics,
            place.index,
            replicas=place.replicas,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_queue=max_queue,
            cache=config.cache,
            restart=restart,
            are_coupled=config.parallel.is_coupled,
        )
        return Frontend(config, client, metrics, place, formats)

    async def ready(self) -> dict[str, float]:
        """Wait until requests can be served; returns the durations of the start-up phases in seconds.

        Raises `ConfigError` for errors of the tokenizer and `EngineUnavailable` for errors of the engine.
        """
        await asyncio.shield(self._renderer)
        ready = await self.client.ready()
        if ready.stats is not None and ready.stats.kv_blocks != self.config.cache.num_blocks:
            from quire.engine.config.plan_text import cache_text

            logger.info("%s", cache_text(self.config.with_blocks(ready.stats.kv_blocks)))
        return self._seconds | ready.seconds

    def check(self, *, embeds: bool = False) -> None:
        """Raise `EngineUnavailable` or `QueueFull` if no request can be accepted now.

        Raises `InvalidParameter` if the model does not support such requests (`embeds`: embeddings, otherwise
        generation).
        """
        self._check_runner(embeds)
        self.check_loaded()
        self.client.check()
        self.client.check_queue()

    async def probe(self) -> None:
        """Return when the engine loop and every rank have answered; raises `EngineUnavailable` if they do not."""
        self.check_loaded()
        await self.client.probe()

    def check_loaded(self) -> None:
        """Raise `EngineUnavailable` if there is no `renderer` yet."""
        if not self._renderer.done():
            raise EngineUnavailable("the model is still loading")

    @property
    def renderer(self) -> Renderer:
        """Available after `ready` has returned or `check` has passed."""
        return self._renderer.result()

    def generate(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        reading: OutputFormat | None = None,
    ) -> Generation:
        """Generate `params.n` sequences for each rendered prompt; `reading` says how to parse their text.

        `params` come from `Renderer.resolve`. Cached prefixes are shared only among requests with the same
        `cache_salt`.

        Raises `InvalidParameter`, `QueueFull` and `EngineUnavailable` before anything has run.
        """
        self._check_runner(embeds=False)
        self._check_request(request_id, priority)
        tokenizer, serial = self.renderer.tokenizer, next(self._serials)
        requests: list[tuple[str, list[int], SamplingParams]] = []
        sequences: dict[str, OutputProcessor] = {}
        for prompt in prompts:
            for choice in range(params.n):
                # Numbered, so that a late output of a finished request is not mistaken for one of a new request with
                # the same id.
                engine_id = f"{request_id}-{len(requests)}-{serial}{self.place.suffix}"
                sequences[engine_id] = OutputProcessor(tokenizer, len(requests), prompt, params, reading)
                requests.append((engine_id, prompt, params.for_engine(self._seed(params.seed, choice))))
        generation = Generation(self.client.submit(requests, priority, _salt(cache_salt)), sequences)
        self._generations[request_id] = generation
        return generation

    def embed(
        self, request_id: str, prompts: Sequence[list[int]], priority: int = 0, cache_salt: str | None = None
    ) -> Embedding:
        """Compute a vector for each of the rendered prompts; otherwise like `generate`."""
        self._check_runner(embeds=True)
        self._check_request(request_id, priority)
        serial = next(self._serials)
        ids = [f"{request_id}-{number}-{serial}{self.place.suffix}" for number in range(len(prompts))]
        requests = [(engine_id, prompt, _NO_PARAMS) for engine_id, prompt in zip(ids, prompts, strict=True)]
        embedding = Embedding(self.client.submit(requests, priority, _salt(cache_salt)), ids)
        self._generations[request_id] = embedding
        return embedding

    def _check_runner(self, embeds: bool) -> None:
        """Reject requests that the model does not support."""
        if embeds and self.config.model.pooling is None:
            raise InvalidParameter(
                "this model generates text and does not support embeddings; use an embedding model, or start the "
                "server with --runner pooling",
                "model",
            )
        if not embeds and self.config.model.pooling is not None:
            raise InvalidParameter(
                "this model computes embeddings and does not generate text; use /v1/embeddings (in Python: LLM.embed)",
                "model",
            )

    def _check_request(self, request_id: str, priority: int) -> None:
        try:
            msgspec.convert(priority, int)
        except msgspec.ValidationError as error:
            raise InvalidParameter(f"priority: {error}", "priority") from None
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidParameter("priority requires a server started with --scheduling-policy priority", "priority")
        if (earlier := self._generations.get(request_id)) is not None and earlier.is_open:
            raise InvalidParameter(f"a request with the id {request_id} is already running", "request_id")

    async def close(self, *, together: bool = False) -> None:
        """Abort running requests. The process that started the engine cores also stops them and removes the sockets.

        `together`: unless an error occurs, keep the cores running until no other host needs their experts.
        """
        (renderer,) = await asyncio.gather(self._renderer, return_exceptions=True)
        if isinstance(renderer, Renderer):
            renderer.close()
        self.client.fail(SHUTTING_DOWN)
        if self._hosts is not None:
            reason = str(await self.client.failed())
            if together and reason == SHUTTING_DOWN:
                self._hosts.request_shutdown()
                while not self._hosts.can_shut_down:
                    await asyncio.sleep(_LEAVE_SECONDS)
            await asyncio.to_thread(self._hosts.close, "" if reason == SHUTTING_DOWN else reason)
        await self.client.close()
        for port in self._ports:
            port.close()
        if self._remove_folder is not None:
            self._remove_folder()

    def _load_renderer(self, formats: ChatFormats) -> Renderer:
        begun = time.monotonic()
        renderer = Renderer.load(self.config.model, formats)
        self._seconds["tokenizer"] = time.monotonic() - begun
        return renderer

    def _seed(self, seed: int | None, choice: int) -> int:
        """The seed of one sequence: the user's for the first choice, a derived one for others; or the next internal
        one.
        """
        if seed is None:
            return self._seeds.getrandbits(63)
        return seed if choice == 0 else random.Random(f"{seed}/{choice}").getrandbits(63)


def _salt(text: str | None) -> bytes:
    """A salt with the length of a prefix cache hash; the engine sees no text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest() if text else b""
