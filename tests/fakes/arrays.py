"""Files with arrays, as clients make them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np


def npy(array: Any, **options: Any) -> bytes:
    """`options` are those of `numpy.save`."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def safetensors(**arrays: tuple[str, Any]) -> bytes:
    """By name: type and values."""
    numpy = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
    header, content = dict[str, Any](), b""
    for name, (kind, values) in arrays.items():
        if kind == "BF16":
            data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            data = values.astype(numpy[kind]).tobytes()
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content
