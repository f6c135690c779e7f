"""Format the figures of benchmarks/compare.py as tables and as docs/benchmarks/servers.md."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from machine import Floor, Machine, describe
from shapes import SHAPES, Shape

_BY_NAME = {shape.name: shape for shape in SHAPES.values()}


@dataclass(frozen=True)
class Column:
    """A figure of a workload and its format."""

    title: str
    workload: str
    key: str
    scale: float
    digits: int
    higher_is_better: bool = False


COLUMNS = (
    Column("batch: output tok/s", "batch", "throughput", 1, 1, True),
    Column("batch: TTFT ms", "batch", "ttft", 1e3, 0),
    Column("stream: TTFT ms", "stream", "ttft", 1e3, 0),
    Column("stream: ITL ms", "stream", "itl", 1e3, 1),
    Column("online: TTFT ms", "online", "ttft", 1e3, 0),
    Column("online: ITL ms", "online", "itl", 1e3, 1),
    Column("online: p99 ITL ms", "online", "itl_p99", 1e3, 0),
)


def merge(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge several runs; of two groups with the same shape and precision, the later one is kept.

    A peer is missing if it is in none of the runs.
    """
    groups = {
        (group["shape"], group["precision"]): {"measured": measured(result)} | group
        for result in results
        for group in result["groups"]
    }
    command = "\n".join(dict.fromkeys(result["command"] for result in results))
    found = {server["peer"] for group in groups.values() for server in group["servers"]}
    missing = {each["peer"]: each for result in results for each in result["missing"] if each["peer"] not in found}
    return results[-1] | {"groups": list(groups.values()), "command": command, "missing": list(missing.values())}


