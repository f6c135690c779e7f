"""The cost of the page at `/`: tokens per second while a browser polls it, and while none does.

.venv/bin/python benchmarks/page.py [--picture docs/pictures/page.png]

A server with two stages of two ranks answers 16 streams all the time. Phases with a poll of `/ui/state` each second
take turns with phases without. The processor time of a poll is measured in the API process over 200 polls in a row,
while it does nothing else. `--picture` takes a picture of the page under this load, with Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import machine
from serving import Server, serving

_STREAMS = 16
_LAYOUT = ("-tp", "2", "-pp", "2", "--kv-cache-memory-bytes", str(32 << 20))


async def keep_asking(client: httpx.AsyncClient, seed: int) -> None:
    """Send requests of random lengths, one after the other."""
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 200))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(20, 100), "ignore_eos": True}
        (await client.post("/v1/completions", json=body)).raise_for_status()


async def poll(client: httpx.AsyncClient) -> None:
    while True:
        (await client.get("/ui/state")).raise_for_status()
        await asyncio.sleep(1)


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


async def measure(server: Server, rounds: int, seconds: float) -> tuple[float, list[float]]:
    """The processor seconds of a poll, and for each round the ratio of tokens per second with polls and without."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300, limits=limits) as client:
        before = sum(server.api_process.cpu_times()[:2])
        for _ in range(200):
            (await client.get("/ui/state")).raise_for_status()
        cost = (sum(server.api_process.cpu_times()[:2]) - before) / 200
        ratios = []
        async with background(*(asyncio.create_task(keep_asking(client, seed)) for seed in range(_STREAMS))):
            await rate(client, seconds)
            for turn in range(rounds):
                found = {}
                for is_open in (turn % 2 == 0, turn % 2 == 1):
                    polls = [asyncio.create_task(poll(client))] * is_open
                    async with background(*polls):
                        found[is_open] = await rate(client, seconds)
                ratios.append(found[True] / found[False])
                print(
                    f"{found[False]:.0f} tokens/s, with the page open {found[True]:.0f}: {ratios[-1]:.3f}", flush=True
                )
    return cost, ratios


async def picture(server: Server, target: Path) -> None:
    from playwright.async_api import async_playwright, expect

    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=300) as client, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1100, "height": 900})
        async with background(*(asyncio.create_task(keep_asking(client, seed)) for seed in range(_STREAMS))):
            await page.goto(url)
            await page.wait_for_timeout(90_000)
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#speed")).to_contain_text("tokens in", timeout=60_000)
            await page.screenshot(path=target, full_page=True)
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10, help="of a phase (default: 10)")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    print(machine.cpu_name())
    with serving(*_LAYOUT) as server:
        if arguments.picture is not None:
            asyncio.run(picture(server, arguments.picture))
            return
        cost, ratios = asyncio.run(measure(server, arguments.rounds, arguments.seconds))
    print(f"a poll takes {cost * 1e3:.2f} ms of a processor: {cost:.2%} of a core while a page is open")
    print(f"tokens per second with the page open / without: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
