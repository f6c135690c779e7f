"""`quire kv`: what the disk tiers of servers (`--kv-disk`) have stored. Servers may run meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from quire.engine.config.memory_plan import format_bytes
from quire.engine.config.options import flag
from quire.engine.kv_store import disk
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.server.config import flags

_SHOWN = 12
"""Characters of a signature that are printed."""


@dataclass(frozen=True, kw_only=True)
class StoreCommandOptions:
    """Options of `quire kv`."""

    signature: str | None = flag(
        None, "only the model whose signature, which list prints, begins with this", metavar="HEX"
    )


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "action",
        choices=["list", "verify", "clear"],
        metavar="ACTION",
        help="list: print what is stored, by model; verify: read all files, and name the damaged ones, with exit code "
        "1 if there are any; clear: remove all files",
    )
    parser.add_argument("path", metavar="PATH", help="folder of the tier, as in --kv-disk PATH:GIB")
    flags.add_flags(parser, StoreCommandOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """List, verify or clear. Returns 1 if files are damaged, otherwise 0."""
    path, signature = Path(parsed.path).expanduser(), flags.collect(parsed, StoreCommandOptions).signature
    if signature == "":
        raise ConfigError("--signature is empty: give the beginning of a signature, or omit it for all models")
    prefix, denied = (signature or "").lower(), list[str]()

    def may_skip(name: str) -> bool:
        denied.append(name)
        return bool(parsed.action == "list")

    if not path.is_dir():
        raise ConfigError(f"{parsed.path}: no such folder")
    models: defaultdict[Path, dict[Path, os.stat_result]] = defaultdict(dict)
    try:
        for file, status in sorted(disk.files_below(path, may_skip).items()):
            if file.parent.name.startswith(prefix):
                models[file.parent][file] = status
        if prefix and not models:
            raise ConfigError(f"--signature {prefix}: there is nothing of such a model in {parsed.path}")
        action = {"list": _list, "verify": _verify, "clear": _clear}[parsed.action]
        result = action(parsed.path, models)
        if denied:
            print(f"folders that this user may not read: {len(denied):,}")
        return result
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {reason_of(error)}; check its permissions") from None


def _list(path: str, models: dict[Path, dict[Path, os.stat_result]]) -> int:
    total = sum(status.st_size for files in models.values() for status in files.values())
    print(f"{path}: {format_bytes(total)}, models: {len(models)}")
    rows, unread = [("signature", "files", "entries", "size", "last used", "model")], 0
    for folder, files in models.items():
        entries = 0
        for file in files:
            if file.suffix == ".kv":
                try:
                    entries += disk.count_entries(file)
                except FileNotFoundError:
                    """Removed in this moment."""
                except (OSError, disk.DamagedFile):
                    unread += 1
        size = format_bytes(sum(status.st_size for status in files.values()))
        used = _age(time.time() - max(status.st_mtime for status in files.values()))
        name = folder.name[:_SHOWN]
        rows.append((name, f"{len(files):,}", f"{entries:,}", size, used, disk.model_of(folder)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers, model in rows if models else ():
        cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))
        print("  ".join([first.ljust(widths[0]), *cells, model]))
    if unread:
        print(f"files that cannot be read: {unread:,}; quire kv verify {path} names them")
    return 0


def _verify(path: str, models: dict[Path, dict[Path, os.stat_result]]) -> int:
    files = {file: status for found in models.values() for file, status in found.items() if file.suffix == ".kv"}
    total, damaged = sum(status.st_size for status in files.values()), 0
    with tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="verifying", leave=False, disable=None
    ) as bar:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # a server has removed it
                if reason := _damage_of(file, bar.update):
                    damaged += 1
                    tqdm.write(f"{file}: {reason}")
    print(f"{path}: {len(files):,} files with {format_bytes(total)}, {damaged:,} damaged")
    return 1 if damaged else 0


def _damage_of(file: Path, on_bytes: Callable[[int], object]) -> str:
    try:
        return disk.find_damage(file, on_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"


def _clear(path: str, models: dict[Path, dict[Path, os.stat_result]]) -> int:
    count = size = 0
    for folder, files in models.items():
        for file, status in files.items():
            file.unlink(missing_ok=True)
            count, size = count + 1, size + status.st_size
        disk.remove_folder(folder)
    print(f"{path}: removed {count:,} files, {format_bytes(size)}")
    return 0


def _age(seconds: float) -> str:
    """A time ago, in its largest unit."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"
