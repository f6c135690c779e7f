"""`quire serve` as a user starts it: time to the first token with cold and warm page cache, then many streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load
import torch

from gpu import checkpoint
from gpu.lab import Lab
from gpu.records import Note, Record, Row

_ROOM = 1.2
"""Required free space relative to the size of the checkpoint."""
_COMMAND = "import sys; from quire.server.cli.main import main; sys.exit(main())"


class Server:
    """A `quire serve` and the processes that it starts."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = load.Address(port)
        self.model = options["model"]
        flags = {name: value for name, value in options.items() if name != "model"}
        words = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._log = log
        self._begun = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, "serve", self.model, *words, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def first_token(self, prompt: list[int], limit: float) -> float:
        """Seconds from the command to the first token; raises `RuntimeError` with the end of the log."""
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - self._begun > limit:
                raise RuntimeError(f"the server did not start; the end of its log:\n{self.tail()}")
            time.sleep(0.02)
        answer = asyncio.run(load.complete(self.address, self.body(prompt, 1)))
        return answer.times[0] - self._begun

    def body(self, prompt: list[int], output: int) -> dict[str, Any]:
        """A request for exactly `output` tokens."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
        return asked | {"stream_options": {"include_usage": True}}

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]

    def resident(self) -> float:
        """GiB of the process tree, counting shared pages once (proc(5), smaps_rollup)."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 2**20

    def _tree(self) -> list[int]:
        found = [self._process.pid]
        for process in found:
            with contextlib.suppress(OSError):
                for children in Path(f"/proc/{process}/task").glob("*/children"):
                    found += map(int, children.read_text().split())
        return found

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.address.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        """Terminate the process tree and wait."""
        tree = self._tree()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        for process in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait(5)


def measure(lab: Lab) -> Iterator[Record]:
    """A checkpoint if there is room for one, else dummy weights, with which startup is not measured."""
    size = checkpoint.weight_bytes(lab.shape, lab.number_bytes)
    disk = lab.scratch if lab.tiny else checkpoint.fastest_disk(int(_ROOM * size))
    if disk is None:
        yield Note(f"no local disk has {_ROOM * size / 1e9:.0f} GB free: startup is not measured")
        yield from _serve(lab, lab.engine_options(lab.model_folder()), is_stored=False)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=disk) as name:
        folder = Path(name)
        shutil.copytree(lab.model_folder(), folder, dirs_exist_ok=True)
        begun = time.perf_counter()
        written = checkpoint.write_weights(lab.shape, folder, getattr(torch, lab.dtype), lab.device)
        yield Note(f"checkpoint of {written / 1e9:.2f} GB written to {disk} in {time.perf_counter() - begun:.1f} s")
        if lab.device == "cuda":
            torch.cuda.empty_cache()
        yield from _serve(lab, lab.engine_options(folder, "safetensors"), is_stored=True)


def _serve(lab: Lab, options: dict[str, Any], *, is_stored: bool) -> Iterator[Record]:
    """Start twice, cold and warm, and put load on the second server; start once without a checkpoint."""
    server = None
    log = lab.scratch / "serve.log"
    try:
        for key in ("cold start", "warm start") if is_stored else ("start",):
            if server is not None:
                server.stop()
            if key == "cold start":
                checkpoint.forget(Path(options["model"]).glob("*.safetensors"))
            server = Server(options, log)
            seconds = server.first_token(lab.prompts(1, 16)[0], lab.seconds_left)
            if is_stored:
                yield Row(key, seconds, None, "from the command to the first token over HTTP")
        assert server is not None
        yield from _load(lab, server)
        yield Note(
            f"memory of the whole server: {server.resident():.2f} GiB of the host's, shared pages once{_device(lab)}"
        )
    finally:
        if server is not None:
            server.stop()


def _device(lab: Lab) -> str:
    if lab.device != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info()
    return f", {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of the device's"


def _load(lab: Lab, server: Server) -> Iterator[Record]:
    """The offline workload in streams, each of which sends its next request when the previous one is finished."""
    count, prompt, output = lab.sizes.offline
    chosen = lab.data.get("requests", count)
    streams = lab.sizes.streams
    asyncio.run(_streams(server, lab.prompts(streams, prompt, seed=4), 8, streams))
    offline = lab.values.get("offline")
    expected = chosen * output / offline if offline else 0.0
    if expected > 0.8 * lab.seconds_left:
        fitting = int(0.8 * lab.seconds_left * (offline or 0.0) / output)
        chosen = max(streams, fitting // streams * streams)
    answers = asyncio.run(_streams(server, lab.prompts(chosen, prompt, seed=5), output, streams))
    load.check_lengths(answers, output)
    figures = load.figures(answers)
    formula = f"{chosen} requests of {prompt} in, {output} out; TTFT {figures.ttft * 1e3:.0f} ms, "
    formula += f"ITL {figures.itl * 1e3:.1f} ms, its p99 {figures.itl_p99 * 1e3:.0f} ms; floor: the offline figure"
    yield Row("server", figures.throughput, offline, formula)


async def _streams(server: Server, prompts: list[list[int]], output: int, streams: int) -> list[load.Answer]:
    async def stream(number: int) -> list[load.Answer]:
        return [await load.complete(server.address, server.body(prompt, output)) for prompt in prompts[number::streams]]

    return [answer for answers in await asyncio.gather(*map(stream, range(streams))) for answer in answers]
