"""The request of `quire quantize` to the process that reads weights (`quire.engine.models.quantize`). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.config.engine_config import EngineConfig
from quire.engine.process import tool

_MODULE = "quire.engine.models.quantize"


@dataclass(frozen=True)
class QuantizeRequest:
    """Write the weights of a model to the folder `out`, quantized as `settings`, a `quantization_config`, say."""

    config: EngineConfig
    """A stage for each layer if there are `texts`."""
    out: Path
    settings: Mapping[str, Any]
    texts: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts for which GPTQ computes the errors; none: round to the nearest."""

    def run(self) -> None:
        """Run it in a process of its own, which shows a progress bar. Raises `ConfigError` if it fails."""
        tool.run(_MODULE, self, self.out)
