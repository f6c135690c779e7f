"""`quire profile`: a trace of a running server."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass

import httpx

from quire.engine.config.options import flag
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.remote import CONNECT_SECONDS, RemoteError, base_url, headers, refusal, unreachable
from quire.server.client.profiler import MAX_PROFILE_SECONDS
from quire.server.config import flags

_VARIABLE = "QUIRE_ADMIN_KEY"


@dataclass(frozen=True, kw_only=True)
class ProfileCommandOptions:
    """Options of `quire profile`."""

    seconds: float = flag(5.0, "duration of the recording; at most 60", metavar="SECONDS")
    output: str = flag("trace.json.gz", "file for the trace, for ui.perfetto.dev", short="-o", metavar="FILE")
    with_stack: bool = flag(False, "record Python calls, too, which makes steps much slower")
    record_shapes: bool = flag(False, "record the shapes of operations' inputs, too")
    profile_memory: bool = flag(False, "record the memory that operations allocate and free, too")
    url: str = flag("http://localhost:8000", "URL of the server", metavar="URL")
    api_key: str | None = flag(None, "admin key (default: the environment variable QUIRE_ADMIN_KEY)", metavar="KEY")


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand."""
    flags.add_flags(parser, ProfileCommandOptions)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Record, and write the trace; Ctrl-C ends the recording early. Returns 0."""
    options = flags.collect(parsed, ProfileCommandOptions)
    url = base_url(options.url)
    if not 0 < options.seconds <= MAX_PROFILE_SECONDS:
        raise ConfigError(f"--seconds {options.seconds:g}: must be greater than 0, and at most {MAX_PROFILE_SECONDS:g}")
    _check_output(options.output)
    body = {
        "seconds": options.seconds,
        "with_stack": options.with_stack,
        "record_shapes": options.record_shapes,
        "profile_memory": options.profile_memory,
    }
    timeout = httpx.Timeout(CONNECT_SECONDS, read=None)
    try:
        with httpx.Client(base_url=url, headers=headers(options.api_key, (_VARIABLE,)), timeout=timeout) as client:
            _raise_for(url, client.post("/start_profile", json=body))
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(options.seconds)
            print("waiting for the traces", file=sys.stderr)
            with client.stream("POST", "/stop_profile") as response:
                if response.status_code != 200:
                    response.read()
                    _raise_for(url, response)
                if response.headers.get("content-type") == "application/json":
                    print(f"the server has written {_path(response)}")
                    return 0
                size = _write(response, options.output)
    except httpx.HTTPError as error:
        raise RemoteError(unreachable(url, error)) from None
    print(f"{options.output}: {size:,} bytes; open it at https://ui.perfetto.dev")
    return 0


def _check_output(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise ConfigError(f"--output {path}: not a file that can be written")


def _raise_for(url: str, response: httpx.Response) -> None:
    if response.status_code != 200:
        raise RemoteError(refusal(url, response.status_code, response.content, _VARIABLE))


def _path(response: httpx.Response) -> str:
    response.read()
    return str(response.json()["path"])


def _write(response: httpx.Response, path: str) -> int:
    """Write the body; an incomplete file is removed. Returns its number of bytes."""
    partial = f"{path}.part"
    try:
        with open(partial, "wb") as file:
            file.writelines(response.iter_bytes())
            size = file.tell()
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return size
