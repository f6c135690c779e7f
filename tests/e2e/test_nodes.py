"""One server on two hosts without Ray: the same tokens as in one process, and everybody stops when one of them goes."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import zmq

from quire.engine.config.options import DEMO_MODEL
from tests.e2e.serving import quire, serve
from tests.fakes.namespaces import Command, Host
from tests.fakes.namespaces import hosts as hosts
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

URL = "http://127.0.0.1:8000"
"""As node 0 sees it."""
SHAPE = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")
TOKEN = "a token for tests only"
CUT_SECONDS = 10.0
"""Less than the default of --cluster-timeout-seconds."""
STOPPED_SECONDS = 15.0
LOST = "(nothing was received from it for 15 s|its connection has closed)"
"""The message when a cable is unplugged. TCP gives up at the same time."""
_INIT = """
import contextlib, os, subprocess, sys
code = subprocess.call(sys.argv[1:])
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
"""A host's first process, with which all others end, is not the server's; it stays until they have ended."""
PROMPTS = [f"Quire serves {'many ' * n}models" for n in range(6)]
REQUESTS = [
    {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, **sampling}
    for prompt in PROMPTS
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 7})
]


@dataclass
class Nodes:
    """Node 0 on the first host and node 1 on the second."""

    first: Host
    api: Command
    other: Command

    def everybody(self) -> list[psutil.Process]:
        return [*self.api.family(), *self.other.family()]


def start(hosts: tuple[Host, Host], node: int, *arguments: str, model: Path = DEMO_MODEL) -> Command:
    first, _ = hosts
    role = ("--node-rank", str(node), *(("--headless",) if node else ()))
    command = quire("serve", str(model), "--nnodes", "2", "--master-addr", first.address, *role, *SHAPE, *arguments)
    return hosts[node].start(sys.executable, "-S", "-c", _INIT, *command, QUIRE_CLUSTER_TOKEN=TOKEN)


def serving(hosts: tuple[Host, Host], *arguments: str, order: tuple[int, int] = (0, 1)) -> Nodes:
    """Both, ready to answer."""
    commands = {}
    for node in order:
        commands[node] = start(hosts, node, *arguments)
        if node == order[0]:
            commands[node].wait_for("waiting up to .* for node 1" if node == 0 else "trying to join")
    commands[0].wait_for("serving .* on http")
    return Nodes(hosts[0], commands[0], commands[1])


def ask(url: str, host: Host | None = None) -> list[str]:
    """The texts that answer `REQUESTS`, sent all at once."""

    def one(body: dict[str, object]) -> str:
        return str(httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])

    def there(body: dict[str, object]) -> str:
        if host is None:
            return one(body)
        with host.inside():
            return one(body)

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(there, REQUESTS))


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    with serve(*SHAPE) as server:
        yield ask(server.url)


@pytest.mark.parametrize(
    ("layout", "order"),
    [(("-tp", "2", "-pp", "2"), (0, 1)), (("-tp", "4"), (1, 0)), (("-tp", "2", "-pcp", "2"), (0, 1))],
    ids=["stages-across", "tp4-across", "shares-across"],
)
def test_tokens_are_those_of_one_process(
    hosts: tuple[Host, Host], layout: tuple[str, ...], order: tuple[int, int], expected: list[str]
) -> None:
    nodes = serving(hosts, *layout, order=order)
    assert ask(URL, hosts[0]) == expected
    assert "gloo, since the ranks are not all on one host" in nodes.api.text or "-pp" in layout
    processes = nodes.everybody()
    assert len(processes) >= 8
    nodes.api.named("quire-serve").send_signal(signal.SIGTERM)
    assert nodes.api.wait(30) == 0
    assert nodes.other.wait(30) == 0
    assert not psutil.wait_procs(processes, timeout=5)[1]


