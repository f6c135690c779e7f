"""KV tiers: conversations whose KV is ten times the device's, prompts that no tier has, and a restart.

    .venv/bin/python benchmarks/kv_tiers.py --peer vllm=/opt/vllm/venv [--only conversations] [--write FILE.md]
    .venv/bin/python benchmarks/kv_tiers.py --servers quire --shape tiny --conversations 32 --turns 4 --rounds 1

The second command is a smoke test. All servers have the same checkpoint of random weights. The KV cache of their device
has room for `--share` of the tokens of all conversations.

- **conversations**: the first turn of all conversations, `--concurrency` at a time, then the second turn of all, and so
  on: when a conversation continues, the device has evicted it. Servers: Quire without tiers, twice; Quire with memory
  for everything (`tiers`); vLLM without and with its native offload to the CPU's memory. `computed` are the prompt
  tokens computed (`vllm:prompt_tokens_by_source` of `/metrics`).
- **idle**: new prompts in each round, which no tier can have, on a server with tiers and on one without, alternately:
  the cost of tiers where they bring nothing.
- **restart**: TTFT of prompts on a server with an empty disk tier (`cold`), and on one that is started afterwards with
  the same disk tier (`warm`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import signal
import statistics
import sys
import textwrap
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import load
import peers
from compare import Prompts
from load import RequestFailed, events, figures, percentile
from machine import provenance
from shapes import SHAPES, make_checkpoint

_BLOCK = 32
"""Tokens of a block, on all servers: vLLM's attention on CPUs needs a multiple of this."""
_CAUSE = re.compile(r" ERROR .*\] (\w*Error: .*)")
"""An error in vLLM's log."""
_DISK_GIB = 4
_SETTLE_SECONDS = 0.3
"""Time in which a server stores what it has just computed."""
_INDEX_SECONDS = 60.0
"""Time for a server to find what its disk tier has."""


@dataclass
class Case:
    """A server, as it is measured."""

    name: str
    kind: type[peers.Peer]
    arguments: list[str] = field(default_factory=list)


def cases(options: argparse.Namespace) -> list[Case]:
    """The servers of the part `conversations`."""
    memory = ["--kv-offloading-size", str(options.memory)]
    found = [
        Case("quire", peers.Quire),
        Case("quire, again", peers.Quire),
        Case("quire, tiers", peers.Quire, memory),
        Case("vllm", peers.Vllm),
        Case("vllm, native offload", peers.Vllm, [*memory, "--kv-offloading-backend", "native"]),
    ]
    return [case for case in found if options.servers is None or case.kind.name in options.servers]


