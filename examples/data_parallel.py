"""Answer prompts offline with several replicas of a model, on one host or on many.

One host, two replicas of two ranks each:

    python examples/data_parallel.py --model M --dp-size 2 --tp-size 2

Two hosts with one replica each; every host answers its share of the prompts:

    python examples/data_parallel.py --model M --dp-size 2 --node-size 2 --node-rank 0 --master-addr 10.0.0.1
    python examples/data_parallel.py --model M --dp-size 2 --node-size 2 --node-rank 1 --master-addr 10.0.0.1

With --enable-expert-parallel the experts of a mixture are spread over the ranks of all replicas, which then step
together; without it the hosts have nothing to do with each other.
"""

from __future__ import annotations

import argparse

from quire import LLM, SamplingParams
from quire.engine.config.options import EngineOptions

PROMPTS = ["What is tensor parallelism?", "What is pipeline parallelism?", "Which flag sets the port?", "Who are you?"]


def main() -> None:
    """Print an answer for each prompt of this host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineOptions.model, help="folder or repository (default: the demo model)")
    parser.add_argument("--dp-size", type=int, default=2, help="replicas, on all hosts")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--node-size", type=int, default=1, help="hosts")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--master-addr", help="address of host 0 (default: this host)")
    parser.add_argument("--master-port", type=int, default=EngineOptions.data_parallel_rpc_port, help="port there")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="spread experts over all ranks")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer")
    given = parser.parse_args()
    if not 0 <= given.node_rank < given.node_size or given.dp_size % given.node_size:
        parser.error("--node-rank must be below --node-size, which must divide --dp-size")
    replicas_here = given.dp_size // given.node_size
    with LLM(
        given.model,
        tensor_parallel_size=given.tp_size,
        data_parallel_size=given.dp_size,
        data_parallel_size_local=replicas_here,
        data_parallel_start_rank=given.node_rank * replicas_here if given.node_size > 1 else None,
        data_parallel_address=given.master_addr,
        data_parallel_rpc_port=given.master_port,
        enable_expert_parallel=given.enable_expert_parallel,
    ) as llm:
        mine = PROMPTS[given.node_rank :: given.node_size]
        params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens)
        for prompt, result in zip(mine, llm.generate(mine, params, use_tqdm=False), strict=True):
            print(f"host {given.node_rank}: {prompt!r} → {result.outputs[0].text!r}", flush=True)


if __name__ == "__main__":
    main()
