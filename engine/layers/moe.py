"""Mixture of experts: a router, and experts of which each rank has either a slice of each or a subset as a whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import kernels
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.layers.all_to_all import (
    AllGatherDispatch,
    AllToAllDispatch,
    ExpertDispatch,
    LocalDispatch,
    RoutedTokens,
    even_slice,
)
from quire.engine.layers.batch import Batch
from quire.engine.layers.from_spec import WHOLE, FromSpec
from quire.engine.layers.linear import ReplicatedLinear
from quire.engine.layers.mlp import MLP
from quire.engine.layers.norm import make_norm
from quire.engine.layers.quantized import QuantizedParameters, loaded_weight
from quire.engine.layers.weight import Weight, whole


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen experts' outputs for each token (Shazeer et al. 2017), plus a shared expert's
    output.

    Without `group`, each rank of a stage has a slice of every expert. With it, whole experts are distributed over the
    group's ranks; the router is replicated, and the shared expert is sharded over the stage.
    """

    def __init__(self, spec: MoESpec, hidden_size: int, parallel: Parallel, group: ExpertGroup | None = None) -> None:
        super().__init__()
        self._parallel, self._group = parallel, group
        self._num_experts, self._weighs_inputs = spec.num_routed, spec.weighs_inputs
        self.placement: ExpertPlacement | None = None
        self.tokens = torch.zeros(spec.num_routed, dtype=torch.int64)
        """Tokens routed to each expert since the start, with expert parallelism: each token is counted on one rank
        only."""
        self.router = ExpertRouter(spec, hidden_size)
        numbers, divided = tuple(range(spec.num_experts)), parallel  # a slice of each
        if group is not None:
            placement = ExpertPlacement.initial(spec.num_experts, group.size, group.config)
            numbers, divided = placement.experts[group.rank], WHOLE
            self.set_placement(placement.twice(spec.num_experts) if spec.media_size else placement)
        fixed_by = _fixed_by(group)
        self.experts, self.media_experts = Experts(spec, hidden_size, numbers, divided, fixed_by=fixed_by), None
        if spec.media_size:
            others = [number + spec.num_experts for number in numbers]
            self.media_experts = Experts(spec, hidden_size, others, divided, "media_experts", fixed_by=fixed_by)
        self.latent_down = self.latent_up = None
        if spec.latent_size:
            own = FromSpec(spec.parameters(hidden_size))
            self.latent_down = own.column_parallel("feed_forward.latent_down")
            self.latent_up = own.column_parallel("feed_forward.latent_up")
            self.latent_up.adds_bias = parallel.rank == 0  # to the sums of its own experts
        self.shared = None if spec.shared is None else MLP(spec.shared, hidden_size, parallel)
        self.shared_gate = SharedGate(hidden_size) if spec.shared_gate else None
        self.input_norm, self.output_norm, self.shared_input_norm, self.shared_output_norm = (
            None if spec.norm is None else make_norm(spec.norm, hidden_size) for _ in range(4)
        )

    def set_placement(self, placement: ExpertPlacement) -> None:
        """Route tokens by `placement` from now on, as all ranks of the group do. The weights must already be in
        place."""
        copies, device = placement.copies(self._num_experts), self.router.weight.device
        max_copies = sum(map(len, copies)) - self._num_experts + 1  # of one expert, for any placement
        physical_ids = torch.tensor(
            [(ids * max_copies)[:max_copies] for ids in copies], device=device
        )  # [experts, most]
        counts = torch.tensor([len(ids) for ids in copies], device=device) if max_copies > 1 else None
        if self.placement is None:
            self._physical_ids, self._copies = physical_ids, counts
        else:  # in place: captured steps keep reading from these addresses
            self._physical_ids.copy_(physical_ids)
            if self._copies is not None and counts is not None:
                self._copies.copy_(counts)
        self.placement = placement

    @property
    def row_rounding(self) -> kernels.RowRounding | None:
        """How inputs may be rounded in advance, if they are also kept as they are; None: nothing reads them rounded."""
        of_shared = None if self.shared is None or self.shared_input_norm else self.shared.reads_input.row_rounding
        return self._expert_rounding or of_shared

    reads_plain_rows = True
    """The router does."""

    @property
    def _expert_rounding(self) -> kernels.RowRounding | None:
        """The same for the experts: only if they read the layer's own input, on this rank."""
        is_sent = self._group is not None and self._group.dp.size > 1
        is_changed = self.input_norm is not None or self.latent_down is not None or self._weighs_inputs
        return None if is_sent or is_changed else self.experts.row_rounding

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        batch: Batch | None = None,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """`[tokens, hidden_size]` → the same, on every rank. `batch` is needed only with `group`, or with a table.
        `adapters` are those of the rows of `x`."""
        dispatch = self._dispatch(kernels.plain_rows(x), batch, adapters)
        shared = self._shared(x, adapters)  # while the tokens are in transit
        out = dispatch.combine(self._of_own_experts(x, dispatch, adapters))
        out = out if self.latent_up is None else self.latent_up(out, adapters)
        if self.output_norm is not None and self.shared_output_norm is not None:
            assert shared is not None
            out, shared = self._parallel.all_reduce(torch.stack((out, shared)))
            return self.output_norm(out) + self.shared_output_norm(shared)  # type: ignore[no-any-return]
        return self._parallel.all_reduce(out if shared is None else out + shared)

    def _dispatch(self, x: Tensor, batch: Batch | None, adapters: kernels.AdapterRows | None = None) -> ExpertDispatch:
        """Route the tokens and start to send them."""
        group = self._group
        if group is None or self.placement is None:
            weights, experts = self.router(x, batch and batch.token_ids, adapters)
            return LocalDispatch(self._weighed(x, weights, experts, adapters))
        if group.dp.size == 1:
            return LocalDispatch(self._routed(x, batch, slice(None), adapters))
        assert batch is not None
        if group.config.all2all_backend == "allgather_reducescatter":
            return AllGatherDispatch(group, self._routed(x, batch, slice(None), adapters), batch.replica_tokens)
        own, count = even_slice(len(x), group.tp.rank, group.tp.size), self.placement.num_local_experts
        of_own = None if adapters is None else adapters.of_rows(own)
        return AllToAllDispatch(group, self._routed(x[own], batch, own, of_own), count, own.start, len(x))

    def _of_own_experts(
        self, x: Tensor | kernels.RoundedRows, dispatch: ExpertDispatch, adapters: kernels.AdapterRows | None
    ) -> Tensor:
        """Run this rank's experts on the tokens that it receives; returns the weighted sums. If adapters may change the
        experts, the tokens are its own."""
        received, weights, ids = dispatch.received()
        if self._group is not None and self.placement is not None:
            ids = ids - self._group.rank * self.placement.num_local_experts
        rounding = self._expert_rounding
        rows = received if rounding is None else kernels.rows_for(x, rounding)
        out: Tensor = self.experts(rows, weights, ids, adapters)
        if self.media_experts is None:
            return out
        rows = rows if rounding == self.media_experts.row_rounding else received
        others: Tensor = self.media_experts(rows, weights, ids - self.experts.count, adapters)
        return out + others

    def _routed(self, x: Tensor, batch: Batch | None, own: slice, adapters: kernels.AdapterRows | None) -> RoutedTokens:
        """Route `x`, the tokens `own` of the batch, whose adapters are `adapters`. The choice of an expert's copy
        depends only on the token's position."""
        weights, experts = self.router(x, batch and batch.token_ids[own], adapters)
        if own != slice(None) or self._parallel.rank == 0:
            counted = torch.ones_like(experts)
            if batch is not None and batch.token_mask is not None:
                counted *= batch.token_mask[own, None]
            self.tokens.index_add_(0, experts.flatten(), counted.flatten())
        if self._copies is None:
            return self._weighed(x, weights, self._physical_ids[experts, 0], adapters)
        assert batch is not None
        copy = batch.positions[own, None] % self._copies[experts]
        return self._weighed(x, weights, self._physical_ids[experts, copy], adapters)

    def _weighed(
        self, x: Tensor, weights: Tensor, experts: Tensor, adapters: kernels.AdapterRows | None
    ) -> RoutedTokens:
        x = x if self.input_norm is None else self.input_norm(x)
        x = x if self.latent_down is None else self.latent_down(x, adapters)
        if not self._weighs_inputs:
            return RoutedTokens(x, weights, experts)
        return RoutedTokens(x * weights.to(x.dtype), torch.ones_like(weights), experts)

    def _shared(self, x: Tensor | kernels.RoundedRows, adapters: kernels.AdapterRows | None) -> Tensor | None:
        if self.shared is None:
            return None
        rows = kernels.rows_for(x, self.shared.reads_input.row_rounding)
        rows = rows if self.shared_input_norm is None else self.shared_input_norm(rows)
        shared = self.shared.partial(rows, adapters)
        return shared if self.shared_gate is None else shared * self.shared_gate(kernels.plain_rows(x), adapters)


