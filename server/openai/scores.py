"""`/score`, as vLLM defines it, and `/rerank`, in the shapes of Jina and Cohere.

Jina: https://api.jina.ai/redoc. Cohere: https://docs.cohere.com/reference/rerank. The response has the fields of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from fastapi import APIRouter, Request, Response
from pydantic import AliasChoices, Field, PrivateAttr, model_validator

from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit
from quire.server.http.request_model import ExtraField, Natural, Positive, rejected
from quire.server.http.state import AppState, MayChooseReplica, ServedModel
from quire.server.openai.content_input import ContentInput, Inputs, read_input, read_inputs
from quire.server.openai.pooling import PoolingBody, make_id, respond, run, usage
from quire.server.openai.protocol import MAX_PROMPTS
from quire.server.text.embedding_output import scores
from quire.server.text.inputs import ContentParts, EmbeddingOptions, PoolingInput, Task

router = APIRouter(route_class=BodyRoute)


class ScoreRequest(PoolingBody):
    """What to score: each of `text_1` with its counterpart in `text_2`, or a single one with all of `text_2`."""

    needs: ClassVar[Task | None] = "score"

    aliases: ClassVar[Sequence[Sequence[str]]] = (
        ("text_1", "data_1", "queries"),
        ("text_2", "data_2", "documents", "items"),
    )
    _given_names: tuple[str, str] = PrivateAttr(("text_1", "text_2"))

    text_1: Annotated[
        str | ContentInput | Inputs,
        Field(
            validation_alias=AliasChoices(*aliases[0]),
            description=f"Also as `data_1` or `queries`. At most {MAX_PROMPTS} texts or objects.",
        ),
    ]
    text_2: Annotated[
        str | ContentInput | Inputs,
        Field(
            validation_alias=AliasChoices(*aliases[1]),
            description=f"Also as `data_2`, `documents` or `items`. At most {MAX_PROMPTS} texts or objects.",
        ),
    ]

    @model_validator(mode="wrap")
    @classmethod
    def _note_names(cls, value: Any, handler: Callable[[Any], Self]) -> Self:
        """Errors name the texts as the request does."""
        body = handler(value)
        if isinstance(value, dict):
            first, second = (
                next((name for name in names if value.get(name) is not None), names[0]) for names in cls.aliases
            )
            body._given_names = first, second
        return body

    async def process_here(self, admit: Admit) -> PoolingInput:
        processor, options, names = admit(self.check_fields()), self.mm_processor_kwargs or {}, self._given_names
        first, second = (
            read_inputs(each, name, options) for each, name in zip((self.text_1, self.text_2), names, strict=True)
        )
        return await processor.pooled.process_pairs(first, second, self.rendering(), names)


class RerankRequest(PoolingBody):
    """The query, and the documents to rank."""

    needs: ClassVar[Task | None] = "score"
    max_items: ClassVar[Mapping[str, int]] = {"documents": MAX_PROMPTS}
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        **PoolingBody.extra_fields,
        # Cohere's
        "max_chunks_per_doc": rejected(1),
        "rank_fields": rejected(["text"]),
        # Jina's
        "return_embeddings": rejected(False),
    }

    query: str | ContentInput
    documents: Annotated[ContentInput | Inputs, Field(description=f"Texts, or objects; at most {MAX_PROMPTS}.")]
    top_n: Natural | None = None
    """Return only this number of documents, the best ones. Default: all, and so does 0."""
    return_documents: bool | None = None
    """Whether results have the documents' texts, without images. Default: true, as Jina's and vLLM's; Cohere's is
    false.
    """
    max_tokens_per_doc: Positive | None = None
    """Cohere's: truncate longer documents to this number of tokens. Default: they are not truncated."""

    def rendering(self) -> EmbeddingOptions:
        return replace(super().rendering(), max_document_tokens=self.max_tokens_per_doc)

    async def process_here(self, admit: Admit) -> _Ranking:
        processor, options = admit(self.check_fields()), self.mm_processor_kwargs or {}
        query, documents = read_input(self.query, "query", options), read_inputs(self.documents, "documents", options)
        given = await processor.pooled.process_pairs(query, documents, self.rendering(), ("query", "documents"))
        if self.return_documents is False:
            return _Ranking(given, None)
        found = [documents] if isinstance(documents, str | ContentParts) else documents
        return _Ranking(given, [each if isinstance(each, str) else each.text for each in found])


class _Ranking(NamedTuple):
    """Processed documents, and their texts, if they are to be returned."""

    given: PoolingInput
    texts: list[str] | None


async def _scores(
    request: Request, state: ServedModel, body: PoolingBody, request_id: str, given: PoolingInput
) -> list[float]:
    outputs, pooling = await run(request, state, body, request_id, given)
    return await asyncio.to_thread(scores, outputs, given, pooling, body.use_activation)


@router.post("/score", dependencies=[MayChooseReplica])
@router.post("/v1/score", dependencies=[MayChooseReplica])
async def score(body: ScoreRequest, request: Request, state: AppState) -> Response:
    """Score pairs of texts with a cross-encoder, which has one label, or with an embedding model; as in vLLM."""
    model, adapter = await state.find_model(body.model)
    given: PoolingInput = await body.process(state.frontend)
    request_id = make_id(body, "score")
    found = await _scores(request, state, body, request_id, replace(given, adapter=adapter))
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found)]
    return respond(request_id, model, data, given)


@router.post("/rerank", dependencies=[MayChooseReplica])
@router.post("/v1/rerank", dependencies=[MayChooseReplica])
async def rerank(body: RerankRequest, request: Request, state: AppState) -> Response:
    """Sort documents by their relevance for a query, as in Jina's API and the first version of Cohere's."""
    return await _rerank(body, request, state, "1")


@router.post("/v2/rerank", dependencies=[MayChooseReplica])
async def rerank_v2(body: RerankRequest, request: Request, state: AppState) -> Response:
    """The same, as in the second version of Cohere's API."""
    return await _rerank(body, request, state, "2")


async def _rerank(body: RerankRequest, request: Request, state: ServedModel, version: str) -> Response:
    model, adapter = await state.find_model(body.model)
    given, texts = await body.process(state.frontend)
    request_id = make_id(body, "rerank")
    found = await _scores(request, state, body, request_id, replace(given, adapter=adapter))
    best = sorted(range(len(found)), key=lambda index: -found[index])
    return json_response(
        {
            "id": request_id,
            "object": "list",
            "model": model,
            "usage": usage(given),
            "results": _results(best[: body.top_n or None], found, texts),
            "meta": {"api_version": {"version": version}},
        }
    )


def _results(order: Sequence[int], found: Sequence[float], texts: Sequence[str] | None) -> list[dict[str, Any]]:
    return [
        {"index": index}
        | ({} if texts is None else {"document": {"text": texts[index]}})
        | {"relevance_score": found[index]}
        for index in order
    ]
