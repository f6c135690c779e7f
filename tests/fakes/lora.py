"""Random adapters of whole models, with torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.engine.architecture.adapters.base import Base, Module, num_rows
from quire.engine.checkpoints import merge
from quire.engine.config.engine_config import ModelConfig
from quire.engine.config.merge_request import merge_request
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.repository.adapter_folder import open_adapter

SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "peft_version": "0.21.2"}


def write_lora(
    folder: Path,
    model: ModelConfig,
    tensors: Iterable[str],
    seed: int = 1,
    *,
    settings: Mapping[str, Any] = SETTINGS,
    size: float = 0.1,
    dtype: torch.dtype = torch.float32,
    biases: Iterable[str] = (),
    others: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> AdapterRef:
    """An adapter of a few of the tensors of a model's checkpoint; those of `settings` with `use_dora` and `lora_bias`
    have a magnitude and a bias. The numbers of the matrices are of this `size` and `dtype`. `biases` are trained as a
    whole. `others` are the shapes of further tensors."""
    base, generator = Base(model.architecture, has_head=model.pooling is None), torch.Generator().manual_seed(seed)
    found = dict[str, Tensor]()
    rank, modules = int(settings["r"]), dict[str, Module]()
    for name in tensors:
        if (module := base.module(path := name.removesuffix(".weight"))) is not None:
            modules[path] = module
        else:  # a stack: its experts one by one
            own = {key[1:]: each for key, each in base._modules.items() if key[0] == "=" and each is not None}
            modules |= {path: each for path, each in own.items() if len(each) == 1 and each[0].tensor == name}
    for path, module in modules.items():
        rows, columns = num_rows(module), module[0].columns
        shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (rank, columns), "lora_B.weight": (rows, rank)}
        shapes |= {"lora_magnitude_vector": (rows,)} if settings.get("use_dora") else {}
        shapes |= {"lora_B.bias": (rows,)} if settings.get("lora_bias") else {}
        for kind, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator)
            is_matrix = len(shape) > 1
            found[f"base_model.model.{path}.{kind}"] = (numbers * size).to(dtype) if is_matrix else 0.5 + numbers.abs()
    for name in biases:
        found[f"base_model.model.{name}"] = torch.randn(base.shapes[name], generator=generator)
    for name, shape in others.items():
        found[f"base_model.model.{name}"] = torch.randn(shape, generator=generator) * size
    return write_adapter(folder, found, settings)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] = SETTINGS) -> AdapterRef:
    """An adapter with these tensors."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(settings)))
    return AdapterRef(open_adapter(folder).digest, (str(folder),))


def merged(model: ModelConfig, adapter: AdapterRef, out: Path) -> Path:
    """The checkpoint with the adapter's changes."""
    merge.run(merge_request(model, open_adapter(Path(adapter.paths[0])), out))
    return out
