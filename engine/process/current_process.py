"""Settings and properties of the current process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def share_cores() -> None:
    """Let the OpenMP threads of torch's operations sleep while they wait, because the kernels' threads need the cores.

    Must be called before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """For imports when a process starts: no garbage collections now, and later ones do not visit the imported objects.

    Importing torch makes hundreds, which take a seventh of its time, as each visits everything imported so far.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def watch_stdin(on_end: Callable[[], None]) -> None:
    """Call `on_end`, in a thread, when standard input closes, as it does when the process at its other end exits."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        on_end()

    threading.Thread(target=watch, daemon=True, name="stdin-watch").start()


def set_name(name: str) -> None:
    """Set the process name shown in ps and top; the kernel keeps 15 characters."""
    Path("/proc/self/comm").write_text(name)


def hide_arguments(secrets: Iterable[str]) -> bool:
    """Overwrite these command-line arguments, which every user of the host can read (ps), with asterisks.

    Returns whether there were any. The kernel shows the memory of the arguments (proc(5): arg_start, arg_end).
    """
    arguments = hidden = Path("/proc/self/cmdline").read_bytes()
    for secret in filter(None, map(os.fsencode, secrets)):
        # a whole argument, or what follows an equals sign
        hidden = re.sub(rb"(?<=[\0=])" + re.escape(secret) + rb"(?=\0)", b"*" * len(secret), hidden)
    if hidden == arguments:
        return False
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])
    with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:  # a sandbox may forbid it
        memory.seek(begin)
        memory.write(hidden)
    return True


def age() -> float:
    """Seconds since the kernel started this process (proc(5), field starttime)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
