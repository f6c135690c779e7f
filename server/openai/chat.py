"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.server.http.file_parts import FilePart
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.media_parts import ImageEmbedsPart, ImageUrlPart, VideoUrlPart
from quire.server.http.request_body import Admit
from quire.server.http.request_model import (
    INTEGRAL,
    MAX_MESSAGES,
    ExtraField,
    MessagePart,
    Natural,
    Positive,
    RequestModel,
    check_length,
    only_one,
    rejected,
    variant,
)
from quire.server.http.response import GenerationResponse, Usage
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.media.types import MediaSource
from quire.server.openai.chat_tools import ChatTools
from quire.server.openai.custom_input import CustomInput
from quire.server.openai.custom_tools import custom_arguments
from quire.server.openai.logprobs import TokenNames, prompt_logprobs_object, token_logprobs
from quire.server.openai.protocol import GenerationRequest, ReasoningRequest
from quire.server.parsers.events import ToolCall
from quire.server.text.conversation import ChatTemplateOptions, ParamNames
from quire.server.text.inputs import ChatInput, GenerationInput
from quire.server.text.output_processor import TextDelta
from quire.server.text.tokenizer import Tokenizer
from quire.server.text.tools import MAX_TOOLS, read_tool_use

router = APIRouter(route_class=BodyRoute)

_TOOL_NAMES = ParamNames(function="", function_parameters=".parameters")


class AssistantFunction(MessagePart):
    """The called function. `arguments` is JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class AssistantCustomTool(MessagePart):
    """The called custom tool."""

    name: str
    input: str


class AssistantToolCall(MessagePart):
    """A tool call of an earlier answer."""

    type: Literal["function", "custom"] = "function"
    id: str | None = None
    function: AssistantFunction | None = None
    custom: AssistantCustomTool | None = None
    """For type `custom`."""

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. Also checks that the field for the type is there."""
        if getattr(self, self.type) is None:
            raise InvalidParameter(f"{param}{self.type} is missing", f"{param}{self.type}")
        return super().check_fields(param)


class _TextPart(MessagePart):
    text: str


class _ChatFile(MessagePart):
    file: FilePart


_MEDIA: dict[str, type[ImageUrlPart | ImageEmbedsPart | VideoUrlPart]] = {
    "image_url": ImageUrlPart,
    "input_image": ImageUrlPart,
    "image_embeds": ImageEmbedsPart,
    "video_url": VideoUrlPart,
}
"""The parts of messages that are not text. `input_image` is the name in Responses."""
_PARTS: dict[str, type[MessagePart]] = {"text": _TextPart, **_MEDIA, "file": _ChatFile}


