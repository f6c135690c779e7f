"""The text side of a model, which all APIs share: input processor, engine client, output processors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Self

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.supervision import EngineState, LogLevel, ReplicaUp, Resize
from quire.server.client.dp_coordinator import DPCoordinator
from quire.server.client.engine_client import SHUTTING_DOWN, EngineClient
from quire.server.client.engine_manager import ApiProcessInfo, EngineManager
from quire.server.client.history import History
from quire.server.client.media_metrics import MediaState
from quire.server.client.metrics import Metrics
from quire.server.client.output_stream import EngineUnavailable, OutputStream
from quire.server.client.profiler import Profiler
from quire.server.client.request_record import RECORD
from quire.server.client.tracing import TRACE
from quire.server.media.service import MediaService
from quire.server.media.types import MediaSettings
from quire.server.serving.adapters import AdapterRegistry, AdapterSettings, Change
from quire.server.serving.beam_search import BeamSearch
from quire.server.serving.generation import Embedding, Generation
from quire.server.serving.open_requests import ENGINE_ID, SEARCH_ID
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import GenerationInput, PoolingInput, Task, refusal, tasks_of
from quire.server.text.media_input import MediaAccess
from quire.server.text.output_processor import OutputProcessor

logger = logging.getLogger(__name__)

_NO_PARAMS = SamplingParams()
"""Used where nothing is sampled."""
_CLOSE_POLL_SECONDS = 0.005
_MEDIA_PROBLEMS: dict[MediaState, str | None] = {
    "loading": "the media process is starting",
    "up": None,
    "down": "the media process is being restarted",
    "failed": "the media process does not start, and is started again; the log of the server says why",
}


class Frontend:
    """The running replicas and their text side, on one event loop: call `start`, await `ready`, then `close`. As an
    async context manager, it is closed on exit.
    """

    def __init__(
        self,
        config: EngineConfig,
        process_info: ApiProcessInfo,
        *,
        name: str,
        formats: ChatFormats,
        max_queue: int | None = None,
        vllm_metrics: bool = True,
        on_drained: Callable[[int], None] = lambda replica: None,
        ask_resize: Callable[[Resize], Awaitable[None]] | None = None,
        set_log_level: Callable[[LogLevel], None] = log.set_level,
        manager: EngineManager | None = None,
        media_path: str = "",
        adapters: AdapterSettings | None = None,
        change_adapter: Change | None = None,
    ) -> None:
        """Create the text side for an engine that a manager has started; `name` and `max_queue` as in `start`,
        `vllm_metrics` as in `Metrics`, `on_drained` as in `EngineClient`.

        The caller passes on the manager's states to `update`. `ask_resize` asks the supervisor for other replicas;
        None: it cannot be asked. `set_log_level` sets the level of log messages in all processes. A
        `manager` is closed with the frontend. `media_path` is the socket of the media process; empty: there is none.
        `adapters` says where adapters may come from, and `change_adapter` is as in `AdapterRegistry`.
        """
        self.config = config
        self.media = MediaAccess(media_path, config.media.max_items) if media_path and config.media else None
        """None: images and videos are refused."""
        self.process_info = process_info
        self.formats = formats
        self.metrics = Metrics(
            name, process_info.metrics, process_info.index, process_info.count, config=config, vllm_names=vllm_metrics
        )
        self.history = History(self.metrics, f"{process_info.metrics}-history")
        self.client = EngineClient(
            process_info.endpoints,
            self.metrics,
            process_info.index,
            awaited=process_info.awaited,
            roles=process_info.roles,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_queue=max_queue,
            cache=config.cache,
            kv_events=config.kv_events,
            kv_store=config.kv_store,
            media=config.model.architecture.media,
            num_adapters=0 if config.lora is None else config.lora.num_slots,
            is_pooling=config.model.pooling is not None,
            token=config.parallel.cluster_token,
            on_drained=on_drained,
        )
        self.adapters = AdapterRegistry(
            config.model,
            adapters or AdapterSettings((name,)),
            self.client.calls.prepare_adapter,
            self.client.pin_adapters,
            is_enabled=config.lora is not None,
            metrics=self.metrics.adapters,
            change=change_adapter,
        )
        self.profiler = Profiler(self.client)
        self.is_draining = False
        """Whether new requests are rejected, because the server is shutting down."""
        self.ask_resize = ask_resize
        self.set_log_level = set_log_level
        self._manager = manager
        self._tasks = tasks_of(config.model.pooling)
        self._serials = itertools.count(time.time_ns() // 1000)  # beyond the serial numbers of a replaced process
        self._open: weakref.WeakValueDictionary[str, Generation | Embedding] = weakref.WeakValueDictionary()
        """By the caller's id."""
        self._seeds = random.Random(
            f"{config.model.seed}/{process_info.index}" if process_info.index else config.model.seed
        )
        self._seconds: dict[str, float] = {}
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, formats))
        self._loading.add_done_callback(self._limit)

    @staticmethod
    def start(
        config: EngineConfig,
        *,
        name: str,
        formats: ChatFormats | None = None,
        log_level: str = "info",
        max_queue: int | None = None,
        hosts: DPCoordinator | None = None,
        media: MediaSettings | None = None,
        adapters: AdapterSettings | None = None,
    ) -> Frontend:
        """Start this host's engine cores, and load the tokenizer meanwhile. `name` is a label of the metrics.

        With `max_queue`, `admit` and `generate` raise `QueueFull` when that many requests are waiting. `hosts` are the
        hosts of other replicas (`quire.server.client.dp_coordinator.connect_hosts`), which are closed with the
        frontend. `media` are the settings for images and videos; None: they are refused. `adapters` says where adapters
        may come from.
        """
        manager = EngineManager(config, name=name, log_level=log_level, hosts=hosts)
        frontend = Frontend(
            config,
            manager.process_info(0),
            name=name,
            formats=formats or ChatFormats(),
            max_queue=max_queue,
            on_drained=partial(manager.drained, 0),
            manager=manager,
            media_path="" if media is None else MediaService(manager, media).path,
            adapters=adapters,
        )
        loop = asyncio.get_running_loop()

        def on_change(state: EngineState) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed without `close`
                loop.call_soon_threadsafe(frontend.update, state)

        manager.on_change = on_change
        if manager.failure is not None:
            frontend.update(manager.failure)
        manager.run_in_thread()
        return frontend

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(together=True)

    async def ready(self) -> dict[str, float]:
        """Wait until requests can be served; returns the durations of the start-up phases in seconds.

        Raises `ConfigError` for errors of the tokenizer and `EngineUnavailable` for errors of the engine.
        """
        await self.loaded()
        ready = await self.client.ready()
        if self._manager is not None:
            self._manager.is_started = True
        return self._seconds | ready.seconds

    async def loaded(self) -> None:
        """Wait until the tokenizer is loaded; raises `ConfigError` for errors of the tokenizer."""
        await asyncio.shield(self._loading)

    def update(self, state: EngineState) -> None:
        """Handle a change that the supervisor reports (see `EngineClient.update`).

        A replica's KV cache may hold less than planned, and its requests are shorter then; as any request may run on
        any replica, all of them are.
        """
        if isinstance(state, ReplicaUp) and state.max_model_len:
            self.config = replace(self.config, model=self.config.model.with_length(state.max_model_len))
            if self._loading.done():
                self._limit(self._loading)
        self.client.update(state)

    def _limit(self, loading: asyncio.Future[InputProcessor]) -> None:
        """Let the input processor, once it is loaded, accept requests of the model's present length."""
        if not loading.cancelled() and loading.exception() is None:
            loading.result().limit(self.config.model.max_model_len)

    @property
    def input_processor(self) -> InputProcessor:
        """Raises `EngineUnavailable` while the tokenizer is loading."""
        if not self._loading.done():
            raise EngineUnavailable("the model is still loading", "loading")
        return self._loading.result()

    def admit(self, task: Task | None = "generate", ignored: Collection[str] = ()) -> InputProcessor:
        """Return the input processor if a request can be accepted now, before anything is spent on it. It ignores the
        fields `ignored`; without a task, it is not for the engine.

        Raises `EngineUnavailable` or `QueueFull` if none can, and `InvalidParameter` if the model does not support the
        task, or with `--strict-parameters` for an ignored field.
        """
        if task is not None:
            if task not in self._tasks:
                raise refusal(self.config.model.pooling, task)
            if self.is_draining:
                raise EngineUnavailable(SHUTTING_DOWN, "draining")
            self.client.admit()
        processor = self.input_processor
        if ignored:
            processor.ignore(ignored)
        return processor

    @property
    def problem(self) -> tuple[str, str] | None:
        """Why new requests should be sent elsewhere: a state, and its reason. None: they run here at once."""
        if self.is_draining:
            return "draining", SHUTTING_DOWN
        found = self.client.problem
        return found if found is not None or self._loading.done() else ("loading", "the tokenizer is still loading")

    @property
    def media_problem(self) -> str | None:
        """Why requests with images or videos wait at the moment, and fail after some seconds, while others do not.
        None: they are accepted, or the model takes none.
        """
        return None if self.metrics.media is None else _MEDIA_PROBLEMS[self.metrics.media.state]

    async def resize(self, asked: Resize) -> None:
        """Change the number of replicas, or their roles (see `EngineManager.resize`), without waiting for replicas that
        start or drain.

        Raises `ConfigError` if that is not possible, and `EngineUnavailable`.
        """
        if self.is_draining:
            raise EngineUnavailable(SHUTTING_DOWN, "draining")
        self.client.check()
        if self.ask_resize is None:
            raise ConfigError("this server has a fixed number of replicas")
        await self.ask_resize(asked)

    async def reset_prefix_cache(self, *, resets_stores: bool = False) -> str:
        """Let no later request use what the prefix caches of all replicas have now, nor with `resets_stores` the KV
        stores of their hosts. Running requests go on. Returns an error; empty if there was none.

        Raises `EngineUnavailable`.
        """
        return await self.client.calls.reset_prefix_cache(clears_stores=resets_stores)

    async def probe(self) -> None:
        """Return when the engine loop and every rank have answered; raises `EngineUnavailable` if they do not."""
        _ = self.input_processor
        await self.client.probe()

    def generate(self, request_id: str, given: GenerationInput) -> Generation:
        """Generate `given.params.n` sequences for each prompt.

        Raises `InvalidParameter`, `QueueFull` and `EngineUnavailable` before anything has run.
        """
        if (trace := TRACE.get()) is not None:
            trace.generate(request_id, "chat" if given.is_chat else "text_completion", given.params)
        if (record := RECORD.get()) is not None:
            record.response_id = request_id
            if record.prompt_characters:
                record.prompts += self._texts(given.prompts, record.prompt_characters)
        if given.length_penalty is not None:
            tokenizer = self.input_processor.tokenizer
            search_id = SEARCH_ID.format(request_id, next(self._serials))
            return BeamSearch(search_id, given, self.generate, tokenizer, self.config.model)
        sequences = [
            (prompt, given.params.for_engine(self._seed(given.params.seed, choice)))
            for prompt in given.prompts
            for choice in range(given.params.n)
        ]
        tokenizer = self.input_processor.tokenizer
        stream, engine_ids = self._submit(
            request_id, sequences, given, given.priority, given.cache_salt, n=given.params.n, kv_peer=given.kv_peer
        )
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
        self,
        request_id: str,
        given: PoolingInput,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Embedding:
        """Compute a vector for each of the prompts, or for each of their tokens; otherwise like `generate`.

        The vector of a classifier has a logit for each label.
        """
        if (trace := TRACE.get()) is not None:
            trace.generate(request_id, "embeddings", None)
        if (record := RECORD.get()) is not None:
            record.response_id = request_id
            if record.prompt_characters:
                record.prompts += self._texts(given.prompts, record.prompt_characters)
        sequences = [(prompt, _NO_PARAMS) for prompt in given.prompts]
        stream, engine_ids = self._submit(
            request_id, sequences, given, priority, cache_salt, second_segments=given.second_segments
        )
        embedding = self._open[request_id] = Embedding(stream, engine_ids)
        return embedding

    def _texts(self, prompts: Sequence[list[int]], length: int) -> list[str]:
        """The first `length` characters of the prompts, for the access log."""
        decode = self.input_processor.tokenizer.decode
        num_tokens = 4 * length + 1  # a character has at most 4 bytes; the first token may be a space that is not shown
        return [decode(prompt[:num_tokens], skip_special_tokens=False)[:length] for prompt in prompts]

    def _submit(
        self,
        request_id: str,
        sequences: Sequence[tuple[list[int], SamplingParams]],
        given: GenerationInput | PoolingInput,
        priority: int,
        cache_salt: str | None,
        *,
        n: int = 1,
        second_segments: Sequence[int] = (),
        kv_peer: str | None = None,
    ) -> tuple[OutputStream, list[str]]:
        """Submit the sequences of a request, `n` for each prompt; returns their outputs and their ids."""
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidParameter("priority requires a server started with --scheduling-policy priority", "priority")
        if kv_peer is not None and self.config.kv_store is None:
            text = "kv_transfer_params requires a server with a KV store: start it with --kv-offloading-size"
            raise InvalidParameter(text, "kv_transfer_params")
        if (earlier := self._open.get(request_id)) is not None and earlier.is_open:
            raise InvalidParameter(f"a request with the id {request_id} is already running", "request_id")
        serial, process = next(self._serials), self.process_info.index
        engine_ids = [ENGINE_ID.format(request_id, at, serial, process) for at in range(len(sequences))]
        # The engine sees no text: a salt has the length of a prefix cache hash.
        salt = blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest() if cache_salt else b""
        requests = [(engine_id, *sequence) for engine_id, sequence in zip(engine_ids, sequences, strict=True)]
        starts: Sequence[int | None] = ()
        if (adapter := given.adapter) is not None:
            starts = given.adapter_starts or [*map(adapter.start, given.prompts)]
        stream = self.client.submit(
            requests,
            priority,
            salt,
            n,
            second_segments,
            given.media,
            (given.media_lease, adapter),
            None if adapter is None else adapter.ref,
            starts,
            "" if adapter is None else adapter.name,
            kv_peer,
        )
        return stream, engine_ids

    async def close(self, *, together: bool = False) -> None:
        """Abort running requests, and stop the engine if `start` has started it.

        `together`: unless an error occurs, keep the cores running until no other host needs their experts.
        """
        (loaded,) = await asyncio.gather(self._loading, return_exceptions=True)
        if isinstance(loaded, InputProcessor):
            loaded.close()
        self.adapters.close()
        self.client.fail(SHUTTING_DOWN)
        if self._manager is not None:
            thread = self._manager.stop_thread(together=together)
            while thread.is_alive():  # at the end of a script, executors accept no more work
                await asyncio.sleep(_CLOSE_POLL_SECONDS)
        await self.client.close()

    def _load(self, formats: ChatFormats) -> InputProcessor:
        begun = time.monotonic()
        processor = InputProcessor.load(self.config.model, formats, media=self.media)
        self._seconds["tokenizer"] = time.monotonic() - begun
        return processor

    def _seed(self, seed: int | None, choice: int) -> int:
        """The seed of one sequence: the user's for the first choice, a derived one for others; or the next internal
        one.
        """
        if seed is None:
            return self._seeds.getrandbits(63)
        return seed if choice == 0 else random.Random(f"{seed}/{choice}").getrandbits(63)
