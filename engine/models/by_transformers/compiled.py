"""The steps of a model that transformers builds, by a package that torch's inductor has compiled ahead of time.

A child process of the lowest priority makes the package while the model itself serves (`compiling`): nothing of the
compiler runs in the rank. The number of tokens is free in it, and it has no guards, so nothing is ever compiled again.
What is ours stays outside: a package calls linear layers, experts and attention through two operations, by number, and
reads all other parameters where the rank has them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.layers.attention import Batch, LayerCache
from quire.engine.models.by_transformers import attention, build, compiling
from quire.kernels import disk

if TYPE_CHECKING:
    from quire.engine.models.by_transformers.decoder import TransformersDecoder

logger = logging.getLogger(__name__)

_TRIALS = {"prompts": 5, "decodes": 9}
"""Steps of each kind that are computed both ways before the package takes them over."""
_EXACT, _ROUNDED = 1e-4, 5e-2
"""Largest relative difference of a token's hidden state: in float32, and where numbers are rounded to 16 or 8 bits."""

_running = threading.local()
"""`model`: the `Compiled` whose package runs in this thread."""


def _module(inputs: list[Tensor], number: int, features: int) -> Tensor:
    out: Tensor = _running.model.modules[number](*inputs)
    if out.shape != (*inputs[0].shape[:-1], features) or out.dtype != inputs[0].dtype:
        raise RuntimeError(f"module {number} has put out {list(out.shape)} of {out.dtype}")
    return out.contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, number: int, *asked: Any) -> Tensor:
    paged: attention.Paged = _running.model.paged
    return paged.answer(number, query, key, value, attention.Asked(*asked), sinks).contiguous()


compiling.OPERATIONS.impl("module", _module, "CompositeExplicitAutograd")
compiling.OPERATIONS.impl("attend", _attend, "CompositeExplicitAutograd")


