"""The placement of ranks in a cluster, from the numbers of its nodes only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.cluster.placement import ClusterNode, place, split_stages
from quire.engine.protocol.errors import ConfigError


def nodes(*counts: int | tuple[int, int]) -> list[ClusterNode]:
    """10.0.0.1, 10.0.0.2, … with so many devices; of a pair, (free, total)."""
    pairs = [count if isinstance(count, tuple) else (count, count) for count in counts]
    return [ClusterNode(f"id{n}", f"10.0.0.{n}", free, total) for n, (free, total) in enumerate(pairs, 1)]


def placed(found: list[ClusterNode], tp: int, pp: int) -> list[tuple[str, list[int]]]:
    (shares,) = place(found, tp, pp, "GPU")
    return [(share.node.address, list(share.ranks)) for share in shares]


@pytest.mark.parametrize(
    ("counts", "tp", "pp", "expected"),
    [
        ((2, 2), 2, 2, [("10.0.0.1", [0, 1]), ("10.0.0.2", [2, 3])]),
        ((2, 8), 2, 2, [("10.0.0.2", [0, 1, 2, 3])]),  # one host is enough
        ((8, 4, 8), 2, 2, [("10.0.0.2", [0, 1, 2, 3])]),  # the smallest such
        ((3, 5), 2, 3, [("10.0.0.2", [0, 1, 2, 3]), ("10.0.0.1", [4, 5])]),
        ((3, 1), 1, 4, [("10.0.0.1", [0, 1, 2]), ("10.0.0.2", [3])]),
        ((1, 1), 1, 1, [("10.0.0.1", [0])]),
        ((8, 4, 2), 2, 5, [("10.0.0.1", [0, 1, 2, 3, 4, 5, 6, 7]), ("10.0.0.3", [8, 9])]),
        (((1, 8), 2), 2, 1, [("10.0.0.2", [0, 1])]),  # taken devices do not count
        ((2, 2), 4, 1, [("10.0.0.1", [0, 1]), ("10.0.0.2", [2, 3])]),  # no host holds a stage
    ],
)
def test_stages_are_whole_on_few_hosts(
    counts: tuple[int | tuple[int, int], ...], tp: int, pp: int, expected: list[tuple[str, list[int]]]
) -> None:
    assert placed(nodes(*counts), tp, pp) == expected


def test_a_stage_that_no_host_could_hold_is_cut() -> None:
    assert split_stages(place(nodes(2, 2), 4, 1, "GPU")[0], 4) == [0]
    assert split_stages(place(nodes(3, 3, 2), 4, 2, "GPU")[0], 4) == [0, 1]
    assert split_stages(place(nodes(2, 2), 2, 2, "GPU")[0], 2) == []


@pytest.mark.parametrize(
    ("counts", "tp", "pp", "expected"),
    [
        ((4, 4), 2, 2, [{"10.0.0.1": 4}, {"10.0.0.2": 4}]),
        ((8, 4), 2, 2, [{"10.0.0.2": 4}, {"10.0.0.1": 4}]),  # the smallest host that is enough
        ((2, 2, 2, 2), 2, 2, [{"10.0.0.1": 2, "10.0.0.2": 2}, {"10.0.0.3": 2, "10.0.0.4": 2}]),
        ((6, 2), 2, 2, [{"10.0.0.1": 4}, {"10.0.0.1": 2, "10.0.0.2": 2}]),
    ],
)
def test_replicas_have_devices_of_their_own(
    counts: tuple[int, ...], tp: int, pp: int, expected: list[dict[str, int]]
) -> None:
    placed = place(nodes(*counts), tp, pp, "GPU", replicas=2)
    assert [{share.node.address: len(share.ranks) for share in shares} for shares in placed] == expected


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4, 2), "--data-parallel-size 2 needs 8 GPUs; the Ray cluster has 6: 4 GPUs on 10.0.0.1, 2 GPUs on 10.0.0.2"),
        ((5, 3), "stage 1 of 2 finds none with 2 GPUs left; the Ray cluster has 5 GPUs on 10.0.0.1, 3 GPUs on"),
    ],
)
def test_too_few_devices_for_all_replicas_have_the_numbers(counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(nodes(*counts), 2, 2, "GPU", replicas=2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("counts", "tp", "pp", "message"),
    [
        ((2, 1), 2, 2, "needs 4 GPUs; the Ray cluster has 3: 2 GPUs on 10.0.0.1, 1 GPU on 10.0.0.2"),
        ((), 1, 1, "needs 1 GPU; the Ray cluster has 0: no node is alive"),
        (((1, 2), 2), 2, 2, "has 4, but only 3 are free: 1 of 2 GPUs on 10.0.0.1, 2 GPUs on 10.0.0.2"),
        (
            (3, 1),
            2,
            2,
            "stage 1 of 2 finds none with 2 GPUs left; the Ray cluster has 3 GPUs on 10.0.0.1, 1 GPU on 10.0.0.2; "
            "use --tensor-parallel-size 1 --pipeline-parallel-size 4",
        ),
        # A host could hold the stage if it were free: it is not cut, since that would be slow for a mistake.
        (((1, 2), (1, 2)), 2, 1, "stage 0 of 1 finds none"),
    ],
)
def test_placement_errors_have_the_numbers(
    counts: tuple[int | tuple[int, int], ...], tp: int, pp: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        place(nodes(*counts), tp, pp, "GPU")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 8), st.integers(1, 4))
def test_every_rank_has_one_device(counts: list[int], tp: int, pp: int) -> None:
    try:
        (shares,) = place(nodes(*counts), tp, pp, "GPU")
    except ConfigError:
        assert sum(counts) < tp * pp or (max(counts) >= tp and sum(count // tp for count in counts) < pp)
        return
    assert [rank for share in shares for rank in share.ranks] == list(range(tp * pp))
    assert len({share.node.id for share in shares}) == len(shares)
    assert all(0 < len(share.ranks) <= share.node.free for share in shares)
    assert not split_stages(shares, tp) or max(counts) < tp
