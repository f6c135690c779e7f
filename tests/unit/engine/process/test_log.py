"""The last warnings of a process, and the formats of its log."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quire.engine.process import log
from quire.engine.protocol.errors import ConfigError

logger = logging.Logger("test")


@pytest.fixture
def recent() -> Iterator[log.RecentWarnings]:
    handler = log.RecentWarnings()
    handler.source = "rank 1"
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_warnings_are_kept_with_their_exceptions_and_information_is_not(recent: log.RecentWarnings) -> None:
    logger.info("nothing")
    logger.warning("rank %d is slow", 3)
    try:
        raise ValueError("no such file")
    except ValueError:
        logger.exception("cannot read")
    found = [(each.level, each.text, each.source) for each in recent.take()]
    assert found == [
        ("warning", "rank 3 is slow", "rank 1"),
        ("error", "cannot read: ValueError('no such file')", "rank 1"),
    ]
    assert recent.take() == []


def test_long_messages_are_cut(recent: log.RecentWarnings) -> None:
    logger.warning("x" * 5000)
    (record,) = recent.take()
    assert record.text == "x" * 1000


def test_a_message_with_wrong_arguments_harms_nobody(
    recent: log.RecentWarnings, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.warning("rank %d", "one")
    assert recent.take() == []
    assert "--- Logging error ---" in capsys.readouterr().err


# --- formats --------------------------------------------------------------------------------------------------


@pytest.fixture
def quire() -> Iterator[logging.Logger]:
    """The logger of all processes, which is put back afterwards, with everything else that `setup` sets."""
    found, root, name = logging.getLogger("quire"), logging.root, multiprocessing.current_process().name
    before = (found.handlers[:], found.propagate, found.level, root.handlers[:], root.level)
    access_level = log.ACCESS.level
    hooks = sys.excepthook, threading.excepthook
    yield found
    for logger in (found, log.ACCESS, logging.getLogger("another.library")):
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.close()
        logger.handlers[:], logger.propagate = [], True
    found.handlers[:], found.propagate, found.level, root.handlers[:], root.level = before
    sys.excepthook, threading.excepthook = hooks
    multiprocessing.current_process().name = name
    logging.captureWarnings(False)
    log.ACCESS.setLevel(access_level)
    found.setLevel(found.level)  # forgets which levels are shown


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "RAY_COLOR_PREFIX", "RAY_DISABLE_WORKER_LOG_PREFIX")
    for name in (log.FORMAT, log.CONFIG, *bars):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


def access(**fields: object) -> None:
    log.ACCESS.info("status=%d", fields["status"], extra={"fields": fields})


def test_lines_have_date_and_zone(quire: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("warning", "api 1")
    quire.info("nothing")
    quire.warning("slow")
    access(status=200)  # whatever the level
    log.print_error("it ends")
    log.print_text("a plan\nof two lines")
    out, err = capsys.readouterr()
    first, second, last = err.splitlines()
    moment, _, rest = first.partition(" ")
    assert abs(datetime.fromisoformat(moment) - datetime.now(UTC)) < timedelta(days=1)
    assert (rest, second.partition(" ")[2]) == ("WARNING [api 1] slow", "INFO [api 1] status=200")
    assert (last, log.error_of(last)) == ("quire: error: it ends", "it ends")
    assert out == "a plan\nof two lines\n"


def test_json_is_one_object_a_line_of_everything(quire: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", None)
    log.setup("info", "rank 3")
    quire.warning("two\nlines of %s \ud83d", "x")
    try:
        raise ValueError("no such file")
    except ValueError:
        quire.exception("cannot read")
    access(status=429, reason="queue_full")
    logging.getLogger("another.library").warning("beware")
    with warnings.catch_warnings(action="default"):
        warnings.warn("old", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("x"), None)
    log.print_error("it ends")
    log.set_level("error")
    log.print_text("a plan\nof two lines")
    out, err = capsys.readouterr()
    assert out == ""
    found = [json.loads(line) for line in err.splitlines()]
    assert all(datetime.fromisoformat(each["time"]).tzinfo for each in found)
    assert [(each["level"], each.get("message", "")[:13]) for each in found] == [
        ("warning", "two\nlines of "),
        ("error", "cannot read"),
        ("info", ""),
        ("warning", "beware"),
        ("warning", found[4]["message"][:13]),
        ("critical", "uncaught exce"),
        ("critical", "uncaught exce"),
        ("error", "it ends"),
        ("info", "a plan\nof two"),
    ]
    assert found[0]["process"] == "rank 3"
    assert "ValueError: no such file" in found[1]["exception"]
    assert "ZeroDivisionError" in found[5]["exception"]
    assert (found[2]["status"], found[2]["reason"], found[2]["logger"]) == (429, "queue_full", "quire.access")
    assert log.error_of(err.splitlines()[-2]) == "it ends"
    assert os.environ["TQDM_DISABLE"] == os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] == "1"


def test_the_format_is_that_of_the_environment_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.FORMAT, "json")
    log.configure(None, None)
    assert log.is_json()
    log.configure("text", None)
    assert not log.is_json()
    monkeypatch.setenv(log.FORMAT, "xml")
    with pytest.raises(ConfigError, match="QUIRE_LOG_FORMAT=xml: must be text or json"):
        log.configure(None, None)


@pytest.mark.parametrize("name", ["quire", "vllm"])
def test_a_configuration_decides_on_everything(quire: logging.Logger, tmp_path: Path, name: str) -> None:
    """Also one that was written for vLLM; the warnings for the page are kept in any case."""
    file, output = tmp_path / "logging.yaml", tmp_path / "quire.log"
    handler = {"class": "logging.FileHandler", "filename": str(output), "formatter": "own"}
    formatters = {"own": {"format": "%(processName)s|%(levelname)s|%(message)s"}}
    config: dict[str, Any] = {"version": 1, "formatters": formatters, "handlers": {"file": handler}}
    config["loggers"] = {name: {"handlers": ["file"], "level": "ERROR", "propagate": False}}
    file.write_text(json.dumps(config))
    log.configure(None, str(file))
    log.RECENT.records.clear()
    log.setup("info", "core 2")
    logging.getLogger("quire.engine.core").warning("slow")
    logging.getLogger("quire.engine.core").error("broken")
    access(status=200)  # whatever the level
    log.set_level("warning")
    logging.getLogger("quire.engine.core").warning("slow again")
    assert output.read_text() == "core 2|ERROR|broken\ncore 2|INFO|status=200\ncore 2|WARNING|slow again\n"
    assert [record.text for record in log.RECENT.take()] == ["broken", "slow again"]


def test_a_configuration_may_set_the_level_of_the_access_log(quire: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "logging.json"
    file.write_text('{"version": 1, "loggers": {"quire.access": {"level": "ERROR"}}}')
    log.configure(None, str(file))
    log.setup("info", "api")
    assert not log.ACCESS.isEnabledFor(logging.INFO)


def test_a_configuration_that_changes(quire: logging.Logger, tmp_path: Path) -> None:
    """If the new one is wrong, for all processes or for one of them, the old one stays."""
    file = tmp_path / "logging.json"

    def write(name: str) -> None:
        handler = {"class": "logging.FileHandler", "filename": str(tmp_path / name)}
        loggers = {"quire": {"handlers": ["file"], "propagate": False}}
        file.write_text(json.dumps({"version": 1, "handlers": {"file": handler}, "loggers": loggers}))

    def lines(name: str) -> list[str]:
        return (tmp_path / name).read_text().splitlines()

    write("one")
    log.configure(None, str(file))
    log.setup("info", "serve")
    quire.info("first")
    write("no/folder")
    first = log.read_again(str(file), "info")
    (_, error) = lines("one")
    assert error.startswith(f"--log-config-file {file}: ")
    assert error.endswith("; the previous configuration stays")
    write("two")
    second = log.read_again(str(file), "warning")
    quire.info("not shown")
    quire.error("second")
    assert lines("two") == ["second"]
    (tmp_path / "one").unlink()  # a file that was moved away is opened again
    log.reload(first, "info")
    quire.info("third")
    log.reload(second.replace("two", "no/folder"), "info")
    assert lines("one")[0] == "third"
    assert "the previous one stays" in lines("one")[1]
    assert os.environ[log.CONFIG] == first
    log.reload("", "error")
    assert quire.level == logging.INFO


def test_without_the_folder_of_its_files_the_log_is_on_standard_error(
    quire: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "logging.json", tmp_path / "logs"
    handlers = {"file": {"class": "logging.FileHandler", "filename": str(folder / "quire.log")}}
    one, several = {"handlers": ["file"], "propagate": False}, ("quire", "quire.access", "another.library")
    config = {"version": 1, "handlers": handlers, "loggers": dict.fromkeys(several, one)}
    file.write_text(json.dumps(config))
    folder.mkdir()
    log.configure(None, str(file))
    log.setup("info", "core")
    quire.info("first")
    assert (folder / "quire.log").read_text() == "first\n"
    shutil.rmtree(folder)
    present = log.read_again(str(file), "info")
    assert present == os.environ[log.CONFIG]
    log.reload(present, "info")
    access(status=200)
    logging.getLogger("another.library").warning("beware")
    applied, read, applied_again, reloaded, line, other = capsys.readouterr().err.splitlines()
    for error in (applied, applied_again):
        assert "ERROR [core] --log-config-file cannot be applied; logging to standard error: [Errno 2]" in error
    assert f"--log-config-file {file}: " in read
    assert "the previous one stays: [Errno 2]" in reloaded
    assert line.endswith("INFO [core] status=200")
    assert other == "beware"
    folder.mkdir()
    log.reload(present, "info")
    quire.info("second")
    assert (folder / "quire.log").read_text() == "second\n"


def test_a_configuration_that_is_wrong_is_an_error_that_names_it(quire: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "logging.json"
    for text, problem in (
        ("{", "cannot read the file"),
        ("[1]", "expected an object"),
        ('{"version": 2}', "version"),
        ('{"version": 1, "handlers": {"a": {"class": "no.such.Class"}}}', "handler 'a'.*no"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"--log-config-file {file}: .*{problem}"):
            log.configure(None, str(file))
    with pytest.raises(ConfigError, match="No such file"):
        log.configure(None, str(tmp_path / "none"))
