"""Converts a conversation to the form that a chat template expects, and renders the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaKind
from quire.server.config.server_options import TEMPLATE_PARAMETERS
from quire.server.parsers.reasoning import detect_reasoning
from quire.server.text.chat_template import ChatTemplate
from quire.server.text.media_prompt import Placeholders

Message = Mapping[str, Any]
"""A message as in the OpenAI API: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""The usual roles of messages."""

_END_SIGN = "\ue000end of the final message\ue000 "
"""Occurs in no conversation. The space shows whether a template trims messages."""
_OF_FUNCTION = ("name", "description", "parameters")
"""The fields of a function that the prompt shows, in this order."""
_PSEUDO_HEADERS = re.compile(r"(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+")
"""The first lines of Claude Code's system prompts. They are for Anthropic's billing, and differ in each request, so
that the cache would have no prefix of the prompt.
"""


@dataclass(frozen=True, kw_only=True)
class ParamNames:
    """An API's names of parameters, for error messages. The defaults are chat's."""

    messages: str = "messages"
    token_ids: str = "kv_transfer_params.prompt_token_ids"
    continue_final_message: str = "continue_final_message"
    reasoning_effort: str = "reasoning_effort"
    thinking: str = "think"
    thinking_budget: str = "thinking_token_budget"
    function: str = ".function"
    """The suffix of `tools[0]` in the name of a function."""
    function_parameters: str = ".function.parameters"
    max_tokens: str = "max_tokens"
    stop: str = "stop"
    logprobs: str = "logprobs"
    structured_outputs: str = "structured_outputs"


CHAT_NAMES = ParamNames()


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """A request's options for rendering a conversation; names and meanings are vLLM's."""

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    reasoning_effort: str | None = None
    thinking: bool | None = None
    """Sets the template's switch for reasoning."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    keep_billing_header: bool = False
    """Whether pseudo-headers of Claude Code at the start of system prompts are kept."""

    def variables(self, template: ChatTemplate, names: ParamNames = CHAT_NAMES) -> dict[str, Any]:
        """Return the template variables that the user sets; raises `InvalidParameter` for unused ones."""
        if taken := TEMPLATE_PARAMETERS.intersection(self.chat_template_kwargs):
            raise InvalidParameter(
                f"chat_template_kwargs cannot set {min(taken)}, which has a parameter of its own",
                "chat_template_kwargs",
            )
        if self.documents and "documents" not in template.reads:
            raise InvalidParameter("this model's chat template does not support documents", "documents")
        switch = template.thinking_switch
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None and "reasoning_effort" in template.reads:
            found["reasoning_effort"] = self.reasoning_effort
        elif self.reasoning_effort == "none" and switch is not None:
            found[switch] = False
        if self.thinking is not None:
            if switch is not None:
                found[switch] = self.thinking
            elif not self.thinking and detect_reasoning(template.source) is not None:
                raise InvalidParameter(
                    f"{names.thinking}: this model's chat template cannot disable it", names.thinking
                )
        return found | dict(self.chat_template_kwargs)

    def ignores_effort(self, template: ChatTemplate) -> bool:
        """Return whether `reasoning_effort`, which is set, has no effect."""
        return "reasoning_effort" not in template.reads and (
            self.reasoning_effort != "none" or template.thinking_switch is None
        )


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    options: ChatTemplateOptions,
    may_call: bool,
    names: ParamNames = CHAT_NAMES,
    placeholders: Placeholders | None = None,
) -> str:
    """Render the prompt; raises `InvalidParameter` for anything that the template cannot express.

    `may_call`: the model may call the tools, so the prompt must show them. With `placeholders`, messages may have
    images and videos, and the prompt is one for `Placeholders.expand`.
    """
    if not messages:
        raise InvalidParameter(f"{names.messages} must not be empty", names.messages)
    if tools and may_call and "tools" not in template.reads:
        raise InvalidParameter(
            "tools: this model's chat template does not support them; start the server with a "
            '--chat-template that does, or send tool_choice: "none"',
            "tools",
        )
    variables = options.variables(template, names) | {
        "tools": [_shown_tool(tool) for tool in tools] or None,
        "documents": list(options.documents) or None,
        "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
    }
    kept = options.keep_billing_header
    found = [_message(message, template.source, at, kept, placeholders) for at, message in enumerate(messages)]
    turns = [turn for turn in found if turn is not None]
    if placeholders is not None:
        turns, variables = placeholders.protected(turns), placeholders.protected(variables)
    if options.continue_final_message:
        if found[-1] is None:
            raise InvalidParameter(
                f"{names.continue_final_message}: nothing is left of the final message without its pseudo-header; "
                "start the server with --keep-billing-header",
                names.continue_final_message,
            )
        turns[-1] = _to_be_continued(turns[-1], names.continue_final_message)
    if placeholders is not None:
        prompt = _render_items(template, turns, variables, names, placeholders)
    else:
        if template.needs_parts:
            turns = [_with_parts(turn) for turn in turns]
        try:
            prompt = template.render(turns, variables, names.messages)
        except InvalidParameter:
            if not any(turn.get("tool_calls") for turn in turns):
                raise
            # Most templates expect tool call arguments as objects, but some (DeepSeek-V3.1's) as JSON text.
            prompt = template.render([_with_arguments_as_text(turn) for turn in turns], variables, names.messages)
    return _cut(prompt, names.continue_final_message) if options.continue_final_message else prompt


