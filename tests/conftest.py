"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

import hypothesis
import pytest

# Hypothesis takes the same examples in every run, so that none fails by chance. To look for others, repeatedly:
# HYPOTHESIS_PROFILE=explore scripts/test PATH
# No clock decides, as emulated and busy processors are slow.
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=100, **COMMON)
hypothesis.settings.register_profile("explore", print_blob=True, max_examples=1500, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

pytest_plugins = ("tests.tiers",)

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)

OF_SLOW_TESTS = {
    "e2e/test_ui.py": "playwright",
    "e2e/test_ui_chat.py": "playwright",
    "e2e/test_openapi_fuzz.py": "schemathesis",
    "integration/engine/checkpoints/test_merge_by_peft.py": "peft",
    "integration/scripts/test_train_demo_adapters.py": "peft",
    "integration/server/text/test_adapter_start.py": "peft",
}
collect_ignore = [
    file for file, package in OF_SLOW_TESTS.items() if find_spec(package) is None and not os.environ.get("CI")
]
"""Files with slow tests only. Without the packages that `scripts/setup ci` installs they cannot be imported; in CI that
is an error.
"""

NAMESPACES = {f"tests/e2e/test_{name}.py" for name in ("doctor", "namespaces", "nodes", "ray", "replicas")}


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Triton, half of which is compiled by itself. On a GPU, it is not to be interpreted."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Tests do not fill the user's folder, and do not get weights that another version has packed.
    os.environ["QUIRE_PACKED_CACHE"] = tempfile.mkdtemp(prefix="quire-test-packed-")
    # A shell without job control makes background processes ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _checked((yield))


def _checked(report: Report) -> Report:
    """In CI, where `scripts/setup ci` has run, tests are not skipped for a package that it installs."""
    if report.skipped and "scripts/setup ci" in str(report.longrepr) and os.environ.get("CI"):
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections need not visit all imported objects each time: neither now nor during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Extension modules report frozen objects as leaked."""
    gc.unfreeze()
    shutil.rmtree(os.environ["QUIRE_PACKED_CACHE"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors of a test and of its fixtures do not depend on earlier tests in this process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def quire_log() -> Iterator[None]:
    """A test's set-up of the log, as commands do it, does not outlast the test: it writes to a captured stream."""
    logger = logging.getLogger("quire")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of this host that nobody listens on. It is given to nobody else during the test, and programs that set
    SO_REUSEADDR can listen on it."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield reserved.getsockname()[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As --dist loadfile, except that the files whose hosts are network namespaces, which have fixed names, count as
    one file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "namespaces" if file in NAMESPACES else file

    return Scheduling(config, log)
