"""Feed-forward layers: one MLP, or a mixture of experts. No torch here; sizes are in features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.spec_parts import (
    GatedActivation,
    MatrixShape,
    NormSpec,
    Parameter,
    Parameters,
    Units,
    bounds,
    linear,
    matrices,
    norm,
)
from quire.engine.protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """`down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    intermediate_size: int
    activation: GatedActivation = "silu"
    is_gated: bool = True
    bias: bool = False
    output_bias: bool | None = None
    """Whether `down` has a bias; None: like the others."""
    gate_multiplier: float = 1.0
    """Factor on the gate before its activation."""
    output_multiplier: float = 1.0
    is_adapted: bool = False
    """An adapter's output is added to gates and ups."""
    sparsity: float = 0.0
    """The share of the gate's features that become 0: the features below this quantile of a normal distribution with
    their mean and deviation. The others become their excess over the quantile (Gemma 3n)."""

    is_clipped: bool = False
    """Linear layers clamp their inputs and outputs to bounds that the checkpoint has."""

    def __post_init__(self) -> None:
        if self.is_gated and self.activation == "quick_gelu":
            raise ConfigError("the activation 'quick_gelu' is not supported with gates")

    def width(self, tp: int) -> int:
        """Inner features per token on one rank."""
        return self.intermediate_size // tp

    def activations(self, tp: int) -> int:
        """Values per token that a rank holds inside the layer at once: gates, ups and their products, and with sparsity
        as many again in float32, counted twice."""
        return 3 * self.width(tp) * (3 if self.sparsity else 1)

    def parameters(self, hidden: int, module: str = "feed_forward") -> Parameters:
        """All parameters, of a layer whose input has `hidden` features."""
        size, units = self.intermediate_size, Units(self.intermediate_size, "feed-forward columns")
        rows = {"gate": size, "up": size} if self.is_gated else {"up": size}
        yield from linear(f"{module}.gate_up", rows, hidden, rows_of=units, bias=self.bias)
        output_bias = self.bias if self.output_bias is None else self.output_bias
        yield from linear(f"{module}.down", hidden, size, columns_of=units, bias=output_bias)
        if self.is_clipped:
            yield from bounds(f"{module}.gate_up", rows)
            yield from bounds(f"{module}.down", ("",))


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A mixture of experts: a router chooses `top_k` of `num_experts` MLPs for each token."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner features of each expert."""
    activation: GatedActivation = "silu"
    is_gated: bool = True
    """See `MLPSpec`."""
    latent_size: int = 0
    """Features that the hidden state is projected to for the experts, whose sum is projected back (Nemotron 3); 0: they
    read the hidden state itself."""
    scoring: Literal["softmax", "sigmoid", "topk_softmax", "sparse_mixer", "sqrt_softplus"] = "softmax"
    """topk_softmax: the softmax over the chosen experts' logits. sparse_mixer: experts are chosen one after another,
    each with its softmax among those not yet chosen whose logits are close to its own (Liu et al. 2024)."""
    sparse_mixer_distance: float = 0.0
    """The largest relative distance of logits that are close."""
    renormalize: bool = False
    """Scale the chosen weights to sum to 1."""
    scale: float = 1.0
    groups: int = 1
    """Only experts of the `top_groups` best groups are eligible (DeepSeek)."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    ineligible_score: float = -math.inf
    """The score given to experts that are not eligible."""
    correction_bias: bool = False
    """Each expert has a bias that is used for the choice only."""
    router_bias: bool = False
    bias: bool = False
    """The experts' own linear layers have biases."""
    weighs_inputs: bool = False
    """The weight of the only chosen expert is a factor on its input, not on its output (Llama 4)."""
    shared: MLPSpec | None = None
    """The shared expert, which every token uses."""
    shared_gate: bool = False
    """Multiply the shared output by `sigmoid(x @ gate)`."""
    norm: NormSpec | None = None
    """Applied to inputs and outputs, with separate weights for the experts and the shared expert, and to the router's
    inputs, which are then divided by the root of their number (Gemma 4); None: there are no norms."""
    expert_scale: bool = False
    """The weight of each expert is multiplied by a number from the checkpoint."""
    table_size: int = 0
    """Above 0: a table in the checkpoint, with so many ids, gives the experts of each token by its id; scores are only
    their weights (DeepSeek-V4)."""
    media_size: int | None = None
    """Inner features of as many further experts, with a router of their own, for the tokens of images and videos (ERNIE
    4.5 VL). 0: they are left out, as the model takes only text; None: there are none."""
    media_token_ids: tuple[int, ...] = ()
    """The tokens that use them: those that features replace, and those before and behind an item."""

    def __post_init__(self) -> None:
        eligible = self.num_experts // self.groups * self.top_groups
        least = 2 if self.group_score == "top2_sum" else 1
        if self.num_experts % self.groups or self.num_experts // self.groups < least or not 0 < self.top_k <= eligible:
            raise ConfigError(
                f"cannot choose {self.top_k} of {eligible} experts ({self.num_experts} in {self.groups} groups, of "
                f"which {self.top_groups} are eligible)"
            )

    @property
    def num_routed(self) -> int:
        """All experts; those of text have the first numbers."""
        return self.num_experts * (2 if self.media_size else 1)

    def expert_numbers(self, module: str) -> range | None:
        """The numbers of a module's experts, given its path in the layer; None: it has none."""
        if module.startswith("feed_forward.media_experts."):
            return range(self.num_experts, 2 * self.num_experts)
        return range(self.num_experts) if module.startswith("feed_forward.experts.") else None

    def experts_per_rank(self, size: int) -> tuple[int, Units | None]:
        """The number of experts of a kind on a rank, and the units of their `size` features that ranks divide; None:
        none."""
        return self.num_experts, Units(size, "feed-forward columns of an expert")

    def width(self, tp: int) -> int:
        """Inner features per token on one rank."""
        size = max(self.intermediate_size, self.media_size or 0)
        _, units = self.experts_per_rank(size)
        size //= 1 if units is None else tp
        return self.top_k * size + (0 if self.shared is None else self.shared.width(tp))

    def activations(self, tp: int) -> int:
        """See `MLPSpec`."""
        return 3 * self.width(tp)

    def parameters(self, hidden: int) -> Parameters:
        """See `MLPSpec`. The router is on all ranks and never quantized. Parameters that decide the routing are always
        float32; tables are int32."""
        module, count = "feed_forward", self.num_experts
        counts = {"": count} if self.media_size is None else {"text": count, "media": count}
        yield from linear(f"{module}.router", counts, hidden, is_float32=True, bias=self.router_bias)
        for name in ("correction_bias", "expert_scale"):
            if getattr(self, name):
                vectors = {part: (size,) for part, size in counts.items()}
                yield Parameter(f"{module}.router", name, vectors, is_float32=True)
        if self.table_size:
            yield Parameter(f"{module}.router", "table", {"": (self.table_size, self.top_k)}, is_float32=True)
        for name in ("router.norm", "input_norm", "output_norm", "shared_input_norm", "shared_output_norm"):
            yield from norm(f"{module}.{name}", self.norm, hidden)
        yield from self.expert_parameters(hidden)
        if self.latent_size:
            yield from linear(f"{module}.latent_down", self.latent_size, hidden)
            yield from linear(f"{module}.latent_up", hidden, self.latent_size)
        if self.shared is not None:
            yield from self.shared.parameters(hidden, f"{module}.shared")
        if self.shared_gate:
            yield from linear(f"{module}.shared_gate", 1, hidden, is_float32=True)

    def expert_matrices(self, hidden: int, tp: int) -> Iterator[MatrixShape]:
        """The weights of these experts on one rank."""
        return matrices(self.expert_parameters(hidden), tp)

    def expert_parameters(self, hidden: int) -> Parameters:
        """The parameters of the experts that tokens are routed to."""
        inputs = self.latent_size or hidden
        for kind, size in (("experts", self.intermediate_size), ("media_experts", self.media_size)):
            if size:
                rows = {"gate": size, "up": size} if self.is_gated else {"up": size}
                number, units = self.experts_per_rank(size)
                gate_up, down = f"feed_forward.{kind}.gate_up", f"feed_forward.{kind}.down"
                yield from linear(gate_up, rows, inputs, rows_of=units, bias=self.bias, number=number)
                yield from linear(down, inputs, size, columns_of=units, bias=self.bias, number=number)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelMoESpec(MoESpec):
    """A mixture whose experts are distributed over ranks as a whole; sizes are per rank."""

    num_local_experts: int
    """Experts of each kind on each rank, including copies."""

    def experts_per_rank(self, size: int) -> tuple[int, Units | None]:
        """See `MoESpec`."""
        return self.num_local_experts, None
