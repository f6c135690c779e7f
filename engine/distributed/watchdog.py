"""Reports collectives that fail or hang: the rank, the collective, the missing ranks, and what to check."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_GRACE_SECONDS = 2.0
"""How long other ranks of a group may take to report that they wait, too."""
_POLL_SECONDS, _CHECK_SECONDS = 0.05, 1.0
"""Ranks that wait for the same collective report it within a second, so that all reports arrive before the core
gives up."""
_HINTS = {
    "nccl": "check that rank's log; to debug the connection, set NCCL_DEBUG=INFO",
    "gloo": "check that rank's log and the network between the hosts",
}
_SLOW_HINT = "; if a rank is only slow, raise --distributed-timeout-seconds"


class CollectiveError(dist.DistError):
    """A collective failed or timed out."""


def collective_error(what: str, x: Tensor, group: dist.ProcessGroup | None, error: RuntimeError) -> CollectiveError:
    """The error for the collective `what` on `x` among the ranks of `group`; None: all ranks."""
    words = str(error).strip()
    reason = words.splitlines()[0] if words else type(error).__name__
    text = f"{what} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return CollectiveError(describe_failure(text, group, reason, timed_out="timed out" in reason.lower()))


def describe_failure(what: str, group: dist.ProcessGroup | None, reason: str, *, timed_out: bool) -> str:
    """Describe the failure of a collective among the ranks of `group`."""
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    missing = missing_ranks(ranks)
    who = f"{_rank_list(missing)} did not join" if missing else "no rank is known to be missing"
    hint = _HINTS.get(backend, "") + _SLOW_HINT * timed_out
    return f"{what} among {_rank_list(ranks)}: {who}; {backend}: {reason}; {hint}"


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def missing_ranks(ranks: Sequence[int]) -> list[int]:
    """The ranks among `ranks` that do not report within a few seconds that they wait. Calling this reports that this
    rank waits."""
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _GRACE_SECONDS
    try:
        store.set(f"quire-waits-{dist.get_rank()}", "")
        while True:
            missing = [rank for rank in ranks if not store.check([f"quire-waits-{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_SECONDS)
    except RuntimeError:
        return []  # the rank that hosts the store has died


@dataclass(frozen=True)
class PendingCollective:
    """A collective in progress."""

    number: int
    """Numbered in the order of their start."""
    text: str
    group: dist.ProcessGroup | None
    """None: unknown."""


def watch(timeout: float, report: Callable[[str], None], pending: Callable[[], Sequence[PendingCollective]]) -> None:
    """Start a thread that calls `report` once, if a collective stays `pending` for longer than `timeout` seconds.

    GPUs need this: the host that launches a collective does not wait for it. torch has its own NCCL watchdog, which
    reports later and ends the process. Neither covers replayed CUDA graphs or symmetric memory; the core's step timeout
    does.
    """

    def run() -> None:
        number, since = -1, 0.0
        while True:
            oldest = min(pending(), key=lambda one: one.number, default=None)
            now = time.monotonic()
            if oldest is None or oldest.number != number:
                number, since = -1 if oldest is None else oldest.number, now
            elif now - since >= timeout:
                waited = f"it has waited there for {now - since:.0f} s"
                report(describe_failure(oldest.text, oldest.group, waited, timed_out=True))
                return
            time.sleep(min(_CHECK_SECONDS, timeout / 4, since + timeout - now))

    threading.Thread(target=run, daemon=True, name="exchange-watch").start()


def pending_on_gpu() -> list[PendingCollective]:
    """NCCL's pending collectives on this rank's GPU; empty if torch is built without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return [] if dump is None else parse_pending(dump(True, True))


def parse_pending(trace: bytes | str) -> list[PendingCollective]:
    """The pending collectives in a JSON trace of torch's flight recorder:
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"""
    entries: list[dict[str, Any]] = json.loads(trace).get("entries", [])
    return [
        PendingCollective(
            number=entry["record_id"],
            text=f"{entry['profiling_name']} of {entry['input_sizes']} {', '.join(entry['input_dtypes'])}",
            group=_group(entry["process_group"][0]),
        )
        for entry in entries
        if entry["state"] != "completed" and not entry["retired"]
    ]


def _group(name: str) -> dist.ProcessGroup | None:
    groups = dist.distributed_c10d._world.pg_names
    return next((group for group, its_name in groups.items() if its_name == name), None)
