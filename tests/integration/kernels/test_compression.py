"""Entries that groups of tokens are compressed to."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import reference
from quire.kernels.cache import allocate_kv_cache
from tests.integration.kernels.conftest import platforms_only, reference_only

BLOCK, EPS, CPU = 16, 1e-5, torch.device("cpu")
REQUESTS = [(0, 1), (15, 1), (0, 40), (5, 3), (127, 1), (90, 39), (31, 2), (3, 1)]
"""Tokens before, and tokens of the step."""


class Case(NamedTuple):
    """The arguments of `kernels.compress_tokens`, except for the cache."""

    inputs: Tensor
    bias: Tensor
    weight: Tensor | None
    cos_sin: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    entry_tables: Tensor
    parts: int

    def run(self, rows: int, module: Any = kernels) -> Tensor:
        """The entries' cache `[blocks, rows, head_dim]`, which was full of sevens."""
        head_dim, blocks = self.bias.shape[1] // self.parts, int(self.entry_tables.max()) + 1
        cache = allocate_kv_cache(1, blocks, 1, rows, head_dim, self.inputs.dtype, CPU, 1)[0]
        reference.write_kv(torch.full((blocks * rows, 1, head_dim), 7.0), None, cache, torch.arange(blocks * rows))
        inputs, bias, weight, cos_sin, *where, _ = self
        module.compress_tokens(inputs, bias, weight, EPS, cos_sin, cache, *where)
        return cache[0, :, 0]


def case(ratio: int, head_dim: int, parts: int, rotary: int = 8, dtype: torch.dtype = torch.float32) -> Case:
    """Random inputs in shuffled blocks; some tokens have no slot."""
    noise = torch.Generator().manual_seed(0)
    lengths = torch.tensor([sum(request) for request in REQUESTS])
    starts = torch.tensor([0, *(count for _, count in REQUESTS)]).cumsum(0)
    width, tokens = -(-int(lengths.max()) // BLOCK), int(starts[-1])
    tables, entries = (torch.randperm(len(REQUESTS) * width, generator=noise).view(-1, width) for _ in range(2))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise)

    inputs = (random(1, tables.numel(), 1, BLOCK, 2 * parts * head_dim) * 2).to(dtype)
    slots = torch.arange(tokens)
    slots[30] = slots[-1] = -1
    return Case(
        *(inputs, random(ratio, parts * head_dim), random(head_dim).to(dtype), random(tokens, rotary)),
        *(slots, tables, lengths, starts, entries),
        parts,
    )


