"""Failures: one clear line and a non-zero exit, or an error object for every waiting client."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.config.options import DEMO_MODEL
from tests.e2e.serving import quire, serve
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.waiting import until


def refusal(*arguments: str) -> str:
    """Run `quire serve`, which is to end by itself; returns the last line of its stderr."""
    ended = subprocess.run(quire("serve", *arguments), capture_output=True, text=True, timeout=60)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_unsupported_models_are_rejected_in_one_line() -> None:
    """The other refusals, and a port in use, are in tests/integration/server/cli/test_serve.py."""
    message = "quire: error: --tensor-parallel-size 3 does not divide this model's 8 attention heads"
    assert refusal("-tp", "3").startswith(message)


def test_tensors_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    """The weights have 6 layers and config.json says 7: only reading the header of each file shows it."""
    write_checkpoint("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    assert "model.layers.6.input_layernorm.weight is missing" in refusal(str(tmp_path), "-tp", "2", "--port", "0")


ENDLESS = {"model": "quire-demo", "prompt": "Quire", "max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("quire-rank-1", signal.SIGKILL),
        ("quire-core", signal.SIGKILL),
        ("quire-rank-1", signal.SIGSTOP),
        ("quire-core", signal.SIGSTOP),
    ],
)
def test_streams_go_on_when_a_part_of_the_only_engine_dies_or_stops(victim: str, number: signal.Signals) -> None:
    with (
        serve("-tp", "2", "--watchdog-seconds", "3") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        body = ENDLESS | {"max_tokens": 800}  # a busy machine is not to be done with them before the death
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        dead = server.named(victim)
        text = ""
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    if not text:
                        dead.send_signal(number)
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == expected
        died = 'quire:engine_deaths_total{engine="0",model_name="quire-demo"} 1.0'
        until(lambda: died in client.get("/metrics").text)
        until(lambda: client.get("/health").status_code == 200)
        assert not psutil.pid_exists(dead.pid)
        named = "rank 1" if victim == "quire-rank-1" else "the engine core"
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "did not respond for 3 s"
        until(lambda: any(f"{named} {how}" in line for line in server.lines))


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Requests that keep all ranks busy."""
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not ended.is_set():
                assert client.post("/v1/completions", json=ENDLESS | {"n": 4}).status_code == 200

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            ended.set()
    for each in asking:
        each.result()


@contextlib.contextmanager
def throttled(process: psutil.Process) -> Iterator[None]:
    """The process runs for a fifth of the time."""
    ended = threading.Event()

    def throttle() -> None:
        while not ended.wait(0.01):
            process.suspend()
            ended.wait(0.04)
            process.resume()

    with ThreadPoolExecutor(1) as pool:
        throttling = pool.submit(throttle)
        try:
            yield
        finally:
            ended.set()
    throttling.result()


