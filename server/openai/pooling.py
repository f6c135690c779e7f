"""`/classify` and `/pooling`, as vLLM defines them, and the common parts of all pooling routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from quire.server.http.request_model import (
    MAX_MESSAGES,
    ExtraField,
    Int64,
    Positive,
    TokenIds,
    hint,
    only_one,
    rejected,
)
from quire.server.http.response import media_tokens, while_connected
from quire.server.http.state import AppState, MayChooseReplica, ServedModel
from quire.server.openai.chat import ChatRequest
from quire.server.openai.content_input import ContentInput, Inputs
from quire.server.openai.protocol import MAX_PROMPTS, ManyTokenIds
from quire.server.text.embedding_output import VectorOptions, activated, to_json
from quire.server.text.inputs import EmbeddingOptions, PooledInput, PoolingInput, Task

router = APIRouter(route_class=BodyRoute)

_OF_MESSAGES = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Fields of a conversation."""


class PoolingBody(RequestBody):
    """The common fields of the bodies of all pooling routes."""

    has_files: ClassVar[bool] = True
    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        "metadata": hint(),
        # vLLM's
        "embed_dtype": rejected("float32"),
        "endianness": rejected("native", "little"),
        "messages": rejected(),
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
    """vLLM extension: add the tokenizer's special tokens. Default: to texts, but not to conversations and content."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """vLLM extension: arguments of the model's processor for the images and videos, such as `max_pixels`."""
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
            add_special_tokens=self.add_special_tokens,
            truncate=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
        )


class InputsBody(PoolingBody):
    """A body with texts, token ids, or content with images and videos; or with a conversation."""

    extra_fields: ClassVar[Mapping[str, ExtraField]] = {
        name: each for name, each in PoolingBody.extra_fields.items() if name != "messages"
    }
    max_items: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES}

    input: Annotated[
        str | Inputs | TokenIds | ManyTokenIds | ContentInput | None,
        Field(
            description="Texts, or token ids of this model's tokenizer, used unchanged; or objects with `text`, "
            f"`image` or `content`. At most {MAX_PROMPTS}."
        ),
    ] = None
    messages: list[dict[str, Any]] | None = None
    """vLLM extension: a conversation instead of `input`, as in a chat, which the model's chat template renders."""
    chat_template: str | None = None
    """vLLM extension: a template for this request; the server needs `--trust-request-chat-template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM extension: variables of the chat template."""
    add_generation_prompt: bool | None = None
    """vLLM extension: start the assistant's turn after `messages`. Default: false."""
    continue_final_message: bool | None = None
    """vLLM extension: continue the last message instead of ending it."""

    def inputs(self) -> dict[str, PooledInput]:
        """The inputs, by their names for error messages; raises `InvalidParameter` if there are none."""
        options = self.mm_processor_kwargs or {}
        match self.input:
            case None:
                raise InvalidParameter("input: Field required", "input")
            case str(text):
                return {"input": text}
            case ContentInput() as given:
                return {"input": given.read("input", options)}
            case [int(), *_]:
                return {"input": self.input}  # type: ignore[dict-item]  # the pattern matches list[int]
            case []:
                raise InvalidParameter("input must not be empty: there is nothing to embed or classify", "input")
        named = {f"input[{at}]": each for at, each in enumerate(self.input)}
        return {
            param: each.read(param, options) if isinstance(each, ContentInput) else each  # type: ignore[misc]  # not a list[int]
            for param, each in named.items()
        }

    def check_fields(self, param: str = "") -> set[str]:
        """See `RequestModel`. Also checks the conversation."""
        ignored = super().check_fields(param)
        if self.messages is None:
            for name in _OF_MESSAGES:
                if getattr(self, name) is not None:
                    raise InvalidParameter(f"{name} is only for messages", name)
        else:
            only_one({"input": self.input, "messages": self.messages})
            ignored |= self.chat().check_fields(param)
        return ignored

    def chat(self) -> ChatRequest:
        """The conversation as a chat request, of which only that is used."""
        fields = (*_OF_MESSAGES, "messages", "mm_processor_kwargs", "add_special_tokens")
        given = {name: value for name in fields if (value := getattr(self, name)) is not None}
        return ChatRequest.validated({"add_generation_prompt": False, **given})

    def vectors(self) -> VectorOptions:
        """The output options of vectors."""
        return VectorOptions(normalize=self.use_activation)

    async def process_here(self, admit: Admit) -> PoolingInput:
        processor = admit(self.check_fields())
        inputs = self.inputs() if self.messages is None else {"messages": self.chat().chat_input()}
        return await processor.pooled.process_embeddings(inputs, self.rendering(), self.vectors())


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
    task: Literal["embed", "token_embed", "classify"] | None = None
    """Only to check the task of the model, which has one. `token_embed`: vectors of each token, of models for late
    interaction. There are no classes of tokens (`token_classify`).
    """

    def task_of_model(self) -> Task | None:
        return self.task or self.needs


async def run(
    request: Request,
    state: ServedModel,
    body: PoolingBody,
    request_id: str,
    given: PoolingInput,
) -> tuple[list[EngineCoreOutput], Pooling]:
    """Return the engine's outputs for processed prompts, and the pooling that made them."""
    pooling = state.frontend.input_processor.pooling
    assert pooling is not None
    with state.frontend.embed(request_id, given, body.priority or 0, body.cache_salt) as embedding:
        return await while_connected(request.receive, embedding.vectors()), pooling


def make_id(body: PoolingBody, kind: str) -> str:
    """Return the id of the response: the request's own id, or a new one."""
    return f"{kind}-{body.request_id or uuid.uuid4().hex}"


def respond(request_id: str, model: str, data: list[dict[str, Any]], given: PoolingInput) -> Response:
    """Return the response of every route but rerank."""
    return json_response(
        {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage(given),
        }
    )


def usage(given: PoolingInput) -> dict[str, Any]:
    """Return the usage of processed inputs, with the tokens of images and videos if there are any."""
    tokens = sum(map(len, given.prompts))
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    details = media_tokens(given.media)
    return {**counts, "prompt_tokens_details": details} if details else counts


@router.post("/classify", dependencies=[MayChooseReplica])
async def classify(body: ClassificationRequest, request: Request, state: AppState) -> Response:
    """Compute the probability of each label for one or more texts, with a classifier; as in vLLM."""
    model, adapter = await state.find_model(body.model)
    given: PoolingInput = await body.process(state.frontend)
    request_id = make_id(body, "classify")
    outputs, pooling = await run(request, state, body, request_id, replace(given, adapter=adapter))
    data = await asyncio.to_thread(_classes, outputs, pooling, body.use_activation)
    return respond(request_id, model, data, given)


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
    model, adapter = await state.find_model(body.model)
    given: PoolingInput = await body.process(state.frontend)
    request_id, options = make_id(body, "pool"), body.vectors()
    outputs, pooled = await run(request, state, body, request_id, replace(given, adapter=adapter))
    data = await asyncio.to_thread(_pooled, outputs, pooled, options, body.encoding_format == "base64")
    return respond(request_id, model, data, given)


def _pooled(
    outputs: Sequence[EngineCoreOutput], pooling: Pooling, options: VectorOptions, as_base64: bool
) -> list[dict[str, Any]]:
    data = []
    for index, output in enumerate(outputs):
        found = options.finish(output.vector or b"", pooling)
        data.append({"index": index, "object": "pooling", "data": to_json(found, as_base64=as_base64)})
    return data
