"""Replacements for transformers' layers, sharded over the ranks of a stage by the model's tensor-parallel plan.

A plan maps parameters and modules, with `*` for layer numbers, to the names of styles; transformers documents these in
`transformers/distributed/tensor_parallel.py`. Parameters and modules without a style are replicated on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.embedding import TiedLinear, VocabParallelEmbedding
from quire.engine.layers.weight import Shard, Weight, whole
from quire.engine.protocol.errors import ConfigError

WHOLE = ("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params")
"""The styles of parameters and modules that every rank has as a whole."""
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_HOOKS = ("moe_tp_experts", "moe_identity_expert", "all_reduce")
_SHARDED = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "embedding_rowwise")
_SUPPORTED = frozenset((*WHOLE, *_GATHERED, *_SPLIT, *_HOOKS, *_SHARDED))


def without_numbers(path: str) -> str:
    """The path with `*` for every layer number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


class ShardingPlan:
    """A model's tensor-parallel plan."""

    def __init__(self, styles: Mapping[str, str], size: int) -> None:
        self._styles = dict(styles) if size > 1 else {}
        if size > 1 and not self._styles:
            raise ConfigError(f"--tensor-parallel-size {size}: transformers has no tensor-parallel plan for this model")
        if unknown := sorted({style for style in self._styles.values() if style not in _SUPPORTED}):
            raise ConfigError(
                f"--tensor-parallel-size {size}: the styles {', '.join(unknown)} of this model's tensor-parallel plan "
                "are not supported"
            )

    def __getitem__(self, path: str) -> str:
        """The style of a module or parameter; empty: none."""
        return self._styles.get(without_numbers(path), "")


def cut(name: str, total: int, parallel: Parallel) -> tuple[int, int]:
    """Start and length of this rank's equal share of `total`."""
    if total % parallel.size:
        raise ConfigError(f"--tensor-parallel-size {parallel.size} does not divide the {total} features of {name}")
    length = total // parallel.size
    return parallel.rank * length, length


class PlannedLinear(TiedLinear):
    """Replaces transformers' `nn.Linear` or `Conv1D`: `[..., in]` → `[..., out]`."""

    def __init__(self, name: str, like: nn.Linear | Conv1D, style: str, parallel: Parallel) -> None:
        super().__init__()
        self._parallel, self._style = parallel, style
        self.is_transposed = isinstance(like, Conv1D)
        """Whether transformers' weight is `[in, out]`; this one is not."""
        shape = like.weight.shape[::-1] if self.is_transposed else like.weight.shape
        self.out_features, self.in_features = rows, columns = shape
        self.is_router = bool(re.search(r"(^|[._])(gate|router)$|router", name))
        """Routers are not quantized: rounding costs more accuracy than it saves."""
        self.is_read_directly = False
        """Whether the model reads the weight directly, so that it must not be packed."""
        dtype, (start, length) = like.weight.dtype, (0, columns)
        bias: tuple[tuple[int, ...], Shard] = (rows,), whole(rows)
        if style in ("colwise", *_GATHERED):
            if style == "colwise":
                start, length = cut(name, rows, parallel)
                share = length
            else:  # the last ranks may be padded: the gathered output is truncated
                share = -(-rows // parallel.size)
                start = min(parallel.rank * share, rows)
                length = min(share, rows - start)
            self.weight = Weight((share, columns), Shard((rows, columns), start, length), dtype=dtype)
            bias = (share,), Shard((rows,), start, length)
        elif style in ("rowwise", *_SPLIT):
            start, length = cut(name, columns, parallel)
            self.weight = Weight((rows, length), Shard((rows, columns), start, length, dim=1), dtype=dtype)
        elif style in ("", *WHOLE):
            self.weight = Weight((rows, columns), whole(rows, columns), dtype=dtype)
        else:
            raise ConfigError(f"--tensor-parallel-size: the style {style} of {name}, a linear layer, is not supported")
        self._inputs = slice(start, start + length) if style in _SPLIT else None
        self.bias = Weight(bias[0], bias[1], dtype=dtype) if like.bias is not None else None

    @property
    def may_be_quantized(self) -> bool:
        return super().may_be_quantized and not (self.is_router or self.is_read_directly)

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Pack as every linear layer does, except that routers are not quantized."""
        if not self.is_read_directly:
            super().pack(None if self.is_router else quantization)

    def forward(self, x: Tensor) -> Tensor:
        lead, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
        if self._inputs is not None:
            x = x[:, self._inputs].contiguous()
        if self._style in ("rowwise", *_SPLIT):
            bias = self.bias if self._parallel.rank == 0 else None  # added by one rank only
            out = self._parallel.all_reduce(self.product(x, bias))
        else:
            out = self.product(x, self.bias)
            if self._style in _GATHERED:
                out = self._parallel.all_gather(out)[:, : self.out_features]
        return out.view(*lead, out.shape[-1])


class PlannedEmbedding(VocabParallelEmbedding):
    """Replaces transformers' `nn.Embedding` of tokens, with the vocabulary sharded over the ranks."""

    def __init__(self, like: nn.Embedding, parallel: Parallel) -> None:
        super().__init__(like.num_embeddings, like.embedding_dim, parallel)
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            like.num_embeddings,
            like.embedding_dim,
            like.padding_idx,
        )


