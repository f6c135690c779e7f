"""Check the built documentation site: one can read all of it, and without a network. `.ci/run` does it after the build.

The links to the next page lead through every page. No page loads anything from another host: the HTML of all pages is
searched for that, and one page is opened in Chromium, because the theme's scripts, which are the same on every page,
may load things, too.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

SITE = Path(__file__).parent.parent / "build" / "site"


class _Page(HTMLParser):
    """What a page loads, and the address of the next one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.next: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "md-footer__link--next" in values.get("class", ""):
            self.next = values["href"]
        if "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values["rel"] not in ("canonical", "next", "prev", "edit"):
            self.loads.append(values["href"])


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def check_pages() -> Iterator[str]:
    """What is wrong with the pages' HTML."""
    pages = {path: _Page(path.read_text()) for path in SITE.rglob("*.html")}
    for path, page in pages.items():
        for address in page.loads:
            if "://" in address or address.startswith("//"):
                yield f"{path} loads {address}"
    left, path = set(pages) - {SITE / "404.html"}, SITE / "index.html"
    while path in left:
        left.remove(path)
        path = (path.parent / (pages[path].next or "") / "index.html").resolve()
    yield from (f"{path} is not reached by links to the next page" for path in sorted(left))


def check_scripts() -> Iterator[str]:
    """What is wrong with the first page in a browser. Searches, too."""
    asked: list[str] = []
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(SITE))) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        address = f"http://127.0.0.1:{server.server_port}/"
        page.goto(address, wait_until="networkidle")
        page.keyboard.press("f")
        page.keyboard.type("tensor parallel")
        page.locator(".md-search-result__link").first.wait_for()
        browser.close()
        server.shutdown()
    yield from (f"A script asks for {url}" for url in asked if not url.startswith((address, "data:", "blob:")))


def main() -> int:
    problems = [*check_pages(), *check_scripts()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
