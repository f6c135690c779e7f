"""The kernels on ARM: the wheel for aarch64 is built by a cross-compiler, and their tests run on an emulated processor.

Python, its packages and the C and C++ libraries for aarch64 come from Debian and the package index. They take about 1.1
GB on disk, and are kept for the next run.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.e2e.environments import made_once, run
from tests.e2e.test_image import SUITE
from tests.e2e.test_wheel import PIP, build_wheel
from tests.unit.test_packages import ROOT

TARGET = "aarch64-linux-gnu"
TOOLS = (f"{TARGET}-g++", "qemu-aarch64", "mmdebstrap")
KERNELS = "tests/integration/kernels"
_NEEDS = f"this test needs {', '.join(TOOLS)}, which .ci/run installs, a package index and a mirror of Debian"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not all(shutil.which(tool) for tool in TOOLS), reason=_NEEDS),
]

_PROCESSOR = """processor\t: {}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""/proc/cpuinfo of a Neoverse N1, which has dot products, and nothing newer."""

_PLUGIN = """
import hypothesis
import pytest
import torch

SLOW = [hypothesis.HealthCheck.too_slow]
FEW = hypothesis.settings(
    max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=SLOW
)

def types(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return tuple(str(value) for _, value in sorted(params.items()) if isinstance(value, torch.dtype))

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    groups = {}
    for item in items:
        groups.setdefault((item.path, item.originalname, types(item)), []).append(item)
    items[:] = [cases[len(cases) // 2] for cases in groups.values()]
    for item in items:
        if hasattr(item.obj, "hypothesis"):
            item.obj._hypothesis_internal_use_settings = FEW
"""
"""Each test runs one case for each type of numbers, with few examples: emulation is ten times as slow as this
machine."""
_TESTS = (
    "check.py::test_every_cpu_kernel_is_checked_and_right",
    "attention.py",
    "experts.py",
    "linear.py",
    "operations.py",
    "quantized.py::test_inputs_of_any_size",
    "sampling.py",
    "threads.py",
)
"""The first one compares every kernel with the reference, at odd sizes."""
_SELECTION = "not [reference and not outside_the_window and not a_hundred_thousand"
"""Without long tests whose failures would not depend on the processor."""
_NEEDED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
_NEEDED_BY_TESTS = ("hypothesis", "msgspec", "numpy", "pytest", "pytest-timeout")


class Emulation:
    """Debian for aarch64 in `root`, whose files stand before this machine's, and Python packages in `site`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root, self.site, self.stubs = folder / "root", folder / "site", folder / "stubs"

    def python(self, folder: Path, *arguments: str) -> str:
        """The output of the emulated Python, with the modules of a folder beside the packages."""
        variables = {
            "LD_LIBRARY_PATH": self.stubs,
            "PYTHONPATH": f"{folder}:{self.site}",
            "OMP_NUM_THREADS": 1,
            "XDG_CACHE_HOME": folder / "cache",
        }
        options = [option for name, value in variables.items() for option in ("-E", f"{name}={value}")]
        command = ["qemu-aarch64", "-cpu", "neoverse-n1", "-L", str(self.root), *options]
        return run([*command, str(self.root / "usr/bin/python3"), *arguments], "failed on aarch64", cwd=folder)

    def install_debian(self) -> None:
        """The C++ library and Python. Only their folders: another one, as /tmp, would hide this machine's."""
        options = ("--quiet", "--variant=extract", "--architectures=arm64", "--include=python3,libstdc++6,libgomp1")
        whole = self.folder / "debian"
        run(["mmdebstrap", *options, SUITE, str(whole)], f"Debian for aarch64 cannot be had; {_NEEDS}")
        self.root.mkdir()
        for name in ("lib", "usr"):
            (whole / name).rename(self.root / name)
        shutil.rmtree(whole)
        contents = {
            "proc/cpuinfo": "".join(_PROCESSOR.format(number) for number in range(os.cpu_count() or 1)),
            "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
        }
        for name, content in contents.items():
            (self.root / name).parent.mkdir(parents=True)
            (self.root / name).write_text(content)

    def install_packages(self) -> None:
        """Install the packages that the kernels and their tests import."""
        version = (self.root / "usr/bin/python3").readlink().name.removeprefix("python")
        platforms = ("manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
        options = (
            *("install", "--no-compile", "--only-binary=:all:", f"--target={self.site}", f"--python-version={version}"),
            *(f"--platform={platform}" for platform in platforms),
        )
        for packages in (("--no-deps", torch()), (*_NEEDED_BY_TORCH, *_NEEDED_BY_TESTS)):
            run([*PIP, *options, *packages], f"packages for aarch64 cannot be had; {_NEEDS}")

    def replace_cuda(self) -> None:
        """The package index has torch for aarch64 with CUDA only: without its libraries, whose functions all fail."""
        libraries = [str(path) for path in self.site.glob("torch/lib/*.so*")]
        dynamic = run([f"{TARGET}-readelf", "--dynamic", *libraries], "torch cannot be read")
        symbols = run([f"{TARGET}-nm", "--dynamic", *libraries], "torch cannot be read")
        functions = set(re.findall(r" U ((?:__)?(?:cu|nccl|nv)\w+)", symbols))
        self.stubs.mkdir()
        source, versions = self.folder / "stub.s", self.folder / "versions"
        source.write_text("".join(f".globl {name}\n{name}:\n" for name in functions) + "mov w0, 100\nret\n")
        for name in set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv(?!pl)).*)\]", dynamic)):
            versions.write_text(f"{'NVSHMEM' if 'nvshmem' in name else name} {{ global: *; }};")
            link = (f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", "-o", str(self.stubs / name))
            run([f"{TARGET}-gcc", "-shared", "-nostdlib", *link, str(source)], f"{name} cannot be made")


def torch() -> str:
    return f"torch=={metadata.version('torch').partition('+')[0]}"


@pytest.fixture(scope="module")
def aarch64() -> Emulation:
    def make(folder: Path) -> None:
        emulation = Emulation(folder)
        emulation.install_debian()
        emulation.install_packages()
        emulation.replace_cuda()

    inputs = (SUITE, torch(), *_NEEDED_BY_TORCH, *_NEEDED_BY_TESTS, _PROCESSOR, str(os.cpu_count()))
    return Emulation(made_once("aarch64", *inputs, make=make))


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """A folder with the contents of the wheel, and the tests beside it."""
    with tempfile.TemporaryDirectory(prefix="quire-aarch64-") as name:
        folder = Path(name)
        wheel = build_wheel(folder, f"{TARGET}-g++")
        assert wheel.name.endswith("_aarch64.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (folder / "fewer_cases.py").write_text(_PLUGIN)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        yield folder


def test_the_kernels_of_the_wheel_are_right_on_aarch64(aarch64: Emulation, installed: Path) -> None:
    """By their own tests, except tests that need another program or a GPU, or wait for each other with time limits."""
    options = ("-c", "/dev/null", f"--rootdir={installed}")
    plugins = ("-p", "fewer_cases", "-p", "no:cacheprovider")
    files = [f"{KERNELS}/test_{name}" for name in _TESTS]
    printed = aarch64.python(installed, "-m", "pytest", "-q", "-k", _SELECTION, *plugins, *options, *files)
    assert re.search(r"\d{3,} passed", printed), printed
    assert "skipped" not in printed, printed
