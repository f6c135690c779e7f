"""What the ranks of a grid tell each other by way of their hosts, whatever their devices are at."""

from __future__ import annotations

import torch.distributed as dist

from quire.engine.distributed import watchdog


def all_gather_object(key: str, value: str) -> list[str]:
    """What every rank of the grid says of a subject, in their order; a rank that is alone hears itself.

    All call this, once for a subject. Raises `watchdog.ExchangeError` where a rank says nothing in time.
    """
    if not dist.is_initialized():
        return [value]
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(_key(key, dist.get_rank()), value)
        values = store.multi_get([_key(key, rank) for rank in range(dist.get_world_size())])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        what = f"what ranks say of {key}"
        raise watchdog.CollectiveError(watchdog.describe_failure(what, None, reason, timed_out=True)) from error
    return [each.decode() for each in values]


def _key(key: str, rank: int) -> str:
    return f"quire-{key}-{rank}"
