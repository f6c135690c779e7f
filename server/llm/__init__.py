"""The Python API: `AsyncLLM` for asyncio programs, `LLM` for scripts. Names and behaviour follow vLLM's."""

from __future__ import annotations

from quire.server.llm.async_llm import AsyncLLM, AsyncLLMEngine
from quire.server.llm.llm import LLM
from quire.server.llm.llm_engine import LLMEngine
from quire.server.parsers.events import ToolCall
from quire.server.serving.llm_outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "Logprob",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringRequestOutput",
    "ToolCall",
]
