"""The folder of temporary files: removed by the last process that uses it, or by the next one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.protocol.errors import ConfigError


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_folder_is_removed_by_its_last_process_or_by_the_next(temporary: Path) -> None:
    stale, foreign = temporary / "quire-stale", temporary / "quire-notes"
    stale.mkdir()
    (stale / "in-use").touch()
    (stale / "requests-0").touch()
    foreign.mkdir()  # not made by a server: it has no mark
    first = RuntimeFolder()
    second = RuntimeFolder()
    assert {path.name for path in temporary.iterdir()} == {Path(first.path).name, Path(second.path).name, "quire-notes"}
    first.remove()
    assert not Path(first.path).exists()
    path = Path(second.path)
    folder = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    assert second.exists
    (path / "in-use").unlink()
    assert not second.exists
    other = RuntimeFolder(second.path)  # as of another process
    second.remove()
    assert path.exists()
    other.remove()
    assert not path.exists()


def test_a_long_path_is_rejected(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ConfigError, match="the path in TMPDIR is too long"):
        RuntimeFolder()
    assert not os.listdir(folder)


def test_a_folder_that_is_not_removed_stays_marked(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next process removes it: a process that begins has put something there meanwhile."""
    first, remove = RuntimeFolder(), os.rmdir

    def late(path: str) -> None:
        Path(path, "items").mkdir()
        remove(path)

    monkeypatch.setattr(os, "rmdir", late)
    first.remove()
    monkeypatch.undo()
    assert first.exists
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    RuntimeFolder().remove()
    assert not os.listdir(temporary)
