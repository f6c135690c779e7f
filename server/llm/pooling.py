"""Requests of the Python API to models that compute vectors, labels or scores."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.llm.media import content_media
from quire.server.llm.prompts import PromptLike, Tokenization, check_supported, split, typed
from quire.server.serving.frontend import Frontend
from quire.server.serving.llm_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.server.text.adapter import RequestAdapter
from quire.server.text.embedding_output import VectorOptions, scores
from quire.server.text.inputs import (
    ContentParts,
    EmbeddingOptions,
    MarkedPrompt,
    PooledInput,
    Task,
    TruncationSide,
)

ScoreData = str | Mapping[str, Any]
"""A text, or `{"content": [parts]}` with the parts of a message."""


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `LLM.classify`, `LLM.score` and `LLM.encode`, as an object. Their keyword arguments of
    the same names override it.
    """

    dimensions: int | None = None
    """Keep the first numbers of a Matryoshka model's vector; None: all."""
    normalize: bool | None = None
    """Give a vector length 1; None: as the model declares."""
    use_activation: bool | None = None
    """False: return logits instead of probabilities, and vectors that are not normalized."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep of a longer prompt; -1: as many as the model takes; None: a longer prompt is an error.
    """
    task: Literal["embed", "token_embed", "classify"] | None = None
    """`LLM.encode`: the expected result; a model for another one is an error."""

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return replace(self)


async def _pool(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None,
    priority: int,
    adapter: RequestAdapter | None,
) -> tuple[Any, dict[str, Any]]:
    """Return a prompt's vector, or the vectors of its tokens, and the common fields of results."""
    processor, (content, text, salt, media) = frontend.admit(task), split(prompt)
    whole: PooledInput = MarkedPrompt(prompt=content, media=media) if media else content
    pooled = await processor.pooled.process_embeddings({"prompt": whole}, rendering, vectors)
    request_id = request_id or uuid.uuid4().hex
    given = replace(pooled, adapter=adapter)
    with frontend.embed(request_id, given, typed(priority, int, "priority"), salt) as embedding:
        (output,) = await embedding.vectors()
    assert processor.pooling is not None
    return vectors.finish(output.vector or b"", processor.pooling).tolist(), {
        "request_id": request_id,
        "prompt": text,
        "prompt_token_ids": pooled.prompts[0],
        "num_cached_tokens": output.num_cached_tokens,
    }


async def embed(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
    adapter: RequestAdapter | None = None,
) -> EmbeddingRequestOutput:
    vector, common = await _pool("embed", frontend, prompt, rendering, vectors, request_id, priority, adapter)
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(vector), **common)


async def classify(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
    adapter: RequestAdapter | None = None,
) -> ClassificationRequestOutput:
    vector, common = await _pool("classify", frontend, prompt, rendering, vectors, request_id, priority, adapter)
    return ClassificationRequestOutput(outputs=ClassificationOutput(vector), **common)


async def encode(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
    adapter: RequestAdapter | None = None,
) -> PoolingRequestOutput[PoolingOutput]:
    vector, common = await _pool(task, frontend, prompt, rendering, vectors, request_id, priority, adapter)
    return PoolingRequestOutput(outputs=PoolingOutput(vector), **common)


async def score(
    frontend: Frontend,
    data_1: ScoreData | Sequence[ScoreData],
    data_2: ScoreData | Sequence[ScoreData],
    rendering: EmbeddingOptions,
    use_activation: bool | None,
    request_id: str | None = None,
    priority: int = 0,
    adapter: RequestAdapter | None = None,
) -> list[ScoringRequestOutput]:
    processor = frontend.admit("score")
    first, second = (
        _content(data, param) if isinstance(data, str | Mapping) else [_content(each, param) for each in data]
        for data, param in ((data_1, "data_1"), (data_2, "data_2"))
    )
    pairs = await processor.pooled.process_pairs(first, second, rendering, ("data_1", "data_2"))
    given = replace(pairs, adapter=adapter)
    request_id = request_id or uuid.uuid4().hex
    priority = typed(priority, int, "priority")
    with frontend.embed(request_id, given, priority) as embedding:
        outputs = await embedding.vectors()
    assert processor.pooling is not None
    parts: Sequence[tuple[int, ...]] = given.compared or [(at,) for at in range(len(outputs))]
    found = scores(outputs, given, processor.pooling, use_activation)
    return [
        ScoringRequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=[token for at in places for token in given.prompts[at]],
            outputs=ScoringOutput(score),
            num_cached_tokens=sum(outputs[at].num_cached_tokens for at in places),
        )
        for places, score in zip(parts, found, strict=True)
    ]


def _content(data: ScoreData, param: str) -> str | ContentParts:
    """An input to score; raises `InvalidParameter` for anything else."""
    if isinstance(data, str):
        return data
    content = data.get("content") if isinstance(data, Mapping) else None
    if not isinstance(content, list):
        raise InvalidParameter(f'{param}: only texts can be scored, and {{"content": [parts]}}', param)
    parts, media = content_media(content, f"{param}.content", data.get("mm_processor_kwargs") or {})
    for at, part in enumerate(parts):
        match part:
            case {"type": "image" | "video"} | {"type": "text", "text": str()}:
                pass
            case _:
                raise InvalidParameter(f"{param}.content[{at}]: expected a text, an image or a video", param)
    return ContentParts(parts=parts, media=media)


def options(
    params: PoolingParams | None = None,
    *,
    truncate_prompt_tokens: int | None = None,
    truncation_side: Literal["left", "right"] = "right",
    add_special_tokens: bool = True,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    prompt_name: str | None = None,
    **unsupported: Any,
) -> EmbeddingOptions:
    """The options for rendering prompts, from a method's arguments; they override `params`.

    Raises `InvalidParameter` for values of wrong types, and the errors of `check_supported`.
    """
    check_supported(unsupported)
    tokenization = Tokenization.of(tokenization_kwargs)
    of_params = None if params is None else params.truncate_prompt_tokens
    lengths = (truncate_prompt_tokens, tokenization.truncate_prompt_tokens, of_params)
    return EmbeddingOptions(
        add_special_tokens=None if add_special_tokens and tokenization.add_special_tokens is not False else False,
        truncate=typed(
            next((each for each in lengths if each is not None), None), int | None, "truncate_prompt_tokens"
        ),
        truncation_side=typed(truncation_side, TruncationSide, "truncation_side"),
        prompt_name=prompt_name,
    )


def vector_options(
    params: PoolingParams | None, *, dimensions: int | None = None, normalize: bool | None = None
) -> VectorOptions:
    """The options for vectors and probabilities, from a method's arguments; they override `params`."""
    params = params or PoolingParams()
    switches = (normalize, params.use_activation, params.normalize)
    return VectorOptions(
        dimensions=typed(params.dimensions if dimensions is None else dimensions, int | None, "dimensions"),
        normalize=next((each for each in switches if each is not None), None),
    )
