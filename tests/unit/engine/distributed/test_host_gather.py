"""Messages between ranks by way of their hosts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from quire.engine.distributed import watchdog
from quire.engine.distributed.host_gather import all_gather_object
from quire.engine.distributed.watchdog import CollectiveError


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """This process is rank 0 of two, which meet in a store of its own."""
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(
        watchdog,
        "describe_failure",
        lambda what, group, reason, *, timed_out: f"{what}: rank 1 did not come ({timed_out})",
    )
    return store


def test_a_single_rank_gathers_its_own_object() -> None:
    assert all_gather_object("a size", "out of memory") == ["out of memory"]


def test_objects_are_gathered_in_rank_order(store: Store) -> None:
    store.set("quire-a size-1", "out of memory")
    assert all_gather_object("a size", "") == ["", "out of memory"]


def test_a_silent_rank_is_named(store: Store) -> None:
    store.set("quire-another size-1", "")
    with pytest.raises(CollectiveError, match=r"all_gather_object of a size: rank 1 did not come \(True\)"):
        all_gather_object("a size", "")
