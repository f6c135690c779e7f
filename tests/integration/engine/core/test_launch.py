"""Starting the process of an engine core before its configuration is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.core import launch
from quire.engine.core.launch import CoreArgs, local_endpoints, prepared_core, start_core
from quire.engine.process.supervisor import Process, StartedProcess, SupervisedProcess, Supervisor
from quire.engine.protocol.supervision import Ready, Shutdown

PROCESS_SECONDS = 60.0


class _Core(SupervisedProcess):
    def __init__(self, started: Process) -> None:
        super().__init__("core")
        self._started = started
        self.seconds: dict[str, float] = {}

    def start(self) -> Process:
        return self._started

    def on_ready(self, ready: Ready) -> None:
        self.seconds = ready.seconds

    def on_exit(self, failure: object) -> None:
        return None


def test_a_core_that_is_prepared_is_the_one_that_starts(tmp_path: Path) -> None:
    options = EngineOptions(device="cpu", kv_cache_memory_bytes=1 << 24)
    with prepared_core(options):
        (prepared,) = launch._prepared
        config = resolve(options)
        args = CoreArgs(config, local_endpoints(config.parallel, str(tmp_path), 1), "info", 1)
        core = _Core(start_core(args, str(tmp_path)))
        assert core.start() is prepared
    supervisor = Supervisor(60.0)
    supervisor.add(core)
    supervisor.run(lambda: bool(core.seconds) or core.process is None)
    assert core.seconds["engine in all"] > 0
    supervisor.stop([core], Shutdown(), PROCESS_SECONDS)
    assert prepared.returncode == 0


def test_a_core_that_is_not_needed_ends() -> None:
    with prepared_core(EngineOptions(tensor_parallel_size=2)):
        (prepared,) = launch._prepared
    assert prepared.returncode is not None
    assert not launch._prepared


def test_no_core_is_prepared_where_none_will_run() -> None:
    with prepared_core(EngineOptions(data_parallel_size=2, data_parallel_size_local=0)):
        assert not launch._prepared


def test_a_core_that_died_while_it_was_prepared_is_replaced(tmp_path: Path) -> None:
    options = EngineOptions(device="cpu", kv_cache_memory_bytes=1 << 24)
    with prepared_core(options):
        (prepared,) = launch._prepared
        prepared.kill()
        prepared.wait()
        config = resolve(options)
        started = start_core(
            CoreArgs(config, local_endpoints(config.parallel, str(tmp_path), 1), "info", 1), str(tmp_path)
        )
        assert started is not prepared
        assert isinstance(started, StartedProcess)
        started.kill()
        started.wait()
        started.connection.close()
        started.wait()
        started.connection.close()


def test_a_prepared_core_whose_supervisor_ends_is_silent() -> None:
    code = (
        "import os; from quire.engine.process.supervisor import start_imports; "
        "start_imports('quire.engine.core.engine_core'); os._exit(0)"
    )
    # Reads until the core, too, has closed its end of the pipe: until it has ended.
    found = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=PROCESS_SECONDS, check=True
    )
    assert found.stderr == ""


def test_imports_are_not_collected() -> None:
    code = """
import gc
from quire.engine.process import current_process
with current_process.imports():
    assert not gc.isenabled()
    import quire.engine.worker
assert gc.isenabled() and gc.get_freeze_count() > 100_000
"""
    subprocess.run([sys.executable, "-c", code], timeout=PROCESS_SECONDS, check=True)
