"""Low-rank adapters of requests, and what ranks do with them. No torch.

An adapter is known by the digest of its weights and settings (`quire.engine.repository.adapter_folder`). Whoever needs
it reads it from one of its paths, and takes no file whose digest is another one; so a replica needs to know nothing in
advance, and a name that is used again cannot stand for an earlier adapter.
"""

from __future__ import annotations

import msgspec

NO_SLOT = -1
NO_RANK = -1
MAX_READS = 2
"""Adapters that ranks are asked to read at a time: they do one after another, unless one takes very long."""


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """An adapter, and where it may be found."""

    digest: bytes
    """32 bytes."""
    paths: tuple[str, ...]
    """Folders or GGUF files, the best first; not every host has all of them. The last one is the adapter's own, unless
    there are only copies: errors name it."""


class AdapterPlan(msgspec.Struct, array_like=True):
    """Changes of the adapters that ranks have, also made in steps that are skipped after a failure; in this order."""

    dropped: list[bytes] = []
    """Digests that ranks no longer keep in the host's memory. They have answered for each, if only with an error."""
    prepared: list[AdapterRef] = []
    """Ranks begin to read these beside the steps, and answer with `AdapterPrepared`."""
    freed: list[int] = []
    """Device slots that no row has from now on."""
    assigned: list[tuple[int, bytes]] = []
    """Device slots, and the digests that they hold from this step on, which all ranks have prepared. See
    `ModelRunnerOutput.adapter_failures`."""


class AdapterPrepared(msgspec.Struct, tag=True, array_like=True):
    """A rank has an adapter in the host's memory, ready to be copied to its device, or cannot read it. It says so once
    for each of `AdapterPlan.prepared`."""

    digest: bytes
    rank: int
    """`NO_RANK`: the core has waited for too long; the ranks may still answer."""
    host_bytes: int = 0
    device_bytes: int = 0
    """What it takes on the rank's device."""
    error: str = ""
    """Why it cannot be used; empty: it can."""
    is_invalid: bool = True
    """The error is the adapter's. Otherwise it is the rank's: it cannot read the files, or has no memory."""
    changes_tower: bool = False
    """The features of images and videos are others with it. The ranks with the tower know."""
