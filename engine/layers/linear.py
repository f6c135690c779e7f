"""Linear layers sharded over the ranks of a stage (Shoeybi et al. 2019, "Megatron-LM")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.quantized import QuantizedParameters, loaded_weight
from quire.engine.layers.weight import Shard, Weight, whole
from quire.kernels.quantized import QuantizedWeight


@dataclass(frozen=True)
class Partition:
    """This rank's output features of one checkpoint tensor: `length` of `total`, from `start` on."""

    name: str
    total: int
    start: int
    length: int

    def shard(self, *columns: int, offset: int = 0) -> Shard:
        """The shard of a tensor whose rows are these features."""
        return Shard((self.total, *columns), self.start, self.length, offset=offset, part=self.name)


def divided(name: str, total: int, parallel: Parallel) -> Partition:
    """An equal share of the output features."""
    length = total // parallel.size
    assert length * parallel.size == total
    return Partition(name, total, parallel.rank * length, length)


class Linear(nn.Module):
    """`x @ weight.T + bias`. Once its weight is loaded, it is packed into the device's fastest format."""

    weight: Weight
    may_have_pool = True
    """Whether adapters may change it: only a product reads the weight, and it is given the adapters of its rows."""
    may_have_new_bias = True
    """Whether adapters may also add a bias of their own to the product."""
    adds_bias = True
    """Whether this rank adds the biases; else another one does, before the ranks' results are summed."""
    has_earlier_rows = False
    """Whether it also multiplies rows of tokens before the step: all tokens of a request must have the same adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized: QuantizedParameters | None = None
        """In place of the weight, if it is kept as the checkpoint stores it."""
        self._product: kernels.PackedLinear | None = None
        self.pool: kernels.LowRankPool | None = None
        """Its changes by adapters; None: no adapter changes this layer."""

    @property
    def may_be_quantized(self) -> bool:
        """Whether `quantized` may replace the weight: only a product reads it."""
        return True

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Replace the weight by its packed form; the parameters become empty."""
        self._product = self._packed(loaded_weight(self), quantization)
        self.weight.data = self.weight.data.new_empty(0)

    def _packed(
        self, weight: Tensor | QuantizedWeight, quantization: kernels.Quantization | None
    ) -> kernels.PackedLinear:
        return kernels.pack_linear(weight, quantization, inputs=self.weight.input_dtype)

    @property
    def row_rounding(self) -> kernels.RowRounding | None:
        """How inputs may be rounded in advance; None: they may not."""
        return None if self._product is None else self._product.row_rounding

    @property
    def reads_plain_rows(self) -> bool:
        """Whether inputs that are rounded in advance must also be kept as they are."""
        return self.pool is not None

    def product(
        self,
        x: Tensor | kernels.RoundedRows,
        bias: Tensor | None = None,
        adapters: kernels.RowAdapters | None = None,
    ) -> Tensor:
        """`[rows, in]` → `[rows, out]`, changed by the adapters of the rows. Without `adapters`, no row has one."""
        if adapters is not None and self.pool is not None:
            if isinstance(adapters, kernels.OneAdapter):
                adapters = adapters.rows(kernels.plain_rows(x))
            if self._product is not None:
                return self._product.with_low_rank(x, bias, self.pool, adapters)
            assert isinstance(x, Tensor)
            return self._changed(F.linear(x, self.weight, bias), x, adapters)
        if isinstance(x, kernels.RoundedRows):
            assert self._product is not None
            return self._product.of_rounded(x, bias)
        return F.linear(x, self.weight, bias) if self._product is None else self._product(x, bias)

    def _changed(self, out: Tensor, x: Tensor, adapters: kernels.AdapterRows | None) -> Tensor:
        """The product `out`, which is changed in place."""
        if adapters is not None and self.pool is not None and adapters.has_adapters:
            kernels.add_low_rank(out, x, self.pool, adapters)
        return out


class ColumnParallelLinear(Linear):
    """`x @ weight.T + bias` for this rank's output features; the outputs of the parts are concatenated."""

    def __init__(self, in_features: int, parts: Sequence[Partition], *, bias: bool) -> None:
        super().__init__()
        rows = sum(part.length for part in parts)
        self.weight = Weight((rows, in_features), *stacked(parts, (in_features,)))
        self.bias = Weight((rows,), *stacked(parts, ())) if bias else None

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """`[tokens, in_features]` → `[tokens, rows of this rank]`."""
        return self.product(x, self.bias, adapters)


