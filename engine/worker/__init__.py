"""Ranks. Importing this package imports torch, without its kernels for tensors that have no data."""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType
from typing import Any

_META_KERNELS = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that torch imports for torch.compile, which is not used: a fifth of the time. The other user of such tensors,
`quire.engine.models.transformers_backend`, imports them itself."""


class _NotImported(ModuleType):
    """In place of a module while torch is imported. If torch itself needs anything of it, it is imported after all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


_begun = time.perf_counter()
if "torch" not in sys.modules:
    for _name in _META_KERNELS:
        sys.modules[_name] = _NotImported(_name)
    import torch

    for _name in _META_KERNELS:
        if isinstance(sys.modules[_name], _NotImported):
            del sys.modules[_name]
    vars(torch).pop("_meta_registrations", None)
IMPORT_SECONDS = time.perf_counter() - _begun
"""What importing torch has taken."""
