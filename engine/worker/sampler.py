"""Logits become tokens. Nothing is kept from step to step: all follows from the requests' tokens and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire import kernels
from quire.engine.protocol.messages import SamplingParams, TokenLogprobs
from quire.engine.worker.async_copies import Array, send
from quire.engine.worker.input_batch import InputBatch, Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sampled:
    """What a step samples, on the device."""

    tokens: Tensor
    """int64 `[rows]`"""
    asked: Ints
    """The rows that asked for log-probabilities."""
    num_top: Ints
    """How many of the likeliest tokens each of these wants."""
    columns: tuple[Tensor, ...]
    """Of these rows, if there are any: what `logprobs` takes."""

    def logprobs(
        self, logprobs: Array, ranks: Array, top_ids: Array, top_logprobs: Array
    ) -> list[TokenLogprobs | None]:
        """The columns, once they are on the host, row for row of all that sample."""
        result: list[TokenLogprobs | None] = [None] * len(self.tokens)
        rows = zip(logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
        for row, count, (logprob, rank, ids, values) in zip(
            self.asked.tolist(), self.num_top.tolist(), rows, strict=True
        ):
            result[row] = TokenLogprobs(logprob, rank, ids[:count], values[:count])
        return result


class Sampler:
    """Samples the next token of each row: bias, forbidden tokens and penalties, then `kernels.sample`.

    The noise of a draw depends on the request's seed, the token's position and its id alone. Rows that do without a
    feature do not pay for it.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, tuple(eos_token_ids), device

    def sample(
        self, logits: Tensor, states: InputBatch, slots: Ints, masks: Mapping[int, bytes] | None = None
    ) -> Sampled:
        """One token for each row of `logits` (float32 `[rows, vocab]`, overwritten), which belong to `slots`.

        `masks` are those of the plan: whoever has one may sample nothing else, and what its parameters forbid is left
        out of it already. The log-probabilities are those of `logits` as given. Nothing here waits for the device.
        """
        controls = states.controls[slots]
        asked = np.flatnonzero(controls["logprobs"] >= 0)
        raw = logits[self._send(asked)] if len(asked) else None
        self._bias(logits, states, slots)
        masked = np.array([slot in masks for slot in slots.tolist()]) if masks else np.zeros(len(slots), bool)
        self._forbid(logits, states, slots, ~masked)
        self._penalize(logits, states, slots)
        if masks:
            self._mask(logits, slots, np.flatnonzero(masked), masks)
        drawing = (np.ascontiguousarray(controls[name]) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
        hosts = (torch.from_numpy(values) for values in (*drawing, states.num_known[slots]))
        tokens = kernels.sample(logits, *hosts)
        counts = controls["logprobs"][asked]
        columns: tuple[Tensor, ...] = ()
        if raw is not None:
            columns = kernels.score_tokens(raw, tokens[self._send(asked)], int(counts.max()))
        return Sampled(tokens, asked, counts, columns)

    def score(self, logits: Tensor, tokens: Ints, num_top: int) -> tuple[Tensor, ...]:
        """For `logits` (float32 `[rows, vocab]`) and a token of each row: the columns of `PromptLogprobs`."""
        return kernels.score_tokens(logits, self._send(tokens), num_top)

    def _bias(self, logits: Tensor, states: InputBatch, slots: Ints) -> None:
        rows = np.flatnonzero(states.controls["num_biases"][slots])
        if not len(rows):
            return
        biases = [_params(states, slot).logit_bias for slot in slots[rows]]
        at = np.repeat(rows, [len(bias) for bias in biases]), np.array([*chain.from_iterable(biases)])
        values = np.fromiter(chain.from_iterable(bias.values() for bias in biases), np.float32)
        logits[self._send(at[0]), self._send(at[1])] += self._send(values)

    def _forbid(self, logits: Tensor, states: InputBatch, slots: Ints, free: Bools) -> None:
        """Early ends, what would complete a bad word, and all but the allowed tokens. Bad words leave one of these."""
        controls = states.controls[slots]
        outputs = states.num_known[slots] - states.num_prompt_tokens[slots]
        early = outputs < controls["min_tokens"]
        ends, words, allowed = _Pairs(), _Pairs(), _Pairs()
        beginnings: list[list[int]] = []  # of the words
        confined: list[int] = []  # rows that may take no other tokens than the allowed ones
        for row in np.flatnonzero(free & (early | (controls["num_bans"] > 0))).tolist():
            params = _params(states, slots[row])
            stops = {*self._eos, *params.stop_token_ids} if early[row] else set()
            if params.allowed_token_ids is None:
                ends.add(row, [token for token in stops if token < self._vocab_size])
            else:
                confined.append(row)
                allowed.add(row, [token for token in params.allowed_token_ids if token not in stops])
            fitting = [word for word in params.bad_word_ids if len(word) <= outputs[row] + 1]
            fitting = [word for word in fitting if word[-1] < self._vocab_size]
            words.add(row, [word[-1] for word in fitting])
            beginnings += [word[:-1] for word in fitting]
        if ends.rows:
            logits[self._at(ends)] = -torch.inf
        if not (words.rows or confined):
            return
        # Several words may have their last token in common.
        lasts, which = np.unique(words.numbers(self._vocab_size), return_inverse=True)
        bad = torch.zeros(len(lasts) + 1, dtype=torch.int32, device=self._device)  # the last stands for other tokens
        if beginnings:
            bad.index_add_(0, self._send(which), self._completed(words, beginnings, states, slots).int())
        bad = bad > 0
        rows, tokens = np.divmod(lasts, self._vocab_size)
        at = self._send(rows), self._send(tokens)
        kept = logits[self._at(allowed)]
        logits[at] = torch.where(bad[:-1], -torch.inf, logits[at])
        if not confined:
            return
        numbers = allowed.numbers(self._vocab_size)
        places = np.searchsorted(lasts, numbers)
        is_last = np.append(lasts, -1)[places] == numbers
        is_bad = bad[self._send(np.where(is_last, places, len(lasts)))]
        owners = self._send(np.searchsorted(confined, allowed.rows))
        left = torch.zeros(len(confined), dtype=torch.int32, device=self._device)
        left.index_add_(0, owners, (~is_bad).int())
        logits[self._send(np.array(confined))] = -torch.inf
        logits[self._at(allowed)] = torch.where(is_bad & (left > 0)[owners], -torch.inf, kept)

    def _completed(self, words: _Pairs, beginnings: list[list[int]], states: InputBatch, slots: Ints) -> Tensor:
        """Whether the tokens of each word's row end in its beginning, bool `[words]`."""
        longest = max(map(len, beginnings))
        expected = np.full((len(beginnings), longest), -1)
        for number, beginning in enumerate(beginnings):
            expected[number, longest - len(beginning) :] = beginning
        owners = slots[words.rows, None]
        positions = states.num_known[owners] - longest + np.arange(longest)
        found = states.memory[self._send(states.places(owners, np.maximum(positions, 0)))]
        sent = self._send(expected)
        return ((found == sent) | (sent < 0)).all(dim=1)

    def _mask(self, logits: Tensor, slots: Ints, rows: Ints, masks: Mapping[int, bytes]) -> None:
        bits = np.frombuffer(bytearray().join(masks[slot] for slot in slots[rows].tolist()), np.int32)
        kernels.apply_bitmask(logits, self._send(rows), self._send(bits.reshape(len(rows), -1)))

    def _penalize(self, logits: Tensor, states: InputBatch, slots: Ints) -> None:
        """Repetition (Keskar et al. 2019) for prompt and output, frequency and presence (OpenAI) for output only."""
        controls = states.controls[slots]
        penalized = np.flatnonzero(
            (controls["repetition_penalty"] != 1.0)
            | (controls["frequency_penalty"] != 0.0)
            | (controls["presence_penalty"] != 0.0)
        )
        if not len(penalized):
            return
        slots, controls = slots[penalized], controls[penalized]
        ends = states.num_prompt_tokens[slots], states.num_known[slots]
        spans = np.stack([states.places(slots, positions) for positions in (np.zeros_like(slots), *ends)], axis=1)
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        factors = np.stack([controls[name] for name in names], axis=1)
        rows, places, sent = (self._send(part) for part in (penalized, spans, factors))
        kernels.penalize(logits, states.memory, rows, places, sent, int(ends[1].max()))

    def _send(self, values: npt.NDArray[Any]) -> Tensor:
        return send(values, self._device)

    def _at(self, pairs: _Pairs) -> tuple[Tensor, Tensor]:
        """Where in the logits they stand."""
        return self._send(np.array(pairs.rows, np.int64)), self._send(np.array(pairs.tokens, np.int64))


class _Pairs:
    """Tokens of rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []

    def add(self, row: int, tokens: list[int]) -> None:
        self.rows += [row] * len(tokens)
        self.tokens += tokens

    def numbers(self, vocab_size: int) -> Ints:
        """One for each pair."""
        return np.array(self.rows, np.int64) * vocab_size + np.array(self.tokens, np.int64)


def _params(states: InputBatch, slot: int) -> SamplingParams:
    params = states.params[slot]
    assert params is not None, f"slot {slot} is free"
    return params
