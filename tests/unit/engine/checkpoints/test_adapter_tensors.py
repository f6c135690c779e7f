"""Which tensors of an adapter are kept while others are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.checkpoints import adapter_tensors
from quire.engine.checkpoints.adapter_tensors import AdapterTensors


def test_kept_tensors_stay_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last."""
    sizes, read = {"a": 3, "b": 5, "c": 4, "d": 20}, list[str]()
    monkeypatch.setattr(adapter_tensors, "_KEPT", 4 * 10)
    stored = {name: SimpleNamespace(dtype="F32", shape=(size, 1)) for name, size in sizes.items()}
    folder: Any = SimpleNamespace(tensors=stored, file="adapter")

    def content(name: str) -> bytearray:
        read.append(name)
        return bytearray(torch.full((sizes[name],), float(ord(name))).numpy().tobytes())

    tensors = AdapterTensors(folder, content)
    for names, expected in (("aba", "ab"), ("c", "c"), ("ac", ""), ("b", "b"), ("d", "d"), ("dd", ""), ("a", "a")):
        for name in names:
            rows = (range(sizes[name]),)
            piece: Any = SimpleNamespace(tensor=name, index=None, rows=rows, columns=(range(1),), is_transposed=False)
            assert tensors[piece].eq(ord(name)).all()
        assert "".join(read) == expected
        read.clear()
