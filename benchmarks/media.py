"""Pictures: TTFT, questions about a known picture, pictures per second, and text streams beside them.

    .venv/bin/python benchmarks/media.py --peer vllm=/opt/vllm/venv --peer llama.cpp=/opt/llama.cpp
    quire serve MODEL --port 8000
    .venv/bin/python benchmarks/media.py --port 8000 [--size 1024] [--seconds 20] [--only ttft|rate|itl] [--json]

The first form starts Quire, vLLM and llama.cpp one after another with a random-weight checkpoint in bfloat16, measures
each, and prints a table. With `--port` a server that runs already is measured, by the OpenAI API.

Every picture is new, and a JPEG, unless a figure is about a known one. A text of as many tokens as a picture's prompt
is the yardstick: its first question is new, too, and its second one finds its prompt in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
from load import Address, Answer, RequestFailed, events, percentile, post
from machine import provenance
from media_checkpoint import MEDIA_SHAPES, make_media_checkpoint
from PIL import Image

Content = str | list[dict[str, Any]]
QUESTIONS = ("What is in the picture?", "Which colours does it have?")
_QUALITY = 90
_SERVERS: tuple[type[peers.Peer], ...] = (peers.Quire, peers.Vllm, peers.LlamaCpp)
_COLUMNS = {
    "ttft_picture_ms": "TTFT of a new picture, ms",
    "ttft_picture_again_ms": "second question, ms",
    "ttft_text_ms": "TTFT of a text, ms",
    "ttft_text_again_ms": "second question, ms",
    "again_ratio": "picture / text, second question",
    "pictures_per_s": "pictures/s",
    "itl_p99_without_pictures_ms": "p99 of ITL, ms",
    "itl_p99_with_pictures_ms": "beside pictures, ms",
    "itl_max_with_pictures_ms": "longest gap, ms",
}


@dataclass
class Client:
    """Sends chats to one server."""

    address: Address
    model: str
    size: int
    """Pixels of each side of the pictures."""
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(time.time_ns() % 2**32))

    def picture(self) -> dict[str, Any]:
        """A part of a message with a new picture: soft shapes, as photos have them, with some noise."""
        rng = np.random.default_rng(next(self.seeds))
        shapes = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((self.size, self.size))
        pixels = np.asarray(shapes) + rng.normal(0, 6, (self.size, self.size, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{_base64(file.getvalue())}"}}

    async def ask(self, content: Content, max_tokens: int = 2) -> tuple[Answer, int]:
        """Send a chat of one message; returns its answer, and the tokens of the prompt."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        answer, num_prompt_tokens = Answer(time.perf_counter()), 0
        async for event in events(self.address, body):
            for choice in event.get("choices") or ():
                # A token that ends within a character may come without text, at the latest with the end.
                if choice.get("delta", {}).get("content") or (choice.get("finish_reason") and not answer.times):
                    answer.times.append(time.perf_counter())
            if usage := event.get("usage"):
                answer.tokens, num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        if not answer.times:
            raise RequestFailed("no output came")
        return answer, num_prompt_tokens

    def text(self, num_words: int) -> str:
        """A new text."""
        rng = random.Random(next(self.seeds))
        words = ("stone", "river", "green", "house", "walks", "seven", "under", "light", "paper", "often")
        return " ".join(rng.choice(words) for _ in range(num_words))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def first_tokens(client: Client, repeats: int) -> dict[str, float]:
    """Medians of TTFT: of a new picture, of the second question about it, and of a text of as many tokens."""
    _, tokens = await client.ask([client.picture(), _text(QUESTIONS[0])])
    _, short = await client.ask(client.text(20))
    _, long = await client.ask(client.text(60))
    num_words = max(1, round(20 + (tokens - short) * 40 / (long - short)))
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        picture, text = client.picture(), client.text(num_words)
        contents: dict[str, Content] = {
            "picture": [picture, _text(QUESTIONS[0])],
            "picture_again": [picture, _text(QUESTIONS[1])],
            "text": f"{text} {QUESTIONS[0]}",
            "text_again": f"{text} {QUESTIONS[1]}",
        }
        for name, content in contents.items():
            answer, _ = await client.ask(content)
            found.setdefault(name, []).append(answer.ttft)
    medians = {f"ttft_{name}_ms": statistics.median(each) * 1e3 for name, each in found.items()}
    return {
        "prompt_tokens": tokens,
        **medians,
        "again_ratio": medians["ttft_picture_again_ms"] / medians["ttft_text_again_ms"],
    }


