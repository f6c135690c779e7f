"""Grammars of structured outputs, compiled by llguidance, and the state of each output in its grammar.

The server uses this module to reject grammars that cannot be enforced, the core to enforce them. llguidance is imported
with the first structured request and does not import torch. Building its tokenizer holds the GIL for up to a second for
150,000 tokens, once per process; compiling and computing masks release the GIL.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.repository import tokenizer_files
from quire.engine.scheduler.unique_items import MARK, TokenTexts, UniqueItems
from quire.engine.scheduler.unique_places import Place, places_of, without_unique_items

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Words = npt.NDArray[np.int32]
Roots = dict[str, Place | None]
"""The places of `UniqueItems`; empty if no array's items must be unique."""

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}
"""White space between JSON tokens is empty, one space, or a new line with indentation, so that a model cannot generate
white space forever. Strings have no numeric escapes: one could spell a property's name and bypass its schema, or be
half of a surrogate pair."""

_SLICES = [r"[ \n\r\t]+", *(rf'[^"\\\x00-\x1F\x7F\u{{2028}}\u{{2029}}]{count}' for count in ("{1,10}", "{1,30}", "+"))]
"""Sets of tokens that are allowed at once where a grammar allows all texts of this form. As llguidance's own, but for
the line separators, which `.` does not match in a schema's pattern."""

_MAX_COMPILED = 64
"""Size of the LRU cache of compiled grammars, each some tens of kilobytes, but with hostile patterns megabytes."""
_MAX_LEXER_STATES = 100_000
"""States of a grammar's lexer, which live as long as the grammar. Two for each character of a string with a maximum
length."""
_MAX_ROW = 2000
"""Maximum number of items in a row of llguidance's Earley parser: of the alternatives that are open at one place of the
output. Enough for a schema with 500 optional properties of one object, which have four items each, or an anyOf of 1,900
objects. Ambiguities in JSON do not add up, because brackets separate its parts."""
_MAX_ROW_OF_GRAMMAR = 500
"""The same for grammars in Lark's notation or GBNF. Rows of an ambiguous grammar (`s: s s | "a"`) grow with the output,
and the time of a mask with the cube of their size: 35 ms with 500 items for a vocabulary of 4,096 tokens, seconds with
2,000 items. Enough for the grammar of a programming language (some hundred rules take less than 200 items), 128 tools,
500 alternatives, or a schema (`%json`) with 120 optional properties of one object."""


_MAX_FORCED = 2**16
"""Maximum number of tokens that a grammar forces at once, which takes 60 ms. llguidance does not limit it: a rule of 40
bytes forces millions of tokens (`T{300}`, where T is `/x{30000}/`), which takes seconds."""


