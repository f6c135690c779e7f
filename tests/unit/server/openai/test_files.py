"""Files that clients upload: over HTTP, by the official clients, and in requests that name them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.config.server_options import MediaOptions
from quire.server.http.forms import form_parts
from quire.server.media import uploads
from quire.server.media.uploads import UploadNotFound, Uploads, UploadsStalled
from tests.fakes.api_server import Server, run_server

FILES = "/v1/files"
BOUNDARY = "b" * 20
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path) -> AsyncIterator[Server]:
    (folder := tmp_path / "files").mkdir()
    async with run_server(config, file_storage_path=str(folder), file_storage_gb=1e-5) as running:
        yield running
    assert not [*folder.glob("*/*.part")]


async def test_the_life_of_a_file(server: Server) -> None:
    content = b"\r\n--x\r\n\0" + bytes(range(256))
    client = server.openai
    first = await client.files.create(file=("a ü.png", content), purpose="vision")
    second = await client.files.create(file=("b.pdf", b""), purpose="user_data")
    assert (first.filename, first.bytes, first.purpose, first.status) == ("a ü.png", 264, "vision", "processed")
    assert {each.id async for each in client.files.list()} == {first.id, second.id}
    assert [each.id async for each in client.files.list(purpose="vision")] == [first.id]
    pages = [each.id async for each in client.files.list(limit=1)]
    assert {*pages} == {first.id, second.id}
    assert await client.files.retrieve(first.id) == first
    downloaded = await client.files.content(first.id)
    assert downloaded.content == content
    assert (await client.files.delete(first.id)).deleted
    for request in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file with the id"):
            await request(first.id)


async def test_anthropic_client(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=str(server.http.base_url), api_key="none") as client:
        made = await client.beta.files.upload(file=("a.png", b"png", "image/png"))
        assert (made.filename, made.size_bytes, made.mime_type) == ("a.png", 3, "image/png")
        assert made.created_at.tzinfo is not None
        others = [(await client.beta.files.upload(file=("b.txt", b""))).id for _ in range(2)]
        assert {each.id async for each in client.beta.files.list(limit=1)} == {made.id, *others}
        ids = [each.id for each in (await client.beta.files.list()).data]
        before = (await server.http.get(FILES, params={"before_id": ids[2], "limit": 1})).json()
        assert ([each["id"] for each in before["data"]], before["has_more"]) == ([ids[1]], True)
        with pytest.raises(anthropic.BadRequestError, match="ids\\[\\] is not supported"):
            await client.beta.files.list(ids=ids)
        assert (await client.beta.files.retrieve_metadata(made.id)).id == made.id
        assert (await client.beta.files.delete(made.id)).id == made.id


def part(name: str, content: bytes = b"x", filename: str | None = None) -> bytes:
    given = "" if filename is None else f'; filename="{filename}"'
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{given}\r\n\r\n'.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
WHOLE = part("file", filename="a")


def named(filename: str) -> bytes:
    return WHOLE.replace(b'filename="a"', filename.encode()) + END


BAD = {
    "no form": (b"{}", {"Content-Type": "application/json"}, "multipart/form-data"),
    "no boundary": (WHOLE + END, {"Content-Type": "multipart/form-data"}, "with a boundary"),
    "empty": (b"", FORM, "invalid or cut off"),
    "a long boundary": (b"", {"Content-Type": f"multipart/form-data; boundary={'b' * 71}"}, "more than 70 characters"),
    "a boundary of another charset": (
        b"",
        {"Content-Type": "multipart/form-data; boundary*=idna''%80"},
        "or not UTF-8",
    ),
    "a name of another charset": (
        named("filename*=idna''%80"),
        FORM,
        "filename in a header of the form",
    ),
    "a name that is not UTF-8": (named("filename*=utf-8''%ed%b2%80"), FORM, "is invalid, or not UTF-8"),
    "a number of a name's part": (named(f"filename*{'9' * 5000}=a"), FORM, "is invalid, or not UTF-8"),
    "parts of a name with and without numbers": (named("filename*=a; filename*0*=b"), FORM, "is invalid, or not UTF-8"),
    "raw bytes in a name": (named('filename="a"').replace(b'"a"', b'"\xff"'), FORM, "are not UTF-8"),
    "control characters": (named("filename*=utf-8''a%0d%0ab"), FORM, "or control characters"),
    "a long name": (named(f'filename="{"a" * 256}"'), FORM, "more than 255 characters"),
    "cut off": (WHOLE, FORM, "invalid or cut off"),
    "cut off in the file": (WHOLE[:-4], FORM, "invalid or cut off"),
    "cut off in a header": (WHOLE[:40], FORM, "invalid or cut off"),
    "another boundary": (WHOLE.replace(b"b" * 20, b"c" * 20) + END, FORM, "file is missing"),
    "bytes before the end": (WHOLE + END[:-4] + b"xx", FORM, "invalid or cut off"),
    "two files": (WHOLE * 2 + END, FORM, "the form has file twice"),
    "no name": (WHOLE.replace(b'; name="file"', b"") + END, FORM, "invalid or cut off"),
    "many parts": (b"".join(part(f"p{at}") for at in range(9)) + END, FORM, "p0 is not supported"),
    "header that is long": (WHOLE.replace(b'"a"', b'"' + b"a" * 9000 + b'"') + END, FORM, "are too long"),
    "no file": (part("purpose", b"vision") + END, FORM, "file is missing"),
    "a file without a name": (part("file") + END, FORM, "has no name"),
    "another field": (WHOLE + part("expires_after[seconds]") + END, FORM, "expires_after[seconds] is not supported"),
    "another purpose": (WHOLE + part("purpose", b"batch") + END, FORM, "'batch' is not supported"),
    "a long purpose": (WHOLE + part("purpose", b"x" * 2000) + END, FORM, "purpose is too long"),
    "too large": (part("file", bytes(20_000), "a") + END, FORM, "the space for files is used up (--file-storage-gb)"),
}


@pytest.mark.parametrize("name", BAD)
async def test_forms_that_are_refused(server: Server, name: str) -> None:
    body, headers, message = BAD[name]
    response = await server.http.post(FILES, content=body, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert (await server.http.get(FILES)).json()["data"] == []


async def test_without_a_folder(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(config) as server:
        response = await server.http.get(FILES)
        assert (response.status_code, "--file-storage-path" in response.text) == (404, True)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_form_arrives_in_pieces(size: int) -> None:
    """Also with a preamble, an epilogue, and blanks behind boundaries (RFC 2046)."""
    content = b"\r\n--" + b"b" * 19 + b"\r\n\r\n-" * 3
    form = b"preamble\r\n" + part("purpose", b"") + part("file", content, "a").replace(b"b\r\nC", b"b \t\r\nC")
    form += END + b"epilogue"

    async def body() -> AsyncIterator[bytes]:
        for at in range(0, len(form), size):
            yield form[at : at + size]

    found = [
        (each.name, each.filename, b"".join([piece async for piece in each.content]))
        async for each in form_parts(body(), BOUNDARY.encode())
    ]
    assert found == [("purpose", None, b""), ("file", "a", content)]


async def test_unfinished_uploads_have_their_space(server: Server) -> None:
    """From their first bytes on; it is free again when their clients have left."""
    begun = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield part("file", b"x", "a")
        begun.set()
        await asyncio.Event().wait()

    async def upload(content: Any, **headers: str) -> int:
        return (await server.http.post(FILES, content=content, headers=FORM | headers)).status_code

    held = asyncio.create_task(upload(stalls(), **{"Content-Length": "8000"}))
    await begun.wait()
    other = part("file", bytes(5000), "a") + END
    while await upload(other) == 200:  # the first one has not arrived
        await server.http.delete(f"{FILES}/{(await server.http.get(FILES)).json()['data'][0]['id']}")
    held.cancel()
    while await upload(other) == 400:
        pass


async def test_keys_own_their_files(config: EngineConfig, core_mode: Callable[[str], None], tmp_path: Path) -> None:
    """By their secrets: the first key of the next start is another one. Each has half of the space."""
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    (folder := tmp_path / "files").mkdir()
    (keys := tmp_path / "keys").write_text("first\nsecond\n")
    options: Any = {"file_storage_path": str(folder), "file_storage_gb": 1e-5, "api_key_file": str(keys)}
    form = part("file", bytes(5000), "a.png") + END
    async with run_server(config, **options) as server:
        made = (await server.http.post(FILES, content=form, headers=FORM | first)).json()["id"]
        refused = await server.http.post(FILES, content=form, headers=FORM | first)
        assert (refused.status_code, "half of --file-storage-gb" in refused.text) == (400, True)
        assert (await server.http.post(FILES, content=form, headers=FORM | second)).status_code == 200
    keys.write_text("second\nfirst\n")
    async with run_server(config, **options) as server:
        for headers, status in ((first, 200), (second, 404)):
            for route in (f"{FILES}/{made}", f"{FILES}/{made}/content"):
                assert (await server.http.get(route, headers=headers)).status_code == status


async def test_a_full_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(uploads.ArrivingFile, "write", fails)
    assert (await server.http.post(FILES, content=WHOLE + END, headers=FORM)).status_code == 507


def test_the_folder_must_be_one(tmp_path: Path) -> None:
    (file := tmp_path / "program").touch(0o700)
    with pytest.raises(ConfigError, match="not a folder that this user can write to"):
        MediaOptions(file_storage_path=str(file)).check_media()


def test_files_are_their_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Uploads(str(tmp_path), 1000)
    made = files.add("one", "../../a", "vision", b"content")
    assert files.read("one", made.id, 7) == b"content"
    with pytest.raises(InvalidParameter, match="more than 6 bytes"):
        files.read("one", made.id, 6)
    for owner, name in (("two", made.id), ("", made.id), ("one", f"../{made.id}"), ("one", "*"), ("one", "")):
        assert not files.all("two")
        for call in (files.get, files.delete, lambda owner, name: files.read(owner, name, 99)):
            with pytest.raises(UploadNotFound):
                call(owner, name)


def test_totals_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what processes that died have left, whatever else is in the folder."""
    (tmp_path / "lost+found").mkdir(mode=0)
    files = Uploads(str(tmp_path), 1000)
    files.add("", "a", "vision", bytes(300))
    abandoned = files.begin("", 600)
    with pytest.raises(InvalidParameter, match="--file-storage-gb"):
        files.add("two", "b", "vision", bytes(200))
    monkeypatch.setattr(uploads, "_FULL_SECONDS", -1.0)
    with pytest.raises(InvalidParameter, match="--file-storage-gb"):
        files.add("two", "b", "vision", bytes(200))
    (left,) = tmp_path.glob("*/*.part")
    os.utime(left, (1, 1))
    files.add("two", "b", "vision", bytes(200))
    assert not left.exists()
    (tmp_path / "usage").write_bytes(b"{")
    with pytest.raises(InvalidParameter, match="half of --file-storage-gb"):
        files.add("two", "c", "vision", bytes(301))
    monkeypatch.setattr(uploads, "MAX_FILES", 1)
    with pytest.raises(InvalidParameter, match="there are 1 files of your API key"):
        files.add("two", "c", "vision", b"")
    abandoned.close()


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Uploads(str(tmp_path), 1000)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            files.add("", "a", "vision", bytes(900))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["usage"]
    made = files.add("", "a", "vision", bytes(1000))
    files.delete("", made.id)
    files.add("", "a", "vision", bytes(1000))


async def test_a_folder_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_CALL_SECONDS", 0.01)
    released = threading.Event()
    with pytest.raises(UploadsStalled, match="has not answered"):
        await Uploads(str(tmp_path)).run(released.wait)
    released.set()
