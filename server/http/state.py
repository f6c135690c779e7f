"""The shared state of all endpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from fastapi import Depends, Request

from quire.server.frontend.frontend import Frontend
from quire.server.http.errors import ModelNotFound
from quire.server.http.large_bodies import BodyRoute, LargeBodies
from quire.server.http.response_store import ResponseStore


@dataclass
class ServedModel:
    """The served model. `model_names` are all its names, the main one first."""

    frontend: Frontend
    model_names: tuple[str, ...]
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: int = field(default_factory=lambda: int(time.time()))
    has_api_keys: bool = False
    """Whether requests need an API key."""
    drain_seconds: float = 0.0
    """Default time for requests to end on a replica that is removed."""
    routes: Sequence[BodyRoute] = ()
    """The routes with bodies; set by the application."""

    @cached_property
    def bodies(self) -> LargeBodies:
        """The processes for large bodies, which start with the first request."""
        return LargeBodies(self.frontend.config.model, self.frontend.formats, self.routes, self.responses)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the response; raises `ModelNotFound` for another model."""
        if name is not None and name not in self.model_names:
            raise ModelNotFound(
                f"the model {name!r} does not exist; available: {' or '.join(self.model_names)}", "model"
            )
        return name or self.model_names[0]


async def _of(request: Request) -> ServedModel:
    state: ServedModel = request.app.state.quire
    return state


AppState = Annotated[ServedModel, Depends(_of)]
