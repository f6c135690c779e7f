"""The page at `/`, in a real browser."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect, sync_playwright

from tests.e2e.serving import Server, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed"),
]
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("-tp", "2", "-pp", "2", "--api-key", "secret", "--kv-cache-memory-bytes", str(16 << 20)) as server:
        yield server


@pytest.fixture
def load(server: Server) -> Iterator[None]:
    """A client that always asks, from before the test to its end."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
            while not over.is_set():
                body = {"prompt": list(range(10, 60)), "max_tokens": 40, "ignore_eos": True, "n": 4}
                client.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        asking.result()


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"]  # root runs it in CI
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
        assert errors == []


def open_page(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#key")).to_be_hidden()


def tile(page: Page, name: str) -> Locator:
    """The value above this name."""
    named = page.get_by_text(name, exact=True)
    return page.locator("#tiles .card").filter(has=named).locator("b")


@pytest.mark.usefixtures("load")
def test_the_page_shows_the_engine_at_work(server: Server, page: Page) -> None:
    open_page(page, server)
    for rank in range(4):
        cell = page.locator(".rank").filter(has_text=f"rank {rank}")
        shares = re.compile(r"a step · computes [1-9]\d* %, waits \d+ %, idle \d+ %")
        expect(cell).to_contain_text(shares, timeout=30_000)
        expect(cell.locator(".bar i").first).not_to_have_css("width", "0px")
    expect(tile(page, "Output tokens / s")).to_have_text(re.compile("[1-9]"), timeout=30_000)
    expect(tile(page, "TTFT, median")).to_have_text(re.compile(r"^[\d.]+ m?s$"), timeout=30_000)
    expect(page.locator("#charts path").first).to_have_attribute("d", re.compile(r"^M[\d. ]+L"))
    expect(page.locator("#plan")).to_contain_text("tensor parallel 2 × pipeline parallel 2 = 4 ranks")
    expect(page.locator("#replicas")).to_contain_text("up")


def test_gpus_and_warnings_of_replicas_are_shown_and_text_stays_selected(server: Server, page: Page) -> None:
    """As a server with two replicas on GPUs would answer."""

    def answer(route: Route) -> None:
        response = route.fetch()
        if response.ok:
            state = response.json()
            (replica,) = state["replicas"]
            replica["ranks"] = [
                {"busy": 0, "waited": 0, "steps": 0, "is_straggler": rank == 3, "gpu_utilization": rank / 4}
                for rank in range(4)
            ]
            state["replicas"].append({**replica, "index": 1, "host": "gpu-host-2"})
            record = {"time": 1.0, "level": "warning", "text": "link <b>down</b>", "source": "rank 3", "replica": 1}
            route.fulfill(response=response, json={**state, "warnings": [record]})
        else:
            route.fulfill(response=response)

    page.route("**/ui/state", answer)
    open_page(page, server)
    cells = page.locator(".rank")
    expect(cells).to_have_count(8)
    expect(cells.nth(7)).to_have_text("rank 3 GPU in use 75 %, idle 25 %")
    expect(cells.nth(7)).to_have_class("rank slow")
    expect(page.locator("#replicas")).to_contain_text("gpu-host-2")
    expect(page.locator("#warnings")).to_contain_text("warning [replica 1, rank 3]: link <b>down</b>")
    for each in ("#plan", "#warnings"):
        page.locator(each).select_text()
        selected = page.evaluate("getSelection().toString()")
        for _ in range(2):
            with page.expect_response("**/ui/state"):
                pass
        assert page.evaluate("getSelection().toString()") == selected != ""


def test_a_refused_key_is_forgotten_and_polls_end(server: Server, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/ui/state") else None)
    page.clock.install()
    page.goto(server.url)
    expect(page.locator("#key")).to_be_visible()
    page.clock.run_for(10_000)
    assert len(asked) == 1
    with page.expect_response("**/ui/state"):
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use it").click()
    page.wait_for_function("sessionStorage.length === 0")
    page.clock.run_for(10_000)
    assert len(asked) == 2
