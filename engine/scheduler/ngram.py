"""N-gram drafts: a text that repeats itself, or a recent answer, is assumed to go on as it did before.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

_MAX_MATCH = 16
"""Longer matches are not distinguished."""
_DECAY = 0.95
"""Factor by which a guess counts less with each later one: about the last 20 count."""
_PRIOR_WEIGHT = 1.0
"""Weight of the rule of succession, as a number of guesses."""
_OVERALL_WEIGHT = 4.0
"""Weight of the share of all requests in the share of one request, as a number of guesses."""
_MAX_MISSES = 2
"""Consecutive tokens that may differ from the repeated tokens, as if they had been replaced."""
_CORPUS_MATCH = 4
"""Length of the match that the start of a corpus counts as."""
_NUM_LENGTHS = 6
"""Number of classes of match lengths, by powers of two; see `_length_class`."""
UNKNOWN = -1
"""Stands for tokens that are not repeated: in front of a text, so that a comparison with tokens before the first one
fails, and in place of images."""
RECENT_MATCH = 4
"""Tokens that a text has in common with a recent answer that it may be repeating."""
_RECENT_TOKENS = 1 << 15
"""Tokens of recent answers after which older ones are forgotten; up to twice as many are known."""
_MULTIPLIER, _KEY_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Acceptance:
    """How many recent guesses were right, by the number of tokens that had matched before."""

    def __init__(self, overall: Acceptance | None = None) -> None:
        """`overall` has the statistics of all requests, and learns from this one, too."""
        self._hits, self._guesses = [0.0] * _NUM_LENGTHS, [0.0] * _NUM_LENGTHS
        self._overall = overall

    def learn(self, num_matched: int, *, is_hit: bool) -> None:
        """Record whether the token after a match was right."""
        length = _length_class(num_matched)
        self._hits[length] = self._hits[length] * _DECAY + is_hit
        self._guesses[length] = self._guesses[length] * _DECAY + 1.0
        if self._overall is not None:
            self._overall.learn(num_matched, is_hit=is_hit)

    def chances(self, num_matched: int, count: int) -> list[float]:
        """Return the estimated probabilities that 1, 2, … `count` tokens after a match are all right."""
        return [*accumulate(map(self.probability, range(num_matched, num_matched + count)), mul)]

    def probability(self, num_matched: int) -> float:
        """Return the probability that the next token is right: the share of right guesses among recent ones after
        matches of this length.

        Without such guesses, it is the share of all requests or, without these, follows the rule of succession: after n
        repeated tokens, the next one repeats with a probability of about n / (n + 1).
        """
        expected, weight = num_matched / (num_matched + 1), _PRIOR_WEIGHT
        if self._overall is not None:
            expected, weight = self._overall.probability(num_matched), _OVERALL_WEIGHT
        length = _length_class(num_matched)
        return (self._hits[length] + weight * expected) / (self._guesses[length] + weight)


class RecentTexts:
    """Recent answers, in which the requests with the same salt look for text that they may be repeating.

    Texts are in one array, with gaps between them, and places are found by a hash of the tokens before them. When the
    array is full, it becomes the older of two.
    """

    def __init__(self, size: int = _RECENT_TOKENS) -> None:
        self.acceptance = Acceptance()
        self._size = size
        self._older: tuple[np.ndarray, dict[int, int]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._tokens = np.full(self._size + _MAX_MISSES + 1, UNKNOWN, np.int32)
        self._places: dict[int, int] = {}
        self._end = 0

    def add(self, tokens: Sequence[int], salt: bytes) -> None:
        """Add a text: an answer after the last `RECENT_MATCH` tokens of its prompt. Of a long one its end is kept."""
        text = np.asarray(tokens[-self._size :], np.int32)
        if self._end + len(text) > self._size:
            self._older = self._tokens, self._places
            self._begin()
        count = len(text) - RECENT_MATCH
        if count <= 0:
            return
        self._tokens[self._end : self._end + len(text)] = text
        keys = np.full(count, hash(salt) & _KEY_BITS, np.uint64)
        for place in range(RECENT_MATCH):
            keys = keys * np.uint64(_MULTIPLIER) + text[place : place + count].astype(np.uint64)
        first = self._end + RECENT_MATCH
        self._places.update(zip(keys.tolist(), range(first, first + count), strict=True))
        self._end += len(text) + 1

    def find(self, last: Sequence[int], salt: bytes) -> tuple[np.ndarray, int] | None:
        """The tokens and the place in them where the last text with these `RECENT_MATCH` tokens went on."""
        key = hash(salt) & _KEY_BITS
        for token in last:
            key = (key * _MULTIPLIER + token) & _KEY_BITS
        for tokens, places in ((self._tokens, self._places), *([self._older] if self._older else [])):
            place = places.get(key)
            if place is not None and tokens[place - RECENT_MATCH : place].tolist() == list(last):
                return tokens, place
        return None


class TokenLookup:
    """The tokens of a request, and the place in them, or in a recent answer, that is being repeated.

    The place moves along with each new token, which takes no search, until several of them differ from the tokens at
    the place.
    """

    def __init__(
        self,
        minimum: int,
        corpus: Sequence[int] = (),
        recent: RecentTexts | None = None,
        salt: bytes = b"",
        overall: Acceptance | None = None,
    ) -> None:
        """A match has at least `minimum` tokens. `corpus` is text to repeat in addition to the request's own text and
        to `recent` texts with this salt. `overall` has the statistics of requests without a corpus, as a corpus is
        expected to be repeated whatever others do."""
        self._minimum = minimum
        self.num_known = 0
        """Tokens of the request that it has been given."""
        self._recent, self._salt = recent, salt
        self._others: np.ndarray | None = None
        """The recent texts that `_source` is a place in; None: it is a place in the request's own tokens."""
        self._tokens = np.full(max(256, 2 * (len(corpus) + _MAX_MATCH + 1)), UNKNOWN, np.int32)
        self._tokens[_MAX_MATCH : _MAX_MATCH + len(corpus)] = corpus
        self._end = _MAX_MATCH + len(corpus) + bool(corpus)
        """End of the tokens in the array."""
        self._source = _MAX_MATCH if corpus else None
        """Where the next token is expected to be; None: nowhere."""
        self._own_acceptance = Acceptance(None if corpus else overall)
        self._num_missed = 0
        """Consecutive tokens before `_source` that differ."""
        self._searched = 0
        """`_end` at the last search."""
        self._num_matched = max(minimum, _CORPUS_MATCH) if corpus else 0
        """Tokens before `_source` that equal the last ones."""
        self.proposed: tuple[list[int], list[float]] | None = None
        """The tokens proposed after the last token, and their chances, for the caller to keep until the next token."""

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens of the request that are new since the last call, given all of them."""
        first, self.num_known = self.num_known, len(token_ids)
        new, start = token_ids[first:], self._end
        if not new:
            return
        self.proposed = None
        self._end += len(new)
        if self._end > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.full(self._end, UNKNOWN, np.int32)))
        self._tokens[start : self._end] = new
        if not first:  # the prompt, which nobody has guessed
            return
        for token in new:
            if self._source is None:
                return
            is_hit = bool(self._text[self._source] == token)
            self._acceptance.learn(self._num_matched, is_hit=is_hit)
            self._num_matched = self._num_matched + 1 if is_hit else 0
            self._num_missed = 0 if is_hit else self._num_missed + 1
            self._source = self._source + 1 if self._num_missed <= _MAX_MISSES else None

    def propose(self, count: int) -> list[int]:
        """Return the tokens expected next, at most `count`; empty if the last tokens have not occurred before."""
        if self._num_matched < self._minimum and self._searched < self._end:
            self._searched = self._end
            self._search()
            if self._source is None and self._recent is not None:
                self._search_recent(self._recent)
        source = self._source
        if source is None:
            return []
        if self._others is not None:
            return self._until_gap(self._others[source : source + count].tolist())
        period = self._end - source  # the tokens after the last one are expected to repeat as well
        if count <= period:
            return self._until_gap(self._tokens[source : source + count].tolist())
        return self._until_gap(np.resize(self._tokens[source : self._end], count).tolist())

    def chances(self, count: int) -> list[float]:
        """Return the estimated probabilities that the first, the second, … of `count` proposed tokens are right, as are
        the tokens before them."""
        return self._acceptance.chances(self._num_matched, count)

    @property
    def _text(self) -> np.ndarray:
        return self._tokens if self._others is None else self._others

    @property
    def _acceptance(self) -> Acceptance:
        return self._own_acceptance if self._others is None or self._recent is None else self._recent.acceptance

    def _until_gap(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens

    def _search(self) -> None:
        """Find the longest match of the last tokens, of several the last one."""
        tokens, last = self._tokens, self._end - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while len(places) and length < _MAX_MATCH:
            longer = places[tokens[places - length] == tokens[last - length]]
            if not len(longer) or tokens[last - length] == UNKNOWN:
                break
            places, length = longer, length + 1
        if len(places) and length >= self._minimum:
            self._source, self._num_matched, self._num_missed = int(places[-1]) + 1, length, 0
            self._others = None

    def _search_recent(self, recent: RecentTexts) -> None:
        found = recent.find(self._tokens[self._end - RECENT_MATCH : self._end].tolist(), self._salt)
        if found is not None:
            self._others, self._source = found
            self._num_matched, self._num_missed = max(self._minimum, RECENT_MATCH), 0


def _length_class(num_matched: int) -> int:
    """The class of a match length: 0, 1, 2-3, 4-7, 8-15, or 16 and more."""
    return min(num_matched.bit_length(), _NUM_LENGTHS - 1)
