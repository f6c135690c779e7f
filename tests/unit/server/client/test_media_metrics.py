"""Counts of images and videos, which the media process writes and API processes show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.engine.config.engine_config import MediaConfig
from quire.server.client.media_metrics import MediaMetrics
from quire.server.client.metrics import Metrics, media_table
from tests.fakes.configs import engine_config
from tests.unit.server.client.test_metrics import samples

MEDIA = MediaConfig(max_items={"image": 1}, max_encoder_features=1, encoder_cache_features=1, max_item_features=1)


def test_an_api_process_shows_what_the_media_process_counts(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    shown = Metrics("m", path, config=replace(engine_config(), media=MEDIA))
    assert samples(shown)["quire:media_process_up"] == 0
    writer = MediaMetrics(media_table(path))
    writer.state, writer.cache_bytes = "up", 4096
    writer.count("image", "loaded", 0.3)
    writer = MediaMetrics(media_table(path))  # its successor
    writer.count("image", "cached", 0.001)
    writer.count("video", "refused", 100.0)
    found = samples(shown)
    assert (found["quire:media_process_up"], found["quire:media_cache_bytes"]) == (1, 4096)
    counts = {name: value for name, value in found.items() if name.startswith("quire:media_items_total") and value}
    assert counts == {
        "quire:media_items_total image loaded": 1,
        "quire:media_items_total image cached": 1,
        "quire:media_items_total video refused": 1,
    }
    bounds = ("0.005", "0.25", "0.5", "+Inf")
    assert [found[f"quire:media_load_seconds_bucket image {bound}"] for bound in bounds] == [1, 1, 2, 2]
    assert found["quire:media_load_seconds_sum video"] == 100
    assert not any("media" in name for name in samples(Metrics("m", path, config=engine_config())))
