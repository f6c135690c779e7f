"""`quire bench` against a real server and a real engine, of the demo model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import quire, serve


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    with serve() as server:
        load = ["--num-prompts", "12", "--random-input-len", "40", "--random-output-len", "8", "--max-concurrency", "4"]
        for backend, num_input in (("openai", 40), ("openai-chat", None)):
            command = ["bench", "serve", "--base-url", server.url, "--backend", backend, "--save-detailed", *load]
            done = subprocess.run(
                quire(*command, "--result-dir", str(tmp_path), "--result-filename", backend),
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "12/12" in done.stderr
            result = json.loads((tmp_path / backend).read_text())
            assert result["completed"] == 12
            assert result["output_lens"] == [8] * 12
            assert result["max_concurrent_requests"] <= 4
            if num_input is None:
                assert all(abs(length - 40) <= 12 for length in result["input_lens"]), result["input_lens"]
            else:
                assert result["input_lens"] == [num_input] * 12


@pytest.mark.slow
def test_throughput_and_startup(tmp_path: Path) -> None:
    command = ["bench", "throughput", "--num-prompts", "4", "--input-len", "40", "--output-len", "8"]
    done = subprocess.run(quire(*command), capture_output=True, text=True, timeout=120)
    assert "4 requests, 160 tokens in, 32 out" in done.stdout, done.stderr
    file = tmp_path / "startup.json"
    command = ["bench", "startup", "--num-iters", "1", "--num-iters-warmup", "0", "--output-json", str(file)]
    done = subprocess.run(quire(*command), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    phases = json.loads(file.read_text())["phases"]
    assert phases.keys() >= {"imports", "load weights", "engine in all", "ready", "first token"}
