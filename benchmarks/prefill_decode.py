"""Pauses of streams while long prompts are computed: with prefill apart, and with chunked prefill alone.

    .venv/bin/python benchmarks/prefill_decode.py [--only "1 prefill, 1 decode"] [--write FILE.md]
    .venv/bin/python benchmarks/prefill_decode.py --shape tiny --length 1024 --output 64 --rounds 1    # a smoke test

`--streams` requests with short prompts run, first alone and then while a client sends prompts of `--length` tokens, one
after the other, and reads a short answer to each. All have the same checkpoint of random weights, and two ranks:

- one replica of two ranks (`-tp 2`), and two replicas, both with chunked prefill alone;
- a prefill replica and a decode replica;
- the same as if on two hosts: each has its own KV store, and one reads from the other at a loopback address;
- two servers that know nothing of each other, one for the streams and one for the prompts: they show how much two ranks
  slow each other down that share only the machine, its memory, clients and API processes.

`itl_ms` and `itl_p99_ms`: the time between two tokens of the streams while prompts are computed, median and 99th
percentile; `quiet_…`: the same without prompts; `p99_ratio`: the ratio of the two 99th percentiles. `ttft_ms`: time to
first token of the long prompts. `handed_over`: how many of the `prompts` changed replicas. For each of these:
`handover_ms`, the mean time from the first token to the second, which includes a decode step (the rest is the part of
the transfer that did not overlap the computation of the prompt); `read_mb`, the KV that the decode replica loaded; and
`recomputed`, the prompt tokens that it computed itself. `written_mb`: KV written to the KV store for each prompt, by
any replica, less what the streams alone write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load
import peers
from compare import Prompts
from load import Answer, RequestFailed, complete, percentile
from machine import provenance
from shapes import SHAPES, make_checkpoint

CASES = {
    "1 replica, -tp 2": ["--tensor-parallel-size", "2"],
    "2 replicas": ["--data-parallel-size", "2"],
    "1 prefill, 1 decode": ["--prefill-replicas", "1", "--decode-replicas", "1"],
    "1 prefill, 1 decode, 2 hosts": ["--prefill-replicas", "1", "--decode-replicas", "1", "-dpl", "1"],
    "2 servers": [],
}
_SHORT = 32
"""Tokens of the prompts of streams."""
_ANSWER = 4
"""Tokens of the answers to long prompts."""
_COUNTS = {
    "handed": "quire:requests_handed_over_total",
    "handovers": "quire:handover_time_seconds_count",
    "seconds": "quire:handover_time_seconds_sum",
    "recomputed": "quire:handed_over_tokens_recomputed_total",
    "written": "quire:kv_store_written_bytes_total",
    "read": "quire:kv_store_read_bytes_total",
}


class Bench:
    """The servers' common model and prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shape = options, SHAPES[options.shape]
        self.prompts = Prompts(make_checkpoint(self.shape, options.cache))
        self.version = ""

    def server(self, name: str, number: int) -> peers.Server:
        """The server with this number in a case. Raises `RequestFailed` if Quire is not installed."""
        options, peer = self.options, peers.find(peers.Quire, None)
        if peer is None:
            raise RequestFailed(f"not installed: {peers.Quire.remedy}")
        self.version = peer.version()
        room = (options.streams + 2) * (options.length + _ANSWER) + options.streams * (_SHORT + options.output)
        size = room * self.shape.kv_numbers * (4 if options.precision == "f32" else 2)
        arguments = [*CASES[name], "--max-model-len", str(options.length + options.output + _SHORT)]
        arguments += ["--kv-cache-memory-bytes", str(size)]
        if "prefill" in name:
            arguments += ["--kv-offloading-size", str(options.memory)]
        if "2 hosts" in name:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            arguments += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
        model = peer.prepare(self.shape, options.precision, options.cache)
        log = Path(options.cache / f"prefill-decode-{re.sub('[^a-z0-9]+', '-', name)}-{number}.log")
        return peers.Server(peer, options.precision, model, 1, log, arguments)


