"""Postprocessing of vectors: truncation, normalization, a classifier's activation, conversion to numbers or base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.engine.config.pooling import Classes, Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import InvalidParameter
from quire.server.text.inputs import PoolingInput

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
        if asked is None or (asked == pooling.size and pooling.classes is None):
            return
        if pooling.classes is not None:
            raise InvalidParameter("dimensions: this model is a classifier and computes no embeddings", "dimensions")
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
        """Postprocess a vector of the engine, or the vectors of a prompt's tokens, as rows; a classifier's as in
        `activated`, by `normalize`.
        """
        import numpy as np  # a lazy import, as most servers never make vectors

        if pooling.classes is not None:
            return activated(vector, pooling.classes, self.normalize)
        x = np.frombuffer(vector, "<f4")
        x = x.reshape((-1, pooling.size) if pooling.is_multi_vector else (pooling.size,))[..., : self.dimensions]
        if pooling.is_normalized if self.normalize is None else self.normalize:
            norms = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
            x = x / np.maximum(norms, _MIN_NORM).astype(np.float32)
        return x


def activated(logits: bytes, classes: Classes, use_activation: bool | None = None) -> npt.NDArray[np.float32]:
    """Return the probabilities of a classifier's labels, or with `use_activation` False the logits."""
    import numpy as np

    x = np.frombuffer(logits, "<f4")
    if use_activation is False or classes.activation == "identity":
        return x
    wide = x.astype(np.float64)
    if classes.activation == "sigmoid":
        wide = np.exp(-np.logaddexp(0.0, -wide))
    else:
        wide = np.exp(wide - wide.max())
        wide /= wide.sum()
    return wide.astype(np.float32)


def scores(
    outputs: Sequence[EngineCoreOutput], given: PoolingInput, pooling: Pooling, use_activation: bool | None = None
) -> list[float]:
    """Return the score of each pair: a classifier's only probability, or the cosine similarity of two vectors (without
    activation their dot product). If tokens have vectors, it is the sum of the similarities of each token of the first
    with the most similar one of the second (MaxSim).
    """
    if pooling.classes is None and use_activation is None:
        use_activation = True
    options = VectorOptions(normalize=use_activation)
    vectors = [options.finish(output.vector or b"", pooling) for output in outputs]
    if given.compared is None:
        return [float(vector[0]) for vector in vectors]
    products = (vectors[first] @ vectors[second].T for first, second in given.compared)
    return [float(each.max(axis=-1).sum() if pooling.is_multi_vector else each) for each in products]


def to_json(vector: npt.NDArray[np.float32], *, as_base64: bool) -> msgspec.Raw:
    """Convert the vector to a JSON list, or to base64 of float32 values, little-endian. Both have equal values."""
    return msgspec.Raw(
        msgspec.json.encode(base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist())
    )
