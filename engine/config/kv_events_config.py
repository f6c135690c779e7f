"""Resolves how replicas tell routers which KV blocks they have (`EngineOptions` → `KVEventsConfig`). No torch."""

from __future__ import annotations

import os
import re
from typing import Any

from quire.engine.architecture.attention_spec import AttentionSpec, CompressedAttentionSpec, MLASpec
from quire.engine.config.engine_config import EngineConfig, KVCacheGroup, KVEventsConfig
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError

_FLAG = "--kv-events-config"
_DEFAULTS: dict[str, Any] = {
    "enable_kv_cache_events": False,
    "publisher": None,
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10_000,
    "hwm": 100_000,
    "max_queue_size": 100_000,
    "topic": "",
}
"""The fields of vLLM's `KVEventsConfig`, with its defaults."""
_ENDPOINT = re.compile(r"tcp://.+:(\d+)|ipc://[^\0\n]+")
_HASH_SEED = "vllm-none-hash"
"""vLLM's, without PYTHONHASHSEED."""


def resolve(options: EngineOptions, config: EngineConfig) -> KVEventsConfig | None:
    """Return how events are published; None: they are not. Raises `ConfigError`."""
    if options.kv_events_config is None:
        return None
    given = dict(options.kv_events_config)
    if unknown := given.keys() - _DEFAULTS.keys():
        raise ConfigError(
            f"{_FLAG}: the field {min(unknown)} is not supported; there are {', '.join(_DEFAULTS)}",
        )
    fields = _DEFAULTS | given
    for name, default in _DEFAULTS.items():
        value = fields[name]
        kind = str if default is None else type(default)
        if type(value) is not kind and not (value is None and default is None):
            raise ConfigError(f"{_FLAG}: {name} must be {_TYPES[kind]}, got {value!r}")
        least = int(name == "max_queue_size")
        if kind is int and isinstance(value, int) and value < least:
            raise ConfigError(f"{_FLAG}: {name} must be at least {least}, got {value}")
    if fields["publisher"] not in (None, "zmq", "null"):
        raise ConfigError(f"{_FLAG}: publisher must be zmq or null, got {fields['publisher']!r}")
    for name in ("endpoint", "replay_endpoint"):
        if fields[name] is None:
            continue
        found = _ENDPOINT.fullmatch(fields[name])
        if found is None or int(found[1] or 0) > 65535:
            raise ConfigError(
                f"{_FLAG}: {name} must be a ZMQ address such as {_DEFAULTS['endpoint']} or ipc://PATH, got "
                f"{fields[name]!r}"
            )
    check_endpoints(fields["endpoint"], fields["replay_endpoint"], config.parallel.replicas)
    if not fields["enable_kv_cache_events"] or fields["publisher"] == "null":
        return None
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            f"{_FLAG}: there are no events without prefix caching, which is "
            + ("not supported for this model" if options.enable_prefix_caching else "off (--no-enable-prefix-caching)")
        )
    return KVEventsConfig(
        endpoint=fields["endpoint"],
        replay_endpoint=fields["replay_endpoint"],
        buffer_steps=fields["buffer_steps"],
        hwm=fields["hwm"],
        max_queue_size=fields["max_queue_size"],
        topic=fields["topic"],
        hash_seed=os.environ.get("PYTHONHASHSEED", _HASH_SEED),
        kinds=tuple(_kind(config, group) for group in config.cache.groups),
    )


def check_endpoints(endpoint: str, replay_endpoint: str | None, replicas: int) -> None:
    """Check that so many replicas have ports or paths of their own. Raises `ConfigError`."""
    if endpoint == replay_endpoint and re.match(r"ipc://[^*]", endpoint):  # ZeroMQ chooses a path for each `*`
        raise ConfigError(f"{_FLAG}: endpoint and replay_endpoint must be different paths, got {endpoint} for both")
    found = [each.rpartition(":")[2] for each in (endpoint, replay_endpoint) if each and each.startswith("tcp:")]
    ports = [port for port in map(int, found) if port]
    if ports and (highest := max(ports) + replicas - 1) > 65535:
        raise ConfigError(
            f"{_FLAG}: replica N uses the port {max(ports)} + N, which is up to {highest} with {replicas} replicas; "
            f"choose a port up to {65536 - replicas}"
        )
    if len(ports) == 2 and abs(ports[0] - ports[1]) < replicas:
        raise ConfigError(
            f"{_FLAG}: replica N uses the ports {ports[0]} + N (endpoint) and {ports[1]} + N (replay_endpoint); choose "
            f"ports that are at least {replicas} apart"
        )


_TYPES: dict[type, str] = {bool: "true or false", int: "a number", str: "a string"}


def _kind(config: EngineConfig, group: KVCacheGroup) -> tuple[str, int | None]:
    """The kind and the window of a group of layers, as in vLLM's `KVCacheSpecKind`."""
    if group.is_state:
        return "mamba", None
    layers = [layer for each in config.with_drafter for layer in each.model.architecture.layers]
    numbers = [number for stage in group.layers for number in stage]
    attention = layers[numbers[0]].attention if numbers else None
    is_latent = isinstance(attention, MLASpec | CompressedAttentionSpec)
    if group.window is None:
        return "mla_attention" if is_latent else "full_attention", None
    is_chunked = isinstance(attention, AttentionSpec) and attention.is_chunked
    kind = "sliding_window_mla" if is_latent else "chunked_local_attention" if is_chunked else "sliding_window"
    return kind, group.window
