"""JSON records are passed on, whatever other processes write into their lines, and text becomes records."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.engine.process.native_output import Wrapper


class Output:
    """The lines that a wrapper writes."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.wrapper = Wrapper(self.lines.append)

    @property
    def messages(self) -> list[str]:
        """The texts of native code. Raises if a line is not a JSON object."""
        found: list[dict[str, Any]] = [json.loads(line) for line in self.lines]
        return [each["message"] for each in found if each.get("logger") == "stderr"]


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.mark.parametrize("seed", range(5))
def test_records_survive_among_the_pieces_of_another_process(output: Output, seed: int) -> None:
    rng = random.Random(seed)
    records = [b'{"time":"%d","message":"{\\"time\\":1}, caf\xc3\xa9"}' % number for number in range(200)]
    pieces = [b"".join(rng.choices([b"loss ", b"{", b"0.5", b"\n", "é".encode()], k=2)) for _ in range(400)]
    order = [*[True] * len(records), *[False] * len(pieces)]
    rng.shuffle(order)
    left, others = iter(records), iter(pieces)
    stream = b"".join(next(left) + b"\n" if is_record else next(others) for is_record in order)
    at = 0
    while at < len(stream):
        size = rng.choice((1, 7, 100, 3000))
        output.wrapper.add(stream[at : at + size], now=0.0)
        at += size
    output.wrapper.flush()
    assert [line for line in output.lines if b"stderr" not in line] == records
    assert output.messages == [b"".join(pieces).decode().strip("\n")]


def test_text_without_a_newline_waits_only_until_it_is_quiet(output: Output) -> None:
    assert output.wrapper.seconds_left(5.0) is None
    output.wrapper.add(b"continue? ", 5.0)
    assert output.wrapper.seconds_left(5.02) == pytest.approx(0.03)
    assert output.wrapper.seconds_left(6.0) == 0.0
    output.wrapper.flush()
    assert output.wrapper.seconds_left(6.0) is None
    output.wrapper.add(b'{"time":1}\n', 6.0)
    assert output.messages == ["continue? "]
    assert output.lines[1:] == [b'{"time":1}']


def test_text_that_does_not_end_is_written_after_a_second(output: Output) -> None:
    for step in range(100):
        output.wrapper.add(b".", step / 100)
    left = output.wrapper.seconds_left(0.99)
    assert left == pytest.approx(0.01)


def test_an_unfinished_record_is_not_cut_by_a_short_pause(output: Output) -> None:
    output.wrapper.add(b'loss {"time":1,"prom', 1.0)
    assert output.wrapper.seconds_left(1.0) == 1.0
    output.wrapper.add(b'pt":"' + b"x" * 200_000 + b'"}\n', 1.9)
    assert [len(line) for line in output.lines] == [200_022]
    output.wrapper.flush()
    assert output.messages == ["loss "]


def test_a_line_without_an_end_is_written_in_parts(output: Output) -> None:
    for _ in range(40):
        output.wrapper.add(b"x" * 10_000, 0.0)
        assert len(output.wrapper._line) <= 1 << 16
    output.wrapper.flush()
    assert len(output.messages) > 4
    assert "".join(output.messages) == "x" * 400_000


@pytest.mark.parametrize(
    "text",
    [
        "{'not': json}",
        "{1,2,3} tensor",
        "{} of them",
        '{"loss": NaN}',
        '{"time":1',
        '{"time":' * 2000,
        '{"time":' + "[" * 20_000,
        '["time"]',
    ],
    ids=lambda text: text[:20],
)
def test_what_only_looks_like_a_record_is_text(output: Output, text: str) -> None:
    output.wrapper.add(text.encode() + b"\n", 0.0)
    output.wrapper.flush()
    assert output.messages == [text]


def test_a_line_that_is_an_object_of_another_library_is_passed_on(output: Output) -> None:
    output.wrapper.add(b'{"level":"warn"}\r\ntext\n', 0.0)
    assert output.lines == [b'{"level":"warn"}']


def test_text_after_a_record_keeps_its_lines(output: Output) -> None:
    """The newline of a record may be another write."""
    output.wrapper.add(b'one {"time":1}two {"time":2}\nthree\n{"time":3}{"time":4} four\nfive\n', 0.0)
    assert output.lines == [b'{"time":%d}' % number for number in range(1, 5)]
    output.wrapper.flush()
    assert output.messages == ["one two three\n four\nfive"]
