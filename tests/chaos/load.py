"""Clients of every kind, and the outcomes of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.chaos.adapters import KEPT, MOVING
from tests.chaos.answers import Answer, Verdict
from tests.chaos.client import Broken, Pace, Refused, events
from tests.chaos.pictures import Site, fresh
from tests.fakes.namespaces import Host

End = Literal["right", "wrong", "duplicated", "lost", "cut", "hung", "refused"]

HUNG_SECONDS = 180.0
"""Seconds after which an unfinished request hangs: longer than a few restarts on a slow machine."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "kind": {"enum": ["first", "second"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _SCHEMA}}
_PROMPTS = ("Quire is", "A pipeline of stages", "Tensor parallelism", "The KV cache", "Which flag", "One two three")


@dataclass(frozen=True)
class Request:
    """A request, and the behaviour of its client."""

    name: str
    path: str
    body: dict[str, Any]
    pace: Pace = field(default_factory=Pace)
    leaves_after: int | None = None
    """Chunks after which the client leaves."""
    has_new_pictures: bool = False
    """Whether its pictures are files that the server has not seen, with the same pixels."""

    def content(self) -> dict[str, Any]:
        """The body to send."""
        return fresh(self.body) if self.has_new_pictures else self.body


def picture_requests(site: Site) -> list[Request]:
    """Questions about pictures: known, new, fetched, broken and huge ones; and texts beside them."""
    greedy, sampled = {"temperature": 0, "ignore_eos": True}, {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    made: list[Request] = []

    def add(name: str, parts: Sequence[str], body: dict[str, Any], max_tokens: int = 64, **client: Any) -> None:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in parts]
        content = [*images[:1], {"type": "text", "text": f"What is this? ({len(made)})"}, *images[1:]]
        whole = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "return_token_ids": True}
        made.append(Request(name, "/v1/chat/completions", {"model": "quire-demo", **whole, **body}, **client))

    small, large = site.data_url(1, 120, 90), site.data_url(2, 400, 300)
    for how, sampling in (("greedy", greedy), ("sampled", sampled)):
        add(f"{how} known stream", [small], {**stream, **sampling}, 150)
        add(f"{how} known, new question", [large, small], sampling)
        add(f"{how} new", [large], sampling, has_new_pictures=True)
        add(f"{how} new stream", [small, small], {**stream, **sampling}, 100, has_new_pictures=True)
        add(f"{how} fetched stream", [site.url(3, 200, 200)], {**stream, **sampling}, has_new_pictures=True)
        add(f"{how} left", [large], {**stream, **sampling}, 150, has_new_pictures=True, leaves_after=20)
        add(f"{how} text stream", [], {**stream, **sampling}, 200)
        add(f"{how} text", [], sampling)
    add("huge", [site.data_url(4, 2500, 2000)], greedy, 16, has_new_pictures=True)
    add("too huge", [site.bomb()], greedy, has_new_pictures=True)
    add("broken", [site.data_url(5, 200, 100, cut=True)], greedy)
    add("no picture", ["data:image/png;base64,AAAA"], greedy)
    add("missing", [site.missing()], greedy)
    add("slow reader", [small], {**stream, **greedy}, 150, pace=Pace(2048, 0.05), has_new_pictures=True)
    return made


