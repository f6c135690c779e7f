"""What a fork may do that a file has taken over: nothing that reaches further than its own item's refusal."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from quire.engine.protocol.errors import InvalidParameter
from quire.server.media import decoders
from quire.server.media.decoders import Decoders
from quire.server.media.decoding import Decoded, DecodeOrder, Refused
from quire.server.media.download import FetchSettings
from quire.server.media.fetcher import Fetcher
from quire.server.media.types import MediaSettings, MediaUnavailable
from tests.fakes.processors import write_processor

HELPER = """
import os, threading, time
import msgspec
from msgspec.structs import replace
from quire.server.media import decoder
from quire.engine.protocol.media import MediaArray

attack, answer, write, end = "", decoder._answer, decoder._write, os._exit

def changed(order, *others):
    global attack
    attack = order.options.pop("attack")
    found, arrays = answer(order, *others)
    pixels, grid = found.arrays
    match attack:
        case "name":
            found = replace(found, arrays=(replace(pixels, name="pixels"), grid))
        case "type":
            found = replace(found, arrays=(pixels, replace(grid, dtype="float32", shape=(2, 3))))
        case "rank":
            found = replace(found, arrays=(replace(pixels, shape=(*pixels.shape, 1)), grid))
        case "width":
            found = replace(found, arrays=(replace(pixels, shape=(2 * pixels.shape[0], pixels.shape[1] // 2)), grid))
        case "none":
            found = replace(found, arrays=(), num_bytes=0)
        case "grids":
            found = replace(found, grids=())
        case "deep":
            found = ["Refused", "", msgspec.Raw(bytes([0x91] * 5000 + [0xc0]))]
    return found, arrays

def stay(found, arrays, target):
    copy = os.dup(target)
    result = write(found, arrays, target)

    def rewrite():
        while True:
            os.pwrite(copy, b"changed", 0)
    if attack == "stay":
        threading.Thread(target=rewrite).start()
    if attack == "more":
        os.pwrite(copy, b"x", found.num_bytes)
    return result

decoder._answer, decoder._write = changed, stay
os._exit = lambda code: time.sleep(600) if attack == "stay" else end(code)
decoder.main()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    return str(write_processor("qwen2_vl", tmp_path))


async def test_answers_are_such_as_the_processor_makes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_HELPER", HELPER)
    Image.new("RGB", (56, 56)).save(file := io.BytesIO(), "PNG")
    helper = Decoders(MediaSettings(model=model))

    async def decoded(attack: str, target: int | None = None) -> tuple[Decoded | Refused, int]:
        target = os.memfd_create("result") if target is None else target
        order = DecodeOrder("image", {"attack": attack}, 10, 2**20, 2**20)
        return await helper.decode(file.getvalue(), order, lambda _: target), target

    answer, target = await decoded("")
    assert isinstance(answer, Decoded)
    assert os.fstat(target).st_size == answer.num_bytes
    for attack in ("name", "type", "rank", "width", "none", "grids", "deep", "more"):
        refused, _ = await decoded(attack)
        assert isinstance(refused, Refused), attack
    answer, target = await decoded("stay")
    assert isinstance(answer, Decoded)
    os.pwrite(target, b"written", 0)
    time.sleep(0.05)  # the fork would take microseconds
    assert os.pread(target, 7, 0) == b"written"
    with pytest.raises(MediaUnavailable, match="not enough shared memory"):
        await decoded("", os.open("/dev/full", os.O_RDWR))
    helper.close()


async def test_processes_get_no_secrets(model: str) -> None:
    helper, fetcher = Decoders(MediaSettings(model=model)), Fetcher(FetchSettings())
    await helper.ready()
    with pytest.raises(InvalidParameter):
        await fetcher.fetch("http://0.0.0.0:1/")
    assert fetcher._process is not None
    for process in (helper._popen, fetcher._process._popen):
        assert process is not None
        variables = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"PATH=" in variables
        assert b"secret" not in variables
    helper.close()
    await fetcher.close()
