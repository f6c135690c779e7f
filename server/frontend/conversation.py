"""A conversation as a chat template wants it, and the prompt that the template makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.frontend.chat_template import ChatTemplate
from quire.server.frontend.tools import for_template
from quire.server.parsers.reasoning import detect_reasoning

Message = Mapping[str, Any]

_END_SIGN = "\ue000end of the final message\ue000 "
"""Stands in no conversation; the space tells whether a template trims."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """What a request says about rendering a conversation; names and meanings are vLLM's."""

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    reasoning_effort: str | None = None
    thinking: bool | None = None
    """Turns the template's switch of thoughts."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    may_call: bool = False
    """The model is to call the tools, and must be shown them."""

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The variables of the template that the user sets; raises `InvalidParameter` for what it would not read."""
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in self.chat_template_kwargs:
                raise InvalidParameter(
                    f"chat_template_kwargs cannot set {name}, which has its own place in the request",
                    "chat_template_kwargs",
                )
        if self.documents and "documents" not in template.reads:
            raise InvalidParameter("this model's chat template reads no documents", "documents")
        return self._effort(template) | self._thinking(template) | dict(self.chat_template_kwargs)

    def _effort(self, template: ChatTemplate) -> dict[str, Any]:
        if self.reasoning_effort is None:
            return {}
        if "reasoning_effort" in template.reads:
            return {"reasoning_effort": self.reasoning_effort}
        switch = _thinking_switch(template)
        if self.reasoning_effort == "none" and switch is not None:
            return {switch: False}
        remedy = f'; set {switch} with chat_template_kwargs, or send "none"' if switch is not None else ""
        raise InvalidParameter(f"this model's chat template reads no reasoning_effort{remedy}", "reasoning_effort")

    def _thinking(self, template: ChatTemplate) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        if (switch := _thinking_switch(template)) is not None:
            return {switch: self.thinking}
        if not self.thinking and detect_reasoning(template.source) is not None:
            raise InvalidParameter("thinking: this model's chat template has no switch that turns it off", "thinking")
        return {}


def _thinking_switch(template: ChatTemplate) -> str | None:
    """The variable of the template that says whether the model is to think."""
    return next((name for name in ("enable_thinking", "thinking") if name in template.reads), None)


def text(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    options: ChatTemplateOptions,
) -> str:
    """The prompt; raises `InvalidParameter` for what the template cannot say."""
    if not messages:
        raise InvalidParameter("messages must not be empty", "messages")
    if tools and options.may_call and "tools" not in template.reads:
        raise InvalidParameter(
            "tools: this model's chat template does not show them to the model; start the server with a "
            '--chat-template that does, or send tool_choice: "none"',
            "tools",
        )
    variables = options.variables(template) | {
        "tools": for_template(tools) or None,
        "documents": list(options.documents) or None,
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
    }
    turns = [_message(message, template.source, at) for at, message in enumerate(messages)]
    if options.continue_final_message:
        turns[-1] = _to_be_continued(turns[-1], len(turns) - 1)
    prompt = _render(template, turns, variables)
    return _cut(prompt) if options.continue_final_message else prompt


def _message(message: Message, template: str, at: int) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments of tool calls as objects, no empty fields."""
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, list):
        result["content"] = "\n".join(_text_of(part, at) for part in content)
    if "reasoning" in result:
        result.setdefault("reasoning_content", result.pop("reasoning"))
    if result.get("role") == "developer" and "developer" not in template:
        result["role"] = "system"
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call, at) for call in calls]
    return result


def _render(template: ChatTemplate, turns: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt. Templates want the arguments of calls as objects, but some (DeepSeek-V3.1's) as JSON text."""
    try:
        return template.render(turns, **variables)
    except InvalidParameter:
        if not any(turn.get("tool_calls") for turn in turns):
            raise
    return template.render([_with_arguments_as_text(turn) for turn in turns], **variables)


def _with_arguments_as_text(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in turn.get("tool_calls", ())
    ]
    return turn | {"tool_calls": calls} if calls else turn


def _to_be_continued(turn: dict[str, Any], at: int) -> dict[str, Any]:
    """The final message with a sign where its text ends; what the template writes behind it is cut off."""
    if not isinstance(turn.get("content"), str) or turn.get("tool_calls"):
        raise InvalidParameter(
            f"continue_final_message: messages[{at}] has no text that could be continued", "continue_final_message"
        )
    return turn | {"content": turn["content"] + _END_SIGN}


def _cut(text: str) -> str:
    """The prompt up to the sign; as in transformers, space before it goes where the template trims messages."""
    at = text.rfind(_END_SIGN.strip())
    if at < 0:
        raise InvalidParameter(
            "continue_final_message: this model's chat template does not show the final message as it is",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_END_SIGN, at) else text[:at].rstrip()


def _text_of(part: Any, at: int) -> str:
    if isinstance(part, str):
        return part
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            problem = f"parts of type {kind} are not served, only text"
        case _:
            problem = 'a part must be {"type": "text", "text": …}'
    raise InvalidParameter(f"messages[{at}].content: {problem}", "messages")


def _tool_call(call: Mapping[str, Any], at: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidParameter(
                f"messages[{at}].tool_calls: the arguments of {function.get('name')} are not JSON", "messages"
            ) from None
    return {**call, "function": function}
