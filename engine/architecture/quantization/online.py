"""Quantization while weights are loaded: `--quantization fp8` and `mxfp4`, and on GPUs `int8` and `int4`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from quire.engine.architecture.families.tensors import weight_names
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.quantization.form import INT4_GROUPS
from quire.engine.architecture.quantization.method import FLOATS, Method, Scheme, Shape, Stored, with_names_of_stacks
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OnlineScheme(Scheme):
    """The plain weight, which its reader rounds. Every rank uses the factors of the whole weight, so results do not
    depend on the layout."""

    is_transposed: bool = False
    """The checkpoint has `[…, in, out]`."""
    stored: Scheme | None = None
    """How the checkpoint quantizes the weight, if it does."""

    def tensors(self, module: str, shape: Shape) -> dict[str, Stored]:
        if self.stored is not None:
            return self.stored.tensors(module, shape)
        *experts, out, columns = shape
        stored = (*experts, columns, out) if self.is_transposed else shape
        found = {f"{module}.weight": Stored(FLOATS, (stored,))}
        return with_names_of_stacks(module, found) if experts else found


SCHEMES = {
    "fp8": OnlineScheme(values="fp8", activations="fp8"),
    "mxfp4": OnlineScheme(values="e2m1", group=32),
    "int8": OnlineScheme(values="int8", activations="int8"),
    "int4": OnlineScheme(values="int4", has_offsets=True),
}
"""fp8, int8: a scale for each output feature of all linear layers. mxfp4: the experts' weights in groups of 32. int4:
groups of the largest size of INT4_GROUPS that divides the inputs of all layers. int8, int4: the head is int8."""


@dataclass(frozen=True, kw_only=True)
class Online(Method):
    requested: str
    """A key of SCHEMES."""
    modules: tuple[str, ...]
    """The names of the modules that are quantized, with a star for each number, sorted: the checkpoint's names, or the
    names in transformers' implementation until it knows the checkpoint."""
    group: int = 0
    """Inputs that share factors; 0: all."""
    heads: tuple[str, ...] = ()
    """Names of the head, which becomes int8."""
    stored: Method | None = None
    """How the checkpoint is quantized, if it is."""

    def scheme(self, module: str) -> Scheme | None:
        if module in self.heads:
            return SCHEMES["int8"]
        if self.is_rounded(module):
            return replace(SCHEMES[self.requested], group=self.group)
        return None if self.stored is None else self.stored.scheme(module)

    def is_rounded(self, module: str) -> bool:
        """Whether this module's weight is quantized while it is loaded."""
        return module in self.heads or with_stars(module) in self.modules


def of(requested: str, arch: ModelSpec, stored: Method | None = None) -> Online:
    """Quantize the layers of this model that published checkpoints quantize, too. These exclude embeddings and routers,
    and with fp8 and mxfp4 heads. Raises `ConfigError` if there is nothing to quantize, or inputs are not whole groups.
    """
    part, scheme = ".experts." if requested == "mxfp4" else "", SCHEMES[requested]
    modules = linear_modules(arch, part)
    if not modules:
        raise ConfigError(
            f"--quantization {requested} quantizes experts, and {arch.name} has none; use fp8, int8 or int4"
        )
    shapes = {
        (each.module, each.rows, each.inputs or each.columns)
        for layer in set(arch.layers)
        for each in layer.matrices(arch.hidden_size, 1)
        if part in each.module
    }
    if requested == "int4":
        sizes = (size for size in INT4_GROUPS if all(columns % size == 0 for _, _, columns in shapes))
        scheme = replace(scheme, group=next(sizes, INT4_GROUPS[-1]))
    for module, rows, columns in sorted(shapes):
        if (problem := scheme.problem((rows, columns))) is not None:
            others = "fp8 or int8" if requested == "int4" else "fp8, int8 or int4"
            raise ConfigError(f"--quantization {requested}: in {module} {problem}; use {others}")
    heads: tuple[str, ...] = ()
    if requested in ("int8", "int4") and not arch.tie_embeddings:
        heads = tuple(weight_names(arch).get((None, arch.outer_matrices(1)[1].module), ()))
    return Online(
        name=f"online {requested}" + (f" from {stored.name}" if stored is not None else ""),
        requested=requested,
        modules=tuple(sorted(modules)),
        group=scheme.group,
        heads=heads,
        stored=stored,
    )


def linear_modules(arch: ModelSpec, part: str = "") -> frozenset[str]:
    """The linear layers and experts of a model by their names in the checkpoint, with a star for each number; with
    `part`, only modules whose path in our layer contains it. They do not include MLA's projection of the latent."""
    modules, names = set[str](), weight_names(arch)
    for number, layer in enumerate(arch.layers):
        for each in layer.matrices(arch.hidden_size, 1):
            if each.module and part in each.module:
                modules.update(map(with_stars, names[number, each.module]))
    return frozenset(modules)


def with_stars(module: str) -> str:
    """The name of a module with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
