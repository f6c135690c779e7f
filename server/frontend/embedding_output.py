"""Postprocessing of vectors: truncation, normalization, and conversion to numbers or base64."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MIN_NORM = 1e-12
"""Shorter vectors are divided by this, as in torch."""


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """A request's options for vectors. None: as the model declares."""

    dimensions: int | None = None
    """Number of dimensions to keep of a Matryoshka model's vector."""
    normalize: bool | None = None
    """Whether to normalize vectors to length 1."""

    def check(self, pooling: Pooling) -> None:
        """Raise `InvalidParameter` for dimensions that the model does not support."""
        asked = self.dimensions
        if asked is None or asked == pooling.size:
            return
        if not pooling.is_matryoshka:
            raise InvalidParameter(
                f"dimensions: this model's vectors have {pooling.size} dimensions, which cannot be reduced: it "
                "declares no Matryoshka representation (is_matryoshka or matryoshka_dimensions in config.json)",
                "dimensions",
            )
        if not 1 <= asked <= pooling.size or (pooling.dimensions and asked not in pooling.dimensions):
            good = ", ".join(map(str, pooling.dimensions)) or f"from 1 to {pooling.size}"
            raise InvalidParameter(f"dimensions must be {good} for this model, got {asked}", "dimensions")

    def finish(self, vector: bytes, pooling: Pooling) -> npt.NDArray[np.float32]:
        """Postprocess a vector of the engine."""
        import numpy as np  # a lazy import, as most servers never make vectors

        x = np.frombuffer(vector, "<f4")[: self.dimensions]
        if pooling.is_normalized if self.normalize is None else self.normalize:
            x = x / np.float32(max(float(np.linalg.norm(x.astype(np.float64))), _MIN_NORM))
        return x


def to_json(vector: npt.NDArray[np.float32], *, as_base64: bool) -> msgspec.Raw:
    """Convert the vector to a JSON list, or to base64 of float32 values, little-endian. Both have equal values."""
    return msgspec.Raw(
        msgspec.json.encode(base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist())
    )
