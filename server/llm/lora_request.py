"""`LoRARequest`: the adapter of a request of the Python API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.protocol.errors import InvalidParameter
from quire.server.serving.frontend import Frontend
from quire.server.text.adapter import RequestAdapter


@dataclass(frozen=True)
class LoRARequest:
    """An adapter (LoRA), as vLLM's class of this name. The model must be loaded with `enable_lora=True`.

    Only the files at `lora_path` decide what the adapter is, as they are when a request starts: neither a name nor an
    id, nor a path that gets other files, can stand for an earlier adapter.
    """

    lora_name: str
    """A name for metrics and errors."""
    lora_int_id: int = 1
    """vLLM's; has no effect."""
    lora_path: str | os.PathLike[str] = ""
    """A PEFT folder, a GGUF file, or a Hugging Face id."""
    base_model_name: str | None = None
    """vLLM's; has no effect."""
    load_inplace: bool = False
    """vLLM's; has no effect: changed files are another adapter anyway."""

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path` as a string."""
        return os.fspath(self.lora_path)


LoRAChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one for each; None: the base model."""


def checked(given: Any) -> Any:
    """The argument `lora_request` of a method. Raises `InvalidParameter` unless it is a `LoRAChoice` with paths."""
    for each in given if isinstance(given, list | tuple) else [given]:
        if each is None:
            continue
        if not isinstance(each, LoRARequest):
            raise InvalidParameter(f"lora_request: expected a LoRARequest, not {type(each).__name__}", "lora_request")
        if not isinstance(each.lora_path, str | os.PathLike) or not each.path:
            raise InvalidParameter(f"lora_request {each.lora_name!r}: lora_path is missing", "lora_request")
    return given


async def opened(frontend: Frontend, given: LoRARequest | None) -> RequestAdapter | None:
    """Read an adapter's files, unless they are known already. Raises `ConfigError` for files that are missing or not
    supported, and without `enable_lora`."""
    return None if given is None else await frontend.adapters.open(given.path, given.lora_name)


async def opened_for(frontend: Frontend, given: LoRAChoice, count: int) -> list[RequestAdapter | None]:
    """The adapters of `count` prompts, otherwise like `opened`. Raises `ValueError` if there are not as many."""
    if not isinstance(given, Sequence):
        return [await opened(frontend, given)] * count
    if len(given) != count:
        raise ValueError(f"lora_request: {len(given)} for {count} prompts")
    different = list(dict.fromkeys(given))
    adapters = await asyncio.gather(*(opened(frontend, each) for each in different))
    found = dict(zip(different, adapters, strict=True))
    return [found[each] for each in given]
