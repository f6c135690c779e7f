"""The result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

Status = Literal["ok", "warning", "fault", "not applicable"]


class Check(msgspec.Struct):
    """The result of a check: what was found and, unless that is right, what to do."""

    name: str
    status: Status
    """fault: Quire cannot work as asked. not applicable: there is nothing to check, or it cannot be read here."""
    found: str
    remedy: str = ""
    values: dict[str, float] = {}
    """The measurements; the names have the units."""

    @property
    def line(self) -> str:
        return f"{self.status:<14}  {self.name}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, found: str, **values: float) -> Check:
    return Check(name, "ok", found, values=values)


def warning(name: str, found: str, remedy: str, **values: float) -> Check:
    return Check(name, "warning", found, remedy, values)


def fault(name: str, found: str, remedy: str) -> Check:
    return Check(name, "fault", found, remedy)


def not_applicable(name: str, found: str) -> Check:
    return Check(name, "not applicable", found)


def worst(checks: Iterable[Check]) -> Status:
    """The most serious status."""
    found = {check.status for check in checks}
    return "fault" if "fault" in found else "warning" if "warning" in found else "ok"


def run(checks: Iterable[tuple[str, Callable[[], Check | Iterable[Check]]]]) -> Iterator[Check]:
    """Run checks in turn. One whose files cannot be read, or are not as expected, is not applicable."""
    for name, check in checks:
        try:
            found = check()
            yield from [found] if isinstance(found, Check) else found
        except (OSError, ValueError, LookupError) as error:
            yield not_applicable(name, f"cannot be read here ({type(error).__name__}: {error})")


def gib(count: float) -> str:
    """A number of bytes as text."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
