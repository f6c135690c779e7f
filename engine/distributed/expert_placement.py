"""The placement of a layer's experts on ranks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.config.engine_config import ExpertParallelConfig


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of each rank, by their numbers in the model. All ranks have the same number, and each expert is on
    some rank.

    An expert (a logical expert) may have copies. Each copy is a physical expert; these are numbered over all ranks:
    `rank * num_local_experts + index`.
    """

    experts: tuple[tuple[int, ...], ...]
    """`[ranks][num_local_experts]`"""

    @staticmethod
    def initial(num_experts: int, ranks: int, config: ExpertParallelConfig) -> ExpertPlacement:
        """The placement before any load is known; the first `config.num_redundant_experts` experts have two copies."""
        numbers = [number % num_experts for number in range(num_experts + config.num_redundant_experts)]
        count = len(numbers) // ranks
        assert count * ranks == len(numbers)
        if config.placement == "round_robin":
            return ExpertPlacement(tuple(tuple(numbers[rank::ranks]) for rank in range(ranks)))
        return ExpertPlacement(tuple(tuple(numbers[rank * count : (rank + 1) * count]) for rank in range(ranks)))

    def twice(self, num_experts: int) -> ExpertPlacement:
        """The placement of experts and of as many others behind them, which are placed in the same way."""
        return ExpertPlacement(tuple((*own, *(number + num_experts for number in own)) for own in self.experts))

    @property
    def num_local_experts(self) -> int:
        """The number of physical experts on each rank."""
        return len(self.experts[0])

    def copies(self, num_experts: int) -> list[list[int]]:
        """For each expert, the numbers of its physical experts."""
        copies: list[list[int]] = [[] for _ in range(num_experts)]
        for physical_id, expert in enumerate(number for rank in self.experts for number in rank):
            copies[expert].append(physical_id)
        assert all(copies)
        return copies
