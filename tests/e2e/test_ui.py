"""The page's frame and its dashboard in a real browser: on made-up numbers, and on those of a real server."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.e2e.fake_page import ADDRESS, FakeServer, open_browser, open_page, warnings
from tests.e2e.serving import serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed"),
]
OVERFLOWS = """() => {
  const found = [];
  const clips = node => !["visible", "clip"].includes(getComputedStyle(node).overflowX);
  for (const node of document.querySelectorAll("header *, #dashboard *")) {
    const box = node.getBoundingClientRect();
    if (!box.width || !node.checkVisibility() || node.closest(".unseen, .plot")) continue;
    const name = `${node.tagName} ${node.id} ${node.className} ${node.textContent.slice(0, 40)}`;
    if (box.left < -0.5 || box.right > innerWidth + 0.5) found.push(`outside: ${name}`);
    const around = node.parentElement.getBoundingClientRect();
    if (box.right > around.right + 1 || box.left < around.left - 7) found.push(`beyond its parent: ${name}`);
    if (clips(node) && node.scrollWidth > node.clientWidth + 1) found.push(`cut: ${name}`);
  }
  return found;
}"""
OVERLAPS = """() => {
  const found = [], boxes = [];
  const walker = document.createTreeWalker(document.querySelector("#dashboard"), NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const around = node.parentElement;
    if (!node.data.trim() || !around.checkVisibility() || around.closest(".unseen, .plot")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width) boxes.push([box, node.data]);
  }
  boxes.forEach(([one, text], at) => boxes.slice(at + 1).forEach(([other, next]) => {
    const width = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const height = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (width > 2 && height > 5) found.push(`${text} / ${next}`);
  }));
  return found;
}"""
TEXT_CONTRASTS = """() => {
  const channels = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = node => {
    const colour = channels(getComputedStyle(node).backgroundColor);
    return colour[3] === 0 ? ground(node.parentElement) : colour;
  };
  const found = [];
  for (const node of document.querySelectorAll("header *, #dashboard *")) {
    const isText = [...node.childNodes].some(each => each.nodeType === Node.TEXT_NODE && each.data.trim());
    if (!isText || !node.checkVisibility()) continue;
    const [one, other] = [light(channels(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${node.tagName} ${node.className} ${node.textContent}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with open_page(browser, viewport={"width": 1280, "height": 800}) as page:
        yield page


def show(page: Page, server: FakeServer, path: str = "/") -> None:
    """Open the page, up to its first charts."""
    server.attach(page)
    page.goto(f"{ADDRESS}{server.prefix}{path}")
    expect(page.locator("#status")).to_have_text("ready")
    expect(chart(page, "Tokens per second").locator("canvas")).to_be_visible()


def tile(page: Page, name: str) -> Locator:
    """The value with this name."""
    return page.locator("#tiles dl > div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def chart(page: Page, title: str) -> Locator:
    """The card of a chart."""
    return page.locator(".chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def show_requests(page: Page) -> Locator:
    """Scroll to the requests in progress. Returns their rows."""
    page.locator("#requests").scroll_into_view_if_needed()
    rows = page.locator("#requests-table tbody tr")
    expect(rows.first).to_be_visible()
    return rows


def test_the_tiers_of_all_hosts_are_summed(page: Page) -> None:
    store = {"memory_bytes": 3 << 30, "memory_capacity": 8 << 30, "disk_bytes": 50 << 30, "disk_capacity": 200 << 30}
    server = FakeServer(kv_stores=[{"host": host, "is_up": True, "disk_error": "", **store} for host in ("a", "b")])
    show(page, server)
    expect(tile(page, "stores up")).to_have_text("2 of 2")
    expect(tile(page, "memory")).to_have_text("6.0 of 16 GiB")
    expect(tile(page, "disk")).to_have_text("100 of 400 GiB")
    server.kv_stores[1] |= {"is_up": False, "disk_error": "No space left on device"}
    expect(tile(page, "stores up")).to_have_text("1 of 2")
    expect(tile(page, "disk")).to_have_text("not in use")
    server.kv_stores.clear()
    expect(tile(page, "stores up")).to_have_count(0)


def test_the_page_shows_what_its_server_says(page: Page) -> None:
    """Also below a proxy's prefix, and as text, whatever it contains; selected text stays selected."""
    record = {"time": time.time(), "level": "error", "text": "link <b>down</b>", "source": "rank 3", "replica": 1}
    server = FakeServer(dead=1, prefix="/llm", warnings=[record])
    show(page, server)
    expect(tile(page, "replicas up")).to_have_text("1 of 2")
    expect(tile(page, "output/s")).to_have_text(re.compile(r"^\d{3,}"))
    replicas = page.locator("#replicas tbody tr")
    expect(replicas.nth(0)).to_contain_text("21 ms")
    expect(replicas.nth(1)).to_contain_text(re.compile(r"restarting.* s ago.*rank 3 was killed by signal 9"))
    ranks = page.locator(".rank")
    expect(ranks).to_have_count(4)
    expect(ranks.nth(2)).to_contain_text(re.compile(r"rank 2 slow.*24 ms a step.*computing \d\d %.*waiting \d\d %"))
    expect(page.locator("#warnings")).to_contain_text("link <b>down</b>")
    expect(page.locator("#down")).to_be_visible()
    failures = chart(page, "Refused and failed requests")
    expect(failures).to_contain_text("queue full")
    expect(failures).not_to_contain_text("overloaded")
    expect(chart(page, "CPU cores in use")).to_be_visible()
    expect(chart(page, "GPUs")).to_have_count(0)
    page.get_by_text("Plan", exact=True).click()
    for each in ("#plan", "#warnings li p"):
        page.locator(each).select_text()
        selected = page.evaluate("getSelection().toString()")
        for _ in range(2):
            with page.expect_response("**/ui/state"):
                pass
        assert page.evaluate("getSelection().toString()") == selected != ""
    assert server.strangers == []


def test_gpus_have_a_chart_and_values(page: Page) -> None:
    show(page, FakeServer(gpus=True))
    expect(chart(page, "GPUs")).to_contain_text(re.compile(r"in use \d+ %memory 84 %power \d\.\d kW"))
    expect(page.locator(".rank").first).to_contain_text(re.compile(r"GPU \d+ %66 of 80 GiB\d+ W"))
    expect(tile(page, "GPU memory")).to_have_text("84 %")


def test_errors_are_those_of_the_last_minute_that_nobody_chose(page: Page) -> None:
    """A reason has the same colour whichever others there are."""
    server = FakeServer(failures={"failed_client_closed": 2, "failed_aborted": 2})
    show(page, server)
    errors, failures = tile(page, "errors/min"), chart(page, "Refused and failed requests")
    expect(errors).to_have_text("0")
    expect(errors).not_to_have_class("bad")
    aborted = failures.get_by_role("button", name="aborted").locator("i")
    colour = aborted.evaluate("node => node.style.background")
    server.failures = {"failed_aborted": 2, "failed_internal": 0.5}
    page.reload()
    expect(errors).to_have_text("30")
    expect(errors).to_have_class("bad")
    expect(failures).not_to_contain_text("client closed")
    assert aborted.evaluate("node => node.style.background") == colour


def test_replicas_being_loaded_at_the_start_were_not_down(page: Page) -> None:
    server = FakeServer(started=time.time() - 120, loading=30)
    show(page, server)
    expect(page.locator("#down")).to_be_hidden()
    server.dead = 1
    page.reload()
    expect(page.locator("#down")).to_be_visible()


def test_an_idle_rank_is_said_to_be_and_keeps_its_height(page: Page) -> None:
    server = FakeServer()
    show(page, server)
    rank = page.locator(".rank").first
    expect(rank).to_contain_text("21 ms a step")
    height = rank.evaluate("node => node.offsetHeight")
    server.idle = True
    expect(rank).to_contain_text(re.compile(r"rank 0idle.*computing\s+0 %waiting\s+0 %"))
    expect(rank.locator(".bar i").first).to_have_css("width", "0px")
    assert rank.evaluate("node => node.offsetHeight") == height


@pytest.mark.parametrize(("width", "height"), [(400, 800), (768, 1024), (1280, 800), (1800, 900), (2560, 1440)])
def test_nothing_is_cut_or_overlaps(page: Page, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.add_init_script("sessionStorage.setItem('quire-key', 'secret')")
    show(page, FakeServer(gpus=True, dead=1, drafts=0.71, key="secret", warnings=warnings()))
    show_requests(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(OVERFLOWS) == []
    assert page.evaluate(OVERLAPS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    show(page, FakeServer(dead=1, warnings=warnings()))
    show_requests(page)
    assert page.evaluate(TEXT_CONTRASTS) == []


def test_charts_change_their_colours_with_the_scheme(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    show(page, FakeServer())
    colours = """node => {
      const {data} = node.getContext("2d").getImageData(0, 0, node.width, node.height), found = new Set();
      for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) found.add(`rgb(${data.slice(at, at + 3)})`);
      return [...found];
    }"""
    resolve = "document.querySelector('.legend i').computedStyleMap().get('background-color').toString()"
    canvas, lines = chart(page, "Tokens per second").locator("canvas"), []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        lines.append(page.evaluate(resolve).replace(" ", ""))
        page.wait_for_function("() => true")
        drawn = [each.replace(" ", "") for each in canvas.evaluate(colours)]
        assert lines[-1] in drawn, scheme
    assert lines[0] != lines[1]


def test_hovering_shows_the_values_of_all_charts_at_that_time(page: Page) -> None:
    server = FakeServer()
    show(page, server)
    columns = server.history()["columns"]
    box = chart(page, "Requests").locator(".u-over").bounding_box()
    assert box is not None
    with page.expect_response("**/ui/state"):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    at = page.locator("#at")
    expect(at).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    clock, *shown = page.evaluate("""() => {
      const at = new Date(), text = document.querySelector("#at").textContent;
      at.setHours(...text.split(":"), 0);
      return [at / 1000, ...[...document.querySelectorAll(".chart .legend")].map(each => each.textContent)];
    }""")
    (row,) = (
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True) if values[0] == clock
    )
    assert f"running {row['running']}" in shown[1]
    assert f"p50 {1000 * row['ttft_p50']:.0f} ms" in shown[2]
    page.mouse.move(0, 0)
    expect(at).to_be_empty()


def test_the_time_shown_can_be_chosen(page: Page) -> None:
    """The history is asked for once, and then for what is new."""
    server, asked = FakeServer(), []
    page.on("request", lambda request: asked.append(request.url) if "/ui/history" in request.url else None)
    show(page, server)
    spans = page.get_by_role("group", name="Time shown")
    expect(spans.get_by_role("button", name="5 min", exact=True)).to_have_attribute("aria-pressed", "true")
    tokens = chart(page, "Tokens per second").locator("canvas")
    before = tokens.evaluate("node => node.toDataURL()")
    spans.get_by_role("button", name="1 h").click()
    expect(spans.get_by_role("button", name="1 h")).to_have_attribute("aria-pressed", "true")
    assert tokens.evaluate("node => node.toDataURL()") != before
    over = chart(page, "Requests").locator(".u-over").bounding_box()
    assert over is not None
    page.mouse.move(over["x"] + 40, over["y"] + 20)
    page.mouse.down()
    page.mouse.move(over["x"] + 90, over["y"] + 20, steps=3)
    page.mouse.up()
    live = page.get_by_role("button", name="Back to now")
    live.click()
    expect(live).to_be_hidden()
    with page.expect_response("**/ui/history?after=*"):
        pass
    assert [url for url in asked if "after=" not in url] == [f"{ADDRESS}/ui/history"]


def test_a_request_is_aborted_after_a_second_click(page: Page) -> None:
    server = FakeServer()
    show(page, server)
    rows = show_requests(page)
    expect(rows).to_have_count(server.num_requests)
    first, handle = (server.requests()["requests"][0][name] for name in ("id", "handle"))
    rows.filter(has_text=first).get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(first)
    dialog.get_by_role("button", name="Keep it").click()
    rows.filter(has_text=first).get_by_role("button").click()
    assert not [each for each in server.asked if each.startswith("DELETE")]
    dialog.get_by_role("button", name="Abort it").click()
    expect(page.locator("#requests-note")).to_have_text(f"{first} was aborted.")
    expect(rows).to_have_count(server.num_requests - 1)
    assert [each for each in server.asked if each.startswith("DELETE")] == [f"DELETE /ui/requests/{handle}"]
    second, handle = (server.requests()["requests"][0][name] for name in ("id", "handle"))
    rows.filter(has_text=second).get_by_role("button").click()
    server.ended.add(handle)
    dialog.get_by_role("button", name="Abort it").click()
    expect(page.locator("#requests-note")).to_have_text(f"{second} had already ended.")
    use_key = page.get_by_role("button", name="Use a key")
    server.can_abort = False
    expect(rows.get_by_role("button")).to_have_count(0)
    expect(use_key).to_be_hidden()
    server.has_admin_key = True
    expect(use_key).to_be_visible()
    server.sees_requests = False
    expect(page.locator("#requests-note")).to_contain_text("12 requests are in progress. This client may not see them.")


def test_an_abort_removes_all_rows_of_a_request_and_no_other(page: Page) -> None:
    """Also if a list from before arrives after it; the notice goes after a while."""
    server = FakeServer(alike=True, num_requests=4)
    page.clock.install()
    show(page, server)
    rows, note = show_requests(page), page.locator("#requests-note")
    expect(rows).to_have_count(4)
    third, fourth = server.requests()["requests"][2:]
    server.held_paths.add("/ui/requests")
    with page.expect_request("**/ui/requests"):
        page.clock.run_for(3000)
    rows.first.get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Abort it").click()
    expect(note).to_have_text("chatcmpl-0 was aborted.")
    expect(rows).to_have_count(2)
    expect(page.locator("#requests-count")).to_have_text("2")
    with page.expect_response("**/ui/requests"):
        server.release()
    with page.expect_response("**/ui/state"):
        page.clock.run_for(1000)
    assert rows.count() == 2
    server.ended.add(third["handle"])
    with page.expect_response("**/ui/requests"):
        page.clock.run_for(3000)
    expect(rows).to_have_count(1)
    expect(rows.locator("td").nth(3)).to_have_text(f"{fourth['prompt_tokens']}")
    expect(note).not_to_be_empty()
    page.clock.fast_forward(61_000)
    with page.expect_response("**/ui/requests"):
        page.clock.run_for(3000)
    expect(note).to_be_empty()


def test_requests_are_sorted_and_filtered(page: Page) -> None:
    server = FakeServer(key="secret")
    page.add_init_script("sessionStorage.setItem('quire-key', 'secret')")
    show(page, server)
    rows = show_requests(page)
    found = server.requests()["requests"]
    header = page.get_by_role("columnheader", name="Prompt")
    header.get_by_role("button").press("Enter")
    expect(header).to_have_attribute("aria-sort", "descending")
    most = max(found, key=lambda each: int(each["prompt_tokens"]))
    expect(rows.first).to_contain_text(most["id"])
    header.get_by_role("button").press("Enter")
    expect(rows.last).to_contain_text(most["id"])
    page.get_by_label("Filter requests").fill("search decode")
    wanted = [each for each in found if each["key"] == "search" and each["phase"] == "decode"]
    expect(rows).to_have_count(len(wanted))
    expect(page.locator("#requests-count")).to_have_text(f"{len(wanted)} of {len(found)}")


def test_the_page_works_by_keyboard(page: Page) -> None:
    show(page, FakeServer())
    dashboard, chat = (page.get_by_role("tab", name=name) for name in ("Dashboard", "Chat"))
    dashboard.focus()
    page.keyboard.press("ArrowRight")
    expect(chat).to_be_focused()
    expect(page.locator("#dashboard")).to_be_hidden()
    assert page.evaluate("location.hash") == "#chat"
    page.keyboard.press("Home")
    expect(dashboard).to_have_attribute("aria-selected", "true")
    page.go_back()
    expect(chat).to_have_attribute("aria-selected", "true")
    page.go_forward()
    plot = chart(page, "Requests").get_by_role("img")
    expect(plot).to_have_attribute("aria-label", re.compile(r"^Requests\. Now running \d+, .* Highest running \d+"))
    plot.focus()
    page.keyboard.press("ArrowLeft")
    spoken = page.locator("#spoken")
    expect(spoken).to_have_text(re.compile(r"^\d\d:\d\d:\d\d: running \d+, waiting \d+, prefilling \d+$"))
    first = spoken.inner_text()
    page.keyboard.press("Home")
    expect(spoken).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(page.locator("#at")).to_be_empty()


def test_only_what_is_visible_is_asked_for(page: Page) -> None:
    server = FakeServer()
    page.clock.install()
    show(page, server)
    for _ in range(2):
        with page.expect_response("**/ui/history?after=*"):
            page.clock.run_for(3000)
    assert "GET /ui/requests" not in server.asked
    page.get_by_role("tab", name="Chat").click()
    server.asked.clear()
    for _ in range(3):
        with page.expect_response("**/ui/state"):
            page.clock.run_for(2000)
    assert set(server.asked) == {"GET /ui/state"}


def test_adapters_are_listed_and_a_chat_chooses_one(page: Page) -> None:
    server = FakeServer(adapters=["pirate", "<b>capitals"])
    show(page, server)
    expect(page.locator("#adapters tbody tr")).to_have_text(
        ["pirate/adapters/pirate0123456789ab", "<b>capitals/adapters/<b>capitals0123456789ab"]
    )
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Model", exact=True).select_option("pirate")

    def asked(text: str) -> Any:
        page.get_by_label("Message", exact=True).fill(text)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Enter")
        body = sent.value.post_data_json
        assert body is not None
        return body.get("model")

    assert asked("Where is the gold?") == "pirate"
    server.adapters = ["capitals"]
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(
        ["llama-3.1-70b", "capitals", "pirate"]
    )
    page.get_by_label("Model", exact=True).select_option("llama-3.1-70b")
    assert asked("And now?") is None


def test_one_request_at_a_time_is_under_way_on_a_slow_link(page: Page) -> None:
    server = FakeServer(held_paths={"/ui/history", "/ui/requests"})
    page.clock.install()
    server.attach(page)
    page.goto(ADDRESS)
    page.locator("#requests").scroll_into_view_if_needed()
    for _ in range(4):
        with page.expect_response("**/ui/state"):
            page.clock.run_for(3000)
    assert [server.asked.count(f"GET {path}") for path in ("/ui/history", "/ui/requests")] == [1, 1]
    server.release()
    expect(chart(page, "Tokens per second").locator("canvas")).to_be_visible()
    expect(page.locator("#requests-table tbody tr")).to_have_count(server.num_requests)
    with page.expect_response("**/ui/history?after=*"):
        page.clock.run_for(3000)


def test_a_server_that_is_gone_is_said_to_be(page: Page) -> None:
    server = FakeServer()
    show(page, server)
    server.gone = True
    expect(page.locator("#status")).to_have_text("no answer")
    expect(page.locator("#reason")).to_have_text("no server")
    expect(page.locator("#dashboard")).to_have_css("opacity", "0.55")
    server.gone = False
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#dashboard")).to_have_css("opacity", "1")


def test_a_refused_key_is_forgotten_and_polls_end(page: Page) -> None:
    server = FakeServer(key="secret")
    server.attach(page)
    page.clock.install()
    page.goto(ADDRESS)
    key, use = page.get_by_label("API key"), page.get_by_role("button", name="Use it")
    expect(key).to_be_focused()
    page.clock.run_for(10_000)
    assert server.asked == ["GET /ui/state"]
    with page.expect_response("**/ui/state"):
        key.fill("wrong")
        use.click()
    expect(page.locator("#key-why")).to_have_text("The server has refused this key.")
    page.wait_for_function("sessionStorage.length === 0")
    page.clock.run_for(10_000)
    assert server.asked == ["GET /ui/state"] * 2
    key.fill("secret")
    use.click()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#key")).to_be_hidden()
    page.get_by_role("button", name="Forget the key").click()
    expect(key).to_be_visible()


def test_the_page_shows_a_real_engine_at_work(page: Page) -> None:
    """The shares of ranks, the history and a request that is aborted, of a server with two stages of two ranks."""
    body = {"prompt": list(range(10, 60)), "max_tokens": 40, "ignore_eos": True, "n": 4}
    over = threading.Event()
    key = {"Authorization": "Bearer secret"}

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, headers=key, timeout=60) as client:
            while not over.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    arguments = (
        "-tp",
        "2",
        "-pp",
        "2",
        "--api-key",
        "user",
        "--admin-key",
        "secret",
        "--kv-cache-memory-bytes",
        str(16 << 20),
    )
    with serve(*arguments) as server, ThreadPoolExecutor(2) as pool:
        load = pool.submit(ask, server.url)
        try:
            page.goto(server.url)
            page.get_by_label("API key").fill("secret")
            page.get_by_role("button", name="Use it").click()
            expect(page.locator("#status")).to_have_text("ready")
            for rank in range(4):
                cell = page.locator(".rank").nth(rank)
                shares = re.compile(rf"rank {rank}.* m?s a step.*computing [1-9]\d* %.*waiting \d+ %")
                expect(cell).to_contain_text(shares, timeout=30_000)
                expect(cell.locator(".bar i").first).not_to_have_css("width", "0px")
            expect(tile(page, "output/s")).to_have_text(re.compile("[1-9]"), timeout=30_000)
            latency = page.locator("#tiles tr").filter(has_text="first token").locator("td").first
            expect(latency).to_have_text(re.compile(r"^[\d.]+ m?s$"), timeout=30_000)
            expect(chart(page, "Requests")).to_contain_text(re.compile(r"running [1-9]"), timeout=30_000)
            expect(page.locator("#replicas")).to_contain_text("up")
            page.get_by_text("Plan", exact=True).click()
            expect(page.locator("#plan")).to_contain_text("tensor parallel 2 × pipeline parallel 2 = 4 ranks")
            long = {**body, "max_tokens": 1900, "n": 1}
            answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=long, headers=key, timeout=60)
            row = show_requests(page).filter(has_text="of 1900")
            row.get_by_role("button").click(timeout=30_000)
            page.get_by_role("button", name="Abort it").click()
            expect(page.locator("#requests-note")).to_have_text(re.compile("was aborted"))
            assert "aborted" in answer.result().json()["error"]["message"]
            page.goto("about:blank")  # no poll while the server ends
        finally:
            over.set()
        load.result()
