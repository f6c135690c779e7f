"""Positions of a prompt with images and videos, for models whose rotary embedding has one along each of time, height
and width (M-RoPE; Qwen2-VL, Wang et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.engine.protocol.media import MediaItem


def place_positions(items: Iterable[MediaItem], length: int, axes: int) -> npt.NDArray[np.int64]:
    """int64 `[axes, length]`, the positions of the prompt's `length` tokens as `MediaSpec.place_axes` says. Runs of a
    single feature are text."""
    positions, number = np.tile(np.arange(length, dtype=np.int64), (axes, 1)), 0
    for item in items:
        for run in item.runs:
            if run.length > 1 and run.grid[0]:
                start = item.offset + run.start
                _, rows, columns = np.indices(run.grid, np.int64).reshape(3, -1)
                positions[-3:, start : start + run.length] = columns, rows, np.full_like(rows, number)
                number += 1
    return positions


def media_positions(items: Iterable[MediaItem], length: int, tokens_per_second: float = 0.0) -> npt.NDArray[np.int64]:
    """int64 `[3, length]`, the positions along time, height and width of the prompt's `length` tokens.

    Text advances all three by 1. A run of features with a grid has, from the next position on, the coordinates of each
    feature; with `tokens_per_second`, times of videos are in the unit of 1 / tokens_per_second seconds. The token
    behind it has the smallest position above all of these, along each axis. (As Qwen2-VL was trained; transformers 5.24
    leaves out times, so that text behind a video of more frames than rows and columns overlaps with it.)
    """
    positions = np.empty((3, length), np.int64)
    at = base = 0
    for item in items:
        for run in item.runs:
            if not run.grid[0]:
                continue  # as text
            start = item.offset + run.start
            positions[:, at:start] = np.arange(base, base + start - at)
            base += start - at
            at = start + run.length
            grid = np.indices(run.grid, np.int64).reshape(3, -1)
            if tokens_per_second and item.kind == "video":
                interval = np.float32(tokens_per_second) * np.float32(item.seconds_per_frame)
                grid[0] = (grid[0].astype(np.float32) * interval).astype(np.int64)
            positions[:, start:at] = base + grid
            base += int(grid.max()) + 1
    positions[:, at:] = np.arange(base, base + length - at)
    return positions
