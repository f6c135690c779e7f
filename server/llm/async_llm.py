"""`AsyncLLM`: a model for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from quire.engine.cluster import ray_cluster
from quire.engine.cluster.cluster_token import with_cluster_token
from quire.engine.config.engine_config import EngineConfig, ModelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.client.dp_coordinator import connect_hosts
from quire.server.client.profiler import MAX_PROFILE_SECONDS
from quire.server.config.engine_args import EngineArgs
from quire.server.llm import pooling
from quire.server.llm.hf_tokenizer import hf_tokenizer
from quire.server.llm.lora_request import LoRARequest, checked, opened
from quire.server.llm.offline_request import OfflineRequest
from quire.server.llm.pooling import PoolingParams, ScoreData
from quire.server.llm.prompts import PromptLike, Tokenization, chat_input, check_supported, process_chat, process_prompt
from quire.server.media.service import media_settings
from quire.server.serving.adapters import AdapterSettings
from quire.server.serving.frontend import Frontend
from quire.server.serving.llm_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.server.text.adapter import RequestAdapter
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.conversation import Message

logger = logging.getLogger(__name__)

_NO_EFFECT = ("usage_context", "start_engine_loop", "stat_loggers", "enable_multiprocessing")
"""Arguments of vLLM's `from_engine_args` that change nothing here."""


