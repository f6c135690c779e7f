"""What the engine reports about itself: gauges and counters. No torch."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, array_like=True):
    """Current gauges, and counters since the start."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    idle_stage_steps: int = 0
    """Stage-steps left idle although a request could have used them."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started: int = 0
    """Start time in milliseconds since 1970; it changes when a replica restarts."""


class RankTimes(msgspec.Struct, array_like=True):
    """What a rank has spent its time with since the start, on a CPU. On a GPU all are 0, as the host does not wait."""

    steps: int = 0
    seconds: float = 0.0
    """Duration of all steps."""
    waited: float = 0.0
    """The part in which the rank waited for others to compute: for those of its stage, and for the previous stage."""
    is_straggler: bool = False
    """Whether it is persistently slower than the other ranks of its stage."""

    @property
    def busy(self) -> float:
        """Seconds for which the rank has computed."""
        return self.seconds - self.waited


class ExpertLoad(msgspec.Struct, array_like=True):
    """How evenly the shared experts are used. Every replica sends the same values from time to time."""

    layers: dict[int, int]
    """Number of experts of each MoE layer, by layer number."""
    tokens: bytes
    """int64, layer by layer and expert by expert: tokens routed to it since the start."""
    imbalance: float
    """Recent load of the busiest rank of each layer divided by the mean load of the ranks; 1 is balanced."""
    moved: int
    """Experts moved since the start."""
