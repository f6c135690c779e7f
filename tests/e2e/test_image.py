"""The image: built from the Dockerfile, and run as a user would, by a container engine without a daemon.

No registry is asked for images: a small Debian, made here, stands in for the base. Packages for Python are downloaded
beforehand by this environment's pip, which knows from where; the build finds them in a folder. The image and its parts
take about 5 GB on disk, and are removed; the small Debian is kept for the next run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from quire.kernels import isa
from tests.e2e.environments import OWN_ENVIRONMENT, made_once, run
from tests.e2e.test_openai import NODES
from tests.e2e.test_wheel import PIP
from tests.fakes import kept_objects
from tests.fakes.namespaces import Command, inside
from tests.unit.test_packages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MAX_BYTES = 1.2e9
_OBJECTS = "/objects"
"""The folder of objects compiled before, while the image is built."""
SUITE = "bookworm"
# As in images of Debian: no documentation, and no packages kept after they have been installed.
_SLIM = (
    "--variant=minbase",
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale", "man")),
    '--aptopt=DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; }',
    '--aptopt=Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";',
)
_NEEDS = "this test needs root, a package index, and podman, runc and mmdebstrap, which .ci/run installs"


_CONFIGURATION = """
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "runc"
"""
"""Podman's configuration: it needs neither systemd nor the right to raise limits on the host."""


class Podman:
    """A container engine whose images and containers lie in a folder."""

    def __init__(self, folder: Path) -> None:
        places = {"root": "images", "runroot": "run", "tmpdir": "state"}
        self.command = ["podman", *(f"--{option}={folder}/{name}" for option, name in places.items())]
        (folder / "containers.conf").write_text(_CONFIGURATION)
        self.variables = {"CONTAINERS_CONF": f"{folder}/containers.conf", "DISABLE_HC_SYSTEMD": "true"}

    def __call__(self, *arguments: str) -> str:
        """The output of one of its commands."""
        return run([*self.command, *arguments], f"podman {arguments[0]} failed", cwd=ROOT, **self.variables)

    def build(self, folder: Path, variant: str, *arguments: str) -> None:
        self(
            *("build", "--isolation", "chroot", "--layers=false", "--format", "docker", "--quiet"),
            *("--build-arg", f"VARIANT={variant}", "--build-arg", "REVISION=0123abc"),
            *("--build-arg", "CPU_BASE=localhost/base", "--build-arg", "CU130_BASE=localhost/base"),
            *("--secret", f"id=pip,src={folder}/pip.conf", "--volume", f"{folder}/wheels:/wheelhouse:ro"),
            *(*arguments, str(ROOT)),
        )

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[Command]:
        """A container that is called `quire`, in a network of its own, with a root file system that is read-only."""
        command = (
            *(*self.command, "run", "--name", "quire", "--network", "none"),
            *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--cap-drop", "all"),
            *("--security-opt", "no-new-privileges", *arguments),
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=OWN_ENVIRONMENT | self.variables,
        )
        container = Command(process, command)
        try:
            yield container
        finally:
            self("rm", "--force", "--time", "0", "--ignore", "quire")
            container.join()
            print(container.text)  # pytest shows it when the test fails


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Packages for Python, pip's configuration for the build, and podman's storage."""
    with tempfile.TemporaryDirectory(prefix="quire-image-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def podman(folder: Path) -> Iterator[Podman]:
    """With `localhost/base`, which stands in for the base of the images. Its compiler keeps its objects: if this
    machine has the same one, the kernels are not compiled again."""

    def make(folder: Path) -> None:
        run(["mmdebstrap", "--quiet", *_SLIM, SUITE, str(folder / "base.tar")], f"no base can be made; {_NEEDS}")

    base = made_once("base", SUITE, *_SLIM, make=make) / "base.tar"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [*project["build-system"]["requires"], *project["project"]["dependencies"], "pip", "cyclonedx-bom"]
    options = ("--only-binary=:all:", "--python-version=3.11", f"--constraint={ROOT / 'constraints.txt'}")
    run(
        # Debian's Python, which need not be this one.
        [*PIP, "download", *options, f"--dest={folder}/wheels", *packages],
        f"the packages cannot be downloaded; {_NEEDS}",
    )
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheelhouse\n")
    podman = Podman(folder)
    compiler = kept_objects.compiler("/usr/bin/c++", python="/usr/bin/python3", seen_as=_OBJECTS)
    podman("import", "--quiet", "--change", f"ENV CXX={_OBJECTS}/{compiler.name}", str(base), "localhost/base")
    try:
        yield podman
    finally:
        podman("system", "reset", "--force")


@pytest.fixture(scope="module")
def image(podman: Podman, folder: Path) -> str:
    """The image for CPUs, with the kernels for this processor only; test_wheel.py compiles all of them."""
    objects = f"{kept_objects.FOLDER}:{_OBJECTS}"
    isas = f"KERNEL_ISAS={isa.chosen().name}"
    podman.build(folder, "cpu", "--volume", objects, "--build-arg", isas, "--tag", "quire:cpu")
    return "quire:cpu"


def test_the_image_is_small_and_says_what_it_is(podman: Podman, image: str) -> None:
    (found,) = json.loads(podman("inspect", image))
    assert found["Size"] < MAX_BYTES
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in found["Labels"].items()}
    assert labels["version"] == project["version"]
    assert labels["revision"] == "0123abc"
    assert (labels["description"], labels["licenses"]) == (project["description"], project["license"])
    assert found["Config"]["User"] == "10001:10001"
    assert set(found["Config"]["Volumes"]) == {"/cache", "/models"}


def test_the_sbom_lists_every_package(podman: Podman, image: str) -> None:
    script = """
