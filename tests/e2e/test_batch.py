"""`quire run-batch` with a real engine, killed in the middle; the same with a fake one is in
tests/integration/server/cli/test_run_batch.py."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.serving import quire

COUNT = 60


@pytest.mark.slow
def test_killed_in_the_middle_and_gone_on_with(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for number in range(COUNT):
            body = {"model": "quire-demo", "prompt": f"Quire {number}", "max_tokens": 40, "temperature": 0}
            body |= {"ignore_eos": True}
            request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")
    command = quire("run-batch", "-i", str(source), "-o", str(target), "--max-num-seqs", "4")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not target.exists() or target.read_bytes().count(b"\n") < 8:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    before = target.read_bytes().count(b"\n")
    assert 8 <= before < COUNT
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{COUNT - before} lines processed" in done.stdout
    assert f"{before} had responses already" in done.stdout
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert Counter(record["custom_id"] for record in records) == {f"request-{number}": 1 for number in range(COUNT)}
    for record in records:
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["usage"]["completion_tokens"] == 40
    assert "output tokens" in done.stdout