def test_a_trace_has_the_ranks_of_both_hosts_on_the_clock_of_the_first(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    serving(hosts, "-pp", "2", "--torch-profiler-dir", str(tmp_path))
    with hosts[0].inside(), httpx.Client(base_url=URL, timeout=120) as client:
        client.post("/start_profile").raise_for_status()
        client.post("/v1/completions", json=REQUESTS[0]).raise_for_status()
        path = client.post("/stop_profile").raise_for_status().json()["path"]
    document = json.loads(gzip.decompress(Path(path).read_bytes()))
    core, first, second = document["otherData"]["processes"]
    assert (first["name"], first["error"]) == ("replica 0 · stage 0 · tensor rank 0 (PP0 TP0)", "")
    assert (second["name"], second["error"]) == ("replica 0 · stage 1 · tensor rank 0 (PP1 TP0)", "")
    assert first["clock_error_us"] == core["clock_error_us"] < second["clock_error_us"], "measured between the hosts"
    steps: dict[int, list[tuple[float, float]]] = {}
    for event in sorted(document["traceEvents"], key=lambda event: int(event["pid"])):  # core, stage 0, stage 1
        if event["name"] == "submit" or event["name"].startswith("step "):
            steps.setdefault(event["args"]["step"], []).append((event["ts"], event["ts"] + event["dur"]))
    whole = [spans for spans in steps.values() if len(spans) == 3]
    assert len(whole) >= REQUESTS[0]["max_tokens"]  # type: ignore[operator]
    for submit, first_stage, second_stage in whole:
        assert submit[0] <= min(first_stage[0], second_stage[0]), "the ranks get the plan from the core"
        assert first_stage[0] <= second_stage[1], "the second stage waits for the first"


def kill_node(nodes: Nodes, other: Host) -> None:
    nodes.other.kill_all()


def kill_rank(nodes: Nodes, other: Host) -> None:
    nodes.other.named("quire-rank-3").kill()


def unplug(nodes: Nodes, other: Host) -> None:
    other.set_link(False)


def stop_node(nodes: Nodes, other: Host) -> None:
    nodes.other.named("quire-node-1").send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("problem", "text", "code"),  # a node that is killed is in the next test
    [
        (kill_rank, r"rank 3 was killed by SIGKILL on node 1 \(10.77.0.2\)", 1),
        (unplug, rf"node 1 \(10.77.0.2\) was lost: {LOST}", 1),
        (stop_node, r"node 1 \(10.77.0.2\) has ended: it was stopped", 0),
    ],
)
def test_without_restarts_a_node_that_goes_is_named_and_all_stop(
    hosts: tuple[Host, Host], problem: object, text: str, code: int
) -> None:
    nodes = serving(hosts, "-tp", "2", "-pp", "2", "--no-restart")
    processes = nodes.everybody()
    assert callable(problem)
    with hosts[0].inside(), openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="quire-demo", prompt="Quire", max_tokens=900, extra_body={"ignore_eos": True}, stream=True
        )
        next(stream)
        problem(nodes, hosts[1])
        with pytest.raises(openai.APIError, match=text):
            list(stream)
        health = httpx.get(f"{URL}/health")
        assert health.status_code == 503
        assert "node 1" in health.text
    assert nodes.api.wait(STOPPED_SECONDS) == 1
    assert nodes.other.wait(STOPPED_SECONDS) == code
    assert not psutil.wait_procs(processes, STOPPED_SECONDS)[1]
    nodes.api.wait_for(rf"ERROR .*{text}", 0)
    if problem is unplug:
        nodes.other.wait_for(rf"ERROR .*node 0 \(10.77.0.1\) was lost: {LOST}", 0)
    if problem is kill_rank:
        nodes.other.wait_for(rf"ERROR .*{text}", 0)


