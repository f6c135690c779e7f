"""Which replicas come, go and get another role."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import ReplicaRole
from quire.server.client.replica_roles import RoleChanges, role_changes, wanted_roles


def counter(any: int = 0, prefill: int = 0, decode: int = 0) -> Counter[ReplicaRole]:
    return Counter({"any": any, "prefill": prefill, "decode": decode})


@pytest.mark.parametrize(
    ("have", "count", "prefill", "decode", "want"),
    [
        (counter(any=2), 3, None, None, counter(any=3)),
        (counter(any=4), None, 1, None, counter(prefill=1, decode=3)),
        (counter(any=4), None, 1, 2, counter(prefill=1, decode=2)),
        (counter(any=1), None, 2, 2, counter(prefill=2, decode=2)),
        (counter(any=4), 6, None, 5, counter(prefill=1, decode=5)),
        (counter(prefill=1, decode=3), 6, None, None, counter(prefill=1, decode=5)),
        (counter(prefill=1, decode=3), None, 2, None, counter(prefill=2, decode=3)),
        (counter(prefill=1, decode=3), None, None, 1, counter(prefill=1, decode=1)),
        (counter(prefill=1, decode=3), 4, 2, None, counter(prefill=2, decode=2)),
        (counter(prefill=1, decode=3), 4, 2, 2, counter(prefill=2, decode=2)),
        (counter(prefill=1, decode=3), None, 0, None, counter(any=4)),
        (counter(prefill=1, decode=3), 2, 0, None, counter(any=2)),
    ],
)
def test_numbers_follow_from_each_other(
    have: Counter[ReplicaRole],
    count: int | None,
    prefill: int | None,
    decode: int | None,
    want: Counter[ReplicaRole],
) -> None:
    assert wanted_roles(have, count, prefill, decode) == want


@pytest.mark.parametrize(
    ("have", "count", "prefill", "decode", "text"),
    [
        (counter(any=2), 3, 1, 1, "data_parallel_size 3 contradicts prefill_replicas 1 and decode_replicas 1"),
        (counter(any=2), 2, 0, 1, "data_parallel_size 2 contradicts decode_replicas 1: with prefill_replicas 0"),
        (counter(any=2), None, 2, None, "2 replicas for prompts and 0 for decodes: each role needs at least one"),
        (counter(prefill=2, decode=2), 2, None, None, "2 replicas for prompts and 0 for decodes"),
        (counter(prefill=2, decode=2), 2, None, 3, "0 replicas for prompts and 3 for decodes"),
    ],
)
def test_each_role_has_a_replica(
    have: Counter[ReplicaRole], count: int | None, prefill: int | None, decode: int | None, text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        wanted_roles(have, count, prefill, decode)


ROLES: dict[int, ReplicaRole] = {0: "prefill", 1: "prefill", 2: "decode", 3: "decode"}


@pytest.mark.parametrize(
    ("want", "changes"),
    [
        (counter(prefill=2, decode=2), RoleChanges([], [], {})),
        # A role changes without a restart; the replica with the layout of the new one is taken.
        (counter(prefill=3, decode=1), RoleChanges([], [], {3: "prefill"})),
        (counter(prefill=1, decode=3), RoleChanges([], [], {1: "decode"})),
        (counter(prefill=2, decode=3), RoleChanges([], ["decode"], {})),
        (counter(prefill=1, decode=2), RoleChanges([1], [], {})),
        (counter(prefill=1, decode=1), RoleChanges([3, 1], [], {})),
        (counter(prefill=1, decode=4), RoleChanges([], ["decode"], {1: "decode"})),
        (counter(any=3), RoleChanges([3], [], {0: "any", 1: "any", 2: "any"})),
    ],
)
def test_as_few_as_possible_change(want: Counter[ReplicaRole], changes: RoleChanges) -> None:
    assert role_changes(ROLES, want, [3, 2, 1, 0], {"prefill": [0, 1, 3], "decode": [2, 3]}) == changes


def test_replicas_that_cannot_be_removed_get_the_roles_of_others() -> None:
    changes = role_changes(ROLES, counter(prefill=1, decode=2), [2], {})
    assert changes == RoleChanges([2], [], {1: "decode"})
    assert role_changes(ROLES, counter(prefill=1, decode=1), [2], {}).removed == [2]  # too few: the caller refuses
