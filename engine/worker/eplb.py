"""Counts the load of a stage's experts, and moves and replicates busy experts between steps (EPLB)."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.config.engine_config import EngineConfig
from quire.engine.distributed.eplb import ExpertMove, moves, rank_loads, rebalance, rounds
from quire.engine.distributed.expert_group import ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.distributed.parallel_state import ParallelState
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.layers.moe import MixtureOfExperts
from quire.engine.models.build import Model
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import ExpertLoad

REPORT_INTERVAL = 100
"""Steps between two load reports, unless experts move more often."""
_ALIGNMENT = 16
"""Bytes; no data type is larger."""


class ExpertLoadBalancer:
    """Balances the experts of one rank. Invariant: all ranks of the group call `step` equally often, and so act at the
    same time.

    Token counts are summed over the group, so that all ranks make the same decision. Every `step_interval` steps a new
    placement is computed for each layer, and the layers are then moved one per step if the interval is long enough. A
    step waits only for one layer's moves, and at most three experts are in memory beyond those that the rank has.
    """

    def __init__(
        self,
        layers: Mapping[int, MixtureOfExperts],
        counts: dict[int, int],
        group: ExpertGroup,
        pipeline: Pipeline,
        device: torch.device,
    ) -> None:
        """`layers` are this stage's layers with experts; `counts` are the numbers of experts, including earlier stages'
        layers."""
        self._group, self._pipeline, self._config, self._device = group, pipeline, group.config, device
        self._layers, self._counts = list(layers.values()), counts
        self._sizes = [counts[number] for number in layers]
        self._upstream_shape = (3 + sum(counts.values()) - sum(self._sizes),)
        """Shape of the report from the previous stage."""
        self._report_interval = (
            min(REPORT_INTERVAL, self._config.step_interval) if self._config.enable_eplb else REPORT_INTERVAL
        )
        self._is_finalized = False
        self._steps = self._posted = self._moved = 0
        self._last_reported = self._last_balanced = [[0] * size for size in self._sizes]
        """Token counts at the last report."""
        self._pending: deque[tuple[MixtureOfExperts, list[int]]] = deque()
        """Layers whose experts are to be moved, each with the load to balance."""

    @staticmethod
    def of(
        model: Model, config: EngineConfig, parallel_state: ParallelState, device: torch.device
    ) -> ExpertLoadBalancer | None:
        """The balancer of a rank; None without expert parallelism."""
        if parallel_state.experts is None or not isinstance(model, Decoder):
            return None
        arch, stage = config.model.architecture, config.parallel.stages[parallel_state.pipeline.stage]
        specs = [(number, arch.layers[number].feed_forward) for number in range(stage.stop)]
        counts = {number: spec.num_routed for number, spec in specs if isinstance(spec, MoESpec)}
        modules = {int(name): layer.feed_forward for name, layer in model.layers.items()}
        layers = {number: layer for number, layer in modules.items() if isinstance(layer, MixtureOfExperts)}
        return ExpertLoadBalancer(layers, counts, parallel_state.experts, parallel_state.pipeline, device)

    def post_receive(self) -> None:
        """Post the receive for the previous stage's report in a future step. May be called from another thread."""
        if self._reports_at(self._posted):
            self._pipeline.post_receive(self._upstream_shape, torch.float64)
        self._posted += 1

    def step(self) -> ExpertLoad | None:
        """Call this before each step of the model. Returns a load report now and then, on the last stage.

        Steps before `finalize` are warm-up: they are not counted and move nothing.
        """
        if not self._is_finalized:
            return None
        reported = self._report() if self._reports_at(self._steps) else None
        if self._config.enable_eplb and self._steps and self._steps % self._config.step_interval == 0:
            self._schedule_moves()
        for _ in range(min(len(self._pending), math.ceil(len(self._layers) / self._config.step_interval))):
            self._balance(*self._pending.popleft())
        self._steps += 1
        return reported

    def _reports_at(self, step: int) -> bool:
        return step > 0 and step % self._report_interval == 0

    def _totals(self) -> list[list[int]]:
        """Tokens of each expert of each layer since the start, summed over all ranks."""
        if not self._layers:
            return []
        own = torch.cat([layer.tokens for layer in self._layers])
        all_ranks = self._group.all_ranks
        rows = all_ranks.start_all_gather(own[None], [1] * all_ranks.size).wait()
        return [counts.tolist() for counts in rows.sum(0).cpu().split_with_sizes(self._sizes)]

    def _report(self) -> ExpertLoad | None:
        """Combine the reports of this stage and earlier ones; send the result to the next stage, or return it on the
        last."""
        totals = self._totals()
        loads = [
            rank_loads(_difference(now, then), _placement_table(layer))
            for layer, now, then in zip(self._layers, totals, self._last_reported, strict=True)
        ]
        self._last_reported = totals
        reported = torch.tensor(
            [
                sum(map(max, loads)),
                sum(sum(each) / len(each) for each in loads),
                self._moved,
                *(count for counts in totals for count in counts),
            ],
            dtype=torch.float64,
        )
        if not self._pipeline.is_first:
            before = self._pipeline.receive(self._upstream_shape, torch.float64).cpu()
            reported = torch.cat([before[:3] + reported[:3], before[3:], reported[3:]])
        if not self._pipeline.is_last:
            self._pipeline.send(reported.to(self._device))
            return None
        busiest, mean, moved, *tokens = reported.tolist()
        counts = torch.tensor(tokens, dtype=torch.int64).numpy().tobytes()
        return ExpertLoad(self._counts, counts, busiest / mean if mean else 1.0, int(moved))

    def _schedule_moves(self) -> None:
        totals = self._totals()
        self._pending.extend(
            (layer, _difference(now, then))
            for layer, now, then in zip(self._layers, totals, self._last_balanced, strict=True)
        )
        self._last_balanced = totals

    def _balance(self, layer: MixtureOfExperts, load: Sequence[int]) -> None:
        now = _placement_table(layer)
        then = rebalance(load, now)
        if then == now:
            return
        steps = moves(now, then)
        mover = _Mover(layer, self._group)
        for batch in rounds(steps):
            mover.run(batch)
        layer.set_placement(ExpertPlacement(then))
        self._moved += sum(step.target.index is not None for step in steps)

    def finalize(self) -> None:
        """Check, once all ranks are loaded, that ranks that exchange experts store them in the same format, and start
        counting.

        The format depends on the processor. Raises `ConfigError` on all ranks.
        """
        self._is_finalized = True
        for layer in self._layers:
            layer.tokens.zero_()
        if not self._config.enable_eplb or not self._layers:
            return
        layouts = str([layer.experts.layout for layer in self._layers])
        reported = self._group.all_ranks.all_gather_ints([zlib.crc32(layouts.encode())])
        if reported.count(reported[self._group.rank]) != len(reported):
            raise ConfigError(
                "--enable-eplb: experts cannot move between ranks whose processors need different weight formats; "
                "run all ranks on hosts of the same kind, or omit the flag"
            )


