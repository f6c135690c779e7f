"""`/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.errors import json_response
from quire.server.http.state import AppState
from quire.server.openai.chat import ChatRequest
from quire.server.openai.protocol import LenientModel, StrictModel

router = APIRouter()


class TokenizeRequest(LenientModel):
    """A `prompt`, or the `messages` (and `tools`) of a chat; then all other fields of a chat are accepted too."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the text. Default: true for a prompt, false for a chat, whose template has
    them.
    """
    return_token_strs: bool | None = False

    def chat(self) -> ChatRequest:
        """Convert to a chat request; rejects what chat rejects."""
        mine = {"prompt", "return_token_strs"}
        try:
            return ChatRequest.model_validate(self.model_dump(exclude_unset=True, exclude=mine))
        except ValidationError as error:
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


class DetokenizeRequest(StrictModel):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, state: AppState) -> Response:
    """Return the token ids of a prompt or a chat, which may exceed the model's maximum length."""
    state.check_model(body.model)
    processor = state.frontend.input_processor
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("expected either prompt or messages", "prompt")
    if body.prompt is not None:
        for name in body.model_extra or ():
            raise InvalidParameter(f"{name} is not a parameter of /tokenize with a prompt", name)
        tokens = await processor.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = body.chat()
        chat.reject_unsupported()
        tokens = await processor.tokenize_chat(chat.chat_input(), chat.truncate_prompt_tokens, chat.longest)
    strings = await processor.names(tokens) if body.return_token_strs else None
    return json_response(
        {"count": len(tokens), "max_model_len": processor.max_model_len, "tokens": tokens, "token_strs": strings}
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: AppState) -> Response:
    """Return the text of token ids, including special tokens."""
    state.check_model(body.model)
    return json_response({"prompt": await state.frontend.input_processor.detokenize(body.tokens, "tokens")})