class ChatMessage(MessagePart):
    """A message of the conversation."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "audio": rejected(),  # the id of an earlier answer
        "images": rejected([]),  # Ollama's
        "partial": rejected(False),  # Kimi's and Qwen's name of continue_final_message
        "prefix": rejected(False),  # DeepSeek's and Mistral's
    }

    role: str
    """system, developer, user, assistant or tool (or function, its old name), or another one that the chat template
    names.
    """
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of the types `text`, `image_url` (or `input_image`), `video_url`, `image_embeds` and `file`
    (images, PDFs and texts). Audio is not supported.
    """
    name: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    function_call: AssistantFunction | None = None
    """The old form of `tool_calls`, with one call."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for templates that show it."""
    reasoning: str | None = None
    """An alias of `reasoning_content`."""

    @property
    def text(self) -> str:
        """The content as text."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)

    def check_parts(self, param: str) -> set[str]:
        """Check the parts of the content, and return their ignored fields. `param` is the message's name."""
        assert isinstance(self.content, list)
        ignored = set[str]()
        for index, part in enumerate(self.content):
            variant(_PARTS, part, f"{param}.content[{index}]", ignored)
        return ignored

    def shown(self, param: str, media: list[MediaSource], options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for the chat template, without the ignored ones. Adds the images and videos to `media`; `options`
        are arguments of the model's processor. `param` is the message's name.
        """
        fields: dict[str, Any] = self.model_dump(exclude_none=True, include=_SHOWN)
        if isinstance(self.content, list):
            fields["content"] = []
            for at, part in enumerate(self.content):
                where, found = f"{param}.content[{at}]", list[str | MediaSource]()
                if part["type"] in _MEDIA:
                    found.append(variant(_MEDIA, part, where, set()).source(where, options))
                elif part["type"] == "file":
                    file = variant({"file": _ChatFile}, part, where, set()).file
                    found += file.parts(f"{where}.file", options)
                else:
                    fields["content"].append(part)
                media += [each for each in found if isinstance(each, MediaSource)]
                fields["content"] += [
                    {"type": "text", "text": each} if isinstance(each, str) else {"type": each.kind} for each in found
                ]
        for call in fields.get("tool_calls", ()):
            custom = call.pop("custom", None)
            if call["type"] == "custom":
                arguments = custom_arguments(custom["input"])
                call |= {"type": "function", "function": {"name": custom["name"], "arguments": arguments}}
        if (call := fields.pop("function_call", None)) is not None:
            fields.setdefault("tool_calls", [{"type": "function", "function": call}])
        if self.role == "function":
            fields["role"] = "tool"
        return fields


_SHOWN: Any = dict.fromkeys(ChatMessage.model_fields, True) | {
    "tool_calls": {
        "__all__": {"type": True, "id": True, "function": {"name", "arguments"}, "custom": {"name", "input"}}
    },
    "function_call": {"name", "arguments"},
}


class PredictedPart(MessagePart):
    """A part of `Prediction`."""

    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """Text that the answer probably repeats: it becomes draft tokens."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def predicted_text(self) -> str:
        """The content as text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(ReasoningRequest, GenerationRequest):
    """The body of a chat completion request."""

    has_files: ClassVar[bool] = True
    max_items: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    prediction: Prediction | None = None
    """Text that the answer probably repeats, such as a file to edit. It makes the answer faster, not different."""
    max_completion_tokens: Positive | None = None
    """Default: up to the model's maximum length. Takes precedence over `max_tokens`, which means the same."""
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=-1, lt=2**63), INTEGRAL] | None = None
    """At most `--max-logprobs`; -1: all (vLLM)."""
    echo: bool | None = None
    """vLLM extension: start the answer with the last message, if that is the assistant's."""
    tools: list[dict[str, Any]] | None = None
    """Functions and custom tools. The arguments follow the schema if the function is `strict`, required or named by
    `tool_choice`; the input of a custom tool follows its `format`.
    """
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    max_tool_calls: Positive | None = None
    """As in Responses: further calls are dropped."""
    include_reasoning: bool | None = None
    """vLLM extension: false omits the model's reasoning from the response."""
    thinking_token_budget: Natural | None = None
    """vLLM extension: maximum number of tokens of reasoning, which ends there."""
    chat_template: str | None = None
    """vLLM extension: a template for this request; the server needs `--trust-request-chat-template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension: variables of the chat template, such as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """vLLM extension: passed to the chat template; rejected if the template does not use them."""
    add_generation_prompt: bool | None = None
    """vLLM extension: start the assistant's turn. Default: true."""
    continue_final_message: bool | None = None
    """vLLM extension: continue the last message instead of starting a new one."""
    add_special_tokens: bool | None = None
    """vLLM extension: add the tokenizer's special tokens to the template's output. Default: false."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """vLLM extension: arguments of the model's processor for the images and videos, such as `max_pixels`."""

    def check_fields(self, param: str = "") -> set[str]:
        """See `GenerationRequest`. Also checks the number of messages and their contents."""
        ignored = super().check_fields(param)
        check_length(self.messages, MAX_MESSAGES, "messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other; send only one of them",
                "continue_final_message",
            )
        if 0 in (self.max_tokens, self.num_predict):
            raise InvalidParameter("max_tokens must be at least 1; 0 is only allowed in completions", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs requires logprobs: true", "top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise InvalidParameter("logprob_token_ids requires logprobs: true", "logprob_token_ids")
        for at, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise InvalidParameter(f"messages[{at}].content is missing", f"messages[{at}].content")
            if isinstance(message.content, list):
                ignored |= message.check_parts(f"messages[{at}]")
        if self.tools:
            ChatTools(self.tools, ignored)
        return ignored

    @property
    def longest(self) -> int | None:
        """The maximum number of output tokens."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return None if (self.num_predict or 0) < 0 else self.num_predict or self.max_tokens

    def chat_input(self) -> ChatInput:
        """The conversation."""
        template = ChatTemplateOptions(
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs or {},
            documents=self.documents or (),
            reasoning_effort=only_one(self.efforts()),
            thinking=self.think if isinstance(self.think, bool) else None,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )
        max_calls = 1 if self.parallel_tool_calls is False else self.max_tool_calls
        tools = use = None
        if self.tools or self.tool_choice is not None:
            tools = ChatTools(self.tools or (), set())
            choice = tools.choice(self.tool_choice)
            use = read_tool_use(tools.functions, choice, max_calls, _TOOL_NAMES, tools.params, tools.grammars)
        media: list[MediaSource] = []
        processor_kwargs = self.mm_processor_kwargs or {}
        messages = [
            message.shown(f"messages[{at}]", media, processor_kwargs) for at, message in enumerate(self.messages)
        ]
        return ChatInput(
            messages=messages,
            media=media,
            tools=() if tools is None else tools.functions,
            tool_use=use,
            template=template,
            shows_reasoning=self.include_reasoning is not False,
            thinking_budget=self.thinking_token_budget,
            token_ids=None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids,
        )

    async def process_here(self, admit: Admit) -> GenerationInput:
        processor = admit(self.check_fields())
        params = self.sampling_params(
            processor.sampling_defaults,
            max_tokens=self.longest,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prediction="" if self.prediction is None else self.prediction.predicted_text,
        )
        options = self.request_options(logprobs="top_logprobs")
        given = await processor.process_chat(self.chat_input(), params, options)
        last = self.messages[-1]
        echo = last.text if self.echo and last.role == "assistant" else ""
        custom = (tool["custom"]["name"] for tool in self.tools or () if tool["type"] == "custom")
        return replace(given, echo=echo, custom_tools=frozenset(custom))


@router.post("/v1/chat/completions", dependencies=[MayChooseReplica])
async def chat_completions(body: ChatRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation."""
    model, adapter = await state.find_model(body.model)
    chat: GenerationInput = await body.process(state.frontend)
    request_id = body.response_id("chatcmpl")
    generation = state.frontend.generate(request_id, replace(chat, adapter=adapter))
    tokenizer, as_ids = state.frontend.input_processor.tokenizer, body.names_tokens_by_id(state)
    formatter, fields = _ChatFormatter(tokenizer, body, chat, as_ids), partial(body.transfer_fields, generation)
    usage = Usage(chat.prompts, chat.params.n, chat.media)
    response = GenerationResponse(request_id, model, formatter, usage, fields=fields, has_times=state.has_request_times)
    if body.stream:
        return response.stream(generation, body.stream_usage(state))
    return await response.whole(generation, request)


class _ChatFormatter:
    """Formats chat completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    null_usage = b',"usage":null'

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatRequest,
        given: GenerationInput,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._top = given.params.logprobs
        self._echo = given.echo
        self._name = TokenNames(tokenizer, as_ids=as_ids)
        self._prompt = given.prompts[0]
        self._prompt_top = given.params.prompt_logprobs
        self.returns_token_ids = bool(body.return_token_ids)
        self._custom_tools = given.custom_tools
        self._inputs: dict[tuple[int, int], CustomInput] = {}
        """The inputs of custom tools that are being streamed, by index of the choice and of the call."""

    def top_level_fields(self, sequences: Sequence[TextDelta]) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None} if sequences else {}
        if self.returns_token_ids:
            found["prompt_token_ids"] = self._prompt
        if sequences and self._prompt_top is not None and (scores := sequences[0].prompt_logprobs) is not None:
            found["prompt_logprobs"] = prompt_logprobs_object(self._tokenizer, self._prompt, scores, self._prompt_top)
        return found

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk_choice(self, delta: TextDelta) -> dict[str, Any]:
        fields = _message_fields(delta)
        pieces = [{"index": call.index, **piece} for call in delta.tool_calls if (piece := self._piece(delta, call))]
        return self._choice(delta, "delta", fields | {"tool_calls": pieces} if pieces else fields)

    def whole_choice(self, delta: TextDelta) -> dict[str, Any]:
        message = _message_fields(delta)
        if not message and not delta.tool_calls:
            message["content"] = ""  # null only if there are tool calls or reasoning
        if self._echo:
            message["content"] = self._echo + delta.text
        if delta.tool_calls:
            message["tool_calls"] = [self._piece(delta, call) for call in delta.tool_calls]
        nothing = {"role": "assistant", "content": None, "refusal": None, "reasoning": None}
        return {"token_ids": None} | self._choice(delta, "message", nothing | message)

    def _piece(self, delta: TextDelta, call: ToolCall) -> dict[str, Any] | None:
        """A call or the next piece of one; None if there is nothing to tell yet."""
        key = delta.index, call.index
        if call.name in self._custom_tools:
            self._inputs[key] = CustomInput()
        if (read := self._inputs.get(key)) is None:
            kind, field, text = "function", "arguments", call.arguments
        else:
            kind, field, text = "custom", "input", read.feed(call.arguments)
        if call.id is not None:
            return {"id": call.id, "type": kind, kind: {"name": call.name, field: text}}
        return {kind: {field: text}} if text or read is None else None

    def _choice(self, delta: TextDelta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            name: message,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.token_ids} if self.returns_token_ids else choice

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        scored = zip(token_ids, logprobs, strict=True)
        content = [token_logprobs(self._tokenizer, self._name, *each, self._top or 0) for each in scored]
        return {"content": content, "refusal": None}


def _message_fields(delta: TextDelta) -> dict[str, Any]:
    """The non-empty fields of a message. The reasoning has both names that clients use."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
    if delta.text:
        fields["content"] = delta.text
    return fields
