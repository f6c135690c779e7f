"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import InvalidParameter
from quire.server.frontend.embedding_output import VectorOptions, to_json
from quire.server.frontend.inputs import EmbeddingOptions, Task
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.openai.pooling import InputsBody, make_id, respond, run
from quire.server.openai.protocol import Int64

router = APIRouter(route_class=BodyRoute)


class EmbeddingRequest(InputsBody):
    """What to embed, and how."""

    needs: ClassVar[Task | None] = "embed"

    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32 values, little-endian. Default: float."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """Return only the first numbers of each vector; for models with a Matryoshka representation."""
    normalize: bool | None = None
    """vLLM extension: whether to normalize vectors to length 1. Default: as the model declares."""
    use_activation: bool | None = None
    """vLLM's newer name of `normalize`."""
    prompt_name: str | None = None
    """sentence-transformers extension: name of the model's prompt to put before each text. Default: the model's
    default, if any.
    """

    def check_fields(self, param: str = "") -> set[str]:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidParameter("normalize and use_activation mean the same; send only one of them", "normalize")
        return super().check_fields(param)

    def vectors(self) -> VectorOptions:
        normalize = self.use_activation if self.normalize is None else self.normalize
        return VectorOptions(dimensions=self.dimensions, normalize=normalize)

    def rendering(self) -> EmbeddingOptions:
        return replace(super().rendering(), prompt_name=self.prompt_name)


@router.post("/v1/embeddings", dependencies=[MayChooseReplica])
async def embeddings(body: EmbeddingRequest, request: Request, state: AppState) -> Response:
    """Compute the embedding vectors of one or more texts, with an embedding model."""
    model = state.check_model(body.model)
    prompts: list[list[int]] = await body.process(partial(state.frontend.admit, "embed"))
    request_id = make_id(body, "embd")
    outputs, pooling = await run(request, state, body, request_id, prompts)
    data = await asyncio.to_thread(_data, outputs, pooling, body.vectors(), body.encoding_format == "base64")
    return respond(request_id, model, data, prompts)


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
