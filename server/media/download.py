"""Downloads files for the fetcher's process: only from addresses that the rules allow, and within limits.

A name is resolved once for each request, all of its addresses are checked, and the connection goes to one of these, so
that a second answer of the name server changes nothing. Every redirect begins anew. Nothing of a response is trusted
but its bytes, and nothing of a library's error reaches the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin

import httpcore
import httpx
import msgspec

from quire.engine.protocol.errors import InvalidParameter
from quire.server.config.media_defaults import FETCH_SECONDS, MAX_BYTES
from quire.server.media.addresses import MAX_URL_CHARACTERS, Address, AddressRules, FetchTarget, parse_url

MAX_REDIRECTS = 3
_MAX_AT_ONCE = 64
_MAX_ADDRESSES = 3
"""Addresses of a name that are tried."""
_RESOLVERS = 32
"""Threads that resolve names, which cannot be stopped: more slow names than this wait."""
_TOTAL_FILES = 4
"""Files of the maximum size that unfinished downloads may have in memory together."""
_REDIRECTS = (301, 302, 303, 307, 308)
_FILE_URL = re.compile(r"file://(?:localhost)?(/[^?#]*)", re.IGNORECASE)
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=\"?([0-9]{1,9})\b")
_NOT_STORED = re.compile(r"(?:^|[\s,])(?:no-store|no-cache)\b")

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]
"""From a name and a port to addresses; raises `OSError`."""


class Fetched(msgspec.Struct, array_like=True, frozen=True):
    """A file."""

    data: bytes
    max_age: float | None
    """Seconds for which the server allows to use it again; None: it says nothing."""


class FetchSettings(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a fetcher may do."""

    is_allowed: bool = True
    """Whether it may use the network (--no-media-fetch)."""
    domains: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    local_path: str = ""
    """The folder of the files that file: URLs may name; empty: none."""
    timeout: float = FETCH_SECONDS
    """Seconds for a whole download, and for the wait before it."""
    max_bytes: int = MAX_BYTES

    def rules(self) -> AddressRules:
        """Raises `ConfigError`."""
        return AddressRules.parse(self.domains, self.networks)


class Downloader:
    """Fetches URLs, some at a time."""

    def __init__(self, settings: FetchSettings, resolve: Resolve | None = None) -> None:
        """Raises `ConfigError` for rules that are invalid."""
        self._settings = settings
        self._rules = settings.rules()
        self._resolve = resolve or self._ask_name_servers
        self._threads = ThreadPoolExecutor(_RESOLVERS, "resolver")
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._memory = _Memory(_TOTAL_FILES * settings.max_bytes)
        self._ssl = httpx.create_ssl_context()
        self._ssl.set_alpn_protocols(["http/1.1"])

    async def fetch(self, url: str, max_bytes: int) -> Fetched:
        """Raises `InvalidParameter`, whose text is for the client."""
        check(self._settings, url)
        seconds = self._settings.timeout
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
        except TimeoutError:
            raise InvalidParameter("too many URLs are being fetched at the moment; try again") from None
        try:
            async with asyncio.timeout(seconds):
                if url[:5].lower() == "file:":
                    reading = asyncio.to_thread(read_file, url, self._settings.local_path, max_bytes)
                    return Fetched(await reading, 0.0)
                return await self._follow(url, max_bytes)
        except TimeoutError:
            raise InvalidParameter(
                f"the URL could not be fetched within {seconds:g} seconds (--media-fetch-timeout)"
            ) from None
        finally:
            self._turns.release()

    async def _follow(self, url: str, max_bytes: int) -> Fetched:
        target = parse_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(target, max_bytes)
            if isinstance(found, Fetched):
                return found
            if target.scheme == "https" and found.scheme == "http":
                raise InvalidParameter(f"{target.host} redirects from https to http, which is not supported")
            target = found
        raise InvalidParameter(f"the URL has more than {MAX_REDIRECTS} redirects")

    async def _get(self, target: FetchTarget, max_bytes: int) -> Fetched | FetchTarget:
        """The file, or where a redirect leads."""
        addresses = await self._addresses(target)
        connection = httpcore.AsyncHTTPConnection(
            httpcore.Origin(target.scheme.encode(), target.host.encode(), target.port),
            ssl_context=self._ssl,
            network_backend=_Pinned(addresses),
        )
        headers: dict[bytes | str, bytes | str] = {
            "Host": target.authority,
            "User-Agent": "Quire",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        request = httpcore.Request("GET", url, headers=headers)
        try:
            with _our_errors(target):
                response = await connection.handle_async_request(request)
            fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS:
                return _redirected(target, fields.get("location", ""))
            if response.status != 200:
                raise InvalidParameter(f"{target.host} answered with status {response.status}")
            if fields.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise InvalidParameter(f"{target.host} sent a compressed answer, which was not asked for")
            if (length := fields.get("content-length", "")).isdigit() and int(length) > max_bytes:
                raise _too_large(max_bytes)
            with _our_errors(target):
                return Fetched(await self._body(response, max_bytes), _max_age(fields))
        finally:
            with contextlib.suppress(Exception):
                await connection.aclose()

    async def _body(self, response: httpcore.Response, max_bytes: int) -> bytes:
        body = bytearray()
        with self._memory.user() as user:
            async for part in response.aiter_stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                await self._memory.take(user, len(part))
                body += part
            return bytes(body)

    async def _addresses(self, target: FetchTarget) -> Sequence[Address]:
        """The addresses to connect to, all of which are allowed."""
        self._rules.check_host(target)
        if (address := target.address) is not None:
            addresses: Sequence[Address] = [address]
        else:
            try:
                addresses = await self._resolve(target.host, target.port)
            except OSError:
                addresses = []
        # Also if only some are: such an answer is an attempt. Clients do not learn which names a network knows.
        if not addresses or not all(self._rules.allows(target, address) for address in addresses):
            raise InvalidParameter(
                f"{target.host} may not be fetched from, or is not known: it must have public addresses, unless "
                "--allowed-media-domains or --allowed-media-networks allows it"
            )
        return addresses[:_MAX_ADDRESSES]

    async def _ask_name_servers(self, host: str, port: int) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(ip_address(each[4][0]) for each in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check(settings: FetchSettings, url: str) -> None:
    """Raises `InvalidParameter` if no URL of this kind is fetched."""
    if len(url) > MAX_URL_CHARACTERS:
        raise InvalidParameter(f"the URL has {len(url)} characters, and at most {MAX_URL_CHARACTERS} are allowed")
    is_file = url[:5].lower() == "file:"
    if is_file and not settings.local_path:
        raise InvalidParameter("file: URLs are not allowed (--allowed-local-media-path)")
    if not is_file and not settings.is_allowed:
        raise InvalidParameter("URLs are not fetched (--no-media-fetch): send the file as a data: URL")


def read_file(url: str, folder: str, max_bytes: int) -> bytes:
    """A regular file in `folder`, to which symbolic links of the path may lead. Raises `InvalidParameter`."""
    if (matched := _FILE_URL.fullmatch(url)) is None:
        raise InvalidParameter("the file: URL is invalid: it must be like file:///folder/name")
    refused = InvalidParameter(
        "the file: URL does not name a readable file in the folder of --allowed-local-media-path"
    )
    path = os.fsdecode(unquote_to_bytes(matched[1]))
    if "\0" in path:
        raise refused
    root = os.path.realpath(folder)
    try:
        parts = PurePath(os.path.realpath(path)).relative_to(root).parts
        # Each part is opened as what it is now and no link, whoever changes the folder meanwhile.
        opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            outer = opened
            try:
                opened = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=outer)
            finally:
                os.close(outer)
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode):
                raise refused
            with open(opened, "rb", closefd=False) as file:
                if status.st_size > max_bytes or len(data := file.read(max_bytes + 1)) > max_bytes:
                    raise _too_large(max_bytes)
            return data
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise refused from None


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to one of some addresses, whatever name it is asked for."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *others, last = map(str, self._addresses)
        for address in others:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(address, port, timeout=1.0)
        return await self._backend.connect_tcp(last, port)


