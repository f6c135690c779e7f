"""Chat templates for the versions of Mistral's tokenizers, whose own layout of a model has none.

Source: src/mistral_common/tokens/tokenizers/instruct.py of github.com/mistralai/mistral-common. Parts are next to each
other without white space: each is tokenized by itself there.
"""

from __future__ import annotations

from collections.abc import Collection

_THOUGHTS = ("[THINK]", "[/THINK]")
_TEMPLATE = """{{- bos_token }}
{%- set found = namespace(first=-1, last=-1, system='') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set found.last = loop.index0 %}
        {%- set found.first = loop.index0 if found.first < 0 else found.first %}
    {%- elif message.role in ('system', 'developer') %}
        {%- set found.system = found.system + message.content + '\\n\\n' %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == found.PLACE_OF_TOOLS %}
            {{- '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + USER_TEXT + '[/INST]' }}
    {%- elif message.role in ('system', 'developer') %}
        {{- SYSTEM_TEXT }}
    {%- elif message.role == 'assistant' %}
        {{- ANSWER }}
        {%- if message.tool_calls %}
            CALLS
        {%- endif %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- RESULT }}
    {%- else %}
        {{- raise_exception('messages of the role ' + message.role + ' are not supported') }}
    {%- endif %}
{%- endfor %}
"""
_LIST_OF_CALLS = """{{- '[TOOL_CALLS][' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": ' + call.function.name|tojson + ', "arguments": ' + call.function.arguments|tojson }}
                {{- ', "id": ' + call.id|tojson + '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']' }}"""
_MARKED_CALLS = """{%- for call in message.tool_calls %}
                {{- '[TOOL_CALLS]' + call.function.name CALL_ID + '[ARGS]' + call.function.arguments|tojson }}
            {%- endfor %}"""
_V3 = {
    "PLACE_OF_TOOLS": "last",
    "USER_TEXT": "(found.system if loop.index0 == found.last else '') + message.content",
    "SYSTEM_TEXT": "''",
    "ANSWER": "message.content or ''",
    "CALLS": _LIST_OF_CALLS,
    # Results that are objects or lists are a part of the JSON, others are strings in it.
    "RESULT": (
        """'[TOOL_RESULTS]{"content": ' + (message.content if message.content[:1] in ('{', '[') else """
        """message.content|tojson) + ', "call_id": ' + message.tool_call_id|tojson + '}[/TOOL_RESULTS]'"""
    ),
}
_V7 = _V3 | {
    "USER_TEXT": "message.content",
    "SYSTEM_TEXT": "'[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]'",
    "RESULT": "'[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]'",
}
_V11 = _V7 | {"CALLS": _MARKED_CALLS.replace("CALL_ID", "+ '[CALL_ID]' + call.id")}
_V13 = _V11 | {
    "PLACE_OF_TOOLS": "first",
    "CALLS": _MARKED_CALLS.replace(" CALL_ID", ""),
    "RESULT": "'[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]'",
}
_WITH_THOUGHTS = {
    "ANSWER": (
        "('[THINK]' + message.reasoning_content + '[/THINK]' if message.reasoning_content else '') "
        "+ (message.content or '')"
    )
}
_VERSIONS = {3: _V3, 7: _V7, 11: _V11, 13: _V13}


def chat_template(version: int, special_tokens: Collection[str]) -> str | None:
    """The template for a version of the tokenizer; None: it is not known."""
    if version not in _VERSIONS:
        return None
    has_thoughts = version == 13 and all(token in special_tokens for token in _THOUGHTS)
    template = _TEMPLATE
    for name, text in (_VERSIONS[version] | (_WITH_THOUGHTS if has_thoughts else {})).items():
        template = template.replace(name, text)
    return template
