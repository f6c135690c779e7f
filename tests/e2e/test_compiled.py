"""`quire serve -O1`: it answers while the model is compiled, and the same afterwards, and ends at any time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import psutil
import pytest

from quire.kernels import disk
from tests.e2e.serving import Server, serve

pytestmark = pytest.mark.slow

ARGUMENTS = ("--model-impl", "transformers", "--dtype", "float32", "--max-num-batched-tokens", "16")
PROMPTS = ("The quire is", "Once upon a time there was a small house at the end of the road, and in it", "A")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of compiled things in which there are the CPU's kernels, and no model."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for kernels in disk.folder().iterdir():
        if kernels.name != "models":
            (folder / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(folder))
    return folder


def answers(server: Server) -> list[str]:
    asked = {"prompt": list(PROMPTS), "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "quire-demo", **asked}, timeout=60)
    return [choice["text"] for choice in response.raise_for_status().json()["choices"]]


def told(server: Server, pattern: str) -> bool:
    return re.search(pattern, "".join(server.lines)) is not None


def test_it_answers_alike_before_and_after_and_the_next_start_finds_it(cache: Path) -> None:
    with serve(*ARGUMENTS) as server:
        expected = answers(server)
    with serve(*ARGUMENTS, "-O1") as server:
        assert told(server, r"compiled in the background \(-O1\)")
        assert answers(server) == expected
        assert not told(server, "compiled the model in")
        give_up = time.monotonic() + 240
        while not (told(server, "prompts run") and told(server, "decodes run")):
            assert time.monotonic() < give_up
            assert answers(server) == expected
        assert told(server, r"compiled the model in [\d.]+ s")
        assert answers(server) == expected
    with serve(*ARGUMENTS, "-O1") as server:
        for _ in range(4):
            assert answers(server) == expected
        assert told(server, r"found the compiled model in \d\.\d s")
        assert told(server, "decodes run")
    assert sorted(file.suffix for file in (cache / "models").iterdir()) == ["", ".pt2"]


def test_it_ends_at_once_while_the_model_is_compiled() -> None:
    with serve(*ARGUMENTS, "-O1") as server:
        answers(server)
        family = server.family()
        assert any(process.nice() == 19 for process in family)
        server.process.terminate()
        assert server.process.wait(15) == 0
        assert not psutil.wait_procs(family, timeout=5)[1]


def test_no_compiler_is_left_where_the_server_was_killed() -> None:
    with serve(*ARGUMENTS, "-O1") as server:
        give_up = time.monotonic() + 120
        while not any(process.name() == "cc1plus" for process in server.family()):
            assert time.monotonic() < give_up
            answers(server)
        family = server.family()
        server.named("quire-core").kill()
        assert server.process.wait(30) != 0
        assert not psutil.wait_procs(family, timeout=15)[1]
