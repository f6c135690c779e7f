"""The start of a supervised process: `python -m quire.engine.process.supervised MODULE [IMPORT …]` (see `supervisor`).

Runs `main` of MODULE, after it has imported the other modules, which MODULE will need later.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator

from quire.engine.process import current_process


def main() -> None:
    """Import everything, then run the module."""
    # The supervisor decides when this process ends. Service managers send signals to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    module, *others = sys.argv[1:]
    current_process.share_cores()
    with current_process.imports():
        with _single_threaded_blas():
            entry = importlib.import_module(module)
        for other in others:
            importlib.import_module(other)
    sys.exit(entry.main())


@contextlib.contextmanager
def _single_threaded_blas() -> Iterator[None]:
    """While numpy is imported: its OpenBLAS, which is not used, would start threads that spin. torch may have its own,
    which is used."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    yield
    os.environ.pop(name)
    if before is not None:
        os.environ[name] = before


if __name__ == "__main__":
    main()
