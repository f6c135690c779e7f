"""`/classify` and `/pooling`, as vLLM defines them, and the common parts of all pooling routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.engine.config.pooling import Pooling
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.errors import InvalidParameter
from quire.server.http.errors import json_response
from quire.server.http.large_bodies import BodyRoute
from quire.server.http.request_body import Admit, RequestBody
from quire.server.http.request_model import ExtraField, Int64, Positive, hint, rejected
from quire.server.http.response import while_connected
from quire.server.http.state import AppState, MayChooseReplica, ServedModel
from quire.server.openai.protocol import MAX_PROMPTS, ManyTokenIds, Texts, TokenIds
from quire.server.text.embedding_output import VectorOptions, activated, to_json
from quire.server.text.inputs import EmbeddingOptions, Prompt, Task

router = APIRouter(route_class=BodyRoute)


class PoolingBody(RequestBody):
    """The common fields of the bodies of all pooling routes."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "metadata": hint(),
        # vLLM's
        "embed_dtype": rejected("float32"),
        "endianness": rejected("native", "little"),
        "messages": rejected(),
        "mm_processor_kwargs": rejected({}),
        "padding": rejected("do_not_pad"),
    }

    model: str | None = None
    """Optional, as the server has one model."""
    user: str | None = None
    """Who the client is, with `--fair-share user`."""
    truncate_prompt_tokens: Int64 | None = None
    """vLLM extension: truncate longer inputs to this number of tokens; -1: to the model's maximum length. Default:
    longer inputs are rejected.
    """
    truncation_side: Literal["left", "right"] | None = None
    """vLLM extension: the side that truncation removes. Default: right."""
    add_special_tokens: bool | None = None
    """vLLM extension: add the tokenizer's special tokens to a text. Default: true."""
    use_activation: bool | None = None
    """Whether to convert logits to probabilities, or an embedding to a vector of length 1. Default: as the model
    declares; scores compare vectors of length 1.
    """
    priority: Int64 | None = None
    """vLLM extension: lower values run first; the server needs `--scheduling-policy priority`."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """vLLM extension: requests share cached prefixes only with requests that have the same salt."""
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    """vLLM extension: the end of the response's id."""

    def rendering(self) -> EmbeddingOptions:
        """How to tokenize the inputs."""
        return EmbeddingOptions(
            add_special_tokens=self.add_special_tokens is not False,
            truncate=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
        )


class InputsBody(PoolingBody):
    """A body with texts or token ids."""

    input: Annotated[
        str | Texts | TokenIds | ManyTokenIds,
        Field(description=f"Texts, or token ids of this model's tokenizer, used unchanged; at most {MAX_PROMPTS}."),
    ]

    def inputs(self) -> dict[str, Prompt]:
        """The inputs, by their names for error messages; raises `InvalidParameter` if there are none."""
        match self.input:
            case str(text):
                return {"input": text}
            case [int(), *_]:
                return {"input": self.input}  # type: ignore[dict-item]  # the pattern matches list[int]
            case []:
                raise InvalidParameter("input must not be empty: there is nothing to embed or classify", "input")
        return {f"input[{at}]": each for at, each in enumerate(self.input)}  # type: ignore[misc]  # not a list[int]

    def vectors(self) -> VectorOptions:
        """The output options of vectors."""
        return VectorOptions(normalize=self.use_activation)

    async def process_here(self, admit: Admit) -> list[list[int]]:
        processor = admit(self.check_fields())
        return await processor.pooled.process_embeddings(self.inputs(), self.rendering(), self.vectors())


class ClassificationRequest(InputsBody):
    """The texts to classify, and the options."""

    needs: ClassVar[Task | None] = "classify"