class _Memory:
    """The memory of unfinished downloads. One that is beyond the limit waits, except for the oldest: it always goes on,
    so that all of them end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: dict[object, int] = {}
        """Bytes of each download, the oldest one first."""
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def user(self) -> Iterator[object]:
        user = object()
        self._taken[user] = 0
        try:
            yield user
        finally:
            del self._taken[user]
            self._changed.set()

    async def take(self, user: object, size: int) -> None:
        while sum(self._taken.values()) + size > self._limit and user is not next(iter(self._taken)):
            self._changed.clear()
            await self._changed.wait()
        self._taken[user] += size


@contextlib.contextmanager
def _our_errors(target: FetchTarget) -> Iterator[None]:
    """Replaces errors of the network and its libraries, whose texts may tell clients about it."""
    try:
        yield
    except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        logger.info("%s: %s", target.host, error)
        is_certificate = isinstance(error.__cause__ or error.__context__, ssl.SSLError)
        reason = "has no valid certificate, or failed to use TLS" if is_certificate else "cannot be reached"
        raise InvalidParameter(f"{target.host} {reason}") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, ssl.SSLError) as error:
        logger.info("%s: %s", target.host, error)
        raise InvalidParameter(f"{target.host} did not send a whole HTTP response") from None


def _redirected(target: FetchTarget, location: str) -> FetchTarget:
    """Raises `InvalidParameter`."""
    if not location or len(location) > MAX_URL_CHARACTERS or any(ord(each) <= 32 for each in location):
        raise InvalidParameter(f"{target.host} redirects to an invalid URL")
    try:
        return parse_url(urljoin(target.url, location))
    except ValueError as error:
        reason = f": {error}" if isinstance(error, InvalidParameter) else ""
        raise InvalidParameter(f"{target.host} redirects to an invalid URL{reason}") from None


def _max_age(fields: dict[str, str]) -> float | None:
    control = fields.get("cache-control", "").lower()
    if _NOT_STORED.search(control):
        return 0.0
    if (matched := _MAX_AGE.search(control)) is None:
        return None
    age = fields.get("age", "")
    return float(max(int(matched[1]) - (int(age) if age.isdigit() and len(age) < 10 else 0), 0))


def _too_large(max_bytes: int) -> InvalidParameter:
    return InvalidParameter(f"the file has more than {max_bytes} bytes (--max-media-bytes)")
