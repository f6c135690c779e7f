"""Ranks as processes of a host."""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import msgspec

from quire.engine.executor.local_ranks import LocalRanks
from quire.engine.process import log
from quire.engine.protocol.adapters import AdapterPrepared
from quire.engine.protocol.rank_report import RankReport
from quire.engine.protocol.rank_state import RankState
from quire.engine.protocol.supervision import Reload
from quire.engine.worker import worker

_START = """
import sys
from quire.engine.executor import factory
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve

if __name__ == "__main__":
    config = resolve(EngineOptions(device="cpu", tensor_parallel_size=2, max_model_len=64, max_num_seqs=2))
    factory.start(config, "warning", lambda: None).close()
    assert "torch" not in sys.modules
"""


def test_only_ranks_import_torch() -> None:
    """The process that starts them must keep answering other hosts, which take its silence for its end."""
    subprocess.run([sys.executable, "-c", _START], check=True, timeout=120)


def test_a_rank_that_has_just_ended_is_no_error() -> None:
    """Its fork server has waited for it, and has not told the exit code yet, so that it still counts as alive."""
    process = multiprocessing.get_context("fork").Process(target=str)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    assert process.is_alive()
    ranks = LocalRanks.__new__(LocalRanks)
    ranks._selector, ranks._usage, ranks._pipes = selectors.DefaultSelector(), None, []
    ranks._processes = {0: process}
    ranks.kill()


def test_what_becomes_of_adapters_is_known_while_no_step_runs() -> None:
    """Until a rank has ended; one may have closed its pipe before."""
    process = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    process.start()
    ranks, answers, ended = LocalRanks.__new__(LocalRanks), SimpleQueue[RankReport](), threading.Event()
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    ranks._processes, ranks._report_pipes, ranks.on_report = {0: process}, [own for own, _ in pipes], answers.put
    thread = threading.Thread(target=ranks._watch, args=(ended.set,))
    thread.start()
    for rank in (1, 0):
        pipes[rank][1].send_bytes(msgspec.msgpack.encode(prepared := AdapterPrepared(b"an adapter", rank)))
        assert answers.get(timeout=20) == prepared
        pipes[rank][1].close()
    assert not ended.is_set()
    process.kill()
    thread.join(20)
    assert ended.is_set()


def _watch(results: Connection, parents: Connection) -> None:
    parents.close()
    log.setup("warning", "rank 3")
    worker._end_with_parent(RankState(), results, lambda: False)
    threading.Event().wait()


def test_a_rank_logs_as_it_is_asked_and_ends_with_the_pipe(tmp_path: Path) -> None:
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "quire.log"), "formatter": "own"}
    config = {
        "version": 1,
        "formatters": {"own": {"format": "%(processName)s|%(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"quire": {"handlers": ["file"], "propagate": False}},
    }
    own, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_watch, args=(theirs, own), daemon=True)
    process.start()
    theirs.close()
    ranks = LocalRanks.__new__(LocalRanks)
    ranks._pipes = [own]
    ranks.reload_logs(Reload(json.dumps(config), "info"))
    ranks.set_log_level("debug")
    own.close()
    process.join(20)
    assert process.exitcode == 1
    assert (tmp_path / "quire.log").read_text() == "rank 3|debug messages are shown\n"
    ranks.set_log_level("info")  # which nobody hears
