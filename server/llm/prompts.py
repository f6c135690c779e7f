"""Converts the prompts and parameters of `AsyncLLM` and `LLM` to the engine's input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.llm.media import chat_media, prompt_media
from quire.server.media.types import MediaSource
from quire.server.serving.frontend import Frontend
from quire.server.text.adapter import OWN_TEMPLATE, RequestAdapter
from quire.server.text.conversation import ChatTemplateOptions, Message
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, GenerationInput, Prompt, RequestOptions
from quire.server.text.tools import read_tool_use

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a mapping such as `TextPrompt` and `TokensPrompt`."""


class TextPrompt(TypedDict):
    """A text as a prompt. A dict with these keys does as well."""

    prompt: str
    """The text."""
    cache_salt: NotRequired[str]
    """Requests share cached prefixes only with requests that have the same salt."""
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """Images and videos under the keys `image` and `video`, one or a list: PIL images, arrays, files, bytes or URLs.
    The text has the model's placeholder for each.
    """
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    """Names of these, by which later prompts may refer to them: with None as the item."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Arguments of the model's processor."""


class TokensPrompt(TypedDict):
    """Token ids as a prompt. A dict with these keys does as well."""

    prompt_token_ids: list[int]
    """The token ids, which are used unchanged."""
    prompt: NotRequired[str]
    """Their text, which the result repeats."""
    cache_salt: NotRequired[str]
    """Requests share cached prefixes only with requests that have the same salt."""


_KEYS = (
    *("prompt", "prompt_token_ids", "cache_salt"),
    *("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"),
)
_UNSUPPORTED = {
    "arrival_time": "it is measured",
    "chat_template_content_format": "it is detected from the chat template",
    "data_parallel_rank": "replicas are chosen by their load and cached prefixes",
    "guided_options_request": "use SamplingParams(structured_outputs=…)",
    **dict.fromkeys(("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids"), "it is a key of a prompt"),
    "prompt_adapter_request": "prompt adapters are not supported",
    "prompt_embeds": "embeddings as prompts are not supported; use texts or token ids",
    "encoder_prompt": "models with an encoder and a decoder are not supported",
    "decoder_prompt": "models with an encoder and a decoder are not supported",
    "trace_headers": "traces are made by `quire serve`",
    "token_type_ids": "use `score` for pairs of texts",
}
"""Arguments and keys of vLLM that must be empty, and the reason or what to do instead."""
_DETECTED = ("auto", "string")
"""Values of `chat_template_content_format` that change nothing."""


class PromptText(NamedTuple):
    """A prompt, its text if that is known, and its salt."""

    prompt: Prompt
    text: str | None
    cache_salt: str | None
    media: Sequence[MediaSource] = ()


class ProcessedPrompt(NamedTuple):
    """The engine's input, and the prompt's text, if it was one."""

    given: GenerationInput
    text: str | None = None


class Tokenization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `tokenization_kwargs`. None: the method's own default."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Tokenization:
        """Raises `InvalidParameter` for keys that are not supported, and for values of wrong types."""
        try:
            return msgspec.convert({} if given is None else given, Tokenization)
        except msgspec.ValidationError as error:
            supported = " and ".join(Tokenization.__struct_fields__)
            raise InvalidParameter(
                f"tokenization_kwargs: {error}; only {supported} are supported", "tokenization_kwargs"
            ) from None


DEFAULT_TOKENIZATION = Tokenization()


