"""`/v1/responses`: OpenAI's newer API (https://platform.openai.com/docs/api-reference/responses).

`responses_request` has its bodies, `responses_tools` converts tools, `responses_input` items to chat messages, and
`responses_output` the answer to items.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import LARGE_BODY, BodyRoute
from quire.server.http.response import EventStreamResponse, while_connected
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.openai.responses_input import page_of_items
from quire.server.openai.responses_output import ProcessedResponse, ResponseFormatter
from quire.server.openai.responses_request import (
    InputTokensRequest,
    ResponsesRequest,
    response_not_found,
    stored_response,
)

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", dependencies=[MayChooseReplica])
async def create_response(body: ResponsesRequest, request: Request, state: AppState) -> Response:
    """Generate an answer to a conversation, or continue an earlier response."""
    model, adapter = await state.find_model(body.model)
    body = await body.with_stored(state, await request.body())
    processed: ProcessedResponse = await body.process(state.frontend)
    response = ResponseFormatter(model, processed, state)
    generation = state.frontend.generate(response.id, replace(processed.chat, adapter=adapter))
    if body.stream:
        return EventStreamResponse(generation, partial(response.write_events, generation), end=b"")
    with generation:
        return json_response(await while_connected(request.receive, response.whole(generation)))


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, state: AppState, stream: bool = False) -> Response:
    """Return a stored response, or one that is being streamed."""
    if stream:
        raise InvalidParameter("stream: only a new response can be streamed", "stream")
    if (running := state.responses.running(response_id)) is not None:
        return json_response(running.object())
    return Response(stored_response(response_id, state, "response_id").response, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, state: AppState) -> Response:
    """Cancel a response that is being streamed."""
    if (running := state.responses.running(response_id)) is not None:
        running.cancel()
        return json_response(running.object())
    stored = stored_response(response_id, state, "response_id")
    if stored.status != "cancelled":
        raise InvalidParameter(f"response {response_id} is {stored.status}; there is nothing to cancel", "response_id")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, state: AppState) -> Response:
    """Delete a response. If it is being streamed, cancel it."""
    if (running := state.responses.running(response_id)) is not None:
        running.cancel()
        state.responses.delete(response_id)
    elif not state.responses.delete(response_id):
        raise response_not_found(response_id, state, "response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    state: AppState,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the items that a stored response answers, those of earlier responses included; by default the newest first.
    `after`: the id of the last item of the page before.
    """
    stored = stored_response(response_id, state, "response_id")
    wanted = {"num_input": stored.num_input, "after": after, "limit": limit, "order": order}
    if len(stored.items) <= LARGE_BODY:
        page = await page_of_items(wanted, state.frontend.input_processor, stored.items)
    else:
        process = state.bodies.process_with_stored(page_of_items, msgspec.json.encode(wanted), stored.items)
        page = await while_connected(request.receive, process)
    if page is None:
        raise InvalidParameter(f"after: response {response_id} has no input item {after}", "after")
    return Response(page, media_type="application/json")


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensRequest, request: Request, state: AppState) -> Response:
    """Count the tokens of an input, including its instructions and tools."""
    await state.find_model(body.model)
    body = await body.with_stored(state, await request.body())
    return json_response({"object": "response.input_tokens", "input_tokens": await body.process(state.frontend)})
