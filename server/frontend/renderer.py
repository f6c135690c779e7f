"""Converts requests to prompt token ids and `SamplingParams`, and validates them against the model."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.model_files import read_json
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.config import ModelOptions
from quire.server.frontend import conversation
from quire.server.frontend.chat_template import ChatTemplate, ChatTemplates
from quire.server.frontend.conversation import ChatTemplateOptions, Message
from quire.server.frontend.structured_outputs import StructuredOutputCheck
from quire.server.frontend.tokenizer import Tokenizer
from quire.server.frontend.tools import ToolUse
from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning
from quire.server.parsers.tool_formats import TOOL_FORMATS, ToolFormat, detect_tools
from quire.server.parsers.tool_grammar import tool_grammar

Prompt = str | list[int]
T = TypeVar("T")

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SHORT = 2048
"""Characters (and token ids) of a request that are rendered immediately. Larger requests are rendered in a thread, so
that other streams do not wait.
"""
_TAIL = 16
"""Tokens at a prompt's end that may contain a marker that opens or closes reasoning."""


class ContextLengthExceeded(InvalidParameter):
    """Prompt and output exceed the model's maximum length."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """A request's options for rendering embedding inputs."""

    add_special_tokens: bool = True
    truncate: int | None = None
    """Number of tokens to keep of a longer input; -1: the model's maximum length; None: longer inputs are rejected."""
    truncation_side: Literal["left", "right"] = "right"
    """The side that truncation removes."""
    prompt_name: str | None = None
    """Which of the model's prompts to put before a text; None: its default."""


@dataclass(frozen=True)
class ChatFormats:
    """A model's chat template, and the formats of its tool calls and reasoning, by name or `auto` or `none`."""

    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    @staticmethod
    def of(options: ModelOptions) -> ChatFormats:
        """The formats set on the command line."""
        return ChatFormats(options.chat_template, options.tool_call_parser, options.reasoning_parser)

    def tool_format(self, template: str) -> ToolFormat | None:
        """Return the format of tool calls. Mistral's two formats share a name; the template selects one."""
        name: str | None = self.tool_call_parser
        if name == "auto" or (name == "mistral" and detect_tools(template) == "mistral_args"):
            name = detect_tools(template)
        return None if name in (None, "none") else TOOL_FORMATS[name]

    def reasoning_format(self, template: str) -> ReasoningFormat | None:
        """Return the format of reasoning."""
        name = detect_reasoning(template) if self.reasoning_parser == "auto" else self.reasoning_parser
        return None if name in (None, "none") else REASONING_FORMATS[name]


