"""Quire: an OpenAI-compatible serving daemon for language models that are bigger than one device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.protocol.errors import ConfigError, InvalidParameter
    from quire.engine.protocol.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from quire.server.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.server.llm import (
        LLM,
        AsyncLLM,
        AsyncLLMEngine,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        Counter,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        EngineUnavailable,
        FlatLogprobs,
        Gauge,
        Histogram,
        LLMEngine,
        Logprob,
        LoRARequest,
        Metric,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        RequestFailed,
        RequestOutput,
        RequestStateStats,
        ScoringOutput,
        ScoringRequestOutput,
        TextPrompt,
        TokensPrompt,
        ToolCall,
        Vector,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineUnavailable",
    "FlatLogprobs",
    "Gauge",
    "Histogram",
    "InvalidParameter",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestFailed",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStateStats",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "Vector",
]

_LIGHT = {
    "AsyncEngineArgs": "quire.server.config.engine_args",
    "ConfigError": "quire.engine.protocol.errors",
    "EngineArgs": "quire.server.config.engine_args",
    "InvalidParameter": "quire.engine.protocol.errors",
    "RequestOutputKind": "quire.engine.protocol.sampling_params",
    "SamplingParams": "quire.engine.protocol.sampling_params",
    "StructuredOutputs": "quire.engine.protocol.sampling_params",
    "StructuredOutputsParams": "quire.engine.protocol.sampling_params",
}
"""The modules of names that are not imported from `quire.server.llm`, which takes longer."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from quire.engine.process.version import version

        return version()
    if name in __all__:
        return getattr(import_module(_LIGHT.get(name, "quire.server.llm")), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
