"""Adapters (LoRA): the speed of a batch that uses them, the first token after a load, and hundreds of them.

    .venv/bin/python benchmarks/lora.py --peer vllm=/opt/vllm/venv [--write docs/benchmarks/lora.md]
    .venv/bin/python benchmarks/lora.py --shape tiny --rounds 1 --batch 4 --output 8 --registered 20    # a smoke test

Each server has a checkpoint of random weights, and is started without adapters and with them; both run at the same time
and are measured in turns, round after round, and each ratio is of figures of the same round. Adapters have rank 16 and
random weights in bfloat16, of the queries and values (`qv`, PEFT's default) or of all linear layers.

- **batch**: requests of `--prompt` tokens in and `--output` out, all at once: of the base on the server without
  adapters (`without`) and on the one with them (`base`), all with one adapter (`one`), each with another (`each`).
- **first**: TTFT of the first request with an adapter that the load route has read (`from memory`), of the next one
  with it (`on device`), by how much the first one is later, and TTFT of the first request with an adapter that is only
  registered (`registered`: Quire reads it then, from a file that the system has in memory; vLLM has read it).
- **many**: start, memory and speed with `--registered` adapters beside those with one, with the same `--max-loras`;
  the requests use that one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import sys
import textwrap
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
import peers
from compare import Prompts
from load import RequestFailed, Workload, complete, figures
from machine import provenance
from shapes import SHAPES, Shape, make_checkpoint

RANK = 16
_NUM_FIRST = 8
"""Adapters for each kind of first token."""
_TARGETS = {
    "qv": ("self_attn.q_proj", "self_attn.v_proj"),
    "all": (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
    ),
}
_SERVERS: tuple[type[peers.Peer], ...] = (peers.Quire, peers.Vllm)
_SHORTEST_MS = 1e-3
"""A shorter time between tokens is no measurement: they arrived together. It has no ratio."""
_FEWEST_ROUNDS = 3
"""Of a run whose figures mean something."""
_CASES = ("without", "base", "one", "each")


def sizes(shape: Shape, module: str) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "o": shape.hidden, "down": shape.hidden}
    name = module.partition(".")[2].removesuffix("_proj")
    inputs = {"o": queries, "down": shape.intermediate}
    return outputs.get(name, shape.intermediate), inputs.get(name, shape.hidden)


def make_adapters(shape: Shape, targets: str, count: int, cache: Path) -> list[Path]:
    """PEFT folders with small random weights, each with other ones."""
    import torch
    from safetensors.torch import save_file

    folders = [cache / shape.name / "adapters" / targets / f"a{number}" for number in range(count)]
    for number, folder in enumerate(folders):
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        noise, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(shape.layers):
            for module in _TARGETS[targets]:
                outputs, inputs = sizes(shape, module)
                for half, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    drawn = torch.empty(size).normal_(std=0.01, generator=noise).to(torch.bfloat16)
                    tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"] = drawn
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        settings |= {"target_modules": [module.partition(".")[2] for module in _TARGETS[targets]]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folders


def flags(peer: peers.Peer, adapters: Sequence[Path], slots: int, kept: int = 0) -> list[str]:
    """Flags of a server that has these adapters, `slots` of them at once on the device. Quire keeps as many in the
    host's memory as fit; vLLM the larger one of `slots` and `kept`.
    """
    own = ["--lora-root", str(adapters[0].parent)] if isinstance(peer, peers.Quire) else []
    own += ["--max-cpu-loras", str(max(slots, kept))] if isinstance(peer, peers.Vllm) else []
    modules = [f"{folder.name}={folder}" for folder in adapters]
    return ["--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(RANK), *own, "--lora-modules", *modules]


class NotStarted(Exception):
    """A server does not start."""


class Servers:
    """The servers of one kind and precision: by name, with and without adapters, running."""

    def __init__(self, options: argparse.Namespace, peer: peers.Peer, precision: str) -> None:
        self.options, self.peer, self.precision, self.shape = options, peer, precision, SHAPES[options.shape]
        self.model = peer.prepare(self.shape, precision, options.cache)
        self.prompts = Prompts(make_checkpoint(self.shape, options.cache))
        self.running: dict[str, peers.Server] = {}

    async def start(self, name: str, arguments: Sequence[str]) -> float:
        """Start another server, unless it runs; returns the seconds until its first token."""
        if name in self.running:
            return 0.0
        log = self.options.cache / f"lora-{self.peer.name}-{self.precision}-{name.replace(' ', '-')}.log"
        server = peers.Server(self.peer, self.precision, self.model, self.options.threads, log, arguments)
        ((prompt, text),) = self.prompts.draw("start", 1, 8)
        try:
            seconds = await server.start(prompt, text, self.options.start_limit)
        except RequestFailed as failure:
            cause = re.search(r"\] (\w+(?:Error|Exception): .*)", log.read_text(errors="replace"))
            raise NotStarted(f"{server.name} does not start: {cause[1]}" if cause else str(failure)) from None
        self.running[name] = server
        await server.idle_share()
        self._pause_others(None)
        return seconds

    def _pause_others(self, server: peers.Server | None) -> None:
        for each in self.running.values():
            each.resume() if each is server else each.pause()

    def stop_all(self, *but: str) -> None:
        """Stop all servers but these."""
        for name in self.running.keys() - {*but}:
            self.running.pop(name).stop()

    async def batch(self, name: str, seed: str, adapters: Sequence[str | None]) -> load.Figures:
        """The figures of a batch on one server, with these adapters; the others are quiet meanwhile."""
        server, options = self.running[name], self.options
        self._pause_others(server)
        workload = self.prompts.workload(server, seed, (len(adapters), options.prompt, options.output))
        bodies = [
            body if adapter is None else body | {"model": adapter}
            for body, adapter in zip(workload.bodies, adapters, strict=True)
        ]
        return figures(await load.run(server.address, Workload(bodies, workload.arrivals, workload.output_tokens)))

    async def first_token(self, name: str, seed: str, adapter: str) -> float:
        """Milliseconds to the first token of a short request."""
        server = self.running[name]
        self._pause_others(server)
        ((prompt, text),) = self.prompts.draw(seed, 1, 16)
        answer = await complete(server.address, server.body(prompt, text, 2) | {"model": adapter})
        return answer.ttft * 1e3

    def load(self, name: str, adapter: Path) -> float:
        """Milliseconds of the route that loads an adapter."""
        server, begun = self.running[name], time.perf_counter()
        self._pause_others(server)
        body = json.dumps({"lora_name": f"late-{adapter.name}", "lora_path": str(adapter)}).encode()
        url = f"http://{server.address.host}:{server.address.port}/v1/load_lora_adapter"
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            answer.read()
        return (time.perf_counter() - begun) * 1e3


async def batches(servers: Servers, name: str, adapters: Sequence[Path]) -> dict[str, Any]:
    """Output tokens per second of each case, by round, and the medians of their ratios to `without`. `name` is the
    server with adapters."""
    options, names = servers.options, [each.name for each in adapters]
    count = options.batch
    cases: dict[str, tuple[str, list[str | None]]] = {
        "without": ("without", [None] * count),
        "base": (name, [None] * count),
        "one": (name, [names[0]] * count),
        "each": (name, [names[at % len(names)] for at in range(count)]),
    }
    await servers.start("without", [])
    for case, (which, chosen) in cases.items():  # warm-up: adapters are read, and shapes are seen
        await servers.batch(which, f"warm-up {case}", chosen)
    found: dict[str, list[float]] = {case: [] for case in cases}
    gaps: dict[str, list[float]] = {case: [] for case in cases}
    begun = time.perf_counter()
    for number in range(options.rounds):
        if number and time.perf_counter() - begun > options.limit:
            break
        for case in list(cases)[:: -1 if number % 2 else 1]:
            which, chosen = cases[case]
            measured = await servers.batch(which, f"{number} {case}", chosen)
            found[case].append(measured.throughput)
            gaps[case].append(measured.itl * 1e3)
    ratios = {
        f"{case}_ratio": [mine / other for mine, other in zip(found[case], found["without"], strict=True)]
        for case in _CASES[1:]
    }
    itl = {
        f"{case}_itl_ratio": [other / mine for mine, other in zip(gaps[case], gaps["without"], strict=True)]
        for case in _CASES[1:]
        if min(*gaps[case], *gaps["without"]) >= _SHORTEST_MS
    }
    memory = {f"memory_{each}_gib": servers.running[which].memory() for each, (which, _) in [*cases.items()][:2]}
    return {
        **{f"{case}_tokens_per_s": statistics.median(each) for case, each in found.items()},
        **{name: statistics.median(each) for name, each in (ratios | itl).items()},
        **memory,
        "rounds": {**found, **ratios, **itl},
    }


async def firsts(servers: Servers, name: str, unused: Sequence[Path], late: Sequence[Path]) -> dict[str, Any]:
    """Medians in milliseconds. `unused` are registered and were not used yet; `late` are loaded by the route."""
    await servers.first_token(name, "warm-up", unused[0].name)
    found: dict[str, list[float]] = {}
    for number, folder in enumerate(late):
        found.setdefault("load_ms", []).append(servers.load(name, folder))
        for each in ("from_memory", "on_device"):
            took = await servers.first_token(name, f"{each} {number}", f"late-{folder.name}")
            found.setdefault(f"{each}_ms", []).append(took)
    found["later_ms"] = [a - b for a, b in zip(found["from_memory_ms"], found["on_device_ms"], strict=True)]
    for number, folder in enumerate(unused[1:]):
        took = await servers.first_token(name, f"registered {number}", folder.name)
        found.setdefault("registered_ms", []).append(took)
    return {name: statistics.median(each) for name, each in found.items()} | {"rounds": found}


async def many(servers: Servers, adapters: Sequence[Path]) -> dict[str, Any]:
    """Start, memory and speed with one adapter registered, and with all; and the ratios of the latter to the former."""
    found: dict[str, float] = {}
    counts, measured = (1, len(adapters)), dict[str, list[load.Figures]]()
    for count in counts:
        arguments = flags(servers.peer, adapters[:count], min(32, len(adapters)))
        starts = []
        for _ in range(servers.options.starts):
            servers.stop_all(*measured)
            starts.append(await servers.start(f"{count} registered", arguments))
        found[f"start_{count}_s"] = min(starts)
        measured[f"{count} registered"] = []
    for number in range(-1, servers.options.rounds):  # at first, a warm-up
        for name, each in [*measured.items()][:: -1 if number % 2 else 1]:
            figures = await servers.batch(name, f"many {number}", [adapters[0].name] * servers.options.batch)
            each += [figures][: number + 1]
    for count, (name, each) in zip(counts, measured.items(), strict=True):
        found[f"memory_{count}_gib"] = servers.running[name].memory()
        found[f"itl_{count}_ms"] = statistics.median(figures.itl for figures in each) * 1e3
    for what, unit in (("start", "s"), ("memory", "gib"), ("itl", "ms")):
        one, every = (found[f"{what}_{count}_{unit}"] for count in counts)
        if min(one, every) >= _SHORTEST_MS:
            found[f"{what}_ratio"] = every / one
    return found


@dataclass
class Part:
    """A part of the figures, and how it is measured."""

    name: str
    targets: str
    measure: Callable[[Servers], Awaitable[dict[str, Any]]]


def parts(options: argparse.Namespace, peer: peers.Peer, precision: str) -> list[Part]:
    """Those about the same targets share their servers. `many` is only measured at the first precision, and of peers
    only the first targets: vLLM's batches with adapters take minutes on CPUs."""
    shape, used = SHAPES[options.shape], options.batch
    unused = used + 1 + _NUM_FIRST  # without the first one, which only warms up

    def made(targets: str, most: int) -> list[Path]:
        return make_adapters(shape, targets, most, options.cache)

    async def with_adapters(servers: Servers, targets: str) -> tuple[str, list[Path]]:
        """The server with adapters for these targets, and all adapters that it gets."""
        name, folders = f"with {targets}", made(targets, unused + _NUM_FIRST)
        servers.stop_all("without", name)
        await servers.start(name, flags(servers.peer, folders[:unused], min(32, used), len(folders)))
        return name, folders

    found: list[Part] = []
    for targets in options.targets if isinstance(peer, peers.Quire) else options.targets[:1]:

        async def batch(servers: Servers, targets: str = targets) -> dict[str, Any]:
            name, folders = await with_adapters(servers, targets)
            return await batches(servers, name, folders[:used])

        async def first(servers: Servers, targets: str = targets) -> dict[str, Any]:
            name, folders = await with_adapters(servers, targets)
            return await firsts(servers, name, folders[used:unused], folders[unused:])

        found += [Part("batch", targets, batch), Part("first", targets, first)]

    async def registered(servers: Servers) -> dict[str, Any]:
        servers.stop_all()
        return await many(servers, made("qv", options.registered))

    if precision == options.precision[0]:
        found.append(Part("many", "qv", registered))
    return [each for each in found if options.only is None or each.name in options.only]


