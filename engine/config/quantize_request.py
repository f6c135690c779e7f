"""The request of `quire quantize` to the process that reads weights (`quire.engine.models.quantize`). No torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError

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
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", _MODULE]  # -P: import nothing from the current folder
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(self, stdin)
            output = process.stdout.read()
            process.wait()
        except BaseException:
            process.terminate()  # and let it remove what it has written
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
        if output:
            raise ConfigError(output.decode())
        if process.returncode:
            raise ConfigError(f"{self.out}: not written, as the process that quantizes died ({process.returncode})")
