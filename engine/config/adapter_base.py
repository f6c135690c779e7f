"""The base of a model's adapters. No torch here."""

from __future__ import annotations

from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config.checkpoint_tensors import by_needed_name, classifier_tensors
from quire.engine.config.engine_config import ModelConfig
from quire.engine.repository import model_files


def adapter_base(model: ModelConfig) -> Base:
    """Return the names and shapes that adapters of a model may change: those of its architecture, and of safetensors
    also the others of the checkpoint, such as a classifier's head, and those that no answer depends on."""
    arch, has_head = model.architecture, model.pooling is None
    is_built = isinstance(arch, TransformersModelSpec)
    headers = None
    if model.load_format == "safetensors":
        headers = model_files.check_weights(model.path, model.load_format)
        if headers is not None and not is_built:
            needed = checkpoint_tensors(arch, has_head=has_head)
            headers = by_needed_name(headers, FAMILIES[arch.name].prefix, needed)
    shapes = {name: tuple(shape) for name, shape in classifier_tensors(model).items()}
    shapes |= {name: info.shape for name, info in (headers or {}).items()}
    return Base(None if is_built else arch, shapes, has_head=has_head)
