"""Images and videos in the text of a prompt: placeholders that a chat template writes, the text of the items in their
place, and the tokens of that text.

A placeholder in a user's text is no placeholder. `Placeholders.protected` breaks it before the conversation is
rendered, by a number that nobody can guess, which `Placeholders.expand` removes again. So the n-th placeholder that
remains is the n-th item's of that kind.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.media import EMBEDS, MediaItem, MediaKind, MediaRun
from quire.server.media.types import LoadedItem, MediaSource


class ItemSpan(NamedTuple):
    """The characters of an item in a text."""

    start: int
    end: int
    item: int
    """The number of the item."""


@dataclass(frozen=True)
class Placeholders:
    """What a chat template writes for an item, by kind."""

    texts: Mapping[MediaKind, str]
    mark: str = field(default_factory=lambda: f"{secrets.randbelow(10**18):018}")
    """Stands in placeholders of users, and after the beginning of one at the end of a text, which the template may join
    with the next. Digits, as templates change the case of texts, or escape them as JSON.
    """
    text_start: str = ""
    """Put behind the last item."""
    text_end: str = ""
    """Put behind the prompt."""
    adds_special_tokens: bool = True
    """Whether the tokenizer's special tokens are added."""

    @cached_property
    def _placeholder(self) -> re.Pattern[str]:
        """The longest first, as one may contain another."""
        return re.compile("|".join(map(re.escape, sorted({*self.texts.values()}, key=len, reverse=True))))

    @cached_property
    def _beginning(self) -> re.Pattern[str]:
        """A proper prefix of a placeholder at the end of a text, apart from space, which templates may strip."""
        begun = {text[:length] for text in self.texts.values() for length in range(1, len(text))}
        return re.compile(f"(?:{'|'.join(map(re.escape, sorted(begun, key=len, reverse=True)))})(?=\\s*\\Z)")

    def protected(self, value: Any) -> Any:
        """Return a value of a template, with marks in the texts that it contains."""
        match value:
            case str():
                value = self._placeholder.sub(lambda found: f"{found[0][0]}{self.mark}{found[0][1:]}", value)
                return self._beginning.sub(lambda found: f"{found[0]}{self.mark}", value)
            case Mapping():
                return {self.protected(name): self.protected(each) for name, each in value.items()}
            case list() | tuple():
                return [self.protected(each) for each in value]
        return value

    def are_in(self, text: str, kinds: Iterable[MediaKind]) -> bool:
        """Return whether a rendered text has exactly the placeholders of these items."""
        return Counter(self._placeholder.findall(text)) == self.counts(kinds)

    def counts(self, kinds: Iterable[MediaKind]) -> Counter[str]:
        """Return how many of each placeholder these items have."""
        return Counter(self.texts[kind] for kind in kinds)

    def order(self, items: Sequence[LoadedItem]) -> Mapping[str, Iterator[int]]:
        """Return the numbers of the items that each placeholder stands for, one after the other."""
        numbers = defaultdict[str, list[int]](list)
        for at, item in enumerate(items):
            numbers[self.texts[item.kind]].append(at)
        return {text: iter(found) for text, found in numbers.items()}

    def expand(self, text: str, items: Sequence[LoadedItem]) -> tuple[str, list[ItemSpan]]:
        """Return a rendered text with the items' texts instead of the placeholders, and without marks. Also returns
        where the items are, in the order of the text.
        """
        order = self.order(items)
        parts: list[str] = []
        spans: list[ItemSpan] = []
        length = end = 0
        for found in self._placeholder.finditer(text):
            at = next(order[found[0]])
            before = text[end : found.start()].replace(self.mark, "")
            begin = length + len(before)
            length, end = begin + len(items[at].text), found.end()
            parts += (before, items[at].text)
            spans.append(ItemSpan(begin, length, at))
        rest = text[end:].replace(self.mark, "")
        return "".join([*parts, *((self.text_start, rest, self.text_end) if spans else (rest,))]), spans