def completion(lines: Iterator[str]) -> str:
    """The text of the rest of a stream."""
    events = [line[6:] for line in lines if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def kill_core(nodes: Nodes, other: Host) -> None:
    nodes.api.named("quire-core").kill()


@pytest.mark.parametrize("problem", [kill_node, kill_rank, kill_core])
def test_streams_go_on_when_a_node_is_back(
    hosts: tuple[Host, Host],
    problem: object,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node joins again by itself; one whose process was killed is started again, here by the test."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    nodes = serving(hosts, "-tp", "2", "-pp", "2")
    body = {"prompt": "Quire", "max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
    assert callable(problem)
    with hosts[0].inside(), httpx.Client(base_url=URL, timeout=300) as client:
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            begun = completion(iter([next(lines)]))
            problem(nodes, hosts[1])
            if problem is kill_node:
                nodes.other = start(hosts, 1, "-tp", "2", "-pp", "2")
                nodes.api.wait_for(r"node 1 \(10.77.0.2\) was lost: its connection has closed")
            assert begun + completion(lines) == expected
        until(lambda: client.get("/health").status_code == 200)
    processes = nodes.everybody()
    nodes.api.named("quire-serve").send_signal(signal.SIGTERM)
    assert nodes.api.wait(30) == 0
    assert nodes.other.wait(30) == 0
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("victim", ["everything", "quire-serve"])
def test_without_restarts_all_stop_when_node_0_goes(hosts: tuple[Host, Host], victim: str) -> None:
    nodes = serving(hosts, "-tp", "2", "-pp", "2", "--no-restart")
    processes = nodes.everybody()
    if victim == "everything":
        nodes.api.kill_all()
    else:
        nodes.api.named(victim).kill()
    assert nodes.other.wait(STOPPED_SECONDS) == 1
    assert not psutil.wait_procs(processes, STOPPED_SECONDS)[1]
    reason = {
        "everything": r"(was killed by SIGKILL on )?node 0 \(10.77.0.1\)",  # depending on which was killed first
        "quire-serve": "the server process has ended",
    }[victim]
    nodes.other.wait_for(f"ERROR .*{reason}", 0)


def test_a_rank_that_hangs_is_named_with_its_node(hosts: tuple[Host, Host]) -> None:
    nodes = serving(hosts, "-tp", "2", "-pp", "2", "--no-restart")
    processes = nodes.everybody()
    nodes.other.named("quire-rank-2").suspend()
    with hosts[0].inside():
        health = httpx.get(f"{URL}/health", timeout=60)
    assert health.status_code == 503
    assert "rank 2 did not respond for 10 s (--watchdog-seconds) on node 1 (10.77.0.2)" in health.text
    assert nodes.api.wait(STOPPED_SECONDS) == 1
    assert nodes.other.wait(STOPPED_SECONDS) == 1
    assert not psutil.wait_procs(processes, timeout=5)[1]


def copied(folder: Path, **changes: object) -> Path:
    """The bundled model with another config.json."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_nodes_meet_over_ipv6(hosts: tuple[Host, Host], expected: list[str]) -> None:
    for host in hosts:
        subprocess.run(["ip", "-n", host.name, "address", "delete", f"{host.address}/24", "dev", "eth0"], check=True)
        host.address = host.address6
    nodes = serving(hosts, "-tp", "2", "-pp", "2")
    assert ask(URL, hosts[0]) == expected
    nodes.api.named("quire-serve").send_signal(signal.SIGTERM)
    assert (nodes.api.wait(30), nodes.other.wait(30)) == (0, 0)


def test_a_cut_of_the_network_only_delays_tokens(hosts: tuple[Host, Host], expected: list[str]) -> None:
    nodes = serving(hosts, "-tp", "2", "-pp", "2")
    with ThreadPoolExecutor(1) as pool:
        hosts[1].set_link(False)
        answering = pool.submit(ask, URL, hosts[0])
        threading.Event().wait(CUT_SECONDS)
        assert not answering.done()
        hosts[1].set_link(True)
        assert answering.result(60) == expected
    assert "was lost" not in nodes.api.text + nodes.other.text


def test_two_hosts_that_are_both_the_first_end_at_once(hosts: tuple[Host, Host]) -> None:
    first = start(hosts, 0, "-pp", "2")
    first.wait_for("waiting up to 600 s for node 1")
    command = quire("serve", "--nnodes", "2", "--master-addr", hosts[0].address, "-pp", "2", *SHAPE)
    second = hosts[1].start(*command, QUIRE_CLUSTER_TOKEN=TOKEN)
    assert second.wait(60) == 2
    second.wait_for(r"quire: error: --master-addr 10.77.0.1 is not an address of this host, where the other nodes", 0)
    assert first.process.poll() is None


def test_a_host_needs_the_token_that_the_first_prints(hosts: tuple[Host, Host]) -> None:
    command = ("-pp", "2", "--nnodes", "2", "--master-addr", hosts[0].address, *SHAPE)
    first = hosts[0].start(*quire("serve", *command))
    token = first.wait_for(r"QUIRE_CLUSTER_TOKEN=(\S+) .*--node-rank 1 --headless")[1]
    first.wait_for("waiting up to 600 s for node 1")
    headless = quire("serve", *command, "--node-rank", "1", "--headless")
    without = hosts[1].start(*headless)
    assert without.wait(30) == 2
    without.wait_for("this host needs the --cluster-token of the host at --master-addr 10.77.0.1", 0)
    wrong = hosts[1].start(*headless, QUIRE_CLUSTER_TOKEN=TOKEN)
    assert wrong.wait(60) == 2
    wrong.wait_for("has another --cluster-token than this host", 0)
    first.wait_for("rejected a connection without the right --cluster-token", 0)
    hosts[1].start(*headless, QUIRE_CLUSTER_TOKEN=token)
    first.wait_for("serving .* on http")


@pytest.mark.parametrize("layout", ["nodes", "replicas"])
def test_strangers_change_nothing(hosts: tuple[Host, Host], layout: str, expected: list[str]) -> None:
    """At every port that listens on the network, while requests run."""
    if layout == "nodes":
        nodes = serving(hosts, "-tp", "2", "-pp", "2")
    else:
        common = ("-dp", "2", "--data-parallel-address", hosts[0].address, *SHAPE)
        replica = quire("serve", *common, "-dpr", "1", "--headless")
        other = hosts[1].start(*replica, QUIRE_CLUSTER_TOKEN=TOKEN)
        api = hosts[0].start(*quire("serve", *common, "-dpl", "1"), QUIRE_CLUSTER_TOKEN=TOKEN)
        api.wait_for("serving .* on http")
        nodes = Nodes(hosts[0], api, other)
    ports = [
        (host, int(line.split()[3].rpartition(":")[2]))
        for host in hosts
        for line in subprocess.check_output(["ip", "netns", "exec", host.name, "ss", "-Htln"], text=True).splitlines()
        if "127.0.0." not in line
    ]
    assert len(ports) >= (1 if layout == "nodes" else 3)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(ask, URL, hosts[0])
        for host, port in ports:
            with hosts[1].inside():
                for message in (b"\x01\x00\x02\x00\x07", b"GET /metrics HTTP/1.1\r\n\r\n", bytes(range(256)) * 99):
                    with contextlib.suppress(OSError), socket.create_connection((host.address, port), 5) as stranger:
                        stranger.sendall(message)
                with zmq.Context() as context, context.socket(zmq.PUSH) as client:
                    client.connect(f"tcp://{host.address}:{port}")
                    client.send(b"\xc1", zmq.DONTWAIT)
                    client.setsockopt(zmq.LINGER, 500)
        assert answering.result(120) == expected
    assert "Traceback" not in nodes.api.text + nodes.other.text
    assert ask(URL, hosts[0]) == expected
    nodes.api.wait_for("rejected a connection without the right --cluster-token", 20)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no folder", r"/no/such/folder: no such model folder"),
        ("other bytes", r"node 1 \(10.77.0.2\) has other bytes in config.json, unlike node 0 \(10.77.0.1\)"),
    ],
)
def test_nodes_that_do_not_fit_are_one_line_on_each(
    hosts: tuple[Host, Host], case: str, text: str, tmp_path: Path
) -> None:
    """All that may differ is in tests/unit/engine/executor/test_nodes.py."""
    model = copied(tmp_path / "model", note="another") if case == "other bytes" else Path("/no/such/folder")
    api = start(hosts, 0, "-pp", "2")
    api.wait_for("waiting up to 600 s for node 1 at port 29501")
    other = start(hosts, 1, "-pp", "2", model=model)
    assert other.wait(20) in (1, 2)
    assert api.wait(20) == 2
    for command in (api, other):
        command.wait_for(text, 0)
        assert "Traceback" not in command.text
    api.wait_for(r"quire: error: node 1 \(10.77.0.2\)", 0)


def started(hosts: tuple[Host, Host], layout: str, model: Path = DEMO_MODEL) -> tuple[Command, Command]:
    """Both hosts, where the second has this model."""
    if layout == "nodes":
        return start(hosts, 0, "-pp", "2"), start(hosts, 1, "-pp", "2", model=model)
    common = ("-dp", "2", "--data-parallel-address", hosts[0].address, *SHAPE)
    api = hosts[0].start(*quire("serve", str(DEMO_MODEL), *common, "-dpl", "1"), QUIRE_CLUSTER_TOKEN=TOKEN)
    replica = quire("serve", str(model), *common, "-dpr", "1", "--headless")
    return api, hosts[1].start(*replica, QUIRE_CLUSTER_TOKEN=TOKEN)


@pytest.mark.parametrize(("layout", "port"), [("nodes", 29501), ("replicas", 29550)])
@pytest.mark.parametrize("closed", [0, 1])
def test_a_firewall_between_the_hosts_is_named_before_weights_are_loaded(
    hosts: tuple[Host, Host], layout: str, port: int, closed: int
) -> None:
    """Only the port at which hosts join is open."""
    rule = ("-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", str(port), "-j", "DROP")
    subprocess.run(["ip", "netns", "exec", hosts[closed].name, "iptables", *rule], check=True)
    commands = started(hosts, layout)
    commands[0].wait_for("has joined")
    joined = time.monotonic()
    assert [command.wait(60) for command in commands] == [2, 2]
    assert time.monotonic() - joined < 15
    there, here = hosts[closed].address, hosts[1 - closed].address
    text = (
        rf"port \d+: .*\({here}\) cannot reach it on .*\({there}\): timed out; open it in the firewall of {there} for "
    )
    text += rf"{here}, like all from \d+ to \d+, which the operating system assigns, or use another network \(--"
    for command in commands:
        command.wait_for(f"quire: error: {text}", 0)
        assert "Traceback" not in command.text
        assert "load" not in command.text


@pytest.mark.parametrize("layout", ["nodes", "replicas"])
def test_other_weights_end_all_hosts_before_the_first_answer(
    hosts: tuple[Host, Host], layout: str, tmp_path: Path
) -> None:
    """One byte that no sample covers."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek((1 << 20) + 77)
        byte = file.read(1)[0]
        file.seek((1 << 20) + 77)
        file.write(bytes([byte ^ 1]))
    commands = started(hosts, layout, model)
    assert [command.wait(90) for command in commands] == [2, 2]
    for command in commands:
        command.wait_for(
            r"quire: error: .*\(10.77.0.2\) has other bytes in model.safetensors, unlike .*copy the same", 0
        )
        assert "Traceback" not in command.text
        assert "restarting" not in command.text
        assert "again" not in command.text
    assert "serving" not in commands[0].text


def test_a_node_that_does_not_come_is_named_in_the_time_that_was_stated(hosts: tuple[Host, Host]) -> None:
    api = start(hosts, 0, "-tp", "2", "--distributed-timeout-seconds", "3")
    assert api.wait(30) == 2
    api.wait_for("quire: error: node 1 did not join at port 29501 within 3 s: 0 of 1 joined", 0)
    other = start(hosts, 1, "-tp", "2", "--distributed-timeout-seconds", "3")
    assert other.wait(30) == 2
    other.wait_for(r"quire: error: node 0 \(10.77.0.1\) did not answer at 10.77.0.1:29501 within 3 s; check that", 0)


def test_the_kv_cache_is_that_of_the_smallest_node(hosts: tuple[Host, Host]) -> None:
    api = start(hosts, 0, "-pp", "2")
    api.wait_for("waiting up to")
    other = start(hosts, 1, "-pp", "2", "--kv-cache-memory-bytes", str(8 << 20))
    api.wait_for("serving .* on http")
    api.wait_for(r"the KV cache has \d+ blocks on every node instead of [\d,]+: no more fit on node 1 \(10.77.0.2\)", 0)
    with hosts[0].inside():
        body = {"prompt": "Quire is", "max_tokens": 8, "n": 4}
        assert httpx.post(f"{URL}/v1/completions", json=body, timeout=60).status_code == 200
    assert other.process.poll() is None


@pytest.mark.parametrize("layout", [("-tp", "2"), ("-tp", "2", "-pp", "2")], ids=["tp2", "tp2-pp2"])
def test_ranks_of_both_hosts_use_the_store_of_the_first(hosts: tuple[Host, Host], layout: tuple[str, ...]) -> None:
    """KV comes back after the devices have lost it; a store that is killed, and a node, cost nothing but time."""
    nodes = serving(hosts, *layout, "--kv-offloading-size", "0.1")
    body = {"prompt": list(range(300, 1110)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with hosts[0].inside(), httpx.Client(base_url=URL, timeout=120) as client:

        def answer() -> tuple[str, int]:
            """The text, and how many of the prompt's tokens came from the store; the devices have lost all."""
            assert client.post("/reset_prefix_cache").json() == {"success": True}
            found = client.post("/v1/completions", json=body).raise_for_status().json()
            tiers = found["usage"]["prompt_tokens_details"].get("cached_tokens_details", {"host": 0})
            return found["choices"][0]["text"], tiers["host"]

        def stored() -> str:
            """The text, once the store brings the prompt back."""
            deadline = time.monotonic() + 60
            while (found := answer())[1] < 800:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            return found[0]

        expected, _ = answer()
        assert stored() == expected
        until(lambda: "quire:kv_store_copied_rank_bytes_total{" in client.get("/metrics").text)
        nodes.api.named("quire-kv-store").kill()
        assert answer()[0] == expected
        assert stored() == expected
        nodes.other.kill_all()
        nodes.other = start(hosts, 1, *layout, "--kv-offloading-size", "0.1")
        nodes.api.wait_for("the engine core is up again")
        until(lambda: client.get("/health").status_code == 200)
        assert stored() == expected
    nodes.api.named("quire-serve").send_signal(signal.SIGTERM)
    assert (nodes.api.wait(30), nodes.other.wait(30)) == (0, 0)
