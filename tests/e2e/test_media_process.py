"""The media process of a server, which dies, hangs and ends: what clients see of it."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM
from quire.engine.protocol.errors import ConfigError
from tests.e2e.serving import Server, serve
from tests.fakes.vision import write_qwen2_vl
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow
MEDIA = "the media process is being restarted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_vl(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ("--device", "cpu", "--dtype", "float32", "--watchdog-seconds", "5", "--api-server-count", "2")
    with serve(str(folder), *flags, "--mm-processor-kwargs", '{"max_pixels": 50176}') as server:
        yield server
    assert not any("Warning" in line for line in server.lines), "libraries do not write to the log"


def picture(colour: str) -> str:
    """As a data URL."""
    file = io.BytesIO()
    Image.new("RGB", (60, 90), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(server: Server, *parts: dict[str, Any]) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def counts(server: Server) -> dict[str, float]:
    """Images by result, and the bytes in the cache."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name == "quire:media_cache_bytes":
                found["bytes"] = sample.value
            if sample.name == "quire:media_items_total" and sample.labels["kind"] == "image":
                found[sample.labels["result"]] = sample.value
    return found


def health(server: Server) -> Any:
    return httpx.get(f"{server.url}/health", timeout=60).json()


def test_items_are_counted_and_the_page_knows_what_the_model_takes(server: Server) -> None:
    red = image(picture("red"))
    assert ask(server, red).status_code == 200
    assert httpx.get(f"{server.url}/ui/state", timeout=60).json()["media"] == {
        "kinds": ["image", "video"],
        "problem": None,
    }
    assert ask(server, red, red).status_code == 200
    refused = ask(server, image("data:image/png;base64,AAAA"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].image_url")
    found = counts(server)
    assert found.pop("bytes") > 0
    assert found == {"loaded": 1, "cached": 2, "refused": 1, "failed": 0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_media_process_that_dies_or_hangs_is_replaced(server: Server, number: signal.Signals) -> None:
    text, green = {"type": "text", "text": "hello"}, image(picture("green"))
    first = ask(server, green, text).json()["choices"]
    process = server.named("quire-media")
    children = process.children(recursive=True)
    os.kill(process.pid, number)
    until(
        lambda: (
            health(server) == {"status": "ok", "media": MEDIA}
            or any(
                each not in (process, *children) for each in server.all_named("quire-media")
            )  # it is up again already
        )
    )
    assert ask(server, text).status_code == 200
    failed = ask(server, green, text)
    if failed.status_code != 200:  # it is not up again already
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "media_unavailable")
        assert "retry-after" in failed.headers
    until(lambda: health(server) == {"status": "ok"}, seen=lambda: health(server))
    assert ask(server, green, text).json()["choices"] == first
    until(lambda: not any(each.is_running() for each in children))


def test_decoding_holds_up_nobody_else(server: Server) -> None:
    """While the decoders stand still, texts and known pictures are answered."""
    text, known, new = {"type": "text", "text": "hello"}, image(picture("white")), image(picture("black"))
    assert ask(server, known).status_code == 200
    decoders = [*server.all_named("quire-decoder")]
    assert min(each.nice() for each in decoders) > server.named("quire-core").nice()
    with ThreadPoolExecutor() as threads:
        for each in decoders:
            each.suspend()
        try:
            waiting = [threads.submit(ask, server, new, text) for _ in range(2)]
            assert ask(server, text).status_code == 200
            assert ask(server, known, text).status_code == 200
            assert not any(each.done() for each in waiting)
        finally:
            for each in decoders:
                each.resume()
        assert [each.result().status_code for each in waiting] == [200, 200]


def test_nothing_is_left_of_it(folder: Path) -> None:
    with serve(str(folder), "--device", "cpu", "--dtype", "float32") as server:
        assert ask(server, image(picture("blue"))).status_code == 200
        family = server.family()
        paths = {str(each.laddr) for each in server.named("quire-media").net_connections("unix")}
        (socket,) = (Path(path) for path in paths if path.endswith("/media"))
        assert len([*socket.parent.glob("items/*.item")]) == 1
    assert not any(each.is_running() for each in family)
    assert not socket.parent.exists()


def test_a_program_gets_one_too_unless_it_takes_only_text(folder: Path, tmp_path: Path) -> None:
    def processes() -> list[psutil.Process]:
        """Of this process, and not of the server."""
        return [each for each in psutil.Process().children() if each.name() == "quire-media"]

    llm = LLM(str(folder), device="cpu", dtype="float32")
    assert len(processes()) == 1
    llm.shutdown()
    assert processes() == []
    (folder / "preprocessor_config.json").rename(tmp_path / "preprocessor_config.json")
    try:
        with pytest.raises(ConfigError, match=r"has no processor of images, .* --language-model-only"):
            LLM(str(folder), device="cpu", dtype="float32")
        llm = LLM(str(folder), device="cpu", dtype="float32", language_model_only=True)
        assert processes() == []
        llm.shutdown()
    finally:
        (tmp_path / "preprocessor_config.json").rename(folder / "preprocessor_config.json")
