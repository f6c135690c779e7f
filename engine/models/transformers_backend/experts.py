"""Replacement for transformers' experts: all families have the same interface, and a gate of their own."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations
from transformers.integrations.moe import _default_apply_gate

from quire import kernels
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.moe import ExpertMatrices, ExpertStack
from quire.engine.layers.quantized import loaded_weight
from quire.engine.models.transformers_backend.sharding import ShardingPlan, planned_stack
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.reference.experts import by_expert

_ACTIVATIONS: dict[type[nn.Module], Literal["silu", "gelu", "gelu_tanh"]] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
}
"""Gates that experts are packed with; others are called between the matrices of each expert."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module has transformers' mark of experts."""
    return hasattr(module, "_apply_gate")


def can_replace(module: Any) -> bool:
    """Whether experts are nothing but their matrices and a gate."""
    if not is_experts(module) or not hasattr(module, "is_transposed") or getattr(module, "has_post_expert_norm", False):
        return False
    tensors = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    return tensors == set(_names(module).values())


def _names(module: Any) -> dict[str, str]:
    """transformers' names of the parameters, by ours."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up.weight": first, "down.weight": "down_proj"}
    biases = {"gate_up.bias": f"{first}_bias", "down.bias": "down_proj_bias"}
    return names | biases if module.has_bias else names


class PlannedExperts(ExpertStack):
    """Replaces transformers' experts, sharded as its plan shards their parameters."""

    def __init__(self, path: str, like: Any, plan: ShardingPlan, parallel: Parallel) -> None:
        super().__init__()
        self._like = [like]  # in a list, as it is no longer a part of the model
        self.names: dict[str, str] = _names(like)
        """transformers' names of the parameters, by ours."""
        self.is_transposed = bool(like.is_transposed)
        """Whether transformers' weights are `[experts, in, out]`; these are not."""
        has_known_gate = like.has_gate and like.is_concatenated and type(like)._apply_gate is _default_apply_gate
        self._activation = _ACTIVATIONS.get(type(like.act_fn)) if has_known_gate else None
        self._product: kernels.PackedExperts | None = None
        self._products: tuple[list[kernels.PackedLinear], ...] = ()
        self._biases: tuple[Tensor | None, ...] = ()

        def style_of(layer: str, name: str) -> str:
            """Some plans are for a checkpoint whose rows of gates and ups alternate, unlike here."""
            style, is_joint = plan[f"{path}.{name}"], layer == "gate_up" and like.has_gate and like.is_concatenated
            return "packed_colwise" if is_joint and style == "colwise" else style

        fixed_by = "--model-impl transformers"

        def matrices(layer: str) -> ExpertMatrices:
            name, bias = self.names[f"{layer}.weight"], self.names.get(f"{layer}.bias")
            weight = planned_stack(
                f"{path}.{name}",
                getattr(like, name),
                style_of(layer, name),
                parallel,
                is_transposed=self.is_transposed,
            )
            if bias is None:
                return ExpertMatrices(weight, None, fixed_by=fixed_by)
            style = style_of(layer, bias)
            biases = planned_stack(f"{path}.{bias}", getattr(like, bias), style, parallel)
            return ExpertMatrices(weight, biases, fixed_by=fixed_by)

        self.gate_up, self.down = matrices("gate_up"), matrices("down")
        self._num_experts = len(self.down.weight)
        is_summed = any(shard.dim == 1 and shard.length < shard.shape[1] for shard in self.down.weight.shards)
        self._adds_bias = parallel.rank == 0 or not is_summed

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Pack the experts together if Quire's kernels have their gate, else each matrix."""
        weights = loaded_weight(self.gate_up), loaded_weight(self.down)
        self._biases = self._own_biases()
        if self._activation is not None:
            self._product = kernels.pack_experts(
                *weights,
                self._activation,
                gate_up_bias=self._biases[0],
                down_bias=self._biases[1],
                quantization=quantization,
            )
        else:
            self._products = tuple(_packed(each, quantization) for each in weights)
        for weight in self.parameters():
            weight.data = weight.data.new_empty(0)

    def _own_biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases that this rank adds. If the ranks' results are summed, only one rank adds the second bias."""
        gate_up, down = (None if each.bias is None else each.bias.data for each in (self.gate_up, self.down))
        return gate_up, down if self._adds_bias else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """transformers' arguments: `[tokens, hidden]`, and `[tokens, top_k]` twice; this rank's part of the sums."""
        x, weights, ids = hidden_states, top_k_weights.float(), top_k_index
        if self._product is not None:
            return self._product(x, weights, ids)
        return by_expert(x, weights, ids, self._num_experts, self._feed_forward)

    def _feed_forward(self, expert: int, rows: Tensor) -> Tensor:
        like = self._like[0]
        inner = self._multiply(0, expert, rows)
        inner = like._apply_gate(inner) if like.has_gate else like.act_fn(inner)
        return self._multiply(1, expert, inner)

    def _multiply(self, layer: int, expert: int, x: Tensor) -> Tensor:
        bias = (self._biases or self._own_biases())[layer]
        bias = None if bias is None else bias[expert]
        if self._products:
            return self._products[layer][expert](x, bias)
        return F.linear(x, (self.gate_up, self.down)[layer].weight[expert], bias)


def _packed(weights: Tensor | QuantizedWeight, quantization: kernels.Quantization | None) -> list[kernels.PackedLinear]:
    if isinstance(weights, QuantizedWeight):
        return [kernels.pack_linear(weights.at(expert)) for expert in range(len(weights.codes))]
    return [kernels.pack_linear(weight, quantization) for weight in weights]