class Renderer:
    """Renders the engine's input for all APIs.

    `defaults` are the sampling parameters that the model's generation_config.json sets.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates | None,
        model: ModelConfig,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_format = tool_format
        self.reasoning_format = reasoning_format
        self.max_model_len = model.max_model_len
        self.pooling = model.pooling
        self.defaults = sampling_defaults(model.path)
        self._templates = templates
        self._structured = StructuredOutputCheck(model)
        self._eos = model.eos_token_ids
        self._vocab_size = model.architecture.vocab_size
        self._max_logprobs = self._vocab_size if model.max_logprobs < 0 else min(model.max_logprobs, self._vocab_size)

    @staticmethod
    def load(model: ModelConfig, formats: ChatFormats) -> Renderer:
        """Load tokenizer and chat template; raises `ConfigError`."""
        tokenizer = Tokenizer.load(model.tokenizer, model.trust_remote_code)
        templates = ChatTemplates.load(model.tokenizer, tokenizer, formats.chat_template)
        source = templates.choose(has_tools=True).source if templates else ""
        return Renderer(tokenizer, templates, model, formats.tool_format(source), formats.reasoning_format(source))

    async def prompt(self, prompt: Prompt, *, add_special_tokens: bool = True, last: int | None = None) -> list[int]:
        """Return a prompt's token ids, or the `last` of them. The tokenizer's special tokens are added to text."""
        (ids,) = await self.prompts([prompt], add_special_tokens=add_special_tokens, last=last)
        return ids

    async def prompts(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True, last: int | None = None
    ) -> list[list[int]]:
        """Like `prompt`, for several prompts."""

        def render() -> list[list[int]]:
            return [self._fitting(self._ids(prompt, add_special_tokens), "prompt", last) for prompt in prompts]

        return await run_in_thread(sum(map(len, prompts)), render)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatTemplateOptions | None = None,
        *,
        last: int | None = None,
    ) -> list[int]:
        """Return a conversation's token ids, or the `last` of them; by default up to the start of the assistant's
        answer.
        """

        def render() -> list[int]:
            return self._fitting(self._chat_ids(messages, tools, options or ChatTemplateOptions()), "messages", last)

        return await run_in_thread(_length(messages, tools), render)

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatTemplateOptions | None = None,
    ) -> list[int]:
        """Like `chat`, without a length limit."""
        return await run_in_thread(
            _length(messages, tools), lambda: self._chat_ids(messages, tools, options or ChatTemplateOptions())
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids, without a length limit."""
        return await run_in_thread(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return tokens as spelled in the vocabulary."""
        return await run_in_thread(len(token_ids), lambda: list(map(self.tokenizer.backend.id_to_token, token_ids)))

    async def detokenize(self, token_ids: list[int], param: str) -> str:
        """Return the text of token ids, including special tokens; rejects ids that the model does not have."""
        self._check_ids(token_ids, param)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=False)

    async def embeddings(self, inputs: Mapping[str, Prompt], options: EmbeddingOptions) -> list[list[int]]:
        """Return token ids of embedding inputs (texts or ids) by name; requires an embedding model."""

        def render() -> list[list[int]]:
            return [self._embedding(given, prompt, options, param) for param, given in inputs.items()]

        prompt = self._embedding_prompt(options.prompt_name)
        return await run_in_thread(sum(len(given) + len(prompt) for given in inputs.values()), render)

    def _embedding(self, given: Prompt, prompt: str, options: EmbeddingOptions, param: str) -> list[int]:
        assert self.pooling is not None
        limit, side = options.truncate, options.truncation_side
        if limit is not None and limit != -1 and not 1 <= limit <= self.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, got {limit}",
                "truncate_prompt_tokens",
            )
        limit = self.max_model_len if limit == -1 else limit
        if not given:
            raise InvalidParameter(f"{param} must not be empty: there is nothing to embed", param)
        if isinstance(given, str):
            text = (prompt + given).lower() if self.pooling.lower_case else prompt + given
            specials = options.add_special_tokens
            if limit is None:
                ids = self.tokenizer.encode(text, add_special_tokens=specials)
            else:
                ids = self.tokenizer.encode_within(text, limit=limit, add_special_tokens=specials, side=side)
            if not ids:
                raise InvalidParameter(f"{param} has no tokens: there is nothing to embed", param)
        else:
            ids = _integers(given, param)
            ids = ids if limit is None else ids[:limit] if side == "right" else ids[-limit:]
        if len(ids) > self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, but {param} has {len(ids)}; "
                "shorten it, or send truncate_prompt_tokens: -1 to truncate it",
                param,
            )
        self._check_ids(ids, param)
        return ids

    def _embedding_prompt(self, name: str | None) -> str:
        """Return the text to put before each embedded text."""
        assert self.pooling is not None
        prompts, chosen = self.pooling.prompts, self.pooling.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise InvalidParameter(f"prompt_name: this model has no prompt {chosen!r}; {known}", "prompt_name")
        if prompts[chosen] and not self.pooling.include_prompt:
            raise InvalidParameter(
                "prompt_name: this model excludes prompts from pooling (include_prompt false), which is not supported",
                "prompt_name",
            )
        return prompts[chosen]

    def _template(self, has_tools: bool, own: str | None) -> ChatTemplate:
        if own is not None:
            try:
                return ChatTemplate(own, self.tokenizer.special_tokens)
            except ConfigError as error:
                raise InvalidParameter(str(error), "chat_template") from None
        if self._templates is None:
            raise InvalidParameter(
                "this model has no chat template; start the server with --chat-template, or use /v1/completions",
                "messages",
            )
        return self._templates.choose(has_tools)

    def reading(
        self,
        prompt_ids: Sequence[int],
        use: ToolUse | None,
        answer: StructuredOutputs | None = None,
        *,
        answer_param: str = "structured_outputs",
        continued: str = "",
        shows_reasoning: bool = True,
    ) -> tuple[OutputFormat | None, StructuredOutputs | None]:
        """Return how to parse the answers to a chat, and the grammar for its tool calls, if one is required.

        With `answer`, the model calls tools or answers in that format. `continued` is the text of a final message that
        the model continues. Raises `InvalidParameter` if there are tools but the model's format of calls is unknown.
        """
        thoughts, format = self.reasoning_format, self.tool_format
        if use is not None and format is None:
            raise InvalidParameter(
                "tools: the format of this model's tool calls could not be detected; set it with "
                '--tool-call-parser when starting the server, or send tool_choice: "none"',
                "tools",
            )
        is_thinking = False
        if thoughts is not None:
            tail = self.tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)
            is_thinking = thoughts.is_opened_by(tail) or continued.rfind(thoughts.open) > continued.rfind(
                thoughts.close
            )
            if not is_thinking and (thoughts.is_closed_by(tail) or continued):
                thoughts = None
        if use is None or format is None:
            reading = OutputFormat(reasoning=thoughts, is_thinking=is_thinking, shows_reasoning=shows_reasoning)
            return reading if thoughts else None, None
        reading = OutputFormat(
            reasoning=thoughts,
            is_thinking=is_thinking,
            shows_reasoning=shows_reasoning,
            tools=format,
            names=frozenset(tool.name for tool in use.tools),
            limit=None if use.several else 1,
        )
        if not use.needs_grammar and answer is None:
            return reading, None
        grammar = tool_grammar(
            format,
            use.tools,
            self.tokenizer.added_id,
            required=use.required,
            several=use.several,
            answer=None if answer is None or use.required else _schema_of(answer, answer_param),
            reasoning=thoughts,
            is_thinking=is_thinking,
        )
        return reading, StructuredOutputs(grammar=grammar)

    async def resolve(self, params: SamplingParams, structured_param: str = "structured_outputs") -> SamplingParams:
        """Return the parameters for the engine and `Frontend.generate`; errors of a format name `structured_param`.

        Rejects whatever the model or tokenizer does not support, and too many log-probabilities.
        """
        outputs, params = params.structured_outputs, _checked(params)
        self.check_logprobs(params.logprobs, "logprobs")
        self.check_logprobs(params.prompt_logprobs, "prompt_logprobs")
        given = (params.stop_token_ids, params.logit_bias, params.allowed_token_ids or (), *params.bad_words)
        bad = await run_in_thread(sum(map(len, given)), lambda: self._bad_word_ids(params))
        if outputs is not None:
            outputs = await self._structured.resolve_in_thread(outputs, structured_param)
        return msgspec.structs.replace(params, bad_word_ids=bad, structured_outputs=outputs)

    async def check_structured(self, outputs: StructuredOutputs, param: str) -> None:
        """Raise `InvalidParameter` about `param` for structured outputs that cannot be enforced."""
        await self._structured.resolve_in_thread(outputs, param)

    def close(self) -> None:
        """Stop the process that compiles grammars."""
        self._structured.close()

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Reject requests for more log-probabilities than --max-logprobs allows."""
        if count is not None and not 0 <= count <= self._max_logprobs:
            raise InvalidParameter(
                f"{param} must be from 0 to {self._max_logprobs} (--max-logprobs), got {count}", param
            )

    def truncation(self, asked: int | None, max_tokens: int | None) -> int | None:
        """Resolve `truncate_prompt_tokens` to a number of prompt tokens; -1: the maximum length minus the output."""
        if asked == -1:
            return max(1, self.max_model_len - max(1, max_tokens or 1))
        if asked is not None and not 1 <= asked <= self.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, got {asked}",
                "truncate_prompt_tokens",
            )
        return asked

    def check_length(self, prompt_ids: Sequence[int], max_tokens: int | None, param: str) -> None:
        """Reject a request whose prompt and full output exceed the model's length."""
        if max_tokens is not None and len(prompt_ids) + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, but the prompt has "
                f"{len(prompt_ids)} and the output (max_tokens) {max_tokens}, {len(prompt_ids) + max_tokens} in total",
                param,
            )

    def _fitting(self, ids: list[int], param: str, last: int | None) -> list[int]:
        if last is not None:
            ids = ids[-last:]
        if not ids:
            raise InvalidParameter(f"{param} must not be empty: there is no token to continue from", param)
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, output included, but the "
                f"prompt has {len(ids)}",
                param,
            )
        self._check_ids(ids, param)
        return ids

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of `bad_words`; rejects unknown ids, and bad words that exclude every allowed token."""
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.logit_bias, "logit_bias")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        bad = [ids for word in params.bad_words for ids in self._bad_word(word)]
        forbidden = {ids[0] for ids in bad if len(ids) == 1}
        if params.min_tokens:
            forbidden.update(self._eos, params.stop_token_ids)
        if params.allowed_token_ids is not None and forbidden.issuperset(params.allowed_token_ids):
            raise InvalidParameter(
                "allowed_token_ids: bad_words or min_tokens exclude all of them", "allowed_token_ids"
            )
        return bad

    def _bad_word(self, word: str) -> list[list[int]]:
        """Tokenize a word as at the start of a text and, if the result differs, as after a space."""
        text = word.strip()
        first, spaced = (self.tokenizer.encode(each, add_special_tokens=False) for each in (text, f" {text}"))
        both = [first, spaced] if len(spaced) == len(first) and spaced[0] != first[0] else [first]
        self._check_ids(itertools.chain(*both), "bad_words")
        return [ids for ids in both if ids]

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        """Reject ids outside of the model's vocabulary; a tokenizer may have more tokens than its model."""
        if (bad := next((i for i in ids if not 0 <= i < self._vocab_size), None)) is not None:
            raise InvalidParameter(
                f"{param}: token id {bad} is not in the model's vocabulary (0 to {self._vocab_size - 1})", param
            )

    def _ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return _integers(prompt, "prompt")

    def _chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: ChatTemplateOptions
    ) -> list[int]:
        template = self._template(bool(tools), options.chat_template)
        text = conversation.text(template, messages, tools, options)
        return self.tokenizer.encode(text, add_special_tokens=options.add_special_tokens)


