"""The two errors that a user can cause, whose text is shown without a traceback; and those of undecodable bytes."""

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message of the expected type, have a text that is not UTF-8, or are nested
too deeply."""


class ConfigError(ValueError):
    """A model or a flag that is not supported or does not fit; the text states the numbers and a remedy."""


class InvalidParameter(ValueError):
    """A request parameter that is invalid or not implemented.

    `param` is its name as the caller used it, or None; the server puts it into the OpenAI error object.
    """

    code: str | None = None
    """The code of the error object."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one line, without its name."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())