def planned_parameter(name: str, like: Tensor, style: str, parallel: Parallel) -> Weight:
    """A parameter outside linear layers: a norm's, or a stack of experts' matrices."""
    if like.ndim == 3:
        return planned_stack(name, like, style, parallel)
    shape, last = tuple(like.shape), like.ndim - 1
    if not shape:
        raise ConfigError(f"{name} is a parameter without dimensions, which is not supported")
    rows = max(last - 1, 0)  # the dimension of output features
    match style:
        case "colwise" | "rowwise" | "embedding_rowwise":
            dim = rows if style == "colwise" else 0 if style == "embedding_rowwise" else last
            if style == "rowwise" and like.ndim == 1:
                raise ConfigError(f"--tensor-parallel-size: the style rowwise of {name}, a vector, is not supported")
            start, length = cut(name, shape[dim], parallel)
            local = (*shape[:dim], length, *shape[dim + 1 :])
            return Weight(local, Shard(shape, start, length, dim=dim), dtype=like.dtype)
        case "packed_colwise" | "packed_rowwise":
            dim = rows if style == "packed_colwise" else last
            half = shape[dim] // 2
            start, length = cut(name, half, parallel)
            shards = (
                Shard(shape, start, length, dim=dim),
                Shard(shape, half + start, length, dim=dim, offset=length),
            )
            return Weight((*shape[:dim], 2 * length, *shape[dim + 1 :]), *shards, dtype=like.dtype)
    if style not in ("", *WHOLE):
        raise ConfigError(f"--tensor-parallel-size: the style {style} of {name}, a parameter, is not supported")
    return Weight(shape, whole(*shape), dtype=like.dtype)


def planned_stack(name: str, like: Tensor, style: str, parallel: Parallel, *, is_transposed: bool = False) -> Weight:
    """A parameter of all experts, `[experts, rows, columns]` or `[experts, rows]`, each sharded as a parameter of its
    own. `is_transposed`: transformers' has columns before rows."""
    one, experts = planned_parameter(name, like[0], style, parallel), range(len(like))
    shards = [
        replace(shard, shape=shard.shape[::-1], dim=1 - shard.dim) if is_transposed else shard for shard in one.shards
    ]
    shape = one.shape[::-1] if is_transposed else one.shape
    each = [replace(shard, expert=expert, local_expert=expert) for expert in experts for shard in shards]
    return Weight((len(like), *shape), *each, dtype=like.dtype)


def hook(path: str, module: nn.Module, style: str, parallel: Parallel) -> None:
    """Add the plan's operations on the inputs or outputs of a module that is not replaced."""
    if style in ("moe_tp_experts", "all_reduce"):
        module.register_forward_hook(lambda module, inputs, output: _summed(output, parallel))
    elif style == "moe_identity_expert":
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] / parallel.size, *inputs[1:]))
    elif style not in ("", *WHOLE) and not isinstance(module, nn.Embedding):
        raise ConfigError(
            f"--tensor-parallel-size: the style {style} of {path} ({type(module).__name__}) is not supported"
        )


def _summed(output: Any, parallel: Parallel) -> Any:
    return parallel.all_reduce(output) if isinstance(output, Tensor) else output
