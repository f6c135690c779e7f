"""Triton's interpreter, which runs kernels without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def with_scales_of_8_bit_floats(patch: pytest.MonkeyPatch) -> None:
    """Let `dot_scaled` read scales of type float8_e4m3fn as such: Triton 3.9's version takes all scales for powers of
    two."""
    from triton.runtime import interpreter

    of_powers: Any = interpreter._dot_scaled_scale_to_f32

    def decoded(scale: Any, compute_type: Any) -> Any:
        if scale.dtype.is_int():
            return of_powers(scale, compute_type)
        octets = torch.from_numpy(np.ascontiguousarray(scale.data).view(np.uint8))
        return octets.view(torch.float8_e4m3fn).float().numpy()

    patch.setattr(interpreter, "_dot_scaled_scale_to_f32", decoded)
