"""The records of the parts: rows with floors and targets, checks, and notes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Aim:
    """The target of a row: a limit on its share of the floor or on its value."""

    what: str
    unit: str
    text: str
    judged: Literal["share", "value"]
    least: float | None = None
    most: float | None = None
    higher_is_better: bool = False
    """Whether the value is a rate, bounded above by the floor, and not a time, bounded below by it."""
    is_optional: bool = False
    """Not every card has the measured feature."""

    def reached(self, value: float, share: float | None) -> bool:
        found = value if self.judged == "value" else share
        if found is None:
            return False
        return (self.least is None or found >= self.least) and (self.most is None or found <= self.most)


AIMS = {
    "decode 1": Aim("decode, batch 1, context 1k: time of a step", "ms", "≥ 85 % of the floor", "share", least=0.85),
    "decode 64": Aim("decode, batch 64, context 1k: time of a step", "ms", "≥ 75 % of the floor", "share", least=0.75),
    "idle": Aim("GPU idle between steps, batch 64", "%", "< 2 %", "value", most=2.0),
    "attention": Aim(
        "paged-attention decode kernel, batch 64 × 4k, GQA 8",
        *("GB/s", "≥ 85 % of copy bandwidth", "share"),
        least=0.85,
        higher_is_better=True,
    ),
    "prefill": Aim(
        "prefill of 8k tokens, whole model",
        *("TFLOP/s", "≥ 60 % of the matmul rate", "share"),
        least=0.6,
        higher_is_better=True,
    ),
    "offline": Aim(
        "offline, 1,000 requests of 512 in / 256 out",
        *("tok/s", "≥ 5,800 tok/s", "value"),
        least=5800,
        higher_is_better=True,
    ),
    "transformers": Aim(
        "offline over transformers' continuous batching", "×", "≥ 3 ×", "value", least=3.0, higher_is_better=True
    ),
    "server": Aim(
        "whole server over HTTP, 256 streams",
        *("tok/s", "≥ 95 % of offline", "share"),
        least=0.95,
        higher_is_better=True,
    ),
    "sampler": Aim("sampler, 256 × 128k vocabulary, top-p", "µs", "≤ 300 µs", "value", most=300),
    "4 bits": Aim(
        "gates and ups of 4 bits, 16 rows", "GB/s", "≥ 60 % of bandwidth", "share", least=0.6, higher_is_better=True
    ),
    "fp8": Aim(
        "gates and ups of 8-bit floats, 8k rows",
        *("TFLOP/s", "≥ 100 % of the matmul rate in 16 bits", "share"),
        least=1.0,
        higher_is_better=True,
    ),
    "fp4": Aim(
        "gates and ups of 4-bit floats by 4-bit floats, 8k rows",
        *("TFLOP/s", "≥ 200 % of the matmul rate in 16 bits", "share"),
        least=2.0,
        higher_is_better=True,
        is_optional=True,
    ),
    "picture": Aim(
        "picture of 1,024 × 1,024 at Qwen3-VL-2B's shape: time to the first token",
        *("ms", "≥ 40 % of the floor", "share"),
        least=0.4,
    ),
    "picture again": Aim(
        "the same picture again: time to the first token over that of a known text", "×", "≤ 1.2 ×", "value", most=1.2
    ),
    "picture beside": Aim(
        "p99 of a step of 16 streams, pictures beside them over none", "×", "≤ 1.5 ×", "value", most=1.5
    ),
    "cold start": Aim(
        "8B from local disk to the first token, not in the page cache", "s", "< 20 s", "value", most=20.0
    ),
    "warm start": Aim("8B from the page cache to the first token", "s", "< 10 s", "value", most=10.0),
}
"""The rows of the table, in order."""


@dataclass(frozen=True)
class Row:
    """A figure in the table of targets; `floor` is the best value that the hardware allows, in the same unit."""

    key: str
    value: float
    floor: float | None = None
    formula: str = ""
    """How the floor, or the value, was computed, with numbers."""
    kind: Literal["row"] = "row"

    @property
    def share(self) -> float | None:
        """The share of the floor that was reached; above 1, the floor is invalid."""
        if self.floor is None:
            return None
        return self.value / self.floor if AIMS[self.key].higher_is_better else self.floor / self.value

    @property
    def reached(self) -> bool:
        return AIMS[self.key].reached(self.value, self.share)


@dataclass(frozen=True)
class Check:
    """A check that passed or failed."""

    what: str
    ok: bool
    detail: str
    kind: Literal["check"] = "check"


@dataclass(frozen=True)
class Note:
    """Information; `data` is for later parts and for the JSON file."""

    text: str
    data: dict[str, Any] | None = None
    kind: Literal["note"] = "note"


Record = Row | Check | Note


def to_json(record: Record) -> dict[str, Any]:
    return asdict(record)


def from_json(fields: dict[str, Any]) -> Record:
    """The inverse of `to_json`."""
    return {"row": Row, "check": Check, "note": Note}[fields["kind"]](**fields)  # type: ignore[no-any-return]
