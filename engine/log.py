"""The log format of all processes: time, level, process."""

from __future__ import annotations

import logging
import sys


def setup(level: str, process_name: str) -> None:
    """Log the `quire` loggers to stderr. `process_name` is shown in each line: api, core, rank 3."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{process_name}] %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("quire")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def printable(text: str) -> str:
    """Return a text from outside with its control characters escaped, so that it stays a part of one log line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