class Compiled:
    """Who computes a decoder's steps: the package once there is one that is right and faster, until then the decoder.

    Each kind of steps is tried by itself, on the first ones that come: the package computes them, and then the decoder,
    whose result stands.
    """

    def __init__(self, decoder: TransformersDecoder, config: EngineConfig, device: torch.device) -> None:
        model, base = config.model, build.base_of(decoder.shell)
        self.paged, self.modules = decoder.paged, compiling.apart(base)
        parts = *base.named_parameters(remove_duplicate=False), *base.named_buffers(remove_duplicate=False)
        self._tensors = {f"base.{name}": tensor.data for name, tensor in parts}
        is_exact = model.dtype == config.cache.dtype == "float32" and model.quantization is None
        self._tolerance, self._device = _EXACT if is_exact else _ROUNDED, device
        self._tried: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Of each step, how many times as fast the package was, and how far off."""
        self._verdicts: dict[str, bool] = {}
        self._package: Any = None
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed, self._starting = False, threading.Lock()
        request = compiling.Request(model, device.type, torch.get_num_threads())
        self._thread = threading.Thread(target=self._prepare, args=(request,), daemon=True, name="compiling")
        self._thread.start()

    def close(self) -> None:
        """End the compiler, if it still runs."""
        with self._starting:
            self._is_closed = True
            if self._child is not None and self._child.poll() is None:
                with suppress(ProcessLookupError):  # it ends by itself just now
                    os.killpg(self._child.pid, signal.SIGKILL)
        self._thread.join()

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], decode: Callable[[], Tensor]) -> Tensor:
        """The hidden states after a step, `[tokens, hidden_size]`, which `decode` gives too."""
        kind = "prompts" if len(batch.token_ids) > len(batch.sequence_lengths) else "decodes"
        if self._package is None or not self._verdicts.get(kind, True):
            return decode()
        try:
            if kind in self._verdicts:
                return self._run(batch, caches)
            compiled, seconds = self._timed(lambda: self._run(batch, caches))
        except RuntimeError as error:
            hidden = decode()  # where memory is what lacks, this fails too, and the next step may do
            self._drop(f"it failed: {_in_a_line(error)}")
            return hidden
        expected, seconds_before = self._timed(decode)
        difference = _largest_difference(compiled, expected)
        if difference <= self._tolerance:
            self._note(kind, seconds_before / seconds, difference)
        else:
            self._drop(f"its hidden states differ from the model's by {difference:.1g}")
        return expected

    def _run(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        self.paged.begin(batch, caches)
        _running.model = self
        hidden: Tensor = self._package.run([batch.token_ids, batch.positions])[0]
        return hidden

    def _timed(self, step: Callable[[], Tensor]) -> tuple[Tensor, float]:
        self._wait()
        begun = time.perf_counter()
        hidden = step()
        self._wait()
        return hidden, time.perf_counter() - begun

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _note(self, kind: str, speed: float, difference: float) -> None:
        tried = self._tried[kind]
        tried.append((speed, difference))
        if len(tried) == _TRIALS[kind]:
            speed, difference = statistics.median(each for each, _ in tried), max(each for _, each in tried)
            self._verdicts[kind] = speed > 1.0
            how = "run compiled from now on" if speed > 1.0 else "run as before, compiled they are not faster"
            logger.info("%s %s: %.2f times as fast, largest relative difference %.1g", kind, how, speed, difference)

    def _drop(self, reason: str) -> None:
        self._package = None
        logger.warning("the compiled model is not used, %s", reason)

    def _prepare(self, request: compiling.Request) -> None:
        """Have the package made, unless there is one, and load it."""
        begun = time.perf_counter()
        try:
            path = request.package()
            package, was_there = self._find(path), True
            if package is None:
                was_there = False
                logger.info("compiling the model in the background (-O1); it serves as it is until then")
                self._compile(request, path)
                package = self._load(path)
        except Exception as error:
            if not self._is_closed:
                logger.warning("the model is not compiled, and serves as it is: %s", _in_a_line(error))
            return
        how = "found the compiled model" if was_there else "compiled the model"
        logger.info("%s in %.1f s, and try it beside the other: %s", how, time.perf_counter() - begun, path)
        self._package = package

    def _find(self, path: Path) -> Any:
        """The package of an earlier start; None: there is none, or it is of no use."""
        if path.parent.exists():
            disk.check_owner(path.parent)
        if not path.exists():
            return None
        try:
            return self._load(path)
        except RuntimeError as error:
            logger.warning("%s is made again: %s", path, _in_a_line(error))
            path.unlink()
            return None

    def _load(self, path: Path) -> Any:
        """The package, on the parameters that are here."""
        disk.check_owner(path.parent, path)
        number = -1 if self._device.index is None else self._device.index
        package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, number)
        names = package.get_constant_fqns()
        if strange := [name for name in names if name not in self._tensors]:
            raise _Failed(f"the package wants {', '.join(strange)}, which the model does not name")
        package.load_constants({name: self._tensors[name] for name in names}, False, True, True)
        return package

    def _compile(self, request: compiling.Request, path: Path) -> None:
        said = ""
        with tempfile.TemporaryDirectory(prefix="quire-compile-", ignore_cleanup_errors=True) as work:
            python_path = os.pathsep.join(filter(None, sys.path))
            program = f"import os; os.nice(19); from {compiling.__name__} import main; main()"
            with self._starting:
                if self._is_closed:
                    raise _Failed("this process ends")
                self._child = child = subprocess.Popen(
                    [sys.executable, "-P", "-c", program],  # -P: nothing of the current folder
                    env={**os.environ, "PYTHONPATH": python_path, "TORCHINDUCTOR_CACHE_DIR": work, "TMPDIR": work},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    process_group=0,
                )
            assert child.stdin is not None
            assert child.stderr is not None
            with suppress(BrokenPipeError), child:
                child.stdin.write(pickle.dumps((request, path)))
                child.stdin.flush()  # and left open: its end tells the child that this process has ended
                said = child.stderr.read().decode(errors="replace").strip()
        if child.returncode:
            logger.debug("the compiler said:\n%s", said)
            if child.returncode < 0:
                raise _Failed(f"the compiler was killed by signal {-child.returncode}")
            raise _Failed(said.rpartition("\n")[2] or f"exit status {child.returncode}")


class _Failed(Exception):
    """There is no package, for this reason."""


def _largest_difference(hidden: Tensor, expected: Tensor) -> float:
    """Of any token's hidden state, relative to it."""
    differences = torch.linalg.vector_norm(hidden.float() - expected.float(), dim=-1)
    return float((differences / torch.linalg.vector_norm(expected.float(), dim=-1).clamp_min(1e-30)).max())


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
