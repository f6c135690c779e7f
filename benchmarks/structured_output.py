"""The cost of structured output: steps in which some requests are constrained, and compilation.

.venv/bin/python benchmarks/structured_output.py [--model FOLDER --load-format dummy] [--json]

A real engine decodes 32 requests endlessly, of which 0, 1, 16 or 32 are constrained by a regular expression that never
ends and forces no token. Each round runs every number once, in a changing order, and is compared with its own run
without constraints; the figures are medians of these ratios, which reduces noise. `per token` is the time between two
tokens of a request of that kind. An unconstrained request gets a token in every step; a constrained one in every second
step if the scheduler runs ahead of the device, and in every step if all are constrained. `masks` is the time the core
takes to compute the masks of a step, `apply` the time the sampler takes to apply them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from quire import kernels
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.executor import factory
from quire.engine.executor.base import STEP_TIMEOUT, Executor, StepFuture
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.engine.scheduler.scheduler import Scheduler

REQUESTS = 32
CONSTRAINED = (0, 1, 16, 32)
ENDLESS = StructuredOutputs(regex="[a-zA-Z ,.]*")
_LENGTH = 1024


def _fields(count: int) -> dict[str, Any]:
    kinds = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 150},
        {"type": "boolean"},
    ]
    properties = {f"field_{number}": kinds[number % 3] for number in range(count)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TREE = {"type": "object", "properties": {"value": {"type": "integer"}, "children": {"items": {"$ref": "#"}}}}
COMPILED = {
    "any object": StructuredOutputs(json_object=True),
    "3 fields": StructuredOutputs(json=_fields(3)),
    "30 fields": StructuredOutputs(json=_fields(30)),
    "300 fields": StructuredOutputs(json=_fields(300)),
    "a tree": StructuredOutputs(json=TREE),
    "an enum of 1000": StructuredOutputs(json={"enum": [f"value number {n}" for n in range(1000)]}),
    "a regex": StructuredOutputs(regex=r"[A-Z]{3}-\d{4}(/[a-z0-9]{1,20})*"),
    "1000 choices": StructuredOutputs(choice=[f"choice number {n}" for n in range(1000)]),
    "a grammar": StructuredOutputs(grammar='start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'),
}


def run(
    config: EngineConfig, executor: Executor, step: int, constrained: int, steps: int
) -> tuple[float, float, float]:
    """Seconds per step, per token of an unconstrained request, and per token of a constrained one."""
    scheduler = Scheduler(config)
    scheduler.in_flight.next_step, scheduler.in_flight.last_finished = step, step - 1  # the ranks continue counting
    for index in range(REQUESTS):
        is_bound = index < constrained
        params = SamplingParams(max_tokens=None, ignore_eos=True, structured_outputs=ENDLESS if is_bound else None)
        request = EngineCoreRequest(0, f"{'bound' if is_bound else 'free'}-{index}", [5 + index, 6, 7], params)
        scheduler.add(request, scheduler.start_grammar(request) if is_bound else None)
    in_flight: deque[tuple[SchedulerOutput, StepFuture]] = deque()
    tokens = {"free": 0, "bound": 0}
    begun, done = 0.0, -10
    while done < steps:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append((plan, executor.submit(plan, STEP_TIMEOUT)))
        if plan is None or len(in_flight) == config.scheduler.depth:
            plan, pending = in_flight.popleft()
            news = scheduler.update(plan, pending.result())
            done += 1
            if done == 0:
                begun, tokens = time.perf_counter(), dict.fromkeys(tokens, 0)
            for outputs in (*news.values(), *scheduler.process_structured(is_idle=not in_flight).values()):
                for request_id in [*outputs.request_ids, *(output.request_id for output in outputs.outputs)]:
                    tokens[request_id.partition("-")[0]] += 1
    seconds = time.perf_counter() - begun
    for request_id in list(scheduler.requests):
        scheduler.abort(request_id)
    last = scheduler.heartbeat()  # the ranks free the slots
    in_flight.append((last, executor.submit(last, STEP_TIMEOUT)))
    for plan, pending in in_flight:
        scheduler.update(plan, pending.result())
    free, bound = REQUESTS - constrained, constrained
    return (
        seconds / steps,
        seconds * free / max(1, tokens["free"]),
        seconds * bound / max(1, tokens["bound"]),
    )


def median_of(work: Callable[[], object], repeats: int = 50) -> float:
    """Seconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def steps(config: EngineConfig, rounds: int, count: int) -> dict[str, float]:
    """Milliseconds and ratios by number of constrained requests."""
    executor = factory.start(config, "warning", on_end=lambda: None)
    step = 0
    found: dict[int, list[tuple[float, float, float]]] = {number: [] for number in CONSTRAINED}
    for turn in range(rounds + 1):
        for number in CONSTRAINED if turn % 2 else CONSTRAINED[::-1]:
            result = run(config, executor, step, number, count)
            step += 4 * (count + 16)
            if turn:  # the first one warms up
                found[number].append(result)
    executor.close()
    figures: dict[str, float] = {}
    for number in CONSTRAINED:
        for name, at in (("step", 0), ("free_token", 1), ("bound_token", 2)):
            if not found[number][0][at]:
                continue
            pairs = zip(found[number], found[0], strict=True)
            figures[f"{name}_ms_{number}"] = statistics.median(each[at] for each in found[number]) * 1e3
            figures[f"{name}_ratio_{number}"] = statistics.median(each[at] / free[1] for each, free in pairs)
    return figures


