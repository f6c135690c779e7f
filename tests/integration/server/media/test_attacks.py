"""What attackers try with URLs, each against servers on this host, and what each gets: docs/design/media-security.md.

The notations of addresses are in tests/unit/server/media/test_addresses.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import trustme

from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.media.addresses import Address
from quire.server.media.download import Downloader, Fetched, FetchSettings
from quire.server.media.fetcher import Fetcher, FetcherDied

OPEN = FetchSettings(networks=("127.0.0.0/8",), timeout=60.0, max_bytes=10_000)
IMPATIENT = FetchSettings(networks=("127.0.0.0/8",), timeout=0.3, max_bytes=10_000)
PUBLIC = FetchSettings(timeout=60.0, max_bytes=10_000)
OK = b"HTTP/1.1 200 OK\r\n"
FILE = OK + b"Content-Length: 4\r\n\r\nfile"
DOT = 0.05
"""Seconds between the bytes of a slow server."""


class Server:
    """Answers every request with the same bytes, and counts requests."""

    def __init__(self, answer: bytes | Callable[[bytes], bytes], slowly: bool = False, ends: bool = True) -> None:
        self.answer, self.slowly, self.ends = answer, slowly, ends
        self.requests: list[bytes] = []
        self.handlers: dict[asyncio.StreamWriter, asyncio.Task[object] | None] = {}
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers[writer] = asyncio.current_task()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            answer = self.answer if isinstance(self.answer, bytes) else self.answer(self.requests[-1])
            for part in [answer[i : i + 1] for i in range(len(answer))] if self.slowly else [answer]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(DOT if self.slowly else 0)
            if not self.ends:
                await reader.read()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self.handlers:
                writer.transport.abort()
            await asyncio.gather(*filter(None, self.handlers.values()))


def names(*answers: Sequence[str]) -> tuple[list[str], Callable[[str, int], object]]:
    """A name server that gives one answer after the other, and the names that it was asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[Address]:
        asked.append(host)
        return [ip_address(each) for each in answers[min(len(asked), len(answers)) - 1]]

    return asked, resolve


async def got(settings: FetchSettings, url: str, resolve: object = None) -> Fetched | str:
    """The file, or the error that a client is shown."""
    downloader = Downloader(settings, resolve)  # type: ignore[arg-type]
    try:
        return await downloader.fetch(url, settings.max_bytes)
    except InvalidParameter as error:
        return str(error)
    finally:
        downloader.close()


class Answer(NamedTuple):
    content: bytes
    message: str
    settings: FetchSettings = OPEN
    slowly: bool = False
    ends: bool = True


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


