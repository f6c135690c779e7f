"""The output of `/v1/responses`: its items, whole or as the events of a stream.

Reasoning is returned as plain text in the `content` of its items, so nothing is encrypted or summarized.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
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
from quire.server.http.response import cached_tokens, media_tokens, named_event, part
from quire.server.http.response_store import StoredResponse
from quire.server.http.state import ServedModel
from quire.server.openai.custom_input import CustomInput
from quire.server.openai.logprobs import TokenNames, token_logprobs
from quire.server.openai.responses_tools import CalledTool
from quire.server.serving.generation import Generation
from quire.server.text.inputs import GenerationInput

_Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_encode = msgspec.json.Encoder().encode


class ProcessedResponse(NamedTuple):
    """The engine's input, and the fields of the request that the response repeats."""

    response_id: str
    chat: GenerationInput
    echoed: dict[str, Any]
    tools: Mapping[str, CalledTool]
    """The tools, by name of the function."""
    items: bytes | None
    """The items up to the answer, without instructions, as JSON; None: not to be stored."""
    num_items: int


class ResponseFormatter:
    """Formats a response while it is generated."""

    def __init__(self, model: str, processed: ProcessedResponse, state: ServedModel) -> None:
        chat = processed.chat
        self.id = processed.response_id
        self._store = state.responses
        self._prompt_tokens = len(chat.prompts[0])
        self._tokenizer = state.frontend.input_processor.tokenizer
        self._name = TokenNames(self._tokenizer, as_ids=state.names_tokens_by_id)
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
        self._processed = processed
        self._inputs: dict[int, CustomInput] = {}
        """The inputs of custom tools that are being streamed, by index of the block."""

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
        self._store.begin(self.id, self)
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
        self._store.end(self.id)
        if (items := self._processed.items) is not None:
            blocks = self._blocks.blocks  # a call that was cut off is not remembered
            kept = [block for block in blocks if block.kind != "call" or _is_json_object(block.text)]
            output = b",".join(_encode(self._item(block, "completed")) for block in kept)
            items = items[:-1] + b"," * bool(kept and self._processed.num_items) + output + b"]"
            stored = StoredResponse(_encode(self.object()), items, self._processed.num_items, status)
            self._store.add(self.id, stored)

    def _usage(self) -> dict[str, Any]:
        blocks = self._blocks
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {
                **cached_tokens(blocks.num_cached_tokens, *blocks.num_loaded_tokens),
                "cache_write_tokens": 0,
                **media_tokens(self._processed.chat.media),
            },
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
                return item | self._tool(block).item(block.call_id, block.text, status)

    def _tool(self, block: ContentBlock) -> CalledTool:
        """The tool of a call."""
        return self._processed.tools[block.name]

    def _item_id(self, block: ContentBlock) -> str:
        prefix = self._tool(block).prefix if block.kind == "call" else {"reasoning": "rs", "text": "msg"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}{block.index:02}"

    def _events(self, event: BlockEvent) -> bytes:
        block = event.block
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        match event:
            case BlockOpened():
                begun = {"output_index": block.index, "item": self._item(block, "in_progress")}
                added = self._sse("response.output_item.added", begun)
                if block.kind == "call":
                    return added
                part = {**at, "content_index": 0, "part": self._part(block)}
                return added + self._sse("response.content_part.added", part)
            case BlockDelta() if block.kind == "call":
                return self._call_delta(block, event.text, at)
            case BlockDelta(text=text, logprobs=scored):
                extra = {"logprobs": self._scores(scored)} if block.kind == "text" else {}
                return self._sse(f"{_GROWS[block.kind]}.delta", {**at, "content_index": 0, "delta": text, **extra})
            case BlockClosed():
                status = "completed" if self._status in ("in_progress", "completed") else "incomplete"
                item = self._item(block, status)
                last = {"output_index": block.index, "item": item}
                if block.kind == "call":
                    return self._call_done(block, item, at) + self._sse("response.output_item.done", last)
                whole: dict[str, Any] = {**at, "content_index": 0, "text": block.text}
                if block.kind == "text":
                    whole["logprobs"] = self._scores(block.logprobs)
                done = self._sse(f"{_GROWS[block.kind]}.done", whole)
                done += self._sse("response.content_part.done", {**at, "content_index": 0, "part": self._part(block)})
                return done + self._sse("response.output_item.done", last)

    def _call_delta(self, block: ContentBlock, arguments: str, at: dict[str, Any]) -> bytes:
        match self._tool(block).kind:
            case "function":
                return self._sse("response.function_call_arguments.delta", {**at, "delta": arguments})
            case "custom":
                reader = self._inputs.setdefault(block.index, CustomInput())
                if text := reader.feed(arguments):
                    return self._sse("response.custom_tool_call_input.delta", {**at, "delta": text})
        return b""

    def _call_done(self, block: ContentBlock, item: dict[str, Any], at: dict[str, Any]) -> bytes:
        match self._tool(block).kind:
            case "function":
                whole = {"name": item["name"], "arguments": block.text}
                return self._sse("response.function_call_arguments.done", {**at, **whole})
            case "custom":
                return self._sse("response.custom_tool_call_input.done", {**at, "input": item["input"]})
        return b""

    def _part(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        scores = self._scores(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _scores(self, scored: Sequence[ScoredToken]) -> list[Any]:
        return [token_logprobs(self._tokenizer, self._name, *each, self._top) for each in scored]

    def _sse(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"sequence_number": number, **fields})


_GROWS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}


def _is_json_object(text: str) -> bool:
    """Return whether the text is complete JSON arguments of a call; empty text is."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
