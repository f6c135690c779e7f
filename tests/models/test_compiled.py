"""-O1: a compiled model takes the steps over if it is right and faster, and nobody waits for it."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.executor.uni import UniExecutor
from quire.engine.families import by_transformers
from quire.engine.layers.attention import Batch
from quire.engine.messages import SamplingParams
from quire.engine.models.by_transformers import compiling, describe
from quire.engine.models.by_transformers.compiled import Compiled
from quire.engine.models.by_transformers.decoder import TransformersDecoder
from quire.engine.models.loading import load_model
from quire.engine.parallel import Parallel
from quire.engine.resolve import plan_text
from quire.kernels import disk
from tests.e2e.harness import Ranks
from tests.models import families, others
from tests.models.common import CPU, configure


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(by_transformers, "describe", describe.describe)
    monkeypatch.setattr(disk, "folder", lambda: tmp_path / "cache")
    caplog.set_level(logging.INFO)


def written(tmp_path: Path, case: str = "OLMo", **options: Any) -> EngineConfig:
    """A tiny model that transformers builds, to be compiled."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (others if case in others.CASES else families).write(case, folder)
    return configure(folder, max_model_len=256, model_impl="transformers", **{"optimization_level": 1} | options)


def decoder_of(config: EngineConfig) -> TransformersDecoder:
    model = load_model(config, 0, Parallel(), CPU)
    assert isinstance(model, TransformersDecoder)
    return model


def batch(rows: int, tokens: int) -> Batch:
    """Of which nothing is read but the sizes."""
    none = torch.zeros(0, dtype=torch.int64)
    ids = torch.zeros(tokens, dtype=torch.int64)
    return Batch(
        token_ids=ids,
        positions=ids,
        slots=ids,
        block_tables=none,
        sequence_lengths=ids[:rows],
        query_starts=none,
        sampled=none,
    )


PROMPT, DECODE = batch(1, 5), batch(2, 2)


class Package:
    """Puts out ones, or what it is told to."""

    def __init__(self) -> None:
        self.hidden: Callable[[int], Tensor] = lambda tokens: torch.ones(tokens, 4)
        self.calls = 0

    def get_constant_fqns(self) -> list[str]:
        return ["base.embed_tokens.weight"]

    def load_constants(self, constants: dict[str, Tensor], *how: bool) -> None:
        assert len(constants["base.embed_tokens.weight"]) == 131

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        return [self.hidden(len(inputs[0]))]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda path, *how: made)
    return made


