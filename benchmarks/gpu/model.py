"""The whole model in this process: decode steps, GPU idle time between them, prefill, memory."""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpu.engine import Engine, Step
from gpu.lab import Lab, synchronize
from gpu.records import Note, Record, Row

_WARM = 4
"""Decode steps before the measured ones."""
_PREFILLS = 4
"""The first one is not counted."""


def measure(lab: Lab) -> Iterator[Record]:
    """Measure everything with one load of the model."""
    begun = time.perf_counter()
    engine = Engine(lab.engine_options(lab.model_folder()) | {"enable_prefix_caching": False})
    try:
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in engine.executor.seconds.items())
        yield Note(f"dummy weights loaded in {time.perf_counter() - begun:.1f} s ({took})")
        yield _decode(lab, engine, "decode 1", 1)
        yield _decode(lab, engine, "decode 64", lab.sizes.batch)
        yield _prefill(lab, engine)
        yield from _idle(lab, engine)  # last, because the profiler may not be allowed on this machine
        yield Note(memory(lab))
    finally:
        engine.close()


def _decode(lab: Lab, engine: Engine, key: str, requests: int) -> Row:
    """Milliseconds per step of `requests` requests whose contexts average `context` tokens."""
    seconds = _decode_seconds(lab, engine, requests)
    context, shape, width = lab.sizes.context, lab.shape, lab.number_bytes
    weights = width * (shape.layer_weights + shape.head_weights)
    cached = width * requests * context * shape.kv_numbers
    formula = f"larger of (weights {weights / 1e9:.2f} GB + KV {cached / 1e9:.2f} GB) / bandwidth and operations / rate"
    return Row(key, seconds * 1e3, lab.floor(lambda floor: floor.decode(context, requests) * 1e3), formula)


def _decode_seconds(
    lab: Lab, engine: Engine, requests: int, run: Callable[[Iterator[Step]], None] | None = None
) -> float:
    """The mean over the steps in which all requests decode, except the first few; `run` receives those steps."""
    count = lab.sizes.decode_steps
    prompt = lab.sizes.context - count // 2
    until_all_decode = -(-requests * prompt // lab.sizes.step_tokens) + requests // lab.sizes.step_tokens + 2
    for number, tokens in enumerate(lab.prompts(requests, prompt, seed=requests)):
        engine.add(f"{number}", tokens, count + until_all_decode + 2 * _WARM)
    steps = engine.steps()
    together = (step for step in steps if step.is_decode and step.rows == requests)
    for _ in itertools.islice(together, _WARM):
        pass
    ends: list[float] = []

    def counted() -> Iterator[Step]:
        for step in itertools.islice(together, count + 1):
            ends.append(step.ended)
            yield step

    if run is None:
        deque(counted(), maxlen=0)
    else:
        run(counted())
    deque(steps, maxlen=0)
    assert len(ends) == count + 1, f"{requests} requests decoded together for {len(ends)} steps only"
    return (ends[-1] - ends[0]) / count


def _idle(lab: Lab, engine: Engine) -> Iterator[Record]:
    """The share of a decode step in which the GPU is idle.

    Busy time is the share of the profiled time covered by kernels and copies, times the duration of the profiled steps.
    The profiler slows down Python but not kernels, so idle time is the rest of a step measured without the profiler.
    """
    plain = _decode_seconds(lab, engine, lab.sizes.batch)
    cuda = lab.device == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    ends: list[float] = []
    events: list[Any] = []

    def profiled(steps: Iterator[Step]) -> None:
        next(steps)
        with torch.profiler.profile(activities=[kind], acc_events=True) as profile:
            ends.extend(step.ended for step in steps)
            synchronize(lab.device)
        events.extend(profile.events())

    _decode_seconds(lab, engine, lab.sizes.batch, profiled)
    wanted = "CUDA" if cuda else "CPU"
    seen = [(event.time_range.start, event.time_range.end) for event in events if event.device_type.name == wanted]
    if not seen:
        raise RuntimeError("the profiler recorded nothing on the device; is CUPTI allowed on this machine?")
    share = union(seen) / (max(end for _, end in seen) - min(start for start, _ in seen))
    busy = share * (ends[-1] - ends[0]) / (len(ends) - 1)
    formula = f"busy {busy * 1e3:.3f} of {plain * 1e3:.3f} ms a step; {100 * (1 - share):.1f} % idle under the profiler"
    yield Row("idle", max(0.0, 100 * (1 - busy / plain)), None, formula)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The time covered by at least one of the spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _prefill(lab: Lab, engine: Engine) -> Row:
    """Operations per second of a prompt in a single step, from its plan to its first token."""
    tokens = lab.sizes.prefill
    assert engine.config.scheduler.max_num_batched_tokens >= tokens
    times = []
    for number, prompt in enumerate(lab.prompts(_PREFILLS, tokens, seed=99)):
        engine.add(f"prefill {number}", prompt, 1)
        begun = time.perf_counter()
        engine.run()
        times.append(time.perf_counter() - begun)
    seconds = statistics.median(times[1:])
    shape = lab.shape
    operations = 2 * (tokens * shape.layer_weights + shape.head_weights)
    operations += shape.attention_operations(tokens * (tokens + 1) // 2)
    formula = f"{operations / 1e12:.2f} T operations in {seconds * 1e3:.1f} ms; floor: the matmul rate"
    rate = lab.limit(lambda machine: machine.rate(lab.precision) / 1e12)
    return Row("prefill", operations / seconds / 1e12, rate, formula)


def memory(lab: Lab) -> str:
    """The memory of this process and of the device."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    text = f"memory: {resident:.2f} GiB resident at most in one process with engine and rank"
    if lab.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        text += f"; device {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB taken"
        text += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of it by tensors at most"
    return text
