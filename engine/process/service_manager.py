"""Tells a service manager such as systemd how the server is: the protocol of sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket
import time

_SEND_SECONDS = 1.0
"""Time to wait for a service manager that is busy."""


class ServiceManager:
    """The service manager that has started this process, if there is one (`NOTIFY_SOCKET`)."""

    def __init__(self) -> None:
        given = os.environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{given[1:]}" if given.startswith("@") else given
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        is_mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._interval = int(microseconds) / 2e6 if is_mine and microseconds.isdecimal() else 0.0
        """Seconds between two signs of life; 0: none is expected."""
        self._next = 0.0

    def notify(self, *assignments: str) -> None:
        """Send `READY=1`, `STATUS=TEXT` and the like; dropped if nobody listens."""
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.sendto("\n".join(" ".join(each.split()) for each in assignments).encode(), self._address)

    def reloading(self) -> None:
        """Report the begin of a reload, which the next `READY=1` ends."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def beat(self) -> None:
        """Send a sign of life when it is time, so that a process that hangs is restarted (`WatchdogSec=`)."""
        if self._interval and (now := time.monotonic()) >= self._next:
            self._next = now + self._interval
            self.notify("WATCHDOG=1")
