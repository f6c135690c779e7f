"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.openai.pooling import VectorsBody, make_id, respond, run
from quire.server.text.embedding_output import VectorOptions, to_json
from quire.server.text.inputs import EmbeddingOptions, PoolingInput, Task

router = APIRouter(route_class=BodyRoute)


class EmbeddingRequest(VectorsBody):
    """The inputs to embed, and the options."""

    needs: ClassVar[Task | None] = "embed"

    prompt_name: str | None = None
    """sentence-transformers extension: name of the model's prompt to put before each text. Default: the model's
    default, if any.
    """

    def rendering(self) -> EmbeddingOptions:
        return replace(super().rendering(), prompt_name=self.prompt_name)


@router.post("/v1/embeddings", dependencies=[MayChooseReplica])
async def embeddings(body: EmbeddingRequest, request: Request, state: AppState) -> Response:
    """Compute the embedding vectors of one or more inputs, with an embedding model."""
    model, adapter = await state.find_model(body.model)
    given: PoolingInput = await body.process(state.frontend)
    request_id = make_id(body, "embd")
    outputs, pooling = await run(request, state, body, request_id, replace(given, adapter=adapter))
    data = await asyncio.to_thread(_data, outputs, pooling, body.vectors(), body.encoding_format == "base64")
    return respond(request_id, model, data, given)


def _data(
    outputs: Sequence[EngineCoreOutput], pooling: Pooling, options: VectorOptions, as_base64: bool
) -> list[dict[str, Any]]:
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": to_json(options.finish(output.vector or b"", pooling), as_base64=as_base64),
        }
        for index, output in enumerate(outputs)
    ]
