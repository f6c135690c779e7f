"""What one request's answer brings: server-sent events, the tokens in them, and when they came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.cli.bench.load import SendTimes


class SSEParser:
    """Splits a stream of bytes into the data of its events (WHATWG HTML, "Server-sent events").

    The other fields and comments are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that are now complete; they may end anywhere in what is received."""
        events = []
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def new_text(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class _UsageCounts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _UsageCounts | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class RequestRecord:
    """One request: what was asked, what came and when. Times are those of the clock that measured it."""

    moments: SendTimes
    prompt_len: int
    """Tokens; as the server counts them once it has said so."""
    end: float = 0.0
    error: str = ""
    arrivals: list[float] = field(default_factory=list)
    """When each chunk with output came."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens of each of these chunks; 1 where the server did not say."""
    texts: list[str] = field(default_factory=list)
    is_done: bool = False
    """The stream has said that nothing follows."""
    _counted: int = 0
    """Output tokens that the server's last usage spoke of."""
    _stream: SSEParser = field(default_factory=SSEParser)

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_len(self) -> int:
        """Output tokens: as the server counts them, else one for each chunk."""
        return self._counted or sum(self.tokens)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.moments.start

    @property
    def latency(self) -> float:
        return self.end - self.moments.start

    @property
    def itls(self) -> list[float]:
        """Seconds between a chunk and the next: what a reader waits, however many tokens come together."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first chunk; None where nothing followed it."""
        following = self.output_len - 1
        return (self.end - self.arrivals[0]) / following if following > 0 else None

    def feed(self, now: float, received: bytes) -> None:
        """Take in a part of the answer's body."""
        for event in self._stream.feed(received):
            if event == b"[DONE]":
                self.is_done = True
                continue
            try:
                self._take(now, _decode(event))
            except msgspec.MsgspecError as error:
                self.error = self.error or f"the server sent an event that is no chunk: {error}"

    def close(self, now: float) -> None:
        """The answer has ended."""
        self.end = now
        if not self.error and not self.arrivals:
            self.error = "the server answered without a single token"

    def _take(self, now: float, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self.error = self.error or message_of(chunk.error)
        count: int | None = None
        if chunk.usage is not None:
            self.prompt_len = chunk.usage.prompt_tokens or self.prompt_len
            if chunk.usage.completion_tokens is not None:
                count = chunk.usage.completion_tokens - self._counted
                self._counted = chunk.usage.completion_tokens
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if count is None and choice.token_ids is not None:
            count = len(choice.token_ids)
        text = choice.new_text()
        if text or count or (choice.finish_reason is not None and not self.arrivals):
            self.arrivals.append(now)
            self.tokens.append(1 if count is None else count)
            self.texts.append(text)


def message_of(error: Any) -> str:
    """The text of an error, in whichever of the shapes that servers give it."""
    match error:
        case {"error": inner} | {"message": inner} | {"detail": inner}:
            return message_of(inner)
        case _:
            return " ".join(str(error).split())
