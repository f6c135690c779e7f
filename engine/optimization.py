"""What -O1 compiles while a model serves: models that transformers builds, having no kernels of ours. No torch here."""

from __future__ import annotations

from quire.engine.architecture import BuiltArchitecture
from quire.engine.config import EngineConfig, EngineOptions
from quire.engine.errors import ConfigError


def check(options: EngineOptions) -> None:
    """Raises `ConfigError` for a level that there is not."""
    if options.optimization_level not in (0, 1):
        raise ConfigError(f"--optimization-level must be 0 or 1, got {options.optimization_level}")


def compiles(config: EngineConfig) -> bool:
    """Whether a rank is to compile its model."""
    return bool(config.options.optimization_level) and not _why_not(config)


def text(config: EngineConfig) -> str:
    """A line of the plan; empty where nothing is asked for."""
    if not config.options.optimization_level:
        return ""
    reason = _why_not(config)
    return f"nothing is compiled (-O1): {reason}" if reason else "compiled in the background (-O1)"


def _why_not(config: EngineConfig) -> str:
    if not isinstance(config.model.architecture, BuiltArchitecture):
        return "Quire's own implementation of this model runs on kernels that are written by hand"
    if config.parallel.world_size > 1:
        return f"a model is compiled for one rank only, and this one has {config.parallel.world_size}"
    return ""
