"""The unfinished requests of a server, as users see them, and their engine ids.

An HTTP request has an engine request for each of its sequences, and for each step of a beam search.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.protocol.engine_core import Phase
from quire.server.client.engine_client import EngineClient
from quire.server.client.output_stream import EngineUnavailable

_LISTED = 200
"""Requests in a list."""
LIST_SECONDS = 1.0
"""Time for replicas to answer with their requests."""
ABORT_SECONDS = 10.0
"""The same if one of them is searched for. A step can take long, especially on a CPU."""
_ALL = 2**31
ENGINE_ID = "{}-{}-{:x}@{}"
"""The id of a sequence in the engine: id of the request, number of the sequence, serial number, and number of the API
process. So a late output of a finished request, or of a dead API process's, is not mistaken for an output of a new
request with the same id.
"""
SEARCH_ID = "{} {:x}"
"""The id of a beam search's steps, as requests: id of the request, and serial number of the search."""
_ENGINE_ID = re.compile(
    r"(?P<id>.*?)(?: (?P<search>[0-9a-f]+))?-(?P<at>\d+)-(?P<serial>[0-9a-f]+)@(?P<process>\d+)", re.DOTALL
)
_HANDLE = re.compile(r"\d+-(?P<serial>[0-9a-f]+)")


@dataclass(frozen=True)
class OpenRequest:
    """An unfinished sequence of a request."""

    id: str
    """The id of the response; of further sequences, followed by `#` and their number. Clients may choose it, so that
    several requests may have the same."""
    handle: str
    """The same for all sequences of a request, and of no other one: number of the API process, and serial number."""
    key: str | None
    """Name of its API key."""
    age: float
    """Seconds since it arrived at its API process."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int | None
    replica: int | None
    phase: Phase | Literal["queued"]
    """queued: no replica is up."""
    api: int
    """Number of the API process."""
    adapter: str | None
    """The digest of its adapter, in hexadecimal digits."""


async def list_requests(client: EngineClient, key: str | None = None) -> tuple[list[OpenRequest], int, list[int]]:
    """Return the oldest unfinished requests, the number of all, and the replicas that have not told theirs: of the API
    key with this name ("": without a key), or of all.
    """
    found, now = await client.open_requests(_LISTED, LIST_SECONDS, label=key), time.monotonic()
    listed = []
    for info, replica in found.requests:
        name, at, process, handle = _parse(info.request_id)
        request = OpenRequest(
            id=f"{name}#{at}" if at else name,
            handle=handle,
            key=info.label or None,
            age=now - info.arrived,
            prompt_tokens=info.num_prompt_tokens,
            cached_tokens=info.num_cached_tokens,
            output_tokens=info.num_output_tokens,
            max_tokens=info.max_tokens,
            replica=replica,
            phase="queued" if replica is None else info.phase,
            api=process,
            adapter=info.adapter.hex() or None,
        )
        listed.append(request)
    return listed, found.total, found.silent


async def abort_request(client: EngineClient, handle: str) -> tuple[str, str] | None:
    """Abort all sequences of the request with this handle, whichever API process it belongs to. Returns the id of its
    response and the name of its key, "" if it has none; None if there is no such request. Raises `EngineUnavailable` if
    it may be on a replica that does not answer.
    """
    if (parts := _HANDLE.fullmatch(handle)) is None:
        return None
    answer = await client.open_requests(_ALL, ABORT_SECONDS, part=parts["serial"])
    found = [each for each in answer.requests if _parse(each[0].request_id).handle == handle]
    if not found and answer.silent:
        raise EngineUnavailable(f"replica {answer.silent[0]} does not answer, and may have this request")
    client.abort_open((info.request_id, replica) for info, replica in found)
    return (_parse(found[0][0].request_id).name, found[0][0].label) if found else None


class _Parts(NamedTuple):
    name: str
    """The id of the response."""
    at: int
    """Number of the sequence."""
    process: int
    handle: str


def _parse(engine_id: str) -> _Parts:
    found = _ENGINE_ID.fullmatch(engine_id)
    assert found is not None, engine_id
    serial = found["search"] or found["serial"]
    return _Parts(found["id"], int(found["at"]), int(found["process"]), f"{found['process']}-{serial}")
