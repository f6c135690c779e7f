"""Imports go down only, lazy ones included; and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from quire.engine.config.engine_config import EngineConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("quire", "server", "engine", "kernels")

FLOOR = (
    *("engine.cluster", "engine.config", "engine.repository", "engine.architecture", "engine.process"),
    "engine.protocol",
)
"""The rooms of the engine that the server may import; nothing in them imports torch."""
APIS = ("server.openai", "server.anthropic")
"""Rooms on one level, which do not import each other."""
ROOMS = (
    "",  # quire/ itself
    *("server.cli", "server.app", "server.llm", *APIS, "server.http", "server.serving"),
    *("server.text", "server.media", "server.parsers", "server.client", "server.config"),
    *("engine.doctor", "engine.core", "engine.executor", "engine.worker", "engine.scheduler", "engine.kv_store"),
    *("engine.models", "engine.checkpoints", "engine.layers", "engine.distributed"),
    *FLOOR,
    "kernels",
)
"""From the top down: a room may import the rooms below it, so that there are no cycles."""
SHARED = {
    *("engine.core.launch", "engine.kv_store.disk", "engine.kv_store.launch"),
    *("engine.scheduler.event_hashes", "engine.scheduler.grammar", "engine.scheduler.prefix_length"),
}
"""Modules of the rooms above the floor, without torch, that the server may import, too."""
OPTIONS_ROOMS = (
    *("engine.config", "server.cli", "server.config", "server.llm"),
    *("engine.cluster.cluster_token", "engine.cluster.ray_cluster", "engine.core.launch", "engine.executor.nodes"),
)
"""The rooms that may read the user's options: they parse and resolve flags, or receive options in a process on another
host, which resolves them itself."""
TORCH_ROOMS = ("engine.worker", "engine.models", "engine.checkpoints", "engine.layers", "engine.distributed", "kernels")
"""The rooms that may import torch, and the kernels, which import it."""
WEB_ROOMS = ("server.http", "server.openai", "server.anthropic", "server.app", "server.cli")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, named without the leading `quire.`, and its file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join(parts[1:] if folder == "quire" else parts), path


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, on_import: bool = False) -> list[str]:
    """Every module that is imported anywhere in a file, or only when the file itself is; `from x import y` as x.y."""
    names: list[str] = []
    for node in parse(path).body if on_import else ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room_of(module: str) -> str:
    return max((room for room in ROOMS if not room or f"{module}.".startswith(f"{room}.")), key=len)


MODULES = list(modules())


def ours() -> Iterator[tuple[str, str]]:
    """Each of our modules, and our modules that it imports."""
    for module, path in MODULES:
        for name in imports(path):
            if name == "quire" or name.startswith("quire."):
                yield module, name.removeprefix("quire").removeprefix(".")


def test_every_folder_is_a_room() -> None:
    found = {".".join(name.split(".")[: 1 if name.startswith("kernels") else 2]) for name, _ in MODULES}
    assert found - {"server", "engine"} == set(ROOMS)


def test_imports_go_down_only() -> None:
    wrong = []
    for module, target in ours():
        room = room_of(module)
        is_allowed = room_of(target) in ROOMS[ROOMS.index(room) :] and {room, room_of(target)} != set(APIS)
        if room.startswith("server.") and target.startswith(("engine.", "kernels")):
            is_shared = any(f"{target}.".startswith(f"{shared}.") for shared in SHARED)
            is_doctor = room == "server.cli" and room_of(target) == "engine.doctor"
            is_allowed = room_of(target) in FLOOR or is_shared or is_doctor
        wrong += [f"{module} imports {target}"] * (not is_allowed)
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """Not even inside of functions, or for types only."""
    names = {f"quire.{name}".rstrip(".") for name, _ in MODULES}
    graph = {}
    for module, path in MODULES:
        own = f"quire.{module}".rstrip(".")
        found = {name if name in names else name.rpartition(".")[0] for name in imports(path)}
        graph[own] = (found & names) - {own}
    TopologicalSorter(graph).prepare()  # raises `CycleError` with the modules


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for module, path in MODULES:
        room = room_of(module)
        for name in imports(path):
            library = name.split(".")[0]
            if library == "torch" or name.startswith("quire.kernels"):
                assert room in TORCH_ROOMS or module == "engine.doctor.device_checks", f"{module} imports {name}"
            if library in ("opentelemetry", "grpc"):
                assert module == "server.http.tracing", f"{module} imports {library}"
            if name.startswith("quire.server.http.tracing"):
                assert module in ("server.app", "server.cli.api_process"), f"{module} imports {name}"
            if library in ("pydantic", "fastapi", "starlette"):
                assert room in WEB_ROOMS, f"{module} imports {library}"
            if library == "ray":
                assert module in ("engine.cluster.ray_cluster", "engine.cluster.ray_launcher"), f"{module} imports ray"
            assert (room, library) != ("server.parsers", "asyncio"), f"{module} imports asyncio"


def test_programs_with_llm_import_no_networking_libraries() -> None:
    """Only our processes need them, or few calls; and `ssl` is missing in some embedded Pythons."""
    files = {f"quire.{module}": path for module, path in MODULES}
    seen, left = set[str](), ["quire.server.llm"]
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            if path := files.get(name):
                left += imports(path, on_import=True)
            elif name.startswith("quire."):  # a name in a module
                left.append(name.rpartition(".")[0])
    assert "quire.server.media.service" in seen
    assert not {name.split(".")[0] for name in seen} & {"ssl", "uvloop", "prometheus_client", "httpx", "aiohttp"}


def test_raw_options_do_not_travel_past_resolve() -> None:
    readers = {module for module, target in ours() if target == "engine.config.options.EngineOptions"}
    assert not {module for module in readers if not {room_of(module), module} & set(OPTIONS_ROOMS)}


def test_the_resolved_configuration_has_no_options() -> None:
    assert "options" not in {field.name for field in dataclasses.fields(EngineConfig)}