def _fixed_by(group: ExpertGroup | None) -> str:
    """See `ExpertMatrices`. The slots of an adapter are a replica's own."""
    if group is not None and group.config.enable_eplb:
        return "--enable-eplb, which moves experts between ranks"
    return "--enable-expert-parallel over replicas" if group is not None and group.dp.size > 1 else ""


class SharedGate(ReplicatedLinear):
    """The weight of the shared expert's output for each token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def forward(self, x: Tensor, adapters: kernels.AdapterRows | None = None) -> Tensor:
        """`[tokens, hidden_size]` → `[tokens, 1]`."""
        return self.logits(x, adapters).sigmoid().to(x.dtype)


class ExpertRouter(ReplicatedLinear):
    """Chooses the experts of each token. All ranks choose alike: their logits are equal, and ties are broken in the
    same way."""

    def __init__(self, spec: MoESpec, hidden_size: int) -> None:
        super().__init__(hidden_size, spec.num_experts, bias=spec.router_bias)
        self._spec, self._input_scale = spec, hidden_size**-0.5
        own, module = FromSpec(spec.parameters(hidden_size)), "feed_forward.router"
        if spec.media_size is not None:
            assert not spec.router_bias
            self.weight = own.weight(module)
            with torch.device("cpu"):  # see `Rotary`
                media_token_ids = torch.tensor(spec.media_token_ids, dtype=torch.int64)
            self._media_token_ids = media_token_ids.to(torch.get_default_device())
        self.norm = None if spec.norm is None else make_norm(spec.norm, hidden_size)
        self.correction_bias = own.weight(module, "correction_bias") if spec.correction_bias else None
        self.expert_scale = own.weight(module, "expert_scale") if spec.expert_scale else None
        self.table = None
        if spec.table_size:
            self.table = Weight((shape := (spec.table_size, spec.top_k)), whole(*shape), dtype=torch.int32)

    def forward(
        self, x: Tensor, token_ids: Tensor | None = None, adapters: kernels.AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """`[tokens, hidden_size]` → weights (float32) and expert numbers (int64), `[tokens, top_k]` each. `token_ids`
        are needed only with a table, or with experts for media."""
        spec = self._spec
        if spec.scoring == "sqrt_softplus":
            scores = F.softplus(self.logits(x, adapters)).sqrt()
            if self.table is not None:
                assert token_ids is not None
                experts = self.table[token_ids].long()
            else:
                choice = scores if self.correction_bias is None else scores + self.correction_bias
                experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
            weights = scores.gather(-1, experts)
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if spec.renormalize else weights
            return weights * spec.scale, experts
        if spec.scoring == "sparse_mixer":
            return sparse_mixer(self.logits(x, adapters), spec.top_k, spec.sparse_mixer_distance)
        x = x if self.norm is None else self.norm(x) * self._input_scale
        logits, bias = self.logits(x, adapters), self.correction_bias
        if spec.media_size is None:
            weights, experts = self._route(logits, bias)
        else:
            of_text, of_media = zip(
                logits.chunk(2, dim=-1), (None, None) if bias is None else bias.chunk(2), strict=True
            )
            weights, experts = self._route(of_text[0].contiguous(), of_text[1])
            if spec.media_size:
                assert token_ids is not None
                others, media_experts = self._route(of_media[0].contiguous(), of_media[1])
                is_media = (token_ids[:, None] == self._media_token_ids).any(dim=-1, keepdim=True)
                weights = torch.where(is_media, others, weights)
                experts = torch.where(is_media, media_experts + spec.num_experts, experts)
        return weights if self.expert_scale is None else weights * self.expert_scale[experts], experts

    def _route(self, logits: Tensor, correction_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[tokens, num_experts]` → as `forward`."""
        spec = self._spec
        assert spec.scoring != "sparse_mixer"
        assert spec.scoring != "sqrt_softplus"
        return kernels.route(
            logits,
            spec.top_k,
            spec.scoring,
            renormalize=spec.renormalize,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_score=spec.group_score,
            ineligible=spec.ineligible_score,
            correction_bias=correction_bias,
        )