async def measure(
    options: argparse.Namespace, peer: type[peers.Peer], given: Path | None, precision: str
) -> dict[str, Any]:
    """All parts of one kind of server at a precision; a part that fails says why."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # the servers are stopped, too
    found = peers.find(peer, given)
    if found is None:
        return {"failure": f"not installed: {peer.remedy}"}
    results: dict[str, Any] = {"version": found.version()}
    servers = Servers(options, found, precision)
    try:
        for part in parts(options, found, precision):
            name, begun = f"{part.name}, {part.targets}", time.perf_counter()
            try:
                results[name] = await part.measure(servers)
            except NotStarted as failure:
                results["failure"] = str(failure)
                break
            except (RequestFailed, RuntimeError, OSError) as failure:
                results[name] = {"failure": str(failure)}
                servers.stop_all()
            seconds = time.perf_counter() - begun
            print(
                found.name, precision, name, json.dumps(results[name]), f"{seconds:.0f} s", file=sys.stderr, flush=True
            )
    finally:
        servers.stop_all()
    return results


def document(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> str:
    """A table for each part, and how it was made."""
    shape = SHAPES[options.shape]
    paragraphs = [
        f"Random weights in the shape of {shape.name}; adapters of rank {RANK} in bfloat16, for queries and values "
        f"(`qv`) or for all linear layers (`all`); {options.threads} threads. A `ratio` is the median over rounds.",
        f"**batch**: {options.batch} requests of {options.prompt} tokens in and {options.output} out, all at once, in "
        f"up to {options.rounds} rounds, the last of which begins within {options.limit:g} s: on a server without "
        "adapters (`without`), and on one with them, of the base (`base`), with the same adapter (`one`) and each with "
        "another (`each`). A `ratio` is the speed as a share of that of `without`; `itl_ratio` is of the time between "
        "tokens alone.",
        "**first**: the time to the first token with an adapter that was loaded (`from_memory`), then again "
        "(`on_device`), and by how much the first one is later; and with one that was registered when the server "
        "started (`registered`), which Quire reads at that moment, and vLLM has in memory.",
        f"**many**: servers with 1 and with {options.registered} registered adapters: seconds until the first token "
        f"(the best of {options.starts} starts), memory of all processes, and the time between tokens of a batch with "
        f"one adapter; a `ratio` is {options.registered} / 1. At the first precision only.",
    ]
    if options.rounds < _FEWEST_ROUNDS:
        paragraphs.insert(0, "**This was a trial run: it has too few rounds for figures that mean anything.**")
    lines = ["# Adapters", "", "`benchmarks/lora.py --write` writes this page: change the program, not the page.", ""]
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, 120, break_on_hyphens=False), ""]
    names = list(dict.fromkeys(name for found in results.values() for name in found if ", " in name))
    for name in names:
        measured = {server: found[name] for server, found in results.items() if name in found}
        columns = [
            each
            for each in dict.fromkeys(column for found in measured.values() for column in found)
            if each not in ("rounds", "failure")
        ]
        servers = " | ".join(measured)
        lines += [f"## {name}", "", f"| | {servers} |", "|---|" + "---:|" * len(measured)]
        for column in columns:
            cells = [_cell(column, found[column]) if column in found else "" for found in measured.values()]
            lines.append(f"| {column} | {' | '.join(cells)} |")
        lines += ["", *_failures(measured)]
    return "\n".join([*lines, *_failures(results), "## Notes", "", *provenance()]) + "\n"


def _failures(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """What failed, and the ends of the reasons."""
    found = [(server, " ".join(each["failure"].split())) for server, each in results.items() if "failure" in each]
    return [f"- {server}: {reason[-300:]}" for server, reason in found] + [""] * bool(found)


def _cell(name: str, value: float) -> str:
    return f"{value:.{3 if name.endswith('ratio') else 2 if name.endswith('gib') else 1}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="where a peer is installed")
    parser.add_argument("--servers", nargs="+", choices=[peer.name for peer in _SERVERS], help="default: all")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    choices = ("f32", "16-bit", "int8")
    parser.add_argument(
        "--precision", nargs="+", choices=choices, default=["int8", "16-bit"], help="default: int8, 16-bit"
    )
    parser.add_argument("--targets", nargs="+", choices=_TARGETS, default=list(_TARGETS), help="default: all")
    parser.add_argument("--only", nargs="+", choices=("batch", "first", "many"), help="parts of the figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=90, metavar="SECONDS", help="begin no further round after so long"
    )
    parser.add_argument("--starts", type=int, default=2, help="of each server of the part `many`; the fastest counts")
    parser.add_argument("--batch", type=int, default=32, help="requests at once, and adapters")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--registered", type=int, default=500, help="adapters of the part `many`")
    parser.add_argument("--threads", type=int, default=2, help="of every server")
    parser.add_argument("--start-limit", type=float, default=420, metavar="SECONDS")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quire-compare")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    options = parser.parse_args()
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    options.cache = options.cache.absolute()
    options.cache.mkdir(parents=True, exist_ok=True)
    places = {name: Path(path).absolute() for name, _, path in (pair.partition("=") for pair in options.peer)}
    results: dict[str, dict[str, Any]] = {}
    for precision, peer in itertools.product(options.precision, _SERVERS):
        if options.servers is None or peer.name in options.servers:
            found = asyncio.run(measure(options, peer, places.get(peer.name), precision))
            results[f"{peer.name} {found.pop('version', '')}, {precision}"] = found
            if options.write:  # keep the figures of an interrupted run
                options.write.write_text(document(options, results))
    print(document(options, results))


if __name__ == "__main__":
    main()
