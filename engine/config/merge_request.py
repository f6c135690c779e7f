"""The request of `quire merge` to the process that reads weights (`quire.engine.checkpoints.merge`). No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.engine.architecture.adapter_spec import AdapterSpec
from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.architecture.quantization.method import FLOATS
from quire.engine.config.checkpoint_tensors import by_needed_name
from quire.engine.config.engine_config import ModelConfig
from quire.engine.process import tool
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files
from quire.engine.repository.adapter_folder import AdapterFolder
from quire.engine.repository.model_files import TensorInfo

_MODULE = "quire.engine.checkpoints.merge"


@dataclass(frozen=True)
class MergeRequest:
    """Write a model with the changes of an adapter to the folder `out`."""

    model: ModelConfig
    adapter: AdapterFolder
    spec: AdapterSpec
    headers: Mapping[str, TensorInfo]
    """The tensors of the base by the names that the model needs them by."""
    embedding: str
    """The name of the embedding's tensor; empty: it is not known."""
    head: str
    out: Path

    @property
    def is_tied(self) -> bool:
        """Whether the base's head is its embedding."""
        return bool(self.head) and self.model.architecture.tie_embeddings

    @property
    def untied_head(self) -> TensorInfo:
        """A tensor for a head that is no longer tied, named as the file names its others."""
        embedding = self.headers[self.embedding]
        before = "language_model." if embedding.name.startswith("language_model.") else ""
        return replace(embedding, name=f"{before}{self.head.removeprefix(before)}")

    def bias_of(self, name: str) -> str:
        """The bias of the module that has this weight."""
        return f"{name.removesuffix('weight')}bias"

    def run(self) -> None:
        """Run it in a process of its own, which shows a progress bar. Raises `ConfigError` if it fails."""
        tool.run(_MODULE, self, self.out)


def merge_request(model: ModelConfig, adapter: AdapterFolder, out: Path) -> MergeRequest:
    """Check that an adapter can be merged into a model, whose weights are here. Raises `ConfigError` that names the
    setting or the tensor that prevents it."""
    arch, headers = model.architecture, model_files.check_weights(model.path, model.load_format)
    if headers is None:
        raise ConfigError(f"{model.path}: weights in *.bin are not supported; save the model as safetensors")
    is_built = isinstance(arch, TransformersModelSpec)
    has_head = model.pooling is None
    if not is_built:
        named = by_needed_name(headers, FAMILIES[arch.name].prefix, checkpoint_tensors(arch, has_head=has_head))
        if len(named) != len(headers):
            raise ConfigError(f"{model.path}: several tensors of the weights are the same one of {arch.name}")
        headers = named
    shapes = {name: info.shape for name, info in headers.items()}
    base = Base(None if is_built else arch, shapes, has_head=has_head)
    spec = adapter.spec(base, arch.name)
    request = MergeRequest(model, adapter, spec, headers, base.embedding, base.head, out)
    if spec.invocation_tokens:
        raise ConfigError(
            f"{adapter.path}: alora_invocation_tokens: the adapter is active only behind these tokens, so it cannot be "
            "merged into weights"
        )
    for name, change in spec.changes.items():
        if name not in headers and not (request.is_tied and name == request.head):
            raise ConfigError(f"{model.path}: {name}, which {adapter.path} changes, is missing")
        biased = [each.bias.tensor for each in change.low_rank if each.bias is not None]
        if biased and (
            request.bias_of(name) not in headers or any(each.expert is not None for each in change.low_rank)
        ):
            raise ConfigError(f"{adapter.path}: {biased[0]}: the base has no {request.bias_of(name)} to merge it into")
    if is_built and arch.tie_embeddings:
        for name, change in spec.changes.items():
            if change.shape[:1] == (arch.vocab_size,):
                raise ConfigError(
                    f"{adapter.path}: changes of {name} are not supported: {arch.name} may use it as embedding and head"
                )
    plain = {*FLOATS, "I64", "I32", "U8", "BOOL"}
    if wrong := next((info for info in headers.values() if info.dtype not in plain), None):
        raise ConfigError(f"{wrong.file}: {wrong.name} has the type {wrong.dtype}, which is not supported")
    return request
