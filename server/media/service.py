"""The media process of a server, as the supervisor of its processes sees it.

One runs on each host with API processes, in `quire serve` or in a program with `LLM`. While it is down, requests with
images or videos wait for it, for some seconds; all others go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from typing import Literal

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import Process, start_process
from quire.engine.repository.processors import check_processor
from quire.server.client.engine_manager import EngineManager
from quire.server.client.helper_process import HelperProcess
from quire.server.client.media_metrics import MediaMetrics
from quire.server.client.metrics import media_table
from quire.server.config.server_options import MediaOptions
from quire.server.media.addresses import AddressRules
from quire.server.media.types import MediaProcessArgs, MediaSettings

_SHARED_MEMORY = "/dev/shm"
_MAX_FEATURE_BYTES = 2**16
"""Of an item's arrays, for each feature; few models need more."""
_NUM_LARGEST_ITEMS = 8
"""For which there should be space in shared memory, which holds items in at most half of it."""
_ENOUGH_BYTES = 2**30
"""However large items may be: free space in shared memory that suffices."""

logger = logging.getLogger(__name__)


def check_addresses(options: MediaOptions) -> None:
    """Raise `ConfigError` for domains or networks that the fetcher does not take."""
    AddressRules.parse(options.allowed_media_domains or (), options.allowed_media_networks or ())


def media_settings(config: EngineConfig, options: MediaOptions) -> MediaSettings | None:
    """Return the settings of the media process; None: the model takes only text. Raises `ConfigError`, also if the
    model's folder has no processor.
    """
    check_addresses(options)
    if config.media is None:
        return None
    check_processor(config.model.path)
    return MediaSettings(
        model=str(config.model.path),
        dtype=config.model.dtype,
        fetch=options.media_fetch,
        allowed_domains=options.allowed_media_domains or (),
        allowed_networks=options.allowed_media_networks or (),
        allowed_local_path=options.allowed_local_media_path or "",
        fetch_timeout=options.media_fetch_timeout,
        max_bytes=options.max_media_bytes,
        upload_folder=options.file_storage_path or "",
        embeds=options.enable_mm_embeds,
        shared_bytes=min(2 * _NUM_LARGEST_ITEMS * _MAX_FEATURE_BYTES * config.media.max_item_features, _ENOUGH_BYTES),
        cache_gb=options.mm_processor_cache_gb,
        processor_kwargs=dict(options.mm_processor_kwargs or {}),
        io_kwargs=dict(options.media_io_kwargs or {}),
    )


class MediaService(HelperProcess):
    """The media process. Its folder stays when it is restarted, so that the items of running requests can still be
    read.
    """

    def __init__(self, manager: EngineManager, settings: MediaSettings) -> None:
        """Start it. The engine has failed if it cannot start, and the server has not started yet."""
        super().__init__("the media process", manager, "Requests with images or videos wait")
        self._manager, self._settings = manager, settings
        self._folder = RuntimeFolder(where=_item_folder(settings.shared_bytes))
        self.path = f"{self._folder.path}/media"
        """The socket for `MediaClient`."""
        self._metrics = MediaMetrics(media_table(manager.metrics_path))
        manager.add_process(self, self._folder.remove)

    def start(self) -> Process:
        metrics = media_table(self._manager.metrics_path)
        args = MediaProcessArgs(self._settings, self._folder.path, metrics, self._manager.log_level)
        return start_process("quire.server.media.process", args)

    def on_state(self, state: Literal["up", "down", "failed"]) -> None:
        self._metrics.state = state


def _item_folder(least_bytes: int) -> str | None:
    """Shared memory, if so much is free; otherwise None: the folder for temporary files."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free >= least_bytes and os.access(_SHARED_MEMORY, os.W_OK):
            return _SHARED_MEMORY
        logger.warning(
            "%s has only %d MiB free; images and videos are kept in the folder for temporary files, which may be slower"
            " (docker run --shm-size)",
            _SHARED_MEMORY,
            free // 2**20,
        )
    return None
