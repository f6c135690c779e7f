"""Which files names stand for, who may name them, and who waits for whom."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import InvalidParameter
from quire.engine.repository import model_files
from quire.server.client.adapter_metrics import AdapterMetrics
from quire.server.serving import adapters
from quire.server.serving.adapters import AdapterRegistry, AdapterSettings
from quire.server.text.sandbox import SandboxFailed, SandboxStopped
from tests.fakes.adapters import SETTINGS, Q, write_adapter
from tests.fakes.sandbox import InProcessSandbox

SHAPES: Mapping[str, tuple[int, ...]] = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)}
Start = Callable[..., AdapterRegistry]


def write(folder: Path, seed: int = 0, **settings: Any) -> Path:
    return write_adapter(folder, SHAPES, SETTINGS | settings, seed=seed)


async def prepare(ref: AdapterRef, pins: bool) -> str:
    return ""


@pytest.fixture
async def start(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start the registry of a server with these settings."""
    started = list[AdapterRegistry]()
    monkeypatch.setattr(adapters, "Sandbox", InProcessSandbox)

    def start(root: Path | None = None, resolver: str = "off") -> AdapterRegistry:
        settings = AdapterSettings(("base",), None if root is None else str(root), resolver)
        metrics = Mock(spec=AdapterMetrics)
        started.append(AdapterRegistry(config.model, settings, prepare, Mock(), is_enabled=True, metrics=metrics))
        return started[-1]

    yield start
    for each in started:
        each.close()


async def test_a_path_has_one_name_and_others_tell_nothing(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "root" / "team" / "a")
    write(tmp_path / "outside")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "bad").mkdir()
    registry = start(tmp_path / "root", "root")
    found = await registry.find("team/a")
    assert found is not None
    assert (registry.named["team/a"].path, found.ref.paths[-1]) == ("team/a", str(tmp_path / "root" / "team" / "a"))
    names = ["./team/a", "team/a/", "team//a", "team/./a", "team/../team/a", str(tmp_path / "root" / "team" / "a")]
    names += ["..", ".", "../outside", "link", "link/adapter_config.json", str(tmp_path), "/etc/shadow", "😀" * 100]
    for name in names:
        assert await registry.find(name) is None, name
    assert [*registry.named] == ["team/a"]
    with pytest.raises(InvalidParameter, match="'bad' cannot be used: bad: no adapter_model") as refusal:
        await registry.find("bad")
    assert str(tmp_path) not in str(refusal.value)


async def test_requests_leave_names_for_operators(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / name)
    monkeypatch.setattr(adapters, "MAX_RESOLVED", 2)
    registry = start(tmp_path, "root")
    assert [await registry.find(name) is not None for name in "abc"] == [True, True, False]
    await registry.load("c", "c")
    assert await registry.find("c") is not None


async def test_replicas_keep_what_is_loaded_to_be_pinned(start: Start, tmp_path: Path) -> None:
    """From the load on, whatever else becomes pinned meanwhile; no longer if the load fails."""
    for number, name in enumerate("ab"):
        write(tmp_path / name, number)
    registry, asked, ready = start(tmp_path), asyncio.Event(), asyncio.Event()
    pin = registry._pin = Mock()

    async def prepare_late(ref: AdapterRef, pins: bool) -> str:
        asked.set()
        await ready.wait()
        return "no memory"

    registry._prepare = prepare_late
    first = asyncio.create_task(registry.load("a", "a", is_pinned=True))
    await asked.wait()
    ((digests,),) = (call.args for call in pin.call_args_list)
    registry._prepare = prepare
    second = (await registry.load("b", "b", is_pinned=True)).ref
    assert second is not None
    assert sorted(pin.call_args.args[0]) == sorted([*digests, second.digest])
    ready.set()
    with pytest.raises(InvalidParameter, match="no memory"):
        await first
    assert pin.call_args.args[0] == [second.digest]


