"""What every endpoint works on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from quire.engine.protocol.errors import InvalidParameter
from quire.server.frontend.frontend import Frontend
from quire.server.http.errors import ModelNotFound
from quire.server.http.response_store import ResponseStore


@dataclass
class ServedModel:
    """One served model. `model_names` are all the names that it answers to; the first is its own."""

    service: Frontend
    model_names: tuple[str, ...]
    trusts_templates: bool = False
    """Whether a request may bring a chat template of its own."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises `ModelNotFound` for a model that is not this one."""
        if name is not None and name not in self.model_names:
            raise ModelNotFound(
                f"the model {name!r} does not exist here; served is {' or '.join(self.model_names)}", "model"
            )
        return name or self.model_names[0]

    def check_template(self, template: str | None) -> None:
        """Raise `InvalidParameter` for a chat template that a request may not bring."""
        if template is not None and not self.trusts_templates:
            raise InvalidParameter(
                "chat_template is only served by servers started with --trust-request-chat-template", "chat_template"
            )


async def _of(request: Request) -> ServedModel:
    state: ServedModel = request.app.state.quire
    return state


AppState = Annotated[ServedModel, Depends(_of)]
