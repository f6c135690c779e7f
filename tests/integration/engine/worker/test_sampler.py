"""The sampler against plain Python, and its noise against the distribution it should draw from."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import NewRequestData, SchedulerOutput
from quire.engine.worker.input_batch import InputBatch, Ints
from quire.engine.worker.sampler import Sampler, SamplerOutput
from quire.kernels import dispatch
from quire.kernels.reference import sampling

VOCAB = 50
CPU = torch.device("cpu")
EOS = (3, 4)


class Row:
    """A request about to sample: `prompt`, then `output`, then the token to come."""

    def __init__(
        self,
        logits: Tensor,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        mask: set[int] | None = None,
        **params: Any,
    ):
        self.logits, self.prompt, self.output, self.mask = logits, prompt or [0], output or [], mask
        self.params = SamplingParams(**params)


def sample(*rows: Row) -> tuple[list[int], list[TokenLogprobs | None]]:
    states = InputBatch(len(rows) + 2, 200, 16)
    slots = torch.randperm(len(rows) + 2)[: len(rows)].tolist()
    plan = SchedulerOutput(0, [], [], [])
    for slot, row in zip(slots, rows, strict=True):
        tokens = row.prompt + row.output
        plan.new.append(NewRequestData(slot, tokens, len(row.prompt), len(tokens) - 1, [0] * 13, row.params))
    states.apply(plan)
    logits = torch.stack([row.logits for row in rows])
    chosen: Ints = torch.tensor(slots).numpy()
    masks = {slot: bits(row.mask) for slot, row in zip(slots, rows, strict=True) if row.mask is not None}
    return reported(Sampler(logits.shape[1], EOS, CPU).sample(logits, states, chosen, states.num_tokens[chosen], masks))


def reported(sampled: SamplerOutput) -> tuple[list[int], list[TokenLogprobs | None]]:
    columns = [column.numpy() for column in sampled.columns]
    return sampled.tokens.tolist(), sampled.logprobs(*columns) if columns else []


def bits(tokens: set[int]) -> bytes:
    """The mask of these tokens, in whole words."""
    return sum(1 << token for token in tokens).to_bytes(-(-VOCAB // 32) * 4, "little")


def token(*args: Any, **kwargs: Any) -> int:
    return sample(Row(*args, **kwargs))[0][0]


def noise(row: Row) -> list[float]:
    position = len(row.prompt) + len(row.output)
    found = kernels.gumbel_noise(torch.tensor([row.params.seed or 0]), torch.tensor([position]), len(row.logits))
    numbers: list[float] = found[0].tolist()
    return numbers


def by_hand(row: Row) -> int:
    """The sampled token, one rule after the other."""
    p = row.params
    x = dict(enumerate(row.logits.tolist()))
    for token, bias in p.logit_bias.items():
        x[token] += bias
    allowed = set(x) if row.mask is None else row.mask
    if row.mask is None:
        if len(row.output) < p.min_tokens:
            allowed -= {*EOS, *p.stop_token_ids}
        if p.allowed_token_ids is not None:
            allowed &= {*p.allowed_token_ids}
        for *first, last in p.bad_word_ids:
            if [None, *row.output][len(row.output) + 1 - len(first) :] == first:
                allowed -= {last}
    x = {token: logit if token in allowed else -math.inf for token, logit in x.items()}
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(row.output).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    if p.temperature < 1e-5:
        return min(x, key=lambda token: (-x[token], token))
    x = {token: logit / p.temperature for token, logit in x.items()}
    top = max(x.values())
    x = {token: logit for token, logit in x.items() if logit >= top + math.log(p.min_p or 1e-300)}
    order = sorted(x, key=lambda token: -x[token])[: p.top_k if p.top_k > 0 else None]
    total, kept, mass = sum(math.exp(x[token] - top) for token in order), [], 0.0
    for token in order:
        if mass < p.top_p or p.top_p == 1.0:
            kept.append(token)
        mass += math.exp(x[token] - top) / total
    drawn = noise(row)
    return max(kept, key=lambda token: x[token] + drawn[token])


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]), "seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 3, 20, 1000]),
        "top_p": st.sampled_from([0.1, 0.5, 0.93]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 1.1]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
        "allowed_token_ids": st.just([*range(2, VOCAB, 3)]),
        "bad_word_ids": st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=2), max_size=6),
        "mask": st.sets(st.integers(0, VOCAB - 1), min_size=1),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
    },
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=9), st.integers(0, 999))
def test_any_mix_of_rows_is_sampled_as_by_hand(mix: list[tuple[dict[str, Any], list[int], list[int]]], n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    rows = [
        Row(torch.randn(VOCAB, generator=generator) * 3, [1, *prompt], output, **{"max_tokens": None, **params})
        for params, prompt, output in mix
    ]
    tokens, logprobs = sample(*rows)
    assert tokens == [by_hand(row) for row in rows]
    assert logprobs == []


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 9, 30]] = 2.0
    assert token(logits, temperature=0.0) == 7
    assert token(logits, temperature=1e-6) == 7


def test_draws_follow_seed_and_position_alone() -> None:
    logits = torch.randn(VOCAB)
    rows = [Row(logits, [1] * length, seed=seed) for length in (1, 2, 3) for seed in range(-3, 20)]
    together = sample(*rows)[0]
    assert [sample(row)[0][0] for row in rows] == together
    assert sample(*rows[::-1])[0] == together[::-1]
    split = [Row(logits, row.prompt[:1], row.prompt[1:], seed=row.params.seed) for row in rows]
    assert sample(*split)[0] == together
    assert len(set(together)) > 10


@pytest.mark.parametrize("along", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_have_the_softmax_distribution(along: str, temperature: float) -> None:
    logits, many = torch.linspace(-2, 2, 20), 20_000
    numbers, fixed = torch.arange(many), torch.full((many,), 11)
    seeds, positions = (numbers, fixed) if along == "seed" else (fixed, numbers)
    states = InputBatch(many, 1, 16)
    states.controls["temperature"], states.controls["top_p"] = temperature, 1.0
    states.controls["repetition_penalty"], states.controls["logprobs"] = 1.0, -1
    states.controls["seed"], states.num_tokens[:] = seeds.numpy(), positions.numpy()
    drawn = (
        Sampler(20, EOS, CPU)
        .sample(logits.repeat(many, 1), states, numbers.numpy(), states.num_tokens[numbers.numpy()])
        .tokens
    )
    expected = (logits / temperature).softmax(-1) * many
    chi_square = ((drawn.bincount(minlength=20) - expected) ** 2 / expected).sum().item()
    assert chi_square < 56  # 19 degrees of freedom, p = 2e-5


def test_minimum_length_forbids_every_end_until_it_is_reached() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 8, 10**1]] = torch.tensor([9.0, 8.0, 7.0, 1.0])
    options: dict[str, Any] = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [8, 10_000]}
    assert token(logits, [5, 5], [6, 6], **options) == 10
    assert token(logits, [5, 5], [6, 6, 6], **options) == 3
    assert token(logits, [5, 5, 6], [6, 6], **options, ignore_eos=True) == 10


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"seed": 7}])
def test_a_mask_of_one_token_leaves_no_choice(params: dict[str, Any]) -> None:
    for only in (0, 31, 32, VOCAB - 1):
        assert token(torch.randn(VOCAB), mask={only}, **params) == only
        assert token(torch.randn(VOCAB), mask={only}, **params, repetition_penalty=1.5, presence_penalty=2.0) == only
        assert token(torch.randn(VOCAB), mask={only}, **params, logit_bias={only: -100}, min_tokens=9) == only


def test_masks_touch_their_own_rows_and_no_log_probabilities() -> None:
    logits = torch.randn(VOCAB) * 2
    best = int(logits.argmax())
    rows = [Row(logits, temperature=0.0, logprobs=2, mask=mask) for mask in (None, {*range(VOCAB)} - {best}, None)]
    tokens, logprobs = sample(*rows)
    assert tokens == [best, int(logits.topk(2).indices[1]), best]
    exact = logits.log_softmax(-1)
    for token, found in zip(tokens, logprobs, strict=True):
        assert found is not None
        assert found.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        assert found.top_ids[0] == best


def test_bad_words_count_in_the_output_alone_and_leave_something() -> None:
    logits = torch.linspace(5, 0, VOCAB)
    bad: dict[str, Any] = {"temperature": 0.0, "bad_word_ids": [[7, 8, 0], [1]]}
    assert token(logits, [5], [7, 8], **bad) == 2
    assert token(logits, [7], [8], **bad) == 0
    assert token(logits, [5], [8], **bad) == 0
    assert token(logits, [5], [7, 8], **bad, allowed_token_ids=[0, 1, 9]) == 9
    assert token(logits, [5], [7, 8], **bad, allowed_token_ids=[0, 1]) == 0
    assert token(logits, [5], [7, 8], **bad, allowed_token_ids=[*EOS, 0, 1], min_tokens=3) == 0


def test_ties_at_the_edge_of_top_k_stay() -> None:
    logits = torch.zeros(VOCAB)
    seen = {token(logits, seed=seed, top_k=5) for seed in range(300)}
    assert len(seen) == VOCAB


@pytest.mark.parametrize("features", [{}, {"temperature": 0.7, "top_p": 0.3, "logit_bias": {9: -50.0}}])
def test_logprobs_are_those_of_the_model(features: dict[str, Any]) -> None:
    rows = [Row(torch.randn(VOCAB) * 2, seed=seed, logprobs=k, **features) for seed, k in enumerate((5, 0, 20, 1))]
    rows.insert(2, Row(torch.randn(VOCAB)))
    expected = [row.logits.log_softmax(-1) for row in rows]
    tokens, logprobs = sample(*rows)
    assert logprobs[2] is None
    for row, exact, token, found in zip(rows, expected, tokens, logprobs, strict=True):
        if found is None:
            continue
        assert found.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        assert found.rank == 1 + (exact > exact[token]).sum().item()
        best = exact.topk(row.params.logprobs or 0)
        assert found.top_ids == best.indices.tolist()
        assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_given_tokens() -> None:
    """They follow the model's distribution, without the bias; beside rows with the most likely tokens and without."""
    wanted = [[7], [], [5, 3, VOCAB - 1, 0]]
    rows = [Row(torch.randn(VOCAB) * 2, logprobs=len(ids) or 2, logprob_token_ids=ids or None) for ids in wanted]
    rows.append(Row(torch.randn(VOCAB), logit_bias={4: 100.0}, logprobs=1, logprob_token_ids=[4]))
    rows.append(Row(torch.randn(VOCAB)))
    expected = [row.logits.log_softmax(-1) for row in rows]
    tokens, logprobs = sample(*rows)
    assert logprobs.pop() is None
    for ids, exact, token, found in zip([*wanted, [4]], expected, tokens, logprobs, strict=False):
        assert found is not None
        assert found.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        assert found.top_ids == (ids or exact.topk(2).indices.tolist())
        assert found.top_logprobs == pytest.approx(exact[found.top_ids].tolist(), abs=1e-5)


def test_plain_greedy_rows_pay_for_one_argmax_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PLATFORMS", {})
    for name in ("gumbel_noise", "_keep_top", "_keep_probable"):
        monkeypatch.setattr(sampling, name, None)
    for name in ("uniform_noise", "score_tokens", "penalize"):
        monkeypatch.setattr(kernels, name, None)
    rows = [Row(torch.randn(VOCAB), temperature=0.0) for _ in range(5)]
    best = [int(row.logits.argmax()) for row in rows]
    assert sample(*rows)[0] == best


def test_nobody_samples() -> None:
    states = InputBatch(2, 8, 4)
    nobody = torch.empty(0).long().numpy()
    assert reported(Sampler(VOCAB, EOS, CPU).sample(torch.empty(0, VOCAB), states, nobody, nobody)) == ([], [])
