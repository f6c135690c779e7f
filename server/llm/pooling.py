"""Requests of the Python API to models that compute vectors, labels or scores."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from quire.engine.protocol.errors import InvalidParameter
from quire.server.llm.prompts import PromptLike, integer, split_salt
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
from quire.server.text.embedding_output import VectorOptions, scores
from quire.server.text.inputs import EmbeddingOptions, Task


async def _pool(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None,
    priority: int,
) -> tuple[list[float], dict[str, Any]]:
    """Return a prompt's vector, and the common fields of results."""
    processor, (given, salt) = frontend.admit(task), split_salt(prompt)
    (ids,) = await processor.pooled.process_embeddings({"prompt": given}, rendering, vectors)
    request_id = request_id or uuid.uuid4().hex
    with frontend.embed(request_id, [ids], integer(priority, "priority"), salt) as embedding:
        (output,) = await embedding.vectors()
    assert processor.pooling is not None
    return vectors.finish(output.vector or b"", processor.pooling).tolist(), {
        "request_id": request_id,
        "prompt": given if isinstance(given, str) else None,
        "prompt_token_ids": ids,
        "num_cached_tokens": output.num_cached_tokens,
    }


async def embed(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> EmbeddingRequestOutput:
    vector, common = await _pool("embed", frontend, prompt, rendering, vectors, request_id, priority)
    return EmbeddingRequestOutput(outputs=EmbeddingOutput(vector), **common)


async def classify(
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> ClassificationRequestOutput:
    vector, common = await _pool("classify", frontend, prompt, rendering, vectors, request_id, priority)
    return ClassificationRequestOutput(outputs=ClassificationOutput(vector), **common)


async def encode(
    task: Task,
    frontend: Frontend,
    prompt: PromptLike,
    rendering: EmbeddingOptions,
    vectors: VectorOptions,
    request_id: str | None = None,
    priority: int = 0,
) -> PoolingRequestOutput[PoolingOutput]:
    vector, common = await _pool(task, frontend, prompt, rendering, vectors, request_id, priority)
    return PoolingRequestOutput(outputs=PoolingOutput(vector), **common)


async def score(
    frontend: Frontend,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    rendering: EmbeddingOptions,
    use_activation: bool | None,
    request_id: str | None = None,
    priority: int = 0,
) -> list[ScoringRequestOutput]:
    processor = frontend.admit("score")
    data_1, data_2 = (texts if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))
    for texts, param in ((data_1, "data_1"), (data_2, "data_2")):
        if not all(isinstance(text, str) for text in texts):
            raise InvalidParameter(f"{param}: only texts can be scored", param)
    given = await processor.pooled.process_pairs(data_1, data_2, rendering, ("data_1", "data_2"))
    request_id = request_id or uuid.uuid4().hex
    priority = integer(priority, "priority")
    with frontend.embed(request_id, given.prompts, priority, None, given.second_segments) as embedding:
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


def options(
    *,
    truncate_prompt_tokens: int | None = None,
    truncation_side: Literal["left", "right"] = "right",
    add_special_tokens: bool = True,
) -> EmbeddingOptions:
    return EmbeddingOptions(
        add_special_tokens=add_special_tokens, truncate=truncate_prompt_tokens, truncation_side=truncation_side
    )
