"""The output of `/v1/responses`: its items, whole or as the events of a stream.

Reasoning is returned as plain text in the `content` of its items, so nothing is encrypted or summarized.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.types import Send

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
from quire.server.http.errors import describe
from quire.server.http.response import named_event, part
from quire.server.http.response_store import StoredResponse
from quire.server.http.state import ServedModel
from quire.server.openai.logprobs import TokenNames, token_logprobs
from quire.server.openai.responses_input import InputTurns, is_json_object
from quire.server.serving.generation import Generation
from quire.server.text.inputs import GenerationInput

_Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_encode = msgspec.json.Encoder().encode


class ProcessedResponse(NamedTuple):
    """The engine's input, and the fields of the request that the response repeats."""

    chat: GenerationInput
    echoed: dict[str, Any]
    conversation: bytes | None
    """The chat messages up to the answer, without instructions, as JSON; None: not to be stored."""


class ResponseFormatter:
    """Formats a response while it is generated."""

    def __init__(self, model: str, processed: ProcessedResponse, state: ServedModel) -> None:
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
        await self._blocks.collect(generation)
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
            status, _ = describe(error)
            code = "server_error" if status >= 500 else "invalid_prompt"
            self._fields["error"] = {"code": code, "message": str(error)}
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
        return named_event(name, {"sequence_number": number, **fields})


_GROWS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
