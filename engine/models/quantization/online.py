"""Quantization of 16-bit checkpoints while they are loaded (`--quantization fp8`, `mxfp4`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.engine.models.families.tensors import weight_names
from quire.engine.models.model_spec import ModelSpec
from quire.engine.models.quantization.method import FLOATS, Method, Scheme, Shape, Stored, with_names_of_stacks
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OnlineScheme(Scheme):
    """The plain weight, which its reader rounds. Factors are those of the whole weight on every rank, so that results
    do not depend on the layout."""

    is_transposed: bool = False
    """The checkpoint has `[…, in, out]`."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        *experts, out, columns = shape
        stored = (*experts, columns, out) if self.is_transposed else shape
        found = {f"{module}.weight": Stored(FLOATS, (stored,))}
        return with_names_of_stacks(module, found) if experts else found


SCHEMES = {
    "fp8": OnlineScheme(values="fp8", activations="fp8"),
    "mxfp4": OnlineScheme(values="e2m1", group=32),
}
"""fp8: a scale for each output feature of all linear layers. mxfp4: the experts' weights in groups of 32."""


@dataclass(frozen=True, kw_only=True)
class Online(Method):
    requested: str
    """A key of SCHEMES."""
    modules: tuple[str, ...]
    """The names of the modules that are quantized, with a star for each number, sorted: the checkpoint's, or those of
    transformers' implementation until it knows the checkpoint."""

    def scheme(self, module: str) -> Scheme | None:
        return SCHEMES[self.requested] if with_stars(module) in self.modules else None


def of(requested: str, arch: ModelSpec) -> Online:
    """Quantize the layers of this model: those that published checkpoints quantize, too. Heads, embeddings and routers
    are none of them. Raises `ConfigError` if there is nothing to quantize, or inputs are not whole groups.
    """
    part, scheme = ".experts." if requested == "mxfp4" else "", SCHEMES[requested]
    modules = linear_modules(arch, part)
    if not modules:
        raise ConfigError(
            f"--quantization {requested} quantizes experts, and {arch.name} has none; use fp8, int8 or int4"
        )
    for layer in set(arch.layers):
        for each in layer.matrices(arch.hidden_size, 1):
            columns = each.inputs or each.columns
            if part in each.module and (problem := scheme.problem((each.rows, columns))) is not None:
                raise ConfigError(f"--quantization {requested}: in {each.module} {problem}; use fp8, int8 or int4")
    return Online(name=f"online {requested}", requested=requested, modules=tuple(sorted(modules)))


def linear_modules(arch: ModelSpec, part: str = "") -> frozenset[str]:
    """The linear layers and experts of a model by their names in the checkpoint, with a star for each number; with
    `part`, those whose path in a layer of ours has it. They do not include MLA's projection of the latent."""
    modules, names = set[str](), weight_names(arch)
    for number, layer in enumerate(arch.layers):
        for each in layer.matrices(arch.hidden_size, 1):
            if each.module and part in each.module:
                modules.update(map(with_stars, names[number, each.module]))
    return frozenset(modules)


def with_stars(module: str) -> str:
    """The name of a module with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
