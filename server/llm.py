"""The Python API: `AsyncLLM` for asyncio programs, `LLM` for scripts. Names and behaviour follow vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec
from tqdm import tqdm

from quire.engine.cluster.cluster_token import with_cluster_token
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.frontend.chat_formats import ChatFormats
from quire.server.frontend.conversation import ChatTemplateOptions, Message
from quire.server.frontend.dp_coordinator import connect_hosts
from quire.server.frontend.embedding_output import VectorOptions, scores
from quire.server.frontend.frontend import Frontend
from quire.server.frontend.input_processor import InputProcessor
from quire.server.frontend.inputs import (
    ChatInput,
    EmbeddingOptions,
    GenerationInput,
    Prompt,
    RequestOptions,
    Task,
)
from quire.server.frontend.output_processor import OutputProcessor, TextDelta
from quire.server.frontend.output_stream import EngineUnavailable
from quire.server.frontend.tools import read_tool_use
from quire.server.llm_outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    beam_search_sequence,
    completion,
    prompt_logprobs,
)
from quire.server.parsers.events import ToolCall

if TYPE_CHECKING:
    from quire.server.cli.engine_args import EngineArgs

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringRequestOutput",
    "ToolCall",
]

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with either as `prompt` or `prompt_token_ids`, and optionally a `cache_salt`."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A model for asyncio programs. The engine starts with the first request, or with `start`.

    `options` are the fields of `quire.engine.config.options.EngineOptions`. Raises `ConfigError` for options or models
    that are not supported.
    """

    def __init__(
        self,
        model: str = EngineOptions.model,
        *,
        chat_template: str | None = None,
        log_level: str = "warning",
        **options: Any,
    ) -> None:
        asked = with_cluster_token(EngineOptions(model=model, **options))
        self.config: EngineConfig = resolve(asked)
        fetch_weights(asked, self.config)
        self._chat_template = chat_template
        self._log_level = log_level
        self._starting: asyncio.Task[Frontend] | None = None
        self._requests: weakref.WeakValueDictionary[str, _OfflineRequest] = weakref.WeakValueDictionary()
        """What `abort` finds."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        chat_template: str | None = None,
        log_level: str = "warning",
        **ignored: Any,
    ) -> AsyncLLM:
        """Make the model of `AsyncEngineArgs`. vLLM's other arguments, such as `usage_context`, have no effect."""
        if ignored:
            logger.info("from_engine_args: %s: no effect", ", ".join(ignored))
        return cls(**vars(engine_args.options), chat_template=chat_template, log_level=log_level)

    async def start(self) -> Frontend:
        """Load the model; raises `EngineUnavailable` with the reason if that fails."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Frontend:
        frontend = await Frontend.start(
            self.config,
            name=str(self.config.model.path),
            formats=ChatFormats(self._chat_template, trust_request_chat_template=True),
            log_level=self._log_level,
            hosts=await asyncio.to_thread(connect_hosts, self.config),
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
    ) -> AsyncIterator[RequestOutput]:
        """Generate text for a prompt. Each result holds all output so far; the last one is `finished`.

        Leaving the loop, or cancelling its task, aborts the request. Raises `InvalidParameter`, `RequestFailed` and
        `EngineUnavailable`.
        """
        request = await self._submit(prompt, sampling_params, request_id, priority)
        async for _ in request.run():
            yield request.result()

    async def add_request(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Start a request; returns what `generate` yields, which need not be read at once.

        The request is aborted when the iterator is deleted.
        """
        return _Results(await self._submit(prompt, params, request_id, priority))

    async def abort(self, request_id: str) -> None:
        """Abort a request of `generate` or `add_request`, whose reader gets `RequestFailed`; ignores unknown ids."""
        if (request := self._requests.get(request_id)) is not None:
            request.abort()

    async def _submit(
        self, prompt: PromptLike, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> _OfflineRequest:
        frontend = await self.start()
        request = _OfflineRequest(frontend, *await _process(frontend, prompt, params, priority), request_id)
        self._requests[request.id] = request
        return request

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        **chat: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; otherwise like `generate`. `chat` are the options of `LLM.chat`."""
        frontend, given = await self.start(), replace(_chat_input(**chat), messages=messages)
        request = _OfflineRequest(
            frontend, *await _process_chat(frontend, given, sampling_params, priority), request_id
        )
        async for _ in request.run():
            yield request.result()

    async def embed(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        priority: int = 0,
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the vector of a prompt, with an embedding model (`runner`); the options are those of
        `/v1/embeddings`.

        Cancelling the task aborts the request. Raises the same errors as `generate`.
        """
        frontend = await self.start()
        rendering = EmbeddingOptions(
            add_special_tokens=add_special_tokens,
            truncate=truncate_prompt_tokens,
            truncation_side=truncation_side,
            prompt_name=prompt_name,
        )
        vectors = VectorOptions(dimensions=dimensions, normalize=normalize)
        return await _embed(frontend, prompt, rendering, vectors, request_id, priority)

    async def classify(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        priority: int = 0,
        *,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> ClassificationRequestOutput:
        """Compute the probability of each label, with a classifier; without `use_activation` its logit.

        `rendering` are `truncate_prompt_tokens`, `truncation_side` and `add_special_tokens` of `embed`, which raises
        the same errors.
        """
        frontend, vectors = await self.start(), VectorOptions(normalize=use_activation)
        return await _classify(frontend, prompt, _rendering(**rendering), vectors, request_id, priority)

    async def encode(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_task: Literal["embed", "classify"] | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Compute what the model's pooling makes of a prompt: a vector, or the probability of each label.

        `pooling_task` checks which of them; the other options are those of `classify` and `embed`.
        """
        frontend, vectors = await self.start(), VectorOptions(dimensions=dimensions, normalize=use_activation)
        return await _encode(
            pooling_task or "pool", frontend, prompt, _rendering(**rendering), vectors, request_id, priority
        )

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        request_id: str | None = None,
        priority: int = 0,
        *,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> list[ScoringRequestOutput]:
        """Score each text of `data_1` with its counterpart in `data_2`, or a single one with all of them.

        A cross-encoder scores pairs, with `use_activation` as in `classify`; an embedding model compares vectors by
        their cosine similarity, or if that is False by their dot product. The other options are those of `classify`.
        """
        return await _score(
            await self.start(), data_1, data_2, _rendering(**rendering), use_activation, request_id, priority
        )

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


class _OwnLoop:
    """Runs an `AsyncLLM` in an event loop of its own thread, so that the caller may itself be in an event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, thread, llm)
        try:
            self._frontend = self._wait(llm.start())
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the engine; the object cannot be used afterwards. Called at the end of the script at the latest."""
        self._finalizer()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            work.close()
            raise EngineUnavailable("the engine is shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            future.cancel()  # an interrupt must not leave requests running


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, llm: AsyncLLM) -> None:
    asyncio.run_coroutine_threadsafe(llm.shutdown(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class LLMEngine(_OwnLoop):
    """vLLM's synchronous engine: add requests, then call `step` while there are unfinished ones. For one thread."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._unfinished: dict[str, AsyncIterator[RequestOutput]] = {}
        self._next: dict[str, asyncio.Future[RequestOutput]] = {}
        """Wait for the next result of each request."""
        super().__init__(llm)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> LLMEngine:
        """Load the model of `EngineArgs`; `options` as in `AsyncLLM.from_engine_args`."""
        return cls(AsyncLLM.from_engine_args(engine_args, **options))

    def add_request(
        self, request_id: str, prompt: PromptLike, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Start a request. Raises `InvalidParameter`, also if `step` has more to return of one with this id, and
        `EngineUnavailable`.
        """
        if request_id in self._unfinished:
            raise InvalidParameter(
                f"a request with the id {request_id} is already running, or `step` has more to return of it",
                "request_id",
            )
        self._unfinished[request_id] = self._wait(self._llm.add_request(request_id, prompt, params, priority))

    def step(self) -> list[RequestOutput]:
        """Wait until requests have new output, and return theirs so far; the last one of a request is `finished`.

        Raises `RequestFailed` and `EngineUnavailable` for a request that has failed; the others go on.
        """
        return self._wait(self._step()) if self._unfinished else []

    async def _step(self) -> list[RequestOutput]:
        for request_id, results in self._unfinished.items():
            if request_id not in self._next:
                self._next[request_id] = asyncio.ensure_future(anext(results))
        await asyncio.wait(self._next.values(), return_when=asyncio.FIRST_COMPLETED)
        outputs: list[RequestOutput] = []
        for request_id in [request_id for request_id, task in self._next.items() if task.done()]:
            error = self._next[request_id].exception()
            if error is not None and outputs:
                break  # the next step raises it
            output = self._next.pop(request_id)
            if error is not None or output.result().finished:
                del self._unfinished[request_id]
            outputs.append(output.result())
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has more to return."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """Return of how many requests `step` has more to return."""
        return len(self._unfinished)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Abort requests, of which `step` returns nothing more; ignores unknown ids."""
        self._wait(self._abort([request_ids] if isinstance(request_ids, str) else request_ids))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._unfinished.pop(request_id, None) is not None:
                if (task := self._next.pop(request_id, None)) is not None:
                    task.cancel()
                await self._llm.abort(request_id)


class LLM(_OwnLoop):
    """A model for scripts: `LLM("model").generate(prompts, params)`. It runs until `shutdown` or the end of the script.

    `options` are the fields of `quire.engine.config.options.EngineOptions`. Raises `ConfigError` for options or models
    that are not supported, and `EngineUnavailable` if loading fails.
    """

    def __init__(
        self,
        model: str = EngineOptions.model,
        *,
        chat_template: str | None = None,
        log_level: str = "warning",
        **options: Any,
    ) -> None:
        super().__init__(AsyncLLM(model, chat_template=chat_template, log_level=log_level, **options))

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for one or more prompts, with common params or one for each; the results are in the order of
        the prompts.

        Raises `InvalidParameter`, `RequestFailed` and `EngineUnavailable`; the other requests are then aborted.
        """
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return self._wait(self._run_all(partial(_process, self._frontend), many, sampling_params, priority, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or more conversations; otherwise like `generate`.

        The model may call `tools` (those of the OpenAI API), and must if `tool_choice` requires it. `tool_calls` of a
        result are its calls; its `text` is the complete output, including the text of calls.
        """
        chat = _chat_input(
            tools,
            tool_choice,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        many: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        chats = [replace(chat, messages=each) for each in many]
        return self._wait(self._run_all(partial(_process_chat, self._frontend), chats, sampling_params, None, use_tqdm))

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Find the most likely outputs of one or more prompts; otherwise like `generate`."""
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=0,
        )

        async def process(prompt: PromptLike, sampling: SamplingParams | None, priority: int) -> _ProcessedPrompt:
            given, text = await _process(self._frontend, prompt, sampling, priority)
            return _ProcessedPrompt(replace(given, length_penalty=params.length_penalty), text)

        results = self._wait(self._run_all(process, many, sampling, None, use_tqdm))
        return [
            BeamSearchOutput([beam_search_sequence(result.prompt_token_ids, output) for output in result.outputs])
            for result in results
        ]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the vectors of one or more prompts, with an embedding model; otherwise like `AsyncLLM.embed`."""
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        rendering = EmbeddingOptions(
            add_special_tokens=add_special_tokens,
            truncate=truncate_prompt_tokens,
            truncation_side=truncation_side,
            prompt_name=prompt_name,
        )
        vectors = VectorOptions(dimensions=dimensions, normalize=normalize)
        return self._wait(self._pool_all(partial(_embed, self._frontend), many, rendering, vectors, use_tqdm))

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: bool = True,
        *,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classify one or more prompts, with a classifier; otherwise like `AsyncLLM.classify`."""
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        vectors = VectorOptions(normalize=use_activation)
        return self._wait(
            self._pool_all(partial(_classify, self._frontend), many, _rendering(**rendering), vectors, use_tqdm)
        )

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: bool = True,
        *,
        pooling_task: Literal["embed", "classify"] | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute what the model's pooling makes of one or more prompts; otherwise like `AsyncLLM.encode`."""
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        vectors = VectorOptions(dimensions=dimensions, normalize=use_activation)
        encode = partial(_encode, pooling_task or "pool", self._frontend)
        return self._wait(self._pool_all(encode, many, _rendering(**rendering), vectors, use_tqdm))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts, all of them in one request; otherwise like `AsyncLLM.score`."""
        with tqdm(total=1, desc="requests", disable=not use_tqdm) as bar:
            found = self._wait(_score(self._frontend, data_1, data_2, _rendering(**rendering), use_activation))
            bar.update()
        return found

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _run_all(
        self,
        process: Callable[[Any, SamplingParams | None, int], Coroutine[Any, Any, _ProcessedPrompt]],
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = [sampling_params] * len(prompts) if not isinstance(sampling_params, Sequence) else sampling_params
        priorities = [0] * len(prompts) if priority is None else priority
        for what, given in (("sampling_params", params), ("priority", priorities)):
            if len(given) != len(prompts):
                raise ValueError(f"{what}: {len(given)} for {len(prompts)} prompts")
        processed = await asyncio.gather(*map(process, prompts, params, priorities))
        with contextlib.ExitStack() as stack, tqdm(total=len(prompts), desc="requests", disable=not use_tqdm) as bar:
            requests = []
            for each in processed:
                requests.append(_OfflineRequest(self._frontend, *each))
                stack.callback(requests[-1].close)
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(request.finish(bar.update))
        return [request.result() for request in requests]

    async def _pool_all(
        self,
        pool: Callable[[PromptLike, EmbeddingOptions, VectorOptions], Coroutine[Any, Any, T]],
        prompts: Sequence[PromptLike],
        rendering: EmbeddingOptions,
        vectors: VectorOptions,
        use_tqdm: bool,
    ) -> list[T]:
        with tqdm(total=len(prompts), desc="requests", disable=not use_tqdm) as bar:

            async def one(prompt: PromptLike) -> T:
                result = await pool(prompt, rendering, vectors)
                bar.update()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]


class _ProcessedPrompt(NamedTuple):
    """The engine's input, and the prompt's text, if it was one."""

    given: GenerationInput
    text: str | None = None


class _OfflineRequest:
    """A request of the Python API and its growing sequences. The constructor submits it."""

    def __init__(
        self, frontend: Frontend, given: GenerationInput, text: str | None, request_id: str | None = None
    ) -> None:
        self._tokenizer = frontend.input_processor.tokenizer
        self.id = request_id or uuid.uuid4().hex
        self._given = given
        self._text = text
        self._sequences = [TextDelta(index) for index in range(given.params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._generation = frontend.generate(self.id, replace(given, output_format=None))  # the text has all output

    async def run(self) -> AsyncIterator[None]:
        """Yield whenever the sequences have grown."""
        with self._generation:
            async for deltas in self._generation:
                for delta in deltas:
                    self._sequences[delta.index].extend(delta)
                yield

    async def finish(self, report: Callable[[int], object]) -> None:
        """Run to the end, then call `report(1)`."""
        async for _ in self.run():
            pass
        report(1)

    def close(self) -> None:
        """Abort what is still running."""
        self._generation.close()

    def abort(self) -> None:
        """Abort what is still running, while another task is in `run`."""
        self._generation.abort()

    def result(self) -> RequestOutput:
        """Return all output so far."""
        (ids,) = self._given.prompts
        is_ranked = self._given.params.logprob_token_ids is None
        scores = self._sequences[0].prompt_logprobs
        if scores is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, ids, scores)
        return RequestOutput(
            request_id=self.id,
            prompt=self._text,
            prompt_token_ids=ids,
            outputs=[
                completion(self._tokenizer, sequence, self._calls(sequence), is_ranked=is_ranked)
                for sequence in self._sequences
            ],
            finished=all(sequence.finish_reason is not None for sequence in self._sequences),
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _calls(self, sequence: TextDelta) -> list[ToolCall]:
        """Parse the tool calls of a finished answer; its text is not changed."""
        output_format = self._given.output_format
        if output_format is None or output_format.tools is None or sequence.finish_reason is None:
            return []
        whole = EngineCoreOutput(self.id, list(sequence.token_ids), finish_reason="stop")
        (ids,) = self._given.prompts
        processor = OutputProcessor(self._tokenizer, 0, ids, self._given.params, output_format)
        return processor.feed(whole).tool_calls


class _Results(AsyncIterator[RequestOutput]):
    """The results of a request that has started, which is aborted when nobody can read them any more."""

    def __init__(self, request: _OfflineRequest) -> None:
        self._steps, self._result = request.run(), request.result
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _close_in, loop, request).atexit = False

    async def __anext__(self) -> RequestOutput:
        await anext(self._steps)
        return self._result()


def _close_in(loop: asyncio.AbstractEventLoop, request: _OfflineRequest) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(request.close)


def _chat_input(
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **template: Any,
) -> ChatInput:
    """Convert the options of `LLM.chat`, without messages; raises `InvalidParameter` for invalid tool options."""
    tool_use = read_tool_use(tools or (), tool_choice)
    options = ChatTemplateOptions(chat_template_kwargs=chat_template_kwargs or {}, **template)
    return ChatInput(messages=(), tools=tools or (), tool_use=tool_use, template=options)


async def _process(
    frontend: Frontend, prompt: PromptLike, params: SamplingParams | None, priority: int
) -> _ProcessedPrompt:
    processor, (given, salt) = frontend.admit(), _split_salt(prompt)
    options = _options(priority, salt)
    processed = await processor.process_prompts([given], _checked(processor, params), options)
    return _ProcessedPrompt(processed, given if isinstance(given, str) else None)


async def _process_chat(
    frontend: Frontend, chat: ChatInput, params: SamplingParams | None, priority: int
) -> _ProcessedPrompt:
    processor, options = frontend.admit(), _options(priority)
    return _ProcessedPrompt(await processor.process_chat(chat, _checked(processor, params), options))


def _checked(processor: InputProcessor, params: SamplingParams | None) -> SamplingParams:
    """Return a copy of `params` whose types and ranges are checked, since a struct made in Python may contain anything.

    Structured outputs are validated later. Default: the model's own sampling parameters.
    """
    if params is None:
        return SamplingParams(**processor.sampling_defaults)
    try:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(params, structured_outputs=None))
        checked: SamplingParams = msgspec.msgpack.decode(plain, type=SamplingParams)
    except InvalidParameter:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(f"sampling parameters: {error}") from None
    checked.structured_outputs = params.structured_outputs
    return checked


def _options(priority: Any, cache_salt: str | None = None) -> RequestOptions:
    return RequestOptions(priority=_integer(priority, "priority"), cache_salt=cache_salt, reject_long_output=False)


def _integer(value: Any, param: str) -> int:
    try:
        return msgspec.convert(value, int)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{param}: {error}", param) from None


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )


async def _pool(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None,
    priority: int,
) -> tuple[list[float], dict[str, Any]]:
    """Return a prompt's vector, and the common fields of results."""
    processor, (given, salt) = frontend.admit(task), _split_salt(prompt)
    (ids,) = await processor.process_embeddings({"prompt": given}, rendering, vectors)
    request_id = request_id or uuid.uuid4().hex
    with frontend.embed(request_id, [ids], _integer(priority, "priority"), salt) as embedding:
        (output,) = await embedding.vectors()
    assert processor.pooling is not None
    return vectors.finish(output.vector or b"", processor.pooling).tolist(), {
        "request_id": request_id,
        "prompt": given if isinstance(given, str) else None,
        "prompt_token_ids": ids,
        "num_cached_tokens": output.num_cached_tokens,
    }


async def _embed(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> EmbeddingRequestOutput:
    vector, common = await _pool("embed", frontend, prompt, rendering, vectors, request_id, priority)
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(vector), **common)


async def _classify(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> ClassificationRequestOutput:
    vector, common = await _pool("classify", frontend, prompt, rendering, vectors, request_id, priority)
    return ClassificationRequestOutput(outputs=ClassificationOutput(vector), **common)


async def _encode(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> PoolingRequestOutput[PoolingOutput]:
    vector, common = await _pool(task, frontend, prompt, rendering, vectors, request_id, priority)
    return PoolingRequestOutput(outputs=PoolingOutput(vector), **common)


async def _score(
    frontend: Frontend,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    rendering: EmbeddingOptions,
    use_activation: bool | None,
    request_id: str | None = None,
    priority: int = 0,
) -> list[ScoringRequestOutput]:
    processor = frontend.admit("score")
    data_1, data_2 = (texts if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))
    for texts, param in ((data_1, "data_1"), (data_2, "data_2")):
        if not all(isinstance(text, str) for text in texts):
            raise InvalidParameter(f"{param}: only texts can be scored", param)
    given = await processor.process_pairs(data_1, data_2, rendering, ("data_1", "data_2"))
    request_id = request_id or uuid.uuid4().hex
    priority = _integer(priority, "priority")
    with frontend.embed(request_id, given.prompts, priority, None, given.second_segments) as embedding:
        outputs = await embedding.vectors()
    assert processor.pooling is not None
    parts: Sequence[tuple[int, ...]] = given.compared or [(at,) for at in range(len(outputs))]
    found = scores(outputs, given, processor.pooling, use_activation)
    return [
        ScoringRequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=[token for at in places for token in given.prompts[at]],
            outputs=ScoringOutput(score),
            num_cached_tokens=sum(outputs[at].num_cached_tokens for at in places),
        )
        for places, score in zip(parts, found, strict=True)
    ]


def _rendering(
    *,
    truncate_prompt_tokens: int | None = None,
    truncation_side: Literal["left", "right"] = "right",
    add_special_tokens: bool = True,
) -> EmbeddingOptions:
    return EmbeddingOptions(
        add_special_tokens=add_special_tokens, truncate=truncate_prompt_tokens, truncation_side=truncation_side
    )


def _split_salt(prompt: PromptLike) -> tuple[Prompt, str | None]:
    """Return a prompt and its salt."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    return given, prompt.get("cache_salt")