def values(server: dict[str, Any], column: Column) -> list[float]:
    """A column's figure in every round."""
    return [figures[column.key] * column.scale for figures in server["figures"].get(column.workload, [])]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio Quire / peer of each round that both have run."""
    return [a / b for a, b in zip(ours, theirs, strict=False) if b]


def spread(found: Sequence[float], digits: int) -> str:
    """Median and range."""
    if not found:
        return "–"
    if len(found) == 1:
        return f"{found[0]:.{digits}f}"
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f}–{max(found):.{digits}f})"


def floors(group: dict[str, Any]) -> dict[str, float]:
    """Column title → the floor in the column's unit, if there is one."""
    floor = Floor(Machine(**group["machine"]), _shape(group), group["precision"])
    requests, prompt, output = group["sizes"]["batch"]
    _, alone, length = group["sizes"]["stream"]
    return {
        "batch: output tok/s": floor.throughput(requests, prompt, output),
        "stream: TTFT ms": floor.prefill(alone) * 1e3,
        "stream: ITL ms": floor.decode(alone + length // 2) * 1e3,
    }


def _shape(group: dict[str, Any]) -> Shape:
    return _BY_NAME[group["shape"]]


def tables(results: dict[str, Any]) -> str:
    """Format every group: figures and floors, ratios, start-up time and memory, accuracy."""
    return "\n".join(_group(group, group.get("measured") or measured(results)) for group in results["groups"])


def measured(results: dict[str, Any]) -> str:
    """Return the date and version of the measurement."""
    return f"{results['date']}, Quire {results['commit']}, rounds: {results['rounds']}"


def _group(group: dict[str, Any], measured: str) -> str:
    shape, machine = _shape(group), Machine(**group["machine"])
    weights = shape.layer_weights + shape.head_weights
    parts = [f"## {group['shape']} ({weights / 1e6:.0f} M weights), {group['precision']}\n"]
    rate = f"{group['rate']:.2f} requests/s" if group["rate"] else "not run"
    parts.append(f"{measured}. Online: {rate}, the same arrivals for all. Median and range over rounds.\n")
    running = [server for server in group["servers"] if server["figures"]]
    least = floors(group)
    rows = [[_label(server), *(spread(values(server, c), c.digits) for c in COLUMNS)] for server in running]
    rows.append(["floor", *(f"{least[c.title]:.{c.digits}f}" if c.title in least else "" for c in COLUMNS)])
    parts.append(_table(["server", *(column.title for column in COLUMNS)], rows))

    ours = [server for server in running if server["peer"].startswith("quire")]
    others = [server for server in running if server not in ours]
    for each in ours:
        name = "Quire" if len(ours) == 1 else each["peer"]
        if found := values(each, COLUMNS[0]):
            share = statistics.median(found) / least[COLUMNS[0].title]
            parts.append(f"{name}'s batch runs at {share:.0%} of the floor.\n")
        if others:
            parts.append(f"{name} / peer, round by round (throughput: above 1 {name} is ahead; times: below 1):\n")
            rows = [
                [_label(other), *(spread(ratios(values(each, c), values(other, c)), 2) for c in COLUMNS)]
                for other in others
            ]
            parts.append(_table(["peer", *(column.title for column in COLUMNS)], rows))

    rows = [
        [
            _label(server),
            spread(server["start"], 1),
            f"{server['memory']:.2f}",
            f"{server['idle']:.2f}",
            _likeness(server["logprobs"]),
        ]
        for server in running
    ]
    heads = ["server", "start to first token s", "memory GiB", "cores busy when idle"]
    parts.append(_table([*heads, "prompt logprobs against f32: correlation, largest difference"], rows))
    failed = [server for server in group["servers"] if server["failure"]]
    parts += [f"{server['peer']} failed: {_shortened(server['failure'])}\n" for server in failed]
    parts.append("Measured in the same run: " + "; ".join(describe(machine)) + ".\n")
    return "\n".join(parts)


def _shortened(failure: str) -> str:
    """The first line and the last, which is the last line of the server's log."""
    lines = failure.strip().splitlines()
    return " ".join(dict.fromkeys([lines[0], lines[-1]]))


def _likeness(found: dict[str, float] | None) -> str:
    return f"{found['correlation']:.5f}, {found['largest']:.3f}" if found else "not measured"


def _label(server: dict[str, Any]) -> str:
    return f"{server['peer']}, {server['kind']}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)]) + "\n"


def document(results: dict[str, Any], title: str = "Other servers", note: str = "") -> str:
    """docs/benchmarks/servers.md and the pages like it; `note` is a paragraph."""
    groups = results["groups"]
    servers = [server for group in groups for server in group["servers"]]
    versions = ", ".join(dict.fromkeys(f"{server['peer']} {server['version']}" for server in servers))
    cpus = ", ".join(dict.fromkeys(group["machine"]["cpu"] for group in groups))
    command = "".join(f"    {line}\n" for line in results["command"].split("\n"))
    missing = "".join(f"- {entry['peer']}: {entry['why']}\n" for entry in results["missing"])
    without = f"\nNot measured:\n\n{missing}" if missing else ""
    paragraph = f"\n{textwrap.fill(note, 120)}\n" if note else ""
    return f"""# {title}

`benchmarks/compare.py` writes this page: change the program, not the page.

{command}
Python {results["python"]}, torch {results["torch"]}.
Servers: {versions}. {cpus}; {results["threads"]} threads for every server.
{paragraph}{without}
{_method(groups[0]["sizes"])}
{tables(results)}
## Commands

{"".join(map(_commands, groups)).rstrip()}
"""


def _commands(group: dict[str, Any]) -> str:
    lines = "".join(f"    {server['command']}\n" for server in group["servers"] if server["command"])
    return f"{group['shape']}, {group['precision']}:\n\n{lines}\n"


def _method(sizes: dict[str, list[int]]) -> str:
    batch, stream, online = sizes["batch"], sizes["stream"], sizes["online"]
    return f"""## What is compared

Checkpoints have random weights in the shape of public models with a vocabulary of 32,000. They are stored in bfloat16,
and converted for servers that need their own format. All servers of a table run at the same time and are measured in
turns, round after round. A server that uses CPU time while idle is stopped (SIGSTOP) while another one is measured.
Prompts are token ids (for transformers, text that encodes to them). They are new in every round and the same for all
servers. Decoding is greedy and continues past the end of sequence, and the length of every answer is checked. OpenVINO
GenAI has no server of its own: `benchmarks/openvino_server.py` puts its continuous batching behind the same API.

Where the servers are limited to AVX2 (`--avx2`), `QUIRE_CPU_ISA`, `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` keep
them from using AVX-512, llama.cpp is built without it, and vLLM's test of the processor is replaced by one for AVX2.

- **batch**: {batch[0]} requests of {batch[1]} tokens in, {batch[2]} out, sent at once.
- **stream**: one request of {stream[1]} in, {stream[2]} out; several, one after the other.
- **online**: {online[0]} requests of {online[1]} in, {online[2]} out. Poisson arrivals, the same for all, at 60 % of
  the requests per second that the slowest useful server reached in the batch of the first round, unless --rate is
  given. A server is useful if it has at least half of the best throughput. The TTFT of a server that cannot keep up is
  large.
- **start**: from the command to the first token. **Memory**: PSS of all processes after the last workload.
- **Prompt logprobs**: those of the 252 tokens after the first in four prompts of 64, compared with transformers in
  float32.

TTFT and ITL are medians over requests; the ITL of a request is the mean of its gaps. The p99 ITL is over all gaps.

**Floors.** A step takes at least the larger of two bounds. The first is *bytes / bandwidth*: every weight is read once,
and the KV cache of every decoding request once, in the bytes of the precision (of a weight at most two, as the
checkpoint has them). The second is *operations / matmul rate*: two operations for each weight and token (for the head
only where a token is sampled), and 4 × heads × head size × layers for each pair of tokens in attention. The TTFT
of a stream is its prefill in one step. Its ITL is the decode step in the middle of the output. The batch is one prefill
of everything, then a decode step for each further token. Bandwidth is the better of copying and reading 1 GiB, and the
matmul rate the best of torch's products. Both are
measured in the same run, at its start and after every round, and the best of each counts (16-bit weights may be
multiplied in float32).
"""