def _placement_table(layer: MixtureOfExperts) -> tuple[tuple[int, ...], ...]:
    assert layer.placement is not None
    return layer.placement.experts


def _difference(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [after - before for after, before in zip(now, then, strict=True)]


class _Mover:
    """Moves a layer's experts, as far as this rank takes part."""

    def __init__(self, layer: MixtureOfExperts, group: ExpertGroup) -> None:
        self._experts, self._peers = layer.experts, group.all_ranks
        self._spare: Tensor | None = None

    def run(self, batch: Sequence[ExpertMove]) -> None:
        """Run one round of moves."""
        rank, size = self._peers.rank, self._peers.size
        sent, received = [0] * size, [0] * size
        rows: list[Tensor] = []
        place = None
        for move in batch:
            if move.target.index is None:
                if move.source.rank == rank:
                    self._spare = self._row(move.source.index)
                continue
            if move.source.rank == rank:
                sent[move.target.rank] = 1
                rows.append(self._row(move.source.index))
            if move.target.rank == rank:
                received[move.source.rank] = 1
                place = move.target.index
        outgoing = rows[0] if rows else self._row(0)[:0]
        arrived = self._peers.all_to_all(outgoing, sent, received)
        if place is not None:
            self._experts.restore(place, list(_parts(arrived[0], self._experts.state(place))))

    def _row(self, place: int | None) -> Tensor:
        """The bytes of one expert, `[1, bytes]`."""
        if place is None:
            assert self._spare is not None
            return self._spare
        parts = self._experts.state(place)
        row = torch.empty((1, sum(map(_row_bytes, parts))), dtype=torch.uint8, device=parts[0].device)
        for to, part in zip(_parts(row[0], parts), parts, strict=True):
            to.copy_(part)
        return row


def _row_bytes(part: Tensor) -> int:
    """Bytes of `part` in a row, with padding."""
    return -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _parts(row: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of an expert's tensors in a row `[bytes]`; `like` are any expert's."""
    start = 0
    for part in like:
        yield row[start : start + part.nbytes].view(part.dtype).view(part.shape)
        start += _row_bytes(part)
