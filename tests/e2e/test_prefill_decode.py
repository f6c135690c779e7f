"""Prompts that a prefill replica of a real server computes, and a decode replica continues; each side is killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Server, quire, serve
from tests.e2e.test_replicas import free_port, run
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "16")
ROLES = ("--prefill-replicas", "1", "--decode-replicas", "1", "--kv-offloading-size", "0.2")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_RNG = random.Random(0)
PROMPTS = [_RNG.choices(range(300, 1500), k=400 + 37 * number) for number in range(6)]
BODIES: list[dict[str, Any]] = [
    {**GREEDY, "prompt": PROMPTS[0], "max_tokens": 24, "logprobs": 2},
    {**GREEDY, "prompt": PROMPTS[1], "max_tokens": 24, "prompt_logprobs": 1},
    {"prompt": PROMPTS[2], "max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 3},
    {**GREEDY, "prompt": PROMPTS[3], "max_tokens": 1},
    {**GREEDY, "prompt": PROMPTS[4], "max_tokens": 24, "structured_outputs": {"regex": "[ab ]{12,}"}},
    {**GREEDY, "prompt": PROMPTS[5], "max_tokens": 24, "frequency_penalty": 0.5, "stop_token_ids": [7]},
]
"""Requests whose prompts are worth computing apart."""


def answer(server: Server, body: dict[str, Any]) -> list[Any]:
    """The choices, without what depends on where they were computed."""
    found = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120)
    assert found.status_code == 200, found.text
    return [
        (each["token_ids"], each["finish_reason"], each["logprobs"], each.get("prompt_logprobs"))
        for each in found.json()["choices"]
    ]


def near(found: Any) -> Any:
    """What is equal to this, with numbers that may be a little different: batches and ranks round differently."""
    match found:
        case float():
            return pytest.approx(found, abs=1e-3)
        case dict():
            return {key: pytest.approx(value, abs=1) if key == "rank" else near(value) for key, value in found.items()}
        case list() | tuple():
            return type(found)(map(near, found))
    return found


@dataclass
class Stream:
    """An answer that arrives in a thread."""

    server: Server
    prompt: list[int]
    num_tokens: int

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {
            **GREEDY,
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=120) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.tokens += choice["token_ids"]

    def all(self) -> list[int]:
        self.thread.join()
        return self.tokens


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[list[Any], list[list[int]]]]:
    """The answers of one replica: to all bodies, and long ones to all prompts."""
    with serve(*FLAGS) as server:
        yield near([answer(server, body) for body in BODIES]), [Stream(server, prompt, 200).all() for prompt in PROMPTS]


def test_answers_are_those_of_one_replica(expected: tuple[list[Any], list[list[int]]]) -> None:
    with serve(*FLAGS, *ROLES) as server:
        until(lambda: server.metrics("kv_store_up"))
        roles = [each["role"] for each in httpx.get(f"{server.url}/replicas").json()["replicas"]]
        assert roles == ["prefill", "decode"]
        assert [answer(server, body) for body in BODIES] == expected[0]
        moved = sum(body.get("n", 1) for body in BODIES if body["max_tokens"] > 1)
        assert server.metrics("requests_handed_over_total", engine="0") == moved
        assert server.metrics("handover_time_seconds_count", engine="1") == moved
        loaded = server.metrics("handed_over_tokens_total", engine="1")
        recomputed = server.metrics("handed_over_tokens_recomputed_total", engine="1")
        assert recomputed <= 16 * moved, "at most a block of each"
        assert loaded + recomputed >= sum(
            len(body["prompt"]) * body.get("n", 1) for body in BODIES if body["max_tokens"] > 1
        )
        with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as threads:
            assert [*threads.map(lambda body: answer(server, body), BODIES)] == expected[0]


def test_a_proxy_does_the_same_with_two_servers(expected: tuple[list[Any], list[list[int]]]) -> None:
    """As vLLM's example of a proxy does it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ("--kv-offloading-size", "0.2", "--cluster-token", "a token of both servers")
    env = os.environ | {"QUIRE_HOST_IP": "127.0.0.1"}
    with (
        serve(*FLAGS, *store, "--kv-peer-port", str(port), env=env) as first,
        serve(*FLAGS, *store, "--kv-peers", f"127.0.0.1:{port}", env=env) as second,
    ):
        until(lambda: first.metrics("kv_store_up") and second.metrics("kv_store_peers_up") == 1)
        loaded: list[int] = []
        for prompt, tokens in zip(PROMPTS, expected[1], strict=True):
            body = {**GREEDY, "prompt": prompt, "max_tokens": 24, "return_token_ids": True}
            asked = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            params = httpx.post(f"{first.url}/v1/completions", json=asked, timeout=120).json()["kv_transfer_params"]
            assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", port)
            given = body | {"kv_transfer_params": params}
            found = httpx.post(f"{second.url}/v1/completions", json=given, timeout=120).json()
            assert found["choices"][0]["token_ids"] == tokens[:24]
            details = found["usage"]["prompt_tokens_details"].get("cached_tokens_details", {"peer": 0})
            loaded.append(details["peer"])
        assert max(loaded) >= 256, "the machine may be too busy for some"


