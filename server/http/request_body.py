"""The bodies of requests, and how they become input for the engine: here, or in another process if they are large."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar, Self

from fastapi.exceptions import RequestValidationError
from pydantic import PrivateAttr, ValidationError

from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.client.fair_share import enter_user
from quire.server.client.output_stream import EngineUnavailable
from quire.server.http.request_model import RequestModel, check_length
from quire.server.media.data_urls import CUT_FILES
from quire.server.serving.frontend import Frontend
from quire.server.text.adapter import OWN_TEMPLATE
from quire.server.text.conversation import CHAT_NAMES, ParamNames
from quire.server.text.input_processor import InputProcessor
from quire.server.text.inputs import Processed, Task, refusal, tasks_of

_SHORT = 1024
"""Characters of a string that a processed body keeps."""

Admit = Callable[[Collection[str]], InputProcessor]
"""`Frontend.admit` for the request's task: admits a request that ignores these fields."""


class RequestBody(RequestModel):
    """A body. Another process processes it if it is large (`quire.server.http.large_bodies`)."""

    needs: ClassVar[Task | None] = None
    """The task that the model must support; None: the request is not for the engine."""
    max_items: ClassVar[Mapping[str, int]] = {}
    """The maximum length of lists, which is checked before anything else in a large body."""
    has_files: ClassVar[bool] = False
    """Whether its files, as base64, can be cut out before it is parsed (see `CutFiles`): it uses them only as items."""
    _processed: Processed | None = PrivateAttr(None)
    _user_name: object = PrivateAttr(None)
    """`user_name` of a processed body, if it is small."""

    @property
    def user_name(self) -> object:
        """The user that the request names; for fair sharing."""
        return getattr(self, "user", None)

    def task_of_model(self) -> Task | None:
        """`needs`, which may depend on the body."""
        return self.needs

    async def process(self, frontend: Frontend) -> Any:
        """Return the input processor's result for the route: the engine's input, if the request is for the engine."""
        enter_user(self._user_name if self._processed is not None else self.user_name)
        admit = partial(frontend.admit, self.task_of_model())
        if self._processed is None:
            value = await self.process_here(admit)
            if (files := CUT_FILES.get()) is not None:
                files.check()
            return value
        if self._processed.own_template != OWN_TEMPLATE.get():
            raise EngineUnavailable("the adapter's chat template has just changed; try again")
        return await admit(self._processed.ignored).resolve(self._processed)

    @abstractmethod
    async def process_here(self, admit: Admit) -> Any:
        """`process` in this process. Calls `admit` when the request is known to be supported, before it is rendered."""

    @classmethod
    async def process_large(cls, value: Any, processor: InputProcessor, stored: bytes | None) -> Any:
        """Validate and process parsed JSON in another process; returns the body for the process that asks.

        `stored`: see `ProcessLarge`.
        """
        return await cls.validated(value).process_reduced(processor)

    async def process_reduced(self, processor: InputProcessor) -> Self:
        """Process this body; returns it reduced."""

        def admit(ignored: Collection[str]) -> InputProcessor:
            if (task := self.task_of_model()) is not None and task not in tasks_of(processor.pooling):
                raise refusal(processor.pooling, task)
            processor.ignore(ignored)
            return processor

        value = await self.process_here(admit)
        processed = Processed(
            value=value,
            unresolved=processor.take_unresolved(),
            ignored=processor.ignored,
            leases=processor.take_leases(),
            own_template=OWN_TEMPLATE.get(),
        )
        return self.reduced(processed)

    @classmethod
    def validated(cls, value: Any) -> Self:
        """Validate parsed JSON; raises `RequestValidationError`, and `InvalidParameter` for a list that is too long."""
        for name, most in cls.max_items.items():
            if isinstance(value, dict) and isinstance(given := value.get(name), list):
                check_length(given, most, name)
        try:
            return cls.model_validate(value, from_attributes=True)  # as FastAPI does
        except ValidationError as error:
            problems = error.errors(include_url=False)
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None

    def reduced(self, processed: Processed | None) -> Self:
        """Return a copy with `processed`, and with only the small fields."""
        kept = {name: value for name in type(self).model_fields if _is_small(value := getattr(self, name))}
        body = self.model_construct(**kept)
        body._processed = processed
        body._user_name = user if _is_small(user := self.user_name) else None
        return body


def sampling_params(
    body: RequestBody, defaults: Mapping[str, Any], names: ParamNames = CHAT_NAMES, **given: Any
) -> SamplingParams:
    """Return the sampling parameters of a body, which are its fields with these `names`, over the model's `defaults`.

    `given` overrides fields. None is the same as no field. Raises `InvalidParameter`.
    """
    own = {field: getattr(names, field, field) for field in SamplingParams.__struct_fields__}
    fields = {field: getattr(body, name) for field, name in own.items() if name in type(body).model_fields}
    params = SamplingParams(max_tokens=None)
    for field, value in {**defaults, **{n: v for n, v in (fields | given).items() if v is not None}}.items():
        setattr(params, field, value)
    params.validate(own)
    return params


def _is_small(value: Any) -> bool:
    if isinstance(value, RequestModel):
        return all(_is_small(each) for _, each in value)
    return len(value) <= _SHORT if isinstance(value, str) else isinstance(value, bool | int | float | None)
