"""Starting the engine-core process. No torch here: this is all that the server knows of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass

from quire.engine.config import EngineConfig


@dataclass(frozen=True)
class Endpoints:
    """ZMQ addresses. The core of replica `r` binds `requests[r]`, API process `i` binds `responses[i]` (PULL, both).

    Frames are msgpack of `messages.ToCore` and `messages.ToServer`.
    """

    requests: tuple[str, ...]
    responses: tuple[str, ...]


def start_core(config: EngineConfig, endpoints: Endpoints, log_level: str = "info") -> subprocess.Popen[bytes]:
    """Start the core as a process of its own (not a fork: the caller's `__main__` is not imported again).

    It ends by itself when this process does, because its standard input closes. It sends `Ready`, or `Dead` with the
    reason, to every API process.
    """
    command = [sys.executable, "-P", "-m", "quire.engine.core"]  # -P: nothing is imported from the current folder
    core = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert core.stdin is not None
    core.stdin.write(pickle.dumps((config, endpoints, log_level)))
    core.stdin.flush()
    return core
