"""Request → prompt token ids and `SamplingParams`, checked against the model."""

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

from quire.engine.config.model_files import read_json
from quire.engine.config.options import ModelConfig
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.messages import SamplingParams, StructuredOutputs
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
"""Characters (and token ids) of a request up to which it is rendered at once; more of them in a thread, so that other
streams do not wait."""
_TAIL = 16
"""Tokens at a prompt's end in which a marker that opens or closes thoughts fits."""


class ContextLengthExceeded(InvalidParameter):
    """Prompt and output do not fit into the model's length."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """What a request says about rendering what is to be embedded."""

    add_special_tokens: bool = True
    truncate: int | None = None
    """Tokens that are kept of a longer input; -1: as many as the model takes; None: it is refused."""
    truncation_side: Literal["left", "right"] = "right"
    """The end of the input that goes."""
    prompt_name: str | None = None
    """Which of the model's prompts goes before a text; None: its default."""


@dataclass(frozen=True)
class ChatFormats:
    """How a model chats: its template, and the formats of its calls and thoughts, by name or `auto` or `none`."""

    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    @staticmethod
    def of(options: ModelOptions) -> ChatFormats:
        """Those that the command line names."""
        return ChatFormats(options.chat_template, options.tool_call_parser, options.reasoning_parser)

    def tool_format(self, template: str) -> ToolFormat | None:
        """The format of calls; Mistral's two go by one name, and the template tells them apart."""
        name: str | None = self.tool_call_parser
        if name == "auto" or (name == "mistral" and detect_tools(template) == "mistral_args"):
            name = detect_tools(template)
        return None if name in (None, "none") else TOOL_FORMATS[name]

    def reasoning_format(self, template: str) -> ReasoningFormat | None:
        """The format of thoughts."""
        name = detect_reasoning(template) if self.reasoning_parser == "auto" else self.reasoning_parser
        return None if name in (None, "none") else REASONING_FORMATS[name]


