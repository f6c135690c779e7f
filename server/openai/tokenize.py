"""`/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.state import AppState
from quire.server.openai.chat import ChatRequest

router = APIRouter(route_class=BodyRoute)


class TokenizeRequest(RequestBody):
    """A `prompt`, or the `messages` (and `tools`) of a chat; then all other fields of a chat are accepted too."""

    has_files: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the text. Default: true for a prompt, false for a chat, whose template has
    them.
    """
    return_token_strs: bool | None = False

    def chat(self) -> ChatRequest:
        """Convert to a chat request; rejects the same requests as chat."""
        mine = {"prompt", "return_token_strs"}
        return ChatRequest.validated(self.model_dump(exclude_unset=True, exclude=mine))

    async def process_here(self, admit: Admit) -> bytes:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("expected either prompt or messages", "prompt")
        if self.prompt is not None:
            processor = admit(self.check_fields())
            tokens = await processor.tokenize(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        else:
            chat = self.chat()
            processor = admit(chat.check_fields())
            tokens = await processor.tokenize_chat(
                chat.chat_input(), chat.truncate_prompt_tokens, chat.longest, chat.truncation_side or "left"
            )
        strings = await processor.names(tokens) if self.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": processor.max_model_len, "tokens": tokens}
        return msgspec.json.encode(found | {"token_strs": strings})


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]

    async def process_here(self, admit: Admit) -> bytes:
        processor = admit(self.check_fields())
        return msgspec.json.encode({"prompt": await processor.detokenize(self.tokens, "tokens")})


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, state: AppState) -> Response:
    """Return the token ids of a prompt or a chat, which may exceed the model's maximum length."""
    await state.find_model(body.model)
    return Response(await body.process(state.frontend), media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: AppState) -> Response:
    """Return the text of token ids, including special tokens."""
    await state.find_model(body.model)
    return Response(await body.process(state.frontend), media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(state: AppState) -> Response:
    """The contents of tokenizer_config.json, and the chat template in use; as in vLLM."""
    processor = state.frontend.input_processor
    found = {"tokenizer_class": "TokenizersBackend", **processor.tokenizer.config}
    return json_response(found | {"chat_template": processor.chat_template})
