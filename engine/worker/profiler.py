"""A rank's profiler: torch's, in slices, so that neither memory nor a pause of the steps grows with the duration.

torch keeps every event in memory, and a recording is collected and written under Python's global lock, which takes a
few microseconds per event. A slice ends between two steps, so that no step is lost. Another thread compresses its file.

Steps are named by a file of our own. torch's annotations (`RecordScope.USER_SCOPE`) are not recorded: gloo makes them,
too, for sends that may end after the slice, which would kill the process.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler

from quire.engine.process.trace import Event, step_name
from quire.engine.protocol.profile import ProfileOptions, RankTrace, StopProfile
from quire.engine.protocol.scheduler_output import SchedulerOutput

_SLICE_SECONDS = {"cpu": 0.1, "cuda": 1.0}
"""Duration of a slice. The end of one makes a GPU's host wait for it."""
_MAX_BYTES = 1 << 30
"""Maximum bytes of a rank's files before compression, which reduces them to about a twentieth."""
_COMPRESSION = 1
"""The fastest."""

logger = logging.getLogger(__name__)


class RankProfiler:
    """Records steps until `finish`, `ProfileOptions.seconds` have passed, or the files have the maximum size.

    Steps must be run by the thread that creates it. An error of the profiler ends the recording, not the rank.
    """

    def __init__(self, rank: int, options: ProfileOptions, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints lines for each slice
        if device.type == "cuda":  # the profiler of GPUs cannot be set up twice while there are CUDA graphs
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
        self._rank, self._options, self._device = rank, options, device
        self._folder = ""
        """Made with the first slice."""
        self._deadline = time.monotonic() + options.seconds
        self._background = ThreadPoolExecutor(1, "profile")
        self._slice: profiler.profile | None = None
        self._slice_end = 0.0
        self._num_slices = self._num_bytes = 0
        self._thread = threading.get_native_id()
        self._steps: list[tuple[str, int, int]] = []
        """Name, begin (`time.time_ns`) and duration in nanoseconds."""
        self._is_over = self._is_cut = False
        self._error = ""

    @contextlib.contextmanager
    def step(self, plan: SchedulerOutput) -> Iterator[None]:
        """Record a step."""
        if self._slice is None and not self._is_over:
            with self._errors():
                self._begin()
        if self._slice is None:
            yield
            return
        begin = time.time_ns()
        yield
        self._steps.append((step_name(plan), begin, time.time_ns() - begin))
        if time.monotonic() >= self._slice_end:
            with self._errors():
                self._end()

    def finish(self, stop: StopProfile, report: Callable[[RankTrace], None]) -> None:
        """End the recording. `report` is called by another thread when the files are complete."""
        with self._errors():
            self._end()
        self._is_over = True
        self._background.submit(self._report, stop, report)
        self._background.shutdown(wait=False)

    def discard(self) -> None:
        """End the recording without a result."""
        self.finish(StopProfile(0, 0), lambda trace: shutil.rmtree(trace.folder, ignore_errors=True))

    def _begin(self) -> None:
        if not self._folder:  # Python's own choice would be /tmp if the folder of the server were full
            self._folder = tempfile.mkdtemp(prefix="profile-", dir=os.environ.get("TMPDIR"))
        options = self._options
        config = torch._C._profiler._ExperimentalConfig()
        if hasattr(config, "trace_only"):  # torch 2.13: no Python object for each event, which only stacks need
            config.trace_only = not options.with_stack
        self._slice = profiler.profile(
            use_kineto=True,
            use_device="cuda" if self._device.type == "cuda" else None,
            with_stack=options.with_stack,
            record_shapes=options.record_shapes,
            profile_memory=options.profile_memory,
            experimental_config=config,
        )
        self._slice._prepare_trace()  # type: ignore[no-untyped-call]
        torch._C._autograd._enable_profiler(  # type: ignore[call-arg]  # its stub has no scopes
            self._slice.config(create_trace_id=False),  # type: ignore[no-untyped-call]
            self._slice.kineto_activities,
            {RecordScope.FUNCTION},
        )
        self._slice_end = min(self._deadline, time.monotonic() + _SLICE_SECONDS[self._device.type])

    def _end(self) -> None:
        if (ended := self._slice) is None:
            return
        self._slice = None
        ended.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._num_slices += 1
        path = os.path.join(self._folder, f"{self._num_slices:06}.json")
        ended.export_chrome_trace(path)  # type: ignore[no-untyped-call]
        self._num_bytes += os.path.getsize(path)
        self._is_cut = self._num_bytes >= _MAX_BYTES
        self._is_over = self._is_cut or time.monotonic() >= self._deadline
        self._background.submit(self._compress, path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Let an error end the recording."""
        try:
            yield
        except Exception as error:
            self._slice, self._is_over = None, True
            self._error = f"{type(error).__name__}: {error}"
            logger.warning("the profiler has failed: %s", self._error)

    def _compress(self, path: str) -> None:
        with self._errors():
            with open(path, "rb") as source, gzip.open(f"{path}.gz", "wb", _COMPRESSION) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.remove(path)

    def _write_steps(self) -> None:
        """Write the steps as torch would, as a thread of their own."""
        pid, origin = os.getpid(), self._options.origin
        name = msgspec.Raw(msgspec.json.encode({"name": f"steps of thread {self._thread}"}))
        events = [Event("M", "thread_name", pid, 0, args=name)]
        for step, begin, duration in self._steps:
            at = (begin - origin) / 1000
            events.append(Event("X", step, pid, 0, at, duration / 1000, "user_annotation"))
        path = os.path.join(self._folder, "steps.json")
        with open(path, "wb") as file:
            file.write(msgspec.json.encode({"baseTimeNanoseconds": origin, "traceEvents": events}))
        self._compress(path)

    def _report(self, stop: StopProfile, report: Callable[[RankTrace], None]) -> None:
        if self._folder:
            with self._errors():
                self._write_steps()
        report(
            RankTrace(
                self._rank,
                os.getpid(),
                self._folder,
                self._options,
                stop,
                len(self._steps),
                is_cut=self._is_cut,
                error=self._error,
            )
        )
