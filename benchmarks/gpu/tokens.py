"""The engine's tokens on the device against transformers' in float32, on tiny models of several families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpu.engine import Engine
from gpu.lab import Lab, free_memory
from gpu.records import Check, Record
from tests.fakes import checkpoints

_OUTPUT = 24


def check(lab: Lab) -> Iterator[Record]:
    """A check for each family: greedy continuations of prompts of several lengths, all at once, token by token."""
    families = checkpoints.FAMILIES[:1] if lab.tiny else checkpoints.FAMILIES
    lengths = (1, 5) if lab.tiny else (1, 5, 16, 17, 60, 130, 200)
    count = 4 if lab.tiny else _OUTPUT
    prompts = [[(7 * number + 3 * place + 1) % 128 for place in range(length)] for number, length in enumerate(lengths)]
    for family in families:
        folder = checkpoints.write_checkpoint(family, lab.scratch / f"tokens-{family}")
        expected = checkpoints.generate(folder, prompts, count)
        found = _generate(lab, folder, prompts, count)
        wrong = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
        detail = f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {count} more each"
        if wrong:
            place = next(at for at in range(count) if found[wrong[0]][at : at + 1] != expected[wrong[0]][at : at + 1])
            detail += f"; {len(wrong)} differ, that of {lengths[wrong[0]]} tokens from its token {place} on"
        yield Check(f"tokens of {family} in float32", not wrong, detail)


def _generate(lab: Lab, folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    options = {
        "model": str(folder),
        "device": lab.device,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,  # prompts are cut
        "kv_cache_memory_bytes": 1 << 26,
    }
    engine = Engine(options)
    try:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, count)
        engine.run()
        return [engine.outputs[str(number)] for number in range(len(prompts))]
    finally:
        engine.close()
        del engine
        free_memory(lab.device)
