"""What `--kv-events-config` becomes, and what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.added_replica import added_replica
from quire.engine.config.engine_config import KVEventsConfig
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from tests.unit.engine.config.test_resolve import _eight_gib, folder, options  # noqa: F401

ON = {"enable_kv_cache_events": True}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "sliding_window_pattern": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
}


def test_the_defaults_are_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = folder(tmp_path)
    assert resolve(options(model, kv_events_config=ON)).kv_events == KVEventsConfig(
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
        hash_seed="vllm-none-hash",
        kinds=(("full_attention", None),),
    )
    for off in ({}, {"publisher": "zmq"}, {**ON, "publisher": "null"}):
        assert resolve(options(model, kv_events_config=off)).kv_events is None
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    given = {**ON, "publisher": "zmq", "endpoint": "tcp://router:1", "replay_endpoint": "ipc:///run/kv", "topic": "kv@"}
    found = resolve(options(model, kv_events_config=given)).kv_events
    assert found is not None
    assert (found.endpoint, found.replay_endpoint, found.topic) == ("tcp://router:1", "ipc:///run/kv", "kv@")
    assert found.hash_seed == "42"


def test_groups_of_layers_have_the_names_of_vllm(tmp_path: Path) -> None:
    found = resolve(options(folder(tmp_path, **GEMMA), kv_events_config=ON)).kv_events
    assert found is not None
    assert set(found.kinds) == {("full_attention", None), ("sliding_window", 64)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"hash": "sha256"}, "the field hash is not supported; there are enable_kv_cache_events, publisher"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false, got 1"),
        ({"publisher": "kafka"}, "publisher must be zmq or null, got 'kafka'"),
        ({"endpoint": None}, "endpoint must be a string, got None"),
        ({"endpoint": "inproc://kv"}, "endpoint must be a ZMQ address such as"),
        ({"endpoint": "ipc://a\0"}, "endpoint must be a ZMQ address such as"),
        ({"replay_endpoint": "tcp://*:70000"}, "replay_endpoint must be a ZMQ address such as"),
        ({"buffer_steps": -1}, "buffer_steps must be at least 0, got -1"),
        ({"max_queue_size": 0}, "max_queue_size must be at least 1, got 0"),
        ({"hwm": True}, "hwm must be a number, got True"),
        (
            {"endpoint": "ipc://@kv", "replay_endpoint": "ipc://@kv"},
            "endpoint and replay_endpoint must be different paths, got ipc://@kv for both",
        ),
        (
            {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://127.0.0.1:5557"},
            r"replica N uses the ports 5557 \+ N \(endpoint\) and 5557 \+ N \(replay_endpoint\)",
        ),
    ],
)
def test_other_fields_and_values_are_refused(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-events-config: {text}"):
        resolve(options(folder(tmp_path), kv_events_config={**ON, **given}))


def test_events_need_a_prefix_cache_and_each_replica_its_own_ports(tmp_path: Path) -> None:
    model = folder(tmp_path)
    with pytest.raises(ConfigError, match=r"without prefix caching, which is off \(--no-enable-prefix-caching\)"):
        resolve(options(model, kv_events_config=ON, enable_prefix_caching=False))
    ports = {**ON, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
    for same in ("tcp://*:0", "ipc://*"):
        resolve(options(model, kv_events_config={**ON, "endpoint": same, "replay_endpoint": same}))
    resolve(options(model, kv_events_config=ports))
    with pytest.raises(ConfigError, match=r"uses the ports 5557 \+ N .* 5558 \+ N .* at least 2 apart"):
        resolve(options(model, kv_events_config=ports, data_parallel_size=2))
    last = {**ON, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:65535"}
    config = resolve(options(model, kv_events_config=last))
    text = r"the port 65535 \+ N, .* up to 65536 .* choose a port up to 65534"
    with pytest.raises(ConfigError, match=text):
        resolve(options(model, kv_events_config=last, data_parallel_size=2))
    with pytest.raises(ConfigError, match=text):
        added_replica(config, 1, (), [1])
