"""The shared state of all endpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from fastapi import Depends, Header, Request

from quire.engine.config.plan_text import plan_text
from quire.engine.protocol.errors import InvalidParameter
from quire.server.client.engine_client import DATA_PARALLEL_RANK, RANK_HEADER
from quire.server.client.fair_share import enter_model
from quire.server.client.tracing import TRACE
from quire.server.http.api_keys import ApiKeys
from quire.server.http.errors import ModelNotFound
from quire.server.http.large_bodies import BodyRoute, LargeBodies
from quire.server.http.response_store import ResponseStore
from quire.server.http.watched_files import WatchedFiles
from quire.server.media.uploads import Uploads
from quire.server.serving.frontend import Frontend
from quire.server.text.adapter import OWN_TEMPLATE, RequestAdapter

_SHOWN_NAMES = 16
"""Names of models in an error."""


@dataclass
class ServedModel:
    """The served model. `model_names` are all its names, the main one first."""

    frontend: Frontend
    model_names: tuple[str, ...]
    responses: ResponseStore = field(default_factory=ResponseStore)
    created: int = field(default_factory=lambda: int(time.time()))
    keys: ApiKeys | None = None
    """The accepted keys; None: there are none."""
    watched_files: list[WatchedFiles] = field(default_factory=list)
    """The files that are read again when they change."""
    has_public_metrics: bool = False
    """Whether metrics need no key."""
    has_request_times: bool = False
    """Whether responses have `metrics` (`--enable-per-request-metrics`)."""
    forces_usage: bool = False
    """Whether every chunk of a stream has the usage (`--enable-force-include-usage`)."""
    names_tokens_by_id: bool = False
    """Whether log-probabilities have token ids by default (`--return-tokens-as-token-ids`)."""
    uploads: Uploads | None = None
    """Files that clients have uploaded; None: they are refused (`--file-storage-path`)."""
    torch_profiler_dir: str | None = None
    """The folder for traces; None: they are sent to the client."""
    drain_seconds: float = 0.0
    """Default time for requests to end on a replica that is removed."""
    routes: Sequence[BodyRoute] = ()
    """The routes with bodies; set by the application."""

    @cached_property
    def plan(self) -> str:
        """The resolved plan, as `serve` prints it."""
        return plan_text(self.frontend.config)

    @cached_property
    def bodies(self) -> LargeBodies:
        """The processes for large bodies, which start with the first request, or at once if the model takes images."""
        frontend = self.frontend
        return LargeBodies(
            frontend.config.model,
            frontend.formats,
            self.routes,
            self.responses,
            lambda: frontend.config.model.max_model_len,
            frontend.media,
            self.model_names,
            self._own_template if frontend.adapters.is_enabled else None,
        )

    async def _own_template(self, name: str) -> str:
        adapter = await self._find_adapter(name)
        return "" if adapter is None else adapter.chat_template

    async def _find_adapter(self, name: str) -> RequestAdapter | None:
        """Find an adapter by its name, or by `BASE:NAME`, as SGLang's clients write it."""
        find = self.frontend.adapters.find
        if (adapter := await find(name)) is not None:
            return adapter
        names = (name.removeprefix(f"{base}:") for base in self.model_names if name.startswith(f"{base}:"))
        return await find(own) if (own := next(names, "")) else None

    def not_found(self, name: str) -> ModelNotFound:
        """Return the error for a model that does not exist."""
        names = [*self.model_names, *self.frontend.adapters.named]
        shown = " or ".join(names[:_SHOWN_NAMES]) + " or others (GET /v1/models)" * (len(names) > _SHOWN_NAMES)
        return ModelNotFound(f"the model {name!r} does not exist; available: {shown}", "model")

    async def find_model(self, name: str | None) -> tuple[str, RequestAdapter | None]:
        """Return the model name for the response, and the adapter that it is the name of; raises `ModelNotFound` for
        another model."""
        adapter = None
        if name is not None and name not in self.model_names:
            if (adapter := await self._find_adapter(name)) is None:
                raise self.not_found(name)
            enter_model(adapter.name)
        OWN_TEMPLATE.set("" if adapter is None else adapter.chat_template)
        name = name or self.model_names[0]
        if (trace := TRACE.get()) is not None:
            trace.model = name
        return name, adapter


async def _of(request: Request) -> ServedModel:
    state: ServedModel = request.app.state.quire
    return state


AppState = Annotated[ServedModel, Depends(_of)]


async def _choose(
    request: Request,
    rank: Annotated[
        str | None,
        Header(alias=RANK_HEADER, description="vLLM extension: the replica to start on, see `/replicas`."),
    ] = None,
) -> None:
    if rank is not None:
        given = request.headers.getlist(RANK_HEADER)
        if len(given) > 1 or not rank.isdecimal() or len(rank) > 9:
            raise InvalidParameter(f"{RANK_HEADER}: {', '.join(given)}: expected the number of a replica", RANK_HEADER)
    DATA_PARALLEL_RANK.set(None if rank is None else int(rank))


MayChooseReplica = Depends(_choose)
"""Dependency of routes whose requests may choose their replica."""
