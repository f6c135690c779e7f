"""`quire profile` of a live server under load: every rank, on one clock, while requests go on."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Server, quire, serve

pytestmark = pytest.mark.slow
KEY = {"Authorization": "Bearer secret"}
REPLICAS, STAGES, TP = 2, 2, 2
BODY = {"prompt": list(range(10, 60)), "max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 3, "n": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    layout = ("-tp", str(TP), "-pp", str(STAGES), "-dp", str(REPLICAS))
    with serve(*layout, "--admin-key", "secret", "--kv-cache-memory-bytes", str(16 << 20)) as server:
        yield server


def ask(client: httpx.Client) -> list[str]:
    choices = client.post("/v1/completions", json=BODY).raise_for_status().json()["choices"]
    return [choice["text"] for choice in choices]


def profile(server: Server, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Record for a second, while two clients ask for the same again and again; all get the same answer."""
    with httpx.Client(base_url=server.url, headers=KEY, timeout=120) as client:
        expected, over = ask(client), threading.Event()

        def keep_asking() -> None:
            while not over.is_set():
                assert ask(client) == expected

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(keep_asking) for _ in range(2)]
            try:
                command = ("profile", "--seconds", "1", "--url", server.url, "--api-key", "secret", "-o", str(path))
                return subprocess.run(quire(*command, *more), capture_output=True, text=True, timeout=300)
            finally:
                over.set()
                for each in asking:
                    each.result()


def test_a_trace_has_every_rank_and_the_loops_on_one_clock(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    result = profile(server, path)
    assert result.returncode == 0, result.stderr
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = {
        f"replica {replica} · stage {stage} · tensor rank {rank} (PP{stage} TP{rank})"
        for replica in range(REPLICAS)
        for stage in range(STAGES)
        for rank in range(TP)
    }
    assert set(names.values()) == ranks | {f"replica {replica} · engine core" for replica in range(REPLICAS)}
    for each in document["otherData"]["processes"]:
        assert (each["error"], each["cut_off"], each["clock_offset_us"]) == ("", False, 0)
    spans: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    ops: dict[str, int] = defaultdict(int)
    for event in events:
        ops[names[event["pid"]]] += event.get("cat") == "cpu_op"
        if "step" in event.get("args", {}) and event["name"] not in ("schedule", "update"):
            spans[names[event["pid"]]][event["args"]["step"]] = event
    for replica in range(REPLICAS):
        core, *own = (spans[name] for name in sorted(spans) if name.startswith(f"replica {replica}"))
        common = set(core).intersection(*own)
        assert len(own) == STAGES * TP
        assert common
        for step in common:
            # The plan is submitted before the ranks have it, and the ranks of a stage run it at the same time.
            of_ranks = [rank[step] for rank in own]
            assert {json.dumps(each["args"]) for each in of_ranks} == {json.dumps(core[step]["args"])}
            assert all(each["ts"] >= core[step]["ts"] for each in of_ranks)
            for at in range(STAGES):
                stage = of_ranks[at * TP : (at + 1) * TP]
                assert max(each["ts"] for each in stage) < min(each["ts"] + each["dur"] for each in stage)
    assert all(ops[rank] for rank in ranks)
    assert not [line for line in server.lines if "USDT" in line], "torch's own lines"


def test_a_rank_that_dies_ends_the_profile_and_the_server_goes_on(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers=KEY, timeout=120) as client:
        expected = ask(client)
        assert client.post("/start_profile", json={"seconds": 30}).status_code == 200
        refused = client.post("/start_profile").json()["error"]
        assert "running already" in refused["message"]
        killed = [each for each in server.family() if each.name() == "quire-rank-1"]
        assert len(killed) == REPLICAS
        for each in killed:
            each.send_signal(signal.SIGKILL)
        stopped = client.post("/stop_profile")
        assert stopped.status_code in (409, 503), stopped.text
        assert ask(client) == expected
        while client.get("/health").status_code != 200:
            pass
        refused = client.post("/stop_profile").json()["error"]
        assert "no profile is running" in refused["message"]
        assert client.post("/start_profile", json={"seconds": 0.01}).status_code == 200
        assert client.post("/stop_profile").status_code == 200
