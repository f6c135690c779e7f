"""`kv_transfer_params`, as proxies pass them from a server for prompts to one that continues."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.config.engine_config import KVStoreConfig
from quire.engine.protocol.engine_core import EngineCoreRequest, ToCore
from tests.fakes.api_server import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
ROUTES = [("/v1/completions", {"prompt": "hello", "max_tokens": 1}), ("/v1/chat/completions", CHAT)]
ASKED: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "aborted_request": [],
}
"""What vLLM's example of a proxy sends to the server for prompts, and a field of another connector."""


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_the_answer_of_one_server_is_for_another(server: Server, route: str, body: dict[str, Any]) -> None:
    frontend, sent = server.frontend, list[EngineCoreRequest]()
    send = frontend.client._send

    def record(message: ToCore, replica: int) -> None:
        if isinstance(message, EngineCoreRequest):
            sent.append(message)
        send(message, replica)

    frontend.client._send = record  # type: ignore[method-assign]
    refused = await server.http.post(route, json=body | {"kv_transfer_params": ASKED})
    assert refused.status_code == 400
    assert "kv_transfer_params requires a server with a KV store" in refused.text
    frontend.config = replace(frontend.config, kv_store=KVStoreConfig(memory_bytes=1 << 30, peer_port=1))
    (replica,) = frontend.client._replicas.values()
    replica.kv_peer = "10.0.0.9:29560"  # that of the replica's host, which is not the API's
    found = (await server.http.post(route, json=body | {"kv_transfer_params": ASKED})).json()
    assert found["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "10.0.0.9:29560",
        "remote_block_ids": [],
        "remote_host": "10.0.0.9",
        "remote_port": 29560,
    }
    streamed = await server.http.post(route, json=body | {"kv_transfer_params": ASKED, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["kv_transfer_params"] == found["kv_transfer_params"]
    assert not any("kv_transfer_params" in chunk for chunk in chunks[:-1])
    given = body | {"kv_transfer_params": found["kv_transfer_params"]}
    assert "kv_transfer_params" not in (await server.http.post(route, json=given)).json()
    assert "kv_transfer_params" not in (await server.http.post(route, json=body)).json()
    assert [each.kv_peer for each in sent] == ["", "", "10.0.0.9:29560", ""]
    assert [each.hands_over for each in sent] == [True, True, False, False]
    replica.kv_peer = ""
    unknown = (await server.http.post(route, json=body | {"kv_transfer_params": ASKED})).json()["kv_transfer_params"]
    assert (unknown["remote_host"], unknown["remote_port"], unknown["do_remote_prefill"]) == (None, None, True)
    wrong = await server.http.post(route, json=body | {"kv_transfer_params": {"remote_port": 99999}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "kv_transfer_params.remote_port")


async def test_a_chat_continues_with_the_tokens_of_the_other_server(server: Server) -> None:
    """As vLLM's routers send them: nothing is rendered again, and no KV store is needed."""
    route, body = "/v1/chat/completions", CHAT | {"max_tokens": 4, "return_token_ids": True}
    first = (await server.http.post(route, json=body)).json()
    tokens = first["prompt_token_ids"]
    other = body | {"messages": [{"role": "user", "content": "something else"}]}
    given = {"kv_transfer_params": {"prompt_token_ids": tokens, "remote_block_ids": [[1, 2]]}}
    found = (await server.http.post(route, json=other | given)).json()
    assert (found["prompt_token_ids"], found["choices"]) == (tokens, first["choices"])
    kept = (await server.http.post(route, json=other | given | {"truncate_prompt_tokens": 2})).json()
    assert kept["prompt_token_ids"] == tokens[-2:]
    for wrong in ([], [320], [-1], ["a"], [3] * 200):
        params = {"kv_transfer_params": {"prompt_token_ids": wrong}}
        refused = await server.http.post(route, json=other | params)
        param = refused.json()["error"]["param"].partition("[")[0]
        assert (refused.status_code, param) == (400, "kv_transfer_params.prompt_token_ids"), wrong
