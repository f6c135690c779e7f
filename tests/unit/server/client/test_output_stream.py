"""The outputs for a waiting reader, and for a reader that is behind when its stream ends with an error."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.server.client.output_stream import EngineUnavailable, OutputStream, RequestFailed


def a_stream(*request_ids: str) -> OutputStream:
    return OutputStream(lambda ids, reason: None, request_ids)


async def test_every_output_wakes_a_reader_that_waits() -> None:
    stream = a_stream("a")
    for token_id in range(2):
        reading = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        if token_id == 0:
            stream.put(EngineCoreOutput("a", [token_id]))
        else:
            stream.put_token("a", token_id)
        await asyncio.wait((reading,), timeout=5.0)
        assert reading.done(), f"output {token_id} wakes nobody"
        assert [output.token_ids for output in reading.result()] == [[token_id]]


async def test_what_came_before_an_error_is_read_first() -> None:
    stream = a_stream("a")
    stream.put(EngineCoreOutput("a", [1, 2]))
    stream.put_token("a", 3)
    stream.put(EngineCoreOutput("a", [], finish_reason="error", error="no memory"))
    (output,) = await stream.get()
    assert output.token_ids == [1, 2, 3]
    assert output.finish_reason is None
    for _ in range(2):
        with pytest.raises(RequestFailed, match="no memory"):
            await stream.get()
    assert not stream.is_open


async def test_what_came_before_the_engines_death_is_read_first() -> None:
    stream = a_stream("a", "b")
    stream.put(EngineCoreOutput("a", [1], finish_reason="stop"))
    stream.put_token("b", 2)
    stream.fail(EngineUnavailable("the engine died"))
    assert [(output.token_ids, output.finish_reason) for output in await stream.get()] == [([1], "stop"), ([2], None)]
    with pytest.raises(EngineUnavailable):
        await stream.get()


async def test_an_error_leaves_the_other_sequences_to_be_aborted() -> None:
    aborted: list[set[str]] = []
    stream = OutputStream(lambda ids, reason: aborted.append(ids), ["a", "b"])
    stream.put(EngineCoreOutput("a", [], finish_reason="error", error="no memory"))
    with pytest.raises(RequestFailed):
        await stream.get()
    stream.close()
    assert aborted == [{"b"}]