class GatedLinear(ColumnParallelLinear):
    """`act_mul(x @ weight.T + bias)` (Shazeer 2020); the parts are gate and up."""

    def __init__(self, in_features: int, gate: Partition, up: Partition, activation: str, *, bias: bool) -> None:
        super().__init__(in_features, (gate, up), bias=bias)
        self._activation = activation

    def _packed(
        self, weight: Tensor | QuantizedWeight, quantization: kernels.Quantization | None
    ) -> kernels.PackedLinear:
        return kernels.pack_gated(weight, self._activation, quantization, inputs=self.weight.input_dtype)

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """`[tokens, in_features]` → `[tokens, gates of this rank]`."""
        out = super().forward(x, adapters)
        return out if self._product is not None else kernels.act_mul(out, self._activation)

    def forward_to(
        self, layer: Linear, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None
    ) -> Tensor | kernels.RoundedRows:
        """The same for a layer that multiplies it, rounded if that layer rounds its inputs and adapters change neither
        of the two."""
        rounding, are_changed = layer.row_rounding, adapters is not None and (self.pool or layer.pool) is not None
        if rounding is None or are_changed or not isinstance(self._product, kernels.PackedGatedLinear):
            return self(x, adapters)  # type: ignore[no-any-return]
        return self._product.rounded(x, self.bias, rounding)


def stacked(parts: Sequence[Partition], columns: tuple[int, ...]) -> list[Shard]:
    """The shards of a parameter that has the rows of `parts`, one part after another."""
    shards, offset = [], 0
    for part in parts:
        shards.append(part.shard(*columns, offset=offset))
        offset += part.length
    return shards


class RowParallelLinear(Linear):
    """`x @ weight.T + bias` with the input features sharded over the ranks; the ranks' results are summed."""

    def __init__(self, in_features: int, out_features: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self._parallel = parallel
        columns = in_features // parallel.size
        assert columns * parallel.size == in_features
        shard = Shard((out_features, in_features), parallel.rank * columns, columns, dim=1)
        self.weight = Weight((out_features, columns), shard)
        self.bias = Weight((out_features,), whole(out_features)) if bias else None
        self.adds_bias = parallel.rank == 0

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """`[tokens, in_features / ranks]` → `[tokens, out_features]`, the same on every rank."""
        return self._parallel.all_reduce(self.partial(x, adapters))

    def partial(self, x: Tensor | kernels.RoundedRows, adapters: kernels.RowAdapters | None = None) -> Tensor:
        """This rank's part of that sum."""
        return self.product(x, self.bias if self.adds_bias else None, adapters)


class GroupedLinear(Linear):
    """Projects groups of features separately, each by weights of its own, which are never quantized."""

    def __init__(self, weight: Weight, groups: int = 1) -> None:
        """`weight` is `[groups * out, in]` or `[groups, out, in]`, as checkpoints have it."""
        super().__init__()
        self.weight, self._groups = weight, groups
        self.may_have_pool = groups == 1 and weight.ndim == 2

    @property
    def may_be_quantized(self) -> bool:
        return False

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """On a GPU, do nothing: one product of all groups reads the weight as it is."""
        if self.weight.device.type == "cpu":
            self._product = kernels.pack_groups(self.weight.flatten(0, -2), self._groups)
            self.weight.data = self.weight.data.new_empty(0)

    def forward(self, x: Tensor | kernels.RoundedRows, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, groups * in]` → `[tokens, groups * out]`"""
        assert isinstance(x, Tensor)
        if self._product is not None:
            return self._changed(self._product(x, None), x, adapters)
        weight = self.weight.view(self._groups, -1, self.weight.shape[-1])
        grouped = torch.unflatten(x, 1, (self._groups, -1))
        out = torch.bmm(grouped.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)
        return self._changed(out, x, adapters)


class ReplicatedLinear(Linear):
    """A small linear layer whose precision matters: replicated on every rank, in float32 whatever the model's
    quantization."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = Weight((out_features, in_features), whole(out_features, in_features))
        self.bias = Weight((out_features,), whole(out_features)) if bias else None

    @property
    def may_be_quantized(self) -> bool:
        return False

    def pack(self, quantization: kernels.Quantization | None) -> None:
        self._product = kernels.pack_linear(self.weight.float())
        self.weight.data = self.weight.data.new_empty(0)

    def logits(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, in_features]` → float32 `[tokens, out_features]`."""
        x, bias = x.float(), None if self.bias is None else self.bias.float()
        out = F.linear(x, self.weight.float(), bias) if self._product is None else self._product(x, bias)
        return self._changed(out, x, adapters)
