"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API (https://docs.claude.com/en/api/messages).

Requests become the input of chat, and the answer becomes blocks. Reasoning is returned as plain text with an empty
signature, and accepted as such; `budget_tokens` is enforced.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Send

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.anthropic.errors import anthropic_error
from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from quire.server.http.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
)
from quire.server.http.errors import describe, json_response
from quire.server.http.large_bodies import BodyRoute
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
from quire.server.http.response import EventStreamResponse, named_event, part, while_connected
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.serving.generation import Generation
from quire.server.text.conversation import ChatTemplateOptions, ParamNames
from quire.server.text.inputs import ChatInput, GenerationInput, RequestOptions, Task
from quire.server.text.tools import MAX_TOOLS, read_tool_use

router = APIRouter(route_class=BodyRoute)

_NAMES = ParamNames(
    continue_final_message="messages",
    reasoning_effort="output_config.effort",
    thinking_budget="thinking.budget_tokens",
    function="",
    function_parameters=".input_schema",
    stop="stop_sequences",
    structured_outputs="output_config.format",
)
"""The API's own names."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(MessagePart):
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"cache_control": LABEL, "caller": LABEL, "citations": hint([])}


class _TextBlock(_Block):
    text: str


class _ThinkingBlock(_Block):
    thinking: str
    signature: str | None = None
    """Ignored: reasoning is not encrypted here."""


class _ToolUseBlock(_Block):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(_Block):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_OF_USER: dict[str, type[_Block]] = {"text": _TextBlock, "tool_result": _ToolResultBlock}
_OF_ASSISTANT: dict[str, type[_Block]] = {"text": _TextBlock, "thinking": _ThinkingBlock, "tool_use": _ToolUseBlock}


class MessageTurn(MessagePart):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessageTool(MessagePart):
    """A function that the model may call."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "cache_control": LABEL,
        "eager_input_streaming": LABEL,
        "allowed_callers": rejected(["direct"]),
        "defer_loading": rejected(False),
        "input_examples": rejected([]),
    }

    name: str
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None


class MessageToolChoice(RequestModel):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(RequestModel):
    """Whether the model uses reasoning; adaptive leaves the choice to the model."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"display": hint("summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class MessageFormat(RequestModel):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class MessageOutputConfig(RequestModel):
    """Options of the answer."""

    effort: ReasoningEffort | None = None
    format: MessageFormat | None = None


class CountTokensRequest(RequestBody):
    """The body of a request to count a conversation's tokens."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "cache_control": LABEL,
        "metadata": LABEL,
        "service_tier": LABEL,
        "user_profile_id": LABEL,
        "betas": hint([]),
        "context_management": hint({"edits": []}),
        "inference_geo": hint(),
        "speed": hint("standard"),
        "thread": hint(),
        "container": rejected(),
        "mcp_servers": rejected([]),
        "output_format": rejected(),
    }
    max_items: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}

    model: str
    messages: Annotated[list[MessageTurn], Field(fail_fast=True)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: MessageOutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension, as in chat."""

    def chat_input(self, ignored: set[str]) -> ChatInput:
        """The conversation; adds the fields that are ignored. Raises `InvalidParameter`."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _text(self.system, "system", ignored)})
        for at, turn in enumerate(self.messages):
            messages += _chat_messages(turn, f"messages[{at}].content", ignored)
        is_continued = bool(self.messages) and self.messages[-1].role == "assistant"
        if is_continued and messages[-1].get("tool_calls"):
            raise InvalidParameter("messages: the results of the last message's tool_use must follow it", "messages")
        check_length(messages, MAX_MESSAGES, "messages")
        tools = [_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())]
        choice = None if self.tool_choice is None else _chat_choice(self.tool_choice)
        max_calls = 1 if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use else None
        thinking = self.thinking or MessageThinking(type="adaptive")
        return ChatInput(
            messages=messages,
            tools=tools,
            tool_use=read_tool_use(tools, choice, max_calls, _NAMES),
            template=ChatTemplateOptions(
                chat_template_kwargs=self.chat_template_kwargs or {},
                reasoning_effort=None if self.output_config is None else self.output_config.effort,
                thinking={"enabled": True, "disabled": False}.get(thinking.type),
                continue_final_message=is_continued,
            ),
            thinking_budget=thinking.budget_tokens if thinking.type == "enabled" else None,
        )

    @property
    def user_name(self) -> object:
        metadata = (self.model_extra or {}).get("metadata")
        return metadata.get("user_id") if isinstance(metadata, dict) else None

    async def process_here(self, admit: Admit) -> GenerationInput:
        ignored = self.check_fields()
        chat = self.chat_input(ignored)
        processor = admit(ignored)
        if chat.thinking_budget is not None and processor.reasoning_format is None:
            processor.ignore(["thinking"])  # the API demands a budget from clients that let a model think
            chat = replace(chat, thinking_budget=None)
        format = self.output_config and self.output_config.format
        structured = format and StructuredOutputs(json=format.schema_)
        params = sampling_params(self, processor.sampling_defaults, _NAMES, structured_outputs=structured)
        return await processor.process_chat(chat, params, RequestOptions(param_names=_NAMES))


