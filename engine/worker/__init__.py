"""Ranks. Importing this package imports torch."""

from __future__ import annotations

import time

_begun = time.perf_counter()
import torch  # noqa: E402, F401

IMPORT_SECONDS = time.perf_counter() - _begun
"""Seconds that importing torch has taken."""
