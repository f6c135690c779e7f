"""`uniqueItems` of strings, integers, booleans and null, which a context-free grammar cannot express.

A reader follows the JSON text of an output and keeps the items of each array whose items must be unique. Tokens that
lead to a dead end are removed from the grammar's mask. A text is a dead end if it repeats an item, or if all items that
could continue it are used. A value of these types has one text in the grammars of this server, except for `-0`, so
that equal items are equal texts.

Nothing here is specific to a tokenizer: a token is its bytes. `Places` says what a schema requires where.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.engine.scheduler.unique_places import Language, Place

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

MARK = "__LIST_APPEND:json_"
"""Beginning of the name of a capture in a grammar: nothing, right before a JSON value."""

_MAX_TOKEN = 64
"""Bytes of a token that can be looked up. Longer ones are read byte by byte where the grammar allows them."""
_QUOTE, _BACKSLASH, _COMMA, _COLON, _SPACES = *b'"\\,:', b" \n\t\r"
_OPENING, _CLOSING = b"[{", b"]}"
_ZEROS = (b"0", b"-0")
"""Two texts of the same value. No other one can follow the first."""

_CLOSES_STRING = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_ENDS_SCALAR = re.compile(rb"([-0-9a-z]+)[\s,\]]")
_NEXT_ITEM = rb",\s*[^\s\]]"
_SECOND_ITEM = rb'\[\s*(?:"(?:[^"\\]|\\.)*"|[-0-9a-z]+)\s*,'
"""A list with an item and a comma: the least that can be a dead end in a list that starts inside of a token."""
_WHOLE_ITEM = rb'(?:^|[\s,\[])(?:"(?:[^"\\]|\\.)*"|(?:-?\d+|true|false|null)(?=[\s,\]]))'
_STARTS_ITEM = re.compile(rb'\s*("(?:[^"\\]|\\.)*\\?|[-0-9a-z]+)', re.DOTALL)


class TokenTexts:
    """The bytes of a vocabulary's tokens, sorted by what they do to the item of a list. Takes a second to build."""

    def __init__(self, tokenizer: LLTokenizer, size: int) -> None:
        self.texts = [tokenizer.decode_bytes([token]) for token in range(size)]
        self.size = size
        texts = self.texts
        self.of_byte = {text[0]: token for token, text in reversed([*enumerate(texts)]) if len(text) == 1}
        """Tokens of a single byte."""
        self._inner = _Sorted((text, token) for token, text in enumerate(texts))
        self._first = _Sorted(
            (found[1], token) for token, text in enumerate(texts) if (found := _STARTS_ITEM.fullmatch(text))
        )
        self.closing: dict[bytes, list[int]] = {}
        """Tokens by their text up to the end of the string in which they start."""
        self.ending: dict[bytes, list[int]] = {}
        """Tokens by their text up to the end of the number or literal in which they start, if the end is inside."""
        for token, text in enumerate(texts):
            if found := _CLOSES_STRING.match(text):
                self.closing.setdefault(found[0], []).append(token)
            if found := _ENDS_SCALAR.match(text):
                self.ending.setdefault(found[1], []).append(token)
        self.lists = self._matching(_SECOND_ITEM, with_long=False)
        self.from_string = self._matching(rb'^(?:[^"\\]|\\.)*"\s*' + _NEXT_ITEM + rb"|" + _SECOND_ITEM)
        self.with_second = self._matching(rb'^(?:[^"\\]|\\.)*"\s*,\s*(?:"(?:[^"\\]|\\.)*"|[^"\s\]])|' + _SECOND_ITEM)
        """Tokens that end a string, and have more than the beginning of another one."""
        self.reopening = self._matching(rb'^(?:[^"\\]|\\.)*"\s*,\s*"\Z', with_long=False)
        """Tokens that end a string and only begin the next one."""
        short = self.reopening[[len(texts[token]) <= _MAX_TOKEN for token in self.reopening.tolist()]]
        self.from_string = np.setdiff1d(self.from_string, short)
        self.from_outside = self._matching(_WHOLE_ITEM + rb"|" + _NEXT_ITEM + rb"|" + _SECOND_ITEM)
        self.quotes = self._matching(rb'"')
        self.commas = self._matching(rb",")
        self.first_comma = self._matching(rb"^\s*,", with_long=False)
        self.first_end = self._matching(rb"^[\s,\]]", with_long=False)

    def _matching(self, pattern: bytes, *, with_long: bool = True) -> Ids:
        """Return the tokens in which this occurs; `with_long`: and those that are too long to be looked up."""
        most, search = _MAX_TOKEN if with_long else np.inf, re.compile(pattern, re.DOTALL).search
        return np.array([n for n, text in enumerate(self.texts) if len(text) > most or search(text)], np.int64)

    def inside(self, starts: Sequence[bytes]) -> list[Ids]:
        """Return the tokens that start with one of these texts."""
        return self._inner.starting_with(starts)

    def opening(self, starts: Sequence[bytes]) -> list[Ids]:
        """Return the tokens that start an item with one of these texts, but do not end it."""
        return self._first.starting_with(starts)


