"""Tokens of tiny models: one rank compared with transformers in float32, two ranks compared with one."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gpu.engine import Engine
from gpu.lab import Lab, free_memory
from gpu.records import Check, Note, Record
from quire.engine.config.devices import SHARE
from quire.engine.config.engine_config import ParallelConfig
from tests.fakes import checkpoints
from tests.fakes.drafts import Guesser

_OUTPUT = 24
_RIGHT = 0.8
"""Share of guesses that are right."""
_LAYOUTS = {"tensor parallel": "tensor_parallel_size", "pipeline parallel": "pipeline_parallel_size"}


def check(lab: Lab) -> Iterator[Record]:
    """Yield a check for each family: greedy continuations of prompts of several lengths, in one batch."""
    task = _Task.of(lab)
    for family in checkpoints.FAMILIES[:1] if lab.tiny else checkpoints.FAMILIES:
        folder = checkpoints.write_checkpoint(family, lab.scratch / f"tokens-{family}")
        expected = checkpoints.generate(folder, task.prompts, task.count)
        found, _ = _generate(lab, folder, task)
        yield task.compare(f"tokens of {family} in float32", found, expected)
        found, _ = _generate(lab, folder, task, drafts=found)
        yield task.compare(f"tokens of {family} with drafts, right and wrong", found, expected)


def ranks(lab: Lab) -> Iterator[Record]:
    """Yield a check for each family and layout of two ranks, which share the GPU if there is only one.

    Notes the families after the first that there is no time for.
    """
    task, before, took = _Task.of(lab), os.environ.get(SHARE), 0.0
    os.environ[SHARE] = "1"
    try:
        for family in checkpoints.FAMILIES[: 1 if lab.tiny else None : 2]:
            if took > max(0.0, lab.seconds_left):
                yield Note(f"no time for two ranks of {family}: a previous family took {took:.0f} s")
                continue
            begun = time.monotonic()
            folder = checkpoints.write_checkpoint(family, lab.scratch / f"ranks-{family}")
            expected, _ = _generate(lab, folder, task)
            for name, size in _LAYOUTS.items():
                found, parallel = _generate(lab, folder, task, {size: 2})
                yield task.compare(f"tokens of {family}, {name} 2, {_where(parallel)}", found, expected)
            took = time.monotonic() - begun
    finally:
        os.environ.pop(SHARE)
        if before is not None:
            os.environ[SHARE] = before


def _where(parallel: ParallelConfig) -> str:
    if parallel.device == "cpu":
        return "on CPU"
    return "on one GPU by gloo" if parallel.ranks_per_device > 1 else "on two GPUs by NCCL"


@dataclass(frozen=True)
class _Task:
    """Prompts of several lengths, and how many tokens come after each."""

    prompts: list[list[int]]
    count: int

    @staticmethod
    def of(lab: Lab) -> _Task:
        lengths = (1, 5) if lab.tiny else (1, 5, 16, 17, 60, 130, 200)
        prompts = [
            [(7 * number + 3 * place + 1) % 128 for place in range(length)] for number, length in enumerate(lengths)
        ]
        return _Task(prompts, 4 if lab.tiny else _OUTPUT)

    def compare(self, what: str, found: list[list[int]], expected: list[list[int]]) -> Check:
        wrong = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
        shortest, longest, count = len(self.prompts[0]), len(self.prompts[-1]), self.count
        detail = f"{len(self.prompts)} prompts of {shortest} to {longest} tokens, {count} more each"
        if wrong:
            first = wrong[0]
            place = next(at for at in range(count) if found[first][at : at + 1] != expected[first][at : at + 1])
            detail += f"; {len(wrong)} differ, the one of {len(self.prompts[first])} tokens from its token {place} on"
        return Check(what, not wrong, detail)


def _generate(
    lab: Lab,
    folder: Path,
    task: _Task,
    sizes: Mapping[str, int] = MappingProxyType({}),
    drafts: list[list[int]] | None = None,
) -> tuple[list[list[int]], ParallelConfig]:
    """The tokens, and the parallel config with these `sizes`. With `drafts`, most of these outputs are guessed."""
    options = {
        "model": str(folder),
        "device": lab.device,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,  # prompts are split into chunks
        "kv_cache_memory_bytes": 1 << 26,
        **sizes,
    }
    engine = Engine(options)
    if drafts is not None:
        texts = [prompt + output for prompt, output in zip(task.prompts, drafts, strict=True)]

        def guess(known: list[int], rng: random.Random) -> int:
            following = [text[len(known)] for text in texts if text[: len(known)] == known and len(text) > len(known)]
            return following[0] if following and rng.random() < _RIGHT else 0

        engine.scheduler.speculation = Guesser(guess, most=3, max_sampled_tokens=8)
    try:
        for number, prompt in enumerate(task.prompts):
            engine.add(str(number), prompt, task.count)
        engine.run()
        return [engine.outputs[str(number)] for number in range(len(task.prompts))], engine.config.parallel
    finally:
        engine.close()
        del engine
        free_memory(lab.device)