def rank_metrics(url: str) -> dict[tuple[str, str], float]:
    """Values by the name of the metric and the rank."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if "rank" in sample.labels]
    return {(sample.name, sample.labels["rank"]): sample.value for sample in samples}


@pytest.mark.slow
def test_a_rank_that_is_slower_than_the_other_is_named_until_it_has_recovered() -> None:
    with serve("-tp", "2") as server, load(server.url):
        until(lambda: rank_metrics(server.url).get(("quire:rank_busy_seconds_total", "0"), 0) > 20)
        assert not any("is slower" in line for line in server.lines)
        with throttled(server.named("quire-rank-1")):
            until(lambda: any("is slower" in line for line in server.lines))
            until(lambda: rank_metrics(server.url)["quire:straggler", "1"] == 1)
        until(lambda: any("rank 1 is no longer slower" in line for line in server.lines))
        until(lambda: rank_metrics(server.url)["quire:straggler", "1"] == 0)
        slower = [line for line in server.lines if "slower" in line]
        assert len(slower) == 2
        assert "WARNING [core] rank 1 is slower than the other ranks of its stage, which wait for it" in slower[0]
        values = rank_metrics(server.url)
        assert values["quire:straggler", "0"] == 0
        assert values["quire:rank_wait_seconds_total", "1"] < values["quire:rank_wait_seconds_total", "0"]


@contextlib.contextmanager
def stopped_main_thread(process: psutil.Process) -> Iterator[None]:
    """The main thread of a process is stopped wherever it is; its other threads run on, until it is killed."""
    libc, seize, interrupt = ctypes.CDLL(None, use_errno=True), 0x4206, 0x4207  # sys/ptrace.h
    for request in (seize, interrupt):
        if libc.ptrace(request, process.pid, None, None):
            pytest.fail(
                f"a thread cannot be stopped here, and hangs are not tested: ptrace: {os.strerror(ctypes.get_errno())}"
            )
    try:
        yield
    finally:
        process.kill()
        # Until its tracer has waited for it, nobody else learns of its death.
        while os.WIFSTOPPED(os.waitpid(process.pid, 0x40000000)[1]):  # __WALL
            pass


@pytest.mark.slow
def test_a_rank_that_hangs_while_others_wait_for_it_is_named() -> None:
    """Most often it hangs in operations that are replayed without Python, so that no stack shows the waiting rank: the
    parts are in tests/integration/engine/distributed/test_cpu_communicator.py and tests/unit/engine/executor."""
    with (
        serve("-tp", "2", "--no-restart", "--watchdog-seconds", "3") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(6):  # until the duration of steps is known
            answer = httpx.post(f"{server.url}/v1/completions", json=ENDLESS | {"max_tokens": 40}, timeout=120)
            assert answer.status_code == 200
        stream = client.completions.create(
            model="quire-demo", prompt="Quire", max_tokens=1900, extra_body={"ignore_eos": True}, stream=True
        )
        next(stream)
        with stopped_main_thread(server.named("quire-rank-1")), pytest.raises(openai.APIError, match="rank 1 did not"):
            list(stream)
        assert server.process.wait(30) == 1


def test_without_restarts_a_rank_that_dies_is_named_to_every_client() -> None:
    with serve("-tp", "2", "--no-restart") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="quire-demo", prompt="Quire", max_tokens=1900, extra_body={"ignore_eos": True}, stream=True
            )
            next(stream)
            server.named("quire-rank-1").kill()
            with pytest.raises(openai.APIError, match="rank 1 was killed by SIGKILL"):
                list(stream)
        assert server.process.wait(30) == 1


@pytest.mark.parametrize(("victim", "named"), [("quire-rank-0", "rank 0"), ("quire-core", "the engine core")])
def test_a_death_while_idle_is_noticed(victim: str, named: str) -> None:
    with serve("-tp", "2", "--no-restart") as server:
        family = server.family()
        assert httpx.post(f"{server.url}/log_level", json={"level": "debug"}).status_code == 200
        for rank in range(2):
            until(lambda text=f"DEBUG [rank {rank}] ": any(text in line for line in server.lines))  # type: ignore[misc]
        server.named(victim).kill()
        assert server.process.wait(30) == 1
        assert any(f"{named} was killed by SIGKILL" in line for line in server.lines)
        assert not psutil.wait_procs(family, timeout=30)[1]


def named_shared_memory(family: list[psutil.Process]) -> set[str]:
    """Files in shared memory that processes have open or mapped under a name. (Other programs have some there, too.)"""
    found = set[str]()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found |= {each.path for each in process.memory_maps()} | {each.path for each in process.open_files()}
    return {path for path in found if path.startswith("/dev/shm/") and Path(path).exists()}


def test_a_killed_server_leaves_nothing_and_imports_nothing_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its last process removes its folder. After SIGTERM: tests/integration/server/cli/test_serve.py."""
    folder, current = tmp_path_factory.mktemp("t"), tmp_path_factory.mktemp("current")
    for name in ("numpy", "torch", "msgspec"):
        (current / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.setenv("TMPDIR", str(folder))
    with serve("-tp", "2", cwd=current) as server:
        family = server.family()
        assert len(family) >= 4
        assert len(list(folder.iterdir())) == 1
        assert not named_shared_memory(family)
        server.process.kill()
        assert server.process.wait(30) == -signal.SIGKILL
        assert not psutil.wait_procs(family, timeout=30)[1]
        until(lambda: not list(folder.iterdir()))
