"""What a chat template gets of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.protocol.errors import InvalidParameter
from quire.server.text.chat_template import ChatTemplate
from quire.server.text.conversation import ChatTemplateOptions, render

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.ec3; cc_entrypoint=cli; cch=00000;"


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render(ChatTemplate(source, {}), messages, (), ChatTemplateOptions(**options), may_call=False)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        ("", "{}"),
        (None, "{}"),
        ('{"s": "cut of', "{}"),
        ('{"s"\n', "{}"),
        ("null", "{}"),
        ("[1]", "{}"),
        ('"text"', "{}"),
        ("[" * 100_000, "{}"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_past_arguments_are_an_object(arguments: Any, shown: str) -> None:
    """A call that was cut off would otherwise end the conversation: clients send it back with each further turn."""
    past = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    for source in (
        "{% for name, value in messages[0].tool_calls[0].function.arguments.items() %}{% endfor %}"
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments }}",  # text only, as DeepSeek-V3.1's
    ):
        assert rendered(source, [past]) == shown


ROLES = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (f"{HEADER}\nYou are", "s:You are;"),
        (f"{HEADER}\nx-anthropic-other: 1\nYou are", "s:You are;"),
        ([{"type": "text", "text": HEADER}, {"type": "text", "text": "You are"}], "s:You are;"),
        (HEADER, ""),
        (f"You are\n{HEADER}\n", f"s:You are\n{HEADER}\n;"),
        (f" {HEADER}", f"s: {HEADER};"),
        ("", "s:;"),
    ],
)
def test_pseudo_headers_of_a_system_prompt_are_removed(content: Any, shown: str) -> None:
    """Only at its start, and only there: what a user writes is left alone."""
    user = {"role": "user", "content": f"{HEADER}\nhi"}
    messages = [{"role": "system", "content": content}, user]
    assert rendered(ROLES, messages) == f"{shown}u:{HEADER}\nhi;"
    kept = rendered(ROLES, [{"role": "developer", "content": f"{HEADER}\nYou are"}], keep_billing_header=True)
    assert kept == f"s:{HEADER}\nYou are;"
    with pytest.raises(InvalidParameter, match="nothing is left of the final message"):
        rendered(ROLES, [user, {"role": "system", "content": HEADER}], continue_final_message=True)