class VectorsBody(InputsBody):
    """A body with inputs whose vectors are returned."""

    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32 values, little-endian. Default: float."""
    dimensions: Positive | None = None
    """Return only the first numbers of each vector; for models with a Matryoshka representation."""
    normalize: bool | None = None
    """vLLM's older name of `use_activation`."""

    def check_fields(self, param: str = "") -> set[str]:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidParameter("normalize and use_activation mean the same; send only one of them", "normalize")
        return super().check_fields(param)

    def vectors(self) -> VectorOptions:
        normalize = self.use_activation if self.normalize is None else self.normalize
        return VectorOptions(dimensions=self.dimensions, normalize=normalize)


class PoolingRequest(VectorsBody):
    """The texts to pool, and the options."""

    needs: ClassVar[Task | None] = "pool"
    task: Literal["embed", "classify"] | None = None
    """Only to check the task of the model, which has one. There are no results for single tokens (`token_embed`,
    `token_classify`).
    """

    def task_of_model(self) -> Task | None:
        return self.task or self.needs


async def run(
    request: Request,
    state: ServedModel,
    body: PoolingBody,
    request_id: str,
    prompts: Sequence[list[int]],
    second_segments: Sequence[int] = (),
) -> tuple[list[EngineCoreOutput], Pooling]:
    """Return the engine's outputs for processed prompts, and the pooling that made them."""
    pooling = state.frontend.input_processor.pooling
    assert pooling is not None
    with state.frontend.embed(request_id, prompts, body.priority or 0, body.cache_salt, second_segments) as embedding:
        return await while_connected(request.receive, embedding.vectors()), pooling


def make_id(body: PoolingBody, kind: str) -> str:
    """Return the id of the response: the request's own id, or a new one."""
    return f"{kind}-{body.request_id or uuid.uuid4().hex}"


def respond(request_id: str, model: str, data: list[dict[str, Any]], prompts: Sequence[list[int]]) -> Response:
    """Return the response of every route but rerank."""
    return json_response(
        {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage(prompts),
        }
    )


def usage(prompts: Sequence[list[int]]) -> dict[str, int]:
    """Return the usage of processed prompts."""
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@router.post("/classify", dependencies=[MayChooseReplica])
async def classify(body: ClassificationRequest, request: Request, state: AppState) -> Response:
    """Compute the probability of each label for one or more texts, with a classifier; as in vLLM."""
    model = state.check_model(body.model)
    prompts: list[list[int]] = await body.process(state.frontend)
    request_id = make_id(body, "classify")
    outputs, pooling = await run(request, state, body, request_id, prompts)
    data = await asyncio.to_thread(_classes, outputs, pooling, body.use_activation)
    return respond(request_id, model, data, prompts)


def _classes(
    outputs: Sequence[EngineCoreOutput], pooling: Pooling, use_activation: bool | None
) -> list[dict[str, Any]]:
    assert pooling.classes is not None
    data = []
    for index, output in enumerate(outputs):
        found = activated(output.vector or b"", pooling.classes, use_activation)
        label = pooling.classes.labels[int(found.argmax())]
        probabilities = msgspec.Raw(msgspec.json.encode(found.tolist()))
        data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(found)})
    return data


@router.post("/pooling", dependencies=[MayChooseReplica])
async def pooling(body: PoolingRequest, request: Request, state: AppState) -> Response:
    """Compute the pooled outputs of texts: vectors of an embedding model, probabilities of a classifier."""
    model = state.check_model(body.model)
    prompts: list[list[int]] = await body.process(state.frontend)
    request_id, options = make_id(body, "pool"), body.vectors()
    outputs, pooled = await run(request, state, body, request_id, prompts)
    data = await asyncio.to_thread(_pooled, outputs, pooled, options, body.encoding_format == "base64")
    return respond(request_id, model, data, prompts)


def _pooled(
    outputs: Sequence[EngineCoreOutput], pooling: Pooling, options: VectorOptions, as_base64: bool
) -> list[dict[str, Any]]:
    data = []
    for index, output in enumerate(outputs):
        found = options.finish(output.vector or b"", pooling)
        data.append({"index": index, "object": "pooling", "data": to_json(found, as_base64=as_base64)})
    return data
