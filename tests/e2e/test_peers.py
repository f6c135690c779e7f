"""The black-box tests that vLLM ships with its sources, against `quire serve` with the demo model.

Nothing of them is in this repository: the package index has them. peers/vllm.toml lists the files, and the failures
that are expected, with the reason: so that a new one is seen.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import httpx
import pytest

import quire
from tests.e2e.environments import OWN_ENVIRONMENT, made_once

HERE = Path(__file__).parent / "peers"
EXPECTED = tomllib.loads((HERE / "vllm.toml").read_text())
INDEX = "https://pypi.org/simple"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def unpack(folder: Path) -> None:
    """Download vLLM's sources, whose digest is known, and keep the listed tests, with the files of fixtures that they
    use.
    """
    name = f"vllm-{EXPECTED['version']}"
    listed = httpx.get(f"{INDEX}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}).json()["files"]
    (url,) = (file["url"] for file in listed if file["filename"] == f"{name}.tar.gz")
    sources = httpx.get(url, timeout=600).raise_for_status().content
    digest = hashlib.sha256(sources).hexdigest()
    assert digest == EXPECTED["sha256"], f"{name}.tar.gz has the digest {digest}"
    wanted = {f"{name}/tests/{file}" for file in EXPECTED["files"]}
    parents = {str(parent) for file in wanted for parent in Path(file).parents}
    with tarfile.open(fileobj=io.BytesIO(sources)) as archive:
        for member in archive:
            path = Path(member.name)
            is_fixture = path.name in ("__init__.py", "conftest.py") and str(path.parent) in parents
            if (member.name in wanted or is_fixture) and member.name != f"{name}/tests/conftest.py":
                member.name = str(path.relative_to(name))
                archive.extract(member, folder, filter="data")


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The folder with vLLM's tests; fails where they cannot be had."""
    return made_once("vllm", EXPECTED["sha256"], json.dumps(EXPECTED["files"]), make=unpack)


def reason(name: str) -> str | None:
    """Why a test of this name fails, if it is expected to."""
    return next(
        (why for why, names in EXPECTED["failures"].items() if any(fnmatch.fnmatch(name, n) for n in names)), None
    )


def test_no_test_of_vllm_fails_that_is_not_expected_to(checkout: Path, tmp_path: Path) -> None:
    path = [str(HERE), str(Path(quire.__file__).parents[1])]
    options = ["--quiet", "--timeout=120", "--override-ini=addopts=", "--continue-on-collection-errors"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "vllm_tests",
            *options,
            *(f"tests/{file}" for file in EXPECTED["files"]),
        ],
        cwd=checkout,
        env=OWN_ENVIRONMENT | {"PYTHONPATH": ":".join(path), "OUTCOMES": str(tmp_path / "outcomes")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes").read_text().splitlines()]
    # fnmatch has a meaning for brackets, which are around a test's parameters.
    results = {name.removeprefix("tests/").replace("[", "(").replace("]", ")"): each for name, *each in outcomes}
    failed = {name: why for name, (outcome, why) in results.items() if outcome == "failed"}
    passed = [name for name, (outcome, _) in results.items() if outcome == "passed"]
    print(f"vLLM {EXPECTED['version']}: {len(passed)} passed, {len(failed)} failed")
    print("\n".join(f"expected to fail, but passed: {name}" for name in passed if reason(name)))
    new = {name: why for name, why in failed.items() if reason(name) is None}
    assert not new, "\n".join(f"{name}: {why}" for name, why in new.items())
    assert len(passed) >= EXPECTED["passed"]
