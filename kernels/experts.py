"""A mixture of experts' feed-forwards in one operation, their weights packed once, as `quire.kernels.linear` packs one.

Where the products are our own, all experts are one call: rows are sorted by expert, experts without rows cost nothing,
and a token's result depends on nothing but the token (kernels/cpu/experts.cpp). Elsewhere the packed linear layers of
the experts that have rows are called one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import linear, packed, reference
from quire.kernels.dispatch import by_device

fused_experts = by_device(reference.fused_experts)
_act_mul = by_device(reference.act_mul)
_packed_experts = by_device(packed.packed_experts)


class PackedExperts(ABC):
    """Experts in the form that the device multiplies by."""

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The weighted sums `[tokens, hidden]`; see `fused_experts`."""

    @abstractmethod
    def state(self, place: int) -> list[Tensor]:
        """All that was made of one expert: in the same place or another, here or elsewhere, it is that expert.

        Equally many bytes for each, contiguous; they may be views or copies.
        """

    @property
    def form(self) -> str:
        """What two are to have in common whose experts change places."""
        return f"{type(self).__name__} {[(part.dtype, *part.shape) for part in self.state(0)]}"

    def restore(self, place: int, state: Sequence[Tensor]) -> None:
        """Put the expert whose `state` this is in the place of another."""
        for mine, theirs in zip(self.state(place), state, strict=True):
            mine.copy_(theirs)


def pack_experts(
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    quantization: linear.Quantization | None = None,
) -> PackedExperts:
    """The experts of `gate_up` `[experts, 2 * size, hidden]` and `down` `[experts, hidden, size]`; see `fused_experts`.

    The two may be overwritten: experts are most of a model, so packed ones take the place of those that they are made
    from where they can. Products and quantization are as in `pack_linear`.
    """
    biases = (gate_up_bias, down_bias)
    packing = linear.packing(gate_up[0], quantization)
    if packing is linear.PlainLinear:
        return PlainExperts(gate_up, down, activation, *biases)
    if packing is linear.TiledLinear or packing is linear.Int8Linear:
        return TiledExperts(gate_up, down, activation, *biases, is_int8=packing is linear.Int8Linear)
    products = [[linear.pack_linear(weight, quantization) for weight in weights] for weights in (gate_up, down)]
    return ExpertByExpert(products[0], products[1], activation, *biases)


class PlainExperts(PackedExperts):
    """Weights as they are."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: str, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> None:
        first_bias, second_bias = (bias if bias is None else bias.detach() for bias in (gate_up_bias, down_bias))
        self._weights = gate_up.detach(), down.detach(), activation, first_bias, second_bias

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return fused_experts(x, weights, ids, *self._weights)

    def state(self, place: int) -> list[Tensor]:
        return _of_place(self._weights, place)


class TiledExperts(PackedExperts):
    """All experts' panels in one tensor: of float32, of bfloat16, or of bytes."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        *,
        is_int8: bool = False,
    ) -> None:
        stacked = _int8_stack if is_int8 else _stack
        first = stacked(gate_up.detach(), gated=True)
        second = stacked(down.detach(), padding=-down.shape[2] % (packed.PANEL // 2))
        biases = [
            gate_up_bias if gate_up_bias is None else torch.stack([packed.side_by_side(bias) for bias in gate_up_bias]),
            down_bias if down_bias is None else F.pad(down_bias, (0, -down_bias.shape[1] % packed.PANEL)),
        ]
        first_bias, second_bias = (bias if bias is None else bias.detach().float() for bias in biases)
        self._weights = *first, first_bias, *second, second_bias, activation

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return _packed_experts(x, weights, ids, *self._weights)

    def state(self, place: int) -> list[Tensor]:
        return _of_place(self._weights, place)


def _of_place(weights: Sequence[Tensor | str | None], place: int) -> list[Tensor]:
    return [weight[place] for weight in weights if isinstance(weight, Tensor)]


def _stack(weights: Tensor, *, gated: bool = False, padding: int = 0) -> tuple[Tensor, None]:
    """The panels of every expert's weight, with so many more columns, in the memory of `weights` if they fit there."""
    panels = (linear.word_panels(_widened(weight, padding), gated) for weight in weights)
    first = next(panels)
    shape = (len(weights), *first.shape)
    fits = first.numel() == weights[0].numel() and weights.is_contiguous()
    stack = weights.view(shape) if fits else weights.new_empty(shape)
    for place, of_expert in zip(stack, chain((first,), panels), strict=True):
        place.copy_(of_expert)
    return stack, None


def _int8_stack(weights: Tensor, *, gated: bool = False, padding: int = 0) -> tuple[Tensor, Tensor]:
    panels = (linear.int8_panels(_widened(weight, padding), gated) for weight in weights)
    first = next(panels)
    stack, scales = (x.new_empty((len(weights), *x.shape)) for x in first)
    for expert, of_expert in enumerate(chain((first,), panels)):
        stack[expert], scales[expert] = of_expert
    return stack, scales


def _widened(weight: Tensor, padding: int) -> Tensor:
    return F.pad(weight, (0, padding)) if padding else weight


class ExpertByExpert(PackedExperts):
    """A call of two packed linear layers for every expert that has rows.

    Python reads which these are, so that a step cannot be replayed: decodes run without CUDA graphs or tapes.
    """

    def __init__(
        self,
        gate_up: Sequence[linear.PackedLinear],
        down: Sequence[linear.PackedLinear],
        activation: str,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._gate_up_biases, self._down_biases = (
            [None] * len(down) if bias is None else list(bias.detach()) for bias in (gate_up_bias, down_bias)
        )

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return reference.by_expert(x, weights, ids, len(self._down), self._feed_forward)

    def _feed_forward(self, expert: int, rows: Tensor) -> Tensor:
        both = self._gate_up[expert](rows, self._gate_up_biases[expert])
        return self._down[expert](_act_mul(both, self._activation), self._down_biases[expert])

    @property
    def form(self) -> str:
        return f"{super().form} of {type(self._down[0]).__name__}"

    def state(self, place: int) -> list[Tensor]:
        biases = [each[place] for each in (self._gate_up_biases, self._down_biases)]
        return [
            *self._gate_up[place].state(),
            *self._down[place].state(),
            *(bias for bias in biases if bias is not None),
        ]

    def restore(self, place: int, state: Sequence[Tensor]) -> None:
        half = len(self._gate_up[place].state())
        self._gate_up[place].restore(state[:half])
        self._down[place].restore(state[half : 2 * half])
        biases = [each[place] for each in (self._gate_up_biases, self._down_biases)]
        for mine, theirs in zip((bias for bias in biases if bias is not None), state[2 * half :], strict=True):
            mine.copy_(theirs)
