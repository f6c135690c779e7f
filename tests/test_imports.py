"""Imports go down only, lazy ones included; and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("quire", "server", "engine", "kernels")

# Each room, and the rooms below it that it may import. A module belongs to the longest room that fits its name.
FLOOR = (
    "engine.architecture",
    "engine.cache_groups",
    "engine.cluster",
    "engine.config",
    "engine.devices",
    "engine.encoder",
    "engine.errors",
    "engine.families",
    "engine.grammar",
    "engine.graph_sizes",
    "engine.grid",
    "engine.launch",
    "engine.log",
    "engine.messages",
    "engine.model_files",
    "engine.placement",
    "engine.pooling",
    "engine.process",
    "engine.ray_cluster",
    "engine.resolve",
    "engine.ring",
    "engine.topology",
)
BELOW: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FLOOR, FLOOR),
    "kernels": (),
    "engine.parallel": ("kernels", *FLOOR),
    "engine.layers": ("engine.parallel", "kernels", *FLOOR),
    "engine.models": ("engine.layers", "engine.parallel", "kernels", *FLOOR),
    "engine.worker": ("engine.models", "engine.layers", "engine.parallel", "kernels", *FLOOR),
    "engine.executor": ("engine.worker", *FLOOR),
    "engine.kv_cache": FLOOR,
    "engine.request": FLOOR,
    "engine.step_time": (),
    "engine.wave": (),
    "engine.queues": ("engine.request", *FLOOR),
    "engine.step_size": ("engine.queues", "engine.request", "engine.step_time", *FLOOR),
    "engine.structured": ("engine.queues", "engine.request", *FLOOR),
    "engine.scheduler": (
        *("engine.kv_cache", "engine.queues", "engine.request", "engine.step_size", "engine.structured", *FLOOR),
    ),
    "engine.core": ("engine.scheduler", "engine.request", "engine.wave", "engine.executor", *FLOOR),
    "engine": (),
    "server.parsers": FLOOR,
    "server.api": ("server", "server.parsers", *FLOOR),
    "server.cli": ("server", "server.api", "", *FLOOR),
    "server": ("server.parsers", *FLOOR),
    "": ("server", *FLOOR),
}
TORCH_ROOMS = ("kernels", "engine.parallel", "engine.layers", "engine.models", "engine.worker")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of ours, named without the leading `quire.`."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join(parts[1:] if folder == "quire" else parts), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in a file, `from x import y` as x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    return max((room for room in BELOW if room == "" or f"{module}.".startswith(f"{room}.")), key=len)


MODULES = list(modules())


@pytest.mark.parametrize(("module", "tree"), MODULES, ids=[name or "quire" for name, _ in MODULES])
def test_imports_go_down_only(module: str, tree: ast.Module) -> None:
    room = room_of(module)
    for name in imports(tree):
        if name == "quire" or name.startswith("quire."):
            target = room_of(name.removeprefix("quire").removeprefix("."))
            assert target in (room, *BELOW[room]), f"{module or 'quire'} imports {name}"


@pytest.mark.parametrize(("module", "tree"), MODULES, ids=[name or "quire" for name, _ in MODULES])
def test_heavy_libraries_stay_in_their_rooms(module: str, tree: ast.Module) -> None:
    room = room_of(module)
    for name in imports(tree):
        library = name.split(".")[0]
        if library == "torch":
            assert room in TORCH_ROOMS, f"{module} imports torch"
        if library in ("pydantic", "fastapi", "starlette"):
            assert room in ("server.api", "server.cli"), f"{module} imports {library}"
        if library == "ray":
            assert module in ("engine.ray_cluster", "engine.executor.ray"), f"{module} imports ray"
        assert (room, library) != ("server.parsers", "asyncio"), f"{module} imports asyncio"