@pytest.mark.parametrize(
    ("lost", "layout"),
    [("quire-core-0", ()), ("quire-core-1", ()), ("quire-kv-store", ()), ("quire-rank-1", ("-pcp", "2"))],
)
def test_either_side_may_be_killed(
    lost: str, layout: tuple[str, ...], expected: tuple[list[Any], list[list[int]]]
) -> None:
    """Also one of the ranks that divide the tokens of prompts."""
    with serve(*FLAGS, *ROLES, *layout) as server:
        until(lambda: server.metrics("kv_store_up"))
        streams = [Stream(server, prompt, 200) for prompt in PROMPTS]
        until(lambda: any(stream.tokens for stream in streams))  # some prompts are computed, others wait
        os.kill(server.named(lost).pid, signal.SIGKILL)
        assert [stream.all() for stream in streams] == expected[1]
        assert [answer(server, body) for body in BODIES] == expected[0]


def test_prompts_on_one_host_and_decodes_on_another(expected: tuple[list[Any], list[list[int]]]) -> None:
    """And the API on a third one, which has no store. The host of the prompts is lost, and comes back elsewhere;
    then the other one is."""
    flags = (*FLAGS, *ROLES, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", free_port())

    def host(rank: int, address: str) -> contextlib.AbstractContextManager[Any]:
        own = quire("serve", *flags, "-dpl", "1", "-dpr", str(rank), "--headless")
        return run("env", f"QUIRE_HOST_IP={address}", *own)

    def check_answers() -> None:
        """Some of them are handed over; of these, nearly nothing is computed again."""
        names = ("requests_handed_over_total", "handed_over_tokens_recomputed_total")
        before = [server.metrics(name) for name in names]
        with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as threads:
            assert [*threads.map(lambda body: answer(server, body), BODIES)] == expected[0]
        moved, recomputed = (server.metrics(name) - old for name, old in zip(names, before, strict=True))
        assert moved > 0
        assert recomputed < 100 * moved, "a block of each; while the machine is busy, some loads may be late"

    def until_peers(prefill: str) -> None:
        """Until both stores read from each other, and the replicas are up."""
        until(lambda: all(server.metrics("kv_store_peers_up", host=each) == 1 for each in (prefill, "127.0.0.3")))
        until(lambda: server.metrics("replicas", state="up") == 2)

    with contextlib.ExitStack() as hosts:
        prompts = hosts.enter_context(host(0, "127.0.0.2"))
        decodes = hosts.enter_context(host(1, "127.0.0.3"))
        server = hosts.enter_context(serve(*flags, "-dpl", "0"))
        until_peers("127.0.0.2")
        check_answers()
        assert server.metrics("kv_store_read_bytes_total", host="127.0.0.3", tier="peer") > 0
        streams = [Stream(server, prompt, 200) for prompt in PROMPTS]
        until(lambda: any(stream.tokens for stream in streams))
        prompts.kill_all()
        assert [stream.all() for stream in streams] == expected[1]
        hosts.enter_context(host(0, "127.0.0.4"))
        until_peers("127.0.0.4")
        check_answers()
        streams = [Stream(server, prompt, 200) for prompt in PROMPTS]
        until(lambda: any(stream.tokens for stream in streams))
        decodes.named("quire-kv-store").kill()
        assert [stream.all() for stream in streams] == expected[1]
        until_peers("127.0.0.4")
        streams = [Stream(server, prompt, 200) for prompt in PROMPTS]
        until(lambda: any(len(stream.tokens) > 20 for stream in streams))  # of the second replica
        decodes.kill_all()
        assert [stream.all() for stream in streams] == expected[1]


def test_roles_change_while_requests_run_in_several_layouts(expected: tuple[list[Any], list[list[int]]]) -> None:
    """All API processes follow."""
    layout = ("--prefill-tensor-parallel-size", "2", "--api-server-count", "2", "--admin-key", "secret")
    with serve(*FLAGS, *ROLES, *layout) as server:
        until(lambda: server.metrics("kv_store_up"))
        streams = [Stream(server, prompt, 200) for prompt in PROMPTS]
        until(lambda: server.metrics("requests_handed_over_total") > 0)  # later, all prompts may be in a cache
        for number, body in enumerate(
            (
                {"prefill_replicas": 0},
                {"prefill_replicas": 1},
                {"decode_replicas": 2},
                {"data_parallel_size": 3, "prefill_replicas": 2},
            )
        ):
            until(lambda number=number: sum(len(stream.tokens) for stream in streams) >= 100 * number, 240)  # type: ignore[misc]
            admin = {"Authorization": "Bearer secret"}
            assert httpx.post(f"{server.url}/replicas", json=body, headers=admin).status_code == 202
        assert [stream.all() for stream in streams] == expected[1]
        assert [answer(server, body) for body in BODIES] == expected[0]

        def found() -> list[tuple[str, str, int]]:
            """The replicas, as any API process knows them."""
            replicas = httpx.get(f"{server.url}/replicas").json()["replicas"]
            return [(each["role"], each["state"], each["tensor_parallel_size"]) for each in replicas]

        wanted = [("prefill", "up", 2), ("prefill", "up", 1), ("decode", "up", 1)]
        until(lambda: all(found() == wanted for _ in range(8)), 240)
