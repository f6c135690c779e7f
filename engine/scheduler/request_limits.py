"""Where a request ends, and which one is too long to begin."""

from __future__ import annotations

from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.engine_core import EngineCoreRequest


class RequestLimits:
    """The limits of a model, applied to requests."""

    def __init__(self, model: ModelConfig) -> None:
        self._is_pooling = model.pooling is not None
        """Embedding model: a request finishes when its prompt is computed, as if `max_tokens` were 1."""
        self._max_model_len = model.max_model_len + self._is_pooling
        """Limit of prompt and output tokens together. A prompt for an embedding model may use the full length."""
        self._eos_token_ids = frozenset(model.eos_token_ids)

    def validate(self, request: EngineCoreRequest) -> str | None:
        """Return why a request can never run, if so."""
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if (length := len(request.prompt_token_ids)) < self._max_model_len:
            return None
        maximum = self._max_model_len - self._is_pooling
        return f"the prompt has {length} tokens; the maximum model length is {maximum}"

    def max_tokens(self, request: EngineCoreRequest) -> int:
        """Return the length of prompt and output together at which a request finishes."""
        limit = 1 if self._is_pooling else request.params.max_tokens
        if limit is None:
            return self._max_model_len
        return min(self._max_model_len, len(request.prompt_token_ids) + limit)

    def stops(self, request: EngineCoreRequest) -> frozenset[int]:
        """Return the tokens that finish a request."""
        params = request.params
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