import importlib.metadata, json
listed = {(part["name"], part["version"]) for part in json.load(open("/opt/quire/sbom.cdx.json"))["components"]}
print(json.dumps([sorted(listed), [(part.name, part.version) for part in importlib.metadata.distributions()]]))
"""
    with podman.started("--entrypoint", "python3", image, "-c", script) as container:
        assert container.wait(60) == 0
    listed, installed = json.loads(container.lines[-1])
    assert {"quire-llm", "torch"} < {name for name, _ in installed}
    assert sorted(installed) == listed


def test_a_login_shell_finds_its_programs(podman: Podman, image: str) -> None:
    """As KubeRay starts one; the manifests of deploy/ download with `hf`."""
    with podman.started("--entrypoint", "bash", image, "-lc", "hf --help && quire --version") as container:
        assert container.wait(60) == 0
    assert container.lines[-1].endswith(" (0123abc)\n")


def test_it_answers_with_a_read_only_root_and_stops(podman: Podman, image: str) -> None:
    """A core that dies leaves nothing behind."""
    with podman.started(image, "serve", "-tp", "2") as container:
        container.wait_for("serving .* on http://0.0.0.0:8000")
        first = ask(podman, 8000, "10001")
        assert podman("healthcheck", "run", "quire").strip() in ("", "healthy")

        (core,) = (process for process in first.children(recursive=True) if process.name() == "quire-core")
        core.kill()
        container.wait_for("the engine core is up again")
        statuses = {process.name(): process.status() for process in first.children(recursive=True)}
        assert psutil.STATUS_ZOMBIE not in statuses.values(), statuses

        podman("stop", "--time", "60", "quire")
        assert container.wait(60) == 0
        assert "shutting down" in container.text
        assert "CPU kernels" not in container.text, "the image has none that fit, or compiles them"


def test_it_answers_for_a_user_that_it_does_not_know(podman: Podman, image: str) -> None:
    """With flags only, at a port and an address of that user's choice; health is bad, as no server listens at the port
    of the health check."""
    with podman.started("--user", "4242", image, "--port", "8001", "--host", "127.0.0.1") as container:
        container.wait_for("serving .* on http://127.0.0.1:8001")
        ask(podman, 8001, "4242")
        with pytest.raises(pytest.fail.Exception, match="unhealthy"):
            podman("healthcheck", "run", "quire")
        podman("stop", "--time", "60", "quire")
        assert container.wait(60) == 0


def ask(podman: Podman, port: int, user: str) -> psutil.Process:
    """The first process of the container, all of whose processes are that user's, after the README's question."""
    first = psutil.Process(int(podman("inspect", "--format", "{{.State.Pid}}", "quire")))
    assert {str(process.uids().effective) for process in [first, *first.children(recursive=True)]} == {user}
    chat = {"messages": [{"role": "user", "content": NODES}], "temperature": 0}
    with inside(f"/proc/{first.pid}/ns/net"):
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=chat, timeout=60).raise_for_status().json()
    assert f'"content": "{answer["choices"][0]["message"]["content"]}"' in (ROOT / "README.md").read_text()
    return first


def test_the_image_for_gpus_has_what_triton_compiles_with(podman: Podman, folder: Path) -> None:
    """Up to the installation of PyTorch, with the stand-in for its base; the rest is the same as in the image for
    CPUs."""
    podman.build(folder, "cu130", "--target", "cu130", "--tag", "quire:cu130")
    headers = "python3 -c 'import sysconfig; print(sysconfig.get_path(\"include\"))'"
    extension = f"echo '#include <Python.h>' | gcc -x c -shared -fPIC -I$({headers}) -o /tmp/stub.so -"
    with podman.started("quire:cu130", "sh", "-c", extension) as container:
        assert container.wait(60) == 0
