"""`/v1/responses`: OpenAI's newer API (https://platform.openai.com/docs/api-reference/responses).

Requests are converted to chat, and the output of chat to items. Reasoning is returned as plain text in the `content` of
its items, so nothing is encrypted or summarized.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, PrivateAttr
from starlette.types import Send

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from quire.server.http.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
    ScoredToken,
)
from quire.server.http.errors import ResponseNotFound, json_response
from quire.server.http.large_bodies import BodyRoute, Continued
from quire.server.http.request_body import Admit, RequestBody
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
from quire.server.http.response import EventStreamResponse, part, while_connected
from quire.server.http.response_store import StoredResponse
from quire.server.http.state import AppState, MayChooseReplica, ServedModel
from quire.server.openai.logprobs import TokenNames, token_logprobs
from quire.server.openai.responses_input import InputTurns, is_json_object
from quire.server.serving.generation import Generation
from quire.server.serving.sampling import sampling_params
from quire.server.text.conversation import ChatTemplateOptions
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import ChatInput, GenerationInput, ParamNames, RequestOptions, Task
from quire.server.text.tools import MAX_TOOLS, read_tool_use

router = APIRouter(route_class=BodyRoute)

_NAMES = ParamNames(
    messages="input",
    logprobs="top_logprobs",
    structured_outputs="text.format",
    reasoning_effort="reasoning.effort",
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
"""What clients may request. Except for log-probabilities, nothing of it exists here."""

_ECHOED = ("user", "safety_identifier", "prompt_cache_key")
MAX_ECHOED = 1024
"""Characters of a field without effect that the response repeats."""

_Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

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


class _ProcessedResponse(NamedTuple):
    """The engine's input, and what the response repeats of the request."""

    chat: GenerationInput
    echoed: dict[str, Any]
    conversation: bytes | None
    """The chat messages up to the answer, without instructions, as JSON; None: not to be stored."""