def _render_items(
    template: ChatTemplate,
    turns: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
    names: ParamNames,
    placeholders: Placeholders,
) -> str:
    """Render turns with images and videos, in the first form for which the template writes a placeholder for each."""
    kinds: list[MediaKind] = [part["type"] for turn in turns for part in _parts(turn) if part["type"] != "text"]
    forms = [turns]
    if any(turn.get("tool_calls") for turn in turns):
        forms.append([_with_arguments_as_text(turn) for turn in turns])
    # Some templates know no parts, and some show only texts in the results of tools.
    forms += [[_with_placeholders(turn, placeholders.texts) for turn in form] for form in forms]
    problem: InvalidParameter | None = None
    for form in forms:
        given = [_with_parts(turn) for turn in form] if template.needs_parts else form
        try:
            prompt = template.render(given, variables, names.messages)
        except InvalidParameter as error:
            problem = error
            continue
        if placeholders.are_in(prompt, kinds):
            return prompt
        problem = problem or InvalidParameter(
            f"{names.messages}: the model's chat template does not show each image and video once, where it is; move "
            "them to messages of the user",
            names.messages,
        )
    assert problem is not None
    raise problem


def _parts(turn: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return content if isinstance(content := turn.get("content"), list) else ()


def _with_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose content is a list of parts."""
    content = turn.get("content")
    return turn | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


def _with_placeholders(turn: dict[str, Any], texts: Mapping[MediaKind, str]) -> dict[str, Any]:
    """Return a turn whose content is a text."""
    shown = [part["text"] if part["type"] == "text" else texts[part["type"]] for part in _parts(turn)]
    return turn | {"content": "\n".join(shown)} if shown else turn


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the prompt shows it: without null, options for the server such as `strict`, and hints."""
    function = tool["function"]
    shown = {name: function[name] for name in _OF_FUNCTION if function.get(name) is not None}
    return {"type": "function", "function": shown}


def _message(
    message: Message, template: str, at: int, keep_billing_header: bool, placeholders: Placeholders | None
) -> dict[str, Any] | None:
    """Convert a message to the form that templates expect: text content (with images or videos: parts), tool call
    arguments as objects, no empty fields. Returns None for a system prompt that has nothing but pseudo-headers.
    """
    result = {key: value for key, value in message.items() if value is not None}
    role, content = result.get("role"), result.get("content")
    if isinstance(content, list):
        kinds = () if placeholders is None else placeholders.texts
        parts = [part if _is_item(part, kinds) else {"type": "text", "text": _text_of(part, at)} for part in content]
        is_text = all(part["type"] == "text" for part in parts)
        result["content"] = "\n".join(part["text"] for part in parts) if is_text else parts
    text = result.get("content")
    if (
        role in ("system", "developer")
        and not keep_billing_header
        and isinstance(text, str)
        and (headers := _PSEUDO_HEADERS.match(text)) is not None
    ):
        if headers.end() == len(text):
            return None
        result["content"] = text[headers.end() :]
    if "reasoning" in result:
        result.setdefault("reasoning_content", result.pop("reasoning"))
    if ".thinking" in template and "reasoning_content" in result and not (content and message.get("tool_calls")):
        result.setdefault("thinking", result["reasoning_content"])  # gpt-oss's allows this or content beside calls
    if role == "developer" and "developer" not in template:
        result["role"] = "system"
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _with_arguments_as_text(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in turn.get("tool_calls", ())
    ]
    return turn | {"tool_calls": calls} if calls else turn


def _to_be_continued(turn: dict[str, Any], param: str) -> dict[str, Any]:
    """Mark the end of the final message's text. The prompt is cut off there."""
    if not isinstance(turn.get("content"), str) or turn.get("tool_calls"):
        raise InvalidParameter(f"{param}: the last message has no text to continue", param)
    return turn | {"content": turn["content"] + _END_SIGN}


def _cut(text: str, param: str) -> str:
    """Cut the prompt at the mark. As in transformers, space before it is removed if the template trims messages."""
    at = text.rfind(_END_SIGN.strip())
    if at < 0:
        raise InvalidParameter(f"{param}: this model's chat template changes the final message", param)
    return text[:at] if text.startswith(_END_SIGN, at) else text[:at].rstrip()


def _is_item(part: Any, kinds: Collection[str]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds


def _text_of(part: Any, at: int) -> str:
    if isinstance(part, str):
        return part
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            problem = f"parts of type {kind} are not supported, only text"
        case _:
            problem = 'expected {"type": "text", "text": …}'
    raise InvalidParameter(f"messages[{at}].content: {problem}", "messages")


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a call to an object. As in vLLM, those of a call that was cut off, or that is otherwise
    not a JSON object, become `{}`, so that the conversation can go on.
    """
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}
