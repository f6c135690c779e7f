"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from quire.engine.errors import InvalidParameter
from quire.engine.messages import MAX_LOGPROBS
from quire.server.api.answer import LEAST_LOGPROB, Answer, Usage
from quire.server.api.protocol import GenerationRequest
from quire.server.api.state import AppState
from quire.server.output import Delta
from quire.server.tokenizer import Tokenizer

router = APIRouter()


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest):
    """The body of a chat completion."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def refuse_unserved(self) -> None:
        """See `GenerationRequest`; also tools, and message fields that would be lost."""
        super().refuse_unserved()
        if self.tools and self.tool_choice != "none":
            raise InvalidParameter('tools are not served yet, except with tool_choice: "none"', "tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice is not served yet", "tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        for at, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise InvalidParameter(f"messages[{at}].content is missing", f"messages[{at}].content")
            for name, value in (message.model_extra or {}).items():
                if value:
                    raise InvalidParameter(f"messages[{at}].{name} is not served", f"messages[{at}].{name}")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, state: AppState) -> Response:
    """Answer a conversation."""
    model = state.check_model(body.model)
    body.refuse_unserved()
    state.service.check()
    renderer = state.service.renderer
    params = body.sampling_params(
        renderer.defaults,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    prompt = await renderer.chat(messages, body.tools or ())
    renderer.check_length(prompt, params.max_tokens, "messages")

    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    generation = state.service.generate(request_id, [prompt], params, body.priority or 0)
    answer = Answer(request_id, model, _Chat(renderer.tokenizer, body), Usage([prompt], params.n))
    if body.stream:
        return answer.stream(generation, body.include_usage)
    return await answer.whole(generation, request)


class _Chat:
    """The shape of chat."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._top = body.top_logprobs or 0

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def whole_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
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
            "token": self._tokenizer.token_text(token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
