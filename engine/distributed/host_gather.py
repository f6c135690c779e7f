"""What the ranks of a grid tell each other by way of their hosts, whatever their devices are at."""

from __future__ import annotations

import torch.distributed as dist

from quire.engine.distributed import watchdog


def all_gather_object(subject: str, mine: str) -> list[str]:
    """What every rank of the grid says of a subject, in their order; a rank that is alone hears itself.

    All call this, once for a subject. Raises `watchdog.ExchangeError` where a rank says nothing in time.
    """
    if not dist.is_initialized():
        return [mine]
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(_key(subject, dist.get_rank()), mine)
        reported = store.multi_get([_key(subject, rank) for rank in range(dist.get_world_size())])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        what = f"what ranks say of {subject}"
        raise watchdog.CollectiveError(watchdog.described(what, None, reason, is_late=True)) from error
    return [each.decode() for each in reported]


def _key(subject: str, rank: int) -> str:
    return f"quire-{subject}-{rank}"
