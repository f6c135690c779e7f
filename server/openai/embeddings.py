"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import InvalidParameter
from quire.server.frontend.embedding_output import VectorOptions, to_json
from quire.server.frontend.input_processor import InputProcessor
from quire.server.frontend.inputs import EmbeddingOptions, Prompt
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.response import while_connected
from quire.server.http.state import AppState, MayChooseReplica
from quire.server.openai.protocol import (
    MAX_PROMPTS,
    ExtraField,
    Int64,
    ManyTokenIds,
    ProcessedBody,
    RequestModel,
    Texts,
    TokenIds,
    hint,
    rejected,
)

router = APIRouter(route_class=BodyRoute)


class EmbeddingRequest(ProcessedBody, RequestModel):
    """What to embed, and how."""

    embeds: ClassVar[bool | None] = True
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "metadata": hint(),
        # vLLM's
        "embed_dtype": rejected("float32"),
        "endianness": rejected("native", "little"),
        "messages": rejected(),
        "mm_processor_kwargs": rejected({}),
        "padding": rejected("do_not_pad"),
    }

    input: Annotated[
        str | Texts | TokenIds | ManyTokenIds,
        Field(description=f"Texts, or token ids of this model's tokenizer, used unchanged; at most {MAX_PROMPTS}."),
    ]
    model: str | None = None
    """Optional, as the server has one model."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32 values, little-endian. Default: float."""
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    """Return only the first numbers of each vector; for models with a Matryoshka representation."""
    user: str | None = None
    """Who the client is, with `--fair-share user`."""
    normalize: bool | None = None
    """vLLM extension: whether to normalize vectors to length 1. Default: as the model declares."""
    use_activation: bool | None = None
    """vLLM's newer name of `normalize`."""
    truncate_prompt_tokens: Int64 | None = None
    """vLLM extension: truncate longer inputs to this number of tokens; -1: to the model's maximum length. Default:
    longer inputs are rejected.
    """
    truncation_side: Literal["left", "right"] | None = None
    """vLLM extension: the side that truncation removes. Default: right."""
    add_special_tokens: bool | None = None
    """vLLM extension: add the tokenizer's special tokens to a text. Default: true."""
    prompt_name: str | None = None
    """sentence-transformers extension: name of the model's prompt to put before each text. Default: the model's
    default, if any.
    """
    priority: Int64 | None = None
    """vLLM extension: lower values run first; the server needs `--scheduling-policy priority`."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """vLLM extension: requests share cached prefixes only with requests that have the same salt."""
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """vLLM extension: the end of the response's id."""

    def reject_unsupported(self) -> set[str]:
        """Return the ignored fields; raise `InvalidParameter` for the first field with an unsupported value."""
        ignored = self.check_fields()
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidParameter("normalize and use_activation mean the same; send only one of them", "normalize")
        return ignored

    def inputs(self) -> dict[str, Prompt]:
        """The inputs, by their names for error messages; raises `InvalidParameter` if there are none."""
        match self.input:
            case str(text):
                return {"input": text}
            case [int(), *_]:
                return {"input": self.input}  # type: ignore[dict-item]  # the pattern matches list[int]
            case []:
                raise InvalidParameter("input must not be empty: there is nothing to embed", "input")
        return {f"input[{at}]": each for at, each in enumerate(self.input)}  # type: ignore[misc]  # not a list[int]

    async def process_here(self, admit: Callable[[], InputProcessor]) -> list[list[int]]:
        ignored = self.reject_unsupported()
        processor = admit()
        processor.ignore(ignored)
        return await processor.process_embeddings(self.inputs(), self.rendering(), self.vectors())

    def vectors(self) -> VectorOptions:
        """The output options of vectors."""
        normalize = self.use_activation if self.normalize is None else self.normalize
        return VectorOptions(dimensions=self.dimensions, normalize=normalize)

    def rendering(self) -> EmbeddingOptions:
        """How to tokenize the inputs."""
        return EmbeddingOptions(
            add_special_tokens=self.add_special_tokens is not False,
            truncate=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            prompt_name=self.prompt_name,
        )


@router.post("/v1/embeddings", dependencies=[MayChooseReplica])
async def embeddings(body: EmbeddingRequest, request: Request, state: AppState) -> Response:
    """Compute the embedding vectors of one or more texts, with an embedding model."""
    model = state.check_model(body.model)
    prompts: list[list[int]] = await body.process(partial(state.frontend.admit, embeds=True))
    processor, vectors = state.frontend.input_processor, body.vectors()
    request_id = f"embd-{body.request_id or uuid.uuid4().hex}"
    with state.frontend.embed(request_id, prompts, body.priority or 0, body.cache_salt) as embedding:
        outputs = await while_connected(request.receive, embedding.vectors())
    assert processor.pooling is not None
    data = await asyncio.to_thread(_data, outputs, processor.pooling, vectors, body.encoding_format == "base64")
    tokens = sum(map(len, prompts))
    return json_response(
        {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


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
