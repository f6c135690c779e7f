"""Compare Quire with other servers on this machine: same checkpoint, same requests, alternating.

For each shape and precision, all installed servers are started and then measured in turn, round after round (A B C,
A B C, …), with prompts that are new in every round and the same for all. Each server's figures are printed with the
floor that follows from the machine's measured bandwidth and matmul rate, and with the ratio Quire / peer of each round.

    .venv/bin/python benchmarks/compare.py --peer vllm=/opt/vllm/venv --peer openvino=/opt/ov/venv \\
        --peer llama.cpp=/opt/llama.cpp --json figures.json --write docs/benchmarks/servers.md
    .venv/bin/python benchmarks/compare.py --quick --model tiny    # a smoke test
    .venv/bin/python benchmarks/compare.py --load a.json b.json --write docs/benchmarks/servers.md    # only write

A peer's location may also be set in the environment: QUIRE_PEER_VLLM, QUIRE_PEER_LLAMA_CPP, QUIRE_PEER_OPENVINO, …
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import load
import machine
import peers
import report
from load import RequestFailed, Workload
from peers import Server
from shapes import SHAPES, Shape, make_checkpoint, words

WORKLOADS = ("batch", "stream", "online")
LOAD = 0.6
"""Share of the slowest useful server's capacity at which `online` sends requests."""
_AVX2 = {"QUIRE_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_LOGPROBS_PROMPTS, _LOGPROBS_TOKENS = 4, 64


@dataclass(frozen=True)
class Sizes:
    """The sizes of the workloads: requests, prompt tokens, output tokens."""

    batch: tuple[int, int, int] = (32, 256, 64)
    stream: tuple[int, int, int] = (1, 128, 128)
    online: tuple[int, int, int] = (48, 256, 64)


QUICK = Sizes(batch=(8, 64, 16), stream=(1, 64, 32), online=(8, 64, 16))


class Prompts:
    """Prompts of random words; the same seed gives the same prompts for every server."""

    def __init__(self, checkpoint: Path) -> None:
        from tokenizers import Tokenizer

        self._words = words(checkpoint)
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def draw(self, seed: str, count: int, tokens: int) -> list[tuple[list[int], str]]:
        """`count` prompts of `tokens` tokens, as ids and as text that encodes to them."""
        source = random.Random(seed)
        drawn = [source.choices(self._words, k=tokens) for _ in range(count)]
        texts = [self._tokenizer.decode(prompt) for prompt in drawn]
        assert all(self._tokenizer.encode(text).ids == prompt for text, prompt in zip(texts, drawn, strict=True))
        return list(zip(drawn, texts, strict=True))

    def workload(self, server: Server, seed: str, size: tuple[int, int, int], rate: float | None = None) -> Workload:
        """`size` as requests for `server`: all at once, or `rate` per second with exponential gaps."""
        count, tokens, output = size
        gaps = random.Random(f"{seed} arrivals")
        arrivals = list(itertools.accumulate(gaps.expovariate(rate) if rate else 0.0 for _ in range(count)))
        bodies = [server.body(prompt, text, output) for prompt, text in self.draw(seed, count, tokens)]
        return Workload(bodies, arrivals, output)


@dataclass
class Measured:
    """The results of one server; the figures of a workload have one entry per round."""

    peer: str
    version: str
    kind: str
    """The meaning of the precision in this server."""
    command: str
    start: list[float] = field(default_factory=list)
    """Seconds from the command to the first token."""
    idle: float = 0.0
    """Cores kept busy while idle."""
    memory: float = 0.0
    """GiB after the last workload."""
    figures: dict[str, list[load.Figures]] = field(default_factory=dict)
    logprobs: dict[str, float] | None = None
    """Compared with transformers in float32: correlation, largest difference, tokens."""
    failure: str | None = None


class Group:
    """All servers of one shape at one precision."""

    def __init__(self, options: argparse.Namespace, shape: Shape, precision: str, found: Sequence[peers.Peer]) -> None:
        self.options, self.shape, self.precision = options, shape, precision
        self.sizes = QUICK if options.quick else Sizes()
        self.prompts = Prompts(make_checkpoint(shape, options.cache))
        self.rate: float | None = options.rate
        self.results: dict[str, Measured] = {}
        self.servers: list[Server] = []
        logs = options.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        taking_part = [peer for peer in found if precision in peer.precisions]
        for peer in taking_part:
            self.results[peer.name] = Measured(peer.name, peer.version(), peer.precisions[precision], "")
        for peer in sorted(taking_part, key=lambda peer: peer.writes != precision):
            try:
                model = peer.prepare(shape, precision, options.cache)
            except (RuntimeError, OSError) as failure:
                self._fail(peer.name, failure)
                continue
            log = logs / f"{shape.name}-{precision}-{peer.name}.log"
            server = Server(peer, precision, model, options.threads, log)
            self.results[peer.name].command = server.command
            self.servers.append(server)

    async def run(self) -> dict[str, Any]:
        """Start, measure and stop the servers; return the contents of the JSON file."""
        say(f"\n{self.shape.name}, {self.precision}")
        limits = [self._measure()]
        try:
            for server in list(self.servers):
                await self._start(server)
            for round_number in range(self.options.rounds):
                for workload in self.options.workload:
                    await self._round(round_number, workload)
                limits.append(self._measure())
            for server in self.servers:
                self.results[server.peer.name].memory = server.memory()
            if self.options.logprobs:
                await self._compare_logprobs()
        finally:
            for server in self.servers:
                server.stop()
        return {
            "shape": self.shape.name,
            "precision": self.precision,
            "sizes": asdict(self.sizes),
            "rate": self.rate,
            "machine": asdict(machine.best(limits)),
            "servers": [asdict(result) for result in self.results.values()],
        }

    def _measure(self) -> machine.Machine:
        """The machine's limits, measured while the servers are idle."""
        for server in self.servers:
            server.pause()
        try:
            return machine.measure(self.options.threads, 0.2 if self.options.quick else 0.5)
        finally:
            for server in self.servers:
                server.resume()

    async def _start(self, server: Server) -> None:
        """Start a server the requested number of times; keep the last one running."""
        result = self.results[server.peer.name]
        for attempt in range(self.options.starts):
            if attempt:
                server.stop()
            prompt, text = self.prompts.draw(f"start {attempt}", 1, 16)[0]
            for other in self.servers:
                other.pause()
            try:
                result.start.append(await server.start(prompt, text, self.options.start_limit))
            except RequestFailed as failure:
                self._fail(server.peer.name, failure)
                self.servers.remove(server)
                return
            finally:
                for other in self.servers:
                    other.resume()
        warm_up = "batch" if "batch" in self.options.workload else self.options.workload[0]
        await self._each(server, "warm-up", getattr(self.sizes, warm_up))
        if server not in self.servers:
            return
        await asyncio.sleep(1)  # let the server finish work after an answer
        result.idle = await server.idle_share()
        shown = ", ".join(f"{seconds:.1f}" for seconds in result.start)
        say(f"  {server.name}: first token after {shown} s, {result.idle:.2f} cores busy when idle")

    async def _round(self, round_number: int, workload: str) -> None:
        if workload == "online" and not self._running():
            return
        if workload == "online" and self.rate is None:
            self.rate = self._useful_rate()
        rate = self.rate if workload == "online" else None
        for server in list(self.servers):
            # the single stream is repeated, so that a figure does not depend on one request
            repeats = self.options.streams if workload == "stream" else 1
            answers = []
            for repeat in range(repeats):
                got = await self._each(
                    server, f"{workload} {round_number} {repeat}", getattr(self.sizes, workload), rate
                )
                answers += got or []
            if not answers:
                continue
            figures = load.figures(answers)
            self.results[server.peer.name].figures.setdefault(workload, []).append(figures)
            say(
                f"  round {round_number + 1} {workload:6} {server.name:20} {figures.throughput:7.1f} tok/s  "
                f"TTFT {figures.ttft * 1e3:7.0f} ms  ITL {figures.itl * 1e3:6.1f} ms  "
                f"p99 {figures.itl_p99 * 1e3:6.0f} ms"
            )

    async def _each(
        self, server: Server, seed: str, size: tuple[int, int, int], rate: float | None = None
    ) -> list[load.Answer] | None:
        """Run one workload on a server while the others are idle; None if it failed, and the server is excluded."""
        for other in self.servers:
            if other is not server:
                other.pause()
        try:
            workload = self.prompts.workload(server, seed, size, rate)
            return await asyncio.wait_for(load.run(server.address, workload), self.options.limit)
        except (RequestFailed, TimeoutError) as failure:
            self._fail(server.peer.name, failure)
            server.stop()
            self.servers.remove(server)
            return None
        finally:
            for other in self.servers:
                if other is not server:
                    other.resume()

    def _useful_rate(self) -> float:
        """Requests per second: `LOAD` of the slowest server that has at least half of the best throughput."""
        output = self.sizes.batch[2]
        return useful_rate([result.figures["batch"][0].throughput for result in self._running()], output)

    def _running(self) -> list[Measured]:
        return [result for result in self.results.values() if "batch" in result.figures]

    async def _compare_logprobs(self) -> None:
        drawn = self.prompts.draw("logprobs", _LOGPROBS_PROMPTS, _LOGPROBS_TOKENS)
        tokens = [prompt for prompt, _ in drawn]
        truth = reference_logprobs(make_checkpoint(self.shape, self.options.cache), tokens, self.options.threads)
        for server in self.servers:
            found: list[float] = []
            try:
                for prompt in tokens:
                    found += await server.peer.prompt_logprobs(server.address, server.model, prompt) or []
            except (RequestFailed, KeyError, TypeError, IndexError, AssertionError) as failure:
                say(f"  {server.name}: no log-probabilities: {failure!r}"[:300])
                continue
            if found:
                likeness = compare_logprobs(truth, found)
                self.results[server.peer.name].logprobs = likeness
                say(
                    f"  {server.name}: {likeness['tokens']:.0f} log-probabilities correlate "
                    f"{likeness['correlation']:.6f} with float32, largest difference {likeness['largest']:.4f}"
                )

    def _fail(self, name: str, failure: Exception) -> None:
        self.results[name].failure = str(failure) or "no answer in time"
        say(f"  {name} {self.precision}: {failure}")


def useful_rate(throughputs: Sequence[float], output: int) -> float:
    """`LOAD` of the smallest capacity that is at least half of the largest, in requests of `output` tokens."""
    return LOAD * min(found for found in throughputs if found >= max(throughputs) / 2) / output


def compare_logprobs(truth: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """The likeness of the log-probabilities of the same tokens to `truth`."""
    differences = [abs(a - b) for a, b in zip(truth, found, strict=True)]
    return {
        "correlation": statistics.correlation(truth, found),
        "largest": max(differences),
        "mean": statistics.fmean(differences),
        "tokens": len(differences),
    }


def reference_logprobs(checkpoint: Path, prompts: Sequence[Sequence[int]], threads: int) -> list[float]:
    """The log-probability of every prompt token but the first, computed by transformers in float32."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found: list[float] = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
            found += logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return found


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in peers.PEERS]
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PATH", help="location of a peer's installation"
    )
    parser.add_argument("--only", nargs="+", choices=names, help="servers to compare (default: all that are installed)")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b"])
    parser.add_argument("--precision", nargs="+", choices=machine.WEIGHT_BYTES, default=list(machine.WEIGHT_BYTES))
    parser.add_argument("--threads", type=int, default=2, help="threads of every server (default: 2)")
    parser.add_argument(
        "--avx2",
        action="store_true",
        help="limit Quire, torch and oneDNN to AVX2; llama.cpp must be built for it, and vLLM's test replaced",
    )
    parser.add_argument("--rounds", type=int, help="rounds (default: 5, with --quick 1)")
    parser.add_argument("--starts", type=int, help="starts of each server (default: 3, with --quick 1)")
    parser.add_argument("--streams", type=int, default=3, help="consecutive single streams per round")
    parser.add_argument(
        "--start-limit", type=float, default=420, metavar="SECONDS", help="limit for a server to start and answer"
    )
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="limit for a workload")
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="workloads of a round, in this order"
    )
    parser.add_argument("--rate", type=float, help="requests per second of `online`, instead of the measured rate")
    parser.add_argument("--quick", action="store_true", help="small workloads, one round: a smoke test")
    parser.add_argument("--no-logprobs", dest="logprobs", action="store_false", help="skip the comparison with float32")
    parser.add_argument("--cache", type=Path, help="folder of the checkpoints (default: ~/.cache/quire-compare)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the document to this file")
    parser.add_argument("--title", default="Other servers", help="of the document")
    parser.add_argument("--note", default="", help="a paragraph for the document, about the circumstances")
    parser.add_argument(
        "--load", type=Path, nargs="+", metavar="FILE", help="load earlier figures instead of measuring"
    )
    options = parser.parse_args()
    if options.avx2:
        os.environ.update(_AVX2)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.starts = options.starts or (1 if options.quick else 3)
    options.cache = (options.cache or Path.home() / ".cache" / "quire-compare").absolute()
    if options.load:
        results = report.merge([json.loads(path.read_text()) for path in options.load])
    else:
        results = asyncio.run(_run(options, parser))
    say("\n" + report.tables(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.write:
        options.write.write_text(report.document(results, options.title, options.note))


async def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    # If this process is terminated, stop the servers too.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    places = dict(pair.partition("=")[::2] for pair in options.peer)
    if unknown := places.keys() - {peer.name for peer in peers.PEERS}:
        parser.error(f"--peer: unknown peer {', '.join(unknown)}")
    found, missing = [], []
    for peer in peers.PEERS:
        given = places.get(peer.name) or os.environ.get(f"QUIRE_PEER_{re.sub(r'[.-]', '_', peer.name.upper())}")
        if options.only and peer.name not in options.only:
            missing.append({"peer": peer.name, "why": "not selected (--only)"})
        elif there := peers.find(peer, Path(given).expanduser().absolute() if given else None):
            found.append(there)
        else:
            where = "where --peer says" if given else "on PATH"
            missing.append({"peer": peer.name, "why": f"not found {where}; to install it: {peer.remedy}"})
    say("servers: " + ", ".join(f"{peer.name} {peer.version()}" for peer in found))
    for entry in missing:
        say(f"  without {entry['peer']}: {entry['why']}")
    groups = []
    for model in options.model:
        for precision in options.precision:
            groups.append(await Group(options, SHAPES[model], precision, found).run())
            if options.json:  # keep the measurements of an interrupted run
                options.json.write_text(json.dumps(_results(options, groups, missing), indent=1) + "\n")
    return _results(options, groups, missing)


def _results(
    options: argparse.Namespace, groups: list[dict[str, Any]], missing: list[dict[str, str]]
) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["benchmarks/compare.py", *(re.sub(r"(^|=)/.*", r"\1PATH", a) for a in sys.argv[1:])]),
        "python": sys.version.split()[0],
        "torch": importlib.metadata.version("torch"),
        "threads": options.threads,
        "rounds": options.rounds,
        "missing": missing,
        "groups": groups,
    }


if __name__ == "__main__":
    main()
