"""Tokenizes the inputs of pooling models: texts to embed or classify, and pairs of texts to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import InvalidParameter
from quire.server.text.chat_template import ChatTemplate
from quire.server.text.conversation import ParamNames
from quire.server.text.embedding_output import VectorOptions
from quire.server.text.inputs import ContextLengthExceeded, EmbeddingOptions, Prompt, ScoreInput, TruncationSide
from quire.server.text.prompt_tokenizer import PromptTokenizer, run_in_thread, truncated
from quire.server.text.template_renderer import LocalRenderer

MAX_PAIR_CHARACTERS = 2**24
"""Characters of all pairs of texts to score, if a common text is tokenized with each of the others."""


class PoolingProcessor:
    """Converts requests to the engine's input. Raises `InvalidParameter` for anything that the model cannot do."""

    def __init__(
        self,
        prompts: PromptTokenizer,
        pooling: Pooling,
        pair_template: ChatTemplate | None,
        has_token_types: bool,
        renderer: LocalRenderer,
    ) -> None:
        """`pair_template` is the user's template for pairs of texts, if given: a model's own is for chats."""
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._pooling = pooling
        self._verb = "embed" if pooling.classes is None else "classify"
        self._pair_template = pair_template
        self._has_token_types = has_token_types
        self._renderer = renderer

    @property
    def renders(self) -> bool:
        """Whether pairs are rendered with a template."""
        return self._pair_template is not None

    async def process_embeddings(
        self, inputs: Mapping[str, Prompt], options: EmbeddingOptions, vectors: VectorOptions
    ) -> list[list[int]]:
        """Return the token ids of texts and token ids to embed or classify, by their names for error messages.

        The model's vectors must support `vectors`.
        """
        vectors.check(self._pooling)
        prefix = self._embedding_prefix(options.prompt_name)

        def render() -> list[list[int]]:
            rendered, total = [], 0
            for param, given in inputs.items():
                rendered.append(self._embedding_ids(given, prefix, options, param))
                total = self._prompts.add_tokens(total, rendered[-1], param.partition("[")[0])
            return rendered

        return await run_in_thread(sum(len(given) + len(prefix) for given in inputs.values()), render)

    async def process_pairs(
        self, first: str | Sequence[str], second: str | Sequence[str], options: EmbeddingOptions, names: tuple[str, str]
    ) -> ScoreInput:
        """Process pairs of texts to score: each of `first` with its counterpart, or a single one with all of `second`.

        `names` are both parameters' names for error messages.
        """
        firsts, seconds = ([given] if isinstance(given, str) else given for given in (first, second))
        for given, name in zip((firsts, seconds), names, strict=True):
            if not given:
                raise InvalidParameter(f"{name} must not be empty: there is nothing to score", name)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidParameter(
                f"{names[0]}: {len(firsts)} texts for {len(seconds)} in {names[1]}; send one, or as many", names[0]
            )
        first_names, second_names = (
            [name] if isinstance(given, str) else [f"{name}[{at}]" for at in range(len(given))]
            for given, name in zip((first, second), names, strict=True)
        )
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
            texts = dict(zip((*first_names, *second_names), (*firsts, *seconds), strict=True))
            prompts = await self.process_embeddings(texts, options, VectorOptions())
            count = len(firsts)
            return ScoreInput(
                prompts=prompts, compared=[(at if count > 1 else 0, count + at) for at in range(len(seconds))]
            )
        limit, size = self._prompts.num_kept(options.truncate), sum(map(len, (*firsts, *seconds)))
        joins_ids = self._pair_template is None and not self._pooling.classes.joins_texts
        if not joins_ids:  # a common first text is tokenized with each second one
            most = self._prompts.most_characters(limit)
            lengths = [[len(text[:most]) for text in texts] for texts in (firsts, seconds)]
            size = sum(map(sum, lengths)) + lengths[0][0] * (len(seconds) - len(firsts))
            if size > MAX_PAIR_CHARACTERS:
                raise InvalidParameter(
                    f"{names[1]}: {len(seconds)} pairs of texts have {size} characters, and at most "
                    f"{MAX_PAIR_CHARACTERS} are allowed in one request; send several requests, or shorter texts",
                    names[1],
                )

        side = options.truncation_side
        templated: list[list[int]] | None = None
        if (template := self._pair_template) is not None:
            # Each text is cut once, so that the question to the renderer has a common one only once.
            cuts = [
                [self._prompts.cut(text, name, limit, side) for text, name in zip(*each, strict=True)]
                for each in ((firsts, first_names), (seconds, second_names))
            ]
            templated = await self._from_template(template, cuts[0], cuts[1], limit, options, names[1])

        def render() -> ScoreInput:
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
                        add_special_tokens=options.add_special_tokens,
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
                total = self._prompts.add_tokens(total, ids, names[1])
            return ScoreInput(prompts=rendered, second_segments=starts)

        return await run_in_thread(size, render)

    def _plain_ids(self, text: str, name: str, limit: int | None, side: TruncationSide) -> list[int]:
        """The token ids of a text of a pair, without special tokens."""
        return self._prompts.token_ids(text, name, limit, add_special_tokens=False, side=side)

    def _joined_text(
        self, first: str, second: str, limit: int | None, options: EmbeddingOptions, names: tuple[str, str]
    ) -> list[int]:
        """The token ids of a pair that is tokenized as one text."""
        side, specials = options.truncation_side, options.add_special_tokens
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
                ids = self._tokenizer.encode(text, add_special_tokens=options.add_special_tokens)
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
            text = (prefix + given).lower() if self._pooling.lower_case else prefix + given
            text, specials = self._prompts.cut(text, param, limit, side), options.add_special_tokens
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
