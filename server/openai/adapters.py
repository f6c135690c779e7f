"""Load and unload adapters (LoRA), while the server runs: the routes of vLLM, SGLang and SageMaker.

vLLM: https://docs.vllm.ai/en/latest/features/lora.html
SageMaker: https://docs.djl.ai/master/docs/serving/serving/docs/adapters_api.html
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from quire.engine.protocol.errors import InvalidParameter
from quire.engine.protocol.supervision import NamedAdapter
from quire.server.client.request_record import current_key
from quire.server.http.errors import ModelNotFound, json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.roles import AdminOrLocal
from quire.server.http.state import AppState, ServedModel
from quire.server.serving.adapters import MAX_NAME

router = APIRouter(route_class=BodyRoute)

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class _SmallBody(RequestBody):
    async def process_here(self, admit: Admit) -> None:
        """Do nothing: it is small."""


class LoadAdapterRequest(_SmallBody):
    """An adapter to load."""

    lora_name: _Name
    """The name by which requests choose it as their `model`."""
    lora_path: _Path
    """Where it is: a path below `--lora-root`, the id of an uploaded GGUF file, or with `--lora-resolver hub` a Hugging
    Face repository."""
    base_model_name: str | None = None
    """The name of the base, for `parent` in `/v1/models`."""
    load_inplace: bool = False
    """Replace the adapter that has the name. Requests that are running go on with the old one."""
    pinned: bool = False
    """Keep it in the memory of every host until it is unloaded."""
    is_3d_lora_weight: bool = False
    """vLLM's layout of experts' weights. Ignored: the files show it."""


class UnloadAdapterRequest(_SmallBody):
    """An adapter to unload."""

    lora_name: _Name
    """Its name."""
    lora_int_id: int | None = None
    """vLLM's number of the adapter. Ignored: the name says which one."""


class SGLangLoadRequest(_SmallBody):
    """An adapter to load, as in SGLang."""

    lora_name: _Name
    """See `/v1/load_lora_adapter`."""
    lora_path: _Path
    """See `/v1/load_lora_adapter`."""
    pinned: bool = False
    """See `/v1/load_lora_adapter`."""


class SageMakerRequest(_SmallBody):
    """An adapter to load, as in SageMaker."""

    name: _Name
    """See `/v1/load_lora_adapter`."""
    src: _Path
    """Like `lora_path` of `/v1/load_lora_adapter`."""
    load_inplace: bool = False
    """See `/v1/load_lora_adapter`."""
    preload: bool = True
    """Only true is supported."""
    pin: bool = False
    """Like `pinned` of `/v1/load_lora_adapter`."""


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, dependencies=[AdminOrLocal])
async def load_lora_adapter(body: LoadAdapterRequest, state: AppState) -> Response:
    """Load an adapter. Responds when every replica has it in memory, and all API processes know its name.

    Needs an admin key. On a server without keys, clients must be on its host, and no other web pages.
    """
    body.check_fields()
    parent = body.base_model_name or ""
    await _load(state, body.lora_name, body.lora_path, in_place=body.load_inplace, parent=parent, is_pinned=body.pinned)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, dependencies=[AdminOrLocal])
async def unload_lora_adapter(body: UnloadAdapterRequest, state: AppState) -> Response:
    """Unload an adapter. New requests with its name are rejected at once; responds when the running ones have ended.

    Needs an admin key. On a server without keys, clients must be on its host, and no other web pages.
    """
    body.check_fields()
    await _unload(state, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", dependencies=[AdminOrLocal])
async def sglang_load(body: SGLangLoadRequest, state: AppState) -> Response:
    """SGLang's route: like `/v1/load_lora_adapter`. Errors have the format of all other routes."""
    body.check_fields()
    await _load(state, body.lora_name, body.lora_path, is_pinned=body.pinned)
    return _loaded(state)


@router.post("/unload_lora_adapter", dependencies=[AdminOrLocal])
async def sglang_unload(body: UnloadAdapterRequest, state: AppState) -> Response:
    """SGLang's route: like `/v1/unload_lora_adapter`. Errors have the format of all other routes."""
    body.check_fields()
    await _unload(state, body.lora_name)
    return _loaded(state)


@router.post("/adapters", response_class=PlainTextResponse, dependencies=[AdminOrLocal])
async def sagemaker_load(body: SageMakerRequest, state: AppState) -> Response:
    """SageMaker's route: like `/v1/load_lora_adapter`."""
    body.check_fields()
    if not body.preload:
        raise InvalidParameter("preload is not supported with this value", "preload")
    await _load(state, body.name, body.src, in_place=body.load_inplace, is_pinned=body.pin)
    return PlainTextResponse(f"Adapter {body.name} registered")


@router.get("/adapters")
async def sagemaker_list(state: AppState) -> Response:
    """SageMaker's list of adapters, all of them on one page."""
    named = state.frontend.adapters.named.values()
    return json_response({"adapters": [{"name": each.name, "src": each.path, "pin": each.is_pinned} for each in named]})


@router.delete("/adapters/{name:path}", response_class=PlainTextResponse, dependencies=[AdminOrLocal])
async def sagemaker_unload(name: str, state: AppState) -> Response:
    """SageMaker's route: like `/v1/unload_lora_adapter`."""
    await _unload(state, name)
    return PlainTextResponse(f"Adapter {name} unregistered")


async def _load(
    state: ServedModel, name: str, path: str, *, in_place: bool = False, parent: str = "", is_pinned: bool = False
) -> NamedAdapter:
    upload = None
    if path.startswith("file-") and state.uploads is not None:
        found = await state.uploads.run(state.uploads.get, current_key(), path)
        upload = str(state.uploads.path(current_key(), found.id))
    adapters = state.frontend.adapters
    return await adapters.load(name, path, in_place=in_place, upload=upload, parent=parent, is_pinned=is_pinned)


async def _unload(state: ServedModel, name: str) -> None:
    if not await state.frontend.adapters.unload(name):
        raise ModelNotFound(f"the lora adapter {name!r} cannot be found", "lora_name")


def _loaded(state: ServedModel) -> Response:
    found = {each.name: each.path for each in state.frontend.adapters.named.values()}
    return json_response({"success": True, "loaded_adapters": found})
