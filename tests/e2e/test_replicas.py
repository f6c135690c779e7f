"""Replicas of the demo model, by the real command line: on one host, on two, and behind balancers of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from quire import AsyncLLM, SamplingParams
from quire.engine.config.options import DEMO_MODEL
from tests.e2e.serving import Server, quire, serve
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.namespaces import Command, Host, hosts
from tests.fakes.waiting import until

__all__ = ["hosts"]  # the fixture

PROMPTS = ["Quire is", "A pipeline", "Tensor parallelism", "The KV cache", "Which flag", "Hello", "One two", "How do I"]
LONG = 120


def ask(url: str, prompt: str, max_tokens: int = 24, **body: object) -> str:
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **body}
    with httpx.Client(base_url=url, headers=KEY, timeout=120) as client:
        return str(client.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"])


def answers(url: str) -> list[str]:
    """Greedy ones, and sampled ones with a seed."""
    with ThreadPoolExecutor(8) as pool:
        greedy = pool.map(lambda prompt: ask(url, prompt), PROMPTS)
        sampled = pool.map(lambda prompt: ask(url, prompt, temperature=1, seed=7), PROMPTS)
        return [*greedy, *sampled]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Each stand-in for another host takes all processors for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[str]]:
    """One replica's answers to each prompt, short and long."""
    with serve() as server, ThreadPoolExecutor(8) as pool:
        return answers(server.url), list(pool.map(lambda prompt: ask(server.url, prompt, LONG), PROMPTS))


async def stream(url: str, prompt: str, begun: asyncio.Event) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = await client.completions.create(
            model="quire-demo",
            prompt=prompt,
            max_tokens=LONG,
            temperature=0,
            extra_body={"ignore_eos": True},
            stream=True,
        )
        text = ""
        async for chunk in chunks:
            begun.set()
            text += chunk.choices[0].text
        return text


async def streams(url: str, disturb: object) -> list[str]:
    """One for each prompt; `disturb()` is called once each has begun."""
    begun = [asyncio.Event() for _ in PROMPTS]
    tasks = [asyncio.create_task(stream(url, *each)) for each in zip(PROMPTS, begun, strict=True)]
    for event in begun:
        await asyncio.wait_for(event.wait(), 60)
    assert callable(disturb)
    disturb()
    return await asyncio.gather(*tasks)