_INLINE_JSON = re.compile(r"(?:\bmark_([0-9]+) )?%json\s*(?=\{)")


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that allows no next token. The message is for the client."""


class Grammar:
    """The state of one output in its grammar. Not thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        unique_items: UniqueItems | None,
        vocab_size: int,
        eos: Words,
        on_error: Callable[[], None],
    ) -> None:
        """`on_error` is called when the matcher fails."""
        self._matcher = matcher
        self._unique_items = unique_items
        self._failure: Exception | None = None
        """Why the mask could not be restricted."""
        self._on_error = on_error
        self._vocab_size = vocab_size
        self._eos = eos

    @property
    def is_complete(self) -> bool:
        """Whether only the end can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token_ids: list[int]) -> None:
        """Advance by these tokens; raises `GrammarError` if the grammar does not allow them."""
        if self._unique_items is None:
            if not self._matcher.consume_tokens(token_ids):
                raise self._error()
            return
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                raise self._error()
            try:
                is_alive = self._unique_items.advance(token_id)
            except ValueError as error:
                raise GrammarError(str(error)) from None
            if not is_alive:
                raise GrammarError("an array whose items must be unique repeats an item")

    def restrict(self, mask: Words) -> None:
        """Remove tokens from the matcher's mask, `[words]`, that the matcher allows but that repeat items.

        Masks are computed for several requests at once, so an error waits for `mask_row`.
        """
        if self._unique_items is not None and not self._matcher.is_error():
            try:
                self._unique_items.restrict(mask)
            except ValueError as error:
                self._failure = GrammarError(str(error))
            except Exception as error:
                self._failure = error

    def forced_tokens(self) -> list[int]:
        """Return the next tokens if the grammar allows only one continuation, tokenized canonically.

        Raises `GrammarError` if there are too many.
        """
        forced_tokens: list[int] = self._matcher.compute_ff_tokens()
        _check_forced(forced_tokens)
        beyond = (at for at, token in enumerate(forced_tokens) if token >= self._vocab_size)
        return forced_tokens[: next(beyond, None)]

    def mask_row(self, mask: Words, params: SamplingParams, output: list[int]) -> bytes:
        """Return a row of `masks` without the tokens that other parameters forbid after this output.

        End of sequence stays allowed if nothing else can follow: the grammar overrides `min_tokens` and `ignore_eos`.
        Raises `GrammarError` if no token is allowed.
        """
        if self._matcher.is_error():
            raise self._error()
        if self._failure is not None:
            raise self._failure
        allowed = mask.copy()
        if params.ignore_eos:
            allowed &= ~self._eos
        if len(output) < params.min_tokens:
            allowed &= ~self._eos & ~_bits(params.stop_token_ids, len(mask))
        if params.allowed_token_ids is not None:
            allowed &= _bits(params.allowed_token_ids, len(mask))
        if params.bad_word_ids:
            allowed &= ~_bits(params.bad_tokens(output), len(mask))
        if not allowed.any():
            allowed = mask & self._eos if not (mask & ~self._eos).any() else allowed
        if not allowed.any():
            cause = "the grammar" if not mask.any() else "the grammar together with the other parameters"
            raise GrammarError(f"after {len(output)} tokens {cause} allows no token")
        return allowed.tobytes()

    def _error(self) -> GrammarError:
        self._on_error()
        return GrammarError(_cause(self._matcher))


class GrammarCompiler:
    """Compiles and caches the grammars of one model. Thread-safe."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._vocab_size = model.architecture.vocab_size
        self._words = -(-self._vocab_size // 32)
        self._eos = _bits(model.eos_token_ids, self._words)
        self._known = _bits(range(self._vocab_size), self._words)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._texts_lock = threading.Lock()
        self._texts: TokenTexts | None = None
        self._compiled: OrderedDict[tuple[str, int, str], tuple[LLMatcher, Roots]] = OrderedDict()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Return the grammar in its initial state. Raises `GrammarError` if it is invalid or its first step fails."""
        outputs, unique = _without_unique_items(outputs)
        key = _to_llguidance(outputs), _max_row(outputs), msgspec.json.encode(unique).decode()
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(*key[:2]), self._roots(unique)
            with self._lock:
                self._compiled[key] = compiled
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
        matcher, roots = compiled
        matcher, unique_items = matcher.deep_copy(), None
        if any(roots.values()):
            unique_items = UniqueItems(roots, self._token_texts, matcher)
        return Grammar(matcher, unique_items, self._vocab_size, self._eos, lambda: self._forget(key))

    def _forget(self, key: tuple[str, int, str]) -> None:
        """Drop a compiled grammar whose tables have grown to a limit. Its copies share them."""
        with self._lock:
            self._compiled.pop(key, None)

    def error(self, outputs: StructuredOutputs) -> str | None:
        """Return why this cannot be enforced, or None. Does not use the cache."""
        try:
            outputs, unique = _without_unique_items(outputs)
            self._compile(_to_llguidance(outputs), _max_row(outputs))
            self._roots(unique)
        except GrammarError as error:
            return str(error)
        return None

    def masks(self, grammars: Sequence[Grammar]) -> Words:
        """Return the bit masks of allowed next tokens, `[grammars, words]`, computed in parallel."""
        from llguidance import LLExecutor

        matchers = [grammar._matcher for grammar in grammars]
        size = self._vocabulary().vocab_size
        masks = np.zeros((len(matchers), -(-size // 32)), np.int32)
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        elif matchers:
            if self._executor is None:
                self._executor = LLExecutor()
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * 4, len(rows))
        masks = masks if size == self._vocab_size else masks[:, : self._words] & self._known
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.restrict(mask)
        return masks

    def _compile(self, source: str, max_row: int) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=max_row, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        first = matcher.deep_copy()  # also fills the tables that every copy shares
        _check_forced(first.compute_ff_tokens())
        bits = np.unpackbits(np.frombuffer(first.compute_bitmask(), np.uint8), bitorder="little")
        (tokens,) = np.nonzero(bits)
        if first.is_error():
            raise GrammarError(f"it fails at its first token: {_cause(first)}")
        if not len(tokens):
            raise GrammarError("it can never be satisfied: it allows no first token")
        for token in {int(tokens[0]), int(tokens[len(tokens) // 2]), int(tokens[-1])}:
            step = matcher.deep_copy()
            step.consume_token(token)
            _check_forced(step.compute_ff_tokens())
            step.compute_bitmask()
            if step.is_error():
                raise GrammarError(f"it fails after its first token: {_cause(step)}")
        return matcher

    def _roots(self, schemas: dict[str, Any]) -> Roots:
        """Return the places of these schemas at which items must be unique. Raises `GrammarError`."""
        from llguidance import LLMatcher, LLTokenizer

        def compile_bytes(schema: dict[str, Any]) -> LLMatcher:
            matcher = LLMatcher(LLTokenizer("byte"), _schema_grammar(schema), log_level=0)
            if matcher.is_error():
                raise GrammarError(matcher.get_error().strip())
            return matcher

        try:
            return {name: places_of(schema, compile_bytes) for name, schema in schemas.items()}
        except ValueError as error:
            raise GrammarError(str(error)) from None

    def _token_texts(self) -> TokenTexts:
        vocabulary = self._vocabulary()
        with self._texts_lock:
            if self._texts is None:
                self._texts = TokenTexts(vocabulary, self._vocab_size)
            return self._texts

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _load_tokenizer(self._model.tokenizer, self._vocab_size, self._model.eos_token_ids)
            return self._tokenizer


def _to_llguidance(outputs: StructuredOutputs) -> str:
    """Return the grammar in llguidance's own notation; raises `GrammarError`."""
    from llguidance import LLMatcher, grammar_from

    try:
        if outputs.regex is not None:
            return LLMatcher.grammar_from_regex(outputs.regex)
        if outputs.choice is not None:
            # JSON does not escape DEL, and Lark accepts no control characters.
            choices = (json.dumps(one, ensure_ascii=False).replace("\x7f", r"\u007f") for one in outputs.choice)
            # A terminal, as each alternative of a rule would be an item of the parser, which has a limit.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(choices)}")
        if outputs.grammar is not None:
            return grammar_from("grammar", outputs.grammar)
        return _schema_grammar({"type": "object"} if outputs.json is None else outputs.json)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _schema_grammar(schema: str | dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _without_unique_items(outputs: StructuredOutputs) -> tuple[StructuredOutputs, dict[str, Any]]:
    """Return structured outputs without `uniqueItems`, and the schemas that have it, by the names of `UniqueItems`.

    In a grammar this is for schemas right after a mark. Raises `GrammarError`.
    """
    schema = outputs.json
    try:
        if isinstance(schema, str) and '"uniqueItems"' in schema:
            schema = json.loads(schema)
        if isinstance(schema, dict):
            plain = without_unique_items(schema)
            return (outputs, {}) if plain == schema else (StructuredOutputs(json=plain), {"": schema})
        if not outputs.num_marks or outputs.grammar is None or '"uniqueItems"' not in outputs.grammar:
            return outputs, {}
        text, schemas, parts, end = outputs.grammar, dict[str, Any](), [], 0
        for found in inline_schemas(outputs):
            if found.mark is not None:
                schemas[found.mark] = found.schema
                parts += [text[end : found.begin], json.dumps(without_unique_items(found.schema))]
                end = found.end
        return StructuredOutputs(grammar="".join((*parts, text[end:]))), schemas
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


class InlineSchema(NamedTuple):
    """A schema in the text of a grammar, after `%json`."""

    begin: int
    end: int
    schema: Any
    mark: str | None
    """The number of the mark before it."""


def inline_schemas(outputs: StructuredOutputs) -> Iterator[InlineSchema]:
    """Find the schemas in a grammar. Raises ValueError if one is not JSON."""
    text, end, marks = outputs.grammar or "", 0, set[str]()
    for found in _INLINE_JSON.finditer(text):
        if found.start() < end:  # inside of a schema
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the grammar's %json is not JSON: {error}") from None
        mark = found[1] if found[1] is not None and 0 < int(found[1]) <= outputs.num_marks else None
        if mark in marks:
            raise ValueError(f"the grammar's mark_{mark} stands before several schemas")
        if mark is not None:
            marks.add(mark)
        yield InlineSchema(found.end(), end, schema, mark)


def json_mark(number: int) -> tuple[str, str]:
    """Return the name and the definition of a rule for Lark grammars: nothing, right before `%json`.

    Only with it a schema in a grammar can have `uniqueItems`. At this place of the output, the grammar must allow
    nothing else that begins with a bracket. It must define `NOTHING` as `/()/`. Only the marks from 1 to the
    `num_marks` of the structured outputs count: a client's grammar may have rules of the same names.
    """
    return f"mark_{number}", f'mark_{number}[capture="{MARK}{number}"]: NOTHING'


def _max_row(outputs: StructuredOutputs) -> int:
    return _MAX_ROW if outputs.grammar is None else _MAX_ROW_OF_GRAMMAR


def _check_forced(tokens: Sequence[int]) -> None:
    if len(tokens) > _MAX_FORCED:
        raise GrammarError(
            f"the grammar forces more than {_MAX_FORCED} tokens at once; use smaller counted repetitions"
        )


def _cause(matcher: LLMatcher) -> str:
    """Return why the matcher failed, for the client."""
    error: str = matcher.get_error().strip().splitlines()[0]
    if found := re.search(r"row has \d+ items; max is (\d+)|Too many items \(limit (\d+)", error):
        count, where = found[1] or found[2], "at one place" if found[1] else "for one token"
        return (
            f"the grammar is too ambiguous: more than {count} alternatives are open {where} of the output; write rules "
            "that match a text in one way only, repeat with * or + instead of recursion, and match text with regular "
            "expressions instead of single characters"
        )
    if "too many expressions" in error or "fuel" in error:
        return f"the regular expressions are too complex: use smaller and fewer counted repetitions ({error})"
    return error


def _load_tokenizer(folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Build llguidance's tokenizer from tokenizer.json and the tokens that only tokenizer_config.json adds."""
    from llguidance import LLTokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise GrammarError(f"structured output needs a tokenizer.json, and {folder} has none")
    tokenizer: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    tokenizer["truncation"] = tokenizer["padding"] = None
    vocabulary = tokenizer["model"]["vocab"]
    ids = {*vocabulary.values()} if isinstance(vocabulary, dict) else {*range(len(vocabulary))}
    added = tokenizer.setdefault("added_tokens", [])
    ids.update(token["id"] for token in added)
    for token_id, token in tokenizer_files.read_settings(folder).get("added_tokens_decoder", {}).items():
        if int(token_id) not in ids:
            ids.add(int(token_id))
            added.append({"id": int(token_id), **token})
    size = max(vocab_size, max(ids) + 1)
    ends = [token for token in eos_token_ids if token in ids]
    try:
        text = msgspec.json.encode(tokenizer).decode()
        return LLTokenizer(text, n_vocab=size, eos_token=ends or None, slices=_SLICES)
    except ValueError as error:
        raise GrammarError(f"structured output is not possible with this model's tokenizer: {error}") from None


def _bits(token_ids: Iterable[int], words: int) -> Words:
    """Return a bit mask of these tokens; ids beyond its size are ignored."""
    bits = np.zeros(words * 32, np.uint8)
    ids = np.fromiter(token_ids, np.int64)
    bits[ids[ids < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
