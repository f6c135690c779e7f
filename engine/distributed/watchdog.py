"""Exchanges between ranks that fail or hang: which rank, which exchange, who is missing, and what to look at."""

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
"""How long the others of a group may take to say that they wait, too."""
_POLL_SECONDS, _CHECK_SECONDS = 0.05, 1.0
"""Ranks that wait for the same begin to say so within the second, and all of it is told before the core gives up."""
_HINTS = {
    "nccl": "look at that rank's log, and for a broken link start with NCCL_DEBUG=INFO",
    "gloo": "look at that rank's log, and at the network between the hosts",
}
_SLOW_HINT = "; where a rank is only slow, raise --distributed-timeout-seconds"


class CollectiveError(dist.DistError):
    """An exchange between ranks that failed or took too long."""


def collective_error(what: str, x: Tensor, group: dist.ProcessGroup | None, error: RuntimeError) -> CollectiveError:
    """The error for `what` on `x` among the ranks of `group`; None: all."""
    words = str(error).strip()
    reason = words.splitlines()[0] if words else type(error).__name__
    text = f"{what} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return CollectiveError(describe_failure(text, group, reason, timed_out="timed out" in reason.lower()))


def describe_failure(what: str, group: dist.ProcessGroup | None, reason: str, *, timed_out: bool) -> str:
    """What an exchange among the ranks of `group` came to."""
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    missing = missing_ranks(ranks)
    who = f"{_rank_list(missing)} did not come to it" if missing else "no rank is known to be missing"
    hint = _HINTS.get(backend, "") + _SLOW_HINT * timed_out
    return f"{what} among {_rank_list(ranks)}: {who}; {backend}: {reason}; {hint}"


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def missing_ranks(ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that do not say within a few seconds that they wait for others, as this one says by asking."""
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
        return []  # the store has gone with the rank that keeps it


@dataclass(frozen=True)
class PendingCollective:
    """An exchange under way."""

    number: int
    """In the order in which they were begun."""
    text: str
    group: dist.ProcessGroup | None
    """None: not known."""


def watch(timeout: float, report: Callable[[str], None], pending: Callable[[], Sequence[PendingCollective]]) -> None:
    """Have a thread `report` an exchange that stays `pending` for longer than `timeout` seconds, once.

    A GPU's exchanges need this: the host that has launched one does not wait for it. torch has a watchdog for them as
    well, whose word comes later and ends the process. Neither sees what CUDA graphs replay and what goes through
    symmetric memory: the core's bound on a step covers that.
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
    """What NCCL has under way on this rank's GPU; nothing where torch is built without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return [] if dump is None else parse_pending(dump(True, True))


def parse_pending(trace: bytes | str) -> list[PendingCollective]:
    """Of the trace of torch's flight recorder, in JSON: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"""
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
