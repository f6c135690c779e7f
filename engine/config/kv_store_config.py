"""Resolves the KV store of a host (`EngineOptions` → `KVStoreConfig`): the tiers of KV below the devices. No torch."""

from __future__ import annotations

import logging
import math
import os
import shutil
import stat

from quire.engine.config import devices
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    KVStoreConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
)
from quire.engine.config.kv_layout import kv_layout, least_memory
from quire.engine.config.memory_plan import format_bytes
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_MEMORY_BYTES = 1 << 30
"""Default of --kv-offloading-size with --kv-disk, if that is no more than `_MEMORY_SHARE` of the free memory."""
_MEMORY_SHARE = 0.1
FILE_SHARE = 8
"""Each tier has room for at least so many files of the disk tier."""

logger = logging.getLogger(__name__)


def resolve(
    options: EngineOptions, model: ModelConfig, parallel: ParallelConfig, cache: CacheConfig, available: Devices
) -> KVStoreConfig | None:
    """Return the tiers of this host; None: KV is on the devices alone. Raises `ConfigError`."""
    disk = None if options.kv_disk is None else _parse_disk(options.kv_disk)
    if not options.kv_offloading_size and disk is None:
        return None
    flag = "--kv-offloading-size" if options.kv_offloading_size else "--kv-disk"
    if not cache.enable_prefix_caching:
        reason = (
            "it was turned off" if not options.enable_prefix_caching else f"{model.architecture.name} cannot use it"
        )
        raise ConfigError(f"{flag} keeps what is in the prefix cache, and {reason}; omit {flag}")
    if parallel.executor == "ray" or parallel.nodes > 1:
        how = "that Ray starts" if parallel.executor == "ray" else "that span hosts"
        raise ConfigError(
            f"{flag} is not supported for replicas {how}, as each host has a store of its own; omit it, or use as many "
            "--data-parallel-size as --nnodes"
        )
    if options.kv_offloading_size == 0:
        raise ConfigError(
            "--kv-offloading-size 0 with --kv-disk: files are read and written by way of the host's memory; use at "
            "least 0.1"
        )
    if not parallel.local_replicas:
        logger.warning("%s has no effect on this host, which has no replicas; set it on the hosts that have some", flag)
        return None
    if options.kv_offloading_size is not None:
        if not math.isfinite(size := options.kv_offloading_size * (1 << 30)):
            raise ConfigError(f"--kv-offloading-size {options.kv_offloading_size}: expected GiB, such as 64")
        memory_bytes = int(size)
    else:
        free = available.memory if available.kind == "cpu" else devices.free_host_memory()
        memory_bytes = min(_MEMORY_BYTES, int(free * _MEMORY_SHARE))
    path, disk_bytes = disk or ("", 0)
    if path and disk_bytes < memory_bytes:
        logger.warning(
            "--kv-disk %s: %s are less than the %s of memory (--kv-offloading-size), so that memory has "
            "most of what is on disk; use a larger size",
            *(options.kv_disk, format_bytes(disk_bytes), format_bytes(memory_bytes)),
        )
    return KVStoreConfig(memory_bytes=memory_bytes, disk_path=path, disk_bytes=disk_bytes)


def check_size(config: EngineConfig) -> None:
    """Check that the memory holds an entry of each kind, and one that is on its way, and the disk some files."""
    if config.kv_store is None:
        return
    sizes = [kind.size for kind in kv_layout(config).kinds]
    if config.kv_store.memory_bytes < (least := least_memory(sizes)):
        raise ConfigError(
            f"--kv-offloading-size: {format_bytes(config.kv_store.memory_bytes)} are too few for entries of up to "
            f"{format_bytes(max(sizes))} in {len(sizes)} kind{'s' * (len(sizes) > 1)}; use at least {_gib(least)}"
        )
    if config.kv_store.disk_path and config.kv_store.disk_bytes < (least := FILE_SHARE * max(sizes)):
        raise ConfigError(
            f"--kv-disk {config.kv_store.disk_path}: {format_bytes(config.kv_store.disk_bytes)} are too few for "
            f"{FILE_SHARE} files with entries of up to {format_bytes(max(sizes))}; use at least {_gib(least)}"
        )


def check_host(store: KVStoreConfig | None, lora: LoraConfig | None, ranks: int, available: Devices) -> None:
    """Check that this host, whose `ranks` have GPUs, has the memory for KV, beside the memory for adapters; the memory
    of CPUs is planned."""
    if store is None or available.capability is not None:  # described, of another host
        return
    adapters = 0 if lora is None else lora.host_bytes * ranks
    if store.memory_bytes + adapters > (free := devices.free_host_memory()):
        beside = f", of which adapters may take {format_bytes(adapters)} (--lora-memory)" * (adapters > 0)
        raise ConfigError(
            f"--kv-offloading-size {store.memory_bytes / (1 << 30):g} (GiB): the host has {format_bytes(free)} of free "
            f"memory{beside}"
        )


def check_disk(store: KVStoreConfig | None) -> None:
    """Check that the folder of the disk tier can be made or written, by this user alone, and that its file system is as
    large."""
    if store is None or not store.disk_path:
        return
    folder = store.disk_path
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ConfigError(f"--kv-disk {store.disk_path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--kv-disk {store.disk_path}: this user cannot write to {folder}")
    if reason := why_untrusted(store.disk_path):
        raise ConfigError(f"--kv-disk {store.disk_path}: {reason}")
    if store.disk_bytes > (size := shutil.disk_usage(folder).total):
        raise ConfigError(
            f"--kv-disk {store.disk_path}: {format_bytes(store.disk_bytes)} are more than the {format_bytes(size)} of "
            "its file system"
        )


def why_untrusted(folder: str) -> str:
    """Return why others than this user and root may change what is in a folder of the disk tier, and what to do; empty:
    they may not, or it does not exist. Raises `OSError`."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user ({status.st_uid}), who could change answers; use a folder of your own"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {folder}, and could change answers; use chmod go-w {folder}, or a new folder in it"
    return ""


def _gib(size: int) -> str:
    """Format a least number of bytes as the value of a flag."""
    return f"{math.ceil(size / (1 << 30) * 100) / 100:g}"


def _parse_disk(text: str) -> tuple[str, int]:
    """Return the absolute path of the folder, and the bytes."""
    path, _, size = text.rpartition(":")
    try:
        gib = float(size)
    except ValueError:
        gib = math.nan
    if not path or not 0 < gib * (1 << 30) < math.inf:
        raise ConfigError(f"--kv-disk {text}: expected PATH:GIB, such as /var/cache/quire-kv:200")
    return os.path.abspath(os.path.expanduser(path)), int(gib * (1 << 30))
