"""Scheduling of requests with structured output: forced tokens, masks of allowed tokens, and which requests are ready.

Such a request waits for its sampled token, which the grammar needs to determine the allowed and the forced next tokens.
Forced tokens (the name of a property, for example) are not sampled; the next row computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.protocol.engine_core import EngineCoreOutput, FinishReason
from quire.engine.scheduler.grammar import GrammarCompiler, GrammarError
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import discard, insert


class StructuredOutputManager:
    """The running requests with a grammar whose prompt is computed; advances their grammars."""

    def __init__(self, grammars: GrammarCompiler, *, workers_keep_tokens: bool) -> None:
        self._grammars = grammars
        self._workers_keep_tokens = workers_keep_tokens
        self.ready: list[Request] = []
        """Requests whose sampled token has arrived, sorted by `Request.order`: they can be scheduled."""
        self._in_flight: set[Request] = set()
        """Requests whose token is being sampled."""

    def __len__(self) -> int:
        return len(self.ready) + len(self._in_flight)

    def start(self, request: Request) -> EngineCoreOutput | None:
        """Append the initially forced tokens. Returns a terminal output if they complete the output, or on error."""
        grammar = request.grammar
        assert grammar is not None
        try:
            if output := request.core_request.output_token_ids:  # otherwise an empty grammar would be complete
                grammar.advance(output)
            request.unsent_to_client = _force(request)
            (error,) = self._constrain([request])
        except GrammarError as grammar_error:
            error = str(grammar_error)
        if error is not None:
            return EngineCoreOutput(request.request_id, [], finish_reason="error", error=error)
        if grammar.is_complete:
            return EngineCoreOutput(request.request_id, request.unsent_to_client, finish_reason="stop")
        return None

    def on_scheduled(self, request: Request) -> bytes:
        """Record that the request's next token is in flight; returns the mask of allowed tokens."""
        discard(self.ready, request)
        self._in_flight.add(request)
        return request.mask

    def remove(self, request: Request) -> None:
        """Remove a request, if present."""
        discard(self.ready, request)
        self._in_flight.discard(request)

    def advance(self, request: Request, token_id: int, new_tokens: list[int]) -> tuple[FinishReason | None, str | None]:
        """Advance the grammar by a sampled token, and append forced tokens to `new_tokens`.

        Returns the finish reason (None: not finished) and the error.
        """
        grammar = request.grammar
        assert grammar is not None
        request.unsent_to_workers = [] if self._workers_keep_tokens else [token_id]
        try:
            grammar.advance([token_id])
            if not grammar.is_complete and len(request.token_ids) < request.max_tokens:
                forced = _force(request)
                request.unsent_to_workers += forced
                new_tokens += forced
        except GrammarError as error:
            return "error", str(error)
        if grammar.is_complete:
            return "stop", None
        return ("length" if len(request.token_ids) >= request.max_tokens else None), None

    def resume(self, requests: Sequence[Request]) -> list[str | None]:
        """Make these requests ready again after their tokens have arrived; returns an error or None for each."""
        errors = self._constrain(requests)
        for request, error in zip(requests, errors, strict=True):
            self._in_flight.remove(request)
            if error is None:
                insert(self.ready, request)
        return errors

    def _constrain(self, requests: Sequence[Request]) -> list[str | None]:
        """Compute the mask of allowed next tokens of each request; returns an error or None for each."""
        grammars = [request.grammar for request in requests if request.grammar is not None]
        errors: list[str | None] = []
        for request, grammar, mask in zip(requests, grammars, self._grammars.masks(grammars), strict=True):
            output = request.token_ids[request.num_prompt_tokens :]
            try:
                request.mask = grammar.mask_row(mask, request.core_request.params, output)
                errors.append(None)
            except GrammarError as error:
                errors.append(str(error))
        return errors

    def check_integrity(self, done: int) -> None:
        """Assert that each request's state matches its queue; `done` is the last finished step."""
        for request in (*self.ready, *self._in_flight):
            assert request.grammar is not None
            assert request.mask
            assert not request.is_plain
        assert all(request.num_pending_tokens for request in self.ready)
        assert all(r.last_step > done and r.num_computed_tokens == len(r.token_ids) for r in self._in_flight)


def _force(request: Request) -> list[int]:
    """Append the tokens that the grammar forces, and return them.

    A token that may finish the request is not forced but sampled. Nothing is forced if the request asks for
    log-probabilities, which only sampling provides, or if other parameters than the grammar may forbid a token.
    """
    params, grammar = request.core_request.params, request.grammar
    room = request.max_tokens - 1 - len(request.token_ids)
    if grammar is None or room <= 0 or params.logprobs is not None or params.prompt_logprobs is not None:
        return []
    if params.allowed_token_ids is not None or params.bad_word_ids:
        return []
    forced = grammar.forced_tokens()[:room]
    ends = (at for at, token in enumerate(forced) if token in request.stops)
    forced = forced[: next(ends, None)]
    if forced:
        grammar.advance(forced)
        request.token_ids += forced
    return forced
