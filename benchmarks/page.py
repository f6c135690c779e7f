"""The cost of the page at `/`: tokens per second while a browser has its dashboard open, and while none does.

.venv/bin/python benchmarks/page.py

A server with two stages of two ranks answers 16 streams all the time. Phases in which the dashboard's requests are made
as often as a browser makes them take turns with phases without. The processor time of each of these requests is
measured in the API process over 200 in a row, less that of an idle phase of the same length; that of a full hour of
history, which the page loads once, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator

import httpx
import machine
from serving import Server, serving

from quire.engine.protocol.stats import EngineStats
from quire.server.client.history import INTERVAL, History
from quire.server.client.metrics import Metrics
from quire.server.http.errors import encode_json

_STREAMS = 16
_POLLS = {"/ui/state": 1.0, "/ui/history": 2.0, "/ui/requests": 2.0}
"""What a browser asks for while the dashboard is visible, and the seconds between two requests."""
_HOUR = 3600
_LAYOUT = ("-tp", "2", "-pp", "2", "--kv-cache-memory-bytes", str(32 << 20))


async def keep_asking(client: httpx.AsyncClient, seed: int) -> None:
    """Send requests of random lengths, one after the other."""
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 200))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(20, 100), "ignore_eos": True}
        (await client.post("/v1/completions", json=body)).raise_for_status()


async def ask(client: httpx.AsyncClient, path: str) -> None:
    """Make a request of the dashboard: of the history, what is new."""
    newest = {"after": time.time() - INTERVAL} if path == "/ui/history" else {}
    (await client.get(path, params=newest)).raise_for_status()


async def poll(client: httpx.AsyncClient, path: str, seconds: float) -> None:
    while True:
        await ask(client, path)
        await asyncio.sleep(seconds)


def whole_hour(runs: int = 20) -> tuple[float, int]:
    """The processor seconds of reading and encoding a full hour of history, and its bytes."""
    rng, metrics = random.Random(0), Metrics("m")
    history = History(metrics)
    metrics.state(0, "up")
    for second in range(_HOUR + 1):
        running = rng.randrange(_STREAMS + 1)
        stats = EngineStats(
            running=running,
            kv_blocks=1000,
            kv_blocks_used=10 * running,
            steps=second,
            generated_tokens=100 * second + running,
            prompt_tokens=50 * second + running,
        )
        metrics.take(0, stats)
        metrics.finished(0, "stop", rng.uniform(0.5, 5))
        metrics.observe(0, "time_to_first_token_seconds", rng.uniform(0.05, 0.5))
        metrics.observe(0, "inter_token_latency_seconds", rng.uniform(0.005, 0.05), running)
        history.sample(float(_HOUR + second), float(second))
    now = 2.0 * _HOUR
    begun = time.process_time()
    for _ in range(runs):
        body = encode_json({"interval": INTERVAL, "time": now, "columns": history.after(0.0, now)})
    return (time.process_time() - begun) / runs, len(body)


@contextlib.asynccontextmanager
async def background(*work: asyncio.Task[None]) -> AsyncIterator[None]:
    """Run tasks meanwhile."""
    try:
        yield
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def generated(client: httpx.AsyncClient) -> tuple[float, float]:
    """Tokens generated since the start, and the time."""
    state = (await client.get("/ui/state")).json()
    return sum(replica["generated_tokens"] for replica in state["replicas"]), time.perf_counter()


async def rate(client: httpx.AsyncClient, seconds: float) -> float:
    """Tokens per second."""
    before, begun = await generated(client)
    await asyncio.sleep(seconds)
    after, ended = await generated(client)
    return (after - before) / (ended - begun)


async def measure(server: Server, rounds: int, seconds: float) -> tuple[dict[str, float], list[float]]:
    """The processor seconds of each request, and for each round the ratio of tokens per second with the page open and
    without."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300, limits=limits) as client:
        costs = {}
        for path in _POLLS:
            used, begun = [sum(server.api_process.cpu_times()[:2])], time.perf_counter()
            for _ in range(200):
                await ask(client, path)
            used.append(sum(server.api_process.cpu_times()[:2]))
            await asyncio.sleep(time.perf_counter() - begun)
            used.append(sum(server.api_process.cpu_times()[:2]))
            costs[path] = (2 * used[1] - used[0] - used[2]) / 200  # less what it uses anyway
        ratios = []
        async with background(*(asyncio.create_task(keep_asking(client, seed)) for seed in range(_STREAMS))):
            await rate(client, seconds)
            for turn in range(rounds):
                found = {}
                for is_open in (turn % 2 == 0, turn % 2 == 1):
                    polls = [asyncio.create_task(poll(client, *each)) for each in _POLLS.items() if is_open]
                    async with background(*polls):
                        found[is_open] = await rate(client, seconds)
                ratios.append(found[True] / found[False])
                print(
                    f"{found[False]:.0f} tokens/s, with the page open {found[True]:.0f}: {ratios[-1]:.3f}", flush=True
                )
    return costs, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10, help="of a phase (default: 10)")
    arguments = parser.parse_args()
    print(machine.cpu_name())
    with serving(*_LAYOUT) as server:
        costs, ratios = asyncio.run(measure(server, arguments.rounds, arguments.seconds))
    for path, cost in costs.items():
        print(f"{path} takes {cost * 1e3:.2f} ms of a processor, every {_POLLS[path]:.0f} s")
    print(f"all of them: {sum(cost / _POLLS[path] for path, cost in costs.items()) * 1e3:.2f} ms each second")
    cost, size = whole_hour()
    print(f"a full hour of history takes {cost * 1e3:.1f} ms once, for {size / 1e3:.0f} kB")
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"tokens per second with the page open / without: median {median:.3f}, {least:.3f} to {most:.3f}")


if __name__ == "__main__":
    main()
