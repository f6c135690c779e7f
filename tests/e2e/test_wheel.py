"""The wheel suffices: it is built, installed in an environment with its requirements, and asked the README's
questions."""

from __future__ import annotations

import base64
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from quire.engine.process.version import COMMIT_FILE
from quire.kernels.cpu.compiler import library_name
from quire.kernels.isa import ISAS
from tests.e2e.environments import OWN_ENVIRONMENT, environment_of_links, run
from tests.e2e.serving import serve
from tests.e2e.test_openai import NODES
from tests.fakes import kept_objects
from tests.unit.test_packages import FILES, ROOT

SHAPES = "What is in this picture?"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """A folder outside the checkout."""
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as folder:
        yield Path(folder)


def build_wheel(outside: Path, compiler: str) -> Path:
    """Build the wheel from a copy of the sources in a folder, as setuptools writes beside what it builds.

    Objects that another test has compiled are not compiled again.
    """
    source = outside / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "quire", source / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(outside / "wheels"))
    program = str(kept_objects.compiler(compiler))
    run(
        [*PIP, "wheel", *options, str(source)],
        "the wheel cannot be built",
        cwd=outside,
        CXX=program,
        REVISION="0123abc",
    )
    shutil.rmtree(source)
    (built,) = (outside / "wheels").iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(outside: Path) -> Path:
    return build_wheel(outside, os.environ.get("CXX", "c++"))


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """And the kernels for each instruction set of this machine, which need no newer system than its name says."""
    expected = {f"{package.replace('.', '/')}/{path.name}" for package, paths in FILES.items() for path in paths}
    machine = platform.machine()
    libraries = {f"quire/kernels/cpu/prebuilt/{library_name(each.name)}" for each in ISAS if each.machine == machine}
    expected.add(str(COMMIT_FILE))
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected | libraries
        contents = [archive.read(name) for name in libraries]
    oldest = max(int(minor) for content in contents for minor in re.findall(rb"GLIBC_2\.(\d+)", content))
    assert wheel.name.endswith(f"-py3-none-manylinux_2_{oldest}_{machine}.whl")
    assert not any(b"libgomp" in content for content in contents)


def test_an_unknown_instruction_set_is_refused() -> None:
    command, variables = (sys.executable, "setup.py", "--version"), os.environ | {"KERNEL_ISAS": "avx2,mmx"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "KERNEL_ISAS is 'avx2,mmx'; it may name " in done.stderr


def test_an_environment_with_what_it_requires_answers_the_question_of_the_readme(wheel: Path, outside: Path) -> None:
    """With the packages that the other tests have, of which pip finds none missing, and without a compiler."""
    environment, elsewhere = outside / "environment", outside / "elsewhere"
    elsewhere.mkdir()
    (described,) = metadata.distributions(name="quire-llm", path=[str(wheel)])
    environment_of_links(environment, described.requires or ())
    run(
        [*PIP, "--python", str(environment), "install", "--no-index", "--no-compile", str(wheel)],
        "the wheel cannot be installed",
        cwd=elsewhere,
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
    )
    quire = str(environment / "bin" / "quire")
    assert (
        run([quire, "--version"], "quire --version failed", cwd=elsewhere) == f"quire {described.version} (0123abc)\n"
    )

    no_compiler = {"CXX": "there-is-none", "QUIRE_KERNEL_CACHE": str(elsewhere / "kernels")}
    with serve(program=[quire], cwd=elsewhere, env=OWN_ENVIRONMENT | no_compiler) as server:
        picture = base64.b64encode((ROOT / "docs/pictures/shapes.png").read_bytes()).decode()
        parts = [
            {"type": "text", "text": SHAPES},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        ]
        text, seen = (
            httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": content}], "temperature": 0},
                timeout=60,
            )
            .raise_for_status()
            .json()["choices"][0]["message"]["content"]
            for content in (NODES, parts)
        )
    readme = (ROOT / "README.md").read_text()
    assert f'"content": "{NODES}"' in readme
    assert f'"content": "{text}"' in readme
    assert f'"text": "{SHAPES}"' in readme
    assert f"The answer is `{seen}`" in readme

    log = "".join(server.lines)
    assert f"from {environment.resolve()}/" in log, "another installation served"
    assert "WARNING" not in log
    assert not (elsewhere / "kernels").exists()
