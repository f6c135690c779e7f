"""The workflows on GitHub: pinned, without secrets, and with no more rights than a job needs."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.parts import PARTS
from tests.unit.test_packages import PROJECT, ROOT

TEXTS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS: dict[str, Any] = {name: yaml.safe_load(text)["jobs"] for name, text in TEXTS.items()}


def test_actions_are_pinned_to_commits() -> None:
    uses = [line for text in TEXTS.values() for line in re.findall(r"\buses: (.*)", text)]
    assert len(uses) > 10
    assert not [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)]


def test_nothing_is_secret() -> None:
    assert not any("secrets" in text for text in TEXTS.values())
    assert JOBS["release.yml"]["publish"]["permissions"] == {"id-token": "write"}


def test_every_python_that_the_package_names_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    (first,) = re.findall(r"python:([\d.]+)-", JOBS["ci.yml"]["ci"]["container"]["image"])
    assert named == [first, *JOBS["ci.yml"]["default"]["strategy"]["matrix"]["python"]]


def test_only_parts_that_need_root_are_privileged() -> None:
    for name, part in PARTS.items():
        texts = "".join((ROOT / file).read_text() for file in part.tests)
        assert part.needs_root == bool(
            re.search(r"import namespaces|fakes\.namespaces|mmdebstrap|chaos\.system", texts)
        ), name
    privileged = [name for name, job in JOBS["ci.yml"].items() if "--privileged" in str(job)]
    assert privileged == ["ci", "slow"]
    assert "contains(fromJSON(needs.parts.outputs.root), matrix.part)" in JOBS["ci.yml"]["slow"]["container"]["options"]
