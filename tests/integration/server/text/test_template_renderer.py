"""Chat templates are rendered in processes of their own, and those that do not end are stopped there."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
from collections.abc import AsyncIterator
from typing import Any, cast

import jinja2
import psutil
import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.fair_share import FairSlots, Overloaded
from quire.server.client.output_stream import DEADLINE, Deadline, RequestTimedOut
from quire.server.text import chat_template, template_renderer
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.conversation import CHAT_NAMES, ChatTemplateOptions
from quire.server.text.sandbox import SandboxFailed, SandboxStopped
from quire.server.text.template_renderer import LocalRenderer, TemplateRenderer
from tests.fakes.tokenizers import CHATML

PLAIN = "{{ messages[0].content }}"
SHARED = "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
ENDLESS = {
    "ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "lists": "{% set l = range(99999) | list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'x' * 10**11 }}",
    "concatenation": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "filters": "{{ 'x' | center(10**10) }}",
    "replacement": "{% set s = 'x' * 10**5 %}{{ s | replace('x', s) }}",
    "macros": "{% macro m(i) %}{% if i %}{{ m(i - 1) }}{{ m(i - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "shared items": SHARED + "{{ n.l }}",
    "shared items in JSON": SHARED + "{{ n.l | tojson }}",
    "output": "{{ 'x' * 2**26 }}",
}


@pytest.fixture
async def renderer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TemplateRenderer]:
    """One whose template becomes endless when the first message is the name of one."""
    monkeypatch.setattr(template_renderer, "QUICK_SECONDS", 0.05)
    monkeypatch.setattr(template_renderer, "MEDIUM_SECONDS", 0.1)
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.2)
    monkeypatch.setattr(template_renderer, "WALL_CLOCK_FACTOR", 1000.0)  # however busy the machine is
    monkeypatch.setattr(template_renderer, "MAX_WAITING", len(ENDLESS))
    branches = (f"{{% elif messages[0].content == '{name}' %}}{text}" for name, text in ENDLESS.items())
    source = f"{{% if false %}}{''.join(branches)}{{% else %}}{PLAIN}{{% endif %}}"
    made = TemplateRenderer(ChatTemplates(ChatTemplate(source, {})))
    yield made
    made.close()


async def render(renderer: TemplateRenderer, text: str, source: str | None = None) -> str:
    options = ChatTemplateOptions(chat_template=source)
    (rendered,) = await renderer.render(ChatTemplate(source or PLAIN, {}), [[{"content": text}]], (), options)
    return rendered


async def test_the_prompt_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    renderer = TemplateRenderer(ChatTemplates(template))
    messages = [{"role": "user", "content": "wörd\ud800 " * at} for at in (1, 2, 30_000)]
    expected = await LocalRenderer().render(template, [messages, messages[:1]])
    for quick in (1.0, 1e-6):  # the second is too short for anything
        monkeypatch.setattr(template_renderer, "QUICK_SECONDS", quick)
        for _ in range(3):
            assert await renderer.render(template, [messages, messages[:1]]) == expected
    renderer.close()


async def test_a_template_that_does_not_end_is_stopped_alone(renderer: TemplateRenderer) -> None:
    endless = {name: asyncio.create_task(render(renderer, name)) for name in ENDLESS}
    while not all(one.done() for one in endless.values()):
        assert await render(renderer, "fine") == "fine"
    for name, one in endless.items():
        error = one.exception()
        assert isinstance(error, InvalidParameter), name
        assert error.param == "messages"
        text = {"output": "makes a prompt of", "recursive loop": "(takes more|does not end)"}.get(name, "takes more")
        assert re.match(f"the chat template {text}", str(error)), name


@pytest.fixture
async def endless(renderer: TemplateRenderer) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Renderings that end only with the test, in all slots of the last tier; one more waits."""
    renderer._sandbox._seconds = 60.0
    renderer._slow = FairSlots(2, 1)
    tasks = [asyncio.create_task(render(renderer, "ranges")) for _ in range(3)]
    while not renderer._slow._waiting:
        await asyncio.sleep(0.001)
    yield tasks
    assert not any(one.done() for one in tasks)
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_others_do_not_wait(
    renderer: TemplateRenderer, endless: list[asyncio.Task[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await render(renderer, "fine") == "fine"
    with pytest.raises(Overloaded, match="too many requests at once take long in the chat template; try again"):
        await render(renderer, "lists")
    monkeypatch.setattr(template_renderer, "MEDIUM_SECONDS", 60.0)

    async def ask_kept(question: bytes, seconds: float) -> bytes:
        raise SandboxStopped

    monkeypatch.setattr(renderer._sandbox, "ask_kept", ask_kept)
    assert await render(renderer, "not quick") == "not quick"


async def test_a_deadline_ends_a_rendering(renderer: TemplateRenderer, endless: list[asyncio.Task[str]]) -> None:
    DEADLINE.set(Deadline(asyncio.get_running_loop().time() + 0.01, 0.01))
    with pytest.raises(RequestTimedOut, match=r"exceeded the time limit of 0\.01 seconds"):
        await render(renderer, "ranges")


async def test_errors_and_own_templates(renderer: TemplateRenderer) -> None:
    assert await render(renderer, "a", "{{ messages[0].content }}!") == "a!"
    for source, message in (
        ("{{ raise_exception('no') }}", "the chat template rejected these messages: no"),
        ("{{ 1 / 0 }}", "the chat template rejected these messages: division by zero"),
        ("{{ ''.join([1]) }}", "the chat template rejected these messages: sequence item 0"),
    ):
        with pytest.raises(InvalidParameter, match=message) as error:
            await render(renderer, "a", source)
        assert error.value.param == "messages"


async def test_other_processes_compile_the_templates_of_adapters(renderer: TemplateRenderer) -> None:
    template = ChatTemplate("{{ messages[0].content }}?", {}, is_valid=True)
    assert await renderer.render(template, [[{"content": "a"}]], (), ChatTemplateOptions(chat_template="a")) == ["a?"]
    assert "_template" not in vars(template)


def test_a_process_that_is_kept_compiles_a_template_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()
    environment = chat_template._environment

    def compiling() -> jinja2.Environment:
        compiled.append("")
        return environment()

    template = ChatTemplate(PLAIN, {})
    monkeypatch.setattr(chat_template, "_environment", compiling)
    answer = template_renderer._make(None)
    question = pickle.dumps((template, [[{"content": "a"}]], (), ChatTemplateOptions(), False, CHAT_NAMES, None))
    answer(question)
    assert compiled
    compiled.clear()
    assert pickle.loads(answer(question)) == ["a"]
    assert not compiled


async def test_a_mistake_of_the_server_is_none_of_the_template(renderer: TemplateRenderer) -> None:
    with pytest.raises(SandboxFailed, match="AttributeError: 'int' object"):
        await renderer.render(ChatTemplate(PLAIN, {}), [cast(Any, [1])])


async def test_processes_that_died_are_replaced(renderer: TemplateRenderer) -> None:
    before = {*psutil.Process().children()}
    renderer.start()
    (helper,) = {*psutil.Process().children()} - before
    assert await render(renderer, "one") == "one"
    os.killpg(helper.pid, signal.SIGKILL)
    assert await render(renderer, "two") == "two"
    renderer.close()
    assert await render(renderer, "three") == "three"