def masks(config: EngineConfig) -> dict[str, float]:
    """Microseconds to compute and to apply the masks of a step."""
    grammars = GrammarCompiler(config.model)
    figures: dict[str, float] = {}
    for number in CONSTRAINED[1:]:
        many = [grammars.compile(ENDLESS) for _ in range(number)]
        figures[f"masks_us_{number}"] = median_of(partial(grammars.masks, many)) * 1e6
        logits = torch.randn(REQUESTS, config.model.architecture.vocab_size)
        rows, bits = torch.arange(number), torch.from_numpy(np.ascontiguousarray(grammars.masks(many)))
        figures[f"apply_us_{number}"] = median_of(partial(kernels.apply_bitmask, logits, rows, bits)) * 1e6
    return figures


def compiling(config: EngineConfig) -> dict[str, float]:
    """Milliseconds until a grammar and its first mask are ready."""
    grammars = GrammarCompiler(config.model)
    begun = time.perf_counter()
    grammars.compile(ENDLESS)
    figures = {"the vocabulary, once": (time.perf_counter() - begun) * 1e3}
    for name, outputs in COMPILED.items():
        figures[name] = median_of(partial(grammars.error, outputs), 9) * 1e3
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), metavar="FOLDER")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--depth", type=int, default=2, help="plans in flight; 2 runs ahead of the device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="steps measured in each run")
    parser.add_argument("--json", action="store_true", help="figures such as free_token_ratio_16 instead of tables")
    options = parser.parse_args()
    config = resolve(
        EngineOptions(model=options.model, load_format=options.load_format, max_model_len=_LENGTH, device="cpu")
    )
    config = replace(
        config, scheduler=replace(config.scheduler, max_num_seqs=REQUESTS, depth=options.depth, dynamic_chunking=False)
    )
    torch.set_num_threads(1)
    compiled = compiling(config)
    figures = steps(config, options.rounds, options.steps) | masks(config)
    if options.json:
        json.dump({**figures, "compile_ms": compiled}, sys.stdout, indent=1)
        print()
        return
    print(
        f"constrained of {REQUESTS}   step ms   free: ms per token (ratio)   constrained (ratio)   masks µs   apply µs"
    )
    for number in CONSTRAINED:
        cells = [
            f"{figures[f'{name}_ms_{number}']:.2f} ({figures[f'{name}_ratio_{number}']:.3f})"
            if f"{name}_ms_{number}" in figures
            else "–"
            for name in ("free_token", "bound_token")
        ]
        costs = [f"{figures.get(f'{name}_us_{number}', 0):.0f}" for name in ("masks", "apply")]
        step = f"{figures[f'step_ms_{number}']:.2f}"
        print(f"{number:17}{step:>10}{cells[0]:>29}{cells[1]:>22}{costs[0]:>11}{costs[1]:>11}")
    print("\ncompiling, ms")
    for name, milliseconds in compiled.items():
        print(f"{name:22}{milliseconds:8.2f}")


if __name__ == "__main__":
    main()
