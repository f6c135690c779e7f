"""The end of a decoding process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess

import pytest

from quire.server.media import decoders
from quire.server.media.types import MediaUnavailable


@pytest.mark.parametrize("has_descriptors", [True, False])
async def test_a_process_is_killed_also_without_a_descriptor(
    has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But without one it is not known when it has ended, so nothing that it has written is used."""

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with subprocess.Popen(["sleep", "60"]) as process:
        if has_descriptors:
            await decoders._end(process.pid)
            assert process.poll() == -signal.SIGKILL
        else:
            monkeypatch.setattr(os, "pidfd_open", refuse)
            with pytest.raises(MediaUnavailable):
                await decoders._end(process.pid)
            assert process.wait() == -signal.SIGKILL
    await decoders._end(process.pid)  # there is none
