"""`LLM`: a model for scripts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from tqdm.auto import tqdm

from quire.engine.config.options import EngineOptions
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.llm import pooling
from quire.server.llm.async_llm import AsyncLLM
from quire.server.llm.llm_engine import LLMEngine
from quire.server.llm.lora_request import LoRAChoice, LoRARequest, checked, opened, opened_for
from quire.server.llm.offline_request import OfflineRequest
from quire.server.llm.pooling import PoolingParams, ScoreData
from quire.server.llm.prompts import (
    ProcessedPrompt,
    PromptLike,
    Tokenization,
    chat_input,
    check_supported,
    joined,
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
from quire.server.text.adapter import RequestAdapter
from quire.server.text.conversation import Message
from quire.server.text.embedding_output import VectorOptions
from quire.server.text.inputs import EmbeddingOptions

T = TypeVar("T")


class LLM(LLMEngine):
    """A model for scripts: `LLM("model").generate(prompts, params)`. It runs until `shutdown`, the end of a `with`
    block, or the end of the script.

    `model` is a folder or a Hugging Face id; the default is the demo model. `options` are the engine flags of
    `quire serve` with underscores (the fields of `quire.engine.config.options.EngineOptions`), or vLLM's, as in
    `EngineArgs`. `chat_template` is the text or the file of a template that replaces the model's own;
    `default_chat_template_kwargs`, `tool_call_parser`, `reasoning_parser` and `torch_profiler_dir` are as for
    `quire serve`; `log_level` is `debug`, `info`, `warning` or `error`.

    Raises `ConfigError` for options or models that are not supported, and `EngineUnavailable` if loading fails.
    """

    def __init__(self, model: str = EngineOptions.model, **options: Any) -> None:
        super().__init__(AsyncLLM(model, **options))

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for requests step by step."""
        return self

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling parameters, which are the default of `LLM.generate` and `LLM.chat`."""
        return SamplingParams(**self._frontend.input_processor.sampling_defaults)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | Sequence[list[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRAChoice = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Generate text for one or more prompts; the results are in the order of the prompts.

        `sampling_params` are common to all prompts, or one for each; None: the model's own defaults.
        `prompt_token_ids` are prompts as token ids; `prompts` are their texts then, or None. `priority` is one number
        for each prompt; lower ones run first with `scheduling_policy="priority"`. `use_tqdm` shows a progress bar on a
        terminal, made by it if it is a function. `tokenization_kwargs` may have `add_special_tokens` and
        `truncate_prompt_tokens`. `lora_request` is the adapter of all prompts, or one for each; None: the base model
        answers. Other arguments of vLLM's (`unsupported`), such as `trace_headers`, must be None.

        Raises `InvalidParameter`, `RequestFailed` and `EngineUnavailable`; the other requests are then aborted. Raises
        `ValueError` if there are not as many parameters, priorities or adapters as prompts, and `ConfigError` for an
        adapter that cannot be used.
        """
        check_supported(unsupported)
        process = partial(process_prompt, self._frontend, tokenization=Tokenization.of(tokenization_kwargs))
        many = joined(prompts, prompt_token_ids)
        return self._wait(self._run_all(process, many, sampling_params, priority, checked(lora_request), use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRAChoice = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Answer one or more conversations; otherwise like `LLM.generate`.

        Contents may have images and videos: parts as in the OpenAI API, or such as `{"type": "image", "image": image}`
        with a PIL image, an array, a file, bytes or a URL. `mm_processor_kwargs` are arguments of the model's
        processor.

        The model may call `tools` (as in the OpenAI API), and must if `tool_choice` requires it. `tool_calls` of a
        result are its calls; its `text` is the complete output, including the text of calls.

        `chat_template` is the text of a template for these conversations, and `chat_template_kwargs` are variables of
        the template, such as `enable_thinking`. `add_generation_prompt` starts the assistant's turn;
        `continue_final_message` continues the last message instead.
        """
        options = partial(
            chat_input,
            tools or (),
            tool_choice,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            mm_processor_kwargs=mm_processor_kwargs,
            **unsupported,
        )
        many: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        chats = [options(messages=each) for each in many]
        process = partial(process_chat, self._frontend, tokenization=Tokenization.of(tokenization_kwargs))
        return self._wait(self._run_all(process, chats, sampling_params, None, checked(lora_request), use_tqdm))

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        lora_request: LoRAChoice = None,
        use_tqdm: bool | Callable[..., Any] = True,
        concurrency_limit: int | None = None,
        **unsupported: Any,
    ) -> list[BeamSearchOutput]:
        """Find the most likely outputs of one or more prompts; otherwise like `LLM.generate`. `concurrency_limit` is
        vLLM's and has no effect: all prompts run together.
        """
        check_supported(unsupported)
        many = joined(prompts, None)
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=0,
        )

        async def process(
            prompt: PromptLike, sampling: SamplingParams | None, priority: int, adapter: RequestAdapter | None
        ) -> ProcessedPrompt:
            given, text = await process_prompt(self._frontend, prompt, sampling, priority, adapter)
            return ProcessedPrompt(replace(given, length_penalty=params.length_penalty), text)

        results = self._wait(self._run_all(process, many, sampling, None, checked(lora_request), use_tqdm))
        return [
            BeamSearchOutput([beam_search_sequence(result.prompt_token_ids, output) for output in result.outputs])
            for result in results
        ]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        lora_request: LoRAChoice = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the vectors of one or more prompts, with an embedding model; otherwise like `AsyncLLM.embed`.

        `pooling_params` are common to all prompts, or one for each.
        """
        render = partial(
            pooling.options,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
            prompt_name=prompt_name,
            tokenization_kwargs=tokenization_kwargs,
            **unsupported,
        )
        finish = partial(pooling.vector_options, dimensions=dimensions, normalize=normalize)
        pool = partial(pooling.embed, self._frontend)
        return self._wait(
            self._pool_all(pool, prompts, pooling_params, render, finish, checked(lora_request), use_tqdm)
        )

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_activation: bool | None = None,
        lora_request: LoRAChoice = None,
        **rendering: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classify one or more prompts, with a classifier; otherwise like `AsyncLLM.classify`."""
        render = partial(pooling.options, **rendering)
        finish = partial(pooling.vector_options, normalize=use_activation)
        pool = partial(pooling.classify, self._frontend)
        return self._wait(
            self._pool_all(pool, prompts, pooling_params, render, finish, checked(lora_request), use_tqdm)
        )

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_task: Literal["embed", "token_embed", "classify"] | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        lora_request: LoRAChoice = None,
        **rendering: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute the pooled outputs of one or more prompts; otherwise like `AsyncLLM.encode`."""
        first = pooling_params[0] if isinstance(pooling_params, Sequence) and pooling_params else pooling_params
        task = pooling_task or (first.task if isinstance(first, PoolingParams) else None)
        render = partial(pooling.options, **rendering)
        finish = partial(pooling.vector_options, dimensions=dimensions, normalize=use_activation)
        pool = partial(pooling.encode, task or "pool", self._frontend)
        return self._wait(
            self._pool_all(pool, prompts, pooling_params, render, finish, checked(lora_request), use_tqdm)
        )

    def score(
        self,
        data_1: ScoreData | Sequence[ScoreData],
        data_2: ScoreData | Sequence[ScoreData],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        use_activation: bool | None = None,
        lora_request: LoRARequest | None = None,
        **rendering: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts, all of them in one request; otherwise like `AsyncLLM.score`."""
        options = pooling.options(pooling_params, **rendering)
        activated = pooling.vector_options(pooling_params, normalize=use_activation).normalize
        adapter = self._wait(opened(self._frontend, checked(lora_request)))
        with _bar(1, use_tqdm) as bar:
            found = self._wait(pooling.score(self._frontend, data_1, data_2, options, activated, adapter=adapter))
            bar.update()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _run_all(
        self,
        process: Callable[
            [Any, SamplingParams | None, int, RequestAdapter | None], Coroutine[Any, Any, ProcessedPrompt]
        ],
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora_request: LoRAChoice,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        params = [sampling_params] * len(prompts) if not isinstance(sampling_params, Sequence) else sampling_params
        priorities = [0] * len(prompts) if priority is None else priority
        for what, given in (("sampling_params", params), ("priority", priorities)):
            if len(given) != len(prompts):
                raise ValueError(f"{what}: {len(given)} for {len(prompts)} prompts")
        adapters = await opened_for(self._frontend, lora_request, len(prompts))
        processed = await asyncio.gather(*map(process, prompts, params, priorities, adapters))
        with (
            contextlib.ExitStack() as stack,
            _bar(len(prompts), use_tqdm) as bar,
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
        pool: Callable[..., Coroutine[Any, Any, T]],
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        render: Callable[[PoolingParams | None], EmbeddingOptions],
        finish: Callable[[PoolingParams | None], VectorOptions],
        lora_request: LoRAChoice,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[T]:
        """Run `pool` for each prompt, with the options that `render` and `finish` make of its parameters."""
        many = joined(prompts, None)
        params = pooling_params if isinstance(pooling_params, Sequence) else [pooling_params] * len(many)
        if len(params) != len(many):
            raise ValueError(f"pooling_params: {len(params)} for {len(many)} prompts")
        inputs = [(prompt, render(given), finish(given)) for prompt, given in zip(many, params, strict=True)]
        adapters = await opened_for(self._frontend, lora_request, len(many))
        with _bar(len(many), use_tqdm) as bar:

            async def one(
                prompt: PromptLike, rendering: EmbeddingOptions, vectors: VectorOptions, adapter: RequestAdapter | None
            ) -> T:
                result = await pool(prompt, rendering, vectors, adapter=adapter)
                bar.update()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*each, adapter)) for each, adapter in zip(inputs, adapters, strict=True)]
        return [task.result() for task in tasks]


def _bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Any:
    """A progress bar, made by `use_tqdm` if it is a function."""
    make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm or None)
    return make(total=total, desc="requests")
