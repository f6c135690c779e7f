"""Text streams beside pictures, step by step: the processor time of each step that the tokens of the streams wait for.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/media_steps.py [--side 448] [--steps 300] [--json]

One rank in this process, on one core, and the real scheduler. Its step-time model learns the same processor time, so
that other load on the machine affects little. Four streams run all the time, first without pictures, then while a
client sends one picture after another. The model is a random-weight Qwen2-VL, whose decoder and tower have 0.1 B
parameters each. `benchmarks/media.py` measures a whole server.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from load import percentile

from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.executor import factory
from quire.engine.executor.base import Executor
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.scheduler import Scheduler

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.fakes.media_prompts import media_data
from tests.fakes.vision import write_qwen2_vl

_STREAMS, _PROMPT, _OUTPUT = 4, 60, 128
_SIZES = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
_TEXT = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "rope_parameters": _AXES, **_SIZES}
_TOWER = {"embed_dim": 768, "depth": 16, "num_heads": 12, "hidden_size": 768, "mlp_ratio": 4}


class Load:
    """A scheduler, its rank, and the requests that are open."""

    def __init__(self, folder: Path, side: int) -> None:
        """Pictures have `side` x `side` patches."""
        options = EngineOptions(
            model=str(folder), dtype="bfloat16", max_model_len=4096, spec_method="none", kv_cache_memory_bytes=1 << 28
        )
        self._executor: Executor = factory.start(resolve(options), "warning", on_end=lambda: None)
        media = self._executor.config.model.architecture.media
        assert media is not None
        torch.set_num_threads(1)
        self._scheduler, self._side, self._image = Scheduler(self._executor.config), side, media.image_token_id
        self._rng, self._numbers = random.Random(0), itertools.count()

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(10, 250) for _ in range(length)]

    def _add(self, prompt: list[int], max_tokens: int, media: list[MediaItem]) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        name = str(next(self._numbers))
        assert self._scheduler.add(EngineCoreRequest(0, name, prompt, params, media=media)) is None
        return name

    def _add_picture(self) -> str:
        side = self._side
        pixels = torch.randn(side**2, 3 * 2 * 14**2)
        data = media_data({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})
        digest = hashlib.blake2b(data.content, digest_size=16).digest()
        before, count, grid = self._text(8), side**2 // 4, (1, side // 2, side // 2)
        item = MediaItem(digest, "image", len(before), count, (MediaRun(0, count, grid),), data=data)
        return self._add([*before, *[self._image] * count, *self._text(12)], 1, [item])

    def run(self, steps: int, *, has_pictures: bool) -> dict[str, float]:
        """Milliseconds of the steps, pictures per second, and the median TTFT of a picture in milliseconds."""
        streams: set[str] = set()
        picture, asked_at, clock = "", 0.0, 0.0
        gaps, ttfts = list[float](), list[float]()
        for step in range(steps):
            while len(streams) < _STREAMS:  # the first ones end one after another
                streams.add(self._add(self._text(_PROMPT), _OUTPUT - (step == 0) * 30 * len(streams), []))
            if has_pictures and not picture:
                picture, asked_at = self._add_picture(), clock
            plan = self._scheduler.schedule()
            assert plan is not None
            begun = time.process_time()
            result = self._executor.submit(plan, 3600.0).result()
            seconds = time.process_time() - begun
            clock += seconds
            if plan.decodes or step:
                gaps.append(seconds * 1e3)
            self._scheduler.token_budget.learn(plan, seconds)
            for outputs in self._scheduler.update(plan, result).values():
                for output in outputs.outputs:
                    if output.finish_reason and output.request_id == picture:
                        picture = ""
                        ttfts.append((clock - asked_at) * 1e3)
                    elif output.finish_reason:
                        streams.discard(output.request_id)
        for name in (*streams, *([picture] if picture else [])):
            self._scheduler.abort(name)
        found = {"itl_p50_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99)}
        if ttfts:
            found |= {"pictures_per_s": len(ttfts) / clock, "ttft_ms": statistics.median(ttfts)}
        return found

    def close(self) -> None:
        self._executor.close()


def measure(side: int, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        load = Load(write_qwen2_vl(Path(folder), tower=_TOWER, **_TEXT), side // 14)
    load.run(60, has_pictures=True)  # learns
    runs: dict[str, Any] = {name: load.run(steps, has_pictures=name == "with") for name in ("without", "with")}
    load.close()
    found = {f"{key}_{name}": value for name, run in runs.items() for key, value in run.items()}
    return {**found, "itl_p99_ratio": found["itl_p99_ms_with"] / found["itl_p99_ms_without"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=448, help="pixels of each side of the pictures, multiple of 28")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options.side, options.steps)
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    for name, value in results.items():
        print(f"{name:24}{value:12.2f}")


if __name__ == "__main__":
    main()
