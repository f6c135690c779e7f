"""`quire kv`: what is stored, which files are damaged, and how to remove them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.engine.kv_store.checksum import checksum
from quire.engine.kv_store.disk import DiskTier
from quire.engine.protocol.kv_store import KVEntry
from quire.server.cli.main import main

MODELS = {b"signature of one": "models/one", b"signature of two": "models/two"}


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    for signature, name in MODELS.items():
        disk = DiskTier(tmp_path, 1 << 20, signature, [1000], model=name)
        for first in (1, 3):
            entries = [KVEntry(bytes([number]) * 16, 0) for number in range(first, first + 2)]
            assert disk.write(entries, [memoryview(bytes(1000))] * 2, [checksum(bytes(1000))] * 2)
    for number, file in enumerate(sorted(tmp_path.glob("*/*.kv"))):
        os.utime(file, (used := time.time() - 3 * 3600 - number % 2, used))
    return tmp_path


def test_what_is_stored_is_listed(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "list", str(tier)]) == 0
    size = [sum(file.stat().st_size for file in tier.glob(f"{each.hex()}/*.kv")) for each in MODELS]
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{tier}: {sum(size) / 1024:.3g} KiB, models: 2"
    assert head.split() == ["signature", "files", "entries", "size", "last", "used", "model"]
    assert [row.split() for row in rows] == [
        [each.hex()[:12], "2", "4", f"{size[0] / 1024:.3g}", "KiB", "3", "h", "ago", name]
        for each, name in MODELS.items()
    ]
    assert main(["kv", "list", str(tier), "--signature", b"signature of two".hex()]) == 0
    assert "models/one" not in capsys.readouterr().out


def test_damaged_files_are_found(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "verify", str(tier)]) == 0
    text, errors = capsys.readouterr()
    assert "4 files with" in text
    assert text.endswith(", 0 damaged\n")
    assert errors == ""  # no progress in the mail of a cron job
    changed, cut = sorted(tier.glob("*/*.kv"))[1:3]
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:20])
    assert main(["kv", "verify", str(tier)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{changed}: entry 1 of 2 has a wrong checksum" in lines
    assert f"{cut}: it is too short" in lines
    assert lines[-1].endswith(", 2 damaged")
    assert main(["kv", "list", str(tier)]) == 0
    assert f"files that cannot be read: 1; quire kv verify {tier} names them" in capsys.readouterr().out


def test_what_cannot_be_read_is_left_out_of_the_list(
    tier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a superuser it may, so the calls are made to fail."""
    first, second = (tier / each.hex() for each in MODELS)
    file, open_file, scandir = next(second.glob("*.kv")), os.open, os.scandir
    (second / "model.json").write_text("[" * 100_000)

    def function(real: Callable[..., Any], forbidden: Path, path: Any, *arguments: Any) -> Any:
        if Path(path) == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", partial(function, open_file, file))
    monkeypatch.setattr(os, "scandir", partial(function, scandir, first))
    assert main(["kv", "list", str(tier)]) == 0
    _, _, row, *notes = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == [second.name[:12], "2", "2"]
    assert notes == [
        f"files that cannot be read: 1; quire kv verify {tier} names them",
        "folders that this user may not read: 1",
    ]
    assert main(["kv", "clear", str(tier)]) == 2
    assert f"{first}: Permission denied" in capsys.readouterr().err


def test_files_are_removed(tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (tier / each.hex() for each in MODELS)
    (two / "notes").write_text("not Quire's")
    assert main(["kv", "clear", str(tier), "--signature", one.name[:-1]]) == 0
    assert capsys.readouterr().out.startswith(f"{tier}: removed 2 files, ")
    assert (one.exists(), len([*two.glob("*.kv")])) == (False, 2)
    assert main(["kv", "clear", str(tier)]) == 0
    assert {file.name for file in two.iterdir()} == {"notes", "model.json"}
    assert main(["kv", "list", str(tier)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tier}: 0 B, models: 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{path}/none"], "{path}/none: no such folder"),
        (["clear", "{path}", "--signature", ""], "--signature is empty"),
        (["clear", "{path}", "--signature", "ff"], "--signature ff: there is nothing of such a model in {path}"),
    ],
)
def test_what_does_not_exist_is_refused(
    tier: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["kv", *(each.format(path=tier) for each in arguments)]) == 2
    assert message.format(path=tier) in capsys.readouterr().err
