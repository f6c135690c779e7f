"""The media process of a server: `quire-media`. It starts the decoders and the fetcher, and decodes and fetches nothing
itself.

    quire (parent) ── quire-media ─┬─ quire-decoder ── a fork for each item
                                   └─ quire-fetcher
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time

import uvloop

from quire.engine.process import current_process, log
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.process.supervisor import HEARTBEAT_SECONDS, SupervisorConnection
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.supervision import Failed, Ready, Reload, SetLogLevel, Shutdown, ToProcess
from quire.server.client.media_metrics import MediaMetrics
from quire.server.media.types import MediaProcessArgs

_INHERITED_SECONDS = 60.0
"""Time for API processes to enter their leases after a restart."""

_LEAST_GB = 1.0
"""GiB that the items of running requests may have, however small the cache is."""

logger = logging.getLogger(__name__)


def capacity(cache_gb: float, folder: str) -> tuple[int, int]:
    """Bytes for items: of all, and of those that no request needs, at most half of the free space."""
    free = shutil.disk_usage(folder).free // 2
    return min(int(max(cache_gb, _LEAST_GB) * 2**30), free), min(int(cache_gb * 2**30), free)


async def _serve(args: MediaProcessArgs, connection: SupervisorConnection) -> int:
    from quire.server.media.download import FetchSettings
    from quire.server.media.fetcher import Fetcher
    from quire.server.media.server import MediaServer
    from quire.server.media.store import Store

    loop, settings, start = asyncio.get_running_loop(), args.settings, time.monotonic()
    ended = asyncio.Event()

    def beat() -> None:
        connection.beat()
        loop.call_later(HEARTBEAT_SECONDS, beat)

    def receive(message: ToProcess) -> None:
        match message:
            case SetLogLevel(level):
                log.set_level(level)
            case Reload(log_config, level):
                log.reload(log_config, level)
            case Shutdown():
                ended.set()

    beat()
    connection.listen(receive)
    fetcher = Fetcher(
        FetchSettings(
            is_allowed=settings.fetch,
            domains=settings.allowed_domains,
            networks=settings.allowed_networks,
            local_path=settings.allowed_local_path,
            timeout=settings.fetch_timeout,
            max_bytes=settings.max_bytes,
        )
    )
    items = f"{args.folder}/items"
    os.makedirs(items, mode=0o700, exist_ok=True)
    store = Store(items, *capacity(settings.cache_gb, items))
    server = MediaServer(settings, store, fetcher, MediaMetrics(args.metrics))
    loop.call_later(_INHERITED_SECONDS, server.store.forget_inherited)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{args.folder}/media")
    try:
        async with await server.serve(f"{args.folder}/media"):
            loading = asyncio.create_task(server.decoders.ready())
            ending = asyncio.create_task(ended.wait())
            await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
                connection.send(Ready({"images": time.monotonic() - start}))
                await ending
    finally:
        await server.close()
    return 0


def main() -> None:
    """Main function of the process."""
    # What transformers would import if it could; nothing here needs it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    connection = SupervisorConnection()
    args: MediaProcessArgs = connection.receive_args()
    current_process.set_name("quire-media")
    log.setup(args.log_level, "media")
    folder = RuntimeFolder(args.folder)  # this process removes it if the server is killed
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_serve(args, connection))
    except ConfigError as error:
        connection.send(Failed(str(error), user_error=True))
        code = 2
    except Exception as error:
        logger.exception("the media process failed")
        connection.send(Failed(f"the media process failed: {type(error).__name__}: {error}"))
        code = 1
    folder.remove()
    sys.stdout.flush()
    os._exit(code)  # connections of API processes would be waited for
