"""Creates the executor of a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.engine.cluster import ray_cluster
from quire.engine.cluster.network import LOOPBACK, set_interfaces
from quire.engine.config.engine_config import EngineConfig
from quire.engine.executor.base import Executor
from quire.engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


def start(config: EngineConfig, log_level: str, on_end: Callable[[], None]) -> Executor:
    """Start the ranks and load the model; raises `WorkerError` or `ConfigError`.

    `on_end` is called, in any thread, as soon as a rank's process exits, even when idle.
    """
    if config.parallel.node != config.parallel.first_node:
        raise ConfigError(
            f"--node-rank {config.parallel.node}: node 0 has the API; the others are started with "
            "quire serve --headless"
        )
    if config.parallel.is_coupled:
        is_one_host = len(config.parallel.local_replicas) == config.parallel.replicas
        set_interfaces(LOOPBACK if is_one_host else config.parallel.coordinator[0])
    # Each executor imports modules that the others do not need.
    match config.parallel.executor:
        case "uni":
            from quire.engine.executor.uni import UniExecutor

            return UniExecutor(config)
        case "mp" if config.parallel.nodes > 1:
            from quire.engine.executor.nodes import MultiNodeExecutor

            return MultiNodeExecutor(config, log_level, on_end)
        case "mp":
            from quire.engine.executor.mp import MpExecutor

            return MpExecutor(config, log_level, on_end)
        case "ray":
            from quire.engine.cluster.ray_launcher import NodesGone, RayLauncher
            from quire.engine.executor.nodes import MultiNodeExecutor

            try:
                return MultiNodeExecutor(config, log_level, on_end, RayLauncher(config, log_level))
            except NodesGone as gone:
                logger.warning("%s; looking for another place", gone)
            placed = ray_cluster.place_again(config)
            return MultiNodeExecutor(placed, log_level, on_end, RayLauncher(placed, log_level))
