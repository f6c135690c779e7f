"""`quire plan`: the layouts of a model that fit a machine, and bounds on their speed. Also the choice of `--auto`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from quire.engine.config import devices
from quire.engine.config.achieved import PUBLISHED
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.floors import Floor
from quire.engine.config.layouts import (
    DEGREES,
    Goal,
    Layout,
    RefusedLayout,
    best_layout,
    candidates,
    layout_flags,
    layouts,
    nothing_fits,
)
from quire.engine.config.machine import NETWORK_GIGABYTES, Machine, describe, this_machine
from quire.engine.config.memory_plan import MemoryPlan, format_bytes, tokens_in_cache
from quire.engine.config.options import EngineOptions, flag
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.serve_options import add_config, read_options
from quire.server.config import flags
from quire.server.config.server_options import ServerOptions

_MAX_OTHERS = 3
"""Layouts that `--auto` logs besides the one that it chooses."""
_HEAD = (
    "-tp|-pp|-dp|EP|weights|KV tokens|max length|such requests|single request|limit|full batch|requests|limit|"
    "TTFT|limit"
)
"""The head of the table; `_row` makes its rows."""
_LEGEND = """\
EP: with --enable-expert-parallel. Weights are per rank, for the largest; KV tokens, and the number of requests of the
maximum length that they hold, are per replica. The rest is a roofline estimate: tokens/s are upper bounds, of a request
that is alone and of all that run at once, with {context:,} tokens of context, and TTFT is a lower bound, of a prompt of
{context:,} tokens that is alone. `limit` is what takes most of that time: memory bandwidth, compute, launches of
kernels or communication. Real servers are slower: use the figures to compare layouts."""
_ERROR = "Published rates of other engines on GPUs are {:.0%} to {:.0%} of these bounds."
_LIMITS = {"bandwidth": "memory bandwidth"}
"""Names of limits in sentences, if they are others."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `quire plan`, in addition to the engine's."""

    gpus: str | None = flag(
        None,
        "NVIDIA GPUs of each host: [COUNTx]NAME, as in 8xH100-80G, or [COUNTx]NAME:GB,GB/s,TFLOPS[,LINK GB/s] for one "
        "that is not known (default: this machine)",
        metavar="GPUS",
        is_common=True,
    )
    network: float = flag(
        NETWORK_GIGABYTES,
        "bandwidth between hosts for each device, in one direction, in GB/s",
        metavar="GB/S",
        is_common=True,
    )
    input_len: int | None = flag(
        None,
        "tokens of a prompt, for TTFT, and of context, for decodes (default: 1024, at most half of --max-model-len)",
    )
    optimize: Literal["throughput", "latency"] = flag(
        "throughput",
        "order: by the tokens/s of a full batch (throughput), or of a request that is alone (latency)",
        is_common=True,
    )
    json: bool = flag(False, "print JSON")


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand: `quire serve`'s, and its own."""
    flags.add_model(parser)
    add_config(parser)
    flags.add_flags(parser, PlanOptions)
    parser.add_argument(
        "--nodes", dest="nnodes", type=int, metavar="N", default=argparse.SUPPRESS, help="number of hosts, as --nnodes"
    )
    flags.add_flags(parser, EngineOptions)
    server = parser.add_argument_group("server", "the server flags of quire serve are taken, and have no effect")
    flags.add_hidden_flags(server, ServerOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Print the layouts. Raises `ConfigError` if none fits."""
    options, _ = read_options(parsed)
    options = replace(options, node_rank=0)  # the plan is the same on each host
    asked = flags.collect(argparse.Namespace(**parsed.given), PlanOptions)
    for note in parsed.notes:
        print(f"quire: warning: {note}", file=sys.stderr)
    if not 0 < asked.network < float("inf"):
        raise ConfigError(f"--network {asked.network:g}: must be above 0")
    if options.nnodes < 1:
        raise ConfigError(f"--nodes {options.nnodes}: must be at least 1")
    if asked.gpus is not None and options.device == "cpu":
        raise ConfigError("--gpus with --device cpu: omit one of them")
    if asked.gpus is not None:
        machine = describe(asked.gpus, options.nnodes, asked.network)
    else:
        machine = this_machine(options, options.nnodes, asked.network)
    fits, refused = layouts(options, machine, given=parsed.given, input_len=asked.input_len, goal=asked.optimize)
    if asked.json:
        print(json.dumps(_as_json(options, machine, fits, refused), indent=2))
    else:
        print("\n".join(_text(options, machine, asked.optimize, fits, refused)))
    if not fits:
        raise nothing_fits(refused)
    return 0


def choose(options: EngineOptions, given: Collection[str], goal: Goal) -> EngineOptions:
    """Return the options with the best layout for this machine, and log it (`--auto`). Raises `ConfigError`."""
    if options.nnodes > 1:
        raise ConfigError(
            f"--auto with --nnodes {options.nnodes}: all hosts need the same layout; omit it, and start them with the "
            f"commands of quire plan MODEL --nodes {options.nnodes}"
        )
    if options.distributed_executor_backend == "ray":
        raise ConfigError("--auto chooses for this host, not for a Ray cluster; omit it, and give -tp, -pp and -dp")
    count = max(1, devices.count_gpus()) if options.device != "cpu" else 1
    first, *more = candidates(options, count, given, has_experts=True)
    if not more:
        options = replace(options, **first)
        logger.info("--auto: %s, the only layout%s", layout_flags(first), _idle(count, options))
        return options
    machine = this_machine(options, 1, NETWORK_GIGABYTES)
    try:
        best, others = best_layout(options, machine, given=given, goal=goal)
    except ConfigError as error:
        raise ConfigError(f"--auto: {error}") from None
    chosen = replace(options, **best.options)
    logger.info("--auto on %s: %s, %s%s", machine.text, best.flags, _rates(best), _idle(count, chosen))
    for other in others[:_MAX_OTHERS]:
        logger.info("--auto: or give %s, %s", other.flags, _rates(other))
    if len(others) > _MAX_OTHERS:
        logger.info("--auto: %d more fit; quire plan prints them", len(others) - _MAX_OTHERS)
    return chosen


def _rates(layout: Layout) -> str:
    floors = layout.estimate
    return (
        f"at most {_number(floors.tokens_per_second)} tokens/s with a full batch of {floors.rows} requests, "
        f"{_number(floors.tokens_per_second_one)} with a single request"
    )


def _idle(count: int, options: EngineOptions) -> str:
    """The remark if the layouts with the given degrees do not use all devices."""
    used = math.prod(getattr(options, name) for name in DEGREES) * options.prefill_context_parallel_size
    return f"; {count - used} of {count} GPUs are idle, as {used} are used" if used < count else ""


def _text(
    options: EngineOptions, machine: Machine, goal: Goal, fits: Sequence[Layout], refused: Sequence[RefusedLayout]
) -> list[str]:
    """The lines that the command prints."""
    lines = [machine.text]
    if fits:
        config, floors = fits[0].config, fits[0].estimate
        model, context = config.model, floors.input_len
        lines[:0] = [f"{model.architecture.name} from {options.model}, {_precision(config)}, on"]
        first = "a full batch" if goal == "throughput" else "a single request"
        lines += [
            "",
            f"Layouts that fit, the most tokens/s of {first} first (--optimize {goal}):",
            *_table(_HEAD.split("|"), [_row(layout) for layout in fits]),
            "",
            *_reasons(goal, fits),
            "",
            *_LEGEND.format(context=context).splitlines(),
            *[_ERROR.format(*PUBLISHED)] * (machine.kind == "cuda"),
        ]
        if (length := model.max_model_len) < model.position_len:
            lines.append(
                f"Requests to the first have at most {length:,} tokens instead of the model's {model.position_len:,}: "
                "its KV cache holds no more (--max-model-len sets the length)."
            )
    if refused:
        lines += ["", "Layouts that are not possible:", *(f"  {layout.flags}: {layout.reason}" for layout in refused)]
    shown = fits[0].options if fits else refused[0].options
    if idle := _idle(machine.count * machine.nodes, replace(options, **shown)):
        lines += ["", f"With the degrees that are given{idle.removeprefix(';')}."]
    if fits:
        lines += ["", "Serve the first with:", *(f"  {line}" for line in commands(options, fits[0]))]
    return lines


def _reasons(goal: Goal, fits: Sequence[Layout]) -> list[str]:
    """Say what takes the time of the first layout, and of the best one for the other goal, if that is another."""

    def batch(layout: Layout) -> str:
        floors = layout.estimate
        return (
            f"{layout.flags}: {floors.rows:,} requests get a token each in {_milliseconds(floors.decode)}, at most "
            f"{_number(floors.tokens_per_second)} tokens/s"
        )

    def single(layout: Layout) -> str:
        floors = layout.estimate
        return (
            f"{layout.flags}: a token takes {_milliseconds(floors.decode_one)}, at most "
            f"{_number(floors.tokens_per_second_one)} tokens/s"
        )

    by_batch = max(fits, key=lambda layout: layout.estimate.tokens_per_second)
    by_single = max(fits, key=lambda layout: layout.estimate.tokens_per_second_one)
    lines = [f"For a full batch, {batch(by_batch)}", f"For a single request, {single(by_single)}"]
    return lines if goal == "throughput" else lines[::-1]


def _milliseconds(floor: Floor) -> str:
    """A time, and what takes it: 5.49 ms (launches 2.9 ms, memory bandwidth 1.7 ms)."""
    parts = sorted(floor.parts.items(), key=lambda part: -part[1])
    text = ", ".join(f"{_LIMITS.get(limit, limit)} {_number(seconds * 1e3)} ms" for limit, seconds in parts if seconds)
    return f"{_number(floor.seconds * 1e3)} ms ({text})"


def _precision(config: EngineConfig) -> str:
    model, kv = config.model, config.cache.dtype
    requested = model.requested_quantization
    weights = f" with {requested} weights" if requested else ""
    return f"{model.dtype}{weights}{f' and a KV cache in {kv}' * (kv != model.dtype)}"


def _row(layout: Layout) -> list[str]:
    floors, config = layout.estimate, layout.config
    tokens = tokens_in_cache(config)
    return [
        *(str(layout.options[name]) for name in DEGREES),
        "yes" if config.parallel.experts else "",
        format_bytes(max(MemoryPlan.of(config).weights)),
        f"{tokens:,}",
        f"{config.model.max_model_len:,}",
        f"{tokens / config.model.max_model_len:.1f}",
        f"{_number(floors.tokens_per_second_one)} tokens/s",
        floors.decode_one.limit,
        f"{_number(floors.tokens_per_second)} tokens/s",
        f"{floors.rows}",
        floors.decode.limit,
        f"{_number(floors.ttft.seconds * 1e3)} ms",
        floors.ttft.limit,
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of columns, aligned at the right; words at the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if column[:1].isdigit() else cell.ljust(width)
            for cell, width, column in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def _number(value: float) -> str:
    """Three digits: 1.23, 12.3, 123, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def commands(options: EngineOptions, layout: Layout) -> list[str]:
    """Return the command of `quire serve` for a layout, for each kind of host."""
    degrees = " ".join(f"{flag} {layout.options[name]}" for name, flag in DEGREES.items() if layout.options[name] > 1)
    experts = ["--enable-expert-parallel"] * layout.options["enable_expert_parallel"]
    others = {
        field.name: getattr(options, field.name)
        for field in fields(EngineOptions)
        if field.repr and field.name not in layout.options and getattr(options, field.name) != field.default
    }
    model = [] if options.model == EngineOptions.model else [shlex.quote(options.model)]
    others.pop("model", None)
    master = others.pop("master_addr", "HOST_0") if options.nnodes > 1 else None
    rest = [part for argument in flags.to_arguments(others) for part in argument.split("=", 1)]
    command = " ".join(filter(None, ["quire serve", *model, degrees, *experts, *map(shlex.quote, rest)]))
    if options.nnodes == 1:
        return [command]
    command += f" --master-addr {shlex.quote(str(master))}"
    return [f"{command}    # on host 0", f"{command} --headless --node-rank R    # on each other host R"]


def _as_json(
    options: EngineOptions, machine: Machine, fits: Sequence[Layout], refused: Sequence[RefusedLayout]
) -> dict[str, Any]:
    return {
        "model": options.model,
        "machine": dataclasses.asdict(machine),
        "layouts": [_layout_as_json(options, layout) for layout in fits],
        "not_possible": [{**layout.options, "reason": str(layout.error)} for layout in refused],
    }


def _layout_as_json(options: EngineOptions, layout: Layout) -> dict[str, Any]:
    config, floors = layout.config, layout.estimate
    sizes, tokens = MemoryPlan.of(config), tokens_in_cache(config)
    return {
        **layout.options,
        "weights_bytes": sizes.weights,
        "kv_cache_blocks": config.cache.num_blocks,
        "kv_cache_tokens": tokens,
        "max_model_len": config.model.max_model_len,
        "requests_of_full_length": tokens / config.model.max_model_len,
        "input_len": floors.input_len,
        "one_request": {
            "tokens_per_second": floors.tokens_per_second_one,
            "limited_by": floors.decode_one.limit,
            "seconds": floors.decode_one.parts,
        },
        "batch": {
            "requests": floors.rows,
            "tokens_per_second": floors.tokens_per_second,
            "limited_by": floors.decode.limit,
            "seconds": floors.decode.parts,
        },
        "ttft": {"seconds": floors.ttft.seconds, "limited_by": floors.ttft.limit},
        "commands": commands(options, layout),
    }
