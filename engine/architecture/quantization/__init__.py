"""How checkpoints are quantized, from their configs. No torch here: sizes are known before weights are read.

A format is a file here, which reads the format's settings and says what it stores for a weight (`Method`, `Scheme`),
and a reader in `quire.engine.checkpoints.quantized_tensors`, which gives codes and factors of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture.quantization import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from quire.engine.architecture.quantization.method import Method
from quire.engine.architecture.quantization.settings import WHERE
from quire.engine.protocol.errors import ConfigError

METHODS: dict[str, Callable[[Mapping[str, Any]], Method | None]] = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read,
    "gguf": gguf.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    "quark": quark.read,
    "torchao": torchao.read,
}
"""By `quant_method`: reads the settings; None if they say that nothing is quantized. Raises `ConfigError`."""


def read(settings: object) -> Method | None:
    """Read the settings of a quantized checkpoint, as in config.json's `quantization_config`; None if there are none.

    Raises `ConfigError` if the format, or a detail of it that would change an answer, is not supported.
    """
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{WHERE} must be an object, got {settings!r}")
    name, producer = settings.get("quant_method"), settings.get("producer")
    if name is None and isinstance(producer, Mapping):  # of some releases of ModelOpt
        name = producer.get("name")
    name = name.removeprefix("intel/") if isinstance(name, str) else name  # of AutoRound's first releases
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(
            f"{WHERE}: quant_method {name!r} is not supported (supported: {', '.join(METHODS)}); "
            "use another checkpoint of this model, such as the full-precision one"
        )
    return METHODS[name](settings)