async def test_repositories_are_not_folders(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def download(repository: str, *_: object) -> Path:
        asked.append(repository)
        return write(tmp_path / "snapshot")

    monkeypatch.setattr(model_files, "download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "team" / "secret", 1)
    registry = start(None, "hub")
    for name in ("team/..", "team/.", "team/...", "../team", "./secret"):
        assert await registry.find(name) is None, name
        with pytest.raises(InvalidParameter, match="--lora-root"):
            await registry.load("x", name)
    found = await registry.find("team/secret")
    assert found is not None
    assert (asked, found.ref.paths[-1]) == (["team/secret"], str(tmp_path / "snapshot"))


async def test_requests_do_not_hold_up_operators(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "good")
    registry, released = start(tmp_path, "hub"), asyncio.Event()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ask = registry._sandbox.ask_async

    async def ask_slowly(question: bytes) -> bytes:
        if b"slow" in question:
            await released.wait()
        return await ask(question)

    monkeypatch.setattr(registry._sandbox, "ask_async", ask_slowly)
    for number in range(5):
        (tmp_path / f"slow{number}").mkdir()
    names = [f"{owner}{number}" for number in range(5) for owner in ("slow", "owner/slow")]
    waiting = [asyncio.create_task(registry.find(name)) for name in names]
    async with asyncio.timeout(30):
        while len(registry._reading) < len(names):
            await asyncio.sleep(0)
        await registry.load("mine", "good")
        released.set()
        assert all(
            isinstance(each, InvalidParameter) for each in await asyncio.gather(*waiting, return_exceptions=True)
        )


async def test_what_cannot_be_read_is_not_tried_at_each_request(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad").mkdir()
    registry, now = start(tmp_path, "root"), [0.0]
    monkeypatch.setattr(adapters, "time", Mock(wraps=time, monotonic=lambda: now[0]))
    with pytest.raises(InvalidParameter, match="no adapter_model"):
        await registry.find("bad")
    write(tmp_path / "bad")
    with pytest.raises(InvalidParameter, match="no adapter_model"):
        await registry.find("bad")
    now[0] += 31
    assert await registry.find("bad") is not None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxStopped(), "more than 600 s of processor time or 4 GiB of memory"),
        (SandboxFailed("traceback"), "an internal error"),
        (OSError("no process"), "cannot be read now: no process"),
    ],
)
async def test_failures_of_reading(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    registry = start(tmp_path)
    monkeypatch.setattr(registry._sandbox, "ask_async", AsyncMock(side_effect=error))
    with pytest.raises(InvalidParameter, match=reason):
        await registry.load("a", "a")


async def test_downloads_for_clients_have_a_budget(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"adapter_model.safetensors": 2**33, "adapter_config.json": 1, "README.md": 2**40, "optimizer.pt": None}
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(model_files, "download", lambda *_: write(tmp_path / "snapshot"))
    registry = start(None, "hub")
    with pytest.raises(InvalidParameter, match="8 GiB, more than the 8 GiB of --lora-disk-gb"):
        await registry.find("owner/name")
    with pytest.raises(InvalidParameter, match="8 GiB, more than the 8 GiB of --lora-disk-gb"):
        await registry.load("x", "owner/name")
    await registry.open("owner/name")  # of the operator
    files.pop(1)
    assert await registry.find("owner/other") is not None


async def test_downloads_for_clients_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = start(None, "hub")
    monkeypatch.setattr(adapters, "_DOWNLOAD_SECONDS", 0.01)
    monkeypatch.setattr(registry._sandbox, "ask_async", lambda _: asyncio.Event().wait())
    with pytest.raises(InvalidParameter, match=r"more than 0\.01 s to download"):
        await registry.find("owner/name")


async def test_relative_paths_follow_the_working_directory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, digests = start(), list[bytes]()
    for seed, folder in enumerate((tmp_path / "one", tmp_path / "two")):
        path = write(folder / "adapter", seed)
        monkeypatch.chdir(folder)
        found = await registry.open("adapter")
        assert (found.path, found.ref.paths[-1]) == ("adapter", str(path))
        digests.append(found.ref.digest)
    assert len({*digests}) == 2


async def test_the_hub_is_asked_once_for_a_path(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def download(repository: str, *_: object) -> Path:
        asked.append(repository)
        return write(tmp_path / "snapshot")

    monkeypatch.setattr(model_files, "download", download)
    registry = start()
    first, second = await registry.open("owner/name"), await registry.open("owner/name")
    assert (asked, first.ref, second.path) == (["owner/name"], second.ref, "owner/name")
    shutil.rmtree(tmp_path / "snapshot")
    assert (await registry.open("owner/name")).ref == first.ref


async def test_unload_waits_for_requests_with_earlier_weights(start: Start, tmp_path: Path) -> None:
    registry = start(write(tmp_path / "a").parent)
    await registry.load("a", "a")
    first = await registry.find("a")
    write(tmp_path / "a", 1)
    await registry.load("a", "a", in_place=True)
    second = await registry.find("a")
    assert first is not None
    assert second is not None
    assert first.ref != second.ref
    unloading = asyncio.create_task(registry.unload("a"))
    del second
    while len(registry._uses) > 1:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not unloading.done()
    del first
    async with asyncio.timeout(30):
        assert await unloading
