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