def split_ids(ids: Sequence[int], marks: Collection[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the parts of token ids: each of these sequences, longer ones first, and what is between them."""
    begin = at = 0
    longest_first = sorted(marks, key=len, reverse=True)
    while at < len(ids):
        mark = next((mark for mark in longest_first if tuple(ids[at : at + len(mark)]) == mark), ())
        if mark:
            yield tuple(ids[begin:at])
            yield mark
            begin = at + len(mark)
        at += len(mark) or 1
    yield tuple(ids[begin:])


def with_pages(messages: Sequence[Mapping[str, Any]], shown: Sequence[int | str]) -> list[Mapping[str, Any]]:
    """Return messages in which the part of each source stands as often as it has items: a document's pages; or as the
    text that it is, between the texts of the document's tags, which stand beside it.
    """
    counts = iter(shown)

    def replaced(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
        found, begin = list[Mapping[str, Any]](), ""
        for part in parts:
            count = next(counts) if part["type"] in ("image", "video") else 1
            if isinstance(count, str):
                begin = f"{found.pop()['text']}\n{count}\n"
            elif begin:
                found.append({**part, "text": begin + part["text"]})
                begin = ""
            else:
                found += [part] * count
        return found[0]["text"] if len(found) == 1 < len(parts) and "text" in found[0] else found

    contents = [message.get("content") for message in messages]
    return [
        {**message, "content": replaced(content)} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]


def media_items(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[ItemSpan],
    items: Sequence[LoadedItem],
    sources: Sequence[MediaSource],
    spec: MediaSpec,
) -> list[MediaItem]:
    """Return the items of a prompt, by their tokens. `offsets` has the characters of each token, in order.

    Raises `InvalidParameter` if the tokenizer makes other feature tokens of an item's text than its processor has
    counted, and for given features (`EMBEDS`) of another width than the tower's.
    """
    found: list[MediaItem] = []
    for span in spans:
        item, param = items[span.item], sources[span.item].param
        # A token at an edge may belong to two items; it is the first one's.
        begin = bisect_left(offsets, span.start + 1, lo=found[-1].end if found else 0, key=lambda each: each[1])
        end = bisect_left(offsets, span.end, lo=begin, key=lambda each: each[0])
        token_id = spec.image_token_id if item.kind == "image" else spec.video_token_id
        features = [index for index, each in enumerate(ids[begin:end]) if each == token_id]
        runs = _runs(features, item.grids)
        expected = len(features), spec.tower.feature_width
        for array in item.data.arrays:
            if array.name == EMBEDS and array.shape != expected:
                shape, wanted = (" × ".join(map(str, each)) for each in (array.shape, expected))
                raise InvalidParameter(f"{param}: the features are {shape}, but must be {wanted}", param)
        if runs is None:
            raise InvalidParameter(
                f"{param}: the model's tokenizer does not represent the text of its processor for this {item.kind}",
                param,
            )
        made = MediaItem(item.digest, item.kind, begin, end - begin, runs, item.seconds_per_frame, item.data)
        found.append(made)
    return found


def _runs(features: Sequence[int], grids: Sequence[tuple[int, int, int]]) -> tuple[MediaRun, ...] | None:
    """Return the runs of consecutive feature tokens; with `grids`, one of each. None: they are not like this."""
    if grids:
        runs, begin = [], 0
        for time, height, width in grids:
            part = features[begin : (begin := begin + time * height * width)]
            if not part or part[-1] - part[0] + 1 != time * height * width:
                return None
            runs.append(MediaRun(part[0], len(part), (time, height, width)))
        return tuple(runs) if begin == len(features) else None
    starts = [at for at, each in enumerate(features) if not at or features[at - 1] != each - 1]
    return tuple(MediaRun(features[a], b - a) for a, b in pairwise([*starts, len(features)])) or None


def truncated_items(
    items: Sequence[MediaItem], length: int, kept: int, side: Literal["left", "right"], params: Sequence[str]
) -> list[MediaItem]:
    """Return the items of a prompt of `length` tokens of which `kept` are left: those that are whole. `params` names
    them. Raises `InvalidParameter` for an item that would be cut.
    """
    begin, end = (max(0, length - kept), length) if side == "left" else (0, min(length, kept))
    found = []
    for item, param in zip(items, params, strict=True):
        if begin <= item.offset and item.end <= end:
            found.append(msgspec.structs.replace(item, offset=item.offset - begin))
        elif item.offset < end and begin < item.end:
            raise InvalidParameter(
                f"truncate_prompt_tokens: {kept} tokens would cut {param}, which has {item.length} of {length}; "
                "an item is kept or removed as a whole",
                "truncate_prompt_tokens",
            )
    return found
