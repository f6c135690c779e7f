"""Lists the unfinished requests of a core, for the page at `/`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from quire.engine.protocol.engine_core import EngineCoreRequest, ListRequests, RequestInfo
from quire.engine.scheduler.request import Request


def list_requests(
    call: ListRequests, requests: Iterable[Request], compiling: Iterable[EngineCoreRequest]
) -> tuple[list[RequestInfo], int]:
    """Return the oldest requests that a call asks for, and the number of all of them. The grammars of `compiling` are
    being compiled.
    """
    known = [(each.core_request, each) for each in requests] + [(each, None) for each in compiling]
    found = [each for each in known if call.selects(each[0])]
    oldest = heapq.nsmallest(call.limit, found, key=lambda each: each[0].arrived)
    return [_info(*each) for each in oldest], len(found)


def _info(given: EngineCoreRequest, request: Request | None) -> RequestInfo:
    num_prompt_tokens, limit = len(given.prompt_token_ids), given.params.max_tokens
    info = RequestInfo(given.request_id, given.label, given.arrived, "waiting", num_prompt_tokens, max_tokens=limit)
    info.adapter = b"" if given.adapter is None else given.adapter.digest
    if request is not None:
        info.phase = request.phase
        info.num_cached_tokens = request.num_cached_tokens or 0
        info.num_output_tokens = len(request.token_ids) - num_prompt_tokens
        info.max_tokens = limit if given.hands_over else request.max_tokens - num_prompt_tokens
    return info
