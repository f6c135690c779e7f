"""Which rank has which experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.config.options import ExpertParallelConfig


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of each rank, by their numbers in the model; every rank has equally many, and each is somewhere.

    One that stands in several places has copies. A place is numbered over all ranks: `rank * places + its index`.
    """

    experts: tuple[tuple[int, ...], ...]
    """`[ranks][places]`"""

    @staticmethod
    def initial(num_experts: int, ranks: int, config: ExpertParallelConfig) -> ExpertPlacement:
        """Where they are before anything is known of their load; the first `config.redundant` ones are doubled."""
        numbers = [number % num_experts for number in range(num_experts + config.redundant)]
        places = len(numbers) // ranks
        assert places * ranks == len(numbers)
        if config.placement == "round_robin":
            return ExpertPlacement(tuple(tuple(numbers[rank::ranks]) for rank in range(ranks)))
        return ExpertPlacement(tuple(tuple(numbers[rank * places : (rank + 1) * places]) for rank in range(ranks)))

    @property
    def places(self) -> int:
        """Of each rank."""
        return len(self.experts[0])

    def copies(self, num_experts: int) -> list[list[int]]:
        """By expert, the places where it stands."""
        found: list[list[int]] = [[] for _ in range(num_experts)]
        for place, expert in enumerate(number for rank in self.experts for number in rank):
            found[expert].append(place)
        assert all(found)
        return found
