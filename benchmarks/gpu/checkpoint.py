"""Create a checkpoint of random weights on the fastest local disk, and evict it from the page cache."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import Shape, is_norm, tensor_sizes

_FILE_BYTES = 4 << 30
_PROBE_BYTES = 64 << 20
_IN_MEMORY = ("tmpfs", "ramfs")


def write_weights(shape: Shape, folder: Path, dtype: torch.dtype, device: str) -> int:
    """Write random weights in files of a few GiB with their index, synced to disk; returns the bytes."""
    torch.manual_seed(0)
    files: dict[str, str] = {}
    total = 0
    for number, names in enumerate(_by_file(shape, dtype.itemsize)):
        tensors: dict[str, Any] = {}
        for name in names:
            tensor = torch.empty(tensor_sizes(shape)[name], dtype=dtype, device=device)
            tensors[name] = (tensor.fill_(1) if is_norm(name) else tensor.normal_(std=0.02)).cpu()
            total += tensor.nbytes
        path = folder / f"model-{number:05}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        files |= dict.fromkeys(names, path.name)
        _flush(path)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _by_file(shape: Shape, width: int) -> list[list[str]]:
    """Lists of tensor names, one list per file."""
    sizes = {name: math.prod(size) * width for name, size in tensor_sizes(shape).items()}
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
    return [list(names) for _, names in itertools.groupby(sizes, key=lambda name: ends[name] // _FILE_BYTES)]


def weight_bytes(shape: Shape, width: int) -> int:
    return width * sum(math.prod(size) for size in tensor_sizes(shape).values())


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def forget(paths: Iterable[Path]) -> None:
    """Evict files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fastest_disk(needed: int) -> Path | None:
    """A folder on the local disk with the fastest writes and `needed` free bytes, or None.

    File systems in memory or on a network do not count.
    """
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home(), Path.cwd()]
    candidates += [mount for mount, kind in _mounts() if kind in ("ext4", "xfs", "btrfs", "zfs", "overlay")]
    found: dict[int, tuple[float, Path]] = {}
    for folder in candidates:
        try:
            disk = folder.stat().st_dev
            if disk in found or _kind_of(folder) in _IN_MEMORY or shutil.disk_usage(folder).free < needed:
                continue
            found[disk] = _write_rate(folder), folder
        except OSError:  # not writable
            continue
    return max(found.values())[1] if found else None


def _write_rate(folder: Path) -> float:
    """Bytes per second of writing, including sync to disk."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        file.write(os.urandom(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / (time.perf_counter() - begun)


def _mounts() -> list[tuple[Path, str]]:
    """Mount points and file system types (proc(5), /proc/mounts)."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [(Path(fields[1]), fields[2]) for fields in lines]


def _kind_of(folder: Path) -> str:
    above = [(len(mount.parts), kind) for mount, kind in _mounts() if folder.absolute().is_relative_to(mount)]
    return max(above)[1] if above else ""