class _Sorted:
    """Texts of tokens, to be found by their beginnings."""

    def __init__(self, texts: Iterable[tuple[bytes, int]]) -> None:
        pairs = sorted((text, token) for text, token in texts if len(text) <= _MAX_TOKEN and 0 not in text)
        self._texts = np.array([text for text, _ in pairs], f"S{_MAX_TOKEN}")
        self._tokens = np.array([token for _, token in pairs], np.int64)

    def starting_with(self, starts: Sequence[bytes]) -> list[Ids]:
        starts = [start for start in starts if len(start) <= _MAX_TOKEN]
        if not starts:
            return []
        after = [start[:-1] + bytes((start[-1] + 1,)) if start else b"\xff" * _MAX_TOKEN for start in starts]
        low = np.searchsorted(self._texts, np.array(starts, self._texts.dtype))
        high = np.searchsorted(self._texts, np.array(after, self._texts.dtype))
        return [self._tokens[begin:end] for begin, end in zip(low.tolist(), high.tolist(), strict=True) if begin < end]


class _DeadEnds:
    """The beginnings of an item of one language that can only be continued to used items."""

    def __init__(self, language: Language, before: _DeadEnds | None) -> None:
        """`before`: those to which these add; they stay as they are."""
        self._language = language
        self._before = before
        self.topmost: list[bytes] = []
        """Sorted; none begins with another. Without strings that are complete, which are known to be used."""
        self._below: dict[bytes, frozenset[int]] = {}
        """By beginning: the next bytes that lead to a dead end."""
        self.is_nearly_used_up: bool = self._has_at_most_one(()) if before is None else before.is_nearly_used_up

    @property
    def is_used_up(self) -> bool:
        return self.topmost[:1] == [b""] or (self._before is not None and self._before.is_used_up)

    @property
    def has_several_strings(self) -> bool:
        """Whether a string can begin in two ways, so that no one item makes its quote a dead end."""
        following = self._language.following(b'"')
        return following is not None and len(following.next) - len(self._dead_next(b'"')) > 1

    def add(self, item: bytes, used: Container[bytes]) -> None:
        """Add one of the used items."""
        if self._type(item) in self._language.free:
            if item in _ZEROS:
                insort(self.topmost, item)
            return
        at, dead = item, None
        while self._is_dead(at, used):
            at = dead = self._before_forced(at)
            if not at:
                break
            at, last = at[:-1], at[-1]
            self._below[at] = self._dead_next(at) | {last}
        if dead is not None and (dead != item or item[0] != _QUOTE):
            begin, end = self.below(dead)
            self.topmost[begin:end] = [dead]
        self.is_nearly_used_up = self._has_at_most_one(used)

    @staticmethod
    def _type(item: bytes) -> str:
        return "string" if item[0] == _QUOTE else "" if item[:1].isalpha() else "integer"

    def _before_forced(self, text: bytes) -> bytes:
        """Return the shortest beginning after which nothing else can follow than the rest of this text."""
        if not text or not self._forces(text, len(text) - 1):  # usually
            return text
        low, high = 0, len(text) - 1
        while low < high:
            middle = (low + high) // 2
            if self._forces(text, middle):
                high = middle
            else:
                low = middle + 1
        return text[:low]

    def _forces(self, text: bytes, size: int) -> bool:
        """Return whether only the rest of this text can follow this many bytes of it."""
        following = self._language.following(text[:size])
        return following is not None and following.forced.startswith(text[size:])

    def below(self, start: bytes) -> tuple[int, int]:
        """Return the range of `topmost` with this beginning."""
        return bisect_left(self.topmost, start), bisect_left(self.topmost, start + b"\xff")

    def contains(self, start: bytes) -> bool:
        """Return whether this beginning of an item is a dead end."""
        at = bisect_right(self.topmost, start)
        if at > 0 and start.startswith(self.topmost[at - 1]):
            return True
        return self._before is not None and self._before.contains(start)

    def _dead_next(self, start: bytes) -> frozenset[int]:
        """Return the next bytes after this beginning that lead to a dead end."""
        if start in self._below or self._before is None:
            return self._below.get(start, frozenset())
        return self._before._dead_next(start)

    def _is_dead(self, start: bytes, used: Container[bytes]) -> bool:
        following = self._language.following(start)
        if following is None or (following.is_complete and start not in used):
            return False
        return len(following.next) <= len(self._dead_next(start))

    def _has_at_most_one(self, used: Container[bytes]) -> bool:
        """Return whether no more than one item is not used."""
        if self._language.free:
            return False
        at = b""
        while (following := self._language.following(at)) is not None:
            alive = following.next - self._dead_next(at)
            is_unused = following.is_complete and at not in used
            if len(alive) + is_unused > 1:
                return False
            if not alive:
                break
            at += following.forced or bytes(alive)
        return True


