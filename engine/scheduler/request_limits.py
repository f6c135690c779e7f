"""Where a request ends, and which one can never run."""

from __future__ import annotations

import math

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.engine.protocol.media import MediaItem


class RequestLimits:
    """The limits of a model, applied to requests."""

    def __init__(self, config: EngineConfig) -> None:
        model, spec = config.model, config.model.architecture.media
        self._is_pooling = model.pooling is not None
        """Embedding model: a request finishes when its prompt is computed, as if `max_tokens` were 1."""
        self._max_model_len = model.max_model_len + self._is_pooling
        """Limit of prompt and output tokens together. A prompt for an embedding model may use the full length."""
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._media = config.media
        is_bidirectional = spec is not None and spec.is_bidirectional
        self._max_run = min(config.scheduler.max_num_batched_tokens, model.min_window) if is_bidirectional else None
        """Limit of the tokens of a run that must be in one row, and in the window of each of them; None: none must."""
        self._spec = spec

    def validate(self, request: EngineCoreRequest) -> str | None:
        """Return why a request can never run, if so."""
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if (length := len(request.prompt_token_ids)) >= self._max_model_len:
            maximum = self._max_model_len - self._is_pooling
            return f"the prompt has {length} tokens; the maximum model length is {maximum}"
        if not 0 <= request.adapter_start < length:
            return f"the adapter starts at token {request.adapter_start}, which is not in the prompt"
        end = 0
        for number, item in enumerate(request.media, 1):
            if reason := self._validate_item(item, end, length):
                return f"{item.kind} {number} of the prompt {reason}"
            end = item.end
        if self._spec is not None and self._spec.is_one_run(request.media):
            assert self._media is not None
            assert self._max_run is not None
            if length > self._max_run:
                reason = "" if self._spec.joins_text else ", because it has images"
                return (
                    f"the prompt has {length:,} tokens that must be in one step and one window{reason}; "
                    f"these have {self._max_run:,} tokens; use a shorter one, or a higher --max-num-batched-tokens"
                )
            count, most = sum(item.num_features for item in request.media), self._media.encoder_cache_features
            if count > most:
                return f"the images have {count:,} features, more than {most:,}; use a higher --encoder-cache-size"
        return None

    def _validate_item(self, item: MediaItem, start: int, end: int) -> str | None:
        """Return why an item that must be between these tokens of the prompt is not possible, if so."""
        if self._media is None or not self._media.max_items[item.kind]:
            return f"is not supported: the model takes no {item.kind}s here"
        if not start <= item.offset <= item.end <= end:
            return f"has tokens {item.offset} to {item.end}, which are not between {start} and {end}"
        ends = (0, *(run.start + run.length for run in item.runs))
        if (
            not item.runs
            or ends[-1] > item.length
            or any(
                run.start < before or run.length < 1 or (run.grid != (0, 0, 0) and math.prod(run.grid) != run.length)
                for run, before in zip(item.runs, ends, strict=False)
            )
        ):
            return "has features at places that are not its own"
        if len(item.digest) != 16 or item.data is None:
            return "has no digest of 16 bytes, or no data"
        if (count := item.num_features) > (most := self._media.max_item_features):
            return f"has {count:,} features, more than {most:,}; use a smaller one, or a higher --encoder-cache-size"
        if self._max_run is not None and (longest := max(run.length for run in item.runs)) > self._max_run:
            return (
                f"has {longest:,} features that must be in one step and one window, which have {self._max_run:,} "
                "tokens; use a smaller one, or a higher --max-num-batched-tokens"
            )
        return None

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
