"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.frontend.conversation import ChatTemplateOptions
from quire.server.frontend.output_processor import TextDelta
from quire.server.frontend.tokenizer import Tokenizer
from quire.server.frontend.tools import ToolUse, read_choice, read_tools
from quire.server.http.response import GenerationResponse, Usage
from quire.server.http.state import AppState, ServedModel
from quire.server.openai.logprobs import LEAST_LOGPROB, TokenNames, prompt_logprobs_object
from quire.server.openai.protocol import MAX_MESSAGES, GenerationRequest, LenientModel
from quire.server.parsers.events import ToolCall
from quire.server.parsers.output_parser import OutputFormat

router = APIRouter()


class AssistantFunction(LenientModel):
    """The called function. `arguments` is JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class AssistantToolCall(LenientModel):
    """A tool call of an earlier answer."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: AssistantFunction


class ChatMessage(LenientModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts of type text. Other types (images, audio, files) are not supported."""
    name: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The reasoning of an earlier answer, for templates that show it."""
    reasoning: str | None = None
    """An alias of `reasoning_content`."""


class ChatRequest(GenerationRequest):
    """The body of a chat completion request."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Default: up to the model's maximum length. Takes precedence over `max_tokens`, which means the same."""
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions. The arguments follow the schema if the function is `strict`, required or named by `tool_choice`."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    include_reasoning: bool | None = None
    """vLLM extension: false omits the model's reasoning from the response."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the model's chat template; rejected if the template does not use it."""
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

    def reject_unsupported(self) -> None:
        """See `GenerationRequest`. Also checks the number of messages and their fields."""
        super().reject_unsupported()
        if len(self.messages) > MAX_MESSAGES:
            raise InvalidParameter(
                f"messages: at most {MAX_MESSAGES} are allowed, got {len(self.messages)}", "messages"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other; send only one of them",
                "continue_final_message",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs requires logprobs: true", "top_logprobs")
        for at, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise InvalidParameter(f"messages[{at}].content is missing", f"messages[{at}].content")
            for name, value in (message.model_extra or {}).items():
                if value:
                    raise InvalidParameter(f"messages[{at}].{name} is not supported", f"messages[{at}].{name}")

    @property
    def longest(self) -> int | None:
        """The maximum number of output tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, without fields that are not set."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def tool_use(self) -> ToolUse | None:
        """Which tools the model may or must call, or None. Raises `InvalidParameter` for invalid tools."""
        return read_choice(read_tools(self.tools or ()), self.tool_choice, self.parallel_tool_calls is not False)

    def options(self, may_call: bool) -> ChatTemplateOptions:
        """How to render the messages. `may_call`: the model may call tools."""
        return ChatTemplateOptions(
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs or {},
            documents=self.documents or (),
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            may_call=may_call,
        )

    @property
    def continued(self) -> str:
        """The text of the final message that the model continues, if it does."""
        content = self.messages[-1].content if self.continue_final_message else None
        return content if isinstance(content, str) else ""


@dataclass(frozen=True)
class PreparedChat:
    """A rendered conversation, and how to parse the answer."""

    model: str
    """The model name for the response."""
    prompt: list[int]
    params: SamplingParams
    """Returned by `Renderer.resolve`."""
    reading: OutputFormat | None


async def prepare(
    state: ServedModel, body: ChatRequest, thinking: bool | None = None, *, generates: bool = True
) -> PreparedChat:
    """Prepare a chat request; all conversation APIs call this after converting their requests to chat.

    `thinking` sets the template's switch for reasoning, unless it is None. Raises `InvalidParameter` and, if the
    request is to generate, `EngineUnavailable` and `QueueFull`.
    """
    model = state.check_model(body.model)
    body.reject_unsupported()
    if generates:
        state.service.check()
    else:
        state.service.check_loaded()
    renderer = state.service.renderer
    state.check_template(body.chat_template)
    use = body.tool_use()
    params = body.sampling_params(
        renderer.defaults,
        max_tokens=body.longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    renderer.check_logprobs(body.top_logprobs, "top_logprobs")
    last = renderer.truncation(body.truncate_prompt_tokens, params.max_tokens)
    options = replace(body.options(may_call=use is not None), thinking=thinking)
    prompt = await renderer.chat(body.conversation(), body.tools or (), options, last=last)
    answer, param = params.structured_outputs, body.structured_param
    if use is not None and answer is not None:
        await renderer.check_structured(answer, param)
    reading, grammar = renderer.reading(
        prompt,
        use,
        answer,
        answer_param=param,
        continued=body.continued,
        shows_reasoning=body.include_reasoning is not False,
    )
    if grammar is not None:
        params, param = msgspec.structs.replace(params, structured_outputs=grammar), "tools"
    renderer.check_length(prompt, params.max_tokens, "messages")
    return PreparedChat(model, prompt, await renderer.resolve(params, param), reading)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation."""
    chat = await prepare(state, body)
    request_id = body.response_id("chatcmpl")
    generation = state.service.generate(
        request_id, [chat.prompt], chat.params, body.priority or 0, body.cache_salt, chat.reading
    )
    shape = _ChatFormatter(state.service.renderer.tokenizer, body, chat.prompt)
    answer = GenerationResponse(request_id, chat.model, shape, Usage([chat.prompt], chat.params.n))
    if body.stream:
        return answer.stream(generation, body.include_usage, body.include_continuous_usage)
    return await answer.whole(generation, request)


class _ChatFormatter:
    """Formats chat completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._top = body.top_logprobs or 0
        self._name = TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._prompt = prompt
        self._prompt_top = body.prompt_logprobs
        self.tells_tokens = bool(body.return_token_ids)

    def beside(self, sequences: Sequence[TextDelta]) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_token_ids": self._prompt} if self.tells_tokens else {}
        if sequences and self._prompt_top is not None and (scores := sequences[0].prompt_logprobs) is not None:
            found["prompt_logprobs"] = prompt_logprobs_object(self._tokenizer, self._prompt, scores, self._prompt_top)
        return found

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        """The fields that end a choice, in a chunk or in a full response."""
        ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return ending | {"token_ids": delta.token_ids} if self.tells_tokens else ending

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk_choice(self, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": _said(delta),
            "logprobs": self._logprobs(delta),
            **self._ending(delta),
        }

    def whole_choice(self, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": None, "refusal": None} | _whole(delta),
            "logprobs": self._logprobs(delta),
            **self._ending(delta),
        }

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        content = []
        for token_id, at in zip(delta.token_ids, delta.logprobs, strict=True):
            likeliest = list(zip(at.top_ids, at.top_logprobs, strict=True))[: self._top]
            top = [self._token(*entry) for entry in likeliest]
            content.append(self._token(token_id, at.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _said(delta: TextDelta) -> dict[str, Any]:
    """The non-empty fields of a message. The reasoning has both names that clients use."""
    said: dict[str, Any] = {}
    if delta.reasoning:
        said["reasoning_content"] = said["reasoning"] = delta.reasoning
    if delta.text:
        said["content"] = delta.text
    if delta.tool_calls:
        said["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.tool_calls]
    return said


def _whole(delta: TextDelta) -> dict[str, Any]:
    """The fields of a complete message. The content is null if there are only tool calls or reasoning."""
    said = _said(delta)
    if not said:
        said["content"] = ""
    if delta.tool_calls:
        said["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return said


def _call(call: ToolCall) -> dict[str, Any]:
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