@contextlib.contextmanager
def other_host(bench: Bench, name: str, server: peers.Server) -> Iterator[None]:
    """The second host, if there is one."""
    if "2 hosts" not in name:
        yield
        return
    command = [*server.launch.command, "--data-parallel-start-rank", "1", "--headless"]
    environment = os.environ | server.launch.environment | {"QUIRE_HOST_IP": "127.0.0.2", "OMP_NUM_THREADS": "1"}
    with (bench.options.cache / "prefill-decode-second-host.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def counts(server: peers.Server) -> dict[str, float]:
    """The sums of metrics over all labels."""
    with urllib.request.urlopen(f"http://{server.address.host}:{server.address.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        key: sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))
        for key, name in _COUNTS.items()
    }


async def measure(bench: Bench, servers: list[peers.Server], number: int) -> dict[str, float]:
    """The figures of one round: the first server gets the streams, the last one the long prompts."""
    options, prompts, server, other = bench.options, bench.prompts, servers[0], servers[-1]

    async def streams(kind: str, count: int) -> list[float]:
        """The gaps of streams that begin together, but for the first ones, when the short prompts are computed."""
        workload = prompts.workload(server, f"{kind} {number}", (count, _SHORT, options.output))
        return [gap for answer in await load.run(server.address, workload) for gap in answer.gaps[2:]]

    async def long_prompts(done: asyncio.Event) -> list[Answer]:
        """The answers to prompts, one after the other."""
        found: list[Answer] = []
        while not done.is_set():
            ((prompt, text),) = prompts.draw(f"long {number} {len(found)}", 1, options.length)
            found.append(await complete(other.address, other.body(prompt, text, _ANSWER)))
        return found

    start = counts(server)
    quiet = await streams("quiet", options.streams)
    before, done = counts(server), asyncio.Event()
    sending = asyncio.create_task(long_prompts(done))
    try:
        busy = await streams("busy", options.streams)
    finally:
        done.set()
        answers = await sending
    return {
        "quiet_itl_ms": statistics.median(quiet) * 1e3,
        "quiet_itl_p99_ms": percentile(quiet, 99) * 1e3,
        "itl_ms": statistics.median(busy) * 1e3,
        "itl_p99_ms": percentile(busy, 99) * 1e3,
        "p99_ratio": percentile(busy, 99) / percentile(quiet, 99),
        "prompts": len(answers),
        "ttft_ms": statistics.median(answer.ttft for answer in answers) * 1e3,
        **of_hand_overs(start, before, counts(server), len(answers)),
    }


def of_hand_overs(
    start: dict[str, float], before: dict[str, float], end: dict[str, float], num_prompts: int
) -> dict[str, float]:
    """The figures of prompts that changed replicas, given the counts before the streams without prompts, before the
    same with prompts, and at the end."""
    found = {key: value - before[key] for key, value in end.items()}
    moved, written = found["handed"], found["written"] - (before["written"] - start["written"])
    if not moved:
        return {"handed_over": 0}
    return {
        "handed_over": moved,
        "handover_ms": found["seconds"] / max(1.0, found["handovers"]) * 1e3,
        "written_mb": written / num_prompts / 1e6,
        "read_mb": found["read"] / moved / 1e6,
        "recomputed": found["recomputed"] / moved,
    }


async def all_cases(bench: Bench, results: dict[str, dict[str, Any]]) -> None:
    """Add the medians over the rounds of each case; one that fails says why."""
    options = bench.options
    for name in CASES:
        if options.only not in (None, name):
            continue
        try:
            servers = [bench.server(name, number) for number in range(2 if name == "2 servers" else 1)]
            with other_host(bench, name, servers[0]):
                try:
                    ((prompt, text),) = bench.prompts.draw("start", 1, 8)
                    for server in servers:
                        await server.start(prompt, text, options.start_limit)
                    rounds = [await measure(bench, servers, number) for number in range(-1, options.rounds)][1:]
                finally:
                    for server in servers:
                        server.stop()
            results[name] = {
                column: statistics.median(each[column] for each in rounds if column in each)
                for column in dict.fromkeys(column for each in rounds for column in each)
            }
        except (RequestFailed, RuntimeError, OSError) as failure:
            results[name] = {"failure": str(failure)}
        print(name, json.dumps(results[name], indent=1), file=sys.stderr, flush=True)
        if options.write:  # keep the figures of an interrupted run
            options.write.write_text(document(bench, results))


def document(bench: Bench, results: dict[str, dict[str, Any]]) -> str:
    """A table of all cases, and how it was made."""
    options = bench.options
    assert __doc__ is not None
    meaning = " ".join(__doc__.split("\n\n")[-1].split())
    text = (
        f"{options.streams} streams of {options.output} tokens, and prompts of {options.length} tokens one after the "
        f"other; medians of {options.rounds} rounds. Each rank has a core. In the last row, two servers know nothing "
        f"of each other: one gets the streams, the other one the prompts. {meaning}"
    )
    columns = list(dict.fromkeys(column for found in results.values() for column in found if column != "failure"))
    lines = [
        "# Prefill apart from decode",
        "",
        "`benchmarks/prefill_decode.py --write` writes this page: change the program, not the page.",
        "",
        f"Quire {bench.version}, random weights in the shape of {bench.shape.name}, {options.precision}.",
        "",
        *textwrap.wrap(text, 120),
        "",
        f"| server | {' | '.join(columns)} |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, found in results.items():
        cells = [_cell(column, found[column]) if column in found else "" for column in columns]
        lines += [f"| {name} | {' | '.join(cells)} |"] if "failure" not in found else []
    lines += ["", *(f"- {name}: {found['failure']}" for name, found in results.items() if "failure" in found)]
    return "\n".join([*lines, "", *provenance()]).replace("\n\n\n", "\n\n") + "\n"


def _cell(name: str, value: float) -> str:
    return f"{value:,.{2 if name.endswith('ratio') else 1 if name.endswith(('_ms', '_mb')) else 0}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one of the servers")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--precision", choices=("f32", "16-bit", "int8"), default="int8")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--output", type=int, default=512, metavar="TOKENS", help="of each stream")
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS", help="of each long prompt")
    parser.add_argument("--rounds", type=int, default=3, help="after one to warm up")
    parser.add_argument("--memory", type=float, default=1.0, metavar="GIB", help="of the KV store")
    parser.add_argument("--start-limit", type=float, default=420, metavar="SECONDS")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quire-compare")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table to this file, too")
    options = parser.parse_args()
    options.cache = options.cache.absolute()
    options.cache.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    bench = Bench(options)
    asyncio.run(all_cases(bench, results))
    print(document(bench, results))


if __name__ == "__main__":
    main()
