"""One run: a server under load, faults by a schedule, a killed parent, a drain, and the remains."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

import httpx

from tests.chaos.faults import FAULTS, LEAST_SHARE, Attack, applicable, describe_shares, schedule
from tests.chaos.load import HUNG_SECONDS, Load, Record, adapter_requests, picture_requests, requests, tier_requests
from tests.chaos.pictures import Site
from tests.chaos.system import Layout, System, system

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes, as seen by the parent of a process and by a shell."""
_TIERS_SECONDS = 60.0
"""Time after the last fault for tokens to be loaded from all tiers."""


@dataclass
class Report:
    """The results of a run."""

    layout: str
    records: list[Record] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """Seconds after each fault until the stream that waited longest got its next token."""
    shares: list[list[float]] = field(default_factory=list)
    """The throughputs measured with each slow replica, as shares of what the others give alone."""
    leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Wrong exit codes, and events that did not happen in time."""
    left_out: list[str] = field(default_factory=list)
    """Faults that this machine cannot make, with the reason."""
    server_log: str = ""
    begun: float = field(default_factory=time.monotonic)

    @property
    def ends(self) -> Counter[str]:
        """Number of requests by outcome."""
        return Counter(str(record.end) for record in self.records)

    @property
    def failures(self) -> list[str]:
        """All outcomes that must not happen."""
        bad = [record for record in self.records if record.end in ("lost", "duplicated", "wrong", "hung")]
        found = [
            f"{each.end}: {each.request.name}, {each.started - self.begun:.1f} to {each.ended - self.begun:.1f} s, "
            f"port {each.port}, {each.answer.num_tokens} tokens: {each.detail}"
            for each in bad
        ]
        low = [each for each in self.shares if max(each) < LEAST_SHARE]
        found += [f"throughput with a slow replica: {describe_shares(each)} of the others'" for each in low]
        return [*found, *(f"left behind: {each}" for each in self.leftovers), *self.problems]

    def row(self) -> dict[str, str]:
        """The figures by name, times in seconds."""
        ends, pause = self.ends, max((record.longest_pause() for record in self.records), default=0.0)
        counts = {end: str(ends[end]) for end in ("lost", "duplicated", "wrong", "hung", "cut", "refused")}
        recoveries = sorted(self.recoveries)
        return {
            "layout": self.layout,
            "requests": str(len(self.records) - ends["refused"]),
            "faults": str(len(self.faults)),
            **counts,
            "left behind": str(len(self.leftovers)),
            "longest pause": f"{pause:.1f}",
            "recovery: half within": f"{recoveries[len(recoveries) // 2]:.1f}" if recoveries else "-",
            "all within": f"{recoveries[-1]:.1f}" if recoveries else "-",
            "throughput with a slow one": describe_shares([*chain(*self.shares)]) if self.shares else "-",
        }


def table(reports: Iterable[Report]) -> str:
    """The figures of several runs as a Markdown table."""
    rows = [report.row() for report in reports]
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run(
    layout: Layout,
    *,
    seed: int,
    faults: int | None = None,
    minutes: float = 0.0,
    only: Iterable[str] = (),
    every: int = 30,
    clients: int = 8,
    say: Callable[[str], None] = print,
) -> Report:
    """Attack a server of this layout `faults` times, or for `minutes`, once for at least `every` requests.

    Then its parent is killed; another server is started in the same folders, and drained. `only` are names of faults
    (default: all that the layout can have).
    """
    report = Report(layout.name)

    def told(line: str) -> None:
        say(f"{layout.name} {time.monotonic() - report.begun:6.1f} s  {line}")

    told(f"seed {seed}")
    with system(layout) as attacked, Site() as site:
        try:
            attacked.start()
            names, report.left_out = applicable(attacked)
            chosen = [name for name in names if not only or name in only]
            catalogue = picture_requests(site) if layout.sees else requests(embeds=layout.embeds)
            catalogue += adapter_requests(catalogue) if layout.adapts else []
            catalogue += tier_requests(catalogue) if layout.has_tiers else []
            load = Load(attacked.address, catalogue, clients=clients, seed=seed, host=attacked.host)
            load.measure()
            report.records = load.records
            told(f"{len(load.expected)} answers known; faults: {', '.join(chosen)}")
            until = time.monotonic() + minutes * 60
            with load.running():
                for number, (name, fault_seed) in enumerate(schedule(chosen, seed)):
                    if number >= faults if faults is not None else time.monotonic() > until:
                        break
                    _wait_for_answers(load, attacked, every)
                    _inject(name, Attack(attacked, load, random.Random(fault_seed)), report, told)
                if layout.has_tiers:
                    told(_check_tiers(attacked, load, report))
                told("parent killed")
                load.cut_all()
                attacked.parent.kill()
                _expect_exit(attacked, _KILLED, report)
            report.leftovers += [each for each in attacked.leftovers() if not each.startswith("$TMPDIR")]
            told("started again")
            attacked.start()
            _drain(attacked, load.again(attacked.address, seed=seed + 1), every, report, told)
        except (OSError, AssertionError, subprocess.TimeoutExpired) as problem:
            report.problems.append(f"{type(problem).__name__}: {problem}")
        finally:
            attacked.close()
            report.server_log = attacked.text
    for failure in report.failures:
        told(failure)
    return report


def _inject(name: str, attack: Attack, report: Report, told: Callable[[str], None]) -> None:
    """Make a fault, and wait until all requests that it may have met have ended."""
    affected, at = set(attack.load.open), time.monotonic()
    try:
        FAULTS[name](attack)
    finally:
        told(f"{name} {attack.told}".strip())
    report.faults.append(name)
    report.shares += [attack.shares] if attack.shares else []
    affected |= attack.load.open
    _wait(attack.load, attack.system, lambda: not affected & attack.load.open)
    report.recoveries.append(max((record.longest_pause(since=at) for record in affected), default=0.0))


def _drain(attacked: System, load: Load, every: int, report: Report, told: Callable[[str], None]) -> None:
    """Send SIGTERM to a server under load: running requests go on to their end."""
    with load.running():
        _wait_for_answers(load, attacked, every)
        told("SIGTERM")
        load.may_refuse = True
        attacked.parent.terminate()
        _expect_exit(attacked, (0,), report)
    report.records += load.records
    report.leftovers += attacked.leftovers()


def _check_tiers(attacked: System, load: Load, report: Report) -> str:
    """Note a tier that has no part in the run, and return how many tokens came from each since the last core started,
    which may have been a moment ago."""
    host, port = attacked.address
    metric = r'quire:prompt_tokens_cached_by_source_total\{.*source="(host|disk)".*\} (\S+)'
    deadline = time.monotonic() + _TIERS_SECONDS
    while True:
        with load.inside():
            text = httpx.get(f"http://{host}:{port}/metrics", timeout=60).text
        found = dict.fromkeys(("host", "disk"), 0)
        for source, count in re.findall(metric, text):
            found[source] += int(float(count))
        handed_over = sum(float(count) for count in re.findall(r"quire:requests_handed_over_total\{.*\} (\S+)", text))
        found |= {"handed-over requests": int(handed_over)} if attacked.layout.has_roles else {}
        if all(found.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    report.problems += [f"no tokens were loaded from {source}" for source, count in found.items() if not count]
    return f"loaded tokens: {found}"


def _wait_for_answers(load: Load, attacked: System, count: int) -> None:
    """Wait until so many more requests have ended."""
    goal = len(load.records) + count
    _wait(load, attacked, lambda: len(load.records) >= goal)


def _expect_exit(attacked: System, codes: tuple[int, ...], report: Report) -> None:
    code = attacked.expect_exit()
    if code not in codes:
        report.problems.append(f"exit code {code} instead of {codes[0]}")


def _wait(load: Load, attacked: System, is_over: Callable[[], bool]) -> None:
    """Wait for clients; raises `TimeoutError` if nothing ends for too long, or the server has given up."""
    last, since = len(load.records), time.monotonic()
    while not is_over():
        time.sleep(0.05)
        if len(load.records) != last:
            last, since = len(load.records), time.monotonic()
        if time.monotonic() - since > HUNG_SECONDS + 60:
            raise TimeoutError("no request has ended for too long")
        if attacked.api.process.poll() is not None:
            raise TimeoutError(f"the server has ended with exit code {attacked.api.process.returncode}")