def serves_again(server: Server, replica: str) -> int:
    """Number of times that the replica has come back."""
    return sum(f"replica {replica} is up again" in line for line in server.lines)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def run(*arguments: str) -> Iterator[Command]:
    """A program on this host, ended with everything that it has started."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = Command(process, arguments)
    try:
        yield command
    finally:
        family = command.family()
        process.terminate()
        try:
            process.wait(30)
        finally:
            for left in psutil.wait_procs(family, timeout=10)[1]:
                left.kill()
            command.join()
            print(f"--- {' '.join(arguments)}\n{command.text}")


@pytest.mark.slow
def test_two_replicas_answer_as_one_and_stand_in_for_each_other(expected: tuple[list[str], list[str]]) -> None:
    with serve("-dp", "2", "--api-server-count", "2") as server:
        assert any("replicas 0-1 on this host" in line for line in server.lines)
        assert answers(server.url) == expected[0]
        for victim in ("quire-core-1", "quire-core-0"):  # the first has come back when the second goes
            assert asyncio.run(streams(server.url, server.named(victim).kill)) == expected[1]
            until(lambda victim=victim: serves_again(server, victim[-1]))  # type: ignore[misc]
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def headless(port: str, replica: int, address: str = "127.0.0.1") -> list[str]:
    return quire(
        *("serve", "-dp", "2", "-dpr", str(replica), "--data-parallel-address", address),
        *("--data-parallel-rpc-port", port, "--data-parallel-size-local", "1", "--headless"),
    )


@pytest.mark.slow
def test_headless_replicas_behind_an_api_without_any(expected: tuple[list[str], list[str]]) -> None:
    port = free_port()
    with (
        run(*headless(port, 0)) as first,
        run(*headless(port, 1)) as second,
        serve("-dp", "2", "-dpl", "0", "--data-parallel-rpc-port", port) as server,
    ):
        assert not [p for p in server.family() if p.name().startswith("quire-core")]
        assert answers(server.url) == expected[0]
        assert asyncio.run(streams(server.url, second.named("quire-core-1").kill)) == expected[1]
        second.wait_for(r"replica 1: the engine core was killed by SIGKILL; restarting it")
        until(lambda: second.text.count("replica 1 is ready") == 2)
        assert asyncio.run(streams(server.url, first.process.kill)) == expected[1]
        with run(*headless(port, 0)) as again:
            again.wait_for("replica 0 is ready")
            until(lambda: serves_again(server, "0"))
            assert asyncio.run(streams(server.url, second.process.kill)) == expected[1]
            server.process.kill()
            again.wait_for(r"the host with the API \(127.0.0.1\) was lost: .*; joining it again")
            again.process.terminate()
            assert again.wait(20) == 0
    assert not [p for p in first.everybody | second.everybody if p.is_running() and p.status() != "zombie"]


@pytest.mark.slow
async def test_headless_replicas_behind_python(expected: tuple[list[str], list[str]]) -> None:
    port = free_port()
    with run(*headless(port, 0)) as first, run(*headless(port, 1)) as second:
        async with AsyncLLM(data_parallel_size=2, data_parallel_size_local=0, data_parallel_rpc_port=int(port)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

            async def one(prompt: str) -> str:
                return [result async for result in llm.generate(prompt, params)][-1].outputs[0].text

            assert await asyncio.gather(*map(one, PROMPTS)) == expected[0][: len(PROMPTS)]
        assert [await asyncio.to_thread(each.wait, 30) for each in (first, second)] == [0, 0]


@pytest.mark.slow
def test_two_hosts(hosts: tuple[Host, Host], expected: tuple[list[str], list[str]]) -> None:
    """The other host's replica goes with it and comes back; the API's end is its end."""
    one, two = hosts
    behind = headless("29550", 1, one.address)
    token = {"QUIRE_CLUSTER_TOKEN": "a token for tests only"}
    other = two.start(*behind, **token)
    command = quire("serve", "-dp", "2", "-dpl", "1", "--data-parallel-address", one.address, "--host", one.address)
    api = one.start(*command, **token)
    url = api.wait_for(r"serving .* on (http://\S+)")[1]
    with one.inside():
        assert answers(url) == expected[0]
        assert asyncio.run(streams(url, other.kill_all)) == expected[1]
        other = two.start(*behind, **token)
        other.wait_for("replica 1 is ready")
        api.wait_for("replica 1 is up again")
        assert asyncio.run(streams(url, lambda: two.set_link(False))) == expected[1]
        # TCP gives up at the same time.
        lost = "(nothing was received from it for 15 s|its connection has closed)"
        other.wait_for(rf"the host with the API \(10.77.0.1\) was lost: {lost}; joining")
        api.wait_for(rf"replica 1 \(10.77.0.2\) was lost: {lost}")
        two.set_link(True)
        until(lambda: other.text.count("replica 1 is ready") == 2)
        until(lambda: api.text.count("replica 1 is up again") == 2)
        assert answers(url) == expected[0]
        api.kill_all()
        other.wait_for(r"the host with the API \(10.77.0.1\) was lost: its connection has closed; joining it again")
        other.named("quire-replicas").terminate()
        assert other.wait(20) == 0


async def endless_streams(url: str, work: object) -> list[set[str]]:
    """The texts of each prompt, which is sent again and again while `work()` is done."""
    begun = [asyncio.Event() for _ in PROMPTS]
    is_over = False

    async def flow(prompt: str, event: asyncio.Event) -> set[str]:
        texts = set[str]()
        while not is_over:
            texts.add(await stream(url, prompt, event))
        return texts

    tasks = [asyncio.create_task(flow(*each)) for each in zip(PROMPTS, begun, strict=True)]
    for event in begun:
        await asyncio.wait_for(event.wait(), 60)
    assert callable(work)
    await work()
    is_over = True
    return await asyncio.gather(*tasks)


def scale(url: str, count: int, **body: object) -> None:
    """Ask for so many replicas."""
    asked = httpx.post(f"{url}/replicas", json={"data_parallel_size": count, **body}, headers=KEY)
    assert asked.status_code == 202, asked.text


def listed(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/replicas", headers=KEY).json()["replicas"]
    return found


def states(url: str) -> dict[int, str]:
    return {each["index"]: each["state"] for each in listed(url)}


KEY = {"Authorization": "Bearer none"}
"""The headers that `stream` sends."""


@pytest.mark.slow
def test_replicas_are_added_and_removed_under_open_streams(expected: tuple[list[str], list[str]]) -> None:
    """Unfinished requests go on elsewhere; replicas that have time to finish are in
    tests/integration/server/client/test_engine_client_replicas.py."""
    room = ("--kv-cache-memory-bytes", str(1 << 29))
    with serve("--api-server-count", "2", "--admin-key", "none", *room) as server:
        processes = [process.pid for process in server.family() if process.name().startswith("quire-api")]

        async def resize(count: int, **body: object) -> None:
            await asyncio.to_thread(scale, server.url, count, **body)
            while await asyncio.to_thread(states, server.url) != dict.fromkeys(range(count), "up"):
                await asyncio.sleep(0.1)

        def has_moved() -> bool:
            return any("requests go on elsewhere" in line for line in server.lines)

        async def come_and_go() -> None:
            await resize(3)
            assert {process.name() for process in server.family()} >= {"quire-core", "quire-core-1", "quire-core-2"}
            while not all(each["num_requests_running"] for each in await asyncio.to_thread(listed, server.url)):
                await asyncio.sleep(0.02)
            await resize(1, drain_timeout_seconds=0.0)
            if not has_moved():  # the running ones have just ended
                await come_and_go()

        assert asyncio.run(endless_streams(server.url, come_and_go)) == [{text} for text in expected[1]]
        until(lambda: not any(process.name() in ("quire-core-1", "quire-core-2") for process in server.family()))
        assert processes == [process.pid for process in server.family() if process.name().startswith("quire-api")]
        refused = httpx.post(f"{server.url}/replicas", json={"data_parallel_size": 1024}, headers=KEY)
        assert refused.status_code == 400
        assert "Not enough memory for replica" in refused.text
        assert states(server.url) == {0: "up"}


@pytest.mark.slow
def test_a_host_that_joins_later(hosts: tuple[Host, Host], expected: tuple[list[str], list[str]]) -> None:
    """It gets requests, and leaves by SIGTERM, as if it had not been there."""
    one, two = hosts
    token = {"QUIRE_CLUSTER_TOKEN": "a token for tests only"}
    where = ("--data-parallel-address", one.address)
    api = one.start(*quire("serve", *where, "--host", one.address, "--admin-key", "none"), **token)
    url = api.wait_for(r"serving .* on (http://\S+)")[1]
    join = quire("serve", *where, "--data-parallel-start-rank", "3", "--data-parallel-size-local", "2", "--headless")
    with one.inside():
        other = two.start(*join, **token)
        until(lambda: states(url) == {0: "up", 3: "up", 4: "up"}, seen=lambda: states(url))
        assert [each["host"] for each in listed(url)] == [one.address, two.address, two.address]
        here = api.named("quire-core").pid

        assert asyncio.run(streams(url, other.named("quire-replicas").terminate)) == expected[1]
        assert other.wait(60) == 0
        assert states(url) == {0: "up"}
        assert api.named("quire-core").pid == here
        assert "lost" not in api.text
        again = two.start(*join, "--shutdown-timeout", "0", **token)
        until(lambda: states(url) == {0: "up", 3: "up", 4: "up"}, seen=lambda: states(url))
        assert asyncio.run(streams(url, again.named("quire-replicas").terminate)) == expected[1]
        assert again.wait(60) == 0
        assert "error" not in again.text.lower()


@pytest.mark.slow
def test_one_api_for_each_replica(expected: tuple[list[str], list[str]]) -> None:
    """Behind an external load balancer, and started in the wrong order."""
    with serve("-dp", "2", "-dpr", "1") as second, serve("-dp", "2", "-dpr", "0") as first:
        assert any("replica 1 on this host" in line for line in second.lines)
        assert answers(first.url) == answers(second.url) == expected[0]


@pytest.mark.slow
def test_an_api_for_each_host_that_has_several(expected: tuple[list[str], list[str]]) -> None:
    with serve("-dp", "4", "-dpr", "2", "-dpl", "2") as server:
        assert {p.name() for p in server.family() if "core" in p.name()} == {"quire-core-2", "quire-core-3"}
        assert answers(server.url) == expected[0]


@pytest.mark.slow
def test_who_is_missing_is_named_in_time() -> None:
    with run(*headless(free_port(), 1), "--distributed-timeout-seconds", "2") as command:
        assert command.wait(60) == 2
        assert "the host with the API (127.0.0.1) did not answer at" in command.text


@pytest.mark.slow
def test_a_signal_ends_headless_replicas() -> None:
    port = free_port()
    with run(*headless(port, 1)) as command, serve("-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", port) as server:
        family = command.family()
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(30) == 0
        assert not psutil.wait_procs(family, timeout=20)[1]
        assert ask(server.url, "Hello")


@pytest.mark.slow
def test_the_example() -> None:
    """The hosts answer disjoint shares of the prompts."""
    example = Path(__file__).parents[2] / "examples" / "data_parallel.py"
    common = ["--dp-size", "2", "--node-size", "2", "--master-port", free_port(), "--max-tokens", "8"]
    with contextlib.ExitStack() as stack:
        commands = [
            stack.enter_context(run(sys.executable, str(example), *common, "--node-rank", str(rank)))
            for rank in range(2)
        ]
        assert [command.wait(120) for command in commands] == [0, 0]
    lines = [[line for line in command.lines if "→" in line] for command in commands]
    assert [len(each) for each in lines] == [2, 2]
    assert len({line for each in lines for line in each}) == 4


def write_mixture(folder: Path) -> None:
    """A small mixture of experts with random weights, and the demo model's tokenizer."""
    architecture, changes = CASES["Mixtral"]
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    write_model(architecture, SIZES | changes | {"num_local_experts": 8, "vocab_size": vocabulary}, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())


