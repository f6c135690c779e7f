"""The logs of all processes, on standard error: text, JSON, or what `--log-config-file` says.

`quire serve` puts format and configuration into the environment (`configure`), from which every process that it starts
reads them, on other hosts, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.stats import LogRecord

FORMAT = "QUIRE_LOG_FORMAT"
CONFIG = "QUIRE_LOG_CONFIG"
"""The content of `--log-config-file`, as JSON."""
ACCESS = logging.getLogger("quire.access")
"""The access log. `fields` of its records are the parts of the line."""

_MAX_CHARACTERS = 1000
"""Maximum length of a message that is kept, and of the text of its exception."""
_ERROR = "quire: error: "

_logger = logging.getLogger("quire")


class RecentWarnings(logging.Handler):
    """Keeps the last warnings and errors of this process, and of processes that send theirs to it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.source = ""
        """The name of this process."""
        self.records: deque[LogRecord] = deque(maxlen=50)
        """Threads append to it: copy it before a loop."""
        self.keep: Callable[[LogRecord], None] = self.records.append

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:_MAX_CHARACTERS]
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {record.exc_info[1]!r}"[:_MAX_CHARACTERS]
            self.keep(LogRecord(record.created, record.levelname.lower(), text, self.source))
        except Exception:
            self.handleError(record)

    def take(self) -> list[LogRecord]:
        """Return the records and forget them."""
        return [self.records.popleft() for _ in range(len(self.records))]


RECENT = RecentWarnings()


class _TextFormatter(logging.Formatter):
    """Time with date and zone, level, process, message."""

    def __init__(self, process_name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{process_name}] %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record.created)


class _JsonFormatter(logging.Formatter):
    """One object a line. `fields` of a record are members of its object."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        found |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return _encode(found)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _encode(found: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(found).decode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(found)


def is_json() -> bool:
    """Whether every line is a JSON object."""
    return os.environ.get(FORMAT) == "json"


def configure(style: Literal["text", "json"] | None, config_file: str | None) -> None:
    """Set the format of the logs of this process and of those that it starts; None leaves it to the environment.

    Raises `ConfigError` for an invalid or unreadable configuration.
    """
    if style is not None:
        os.environ[FORMAT] = style
    if (given := os.environ.get(FORMAT, "text")) not in ("text", "json"):
        raise ConfigError(f"environment variable {FORMAT}={given}: must be text or json")
    if is_json():
        os.environ["TQDM_DISABLE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        os.environ["RAY_COLOR_PREFIX"], os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] = "0", "1"
    if config_file is not None:
        os.environ[CONFIG] = json.dumps(_read_config(config_file))


def _read_config(path: str) -> dict[str, Any]:
    from logging.config import dictConfig  # slow to import

    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML, except for tabs
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--log-config-file {path}: cannot read the file: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--log-config-file {path}: expected an object for Python's logging.config.dictConfig")
    loggers = config.get("loggers")
    if isinstance(loggers, dict) and "vllm" in loggers:
        loggers.setdefault("quire", loggers.pop("vllm"))
    config.setdefault("disable_existing_loggers", False)
    try:
        dictConfig(json.loads(json.dumps(config)))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise ConfigError(f"--log-config-file {path}: {error}{cause}") from None
    return config


def read_again(path: str, level: str) -> str:
    """Read `--log-config-file` again and log as it says. If it is invalid, the previous configuration stays, and an
    error is logged. Returns the present configuration (`CONFIG`).
    """
    problem = ""
    try:
        configure(None, path)
    except ConfigError as error:
        problem = str(error)
    setup(level, RECENT.source)
    if problem:
        _logger.error("%s; the previous configuration stays", problem)
    return os.environ[CONFIG]


def reload(config: str, level: str) -> None:
    """Log as this configuration says (`CONFIG`; empty: there is none), in this process and in those that it starts. If
    this process cannot apply it, the previous configuration stays, and an error is logged.
    """
    if not config:
        return
    try:
        _setup(level, config)
    except Exception as error:  # such as a file that this process cannot write to
        setup(level, RECENT.source)
        _logger.error(
            "the configuration of the logs cannot be used; the previous one stays: %s", error.__cause__ or error
        )
    else:
        os.environ[CONFIG] = config


def setup(level: str, process_name: str) -> None:
    """Log the `quire` loggers to stderr, unless `--log-config-file` says otherwise. `process_name` is shown in each
    line: api, core, rank 3.

    A configuration that cannot be applied any more, such as one with a file in a folder that was removed, is an error
    in the log on stderr.
    """
    RECENT.source = multiprocessing.current_process().name = process_name
    try:
        _setup(level, os.environ.get(CONFIG, ""))
    except Exception as error:
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger) and logger.handlers:  # closed ones, which may raise
                logger.handlers.clear()
                logger.propagate = True
        _setup(level, "")
        _logger.error("--log-config-file cannot be applied; logging to standard error: %s", error.__cause__ or error)


def _setup(level: str, config: str) -> None:
    """Log as `config` says, or to stderr if it is empty; raises anything if it cannot be applied."""
    name = RECENT.source
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(name) if is_json() else _TextFormatter(name))
    _logger.handlers[:] = [handler, RECENT]
    _logger.propagate = False
    set_level(level)
    if is_json():  # of other libraries, too
        logging.root.handlers[:] = [handler]
        logging.captureWarnings(True)
        sys.excepthook = lambda *error: _logger.critical("uncaught exception", exc_info=error)
        threading.excepthook = lambda raised: _logger.critical(
            "uncaught exception in a thread",
            exc_info=(raised.exc_type, raised.exc_value or raised.exc_type(), raised.exc_traceback),
        )
    if config:
        from logging.config import dictConfig  # slow to import

        _logger.handlers[:], _logger.propagate = [], True
        ACCESS.setLevel(logging.NOTSET)
        dictConfig(json.loads(config))
        _logger.addHandler(RECENT)
    if ACCESS.level == logging.NOTSET:  # or else it is the configuration's
        ACCESS.setLevel(logging.INFO)  # whatever the level of the others


def set_level(level: str) -> None:
    """Show messages of at least this level from now on."""
    _logger.setLevel(level.upper())


def print_error(text: str) -> None:
    """Say on standard error why the program ends."""
    fields = {"time": _time(datetime.now().timestamp()), "level": "error", "message": text}
    print(_encode(fields) if is_json() else _ERROR + text, file=sys.stderr)


def error_of(line: str) -> str:
    """Return the text that `print_error` has printed as this line, or the line if it is another one."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            return str(json.loads(line).get("message", line))
    return line.removeprefix(_ERROR)


def print_text(text: str) -> None:
    """Print a text of several lines on standard output, or log it, whatever the level, if every line must be a JSON
    object.
    """
    if is_json():
        _logger.handle(_logger.makeRecord(_logger.name, logging.INFO, __file__, 0, "%s", (text,), None))
    else:
        print(text, flush=True)


def printable(text: str) -> str:
    """Return a text from outside with its control characters escaped, so that it stays a part of one log line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
