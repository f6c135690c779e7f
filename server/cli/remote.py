"""A client for command-line tools, for any running server with the OpenAI API."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError

CONNECT_SECONDS = 10.0
"""Connection timeout. There is no timeout for the response."""


class RemoteError(ConfigError):
    """The server cannot be reached, or returned an error."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """The server to use, and the sampling parameters."""

    url: str = flag("http://localhost:8000", "URL of the server", metavar="URL")
    api_key: str | None = flag(
        None, "API key (default: the environment variable QUIRE_API_KEY or OPENAI_API_KEY)", metavar="KEY"
    )
    model: str | None = flag(
        None, "name of the model (default: the first model that the server lists)", short="--model-name", metavar="NAME"
    )
    max_tokens: int | None = flag(None, "maximum number of output tokens (default: the server's)")
    temperature: float | None = flag(None, "sampling temperature (default: the server's)")
    quick: str | None = flag(None, "send this one message, print the answer and exit", short="-q")


class RemoteServer:
    """A connection to a server. Raises `RemoteError` with a one-line message."""

    def __init__(self, options: RemoteOptions) -> None:
        self._url = base_url(options.url)
        self._model = options.model
        self._sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        timeout = httpx.Timeout(CONNECT_SECONDS, read=None)
        self._client = httpx.Client(base_url=self._url, headers=headers(options.api_key), timeout=timeout)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def model(self) -> str:
        """The name of the model. The first access may ask the server for it."""
        if self._model is None:
            with self._answer("GET", "/v1/models") as response:
                listed = _json(response.read())
            try:
                self._model = str(listed["data"][0]["id"])
            except (LookupError, TypeError):
                raise RemoteError(f"{self._url} lists no models; choose one with --model") from None
        return self._model

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the first choice of each chunk of a streamed response. Closing the generator ends the request."""
        sampling = {name: value for name, value in self._sampling.items() if value is not None}
        with self._answer("POST", path, {"model": self.model, "stream": True, **sampling, **body}) as response:
            for line in response.lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = _json(data)
                if not isinstance(chunk, dict) or "error" in chunk:
                    raise RemoteError(error_text(data.encode()))
                yield from (choice for choice in chunk.get("choices", ())[:1] if isinstance(choice, dict))

    def _answer(self, method: str, path: str, body: Any = None) -> _RemoteReply:
        return _RemoteReply(self._client, self._url, self._client.build_request(method, path, json=body))


class _RemoteReply:
    """A response with status 200, open inside the `with` block. All failures become `RemoteError`."""

    def __init__(self, client: httpx.Client, url: str, request: httpx.Request) -> None:
        self._client = client
        self._url = url
        self._request = request

    def __enter__(self) -> _RemoteReply:
        try:
            self._response = self._client.send(self._request, stream=True)
            if self._response.status_code != 200:
                with closing(self._response):
                    raise RemoteError(refusal(self._url, self._response.status_code, self._response.read()))
        except httpx.HTTPError as error:
            raise RemoteError(unreachable(self._url, error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._response.close()
        if isinstance(error, httpx.HTTPError):
            raise RemoteError(f"the response of {self._url} was interrupted: {error}") from None

    def read(self) -> bytes:
        return self._response.read()

    def lines(self) -> Iterator[str]:
        return self._response.iter_lines()


def base_url(url: str, flag: str = "--url") -> str:
    """Return a server's URL without the `/v1` suffix of OpenAI clients; raises `RemoteError` for an invalid URL."""
    try:
        parts = httpx.URL(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.host) and 0 < (parts.port or 80) < 2**16
        why = ""
    except (httpx.InvalidURL, ValueError) as error:
        is_url, why = False, f" ({error})"
    if not is_url or parts.query or parts.fragment:
        shown = url if url.isprintable() else repr(url)
        raise RemoteError(f"{flag} {shown}: expected a URL such as http://localhost:8000{why}")
    return url.rstrip("/").removesuffix("/v1")


def headers(api_key: str | None, variables: Sequence[str] = ("QUIRE_API_KEY", "OPENAI_API_KEY")) -> dict[str, str]:
    """Return the authorization header. Without `api_key`, the key comes from the first of these environment variables
    that has one.
    """
    named = [key for name in variables for key in os.environ.get(name, "").replace(",", " ").split()]
    key = next(iter(named), "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):
        raise RemoteError("the API key contains characters that are not allowed in an HTTP header")
    return {"Authorization": f"Bearer {key}"} if key else {}


def unreachable(url: str, error: httpx.HTTPError) -> str:
    """Describe a connection failure, in one line."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {url} ({error}); start one with `quire serve`, or choose another with --url"
    return f"{url} did not send a valid response: {error or type(error).__name__}"


def refusal(url: str, status: int, body: bytes, variable: str = "QUIRE_API_KEY") -> str:
    """Describe an error response, in one line. `variable` is the environment variable that the key may come from."""
    if status == 401:
        return f"{url} rejected the API key; set it with --api-key or the environment variable {variable}"
    return f"{url} returned HTTP {status}: {error_text(body)}"


def error_text(body: bytes) -> str:
    """Return the message of an error object, or else the start of the body."""
    match _json(body):
        case {"error": {"message": str(message)}} | {"error": str(message)} | {"message": str(message)}:
            text = message
        case _:
            text = body.decode(errors="replace")
    return " ".join(text.split())[:500] or "no details"


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
