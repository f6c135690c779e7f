"""Converts the prompts and parameters of `AsyncLLM` and `LLM` to the engine's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.serving.frontend import Frontend
from quire.server.text.conversation import ChatTemplateOptions
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, GenerationInput, Prompt, RequestOptions
from quire.server.text.tools import read_tool_use

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with either as `prompt` or `prompt_token_ids`, and optionally a `cache_salt`."""


class ProcessedPrompt(NamedTuple):
    """The engine's input, and the prompt's text, if it was one."""

    given: GenerationInput
    text: str | None = None


def chat_input(
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


async def process_prompt(
    frontend: Frontend, prompt: PromptLike, params: SamplingParams | None, priority: int
) -> ProcessedPrompt:
    processor, (given, salt) = frontend.admit(), split_salt(prompt)
    options = _options(priority, salt)
    processed = await processor.process_prompts([given], _checked(processor, params), options)
    return ProcessedPrompt(processed, given if isinstance(given, str) else None)


async def process_chat(
    frontend: Frontend, chat: ChatInput, params: SamplingParams | None, priority: int
) -> ProcessedPrompt:
    processor, options = frontend.admit(), _options(priority)
    return ProcessedPrompt(await processor.process_chat(chat, _checked(processor, params), options))


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
    return RequestOptions(priority=integer(priority, "priority"), cache_salt=cache_salt, reject_long_output=False)


def integer(value: Any, param: str) -> int:
    try:
        return msgspec.convert(value, int)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{param}: {error}", param) from None


def is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )


def split_salt(prompt: PromptLike) -> tuple[Prompt, str | None]:
    """Return a prompt and its salt."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    return given, prompt.get("cache_salt")
