"""The name that Quire is installed under, and its version."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "quire-llm"
"""What pip installs; another project's package is named `quire`."""


def version() -> str:
    """Raises `importlib.metadata.PackageNotFoundError` in a checkout that is not installed."""
    return importlib.metadata.version(DISTRIBUTION)
