"""What the fork server of ranks imports before it forks them."""

from __future__ import annotations

from quire.engine import process

with process.imports():
    import quire.engine.worker.worker  # noqa: F401
