"""The Python API: `AsyncLLM` for asyncio programs, `LLM` for scripts. Names and behaviour follow vLLM's."""

from __future__ import annotations

from quire.server.client.output_stream import EngineUnavailable, RequestFailed
from quire.server.llm.async_llm import AsyncLLM, AsyncLLMEngine
from quire.server.llm.llm import LLM
from quire.server.llm.llm_engine import LLMEngine
from quire.server.llm.lora_request import LoRARequest
from quire.server.llm.metrics_reader import Counter, Gauge, Histogram, Metric, Vector
from quire.server.llm.pooling import PoolingParams
from quire.server.llm.prompts import TextPrompt, TokensPrompt
from quire.server.parsers.events import ToolCall
from quire.server.serving.llm_outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineUnavailable",
    "FlatLogprobs",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestFailed",
    "RequestOutput",
    "RequestStateStats",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "Vector",
]
