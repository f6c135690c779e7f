"""Drafts that are right, wrong, or both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.engine.config.engine_config import SpeculativeConfig
from quire.engine.scheduler.model_drafts import ModelSpeculationManager
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.speculation import Kind, SpeculationManager, StepTimes

Guess = Callable[[list[int], random.Random], int]
"""The guessed next token of these tokens."""


class Guesser(SpeculationManager):
    """Gives each request `most` drafts, or as many as it can still use, regardless of their cost. With `varies`, `most`
    is the maximum."""

    def __init__(
        self,
        guess: Guess,
        most: int = 4,
        max_sampled_tokens: int = 16,
        state_block_size: int | None = None,
        *,
        varies: bool = False,
    ) -> None:
        super().__init__(SpeculativeConfig(num_speculative_tokens=most), max_sampled_tokens, state_block_size)
        self.guess, self.rng, self.varies = guess, random.Random(0), varies

    def draft(self, decodes: Sequence[Request], num_others: int = 0) -> dict[Request, list[int]]:
        found, most = {}, self.config.num_speculative_tokens
        for request in decodes[: self.max_sampled_tokens // (most + 1)]:
            drafts: list[int] = []
            count = self.rng.randint(1, most) if self.varies else most
            for _ in range(min(count, self.max_drafts(request))):
                drafts.append(self.guess(request.token_ids + drafts, self.rng))
            if drafts:
                found[request] = drafts
        return found


class FreeSteps(StepTimes):
    """Every step takes the same time."""

    def relative(self, kind: Kind, num_rows: int, sizes: Iterable[float]) -> list[float]:
        return [1.0 for _ in sizes]

    def catch_up(self, num_rows: int) -> float:
        return 0.0


class Mixed(ModelSpeculationManager):
    """Chooses between n-grams and the drafts of a model as if no step took longer for them."""

    def __init__(
        self, most: int = 4, max_sampled_tokens: int = 64, state_block_size: int | None = None, **config: Any
    ) -> None:
        settings: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": most} | config
        super().__init__(SpeculativeConfig(**settings), max_sampled_tokens, state_block_size)
        self.times = FreeSteps()


class Always(ModelSpeculationManager):
    """Makes the workers draft `most` tokens after each step, regardless of their cost; with `varies` sometimes fewer,
    none, or no drafting at all. There are no n-grams beside them."""

    def __init__(
        self,
        most: int = 4,
        max_sampled_tokens: int = 16,
        state_block_size: int | None = None,
        *,
        varies: bool = False,
        **config: Any,
    ) -> None:
        made = SpeculativeConfig(num_speculative_tokens=most, **config)
        super().__init__(made, max_sampled_tokens, state_block_size)
        self.rng, self.varies = random.Random(0), varies

    def may_chain(self, requests: Sequence[Request], num_drafts: int) -> bool:
        return True

    def num_drafts(self, requests: Sequence[Request], num_rows: int, *, has_prompts: bool) -> int | None:
        most = self.config.num_speculative_tokens if requests else 0
        return self.rng.choice([None, *range(most + 1), most]) if self.varies else most

    def propose(self, request: Request) -> tuple[list[int], list[float]]:
        return [], []


class _Recorder(ModelSpeculationManager):
    """Keeps all drafts of the model, with the tokens that they follow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made: list[tuple[list[int], list[int]]] = []

    def add_drafts(self, drafts: Mapping[Request, list[int]]) -> None:
        self.made += [(list(request.token_ids), made) for request, made in drafts.items()]
        super().add_drafts(drafts)


class Recording(_Recorder, Always):
    pass


class RecordingMixed(_Recorder, Mixed):
    pass
