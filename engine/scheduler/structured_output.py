"""Requests for structured output: what of it is forced, what may come next, and whose turn it is.

Each is held back until its token came back: only then does its grammar say which may come next, and which must. Those
that must come (the name of a property, say) are known without being sampled, so that its next row computes them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.protocol.messages import EngineCoreOutput, FinishReason
from quire.engine.scheduler.grammar import GrammarCompiler, GrammarError
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import discard, insert


class StructuredOutputManager:
    """The running requests with a grammar whose prompt is computed, and how their grammars go on."""

    def __init__(self, grammars: GrammarCompiler, *, workers_keep: bool) -> None:
        self._grammars = grammars
        self._workers_keep = workers_keep
        self.ready: list[Request] = []
        """Those whose token came back, in the order of `Request.order`: they go on by it and what it forces."""
        self._under_way: set[Request] = set()
        """Those whose token is being sampled."""

    def __len__(self) -> int:
        return len(self.ready) + len(self._under_way)

    def begin(self, request: Request) -> EngineCoreOutput | None:
        """Force what can be before anything is sampled; the terminal output where that is all, or there is an error."""
        grammar = request.grammar
        assert grammar is not None
        try:
            if output := request.submit.output_token_ids:  # else a grammar of nothing would be at its end
                grammar.advance(output)
            request.unsent_to_client = _force(request)
            (error,) = self._constrain([request])
        except GrammarError as problem:
            error = str(problem)
        if error is not None:
            return EngineCoreOutput(request.request_id, [], finish_reason="error", error=error)
        if grammar.is_complete:
            return EngineCoreOutput(request.request_id, request.unsent_to_client, finish_reason="stop")
        return None

    def on_scheduled(self, request: Request) -> bytes:
        """A plan samples the next token of this request; returns the tokens that are allowed."""
        discard(self.ready, request)
        self._under_way.add(request)
        return request.mask

    def leave(self, request: Request) -> None:
        """Forget a request, if it is here."""
        discard(self.ready, request)
        self._under_way.discard(request)

    def follow(self, request: Request, token_id: int, reported: list[int]) -> tuple[FinishReason | None, str | None]:
        """Take a sampled token into the grammar, and tell what that forces, too; whether it ends, and the error."""
        grammar = request.grammar
        assert grammar is not None
        request.unsent_to_workers = [] if self._workers_keep else [token_id]
        try:
            grammar.advance([token_id])
            if not grammar.is_complete and len(request.token_ids) < request.max_tokens:
                forced = _force(request)
                request.unsent_to_workers += forced
                reported += forced
        except GrammarError as error:
            return "error", str(error)
        if grammar.is_complete:
            return "stop", None
        return ("length" if len(request.token_ids) >= request.max_tokens else None), None

    def go_on(self, requests: Sequence[Request]) -> list[str | None]:
        """Let these be planned again, now that their tokens are known, or say of each why it cannot."""
        errors = self._constrain(requests)
        for request, error in zip(requests, errors, strict=True):
            self._under_way.remove(request)
            if error is None:
                insert(self.ready, request)
        return errors

    def _constrain(self, requests: Sequence[Request]) -> list[str | None]:
        """Find out which tokens each may go on with, or why it cannot."""
        grammars = [request.grammar for request in requests if request.grammar is not None]
        errors: list[str | None] = []
        for request, grammar, mask in zip(requests, grammars, self._grammars.masks(grammars), strict=True):
            output = request.token_ids[request.num_prompt_tokens :]
            try:
                request.mask = grammar.restricted(mask, request.submit.params, output)
                errors.append(None)
            except GrammarError as error:
                errors.append(str(error))
        return errors

    def check_integrity(self, done: int) -> None:
        """Assert that requests are in the state of their queue; `done` is the last step that came back."""
        for request in (*self.ready, *self._under_way):
            assert request.grammar is not None
            assert request.mask
            assert not request.is_plain
        assert all(request.num_pending_tokens for request in self.ready)
        assert all(r.last_step > done and r.num_computed_tokens == len(r.token_ids) for r in self._under_way)


def _force(request: Request) -> list[int]:
    """Append the tokens that the grammar leaves no choice about, and return them.

    Not the one that may end the request, which is sampled; and none where log-probabilities are asked for, as those of
    a token are known where it is sampled and those of a prompt once it has run, or where others than the grammar may
    forbid it.
    """
    params, grammar = request.submit.params, request.grammar
    room = request.max_tokens - 1 - len(request.token_ids)
    if grammar is None or room <= 0 or params.logprobs is not None or params.prompt_logprobs is not None:
        return []
    if params.allowed_token_ids is not None or params.bad_word_ids:
        return []
    forced = grammar.forced()[:room]
    ends = (at for at, token in enumerate(forced) if token in request.stops)
    forced = forced[: next(ends, None)]
    if forced:
        grammar.advance(forced)
        request.token_ids += forced
    return forced