@reference_only
@pytest.mark.parametrize(("ratio", "rows"), [(4, 4), (8, 4), (128, 2)])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_reference_is_the_formula(ratio: int, rows: int, parts: int) -> None:
    """One entry after another, and one feature after another."""
    given, head_dim, rotary = case(ratio, 12, parts), 12, 8
    expected = torch.full((given.entry_tables.numel(), rows, head_dim), 7.0)
    for request, (context, count) in enumerate(REQUESTS):
        for place in range(count):
            token, position = int(given.starts[request]) + place, context + place
            if (position + 1) % ratio or given.slots[token] < 0:
                continue
            group = range(position + 1 - ratio, position + 1)
            own = (parts - 1) * head_dim
            seen = [(at, own, at - group[0]) for at in group]
            if parts == 2 and group[0] > 0:
                seen = [(at - ratio, 0, at - group[0]) for at in group] + seen
            sums = torch.zeros(head_dim)
            for feature in range(head_dim):
                values, gates = [], []
                for at, first, number in seen:
                    row = given.inputs[0, given.tables[request, at // BLOCK], 0, at % BLOCK]
                    values.append(row[first + feature])
                    gates.append(row[parts * head_dim + first + feature] + given.bias[number, first + feature])
                sums[feature] = torch.stack(values) @ torch.stack(gates).softmax(0)
            assert given.weight is not None
            normed = sums / (sums.square().mean() + EPS).sqrt() * given.weight
            turned = torch.view_as_complex(normed[-rotary:].view(-1, 2)) * torch.complex(*given.cos_sin[token].chunk(2))
            entry = torch.cat((turned.real, turned.imag, normed[:-rotary]))
            block = given.entry_tables[request, position // BLOCK]
            expected[block, position % BLOCK // (BLOCK // rows)] = entry
    assert (expected != 7.0).any()
    torch.testing.assert_close(given.run(rows, reference), expected, rtol=1e-5, atol=1e-5)


@platforms_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ratio", "rows", "head_dim", "parts", "rotary"),
    [(4, 4, 128, 2, 64), (128, 4, 128, 1, 64), (8, 2, 20, 2, 0), (5, 4, 34, 1, 34), (1, 16, 6, 2, 4)],
)
def test_entries_are_those_of_the_reference(
    ratio: int, rows: int, head_dim: int, parts: int, rotary: int, dtype: torch.dtype
) -> None:
    check_entries(case(ratio, head_dim, parts, rotary, dtype), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_without_a_norm_in_the_rows_of_last_tokens(dtype: torch.dtype) -> None:
    check_entries_in_place(dtype, 20)


def test_without_gates_they_are_0() -> None:
    check_entries_without_gates(torch.float32, 20)


def check_entries_without_gates(dtype: torch.dtype, head_dim: int) -> None:
    given = case(4, head_dim, 2, 8, dtype)
    width = given.bias.shape[1]
    gated = given.inputs.clone()
    gated[..., width:] = 0.0
    expected = given._replace(inputs=gated).run(4, reference)
    assert (expected != 7.0).any()
    for module in (reference, kernels):
        found = given._replace(inputs=given.inputs[..., :width]).run(4, module)
        step = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=step, atol=step)


def check_entries_in_place(dtype: torch.dtype, head_dim: int) -> None:
    """Each entry replaces the values of the last token of its group, and nothing else changes."""
    given, ratio = case(4, head_dim, 1, 0, dtype), 4
    inputs, bias, _, cos_sin, slots, tables, lengths, starts, *_ = given
    expected = inputs.clone()
    of_groups = expected[:, :, :, ratio - 1 :: ratio, :head_dim]
    entries = given._replace(weight=None, entry_tables=tables).run(BLOCK // ratio, reference)
    is_new = (entries != 7.0).any(-1)
    of_groups[0, :, 0][is_new] = entries[is_new]
    found = inputs.clone()
    rows = found[:, :, :, ratio - 1 :: ratio, :head_dim]
    kernels.compress_tokens(found, bias, None, 0.0, cos_sin, rows, slots, tables, lengths, starts, tables)
    step = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=step)
    assert not torch.equal(found, inputs)
    normed = given._replace(weight=torch.ones(head_dim), entry_tables=tables).run(BLOCK // ratio, reference)[is_new]
    same = torch.nn.functional.rms_norm(entries[is_new].float(), (head_dim,), None, EPS)
    torch.testing.assert_close(normed.float(), same, rtol=0.02, atol=0.02)


def check_entries(given: Case, rows: int) -> None:
    found, expected = given.run(rows), given.run(rows, reference)
    step = 2e-5 if found.dtype == torch.float32 else 8 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=step)
    changed = (found != 7.0).any(-1)
    assert torch.equal(changed, (expected != 7.0).any(-1))
    assert changed.any()
    assert not changed.all()


def test_an_entry_does_not_depend_on_other_requests_or_chunks() -> None:
    given = case(4, 32, 2)
    together = given.run(4)
    for request in range(len(REQUESTS)):
        for token in range(int(given.starts[request]), int(given.starts[request + 1])):
            seen = given.lengths[request] - given.starts[request + 1] + token + 1
            one, rows = slice(request, request + 1), slice(token, token + 1)
            alone = given._replace(
                cos_sin=given.cos_sin[rows],
                slots=given.slots[rows],
                tables=given.tables[one],
                lengths=seen[None],
                starts=torch.tensor([0, 1]),
                entry_tables=given.entry_tables[one],
            ).run(4)
            changed = (alone != 7.0).any(-1)
            assert int(changed.sum()) == (int(seen) % 4 == 0 and int(given.slots[token]) >= 0)
            assert torch.equal(alone[changed], together[: len(alone)][changed])
