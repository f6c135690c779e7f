"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API (https://docs.claude.com/en/api/messages).

Requests become the input of chat (`messages_input`, `tools`), and the answer becomes blocks (`messages_output`).
Reasoning is returned as plain text with an empty signature, and accepted as such; `budget_tokens` is enforced.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import StructuredOutputs
from quire.server.anthropic.errors import UnsupportedThread
from quire.server.anthropic.messages_input import MessageTurn, MessageTurns
from quire.server.anthropic.messages_output import MessageFormatter
from quire.server.anthropic.tools import MessageTool, MessageToolChoice, Toolset
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody, sampling_params
from quire.server.http.request_model import (
    LABEL,
    MAX_MESSAGES,
    ExtraField,
    Int64,
    Positive,
    ReasoningEffort,
    RequestModel,
    check_length,
    hint,
    rejected,
    variant,
)
from quire.server.http.response import EventStreamResponse, while_connected
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.text.conversation import ChatTemplateOptions, ParamNames
from quire.server.text.inputs import ChatInput, GenerationInput, RequestOptions, Task
from quire.server.text.tools import MAX_TOOLS, read_tool_use

router = APIRouter(route_class=BodyRoute)

_NAMES = ParamNames(
    continue_final_message="messages",
    reasoning_effort="output_config.effort",
    thinking="thinking",
    thinking_budget="thinking.budget_tokens",
    function="",
    function_parameters=".input_schema",
    stop="stop_sequences",
    structured_outputs="output_config.format",
)
"""The API's own names."""


class MessageThinking(RequestModel):
    """Whether the model uses reasoning; adaptive leaves the choice to the model."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"block_binding": LABEL, "display": hint("summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None


class MessageFormat(RequestModel):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class MessageOutputConfig(RequestModel):
    """Options of the answer."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {"task_budget": rejected()}

    effort: ReasoningEffort | None = None
    format: MessageFormat | None = None


class ThinkingTurns(RequestModel):
    """The last turns, whose thinking is kept."""

    type: Literal["thinking_turns", "all"]
    value: Positive | None = None


class ClearThinking(RequestModel):
    """Removes the thinking of all but the last turns."""

    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(type="thinking_turns", value=1)

    def edit(self, messages: Sequence[dict[str, Any]]) -> None:
        """Edit chat messages."""
        if self.keep == "all" or self.keep.type == "all":
            return
        thinking = [message for message in messages if "reasoning_content" in message]
        for message in thinking[: -(self.keep.value or 1)]:
            del message["reasoning_content"]


class ContextManagement(RequestModel):
    """Edits of the conversation before it is answered. Only `clear_thinking_20251015` is supported."""

    edits: list[dict[str, Any]] | None = None


class CountTokensRequest(RequestBody):
    """The body of a request to count a conversation's tokens. It may be that of a request for a message."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        **dict.fromkeys(("max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream"), LABEL),
        "billing_policy": LABEL,
        "cache_control": LABEL,
        "metadata": LABEL,
        "service_tier": LABEL,
        "user_profile_id": LABEL,
        "betas": hint([]),
        "diagnostics": hint(),
        "fallbacks": hint([]),
        "inference_geo": hint(),
        "mcp_servers": hint([]),
        "speed": hint("standard"),
        "compaction": rejected(),
        "container": rejected(),
        "thread": rejected(),
    }
    has_files: ClassVar[bool] = True
    max_items: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}

    model: str
    messages: Annotated[list[MessageTurn], Field(fail_fast=True)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: MessageOutputConfig | None = None
    output_format: MessageFormat | None = None
    """The old name of `output_config.format`."""
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension, as in chat."""

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. A thread has an error of its own, on which clients send the whole conversation."""
        if (self.model_extra or {}).get("thread") is not None:
            raise UnsupportedThread(
                "thread is not supported, as no conversation is kept here; send the whole conversation without it",
                "thread",
            )
        return super().check_fields(param)

    def chat_input(self, ignored: set[str]) -> ChatInput:
        """The conversation; adds the fields that are ignored. Raises `InvalidParameter`."""
        given = Toolset(self.tools or (), self.tool_choice)
        turns = MessageTurns(ignored, given)
        if self.system is not None:
            turns.add_system(self.system)
        last_user = max((at for at, turn in enumerate(self.messages) if turn.role == "user"), default=-1)
        for at, turn in enumerate(self.messages):
            turns.add(turn, f"messages[{at}]", is_current=at >= last_user)
        messages = turns.messages
        is_continued = bool(self.messages) and self.messages[-1].role == "assistant"
        if is_continued and messages[-1].get("tool_calls"):
            raise InvalidParameter("messages: the results of the last message's tool_use must follow it", "messages")
        check_length(messages, MAX_MESSAGES, "messages")
        for at, edit in enumerate((self.context_management and self.context_management.edits) or ()):
            kinds = {"clear_thinking_20251015": ClearThinking}
            variant(kinds, edit, f"context_management.edits[{at}]", ignored).edit(messages)
        choice = None if self.tool_choice is None else self.tool_choice.choice()
        max_calls = 1 if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use else None
        thinking = self.thinking or MessageThinking(type="adaptive")
        return ChatInput(
            messages=messages,
            media=turns.media,
            tools=given.shown,
            tool_use=read_tool_use(given.callable, choice, max_calls, _NAMES),
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

    def structured(self) -> tuple[StructuredOutputs | None, ParamNames]:
        """The answer's format, and the names of parameters; raises `InvalidParameter`."""
        format = None if self.output_config is None else self.output_config.format
        if self.output_format is None:
            return None if format is None else StructuredOutputs(json=format.schema_), _NAMES
        if format is not None:
            raise InvalidParameter(
                "output_format and output_config.format mean the same; send only one", "output_format"
            )
        return StructuredOutputs(json=self.output_format.schema_), replace(_NAMES, structured_outputs="output_format")

    async def process_here(self, admit: Admit) -> GenerationInput:
        ignored = self.check_fields()
        chat = self.chat_input(ignored)
        structured, names = self.structured()
        processor = admit(ignored)
        if chat.thinking_budget is not None and processor.reasoning_format is None:
            processor.ignore(["thinking"])  # the API demands a budget from clients that let a model think
            chat = replace(chat, thinking_budget=None)
        params = sampling_params(self, processor.sampling_defaults, names, structured_outputs=structured)
        return await processor.process_chat(chat, params, RequestOptions(param_names=names))


class MessagesRequest(CountTokensRequest):
    """The body of a request for a message."""

    needs: ClassVar[Task | None] = "generate"

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stream: bool | None = None


@router.post("/v1/messages", dependencies=[MayChooseReplica])
async def messages(body: MessagesRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation, in Anthropic's format."""
    model, adapter = await state.find_model(body.model)
    chat: GenerationInput = await body.process(state.frontend)
    message_id = f"msg_{uuid.uuid4().hex}"
    generation = state.frontend.generate(message_id, replace(chat, adapter=adapter))
    message = MessageFormatter(message_id, model, len(chat.prompts[0]))
    if body.stream:
        return EventStreamResponse(generation, partial(message.write_events, generation), end=b"")
    with generation:
        return json_response(await while_connected(request.receive, message.whole(generation)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, state: AppState) -> Response:
    """Count the tokens of a conversation, including its system prompt and tools; rejected if they exceed the model's
    maximum.
    """
    await state.find_model(body.model)
    chat: GenerationInput = await body.process(state.frontend)
    return json_response({"input_tokens": len(chat.prompts[0])})
