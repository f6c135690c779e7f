"""The images and videos of running requests, and what they mean for the tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.architecture.media_spec import MediaSpec
from quire.engine.layers.media_positions import media_positions, place_positions
from quire.engine.protocol.media import MediaItem

Ints = npt.NDArray[np.int64]


class FeatureRange(NamedTuple):
    """Features of an item that replace the embeddings of consecutive tokens of a step."""

    digest: bytes
    begin: int
    end: int
    token: int
    """Index in the step of the first of these tokens."""


class MediaRows:
    """By request slot; the same on every rank of every stage."""

    def __init__(self, slots: int, spec: MediaSpec, vocab_size: int, *, has_axes: bool) -> None:
        """`has_axes`: the model's rotary embedding has a position along each axis."""
        self._spec, self._vocab_size, self._has_axes = spec, vocab_size, has_axes
        self._items: dict[int, Sequence[MediaItem]] = {}
        self._prompts: dict[int, Ints] = {}
        """Positions of a prompt's tokens along the axes."""
        self._ends = np.zeros(slots, np.int64)
        """The tokens up to which those of a slot's request differ from causal text; 0: none do."""
        self._deltas = np.zeros(slots, np.int64)
        """Added to the positions of a slot's later tokens."""

    def add(self, slot: int, items: Sequence[MediaItem], num_prompt_tokens: int) -> None:
        is_one_run = self._spec.is_one_run(items)
        if not items and not is_one_run:
            return
        self._items[slot] = items
        self._ends[slot] = num_prompt_tokens if is_one_run else items[-1].end
        if self._has_axes:
            if axes := self._spec.place_axes:
                found = place_positions(items, num_prompt_tokens, axes)
            else:
                found = media_positions(items, num_prompt_tokens, self._spec.tokens_per_second)
            self._prompts[slot], self._ends[slot] = found, num_prompt_tokens
            self._deltas[slot] = int(found.max()) + 1 - num_prompt_tokens

    def valid(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens of a prompt, such that each has a logit, for penalties and log-probabilities. The ids that stand
        for features may be outside the vocabulary; they become its last one."""
        return [min(token_id, self._vocab_size - 1) for token_id in token_ids]

    def free(self, slots: Iterable[int]) -> None:
        if self._items:
            for slot in slots:
                self._items.pop(slot, None)
                self._prompts.pop(slot, None)
                self._ends[slot] = self._deltas[slot] = 0

    def around_items(self, slot: int, first: int, count: int) -> Ints | None:
        """Of `count` tokens from position `first` on: the indices of those of items, and of the ones before and behind
        each. None: the slot's request has no items."""
        if not (items := self._items.get(slot)):
            return None
        places = np.arange(first, first + count)
        is_near = [(item.offset - 1 <= places) & (places <= item.end) for item in items]
        return np.flatnonzero(np.logical_or.reduce(is_near))

    def step(self, slots: Ints, first: Ints, counts: Ints) -> tuple[dict[str, Ints], list[FeatureRange]]:
        """For `counts` tokens of each of these slots from position `first` on: the fields of `Batch` that are not as
        for text, and the features that `media_tokens` take."""
        if not self._items:
            return {}, []
        starts = counts.cumsum() - counts
        before = np.flatnonzero(first < self._ends[slots])
        rows = [*zip(*(each[before].tolist() for each in (slots, first, counts, starts)), strict=True)]
        positions = np.arange(counts.sum()) + np.repeat(first - starts, counts)
        ends, has_runs = positions + 1, False
        features: list[FeatureRange] = []
        for slot, begin, count, start in rows:
            for digest, place, number, length in self._features(slot):
                low, high = max(begin, place), min(begin + count, place + length)
                if low < high:
                    token = start + low - begin
                    features.append(FeatureRange(digest, number + low - place, number + high - place, token))
            for place, length in self._runs(slot):
                low, high = max(begin, place), min(begin + count, place + length)
                if low < high:
                    assert high == place + length, "a step ends inside a run"
                    ends[start + low - begin : start + high - begin] = high
                    has_runs = True
        fields = {}
        if self._has_axes:
            fields["rope_positions"] = positions = positions + np.repeat(self._deltas[slots], counts)
            if rows:
                fields["rope_positions"] = np.tile(positions, (self._spec.place_axes or 3, 1))
            for slot, begin, count, start in rows:
                own = self._prompts[slot][:, begin : begin + count]
                fields["rope_positions"][:, start : start + own.shape[1]] = own
        if features:
            fields["media_tokens"] = np.concatenate(
                [each.token + np.arange(each.end - each.begin) for each in features]
            )
        if has_runs:
            fields["key_ends"] = ends
        return fields, features

    def _runs(self, slot: int) -> Iterable[tuple[int, int]]:
        """The tokens of a slot's request that attend to each other in both directions: the first one, and how many."""
        if not self._spec.is_bidirectional:
            return ()
        if self._spec.joins_prompt:
            return ((0, int(self._ends[slot])),)
        return ((place, length) for _, place, _, length in self._features(slot))

    def _features(self, slot: int) -> Iterator[tuple[bytes, int, int, int]]:
        """The runs of a slot's items: digest, position of the first token, number of its feature, length."""
        for item in self._items[slot]:
            number = 0
            for run in item.runs:
                yield item.digest, item.offset + run.start, number, run.length
                number += run.length
