"""The folders of compiled files, and the users whose files are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels import disk
from quire.kernels.cpu import build


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.folder() == tmp_path / "quire" / "kernels"
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "other"))
    assert disk.folder() == tmp_path / "other"


def test_what_others_may_write_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.touch()
    disk.check_owner(tmp_path, path)
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="library can be written by others"):
        disk.check_owner(tmp_path, path)
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_key", lambda *_: "key")
    (tmp_path / "key").mkdir()
    (tmp_path / "key").chmod(0o777)
    with pytest.raises(build.CannotBuild, match="can be written by others; set QUIRE_KERNEL_CACHE to another"):
        build.load()
