"""Imports go down only, lazy ones included; and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from quire.engine.config.engine_config import EngineConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("quire", "server", "engine", "kernels")

# Each room, and the rooms below it that it may import. A module belongs to the longest room that fits its name.
SPEC = (
    *("engine.models.families", "engine.models.model_spec", "engine.models.encoder_spec"),
    *("engine.models.attention_spec", "engine.models.recurrent_spec", "engine.models.spec_parts"),
    *("engine.models.draft_head_spec", "engine.models.quantization"),
)
"""What models are, in numbers: the part of `engine.models` without torch."""
BASE = (
    *("engine.protocol", "engine.log", "engine.process", "engine.runtime_folder", "engine.trace"),
    *("engine.supervisor", "engine.supervised"),
)
CONFIG = ("engine.config", "engine.cluster", *SPEC, *BASE)
"""The floor: every room may import it, and nothing in it imports torch."""
FLAGS = ("server.cli.flags", "server.cli.lazy", "server.cli.vllm", "server.cli.vllm_flags")
"""What reads options from arguments, for `EngineArgs`, too."""
BELOW: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(SPEC, (*SPEC, *BASE)),
    "engine.config": (*SPEC, *BASE),
    "engine.cluster": ("engine.config", *SPEC, *BASE),
    "engine.config.resolve": CONFIG,
    "engine.config.layouts": ("engine.config.resolve", *CONFIG),
    "kernels": (),
    "engine.distributed": ("kernels", *CONFIG),
    "engine.doctor": CONFIG,
    "engine.doctor.device_checks": ("engine.doctor", "engine.distributed", "kernels", *CONFIG),
    "engine.layers": ("engine.distributed", "kernels", *CONFIG),
    "engine.models": ("engine.layers", "engine.distributed", "kernels", *CONFIG),
    "engine.worker": ("engine.models", "engine.layers", "engine.distributed", "kernels", *CONFIG),
    "engine.executor": ("engine.worker", "engine.distributed", "engine.config.resolve", *CONFIG),
    "engine.scheduler.grammar": CONFIG,
    "engine.scheduler": ("engine.scheduler.grammar", *CONFIG),
    "engine.core.launch": CONFIG,
    "engine.core": ("engine.scheduler", "engine.scheduler.grammar", "engine.executor", "engine.core.launch", *CONFIG),
    "engine": (),
    "server.parsers": CONFIG,
    "server.config": CONFIG,
    **dict.fromkeys(FLAGS, (*FLAGS, "server.config", *CONFIG)),
    "server.cli.engine_args": (*FLAGS, *CONFIG),
    "server.frontend": ("server.config", "server.parsers", "engine.core.launch", "engine.scheduler.grammar", *CONFIG),
    "server.http": ("server.frontend", "server.config", "server.parsers", "server.llm_outputs", *CONFIG),
    "server.openai": ("server.http", "server.frontend", "server.parsers", "server.llm_outputs", *CONFIG),
    "server.anthropic": ("server.openai", "server.http", "server.frontend", *CONFIG),
    "server.app": ("server.anthropic", "server.openai", "server.http", "server.config", *CONFIG),
    "server.llm_outputs": ("server.frontend", "server.parsers", *CONFIG),
    "server.llm": (
        *("server.llm_outputs", "server.frontend", "server.parsers", "server.cli.engine_args"),
        *("engine.config.resolve", *CONFIG),
    ),
    "server.cli": (
        *(
            "server.app",
            "server.llm",
            "server.http",
            "server.frontend",
            "server.config",
            *FLAGS,
            "engine.core.launch",
            "engine.doctor",
            "engine.config.layouts",
            "engine.config.resolve",
            "",
            *CONFIG,
        ),
    ),
    "server": (),
    "": ("server.llm", "server.llm_outputs", "server.cli.engine_args", *CONFIG),
}
OPTIONS_ROOMS = (
    *(
        "engine.config",
        "engine.config.resolve",
        "engine.config.layouts",
        "server.cli",
        "server.cli.engine_args",
        "server.llm",
    ),
    *("engine.cluster.cluster_token", "engine.cluster.ray_cluster", "engine.core.launch", "engine.executor.nodes"),
)
"""Where the user's options may be read: where flags are parsed and resolved, and where a process on another host gets
the options that it resolves itself."""
TORCH_ROOMS = (
    *("kernels", "engine.distributed", "engine.doctor.device_checks", "engine.layers", "engine.models"),
    "engine.worker",
)

WEB_ROOMS = ("server.http", "server.openai", "server.anthropic", "server.app", "server.cli")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, named without the leading `quire.`, and its file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join(parts[1:] if folder == "quire" else parts), path


@cache
def imports(path: Path) -> list[str]:
    """Every module that is imported anywhere in a file, `from x import y` as x.y."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room_of(module: str) -> str:
    return max((room for room in BELOW if room == "" or f"{module}.".startswith(f"{room}.")), key=len)


MODULES = list(modules())


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name or "quire" for name, _ in MODULES])
def test_imports_go_down_only(module: str, path: Path) -> None:
    room = room_of(module)
    for name in imports(path):
        if name == "quire" or name.startswith("quire."):
            target = room_of(name.removeprefix("quire").removeprefix("."))
            assert target in (room, *BELOW[room]), f"{module or 'quire'} imports {name}"


def test_no_modules_import_each_other() -> None:
    """Not even inside of functions, or for types only."""
    names = {f"quire.{name}".rstrip(".") for name, _ in MODULES}
    graph = {}
    for module, path in MODULES:
        own = f"quire.{module}".rstrip(".")
        found = {name if name in names else name.rpartition(".")[0] for name in imports(path)}
        graph[own] = (found & names) - {own}
    TopologicalSorter(graph).prepare()  # raises `CycleError` with the modules


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name or "quire" for name, _ in MODULES])
def test_heavy_libraries_stay_in_their_rooms(module: str, path: Path) -> None:
    room = room_of(module)
    for name in imports(path):
        library = name.split(".")[0]
        if library == "torch":
            assert room in TORCH_ROOMS, f"{module} imports torch"
        if library in ("opentelemetry", "grpc"):
            assert module == "server.http.tracing", f"{module} imports {library}"
        if name.startswith("quire.server.http.tracing"):
            assert module in ("server.app", "server.cli.api_process"), f"{module} imports {name}"
        if library in ("pydantic", "fastapi", "starlette"):
            assert room in WEB_ROOMS, f"{module} imports {library}"
        if library == "ray":
            assert module in ("engine.cluster.ray_cluster", "engine.cluster.ray_launcher"), f"{module} imports ray"
        assert (room, library) != ("server.parsers", "asyncio"), f"{module} imports asyncio"


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name or "quire" for name, _ in MODULES])
def test_raw_options_do_not_travel_past_resolve(module: str, path: Path) -> None:
    if "quire.engine.config.options.EngineOptions" in imports(path):
        assert {room_of(module), module} & set(OPTIONS_ROOMS), f"{module} reads EngineOptions"


def test_the_resolved_configuration_has_no_options() -> None:
    assert "options" not in {field.name for field in dataclasses.fields(EngineConfig)}
