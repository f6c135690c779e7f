"""`quire run-batch`: answer a file of requests, each by the route that it names.

The routes are those of the server, asked inside the process. A run that was killed is gone on with by the same command.
The exit code is 0 once every line has its record, also where that tells of an error; 1 when the run could not go on
(the engine or the server is gone, the disk is full); 2 when it could not begin.
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

from quire.engine import log, process
from quire.engine.config.options import EngineConfig, EngineOptions, flag
from quire.engine.config.resolve import fetch_weights, plan_text, resolve
from quire.engine.protocol.errors import ConfigError
from quire.server.cli import flags, remote
from quire.server.cli.batch_input import BatchLine, LineError, count_lines, read_lines
from quire.server.cli.batch_output import BatchResults
from quire.server.cli.serve import DEMO_NAME
from quire.server.config import ModelOptions

REMOTE_CONCURRENCY = 256
"""Requests in flight to a server that is asked over HTTP."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ModelOptions):
    """What `quire run-batch` can be told, beside the engine's options."""

    input_file: str | None = flag(None, "requests, one on each line", short="-i", metavar="FILE")
    output_file: str | None = flag(
        None,
        "answers, appended as they come; what is answered there already is not asked again",
        short="-o",
        metavar="FILE",
    )
    url: str | None = flag(None, "a running server to ask, instead of starting an engine", metavar="URL")
    api_key: str | None = flag(
        None, "its key (default: the environment's QUIRE_API_KEY or OPENAI_API_KEY)", metavar="KEY"
    )
    max_concurrency: int | None = flag(
        None, f"requests in flight (default: twice --max-num-seqs, {REMOTE_CONCURRENCY} with --url)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("warning", "what is worth a log line")
    disable_tqdm: bool = flag(False, "no progress bar")


class RunFailed(RuntimeError):
    """The run cannot go on, whatever the next line is; what is answered stays."""


class BatchAnswer(NamedTuple):
    """What a route said."""

    status: int
    request_id: str
    body: bytes


class BatchBackend(Protocol):
    """Who answers."""

    def serves(self, url: str) -> bool:
        """Whether this is a route to post to."""

    async def post(self, url: str, body: bytes) -> BatchAnswer:
        """Ask; raises `RunFailed` when no other question would be answered either."""


def fill(parser: argparse.ArgumentParser) -> None:
    """Give the subcommand its flags."""
    flags.add_model(parser)
    parser.add_argument("--model", dest="model", default=argparse.SUPPRESS, help="the same, as a flag")
    flags.add_flags(parser.add_argument_group("batch"), BatchOptions)
    flags.add_flags(parser.add_argument_group("engine, as for quire serve"), EngineOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Answer the lines that have no answer yet."""
    options, engine = flags.collect(parsed, BatchOptions), flags.collect(parsed, EngineOptions)
    source, target = _check(options, parsed)
    log.setup(options.log_level, "batch")
    process.set_name("quire-batch")
    with open(source, "rb") as file, BatchResults(target) as results:
        total = count_lines(source)
        if results.last_number > total:
            raise ConfigError(f"-o {target} answers another file than -i {source}, which has {total} lines")
        if all(results.has(line) for line in read_lines(file, lambda url: True)):
            print(f"all {results.count:,} lines were answered before")
            return 0
        file.seek(0)

        def work(backend: BatchBackend) -> BatchRun:
            bar = tqdm(total=total, unit="line", disable=True if options.disable_tqdm else None)
            return BatchRun(read_lines(file, backend.serves), results, backend, bar)

        asking = _ask_server(options, options.url, work) if options.url else _ask_engine(options, engine, work)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(asking)
        except (RunFailed, OSError) as failure:
            why = str(failure)
            if isinstance(failure, OSError) and failure.filename == target:
                why = f"-o {target}: {failure.strerror}"
            print(f"quire: error: {why}\nThe same command goes on from here.", file=sys.stderr)
            return 1
    return 0


def _check(options: BatchOptions, parsed: argparse.Namespace) -> tuple[str, str]:
    """Where to read and to write; raises `ConfigError`."""
    source, target = options.input_file, options.output_file
    if source is None or target is None:
        raise ConfigError("run-batch needs a file to read and one to write: -i FILE -o FILE")
    if not os.path.isfile(source) or not os.access(source, os.R_OK):
        raise ConfigError(f"-i {source}: not a file that can be read")
    if os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError(f"-i and -o name the same file: {source}")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {options.max_concurrency}: at least 1")
    idle = [field.name for field in (*fields(EngineOptions), *fields(ModelOptions))]
    if options.url is not None and (given := next((name for name in idle if hasattr(parsed, name)), None)):
        raise ConfigError(f"--url asks a running server: --{given.replace('_', '-')} would do nothing; leave it out")
    return source, target


class BatchRun:
    """The lines on their way: each worker takes the next one, has it answered, and writes the answer down."""

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
        """Answer all; raises `RunFailed`, and `OSError` when nothing can be written any more."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            self._bar.close()
            print(self.summary(), flush=True)

    def summary(self) -> str:
        """What has been done, in a line."""
        seconds = time.monotonic() - self._begun
        now = self._results.count - self._earlier
        return (
            f"{now:,} lines answered in {seconds:,.1f} s, {self._failed:,} of them with an error; {self._earlier:,} "
            f"were answered before; {self._tokens:,} output tokens, {self._tokens / max(seconds, 1e-9):,.1f}/s"
        )

    async def _work(self) -> None:
        for line in self._lines:
            if not self._results.has(line):
                if line.problem is None:
                    await self._ask(line)
                else:
                    self._refuse(line, line.problem)
                    await asyncio.sleep(0)
            self._show(line)

    async def _ask(self, line: BatchLine) -> None:
        answer = await self._backend.post(line.url, line.body)
        try:
            content = msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            text = f"HTTP {answer.status} with a body that is not JSON: {answer.body[:200].decode(errors='replace')}"
            return self._refuse(line, LineError("invalid_response", text))
        self._tokens += _output_tokens(content)
        self._failed += answer.status != 200
        self._results.answer(line, answer.status, answer.request_id, content)

    def _refuse(self, line: BatchLine, problem: LineError) -> None:
        self._failed += 1
        self._results.refuse(line, problem)

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


# --- an engine of our own -------------------------------------------------------------------------------------


async def _ask_engine(options: BatchOptions, engine: EngineOptions, work: Callable[[BatchBackend], BatchRun]) -> None:
    config = resolve(engine)
    print(plan_text(config), flush=True)
    fetch_weights(engine, config)
    # As in `quire serve`: transformers is to leave torch out of this process.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from quire.server.app import create_app
    from quire.server.frontend.dp_coordinator import meet
    from quire.server.frontend.frontend import Frontend
    from quire.server.frontend.output_stream import EngineUnavailable
    from quire.server.frontend.renderer import ChatFormats
    from quire.server.http.state import ServedModel

    names = options.served_model_name or (DEMO_NAME if engine.model == EngineOptions.model else engine.model,)
    service = await Frontend.start(
        config,
        name=names[0],
        formats=ChatFormats.of(options),
        log_level=options.log_level,
        hosts=meet(config),
    )
    try:
        await service.ready()
        backend = InProcess(create_app(ServedModel(service, names, options.trust_request_chat_template)))
        await work(backend).run(options.max_concurrency or _enough(config))
    except EngineUnavailable as failure:
        raise RunFailed(str(failure)) from None
    finally:
        await service.close(together=True)


def _enough(config: EngineConfig) -> int:
    """Requests in flight: as many as run at once, and as many again, so that each that ends has a successor."""
    return 2 * config.scheduler.max_num_seqs


class InProcess:
    """The application itself."""

    def __init__(self, app: Any) -> None:
        from quire.server.http import in_process

        self._app = app
        self._post = in_process.post
        self.serves = lru_cache(maxsize=1024)(lambda url: in_process.serves(app, "POST", url))

    async def post(self, url: str, body: bytes) -> BatchAnswer:
        reply = await self._post(self._app, url, body)
        content = bytes(reply.body)
        if reply.status == 503:
            raise RunFailed(remote.error_text(content))
        return BatchAnswer(reply.status, _request_id(), content)


def _request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


# --- a server that runs ---------------------------------------------------------------------------------------


async def _ask_server(options: BatchOptions, url: str, work: Callable[[BatchBackend], BatchRun]) -> None:
    concurrency = options.max_concurrency or REMOTE_CONCURRENCY
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(remote.CONNECT_SECONDS, read=None, pool=None)
    where, headers = remote.base_url(url), remote.headers(options.api_key)
    async with httpx.AsyncClient(base_url=where, headers=headers, limits=limits, timeout=timeout) as client:
        await work(OverHttp(client, where)).run(concurrency)


class OverHttp:
    """A server that runs somewhere."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    def serves(self, url: str) -> bool:
        """Whatever looks like a route; the server says what it thinks of it."""
        return url.startswith("/") and url.isascii() and url.isprintable()

    async def post(self, url: str, body: bytes) -> BatchAnswer:
        while True:
            try:
                response = await self._client.post(url, content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError as error:
                raise RunFailed(remote.unreachable(self._url, error)) from None
            if response.status_code != 429:
                break
            await asyncio.sleep(_patience(response.headers.get("retry-after", "")))
        if response.status_code in (401, 403, 502, 503, 504) and not _is_its_own(response):
            raise RunFailed(remote.refusal(self._url, response.status_code, response.content))
        return BatchAnswer(
            response.status_code, response.headers.get("x-request-id") or _request_id(), response.content
        )


def _is_its_own(response: httpx.Response) -> bool:
    """Whether an error is of this request alone: the server's time limit, not a gateway's."""
    return response.status_code == 504 and b'"request_timeout"' in response.content


def _patience(retry_after: str) -> float:
    """Seconds until a busy server is asked again."""
    return min(float(retry_after), 60.0) if retry_after.isdigit() else 1.0
