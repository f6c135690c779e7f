"""How the C++ kernels are compiled, without a compiler."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.kernels import isa
from quire.kernels.cpu import build, compiler


def test_headers_are_parsed_once_for_all_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[str] = []
    reports: list[tuple[int, int]] = []

    def run(command: list[str]) -> None:
        commands.append(" ".join(command))
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(compiler, "_run", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    library = tmp_path / "library"
    compiler.compile_library("c++", ["-mfast"], tmp_path, library, lambda *report: reports.append(report))
    headers, *sources, _, link = commands
    options, precompiled = headers.partition(" -x c++-header ")[0], headers.rpartition(" -o ")[2]
    assert "-mfast" in options
    for line in sources:  # a precompiled header is used only with the same options
        assert line.startswith(f"{options} -include {precompiled.removesuffix('.gch')} -c {compiler.SOURCES}/")
    compiled = [line.partition(" -c ")[2].split()[0] for line in sources]
    assert sorted(compiled) == sorted(map(str, compiler.SOURCES.glob("*.cpp")))
    assert all(f"/{Path(source).stem}.o" in link for source in compiled)
    assert reports == [(done, len(compiled)) for done in range(1, len(compiled) + 1)]
    assert library.exists()


def test_the_first_failure_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str]) -> None:
        raise compiler.CompileError("it is broken")

    monkeypatch.setattr(compiler, "_run", fail)
    with pytest.raises(compiler.CompileError, match="it is broken"):
        compiler.compile_library("c++", [], tmp_path, tmp_path / "library")
    assert not list(tmp_path.iterdir())


def test_progress_is_logged_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compile_library(report: Callable[[int, int], None]) -> None:
        for done in range(1, 11):
            report(done, 10)

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caplog.set_level(logging.INFO)
    build._compile(tmp_path / "library", "avx2", compile_library)
    logged = [record.getMessage() for record in caplog.records]
    assert logged[1:-1] == [f"compiled {done} of 10 files of the CPU kernels" for done in (3, 5, 8, 10)]

    caplog.clear()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    build._compile(tmp_path / compiler.library_name("avx2", is_second=True), "avx2", compile_library)
    assert "other CPU kernels: 100%" in capsys.readouterr().err
    assert len(caplog.records) == 2


def test_the_second_library_has_the_other_sources_and_finds_the_first_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(compiler, "_run", run)
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    compiler.compile_library("c++", [], tmp_path, second, names=compiler.SECOND, needed=first)
    compiled = {Path(command[command.index("-c") + 1]).stem for command in commands if "-c" in command}
    assert compiled == compiler.SECOND
    assert commands[-1][-5:-2] == [f"-L{tmp_path}", "-l:first.so", "-Wl,-rpath,$ORIGIN"]
    assert {path.stem for path in compiler.SOURCES.glob("*.cpp")} == compiler.FIRST | compiler.SECOND


def test_a_library_is_compiled_once_and_a_failure_is_kept(tmp_path: Path) -> None:
    library = tmp_path / "library.so"

    def fail() -> None:
        raise compiler.CompileError("it is broken")

    for problem in ("the compiler failed (g++ 12", "the compiler failed before"):
        with pytest.raises(compiler.CompileError, match=re.escape(problem)):
            compiler.once(library, fail)
    failed = tmp_path / "failed.txt"
    assert failed.read_text() == "it is broken\n"
    failed.unlink()
    compiler.once(library, library.touch)
    compiler.once(library, fail)


def test_the_second_library_waits_until_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[str] = []
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(build, "_key", lambda *_: "key")
    monkeypatch.setattr(build, "_load", lambda library, *_: loaded.append(library.name))
    name = isa.chosen().name
    first, second = (compiler.library_name(name, is_second=each) for each in (False, True))
    build.load(complete=False)
    assert loaded == [first]
    build.load()
    assert loaded == [first, first, second]


def test_an_operation_that_is_not_there_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = SimpleNamespace(norm=abs)
    calls: list[None] = []

    def load() -> None:
        calls.append(None)
        registered.route = len

    monkeypatch.setattr(torch.ops, "quire", registered)
    monkeypatch.setattr(build, "load", load)
    operations = build.Operations()
    assert (operations.norm(-1), len(calls)) == (1, 0)
    assert (operations.route("ab"), operations.route("ab"), len(calls)) == (2, 2, 1)
