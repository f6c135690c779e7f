"""Adapters (LoRA): the speed of a batch that uses them, the first token after a load, and hundreds of them.

    .venv/bin/python benchmarks/lora.py --peer vllm=/opt/vllm/venv [--targets qv all] [--rounds 5] [--write FILE.md]
    .venv/bin/python benchmarks/lora.py --shape tiny --rounds 1 --batch 4 --output 8 --registered 20    # a smoke test

Each server is started with a checkpoint of random weights, once without adapters and once with them; all run at the
same time and are measured in turns, round after round, and each ratio is of figures of the same round. Adapters have
rank 16 and random weights in bfloat16, of the queries and values (`qv`, PEFT's default) or of all linear layers.

- **batch**: requests of `--prompt` tokens in and `--output` out, all at once: of the base on the server without
  adapters (`without`) and on the one with them (`base`), all with one adapter (`one`), each with another (`each`).
- **first**: TTFT of the first request with an adapter that the load route has read (`from memory`), and of one that is
  only registered (`from disk`; the system has its file in memory), beside the next request with the same adapter.
- **many**: start, memory and speed with `--registered` adapters beside those with one, with the same `--max-loras`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import textwrap
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
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


def flags(peer: peers.Peer, adapters: Sequence[Path], count: int) -> list[str]:
    """Flags of a server that has the first `count` of these adapters, and room for all of them at once, but for no more
    than 32.
    """
    slots = str(min(len(adapters), 32))
    own = ["--lora-root", str(adapters[0].parent)] if isinstance(peer, peers.Quire) else []
    modules = [f"{folder.name}={folder}" for folder in adapters[:count]]
    return ["--enable-lora", "--max-loras", slots, "--max-lora-rank", str(RANK), *own, "--lora-modules", *modules]


class Servers:
    """The servers of one kind: by name, with and without adapters, running."""

    def __init__(self, options: argparse.Namespace, peer: peers.Peer) -> None:
        self.options, self.peer, self.shape = options, peer, SHAPES[options.shape]
        self.model = peer.prepare(self.shape, options.precision, options.cache)
        self.prompts = Prompts(make_checkpoint(self.shape, options.cache))
        self.running: dict[str, peers.Server] = {}

    async def start(self, name: str, arguments: Sequence[str]) -> float:
        """Start another server; returns the seconds until its first token."""
        log = self.options.cache / f"lora-{self.peer.name}-{name}.log"
        server = peers.Server(self.peer, self.options.precision, self.model, self.options.threads, log, arguments)
        ((prompt, text),) = self.prompts.draw("start", 1, 8)
        seconds = await server.start(prompt, text, self.options.start_limit)
        self.running[name] = server
        await server.idle_share()
        self._pause_others(None)
        return seconds

    def _pause_others(self, server: peers.Server | None) -> None:
        for each in self.running.values():
            each.resume() if each is server else each.pause()

    def stop(self, name: str) -> None:
        self.running.pop(name).stop()

    def stop_all(self) -> None:
        for name in list(self.running):
            self.stop(name)

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


async def batches(servers: Servers, adapters: Sequence[Path]) -> dict[str, Any]:
    """Output tokens per second of each case, by round, and the medians of their ratios to `without`."""
    options, names = servers.options, [each.name for each in adapters]
    count = options.batch
    cases: dict[str, tuple[str, list[str | None]]] = {
        "without": ("without", [None] * count),
        "base": ("with", [None] * count),
        "one": ("with", [names[0]] * count),
        "each": ("with", [names[at % len(names)] for at in range(count)]),
    }
    await servers.start("without", [])
    await servers.start("with", flags(servers.peer, adapters, len(adapters)))
    for case, (name, chosen) in cases.items():  # warm-up: adapters are read, and shapes are seen
        await servers.batch(name, f"warm-up {case}", chosen)
    found: dict[str, list[float]] = {case: [] for case in cases}
    gaps: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for case in list(cases)[:: -1 if number % 2 else 1]:
            name, chosen = cases[case]
            measured = await servers.batch(name, f"{number} {case}", chosen)
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
    memory = {f"memory_{name}_gib": server.memory() for name, server in servers.running.items()}
    return {
        **{f"{case}_tokens_per_s": statistics.median(each) for case, each in found.items()},
        **{name: statistics.median(each) for name, each in (ratios | itl).items()},
        **memory,
        "rounds": {**found, **ratios, **itl},
    }


async def firsts(servers: Servers, adapters: Sequence[Path], late: Sequence[Path]) -> dict[str, Any]:
    """Medians in milliseconds. `adapters` are registered and were not used yet; `late` are loaded by the route."""
    if "with" not in servers.running:
        await servers.start("with", flags(servers.peer, adapters, len(adapters)))
    await servers.first_token("with", "warm-up", adapters[0].name)
    found: dict[str, list[float]] = {}
    for number, folder in enumerate(late):
        found.setdefault("load_ms", []).append(servers.load("with", folder))
        for each in ("from_memory", "again"):
            took = await servers.first_token("with", f"{each} {number}", f"late-{folder.name}")
            found.setdefault(f"{each}_ms", []).append(took)
    for number, folder in enumerate(adapters[-len(late) :]):
        took = await servers.first_token("with", f"disk {number}", folder.name)
        found.setdefault("from_disk_ms", []).append(took)
    return {name: statistics.median(each) for name, each in found.items()}


async def many(servers: Servers, adapters: Sequence[Path]) -> dict[str, Any]:
    """Start, memory and speed of the base with one adapter registered, and with all."""
    found: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"1": [], str(len(adapters)): []}
    for name in rates:
        found[f"start_{name}_s"] = await servers.start(name, flags(servers.peer, adapters, int(name)))
    for number in range(servers.options.rounds):
        for name, each in rates.items():
            measured = await servers.batch(name, f"many {number}", [None] * servers.options.batch)
            each.append(measured.throughput)
    for name in rates:
        found[f"memory_{name}_gib"] = servers.running[name].memory()
    one, all_of_them = rates.values()
    return found | {"speed_ratio": statistics.median(b / a for a, b in zip(one, all_of_them, strict=True))}


@dataclass
class Part:
    """A part of the figures, and how it is measured."""

    name: str
    targets: str
    measure: Callable[[Servers], Awaitable[dict[str, Any]]]


def parts(options: argparse.Namespace) -> list[Part]:
    shape, count = SHAPES[options.shape], max(options.batch, 2 * _NUM_FIRST)

    def made(targets: str, most: int) -> list[Path]:
        return make_adapters(shape, targets, most, options.cache)

    found: list[Part] = []
    for targets in options.targets:

        async def batch(servers: Servers, targets: str = targets) -> dict[str, Any]:
            return await batches(servers, made(targets, count)[: options.batch])

        async def first(servers: Servers, targets: str = targets) -> dict[str, Any]:
            folders = made(targets, count)
            return await firsts(servers, folders[:-_NUM_FIRST], folders[-_NUM_FIRST:])

        found += [Part("batch", targets, batch), Part("first", targets, first)]

    async def registered(servers: Servers) -> dict[str, Any]:
        return await many(servers, made("qv", options.registered))

    found.append(Part("many", "qv", registered))
    return [each for each in found if options.only in (None, each.name)]


async def measure(options: argparse.Namespace, peer: type[peers.Peer], given: Path | None) -> dict[str, Any]:
    """All parts of one kind of server; a part that fails says why."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # the servers are stopped, too
    found = peers.find(peer, given)
    if found is None:
        return {"failure": f"not installed: {peer.remedy}"}
    results: dict[str, Any] = {"version": found.version()}
    for part in parts(options):
        servers = Servers(options, found)
        name = f"{part.name}, {part.targets}"
        try:
            results[name] = await part.measure(servers)
        except (RequestFailed, RuntimeError, OSError) as failure:
            results[name] = {"failure": str(failure)}
        finally:
            servers.stop_all()
        print(found.name, name, json.dumps(results[name], indent=1), file=sys.stderr, flush=True)
    return results