@pytest.mark.slow
def test_two_hosts_that_share_experts_are_restarted_together(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """After the death of a core of either, and after the loss of a host."""
    one, two = hosts
    write_mixture(tmp_path)
    token = {"QUIRE_CLUSTER_TOKEN": "a token for tests only"}
    common = (
        *("serve", str(tmp_path), "--served-model-name", "quire-demo", "--max-model-len", "256"),
        *("-dp", "2", "--enable-expert-parallel", "--data-parallel-address", one.address),
    )
    behind = quire(*common, "-dpr", "1", "--headless")
    other = two.start(*behind, **token)
    api = one.start(*quire(*common, "-dpl", "1", "--host", one.address), **token)
    url = api.wait_for(r"serving .* on (http://\S+)")[1]

    def is_up_again(times: int) -> bool:
        return all(api.text.count(f"replica {replica} is up again") == times for replica in range(2))

    with one.inside():
        expected = asyncio.run(streams(url, lambda: None))
        assert asyncio.run(streams(url, other.named("quire-core-1").kill)) == expected
        until(lambda: is_up_again(1))
        assert asyncio.run(streams(url, api.named("quire-core-0").kill)) == expected
        until(lambda: is_up_again(2))

        def lose_host() -> None:
            other.kill_all()
            two.start(*behind, **token)

        assert asyncio.run(streams(url, lose_host)) == expected
        until(lambda: is_up_again(3))
        assert asyncio.run(streams(url, lambda: None)) == expected
        assert "given up" not in api.text


@pytest.mark.slow
@pytest.mark.parametrize("longest", [0, 1])
def test_hosts_that_share_experts_end_when_all_are_done(tmp_path: Path, longest: int) -> None:
    write_mixture(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "data_parallel.py"
    common = ["--model", str(tmp_path), "--enable-expert-parallel", "--node-size", "2", "--master-port", free_port()]
    with contextlib.ExitStack() as stack:
        commands = [
            stack.enter_context(
                run(
                    *(sys.executable, str(example), *common, "--node-rank", str(rank)),
                    *("--max-tokens", "300" if rank == longest else "2"),
                )
            )
            for rank in range(2)
        ]
        assert [command.wait(120) for command in commands] == [0, 0]
    assert [sum("→" in line for line in command.lines) for command in commands] == [2, 2]
