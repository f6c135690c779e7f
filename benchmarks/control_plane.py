"""Microseconds of Python per step, with a model that costs nothing: scheduler, plan, update, messages.

.venv/bin/python benchmarks/control_plane.py [--shares 500] [--json]

Requests decode endlessly in the real Scheduler; a stand-in answers every plan with one token per row. `step` is one
iteration of the core's loop: schedule + encode (the plan, as sent to the workers) + update. A separate thread encodes
the outputs. `worker` is the work of each rank around the model: decode the plan, apply it, build the batch, store the
sampled tokens. All figures are medians over the steps, and include blocks and the prefix cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import torch

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import LayerSpec, ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.scheduler import Scheduler
from quire.engine.worker.input_batch import InputBatch

SIZES = (1, 32, 64, 256, 1024)
BLOCK = 16
PROMPT = 128
EOS = 2
DEPTH = 2  # the scheduler runs ahead, as with ranks in other processes and on GPUs
PARTS = ("schedule", "encode", "update", "encode_outputs")


def config(requests: int, length: int) -> EngineConfig:
    norm = NormSpec(eps=1e-6)
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=8, scale=0.35, rope=None),
        attention_norm=norm,
        feed_forward=MLPSpec(intermediate_size=64),
        feed_forward_norm=norm,
    )
    architecture = ModelSpec(
        name="LlamaForCausalLM",
        hidden_size=32,
        vocab_size=32000,
        max_position=length,
        layers=(layer,),
        norm=norm,
        tie_embeddings=False,
    )
    return EngineConfig(
        model=ModelConfig(
            path=Path(),
            tokenizer=Path(),
            architecture=architecture,
            dtype="float32",
            quantization=None,
            max_model_len=length,
            load_format="dummy",
            eos_token_ids=(EOS,),
            trust_remote_code=False,
            seed=0,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=1, pipeline_parallel_size=1, stages=(range(1),), executor="uni", device="cpu"
        ),
        cache=CacheConfig(
            block_size=BLOCK,
            num_blocks=requests * (length // BLOCK + 1),
            dtype="float32",
            enable_prefix_caching=True,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=max(8192, requests),
            enable_chunked_prefill=True,
            policy="fcfs",
            depth=DEPTH,
        ),
    )


def measure(requests: int, steps: int, shares: int) -> dict[str, float]:
    """Median microseconds of each part of a step with this many requests decoding, and one of each share waiting."""
    length = PROMPT + BLOCK + steps * 2
    scheduler = Scheduler(config(requests, length))
    states = InputBatch(requests, length, BLOCK)
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(SchedulerOutput).decode
    for index in range(requests + shares):
        # Prompts of different lengths, so that about one decode in 16 needs a new block in each step.
        prompt = [3 + (index * 31 + place) % 1000 for place in range(PROMPT + index % BLOCK)]
        request_id = f"chatcmpl-{index:032x}-0"
        params = SamplingParams(max_tokens=None, temperature=0.0)
        share = b"%d" % (index % shares) if shares else b""
        scheduler.add(EngineCoreRequest(0, request_id, prompt, params, share=share))
    parts: dict[str, list[float]] = {name: [] for name in (*PARTS, "step", "worker")}
    in_flight: deque[SchedulerOutput] = deque()
    clock = time.perf_counter
    gc.collect()
    gc.freeze()
    while len(parts["step"]) < steps:
        times = [clock()]
        plan = scheduler.schedule()
        assert plan is not None
        times.append(clock())
        message = encode(plan)
        times.append(clock())
        worker = -clock()
        rows = states.apply(decode(message))
        _, places = states.batch(rows)
        states.advance(rows)
        states.write_sampled(places, torch.full((len(rows.sampling),), 7))
        states.append_sampled(rows)
        worker += clock()
        in_flight.append(plan)
        if len(in_flight) < DEPTH:
            continue
        plan = in_flight.popleft()
        sampled = len(plan.scheduled) and plan.scheduled[0].num_tokens > 1
        result = ModelRunnerOutput(plan.step, [7] * plan.num_rows)
        if sampled:  # still prefilling: only the last chunk of a prompt samples
            ends = {request.slot for request in scheduler.running.decoding}
            result.token_ids = [7] * len(plan.decodes) + [7 if row.slot in ends else -1 for row in plan.scheduled]
        times.append(clock())
        news = scheduler.update(plan, result)
        times.append(clock())
        for outputs in news.values():
            outputs.stats = msgspec.structs.replace(scheduler.snapshot())
            encode(outputs)
        times.append(clock())
        if len(scheduler.running.decoding) == requests and not sampled:
            spent = [times[1] - times[0], times[2] - times[1], times[4] - times[3], times[5] - times[4]]
            for name, seconds in zip(PARTS, spent, strict=True):
                parts[name].append(seconds * 1e6)
            parts["step"].append(sum(spent[:3]) * 1e6)
            parts["worker"].append(worker * 1e6)
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps per number of requests")
    parser.add_argument("--shares", type=int, default=0, help="fair sharing between this many clients")
    parser.add_argument("--json", action="store_true", help="figures such as step_us_256 instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {size: measure(size, options.steps, options.shares) for size in SIZES}
    if options.json:
        flat = {
            f"{name}_us_{size}": round(value, 1) for size, parts in results.items() for name, value in parts.items()
        }
        json.dump(flat, sys.stdout, indent=1)
        print()
        return
    names = ("step", *PARTS, "worker")
    print("µs a step".ljust(14) + "".join(name.rjust(16) for name in names))
    for size, parts in results.items():
        print(f"{size} running".ljust(14) + "".join(f"{parts[name]:16.1f}" for name in names))


if __name__ == "__main__":
    main()