def requests(*, embeds: bool) -> list[Request]:
    """The requests of the mixed load: of a model that generates text, or of one that embeds it."""
    if embeds:
        texts = [" ".join(_PROMPTS[i:] * (i + 1)) for i in range(len(_PROMPTS))]
        return [
            Request(f"embeddings of {count}", "/v1/embeddings", {"model": "quire-demo", "input": texts[:count]})
            for count in range(1, len(texts) + 1)
        ]
    greedy, sampled = {"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 7}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    made: list[Request] = []

    def add(name: str, body: dict[str, Any], max_tokens: int = 96, **client: Any) -> None:
        number = len(made)
        is_chat = "chat" in name
        said = f"{_PROMPTS[number % len(_PROMPTS)]} ({number})"
        prompt = {"messages": [{"role": "user", "content": said}]} if is_chat else {"prompt": said}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        content = {"model": "quire-demo", "max_tokens": max_tokens, "return_token_ids": True, **prompt, **body}
        made.append(Request(name, path, content, **client))

    for how, sampling in (("greedy", greedy), ("sampled", sampled)):
        long = {**sampling, "ignore_eos": True}
        add(f"{how} stream", {**streamed, **long}, 200)
        add(f"{how} stream, short", {**streamed, **sampling}, 24)
        add(f"{how} chat stream", {**streamed, **sampling})
        add(f"{how} completion", long)
        add(f"{how} chat", sampling)
        add(f"{how} logprobs stream", {**streamed, **long, "logprobs": 3})
        add(f"{how} chat logprobs", {**sampling, "logprobs": True, "top_logprobs": 2})
        add(f"{how} slow reader", {**streamed, **long}, 150, pace=Pace(2048, 0.05))
        add(f"{how} stream, left", {**streamed, **long}, 150, leaves_after=20)
        add(
            f"{how} completion, penalties", {**long, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.01}
        )
        add(f"{how} stream, stop", {**streamed, **long, "stop": ["the", "."], "min_tokens": 20})
        add(f"{how} chat schema", {**sampling, "response_format": _format()}, 120)
        add(f"{how} chat schema stream", {**streamed, **sampling, "response_format": _format()}, 120)
        add(f"{how} chat tools stream", {**streamed, **sampling, "tools": [_TOOL], "tool_choice": "required"}, 120)
        add(f"{how} chat tools", {**sampling, "tools": [_TOOL], "tool_choice": "required"}, 120)
    add("n stream", {**streamed, **sampled, "n": 4, "ignore_eos": True}, 64)
    add("n chat", {**sampled, "n": 3, "logprobs": True}, 64)
    add("prompt logprobs", {**greedy, "prompt": "The KV cache holds keys and values. " * 12, "prompt_logprobs": 2}, 32)
    add("long prompt", {**greedy, "prompt": "Tokens of a long prompt are computed in chunks. " * 40}, 32)
    add("long prompt stream", {**streamed, **sampled, "prompt": "Chunks of a long prompt are shared. " * 40}, 64)
    return made


_WITH_ADAPTERS = (
    *("greedy stream", "greedy chat", "greedy logprobs stream", "greedy slow reader", "greedy stream, left"),
    *("sampled chat stream", "sampled completion, penalties", "sampled chat schema stream", "sampled chat tools"),
    *("n stream", "prompt logprobs", "long prompt", "long prompt stream"),
)


def adapter_requests(catalogue: Sequence[Request]) -> list[Request]:
    """Some of these requests, for each adapter."""
    return [
        replace(each, name=f"{each.name}, {adapter}", body=each.body | {"model": adapter})
        for each in catalogue
        if each.name in _WITH_ADAPTERS
        for adapter in (*KEPT, MOVING)
    ]


_WITH_TIERS = (
    *("greedy stream", "greedy chat", "greedy completion", "greedy stream, left", "greedy logprobs stream"),
    *("sampled chat stream", "sampled completion, penalties", "sampled chat schema", "sampled stream, stop"),
)
_NUM_BEGINNINGS = 8


def tier_requests(catalogue: Sequence[Request]) -> list[Request]:
    """Some of these requests after each of some long beginnings, which are more than the devices have room for."""
    return [
        replace(each, name=f"{each.name}, beginning {number}", body=_begin(each.body, number))
        for each in catalogue
        if each.name in _WITH_TIERS
        for number in range(_NUM_BEGINNINGS)
    ]


def _begin(body: dict[str, Any], number: int) -> dict[str, Any]:
    beginning = f"{number}: " + f"Text {number} is said again and again. " * (30 + number)
    if "prompt" in body:
        return body | {"prompt": beginning + body["prompt"]}
    (message,) = body["messages"]
    return body | {"messages": [message | {"content": beginning + message["content"]}]}


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True}}


@dataclass(eq=False)
class Record:
    """The outcome of a request. Times are from `time.monotonic`."""

    request: Request
    answer: Answer = field(default_factory=Answer)
    port: int = 0
    started: float = field(default_factory=time.monotonic)
    heard: list[float] = field(default_factory=list)
    """The times at which it got tokens."""
    num_tokens: list[int] = field(default_factory=list)
    """Its number of tokens at these times."""
    may_be_refused: bool = False
    meanings: set[str] = field(default_factory=set)
    """The adapters whose answer is right, if its own has other weights in turns."""
    end: End | None = None
    detail: str = ""
    ended: float = 0.0

    def longest_pause(self, since: float = 0.0) -> float:
        """The longest time between two tokens since then, in seconds; 0 if the client itself pauses."""
        if self.request.pace.pause:
            return 0.0
        pairs = zip(self.heard, self.heard[1:], strict=False)
        return max((later - max(earlier, since) for earlier, later in pairs), default=0.0)


async def send(address: tuple[str, int], record: Record) -> bool:
    """Send a request and read its answer; returns whether the client stayed to the end."""
    request, num_chunks = record.request, 0

    def on_connect(port: int) -> None:
        record.port = port

    async with contextlib.aclosing(
        events(address, request.path, request.content(), request.pace, on_connect)
    ) as payloads:
        async for payload in payloads:
            record.answer.add(payload)
            if not record.num_tokens or record.answer.num_tokens > record.num_tokens[-1]:
                record.heard.append(time.monotonic())
                record.num_tokens.append(record.answer.num_tokens)
            num_chunks += 1
            if num_chunks == request.leaves_after:
                return False
    return True


