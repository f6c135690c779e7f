"""The media process: it ends with its parent, its files outlive its death, and leases are entered in the next."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from PIL import Image

from quire.engine.process.supervisor import StartedProcess, start_imports
from quire.engine.protocol.supervision import Failed, FromProcess, Heartbeat, Ready
from quire.server.media.client import MediaClient
from quire.server.media.types import MediaFormat, MediaProcessArgs, MediaSettings, MediaSource
from tests.fakes.processors import write_processor
from tests.fakes.waiting import until_async


@pytest.fixture
def args(tmp_path: Path) -> MediaProcessArgs:
    (tmp_path / "model").mkdir()
    (tmp_path / "shared").mkdir()
    settings = MediaSettings(model=str(write_processor("gemma3", tmp_path / "model")))
    (tmp_path / "metrics").touch()
    return MediaProcessArgs(settings, str(tmp_path / "shared"), str(tmp_path / "metrics"), "warning")


Start = Callable[[], tuple[StartedProcess, FromProcess]]


@pytest.fixture
def start(args: MediaProcessArgs) -> Iterator[Start]:
    """Starts a process, and returns it with its first message but heartbeats."""
    started = []

    def start() -> tuple[StartedProcess, FromProcess]:
        process = start_imports("quire.server.media.process")
        started.append(process)
        process.give(args)
        while isinstance(message := receive(process), Heartbeat):
            pass
        return process, message

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.kill_session()
        process.connection.close()


def receive(process: StartedProcess) -> FromProcess:
    assert process.connection.poll(30)
    message: FromProcess = msgspec.msgpack.decode(process.connection.recv_bytes(), type=FromProcess)
    return message


def session(leader: int) -> list[str]:
    """The names of the processes of a session that are alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return sorted(found)


async def test_files_outlive_the_process_and_leases_go_on(args: MediaProcessArgs, start: Start) -> None:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(file, "PNG")
    source = MediaSource("image", "p", data=file.getvalue())
    process, ready = start()
    assert isinstance(ready, Ready)
    client = MediaClient(f"{args.folder}/media")
    assert await client.format() == MediaFormat("<start_of_image>", "", adds_special_tokens=False)  # it has none
    loaded = await client.load([source])
    path = Path(loaded.items[0].data.path)
    content = path.read_bytes()
    process.kill()
    process.wait()
    process.kill_session()
    assert path.read_bytes() == content
    waiting = asyncio.create_task(client.load([MediaSource("image", "p", data=file.getvalue() + b"trailing")]))
    successor, _ = await asyncio.to_thread(start)
    again = await waiting
    assert again.items == loaded.items
    client.release(again.lease)
    client.release(loaded.lease)
    client.close()
    successor.connection.close()  # as if the parent had died
    successor.wait()
    await until_async(lambda: not session(successor.pid), seen=lambda: session(successor.pid))


def test_a_model_whose_processor_cannot_be_loaded_ends_the_start(args: MediaProcessArgs, start: Start) -> None:
    Path(args.settings.model, "preprocessor_config.json").unlink()
    process, failure = start()
    assert isinstance(failure, Failed)
    assert failure.user_error
    assert failure.reason.startswith("images are not supported for gemma3")
    process.wait()


def test_the_client_imports_no_heavy_library() -> None:
    """API processes have it."""
    check = (
        "import sys, quire.server.media.client; print(sorted({'torch', 'transformers', 'PIL', 'numpy', 'httpcore'}"
        " & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"
