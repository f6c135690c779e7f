"""The text side of a model, which all APIs share: input processor, engine client, output processors."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.plan_text import cache_text
from quire.engine.core.launch import (
    LOOPBACK,
    Endpoints,
    local_endpoints,
    replica_config,
    reserve_ports,
    socket_port,
    start_core,
)
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.frontend.chat_formats import ChatFormats
from quire.server.frontend.dp_coordinator import DPCoordinator
from quire.server.frontend.engine_client import SHUTTING_DOWN, EngineClient
from quire.server.frontend.generation import Embedding, Generation
from quire.server.frontend.input_processor import InputProcessor
from quire.server.frontend.inputs import GenerationInput
from quire.server.frontend.metrics import Metrics
from quire.server.frontend.output_processor import OutputProcessor
from quire.server.frontend.output_stream import EngineUnavailable, OutputStream

logger = logging.getLogger(__name__)

_NO_PARAMS = SamplingParams()
"""Used where nothing is sampled."""
_LEAVE_SECONDS = 0.05
"""Polling interval of hosts that shut down together."""
_MAX_FOLDER_BYTES = 90
"""In bytes. The path of a Unix socket inside must be shorter than 108 bytes (unix(7))."""


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


class Frontend:
    """The running replicas and their text side. Call `start`, await `ready`, then `close`, all on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        metrics: Metrics,
        process_info: ApiProcessInfo,
        formats: ChatFormats,
    ) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.process_info = process_info
        self.formats = formats
        self._serials = itertools.count()
        self._open: weakref.WeakValueDictionary[str, Generation | Embedding] = weakref.WeakValueDictionary()
        """By the caller's id."""
        self._seeds = random.Random(
            f"{config.model.seed}/{process_info.index}" if process_info.index else config.model.seed
        )
        self._remove_folder: weakref.finalize[[str], Frontend] | None = None
        self._hosts: DPCoordinator | None = None
        self._ports: list[socket.socket] = []
        self._seconds: dict[str, float] = {}
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, formats))

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

        `count` is the number of API processes; the others call `join`. With `max_queue`, `admit` and `generate` raise
        `QueueFull` when that many requests are waiting. `hosts` are the hosts of other replicas
        (`quire.server.frontend.dp_coordinator.connect_hosts`), which are closed with the frontend.
        """
        folder = tempfile.mkdtemp(prefix="quire-")
        if len(folder) > _MAX_FOLDER_BYTES:
            os.rmdir(folder)
            raise ConfigError(
                f"the path in TMPDIR is too long for Unix sockets: {os.path.dirname(folder)}; set a shorter one"
            )
        endpoints = local_endpoints(config.parallel, folder, count)
        if hosts is not None:
            endpoints = Endpoints(hosts.requests, hosts.responses or endpoints.responses)
        process_info = ApiProcessInfo(folder, endpoints, tuple(config.parallel.api_replicas))
        metrics = Metrics(name, process_info.metrics, 0, count, process_info.replicas)
        ports = reserve_ports(LOOPBACK, 1) if config.parallel.is_coupled and hosts is None else []
        master = (LOOPBACK, socket_port(ports[0])) if ports else None if hosts is None else hosts.master

        def start_replica(replica: int) -> subprocess.Popen[bytes]:
            return start_core(replica_config(config, replica, master), endpoints, log_level)

        cores = {replica: start_replica(replica) for replica in config.parallel.local_replicas}
        restart = None if config.parallel.is_coupled else start_replica  # coupled replicas end together
        frontend = Frontend._of(config, cores, metrics, process_info, formats or ChatFormats(), max_queue, restart)
        frontend._ports = ports
        frontend._remove_folder = weakref.finalize(frontend, shutil.rmtree, folder, ignore_errors=True)
        if hosts is not None:
            frontend._hosts = hosts
            hosts.watch(frontend.client)
        return frontend

    @staticmethod
    async def join(
        config: EngineConfig,
        process_info: ApiProcessInfo,
        *,
        name: str,
        formats: ChatFormats,
        max_queue: int | None = None,
    ) -> Frontend:
        """Create the text side for an engine that another process has started; `max_queue` as in `start`."""
        metrics = Metrics(name, process_info.metrics, process_info.index, process_info.count, process_info.replicas)
        return Frontend._of(config, None, metrics, process_info, formats, max_queue)

    @staticmethod
    def _of(
        config: EngineConfig,
        cores: Mapping[int, subprocess.Popen[bytes]] | None,
        metrics: Metrics,
        process_info: ApiProcessInfo,
        formats: ChatFormats,
        max_queue: int | None,
        restart: Callable[[int], subprocess.Popen[bytes]] | None = None,
    ) -> Frontend:
        client = EngineClient(
            process_info.endpoints,
            cores,
            metrics,
            process_info.index,
            replicas=process_info.replicas,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_queue=max_queue,
            cache=config.cache,
            restart=restart,
            are_coupled=config.parallel.is_coupled,
        )
        return Frontend(config, client, metrics, process_info, formats)

    async def ready(self) -> dict[str, float]:
        """Wait until requests can be served; returns the durations of the start-up phases in seconds.

        Raises `ConfigError` for errors of the tokenizer and `EngineUnavailable` for errors of the engine.
        """
        await asyncio.shield(self._loading)
        ready = await self.client.ready()
        if ready.stats is not None and ready.stats.kv_blocks != self.config.cache.num_blocks:
            logger.info("%s", cache_text(self.config.with_blocks(ready.stats.kv_blocks)))
        return self._seconds | ready.seconds

    @property
    def input_processor(self) -> InputProcessor:
        """Raises `EngineUnavailable` while the tokenizer is loading."""
        if not self._loading.done():
            raise EngineUnavailable("the model is still loading")
        return self._loading.result()

    def admit(self, *, embeds: bool = False) -> InputProcessor:
        """Return the input processor if a request can be accepted now, before anything is spent on it.

        Raises `EngineUnavailable` or `QueueFull` if none can, and `InvalidParameter` if the model does not support such
        requests (`embeds`: embeddings, otherwise generation).
        """
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
        self.client.admit()
        return self.input_processor

    async def probe(self) -> None:
        """Return when the engine loop and every rank have answered; raises `EngineUnavailable` if they do not."""
        _ = self.input_processor
        await self.client.probe()

    def generate(self, request_id: str, given: GenerationInput) -> Generation:
        """Generate `given.params.n` sequences for each prompt.

        Raises `InvalidParameter`, `QueueFull` and `EngineUnavailable` before anything has run.
        """
        sequences = [
            (prompt, given.params.for_engine(self._seed(given.params.seed, choice)))
            for prompt in given.prompts
            for choice in range(given.params.n)
        ]
        tokenizer = self.input_processor.tokenizer
        stream, engine_ids = self._submit(request_id, sequences, given.priority, given.cache_salt)
        try:  # the engine works on the prompts meanwhile
            processors = {
                engine_id: OutputProcessor(tokenizer, index, prompt, given.params, given.output_format)
                for index, (engine_id, (prompt, _)) in enumerate(zip(engine_ids, sequences, strict=True))
            }
        except BaseException:
            stream.close()
            raise
        generation = self._open[request_id] = Generation(stream, processors)
        return generation

    def embed(
        self, request_id: str, prompts: Sequence[list[int]], priority: int = 0, cache_salt: str | None = None
    ) -> Embedding:
        """Compute a vector for each of the processed prompts; otherwise like `generate`."""
        sequences = [(prompt, _NO_PARAMS) for prompt in prompts]
        embedding = self._open[request_id] = Embedding(*self._submit(request_id, sequences, priority, cache_salt))
        return embedding

    def _submit(
        self,
        request_id: str,
        sequences: Sequence[tuple[list[int], SamplingParams]],
        priority: int,
        cache_salt: str | None,
    ) -> tuple[OutputStream, list[str]]:
        """Submit the sequences of a request; returns their outputs and their ids."""
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidParameter("priority requires a server started with --scheduling-policy priority", "priority")
        if (earlier := self._open.get(request_id)) is not None and earlier.is_open:
            raise InvalidParameter(f"a request with the id {request_id} is already running", "request_id")
        # Numbered, and with the number of the process, so that a late output of a finished request is not mistaken for
        # one of a new request with the same id.
        serial = next(self._serials)
        engine_ids = [f"{request_id}-{at}-{serial}@{self.process_info.index}" for at in range(len(sequences))]
        # The engine sees no text: a salt has the length of a prefix cache hash.
        salt = blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest() if cache_salt else b""
        requests = [(engine_id, *sequence) for engine_id, sequence in zip(engine_ids, sequences, strict=True)]
        return self.client.submit(requests, priority, salt), engine_ids

    async def close(self, *, together: bool = False) -> None:
        """Abort running requests. The process that started the engine cores also stops them and removes the sockets.

        `together`: unless an error occurs, keep the cores running until no other host needs their experts.
        """
        (loaded,) = await asyncio.gather(self._loading, return_exceptions=True)
        if isinstance(loaded, InputProcessor):
            loaded.close()
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

    def _load(self, formats: ChatFormats) -> InputProcessor:
        begun = time.monotonic()
        processor = InputProcessor.load(self.config.model, formats)
        self._seconds["tokenizer"] = time.monotonic() - begun
        return processor

    def _seed(self, seed: int | None, choice: int) -> int:
        """The seed of one sequence: the user's for the first choice, a derived one for others; or the next internal
        one.
        """
        if seed is None:
            return self._seeds.getrandbits(63)
        return seed if choice == 0 else random.Random(f"{seed}/{choice}").getrandbits(63)
