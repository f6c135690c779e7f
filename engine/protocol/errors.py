"""The two errors a person can cause. Their text is shown alone, without a traceback."""


class ConfigError(ValueError):
    """A model or a flag that cannot be served as asked; the text carries the numbers and a remedy."""


class InvalidParameter(ValueError):
    """A request parameter that is wrong or not implemented.

    `param` is the name the client used; the server puts it into the OpenAI error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
