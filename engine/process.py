"""What a process of ours says of itself."""

from __future__ import annotations

import os
import time
from pathlib import Path


def share_cores() -> None:
    """Have OpenMP's threads, of torch's own operations, sleep while they wait: the kernels' threads need the cores.

    To be called before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def set_name(name: str) -> None:
    """Show this process as `name` in ps and top; the kernel keeps 15 characters."""
    Path("/proc/self/comm").write_text(name)


def age() -> float:
    """Seconds since the kernel started this process (proc(5), field starttime)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