ANSWERS = {
    "redirect to metadata": Answer(redirect("http://169.254.169.254/latest/"), "may not be fetched from"),
    "redirect to IPv6": Answer(redirect("http://[fd00:ec2::254]/"), "may not be fetched from"),
    "redirect to a decimal address": Answer(redirect("http://2852039166/"), "four decimal numbers"),
    "redirect to file:": Answer(redirect("file:///etc/passwd"), "not file:"),
    "redirect to gopher:": Answer(redirect("gopher://127.0.0.1:6379/_x"), "not gopher:"),
    "redirect to data:": Answer(redirect("data:,x"), "redirects to an invalid URL"),
    "redirect to a user name": Answer(redirect("http://a:b@127.0.0.1/"), "user name"),
    "redirect with a line break": Answer(redirect("http://127.0.0.1/\x01"), "invalid URL"),
    "redirect to brackets": Answer(redirect("http://[::1/"), "invalid URL"),
    "redirect to mail": Answer(redirect("http://127.0.0.1:25/"), "port 25"),
    "redirect to nowhere": Answer(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "invalid URL"),
    "long redirect": Answer(redirect("/" + "a" * 9000), "invalid URL"),
    "redirects in a circle": Answer(redirect("/", 307), "more than 3 redirects"),
    "permanent circle": Answer(redirect("?", 308), "more than 3 redirects"),
    "nothing for ever": Answer(b"", "within 0.3 seconds", IMPATIENT, ends=False),
    "slow headers": Answer(OK * 50, "within 0.3 seconds", IMPATIENT, slowly=True),
    "slow body": Answer(OK + b"Content-Length: 9999\r\n\r\n" + b"a" * 50, "within 0.3", IMPATIENT, ends=False),
    "informational for ever": Answer(b"HTTP/1.1 100 Continue\r\n\r\n" * 9, "within 0.3", IMPATIENT, ends=False),
    "announced length": Answer(OK + b"Content-Length: 999999999999\r\n\r\n", "more than 10000 bytes", ends=False),
    "body without a length": Answer(OK + b"\r\n" + b"a" * 10_001, "more than 10000 bytes"),
    "chunks": Answer(
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b"a" * 4096 + b"\r\nffffffff\r\n" + b"a" * 9999,
        "more than 10000 bytes",
        ends=False,
    ),
    "chunk of negative size": Answer(OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "whole HTTP response"),
    "huge header": Answer(OK + b"A: " + b"a" * 200_000 + b"\r\n\r\n", "whole HTTP response"),
    "many headers": Answer(OK + b"A: b\r\n" * 40_000 + b"\r\n", "whole HTTP response"),
    "bomb in gzip": Answer(OK + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b", "compressed answer"),
    "two encodings": Answer(OK + b"Content-Encoding: br, gzip\r\n\r\nx", "compressed answer"),
    "shorter than announced": Answer(OK + b"Content-Length: 100\r\n\r\nx", "whole HTTP response"),
    "two lengths": Answer(OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "whole HTTP response"),
    "length in words": Answer(OK + b"Content-Length: many\r\n\r\nx", "whole HTTP response"),
    "other protocol": Answer(b"SSH-2.0-OpenSSH_9.2\r\n", "whole HTTP response"),
    "other protocol's upgrade": Answer(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", "whole HTTP response"),
    "closes": Answer(b"", "whole HTTP response"),
    "asks for a password": Answer(b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\n\r\n", "status 401"),
    "part": Answer(b"HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\nx", "status 206"),
    "secret in an error": Answer(b"HTTP/1.1 500 secret\r\nContent-Length: 6\r\n\r\nsecret", "status 500"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_what_a_server_answers(answer: Answer) -> None:
    async with Server(answer.content, answer.slowly, answer.ends).running() as server:
        message = await got(answer.settings, f"http://127.0.0.1:{server.port}/")
    assert isinstance(message, str)
    assert answer.message in message
    assert "secret" not in message


async def test_a_name_is_resolved_once_for_a_connection() -> None:
    """DNS rebinding: the second answer would be another address."""
    asked, resolve = names(["127.0.0.1"], ["127.0.0.2"])
    async with Server(FILE).running() as server:
        fetched = await got(OPEN, f"http://images.example:{server.port}/a?b", resolve)
        assert isinstance(fetched, Fetched)
        assert fetched.data == b"file"
        head = server.requests[0].decode().lower().split("\r\n")
    assert asked == ["images.example"]
    assert head[0] == "get /a?b http/1.1"
    assert f"host: images.example:{server.port}" in head
    assert not any(each.startswith(("cookie:", "authorization:", "proxy-", "referer:")) for each in head)


async def test_a_redirect_to_the_same_name_is_checked_again() -> None:
    """The name's address changes between both."""
    asked, resolve = names(["127.0.0.1"], ["10.0.0.1"])
    async with Server(redirect("/again")).running() as server:
        message = await got(OPEN, f"http://images.example:{server.port}/", resolve)
    assert "may not be fetched from" in str(message)
    assert "10.0.0.1" not in str(message)
    assert asked == ["images.example"] * 2


@pytest.mark.parametrize(
    "answer",
    [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"], ["0.0.0.0"], ["::1"], []],
    ids=str,
)
async def test_a_name_with_any_address_that_is_not_public_is_refused(answer: list[str]) -> None:
    _, resolve = names(answer)
    async with Server(FILE).running() as server:
        message = await got(PUBLIC, f"http://images.example:{server.port}/", resolve)
        assert "may not be fetched from, or is not known" in str(message)
        assert not server.requests


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "127.0.0.1", "[::ffff:127.0.0.1]", "１２７.0.0.1", "0.0.0.0"]
)
async def test_this_host_is_not_contacted_by_default(host: str) -> None:
    async with Server(FILE).running() as server:
        assert "may not be fetched from" in str(await got(PUBLIC, f"http://{host}:{server.port}/"))
        assert not server.requests


async def test_a_redirect_leaves_the_allowed_domains() -> None:
    _, resolve = names(["127.0.0.1"])
    settings = FetchSettings(domains=("images.example",), timeout=60.0, max_bytes=10_000)
    async with Server(redirect("http://other.example/")).running() as server:
        message = await got(settings, f"http://images.example:{server.port}/", resolve)
    assert message == "other.example is not one of the hosts that --allowed-media-domains allows"


async def test_certificates_are_checked_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("images.example").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    _, resolve = names(["127.0.0.1"])

    def answer(request: bytes) -> bytes:
        return redirect("http://images.example/") if b"GET /down" in request else FILE

    async with Server(answer).running(context) as server:
        url = f"https://images.example:{server.port}/"
        assert await got(OPEN, url, resolve) == "images.example has no valid certificate, or failed to use TLS"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert isinstance(await got(OPEN, url, resolve), Fetched)
        assert "no valid certificate" in str(await got(OPEN, url.replace("images.", "other."), resolve))
        assert "from https to http" in str(await got(OPEN, url + "down", resolve))


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(FILE).running() as server, Server(FILE).running() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert isinstance(await got(OPEN, f"http://127.0.0.1:{server.port}/"), Fetched)
        assert not proxy.requests


@pytest.mark.parametrize(
    ("headers", "max_age"),
    [
        (b"", None),
        (b"Cache-Control: public, max-age=60\r\nAge: 20\r\n", 40.0),
        (b"Cache-Control: max-age=60, no-store\r\n", 0.0),
        (b"Cache-Control: s-maxage=60\r\n", None),
        (b"Cache-Control: max-age=99999999999999999999\r\n", None),
        (b"Cache-Control: max-age=60\r\nAge: " + b"9" * 5000 + b"\r\n", 60.0),
    ],
)
async def test_how_long_a_file_may_be_used(headers: bytes, max_age: float | None) -> None:
    async with Server(OK + headers + b"Content-Length: 1\r\n\r\nx").running() as server:
        assert await got(OPEN, f"http://127.0.0.1:{server.port}/") == Fetched(b"x", max_age)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (allowed := tmp_path / "allowed").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "secret").write_bytes(b"secret")
    (allowed / "in side").write_bytes(b"inside")
    (allowed / "large").write_bytes(bytes(10_001))
    (allowed / "link").symlink_to("in side")
    (allowed / "out").symlink_to(tmp_path / "secret")
    (allowed / "folder").symlink_to(tmp_path)
    (allowed / "loop").symlink_to("loop")
    (allowed / "zero").symlink_to("/dev/zero")
    os.mkfifo(allowed / "pipe")
    return allowed


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "%2e%2e/secret",
        "..%2fsecret",
        "../allowed-too/secret",
        "out",
        "folder/secret",
        "loop",
        "zero",
        "pipe",
        "",
        ".",
        "missing",
        "in side%00.png",
        "link/x",
        "a" * 300,
        "../" * 50 + "etc/passwd",
    ],
)
async def test_files_outside_the_allowed_folder_are_not_read(folder: Path, path: str) -> None:
    message = await got(FetchSettings(local_path=str(folder)), f"file://{folder}/{path}")
    assert message == "the file: URL does not name a readable file in the folder of --allowed-local-media-path"


async def test_files_in_the_allowed_folder_are_read(folder: Path) -> None:
    settings = FetchSettings(local_path=str(folder), max_bytes=10_000, is_allowed=False)
    for path in ("in%20side", "link", "folder/allowed/link"):
        assert await got(settings, f"file://localhost{folder}/{path}") == Fetched(b"inside", 0.0)
    assert "more than 10000 bytes" in str(await got(settings, f"file://{folder}/large"))
    assert "must be like file:" in str(await got(settings, f"file://host{folder}/link"))
    assert "--no-media-fetch" in str(await got(settings, "http://127.0.0.1/"))
    assert "--allowed-local-media-path" in str(await got(PUBLIC, f"file://{folder}/link"))


async def test_many_downloads_stay_within_the_memory() -> None:
    """More files than fit, from servers that send most of them and then wait: the oldest ones always go on."""
    most = OK + b"Content-Length: 10000\r\n\r\n" + b"a" * 9_000

    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(most)
        await asyncio.sleep(DOT)
        writer.write(b"a" * 1_000)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(finish, "127.0.0.1", 0)
    downloader = Downloader(OPEN)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    found = await asyncio.gather(*(downloader.fetch(url, 10_000) for _ in range(20)))
    server.close()
    downloader.close()
    assert [len(each.data) for each in found] == [10_000] * 20


async def test_the_process_fetches_and_ends_with_its_parent() -> None:
    fetcher = Fetcher(OPEN)
    before = set(psutil.Process().children())
    async with Server(FILE).running() as server, Server(b"", ends=False).running() as silent:
        url = f"http://127.0.0.1:{server.port}/"
        found = await asyncio.gather(*(fetcher.fetch(url) for _ in range(10)))
        assert found == [Fetched(b"file", None)] * 10
        with pytest.raises(InvalidParameter, match="more than 3 bytes"):
            await fetcher.fetch(url, 3)
        (process,) = set(psutil.Process().children()) - before
        waiting = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{silent.port}/"))
        while not silent.requests:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not process.net_connections() or await fetcher.fetch(url)
        process.send_signal(signal.SIGKILL)
        assert await fetcher.fetch(url) == Fetched(b"file", None)
        (process,) = set(psutil.Process().children()) - before
    await fetcher.close()
    assert not process.is_running()


async def test_a_url_that_kills_the_process_twice_fails() -> None:
    fetcher = Fetcher(OPEN)
    before = set(psutil.Process().children())

    def kill(request: bytes) -> bytes:
        for process in set(psutil.Process().children()) - before:
            process.kill()
        return FILE

    async with Server(kill).running() as server:
        with pytest.raises(FetcherDied):
            await fetcher.fetch(f"http://127.0.0.1:{server.port}/")
    await fetcher.close()


def test_invalid_rules_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--allowed-media-networks"):
        Fetcher(FetchSettings(networks=("10.0.0.1/8",)))


def test_a_closed_port_is_told_from_nothing_else() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        message = asyncio.run(got(OPEN, f"http://127.0.0.1:{closed.getsockname()[1]}/"))
    assert message == "127.0.0.1 cannot be reached"
