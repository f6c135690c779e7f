"""What a supervisor does about the media process, which the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.config.engine_config import EngineConfig, MediaConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import EngineStats
from quire.engine.protocol.supervision import EngineFailed, Failed, Ready, SetLogLevel, Shutdown
from quire.server.client import engine_manager, helper_process
from quire.server.client.engine_manager import EngineManager
from quire.server.client.media_metrics import MediaMetrics
from quire.server.client.metrics import media_table
from quire.server.config.server_options import MediaOptions
from quire.server.media import service
from quire.server.media.service import MediaService, media_settings
from quire.server.media.types import MediaProcessArgs, MediaSettings
from tests.fakes.supervised import FakeProcess

MEDIA = MediaConfig(max_items={"image": 1}, max_encoder_features=1, encoder_cache_features=1, max_item_features=1)


class Host:
    """A host with an engine core, which is up, and the media process."""

    def __init__(self, config: EngineConfig, core: FakeProcess, started: list[tuple[MediaProcessArgs, FakeProcess]]):
        self.core, self.started = core, started
        self.manager = EngineManager(config, name="m")
        self.service = MediaService(self.manager, MediaSettings(model="folder"))
        self._metrics = MediaMetrics(media_table(self.manager.metrics_path))
        core.say(Ready({}, EngineStats(kv_blocks=100)))
        self.manager.run(lambda: self.manager.is_settled)

    @property
    def state(self) -> str:
        """As API processes see it."""
        return self._metrics.state

    @property
    def process(self) -> FakeProcess:
        """The newest one."""
        return self.started[-1][1]

    def exit(self, failure: Failed | None = None) -> None:
        """Let it exit, and wait for the next one, or for the end of the engine."""
        count = len(self.started)
        if failure is not None:
            self.process.say(failure)
        self.process.exit(1)
        self.manager.run(lambda: len(self.started) > count or self.manager.failure is not None)

    def get_ready(self) -> None:
        self.process.say(Ready({}))
        self.manager.run(lambda: self.service.is_ready)


@pytest.fixture
def host(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr("quire.engine.process.supervisor._TICK_SECONDS", 0.001)
    monkeypatch.setattr(helper_process, "_MAX_RESTART_SECONDS", 0.0)
    core, started = FakeProcess(), list[tuple[MediaProcessArgs, FakeProcess]]()

    def start(module: str, args: Any) -> FakeProcess:
        started.append((args, FakeProcess()))
        return started[-1][1]

    monkeypatch.setattr(engine_manager, "start_core", lambda args, folder: core)
    monkeypatch.setattr(service, "start_process", start)
    made = Host(config, core, started)
    yield made
    for each in (core, made.process):
        if each.code is None:
            each.exit(0)
    made.manager.close()


def test_it_is_replaced_when_it_dies_and_stopped_after_the_cores(host: Host) -> None:
    assert not host.service.has_been_ready
    assert host.state == "loading"
    host.get_ready()
    assert host.state == "up"
    host.manager.set_log_level("debug")
    assert host.process.heard() == [SetLogLevel("debug")]
    host.exit()
    assert host.state == "down"
    assert host.service.has_been_ready
    host.exit(Failed("the folder of the model is gone", user_error=True))  # it may come back
    host.get_ready()
    assert host.state == "up"
    assert host.manager.failure is None
    (first, _), *_, (last, process) = host.started
    assert (last.folder, last.settings) == (first.folder, MediaSettings(model="folder"))
    assert host.service.path.startswith(last.folder)
    assert (first.log_level, last.log_level) == ("info", "debug")
    ended = list[FakeProcess]()

    def end(each: FakeProcess) -> None:
        if each.heard()[-1:] == [Shutdown()]:
            ended.append(each)
            each.exit(0)

    host.core.on_poll = lambda: end(host.core)
    process.on_poll = lambda: end(process)
    host.manager.close()
    assert ended == [host.core, process]
    assert not Path(last.folder).exists()


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ([Failed("images are not supported for X", user_error=True)], "images are not supported for X"),
        ([None, None, None], "the media process exited with code 1"),
    ],
)
def test_the_server_ends_if_it_cannot_start(host: Host, failures: list[Failed | None], reason: str) -> None:
    for failure in failures:
        assert host.manager.failure is None
        host.exit(failure)
    assert host.manager.failure == EngineFailed(reason)
    assert host.manager.is_user_error == (failures[0] is not None)
    assert len(host.started) == len(failures)


@pytest.mark.parametrize("failure", [Failed("images are not supported for X", user_error=True), None])
def test_a_server_that_has_started_goes_on_without_it(host: Host, failure: Failed | None) -> None:
    """It does, even if the process has never been ready."""
    host.manager.is_started = True
    for _ in range(5):
        host.exit(failure)
        assert host.state == "failed"
    host.get_ready()
    assert host.state == "up"
    assert host.manager.failure is None


def test_it_is_restarted_later_each_time_but_within_a_minute(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "_MAX_RESTART_SECONDS", 60.0)
    host.manager.is_started = True
    delays = [host.service.on_exit(Failed("it died")) for _ in range(1100)]
    assert delays == [1, 3, 7, 15, 31, *[60] * 1095]


@pytest.fixture
def with_media(config: EngineConfig, tmp_path: Path) -> EngineConfig:
    """A model that takes images, with its processor."""
    (tmp_path / "preprocessor_config.json").touch()
    return replace(config, media=MEDIA, model=replace(config.model, path=tmp_path))


def test_its_settings_are_those_of_the_command_line(config: EngineConfig, with_media: EngineConfig) -> None:
    options = MediaOptions(
        media_fetch=False,
        allowed_local_media_path="/media",
        media_fetch_timeout=3.0,
        max_media_bytes=5,
        mm_processor_kwargs={"max_pixels": 7},
        media_io_kwargs={"video": {"fps": 1}},
        mm_processor_cache_gb=2.0,
    )
    assert media_settings(config, options) is None  # it takes only text
    half = replace(with_media, model=replace(with_media.model, dtype="float16"))
    assert media_settings(half, options) == MediaSettings(
        model=str(half.model.path),
        dtype="float16",
        fetch=False,
        allowed_local_path="/media",
        fetch_timeout=3.0,
        max_bytes=5,
        shared_bytes=2**20,
        cache_gb=2.0,
        processor_kwargs={"max_pixels": 7},
        io_kwargs={"video": {"fps": 1}},
    )


@pytest.mark.parametrize(
    ("max_item_features", "free_mib", "is_shared"),
    [(49, 64, True), (49, 48, False), (16_384, 1023, False), (16_384, 1024, True)],  # 49: the bundled model's
)
def test_items_lie_in_shared_memory_if_the_largest_ones_fit(
    with_media: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    max_item_features: int,
    free_mib: int,
    is_shared: bool,
) -> None:
    """Containers have 64 MiB by default (docker run)."""
    media = replace(MEDIA, max_item_features=max_item_features)
    settings = media_settings(replace(with_media, media=media), MediaOptions())
    assert settings is not None
    monkeypatch.setattr(
        "quire.server.media.service.shutil.disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20)
    )
    assert (service._item_folder(settings.shared_bytes) == "/dev/shm") == is_shared
    assert ("MiB free" in caplog.text) == (not is_shared)


def test_a_model_without_a_processor_is_refused_at_once(with_media: EngineConfig) -> None:
    (with_media.model.path / "preprocessor_config.json").rename(with_media.model.path / "processor_config.json")
    assert media_settings(with_media, MediaOptions())
    (with_media.model.path / "processor_config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"no processor of images, preprocessor_config.json or .*--language-model-only"
    ):
        media_settings(with_media, MediaOptions())


def test_domains_and_networks_are_what_the_fetcher_takes(with_media: EngineConfig) -> None:
    for domain in ("images.example", "*.images.example", "::1", "192.168.1.1"):
        assert media_settings(with_media, MediaOptions(allowed_media_domains=(domain,)))
    for options in (MediaOptions(allowed_media_domains=("a b",)), MediaOptions(allowed_media_networks=("10.0.0.1/8",))):
        with pytest.raises(ConfigError, match="--allowed-media-"):
            media_settings(with_media, options)
