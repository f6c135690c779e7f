"""Op replay: record operations on tensors, and run them again without Python. Needs the compiled library."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch


def available() -> bool:
    """Whether this process has loaded the compiled library."""
    return hasattr(torch.ops.quire, "paged_attention")


class OpReplay:
    """The operations on tensors that this thread runs within `with`.

    `replay` reads tensors that existed before in place, and recomputes all others. Values that Python read from
    tensors, and decisions it made, are those of the recording.
    """

    def __init__(self) -> None:
        self._ops = torch.classes.quire.OpReplay()
        self.reason = ""
        """After `with`: why the operations cannot be replayed, or ""."""

    def __enter__(self) -> Self:
        self._ops.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.reason = self._ops.end()

    def replay(self) -> None:
        """Run all operations again. Raises `RuntimeError` if there is a `reason` not to, and the operations' errors."""
        self._ops.replay()