async def per_second(client: Client, num_clients: int, seconds: float) -> dict[str, float]:
    """New pictures per second that are answered with one token, by clients that each wait for their answer."""
    end = time.perf_counter() + seconds
    times: list[float] = []

    async def one() -> None:
        while time.perf_counter() < end:
            picture = await asyncio.to_thread(client.picture)
            await client.ask([picture, _text(QUESTIONS[0])], max_tokens=1)
            times.append(time.perf_counter())

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(num_clients)))
    return {"pictures_per_s": len(times) / (max(times) - begun)}


async def beside_text(client: Client, num_streams: int, seconds: float, *, tokenizes: bool = False) -> dict[str, float]:
    """Median, 99th percentile and maximum of the ITL of text streams without pictures, and while another client sends
    one after another; with `tokenizes`, also while it sends them to `/tokenize`, which only decodes and preprocesses
    them. A server that encodes a picture in one step stops all streams once: only the maximum shows that.
    """
    gaps: list[float] = []
    stopping = asyncio.Event()

    async def stream() -> None:
        while not stopping.is_set():
            answer, _ = await client.ask(client.text(40), max_tokens=128)
            gaps.extend(answer.gaps)

    async def pictures(name: str) -> int:
        count = 0
        while not stopping.is_set():
            content = [await asyncio.to_thread(client.picture), _text(QUESTIONS[0])]
            if name == "with":
                await client.ask(content, max_tokens=1)
            else:
                body = {"model": client.model, "messages": [{"role": "user", "content": content}]}
                await post(replace(client.address, path="/tokenize"), body)
            count += 1
        return count

    found: dict[str, float] = {}
    for name in ("without", *(["with_preprocessed"] if tokenizes else []), "with"):
        gaps.clear()
        stopping.clear()
        streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
        sent = None if name == "without" else asyncio.create_task(pictures(name))
        await asyncio.sleep(seconds)
        stopping.set()
        await asyncio.gather(*streams)
        for each, percent in (("p50", 50), ("p99", 99), ("max", 100)):
            found[f"itl_{each}_{name}_pictures_ms"] = percentile(gaps, percent) * 1e3
        if sent is not None:
            found[f"pictures_beside_text{name.removeprefix('with')}"] = await sent
    ratio = found["itl_p99_with_pictures_ms"] / found["itl_p99_without_pictures_ms"]
    return {**found, "itl_p99_ratio": ratio}


async def measure(client: Client, options: argparse.Namespace) -> dict[str, float]:
    await client.ask([client.picture(), _text(QUESTIONS[0])])  # warm-up
    measures: dict[str, Callable[[], Coroutine[Any, Any, dict[str, float]]]] = {
        "ttft": lambda: first_tokens(client, options.repeats),
        "rate": lambda: per_second(client, options.clients, options.seconds),
        "itl": lambda: beside_text(client, options.streams, options.seconds, tokenizes=options.tokenize),
    }
    found: dict[str, float] = {}
    for name, run in measures.items():
        if options.only in (None, name):
            found |= await run()
    return found


