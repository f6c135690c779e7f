"""The sampling parameters of a request, made in the same way by all APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.text.inputs import ParamNames

_NAMES = ParamNames()


def sampling_params(
    defaults: Mapping[str, Any], given: Mapping[str, Any], names: ParamNames = _NAMES
) -> SamplingParams:
    """Return the parameters `given`, unless they are None, over the model's `defaults`. Raises `InvalidParameter`."""
    params = SamplingParams(max_tokens=None)
    for name, value in {**defaults, **{name: value for name, value in given.items() if value is not None}}.items():
        setattr(params, name, value)
    params.validate({"stop": names.stop})
    return params
