"""Modules that the fork server of ranks imports before it forks them."""

from __future__ import annotations

from quire.engine.process import current_process

with current_process.imports():
    import quire.engine.worker.worker  # noqa: F401