class Bench:
    """The servers' common model, prompts and sizes."""

    def __init__(self, options: argparse.Namespace, places: dict[str, Path]) -> None:
        self.options, self.shape = options, SHAPES[options.shape]
        self.prompts = Prompts(make_checkpoint(self.shape, options.cache))
        self._places = places

    @property
    def conversation_tokens(self) -> int:
        """Tokens of a conversation at its end."""
        options = self.options
        return int(options.first + (options.turns - 1) * options.new + options.turns * options.output)

    @property
    def device_tokens(self) -> int:
        """Tokens that the device's KV cache has room for: at least the longest request."""
        share = int(self.options.conversations * self.conversation_tokens * self.options.share)
        return max(share, peers.MAX_TOKENS) // _BLOCK * _BLOCK

    def server(self, case: Case) -> peers.Server:
        """Raises `RequestFailed` if it is not installed."""
        peer = peers.find(case.kind, self._places.get(case.kind.name))
        if peer is None:
            raise RequestFailed(f"not installed: {case.kind.remedy}")
        sizes = ["--block-size", str(_BLOCK)]
        if isinstance(peer, peers.Quire):
            width = 4 if self.options.precision == "f32" else 2
            sizes += ["--kv-cache-memory-bytes", str(self.device_tokens * self.shape.kv_numbers * width)]
        else:
            sizes += ["--num-gpu-blocks-override", str(self.device_tokens // _BLOCK + 1)]  # one is reserved
        model = peer.prepare(self.shape, self.options.precision, self.options.cache)
        arguments = [*sizes, *case.arguments]
        return peers.Server(peer, self.options.precision, model, self.options.threads, self.log(case), arguments)

    def log(self, case: Case) -> Path:
        return Path(self.options.cache / f"kv-tiers-{case.name.replace(', ', '-').replace(' ', '-')}.log")

    async def start(self, server: peers.Server) -> None:
        ((prompt, text),) = self.prompts.draw("start", 1, 8)
        await server.start(prompt, text, self.options.start_limit)

    def version(self, kind: type[peers.Peer]) -> str:
        peer = peers.find(kind, self._places.get(kind.name))
        return "" if peer is None else peer.version()


def metric(server: peers.Server, name: str, label: str = "") -> float:
    """The sum of a metric's samples with this label."""
    with urllib.request.urlopen(f"http://{server.address.host}:{server.address.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{([^}}]*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


def computed(server: peers.Server) -> float:
    """Prompt tokens that the server has computed."""
    return metric(server, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')


async def turn(server: peers.Server, history: list[int], output: int) -> float:
    """Send a conversation, add the answer's tokens to it, and return the seconds to the first one."""
    body = server.body(list(history), "", output) | {"return_token_ids": True}
    sent, first, count = time.perf_counter(), 0.0, len(history)
    async for event in events(server.address, body):
        for choice in event.get("choices") or []:
            if ids := choice.get("token_ids"):
                first = first or time.perf_counter()
                history += ids
    if len(history) != count + output:
        raise RequestFailed(f"an answer has {len(history) - count} tokens, not {output}")
    return first - sent


async def conversations(bench: Bench, server: peers.Server) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures of all turns of all conversations, and their tokens."""
    options = bench.options
    free = asyncio.Semaphore(options.concurrency)
    histories: list[list[int]] = [[] for _ in range(options.conversations)]
    later: list[float] = []
    sent, before, begun = 0, computed(server), time.perf_counter()

    async def go_on(history: list[int], message: list[int]) -> float:
        async with free:
            history += message
            return await turn(server, history, options.output)

    for number in range(options.turns):
        size = options.new if number else options.first
        messages = [prompt for prompt, _ in bench.prompts.draw(f"turn {number}", options.conversations, size)]
        sent += sum(map(len, histories)) + options.conversations * size
        ttfts = await asyncio.gather(*map(go_on, histories, messages))
        later += ttfts if number else []
    seconds = time.perf_counter() - begun
    took = computed(server) - before
    found = {
        "sent": sent,
        "computed": took,
        "computed_share": took / sent,
        "ttft_ms": statistics.median(later) * 1e3,
        "ttft_p99_ms": percentile(later, 99) * 1e3,
        "tokens_per_s": options.conversations * options.turns * options.output / seconds,
        "memory_gib": server.memory(),
    }
    return found, histories


async def all_conversations(bench: Bench) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    plain: dict[str, tuple[dict[str, Any], list[list[int]]]] = {}
    """The figures and tokens of each kind of server without tiers."""
    for case in cases(bench.options):
        try:
            server = bench.server(case)
            try:
                await bench.start(server)
                measured, histories = await conversations(bench, server)
            finally:
                server.stop()
        except (RequestFailed, RuntimeError, OSError) as failure:
            measured = {"failure": _cause(bench.log(case), failure)}
        else:
            without, tokens = plain.setdefault(case.kind.name, (measured, histories))
            if without is not measured:
                measured["computed_ratio"] = measured["computed"] / without["computed"]
                measured["ttft_ratio"] = measured["ttft_ms"] / without["ttft_ms"]
                measured["same"] = sum(map(list.__eq__, histories, tokens))
        found[case.name] = measured | {"version": bench.version(case.kind)}
        print(case.name, json.dumps(measured, indent=1), file=sys.stderr, flush=True)
    return found


def _cause(log: Path, failure: Exception) -> str:
    """The first line of a failure, and the first error in the server's log."""
    first = str(failure).partition("\n")[0]
    found = _CAUSE.search(log.read_text(errors="replace")) if log.exists() else None
    return first if found is None else f"{first} {found[1]}"


async def idle(bench: Bench) -> dict[str, dict[str, Any]]:
    """Output tokens per second, median TTFT and processor time of new prompts, with tiers beside without."""
    options = bench.options
    names = {"without": [], "tiers": ["--kv-offloading-size", str(options.memory)]}
    servers = {name: bench.server(Case(f"idle {name}", peers.Quire, flags)) for name, flags in names.items()}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    ttfts: dict[str, list[float]] = {name: [] for name in servers}
    times: dict[str, list[float]] = {name: [] for name in servers}
    size = (options.batch, options.first, options.output)
    try:
        for server in servers.values():
            await bench.start(server)
        for number in range(-1, options.rounds):  # the first is a warm-up
            for name in list(servers)[:: -1 if number % 2 else 1]:
                server, before = servers[name], servers[name].cpu_seconds()
                measured = figures(await load.run(server.address, bench.prompts.workload(server, f"{number}", size)))
                await asyncio.sleep(_SETTLE_SECONDS)
                if number >= 0:
                    rates[name].append(measured.throughput)
                    ttfts[name].append(measured.ttft)
                    times[name].append(server.cpu_seconds() - before)
    finally:
        for server in servers.values():
            server.stop()
    found = {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "ttft_ms": statistics.median(ttfts[name]) * 1e3,
            "cpu_s": statistics.median(times[name]),
        }
        for name in servers
    }
    for column, each in (("speed_ratio", rates), ("cpu_ratio", times)):
        pairs = zip(each["tiers"], each["without"], strict=True)
        found["tiers"][column] = statistics.median(mine / other for mine, other in pairs)
    print("idle", json.dumps(found, indent=1), file=sys.stderr, flush=True)
    return found


async def restart(bench: Bench) -> dict[str, dict[str, Any]]:
    """TTFT of prompts that an earlier server has computed, with its disk tier and with an empty one."""
    options, folder = bench.options, bench.options.cache / "kv-tiers-disk"
    length = peers.MAX_TOKENS * 3 // 4
    prompts = [prompt for prompt, _ in bench.prompts.draw("restart", options.prompts, length)]
    flags = ["--kv-offloading-size", str(options.memory), "--kv-disk", f"{folder}:{_DISK_GIB}"]
    found: dict[str, dict[str, Any]] = {}
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for name in ("cold", "warm"):
            server = bench.server(Case(f"restart {name}", peers.Quire, flags))
            try:
                await bench.start(server)
                up, entries = time.perf_counter(), 0.0
                while name == "warm" and not entries and time.perf_counter() < up + _INDEX_SECONDS:
                    entries = metric(server, "quire:kv_store_entries", 'tier="disk"')
                    await asyncio.sleep(0.05)
                indexed, before = time.perf_counter() - up, computed(server)
                ttfts = [await turn(server, list(prompt), 1) for prompt in prompts]
                found[name] = {
                    "first_ttft_ms": ttfts[0] * 1e3,
                    "ttft_ms": statistics.median(ttfts) * 1e3,
                    "computed_share": (computed(server) - before) / (length * len(prompts)),
                }
                if name == "warm":
                    found[name]["indexed_s"] = indexed
            finally:
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found["warm"]["ttft_ratio"] = found["warm"]["ttft_ms"] / found["cold"]["ttft_ms"]
    print("restart", json.dumps(found, indent=1), file=sys.stderr, flush=True)
    return found


PARTS = {"conversations": all_conversations, "idle": idle, "restart": restart}


async def measure(bench: Bench, results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Add the figures of all parts; a part that fails says why."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # the servers are stopped, too
    for name, part in PARTS.items():
        if bench.options.only not in (None, name) or (name != "conversations" and not _measures_quire(bench.options)):
            continue
        try:
            results[name] = await part(bench)
        except (RequestFailed, RuntimeError, OSError) as failure:
            results[name] = {"quire": {"failure": str(failure)}}
            print(name, failure, file=sys.stderr, flush=True)
        if bench.options.write:  # keep the figures of an interrupted run
            bench.options.write.write_text(document(bench, results))


def _measures_quire(options: argparse.Namespace) -> bool:
    return options.servers is None or "quire" in options.servers


def document(bench: Bench, results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A table for each part, and how it was made."""
    options = bench.options
    total = options.conversations * bench.conversation_tokens
    what = {
        "conversations": f"{options.conversations} conversations of {options.turns} turns, {options.concurrency} at a "
        f"time. The first turn has {options.first} new tokens, each later one {options.new}, and each answer "
        f"{options.output}. At the end, all conversations together have {total:,} tokens; the device has room for "
        f"{bench.device_tokens:,}, and the tiers have {options.memory:g} GiB of memory. `computed`: how many of the "
        "prompt tokens that were `sent` the server computed. TTFT is that of all turns but the first. "
        "`computed_ratio`, `ttft_ratio`: relative to the same server without tiers. `same`: conversations with the "
        "same tokens as without tiers. Rounding depends on the batch, so some differ in any two runs: `again`, a "
        "second run without tiers, shows how many.",
        "idle": f"The cost of tiers where they bring nothing: {options.batch} new prompts of {options.first} tokens "
        f"with {options.output} output tokens each, sent at once, in {options.rounds} rounds that alternate between "
        "the servers. `cpu_s`: processor time of all processes, the figure that other work on the machine affects "
        "least. `speed_ratio`, `cpu_ratio`: medians over the rounds of the ratios of output tokens per second and of "
        "processor time.",
        "restart": f"{options.prompts} prompts of {peers.MAX_TOKENS * 3 // 4:,} tokens, one after the other, on a "
        "server with an empty disk tier (`cold`), and on one that was started afterwards with the same disk tier "
        "(`warm`). `indexed_s`: seconds from its first token until the disk tier is in use.",
    }
    lines = [
        "# KV tiers",
        "",
        "`benchmarks/kv_tiers.py --write` writes this page: change the program, not the page.",
        "",
        f"Random weights in the shape of {bench.shape.name}, {options.precision}; {options.threads} threads for each "
        "server.",
        "",
    ]
    for name, measured in results.items():
        seen = dict.fromkeys(column for found in measured.values() for column in found)
        columns = [column for column in seen if column not in ("failure", "version")]
        lines += [f"## {name.capitalize()}", "", *textwrap.wrap(what[name], 120), ""]
        lines += [f"| server | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)] if columns else []
        for server, found in measured.items():
            if "failure" not in found:
                cells = [_cell(column, found[column]) if column in found else "" for column in columns]
                title = server.replace(",", f" {found['version']},", 1) if "," in server else server
                title += f" {found['version']}" if "version" in found and "," not in server else ""
                lines.append(f"| {title} | {' | '.join(cells)} |")
        failures = [f"- {server}: {found['failure']}" for server, found in measured.items() if "failure" in found]
        lines += ["", *failures, *[""] * bool(failures)]
    return "\n".join([*lines, *provenance()]) + "\n"


def _cell(name: str, value: float) -> str:
    digits = 3 if name.endswith(("ratio", "share")) else 2 if name.endswith(("gib", "_s")) else 0
    return f"{value:,.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="where a peer is installed")
    parser.add_argument("--servers", nargs="+", choices=("quire", "vllm"), help="default: all")
    parser.add_argument("--only", choices=PARTS, help="a part of the figures")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--precision", choices=("f32", "16-bit", "int8"), default="int8")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4, help="conversations that wait for an answer at a time")
    parser.add_argument("--first", type=int, default=256, metavar="TOKENS", help="of a conversation's first turn")
    parser.add_argument("--new", type=int, default=24, metavar="TOKENS", help="of each other turn")
    parser.add_argument("--output", type=int, default=8, metavar="TOKENS", help="of each answer")
    parser.add_argument("--share", type=float, default=0.1, help="of all conversations' KV that the device has")
    parser.add_argument("--memory", type=float, default=1.0, metavar="GIB", help="memory of the tiers")
    parser.add_argument("--batch", type=int, default=8, help="requests at once of the part `idle`")
    parser.add_argument("--rounds", type=int, default=25, help="of the part `idle`")
    parser.add_argument("--prompts", type=int, default=4, help="of the part `restart`")
    parser.add_argument("--threads", type=int, default=2, help="of every server")
    parser.add_argument("--start-limit", type=float, default=420, metavar="SECONDS")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quire-compare")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    options = parser.parse_args()
    options.cache = options.cache.absolute()
    options.cache.mkdir(parents=True, exist_ok=True)
    places = {name: Path(path).absolute() for name, _, path in (pair.partition("=") for pair in options.peer)}
    bench = Bench(options, places)
    longest = bench.conversation_tokens
    if longest > peers.MAX_TOKENS:
        parser.error(f"a conversation has {longest} tokens, more than the {peers.MAX_TOKENS} that servers are set for")
    results: dict[str, dict[str, dict[str, Any]]] = {}
    asyncio.run(measure(bench, results))
    print(document(bench, results))


if __name__ == "__main__":
    main()
