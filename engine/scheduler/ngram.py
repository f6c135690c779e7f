"""N-gram drafts: a text that repeats itself is assumed to go on as it did before.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAX_MATCH = 16
"""Longer matches are not told apart."""
_DECAY = 0.95
"""Factor by which a guess counts less with each later one: about the last 20 count."""
_PRIOR_WEIGHT = 1.0
"""Guesses as which the rule of succession counts."""
_MAX_MISSES = 2
"""Consecutive tokens that may differ from those that are being repeated, as if they had been replaced."""
_CORPUS_MATCH = 4
"""Tokens as whose repetition the start of a corpus counts."""
_UNKNOWN = -1
"""In front of the tokens, so that a comparison with tokens before the first one fails."""


class TokenLookup:
    """The tokens of a request, and the place in them that is being repeated.

    The place moves along with each new token, which takes no search, until several differ from those at the place.
    """

    def __init__(self, minimum: int, corpus: Sequence[int] = ()) -> None:
        """A match has at least `minimum` tokens. `corpus` is text to repeat in addition to the request's own."""
        self._minimum, self._num_known = minimum, 0
        self._tokens = np.full(max(256, 2 * (len(corpus) + _MAX_MATCH + 1)), _UNKNOWN, np.int32)
        self._tokens[_MAX_MATCH : _MAX_MATCH + len(corpus)] = corpus
        self._end = _MAX_MATCH + len(corpus) + bool(corpus)
        """End of the tokens in the array."""
        self._source = _MAX_MATCH if corpus else None
        """Where the next token is expected to be; None: nowhere."""
        self._hits, self._guesses = [0.0] * 6, [0.0] * 6
        """Right guesses, and all guesses, by the length of the match (see `_length_class`)."""
        self._num_missed = 0
        """Consecutive tokens before `_source` that differ."""
        self._searched = 0
        """`_end` at the last search."""
        self._num_matched = max(minimum, _CORPUS_MATCH) if corpus else 0
        """Tokens before `_source` that equal the last ones."""

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens of the request that are new since the last call, given all of them."""
        first, self._num_known = self._num_known, len(token_ids)
        new, start = token_ids[first:], self._end
        if not new:
            return
        self._end += len(new)
        if self._end > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.full(self._end, _UNKNOWN, np.int32)))
        self._tokens[start : self._end] = new
        if not first:  # the prompt, which nobody has guessed
            return
        for token in new:
            if self._source is None:
                return
            is_hit, at = bool(self._tokens[self._source] == token), _length_class(self._num_matched)
            self._hits[at] = self._hits[at] * _DECAY + is_hit
            self._guesses[at] = self._guesses[at] * _DECAY + 1.0
            self._num_matched = self._num_matched + 1 if is_hit else 0
            self._num_missed = 0 if is_hit else self._num_missed + 1
            self._source = self._source + 1 if self._num_missed <= _MAX_MISSES else None

    def propose(self, count: int) -> list[int]:
        """Return the tokens expected next, at most `count`; empty if the last tokens have not occurred before."""
        if self._num_matched < self._minimum and self._searched < self._end:
            self._searched = self._end
            self._search()
        source = self._source
        if source is None:
            return []
        period = self._end - source  # what follows the last token is expected to repeat as well
        if count <= period:
            return self._until_gap(self._tokens[source : source + count].tolist())
        return self._until_gap(np.resize(self._tokens[source : self._end], count).tolist())

    @property
    def probability(self) -> float:
        """Estimated probability of a proposed token to be right if those before it are.

        The share of recent guesses after matches of this length that were right; without any, by the rule of
        succession: after n tokens that were repeated, the next one is with a probability of about n / (n + 1).
        """
        at, expected = _length_class(self._num_matched), self._num_matched / (self._num_matched + 1)
        return (self._hits[at] + _PRIOR_WEIGHT * expected) / (self._guesses[at] + _PRIOR_WEIGHT)

    def _until_gap(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(_UNKNOWN)] if _UNKNOWN in tokens else tokens

    def _search(self) -> None:
        """Find the longest match of the last tokens, of several the last one."""
        tokens, last = self._tokens, self._end - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while len(places) and length < _MAX_MATCH:
            longer = places[tokens[places - length] == tokens[last - length]]
            if not len(longer) or tokens[last - length] == _UNKNOWN:
                break
            places, length = longer, length + 1
        if len(places) and length >= self._minimum:
            self._source, self._num_matched, self._num_missed = int(places[-1]) + 1, length, 0


def _length_class(num_matched: int) -> int:
    """0, 1, 2-3, 4-7, 8-15 or more."""
    return min(num_matched.bit_length(), 5)
