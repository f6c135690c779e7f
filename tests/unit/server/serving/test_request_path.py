"""docs/design/request.md against a trace of one streamed chat."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fakes.api_server import Server

ROOT = Path(__file__).parents[4]
SENT = "engine/cluster/security.py split"
"""The function that ends the way to the engine."""


class Trace:
    """The functions of this repository's product, in order of their first call."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code not in self._names:
            path = Path(code.co_filename or "").resolve()  # rooms are linked into the package
            is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("server", "engine")
            is_part = code.co_name.startswith("<")  # a comprehension, or a lambda
            self._names[code] = f"{path.relative_to(ROOT)} {code.co_qualname}" if is_ours and not is_part else ""
        if name := self._names[code]:
            self.functions.setdefault(name)


async def trace_chat(server: Server) -> list[str]:
    async def chat() -> None:
        body = {"messages": [{"role": "user", "content": "hello world"}], "stream": True}
        async with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert "[DONE]" in [line.removeprefix("data: ") async for line in response.aiter_lines()]

    await chat()  # the trace leaves out functions that only the first request calls
    trace = Trace()
    sys.setprofile(trace)
    try:
        await chat()
    finally:
        sys.setprofile(None)
    return list(trace.functions)


def listed(section: str) -> list[str]:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)
    return [f"{file} {name}" for name, file in rows]


async def test_the_page_lists_the_functions_of_a_streamed_chat(server: Server) -> None:
    page = (ROOT / "docs" / "design" / "request.md").read_text()
    to_the_wire, back = page.split("## In the engine")
    there, here = listed(to_the_wire), listed(back)
    assert len({*there, *here}) == len(there) + len(here)
    each_step = listed(back.partition("Then each step")[2].partition("And the end")[0])
    assert len(there) <= 87  # the path stays short
    assert len(each_step) <= 19
    traced = await trace_chat(server)
    sent = traced.index(SENT) + 1
    assert set(there) == set(traced[:sent])
    assert set(here) == set(traced[sent:])