async def compare(options: argparse.Namespace, peer: type[peers.Peer], given: Path | None) -> dict[str, Any]:
    """Start a server, measure it and stop it; returns its figures, command and version."""
    # If this process is terminated, stop the server, too.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    found = peers.find(peer, given)
    if found is None:
        return {"failure": f"not installed: {peer.remedy}"}
    model, arguments = make_media_checkpoint(options.shape, options.cache), list[str]()
    if isinstance(found, peers.LlamaCpp):
        source, model = model, options.cache / options.shape / "bf16.gguf"
        projector = model.with_name("mmproj-bf16.gguf")
        if not model.exists():
            found.convert(source, "bf16", model)
        if not projector.exists():
            found.convert(source, "bf16", projector, "--mmproj")
        slots, tokens = str(options.clients), str(options.clients * peers.MAX_TOKENS)
        arguments = ["--mmproj", str(projector), "-np", slots, "-c", tokens]
    elif isinstance(found, peers.Vllm):  # it would encode the largest picture, of 16 times the patches, as a test
        arguments = ["--skip-mm-profiling", "--limit-mm-per-prompt", '{"image": 1, "video": 0}']
    log = options.cache / f"{found.name}.log"
    server = peers.Server(found, "16-bit", model, options.threads, log, arguments)
    about = {"version": found.version(), "command": server.command}
    try:
        await server.start("a text", "a text", options.start_limit)  # llama.cpp refuses ids beside a projector
        client = Client(replace(server.address, path="/v1/chat/completions"), str(model), options.size)
        return about | await measure(client, options)
    except (RequestFailed, RuntimeError, OSError) as failure:
        return about | {"failure": str(failure).splitlines()[0]}
    finally:
        server.stop()


def document(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> str:
    """The table of all servers, and how it was made."""
    lines = ["| server | " + " | ".join(_COLUMNS.values()) + " |", "|---|" + "---:|" * len(_COLUMNS)]
    for name, found in results.items():
        cells = [f"{found[each]:.{0 if each.endswith('ms') else 2}f}" if each in found else "" for each in _COLUMNS]
        lines.append(f"| {name} {found.get('version', '')} | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {found['failure']}" for name, found in results.items() if "failure" in found)]
    lines += ["", *(f"- {name}: `{found['command']}`" for name, found in results.items() if "command" in found)]
    return "\n".join([*lines, "", *provenance()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="of a server that runs; without it, servers are started and compared")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", help="name of the model (default: the first one that the server lists)")
    parser.add_argument("--size", type=int, default=1024, help="pixels of each side of the pictures")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each load")
    parser.add_argument("--tokenize", action="store_true", help="also measure beside preprocessing alone")
    parser.add_argument("--only", choices=("ttft", "rate", "itl"), help="a part of the figures")
    parser.add_argument("--json", action="store_true")
    of_servers = parser.add_argument_group("servers that are started")
    of_servers.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PATH", help="where a peer is installed"
    )
    of_servers.add_argument("--servers", nargs="+", choices=[peer.name for peer in _SERVERS], help="default: all")
    of_servers.add_argument("--shape", choices=MEDIA_SHAPES, default="qwen3-vl-2b")
    of_servers.add_argument("--threads", type=int, default=2, help="of every server")
    of_servers.add_argument("--start-limit", type=float, default=420, metavar="SECONDS")
    of_servers.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quire-compare")
    of_servers.add_argument("--write", type=Path, metavar="FILE.md", help="write the table to this file, too")
    options = parser.parse_args()
    if options.port is None:
        options.cache = options.cache.absolute()
        options.cache.mkdir(parents=True, exist_ok=True)
        places = {name: Path(path).absolute() for name, _, path in (pair.partition("=") for pair in options.peer)}
        compared: dict[str, dict[str, Any]] = {}
        for peer in _SERVERS:
            if options.servers is None or peer.name in options.servers:
                compared[peer.name] = asyncio.run(compare(options, peer, places.get(peer.name)))
                print(peer.name, json.dumps(compared[peer.name], indent=1), file=sys.stderr, flush=True)
                if options.write:  # keep the figures of an interrupted run
                    options.write.write_text(document(options, compared))
        print(document(options, compared))
        return
    model = options.model
    if model is None:
        with urllib.request.urlopen(f"http://{options.host}:{options.port}/v1/models") as listed:
            model = json.load(listed)["data"][0]["id"]
    client = Client(Address(options.port, "/v1/chat/completions", options.host), model, options.size)
    results = asyncio.run(measure(client, options))
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    for name, value in results.items():
        print(f"{name:28}{value:12.2f}")


if __name__ == "__main__":
    main()
