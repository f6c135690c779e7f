"""The answers of a batch, in OpenAI's format, in a file that a run which was killed can go on with.

https://platform.openai.com/docs/api-reference/batch/request-output. The `id` of a record, `batch_req_N`, has the number
of the line that it answers. So each line is answered once, whatever its `custom_id` is; that is compared as well, by a
hash, so that answers to another file are noticed. Each line takes 8 bytes of memory.
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
"""Of every record."""
_ID = re.compile(r"batch_req_([1-9][0-9]{0,11})")
_encode = msgspec.json.Encoder().encode


class _Record(msgspec.Struct):
    id: str
    custom_id: str | None


class BatchResults:
    """The output file, locked. What is half a line at its end is cut off; raises `ConfigError` for a file of others."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "a+b")  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise ConfigError(f"-o {path}: {error.strerror}") from None
        self._answered = array("Q")
        """By line number - 1: a hash of the custom_id, 0 where there is no answer."""
        self.count = 0
        """Lines that have their answer."""
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
        with contextlib.suppress(OSError):  # what could not be written has been told
            self._file.close()

    @property
    def last_number(self) -> int:
        """Of the lines that are answered, the last one's number."""
        return len(self._answered)

    def has(self, line: BatchLine) -> bool:
        """Whether this line is answered; raises `ConfigError` when the answer is to another one."""
        answered = self._answered[line.number - 1] if line.number <= len(self._answered) else 0
        if answered and answered != _hash(line.custom_id):
            raise ConfigError(
                f"-o {self._path} answers another file than this: line {line.number} there had not the custom_id "
                f"{line.custom_id!r}; name a new file"
            )
        return bool(answered)

    def answer(self, line: BatchLine, status: int, request_id: str, body: Any) -> None:
        """Append the answer to a line; it is in the file when this returns. Raises `OSError` with the file's name."""
        self._append(line, {"status_code": status, "request_id": request_id, "body": body}, None)

    def refuse(self, line: BatchLine, problem: LineError) -> None:
        """Append the error of a line that could not be asked."""
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
            raise ConfigError(f"-o {self._path}: another run writes to this file") from None

    def _foreign(self, line: int) -> ConfigError:
        return ConfigError(f"-o {self._path}: line {line} is not of `quire run-batch`; name another file")

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
    """64 bits, never 0."""
    text = b"" if custom_id is None else b"=" + custom_id.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
