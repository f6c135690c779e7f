"""Resolves the KV store of a host (`EngineOptions` → `KVStoreConfig`): the tiers of KV outside the devices. No
torch."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import stat
from ipaddress import IPv4Address, IPv6Address, ip_address

from quire.engine.config import devices
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig, KVStoreConfig, LoraConfig
from quire.engine.config.kv_layout import kv_layout, least_memory, place_bytes
from quire.engine.config.memory_plan import format_bytes
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_MEMORY_BYTES = 1 << 30
"""Default of --kv-offloading-size with --kv-disk, if that is no more than `_MEMORY_SHARE` of the free memory."""
_MEMORY_SHARE = 0.1
_MIB = 1 << 20
_PROMPTS = 4
"""Default of --kv-offloading-size with --prefill-replicas, with the same limit: this many prompts of the model's length
for each prefill replica of the host, since some are being computed while others are being loaded. If it is more,
`_WAITING_TOKENS` for each of --max-num-seqs: as many prompts may wait for decode replicas that are full."""
_WAITING_TOKENS = 1024
FILE_SHARE = 8
"""Each tier has room for at least this many files of the disk tier."""

logger = logging.getLogger(__name__)


def resolve(options: EngineOptions, config: EngineConfig, available: Devices) -> KVStoreConfig | None:
    """Return the tiers of this host; None: KV is on the devices alone. Raises `ConfigError`."""
    disk = None if options.kv_disk is None else _parse_disk(options.kv_disk)
    has_roles, parallel, name = options.prefill_replicas is not None, config.parallel, config.model.architecture.name
    if not options.kv_offloading_size and disk is None and not has_roles:
        for own in ("kv_peers", "kv_peer_port", "kv_peer_bandwidth", "kv_disk_bandwidth"):
            if getattr(options, own) is not None:
                own = f"--{own.replace('_', '-')}"
                raise ConfigError(f"{own} needs a KV store on this host: set --kv-offloading-size, or omit {own}")
        return None
    if disk is None and options.kv_disk_bandwidth is not None:
        raise ConfigError("--kv-disk-bandwidth limits writes to --kv-disk, which is not set; omit it")
    if options.kv_peer_port is not None and options.kv_peer_port >= 1 << 16:
        raise ConfigError(f"--kv-peer-port {options.kv_peer_port}: expected a port, at most 65535")
    tier = "--kv-offloading-size" if options.kv_offloading_size else "--kv-disk" if disk is not None else ""
    flag = "--prefill-replicas" if has_roles else tier
    if has_roles and config.model.pooling is not None:
        raise ConfigError(f"{flag}: {name} does not generate text, so there is nothing to decode; omit {flag}")
    if not config.cache.enable_prefix_caching:
        is_off = not options.enable_prefix_caching
        reason = "it is off (--no-enable-prefix-caching)" if is_off else f"{name} cannot use it"
        raise ConfigError(f"{flag} needs the prefix cache, and {reason}; omit {flag}")
    if options.kv_offloading_size == 0:
        raise ConfigError(
            f"--kv-offloading-size 0 with {flag}: KV passes through the host's memory; use at least 0.1, or omit it"
        )
    if not parallel.local_replicas:
        if tier:
            text = "%s has no effect on this host, which has no replicas; set it on the hosts that have some"
            logger.warning(text, tier)
        return None
    if parallel.node != parallel.first_node:
        logger.info(
            "this host's ranks use the KV store of node %d: sizes and paths that are set here have no effect",
            parallel.first_node,
        )
        return KVStoreConfig(memory_bytes=0)
    longest = _prompt_bytes(config, config.model.max_model_len)
    least = least_memory([kind.size for kind in kv_layout(config).kinds])
    if options.kv_offloading_size is not None:
        if not math.isfinite(size := options.kv_offloading_size * (1 << 30)):
            raise ConfigError(f"--kv-offloading-size {options.kv_offloading_size}: expected GiB, such as 64")
        memory_bytes = int(size)
    else:
        is_elsewhere = available.kind == "cuda" or parallel.ray
        free = devices.free_host_memory() if is_elsewhere else available.memory
        wanted = max(_handed_over_bytes(config), least) if has_roles else 0
        memory_bytes = min(max(wanted, _MEMORY_BYTES if disk else 0), int(free * _MEMORY_SHARE))
        if has_roles:
            logger.info(
                "up to %s of the host's memory holds KV on its way between replicas%s; --kv-offloading-size sets it",
                format_bytes(memory_bytes),
                f", a tenth of the free memory, though prompts may need {format_bytes(wanted)}"
                * (memory_bytes < wanted),
            )
    path, disk_bytes = disk or ("", 0)
    if path and disk_bytes < memory_bytes:
        logger.warning(
            "--kv-disk %s: %s is less than the %s of memory (--kv-offloading-size), so the disk adds "
            "little; use a larger size",
            *(options.kv_disk, format_bytes(disk_bytes), format_bytes(memory_bytes)),
        )
    return KVStoreConfig(
        memory_bytes=memory_bytes,
        num_tokens=(memory_bytes + disk_bytes) * config.model.max_model_len // longest,
        disk_path=path,
        disk_bytes=disk_bytes,
        disk_bandwidth=(options.kv_disk_bandwidth or 0.0) * _MIB,
        peers=_parse_peers(options.kv_peers or "", parallel.cluster_token),
        peer_port=options.kv_peer_port or 0,
        peer_bandwidth=(options.kv_peer_bandwidth or 0.0) * _MIB,
    )


def _handed_over_bytes(config: EngineConfig) -> int:
    """The memory for `_PROMPTS`, or for prompts that wait. A host without prefill replicas counts as having one: it may
    get one later, or load from other hosts."""
    parallel, length = config.parallel, config.model.max_model_len
    count = _PROMPTS * max(1, sum(parallel.role_of(each) == "prefill" for each in parallel.local_replicas))
    waiting = config.scheduler.max_num_seqs * _prompt_bytes(config, min(length, _WAITING_TOKENS))
    return max(count * _prompt_bytes(config, length), waiting)


def _prompt_bytes(config: EngineConfig, length: int) -> int:
    """The memory for a prompt of `length` tokens."""
    used = 0
    for kind in kv_layout(config).kinds:
        group = config.cache.groups[kind.groups[0]]
        # Only few blocks of a prompt have entries of states, and of windows that fill pages.
        tokens = min(length, kind.window or length) if group.is_state or group.fills_pages else length
        used += place_bytes(kind.size) * -(-tokens // config.cache.block_size)
    return used


def check_layouts(config: EngineConfig, prefill: EngineConfig) -> None:
    """Check that replicas with these two layouts can share entries."""
    if kv_layout(config).signature != kv_layout(prefill).signature:
        raise ConfigError(
            "--prefill-tensor-parallel-size, --prefill-pipeline-parallel-size: replicas share the KV of "
            f"{config.model.architecture.name} only if they have the same number of ranks; omit them"
        )


def check_size(config: EngineConfig) -> None:
    """Check that the memory has room for an entry of each kind and one more, and the disk for some files."""
    if config.kv_store is None or not config.kv_store.memory_bytes:
        return
    sizes = [kind.size for kind in kv_layout(config).kinds]
    if config.kv_store.memory_bytes < (least := least_memory(sizes)):
        raise ConfigError(
            f"--kv-offloading-size: {format_bytes(config.kv_store.memory_bytes)} is too little for entries of up to "
            f"{format_bytes(max(sizes))} in {len(sizes)} kind{'s' * (len(sizes) > 1)}; use at least {_gib(least)}"
        )
    if config.kv_store.disk_path and config.kv_store.disk_bytes < (least := FILE_SHARE * max(sizes)):
        raise ConfigError(
            f"--kv-disk {config.kv_store.disk_path}: {format_bytes(config.kv_store.disk_bytes)} is too little for "
            f"{FILE_SHARE} files with entries of up to {format_bytes(max(sizes))}; use at least {_gib(least)}"
        )


def check_host(store: KVStoreConfig | None, lora: LoraConfig | None, ranks: int, available: Devices) -> None:
    """Check that this host, which has `ranks` GPU ranks, has enough memory for KV and adapters. On CPUs, this memory is
    part of the ranks' memory plan, unless Ray places the ranks."""
    if store is None or not store.memory_bytes or available.capability is not None:  # described, of another host
        return
    adapters = 0 if lora is None else lora.host_bytes * ranks
    if store.memory_bytes + adapters > (free := devices.free_host_memory()):
        beside = f", of which adapters may take {format_bytes(adapters)} (--lora-memory)" * (adapters > 0)
        raise ConfigError(
            f"--kv-offloading-size {store.memory_bytes / (1 << 30):g} (GiB): the host has {format_bytes(free)} of free "
            f"memory{beside}"
        )


