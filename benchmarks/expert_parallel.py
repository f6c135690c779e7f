"""How much of the all-to-all two micro-batches hide: two replicas on this machine, with and without --enable-dbo.

    python benchmarks/expert_parallel.py [--tokens 256] [--latency-ms 2] [--gbit 1]

Two processes of one thread each hold half of the experts and compute prompts of equal length together. They communicate
through gloo on the loopback interface, which has no network cost to hide, so each all-to-all is delayed until it would
have arrived over a network of the given latency and bandwidth; the delay costs no computation. Steps with one batch and
with two micro-batches alternate. Shown are the medians of what a rank measures:

- network: the sum of the network times of the step's all-to-alls;
- waited: how long the rank waited for them because it had nothing left to compute;
- hidden: the rest of network, as a share;
- step: the whole step, which depends on other load on the machine; micro-batches are less efficient to compute.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.engine.cluster.network import LOOPBACK, set_interfaces
from quire.engine.config.engine_config import EngineConfig, ExpertParallelConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.distributed.expert_group import ProcessGroupExpertCommunicator, Transfer
from quire.engine.distributed.parallel_state import connect
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner

BACKENDS: tuple[Literal["allgather_reducescatter", "all_to_all"], ...] = ("allgather_reducescatter", "all_to_all")
MODEL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Network:
    """The simulated network between the replicas."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second in each direction."""
    under_way: float = 0.0
    """Seconds that the all-to-alls of this step take."""
    waited: float = 0.0
    """Seconds that this rank has waited for them."""


@dataclass(frozen=True)
class Slow:
    """Rows that are delivered after the network's delay."""

    rows: Transfer
    network: Network
    due: float

    def wait(self) -> Tensor:
        self.network.waited += max(0.0, self.due - time.perf_counter())
        rows = self.rows.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return rows


def slow_down(network: Network) -> None:
    """Delay every all-to-all between processes as the network would."""
    start = ProcessGroupExpertCommunicator.start_all_to_all

    def slow(self: ProcessGroupExpertCommunicator, x: Tensor, sent: list[int], received: list[int]) -> Transfer:
        pending, row = start(self, x, sent, received), x.shape[1] * x.element_size()
        crossing = max(sum(sent) - sent[self.rank], sum(received) - received[self.rank]) * row
        takes = network.latency + crossing / network.bandwidth
        network.under_way += takes
        return Slow(pending, network, time.perf_counter() + takes)

    ProcessGroupExpertCommunicator.start_all_to_all = slow  # type: ignore[assignment, method-assign]


class Step(NamedTuple):
    """Seconds."""

    network: float
    waited: float
    step: float


def work(config: EngineConfig, network: Network, tokens: int, rounds: int, pipe: Connection) -> None:
    """A replica; reports its steps in both modes."""
    torch.set_num_threads(1)
    set_interfaces(LOOPBACK)
    slow_down(network)
    parallel, cpu = config.parallel, torch.device("cpu")
    links = connect(parallel, 0, parallel.init_method, cpu)
    runner = ModelRunner(config, 0, links, cpu)
    blocks = list(range(-(-tokens // config.cache.block_size)))
    prompt = [(7 * at + 13 * parallel.replica) % 250 + 3 for at in range(tokens)]
    steps: dict[str, list[Step]] = {"one piece": [], "halves": []}
    number = 0
    for turn in range(rounds + 1):
        for way, measured in steps.items():
            network.under_way = network.waited = 0.0
            assert isinstance(runner._model, Decoder)
            runner._model._dbo_token_threshold = 1 if way == "halves" else None
            request = NewRequestData(0, prompt, tokens, 0, blocks, SamplingParams(temperature=0.0))
            plan = SchedulerOutput(
                number, [0] if number else [], [request], [CachedRequestData(0, tokens, [], [])], has_work=True
            )
            began = time.perf_counter()
            runner.launch(plan).result()
            if turn:  # the first one warms up
                measured.append(Step(network.under_way, network.waited, time.perf_counter() - began))
            number += 1
    pipe.send(steps)
    links.close()


def measure(config: EngineConfig, network: Network, tokens: int, rounds: int) -> dict[str, list[Step]]:
    spawn = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    folder = tempfile.TemporaryDirectory()
    for replica in range(2):
        ours, theirs = spawn.Pipe()
        parallel = replace(config.parallel, replicas=2, replica=replica, init_method=f"file://{folder.name}/rendezvous")
        arguments = (replace(config, parallel=parallel), network, tokens, rounds, theirs)
        processes.append(spawn.Process(target=work, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    steps: list[dict[str, list[Step]]] = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    folder.cleanup()
    return steps[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each replica per step")
    parser.add_argument("--latency-ms", type=float, default=2.0, help="latency of the network between the replicas")
    parser.add_argument("--gbit", type=float, default=1.0, help="Gbit/s of the network in each direction")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    network = Network(options.latency_ms / 1e3, options.gbit * 1e9 / 8)
    print(f"2 replicas × 1 thread, {options.tokens} tokens each, {options.latency_ms} ms, {options.gbit} Gbit/s\n")
    print("| exchange | batch | network, ms | waited, ms | hidden | step, ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = resolve(
            EngineOptions(
                model=folder,
                device="cpu",
                load_format="dummy",
                spec_method="none",
                max_model_len=options.tokens + 1,
                max_num_seqs=1,
                kv_cache_memory_bytes=1 << 28,
            )
        )
        for backend in BACKENDS:
            experts = ExpertParallelConfig(all2all_backend=backend, dbo_token_threshold=1)
            coupled = replace(config, parallel=replace(config.parallel, replicas=2, experts=experts))
            for way, steps in measure(coupled, network, options.tokens, options.rounds).items():
                ms = [statistics.median(column) * 1e3 for column in zip(*steps, strict=True)]
                hidden = statistics.median(1 - each.waited / each.network for each in steps)
                print(f"| {backend} | {way} | {ms[0]:.0f} | {ms[1]:.0f} | {hidden:.0%} | {ms[2]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
