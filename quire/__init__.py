"""Quire: an OpenAI-compatible serving daemon for language models that are bigger than one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
    from quire.server.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.server.llm import (
        LLM,
        AsyncLLM,
        AsyncLLMEngine,
        BeamSearchParams,
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        LLMEngine,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name in ("SamplingParams", "StructuredOutputs"):
        from quire.engine.protocol import sampling_params

        return getattr(sampling_params, name)
    if name in ("AsyncEngineArgs", "EngineArgs"):
        from quire.server.config import engine_args

        return getattr(engine_args, name)
    if name == "__version__":
        from quire.engine.process.version import version

        return version()
    if name in __all__:
        from quire.server import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