def sparse_mixer(logits: Tensor, top_k: int, distance: float) -> tuple[Tensor, Tensor]:
    """Weights and experts, as `kernels.route` returns them: the best experts, each weighted by the softmax over the
    experts that are not better and whose logits are at most `distance` below its own, relative to the larger size.

    Source: Phi-3.5-MoE (Liu et al. 2024, "GRIN").
    """
    weights, experts, rest = [], [], logits
    for _ in range(top_k):
        best, chosen = rest.max(dim=-1, keepdim=True)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > distance
        weights.append(rest.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(-1, chosen))
        experts.append(chosen)
        rest = rest.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)


class ExpertMatrices(nn.Module):
    """One linear layer of all the experts on a rank, `[experts, rows, columns]`, and its biases `[experts, rows]`."""

    def __init__(self, weight: Weight, bias: Weight | None, *, adds_bias: bool = True, fixed_by: str = "") -> None:
        super().__init__()
        self.weight, self.bias, self.adds_bias = weight, bias, adds_bias
        self.pool: kernels.LowRankPool | None = None
        """As in `Linear`; the slots are those of `kernels.ExpertChanges`."""
        self.fixed_by = fixed_by
        """What keeps adapters from changing these matrices: a flag. Empty: they may."""
        self.in_features = weight.shards[0].shape[1]
        """Input features of all ranks together."""
        self.quantized: QuantizedParameters | None = None
        """As in `Linear`."""

    @property
    def may_have_pool(self) -> bool:
        """As in `Linear`."""
        return not self.fixed_by