class _Items:
    """The items of one array so far: own ones, and those before, which stay as they are."""

    def __init__(self, place: Place, before: _Items | None = None) -> None:
        self._place = place
        self._before = before
        self.texts: set[bytes] = set()
        self.sorted: list[bytes] = []
        self._dead_ends: dict[Language, _DeadEnds] = {}

    def __contains__(self, text: object) -> bool:
        return text in self.texts or (self._before is not None and text in self._before)

    def dead_ends(self, index: int) -> _DeadEnds | None:
        """Return those of the item at this place; None if it can have none."""
        language = self._place.language(index)
        if language is None or language.is_free:
            return None
        if language not in self._dead_ends:
            before = None if self._before is None else self._before.dead_ends(index)
            found = self._dead_ends[language] = _DeadEnds(language, before)
            for text in self.sorted:
                found.add(text, self)
        return self._dead_ends[language]

    def add(self, text: bytes) -> None:
        for each in _ZEROS if text in _ZEROS else (text,):
            self.texts.add(each)
            insort(self.sorted, each)
            for found in self._dead_ends.values():
                found.add(each, self)

    def with_item(self, text: bytes) -> _Items:
        """Return these and another one."""
        items = _Items(self._place, self)
        items.add(text)
        return items


class _Frame:
    """An array or object that is open."""

    __slots__ = ("index", "is_object", "items", "key", "place")

    def __init__(self, place: Place | None, is_object: bool) -> None:
        self.place = place
        self.is_object = is_object
        self.index = 0
        self.key: bytes | None = None
        """The name of the property whose value is next; None before a name."""
        self.items = _Items(place) if not is_object and place is not None and place.is_unique else None

    def copy(self) -> _Frame:
        copy = object.__new__(_Frame)
        copy.place, copy.is_object, copy.index = self.place, self.is_object, self.index
        copy.key, copy.items = self.key, self.items
        return copy

    def inner(self) -> Place | None:
        """Return the place of the next value."""
        if self.place is None:
            return None
        return self.place.property(self.key or b"") if self.is_object else self.place.item(self.index)