async def run_in_thread(size: int, work: Callable[[], T]) -> T:
    """Return the result of work on so many characters or tokens: in a thread, unless there are few."""
    return work() if size <= _SHORT else await asyncio.to_thread(work)


def _length(*values: Any) -> int:
    """The number of characters and items in these values; stops counting when there are many."""
    count, ahead = 0, [*values]
    while ahead and count <= _SHORT:
        match ahead.pop():
            case str(text):
                count += len(text)
            case Mapping() as each:
                count += len(each)
                ahead += each.values()
            case Sequence() as each:
                count += len(each)
                ahead += each
    return count


def _checked(params: SamplingParams) -> SamplingParams:
    """Return a copy of `params` with validated types, since a struct made in Python may contain anything. Omits
    `structured_outputs`, which are validated separately.
    """
    try:
        plain = msgspec.structs.replace(params, structured_outputs=None)
        checked: SamplingParams = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=SamplingParams)
    except InvalidParameter:
        raise
    except UnicodeEncodeError as error:
        param = "stop" if error.object in params.stop else "bad_words"
        raise InvalidParameter(f"{param}: {error.object!r} contains an unpaired surrogate", param) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(f"sampling parameters: {error}") from None
    return checked


def _schema_of(answer: StructuredOutputs, param: str) -> Any:
    """The JSON schema of a format used together with tools; raises `InvalidParameter` for other formats."""
    if answer.json_object:
        return {"type": "object"}
    if answer.json is None:
        raise InvalidParameter(
            f"{param}: together with tools, only json and json_object are supported; send "
            'tool_choice: "none", or omit the tools',
            param,
        )
    return json.loads(answer.json) if isinstance(answer.json, str) else answer.json


def _integers(token_ids: Iterable[Any], param: str) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise InvalidParameter(f"{param}: token ids must be integers", param) from None


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters in generation_config.json. A request's own take precedence."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    config = read_json(path)
    return {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
