"""Renders and tokenizes the requests of all APIs, and validates them against the model."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.engine.architecture.encoder_spec import EncoderSpec
from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.server.media.client import MediaClient
from quire.server.media.types import MediaSource
from quire.server.parsers.output_parser import OutputFormat
from quire.server.parsers.reasoning import detect_reasoning
from quire.server.parsers.tool_formats import Quoted, Tagged
from quire.server.parsers.tool_grammar import GrammarTool, has_closing_token, thoughts_grammar, tool_grammar
from quire.server.text.adapter import OWN_TEMPLATE
from quire.server.text.chat_formats import ChatFormats
from quire.server.text.chat_template import ChatTemplate, ChatTemplates
from quire.server.text.conversation import CHAT_NAMES, ROLES, ParamNames
from quire.server.text.inputs import (
    ChatInput,
    ContextLengthExceeded,
    GenerationInput,
    Processed,
    Prompt,
    RequestOptions,
    TruncationSide,
)
from quire.server.text.json_schema import checked_schema
from quire.server.text.media_input import MediaAccess, MediaInput, MediaLease, text_only
from quire.server.text.media_prompt import ItemSpan, Placeholders, media_items, split_ids, truncated_items, with_pages
from quire.server.text.pooling_processor import ItemTokenizer, MarkedIds, PoolingProcessor, RenderMarked
from quire.server.text.prompt_tokenizer import PromptTokenizer, run_in_thread, truncated
from quire.server.text.schemas.common import Budget
from quire.server.text.structured_outputs import SizeCheck, StructuredOutputCheck, about, new_dropped, warn
from quire.server.text.template_renderer import LocalRenderer, TemplateRenderer
from quire.server.text.tokenizer import Tokenizer
from quire.server.text.tools import ToolUse

logger = logging.getLogger(__name__)

_DEFAULT_OPTIONS = RequestOptions()
_MAX_IGNORED = 256
"""Ignored fields that are logged; clients choose their names."""
_INDEX = re.compile(r"\[[0-9]+\]")
_PREDICTED_CHARACTERS = 16
"""Characters of a prediction that are read for each token of the model's length: more tokens are of no use."""
_MAX_OWN_TEMPLATES = 32
"""Templates of adapters that are kept compiled."""
_TAIL = 16
"""Tokens at a prompt's end that may contain a marker that opens or closes reasoning."""


