"""Tokenizes the inputs of pooling models, texts and content with images: to embed or classify, and pairs to score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeGuard

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import MediaItem
from quire.server.media.types import MediaSource
from quire.server.text.chat_template import ChatTemplate
from quire.server.text.conversation import ChatTemplateOptions, Message, ParamNames
from quire.server.text.embedding_output import VectorOptions
from quire.server.text.inputs import (
    ChatInput,
    ContentParts,
    ContextLengthExceeded,
    EmbeddingOptions,
    MarkedPrompt,
    PooledInput,
    PoolingInput,
    Prompt,
    TruncationSide,
)
from quire.server.text.media_input import MediaLease
from quire.server.text.media_prompt import Placeholders, with_pages
from quire.server.text.prompt_tokenizer import PromptTokenizer, run_in_thread, truncated
from quire.server.text.template_renderer import LocalRenderer

PairInput = str | ContentParts
"""A text of a pair, or content with images or videos."""
MAX_PAIR_CHARACTERS = 2**24
"""Characters of all pairs of texts to score, if a common text is tokenized with each of the others."""


MarkedIds = tuple[list[int], list[MediaItem]]
"""The token ids of a prompt, and its items."""
RenderMarked = Callable[[Placeholders | None, Sequence[Sequence[int | str]]], Awaitable[Sequence[str]]]
"""Returns the texts of prompts for `Placeholders.expand` (without placeholders: of prompts without items), given the
number of items of each source of each prompt (none: each has one)."""


class _Render(Protocol):
    def __call__(
        self, chat: ChatInput, names: ParamNames, placeholders: Placeholders | None = None
    ) -> Awaitable[str]: ...


class ItemTokenizer(NamedTuple):
    """What `quire.server.text.input_processor.InputProcessor` does for conversations, and for images and videos."""

    render: _Render
    tokenize: Callable[
        [Sequence[Sequence[MediaSource]], RenderMarked, int | None, TruncationSide, Sequence[str], bool],
        Awaitable[tuple[list[MarkedIds], MediaLease]],
    ]
    expand: Callable[
        [Sequence[MediaSource], Prompt, int | None, TruncationSide, str, bool],
        Awaitable[tuple[list[int], list[MediaItem], MediaLease]],
    ]


class PoolingProcessor:
    """Converts requests to the engine's input. Raises `InvalidParameter` for anything that the model cannot do."""

    def __init__(
        self,
        prompts: PromptTokenizer,
        pooling: Pooling,
        pair_template: ChatTemplate | None,
        has_token_types: bool,
        renderer: LocalRenderer,
        items: ItemTokenizer,
    ) -> None:
        """`pair_template` is the user's template for pairs of texts, if given: a model's own is for chats."""
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._pooling = pooling
        self._verb = "embed" if pooling.classes is None else "classify"
        self._pair_template = pair_template
        self._has_token_types = has_token_types
        self._renderer = renderer
        self._items = items

    @property
    def renders(self) -> bool:
        """Whether pairs are rendered with a template."""
        return self._pair_template is not None

    async def process_embeddings(
        self, inputs: Mapping[str, PooledInput], options: EmbeddingOptions, vectors: VectorOptions
    ) -> PoolingInput:
        """Process inputs to embed or classify, by their names for error messages.

        The model's vectors must support `vectors`.
        """
        vectors.check(self._pooling)
        plain = {param: given for param, given in inputs.items() if isinstance(given, str | list)}
        others = {param: given for param, given in inputs.items() if not isinstance(given, str | list)}
        if others and options.prompt_name is not None:
            raise InvalidParameter(
                f"prompt_name: only for texts; {next(iter(others))} has a template or items", "prompt_name"
            )
        prefix = self._embedding_prefix(options.prompt_name)

        def render() -> list[MarkedIds]:
            rendered, total = list[MarkedIds](), 0
            for param, given in plain.items():
                rendered.append((self._embedding_ids(given, prefix, options, param), []))
                total = self._prompts.add_tokens(total, rendered[-1][0], param.partition("[")[0])
            return rendered

        found = await run_in_thread(sum(len(given) + len(prefix) for given in plain.values()), render)
        made, lease = await self._marked_ids(others, options)
        by_param = dict(zip([*plain, *others], [*found, *made], strict=True))
        return self._input([by_param[param] for param in inputs], lease)

    async def _marked_ids(
        self, inputs: Mapping[str, MarkedPrompt | ContentParts | ChatInput], options: EmbeddingOptions
    ) -> tuple[list[MarkedIds], MediaLease | None]:
        """Return the token ids of inputs that are not plain, with the lease of their items."""
        limit, side = self._prompts.num_kept(options.truncate), options.truncation_side
        lease = None
        if len(inputs) == 1 and isinstance(given := next(iter(inputs.values())), MarkedPrompt):
            (param,), specials = inputs, options.adds_special_tokens
            ids, items, lease = await self._items.expand(given.media, given.prompt, limit, side, param, specials)
            made = [(ids, items)]
        else:
            chats = {param: self._chat(given, options) for param, given in inputs.items()}
            params = [*chats]

            async def render(placeholders: Placeholders | None, counts: Sequence[Sequence[int | str]]) -> list[str]:
                shown = [
                    replace(chat, messages=with_pages(chat.messages, counts[at])) if counts and chat.media else chat
                    for at, chat in enumerate(chats.values())
                ]
                names = [ParamNames(messages=param) for param in params]
                return await asyncio.gather(
                    *(self._items.render(*each, placeholders) for each in zip(shown, names, strict=True))
                )

            specials = any(chat.template.add_special_tokens for chat in chats.values())
            media = [chat.media for chat in chats.values()]
            made, lease = await self._tokenized(media, render, limit, side, params, specials)
        for (ids, _), param in zip(made, inputs, strict=True):
            self._check_length(ids, param)
        return made, lease

    async def _tokenized(
        self,
        media: Sequence[Sequence[MediaSource]],
        render: RenderMarked,
        limit: int | None,
        side: TruncationSide,
        params: Sequence[str],
        add_special_tokens: bool,
    ) -> tuple[list[MarkedIds], MediaLease | None]:
        """The token ids of rendered texts, whether or not they have items."""
        if any(media):
            return await self._items.tokenize(media, render, limit, side, params, add_special_tokens)
        texts = await render(None, ())

        def tokenize() -> list[MarkedIds]:
            found, total = list[MarkedIds](), 0
            for text, param in zip(texts, params, strict=True):
                ids = self._prompts.token_ids(text, param, limit, add_special_tokens, side)
                ids = ids if limit is None else truncated(ids, limit, side)
                total = self._prompts.add_tokens(total, ids, param.partition("[")[0])
                found.append((ids, []))
            return found

        return await run_in_thread(sum(map(len, texts)), tokenize), None

    @staticmethod
    def _chat(given: MarkedPrompt | ContentParts | ChatInput, options: EmbeddingOptions) -> ChatInput:
        assert not isinstance(given, MarkedPrompt), "its text is no conversation"
        if isinstance(given, ChatInput):
            return given
        message = {"role": "user", "content": given.parts}
        template = ChatTemplateOptions(add_special_tokens=bool(options.add_special_tokens))
        return ChatInput(messages=[message], media=given.media, template=template)

    @staticmethod
    def _input(made: Sequence[MarkedIds], lease: MediaLease | None) -> PoolingInput:
        return PoolingInput(
            prompts=[ids for ids, _ in made], media=[items for _, items in made] if lease else (), media_lease=lease
        )

    async def process_pairs(
        self,
        first: PairInput | Sequence[PairInput],
        second: PairInput | Sequence[PairInput],
        options: EmbeddingOptions,
        names: tuple[str, str],
    ) -> PoolingInput:
        """Process pairs to score: each of `first` with its counterpart, or a single one with all of `second`.

        `names` are both parameters' names for error messages.
        """
        all_firsts, all_seconds = (
            [given] if isinstance(given, str | ContentParts) else given for given in (first, second)
        )
        for given, name in zip((all_firsts, all_seconds), names, strict=True):
            if not given:
                raise InvalidParameter(f"{name} must not be empty: there is nothing to score", name)
        if len(all_firsts) not in (1, len(all_seconds)):
            raise InvalidParameter(
                f"{names[0]}: {len(all_firsts)} texts for {len(all_seconds)} in {names[1]}; send one, or as many",
                names[0],
            )
        first_names, second_names = (
            [name] if isinstance(given, str | ContentParts) else [f"{name}[{at}]" for at in range(len(given))]
            for given, name in zip((first, second), names, strict=True)
        )
        is_classifier = self._pooling.classes is not None  # otherwise, the chat template shows content
        firsts, seconds = (
            [each if isinstance(each, str) or each.media or not is_classifier else each.text for each in given]
            for given in (all_firsts, all_seconds)
        )
        both_names = first_names, second_names
        if not _are_texts(firsts) or not _are_texts(seconds):
            return await self._process_contents(firsts, seconds, options, both_names, names[1])
        return await self._process_texts(firsts, seconds, options, both_names, names[1])

    async def _process_texts(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        options: EmbeddingOptions,
        names: tuple[Sequence[str], Sequence[str]],
        param: str,
    ) -> PoolingInput:
        """`process_pairs` for texts; `names` are those of both sides' inputs, and `param` the name of all `seconds`."""
        first_names, second_names = names
        if options.max_document_tokens is not None:
            longest = options.max_document_tokens
            named = [*zip(seconds, second_names, strict=True)]
            seconds = await run_in_thread(
                sum(map(len, seconds)),
                lambda: [
                    self._tokenizer.shortened(self._prompts.cut(text, name, longest, "right"), longest)
                    for text, name in named
                ],
            )
        if self._pooling.classes is None:
            return await self._process_compared(firsts, seconds, options, names)
        limit, size = self._prompts.num_kept(options.truncate), sum(map(len, (*firsts, *seconds)))
        joins_ids = self._pair_template is None and not self._pooling.classes.joins_texts
        if not joins_ids:  # a common first text is tokenized with each second one
            most = self._prompts.most_characters(limit)
            lengths = [[len(text[:most]) for text in texts] for texts in (firsts, seconds)]
            size = sum(map(sum, lengths)) + lengths[0][0] * (len(seconds) - len(firsts))
            if size > MAX_PAIR_CHARACTERS:
                raise InvalidParameter(
                    f"{param}: {len(seconds)} pairs of texts have {size} characters, and at most "
                    f"{MAX_PAIR_CHARACTERS} are allowed in one request; send several requests, or shorter texts",
                    param,
                )

        side = options.truncation_side
        templated: list[list[int]] | None = None
        if (template := self._pair_template) is not None:
            # Each text is cut once, so that the question to the renderer has a common one only once.
            cuts = [
                [self._prompts.cut(text, name, limit, side) for text, name in zip(*each, strict=True)]
                for each in ((firsts, first_names), (seconds, second_names))
            ]
            templated = await self._from_template(template, cuts[0], cuts[1], limit, options, param)

        def render() -> PoolingInput:
            rendered, starts, total = [], [], 0
            for at, (text, name) in enumerate(zip(seconds, second_names, strict=True)):
                if at < len(firsts):
                    other, other_name = firsts[at], first_names[at]
                    other_ids = self._plain_ids(other, other_name, limit, side) if joins_ids else []
                if joins_ids:
                    ids, start = self._tokenizer.join_pair(
                        other_ids,
                        self._plain_ids(text, name, limit, side),
                        limit,
                        add_special_tokens=options.adds_special_tokens,
                        side=side,
                    )
                elif templated is not None:
                    ids, start = templated[at], 0
                else:
                    ids, start = self._joined_text(other, text, limit, options, (other_name, name)), 0
                if len(ids) > self._prompts.max_model_len:  # perhaps because of the first text alone
                    self._check_length(other_ids or self._plain_ids(other, other_name, limit, side), other_name)
                self._check_length(ids, name)
                rendered.append(ids)
                starts.append(start if self._has_token_types else 0)
                total = self._prompts.add_tokens(total, ids, param)
            return PoolingInput(prompts=rendered, second_segments=starts)

        return await run_in_thread(size, render)

    async def _process_compared(
        self,
        firsts: Sequence[PairInput],
        seconds: Sequence[PairInput],
        options: EmbeddingOptions,
        names: tuple[Sequence[str], Sequence[str]],
    ) -> PoolingInput:
        """Process what an embedding model compares; `names` are those of both sides' inputs."""
        inputs = dict(zip((*names[0], *names[1]), (*firsts, *seconds), strict=True))
        made = await self.process_embeddings(inputs, options, VectorOptions())
        count = len(firsts)
        return replace(made, compared=[(at if count > 1 else 0, count + at) for at in range(len(seconds))])

    async def _process_contents(
        self,
        firsts: Sequence[PairInput],
        seconds: Sequence[PairInput],
        options: EmbeddingOptions,
        names: tuple[Sequence[str], Sequence[str]],
        param: str,
    ) -> PoolingInput:
        """`_process_texts` for pairs of which some have parts."""
        if options.max_document_tokens is not None:
            raise InvalidParameter(
                "max_tokens_per_doc: only texts can be truncated, not documents with parts", "max_tokens_per_doc"
            )
        if self._pooling.classes is None:
            return await self._process_compared(firsts, seconds, options, names)
        if (template := self._pair_template) is None:
            sides = (zip(given, own, strict=True) for given, own in zip((firsts, seconds), names, strict=True))
            where = next(name for side in sides for each, name in side if isinstance(each, ContentParts))
            raise InvalidParameter(
                f"{where}: images and videos need a template for pairs; start the server with --chat-template", where
            )
        limit = self._prompts.num_kept(options.truncate)
        pairs = [(firsts[min(at, len(firsts) - 1)], second) for at, second in enumerate(seconds)]

        async def render(placeholders: Placeholders | None, counts: Sequence[Sequence[int | str]]) -> list[str]:
            conversations: list[Sequence[Message]] = []
            for at, pair in enumerate(pairs):
                messages = [
                    {"role": role, "content": given.parts if isinstance(given, ContentParts) else given}
                    for role, given in zip(("query", "document"), pair, strict=True)
                ]
                conversations.append(with_pages(messages, counts[at]) if counts else messages)
            return await self._renderer.render(
                template, conversations, names=ParamNames(messages=param), placeholders=placeholders
            )

        media = [[source for each in pair if isinstance(each, ContentParts) for source in each.media] for pair in pairs]
        specials, side = options.adds_special_tokens, options.truncation_side
        made, lease = await self._tokenized(media, render, None, side, names[1], specials)
        for (ids, _), name in zip(made, names[1], strict=True):
            if limit is not None and len(ids) > limit:
                raise InvalidParameter(
                    f"truncate_prompt_tokens: {name} has {len(ids)} tokens with its template, and pairs with parts "
                    "cannot be truncated",
                    "truncate_prompt_tokens",
                )
            self._check_length(ids, name)
        return self._input(made, lease)

    def _plain_ids(self, text: str, name: str, limit: int | None, side: TruncationSide) -> list[int]:
        """The token ids of a text of a pair, without special tokens."""
        return self._prompts.token_ids(text, name, limit, add_special_tokens=False, side=side)

    def _joined_text(
        self, first: str, second: str, limit: int | None, options: EmbeddingOptions, names: tuple[str, str]
    ) -> list[int]:
        """The token ids of a pair that is tokenized as one text."""
        side, specials = options.truncation_side, options.adds_special_tokens
        first, second = (
            self._prompts.cut(text, name, limit, side) for text, name in zip((first, second), names, strict=True)
        )
        if limit is None:
            return self._tokenizer.encode(first + second, add_special_tokens=specials)
        return self._tokenizer.encode_within(first + second, limit, add_special_tokens=specials, side=side)

    async def _from_template(
        self,
        template: ChatTemplate,
        firsts: Sequence[str],
        seconds: Sequence[str],
        limit: int | None,
        options: EmbeddingOptions,
        param: str,
    ) -> list[list[int]]:
        """The token ids of the template's texts for pairs. Truncation shortens the second text, so that the template's
        end stays. `param` is the second texts' name for error messages.
        """
        found: dict[int, list[int]] = {}
        left = dict(enumerate(seconds))

        def tokenize(texts: Sequence[str]) -> None:
            total = sum(map(len, found.values()))
            for (at, second), text in zip([*left.items()], texts, strict=True):
                ids = self._tokenizer.encode(text, add_special_tokens=options.adds_special_tokens)
                if limit is None or len(ids) <= limit or not second:
                    total = self._prompts.add_tokens(total, ids, param)
                    found[at] = ids
                    del left[at]
                    continue
                count = len(self._tokenizer.encode(second, add_special_tokens=False))
                shorter = self._tokenizer.shortened(second, max(0, count - (len(ids) - limit)), options.truncation_side)
                left[at] = shorter if len(shorter) < len(second) else ""

        while left:
            pairs = [
                [
                    {"role": "query", "content": firsts[min(at, len(firsts) - 1)]},
                    {"role": "document", "content": second},
                ]
                for at, second in left.items()
            ]
            texts = await self._renderer.render(template, pairs, names=ParamNames(messages=param))
            await run_in_thread(sum(map(len, texts)), partial(tokenize, texts))
        return [found[at] for at in range(len(seconds))]

    def _check_length(self, ids: list[int], param: str) -> None:
        """Reject a prompt to pool that is empty or too long, or has unknown tokens."""
        if not ids:
            raise InvalidParameter(f"{param} has no tokens: there is nothing to {self._verb}", param)
        if len(ids) > (most := self._prompts.max_model_len):
            raise ContextLengthExceeded(
                f"this model's maximum context length is {most} tokens, but {param} has {len(ids)}; "
                "shorten it, or send truncate_prompt_tokens: -1 to truncate it",
                param,
            )
        self._prompts.check_ids(ids, param)

    def _embedding_ids(self, given: Prompt, prefix: str, options: EmbeddingOptions, param: str) -> list[int]:
        limit, side = self._prompts.num_kept(options.truncate), options.truncation_side
        if not given:
            raise InvalidParameter(f"{param} must not be empty: there is nothing to {self._verb}", param)
        if isinstance(given, str):
            given = f"{prefix}{given}{self._pooling.suffix}"
            text = given.lower() if self._pooling.lower_case else given
            text = self._prompts.cut(text, param, limit, side)
            specials = options.adds_special_tokens and self._pooling.adds_special_tokens
            if limit is None:
                ids = self._tokenizer.encode(text, add_special_tokens=specials)
            else:
                ids = self._tokenizer.encode_within(text, limit=limit, add_special_tokens=specials, side=side)
        else:
            ids = self._prompts.token_ids(given, param, None, False)
            ids = ids if limit is None else truncated(ids, limit, side)
        self._check_length(ids, param)
        return ids

    def _embedding_prefix(self, name: str | None) -> str:
        """Return the text to put before each embedded text."""
        prompts, chosen = self._pooling.prompts, self._pooling.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise InvalidParameter(f"prompt_name: this model has no prompt {chosen!r}; {known}", "prompt_name")
        if prompts[chosen] and not self._pooling.include_prompt:
            raise InvalidParameter(
                "prompt_name: this model excludes prompts from pooling (include_prompt false), which is not supported",
                "prompt_name",
            )
        return prompts[chosen]


def _are_texts(given: list[PairInput]) -> TypeGuard[list[str]]:
    return all(isinstance(each, str) for each in given)
