"""Scheduling of requests with structured output: forced tokens, masks of allowed tokens, and which requests are ready.

Such a request waits for its sampled token, which the grammar needs to determine the allowed and the forced next tokens.
Forced tokens (the name of a property, for example) are not sampled; the next row computes all of them.

Grammars usually take some tens of microseconds for a token, but ambiguous ones take milliseconds. Therefore each
iteration of the loop has a time budget for them. A request whose turn has not come is not ready yet.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreRequest
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.scheduler.grammar import Grammar, GrammarCompiler, GrammarError
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import discard, insert

logger = logging.getLogger(__name__)

_BUDGET_SECONDS = 0.02
"""Time for grammars in one iteration of the loop."""
_AT_ONCE = 16
"""Requests whose masks are computed together. The time is checked only between such groups: a group whose masks all
take as long as possible, unlike for the token before, exceeds the budget by its own time."""


@dataclass(frozen=True)
class StartedGrammar:
    """A grammar after the known tokens of a new request, with the data for its first row."""

    grammar: Grammar
    forced: list[int]
    """The first tokens of the output, not sampled; the grammar is behind them."""
    mask: bytes
    """The tokens allowed next."""


@dataclass(frozen=True)
class _Arrived:
    """A sampled token that the grammar has not processed yet."""

    token_id: int
    logprobs: TokenLogprobs | None
    at: float


class StructuredOutputManager:
    """The running requests with a grammar whose prompt is computed; advances their grammars."""

    def __init__(
        self,
        grammars: GrammarCompiler,
        *,
        workers_keep_tokens: bool,
        clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._grammars = grammars
        self._workers_keep_tokens = workers_keep_tokens
        self._clock = clock
        self._processor_clock = processor_clock
        self.ready: list[Request] = []
        """Requests whose sampled token has been processed, sorted by `Request.order`: they can be scheduled."""
        self._in_flight: set[Request] = set()
        """Requests whose token is being sampled."""
        self._arrived: dict[Request, _Arrived] = {}
        """Requests whose sampled token waits to be processed, the longest-waiting first."""
        self._next_expensive_at = 0.0

    def __len__(self) -> int:
        return len(self.ready) + len(self._in_flight) + len(self._arrived)

    def start(self, core_request: EngineCoreRequest, max_tokens: int, stops: frozenset[int]) -> StartedGrammar:
        """Compile a request's grammar and advance it by the known output. `max_tokens` and `stops`: as in `Request`.

        May take long; can be called in any thread. Raises `GrammarError`.
        """
        params, output = core_request.params, core_request.output_token_ids
        assert params.structured_outputs is not None
        grammar = self._grammars.compile(params.structured_outputs)
        for token_id in output:  # one at a time: each call holds the GIL
            grammar.advance([token_id])
        num_tokens = len(core_request.prompt_token_ids) + len(output)
        forced = _force(grammar, params, max_tokens - 1 - num_tokens, stops)
        (mask,) = self._grammars.masks([grammar])
        return StartedGrammar(grammar, forced, grammar.mask_row(mask, params, output + forced))

    def on_scheduled(self, request: Request) -> bytes:
        """Record that the request's next token is in flight; returns the mask of allowed tokens."""
        discard(self.ready, request)
        self._in_flight.add(request)
        return request.mask

    def on_sampled(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Record that the request's token, which is already in `token_ids`, has arrived; `process` processes it."""
        self._in_flight.remove(request)
        self._arrived[request] = _Arrived(token_id, logprobs, self._clock())

    def is_processing(self, request: Request) -> bool:
        """Whether the request's last token has not been processed yet."""
        return request in self._arrived

    def remove(self, request: Request) -> None:
        """Remove a request, if present."""
        discard(self.ready, request)
        self._in_flight.discard(request)
        self._arrived.pop(request, None)

    def process(self, *, is_idle: bool) -> list[tuple[Request, EngineCoreOutput]]:
        """Process tokens that have arrived: advance the grammars, append forced tokens, compute the next masks.

        The requests whose last token was cheap come first, less the time that they have waited, as many as fit into the
        budget. Of those that do not fit, the longest-waiting one is processed after them, but only for half of the time
        (`is_idle`: always, as there is no other work). Returns the outputs of processed requests, which are ready or,
        if the output has a finish reason, removed.
        """
        if not self._arrived:
            return []
        deadline, left = self._clock() + _BUDGET_SECONDS, _BUDGET_SECONDS
        batch: list[Request] = []
        for request in sorted(self._arrived, key=lambda each: self._arrived[each].at + each.grammar_seconds):
            if request.grammar_seconds <= left:
                left -= request.grammar_seconds
                batch.append(request)
        expensive = next((request for request in self._arrived if request.grammar_seconds > _BUDGET_SECONDS), None)
        outputs: list[tuple[Request, EngineCoreOutput]] = []
        while batch and (not outputs or self._clock() < deadline):
            outputs += self._process(batch[:_AT_ONCE], deadline)
            del batch[:_AT_ONCE]
        now = self._clock()
        if expensive is not None and (now >= self._next_expensive_at or (is_idle and not outputs)):
            outputs += self._process([expensive], deadline)
            self._next_expensive_at = 2 * self._clock() - now
        return outputs

    def _process(self, requests: Sequence[Request], deadline: float) -> list[tuple[Request, EngineCoreOutput]]:
        """Process these requests, after the first one only until the deadline.

        Each costs the same part of the shorter of wall-clock and processor time: other processes delay a wall clock,
        and other threads of this one use processor time.
        """
        outputs: list[tuple[Request, EngineCoreOutput]] = []
        unfinished: list[tuple[Request, Grammar, EngineCoreOutput]] = []
        begun, begun_processor = self._clock(), self._processor_clock()
        for request in requests:
            if outputs and self._clock() > deadline:
                break
            assert request.grammar is not None
            output = self._advance(request, request.grammar, self._arrived.pop(request))
            outputs.append((request, output))
            if output.finish_reason is None:
                unfinished.append((request, request.grammar, output))
        masks = self._grammars.masks([grammar for _, grammar, _ in unfinished])
        seconds = min(self._clock() - begun, self._processor_clock() - begun_processor) / len(outputs)
        for (request, grammar, output), mask in zip(unfinished, masks, strict=True):
            request.grammar_seconds = seconds
            known = request.token_ids[request.num_prompt_tokens :]
            with _guard(output):
                request.mask = grammar.mask_row(mask, request.core_request.params, known)
                insert(self.ready, request)
        return outputs

    def _advance(self, request: Request, grammar: Grammar, arrived: _Arrived) -> EngineCoreOutput:
        """Advance the grammar by the sampled token, and append the tokens that it forces."""
        tokens = [*request.unsent_to_client, arrived.token_id]
        output = request.output(tokens, None if arrived.logprobs is None else [arrived.logprobs])
        request.unsent_to_client = []
        request.unsent_to_workers = [] if self._workers_keep_tokens else [arrived.token_id]
        with _guard(output):
            grammar.advance([arrived.token_id])
            if not grammar.is_complete:
                room = request.max_tokens - 1 - len(request.token_ids)
                forced = _force(grammar, request.core_request.params, room, request.stops)
                request.token_ids += forced
                request.unsent_to_workers += forced
                output.token_ids += forced
        if output.finish_reason is None:
            if grammar.is_complete:
                output.finish_reason = "stop"
            elif len(request.token_ids) >= request.max_tokens:
                output.finish_reason = "length"
        return output

    def check_integrity(self, done: int) -> None:
        """Assert that each request's state matches its queue; `done` is the last finished step."""
        for request in (*self.ready, *self._in_flight, *self._arrived):
            assert request.grammar is not None
            assert request.mask
            assert not request.is_plain
        assert all(request.num_pending_tokens for request in (*self.ready, *self._arrived))
        assert all(r.last_step > done and r.num_computed_tokens == len(r.token_ids) for r in self._in_flight)
        assert all(request.last_step <= done for request in self._arrived)


def reject(output: EngineCoreOutput, error: GrammarError) -> None:
    """End a request whose grammar cannot be enforced any further."""
    output.finish_reason, output.error, output.is_invalid = "error", f"structured output: {error}", True


@contextlib.contextmanager
def _guard(output: EngineCoreOutput) -> Iterator[None]:
    """Turn any error into the end of the request whose output this is: others and the engine must not notice it."""
    try:
        yield
    except GrammarError as error:
        reject(output, error)
    except Exception as error:
        logger.exception("the grammar of request %s failed", output.request_id)
        output.finish_reason, output.error = "error", f"structured output: {type(error).__name__}: {error}"


def _force(grammar: Grammar, params: SamplingParams, room: int, stops: frozenset[int]) -> list[int]:
    """Advance the grammar by the tokens that it forces, at most `room`, and return them.

    A token that may finish the request is not forced but sampled. Nothing is forced if the request asks for
    log-probabilities, which only sampling provides, or if other parameters than the grammar may forbid a token.
    """
    if room <= 0 or params.logprobs is not None or params.prompt_logprobs is not None:
        return []
    if params.allowed_token_ids is not None or params.bad_word_ids:
        return []
    forced = grammar.forced_tokens()[:room]
    ends = (at for at, token in enumerate(forced) if token in stops)
    forced = forced[: next(ends, None)]
    if forced:
        grammar.advance(forced)
    return forced
