"""One log format for every process: time, level, who speaks."""

from __future__ import annotations

import logging
import sys


def setup(level: str, who: str) -> None:
    """Send the `quire` loggers to stderr. `who` is the process: api, core, rank 3."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{who}] %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("quire")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
