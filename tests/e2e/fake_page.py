"""The page's server without an engine: its real files, and made-up numbers of an afternoon's load.

`python -m tests.e2e.fake_page docs/pictures/page.png` takes the picture of docs/guides/monitoring.md.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI
from playwright.sync_api import Browser, Page, Route, sync_playwright
from starlette.testclient import TestClient

from quire.server.client.http_metrics import REASONS
from quire.server.http.page import routes

ADDRESS = "http://quire.test"
_INTERVAL, _HOUR = 2, 3600
_PLAN = """LlamaForCausalLM from meta-llama/Llama-3.1-70B-Instruct
bfloat16, tensor parallel 2 × pipeline parallel 2 = 4 ranks, data parallel 2
  stage 0 (ranks 0-1): layers 0-39, per rank weights 33.5 GiB, KV cache 35.1 GiB in 28,753 blocks of 16 tokens
  stage 1 (ranks 2-3): layers 40-79, per rank weights 33.5 GiB, KV cache 35.1 GiB in 28,753 blocks of 16 tokens
KV cache holds 460,048 tokens: 3.5 requests at the full length of 131,072; at most 256 run at once"""


@dataclass
class FakeServer:
    """What a server with these properties would answer. The numbers depend only on the time."""

    num_replicas: int = 2
    gpus: bool = False
    peak: int = 90
    """The most requests that run at once."""
    idle: bool = False
    """Nothing has been asked yet."""
    dead: int | None = None
    """The replica that has died, and is expected back."""
    gone: bool = False
    """A proxy answers that it is not there."""
    key: str | None = None
    """Its API key."""
    can_abort: bool = True
    has_admin_key: bool = False
    sees_requests: bool = True
    prefix: str = ""
    """The path below which a reverse proxy has it."""
    started: float = field(default_factory=lambda: time.time() - 3 * _HOUR)
    plan: str = _PLAN
    kv_stores: list[dict[str, Any]] = field(default_factory=list)
    num_requests: int = 14
    alike: bool = False
    """The first two sequences are of the same request, and the next two requests have the same id."""
    adapters: list[str] | None = None
    """Names of adapters. None: the server takes none."""
    drafts: float | None = None
    """The share of drafts that are accepted."""
    loading: float = 0
    """Seconds after its start until its replicas are up."""
    failures: dict[str, float] | None = None
    """The requests that fail, per second, instead of those of the afternoon."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Method and path of the requests for data."""
    strangers: list[str] = field(default_factory=list)
    """Addresses of other servers that the page has asked."""
    ended: set[str] = field(default_factory=set)
    """Handles of the requests that are no longer there."""
    held_paths: set[str] = field(default_factory=set)
    """Answers of these paths are kept until `release`."""
    held: list[tuple[Route, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        app = FastAPI()
        routes.add_page(app)
        self._files = TestClient(app)

    def attach(self, page: Page) -> None:
        """Answer all requests of the page."""
        page.route("**/*", self._answer)

    def release(self) -> None:
        """Send the answers that were kept, as they were when they were asked for, and keep no more."""
        self.held_paths.clear()
        while self.held:
            _send(*self.held.pop(0))

    def state(self) -> dict[str, Any]:
        """`/ui/state`."""
        now = time.time()
        replicas = [self._replica(index, now) for index in range(self.num_replicas)]
        return {
            "model": "llama-3.1-70b",
            "version": "0.1.0",
            "time": now,
            "monotonic": time.monotonic(),
            "created": self.started,
            "status": "ready",
            "reason": None,
            "max_model_len": 131072,
            "generates": True,
            "kv_stores": self.kv_stores,
            "plan": self.plan,
            "warnings": self.warnings,
            "capabilities": {"tools": True, "reasoning": False},
            "adapters": self.adapters and len(self.adapters),
            "role": "admin" if self.key else None,
            "can_abort": self.can_abort,
            "has_admin_key": self.has_admin_key,
            "replicas": replicas,
        }

    def models(self) -> dict[str, Any]:
        """`/v1/models`."""
        own, digest = {"object": "model", "created": int(self.started), "owned_by": "quire"}, "0123456789abcdef" * 4
        listed: list[dict[str, Any]] = [{"id": "llama-3.1-70b", "root": "llama-3.1-70b", "parent": None, **own}]
        listed += [
            {"id": name, "root": f"/adapters/{name}", "parent": "llama-3.1-70b", "digest": digest, **own}
            for name in self.adapters or ()
        ]
        return {"object": "list", "data": listed}

    def history(self, after: float = 0) -> dict[str, Any]:
        """`/ui/history`."""
        now = time.time()
        newest = int(now) // _INTERVAL * _INTERVAL
        times = [at for at in range(newest - _HOUR + _INTERVAL, newest + 1, _INTERVAL) if at > max(after, self.started)]
        rows = [self._row(at, now) for at in times]
        columns: dict[str, list[float | None]] = {name: [row[name] for row in rows] for name in self._row(0, now)}
        return {"interval": _INTERVAL, "time": now, "columns": {"time": times, **columns}}

    def requests(self) -> dict[str, Any]:
        """`/ui/requests`."""
        if self.idle:
            return {"requests": [], "total": 0}
        now, found = time.time(), []
        up = [index for index in range(self.num_replicas) if index != self.dead]
        for at in range(self.num_requests):
            choice = random.Random(at)
            age = 0.4 + 1.7 * (self.num_requests - at) + now % 1
            phase = "decode" if at < self.num_requests - 3 else ("preempted", "prefill", "waiting")[at % 3]
            prompt, most = choice.randrange(200, 9000), choice.choice([256, 512, 1024, 4096])
            name, api, sequence = f"chatcmpl-{choice.randrange(1 << 64):016x}", 0, 0
            if self.alike:
                name, api, sequence = f"chatcmpl-{at // 2}", int(at == 3), int(at == 1)
            found.append(
                {
                    "handle": f"{api}.{name}",
                    "id": f"{name}#{sequence}" if sequence else name,
                    "key": choice.choice(["search", "assistant", "batch-eval"]) if self.key else None,
                    "age": age,
                    "prompt_tokens": prompt,
                    "cached_tokens": 16 * (prompt // 2 // 16) if choice.random() < 0.6 else 0,
                    "output_tokens": min(most - 1, int(22 * age)) if phase == "decode" else 0,
                    "max_tokens": most,
                    "replica": None if phase == "waiting" else choice.choice(up),
                    "phase": "queued" if phase == "waiting" else phase,
                    "api": api,
                }
            )
        left = [each for each in found if each["handle"] not in self.ended]
        return {"requests": left if self.sees_requests else [], "total": len(left)}

    def _replica(self, index: int, now: float) -> dict[str, Any]:
        is_up = index != self.dead
        works = is_up and not self.idle
        row = self._row(int(now) // _INTERVAL * _INTERVAL, now)
        share = 1 / max(1, self.num_replicas - (self.dead is not None)) if works else 0
        death = {"time": now - 42, "reason": "rank 3 was killed by signal 9 (SIGKILL)"} if not is_up else None
        return {
            "index": index,
            "host": f"gpu-{index + 1:02}.example" if self.gpus else "localhost",
            "role": "any",
            "tensor_parallel_size": 2,
            "stages": [[0, 39], [40, 79]],
            "state": "up" if is_up else "restarting",
            "reason": death["reason"] if death else None,
            "last_death": death,
            "num_requests_running": round(row["running"] * share) if works else 0,
            "num_requests_waiting": round(row["waiting"] * share) if works else 0,
            "prefilling": round(row["prefilling"] * share) if works else 0,
            "running": round(row["running"] * share) if works else 0,
            "waiting": round(row["waiting"] * share) if works else 0,
            "kv_blocks": 28753,
            "kv_blocks_used": round(28753 * row["kv_cache"]) if works else 0,
            "preemptions": 3,
            "steps_per_second": 40.0 if works else 0,
            "tokens_per_second": row["output_tokens"] * share if works else 0,
            "prompt_tokens_per_second": row["prompt_tokens"] * share if works else 0,
            "step_seconds": None if self.gpus or not works else 0.0213,
            "ranks": [self._rank(rank, now + index, works) for rank in range(4)] if is_up else [],
        }

    def _rank(self, rank: int, now: float, works: bool) -> dict[str, Any]:
        wave = 0.05 * math.sin(now / 3 + rank)
        used = 0.93 + wave if works else 0.0
        gpu = {
            "utilization": used,
            "memory_used": 71_400_000_000 + rank * 180_000_000,
            "memory_total": 85_500_000_000,
            "power": 110 + 480 * used,
        }
        return {
            "busy": 1000.0,
            "waited": 300.0,
            "steps": 40_000,
            "is_straggler": works and rank == 2,
            "cpu_seconds": 1200.0,
            "resident_bytes": 1_240_000_000,
            "computing": None if self.gpus else (0.62 + wave) * works,
            "waiting": None if self.gpus else (0.21 - wave) * works,
            "step_seconds": None if self.gpus or not works else 0.0213 + 0.0028 * (rank == 2),
            "gpu": gpu if self.gpus else None,
        }

    def _row(self, at: float, now: float) -> dict[str, Any]:
        """The values of the history at a time."""
        noise = random.Random(at)
        wave = 0.5 + 0.3 * math.sin(at / 410) + 0.12 * math.sin(at / 67) + 0.08 * noise.random()
        died = at % 2900 < 110 if self.dead is None else now - at < 42
        up = self.num_replicas - (died and not self.idle) if at >= self.started + self.loading else 0
        load = 0.0 if self.idle else wave * up / self.num_replicas
        waiting = round(self.peak * (max(0, 0.7 * (wave - 0.75)) + (0.25 * noise.random() if died else 0)))
        failed = dict.fromkeys((f"failed_{reason}" for reason in REASONS), 0.0)
        if self.failures is not None:
            failed |= self.failures
        elif not self.idle:
            failed["failed_queue_full"] = 0.5 * noise.randrange(5) if died else 0.0
            failed["failed_client_closed"] = 0.5 * (noise.random() < 0.02)
            failed["failed_invalid"] = 0.5 * (noise.random() < 0.008)

        def seconds(name: str, base: float, growth: float) -> dict[str, float | None]:
            middle = base * (1 + growth * wave**3 + 2 * died) * (1 + 0.06 * noise.random())
            values = (middle, middle * (1.9 + 0.4 * wave), middle * (2.7 + wave))
            return {
                f"{name}_{part}": None if self.idle else value
                for part, value in zip(("p50", "p95", "p99"), values, strict=True)
            }

        return {
            "running": round(load * self.peak),
            "prefilling": round(load * self.peak / 15 * noise.random()),
            "waiting": 0 if self.idle else waiting,
            "output_tokens": load * self.peak * 48,
            "prompt_tokens": load * self.peak * 109 * (0.85 + 0.3 * noise.random()),
            "requests": load * self.peak / 6.4,
            "kv_cache": load * 0.88,
            "prefix_hits": None if self.idle else 0.44 + 0.1 * math.sin(at / 300),
            "preemptions": 0.5 * (load > 0.88),
            "drafts_accepted": self.drafts,
            **seconds("ttft", 0.14, 2.5),
            **seconds("itl", 0.018, 0.5),
            **seconds("e2e", 5.5, 0.6),
            "replicas_up": up - (self.dead is not None and self.idle),
            "replicas": self.num_replicas,
            **failed,
            "gpu_utilization": 0.04 + 0.93 * min(1, load * 1.4) if self.gpus else None,
            "gpu_memory": 0.84 if self.gpus else None,
            "gpu_power": self.num_replicas * 4 * (110 + 520 * min(1, load * 1.4)) if self.gpus else None,
            "cpu": None if self.gpus else up * 4 * (0.04 + 0.8 * load),
        }

    def _answer(self, route: Route) -> None:
        request, url = route.request, urlsplit(route.request.url)
        if not request.url.startswith(f"{ADDRESS}{self.prefix}/"):
            self.strangers.append(request.url)
            return route.abort()
        path = url.path.removeprefix(self.prefix)
        if path in ("/", "/ui") or path.startswith("/ui/files/"):
            if path == "/":
                path = "/ui"
            file = self._files.get(path)
            return route.fulfill(status=file.status_code, headers=dict(file.headers), body=file.content)
        self.asked.append(f"{request.method} {path}")
        if self.gone:
            return _fail(route, 503, "no server")
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return _fail(route, 401, "the API key is missing or wrong")
        if path == "/ui/state":
            return self._send(route, path, self.state())
        if path == "/ui/history":
            return self._send(route, path, self.history(float(parse_qs(url.query).get("after", ["0"])[0])))
        if path == "/v1/models":
            return self._send(route, path, self.models())
        if path == "/ui/requests":
            return self._send(route, path, self.requests())
        name = path.removeprefix("/ui/requests/")
        if request.method == "DELETE" and name in {each["handle"] for each in self.requests()["requests"]}:
            self.ended.add(name)
            return route.fulfill(status=204)
        return _fail(route, 404, "there is no such request")

    def _send(self, route: Route, path: str, answer: dict[str, Any]) -> None:
        if path in self.held_paths:
            self.held.append((route, answer))
        else:
            _send(route, answer)


def _send(route: Route, answer: dict[str, Any]) -> None:
    route.fulfill(content_type="application/json", body=json.dumps(answer))


def _fail(route: Route, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "error", "param": None, "code": status}})
    route.fulfill(status=status, content_type="application/json", body=body)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"]  # root runs it in CI
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """A page with storage of its own; at its end, fails if there was an error or a violation of the page's policy."""
    page, errors = browser.new_page(**options), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    ours = [each for each in errors if "the server responded with a status of" not in each]
    assert not ours, ours


WARNINGS = [
    ("warning", "KV cache is full: a request was preempted", "scheduler", 1, 300),
    ("error", "rank 3 was killed by signal 9 (SIGKILL); restarting", "core", 1, 42),
    ("warning", "rank 2 is slower than the other ranks of its stage: 24.1 ms a step, 21.3 ms there", "rank 2", 0, 8),
]
"""Level, text, source, replica and age."""


def warnings() -> list[dict[str, Any]]:
    """`WARNINGS` as `/ui/state` has them."""
    now = time.time()
    return [
        {"time": now - age, "level": level, "text": text, "source": source, "replica": replica}
        for level, text, source, replica, age in WARNINGS
    ]


def main(path: str) -> None:
    server = FakeServer(gpus=True, dead=1, peak=14, warnings=warnings()[1:])
    server.num_requests = sum(each["running"] + each["waiting"] for each in server.state()["replicas"])
    size = {"width": 1280, "height": 720}
    with open_browser() as browser, open_page(browser, viewport=size, color_scheme="light") as page:
        server.attach(page)
        page.goto(ADDRESS)
        page.locator("#charts canvas").first.wait_for()
        with page.expect_response("**/ui/requests"):
            page.locator("#requests").scroll_into_view_if_needed()
        page.wait_for_selector("#requests tbody tr")
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    main(sys.argv[1])
