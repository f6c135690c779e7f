"""The input that the Python API passes on to the engine."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.llm.prompts import chat_input, process_chat, process_prompt
from tests.fakes.api_server import Server


async def test_priority_and_salt_of_a_prompt_reach_the_engine(server: Server) -> None:
    for params in (None, SamplingParams(max_tokens=3)):
        salted = await process_prompt(server.frontend, {"prompt": "a", "cache_salt": "s"}, params, 3)
        assert (salted.given.priority, salted.given.cache_salt, salted.text) == (3, "s", "a")
        plain = await process_prompt(server.frontend, [70, 71], params, -2)
        assert (plain.given.priority, plain.given.cache_salt, plain.text) == (-2, None, None)


async def test_priority_of_a_conversation_reaches_the_engine(server: Server) -> None:
    chat = replace(chat_input(), messages=[{"role": "user", "content": "a"}])
    assert (await process_chat(server.frontend, chat, None, 3)).given.priority == 3