class Load:
    """Clients that send one request after the other, until `finish`."""

    def __init__(
        self, address: tuple[str, int], catalogue: Sequence[Request], *, clients: int, seed: int, host: Host | None
    ) -> None:
        """Connect to `address` as seen from `host` (None: this one)."""
        self.records: list[Record] = []
        """The records of requests that have ended."""
        self.open: set[Record] = set()
        self.cut_ports: set[int] = set()
        """Local ports of clients whose API process was killed."""
        self._address, self._catalogue, self._clients, self._seed, self._host = address, catalogue, clients, seed, host
        self.expected: dict[str, Answer] = {}
        """The undisturbed answers by the names of the requests."""
        self.may_refuse = False
        """Whether the server may close new connections now, or answer 503."""
        self.meanings = {KEPT[0]}
        """The adapters whose weights `MOVING` may have at the moment."""
        self.is_gone = False
        """Whether the server may not know `MOVING`."""
        self._is_over = self._is_dead = False
        self._thread = threading.Thread(target=self._run_thread, name="load")

    def measure(self) -> None:
        """Learn the undisturbed answers: each request once without company."""

        async def ask() -> None:
            for request in self._catalogue:
                if request.body["model"] == MOVING:
                    continue
                record = Record(replace(request, leaves_after=None))
                await send(self._address, record)
                self.expected[request.name] = record.answer

        with self.inside():
            asyncio.run(ask())
        long = [self.expected.get(_named("greedy stream", each)) for each in ("", *KEPT)]
        for one, other in itertools.combinations([each for each in long if each is not None], 2):
            assert one.verdict(other, is_whole=True) != "right", "two adapters answer alike"

    def again(self, address: tuple[str, int], *, seed: int) -> Load:
        """Return the same load for another server of this layout."""
        load = Load(address, self._catalogue, clients=self._clients, seed=seed, host=self._host)
        load.expected, load.meanings = self.expected, self.meanings
        return load

    def may_mean(self, meanings: set[str], *, is_gone: bool = False) -> None:
        """From now on, `MOVING` may have the weights of these adapters, or also not be there."""
        self.meanings, self.is_gone = meanings, is_gone
        for record in list(self.open):
            self._note_meanings(record)

    def _note_meanings(self, record: Record) -> None:
        """Note what the adapter of a request may be, which the server decides before the first token."""
        if record.request.body["model"] == MOVING and not record.num_tokens:
            record.meanings = record.meanings | self.meanings
            record.may_be_refused = record.may_be_refused or self.is_gone

    def cut_all(self) -> None:
        """Expect every connection to break from now on."""
        self.may_refuse = self._is_dead = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run clients within the block."""
        self._thread.start()
        try:
            yield
        finally:
            self.finish()

    def finish(self) -> None:
        """Return when no request is open any more. No new ones are sent."""
        self._is_over = True
        self._thread.join()

    def tokens_per_second(self, seconds: float) -> float:
        """Measure the tokens that clients get from now on."""
        begin = time.monotonic()
        time.sleep(seconds)
        end, count = time.monotonic(), 0
        for record in [*self.records, *list(self.open)]:
            for at, before, after in zip(record.heard, [0, *record.num_tokens], record.num_tokens, strict=False):
                count += after - before if begin <= at < end else 0
        return count / (end - begin)

    def inside(self) -> AbstractContextManager[None]:
        """Within the block, sockets that this thread opens are on the clients' host."""
        return nullcontext() if self._host is None else self._host.inside()

    def _run_thread(self) -> None:
        with self.inside():
            asyncio.run(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(random.Random(self._seed * 1000 + number)))

    async def _client(self, rng: random.Random) -> None:
        while not self._is_over:
            record = Record(rng.choice(self._catalogue), may_be_refused=self.may_refuse)
            self.open.add(record)
            self._note_meanings(record)
            record.end = await self._end_of(record)
            record.ended = time.monotonic()
            self.open.remove(record)
            self.records.append(record)
            if record.end == "refused":
                await asyncio.sleep(0.2)

    async def _end_of(self, record: Record) -> End:
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                is_whole = await send(self._address, record)
        except TimeoutError:
            record.detail = f"no end after {HUNG_SECONDS:g} s and {record.answer.num_tokens} tokens"
            return "hung"
        except Refused as refusal:
            record.detail = str(refusal)
            return "refused" if record.may_be_refused or self.may_refuse else "lost"
        except Broken as error:
            record.detail = str(error)
            if record.may_be_refused and not record.num_tokens:
                return "refused"
            verdict, _ = self._verdict(record, is_whole=False)
            if verdict != "right":
                return verdict
            return "cut" if self._is_dead or record.port in self.cut_ports else "lost"
        verdict, expected = self._verdict(record, is_whole=is_whole)
        if verdict != "right":
            record.detail = f"got {record.answer}\nexpected {expected}"
        return verdict

    def _verdict(self, record: Record, *, is_whole: bool) -> tuple[Verdict, Answer]:
        """Compare with the undisturbed answer, or with the nearest one."""
        name = record.request.name
        names = [_named(name.removesuffix(f", {MOVING}"), each) for each in sorted(record.meanings)] or [name]
        verdicts = [
            (record.answer.verdict(self.expected[each], is_whole=is_whole), self.expected[each]) for each in names
        ]
        return next((each for each in verdicts if each[0] == "right"), verdicts[0])


def _named(name: str, adapter: str) -> str:
    """The name of a request for an adapter; "": of that for the model."""
    return f"{name}, {adapter}" if adapter else name