class MessagesRequest(CountTokensRequest):
    """The body of a request for a message."""

    needs: ClassVar[Task | None] = "generate"

    max_tokens: Annotated[Int64, Field(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stream: bool | None = None


@router.post("/v1/messages", dependencies=[MayChooseReplica])
async def messages(body: MessagesRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation, in Anthropic's format."""
    model = state.check_model(body.model)
    chat: GenerationInput = await body.process(state.frontend)
    message_id = f"msg_{uuid.uuid4().hex}"
    generation = state.frontend.generate(message_id, chat)
    message = _MessageFormatter(message_id, model, len(chat.prompts[0]))
    if body.stream:
        return EventStreamResponse(generation, partial(message.write_events, generation), end=b"")
    with generation:
        return json_response(await while_connected(request.receive, message.whole(generation)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, state: AppState) -> Response:
    """Count the tokens of a conversation, including its system prompt and tools; rejected if they exceed the model's
    maximum.
    """
    state.check_model(body.model)
    chat: GenerationInput = await body.process(state.frontend)
    return json_response({"input_tokens": len(chat.prompts[0])})


class _MessageFormatter:
    """Formats a message while it is generated."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks = ContentBlocks()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        await self._blocks.collect(generation)
        return self._object([_block(block) for block in self._blocks.blocks], self._stop())

    async def write_events(self, generation: Generation, send: Send) -> None:
        """Send the events of a stream. It starts with the first tokens, when the number of cached tokens is known."""
        blocks = self._blocks
        has_begun = False
        try:
            async for deltas in generation:
                events = [_event(event) for event in blocks.feed(deltas)]
                if not has_begun:
                    has_begun = True
                    nothing = {"stop_reason": None, "stop_sequence": None}
                    events.insert(0, named_event("message_start", {"message": self._object([], nothing)}))
                if events:
                    await send(part(b"".join(events)))
        except (RequestFailed, EngineUnavailable) as error:
            await send(part(named_event("error", anthropic_error(*describe(error)))))
            return
        events = [_event(event) for event in blocks.close()]
        events.append(named_event("message_delta", {"delta": self._stop(), "usage": self._usage()}))
        events.append(named_event("message_stop", {}))
        await send(part(b"".join(events)))

    def _object(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **stop, "usage": self._usage()}

    def _stop(self) -> dict[str, Any]:
        reason = _STOP_REASONS[self._blocks.finish_reason or "stop"]
        if reason == "end_turn" and self._blocks.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._blocks.stop_string}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        cached = self._blocks.num_cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._blocks.num_tokens,
        }


def _event(event: BlockEvent) -> bytes:
    index = event.block.index
    match event:
        case BlockOpened(block):
            return named_event("content_block_start", {"index": index, "content_block": _block(block)})
        case BlockDelta(block, text):
            kind, field = _DELTAS[block.kind]
            return named_event("content_block_delta", {"index": index, "delta": {"type": kind, field: text}})
        case BlockClosed():
            return named_event("content_block_stop", {"index": index})


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. If the call was cut off, return the complete ones."""
    try:
        arguments = pydantic_core.from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _chat_messages(turn: MessageTurn, param: str, ignored: set[str]) -> list[dict[str, Any]]:
    """Convert a turn to chat messages. Each tool_result becomes its own message, before or between the text."""
    if turn.role == "assistant":
        return [_assistant_message(turn.content, param, ignored)]
    if turn.role == "system" or isinstance(turn.content, str):
        return [{"role": turn.role, "content": _text(turn.content, param, ignored)}]
    messages: list[dict[str, Any]] = []
    for at, block in enumerate(turn.content):
        where = f"{param}[{at}]"
        match variant(_OF_USER, block, where, ignored):
            case _ToolResultBlock() as read:
                text = "" if read.content is None else _text(read.content, f"{where}.content", ignored)
                text = f"Error: {text}" if read.is_error else text
                messages.append({"role": "tool", "content": text, "tool_call_id": read.tool_use_id})
            case _TextBlock(text=text):
                if not messages or messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": text})
                else:
                    messages[-1]["content"] += "\n" + text
    return messages


def _assistant_message(content: str | list[dict[str, Any]], param: str, ignored: set[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(content):
        match variant(_OF_ASSISTANT, block, f"{param}[{at}]", ignored):
            case _TextBlock(text=text):
                texts.append(text)
            case _ThinkingBlock(thinking=text):
                thoughts.append(text)
            case _ToolUseBlock() as read:
                function = {"name": read.name, "arguments": read.input}
                calls.append({"type": "function", "id": read.id, "function": function})
    message: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _text(content: str | list[dict[str, Any]], param: str, ignored: set[str]) -> str:
    if isinstance(content, str):
        return content
    kinds = {"text": _TextBlock}
    return "\n".join(variant(kinds, block, f"{param}[{at}]", ignored).text for at, block in enumerate(content))


def _chat_tool(tool: MessageTool, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidParameter(
            f"{param}.type: tools of type {tool.type} are not supported, only those with an input_schema",
            f"{param}.type",
        )
    if tool.input_schema is None:
        raise InvalidParameter(f"{param}.input_schema is missing", f"{param}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chat_choice(choice: MessageToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidParameter(
            "tool_choice: a name is required with type tool, and only allowed with it", "tool_choice"
        )
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
