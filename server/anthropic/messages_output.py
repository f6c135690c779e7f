"""The answers of `/v1/messages`: a model's output as blocks, whole or as events."""

from __future__ import annotations

from typing import Any

import pydantic_core
from starlette.types import Send

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
from quire.server.http.errors import describe
from quire.server.http.response import named_event, part
from quire.server.serving.generation import Generation

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormatter:
    """Formats a message while it is generated."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._blocks = ContentBlocks()

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole message."""
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
