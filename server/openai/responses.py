"""`/v1/responses`: OpenAI's newer API (https://platform.openai.com/docs/api-reference/responses).

`responses_input` converts the items of a request to chat messages, and `responses_output` the answer to items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, PrivateAttr

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.http.errors import ResponseNotFound, json_response
from quire.server.http.large_bodies import BodyRoute, Continued
from quire.server.http.request_body import Admit, RequestBody, sampling_params
from quire.server.http.request_model import (
    LABEL,
    MAX_MESSAGES,
    ExtraField,
    Int64,
    MessagePart,
    ReasoningEffort,
    RequestModel,
    check_length,
    hint,
    rejected,
    variant,
)
from quire.server.http.response import EventStreamResponse, while_connected
from quire.server.http.response_store import StoredResponse
from quire.server.http.state import AppState, MayChooseReplica, ServedModel
from quire.server.openai.responses_input import InputTurns
from quire.server.openai.responses_output import ProcessedResponse, ResponseFormatter
from quire.server.text.conversation import ChatTemplateOptions, ParamNames
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, RequestOptions, Task
from quire.server.text.tools import MAX_TOOLS, read_tool_use

router = APIRouter(route_class=BodyRoute)

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

_ECHOED = ("user", "safety_identifier", "prompt_cache_key")
MAX_ECHOED = 1024
"""Characters of a field without effect that the response repeats."""

_encode = msgspec.json.Encoder().encode


class _ResponsesTool(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "defer_loading": rejected(False),
        "allowed_callers": rejected(["direct"]),
    }

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_HOSTED_TOOLS = re.compile(
    "(web_search|file_search|code_interpreter|computer|image_generation|mcp|tool_search)(_preview|_use)*(_[0-9_]+)?"
)
"""Types of tools that OpenAI runs. They are offers to the model, so it can do without them."""


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


class ResponsesRequest(RequestBody):
    """The body of a request for a response."""

    needs: ClassVar[Task | None] = "generate"
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention", *_ECHOED), LABEL),
        "client_metadata": hint(),
        "service_tier": hint("auto", "default"),
        "stream_options": hint({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "truncation": hint("disabled"),
        "background": rejected(False),
        "context_management": rejected([]),
        "conversation": rejected(),
        "prompt": rejected(),
    }
    max_items: ClassVar[Mapping[str, int]] = {"input": 4 * MAX_MESSAGES, "tools": MAX_TOOLS}
    _earlier: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    """The conversation that this request continues."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    """vLLM extension, as in chat."""
    seed: Int64 | None = None
    """vLLM extension, as in chat."""
    stop: str | list[str] | None = None
    """vLLM extension, as in chat."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Int64, Field(ge=1)] | None = None
    """Of functions, as there are no built-in tools: further calls are dropped."""
    top_logprobs: Annotated[Int64, Field(ge=-1)] | None = None
    """At most `--max-logprobs`; -1: all (vLLM). Log-probabilities are returned if this is not 0, or `include` has
    `message.output_text.logprobs`.
    """
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension, as in chat."""

    @classmethod
    async def process_large(cls, value: Any, processor: InputProcessor, stored: bytes | None) -> Any:
        """See `RequestBody`."""
        body = cls.validated(value)
        if body.previous_response_id is not None:
            if stored is None:
                return Continued(body.previous_response_id, body.reduced(None))
            body._earlier = msgspec.json.decode(stored)
        return await body.process_reduced(processor)

    def find_earlier(self, state: ServedModel) -> None:
        """Find the conversation that this request continues; raises `InvalidParameter`."""
        if self.previous_response_id is not None and self._processed is None:
            self._earlier = _earlier(self.previous_response_id, state)

    async def process_here(self, admit: Admit) -> ProcessedResponse:
        turns = self.conversation()
        given = self.chat_input(turns)
        structured = self.text and self.text.format and self.text.format.structured()
        has_logprobs = self.top_logprobs or _LOGPROBS in (self.include or ())
        logprobs = (self.top_logprobs or 0) if has_logprobs else None
        processor = admit(turns.ignored)
        params = sampling_params(
            self, processor.sampling_defaults, _NAMES, logprobs=logprobs, structured_outputs=structured
        )
        chat = await processor.process_chat(given, params, RequestOptions(param_names=_NAMES))
        echoed = self.echoed_fields()
        try:
            _encode(echoed)
            conversation = _encode(turns.messages) if self.store is not False else None
        except (UnicodeEncodeError, OverflowError, ValueError, RecursionError) as error:
            raise InvalidParameter(f"the request cannot be converted to JSON: {error}") from None
        return ProcessedResponse(chat, echoed, conversation)

    def conversation(self) -> InputTurns:
        """The chat messages up to the answer, without instructions; raises `InvalidParameter`."""
        ignored = self.check_fields()
        for name in _ECHOED:
            if len(str((self.model_extra or {}).get(name))) > MAX_ECHOED:
                raise InvalidParameter(f"{name}: at most {MAX_ECHOED} characters are allowed", name)
        if other := next((name for name in self.include or () if name not in _INCLUDABLE), None):
            raise InvalidParameter(f"include: {other} is not supported", "include")
        turns = InputTurns(self._earlier)
        turns.ignored = ignored
        if isinstance(self.input, str):
            turns.add({"role": "user", "content": self.input}, "input")
        else:
            for at, item in enumerate(self.input):
                turns.add(item, f"input[{at}]")
        return turns

    def chat_input(self, turns: InputTurns) -> ChatInput:
        """The conversation, with instructions and tools. Adds the ignored fields of tools to the turns'; raises
        `InvalidParameter`.
        """
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = [*instructions, *turns.messages]
        check_length(messages, MAX_MESSAGES, "input")
        found = [_chat_tool(tool, f"tools[{at}]", turns.ignored) for at, tool in enumerate(self.tools or ())]
        tools = [tool for tool in found if tool is not None]
        max_calls = 1 if self.parallel_tool_calls is False else self.max_tool_calls
        return ChatInput(
            messages=messages,
            tools=tools,
            tool_use=read_tool_use(tools, _chat_choice(self.tool_choice), max_calls, _NAMES),
            template=ChatTemplateOptions(
                chat_template_kwargs=self.chat_template_kwargs or {},
                reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            ),
        )

    def echoed_fields(self) -> dict[str, Any]:
        """The fields of the response that repeat the request."""
        text, extra = self.text and self.text.format, self.model_extra or {}
        nothing = {"description": None, "parameters": None, "strict": False}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "safety_identifier": extra.get("safety_identifier"),
            "service_tier": "default",
            "store": self.store is not False,
            "text": {"format": text.model_dump(by_alias=True, exclude_none=True) if text else {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [nothing | tool for tool in self.tools or () if tool["type"] == "function"],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            **({} if extra.get("user") is None else {"user": extra["user"]}),
        }


@router.post("/v1/responses", dependencies=[MayChooseReplica])
async def create_response(body: ResponsesRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation, or continue an earlier response."""
    model = state.check_model(body.model)
    body.find_earlier(state)
    processed: ProcessedResponse = await body.process(state.frontend)
    response = ResponseFormatter(model, processed, state)
    generation = state.frontend.generate(response.id, processed.chat)
    if body.stream:
        return EventStreamResponse(generation, partial(response.write_events, generation), end=b"")
    with generation:
        return json_response(await while_connected(request.receive, response.whole(generation)))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, state: AppState, stream: bool = False) -> Response:
    """Return a stored response, or one that is being streamed."""
    if stream:
        raise InvalidParameter("stream: only a new response can be streamed", "stream")
    if (running := state.responses.running.get(response_id)) is not None:
        return json_response(running.object())
    return Response(_stored(response_id, state, "response_id").response, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, state: AppState) -> Response:
    """Cancel a response that is being streamed."""
    if (running := state.responses.running.get(response_id)) is not None:
        running.cancel()
        return json_response(running.object())
    stored = msgspec.json.decode(_stored(response_id, state, "response_id").response)
    if stored["status"] != "cancelled":
        raise InvalidParameter(
            f"response {response_id} is {stored['status']}; there is nothing to cancel", "response_id"
        )
    return json_response(stored)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, state: AppState) -> Response:
    """Delete a response. If it is being streamed, cancel it."""
    if (running := state.responses.running.get(response_id)) is not None:
        running.cancel()
        state.responses.delete(response_id)
    elif not state.responses.delete(response_id):
        raise _not_found(response_id, state, "response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _chat_tool(tool: dict[str, Any], param: str, ignored: set[str]) -> dict[str, Any] | None:
    """Convert a function to a tool of chat. Other tools of OpenAI's are ignored (None)."""
    if isinstance(kind := tool.get("type"), str) and _HOSTED_TOOLS.fullmatch(kind):
        ignored.add(f"{param}.type={kind}")
        return None
    read = variant({"function": _ResponsesTool}, tool, param, ignored)
    function = read.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_nested(one) for one in tools]}}
    raise InvalidParameter(
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
        '{"type": "allowed_tools", "mode": …, "tools": …}',
        "tool_choice",
    )


def _nested(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _earlier(response_id: str, state: ServedModel) -> list[dict[str, Any]]:
    if response_id in state.responses.running:
        raise InvalidParameter(f"response {response_id} has not ended yet", "previous_response_id")
    return _stored(response_id, state, "previous_response_id").messages()


def _stored(response_id: str, state: ServedModel, param: str) -> StoredResponse:
    if (stored := state.responses.get(response_id)) is None:
        raise _not_found(response_id, state, param)
    return stored


def _not_found(response_id: str, state: ServedModel, param: str) -> ResponseNotFound:
    count = state.frontend.process_info.count
    others = f", and each of the {count} API processes has only its own" if count > 1 else ""
    return ResponseNotFound(
        f"response {response_id} not found: only the newest responses with store: true are kept, in memory{others}",
        param,
    )
