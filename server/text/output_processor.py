"""Converts token ids to text incrementally: detokenizer, stop strings and parsers, combined for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.parsers.events import Content, Event, Reasoning, ToolCall
from quire.server.parsers.output_parser import OutputFormat, OutputParser
from quire.server.text.tokenizer import Tokenizer

AnswerEnd = FinishReason | Literal["tool_calls"]
"""Why an answer ended: `stop` (end of sequence, stop token or stop string), `length` (of the output or the model),
`abort` or `error`; or `tool_calls`, if it stopped and contains some.
"""

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
"""Tokens that may be pending. A character has at most four bytes, so more pending tokens cannot form valid text."""


class Detokenizer:
    """Incremental decoding of the output after a prompt.

    Let P be the decoded prompt and F the decoded prompt + output. The results of `feed` and `flush`, concatenated, are
    F without the prefix that it shares with P. So the space that a decoder strips from a first token stays, a character
    that starts in the prompt and ends in the output is returned whole, and bytes that never form a character become
    U+FFFD. The one exception: returned text is never changed. Byte-fallback decoders replace every byte of a run of
    byte tokens if one of them is not UTF-8, even in complete characters; characters already returned stay, and only the
    rest of the run is replaced. (`tokenizers`' DecodeStream raises in this case, repeats a prompt that ends inside a
    character, and drops pending tokens at the end.)

    Each call decodes a window: the tokens of the last returned text (`_context`) and the tokens not returned yet
    (`_pending`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """`kept` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and not kept
        self._skipped = tokenizer.special_ids - kept if kept else frozenset()
        self._context = self._prompt_context(prompt_ids)
        text = self._decode(self._context)
        self._base = _complete_text(text)
        self._prompt_tail = text[len(self._base) :]
        """The prompt's own incomplete tail, which is not returned."""
        self._pending: list[int] = []
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._is_flushed = not self._prompt_tail
        """All text of `_context` has been returned, and nothing is pending."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes. A token that ends inside a character stays pending."""
        if self._is_flushed and (piece := self._pieces[token_id]):
            self._context, self._base = [token_id], piece
            return piece
        self._is_flushed = False
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        overdue = len(self._pending) >= _MAX_PENDING
        if text == self._base:
            if overdue:
                self._pending.clear()
            return ""
        if text.endswith(_REPLACEMENT) and not overdue:
            return ""
        new = self._after_base(text)
        shown = _complete_text(new)
        self._context, self._pending = self._pending, []
        self._base = self._decode(self._context).removesuffix(new[len(shown) :])
        self._is_flushed = shown == new
        return self._without_prompt_tail(shown)

    def flush(self) -> str:
        """Return the text of the pending tokens. `feed` must not be called afterwards."""
        return self._without_prompt_tail(self._after_base(self._decode(self._context + self._pending)))

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that decodes to some text and starts at a character boundary."""
        for count in (8, 32, 128):
            context = list(prompt_ids[-count:])
            text = self._decode(context)
            if len(context) < count or (text and not text.startswith(_REPLACEMENT)):
                break
        return context

    def _decode(self, ids: list[int]) -> str:
        if self._skipped:
            ids = [token_id for token_id in ids if token_id not in self._skipped]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _after_base(self, text: str) -> str:
        if text.startswith(self._base):
            return text[len(self._base) :]
        return self._decode(self._pending)

    def _without_prompt_tail(self, new: str) -> str:
        tail, self._prompt_tail = self._prompt_tail, ""
        shared = min(len(tail), len(new) - len(new.lstrip(_REPLACEMENT)))
        return new[shared:]


class NoDetokenizer:
    """In place of a `Detokenizer`, if nobody reads the text."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _complete_text(text: str) -> str:
    """The text without trailing U+FFFD (up to three) that may still become one character."""
    tail = len(text) - len(text.rstrip(_REPLACEMENT))
    return text[: len(text) - min(tail, 3)]


class StopStrings:
    """Finds the stop string that completes first, independent of how the text is split.

    Text that may be the start of a stop string is held back. If two complete at the same character, the longer one
    counts.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown; once `found` is set, all text up to the stop string."""
        text = self._held + text
        matches = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        keep = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class TextDelta:
    """New output of one sequence. `logprobs`, if requested, has one entry for each of `token_ids`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: AnswerEnd | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the sequence; None for the end-of-sequence token."""
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0
    """Accepted draft tokens."""
    num_rejected_tokens: int = 0
    num_loaded_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of `num_cached_tokens`: those whose KV came from the host's memory, from its disk, and from other hosts."""
    prompt_logprobs: PromptLogprobs | None = None
    """If requested: of the whole prompt, in the first delta with tokens or a finish reason."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Pieces of tool calls, at most one per call."""
    num_tokens_before_words: int = 0
    """The number of `token_ids` before the first text or tool call of the sequence: reasoning and markers."""

    @property
    def has_content(self) -> bool:
        """Whether there is anything besides tokens without text."""
        return bool(self.text or self.logprobs or self.finish_reason or self.reasoning or self.tool_calls)

    @property
    def is_text(self) -> bool:
        """Whether there is nothing to show but text."""
        other = self.logprobs or self.finish_reason or self.prompt_logprobs or self.reasoning or self.tool_calls
        return bool(self.text) and not other

    def extend(self, more: TextDelta) -> None:
        """Append the next delta of the same sequence."""
        self.text += more.text
        self.token_ids += more.token_ids
        if more.logprobs is not None:
            self.logprobs = (self.logprobs or []) + more.logprobs
        self.finish_reason = more.finish_reason
        self.stop_reason = more.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, more.num_cached_tokens)
        self.num_loaded_tokens = max(self.num_loaded_tokens, more.num_loaded_tokens)
        self.num_accepted_tokens += more.num_accepted_tokens
        self.num_rejected_tokens += more.num_rejected_tokens
        if more.prompt_logprobs is not None:
            self.prompt_logprobs = more.prompt_logprobs
        self.reasoning += more.reasoning
        for call in more.tool_calls:
            self._add(call)
        self.num_tokens_before_words += more.num_tokens_before_words

    def read(self, events: Sequence[Event]) -> None:
        """Append the events of a parser."""
        for event in events:
            match event:
                case Content(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCall():
                    self._add(event)

    def _add(self, piece: ToolCall) -> None:
        if piece.id is None and self.tool_calls and self.tool_calls[-1].index == piece.index:
            self.tool_calls[-1].arguments += piece.arguments
        else:
            self.tool_calls.append(replace(piece))


class OutputProcessor:
    """Converts the engine's outputs of one sequence to `TextDelta`s, up to the one with a finish reason."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output_format: OutputFormat | None = None,
    ) -> None:
        self._index = index
        self._params = params
        special = tokenizer.special_among(output_format.markers) if output_format and params.skip_special_tokens else {}
        kept = frozenset(special.values())
        self._detokenizer: Detokenizer | NoDetokenizer = NoDetokenizer()
        if params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, kept)
        self._parser: OutputParser | None = output_format.parser(hidden=special) if output_format else None
        self._has_words = self._has_called = False
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._count = 0
        top = params.prompt_logprobs
        self._scores = None if top is None else PromptLogprobs(top, b"", b"", b"", b"")
        """The log-probabilities of the prompt; None once they have been returned."""

    def feed(self, output: EngineCoreOutput) -> TextDelta:
        """Convert an output. A stop string may finish the sequence before the engine does."""
        if self._params.max_tokens == 0 and output.token_ids:
            output.token_ids, output.logprobs = [], output.logprobs and []
            output.finish_reason, output.stop_token_id = "length", None
        delta = self._text(output)
        delta.num_accepted_tokens, delta.num_rejected_tokens = output.num_accepted_tokens, output.num_rejected_tokens
        delta.num_loaded_tokens = output.num_loaded_tokens
        if self._scores is not None:
            if output.prompt_logprobs is not None:
                self._scores.extend(output.prompt_logprobs)
            if output.token_ids or output.finish_reason is not None:
                delta.prompt_logprobs, self._scores = self._scores, None
        return delta

    def _text(self, output: EngineCoreOutput) -> TextDelta:
        if self._stop is None and self._parser is None and output.finish_reason is None:
            new = "".join(map(self._detokenizer.feed, output.token_ids))
            return TextDelta(self._index, new, output.token_ids, output.logprobs, None, None, output.num_cached_tokens)
        delta = TextDelta(self._index, num_cached_tokens=output.num_cached_tokens)
        text = []
        for token_id in output.token_ids:
            self._count += 1
            delta.token_ids.append(token_id)
            is_stop_token = output.stop_token_id is not None and len(delta.token_ids) == len(output.token_ids)
            if is_stop_token and not self._params.include_stop_str_in_output:
                break
            text.append(self._show(self._detokenizer.feed(token_id)))
            if self._parser is not None and not self._has_words:  # token by token, to count them
                delta.read(self._parser.feed(text.pop()))
                self._has_words = bool(delta.text or delta.tool_calls)
                delta.num_tokens_before_words += not self._has_words
            if self._stop_string is not None:
                break
        if output.finish_reason is not None and self._stop_string is None:
            text.append(self._show(self._detokenizer.flush()))
            if self._stop is not None and self._stop.found is None:
                text.append(self._stop.flush())
        if output.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
        if self._stop_string is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stop_string
        else:
            delta.finish_reason = output.finish_reason
            if output.stop_token_id in self._params.stop_token_ids:
                delta.stop_reason = output.stop_token_id
        self._read("".join(text), delta)
        return delta

    def _read(self, text: str, delta: TextDelta) -> None:
        if self._parser is None:
            delta.text = text
            return
        delta.read(self._parser.feed(text))
        if delta.finish_reason is not None:
            delta.read(self._parser.finish())
        self._has_called = self._has_called or bool(delta.tool_calls)
        if self._has_called and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"

    @property
    def _stop_string(self) -> str | None:
        return None if self._stop is None else self._stop.found

    def _show(self, text: str) -> str:
        """Return the text to show. Stop strings are checked once `min_tokens` is reached."""
        if self._stop is None or self._count < self._params.min_tokens:
            return text
        return self._stop.feed(text)
