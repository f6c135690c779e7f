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
row advances past them, and it waits for the result, which takes back those that do not count. A recurrent state cannot
go back, so it is kept as it is before the drafts, and the request's next row computes those that count once more.
Drafts of a model are made by the workers at the end of a step, in slots that the rows get in advance, and arrive with
its result. While drafts pay, a single stage runs ahead only if all rows can be chained: they continue where the workers
are at the end of the step in flight (`_chain`).
`quire.engine.scheduler.token_budget` decides how many tokens a plan contains.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat, takewhile

import msgspec

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.protocol.stats import ITERATION_TOKENS, EngineStats
from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.grammar import GrammarCompiler
from quire.engine.scheduler.kv_cache_manager import KVCacheManager, extend_hashes
from quire.engine.scheduler.model_drafts import ModelSpeculationManager, make_speculation
from quire.engine.scheduler.request import Request, Share
from quire.engine.scheduler.request_queue import RequestQueue, discard, insert, order
from quire.engine.scheduler.speculation import SpeculationManager
from quire.engine.scheduler.structured_output import StartedGrammar, StructuredOutputManager
from quire.engine.scheduler.token_budget import TokenBudget


class Scheduler:
    """Owns the requests from `add` to their last output, and their KV blocks."""

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        self.config = config.scheduler
        self.stages = config.parallel.pipeline_parallel_size
        self.workers_keep_tokens = self.stages == 1
        """The stage that samples also embeds the tokens, so plans need not send them back to it."""
        self.is_pooling = config.model.pooling is not None
        """Embedding model: a request finishes when its prompt is computed, as if `max_tokens` were 1."""
        self.max_model_len = config.model.max_model_len + self.is_pooling
        """Limit of prompt and output tokens together. A prompt for an embedding model may use the full length."""
        self.eos_token_ids = frozenset(config.model.eos_token_ids)
        self.kv = KVCacheManager(
            cache.num_blocks, cache.block_size, cache.enable_prefix_caching, cache.groups, cache.blocks_per_page
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        """Admitted requests, sorted by `Request.order`."""
        self.prefilling: list[Request] = []
        """Running requests with known tokens that are not scheduled yet, sorted the same way."""
        self.decoding: list[Request] = []
        """Running requests in decode, sorted the same way. A request whose last token is in flight is in neither."""
        self.grammars = GrammarCompiler(config.model)
        self.structured_output = StructuredOutputManager(self.grammars, workers_keep_tokens=self.workers_keep_tokens)
        """Running requests with structured output."""
        self.speculation: SpeculationManager | None = None
        if self.config.speculative is not None:
            block_size = cache.block_size if self.kv.states else None
            self.speculation = make_speculation(
                self.config.speculative,
                self.config.max_sampled_tokens,
                block_size,
                ranks_wait_for_cpu=config.parallel.device == "cpu" and config.parallel.tensor_parallel_size > 1,
            )
        self._drafted = DraftsInFlight()
        self._last_drafting_step, self._last_num_drafts = -1, 0
        """The last step at whose end the workers make drafts, and how many for a row, at most."""
        self._all_ranks_draft = config.drafter is None or config.drafter.parallel.tensor_parallel_size == (
            config.parallel.tensor_parallel_size
        )
        self.waiting = RequestQueue()
        self.token_budget = TokenBudget(self.config, self.stages)
        self._decode_context = 0
        """Sum of `num_computed_tokens` over `decoding`."""
        self.stats = EngineStats(kv_blocks=cache.num_blocks, started=time.time_ns() // 1_000_000)
        self._num_added = 0
        self._step = 0
        self._last_finished_step = -1
        """The last step whose result has arrived. A request with a later `last_step` is in flight."""
        self._rows_in_flight: dict[int, list[Request]] = {}
        """The requests of each plan in flight, row by row."""
        self._skipped_until = -1
        """After a failed step, the workers skip the plans in flight up to this step."""
        self._next_clears_failure = False
        """The next plan is the first one that the workers run after a failure."""
        self._tokens_in_flight = 0
        self._max_chunk = 0
        """Maximum tokens of a prompt in the current plan, with chunked prefill."""
        self._is_blocked = False
        """The next request was not admitted for lack of free blocks."""
        self._next_victim: Request | None = None
        """Left out of the current plan, so that it can be preempted when its result has arrived."""
        self._window_moved: list[Request] = []
        """With sliding windows: the requests that the last plan moved forward by more than one token."""
        self._free_slots = list(reversed(range(self.config.max_num_seqs)))
        self._freed_slots: list[int] = []
        """Slots that the next plan tells the workers to free."""

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # --- requests ---------------------------------------------------------------------------------------------

    def start_grammar(self, core_request: EngineCoreRequest) -> StartedGrammar:
        """Compile and start the grammar of a request with structured output, which `add` needs.

        May take long; can be called in any thread. Raises `GrammarError`.
        """
        return self.structured_output.start(core_request, self._max_tokens(core_request), self._stops(core_request))

    def add(self, core_request: EngineCoreRequest, started: StartedGrammar | None = None) -> EngineCoreOutput | None:
        """Queue a request. Returns its terminal output if the request can never run, or has nothing left to compute.

        `started` is the grammar of a request with structured output. A request that already has output tokens
        continues after them like a preempted one; its prompt log-probabilities have already been sent.
        """
        prompt, output = core_request.prompt_token_ids, core_request.output_token_ids
        error = None
        if core_request.request_id in self.requests:
            error = f"request id {core_request.request_id!r} is in use"
        elif not prompt:
            error = "the prompt is empty"
        elif len(prompt) >= self.max_model_len:
            maximum = self.max_model_len - self.is_pooling
            error = f"the prompt has {len(prompt)} tokens; the maximum model length is {maximum}"
        if error:
            return EngineCoreOutput(core_request.request_id, [], finish_reason="error", error=error)
        params, forced = core_request.params, [] if started is None else started.forced
        if started is not None and started.grammar.is_complete:
            return EngineCoreOutput(core_request.request_id, forced, finish_reason="stop")
        request = Request(
            core_request=core_request,
            client=core_request.client,
            request_id=core_request.request_id,
            order=(core_request.priority if self.config.policy == "priority" else 0, self._num_added),
            token_ids=prompt + output + forced,
            max_tokens=self._max_tokens(core_request),
            stops=self._stops(core_request),
            share=self.waiting.share(core_request.share, core_request.weight),
            num_scored_tokens=len(prompt) - 1 if output and params.prompt_logprobs is not None else 0,
            unsent_to_client=forced,
        )
        if started is not None:
            request.grammar, request.mask = started.grammar, started.mask
        if len(request.token_ids) >= request.max_tokens:
            return EngineCoreOutput(core_request.request_id, [], finish_reason="length")
        self._num_added += 1
        self.requests[core_request.request_id] = request
        self.waiting.add(request)
        return None

    def _max_tokens(self, core_request: EngineCoreRequest) -> int:
        limit = 1 if self.is_pooling else core_request.params.max_tokens
        if limit is None:
            return self.max_model_len
        return min(self.max_model_len, len(core_request.prompt_token_ids) + limit)

    def _stops(self, core_request: EngineCoreRequest) -> frozenset[int]:
        params = core_request.params
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)

    def abort(self, request_id: str) -> tuple[Request, EngineCoreOutput] | None:
        """Abort a request and free its blocks. Returns None if it has already ended."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return request, self._end(request, "abort")

    def _end(self, request: Request, reason: FinishReason) -> EngineCoreOutput:
        """Finish a request without another token; returns its terminal output."""
        self._finish(request, reason)
        return EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            running_seconds=request.running_seconds,
            preempted_after=request.preempted_after,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if self.speculation is not None:
            self.speculation.on_finish(request, len(self.running))
        del self.requests[request.request_id]
        self.waiting.finish(request)
        if request.slot is not None:
            self._remove_from_workers(request)

    def _remove_from_workers(self, request: Request) -> None:
        """Free a running request's slot and blocks; only its tokens are kept."""
        assert request.slot is not None
        self._publish(request)
        discard(self.running, request)
        discard(self.prefilling, request)
        self.structured_output.remove(request)
        self._end_decode(request)
        self._drafted.pop(request, None)
        request.num_accepted = 0
        request.share.count_running(-1)
        self.kv.free(self.kv.without_freed(request.block_ids))
        self._freed_slots.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = None
        request.block_ids = []
        request.num_computed_tokens = request.num_published = request.decode_until = 0

    # --- plans ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Return the next plan, or None if nothing can run until a plan in flight has finished."""
        if self._awaits_drafts():
            return self._chain()
        plan = SchedulerOutput(step=self._step, freed_slots=[], new=[], scheduled=[])
        self._next_victim = None
        is_shared = len(self.waiting.shares) > 1
        if is_shared:
            self._preempt_for_share()
        max_rows, tokens_left = self.token_budget.share(self.running, self.waiting, self._tokens_in_flight)
        self._max_chunk = tokens_left
        preemptions = self.stats.preemptions
        while self._window_moved:
            self._free_out_of_window(self._window_moved.pop())

        rows = self._schedule_decodes(plan, max_rows, tokens_left)
        num_plain, context = len(rows), self._context_of_decodes(len(rows))
        tokens_left = max(0, tokens_left - plan.num_tokens)
        max_rows = min(max_rows, self.config.max_sampled_tokens - plan.num_draft_tokens)
        tokens_left = self._schedule_chunks(plan, rows, self.structured_output.ready, max_rows, tokens_left)
        num_decodes = len(rows)
        context += sum(request.num_computed_tokens for request in rows[num_plain:])
        limit = self.token_budget.max_prompt_tokens(
            num_decodes,
            context,
            self.prefilling,
            self.waiting,
            is_latency_bound=bool(self.decoding or self.structured_output or self._drafted),
        )
        tokens_left = min(tokens_left, limit)
        self._max_chunk = self.token_budget.max_chunk(
            tokens_left, len(self.prefilling) + len(self.waiting), is_alone=len(self.requests) == 1
        )
        chunks: Sequence[Request] = self.prefilling
        if is_shared and chunks:
            chunks = sorted(chunks, key=lambda request: request.share.served)
            first = self._first_waiting()
            if first is not None and first.share.served < chunks[0].share.served:
                tokens_left = self._admit(plan, rows, max_rows, tokens_left, preemptions, at_most=1)
        tokens_left = self._schedule_chunks(plan, rows, chunks, max_rows, tokens_left)
        self._admit(plan, rows, max_rows, tokens_left, preemptions)

        if rows:
            if isinstance(self.speculation, ModelSpeculationManager):
                self._ask_for_drafts(plan, rows, self.speculation)
            self.token_budget.on_scheduled(plan, rows, num_decodes, context)
            return self._finish_plan(plan, rows)
        if self._rows_in_flight and len(self.requests) >= self.stages:
            self.stats.idle_stage_steps += max(0, self.stages - len(self._rows_in_flight))
        return None

    def heartbeat(self) -> SchedulerOutput:
        """Return a plan without rows, which every rank answers."""
        return self._finish_plan(SchedulerOutput(step=self._step, freed_slots=[], new=[], scheduled=[]), [])

    def _finish_plan(self, plan: SchedulerOutput, rows: list[Request]) -> SchedulerOutput:
        plan.freed_slots, self._freed_slots = self._freed_slots, []
        plan.clears_failure, self._next_clears_failure = self._next_clears_failure, False
        self._rows_in_flight[plan.step] = rows
        if num_tokens := plan.num_tokens:
            self._tokens_in_flight += num_tokens
            self.stats.iteration_tokens[bisect_left(ITERATION_TOKENS, num_tokens)] += 1
            self.stats.iteration_tokens[-1] += num_tokens
        self._step += 1
        self.stats.steps += 1
        return plan

    def _context_of_decodes(self, decodes: int) -> int:
        """Estimated number of KV tokens that this many of the decodes read."""
        return self._decode_context * decodes // max(1, len(self.decoding))

    def _schedule_decodes(self, plan: SchedulerOutput, max_rows: int, tokens_left: int) -> list[Request]:
        """Schedule the pending token of each decode: only its slot number unless it needs a block. Returns the rows."""
        unchanged: list[Request] = []
        extended: list[Request] = []
        ready = (
            self.decoding
            if self.workers_keep_tokens
            else [r for r in self.decoding if r.last_step <= self._last_finished_step]
        )
        ready = ready[: min(max_rows, tokens_left)]
        if self.kv.states and self.speculation is not None:  # a decode may have several pending tokens
            counts = accumulate(max(1, request.num_pending_tokens) for request in ready)
            # No row is left out forever: pending tokens are no more than a step may sample, and so fit into a step.
            ready = ready[: max(1, sum(count <= tokens_left for count in counts))]
        drafts = self._draft(ready)
        for request in ready:
            computed = request.num_computed_tokens
            if request in drafts:
                continue
            if computed < request.decode_until:
                request.num_computed_tokens = computed + 1
                request.last_step = plan.step
                unchanged.append(request)
            elif (row := self._extend_decode(request)) is not None:
                plan.scheduled.append(row)
                extended.append(request)
        for request, tokens in drafts.items():
            if (row := self._schedule_drafts(request, tokens)) is not None:
                plan.scheduled.append(row)
                extended.append(request)
        self._decode_context += len(unchanged)
        plan.decodes = [request.slot for request in unchanged]  # type: ignore[misc]  # a decode has a slot
        if not self.workers_keep_tokens:
            plan.token_ids = [request.token_ids[-1] for request in unchanged]
        return unchanged + extended

    def _extend_decode(self, request: Request) -> CachedRequestData | None:
        """Return the row of a decode whose last block is full, or None if it cannot be scheduled now."""
        if request.slot is None or request is self._next_victim:
            return None
        if request.num_computed_tokens >= request.max_tokens - 1:
            self._end_decode(request)
            return None
        count = max(1, request.num_pending_tokens)
        if not self._make_room(request, count):
            return None
        new_blocks = self._advance(request, count)
        if self.kv.states:
            self._window_moved.append(request)
        self._decode_context += count
        request.decode_until = self._decode_until(request)
        return self._decode_row(request, count, new_blocks, [])

    def _decode_row(self, request: Request, count: int, new_blocks: list[int], drafts: list[int]) -> CachedRequestData:
        """Return the row of a decode of `count` tokens, with what the workers do not know yet."""
        assert request.slot is not None
        new_tokens = request.unsent_to_workers or ([] if self.workers_keep_tokens else request.token_ids[-1:])
        row = CachedRequestData(request.slot, count, new_tokens, new_blocks, drafts, request.num_accepted)
        request.unsent_to_workers, request.num_accepted = [], 0
        return row

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
        return self.kv.num_free - len(self.decoding) * self.kv.num_groups

    def _schedule_drafts(self, request: Request, drafts: list[int]) -> CachedRequestData | None:
        """Return the row of a decode with drafts, for whose result the request waits; without them if there is no
        memory for their KV.
        """
        if request.slot is None:
            return None
        if self.kv.windows:
            self._free_out_of_window(request)
        count = request.num_pending_tokens + len(drafts)
        needed = self.kv.pages_needed(request.block_ids, request.num_computed_tokens + count)
        if needed > self._spare_pages:
            return self._extend_decode(request)
        self._end_decode(request)
        self._drafted.add(request, len(drafts))
        return self._decode_row(request, count, self._advance(request, count), drafts)

    def _ask_for_drafts(self, plan: SchedulerOutput, rows: list[Request], speculation: ModelSpeculationManager) -> None:
        """Have the workers make drafts after this step, if the next plan can use them, and give them slots.

        Where blocks are scarce, rows have no slots in advance, and fewer drafts.
        """
        drafting = [] if self._has_prompts else [request for request in rows if self._can_have_drafts(request)]
        plan.num_drafts = speculation.num_drafts(drafting, len(rows), has_prompts=plan.num_prefill_tokens > 0)
        if not plan.num_drafts:
            return
        self._last_drafting_step, self._last_num_drafts = plan.step, plan.num_drafts
        extended: dict[Request, list[int]] = {}
        for request in () if self.kv.states else drafting:  # with states, drafts end with the block
            known, computed = len(request.token_ids), request.num_computed_tokens
            end = min(computed + plan.num_drafts, request.max_tokens)
            if 0 < self.kv.pages_needed(request.block_ids, end) <= self._spare_pages:
                extended[request] = self.kv.extend(
                    request.block_ids, request.hashes, computed, end, known, request.num_prompt_tokens
                )
        unchanged, changed = rows[: len(plan.decodes)], rows[len(plan.decodes) :]
        for request, row in zip(changed, plan.scheduled, strict=True):
            row.new_block_ids += extended.get(request, [])
        moved = [request for request in unchanged if request in extended]
        if moved:
            plan.scheduled[:0] = [self._decode_row(request, 1, extended[request], []) for request in moved]
            unchanged = [request for request in unchanged if request not in extended]
            plan.decodes = [request.slot for request in unchanged]  # type: ignore[misc]  # a decode has a slot
            if not self.workers_keep_tokens:
                plan.token_ids = [request.token_ids[-1] for request in unchanged]
            rows[:] = [*unchanged, *moved, *changed]

    def _can_have_drafts(self, request: Request) -> bool:
        """Whether a request that has a row in the current plan samples there, and goes on."""
        least = request.num_computed_tokens - self._drafted.num_drafts(request)
        return request.grammar is None and not request.num_pending_tokens and least < request.max_tokens - 2

    @property
    def _has_prompts(self) -> bool:
        """Whether the next plan has prompts to compute: then a step has no time to spare for drafts."""
        return bool(self.prefilling) or (len(self.waiting) > 0 and bool(self._free_slots) and not self._is_blocked)

    def _awaits_drafts(self) -> bool:
        """Whether the next plan of a single stage must wait for the one in flight, because it can have drafts then."""
        if self.speculation is None or self.stages > 1 or not self._rows_in_flight or self._has_prompts:
            return False
        if self._drafted or self._last_drafting_step > self._last_finished_step:
            return True
        return self._spare_pages > 0 and bool(self.speculation.draft(self.decoding, len(self.structured_output.ready)))

    def _chain(self) -> SchedulerOutput | None:
        """Return a plan whose rows continue where those of the plan in flight end, with the drafts made there; None if
        it must wait for the result.

        A chained row moves forward by the maximum number of tokens, and is placed within the limits even then.
        """
        count = self._last_num_drafts if self._last_drafting_step == self._step - 1 else 0
        rows = sorted((*self.decoding, *self._drafted), key=order)
        if not self._can_chain(rows, 1 + count):
            return None
        assert isinstance(self.speculation, ModelSpeculationManager)
        plan = SchedulerOutput(step=self._step, freed_slots=[], new=[], scheduled=[])
        for request in rows:
            assert request.slot is not None
            assert not request.unsent_to_workers
            if self.kv.windows:
                self._free_out_of_window(request)
            self._end_decode(request)
            self._drafted.add(request, count)
            new_blocks = self._advance(request, 1 + count)
            plan.scheduled.append(CachedRequestData(request.slot, 1 + count, [], new_blocks, is_chained=True))
        self._ask_for_drafts(plan, rows, self.speculation)
        return self._finish_plan(plan, rows)

    def _can_chain(self, rows: list[Request], count: int) -> bool:
        """Whether all of these requests can have chained rows of `count` tokens in the next plan."""
        if not isinstance(self.speculation, ModelSpeculationManager):
            return False
        if not self._all_ranks_draft or self.kv.states or self.structured_output:
            return False
        if not (self._drafted or count > 1) or len(self._rows_in_flight) > 1:
            return False
        if len(self.waiting) > 0 and (self._free_slots or len(self.waiting.shares) > 1):  # one may be admitted
            return False
        if any(r.last_step != self._step - 1 or r.num_computed_tokens + count >= r.max_tokens for r in rows):
            return False
        ends = [(request.block_ids, request.num_computed_tokens + count) for request in rows]
        pages = sum(max(0, self.kv.pages_needed(*end)) for end in ends)
        most = self.speculation.max_sampled_tokens
        if not 0 < len(rows) * count <= most or pages + len(rows) * self.kv.num_groups > self.kv.num_free:
            return False
        return self.speculation.may_chain(rows, count - 1)

    def _schedule_chunks(
        self, plan: SchedulerOutput, rows: list[Request], queue: Sequence[Request], max_rows: int, tokens_left: int
    ) -> int:
        """Schedule the requests of `queue` that fit; returns the tokens left in the budget."""
        for request in queue[:]:
            if len(rows) >= max_rows or not tokens_left:
                break
            count = self._chunk(request, tokens_left)
            # A request without a slot was preempted by an earlier row.
            if not count or request.slot is None or request is self._next_victim:
                continue
            if self._make_room(request, count):
                self._schedule_chunk(plan, request, count)
                rows.append(request)
                tokens_left -= count
        return tokens_left

    def _schedule_chunk(self, plan: SchedulerOutput, request: Request, count: int) -> None:
        """Add a row of pending tokens. After its last chunk a request becomes a decode, or sends its grammar mask."""
        assert request.slot is not None
        new_blocks = self._advance(request, count)
        self.waiting.serve(request, count)
        plan.scheduled.append(CachedRequestData(request.slot, count, request.unsent_to_workers, new_blocks))
        if self.kv.windows:
            self._window_moved.append(request)
        if request.unsent_to_workers:
            request.unsent_to_workers = []
        if request.num_pending_tokens:
            return
        discard(self.prefilling, request)
        if request.grammar is not None:
            plan.masks[request.slot] = self.structured_output.on_scheduled(request)
        else:
            insert(self.decoding, request)
            self._decode_context += request.num_computed_tokens
            request.decode_until = self._decode_until(request)

    def _end_decode(self, request: Request) -> None:
        if discard(self.decoding, request):
            self._decode_context -= request.num_computed_tokens

    def _decode_until(self, request: Request) -> int:
        size = self.kv.block_size
        return min(-(-request.num_computed_tokens // size) * size, request.max_tokens - 1)

    def _chunk(self, request: Request, tokens_left: int) -> int:
        """Number of pending tokens that fit; without chunked prefill all or none."""
        pending = request.num_pending_tokens
        if self.config.enable_chunked_prefill:
            return min(pending, tokens_left, self._max_chunk)
        return pending if pending <= tokens_left else 0

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt until `count` more tokens fit; returns False if preempting all requests of lower priority is not
        enough."""
        if self.kv.windows:
            self._free_out_of_window(request)
        needed = self.kv.pages_needed(request.block_ids, request.num_computed_tokens + count)
        while needed > self.kv.num_free:
            if not self._preempt_lower_priority(request):
                return False
        return True

    def _free_out_of_window(self, request: Request) -> None:
        """Free the blocks outside the request's windows. The request must not have a row in the current plan.

        All rows of a step write KV before any row attends, so a later row could overwrite what this one still reads.
        """
        num_published = request.num_published
        self._publish(request)
        position = request.num_computed_tokens - self._drafted.num_drafts(request)
        self.kv.free_out_of_window(request.block_ids, position, num_published)

    def _advance(self, request: Request, count: int) -> list[int]:
        """Move a request forward by `count` tokens; returns the blocks allocated for them, which must be free."""
        start, known = request.num_computed_tokens, len(request.token_ids)
        end = request.num_computed_tokens = start + count
        new_blocks = self.kv.extend(request.block_ids, request.hashes, start, end, known, request.num_prompt_tokens)
        request.last_step = self._step
        if not self.kv.states:  # in a step, rows read states before others are written
            self._publish(request)
        return new_blocks

    def _publish(self, request: Request) -> None:
        """Add the request's full blocks of known, scheduled tokens to the prefix cache."""
        kv = self.kv
        if not kv.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // kv.block_size * kv.num_groups
        if full > request.num_published:
            extend_hashes(
                request.hashes, request.token_ids, kv.block_size, request.core_request.cache_salt, kv.num_groups
            )
            step = request.last_step if request.last_step > self._last_finished_step else None
            known = max(len(request.token_ids), request.num_computed_tokens)
            for index in range(request.num_published, full):
                block, boundary = request.block_ids[index], kv.num_tokens_in(index) + kv.block_size
                if block >= 0 and kv.is_kept(index % kv.num_groups, boundary, known):
                    kv.publish(block, request.hashes[index], step)
            request.num_published = full

    def _first_waiting(self) -> Request | None:
        """Return the waiting request to admit next."""
        # If blocks are scarce, nobody knows for how many requests they suffice: the lowest load goes first.
        return self.waiting.peek(0 if self._is_blocked else self.config.max_num_seqs)

    def _admit(
        self,
        plan: SchedulerOutput,
        rows: list[Request],
        max_rows: int,
        tokens_left: int,
        preemptions: int,
        at_most: int | None = None,
    ) -> int:
        """Admit waiting requests, and schedule their first chunks; returns the tokens left in the budget.

        After a preemption in this plan (`preemptions`: the number before it) nothing is admitted: the preempted request
        would be admitted and preempted again.
        """
        for _ in repeat(None) if at_most is None else range(at_most):
            if len(rows) >= max_rows or not tokens_left or not self._free_slots:
                break
            if self.stats.preemptions != preemptions or self._next_victim is not None:
                break
            request = self._first_waiting()
            if request is None or not self._start(request, tokens_left):
                break
            count = self._chunk(request, tokens_left)
            plan.new.append(self._new_request_data(request))
            self._schedule_chunk(plan, request, count)
            rows.append(request)
            tokens_left -= count
        return tokens_left

    def _cached_blocks(self, request: Request) -> list[int] | None:
        """Return the blocks of a waiting request's cached prefix, or None if it cannot be admitted now.

        It is admitted only if blocks for all its known tokens are free, so that it is not preempted at once.
        """
        kv = self.kv
        if kv.enable_prefix_caching:
            extend_hashes(
                request.hashes, request.token_ids, kv.block_size, request.core_request.cache_salt, kv.num_groups
            )
        # At least one token is computed, because the logits of the last token are not cached.
        cached = kv.match(request.hashes[: kv.num_full_blocks(request.num_reusable_tokens)])
        for prefix in (cached, []) if kv.states else (cached,):  # pages that are not full may hold a prefix
            needed = kv.max_pages_needed(len(request.token_ids), self.config.max_num_batched_tokens, prefix)
            self._is_blocked = not kv.can_allocate(needed, cached_blocks=kv.without_freed(prefix))
            if not self._is_blocked:
                return prefix
        return None

    def _start(self, request: Request, tokens_left: int) -> bool:
        """Give a waiting request a slot and its cached prefix; returns False if it cannot be admitted now."""
        cached, kv = self._cached_blocks(request), self.kv
        if cached is None:
            return False
        request.num_computed_tokens = kv.num_tokens_in(len(cached))
        if not self._chunk(request, tokens_left):
            request.num_computed_tokens = 0
            return False
        self.waiting.pop(request)
        kv.touch(kv.without_freed(cached))
        request.block_ids = cached
        request.num_published = len(cached)
        request.slot = self._free_slots.pop()
        request.share.count_running(1)
        insert(self.running, request)
        insert(self.prefilling, request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.started_at = time.monotonic()
            self.stats.prefix_queried_tokens += request.num_prompt_tokens
            self.stats.prefix_hit_tokens += request.num_cached_tokens
            self.stats.prompt_tokens += request.num_prompt_tokens
        return True

    def _new_request_data(self, request: Request) -> NewRequestData:
        assert request.slot is not None
        request.unsent_to_workers = []
        params = request.core_request.params
        if params.predicted_token_ids:  # which only the scheduler reads
            params = msgspec.structs.replace(params, predicted_token_ids=[])
        return NewRequestData(
            slot=request.slot,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=self.kv.block_table(request.block_ids),
            params=params,
            num_scored_tokens=request.num_scored_tokens,
            second_segment=request.core_request.second_segment,
        )

    def _preempt_lower_priority(self, request: Request) -> bool:
        """Preempt the lowest-priority request after this one that is not in flight; returns whether there was one."""
        return self._preempt(takewhile(lambda victim: victim is not request, reversed(self._by_place())))

    def _preempt_for_share(self) -> None:
        """Preempt the newest request of the most loaded share, if the next request finds no place and its share has a
        lower load even with it.

        So each preemption makes the loads more equal, and none is undone by another.
        """
        if self._free_slots and not self._is_blocked:
            return
        shares = [share for share in self.waiting.shares if share.num_running > 1]
        if not shares or (request := self._first_waiting()) is None:
            return
        share = max(shares, key=_load_without_newest)
        if _load_without_newest(share) <= request.share.load:
            return
        if not self._free_slots or self._cached_blocks(request) is None:
            self._preempt(victim for victim in reversed(self.running) if victim.share is share)

    def _by_place(self) -> list[Request]:
        """Return the running requests, the first one to preempt last.

        A request's place is the number of requests of its share before it, divided by the weight.
        """
        if len(self.waiting.shares) <= 1:
            return self.running
        seen: Counter[bytes] = Counter()
        places: list[tuple[float, tuple[int, int], Request]] = []
        for request in self.running:
            share = request.share
            places.append((seen[share.key] / share.weight, request.order, request))
            seen[share.key] += 1
        return [request for _, _, request in sorted(places)]

    def _preempt(self, candidates: Iterable[Request]) -> bool:
        """Preempt the first of these requests that is not in flight; returns whether there was one. A request whose
        grammar has not processed the last token counts as in flight.

        The preempted request is queued again and recomputes its tokens, mostly from the prefix cache; its output does
        not change. If all candidates are in flight, the first one is not scheduled again, so that it can be preempted
        when its result has arrived.
        """
        first = None
        for victim in candidates:
            if victim.last_step <= self._last_finished_step and not self.structured_output.is_processing(victim):
                self._requeue(victim)
                return True
            first = first or victim
        if first is not None:
            self._next_victim = first
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
        rows = self._rows_in_flight.pop(plan.step)
        outputs: dict[int, EngineCoreOutputs] = {}
        if result.failure and plan.step > self._skipped_until:
            self._fail(rows, result.failure, outputs)
        self._last_finished_step = plan.step
        self.kv.mark_written(plan.step)
        self._tokens_in_flight -= plan.num_tokens
        if self.speculation is not None:
            self.speculation.on_result(plan, None if result.failure else time.perf_counter())
        if result.prompt_logprobs:
            self._emit_prompt_logprobs(rows, result.prompt_logprobs, outputs)
        if result.vectors:
            self._emit_embeddings(rows, result.vectors, outputs)
        client, client_outputs = -1, EngineCoreOutputs()
        results = zip(rows, result.token_ids, result.logprobs or repeat(None), strict=False)  # the last may be infinite
        for request, token_id, logprobs in results:
            if token_id < 0 or request.finish_reason is not None:
                continue
            if request.client != client:
                client = request.client
                client_outputs = outputs.setdefault(client, EngineCoreOutputs())
            if request in self._drafted:
                row = rows.index(request)
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
        self._count_generated(outputs)
        return outputs

    def process_structured(self, *, is_idle: bool) -> dict[int, EngineCoreOutputs]:
        """Process sampled tokens of structured outputs, within a time budget; returns the new outputs by API process.

        To be called once per iteration, after `update`. `is_idle`: no plan is in flight.
        """
        outputs: dict[int, EngineCoreOutputs] = {}
        for request, output in self.structured_output.process(is_idle=is_idle):
            outputs.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)
            if output.finish_reason is not None:
                self._finish(request, output.finish_reason)
        self._count_generated(outputs)
        return outputs

    def _count_generated(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        self.stats.generated_tokens += sum(
            len(each.token_ids) + sum(len(output.token_ids) for output in each.outputs) for each in outputs.values()
        )

    def _fail(self, rows: list[Request], reason: str, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End the requests of a failed plan with an error. The plans in flight after it are skipped by the workers.

        Requests with rows only in the skipped plans are queued again and recompute their tokens. No other request can
        have used the blocks that these plans published, because an admitted request has a row in the admitting plan.
        """
        self._skipped_until, self._next_clears_failure = self._step - 1, True
        for request in rows:
            if request.finish_reason is None:
                output = self._end(request, "error")
                output.error = reason
                outputs.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)
        for request in {id(request): request for later in self._rows_in_flight.values() for request in later}.values():
            if request.slot is not None:
                self._requeue(request)
        self.kv.unpublish_unwritten()

    def _emit_prompt_logprobs(
        self, rows: list[Request], scores: dict[int, PromptLogprobs], outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Emit the prompt log-probabilities of a plan; they are not computed again after a preemption."""
        for row, scored in scores.items():
            request = rows[row]
            if request.finish_reason is None:
                request.num_scored_tokens += len(scored)
                output = EngineCoreOutput(request.request_id, [], prompt_logprobs=scored)
                outputs.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)

    def _emit_embeddings(
        self, rows: list[Request], vectors: dict[int, bytes], outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Finish the requests whose prompts were pooled, and emit their vectors."""
        for row, vector in vectors.items():
            request = rows[row]
            if request.finish_reason is None:
                output = self._end(request, "stop")
                output.vector = vector
                outputs.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)

    def _verify(
        self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs | None], num_made: int
    ) -> EngineCoreOutput:
        """Process the result of the oldest row in flight of a request with drafts: take back those that do not count,
        and return the output.

        `sampled` are the tokens at the places of the drafts that count, and the one after them; `num_made` drafts of
        what follows were made, which a chained row has.
        """
        num_drafts, num_missing = self._drafted.on_result(request, num_made)
        num_accepted = len(sampled) - 1
        num_computed = 0 if self.kv.states else num_accepted
        request.num_computed_tokens -= num_drafts - num_computed + num_missing
        ends = (at + 1 for at, token_id in enumerate(sampled) if token_id in request.stops)
        sampled = sampled[: min(next(ends, len(sampled)), request.max_tokens - len(request.token_ids))]
        request.token_ids += sampled
        output = self._make_output(request, sampled, logprobs[: len(sampled)])
        num_told = min(num_accepted, len(sampled))  # those after the end count nowhere
        output.num_accepted_tokens, output.num_rejected_tokens = num_told, num_drafts - num_told
        self.stats.num_drafts += num_drafts > 0
        self.stats.num_draft_tokens += num_drafts
        self.stats.num_accepted_tokens += num_told
        for place in range(num_told):
            self.stats.accepted_per_position[place] += 1
        if isinstance(self.speculation, ModelSpeculationManager):
            self.speculation.on_verified(is_stop=request.finish_reason == "stop")
        if request.finish_reason is None and request not in self._drafted:
            if request.last_step <= self._last_finished_step:  # otherwise it is chained: the workers know
                request.unsent_to_workers, request.num_accepted = sampled, num_computed
            insert(self.decoding, request)
            self._decode_context += request.num_computed_tokens
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
        if reason is not None:
            self._finish(request, reason)
        request.is_plain = request.core_request.params.logprobs is None
        return EngineCoreOutput(
            request_id=request.request_id,
            token_ids=[*request.unsent_to_client, *token_ids],
            logprobs=[each for each in logprobs if each is not None] or None,
            finish_reason=reason,
            stop_token_id=token_id if token_id in request.stops else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            running_seconds=request.running_seconds,
            preempted_after=request.preempted_after,
        )

    # --- state ------------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineStats:
        """Return the counters and the updated gauges."""
        self.stats.running = len(self.running)
        self.stats.waiting = len(self.waiting)
        self.stats.prefilling = len(self.prefilling)
        self.stats.kv_blocks_used = self.kv.num_blocks - self.kv.num_free_blocks
        return self.stats

    def check_integrity(self) -> None:
        """Assert that requests, slots, blocks and queues agree. Called by tests after every step."""
        self.kv.check_integrity(self.kv.without_freed(request.block_ids) for request in self.running)
        self.structured_output.check_integrity(self._last_finished_step)
        self._drafted.check_integrity(len(self._rows_in_flight))
        waiting = self.waiting.check_integrity(self.running)
        assert {id(r) for r in (*self.running, *waiting)} == {id(r) for r in self.requests.values()}
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots, key=lambda s: -1 if s is None else s) == list(range(self.config.max_num_seqs))
        for queue in (self.running, self.prefilling, self.decoding, self.structured_output.ready):
            assert queue == sorted(queue, key=order)
        queued = self.prefilling + self.decoding + self.structured_output.ready
        in_last_step = [r for r in self.running if r not in queued and r.grammar is None and r not in self._drafted]
        num_others = len(self.structured_output) + len(self._drafted)
        assert len(self.prefilling + self.decoding + in_last_step) + num_others == len(self.running)
        assert all(r.num_pending_tokens for r in self.prefilling)
        assert self._decode_context == sum(r.num_computed_tokens for r in self.decoding)
        assert all(r.num_computed_tokens == r.max_tokens - 1 for r in in_last_step)
        # There are slots for the drafts in flight, and for those that are made next.
        most_drafts = 0 if self.speculation is None else self.speculation.config.num_speculative_tokens
        max_row = self.config.max_num_batched_tokens + 2 * most_drafts
        for request in self.running:
            least = request.num_computed_tokens - self._drafted.num_drafts(request)
            assert len(request.block_ids) >= self.kv.num_blocks_for(request.num_computed_tokens)
            self.kv.check_windows(request.block_ids, least, max_row)
            assert least < len(request.token_ids) + self.config.depth
            assert max(request.num_computed_tokens + 1, len(request.token_ids)) <= request.max_tokens
        assert all(r.num_scored_tokens < r.num_prompt_tokens for r in self.requests.values())
        assert all(r.slot is None and not r.block_ids and not r.num_computed_tokens for r in waiting)


def _load_without_newest(share: Share) -> float:
    return (share.num_running - 1) / share.weight