class AsyncLLM:
    """A model for asyncio programs. The engine starts with the first request, with `async with`, or with `start`.

    The arguments are the same as for `LLM`. Raises `ConfigError` for options or models that are not supported.
    """

    def __init__(self, model: str = EngineOptions.model, **options: Any) -> None:
        self._load(EngineArgs(model, **options))

    def _load(self, args: EngineArgs) -> None:
        asked, self._server = with_cluster_token(args.options), args.server_options
        self._server.check()
        self.config: EngineConfig = ray_cluster.resolve(asked)
        self._media = media_settings(self.config, self._server)
        fetch_weights(asked, self.config)
        self._adapters = AdapterSettings(
            (str(self.config.model.path),),
            download_dir=asked.download_dir,
            uses_templates=self._server.chat_template is None,
        )
        self._starting: asyncio.Task[Frontend] | None = None
        self._tokenizer: Any = None
        self._profile_prefix = "quire"
        self._requests: weakref.WeakValueDictionary[str, OfflineRequest] = weakref.WeakValueDictionary()
        """The requests that `abort` finds."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        chat_template: str | None = None,
        log_level: str | None = None,
        **ignored: Any,
    ) -> AsyncLLM:
        """Make an `AsyncLLM` with these options. `chat_template` and `log_level` replace those of `engine_args`, which
        is not changed; None: keep them.

        These arguments of vLLM's have no effect: `usage_context`, `start_engine_loop`, `stat_loggers`,
        `enable_multiprocessing`. Raises `ConfigError`, and `TypeError` for other arguments.
        """
        for name in ignored:
            if name not in _NO_EFFECT:
                raise TypeError(f"from_engine_args: unexpected keyword argument {name!r}; set it in engine_args")
        if ignored:
            logger.info("from_engine_args: %s: no effect", ", ".join(ignored))
        made = cls.__new__(cls)
        made._load(engine_args.replaced(chat_template=chat_template, log_level=log_level))
        return made

    async def start(self) -> Frontend:
        """Load the model; raises `EngineUnavailable` with the reason if that fails. The result is internal."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Frontend:
        frontend = Frontend.start(
            self.config,
            name=str(self.config.model.path),
            formats=replace(ChatFormats.of(self._server), trust_request_chat_template=True),
            log_level=self._server.log_level,
            hosts=await asyncio.to_thread(connect_hosts, self.config),
            media=self._media,
            adapters=self._adapters,
        )
        try:
            await frontend.ready()
        except BaseException:
            await frontend.close()
            raise
        return frontend

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Generate text for a prompt, for `async for`. Each result holds all output so far, unless `output_kind` of the
        `sampling_params` says otherwise; the last one is `finished`.

        `sampling_params` None: the model's own defaults. `request_id` None: a random one. Requests of lower `priority`
        run first with `scheduling_policy="priority"`. `tokenization_kwargs` may have `add_special_tokens` and
        `truncate_prompt_tokens`. `lora_request` is the adapter; None: the base model answers. Other arguments of vLLM's
        (`unsupported`), such as `trace_headers`, must be None.

        Leaving the loop, or cancelling its task, aborts the request. Raises `InvalidParameter`, `RequestFailed` and
        `EngineUnavailable`.
        """
        check_supported(unsupported)
        request = await self._submit(prompt, sampling_params, request_id, priority, lora_request, tokenization_kwargs)
        async for result in request.results():
            yield result

    async def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Start a request; returns the results that `AsyncLLM.generate` yields, which need not be read at once.

        The request is aborted when the iterator is deleted. Raises `InvalidParameter` and `EngineUnavailable`.
        """
        check_supported(unsupported)
        return _Results(await self._submit(prompt, params, request_id, priority, lora_request, tokenization_kwargs))

    async def _opened(self, given: LoRARequest | None) -> tuple[Frontend, RequestAdapter | None]:
        """Wait until the model is loaded, and read the adapter of a request."""
        given, frontend = checked(given), await self.start()
        return frontend, await opened(frontend, given)

    async def abort(self, request_id: str) -> None:
        """Abort a request of `AsyncLLM.generate` or `AsyncLLM.add_request`, whose reader gets `RequestFailed`; ignores
        unknown ids.
        """
        if (request := self._requests.get(request_id)) is not None:
            request.abort()

    async def _submit(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> OfflineRequest:
        tokenization = Tokenization.of(tokenization_kwargs)
        frontend, adapter = await self._opened(lora_request)
        processed = await process_prompt(frontend, prompt, params, priority, adapter, tokenization=tokenization)
        request = OfflineRequest(frontend, *processed, request_id)
        self._requests[request.id] = request
        return request

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **chat: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; otherwise like `AsyncLLM.generate`. `chat` are the keyword options of `LLM.chat`, and
        other arguments of vLLM's, which must be None.
        """
        given, tokenization = chat_input(messages=messages, **chat), Tokenization.of(tokenization_kwargs)
        frontend, adapter = await self._opened(lora_request)
        processed = await process_chat(frontend, given, sampling_params, priority, adapter, tokenization=tokenization)
        request = OfflineRequest(frontend, *processed, request_id)
        async for result in request.results():
            yield result

    async def embed(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> EmbeddingRequestOutput:
        """Compute the vector of a prompt, with an embedding model (`runner`).

        `truncate_prompt_tokens` keeps this number of tokens of a longer prompt, -1 as many as the model takes, and
        removes those on the `truncation_side`; None: a longer prompt is an error. `add_special_tokens` is for texts.
        `dimensions` keeps the first numbers of a Matryoshka model's vector, and `normalize` gives it length 1; None: as
        the model declares. `prompt_name` is the name of the model's prompt to put before a text; None: its default.
        `pooling_params` and `tokenization_kwargs` are other ways to give some of these. Other arguments of vLLM's
        (`unsupported`), such as `trace_headers`, must be None.

        Cancelling the task aborts the request. Raises the same errors as `AsyncLLM.generate`.
        """
        rendering = pooling.options(
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
            prompt_name=prompt_name,
            tokenization_kwargs=tokenization_kwargs,
            **unsupported,
        )
        vectors = pooling.vector_options(pooling_params, dimensions=dimensions, normalize=normalize)
        frontend, adapter = await self._opened(lora_request)
        return await pooling.embed(frontend, prompt, rendering, vectors, request_id, priority, adapter)

    async def classify(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_params: PoolingParams | None = None,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
        **rendering: Any,
    ) -> ClassificationRequestOutput:
        """Compute the probability of each label, with a classifier; if `use_activation` is False, its logit.

        `rendering` are `truncate_prompt_tokens`, `truncation_side`, `add_special_tokens` and `tokenization_kwargs` of
        `AsyncLLM.embed`, which raises the same errors, and other arguments of vLLM's, which must be None.
        `lora_request` is the adapter.
        """
        given = pooling.options(pooling_params, **rendering)
        vectors = pooling.vector_options(pooling_params, normalize=use_activation)
        frontend, adapter = await self._opened(lora_request)
        return await pooling.classify(frontend, prompt, given, vectors, request_id, priority, adapter)

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_task: Literal["embed", "token_embed", "classify"] | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
        **rendering: Any,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Compute the pooled output of a prompt: a vector, the vectors of its tokens, or the probability of each label.

        `pooling_task` is the expected one of them: a model for the other raises `InvalidParameter`. The other options
        are as in `AsyncLLM.classify` and `AsyncLLM.embed`.
        """
        task = pooling_task or (pooling_params and pooling_params.task)
        given = pooling.options(pooling_params, **rendering)
        vectors = pooling.vector_options(pooling_params, dimensions=dimensions, normalize=use_activation)
        frontend, adapter = await self._opened(lora_request)
        return await pooling.encode(task or "pool", frontend, prompt, given, vectors, request_id, priority, adapter)

    async def score(
        self,
        data_1: ScoreData | Sequence[ScoreData],
        data_2: ScoreData | Sequence[ScoreData],
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_params: PoolingParams | None = None,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
        **rendering: Any,
    ) -> list[ScoringRequestOutput]:
        """Score each text of `data_1` with its counterpart in `data_2`, or a single one with all of them. Instead of a
        text, `{"content": [parts]}` has the parts of a message, with images and videos as in `LLM.chat`.

        A cross-encoder scores pairs, with `use_activation` as in `AsyncLLM.classify`; an embedding model compares
        vectors by their cosine similarity, or if that is False by their dot product, and vectors of tokens by MaxSim.
        The other options are as in `AsyncLLM.classify`.
        """
        given = pooling.options(pooling_params, **rendering)
        activated = pooling.vector_options(pooling_params, normalize=use_activation).normalize
        frontend, adapter = await self._opened(lora_request)
        return await pooling.score(frontend, data_1, data_2, given, activated, request_id, priority, adapter)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, such as `max_model_len` and `architecture`."""
        return self.config.model

    async def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers, which gives the same ids; with its chat template.

        It is a copy: changes to it do not affect the engine.
        """
        if self._tokenizer is None:
            processor = (await self.start()).input_processor
            self._tokenizer = await asyncio.to_thread(hf_tokenizer, processor)
        return self._tokenizer

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start recording the operations of all ranks with torch's profiler, for at most 60 seconds.

        `profile_prefix` is the start of the trace's name; None: quire. Raises `ConfigError` without
        `torch_profiler_dir`, the option with the folder for traces, `EngineUnavailable`, and `RuntimeError` if a
        recording is running.
        """
        self._traces()
        await (await self.start()).profiler.start(MAX_PROFILE_SECONDS)
        self._profile_prefix = profile_prefix or "quire"

    async def stop_profile(self) -> str:
        """Stop recording; returns the path of the trace of all ranks, in the format of Chrome and Perfetto, as
        `.json.gz`. Raises `ConfigError` without `torch_profiler_dir`, `EngineUnavailable`, `OSError`, and
        `RuntimeError` if nothing was recorded.
        """
        folder = self._traces()
        path, _ = await (await self.start()).profiler.save(folder, self._profile_prefix)
        return path

    def _traces(self) -> str:
        """Return the folder for traces."""
        if (folder := self._server.torch_profiler_dir) is None:
            raise ConfigError(
                "torch_profiler_dir is not set: give the folder for traces, as in LLM(torch_profiler_dir=…)"
            )
        return folder

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let no later request use what the prefix cache has now, nor with `reset_connector` the KV store of the host,
        in memory and on disk. Returns whether all could be forgotten. Running requests go on.

        `reset_running_requests` is vLLM's and has no effect: running requests do not prevent a reset.
        """
        error = await (await self.start()).reset_prefix_cache(resets_stores=reset_connector)
        if error:
            logger.warning("the prefix cache was not reset: %s", error)
        return not error

    async def shutdown(self) -> None:
        """Abort running requests and stop the engine. If hosts share experts, wait until all of them shut down."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            await asyncio.wait((starting,))
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().close(together=True)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()


AsyncLLMEngine = AsyncLLM
"""vLLM's name."""


class _Results(AsyncIterator[RequestOutput]):
    """The results of a request that has started. It is aborted when nobody can read them any more."""

    def __init__(self, request: OfflineRequest) -> None:
        self._results = request.results()
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _close_in, loop, request).atexit = False

    async def __anext__(self) -> RequestOutput:
        return await anext(self._results)


def _close_in(loop: asyncio.AbstractEventLoop, request: OfflineRequest) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(request.close)