class Renderer:
    """Makes what the engine reads; every front end renders here.

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
        """Read tokenizer and chat template; raises `ConfigError`."""
        tokenizer = Tokenizer.load(model.tokenizer, model.trust_remote_code)
        templates = ChatTemplates.load(model.tokenizer, tokenizer, formats.chat_template)
        source = templates.choose(has_tools=True).source if templates else ""
        return Renderer(tokenizer, templates, model, formats.tool_format(source), formats.reasoning_format(source))

    async def prompt(self, prompt: Prompt, *, add_special_tokens: bool = True, last: int | None = None) -> list[int]:
        """Token ids of a prompt, or the `last` of them; text gets the special tokens that the tokenizer adds to it."""
        (ids,) = await self.prompts([prompt], add_special_tokens=add_special_tokens, last=last)
        return ids

    async def prompts(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True, last: int | None = None
    ) -> list[list[int]]:
        """The same of each prompt."""

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
        """Token ids of a conversation, or the `last` of them, by default up to where the assistant begins to speak."""

        def render() -> list[int]:
            return self._fitting(self._chat_ids(messages, tools, options or ChatTemplateOptions()), "messages", last)

        return await run_in_thread(_length(messages, tools), render)

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatTemplateOptions | None = None,
    ) -> list[int]:
        """The same, however long it is."""
        return await run_in_thread(
            _length(messages, tools), lambda: self._chat_ids(messages, tools, options or ChatTemplateOptions())
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, however long it is."""
        return await run_in_thread(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Tokens as the vocabulary spells them."""
        return await run_in_thread(len(token_ids), lambda: list(map(self.tokenizer.backend.id_to_token, token_ids)))

    async def detokenize(self, token_ids: list[int], param: str) -> str:
        """The text of token ids, special tokens included; refuses those that the model does not have."""
        self._check_ids(token_ids, param)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=False)

    async def embeddings(self, inputs: Mapping[str, Prompt], options: EmbeddingOptions) -> list[list[int]]:
        """Token ids of what is to be embedded, texts or ids, by their names; for a server whose model embeds."""

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
                "shorten it, or send truncate_prompt_tokens: -1 to have its end cut off",
                param,
            )
        self._check_ids(ids, param)
        return ids

    def _embedding_prompt(self, name: str | None) -> str:
        """The text that goes before a text that is embedded."""
        assert self.pooling is not None
        prompts, chosen = self.pooling.prompts, self.pooling.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise InvalidParameter(f"prompt_name: this model has no prompt {chosen!r}; {known}", "prompt_name")
        if prompts[chosen] and not self.pooling.pools_prompts:
            raise InvalidParameter(
                "prompt_name: this model leaves prompts out of its pooling (include_prompt false), which is not served",
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
                "this model brings no chat template; start the server with --chat-template, or use /v1/completions",
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
        """How the answers to a chat are to be read, and the grammar that holds the model to its tools, where one must.

        With `answer`, the model calls tools or answers in that format. `continued` is the text of a final message that
        the model continues. Raises `InvalidParameter` where there are tools and nobody knows how this model calls them.
        """
        thoughts, format = self.reasoning_format, self.tool_format
        if use is not None and format is None:
            raise InvalidParameter(
                "tools: this model's chat template shows no format of tool calls that is known; name one with "
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
        """The parameters as the engine takes them, `Frontend.generate` too; errors of a format are about
        `structured_param`.

        Refuses what the model or its tokenizer does not have, and more log-probabilities than are served.
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
        """Raise `InvalidParameter` about `param` for what cannot be enforced."""
        await self._structured.resolve_in_thread(outputs, param)

    def close(self) -> None:
        """End the process that compiles grammars."""
        self._structured.close()

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Refuse to tell more of the likeliest tokens than --max-logprobs allows."""
        if count is not None and not 0 <= count <= self._max_logprobs:
            raise InvalidParameter(
                f"{param} must be from 0 to {self._max_logprobs} here (--max-logprobs), got {count}", param
            )

    def truncation(self, asked: int | None, max_tokens: int | None) -> int | None:
        """How many tokens `truncate_prompt_tokens` leaves of a prompt; -1: what its output leaves of the length."""
        if asked == -1:
            return max(1, self.max_model_len - max(1, max_tokens or 1))
        if asked is not None and not 1 <= asked <= self.max_model_len:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be -1 or from 1 to {self.max_model_len}, got {asked}",
                "truncate_prompt_tokens",
            )
        return asked

    def check_length(self, prompt_ids: Sequence[int], max_tokens: int | None, param: str) -> None:
        """Refuse a request whose full output could not fit behind its prompt."""
        if max_tokens is not None and len(prompt_ids) + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, but {len(prompt_ids)} in the "
                f"prompt and {max_tokens} for the output (max_tokens) make {len(prompt_ids) + max_tokens}",
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
        """The tokens of `bad_words`; refuses ids that the model does not have, and those that leave nothing."""
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.logit_bias, "logit_bias")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        bad = [ids for word in params.bad_words for ids in self._bad_word(word)]
        forbidden = {ids[0] for ids in bad if len(ids) == 1}
        if params.min_tokens:
            forbidden.update(self._eos, params.stop_token_ids)
        if params.allowed_token_ids is not None and forbidden.issuperset(params.allowed_token_ids):
            raise InvalidParameter(
                "allowed_token_ids: bad_words, or min_tokens, forbid every one of them", "allowed_token_ids"
            )
        return bad

    def _bad_word(self, word: str) -> list[list[int]]:
        """The tokens of a word as a text begins with it, and as they are behind a space where they begin otherwise."""
        text = word.strip()
        first, spaced = (self.tokenizer.encode(each, add_special_tokens=False) for each in (text, f" {text}"))
        both = [first, spaced] if len(spaced) == len(first) and spaced[0] != first[0] else [first]
        self._check_ids(itertools.chain(*both), "bad_words")
        return [ids for ids in both if ids]

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        """Refuse ids that the model has no row for; a tokenizer may know more tokens than its model."""
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
    """The result of work on so many characters, tokens or the like: in a thread unless it is short."""
    return work() if size <= _SHORT else await asyncio.to_thread(work)


def _length(*values: Any) -> int:
    """Characters and items in these, counted no further than it takes to know that they are many."""
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
    """A copy of `params` whose types are those declared: a struct made in Python may hold anything. It is without
    `structured_outputs`, which have a check of their own."""
    try:
        plain = msgspec.structs.replace(params, structured_outputs=None)
        checked: SamplingParams = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=SamplingParams)
    except InvalidParameter:
        raise
    except UnicodeEncodeError as error:
        param = "stop" if error.object in params.stop else "bad_words"
        raise InvalidParameter(f"{param}: {error.object!r} has half of a surrogate pair", param) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidParameter(f"sampling parameters: {error}") from None
    return checked


def _schema_of(answer: StructuredOutputs, param: str) -> Any:
    """The JSON schema of a format that stands beside tools; raises `InvalidParameter` for one that is no JSON."""
    if answer.json_object:
        return {"type": "object"}
    if answer.json is None:
        raise InvalidParameter(
            f"{param}: while the model may call tools, the answer can be held to json or json_object alone; send "
            'tool_choice: "none", or no tools',
            param,
        )
    return json.loads(answer.json) if isinstance(answer.json, str) else answer.json


def _integers(token_ids: Iterable[Any], param: str) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise InvalidParameter(f"{param}: token ids must be integers", param) from None


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling parameters that generation_config.json sets; a request's own go before them."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    config = read_json(path)
    return {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
