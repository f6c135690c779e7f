"""Values that the files for building images repeat from other files are the same there."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import hcl2

from tests.unit.test_packages import ROOMS, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, flags=re.M))
STAGES = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, flags=re.M))


def test_the_dockerfile_has_the_version_of_the_checkout() -> None:
    assert ARGUMENTS["VERSION"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_context_has_what_the_wheel_is_built_from() -> None:
    admitted = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.M))
    assert admitted >= {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "quire", *ROOMS}
    assert all((ROOT / name).exists() for name in admitted)


def test_bake_sets_what_the_dockerfile_asks_for() -> None:
    with (ROOT / "docker-bake.hcl").open() as file:
        bake: dict[str, list[dict[str, Any]]] = hcl2.load(file)
    targets = {name.strip('"'): target for block in bake["target"] for name, target in block.items()}
    assert {"cpu", "cuda"} < set(targets)
    for target in targets.values():
        assert set(target["args"]) <= set(ARGUMENTS)
        assert target["args"].get("VARIANT", '"cpu"').strip('"') in STAGES
    variables = {name.strip('"'): variable["default"] for block in bake["variable"] for name, variable in block.items()}
    assert variables["VERSION"].strip('"') == ARGUMENTS["VERSION"]


def test_a_container_listens_on_all_addresses() -> None:
    assert re.search(r"^ +QUIRE_HOST=0\.0\.0\.0\b", DOCKERFILE, flags=re.M)
