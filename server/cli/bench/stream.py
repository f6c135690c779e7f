"""Records a streamed response: server-sent events, their tokens, and arrival times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.server.cli.bench.load import SendTimes


class SSEParser:
    """Splits a stream of bytes into the data of its events (WHATWG HTML, "Server-sent events").

    Other fields and comments are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the completed events; the bytes may be split anywhere."""
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
    """One request and its response. Times are on the clock that measured it."""

    moments: SendTimes
    prompt_len: int
    """Length of the prompt in tokens, as counted by the server if it reports usage."""
    end: float = 0.0
    error: str = ""
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each chunk with output."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens of each of these chunks; 1 if the server did not report it."""
    texts: list[str] = field(default_factory=list)
    is_done: bool = False
    """The end-of-stream marker has arrived."""
    _counted: int = 0
    """Output tokens in the server's last usage."""
    _stream: SSEParser = field(default_factory=SSEParser)

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_len(self) -> int:
        """Output tokens: as counted by the server, or else one per chunk."""
        return self._counted or sum(self.tokens)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.moments.start

    @property
    def latency(self) -> float:
        return self.end - self.moments.start

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive chunks: how long a reader waits, however many tokens arrive together."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first chunk; None if nothing followed it."""
        following = self.output_len - 1
        return (self.end - self.arrivals[0]) / following if following > 0 else None

    def feed(self, now: float, received: bytes) -> None:
        """Process a part of the response body."""
        for event in self._stream.feed(received):
            if event == b"[DONE]":
                self.is_done = True
                continue
            try:
                self._take(now, _decode(event))
            except msgspec.MsgspecError as error:
                self.error = self.error or f"the server sent an invalid chunk: {error}"

    def close(self, now: float) -> None:
        """End the record."""
        self.end = now
        if not self.error and not self.arrivals:
            self.error = "the response has no tokens"

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
    """The message of an error, in any of the formats that servers use."""
    match error:
        case {"error": inner} | {"message": inner} | {"detail": inner}:
            return message_of(inner)
        case _:
            return " ".join(str(error).split())
