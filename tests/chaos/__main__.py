"""The chaos suite by hand: `scripts/chaos --minutes 10 --seed 1 --layout dp2`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.run import run, table
from tests.chaos.system import LAYOUTS


def main() -> int:
    """Attack servers, print the events and a table, and return 1 if something was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of attacks, per layout (default: 5)")
    parser.add_argument("--faults", type=int, metavar="N", help="end after N faults per layout instead")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and the load (default: 0)")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="(default: all)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[], help="faults (default: all)")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="requests per fault (default: 50)")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="at the same time (default: 8)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write the servers' logs into a folder")
    options = parser.parse_args()
    reports = []
    for name in options.layout:
        report = run(
            LAYOUTS[name],
            seed=options.seed,
            faults=options.faults,
            minutes=options.minutes,
            only=options.only,
            every=options.every,
            clients=options.clients,
            say=lambda line: print(line, flush=True),
        )
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{name}-{options.seed}.log").write_text(report.server_log)
        reports.append(report)
    print(table(reports))
    for line in sorted({line for report in reports for line in report.left_out}):
        print(f"left out: {line}")
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
