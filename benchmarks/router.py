"""Simulates replicas that hang, are slow, recover, join, drain and die, and compares the router's throughput, p99 and
shares with those of an oracle, and with the router of another version:

git show REVISION:server/client/router.py > before.py
.venv/bin/python -m benchmarks.router --before before.py --replicas 2 8
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.server.client.router import Router
from tests.fakes.replica_traffic import COURSES, PROMPTS, Outcome, simulate


def load(path: Path) -> Callable[..., Router]:
    """The router of a file that has no clock."""
    spec = importlib.util.spec_from_file_location("router_before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)

    class Before(module.Router):  # type: ignore[misc, name-defined]
        def on_output(self, replica: int) -> None:
            """It does not want to know."""

        def on_first_token(self, request_id: str, seconds: float = 0.0) -> None:
            super().on_first_token(request_id)

    def make(*args: Any, clock: Callable[[], float], **options: Any) -> Router:
        router: Router = Before(*args, **options)
        return router

    return make


def cells(outcome: Outcome, ideal: Outcome) -> str:
    return (
        f"{outcome.throughput:.0f} ({outcome.throughput / ideal.throughput:.2f}) | {outcome.p99 * 1e3:.0f} "
        f"({outcome.p99 / ideal.p99:.1f}) | {outcome.pause:.2f} | {outcome.last_share:.0%} | {outcome.hits:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--clients", type=int, default=8, help="for each replica")
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=[*PROMPTS])
    parser.add_argument("--courses", nargs="+", choices=COURSES, default=[*COURSES])
    parser.add_argument("--before", type=Path, help="another version's router.py, which did not notice silence")
    args = parser.parse_args()
    versions: dict[str, dict[str, Any]] = {"now": {}}
    if args.before is not None:
        versions = {"before": {"router": load(args.before), "notices_silence": False}, "now": {}}
    print("In brackets: relative to the oracle. The last replica is the one that something happens to.\n")
    print("| replicas | prompts | last replica | version | answers/s | p99 ms | pause s | its share | cached |")
    print("|---|---|---|---|---|---|---|---|---|")
    for replicas in args.replicas:
        for prompts in args.prompts:
            for course in args.courses:
                ideal = simulate(course, prompts, replicas, clients=args.clients, router=None)
                for name, options in versions.items():
                    outcome = simulate(course, prompts, replicas, clients=args.clients, **options)
                    print(f"| {replicas} | {prompts} | {course} | {name} | {cells(outcome, ideal)} |", flush=True)


if __name__ == "__main__":
    main()