def check_disk(store: KVStoreConfig | None) -> None:
    """Check that this user, and no other one, can create or write the folder of the disk tier, and that its file system
    is large enough."""
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
            f"--kv-disk {store.disk_path}: {format_bytes(store.disk_bytes)} is more than the {format_bytes(size)} of "
            "its file system"
        )


def why_untrusted(folder: str) -> str:
    """Return why users other than this one and root could change files in a folder of the disk tier, and what to do;
    empty: they could not, or it does not exist. Raises `OSError`."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user ({status.st_uid}), who could change answers; use a folder of your own"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {folder}, and could change answers; use chmod go-w {folder}, or a new folder in it"
    return ""


def ip_of(address: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address in `HOST:PORT`, where an IPv6 address has brackets; None: the host is a name."""
    try:
        return ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def _is_address(address: str) -> bool:
    """Whether a text is `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    label = r"[a-z0-9]([\w-]{0,61}[a-z0-9])?"
    is_name = re.fullmatch(rf"{label}(\.{label})*\.?", host, re.ASCII | re.IGNORECASE)
    if not is_name and not (host.startswith("[") and host.endswith("]") and ip_of(address)):
        return False
    return re.fullmatch(r"[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16


def _parse_peers(text: str, token: str) -> tuple[str, ...]:
    """Return the addresses of --kv-peers. Without a token, they must be on this host."""
    addresses = [each.strip() for each in text.split(",") if each.strip()]
    for address in addresses:
        if not _is_address(address):
            raise ConfigError(f"--kv-peers {address}: expected HOST:PORT, such as 10.0.0.7:29560")
        ip = ip_of(address)
        if not token and not (address.startswith("localhost:") if ip is None else ip.is_loopback):
            raise ConfigError(
                f"--kv-peers {address}: connections to other hosts need a --cluster-token, the same on all of them"
            )
    # Stores without a token listen at 127.0.0.1, but "localhost" may mean ::1.
    return tuple(dict.fromkeys(re.sub("^localhost:", "127.0.0.1:", each) for each in addresses))


def _gib(size: int) -> str:
    """Format a minimum of bytes as the value of a flag in GiB, rounded up."""
    return f"{math.ceil(size / (1 << 30) * 100) / 100:g}"


def _parse_disk(text: str) -> tuple[str, int]:
    """Return the absolute path of the folder, and the bytes."""
    path, _, size = text.rpartition(":")
    try:
        gib = float(size)
    except ValueError:
        gib = math.nan
    if not path or not 0 < gib * (1 << 30) < math.inf:
        raise ConfigError(f"--kv-disk {text}: expected PATH:GIB, GIB a number above 0, such as /var/cache/quire-kv:200")
    if "://" in path:
        raise ConfigError(f"--kv-disk {text}: expected the path of a folder; mount the storage, and give its path")
    return os.path.abspath(os.path.expanduser(path)), int(gib * (1 << 30))
