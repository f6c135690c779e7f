"""The view that other users of a host have of a process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from quire.engine.process import current_process
print(current_process.hide_arguments(["s=1", "secret", "k", ""]), current_process.hide_arguments(["other"]))
print(open("/proc/self/cmdline").read().split(chr(0))[3:])
"""


def test_secrets_among_the_arguments() -> None:
    arguments = ["--api-key", "secret", "k", "--api-key=s=1", "--config", "secrets", "", "ü"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "True False",
        "['--api-key', '******', '*', '--api-key=***', '--config', 'secrets', '', 'ü', '']",
    ], done.stderr