class Steps:
    """A model whose package was found; a step takes two seconds by the model, and `seconds` by the package."""

    def __init__(self, config: EngineConfig, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.by_model = 1.0, 0
        path = compiling.Request(config.model, "cpu", torch.get_num_threads()).package()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.compiled = Compiled(decoder_of(config), config, CPU)
        self.compiled._thread.join()

        def timed(step: Callable[[], Tensor]) -> tuple[Tensor, float]:
            before = self.by_model
            return step(), 2.0 if self.by_model > before else self.seconds

        monkeypatch.setattr(self.compiled, "_timed", timed)

    def run(self, batch: Batch, count: int) -> list[Tensor]:
        def decode() -> Tensor:
            self.by_model += 1
            return torch.ones(len(batch.token_ids), 4)

        return [self.compiled(batch, (), decode) for _ in range(count)]


@pytest.fixture
def steps(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(written(tmp_path), package, monkeypatch)


def test_steps_are_taken_over_kind_by_kind_once_they_were_right_and_faster(
    steps: Steps, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    assert "found the compiled model in" in caplog.get_records("setup")[-1].message
    steps.run(DECODE, 9)
    assert (steps.by_model, package.calls) == (9, 9)
    assert "decodes run compiled from now on: 2.00 times as fast, largest relative difference 0" in caplog.text
    steps.run(DECODE, 5)
    assert (steps.by_model, package.calls) == (9, 14)
    steps.run(PROMPT, 6)
    assert (steps.by_model, package.calls) == (14, 20)


def test_what_is_slower_stays_as_it_was(steps: Steps, package: Package, caplog: pytest.LogCaptureFixture) -> None:
    steps.seconds = 2.5
    steps.run(DECODE, 20)
    assert (steps.by_model, package.calls) == (20, 9)
    assert "decodes run as before, compiled they are not faster: 0.80 times as fast" in caplog.text


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_what_is_wrong_is_dropped_and_never_seen(
    wrong: float, steps: Steps, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    package.hidden = lambda tokens: torch.full((tokens, 4), wrong)
    assert all((hidden == 1).all() for hidden in steps.run(PROMPT, 5))
    assert (steps.by_model, package.calls) == (5, 1)
    assert "the compiled model is not used, its hidden states differ from the model's by" in caplog.text


@pytest.mark.parametrize("taken", [False, True])
def test_what_fails_is_dropped_and_the_model_serves_the_step(
    taken: bool, steps: Steps, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tokens: int) -> Tensor:
        raise RuntimeError("no\nmemory")

    steps.run(DECODE, 9 * taken)
    package.hidden = fail
    assert all((hidden == 1).all() for hidden in steps.run(DECODE, 3))
    assert package.calls == 9 * taken + 1
    assert "the compiled model is not used, it failed: no memory" in caplog.text


def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = written(tmp_path)
    path = compiling.Request(config.model, "cpu", torch.get_num_threads()).package()
    path.parent.mkdir(parents=True)
    path.touch()
    path.parent.chmod(0o777)
    Compiled(decoder_of(config), config, CPU)._thread.join()
    assert "serves as it is: " in caplog.text
    assert "can be written by others" in caplog.text


def test_a_package_is_for_one_model_and_one_way_to_run_it(tmp_path: Path) -> None:
    def package(threads: int = 2, case: str = "OLMo", **options: Any) -> Path:
        return compiling.Request(written(tmp_path, case, **options).model, "cpu", threads).package()

    assert package() == package()
    others = package(3), package(dtype="bfloat16"), package(trust_remote_code=True), package(case="Arcee")
    assert len({package(), *others}) == 5


def test_the_plan_says_what_is_compiled(tmp_path: Path) -> None:
    assert "compiled in the background (-O1)" in plan_text(written(tmp_path))
    assert "compiled" not in plan_text(written(tmp_path, optimization_level=0))
    two = plan_text(written(tmp_path, tensor_parallel_size=2))
    assert "nothing is compiled (-O1): a model is compiled for one rank only, and this one has 2" in two
    with pytest.raises(ConfigError, match="--optimization-level must be 0 or 1, got 2"):
        written(tmp_path, optimization_level=2)


def test_a_package_that_does_not_load_is_made_again(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(path: str, *how: Any) -> Package:
        if Path(path).read_text() == "made":
            return package
        raise RuntimeError("not a zip archive\nand more")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    monkeypatch.setattr(Compiled, "_compile", lambda self, request, path: path.write_text("made"))
    made = Steps(written(tmp_path), package, monkeypatch)
    assert made.compiled._package is package
    assert ".pt2 is made again: not a zip archive and more" in caplog.text


def test_a_package_of_another_model_is_refused(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(package, "get_constant_fqns", lambda: ["base.embed_tokens.weight", "lifted"])
    assert Steps(written(tmp_path), package, monkeypatch).compiled._package is None
    assert "serves as it is: the package wants lifted, which the model does not name" in caplog.text


def test_a_step_that_neither_has_memory_for_leaves_the_package(steps: Steps, package: Package) -> None:
    def fails(*given: object) -> Tensor:
        raise RuntimeError("can't allocate memory")

    package.hidden = fails
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        steps.compiled(PROMPT, (), fails)
    assert steps.compiled._package is package


@pytest.fixture
def compiling_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Compiled, psutil.Process]]:
    """A model whose compilation has begun, and the process that does it."""
    config, start = written(tmp_path), subprocess.Popen
    started: SimpleQueue[int] = SimpleQueue()

    def popen(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = start(*command, **options)
        started.put(child.pid)
        return child

    monkeypatch.setattr(subprocess, "Popen", popen)
    begun = Compiled(decoder_of(config), config, CPU)
    yield begun, psutil.Process(started.get(timeout=60))
    begun.close()


def test_the_compiler_ends_with_the_rank(
    compiling_now: tuple[Compiled, psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    begun, child = compiling_now
    family = [child, *child.children(recursive=True)]
    begun.close()
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert "serves as it is" not in caplog.text


def test_a_compiler_that_the_kernel_killed_is_told_so(
    compiling_now: tuple[Compiled, psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    begun, child = compiling_now
    child.kill()
    begun._thread.join()
    assert "serves as it is: the compiler was killed by signal 9" in caplog.text


def test_a_compiler_that_has_just_ended_is_no_error(
    compiling_now: tuple[Compiled, psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, child = compiling_now
    child.kill()
    begun._thread.join()
    with monkeypatch.context() as patch:
        patch.setattr(begun._child, "poll", lambda: None)  # as it answers while another thread waits
        begun.close()


@pytest.mark.slow
def test_the_compiler_ends_by_itself_where_the_rank_was_killed(
    compiling_now: tuple[Compiled, psutil.Process],
) -> None:
    begun, child = compiling_now
    while not (compilers := child.children(recursive=True)):  # raises where it has ended without any
        time.sleep(0.01)
    assert begun._child is not None
    assert begun._child.stdin is not None
    os.close(begun._child.stdin.fileno())  # as the end of a process does
    assert not psutil.wait_procs([child, *compilers], timeout=30)[1]


@pytest.mark.slow
def test_without_a_compiler_the_model_serves_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = written(tmp_path)
    failed = Compiled(decoder_of(config), config, CPU)
    failed._thread.join()
    assert "the model is not compiled, and serves as it is: InductorError: InvalidCxxCompiler: " in caplog.text
    assert failed(PROMPT, (), lambda: torch.ones(5, 4)).shape == (5, 4)


CASES = ("OLMo", "EXAONE 4, windows", "MiniCPM3", "OLMoE", "Gemma 3", "Phi-3, longrope", "gpt-oss", "OPT-350M")
"""Plain; windows; keys wider than values; experts; two rotary bases; frequencies by length; sinks; positions."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "options"), [*((case, {}) for case in CASES), ("OLMo", {"dtype": "bfloat16"})])
def test_tokens_are_the_same_compiled_and_the_next_start_finds_it(
    case: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    requests = [([3 + (7 * n + length) % 120 for n in range(length)], params) for length in (1, 33, 40, 90)]

    def served(level: int) -> list[list[list[int]]]:
        config = written(tmp_path, case, optimization_level=level, **options)
        executor = UniExecutor(config)
        with Ranks(config, executor) as ranks:
            before = ranks.tokens(requests, max_num_batched_tokens=16)
            model: Any = executor._worker._runner._model
            if level:
                model._compiled._thread.join()
                monkeypatch.setattr(model._compiled, "_note", take(model._compiled))
            after = [ranks.tokens(requests, max_num_batched_tokens=size) for size in (16, 128)]
            assert not level or model._compiled._verdicts == {"prompts": True, "decodes": True}, caplog.text
        return [before, *after]

    def take(it: Compiled) -> Callable[..., None]:
        def note(kind: str, speed: float, difference: float) -> None:
            it._verdicts[kind] = True

        return note

    expected = served(0)
    assert served(1) == expected
    assert "found" not in caplog.text
    assert served(1) == expected
    assert "found the compiled model in" in caplog.text
