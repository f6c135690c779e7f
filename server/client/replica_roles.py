"""Which replicas are removed, added, or get another role, so that there are so many of each role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import ReplicaRole


@dataclass(frozen=True)
class RoleChanges:
    """What becomes of the replicas."""

    removed: list[int]
    added: list[ReplicaRole]
    """The roles of new replicas."""
    changed: dict[int, ReplicaRole]
    """The new roles of replicas that stay."""


def wanted_roles(
    have: Counter[ReplicaRole], count: int | None, prefill: int | None, decode: int | None
) -> Counter[ReplicaRole]:
    """Return how many replicas of each role there are to be, and `count` in all. None: as many as there are, or as
    follow from the others; with `prefill` 0 no replica has a role. Raises `ConfigError` for numbers that contradict.
    """
    total = have.total()
    has_roles = have["any"] < total
    if prefill is None and decode is None:
        if not has_roles or count is None:
            return have if count is None else Counter({"any": count})
        prefill = have["prefill"]
    if prefill == 0:
        if count is not None and decode not in (None, count):
            raise ConfigError(
                f"data_parallel_size {count} contradicts decode_replicas {decode}: with prefill_replicas 0 no replica "
                "has a role; omit one of them"
            )
        return Counter({"any": decode or total if count is None else count})
    if count is None and has_roles:
        prefill, decode = prefill or have["prefill"], have["decode"] if decode is None else decode
    rest = total if count is None else count
    prefill = rest - (decode or 0) if prefill is None else prefill
    decode = rest - prefill if decode is None else decode
    if count is not None and prefill + decode != count:
        raise ConfigError(
            f"data_parallel_size {count} contradicts prefill_replicas {prefill} and decode_replicas {decode}, together "
            f"{prefill + decode}; omit it"
        )
    if min(prefill, decode) < 1:
        raise ConfigError(
            f"{max(0, prefill)} replicas for prompts and {max(0, decode)} for decodes: each role needs at least one; "
            "with prefill_replicas 0 no replica has a role"
        )
    return Counter({"prefill": prefill, "decode": decode})


def role_changes(
    roles: Mapping[int, ReplicaRole],
    want: Counter[ReplicaRole],
    removable: Sequence[int],
    suited: Mapping[ReplicaRole, Collection[int]],
) -> RoleChanges:
    """Return how to get from the present `roles` of all replicas to the numbers `want`. As few as possible change.

    `removable` are in the order in which they are removed, those of a role that has too many first. Those that get
    another role are the replicas `suited` for it, if there are any: those that have its layout. `removed` has too few
    if there are not enough.
    """
    have = Counter(roles.values())
    removed: list[int] = []
    for has_many in (True, False):
        for replica in removable:
            excess = have[roles[replica]] > want[roles[replica]]
            if have.total() > want.total() and replica not in removed and excess >= has_many:
                have[roles[replica]] -= 1
                removed.append(replica)
    added: list[ReplicaRole] = []
    while have.total() < want.total():
        lacking = next(role for role in want if have[role] < want[role])
        have[lacking] += 1
        added.append(lacking)
    changed: dict[int, ReplicaRole] = {}
    for role, number in want.items():
        stay = [replica for replica in roles if replica not in removed and replica not in changed]
        order = 1 if role == "prefill" else -1
        for replica in sorted(stay, key=lambda replica: (replica not in suited.get(role, ()), order * replica)):
            own = roles[replica]
            if have[role] < number and own != role and have[own] > want[own]:
                have[own] -= 1
                have[role] += 1
                changed[replica] = role
    return RoleChanges(removed, added, changed)


def host_of(address: str) -> str:
    """Return the host of a replica that has this address."""
    return urlsplit(address).hostname or "localhost"


def hosts_with_one_role(addresses: Mapping[int, str], roles: Mapping[int, ReplicaRole]) -> dict[str, ReplicaRole]:
    """Return the hosts on which no request can change replicas, as all that are there have the same role, other than
    "any"; given the replicas' `addresses`."""
    found: dict[str, set[ReplicaRole]] = {}
    for replica, address in addresses.items():
        found.setdefault(host_of(address), set()).add(roles.get(replica, "any"))
    return {host: next(iter(own)) for host, own in found.items() if len(own) == 1 and "any" not in own}
