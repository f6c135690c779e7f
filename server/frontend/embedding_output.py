"""What becomes of a vector on its way out: shortened, normalized, and written as numbers or base64."""

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

_LEAST_LENGTH = 1e-12
"""What a vector shorter than this is divided by, as in torch."""


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """What a request says about its vectors. None: as the model declares."""

    dimensions: int | None = None
    """How many numbers of a Matryoshka model's vector are wanted."""
    normalize: bool | None = None
    """Whether vectors are brought to length 1."""

    def check(self, pooling: Pooling) -> None:
        """Raise `InvalidParameter` for dimensions that the model does not have."""
        asked = self.dimensions
        if asked is None or asked == pooling.size:
            return
        if not pooling.is_matryoshka:
            raise InvalidParameter(
                f"dimensions: the vectors of this model have {pooling.size} numbers and cannot be shortened: it "
                "declares no Matryoshka representation (is_matryoshka or matryoshka_dimensions in config.json)",
                "dimensions",
            )
        if not 1 <= asked <= pooling.size or (pooling.dimensions and asked not in pooling.dimensions):
            good = ", ".join(map(str, pooling.dimensions)) or f"from 1 to {pooling.size}"
            raise InvalidParameter(f"dimensions must be {good} for this model, got {asked}", "dimensions")

    def finish(self, vector: bytes, pooling: Pooling) -> npt.NDArray[np.float32]:
        """The vector that is told, from the engine's."""
        import numpy as np  # not before there is a vector: most servers never make one

        x = np.frombuffer(vector, "<f4")[: self.dimensions]
        if pooling.is_normalized if self.normalize is None else self.normalize:
            x = x / np.float32(max(float(np.linalg.norm(x.astype(np.float64))), _LEAST_LENGTH))
        return x


def to_json(vector: npt.NDArray[np.float32], *, as_base64: bool) -> msgspec.Raw:
    """The vector as a JSON list, or as base64 of its float32, little-endian. The numbers of both are the same."""
    return msgspec.Raw(
        msgspec.json.encode(base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist())
    )
