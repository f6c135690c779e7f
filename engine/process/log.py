"""The log format of all processes: time, level, process."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable

from quire.engine.protocol.stats import LogRecord

_MAX_CHARACTERS = 1000
"""Maximum length of a message that is kept, and of the text of its exception."""


class RecentWarnings(logging.Handler):
    """Keeps the last warnings and errors of this process, and of processes that send theirs to it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.source = ""
        """The name of this process."""
        self.records: deque[LogRecord] = deque(maxlen=50)
        """Threads append to it: copy it before a loop."""
        self.keep: Callable[[LogRecord], None] = self.records.append

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:_MAX_CHARACTERS]
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {record.exc_info[1]!r}"[:_MAX_CHARACTERS]
            self.keep(LogRecord(record.created, record.levelname.lower(), text, self.source))
        except Exception:
            self.handleError(record)

    def take(self) -> list[LogRecord]:
        """Return the records and forget them."""
        return [self.records.popleft() for _ in range(len(self.records))]


RECENT = RecentWarnings()


def setup(level: str, process_name: str) -> None:
    """Log the `quire` loggers to stderr. `process_name` is shown in each line: api, core, rank 3."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{process_name}] %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("quire")
    RECENT.source = process_name
    logger.handlers[:] = [handler, RECENT]
    logger.setLevel(level.upper())
    logger.propagate = False


def printable(text: str) -> str:
    """Return a text from outside with its control characters escaped, so that it stays a part of one log line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