class ResponsesRequest(RequestBody):
    """The body of a request for a response."""

    needs: ClassVar[Task | None] = "generate"
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention", *_ECHOED), LABEL),
        "client_metadata": hint(),
        "context_management": hint([]),
        "service_tier": hint("auto", "default"),
        "stream_options": hint({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "truncation": hint("disabled"),
        "background": rejected(False),
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

    async def process_here(self, admit: Admit) -> _ProcessedResponse:
        turns = self.conversation()
        given = self.chat_input(turns)
        has_logprobs = self.top_logprobs or _LOGPROBS in (self.include or ())
        fields = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "logprobs": (self.top_logprobs or 0) if has_logprobs else None,
            "structured_outputs": self.text and self.text.format and self.text.format.structured(),
        }
        processor = admit(turns.ignored)
        params = sampling_params(processor.sampling_defaults, fields, _NAMES)
        chat = await processor.process_chat(given, params, RequestOptions(param_names=_NAMES))
        echoed = self.echoed_fields()
        try:
            _encode(echoed)
            conversation = _encode(turns.messages) if self.store is not False else None
        except (UnicodeEncodeError, OverflowError, ValueError, RecursionError) as error:
            raise InvalidParameter(f"the request cannot be converted to JSON: {error}") from None
        return _ProcessedResponse(chat, echoed, conversation)

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
        """The conversation, with instructions and tools. Adds the ignored fields of tools to those of the turns; raises
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
            tool_use=read_tool_use(tools, _chat_choice(self.tool_choice), max_calls, function=""),
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
    processed: _ProcessedResponse = await body.process(state.frontend)
    response = _ResponseFormatter(model, processed, state)
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


class _ResponseFormatter:
    """Formats a response while it is generated."""

    def __init__(self, model: str, processed: _ProcessedResponse, state: ServedModel) -> None:
        chat = processed.chat
        self.id = f"resp_{uuid.uuid4().hex}"
        self._store = state.responses
        self._prompt_tokens = len(chat.prompts[0])
        self._tokenizer = state.frontend.input_processor.tokenizer
        self._top = chat.params.logprobs or 0
        self._blocks = ContentBlocks()
        self._status: _Status = "in_progress"
        self._task: asyncio.Task[Any] | None = None
        self._number = 0
        """Sequence number of the next event."""
        self._fields: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "model": model,
            "error": None,
            "incomplete_details": None,
            "temperature": chat.params.temperature,
            "top_p": chat.params.top_p,
            **processed.echoed,
        }
        self._conversation = processed.conversation

    def object(self) -> dict[str, Any]:
        """The response so far."""
        blocks = self._blocks.blocks
        statuses = {"in_progress": "in_progress", "completed": "completed"}
        output = [self._item(block, "completed") for block in blocks[:-1]]
        output += [self._item(block, statuses.get(self._status, "incomplete")) for block in blocks[-1:]]
        usage = {} if self._status == "in_progress" else {"usage": self._usage()}
        return self._fields | {"status": self._status, "output": output, **usage}

    def cancel(self) -> None:
        """End the stream now."""
        assert self._task is not None
        self._end("cancelled")
        self._task.cancel()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        async for deltas in generation:
            for _ in self._blocks.feed(deltas):
                pass
        self._complete()
        return self.object()

    async def write_events(self, generation: Generation, send: Send) -> None:
        """Send the events of a stream. Until its end, the response can be cancelled by id."""
        self._task = asyncio.current_task()
        self._store.running[self.id] = self
        try:
            begun = {"response": self.object()}
            await send(part(self._sse("response.created", begun) + self._sse("response.in_progress", begun)))
            async for deltas in generation:
                if events := b"".join(map(self._events, self._blocks.feed(deltas))):
                    await send(part(events))
            self._complete()
        except (RequestFailed, EngineUnavailable) as error:
            self._fields["error"] = {"code": "server_error", "message": str(error)}
            self._end("failed")
        except asyncio.CancelledError:
            if self._status != "cancelled":  # the client has disconnected
                self._end("cancelled")
                raise
            assert self._task is not None
            self._task.uncancel()
            generation.close()
        events = b"".join(map(self._events, self._blocks.close()))
        last = self._status if self._status in ("completed", "failed") else "incomplete"
        await send(part(events + self._sse(f"response.{last}", {"response": self.object()})))

    def _complete(self) -> None:
        if self._blocks.finish_reason == "length":
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
            self._end("incomplete")
        else:
            self._fields["completed_at"] = int(time.time())
            self._end("completed")

    def _end(self, status: _Status) -> None:
        """Set the final status, and store the response if requested."""
        self._status = status
        self._store.running.pop(self.id, None)
        if self._conversation is not None:
            answer = b"".join(b"," + _encode(message) for message in self._messages())
            beginning = self._conversation[:-1] if self._conversation != b"[]" else b"["
            self._store.add(self.id, StoredResponse(_encode(self.object()), beginning + answer + b"]"))

    def _messages(self) -> list[dict[str, Any]]:
        """The output as chat messages, without an incomplete tool call."""
        turns = InputTurns([])
        for block in self._blocks.blocks:
            match block.kind:
                case "reasoning":
                    turns.add_reasoning(block.text)
                case "text":
                    turns.add_text(block.text)
                case "call" if is_json_object(block.text):
                    turns.call(block.call_id, block.name, block.text)
        return turns.messages

    def _usage(self) -> dict[str, Any]:
        blocks = self._blocks
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": blocks.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": blocks.num_tokens,
            "output_tokens_details": {"reasoning_tokens": blocks.num_reasoning_tokens},
            "total_tokens": self._prompt_tokens + blocks.num_tokens,
        }

    def _item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        content = [self._part(block)] if block.text else []
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "reasoning":
                return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
            case "text":
                return item | {"type": "message", "role": "assistant", "content": content}
            case "call":
                arguments = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call", **arguments}

    def _item_id(self, block: ContentBlock) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}{block.index:02}"

    def _events(self, event: BlockEvent) -> bytes:
        block = event.block
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            at["content_index"] = 0
        match event:
            case BlockOpened():
                item = {"output_index": block.index, "item": self._item(block, "in_progress")}
                added = self._sse("response.output_item.added", item)
                if block.kind == "call":
                    return added
                return added + self._sse("response.content_part.added", {**at, "part": self._part(block)})
            case BlockDelta(text=text, logprobs=scored):
                extra = {"logprobs": self._scores(scored)} if block.kind == "text" else {}
                return self._sse(f"{_GROWS[block.kind]}.delta", {**at, "delta": text, **extra})
            case BlockClosed():
                whole: dict[str, Any] = {"text": block.text}
                if block.kind == "text":
                    whole["logprobs"] = self._scores(block.logprobs)
                if block.kind == "call":
                    whole = {"name": block.name, "arguments": block.text}
                done = self._sse(f"{_GROWS[block.kind]}.done", {**at, **whole})
                if block.kind != "call":
                    done += self._sse("response.content_part.done", {**at, "part": self._part(block)})
                status = "completed" if self._status in ("in_progress", "completed") else "incomplete"
                item = {"output_index": block.index, "item": self._item(block, status)}
                return done + self._sse("response.output_item.done", item)

    def _part(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        scores = self._scores(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _scores(self, scored: Sequence[ScoredToken]) -> list[Any]:
        name = TokenNames(self._tokenizer, as_ids=False)
        return [token_logprobs(self._tokenizer, name, *each, self._top) for each in scored]

    def _sse(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = _encode({"type": name, "sequence_number": number, **fields})
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


_GROWS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


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