class InputProcessor:
    """Converts requests to the engine's input. Raises `InvalidParameter` for anything that the model cannot do.

    `structured` checks structured outputs; default: by compiling them. `renderer` renders chat templates; default: this
    process does. `media` loads images and videos; None: the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates | None,
        model: ModelConfig,
        formats: ChatFormats,
        structured: StructuredOutputCheck | SizeCheck | None = None,
        renderer: LocalRenderer | None = None,
        media: MediaInput | None = None,
    ) -> None:
        source = templates.choose(has_tools=True).source if templates else ""
        self.chat_template = templates.choose(has_tools=False).source if templates else None
        self.tokenizer = tokenizer
        self.tool_format = formats.tool_format(source)
        self.reasoning_format = formats.reasoning_format(source)
        self.max_model_len = model.max_model_len
        self.pooling = model.pooling
        self._prompts = PromptTokenizer(tokenizer, model)
        self._renderer = renderer or LocalRenderer()
        self.media = media
        self._leases: list[MediaLease] = []
        """Those that another process must adopt."""
        self._pooled: PoolingProcessor | None = None
        if model.pooling is not None:
            template = templates.choose(has_tools=False) if templates and formats.chat_template is not None else None
            has_types = isinstance(arch := model.architecture, EncoderSpec) and arch.token_types > 1
            tokenize = ItemTokenizer(self._render, self._tokenize_items, self._expand_items)
            self._pooled = PoolingProcessor(self._prompts, model.pooling, template, has_types, self._renderer, tokenize)
        self.sampling_defaults = model.sampling_defaults
        self._max_output_tokens = model.max_output_tokens
        self._templates = templates
        self._own_templates: dict[str, ChatTemplate] = {}
        """Templates of adapters, by their texts."""
        self._variables = _variables(tokenizer, formats)
        self._trusts_templates = formats.trust_request_chat_template
        self._is_strict = formats.strict_parameters
        self._keeps_billing_header = formats.keep_billing_header
        self.ignored: set[str] = set()
        """The fields of requests that had no effect so far, without indices."""
        self._fallback = formats.structured_outputs_fallback
        self._structured = structured or StructuredOutputCheck(model, self._fallback)
        self._is_for_other = isinstance(structured, SizeCheck)
        """Whether another process asks, which logs, checks structured outputs and adopts leases."""
        self._eos = model.eos_token_ids
        self._vocab_size = model.architecture.vocab_size
        self._max_logprobs = self._vocab_size if model.max_logprobs < 0 else min(model.max_logprobs, self._vocab_size)

    @staticmethod
    def load(
        model: ModelConfig,
        formats: ChatFormats,
        structured: SizeCheck | None = None,
        media: MediaAccess | None = None,
    ) -> InputProcessor:
        """Load tokenizer and chat template; raises `ConfigError`. With a `SizeCheck`, everything else happens in this
        process. Without `media`, images and videos are refused.
        """
        tokenizer = Tokenizer.load(model.tokenizer, model.trust_remote_code)
        variables = _variables(tokenizer, formats)
        template = formats.chat_template
        if template is None and model.pooling is not None:
            template = model.pooling.chat_template
        templates = ChatTemplates.load(model.tokenizer, tokenizer, template, variables)
        unread = sorted({*(formats.default_chat_template_kwargs or ())} - (templates.reads if templates else set()))
        if unread and not isinstance(structured, SizeCheck):  # otherwise the process that asks does so
            logger.warning("--default-chat-template-kwargs: no chat template of the model reads %s", ", ".join(unread))
        renderer = None if isinstance(structured, SizeCheck) else TemplateRenderer(templates)
        taken = None
        if media is not None:
            spec = model.architecture.media
            assert spec is not None
            taken = MediaInput(MediaClient(media.path), spec, media.limits)
        return InputProcessor(tokenizer, templates, model, formats, structured, renderer, taken)

    def limit(self, max_model_len: int) -> None:
        """Change the model's length."""
        self.max_model_len = self._prompts.max_model_len = max_model_len

    @property
    def pooled(self) -> PoolingProcessor:
        """Processes requests to a model that pools."""
        assert self._pooled is not None
        return self._pooled

    def start(self) -> None:
        """Start the process that renders chat templates, which otherwise starts with the first conversation."""
        if self._templates is not None and (self.pooling is None or self.pooled.renders):
            self._renderer.start()

    def close(self) -> None:
        """Stop the processes that compile grammars and render templates."""
        self._structured.close()
        self._renderer.close()
        if self.media is not None:
            self.media.loader.close()

    def ignore(self, params: Iterable[str]) -> None:
        """Record fields of a request that have no effect, and log each once.

        With `--strict-parameters`, raises `InvalidParameter` for the first one.
        """
        for param in sorted(params):
            if self._is_strict:
                raise InvalidParameter(f"{param} is not supported, and --strict-parameters is set", param)
            name = _INDEX.sub("[]", param)[:100]
            if name not in self.ignored and len(self.ignored) < _MAX_IGNORED:
                self.ignored.add(name)
                if not self._is_for_other:  # otherwise the process that asks does so
                    logger.info("request field %s has no effect (--strict-parameters rejects it)", ascii(name)[1:-1])

    async def resolve(self, processed: Processed) -> Any:
        """Return the value of a request that another process has processed, when its structured outputs are checked,
        and the data of its images is kept."""
        for lease in processed.leases:
            assert self.media is not None
            await lease.adopt(self.media.loader)
        for outputs, param in processed.unresolved:
            resolved = await self._structured.resolve_in_thread(outputs, param)
            for name in outputs.__struct_fields__:
                setattr(outputs, name, getattr(resolved, name))
        return processed.value

    def take_unresolved(self) -> Sequence[tuple[StructuredOutputs, str]]:
        """Return the outputs that this processor, which only checks sizes, has left for another one to `resolve`."""
        assert isinstance(self._structured, SizeCheck)
        left, self._structured.unresolved = self._structured.unresolved, []
        return left

    def take_leases(self) -> Sequence[MediaLease]:
        """Return the leases of what this processor has loaded for another process, which adopts them."""
        left, self._leases = self._leases, []
        for lease in left:
            assert self.media is not None
            self.media.loader.hand_over(lease.name)
        return left

    # --- generation ---------------------------------------------------------------------------------------------

    async def process_prompts(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions = _DEFAULT_OPTIONS,
        *,
        add_special_tokens: bool = True,
        media: Sequence[MediaSource] = (),
    ) -> GenerationInput:
        """Process texts and token ids to continue. With `add_special_tokens`, texts get the tokenizer's. With `media`,
        there is one prompt, which has a placeholder for each of these items.
        """
        params = await self._validate(params, options.param_names)
        last = self._prompts.num_kept(options.truncate_prompt_tokens, params.max_tokens or 1)
        side = options.truncation_side
        max_tokens = params.max_tokens if options.reject_long_output else None

        def tokenize() -> list[list[int]]:
            tokenized, total = [], 0
            for prompt in prompts:
                ids = self._prompts.token_ids(prompt, "prompt", last, add_special_tokens, side)
                tokenized.append(self._fit(ids, "prompt", last, max_tokens, side))
                total = self._prompts.add_tokens(total, tokenized[-1], "prompt")
            return tokenized

        items: list[MediaItem] = []
        lease = None
        if media:
            if len(prompts) != 1:
                raise InvalidParameter("prompt: images and videos need a single prompt", "prompt")
            (prompt,) = prompts
            ids, items, lease = await self._expand_items(media, prompt, last, side, "prompt", add_special_tokens)
            tokenized = [self._fit(ids, "prompt", None, max_tokens, side)]
        else:
            tokenized = await run_in_thread(sum(map(len, prompts)), tokenize)
        if (outputs := params.structured_outputs) is not None:
            name = options.param_names.structured_outputs
            params.structured_outputs = await self._structured.resolve_in_thread(outputs, name)
        return GenerationInput(
            prompts=tokenized,
            params=params,
            priority=options.priority,
            cache_salt=options.cache_salt,
            kv_peer=options.kv_peer,
            length_penalty=options.length_penalty,
            media=[items] if items else (),
            media_lease=lease,
        )

    async def process_chat(
        self, chat: ChatInput, params: SamplingParams, options: RequestOptions = _DEFAULT_OPTIONS
    ) -> GenerationInput:
        """Process a conversation. Raises `InvalidParameter` also if the model may call tools and their format is
        unknown, or the reasoning is to be limited and its format is unknown.
        """
        names = options.param_names
        if chat.thinking_budget is not None and self.reasoning_format is None:
            raise InvalidParameter(
                f"{names.thinking_budget}: this model has no reasoning whose format is known; omit it, or set "
                "--reasoning-parser when starting the server",
                names.thinking_budget,
            )
        params = await self._validate(params, names)
        last = self._prompts.num_kept(options.truncate_prompt_tokens, params.max_tokens or 1)
        side = options.truncation_side
        max_tokens = params.max_tokens if options.reject_long_output else None
        items: list[MediaItem] = []
        lease = None
        if chat.media:
            ids, items, lease = await self._tokenize_chat_items(chat, last, side, names)
            prompt = self._fit(ids, names.messages, None, max_tokens, side)
        elif chat.token_ids is not None:
            prompt = self._fit([*chat.token_ids], names.token_ids, last, max_tokens, side)
        else:
            text = await self._render(chat, names)

            def tokenize() -> list[int]:
                cut = self._prompts.cut(text, names.messages, last, side)
                ids = self.tokenizer.encode(cut, add_special_tokens=chat.template.add_special_tokens)
                return self._fit(ids, names.messages, last, max_tokens, side)

            prompt = await run_in_thread(len(text), tokenize)
        output_format = self._output_format(chat, prompt)
        if (answer := params.structured_outputs) is not None:
            params.structured_outputs = await self._structured.resolve_in_thread(answer, names.structured_outputs)
        thoughts, budget = None if output_format is None else output_format.reasoning, chat.thinking_budget
        if thoughts is None or (answer is not None and chat.tool_use is None):  # a structured answer has no thoughts
            budget = None
        elif budget is not None and not has_closing_token(thoughts, self.tokenizer.added_id):
            raise InvalidParameter(
                f"{names.thinking_budget}: it needs a token that closes reasoning, but this model writes "
                f"{thoughts.close!r} as text",
                names.thinking_budget,
            )
        needs_grammar = chat.tool_use is not None and (chat.tool_use.needs_grammar or budget is not None)
        if chat.tool_use is not None and (needs_grammar or answer is not None):
            schema = None if answer is None or chat.tool_use.required else _schema_of(answer, names.structured_outputs)
            for each in [tool.grammar for tool in chat.tool_use.tools if tool.grammar is not None]:
                await self._structured.resolve_in_thread(StructuredOutputs(grammar=each.definition), each.param)
            # Even a small schema may take long to check.
            grammar = await asyncio.to_thread(self._tool_grammar, chat.tool_use, output_format, schema, budget)
            params.structured_outputs = await self._resolve_tools(grammar, chat.tool_use)
            assert output_format is not None
            output_format = replace(output_format, is_enforced=True)
        elif budget is not None:
            assert output_format is not None
            assert thoughts is not None
            limit = thoughts_grammar(thoughts, self.tokenizer.added_id, output_format.is_thinking, budget)
            params.structured_outputs = await self._structured.resolve_in_thread(
                StructuredOutputs(grammar=limit), names.thinking_budget
            )
        return GenerationInput(
            prompts=[prompt],
            params=params,
            is_chat=True,
            output_format=output_format,
            priority=options.priority,
            cache_salt=options.cache_salt,
            kv_peer=options.kv_peer,
            length_penalty=options.length_penalty,
            media=[items] if items else (),
            media_lease=lease,
        )

    async def _resolve_tools(self, grammar: StructuredOutputs, use: ToolUse) -> StructuredOutputs:
        """Resolve the grammar of these tools. An error about a keyword names the tool."""
        try:
            return await self._structured.resolve_in_thread(grammar, "tools")
        except InvalidParameter:
            checked = [tool for tool in use.tools if tool.strict or use.required]
            await asyncio.to_thread(_checked, checked, new_dropped(self._fallback))
            raise

    async def _validate(self, params: SamplingParams, names: ParamNames) -> SamplingParams:
        """Return a copy of `params` with the token ids of bad words, and with numbers of log-probabilities.

        `SamplingParams` itself checks the ranges that do not depend on the model.
        """
        if params.structured_outputs is not None and params.structured_outputs.num_marks:
            raise InvalidParameter(
                f"{names.structured_outputs}: num_marks is the server's own", names.structured_outputs
            )
        counts: dict[str, int | None] = {}
        for field_name, name, count in (
            ("logprobs", names.logprobs, params.logprobs),
            ("prompt_logprobs", "prompt_logprobs", params.prompt_logprobs),
        ):
            counts[field_name] = self._vocab_size if count == -1 else count
            if (counts[field_name] or 0) > self._max_logprobs:
                if count == -1:
                    raise InvalidParameter(f"{name}: -1 requires a server started with --max-logprobs -1", name)
                raise InvalidParameter(
                    f"{name} must be from 0 to {self._max_logprobs} (--max-logprobs), got {count}", name
                )
        if (scored := params.logprob_token_ids) is not None:
            scored = [*dict.fromkeys(scored)]
            if len(scored) > self._max_logprobs:
                raise InvalidParameter(
                    f"logprob_token_ids: at most {self._max_logprobs} are allowed (--max-logprobs), got {len(scored)}",
                    "logprob_token_ids",
                )
            self._prompts.check_ids(scored, "logprob_token_ids")
            counts["logprobs"] = len(scored)
        given = (params.stop_token_ids, params.logit_bias, params.allowed_token_ids or (), *params.bad_words)
        params = msgspec.structs.replace(
            params, bad_word_ids=[], predicted_token_ids=[], logprob_token_ids=scored, **counts
        )
        if text := params.prediction:
            text = text[: _PREDICTED_CHARACTERS * self.max_model_len]
            tokenize = partial(self.tokenizer.encode, text, add_special_tokens=False)
            predicted = (await run_in_thread(len(text), tokenize))[: self.max_model_len]
            params.predicted_token_ids = [*itertools.takewhile(lambda token: token < self._vocab_size, predicted)]
        if any(given):
            params.bad_word_ids = await run_in_thread(sum(map(len, given)), lambda: self._bad_word_ids(params))
        if (most := self._max_output_tokens) is not None:
            params.max_tokens = most if params.max_tokens is None else min(params.max_tokens, most)
        return params

    async def _tokenize_chat_items(
        self, chat: ChatInput, last: int | None, side: TruncationSide, names: ParamNames
    ) -> tuple[list[int], list[MediaItem], MediaLease]:
        """`_tokenize_items` for a conversation."""

        async def render(placeholders: Placeholders | None, counts: Sequence[Sequence[int | str]]) -> list[str]:
            shown = replace(chat, messages=with_pages(chat.messages, counts[0])) if counts else chat
            return [await self._render(shown, names, placeholders)]

        specials = chat.template.add_special_tokens
        made, lease = await self._tokenize_items([chat.media], render, last, side, [names.messages], specials)
        return *made[0], lease

    async def _tokenize_items(
        self,
        media: Sequence[Sequence[MediaSource]],
        render: RenderMarked,
        last: int | None,
        side: TruncationSide,
        params: Sequence[str],
        add_special_tokens: bool,
    ) -> tuple[list[MarkedIds], MediaLease]:
        """Return the token ids of prompts with images and videos, at most the `last` ones, with the items, which are
        loaded. `media` has the sources of each prompt, and `params` its name. Raises `InvalidParameter` also if an item
        would be cut, and `MediaUnavailable`.
        """
        if self.media is None:
            raise text_only(next(itertools.chain(*media)))
        for sources in media:
            placeholders = await self.media.check(sources)
        spec = self.media.spec
        has_documents = any(source.is_document for source in itertools.chain(*media))  # their pages are not known yet
        rendered = () if has_documents else await render(placeholders, ())
        loaded, name = await self.media.load(media)
        lease = MediaLease(name, None if self._is_for_other else self.media.loader)
        if has_documents:
            rendered = await render(placeholders, [each.counts for each in loaded])
        expanded = [placeholders.expand(text, each.items) for text, each in zip(rendered, loaded, strict=True)]
        add_special_tokens &= placeholders.adds_special_tokens
        if last is None:
            for (text, _), param in zip(expanded, params, strict=True):
                self._prompts.cut(text, param, None)

        def tokenize() -> list[MarkedIds]:
            found, total = list[MarkedIds](), 0
            for (text, spans), each, param in zip(expanded, loaded, params, strict=True):
                ids, offsets = self.tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
                items = media_items(ids, offsets, spans, each.items, each.sources, spec)
                if last is not None:
                    names = [each.sources[span.item].param for span in spans]
                    items = truncated_items(items, len(ids), last, side, names)
                    ids = truncated(ids, last, side)
                total = self._prompts.add_tokens(total, ids, param.partition("[")[0])
                found.append((ids, items))
            return found

        made = await run_in_thread(sum(len(text) for text, _ in expanded), tokenize)
        if self._is_for_other:
            self._leases.append(lease)
        return made, lease

    async def _expand_items(
        self,
        media: Sequence[MediaSource],
        prompt: Prompt,
        last: int | None,
        side: TruncationSide,
        param: str,
        add_special_tokens: bool,
    ) -> tuple[list[int], list[MediaItem], MediaLease]:
        """Like `_tokenize_items`, for a text or token ids with the placeholder for each item."""
        if isinstance(prompt, str):
            text = prompt

            async def as_it_is(placeholders: Placeholders | None, counts: Sequence[Sequence[int | str]]) -> list[str]:
                assert placeholders is not None
                if not placeholders.are_in(text, [source.kind for source in media]):
                    wanted = " or ".join(repr(placeholders.texts[kind]) for kind in placeholders.texts)
                    raise InvalidParameter(f"{param}: it must have {wanted} once for each item", param)
                return [text]

            made, lease = await self._tokenize_items([media], as_it_is, last, side, [param], add_special_tokens)
            return *made[0], lease
        if self.media is None:
            raise text_only(media[0])
        placeholders, spec = await self.media.check(media), self.media.spec
        encode = partial(self.tokenizer.encode_with_offsets, add_special_tokens=False)
        marks = {tuple(encode(text)[0]): text for text in placeholders.texts.values()}
        parts = [*split_ids(prompt, marks)]
        if Counter(marks[part] for part in parts if part in marks) != placeholders.counts(each.kind for each in media):
            wanted = " or ".join(f"{[*mark]} ({text!r})" for mark, text in marks.items())
            raise InvalidParameter(f"{param}: it must have the tokens {wanted} once for each item", param)
        (loaded,), name = await self.media.load([media])
        lease = MediaLease(name, None if self._is_for_other else self.media.loader)

        def expand() -> tuple[list[int], list[MediaItem]]:
            ids, items, params = list[int](), list[MediaItem](), list[str]()
            order = placeholders.order(loaded.items)
            for part in parts:
                if part not in marks:
                    ids += part
                    continue
                at = next(order[marks[part]])
                item, own = loaded.items[at], encode(loaded.items[at].text)
                (made,) = media_items(*own, [ItemSpan(0, len(item.text), 0)], [item], [loaded.sources[at]], spec)
                items.append(msgspec.structs.replace(made, offset=len(ids) + made.offset))
                ids += own[0]
                params.append(loaded.sources[at].param)
            if last is None:
                return ids, items
            return truncated(ids, last, side), truncated_items(items, len(ids), last, side, params)

        ids, items = await run_in_thread(sum(len(item.text) for item in loaded.items), expand)
        if self._is_for_other:
            self._leases.append(lease)
        return ids, items, lease

    async def _render(self, chat: ChatInput, names: ParamNames, placeholders: Placeholders | None = None) -> str:
        """Return a conversation's text, by default up to the start of the answer. With `placeholders`, it is one for
        `Placeholders.expand`.
        """
        if (own := chat.template.chat_template) is not None:
            if not self._trusts_templates:
                raise InvalidParameter(
                    "chat_template requires a server started with --trust-request-chat-template", "chat_template"
                )
            try:
                template = ChatTemplate(own, self._variables)
            except ConfigError as error:
                raise InvalidParameter(str(error), "chat_template") from None
        elif own := OWN_TEMPLATE.get():
            if own not in self._own_templates:
                while len(self._own_templates) >= _MAX_OWN_TEMPLATES:
                    self._own_templates.pop(next(iter(self._own_templates)))
                self._own_templates[own] = ChatTemplate(own, self._variables, is_valid=True)
            template = self._own_templates[own]
            if chat.template.reasoning_effort is not None or chat.template.thinking:
                await asyncio.to_thread(getattr, template, "reads")  # which may take long
        elif self._templates is None:
            remedy = "use /v1/completions" if self.pooling is None else "send texts as input"
            raise InvalidParameter(
                f"this model has no chat template; start the server with --chat-template, or {remedy}", names.messages
            )
        else:
            template = self._templates.choose(bool(chat.tools))
        if chat.template.reasoning_effort is not None and chat.template.ignores_effort(template):
            self.ignore([names.reasoning_effort])
        if chat.template.thinking and template.thinking_switch is None and detect_reasoning(template.source) is None:
            self.ignore([names.thinking])
        for at, message in enumerate(chat.messages):
            role = message.get("role")
            if role not in ROLES and not any(f"{quote}{role}{quote}" in template.source for quote in "'\""):
                param = f"{names.messages}[{at}].role"
                raise InvalidParameter(f"{param} must be {' or '.join(ROLES)}, got {role!r}", param)
        options = replace(chat.template, keep_billing_header=self._keeps_billing_header, chat_template=own or None)
        (text,) = await self._renderer.render(
            template, [chat.messages], chat.tools, options, chat.tool_use is not None, names, placeholders
        )
        return text

    def _fit(
        self, ids: list[int], param: str, last: int | None, max_tokens: int | None, side: TruncationSide
    ) -> list[int]:
        """Return the `last` token ids, or the first ones; rejects a prompt that is empty, or too long together with its
        output.
        """
        if last is not None:
            ids = truncated(ids, last, side)
        if not ids:
            raise InvalidParameter(f"{param} must not be empty: there is no token to continue from", param)
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, output included, but the "
                f"prompt has {len(ids)}",
                param,
            )
        if max_tokens is not None and len(ids) + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_model_len} tokens, but the prompt has "
                f"{len(ids)} and the output (max_tokens) {max_tokens}, {len(ids) + max_tokens} in total",
                param,
            )
        self._prompts.check_ids(ids, param)
        return ids

    def _output_format(self, chat: ChatInput, prompt: Sequence[int]) -> OutputFormat | None:
        """Return the output format of the answer, which depends on whether the prompt ends inside the model's
        reasoning."""
        thoughts, use = self.reasoning_format, chat.tool_use
        if use is not None and self.tool_format is None:
            raise InvalidParameter(
                "tools: the format of this model's tool calls could not be detected; set it with "
                '--tool-call-parser when starting the server, or send tool_choice: "none"',
                "tools",
            )
        is_thinking = False
        if thoughts is not None:
            final = chat.messages[-1].get("content") if chat.template.continue_final_message else None
            continued = final if isinstance(final, str) else ""
            tail = self.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
            is_open = continued.rfind(thoughts.open) > continued.rfind(thoughts.close)
            is_thinking = thoughts.is_opened_by(tail) or is_open
            if not is_thinking and (thoughts.is_closed_by(tail) or continued):
                thoughts = None
        if use is None and thoughts is None:
            return None
        return OutputFormat(
            reasoning=thoughts,
            is_thinking=is_thinking,
            shows_reasoning=chat.shows_reasoning,
            tools=None if use is None else self.tool_format,
            schemas={} if use is None else {tool.name: tool.parameters for tool in use.tools},
            limit=None if use is None else use.max_calls,
            is_required=use is not None and use.required,
        )

    def _tool_grammar(
        self, use: ToolUse, output_format: OutputFormat | None, answer: Any, budget: int | None
    ) -> StructuredOutputs:
        """Return the grammar for required or strict calls, or for calls or an answer with the schema `answer`."""
        assert output_format is not None
        assert output_format.tools is not None
        tools = use.tools
        if isinstance(output_format.tools.call, Tagged | Quoted):  # each property has a grammar of its own
            dropped = new_dropped(self._fallback)
            checked = iter(_checked([tool for tool in tools if tool.strict or use.required], dropped))
            tools = tuple(next(checked) if tool.strict or use.required else tool for tool in tools)
            warn(dropped or (), "tools")
        return tool_grammar(
            output_format.tools,
            tools,
            self.tokenizer.added_id,
            required=use.required,
            several=use.max_calls != 1,
            answer=answer,
            reasoning=output_format.reasoning,
            is_thinking=output_format.is_thinking,
            budget=budget,
        )

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of `bad_words`, and remove duplicates from the other lists.

        Rejects unknown ids, and bad words that exclude every allowed token.
        """
        self._prompts.check_ids(params.stop_token_ids, "stop_token_ids")
        self._prompts.check_ids(params.logit_bias, "logit_bias")
        self._prompts.check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        params.stop_token_ids = [*dict.fromkeys(params.stop_token_ids)]
        if params.allowed_token_ids is not None:
            params.allowed_token_ids = [*dict.fromkeys(params.allowed_token_ids)]
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
        self._prompts.check_ids([*itertools.chain(*both)], "bad_words")
        return [ids for ids in both if ids]

    # --- tokens -------------------------------------------------------------------------------------------------

    async def tokenize_chat(
        self,
        chat: ChatInput,
        truncate: int | None,
        max_tokens: int | None,
        side: TruncationSide = "left",
        names: ParamNames = CHAT_NAMES,
    ) -> list[int]:
        """Return a conversation's token ids as `process_chat` does, without a length limit."""
        last = self._prompts.num_kept(truncate, max(1, max_tokens or 1))
        if chat.media:
            return (await self._tokenize_chat_items(chat, last, side, names))[0]
        text, specials = await self._render(chat, names), chat.template.add_special_tokens
        ids = await run_in_thread(len(text), lambda: self.tokenizer.encode(text, add_special_tokens=specials))
        return ids if last is None else truncated(ids, last, side)

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
        self._prompts.check_ids(token_ids, param)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens=False)


def _variables(tokenizer: Tokenizer, formats: ChatFormats) -> dict[str, Any]:
    """The default variables of chat templates, which requests override. A value of None is not set."""
    defaults = formats.default_chat_template_kwargs or {}
    return {name: value for name, value in defaults.items() if value is not None} | tokenizer.special_tokens


def _checked(tools: Sequence[GrammarTool], dropped: list[str] | None) -> list[GrammarTool]:
    """Return tools whose schemas are as they are enforced, with all references to definitions."""
    found: list[GrammarTool] = []
    budget = Budget()
    for tool in tools:
        with about("tools", f"tools: {tool.name}"):
            schema = checked_schema(tool.parameters, dropped, budget, keeps_unique_items=False)
            found.append(replace(tool, parameters=schema))
    return found


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
