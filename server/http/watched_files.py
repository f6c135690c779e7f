"""Files that may change while the server runs, such as keys and certificates."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

logger = logging.getLogger(__name__)


class WatchedFiles:
    """Files that belong together, and are read again when one of them changes."""

    def __init__(self, read: Callable[[], str], *files: str) -> None:
        """`read` reads the files again, and returns a description of their content. If they cannot be used, it raises
        `OSError` or `ValueError`, and changes nothing. Raises `OSError`.
        """
        self._read, self._files = read, files
        self._seen: tuple[tuple[int, int, int], ...] | None = self._look()

    def check(self, *, again: bool = False) -> None:
        """Read the files if one has changed; with `again` in any case.

        If they cannot be used, the previous content stays valid, and an error is logged.
        """
        names = ", ".join(self._files)
        state = None
        try:
            state = self._look()
            if again or state != self._seen:
                logger.info("read %s again: %s", names, self._read())
        except ValueError as error:  # until the next change
            logger.error("%s: invalid; the previous content stays valid: %s", names, error)
        except OSError as error:  # until they can be read
            state = None
            if again or self._seen is not None:
                logger.error("%s: cannot be read; the previous content stays valid: %s", names, error)
        self._seen = state

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        found = map(os.stat, self._files)
        return tuple((each.st_ctime_ns, each.st_size, each.st_ino) for each in found)
