"""The Python API: `AsyncLLM` for asyncio programs, `LLM` for scripts. Names and behaviour follow vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from tqdm import tqdm

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.frontend.conversation import ChatTemplateOptions, Message
from quire.server.frontend.dp_coordinator import connect_hosts
from quire.server.frontend.embedding_output import VectorOptions
from quire.server.frontend.frontend import Frontend
from quire.server.frontend.output_processor import OutputProcessor, TextDelta
from quire.server.frontend.renderer import ChatFormats, EmbeddingOptions, Prompt
from quire.server.frontend.tools import ToolUse, read_choice, read_tools
from quire.server.llm_outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    completion,
    prompt_logprobs,
)
from quire.server.parsers.events import ToolCall
from quire.server.parsers.output_parser import OutputFormat

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EmbeddingRequestOutput", "Logprob", "RequestOutput", "ToolCall"]

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with either as `prompt` or `prompt_token_ids`, and optionally a `cache_salt`."""

T = TypeVar("T")


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
        asked = EngineOptions(model=model, **options)
        self.config: EngineConfig = resolve(asked)
        fetch_weights(asked, self.config)
        self._chat_template = chat_template
        self._log_level = log_level
        self._starting: asyncio.Task[Frontend] | None = None

    async def start(self) -> Frontend:
        """Load the model; raises `EngineUnavailable` with the reason if that fails."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Frontend:
        service = await Frontend.start(
            self.config,
            name=str(self.config.model.path),
            formats=ChatFormats(self._chat_template),
            log_level=self._log_level,
            hosts=await asyncio.to_thread(connect_hosts, self.config),
        )
        try:
            await service.ready()
        except BaseException:
            await service.close()
            raise
        return service

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
        service = await self.start()
        request = _OfflineRequest(service, await _render(service, prompt, sampling_params), request_id, priority)
        async for _ in request.run():
            yield request.result()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        **chat: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; otherwise like `generate`. `chat` are the options of `LLM.chat`."""
        service, how = await self.start(), _ChatPrompt.of(**chat)
        request = _OfflineRequest(service, await how.render(service, messages, sampling_params), request_id, priority)
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
        service = await self.start()
        rendering = EmbeddingOptions(
            add_special_tokens=add_special_tokens,
            truncate=truncate_prompt_tokens,
            truncation_side=truncation_side,
            prompt_name=prompt_name,
        )
        vectors = VectorOptions(dimensions=dimensions, normalize=normalize)
        return await _embed(service, prompt, rendering, vectors, request_id, priority)

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


