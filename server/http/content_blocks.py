"""What a model says, as the blocks that newer APIs make of it: thoughts, text and calls, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.server.frontend.output_processor import AnswerEnd, TextDelta
from quire.server.parsers.events import ToolCall


@dataclass
class ContentBlock:
    """A part of an answer; `text` is a call's JSON arguments. Its index is its place among the blocks."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class BlockOpened:
    """A block begins."""

    block: ContentBlock


@dataclass(frozen=True)
class BlockDelta:
    """A block has this much more text."""

    block: ContentBlock
    text: str


@dataclass(frozen=True)
class BlockClosed:
    """A block is complete, or will not be."""

    block: ContentBlock


BlockEvent = BlockOpened | BlockDelta | BlockClosed


class ContentBlocks:
    """Counts and collects one answer: feed it its deltas, and `close` it."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self.finish_reason: AnswerEnd | None = None
        self.stop_string: str | None = None
        """That ended the answer."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt."""
        self._num_before_words = 0
        self._open: ContentBlock | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts, with their markers: those up to the first other word."""
        return self._num_before_words if any(block.kind == "reasoning" for block in self.blocks) else 0

    def feed(self, deltas: Sequence[TextDelta]) -> Iterator[BlockEvent]:
        """What these bring."""
        for delta in deltas:
            self._count(delta)
            calls = delta.tool_calls
            if calls and calls[0].id is None:  # it goes on with the open call, before anything else
                yield from self._grow("call", calls[0].arguments)
                calls = calls[1:]
            yield from self._grow("reasoning", delta.reasoning)
            yield from self._grow("text", delta.text)
            for call in calls:
                yield from self._begin_call(call)

    def close(self) -> Iterator[BlockEvent]:
        """Nothing follows."""
        if self._open is not None:
            yield BlockClosed(self._open)
            self._open = None

    def _count(self, delta: TextDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        has_words = delta.text or delta.tool_calls or any(block.kind != "reasoning" for block in self.blocks)
        if delta.reasoning or not has_words:
            self._num_before_words += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_string = delta.stop_reason if isinstance(delta.stop_reason, str) else None

    def _grow(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(ContentBlock(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.text += text
        yield BlockDelta(block, text)

    def _begin_call(self, call: ToolCall) -> Iterator[BlockEvent]:
        yield from self._begin(ContentBlock("call", len(self.blocks), call_id=call.id or "", name=call.name or ""))
        yield from self._grow("call", call.arguments)

    def _begin(self, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = block
        self.blocks.append(block)
        yield BlockOpened(block)
