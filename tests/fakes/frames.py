"""Frames that no process sends."""

from __future__ import annotations

import msgspec

DEEP = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
"""Lists in lists; where a message has more fields than its receiver knows, it is nested too deeply to be skipped."""