class LLM:
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
        llm = AsyncLLM(model, chat_template=chat_template, log_level=log_level, **options)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire-llm", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, thread, llm)
        try:
            self._service = self._wait(llm.start())
        except BaseException:
            self.shutdown()
            raise

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
        return self._wait(self._run_all(partial(_render, self._service), many, sampling_params, priority, use_tqdm))

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
        how = _ChatPrompt.of(
            tools,
            tool_choice,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        many: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        return self._wait(self._run_all(partial(how.render, self._service), many, sampling_params, None, use_tqdm))

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
        return self._wait(self._embed_all(many, rendering, vectors, use_tqdm))

    def shutdown(self) -> None:
        """Stop the engine; the object cannot be used afterwards. Called at the end of the script at the latest."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _run_all(
        self,
        render: Callable[[Any, SamplingParams | None], Coroutine[Any, Any, _RenderedPrompt]],
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
        rendered = await asyncio.gather(*map(render, prompts, params))
        with contextlib.ExitStack() as stack, tqdm(total=len(prompts), desc="requests", disable=not use_tqdm) as bar:
            requests = []
            for one, rank in zip(rendered, priorities, strict=True):
                requests.append(_OfflineRequest(self._service, one, None, rank))
                stack.callback(requests[-1].close)
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(request.finish(bar.update))
        return [request.result() for request in requests]

    async def _embed_all(
        self, prompts: Sequence[PromptLike], rendering: EmbeddingOptions, vectors: VectorOptions, use_tqdm: bool
    ) -> list[EmbeddingRequestOutput]:
        with tqdm(total=len(prompts), desc="requests", disable=not use_tqdm) as bar:

            async def one(prompt: PromptLike) -> EmbeddingRequestOutput:
                result = await _embed(self._service, prompt, rendering, vectors)
                bar.update()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
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


class _RenderedPrompt(NamedTuple):
    """A prompt: its text, if any, the engine's input, and how to parse tool calls in the answer."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    reading: OutputFormat | None = None


class _OfflineRequest:
    """A request of the Python API and its growing sequences. The constructor submits it."""

    def __init__(
        self,
        service: Frontend,
        prompt: _RenderedPrompt,
        request_id: str | None,
        priority: int,
    ) -> None:
        params = prompt.params
        self._tokenizer = service.renderer.tokenizer
        self._id = request_id or uuid.uuid4().hex
        self._prompt = prompt.text
        self._ids = prompt.ids
        self._params = params
        self._reading = prompt.reading
        self._sequences = [TextDelta(index) for index in range(params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._generation = service.generate(self._id, [prompt.ids], params, priority, prompt.cache_salt)

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

    def result(self) -> RequestOutput:
        """Return all output so far."""
        scores = self._sequences[0].prompt_logprobs
        if scores is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, self._ids, scores)
        return RequestOutput(
            request_id=self._id,
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            outputs=[completion(self._tokenizer, sequence, self._calls(sequence)) for sequence in self._sequences],
            finished=all(sequence.finish_reason is not None for sequence in self._sequences),
            num_cached_tokens=self._sequences[0].num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _calls(self, sequence: TextDelta) -> list[ToolCall]:
        """Parse the tool calls of a finished answer; its text is not changed."""
        if self._reading is None or sequence.finish_reason is None:
            return []
        whole = EngineCoreOutput(self._id, list(sequence.token_ids), finish_reason="stop")
        return OutputProcessor(self._tokenizer, 0, self._ids, self._params, self._reading).feed(whole).tool_calls


@dataclass(frozen=True)
class _ChatPrompt:
    """How to render conversations, and which tools the model may call."""

    options: ChatTemplateOptions
    tools: Sequence[Mapping[str, Any]]
    use: ToolUse | None

    @staticmethod
    def of(
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> _ChatPrompt:
        """Create from the options of `LLM.chat`; raises `InvalidParameter` for invalid tool options."""
        use = read_choice(read_tools(tools or ()), tool_choice)
        kwargs = chat_template_kwargs or {}
        return _ChatPrompt(
            ChatTemplateOptions(may_call=use is not None, chat_template_kwargs=kwargs, **options), tools or (), use
        )

    async def render(
        self, service: Frontend, messages: Sequence[Message], params: SamplingParams | None
    ) -> _RenderedPrompt:
        """Render a conversation."""
        renderer = service.renderer
        ids = await renderer.chat(messages, self.tools, self.options)
        params = _given(service, params)
        reading, param = None, "structured_outputs"
        if self.use is not None:
            if params.structured_outputs is not None:
                await renderer.check_structured(params.structured_outputs, param)
            continued = messages[-1].get("content") if self.options.continue_final_message else None
            reading, grammar = renderer.reading(
                ids, self.use, params.structured_outputs, continued=continued if isinstance(continued, str) else ""
            )
            if grammar is not None:
                params, param = msgspec.structs.replace(params, structured_outputs=grammar), "tools"
        return _RenderedPrompt(None, ids, await renderer.resolve(params, param), reading=reading)


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )


def _given(service: Frontend, params: SamplingParams | None) -> SamplingParams:
    return SamplingParams(**service.renderer.defaults) if params is None else params


async def _render(service: Frontend, prompt: PromptLike, params: SamplingParams | None) -> _RenderedPrompt:
    given, salt = _taken_apart(prompt)
    ids = await service.renderer.prompt(given)
    resolved = await service.renderer.resolve(_given(service, params))
    return _RenderedPrompt(given if isinstance(given, str) else None, ids, resolved, salt)


async def _embed(
    service: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> EmbeddingRequestOutput:
    service.check(embeds=True)
    pooling = service.renderer.pooling
    assert pooling is not None
    vectors.check(pooling)
    given, salt = _taken_apart(prompt)
    (ids,) = await service.renderer.embeddings({"prompt": given}, rendering)
    request_id = request_id or uuid.uuid4().hex
    with service.embed(request_id, [ids], priority, salt) as embedding:
        (output,) = await embedding.vectors()
    return EmbeddingRequestOutput(
        request_id=request_id,
        prompt=given if isinstance(given, str) else None,
        prompt_token_ids=ids,
        outputs=EmbeddingOutput(vectors.finish(output.vector or b"", pooling).tolist()),
        num_cached_tokens=output.num_cached_tokens,
    )


def _taken_apart(prompt: PromptLike) -> tuple[Prompt, str | None]:
    """Return a prompt and its salt."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    return given, prompt.get("cache_salt")
