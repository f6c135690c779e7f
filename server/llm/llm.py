"""`LLM`: a model for scripts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

from tqdm.auto import tqdm

from quire.engine.config.options import EngineOptions
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.llm import pooling
from quire.server.llm.async_llm import AsyncLLM
from quire.server.llm.offline_request import OfflineRequest
from quire.server.llm.own_loop import OwnLoop
from quire.server.llm.prompts import (
    ProcessedPrompt,
    PromptLike,
    chat_input,
    is_one_prompt,
    process_chat,
    process_prompt,
)
from quire.server.serving.llm_outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    beam_search_sequence,
)
from quire.server.text.conversation import Message
from quire.server.text.embedding_output import VectorOptions
from quire.server.text.inputs import EmbeddingOptions

T = TypeVar("T")


class LLM(OwnLoop):
    """A model for scripts: `LLM("model").generate(prompts, params)`. It runs until `shutdown`, the end of a `with`
    block, or the end of the script.

    `model` is a folder or a Hugging Face id; the default is the demo model. `options` are the engine flags of
    `quire serve` with underscores (the fields of `quire.engine.config.options.EngineOptions`). `chat_template` is the
    text or the file of a template that replaces the model's own; `log_level` is `debug`, `info`, `warning` or `error`.

    Raises `ConfigError` for options or models that are not supported, and `EngineUnavailable` if loading fails.
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
        """Generate text for one or more prompts; the results are in the order of the prompts.

        `sampling_params` are common to all prompts, or one for each; None: the model's own defaults. `priority` is one
        number for each prompt; lower ones run first with `scheduling_policy="priority"`. `use_tqdm` shows a progress
        bar on a terminal.

        Raises `InvalidParameter`, `RequestFailed` and `EngineUnavailable`; the other requests are then aborted. Raises
        `ValueError` if there are not as many parameters or priorities as prompts.
        """
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        return self._wait(
            self._run_all(partial(process_prompt, self._frontend), many, sampling_params, priority, use_tqdm)
        )

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
        """Answer one or more conversations; otherwise like `LLM.generate`.

        The model may call `tools` (as in the OpenAI API), and must if `tool_choice` requires it. `tool_calls` of a
        result are its calls; its `text` is the complete output, including the text of calls.

        `chat_template` is the text of a template for these conversations, and `chat_template_kwargs` are variables of
        the template, such as `enable_thinking`. `add_generation_prompt` starts the assistant's turn;
        `continue_final_message` continues the last message instead.
        """
        chat = chat_input(
            tools,
            tool_choice,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        many: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        chats = [replace(chat, messages=each) for each in many]
        return self._wait(self._run_all(partial(process_chat, self._frontend), chats, sampling_params, None, use_tqdm))

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Find the most likely outputs of one or more prompts; otherwise like `LLM.generate`."""
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=0,
        )

        async def process(prompt: PromptLike, sampling: SamplingParams | None, priority: int) -> ProcessedPrompt:
            given, text = await process_prompt(self._frontend, prompt, sampling, priority)
            return ProcessedPrompt(replace(given, length_penalty=params.length_penalty), text)

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
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        rendering = EmbeddingOptions(
            add_special_tokens=add_special_tokens,
            truncate=truncate_prompt_tokens,
            truncation_side=truncation_side,
            prompt_name=prompt_name,
        )
        vectors = VectorOptions(dimensions=dimensions, normalize=normalize)
        return self._wait(self._pool_all(partial(pooling.embed, self._frontend), many, rendering, vectors, use_tqdm))

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        use_tqdm: bool = True,
        *,
        use_activation: bool | None = None,
        **rendering: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classify one or more prompts, with a classifier; otherwise like `AsyncLLM.classify`."""
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        vectors = VectorOptions(normalize=use_activation)
        return self._wait(
            self._pool_all(
                partial(pooling.classify, self._frontend),
                many,
                pooling.options(**rendering),
                vectors,
                use_tqdm,
            )
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
        """Compute the pooled outputs of one or more prompts; otherwise like `AsyncLLM.encode`."""
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        vectors = VectorOptions(dimensions=dimensions, normalize=use_activation)
        encode = partial(pooling.encode, pooling_task or "pool", self._frontend)
        return self._wait(self._pool_all(encode, many, pooling.options(**rendering), vectors, use_tqdm))

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
        with tqdm(total=1, desc="requests", disable=not use_tqdm or None) as bar:
            found = self._wait(
                pooling.score(self._frontend, data_1, data_2, pooling.options(**rendering), use_activation)
            )
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
        process: Callable[[Any, SamplingParams | None, int], Coroutine[Any, Any, ProcessedPrompt]],
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
        with (
            contextlib.ExitStack() as stack,
            tqdm(total=len(prompts), desc="requests", disable=not use_tqdm or None) as bar,
        ):
            requests = []
            for each in processed:
                requests.append(OfflineRequest(self._frontend, *each))
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
        with tqdm(total=len(prompts), desc="requests", disable=not use_tqdm or None) as bar:

            async def one(prompt: PromptLike) -> T:
                result = await pool(prompt, rendering, vectors)
                bar.update()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]
