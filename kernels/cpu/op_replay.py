"""Operations on tensors kept as they run, and run again without the Python around them; compiled only."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch


def available() -> bool:
    """Whether this process has loaded the compiled library."""
    return hasattr(torch.ops.quire, "paged_attention")


class OpReplay:
    """What this thread does with tensors within `with`.

    `replay` reads what was there before where it lies, and makes all else anew. What Python read out of tensors, or
    decided, stays as it was.
    """

    def __init__(self) -> None:
        self._tape = torch.classes.quire.Tape()
        self.reason = ""
        """After `with`: why it cannot be replayed, "" if it can."""

    def __enter__(self) -> Self:
        self._tape.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.reason = self._tape.end()

    def replay(self) -> None:
        """Run all of it again. Raises `RuntimeError` where there is a reason against it, and what operations raise."""
        self._tape.replay()
