"""The output of a batch, in OpenAI's format, in a file from which an interrupted run can be resumed.

https://platform.openai.com/docs/api-reference/batch/request-output. The `id` of a record, `batch_req_N`, contains the
number of the input line. So each line gets one response, even if `custom_id`s repeat. A hash of the `custom_id` is
compared as well, to detect the output of another input file. Each line takes 8 bytes of memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
from array import array
from types import TracebackType
from typing import Any

import msgspec

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.batch_input import BatchLine, LineError

_BEGINNING = b'{"id":"batch_req_'
"""The start of every record."""
_ID = re.compile(r"batch_req_([1-9][0-9]{0,11})")
_encode = msgspec.json.Encoder().encode


class _Record(msgspec.Struct):
    id: str
    custom_id: str | None


class BatchResults:
    """The locked output file. An incomplete last line is removed. Raises `ConfigError` for other files."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "a+b")  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise ConfigError(f"-o {path}: {error.strerror}") from None
        self._answered = array("Q")
        """By line number - 1: a hash of the custom_id, or 0 if there is no response yet."""
        self.count = 0
        """Number of lines that have a response."""
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BatchResults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # write errors have been reported already
            self._file.close()

    @property
    def last_number(self) -> int:
        """The number of the last line that has a response."""
        return len(self._answered)

    def has(self, line: BatchLine) -> bool:
        """Return whether this line has a response; raises `ConfigError` if that belongs to another `custom_id`."""
        answered = self._answered[line.number - 1] if line.number <= len(self._answered) else 0
        if answered and answered != _hash(line.custom_id):
            raise ConfigError(
                f"-o {self._path} was written for another input file: its line {line.number} does not have the "
                f"custom_id {line.custom_id!r}; choose a new file"
            )
        return bool(answered)

    def answer(self, line: BatchLine, status: int, request_id: str, body: Any) -> None:
        """Append the response to a line, and flush it. Raises `OSError` with the file's name."""
        self._append(line, {"status_code": status, "request_id": request_id, "body": body}, None)

    def write_error(self, line: BatchLine, problem: LineError) -> None:
        """Append the error of an invalid line."""
        self._append(line, None, {"code": problem.code, "message": problem.message})

    def _append(self, line: BatchLine, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        record = {"id": f"batch_req_{line.number}", "custom_id": line.custom_id, "response": response, "error": error}
        try:
            self._file.write(_encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None
        self.count += 1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"-o {self._path}: another run is writing to this file") from None

    def _foreign(self, line: int) -> ConfigError:
        return ConfigError(f"-o {self._path}: line {line} was not written by `quire run-batch`; choose another file")

    def _read(self) -> None:
        decode = msgspec.json.Decoder(_Record).decode
        end = 0
        self._file.seek(0)
        for at, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                if not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
                    raise self._foreign(at)
                break
            end += len(raw)
            try:
                record = decode(raw)
                number = _ID.fullmatch(record.id)
            except (msgspec.DecodeError, UnicodeDecodeError):
                number = None
            if number is None:
                raise self._foreign(at)
            self._note(int(number[1]), record.custom_id)
        self._file.truncate(end)

    def _note(self, number: int, custom_id: str | None) -> None:
        missing = number - len(self._answered)
        if missing > 0:
            self._answered.frombytes(bytes(8 * missing))
        self.count += not self._answered[number - 1]
        self._answered[number - 1] = _hash(custom_id)


def _hash(custom_id: str | None) -> int:
    """A 64-bit hash, never 0."""
    text = b"" if custom_id is None else b"=" + custom_id.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
