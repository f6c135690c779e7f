"""Op replay: the tensors that a replay reads again, recomputes and frees, and operations that cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels.cpu import shared
from quire.kernels.cpu.op_replay import OpReplay

Work = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module", params=["cpu"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Compiled operations and torch's; the reference consists of the latter."""
    return str(request.param)


PACKED = torch.ops.mkldnn._reorder_linear_weight(torch.randn(4, 4), 8)


def rows(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Views, lists of tensors in arguments and results, an operation that changes its arguments."""
    first, second = (x @ weight).tensor_split(2, dim=1)
    joined = torch.cat((second, first, x[:, :1]), dim=1)
    joined[:, 1:].mul_(2.0).add_(first.sum())
    return joined[:, :4]


def by_numbers(x: Tensor, weight: Tensor) -> Tensor:
    """Rows taken by numbers that the tensors hold."""
    order = x[:, 0].argsort()
    return weight[order] + x[order]


def by_kernels(x: Tensor, weight: Tensor) -> Tensor:
    """An optional argument that is left out, a number and a name among the arguments, two results."""
    normed, added = kernels.add_rms_norm(x, x.flip(0), weight[0], 1e-6)
    return normed + kernels.act_mul(torch.cat((added, added), dim=1), "silu")


def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """A weight of oneDNN's, which has no memory that torch knows of, from before and from the step itself."""
    repacked = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    both = (torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "") for packed in (PACKED, repacked))
    return sum(both, start=x)


def as_it_was(x: Tensor, weight: Tensor) -> Tensor:
    """Operations that return their argument itself, as it is contiguous already."""
    return (x.contiguous() + weight.contiguous()).contiguous().float()


def by_wrappers(x: Tensor, weight: Tensor) -> Tensor:
    """Tensors with a layout of their own, and functions that torch transforms."""
    return x.relu().to_sparse().to_dense() + torch.vmap(torch.neg)(weight)


def with_constants(x: Tensor, weight: Tensor) -> Tensor:
    """Numbers of Python's, which torch wraps into tensors."""
    return (3 - x * 2.5) / torch.arange(1, 5) + torch.full((4,), 0.5)


@pytest.mark.parametrize(
    "work", [rows, in_parts, by_numbers, by_kernels, by_onednn, as_it_was, by_wrappers, with_constants]
)
def test_a_replay_does_the_same_with_other_numbers(work: Work) -> None:
    x, weight, out = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4)
    with torch.inference_mode():
        with OpReplay() as ops:
            out.copy_(work(x, weight))
        assert not ops.reason
        for _ in range(3):
            x.normal_()
            weight.normal_()
            expected = work(x.clone(), weight.clone())
            ops.replay()
            assert torch.equal(out, expected)


def test_other_tensors_may_come_to_lie_where_values_were() -> None:
    """Between two replays, and within one step, where each value takes the memory of the one before."""
    x, out = torch.zeros(1 << 12), torch.zeros(1 << 12)

    def work() -> None:
        value = x + 1
        for _ in range(50):
            value = value + 1
        out.copy_(value)

    with torch.inference_mode():
        with OpReplay() as ops:
            work()
        for number in range(20):
            x.fill_(number)
            others = [torch.full_like(x, -1.0) for _ in range(number)]
            ops.replay()
            assert out.eq(number + 51).all()
            del others


def test_a_replay_lets_go_of_all_that_it_makes() -> None:
    x, out = torch.zeros(1 << 10), torch.zeros(1 << 10)
    with torch.inference_mode():
        with OpReplay() as ops:
            value = x + 1
            out.copy_(torch.cat((value[: 1 << 9], value[1 << 9 :])) + 1)
            del value
        with torch.profiler.profile(profile_memory=True) as profile:
            ops.replay()
    changes = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert max(changes) > x.nbytes // 2
    assert sum(changes) == 0
    assert out.eq(2).all()


def test_a_replay_that_fails_lets_go_too() -> None:
    x, rows, out = torch.zeros(1 << 10), torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    with torch.inference_mode():
        with OpReplay() as ops:
            out.copy_((x + 1).index_select(0, rows))
        rows.fill_(len(x))
        with torch.profiler.profile(profile_memory=True) as profile, pytest.raises(IndexError, match="out of range"):
            ops.replay()
        changes = [event.self_cpu_memory_usage for event in profile.key_averages()]
        assert max(changes) > x.nbytes // 2
        assert sum(changes) == 0
        rows.zero_()
        ops.replay()
    assert out.eq(1).all()


def test_collectives_run_in_a_replay() -> None:
    memory, out = torch.zeros(shared.segment_bytes(1), dtype=torch.uint8), torch.zeros(8)
    x = torch.randn(8)
    with torch.inference_mode():
        with OpReplay() as ops:
            value = x * 2
            shared.all_reduce(memory, 0, 1, 10.0, value)
            out.copy_(shared.all_gather(memory, 0, 1, 10.0, value))
        assert not ops.reason
        x.normal_()
        ops.replay()
    assert torch.equal(out, x * 2)


GIVEN = torch.ones(8)


def failing(x: Tensor) -> None:
    with suppress(RuntimeError):
        x @ torch.ones(9)


@pytest.mark.parametrize(
    ("work", "operation"),
    [
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.unique(), "unique"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.sum().item(), "item"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x + torch.tensor([float(number) for number in range(8)]), "lift_fresh"),
        (lambda x: torch.where(x > 0), "nonzero"),
        (lambda x: x.repeat_interleave(torch.arange(8)), "repeat_interleave"),
        (lambda x: torch.is_nonzero(x[0]), "item"),
        (lambda x: GIVEN.narrow(0, GIVEN[0].long(), 2), "item"),
        (lambda x: GIVEN.tensor_split(torch.ones(1, dtype=torch.int64)), "item"),
        (lambda x: x.is_same_size(x), "is_same_size"),
        (lambda x: GIVEN.view(2, 4).t_(), "t_"),
        (lambda x: torch.empty(0).set_((x + 1).untyped_storage()), "set_"),
        (failing, "matmul"),
    ],
)
def test_what_would_not_be_the_same_again_is_not_kept(work: Callable[[Tensor], Any], operation: str) -> None:
    with torch.inference_mode():
        with OpReplay() as ops:
            work(torch.randn(8))
        assert operation in ops.reason
        with pytest.raises(RuntimeError, match="these operations cannot be replayed"):
            ops.replay()


def test_collectives_of_torch_are_not_kept(tmp_path: Path) -> None:
    """Python waits for them."""
    torch.distributed.init_process_group("gloo", (tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        with torch.inference_mode(), OpReplay() as ops:
            torch.distributed.all_reduce(torch.ones(4))
    finally:
        torch.distributed.destroy_process_group()
    assert "allreduce" in ops.reason


def test_an_error_comes_out_and_the_next_replay_is_another() -> None:
    x = torch.randn(3, 3)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="shapes"), OpReplay():
            x @ torch.randn(4, 4)
        with OpReplay() as ops:
            x.add_(1.0)
        before = x.clone()
        ops.replay()
        assert torch.equal(x, before + 1)
        with pytest.raises(RuntimeError, match="one OpReplay at a time"), OpReplay(), OpReplay():
            pass
        with OpReplay() as after:
            x.add_(1.0)
        assert not after.reason