class ExpertStack(nn.Module):
    """The matrices of a layer's experts, which are packed together."""

    gate_up: ExpertMatrices
    down: ExpertMatrices

    @abstractmethod
    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Replace the loaded weights by their packed form; their parameters become empty."""


class Experts(ExpertStack):
    """The experts on a rank. Once all weights are loaded, they are packed into the device's format."""

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        experts: Sequence[int],
        parallel: Parallel,
        kind: str = "experts",
        *,
        fixed_by: str = "",
    ) -> None:
        """`experts` are their numbers in the model, by place, in which copies repeat; each is sharded over `parallel`.
        Their parameters are named by their `kind`. `fixed_by` is that of their matrices."""
        super().__init__()
        self._spec = spec
        self.count = len(experts)
        self._product: kernels.PackedExperts | None = None
        own = FromSpec(spec.expert_parameters(hidden_size), parallel)
        self.gate_up, self.down = (
            ExpertMatrices(
                own.stack(module, "weight", experts),
                own.stack(module, "bias", experts) if spec.bias else None,
                adds_bias=adds_bias,
                fixed_by=fixed_by,
            )
            for module, adds_bias in (
                (f"feed_forward.{kind}.gate_up", True),
                (f"feed_forward.{kind}.down", parallel.rank == 0),
            )
        )

    def pack(self, quantization: kernels.Quantization | None) -> None:
        """Replace the weights by their packed form, in the same memory if it fits; their parameters become empty."""
        self._product = kernels.pack_experts(
            loaded_weight(self.gate_up),
            loaded_weight(self.down),
            self._spec.activation,
            gate_up_bias=self.gate_up.bias,
            down_bias=self._down_bias,
            quantization=quantization,
            gated=self._spec.is_gated,
            inputs=self.gate_up.weight.input_dtype,
        )
        for matrices in (self.gate_up, self.down):
            matrices.weight.data = matrices.weight.data.new_empty(0)

    @property
    def _down_bias(self) -> Tensor | None:
        return self.down.bias if self.down.adds_bias else None

    @property
    def layout(self) -> str:
        """The weight format, which must be the same on ranks that exchange experts."""
        return "as they are" if self._product is None else self._product.layout

    def state(self, place: int) -> list[Tensor]:
        """The tensors of the expert in this place, as `kernels.Experts.state`."""
        if self._product is not None:
            return self._product.state(place)
        return [weight.data[place] for weight in self.parameters()]

    def restore(self, place: int, state: Sequence[Tensor]) -> None:
        """Store the expert with this `state` in a place."""
        if self._product is not None:
            return self._product.restore(place, state)
        for target, source in zip(self.state(place), state, strict=True):
            target.copy_(source)

    @property
    def row_rounding(self) -> kernels.RowRounding | None:
        """As in `Linear`."""
        return None if self._product is None else self._product.row_rounding

    def forward(
        self,
        x: Tensor | kernels.RoundedRows,
        weights: Tensor,
        ids: Tensor,
        adapters: kernels.AdapterRows | None = None,
    ) -> Tensor:
        """This rank's part of the sum. `ids` are local to this rank; ids out of range are ignored. `adapters` are those
        of the rows, which are plain, too, if there are pools."""
        changes, pools = None, (self.gate_up.pool, self.down.pool)
        if adapters is not None and adapters.has_adapters and any(pool is not None for pool in pools):
            changes = kernels.ExpertChanges.of(*pools, kernels.plain_rows(x), ids, adapters, self.count)
        if isinstance(x, kernels.RoundedRows):
            assert self._product is not None
            return self._product.of_rounded(x, weights, ids, changes)
        if self._product is not None:
            return self._product(x, weights, ids, changes)
        return kernels.fused_experts(
            x,
            weights,
            ids,
            self.gate_up.weight,
            self.down.weight,
            self._spec.activation,
            gate_up_bias=self.gate_up.bias,
            down_bias=self._down_bias,
            changes=changes,
        )
