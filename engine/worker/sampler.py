"""Samples tokens from logits. The sampler has no state: the result depends only on the requests' tokens and
parameters."""

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
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker.async_copies import Array, send
from quire.engine.worker.input_batch import InputBatch, Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplerOutput:
    """The sampled tokens of a step, on the device."""

    tokens: Tensor
    """int64 `[rows]`"""
    logprob_rows: Ints
    """The rows that requested log-probabilities."""
    num_top: Ints
    """The number of most likely tokens that each of these rows requested."""
    columns: tuple[Tensor, ...]
    """The arguments of `logprobs` for these rows; empty if there are none."""

    def logprobs(
        self, logprobs: Array, ranks: Array, top_ids: Array, top_logprobs: Array
    ) -> list[TokenLogprobs | None]:
        """Convert the columns, once they are on the host, into one entry per sampled row."""
        result: list[TokenLogprobs | None] = [None] * len(self.tokens)
        rows = zip(logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
        for row, count, (logprob, rank, ids, values) in zip(
            self.logprob_rows.tolist(), self.num_top.tolist(), rows, strict=True
        ):
            result[row] = TokenLogprobs(logprob, rank, ids[:count], values[:count])
        return result


class Sampler:
    """Samples the next token of each row: applies bias, forbidden tokens and penalties, then calls `kernels.sample`.

    The sampling noise depends only on the request's seed, the token's position and its id. Rows that do not use a
    feature do not pay for it.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, tuple(eos_token_ids), device

    def sample(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        slots: Ints,
        lengths: Ints,
        masks: Mapping[int, bytes] | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row of `logits` (float32 `[rows, vocab]`, overwritten); the rows belong to `slots`,
        and follow `lengths` tokens.

        `masks` are the plan's bitmasks by slot: a row with a mask may only sample tokens in it, and the mask already
        excludes tokens that the request's parameters forbid. Log-probabilities are computed from the original `logits`.
        Nothing here waits for the device.
        """
        controls = input_batch.controls[slots]
        logprob_rows = np.flatnonzero(controls["logprobs"] >= 0)
        raw = logits[self._send(logprob_rows)] if len(logprob_rows) else None
        self._bias(logits, input_batch, slots)
        masked = np.array([slot in masks for slot in slots.tolist()]) if masks else np.zeros(len(slots), bool)
        self._forbid(logits, input_batch, slots, lengths, ~masked)
        self._penalize(logits, input_batch, slots, lengths)
        if masks:
            self._mask(logits, slots, np.flatnonzero(masked), masks)
        tokens = kernels.sample(logits, *_controls(controls), torch.from_numpy(lengths))
        counts = controls["logprobs"][logprob_rows]
        columns: tuple[Tensor, ...] = ()
        if raw is not None:
            columns = kernels.score_tokens(raw, tokens[self._send(logprob_rows)], int(counts.max()))
            self._score_given(raw, columns, input_batch, slots[logprob_rows])
        return SamplerOutput(tokens, logprob_rows, counts, columns)

    def draft(self, logits: Tensor, input_batch: InputBatch, slots: Ints, lengths: Tensor) -> Tensor:
        """Guess the result of `sample`, int64 `[rows]`: with the same noise, but without the effects of the tokens
        before. `lengths` are on the device."""
        self._bias(logits, input_batch, slots)
        return kernels.sample(logits, *_controls(input_batch.controls[slots]), lengths)

    def score(self, logits: Tensor, tokens: Ints, num_top: int) -> tuple[Tensor, ...]:
        """For `logits` (float32 `[rows, vocab]`) and one token per row, the columns of `PromptLogprobs`."""
        return kernels.score_tokens(logits, self._send(tokens), num_top)

    def _score_given(self, raw: Tensor, columns: tuple[Tensor, ...], input_batch: InputBatch, slots: Ints) -> None:
        """Replace the most likely tokens in `columns` by the `logprob_token_ids` of the rows that have them."""
        rows = np.flatnonzero(input_batch.controls["num_scored"][slots])
        if not len(rows):
            return
        pairs, places = _TokenPairs(), list[int]()
        for row in rows.tolist():
            token_ids = _params(input_batch, slots[row]).logprob_token_ids or []
            pairs.add(row, token_ids)
            places += range(len(token_ids))
        of_rows, tokens = at = self._at(pairs)
        _, _, top_ids, top_logprobs = columns
        target = of_rows, self._send(np.array(places))
        top_ids[target] = tokens.int()
        top_logprobs[target] = raw[at] - raw.logsumexp(dim=-1)[of_rows]

    def _bias(self, logits: Tensor, input_batch: InputBatch, slots: Ints) -> None:
        rows = np.flatnonzero(input_batch.controls["num_biases"][slots])
        if not len(rows):
            return
        biases = [_params(input_batch, slot).logit_bias for slot in slots[rows]]
        at = np.repeat(rows, [len(bias) for bias in biases]), np.array([*chain.from_iterable(biases)])
        values = np.fromiter(chain.from_iterable(bias.values() for bias in biases), np.float32)
        logits[self._send(at[0]), self._send(at[1])] += self._send(values)

    def _forbid(self, logits: Tensor, input_batch: InputBatch, slots: Ints, lengths: Ints, is_unmasked: Bools) -> None:
        """Mask stop tokens before `min_tokens`, tokens that would complete a bad word, and all but the allowed tokens.

        If bad words would exclude every allowed token of a row, the bad words are ignored.
        """
        controls = input_batch.controls[slots]
        outputs = lengths - input_batch.num_prompt_tokens[slots]
        early = outputs < controls["min_tokens"]
        stop_pairs, words, allowed = _TokenPairs(), _TokenPairs(), _TokenPairs()
        prefixes: list[list[int]] = []  # of the bad words
        restricted: list[int] = []  # rows that are restricted to their allowed tokens
        for row in np.flatnonzero(is_unmasked & (early | (controls["num_bans"] > 0))).tolist():
            params = _params(input_batch, slots[row])
            stops = {*self._eos, *params.stop_token_ids} if early[row] else set()
            if params.allowed_token_ids is None:
                stop_pairs.add(row, [token for token in stops if token < self._vocab_size])
            else:
                restricted.append(row)
                allowed.add(row, [token for token in params.allowed_token_ids if token not in stops])
            matching = [word for word in params.bad_word_ids if len(word) <= outputs[row] + 1]
            matching = [word for word in matching if word[-1] < self._vocab_size]
            words.add(row, [word[-1] for word in matching])
            prefixes += [word[:-1] for word in matching]
        if stop_pairs.rows:
            logits[self._at(stop_pairs)] = -torch.inf
        if not (words.rows or restricted):
            return
        # Several words may end in the same token.
        lasts, which = np.unique(words.keys(self._vocab_size), return_inverse=True)
        bad = torch.zeros(
            len(lasts) + 1, dtype=torch.int32, device=self._device
        )  # the last entry stands for all other tokens
        if prefixes:
            bad.index_add_(0, self._send(which), self._completed(words, prefixes, input_batch, slots, lengths).int())
        bad = bad > 0
        rows, tokens = np.divmod(lasts, self._vocab_size)
        at = self._send(rows), self._send(tokens)
        kept = logits[self._at(allowed)]
        logits[at] = torch.where(bad[:-1], -torch.inf, logits[at])
        if not restricted:
            return
        keys = allowed.keys(self._vocab_size)
        places = np.searchsorted(lasts, keys)
        is_last = np.append(lasts, -1)[places] == keys
        is_bad = bad[self._send(np.where(is_last, places, len(lasts)))]
        owners = self._send(np.searchsorted(restricted, allowed.rows))
        left = torch.zeros(len(restricted), dtype=torch.int32, device=self._device)
        left.index_add_(0, owners, (~is_bad).int())
        logits[self._send(np.array(restricted))] = -torch.inf
        logits[self._at(allowed)] = torch.where(is_bad & (left > 0)[owners], -torch.inf, kept)

    def _completed(
        self, words: _TokenPairs, prefixes: list[list[int]], input_batch: InputBatch, slots: Ints, lengths: Ints
    ) -> Tensor:
        """Whether the tokens of each word's row end with the word's prefix, bool `[words]`."""
        longest = max(map(len, prefixes))
        expected = np.full((len(prefixes), longest), -1)
        for number, beginning in enumerate(prefixes):
            expected[number, longest - len(beginning) :] = beginning
        owners = slots[words.rows, None]
        positions = lengths[words.rows, None] - longest + np.arange(longest)
        last_tokens = input_batch.memory[self._send(input_batch.token_indices(owners, np.maximum(positions, 0)))]
        sent = self._send(expected)
        return ((last_tokens == sent) | (sent < 0)).all(dim=1)

    def _mask(self, logits: Tensor, slots: Ints, rows: Ints, masks: Mapping[int, bytes]) -> None:
        bits = np.frombuffer(bytearray().join(masks[slot] for slot in slots[rows].tolist()), np.int32)
        kernels.apply_bitmask(logits, self._send(rows), self._send(bits.reshape(len(rows), -1)))

    def _penalize(self, logits: Tensor, input_batch: InputBatch, slots: Ints, lengths: Ints) -> None:
        """Apply the repetition penalty (Keskar et al. 2019) to prompt and output tokens, and the frequency and presence
        penalties (OpenAI) to output tokens."""
        controls = input_batch.controls[slots]
        penalized = np.flatnonzero(
            (controls["repetition_penalty"] != 1.0)
            | (controls["frequency_penalty"] != 0.0)
            | (controls["presence_penalty"] != 0.0)
        )
        if not len(penalized):
            return
        slots, controls = slots[penalized], controls[penalized]
        ends = input_batch.num_prompt_tokens[slots], lengths[penalized]
        spans = np.stack(
            [input_batch.token_indices(slots, positions) for positions in (np.zeros_like(slots), *ends)], axis=1
        )
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        factors = np.stack([controls[name] for name in names], axis=1)
        rows, places, sent = (self._send(part) for part in (penalized, spans, factors))
        kernels.penalize(logits, input_batch.memory, rows, places, sent, int(ends[1].max()))

    def _send(self, values: npt.NDArray[Any]) -> Tensor:
        return send(values, self._device)

    def _at(self, pairs: _TokenPairs) -> tuple[Tensor, Tensor]:
        """Their indices in the logits."""
        return self._send(np.array(pairs.rows, np.int64)), self._send(np.array(pairs.tokens, np.int64))


class _TokenPairs:
    """Pairs of a row and a token."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []

    def add(self, row: int, tokens: list[int]) -> None:
        self.rows += [row] * len(tokens)
        self.tokens += tokens

    def keys(self, vocab_size: int) -> Ints:
        """One unique number for each pair."""
        return np.array(self.rows, np.int64) * vocab_size + np.array(self.tokens, np.int64)


def _controls(controls: npt.NDArray[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `kernels.sample` between logits and positions."""
    names = "temperature", "top_k", "top_p", "min_p", "seed"
    temperature, top_k, top_p, min_p, seeds = (torch.from_numpy(np.ascontiguousarray(controls[name])) for name in names)
    return temperature, top_k, top_p, min_p, seeds


def _params(input_batch: InputBatch, slot: int) -> SamplingParams:
    params = input_batch.params[slot]
    assert params is not None, f"slot {slot} is free"
    return params
