"""Unit tests start no process and load no C++: a test that does either fails."""

from __future__ import annotations

import importlib
import multiprocessing.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

platform.platform()  # runs `uname` once; clients ask for it


def refuse(what: str) -> Callable[..., NoReturn]:
    def refused(*args: object, **kwargs: object) -> NoReturn:
        pytest.fail(f"a unit test {what}: move it to tests/integration")

    return refused


@pytest.fixture(scope="session")
def fonts() -> None:
    """matplotlib runs `fc-list` once. A module that plots uses this in all its tests, so that it comes first."""
    importlib.import_module("matplotlib.font_manager")


@pytest.fixture(autouse=True, scope="module")
def only_this_process() -> Iterator[None]:
    """Operations run with the reference, as kernels may have been loaded before for other tests."""
    from quire.kernels import cpu, dispatch  # and torch, which the process that distributes the tests does not need

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", refuse("starts a process"))
        patch.setattr(multiprocessing.util, "spawnv_passfds", refuse("starts a process"))
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system"):
            patch.setattr(os, name, refuse("starts a process"))
        patch.setattr(cpu, "load", refuse("loads compiled kernels"))
        patch.setattr(dispatch, "PLATFORMS", {})
        yield
