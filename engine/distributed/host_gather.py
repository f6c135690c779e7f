"""Exchange of short texts between the ranks of a grid through their hosts, whatever their devices are doing."""

from __future__ import annotations

import torch.distributed as dist

from quire.engine.distributed import watchdog


def all_gather_object(key: str, value: str) -> list[str]:
    """The values of every rank of the grid, in rank order; a single rank gets its own.

    All ranks call this, once for each key. Raises `watchdog.CollectiveError` if a rank does not answer in time.
    """
    if not dist.is_initialized():
        return [value]
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(_key(key, dist.get_rank()), value)
        values = store.multi_get([_key(key, rank) for rank in range(dist.get_world_size())])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        what = f"all_gather_object of {key}"
        raise watchdog.CollectiveError(watchdog.describe_failure(what, None, reason, timed_out=True)) from error
    return [each.decode() for each in values]


def _key(key: str, rank: int) -> str:
    return f"quire-{key}-{rank}"
