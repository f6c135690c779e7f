"""Throughput of a real server while one of its replicas hangs, is slow, or is cut off: answers per second, and the
longest time without any.

.venv/bin/python -m benchmarks.replica_in_trouble [--layouts dp2 dp4 hosts] [--clients 16] [--seconds 8]

Clients ask for 32 tokens, again and again. "alone" is the throughput of the other replicas after the last one has been
removed, which is what they can give; of two hosts, that of one replica. A hung core is stopped; a slow one runs for a
tenth of the time. A host is cut off by unplugging its cable, which needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import httpx
import psutil

from quire.engine.config.options import DEMO_MODEL
from tests.chaos.faults import slowed
from tests.e2e.serving import quire, serve
from tests.fakes.namespaces import switched_hosts

PORT = 8000


class Load:
    """Clients in a thread; sockets are opened within `inside`."""

    def __init__(self, url: str, clients: int, inside: Callable[[], AbstractContextManager[None]] = nullcontext):
        self._url, self._num_clients, self._inside = url, clients, inside
        self.answers: list[float] = []
        """The times of answers."""
        self.num_failed = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def measure(self, seconds: float, *, skip: float = 0.0) -> str:
        """Describe the answers from now on, after `skip` seconds of which only the pauses count."""
        begin = time.monotonic()
        time.sleep(skip + seconds)
        end = time.monotonic()
        times = [begin, *(at for at in self.answers if begin <= at < end), end]
        pause = max(later - earlier for earlier, later in itertools.pairwise(times))
        rate = sum(at >= begin + skip for at in times[1:-1]) / (end - begin - skip)
        return f"{rate:5.1f} answers/s, longest time without one {pause:.2f} s, {self.num_failed} failed"

    def _run(self) -> None:
        async def run() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=120, limits=limits) as http, asyncio.TaskGroup() as group:
                for number in range(self._num_clients):
                    group.create_task(self._client(http, number))

        with self._inside():
            asyncio.run(run())

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        for count in itertools.count():
            if self._is_over:
                return
            body = {"prompt": f"Request {count} of client {number}: Quire is", "max_tokens": 32, "ignore_eos": True}
            response = await http.post(f"{self._url}/v1/completions", json=body)
            self.num_failed += response.status_code != 200
            self.answers.append(time.monotonic())


@contextlib.contextmanager
def held(process: psutil.Process) -> Iterator[None]:
    """Stop a process within the block."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the watchdog has killed it
            process.resume()


def on_one_host(replicas: int, clients: int, seconds: float) -> None:
    name = f"-dp {replicas}"
    with (
        serve(str(DEMO_MODEL), "-dp", str(replicas), "--max-num-seqs", "64") as server,
        Load(server.url, clients) as load,
    ):
        load.measure(3)
        print(f"{name}, all well:      {load.measure(seconds)}", flush=True)
        with slowed(server.named(f"quire-core-{replicas - 1}")):
            print(f"{name}, one slow:      {load.measure(seconds, skip=2)}", flush=True)
        load.measure(3)
        with held(server.named(f"quire-core-{replicas - 1}")):
            print(f"{name}, one hangs:     {load.measure(seconds)}", flush=True)
        httpx.post(f"{server.url}/replicas", json={"data_parallel_size": replicas - 1}, timeout=60)
        load.measure(5)
        print(f"{name}, others alone:  {load.measure(seconds)}", flush=True)


def on_two_hosts(clients: int, seconds: float) -> None:
    with switched_hosts(2) as (first, second):
        common = ["serve", str(DEMO_MODEL), "-dp", "2", "-dpl", "1", "--data-parallel-address", first.address]
        token = "a token for benchmarks"
        first.start(*quire(*common, "--host", first.address, "--port", str(PORT)), QUIRE_CLUSTER_TOKEN=token)
        second.start(*quire(*common, "-dpr", "1", "--headless"), QUIRE_CLUSTER_TOKEN=token)
        first.commands[0].wait_for("serving .* on http")
        with Load(f"http://{first.address}:{PORT}", clients, first.inside) as load:
            load.measure(3)
            print(f"two hosts, all well:   {load.measure(seconds)}", flush=True)
            second.set_link(False)
            print(f"two hosts, cable cut:  {load.measure(seconds)}", flush=True)
            second.set_link(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=("dp2", "dp4", "hosts"), default=["dp2", "dp4", "hosts"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measurement")
    options = parser.parse_args()
    for layout in options.layouts:
        if layout == "hosts":
            on_two_hosts(options.clients, options.seconds)
        else:
            on_one_host(int(layout.removeprefix("dp")), options.clients, options.seconds)


if __name__ == "__main__":
    main()
