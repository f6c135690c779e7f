"""Pictures: TTFT, questions about a known picture, pictures per second, and text streams beside them.

    quire serve MODEL --port 8000
    .venv/bin/python benchmarks/media.py --port 8000 [--size 1024] [--seconds 20] [--only ttft|rate|itl] [--json]

Measures a server that runs already, by the OpenAI API, so that the same client measures Quire, vLLM and llama.cpp.
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
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from load import Address, Answer, RequestFailed, events, percentile, post
from PIL import Image

Content = str | list[dict[str, Any]]
QUESTIONS = ("What is in the picture?", "Which colours does it have?")
_QUALITY = 90


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
    """99th percentile of the ITL of text streams without pictures, and while another client sends one after another;
    with `tokenizes`, also while it sends them to `/tokenize`, which only decodes and preprocesses them.
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
        found[f"itl_p99_{name}_pictures_ms"] = percentile(gaps, 99) * 1e3
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
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
    options = parser.parse_args()
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
