"""`quire run-batch`: process a file of requests, each with the route that it names.

It calls the server's routes inside the process. The same command resumes an interrupted run. The exit
code is 0 once every line has its record, even if that is an error; 1 if the run cannot continue (the engine or server
is gone, the disk is full); 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import httpx
import msgspec
import uvloop
from tqdm import tqdm

from quire.engine.cluster import ray_cluster
from quire.engine.config.options import EngineOptions, flag
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights
from quire.engine.process import current_process, log, native_output
from quire.engine.protocol.errors import ConfigError
from quire.server.cli import remote
from quire.server.cli.batch_input import BatchLine, LineError, count_lines, read_lines
from quire.server.cli.batch_output import BatchResults
from quire.server.cli.serve import DEMO_NAME, first_adapters
from quire.server.config import flags
from quire.server.config.server_options import AdapterOptions, ChatOptions, MediaOptions

REMOTE_CONCURRENCY = 256
"""Requests in flight to a server over HTTP."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(MediaOptions, AdapterOptions, ChatOptions):
    """Options of `quire run-batch`, in addition to the engine's."""

    input_file: str | None = flag(
        None, "input file, with one request per line", short="-i", metavar="FILE", is_common=True
    )
    output_file: str | None = flag(
        None,
        "output file; responses are appended as they arrive, and requests that have one are skipped",
        short="-o",
        metavar="FILE",
        is_common=True,
    )
    url: str | None = flag(
        None, "URL of a running server to use instead of starting an engine", metavar="URL", is_common=True
    )
    api_key: str | None = flag(
        None, "API key (default: the environment variable QUIRE_API_KEY or OPENAI_API_KEY)", metavar="KEY"
    )
    max_concurrency: int | None = flag(
        None,
        f"maximum number of requests in flight (default: twice --max-num-seqs, {REMOTE_CONCURRENCY} with --url)",
        is_common=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("warning", "lowest level of log messages to show")
    disable_tqdm: bool = flag(False, "do not show a progress bar")


class RunFailed(RuntimeError):
    """The run cannot continue with any line. Responses written so far are kept."""


class BatchReply(NamedTuple):
    """The response of a route."""

    status: int
    request_id: str
    body: bytes


class BatchBackend(Protocol):
    """Answers the requests of a batch."""

    def serves(self, url: str) -> bool:
        """Return whether this is a POST route."""

    async def post(self, url: str, body: bytes) -> BatchReply:
        """Send a request; raises `RunFailed` if every other request would fail as well."""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_model(parser)
    parser.add_argument("--model", dest="model", default=argparse.SUPPRESS, help="same as MODEL")
    flags.add_flags(parser, BatchOptions)
    flags.add_flags(parser, EngineOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Process the lines that have no response yet."""
    options, engine = flags.collect(parsed, BatchOptions), flags.collect(parsed, EngineOptions)
    source, target = _check(options, parsed)
    log.configure(None, None)
    if log.is_json():
        native_output.wrap()
    log.setup(options.log_level, "batch")
    current_process.set_name("quire-batch")
    with open(source, "rb") as file, BatchResults(target) as results:
        total = count_lines(source)
        if results.last_number > total:
            raise ConfigError(f"-o {target} was written for another input file: -i {source} has only {total} lines")
        if all(results.has(line) for line in read_lines(file, lambda url: True)):
            log.print_text(f"all {results.count:,} lines have responses already")
            return 0
        file.seek(0)

        def work(backend: BatchBackend) -> BatchRun:
            bar = tqdm(total=total, unit="line", disable=options.disable_tqdm or log.is_json() or None)
            return BatchRun(read_lines(file, backend.serves), results, backend, bar)

        asking = _run_remote(options, options.url, work) if options.url else _run_in_process(options, engine, work)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(asking)
        except (RunFailed, OSError) as failure:
            why = str(failure)
            if isinstance(failure, OSError) and failure.filename == target:
                why = f"-o {target}: {failure.strerror}"
            log.print_error(f"{why}\nRun the same command again to resume.")
            return 1
    return 0


def _check(options: BatchOptions, parsed: argparse.Namespace) -> tuple[str, str]:
    """Return the input and output paths; raises `ConfigError` for invalid options."""
    options.check()
    options.check_media()
    source, target = options.input_file, options.output_file
    if source is None or target is None:
        raise ConfigError("run-batch requires an input file and an output file: -i FILE -o FILE")
    if not os.path.isfile(source) or not os.access(source, os.R_OK):
        raise ConfigError(f"-i {source}: not a readable file")
    if os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError(f"-i and -o name the same file: {source}")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {options.max_concurrency}: must be at least 1")
    groups = (EngineOptions, ChatOptions, AdapterOptions, MediaOptions)
    idle = [field.name for group in groups for field in fields(group)]
    if options.url is not None and (given := next((name for name in idle if hasattr(parsed, name)), None)):
        raise ConfigError(f"--{given.replace('_', '-')} has no effect on a running server (--url); omit it")
    return source, target


class BatchRun:
    """The lines of a batch in progress: each worker takes the next line, sends it and writes the response."""

    def __init__(
        self, lines: Iterator[BatchLine], results: BatchResults, backend: BatchBackend, bar: tqdm[Any]
    ) -> None:
        self._lines = lines
        self._results = results
        self._backend = backend
        self._bar = bar
        self._earlier = results.count
        self._failed = 0
        self._tokens = 0
        self._begun = time.monotonic()

    async def run(self, concurrency: int) -> None:
        """Process all lines; raises `RunFailed`, and `OSError` if the output cannot be written."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            self._bar.close()
            log.print_text(self.summary())

    def summary(self) -> str:
        """A one-line summary of the run."""
        seconds = time.monotonic() - self._begun
        now = self._results.count - self._earlier
        return (
            f"{now:,} lines processed in {seconds:,.1f} s, {self._failed:,} of them with an error; {self._earlier:,} "
            f"had responses already; {self._tokens:,} output tokens, {self._tokens / max(seconds, 1e-9):,.1f}/s"
        )

    async def _work(self) -> None:
        for line in self._lines:
            if not self._results.has(line):
                if line.problem is None:
                    await self._post(line)
                else:
                    self._write_error(line, line.problem)
                    await asyncio.sleep(0)
            self._show(line)

    async def _post(self, line: BatchLine) -> None:
        answer = await self._backend.post(line.url, line.body)
        try:
            content = msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            text = f"HTTP {answer.status} with a body that is not JSON: {answer.body[:200].decode(errors='replace')}"
            return self._write_error(line, LineError("invalid_response", text))
        self._tokens += _output_tokens(content)
        self._failed += answer.status != 200
        self._results.answer(line, answer.status, answer.request_id, content)

    def _write_error(self, line: BatchLine, problem: LineError) -> None:
        self._failed += 1
        self._results.write_error(line, problem)

    def _show(self, line: BatchLine) -> None:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens / seconds:,.0f} tokens/s", refresh=False)
        self._bar.update()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _output_tokens(content: Any) -> int:
    match content:
        case {"usage": {"completion_tokens": int(count)} | {"output_tokens": int(count)}}:
            return count
        case _:
            return 0


# --- with an engine in this process ---------------------------------------------------------------------------


async def _run_in_process(
    options: BatchOptions, engine: EngineOptions, work: Callable[[BatchBackend], BatchRun]
) -> None:
    from quire.server.media.service import media_settings

    config = ray_cluster.resolve(engine)
    log.print_text(plan_text(config))
    names = options.served_model_name or (DEMO_NAME if engine.model == EngineOptions.model else engine.model,)
    adapters = first_adapters(options, engine, names, is_enabled=config.lora is not None)
    media = media_settings(config, options)
    fetch_weights(engine, config)
    # As in `quire serve`: keep transformers from importing torch in this process.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from quire.server.app import create_app
    from quire.server.client.dp_coordinator import connect_hosts
    from quire.server.client.output_stream import EngineUnavailable
    from quire.server.http.state import ServedModel
    from quire.server.serving.adapters import AdapterSettings
    from quire.server.serving.frontend import Frontend
    from quire.server.text.chat_formats import ChatFormats

    frontend = Frontend.start(
        config,
        name=names[0],
        formats=ChatFormats.of(options),
        log_level=options.log_level,
        hosts=connect_hosts(config),
        media=media,
        adapters=AdapterSettings.of(
            options, names, download_dir=engine.download_dir, chat_template=options.chat_template
        ),
    )
    for adapter in adapters:
        frontend.adapters.set(adapter.name, adapter)
    try:
        async with frontend:
            await frontend.adapters.check()
            await frontend.ready()
            backend = InProcess(create_app(ServedModel(frontend, names)))
            # By default twice the batch size, so that each request that finishes has a successor.
            await work(backend).run(options.max_concurrency or 2 * config.scheduler.max_num_seqs)
    except EngineUnavailable as failure:
        raise RunFailed(str(failure)) from None


class InProcess:
    """Calls the application in this process."""

    def __init__(self, app: Any) -> None:
        from quire.server.http import in_process

        self._app = app
        self._post = in_process.post
        self.serves = lru_cache(maxsize=1024)(lambda url: in_process.serves(app, "POST", url))

    async def post(self, url: str, body: bytes) -> BatchReply:
        reply = await self._post(self._app, url, body)
        content = bytes(reply.body)
        if reply.status == 503:
            raise RunFailed(remote.error_text(content))
        return BatchReply(reply.status, _request_id(), content)


def _request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


# --- with a running server ------------------------------------------------------------------------------------


async def _run_remote(options: BatchOptions, url: str, work: Callable[[BatchBackend], BatchRun]) -> None:
    concurrency = options.max_concurrency or REMOTE_CONCURRENCY
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(remote.CONNECT_SECONDS, read=None, pool=None)
    where, headers = remote.base_url(url), remote.headers(options.api_key)
    async with httpx.AsyncClient(base_url=where, headers=headers, limits=limits, timeout=timeout) as client:
        await work(OverHttp(client, where)).run(concurrency)


class OverHttp:
    """Sends requests to a running server."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    def serves(self, url: str) -> bool:
        """Accept anything that looks like a route; the server checks it."""
        return url.startswith("/") and url.isascii() and url.isprintable()

    async def post(self, url: str, body: bytes) -> BatchReply:
        while True:
            try:
                response = await self._client.post(url, content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError as error:
                raise RunFailed(remote.unreachable(self._url, error)) from None
            if response.status_code != 429:
                break
            retry_after = response.headers.get("retry-after", "")
            await asyncio.sleep(min(float(retry_after), 60.0) if retry_after.isdigit() else 1.0)
        # The server's own time limit concerns this request only, unlike a gateway's.
        is_request_timeout = response.status_code == 504 and b'"request_timeout"' in response.content
        if response.status_code in (401, 403, 502, 503, 504) and not is_request_timeout:
            raise RunFailed(remote.refusal(self._url, response.status_code, response.content))
        return BatchReply(response.status_code, response.headers.get("x-request-id") or _request_id(), response.content)
