"""The scheduler: decides which tokens run in the next step.

Each call to `schedule` makes one plan of at most `max_num_batched_tokens`: first decodes (requests with one pending
token), then prefill chunks, then new requests. There are no phases: a row moves a request forward by some number of
tokens, and the worker samples when the row reaches the request's last known token. Decodes and chunks are in separate
lists only to keep a step cheap: a decode costs one comparison until it needs a block or reaches its length limit.

With a single stage the workers keep the tokens that they sample, so the next token of a decode can be scheduled while
the previous one is in flight. Nothing is scheduled beyond a length limit, which is known in advance. A stop token is
not known in advance: if a request has sampled one, the result of its next row is discarded. Its blocks can be reused
at once, because workers run plans in order.

A request with structured output waits for each sampled token (see `quire.engine.scheduler.structured_output`). With
pipeline stages, one plan per stage is in flight, and a decode waits for its token.

With speculation, a decode whose tokens are all known can have drafts (see `quire.engine.scheduler.speculation`). Its
row advances past them, and it waits for the result, which takes back the drafts that do not count. A recurrent state
cannot go back, so it is kept as it is before the drafts, and the request's next row recomputes the drafts that count.
While drafts of a model pay, a single stage runs ahead only if all rows can be chained
(`quire.engine.scheduler.draft_steps`).

The scheduler coordinates; other objects own the state between its calls: `TokenBudget` decides how many tokens a plan
contains, `RequestQueue` which request is next, `RunningRequests` which requests have a slot, `RequestBlocks` which
memory requests have, `EncoderCacheManager` which images are encoded, `AdapterManager` which adapters the workers have,
`KVTransferManager` which KV is loaded from the host (`KVLoads`) and stored there, `PlansInFlight` which results are
awaited, and `PlanBuilder` which changes the workers receive.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat, takewhile

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.adapters import AdapterPrepared
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.protocol.stats import ITERATION_TOKENS, EngineStats
from quire.engine.scheduler.adapters import AdapterManager
from quire.engine.scheduler.draft_steps import DraftSteps
from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.encoder_cache import EncoderCacheManager
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.engine.scheduler.kv_cache_manager import KVCacheManager
from quire.engine.scheduler.kv_events import KVEvents
from quire.engine.scheduler.kv_transfers import KVTransferManager
from quire.engine.scheduler.model_drafts import ModelSpeculationManager, make_speculation
from quire.engine.scheduler.outputs import OutputsByClient
from quire.engine.scheduler.plan_builder import PlanBuilder, PlanLimits
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks
from quire.engine.scheduler.request_limits import RequestLimits
from quire.engine.scheduler.request_queue import RequestQueue, discard, order
from quire.engine.scheduler.running_requests import RunningRequests
from quire.engine.scheduler.structured_output import StartedGrammar, StructuredOutputManager
from quire.engine.scheduler.token_budget import TokenBudget, TowerTime

_MAX_OFFERED_NEXT = 8
"""Waiting requests that are looked at for those that start next."""


class Scheduler:
    """Owns the requests from `add` to their last output, and their KV blocks."""

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        self.config = config.scheduler
        self.stages = config.parallel.pipeline_parallel_size
        self.workers_keep_tokens = self.stages == 1
        """The stage that samples also embeds the tokens, so plans need not send them back to it."""
        self.limits = RequestLimits(config)
        self.kv = KVCacheManager(
            cache.num_blocks, cache.block_size, cache.enable_prefix_caching, cache.groups, cache.blocks_per_page
        )
        self.in_flight = PlansInFlight()
        self.drafts_in_flight = DraftsInFlight()
        media = config.model.architecture.media
        self.blocks = RequestBlocks(self.kv, self.in_flight, self.drafts_in_flight, media=media)
        if config.kv_events is not None:
            self.kv.listener = KVEvents(config.kv_events, cache.block_size)
        self.stats = EngineStats(kv_blocks=cache.num_blocks, started=time.time_ns() // 1_000_000)
        self.adapters = AdapterManager(config, self.stats)
        self.encoder_cache = EncoderCacheManager(config, self.in_flight, self.adapters, self.stats)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, Request] = {}
        """Requests that have not come yet (`expect`)."""
        self.running = RunningRequests(self.config.max_num_seqs)
        self.grammars = GrammarCompiler(config.model)
        self.structured_output = StructuredOutputManager(self.grammars, workers_keep_tokens=self.workers_keep_tokens)
        """Running requests with structured output."""
        self.speculation = make_speculation(config)
        self.draft_steps = DraftSteps(config, self.blocks, self.in_flight, self.drafts_in_flight)
        self.waiting = RequestQueue()
        self.token_budget = TokenBudget(self.config, self.stages)
        self.kv_transfers = KVTransferManager(
            config, self.blocks, self.in_flight, self.running, self.token_budget, self.stats
        )
        self.kv_loads = self.kv_transfers.loads
        self._num_added = 0
        self._admits = True
        """False once this plan has preempted or chosen a victim: that request would be admitted again at once."""
        self._is_blocked = False
        """The next request was not admitted for lack of free blocks, or because enough others wait for the KV store."""
        self._next_victim: Request | None = None
        """Left out of the current plan, so that it can be preempted when its result has arrived."""
        self._window_moved: list[Request] = []
        """With sliding windows: the requests that the last plan moved forward by more than one token."""

    @property
    def has_work(self) -> bool:
        """Whether there may be a plan. Requests whose adapter the workers read, or whose KV the store brings, wait for
        these alone."""
        if self.running or len(self.waiting) > 0:
            return True
        return any(each.has_startable or each.has_changes for each in (self.adapters, self.kv_transfers))

    # --- requests ---------------------------------------------------------------------------------------------

    def start_grammar(self, core_request: EngineCoreRequest) -> StartedGrammar:
        """Compile and start the grammar of a request with structured output, which `add` needs.

        May take long; can be called in any thread. Raises `GrammarError`.
        """
        limits = self.limits
        return self.structured_output.start(core_request, limits.max_tokens(core_request), limits.stops(core_request))

    def add(self, core_request: EngineCoreRequest, started: StartedGrammar | None = None) -> EngineCoreOutput | None:
        """Queue a request. Returns its terminal output if the request can never run, or has nothing left to compute.

        `started` is the grammar of a request with structured output. A request that already has output tokens
        continues after them like a preempted one; its prompt log-probabilities have already been sent.
        """
        prompt, output = core_request.prompt_token_ids, core_request.output_token_ids
        if core_request.request_id in self.requests:
            in_use = f"request id {core_request.request_id!r} is in use"
            return EngineCoreOutput(core_request.request_id, [], finish_reason="error", error=in_use)
        error, is_invalid = self.limits.validate(core_request) or "", True
        if core_request.adapter is not None and not error:
            error, is_invalid = self.adapters.error_of(core_request.adapter)
        if error:
            return EngineCoreOutput(
                core_request.request_id, [], finish_reason="error", error=error, is_invalid=is_invalid
            )
        params, forced = core_request.params, [] if started is None else started.forced
        if started is not None and started.grammar.is_complete:
            return EngineCoreOutput(core_request.request_id, forced, finish_reason="stop")
        request = self._request(core_request, prompt + output + forced)
        request.num_scored_tokens = len(prompt) - 1 if output and params.prompt_logprobs is not None else 0
        request.unsent_to_client = forced
        if started is not None:
            request.grammar, request.mask = started.grammar, started.mask
        if len(request.token_ids) >= request.max_tokens:
            return EngineCoreOutput(core_request.request_id, [], finish_reason="length")
        self._num_added += 1
        self.requests[core_request.request_id] = request
        expected = self.expected.pop(core_request.request_id, None)
        if self.adapters.add(request):
            self.encoder_cache.add(request)
            if expected is None or not self.kv_loads.arrive(expected, request):
                self.waiting.add(request)
        elif expected is not None:
            self.kv_loads.finish(expected)
        return None

    def _request(self, core_request: EngineCoreRequest, known: list[int]) -> Request:
        """A request with these known tokens. One that hands over ends here with the next one."""
        max_tokens = self.limits.max_tokens(core_request)
        return Request(
            core_request=core_request,
            client=core_request.client,
            request_id=core_request.request_id,
            order=(core_request.priority if self.config.policy == "priority" else 0, self._num_added),
            token_ids=known,
            max_tokens=min(max_tokens, len(known) + 1) if core_request.hands_over else max_tokens,
            stops=self.limits.stops(core_request),
            share=self.waiting.share(core_request.share, core_request.weight),
        )

    def expect(self, core_request: EngineCoreRequest) -> None:
        """Load what the KV store gets of a request's prompt, which another replica computes, and its adapter, until the
        request is added or aborted. There is no output for it, except that it is aborted."""
        request_id, adapter = core_request.request_id, core_request.adapter
        if request_id in self.requests:
            return
        self.expect_no_more(request_id)
        request = self.expected[request_id] = self._request(core_request, [*core_request.prompt_token_ids])
        request.num_scored_tokens = request.num_prompt_tokens - 1  # with the first token, they will have been sent
        if self.limits.validate(core_request) is None and (adapter is None or not self.adapters.error_of(adapter)[0]):
            if adapter is not None:
                self.adapters.prepare(adapter)
            self.kv_loads.expect(request)

    def expect_no_more(self, request_id: str) -> Request | None:
        """Forget an expected request; returns it, if there is one."""
        if (request := self.expected.pop(request_id, None)) is not None:
            self.kv_loads.finish(request)
        return request

    def on_adapter(self, answer: AdapterPrepared) -> tuple[str | None, list[tuple[Request, EngineCoreOutput]]]:
        """Process a worker's answer about an adapter; returns as `AdapterManager.on_prepared`, and the requests that
        end because of it."""
        error = self.adapters.on_prepared(answer)
        ended: list[tuple[Request, EngineCoreOutput]] = []
        if error is not None:
            for request in self.adapters.requests_of(answer.digest):
                if not error:
                    self.encoder_cache.add(request)
                    self._queue(request)
                    continue
                output = self._end(request, "error")
                output.error, output.is_invalid = error, answer.is_invalid
                ended.append((request, output))
        return error, ended

    def _queue(self, request: Request) -> None:
        """Queue a request that has waited elsewhere."""
        given = request.core_request
        request.share = self.waiting.share(given.share, given.weight)
        self.waiting.add(request)

    def abort(self, request_id: str) -> tuple[Request, EngineCoreOutput] | None:
        """Abort a request and free its blocks. Returns None if it has already ended."""
        if (expected := self.expect_no_more(request_id)) is not None:
            return expected, expected.output([], finish_reason="abort")
        request = self.requests.get(request_id)
        if request is None:
            return None
        return request, self._end(request, "abort")

    def _end(self, request: Request, reason: FinishReason) -> EngineCoreOutput:
        """Finish a request without another token; returns its terminal output."""
        self._finish(request, reason)
        return request.output([], finish_reason=reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if self.speculation is not None:
            self.speculation.on_finish(request, len(self.running))
        del self.requests[request.request_id]
        if request.slot is not None or (self.adapters.is_queued(request) and not self.kv_loads.is_waiting(request)):
            self.waiting.finish(request)
        if request.slot is not None:
            self._remove_from_workers(request)
        self.encoder_cache.finish(request)
        self.adapters.finish(request)
        self.kv_transfers.finish(request)

    def _remove_from_workers(self, request: Request) -> None:
        """Free a running request's slot and blocks; only its tokens are kept."""
        self.structured_output.remove(request)
        self.running.stop(request)
        self.drafts_in_flight.pop(request, None)
        self.blocks.free(request)
        self.encoder_cache.release(request)
        self.adapters.stop(request)
        request.num_computed_tokens = request.num_accepted = request.decode_until = 0

    # --- plans ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Return the next plan, or None if nothing can run until a plan in flight has finished."""
        self.kv_transfers.poll()
        for request in (*self.adapters.take_startable(), *self.kv_loads.take_startable()):
            self._queue(request)
        met = self.kv_loads.take_met()
        for request in met:
            self._remove_from_workers(request)
            self.kv_loads.rejoin(request)
            self.waiting.push(request)
        if self._awaits_drafts():
            return self._chain()
        self._next_victim = None
        is_shared = len(self.waiting.shares) > 1
        if is_shared:
            self._preempt_for_share()
        self._admits = self._next_victim is None
        max_rows, max_tokens = self.token_budget.share(self.running, self.waiting, self.in_flight.num_tokens)
        plan = PlanBuilder(
            self.in_flight.next_step,
            is_chunked=self.config.enable_chunked_prefill,
            workers_keep_tokens=self.workers_keep_tokens,
        )
        while self._window_moved:
            self.blocks.free_out_of_window(self._window_moved.pop())

        self._schedule_decodes(plan, max_rows, max_tokens)
        num_decodes, num_plain = plan.num_rows, len(plan.changed)
        context = self.running.decode_context * num_decodes // max(1, len(self.running.decoding))
        max_rows = min(max_rows, self.config.max_sampled_tokens - plan.output.num_draft_tokens)
        self._schedule_chunks(plan, self.structured_output.ready, PlanLimits(max_rows, max_tokens, max_tokens))
        num_decodes = plan.num_rows
        context += sum(request.num_computed_tokens for request in plan.changed[num_plain:])
        is_latency_bound = bool(self.running.decoding or self.structured_output or self.drafts_in_flight)
        waits_for_encoder = False
        measures_decodes = self.token_budget.measures_decodes(num_decodes, self.running.prefilling, self.waiting)
        if self.encoder_cache.has_requests and not measures_decodes:
            waits_for_encoder = not self.waiting and all(map(self.encoder_cache.is_awaited_by, self.running.prefilling))
            within: TowerTime | None = None
            if is_latency_bound and self.config.dynamic_chunking:
                within = self.token_budget.tower_time(num_decodes, context, waits_for_encoder)
            self.encoder_cache.start(within)
        max_prompt_tokens = self.token_budget.max_prompt_tokens(
            num_decodes,
            context,
            self.running.prefilling,
            self.waiting,
            self.encoder_cache.planned_work,
            is_latency_bound=is_latency_bound,
            waits_for_encoder=waits_for_encoder,
        )
        max_prompt_tokens = 0 if measures_decodes else min(max_prompt_tokens, max_tokens - plan.num_tokens)
        max_chunk = self.token_budget.max_chunk(
            max_prompt_tokens, len(self.running.prefilling) + len(self.waiting), is_alone=len(self.requests) == 1
        )
        limits = PlanLimits(max_rows, plan.num_tokens + max_prompt_tokens, max_chunk)
        chunks: Sequence[Request] = self.running.prefilling
        if is_shared and chunks:
            chunks = sorted(chunks, key=lambda request: request.share.served)
            first = self._first_waiting()
            if first is not None and first.share.served < chunks[0].share.served:
                self._admit(plan, limits, at_most=1)
        if met:  # they have been before the running prompts, or some of them
            chunks = [*chunks]
            self._admit(plan, limits, at_most=len(met))
        self._schedule_chunks(plan, chunks, limits)
        self._admit(plan, limits)
        if self.kv_transfers.is_open:
            self._offer_next()

        if (
            plan.num_rows
            or self.encoder_cache.has_planned
            or self.adapters.has_changes
            or self.kv_transfers.has_changes
        ):
            work = self.encoder_cache.planned_work
            output, rows = self._finish_plan(plan)
            self.token_budget.on_scheduled(output, rows, num_decodes, context, work)
            return output
        if len(self.in_flight) and len(self.requests) >= self.stages:
            self.stats.idle_stage_steps += max(0, self.stages - len(self.in_flight))
        return None

    def heartbeat(self) -> SchedulerOutput:
        """Return a plan without rows, which every rank answers."""
        return self._finish_plan(PlanBuilder(self.in_flight.next_step))[0]

    def _finish_plan(self, plan: PlanBuilder) -> tuple[SchedulerOutput, list[Request]]:
        """Ask for drafts after the plan, and return it and the requests of its rows."""
        if plan.num_rows and isinstance(self.speculation, ModelSpeculationManager):
            num_reserved, has_time = len(self.running.decoding) * self.kv.num_groups, not self._has_prompts
            self.draft_steps.ask(plan, self.speculation, num_reserved, has_time=has_time)
        output, rows = plan.finish()
        output.freed_slots, output.media = self.running.take_freed_slots(), self.encoder_cache.take_plan()
        output.adapters, output.kv_copies = self.adapters.take_plan(), self.kv_transfers.take_plan()
        self.in_flight.add(output, rows)
        self.stats.steps += 1
        return output, rows

    def _schedule_decodes(self, plan: PlanBuilder, max_rows: int, max_tokens: int) -> None:
        """Schedule the pending token of each decode: only its slot number unless it needs a block."""
        unchanged, step = plan.decodes, plan.output.step
        ready = (
            self.running.decoding
            if self.workers_keep_tokens
            else [r for r in self.running.decoding if not self.in_flight.contains(r)]
        )
        ready = ready[: min(max_rows, max_tokens)]
        if self.kv.states and self.speculation is not None:  # a decode may have several pending tokens
            counts = accumulate(max(1, request.num_pending_tokens) for request in ready)
            # No row is left out forever: pending tokens are no more than a step may sample, and so fit into a step.
            ready = ready[: max(1, sum(count <= max_tokens for count in counts))]
        drafts = self._draft(ready)
        for request in ready:
            computed = request.num_computed_tokens
            if request in drafts:
                continue
            if computed < request.decode_until:
                request.num_computed_tokens = computed + 1
                request.last_step = step
                unchanged.append(request)
            else:
                self._extend_decode(plan, request)
        for request, tokens in drafts.items():
            self._schedule_drafts(plan, request, tokens)
        self.running.decode_context += len(unchanged)

    def _extend_decode(self, plan: PlanBuilder, request: Request) -> None:
        """Schedule a decode whose last block is full, if it can be now."""
        if request.slot is None or request is self._next_victim:
            return
        if request.num_computed_tokens >= request.max_tokens - 1:
            self.running.end_decode(request)
            return
        count = max(1, request.num_pending_tokens)
        if not self._make_room(request, count):
            return
        new_blocks = self.blocks.advance(request, count)
        if self.kv.states:
            self._window_moved.append(request)
        self.running.decode_context += count
        request.decode_until = self.blocks.decode_until(request)
        plan.add_decode(request, count, new_blocks)

    def _draft(self, decodes: Sequence[Request]) -> dict[Request, list[int]]:
        """Return the drafts of decodes, if the tokens of all of them are known."""
        if self.speculation is None or self._has_prompts or self._spare_pages <= 0:
            return {}
        if any(not r.num_pending_tokens or r is self._next_victim for r in decodes):
            return {}
        return self.speculation.draft(decodes, len(self.structured_output.ready))

    @property
    def _spare_pages(self) -> int:
        """Free pages less those that decodes may need in this step: drafts preempt nobody."""
        return self.kv.num_free - len(self.running.decoding) * self.kv.num_groups

    def _schedule_drafts(self, plan: PlanBuilder, request: Request, drafts: list[int]) -> None:
        """Schedule a decode with drafts, for whose result the request waits; without them if there is no memory for
        their KV.
        """
        if request.slot is None:
            return
        self.blocks.free_out_of_window(request)
        count = request.num_pending_tokens + len(drafts)
        if self.blocks.pages_needed(request, count) > self._spare_pages:
            self._extend_decode(plan, request)
            return
        self.running.end_decode(request)
        self.drafts_in_flight.add(request, len(drafts))
        plan.add_decode(request, count, self.blocks.advance(request, count), drafts)

    @property
    def _has_prompts(self) -> bool:
        """Whether the next plan has prompts to compute: then a step has no time to spare for drafts."""
        return bool(self.running.prefilling) or (
            len(self.waiting) > 0 and bool(self.running.free_slots) and not self._is_blocked
        )

    def _awaits_drafts(self) -> bool:
        """Whether the next plan of a single stage must wait for the one in flight, because it can have drafts then."""
        if self.speculation is None or self.stages > 1 or not len(self.in_flight) or self._has_prompts:
            return False
        if self.drafts_in_flight or self.draft_steps.are_in_flight:
            return True
        return self._spare_pages > 0 and bool(
            self.speculation.draft(self.running.decoding, len(self.structured_output.ready))
        )

    def _chain(self) -> SchedulerOutput | None:
        """Return a plan whose rows are all chained to those in flight; None if the core must wait for their results."""
        if not isinstance(self.speculation, ModelSpeculationManager) or self.structured_output:
            return None
        if len(self.waiting) > 0 and (self.running.free_slots or len(self.waiting.shares) > 1):  # one may be admitted
            return None
        requests = sorted((*self.running.decoding, *self.drafts_in_flight), key=order)
        if not self.draft_steps.can_chain(requests, self.speculation):
            return None
        for request in requests:
            self.running.end_decode(request)
        return self._finish_plan(self.draft_steps.chain(requests))[0]

    def _schedule_chunks(self, plan: PlanBuilder, queue: Sequence[Request], limits: PlanLimits) -> None:
        """Schedule the requests of `queue` that fit."""
        for request in queue[:]:
            if plan.is_full(limits):
                break
            if request.slot is None or request is self._next_victim:
                continue  # it was preempted by an earlier row, or will be
            if self.kv_loads.awaits_copies(request):
                continue
            count = self._chunk_size(plan, request, limits)
            if count and self._make_room(request, count):
                self._schedule_chunk(plan, request, count)

    def _chunk_size(self, plan: PlanBuilder, request: Request, limits: PlanLimits) -> int:
        """Return how many of a request's pending tokens fit. While decodes leave too little room for an image that must
        be in one row, nobody is admitted."""
        count = min(plan.chunk(request, limits), self.kv_loads.row_tokens(request))
        if count and (request.core_request.media or self.encoder_cache.joins_text):
            count = self.encoder_cache.limit_chunk(request, count, self.config.max_num_batched_tokens - plan.num_tokens)
            self._admits &= not self.encoder_cache.lacks_tokens
        return count

    def _schedule_chunk(self, plan: PlanBuilder, request: Request, count: int) -> None:
        """Add a row of pending tokens. After its last chunk a request becomes a decode, or sends its grammar mask."""
        assert request.slot is not None
        plan.add_chunk(request, count, self.blocks.advance(request, count))
        if request.core_request.media:
            self.encoder_cache.hold(request, count)
        self.waiting.serve(request, count)
        if self.kv.windows:
            self._window_moved.append(request)
        if request.num_pending_tokens:
            return
        discard(self.running.prefilling, request)
        if request.grammar is not None:
            plan.output.masks[request.slot] = self.structured_output.on_scheduled(request)
        else:
            self.running.begin_decode(request)
            request.decode_until = self.blocks.decode_until(request)

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt until `count` more tokens fit; returns False if preempting all requests of lower priority is not
        enough, or not needed, because copies to the KV store will have ended in time for the next plan or so."""
        self.blocks.free_out_of_window(request)
        needed = self.blocks.pages_needed(request, count)
        if needed > self.kv.num_free:
            self.kv_loads.make_room(needed)
            if 0 < needed - self.kv.num_free <= self.kv_transfers.num_returning:
                return False
        while needed > self.kv.num_free:
            last_first = reversed(self.waiting.by_place(self.running))
            if not self._preempt(takewhile(lambda victim: victim is not request, last_first)):
                return False
        return True

    def _first_waiting(self) -> Request | None:
        """Return the waiting request to admit next, if there is one and it need not wait; those before it that wait for
        an adapter, or for KV from the store, leave the queue."""
        # If blocks are scarce, nobody knows for how many requests they suffice: the lowest load goes first.
        num_places = 0 if self._is_blocked else self.config.max_num_seqs
        while (request := self.waiting.peek(num_places)) is not None:
            if not self.adapters.can_start(request):
                self.adapters.wait(request)
            elif not (num_free := len(self.running.free_slots)):
                break
            elif (is_taken := self.kv_loads.take(request, num_free)) is None:
                self._is_blocked = True
                return None
            elif not is_taken:
                break
            self.waiting.withdraw(request)
        return request

    def _admit(self, plan: PlanBuilder, limits: PlanLimits, at_most: int | None = None) -> None:
        """Admit waiting requests, and schedule their first chunks."""
        for _ in repeat(None) if at_most is None else range(at_most):
            if plan.is_full(limits) or not self.running.free_slots or not self._admits:
                break
            request = self._first_waiting()
            if request is None or not self._start(plan, request, limits):
                break
            plan.add_new(request, self.kv.block_table(request.block_ids), self.adapters.slot_of(request))
            self._schedule_chunk(plan, request, self._chunk_size(plan, request, limits))

    def _find_prefix(self, request: Request) -> list[int] | None:
        blocks, loads, row_tokens = self.blocks, self.kv_loads, self.config.max_num_batched_tokens
        prefix = blocks.find_prefix(request, row_tokens, loads.num_reserved(request))
        while prefix is None and loads.make_way(request, only_expected=bool(self.running)):
            prefix = blocks.find_prefix(request, row_tokens, loads.num_reserved(request))
        self._is_blocked = prefix is None
        return prefix

    def _start(self, plan: PlanBuilder, request: Request, limits: PlanLimits) -> bool:
        """Give a waiting request a slot and its cached prefix; returns False if it cannot be admitted now."""
        prefix = self._find_prefix(request)
        if prefix is None:
            return False
        request.num_computed_tokens = self.kv.num_tokens_in(len(prefix))
        if not self._chunk_size(plan, request, limits):
            request.num_computed_tokens = 0
            return False
        self.waiting.pop(request)
        self.blocks.start(request, prefix)
        self.adapters.start(request)
        self.kv_transfers.start(request, len(prefix) // self.kv.num_groups)
        request.num_drafter_tokens = request.num_computed_tokens  # whoever has filled these blocks
        self.running.start(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.started_at = time.monotonic()
            if not request.is_resumed:  # the replica that began it has counted its prompt
                self.stats.prefix_queried_tokens += request.num_prompt_tokens
                self.stats.prefix_hit_tokens += request.num_cached_tokens
                self.stats.prompt_tokens += request.num_prompt_tokens
        return True

    def _offer_next(self) -> None:
        """Let the next requests that hand over offer the KV store what they will compute, as far as the next plan has
        room for them."""
        room = self.config.max_num_batched_tokens - sum(
            request.num_pending_tokens for request in self.running.prefilling
        )
        for request in chain(self.kv_loads.waiting, self.waiting.first(_MAX_OFFERED_NEXT)):
            if room <= 0 or self._is_blocked:
                break
            self.kv_transfers.offer_ahead(request)
            room -= len(request.token_ids)

    def _preempt_for_share(self) -> None:
        """Preempt the newest request of the most loaded share, if the next request finds no place and its share has a
        lower load even with it.

        So each preemption makes the loads more equal, and none is undone by another.
        """
        if self.running.free_slots and not self._is_blocked:
            return
        if (request := self._first_waiting()) is None or (share := self.waiting.overloaded(request.share)) is None:
            return
        if not self.running.free_slots or self._find_prefix(request) is None:
            self._preempt(victim for victim in reversed(self.running) if victim.share is share)

    def _preempt(self, candidates: Iterable[Request]) -> bool:
        """Preempt the first of these requests that is not in flight; returns whether there was one. A request whose
        grammar has not processed the last token counts as in flight.

        The preempted request is queued again and recomputes its tokens, mostly from the prefix cache; its output does
        not change. If all candidates are in flight, the first one is not scheduled again, so that it can be preempted
        when its result has arrived.
        """
        first = None
        for victim in candidates:
            if not self.in_flight.contains(victim) and not self.structured_output.is_processing(victim):
                self._requeue(victim)
                self._admits = False
                return True
            first = first or victim
        if first is not None:
            self._next_victim = first
            self._admits = False
            first.decode_until = 0
        return False

    def _requeue(self, request: Request) -> None:
        """Queue a running request again; its next output says so."""
        self._remove_from_workers(request)
        self.waiting.push(request)
        request.preempted_after = [*request.preempted_after, request.running_seconds]  # sent outputs share the old list
        request.is_plain = False
        self.stats.preemptions += 1

    # --- results ----------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens of a plan; returns the new outputs by API process."""
        assert plan.step == result.step, f"result of step {result.step} for plan {plan.step}"
        rows, outputs, num_accepted = self.in_flight.rows[plan.step], OutputsByClient(), self.stats.num_accepted_tokens
        if result.adapter_failures:
            self._end_adapted(result.adapter_failures, outputs)
        if result.failure:
            self._fail(plan, result.failure, outputs)
        if result.encoding_failures:
            self._end_with(result.encoding_failures, outputs)
        self.in_flight.finish(plan)
        self.kv.mark_written(plan.step)
        self.kv_transfers.on_finished()
        self.encoder_cache.on_finished(plan.step)
        if self.speculation is not None:
            self.speculation.on_result(plan, None if result.failure else time.perf_counter())
        for number, scored in result.prompt_logprobs.items():  # they are not computed again after a preemption
            request = rows[number]
            if request.finish_reason is None:
                request.num_scored_tokens += len(scored)
                outputs.add(request, EngineCoreOutput(request.request_id, [], prompt_logprobs=scored))
        for number, vector in result.vectors.items():
            if rows[number].finish_reason is None:
                output = self._end(rows[number], "stop")
                output.vector = vector
                outputs.add(rows[number], output)
        client, client_outputs = -1, EngineCoreOutputs()
        results = zip(rows, result.token_ids, result.logprobs or repeat(None), strict=False)  # the last may be infinite
        for row, (request, token_id, logprobs) in enumerate(results):
            if token_id < 0 or request.finish_reason is not None:
                continue
            if request.client != client:
                client, client_outputs = request.client, outputs.of(request)
            if request in self.drafts_in_flight:
                sampled = [token_id, *result.accepted.get(row, [])]
                scores = [logprobs, *result.accepted_logprobs.get(row, [])]
                num_made = len(result.draft_token_ids.get(row, []))
                client_outputs.outputs.append(self._verify(request, sampled, scores, num_made))
                continue
            tokens = request.token_ids
            tokens.append(token_id)
            if request.is_plain and len(tokens) < request.max_tokens and token_id not in request.stops:
                client_outputs.request_ids.append(request.request_id)
                client_outputs.token_ids.append(token_id)
            elif request.grammar is not None and token_id not in request.stops:
                self.structured_output.on_sampled(request, token_id, logprobs)
            else:
                client_outputs.outputs.append(self._make_output(request, [token_id], [logprobs]))
        if isinstance(self.speculation, ModelSpeculationManager) and result.draft_token_ids:
            self.speculation.add_drafts({rows[row]: drafts for row, drafts in result.draft_token_ids.items()})
        self.stats.generated_tokens += outputs.num_tokens
        if not result.failure:
            self._count_tokens(plan, self.stats.num_accepted_tokens - num_accepted)
        return outputs

    def _count_tokens(self, plan: SchedulerOutput, num_accepted: int) -> None:
        """Count the tokens of a step, except drafts that do not count and drafts that are computed again."""
        num_tokens = plan.num_tokens
        if self.speculation is not None:
            num_tokens += (0 if self.kv.states else num_accepted) - plan.num_draft_tokens
        if num_tokens:
            self.stats.iteration_tokens[bisect_left(ITERATION_TOKENS, num_tokens)] += 1
            self.stats.iteration_tokens[-1] += num_tokens

    def process_structured(self, *, is_idle: bool) -> dict[int, EngineCoreOutputs]:
        """Process sampled tokens of structured outputs, within a time budget; returns the new outputs by API process.

        To be called once per iteration, after `update`. `is_idle`: no plan is in flight.
        """
        outputs = OutputsByClient()
        for request, output in self.structured_output.process(is_idle=is_idle):
            self._on_output(request, output)
            outputs.add(request, output)
        self.stats.generated_tokens += outputs.num_tokens
        return outputs

    def _fail(self, plan: SchedulerOutput, reason: str, outputs: OutputsByClient) -> None:
        """End the requests of a failed plan with an error. The plans in flight after it are skipped by the workers.

        Requests with rows only in the skipped plans are queued again and recompute their tokens. No other request can
        have used the blocks that these plans published, because an admitted request has a row in the admitting plan.
        """
        skipped = self.in_flight.fail(plan.step)
        if skipped is None:
            return
        for request in (*self.in_flight.rows[plan.step], *self.encoder_cache.encoded_for(plan.step)):
            if request.finish_reason is None:
                output = self._end(request, "error")
                output.error = reason
                outputs.add(request, output)
        for request in skipped:
            if request.slot is not None:
                self._requeue(request)
        self.kv.unpublish_unwritten()
        self.kv_transfers.on_failed(plan.step)
        self.encoder_cache.on_failed(plan.step)

    def _end_with(self, failures: dict[bytes, str], outputs: OutputsByClient) -> None:
        """End the requests with images that could not be encoded."""
        ended = self.encoder_cache.requests_with(failures)
        for request in ended:
            first = next(item for item in request.core_request.media if item.digest in failures)
            output = self._end(request, "error")
            output.error = failures[first.digest]
            outputs.add(request, output)
        for request in {*ended, *chain.from_iterable(self.in_flight.rows.values())}:
            if starts := [item.offset for item in request.core_request.media if item.digest in failures]:
                self._withdraw(request, starts[0])
        self.encoder_cache.drop(failures)

    def _end_adapted(self, failures: dict[bytes, str], outputs: OutputsByClient) -> None:
        """End the requests with adapters that could not be placed."""
        for digest, reason in failures.items():
            for request in self.adapters.requests_of(digest):
                output = self._end(request, "error")
                output.error = reason
                outputs.add(request, output)
            self.adapters.on_failed(digest)
        for request in {*chain.from_iterable(self.in_flight.rows.values())}:
            adapter = request.core_request.adapter
            if adapter is not None and adapter.digest in failures:
                self._withdraw(request, 0)

    def _withdraw(self, request: Request, start: int) -> None:
        """Drop what was computed of a request from this token on: it is wrong, also if the request has been aborted
        since. No other request can have used it: the hashes of such blocks include the image, or the adapter."""
        self.kv.unpublish(request.hashes[self.kv.num_full_blocks(start) :])
        self.kv_transfers.withdraw(request)

    def _verify(
        self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs | None], num_made: int
    ) -> EngineCoreOutput:
        """Process the result of the oldest row in flight of a request with drafts: take back the drafts that do not
        count, and return the output.

        `sampled` are the tokens at the places of the drafts that count, and the one after them; `num_made` drafts of
        the following tokens were made, which a chained row has.
        """
        num_drafts, num_missing = self.drafts_in_flight.on_result(request, num_made)
        num_accepted = len(sampled) - 1
        num_computed = 0 if self.kv.states else num_accepted
        request.num_computed_tokens -= num_drafts - num_computed + num_missing
        ends = (at + 1 for at, token_id in enumerate(sampled) if token_id in request.stops)
        sampled = sampled[: min(next(ends, len(sampled)), request.max_tokens - len(request.token_ids))]
        request.token_ids += sampled
        output = self._make_output(request, sampled, logprobs[: len(sampled)])
        num_told = min(num_accepted, len(sampled))  # drafts after the end count nowhere
        output.num_accepted_tokens, output.num_rejected_tokens = num_told, num_drafts - num_told
        self.stats.num_drafts += num_drafts > 0
        self.stats.num_draft_tokens += num_drafts
        self.stats.num_accepted_tokens += num_told
        for place in range(num_told):
            self.stats.accepted_per_position[place] += 1
        if isinstance(self.speculation, ModelSpeculationManager):
            self.speculation.on_verified(is_stop=request.finish_reason == "stop")
        if request.finish_reason is None and request not in self.drafts_in_flight:
            if not self.in_flight.contains(request):  # otherwise it is chained: the workers know
                request.unsent_to_workers, request.num_accepted = sampled, num_computed
            self.running.begin_decode(request)
            request.decode_until = 0  # the next row tells the workers
        return output

    def _make_output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs | None]
    ) -> EngineCoreOutput:
        """Return an output with more than a plain token; finishes the request if the last token does."""
        token_id = token_ids[-1]
        reason: FinishReason | None = None
        if token_id in request.stops:
            reason = "stop"
        elif len(request.token_ids) >= request.max_tokens:
            reason = "length"
        request.is_plain = request.core_request.params.logprobs is None
        output = request.output(
            [*request.unsent_to_client, *token_ids],
            [each for each in logprobs if each is not None] or None,
            reason,
            token_id if token_id in request.stops else None,
        )
        self._on_output(request, output)
        return output

    def _on_output(self, request: Request, output: EngineCoreOutput) -> None:
        """Finish a request with its last output here, unless it goes on. One that hands over continues elsewhere."""
        if output.finish_reason is None:
            return
        self._finish(request, output.finish_reason)
        core_request = request.core_request
        if core_request.hands_over and output.finish_reason == "length":
            output.is_handed_over = len(request.token_ids) < self.limits.max_tokens(core_request)
            output.finish_reason = None if output.is_handed_over else "length"

    # --- state ------------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineStats:
        """Return the counters and the updated gauges."""
        self.stats.running = len(self.running)
        self.stats.waiting = len(self.requests) - len(self.running)
        self.stats.prefilling = len(self.running.prefilling)
        self.stats.kv_blocks_used = self.kv.num_blocks - self.kv.num_free_blocks
        self.adapters.count()
        self.kv_transfers.count()
        return self.stats

    def check_integrity(self) -> None:
        """Assert that requests, slots, blocks and queues agree. Called by tests after every step."""
        # There are slots for the drafts in flight, and for those that are made next.
        most_drafts = 0 if self.speculation is None else self.speculation.config.num_speculative_tokens
        max_row = self.config.max_num_batched_tokens + 2 * most_drafts
        self.blocks.check_integrity(self.running, max_row, self.kv_transfers.block_lists())
        self.structured_output.check_integrity(self.in_flight.last_finished)
        drafted = self.drafts_in_flight
        drafted.check_integrity(len(self.in_flight))
        waiting = self.waiting.check_integrity(self.running)
        unqueued = (
            *self.adapters.check_integrity(self.running, self.requests.values(), self.encoder_cache.user),
            *self.kv_transfers.check_integrity(self.requests.values()),
        )
        requests = [id(r) for r in (*self.running, *waiting, *unqueued)]
        assert sorted(requests) == sorted(id(r) for r in self.requests.values())
        self.running.check_integrity(self.structured_output, drafted)
        self.encoder_cache.check_integrity(self.running)
        for request in self.running:
            least = request.num_computed_tokens - drafted.num_drafts(request)
            assert least < len(request.token_ids) + self.config.depth
            assert max(request.num_computed_tokens + 1, len(request.token_ids)) <= request.max_tokens
        assert all(r.num_scored_tokens < r.num_prompt_tokens for r in self.requests.values())
        queued = (*waiting, *unqueued)
        assert all(r.slot is None and not r.block_ids and not r.num_computed_tokens for r in queued)
