"""The bodies of `/v1/responses` and of the routes below it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec
from pydantic import Field, PrivateAttr

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.http.errors import ResponseNotFound
from quire.server.http.large_bodies import LARGE_BODY, Continued
from quire.server.http.request_body import Admit
from quire.server.http.request_model import (
    INTEGRAL,
    LABEL,
    MAX_MESSAGES,
    ExtraField,
    Positive,
    ReasoningEffort,
    RequestModel,
    check_length,
    hint,
    only_one,
    rejected,
)
from quire.server.http.response_store import StoredResponse
from quire.server.http.state import ServedModel
from quire.server.media.data_urls import CUT_FILES, FilesNotRead
from quire.server.openai.protocol import OF_OLLAMA, ReasoningRequest, SamplingRequest
from quire.server.openai.responses_input import (
    InputTurns,
    is_message,
    referred_id,
    resolved,
    response_of,
    shortened,
    shortenings,
)
from quire.server.openai.responses_output import ProcessedResponse
from quire.server.openai.responses_tools import ResponseTools
from quire.server.text.conversation import ChatTemplateOptions, ParamNames
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, ContextLengthExceeded, GenerationInput, RequestOptions, Task
from quire.server.text.tools import MAX_TOOLS, read_tool_use

_NAMES = ParamNames(
    messages="input",
    reasoning_effort="reasoning.effort",
    function="",
    function_parameters=".parameters",
    max_tokens="max_output_tokens",
    logprobs="top_logprobs",
    structured_outputs="text.format",
)
"""The API's own names."""
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",  # to send the reasoning back; it is returned as plain text
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The values that clients may request. Except for log-probabilities, none of them exists here."""

_NO_FIELDS = {"description": None, "parameters": None, "strict": False}
"""A function without its optional fields."""
_ECHOED = ("user", "safety_identifier", "prompt_cache_key")
MAX_ECHOED = 1024
"""Characters of a field without effect that the response repeats."""

_encode = msgspec.json.Encoder().encode


class ResponseTextFormat(RequestModel):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def structured(self) -> StructuredOutputs | None:
        """Convert to the engine's parameters."""
        given = self.model_dump(by_alias=True, exclude_none=True, include={"name", "description", "schema_", "strict"})
        if self.type != "json_schema" and given:
            raise InvalidParameter(f"text.format: {next(iter(given))} requires type json_schema", "text.format")
        for name in ("name", "schema") if self.type == "json_schema" else ():
            if name not in given:
                raise InvalidParameter(f"text.format.{name} is missing", f"text.format.{name}")
        if self.schema_ is not None:
            return StructuredOutputs(json=self.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class ResponseText(RequestModel):
    """Options of the text."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"verbosity": hint("medium")}

    format: ResponseTextFormat | None = None


class ResponseReasoning(RequestModel):
    """Options of the reasoning. Summaries are not generated; the reasoning itself is returned."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"summary": hint("auto"), "generate_summary": hint("auto")}

    effort: ReasoningEffort | None = None


class ReadRequest(NamedTuple):
    """The input of a request, as chat has it."""

    chat: ChatInput
    items: list[dict[str, Any]]
    """The items of the conversation, without instructions."""
    tools: ResponseTools
    ignored: set[str]
    """The fields, items and tools that have no effect."""


class InputTokensRequest(ReasoningRequest):
    """The body of a request to count the tokens of an input."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "personality": hint(),
        "conversation": rejected(),
    }
    has_files: ClassVar[bool] = True
    max_items: ClassVar[Mapping[str, int]] = {"input": 4 * MAX_MESSAGES, "tools": MAX_TOOLS}
    _stored: dict[str, list[dict[str, Any]]] = PrivateAttr(default_factory=dict)
    """The items of the stored responses that this request refers to, by id."""
    _lacks_earlier: bool = PrivateAttr(False)
    """Another process has not found the response that this request continues."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Those that the client runs: of the types `function`, `custom`, `namespace`, `local_shell`, `shell`, `apply_patch`
    and `tool_search`. Others are ignored.
    """
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: leave out the oldest turns of an input that is too long. `/v1/responses/input_tokens` counts all of
    them.
    """
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension, as in chat."""

    @classmethod
    async def process_large(cls, value: Any, processor: InputProcessor, stored: bytes | None) -> Any:
        """See `RequestBody`."""
        body = cls.validated(value)
        if response_ids := body._response_ids():
            if stored is None:
                return Continued(response_ids)
            body._stored = msgspec.json.decode(stored)
            if body.previous_response_id not in (None, *body._stored):
                return body._without_earlier()
        return await body.process_reduced(processor)

    def _without_earlier(self) -> Self:
        body = self.reduced(None)
        body._lacks_earlier = True
        return body

    def _response_ids(self) -> list[str]:
        """The ids of the stored responses that this request refers to."""
        given = self.input if isinstance(self.input, list) else ()
        referred = [response_of(item_id) for item in given if (item_id := referred_id(item)) is not None]
        return [*dict.fromkeys(each for each in (self.previous_response_id, *referred) if each is not None)]

    async def with_stored(self, state: ServedModel, content: bytes) -> Self:
        """Return this body, whose bytes are `content`, with the stored responses that it refers to; if they are large,
        it is processed as a large body. Raises `InvalidParameter` if the one that it continues is missing, and
        `FilesNotRead`.
        """
        if self._processed is not None:
            return self
        if (earlier := self.previous_response_id) is not None:
            if state.responses.running(earlier) is not None:
                raise InvalidParameter(f"response {earlier} has not ended yet", "previous_response_id")
            stored_response(earlier, state, "previous_response_id")
            if self._lacks_earlier:  # it has ended meanwhile
                raise InvalidParameter(f"response {earlier} had not ended yet", "previous_response_id")
        stored = state.responses.items_of(self._response_ids())
        if len(stored) <= LARGE_BODY:
            self._stored = msgspec.json.decode(stored)
            return self
        if CUT_FILES.get() is not None:
            raise FilesNotRead
        if self.needs is not None:
            state.frontend.client.admit()
        found: Self = await state.bodies.process_with_stored(type(self).process_large, content, stored)
        return found

    def read(self) -> ReadRequest:
        """Convert the input and the tools; raises `InvalidParameter`."""
        ignored = self.check_fields()
        tools = ResponseTools(self.tools or (), ignored)
        turns = InputTurns(tools, ignored)
        given = [] if self.input is None else self.input
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
        own = [*resolved(given, self._stored)]
        earlier = self._stored[self.previous_response_id] if self.previous_response_id is not None else []
        for at, item in enumerate(earlier):
            turns.add(item, f"previous_response_id.items[{at}]")
        for at, item in enumerate(own):
            turns.add(item, f"input[{at}]")
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = [*instructions, *turns.messages]
        check_length(messages, MAX_MESSAGES, "input")
        choice = tools.choice(self.tool_choice)
        chat = ChatInput(
            messages=messages,
            media=turns.media,
            tools=tools.functions,
            tool_use=read_tool_use(tools.functions, choice, self._max_calls, _NAMES, tools.params, tools.grammars),
            template=ChatTemplateOptions(
                chat_template_kwargs=self.chat_template_kwargs or {},
                reasoning_effort=only_one(self.efforts()),
                thinking=self.think if isinstance(self.think, bool) else None,
            ),
        )
        return ReadRequest(chat, [*earlier, *own], tools, ignored)

    def efforts(self) -> dict[str, ReasoningEffort | None]:
        own = None if self.reasoning is None else self.reasoning.effort
        return {**super().efforts(), "reasoning.effort": own}

    @property
    def _names(self) -> ParamNames:
        """The names of the parameters that the request sets."""
        given = (name for name, effort in self.efforts().items() if effort is not None)
        return replace(_NAMES, reasoning_effort=next(given, "reasoning.effort"))

    @property
    def _max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    async def process_here(self, admit: Admit) -> Any:
        """Return the number of tokens."""
        read = self.read()
        return len(await admit(read.ignored).tokenize_chat(read.chat, None, None, names=self._names))


class ResponsesRequest(SamplingRequest, InputTokensRequest):
    """The body of a request for a response."""

    needs: ClassVar[Task | None] = "generate"
    longest_name: ClassVar[str] = "max_output_tokens"
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention", *_ECHOED), LABEL),
        **OF_OLLAMA,
        "keep_alive": hint(),
        "client_metadata": hint(),
        "service_tier": hint("auto", "default"),
        "stream_options": hint({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "background": rejected(False),
        "context_management": rejected([]),
        "conversation": rejected(),
        "prompt": rejected(),
    }

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    """Of functions, as there are no built-in tools: further calls are dropped."""
    top_logprobs: Annotated[int, Field(ge=-1, lt=2**63), INTEGRAL] | None = None
    """At most `--max-logprobs`; -1: all (vLLM). Log-probabilities are returned if this is not 0, or `include` has
    `message.output_text.logprobs`.
    """
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None

    @property
    def _max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else self.max_tool_calls

    def check_fields(self, param: str = "") -> set[str]:
        """See `SamplingRequest`."""
        if self.num_predict == 0:
            raise InvalidParameter("num_predict must not be 0", "num_predict")
        return super().check_fields(param)

    @property
    def _names(self) -> ParamNames:
        return replace(super()._names, structured_outputs="format") if self.format else super()._names

    @property
    def _longest(self) -> int | None:
        """The maximum number of output tokens."""
        return self.max_output_tokens if self.num_predict is None else max(self.num_predict, 0) or None

    async def process_here(self, admit: Admit) -> ProcessedResponse:
        for name in _ECHOED:
            if len(str((self.model_extra or {}).get(name))) > MAX_ECHOED:
                raise InvalidParameter(f"{name}: at most {MAX_ECHOED} characters are allowed", name)
        if other := next((name for name in self.include or () if name not in _INCLUDABLE), None):
            raise InvalidParameter(f"include: {other} is not supported", "include")
        read = self.read()
        has_logprobs = self.top_logprobs or _LOGPROBS in (self.include or ())
        logprobs = (self.top_logprobs or 0) if has_logprobs else None
        processor = admit(read.ignored)
        text = self.text and self.text.format
        structures = {"text.format": text.structured() if text else None}
        params = self.sampled(
            processor.sampling_defaults, structures, self._names, logprobs=logprobs, max_tokens=self._longest
        )
        chat = await self._process_chat(processor, read.chat, params)
        echoed, key = self._echoed_fields(read.tools.given), uuid.uuid4().hex
        items = [
            item if _has_id(item) else item | {"id": _item_id(item, key, at)} for at, item in enumerate(read.items)
        ]
        try:
            _encode(echoed)
            encoded = _encode(items) if self.store is not False else None
            if encoded is not None and (files := CUT_FILES.get()) is not None:
                encoded = files.restored(encoded)
        except (UnicodeEncodeError, OverflowError, ValueError, RecursionError) as error:
            raise InvalidParameter(f"the request cannot be converted to JSON: {error}") from None
        return ProcessedResponse(f"resp_{key}", chat, echoed, read.tools.called, encoded, len(items))

    async def _process_chat(
        self, processor: InputProcessor, chat: ChatInput, params: SamplingParams
    ) -> GenerationInput:
        """Process the conversation, or with `truncation` the longest part of it that fits."""

        async def process(chat: ChatInput) -> GenerationInput:
            return await processor.process_chat(chat, params, RequestOptions(param_names=self._names))

        try:
            return await process(chat)
        except ContextLengthExceeded:
            ways = shortenings(chat.messages) if self.truncation == "auto" else []
            if not ways:
                raise
        found = await process(shortened(chat, ways[-1]))
        first, last = 0, len(ways) - 1
        while first < last:
            middle = (first + last) // 2
            try:
                found, last = await process(shortened(chat, ways[middle])), middle
            except ContextLengthExceeded:
                first = middle + 1
        return found

    def _echoed_fields(self, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields of the response that repeat the request, with these tools."""
        text, extra = self.text and self.text.format, self.model_extra or {}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self._longest,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "reasoning": {"effort": only_one(self.efforts()), "summary": None},
            "safety_identifier": extra.get("safety_identifier"),
            "service_tier": "default",
            "store": self.store is not False,
            "text": {"format": text.model_dump(by_alias=True, exclude_none=True) if text else {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [_NO_FIELDS | tool if tool["type"] == "function" else tool for tool in tools],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            **({} if extra.get("user") is None else {"user": extra["user"]}),
        }


def stored_response(response_id: str, state: ServedModel, param: str) -> StoredResponse:
    """Return a stored response; raises `ResponseNotFound`."""
    if (stored := state.responses.get(response_id)) is None:
        raise response_not_found(response_id, state, param)
    return stored


def response_not_found(response_id: str, state: ServedModel, param: str) -> ResponseNotFound:
    """Return the error for a response that is not stored."""
    count = state.frontend.process_info.count
    own = " for the API key that made them" if state.keys is not None else ""
    others = f", and each of the {count} API processes has only its own" if count > 1 else ""
    kept = f"only the newest responses with store: true are kept, in memory{own}{others}"
    return ResponseNotFound(
        f"response {response_id} not found: {kept}",
        param,
    )


def _has_id(item: dict[str, Any]) -> bool:
    return isinstance(item.get("id"), str) and bool(item["id"])


def _item_id(item: dict[str, Any], key: str, at: int) -> str:
    return f"{'msg' if is_message(item) else 'item'}_{key}i{at:02}"