def document(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> str:
    """A table for each part, and how it was made."""
    shape = SHAPES[options.shape]
    lines = [
        "# Adapters",
        "",
        "`benchmarks/lora.py --write` writes this page: change the program, not the page.",
        "",
        *textwrap.wrap(
            f"Random weights in the shape of {shape.name}, {options.precision}; adapters of rank {RANK} for queries "
            f"and values (`qv`) or for all linear layers (`all`); {options.threads} threads. `without`: a server "
            f"without adapters. On a server with adapters, {options.batch} requests of {options.prompt} tokens in and "
            f"{options.output} out use none (`base`), the same one (`one`), or different ones (`each`). A `ratio` is "
            f"the speed as a share of that of `without`, the median over {options.rounds} rounds; `itl_ratio` is of "
            "the time between tokens alone.",
            120,
        ),
        "",
    ]
    names = list(dict.fromkeys(name for found in results.values() for name in found if ", " in name))
    for name in names:
        measured = {server: found[name] for server, found in results.items() if name in found}
        columns = [
            each
            for each in dict.fromkeys(column for found in measured.values() for column in found)
            if each not in ("rounds", "failure")
        ]
        lines += [f"## {name}", "", f"| server | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        for server, found in measured.items():
            cells = [_cell(each, found[each]) if each in found else "" for each in columns]
            lines.append(f"| {server} {results[server]['version']} | {' | '.join(cells)} |")
        lines += ["", *(f"- {server}: {found['failure']}" for server, found in measured.items() if "failure" in found)]
    lines += [f"- {server}: {found['failure']}" for server, found in results.items() if "failure" in found]
    return "\n".join([*lines, "", *provenance()]) + "\n"


def _cell(name: str, value: float) -> str:
    return f"{value:.{3 if name.endswith('ratio') else 2 if name.endswith('gib') else 1}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="where a peer is installed")
    parser.add_argument("--servers", nargs="+", choices=[peer.name for peer in _SERVERS], help="default: all")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--precision", choices=("f32", "16-bit", "int8"), default="int8")
    parser.add_argument("--targets", nargs="+", choices=_TARGETS, default=list(_TARGETS), help="default: all")
    parser.add_argument("--only", choices=("batch", "first", "many"), help="a part of the figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="requests at once, and adapters")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=int, default=96, help="tokens")
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
    for peer in _SERVERS:
        if options.servers is None or peer.name in options.servers:
            results[peer.name] = asyncio.run(measure(options, peer, places.get(peer.name)))
            if options.write:  # keep the figures of an interrupted run
                options.write.write_text(document(options, results))
    print(document(options, results))


if __name__ == "__main__":
    main()