class _Reader:
    """Reads a JSON value that the grammar has allowed. `text` is that of the string, number or literal at the end."""

    __slots__ = ("_made", "_num_shared", "_root", "frames", "has_item", "is_done", "is_escaped", "is_string", "text")

    def __init__(self, root: Place | None) -> None:
        self._root = root
        self._made: dict[tuple[_Items, bytes], _Items] | None = None
        """The items that copies have made, by those that they were made from, and the new one; None: change them."""
        self.frames: list[_Frame] = []
        self._num_shared = 0
        """The outermost frames that belong to the reader of which this is a copy."""
        self.text: bytearray | None = None
        self.is_string = self.is_escaped = False
        self.has_item = False
        """Whether the last value in the array is complete."""
        self.is_done = False

    def copy(self, made: dict[tuple[_Items, bytes], _Items]) -> _Reader:
        """Return a reader that leaves the frames and items of this one as they are."""
        copy = object.__new__(_Reader)
        copy._root, copy._made, copy.frames, copy._num_shared = self._root, made, [*self.frames], len(self.frames)
        copy.text = None if self.text is None else bytearray(self.text)
        copy.is_string, copy.is_escaped = self.is_string, self.is_escaped
        copy.has_item, copy.is_done = self.has_item, self.is_done
        return copy

    @property
    def items(self) -> _Items | None:
        """The items of the innermost array, if they must be unique."""
        return self.frames[-1].items if self.frames else None

    def read(self, text: bytes) -> int:
        """Read this text up to the end of the JSON value. Returns the number of bytes; -1 if they are a dead end."""
        for at, byte in enumerate(text):
            if self.is_string:
                assert self.text is not None
                self.text.append(byte)
                if self.is_escaped or byte == _BACKSLASH:
                    self.is_escaped = not self.is_escaped
                elif byte == _QUOTE:
                    self.is_string = False
                    if not self._end():
                        return -1
            elif byte in _SPACES or byte == _COMMA or byte in _CLOSING:
                if not self.frames and byte not in _SPACES:  # not a value
                    self.is_done = True
                    return at
                if (self.text is not None and not self._end()) or (byte == _COMMA and not self._go_on()):
                    return -1
                if byte in _CLOSING:
                    self.frames.pop()
                    self._num_shared = min(self._num_shared, len(self.frames))
                    self.has_item = True
            elif byte in _OPENING:
                self.frames.append(_Frame(self.frames[-1].inner() if self.frames else self._root, byte == _OPENING[1]))
                self.has_item = False
            elif self.text is not None:
                self.text.append(byte)
            elif not self.frames:  # neither an array nor an object
                self.is_done = True
                return at
            elif byte != _COLON:
                self.text, self.is_string = bytearray((byte,)), byte == _QUOTE
            if not self.frames and byte in _CLOSING:
                self.is_done = True
                return at + 1
        return -1 if self._is_dead_end() else len(text)

    def _frame(self) -> _Frame:
        """Return the innermost frame, to be changed."""
        if self._num_shared == len(self.frames):
            self.frames[-1] = self.frames[-1].copy()
            self._num_shared -= 1
        return self.frames[-1]

    def _end(self) -> bool:
        """End the value or name that is read; returns whether it may be there."""
        assert self.text is not None
        text, self.text = bytes(self.text), None
        frame = self._frame()
        if frame.is_object and frame.key is None:
            frame.key = text
            return True
        self.has_item = True
        if frame.items is None:
            return True
        if text in frame.items:
            return False
        if self._made is None:
            frame.items.add(text)
            return True
        made = self._made.get((frame.items, text))
        if made is None:
            made = self._made[frame.items, text] = frame.items.with_item(text)
        frame.items = made
        return True

    def _go_on(self) -> bool:
        """Read a comma; returns whether an item can follow."""
        frame = self._frame()
        frame.index += 1
        frame.key = None
        self.has_item = False
        dead_ends = None if frame.items is None else frame.items.dead_ends(frame.index)
        return dead_ends is None or not dead_ends.is_used_up

    def _is_dead_end(self) -> bool:
        """Return whether the item that is read can only be continued to used ones."""
        if self.text is None or (items := self.items) is None:
            return False
        dead_ends = items.dead_ends(self.frames[-1].index)
        return dead_ends is not None and dead_ends.contains(bytes(self.text))


