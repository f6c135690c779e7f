"""The last warnings of a process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.engine.process import log

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
