"""Chat templates are rendered in processes of their own, and those that do not end are stopped there."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.server.text import conversation, template_renderer
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.conversation import ChatTemplateOptions
from quire.server.text.template_renderer import TemplateRenderer
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
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.2)
    branches = (f"{{% elif messages[0].content == '{name}' %}}{text}" for name, text in ENDLESS.items())
    source = f"{{% if false %}}{''.join(branches)}{{% else %}}{PLAIN}{{% endif %}}"
    made = TemplateRenderer(ChatTemplates(ChatTemplate(source, {})))
    yield made
    made.close()


async def render(renderer: TemplateRenderer, text: str, source: str | None = None) -> str:
    options = ChatTemplateOptions(chat_template=source)
    return await renderer.render(ChatTemplate(source or PLAIN, {}), [{"content": text}], (), options, may_call=False)


async def test_the_prompt_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    renderer = TemplateRenderer(ChatTemplates(template))
    messages = [{"role": "user", "content": "wörd\ud800 " * at} for at in (1, 2, 30_000)]
    expected = conversation.render(template, messages, (), ChatTemplateOptions(), may_call=False)
    for quick in (1.0, 1e-6):  # the second is too short for anything
        monkeypatch.setattr(template_renderer, "QUICK_SECONDS", quick)
        for _ in range(3):
            assert await renderer.render(template, messages, (), ChatTemplateOptions(), may_call=False) == expected
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


async def test_others_do_not_wait(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer._sandbox, "_seconds", 60.0)
    endless = [asyncio.create_task(render(renderer, "ranges")) for _ in range(20)]
    assert await render(renderer, "fine") == "fine"
    assert not any(one.done() for one in endless)
    for one in endless:
        one.cancel()
    await asyncio.gather(*endless, return_exceptions=True)


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


async def test_processes_that_died_are_replaced(renderer: TemplateRenderer) -> None:
    before = {*psutil.Process().children()}
    renderer.start()
    (helper,) = {*psutil.Process().children()} - before
    assert await render(renderer, "one") == "one"
    os.killpg(helper.pid, signal.SIGKILL)
    assert await render(renderer, "two") == "two"
    renderer.close()
    assert await render(renderer, "three") == "three"
