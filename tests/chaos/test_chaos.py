"""Parts of servers are killed, stopped and starved, and no client notices more than a pause.

A failure is repeated by the same layout and seed, by hand with `scripts/chaos`, where other seeds and longer runs are.
"""

from __future__ import annotations

import pytest

from tests.chaos.run import run, table
from tests.chaos.system import LAYOUTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ("one", ["stop core", "kill core twice", "kill core and api", "full disk"]),
        (
            "dp2-api2",
            [
                "kill cores",
                "stop api",
                "pause core",
                "slow core",
                "kill api twice",
                "descriptors",
                "pause parent",
                "resize",
            ],
        ),
        ("tp2-pp2", ["kill rank", "stop rank", "kill fork server", "full shm"]),
        ("dp2-tp2-ep", ["kill rank", "kill core and api"]),
        ("pictures", ["kill core and media", "kill api and media", "kill rank", "kill decoders", "kill fetcher"]),
        ("adapters", ["reload adapter", "unload adapter", "reload and kill core", "reload and kill api", "kill cores"]),
        ("tiers", ["kill core and kv store", "stop kv store", "full kv disk", "damage kv files", "kill rank"]),
        (
            "prefill-decode",
            ["kill core twice", "stop core", "pause core", "kill rank", "kill core and kv store", "change roles"],
        ),
        ("nodes", ["cut", "lose host", "kill rank", "kill kv store", "stop kv store"]),
        ("hosts", ["cut", "long cut", "lose host", "slow cable", "kill cores", "leave"]),
    ],
)
def test_clients_notice_only_a_pause(layout: str, faults: list[str]) -> None:
    report = run(LAYOUTS[layout], seed=1, faults=len(faults), only=faults, every=15)
    print(table([report]))
    assert not report.failures
    assert sorted(report.faults) == sorted(faults)
    assert report.ends["right"] > 15 * len(faults)