class UniqueItems:
    """The state of one output in the arrays of its grammar whose items must be unique. Not thread-safe."""

    def __init__(self, roots: dict[str, Place | None], tokens: Callable[[], TokenTexts], matcher: LLMatcher) -> None:
        """`roots`: by name of the capture before a JSON value; without a name, the whole output is the value. `matcher`
        is the grammar's, before the first token.
        """
        self._roots = roots
        self._tokens = tokens
        self._reader = _Reader(roots[""]) if "" in roots else None
        self._matcher = None if "" in roots else matcher.deep_copy()
        """Only consumes tokens, as the captures of one that looks ahead may be ahead, too."""
        self._num_marks = 0
        if self._matcher is not None and (marks := self._marks(self._matcher)):
            self._reader, self._num_marks = self._reader_of(marks), len(marks)

    def advance(self, token_id: int) -> bool:
        """Read a token that the grammar allows; returns whether it is no dead end."""
        text = self._text(token_id)
        if self._matcher is not None:
            self._matcher.consume_token(token_id)
            number = len(self._marks(self._matcher))
            if self._reader is None and number > self._num_marks:
                before = self._matcher.deep_copy()
                before.rollback(1)
                self._reader, text = self._begun(token_id, before)
            self._num_marks = number
        if self._reader is None or self._reader.is_done:
            return True
        is_alive = self._reader.read(text) >= 0
        if self._reader.is_done and self._matcher is not None:
            self._reader = None  # more values may follow
        return is_alive

    def restrict(self, mask: Words) -> None:
        """Remove the tokens that lead to a dead end from a mask, `[words]`."""
        reader, tokens = self._reader, self._tokens()
        if reader is None:
            assert self._matcher is not None
            for token in _allowed(mask, tokens.lists):
                started, text = self._begun(token, self._matcher)
                if started is not None and started.read(text) < 0:
                    _remove(mask, [token])
            return
        if reader.is_done:
            return
        removed: list[Ids | list[int]] = []
        items = reader.items
        check = _allowed(mask, tokens.lists) if items is None else self._find(mask, reader, items, removed)
        made: dict[tuple[_Items, bytes], _Items] = {}
        removed.append([token for token in check if reader.copy(made).read(self._text(token)) < 0])
        for tokens_removed in removed:
            _remove(mask, tokens_removed)

    def _find(self, mask: Words, reader: _Reader, items: _Items, removed: list[Ids | list[int]]) -> Iterable[int]:
        """Find the tokens to remove that can be looked up; returns those that must be read."""
        tokens, frame = self._tokens(), reader.frames[-1]
        dead_ends, next_ones = items.dead_ends(frame.index), items.dead_ends(frame.index + 1)
        if reader.text is None:
            if not reader.has_item:
                removed += tokens.opening(dead_ends.topmost if dead_ends else ())
            elif next_ones is not None and next_ones.is_used_up:
                removed.append(tokens.first_comma)
            return _allowed(mask, tokens.from_outside)
        text = bytes(reader.text)
        if dead_ends is not None:
            begin, end = dead_ends.below(text)
            removed += tokens.inside([each[len(text) :] for each in dead_ends.topmost[begin:end]])
        if reader.is_escaped:
            return _allowed(mask, tokens.quotes)
        begin, end = bisect_left(items.sorted, text), bisect_left(items.sorted, text + b"\xff")
        table = tokens.closing if reader.is_string else tokens.ending
        if end - begin <= len(table):
            rests = (each[len(text) :] for each in items.sorted[begin:end])
            removed += [table[rest] for rest in rests if rest in table]
        else:
            removed += [found for rest, found in table.items() if text + rest in items.texts]
        if not reader.is_string and text in items.texts:
            removed.append(tokens.first_end)
        ends_string = tokens.with_second if next_ones is None else tokens.from_string
        check = {*_allowed(mask, ends_string if reader.is_string else tokens.from_outside)}
        if reader.is_string and next_ones is not None and not next_ones.has_several_strings:
            check.update(_allowed(mask, tokens.reopening))
        if next_ones is not None and next_ones.is_nearly_used_up:
            check.update(_allowed(mask, tokens.commas))
        return check

    def _text(self, token_id: int) -> bytes:
        texts = self._tokens().texts
        return texts[token_id] if token_id < len(texts) else b""

    def _begun(self, token_id: int, before: LLMatcher) -> tuple[_Reader | None, bytes]:
        """Return a reader of the JSON value that begins in or right after this token, and the value's text in it; None
        if there is none, or one that matters not. `before` has not consumed the token.
        """
        text, number, tokens = self._text(token_id), len(self._marks(before)), self._tokens()
        after = before.deep_copy()
        after.consume_token(token_id)
        marks = self._marks(after)[number:]
        if not marks:
            return None, b""
        step = before.deep_copy()
        for at, byte in enumerate(text):
            if byte not in tokens.of_byte or not step.consume_token(tokens.of_byte[byte]):
                break
            if len(self._marks(step)) > number:
                return self._reader_of(marks), text[at + 1 :]
        return self._reader_of(marks), b""

    def _marks(self, matcher: LLMatcher) -> list[str]:
        """Return the names of the marks that a matcher has captured, in this order; a grammar may have others."""
        names = (name.removeprefix(MARK) for name, _ in matcher.get_captures())
        return [name for name in names if name in self._roots]

    def _reader_of(self, marks: Sequence[str]) -> _Reader | None:
        places = {self._roots[name] for name in marks}
        if len(places) > 1:
            raise ValueError("uniqueItems is not supported where values of several schemas can begin")
        (place,) = places
        return None if place is None else _Reader(place)


def _allowed(mask: Words, tokens: Ids) -> list[int]:
    """Return those of the tokens that a mask allows."""
    tokens = tokens[tokens < len(mask) * 32]
    found: list[int] = tokens[(mask[tokens >> 5] >> (tokens & 31)) & 1 == 1].tolist()
    return found


def _remove(mask: Words, tokens: Ids | Sequence[int]) -> None:
    ids = np.asarray(tokens, np.int64)
    ids = ids[ids < len(mask) * 32]
    if len(ids):
        words = mask.view(np.uint32)
        np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