def chat_input(
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    messages: Sequence[Message] = (),
    **unsupported: Any,
) -> ChatInput:
    """Convert the options of `LLM.chat`; raises `InvalidParameter` for invalid tool options, images and videos, and the
    errors of `check_supported`.
    """
    check_supported(unsupported)
    tool_use = read_tool_use(tools or (), tool_choice)
    options = ChatTemplateOptions(
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs or {},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    messages, media = chat_media(messages, mm_processor_kwargs or {})
    return ChatInput(messages=messages, media=media, tools=tools or (), tool_use=tool_use, template=options)


async def process_prompt(
    frontend: Frontend,
    prompt: PromptLike,
    params: SamplingParams | None,
    priority: int,
    adapter: RequestAdapter | None = None,
    *,
    tokenization: Tokenization = DEFAULT_TOKENIZATION,
) -> ProcessedPrompt:
    processor, (given, text, salt, media) = frontend.admit(), split(prompt)
    checked = _checked(processor, params)
    if checked.thinking_token_budget is not None:
        raise InvalidParameter(
            "thinking_token_budget: only conversations have reasoning whose tokens are counted; use `chat`",
            "thinking_token_budget",
        )
    processed = await processor.process_prompts(
        [given],
        checked,
        _options(checked, priority, salt, tokenization),
        add_special_tokens=tokenization.add_special_tokens is not False,
        media=media,
    )
    return ProcessedPrompt(replace(processed, adapter=adapter), text)


async def process_chat(
    frontend: Frontend,
    chat: ChatInput,
    params: SamplingParams | None,
    priority: int,
    adapter: RequestAdapter | None = None,
    *,
    tokenization: Tokenization = DEFAULT_TOKENIZATION,
) -> ProcessedPrompt:
    processor = frontend.admit()
    checked = _checked(processor, params)
    if tokenization.add_special_tokens is not None:
        chat = replace(chat, template=replace(chat.template, add_special_tokens=tokenization.add_special_tokens))
    chat = replace(chat, thinking_budget=checked.thinking_token_budget)
    options = _options(checked, priority, None, tokenization)
    token = OWN_TEMPLATE.set("" if adapter is None else adapter.chat_template)
    try:
        processed = await processor.process_chat(chat, checked, options)
    finally:
        OWN_TEMPLATE.reset(token)
    return ProcessedPrompt(replace(processed, adapter=adapter))


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


def _options(
    params: SamplingParams, priority: Any, cache_salt: str | None, tokenization: Tokenization
) -> RequestOptions:
    kept = params.truncate_prompt_tokens
    return RequestOptions(
        truncate_prompt_tokens=tokenization.truncate_prompt_tokens if kept is None else kept,
        priority=typed(priority, int, "priority"),
        cache_salt=cache_salt,
        reject_long_output=False,
    )


def typed(value: Any, kind: Any, param: str) -> Any:
    """Return the value of a parameter; raises `InvalidParameter` if its type is not `kind`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{param}: {error}", param) from None


def is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )


def split(prompt: PromptLike) -> PromptText:
    """Return the parts of a prompt; raises `InvalidParameter` for keys that are unknown or not supported."""
    if not isinstance(prompt, Mapping):
        return PromptText(prompt, prompt if isinstance(prompt, str) else None, None)
    for key, value in prompt.items():
        if key not in _KEYS:
            check_supported({key: value}, InvalidParameter(f"prompt: unknown key {key!r}{_nearest(key, _KEYS)}", key))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (given := text if ids is None else ids) is None:
        raise InvalidParameter("prompt: a mapping must have a prompt or prompt_token_ids", "prompt")
    text = text if isinstance(text, str) else None
    return PromptText(given, text, prompt.get("cache_salt"), prompt_media(prompt))


def joined(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Return the prompts of a method of `LLM` as a list, given as vLLM takes them. With `prompt_token_ids`, the
    `prompts` are their texts.

    Raises `InvalidParameter` if there are neither, or not as many of both.
    """
    if prompt_token_ids is None:
        if prompts is None:
            raise InvalidParameter("prompts must be given", "prompts")
        return [prompts] if is_one_prompt(prompts) else list(prompts)
    ids = [prompt_token_ids] if is_one_prompt(prompt_token_ids) else list(prompt_token_ids)
    texts = [None] * len(ids) if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
    if len(ids) != len(texts):
        raise InvalidParameter(f"prompt_token_ids: {len(ids)} for {len(texts)} prompts", "prompt_token_ids")
    return [{"prompt_token_ids": each, "prompt": text} for each, text in zip(ids, texts, strict=True)]


def check_supported(given: Mapping[str, Any], unknown: Exception | None = None) -> None:
    """Reject arguments that are not supported, unless they are empty or None, and those that are not vLLM's: with the
    error `unknown`, or a `TypeError`. Raises `InvalidParameter`.
    """
    for name, value in given.items():
        if name not in _UNSUPPORTED:
            raise unknown or TypeError(f"unexpected keyword argument {name!r}{_nearest(name, _UNSUPPORTED)}")
        is_empty = isinstance(value, Mapping | Sequence) and (not value or value in _DETECTED)
        if value is not None and not is_empty:
            raise InvalidParameter(f"{name}: {_UNSUPPORTED[name]}", name)


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {found[0]}?" if found else ""
