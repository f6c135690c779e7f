"""Which tokens run next.

Every turn makes one plan of at most `max_num_batched_tokens`: first the requests that wait for one token (decodes),
then longer rests (prefill chunks), then new requests. Nothing here knows a phase: a row moves a request forward by some
tokens, and the worker samples when it reaches the end of what is known. Decodes and chunks are kept apart only so that
a step touches no more than what changes: a decode costs one comparison until it needs a block or may end.

With a single stage the workers keep what they sample, so the next token of a decode can be planned while the one before
is still under way. Nothing is planned beyond a length limit, which is known beforehand; a stop token is not, and the
row of a request that has met one is computed in vain. Its blocks may go to others at once, because workers run plans
in order.

A structured output is held back until its token came back (see `quire.engine.scheduler.structured_output`). With
pipeline stages, one plan for each is in flight, and a decode waits for its token. How many tokens a plan takes is
decided in `quire.engine.scheduler.token_budget`.
"""

from __future__ import annotations

import time
from itertools import repeat

from quire.engine.config.options import EngineConfig
from quire.engine.protocol.messages import (
    CachedRequestData,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from quire.engine.scheduler.grammar import Grammar, GrammarCompiler
from quire.engine.scheduler.kv_cache_manager import KVCacheManager, extend_hashes
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_queue import RequestQueue, discard, insert, order
from quire.engine.scheduler.structured_output import StructuredOutputManager
from quire.engine.scheduler.token_budget import TokenBudget


class Scheduler:
    """Owns the requests from `add` to their last output, and the KV blocks they hold."""

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        self.config = config.scheduler
        self.stages = config.parallel.pipeline_parallel_size
        self.workers_keep = self.stages == 1
        """The stage that samples is the one that reads tokens, so they need not be sent back to it."""
        self.pools = config.model.pooling is not None
        """The model embeds: a request ends when its prompt is computed, as if one token were to be sampled then."""
        self.max_model_len = config.model.max_model_len + self.pools
        """Tokens of prompt and output together. A prompt that is embedded may fill the model's length."""
        self.eos_token_ids = frozenset(config.model.eos_token_ids)
        self.kv = KVCacheManager(cache.num_blocks, cache.block_size, cache.enable_prefix_caching, cache.groups)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        """Admitted, in the order of `Request.order`."""
        self.prefilling: list[Request] = []
        """Those with more known tokens than plans compute, in the same order."""
        self.decoding: list[Request] = []
        """Those that go on by one token, in the same order. Whose last token is under way is in neither list."""
        self.grammars = GrammarCompiler(config.model)
        self.structured_output = StructuredOutputManager(self.grammars, workers_keep=self.workers_keep)
        """Those that go on by a grammar."""
        self.waiting = RequestQueue()
        self.token_budget = TokenBudget(self.config, self.stages)
        self._decode_context = 0
        """Tokens computed of all that are decoding."""
        self.stats = EngineStats(kv_blocks=cache.num_blocks, started=time.time_ns() // 1_000_000)
        self._arrivals = 0
        self._step = 0
        self._done = -1
        """The last step that came back: a request with a later `last_step` is in flight."""
        self._rows: dict[int, list[Request]] = {}
        """Requests of each plan in flight, row for row."""
        self._skipped_until = -1
        """A plan that failed has made the workers skip those behind it up to this one."""
        self._resumes = False
        """The next plan is the first that they are to run again."""
        self._tokens_in_flight = 0
        self._held: Request | None = None
        """Left out of the plan being made, so that it can be preempted when it has come back."""
        self._outgrown: list[Request] = []
        """Those whose windows the last plan has moved by more than a token, if there are windows."""
        self._free_slots = list(reversed(range(self.config.max_num_seqs)))
        self._released: list[int] = []
        """Slots that the workers are to forget with the next plan."""

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, submit: EngineCoreRequest, grammar: Grammar | None = None) -> EngineCoreOutput | None:
        """Queue a request; returns its terminal output at once if it can never run, or need not.

        A request for structured output comes with its compiled grammar. One that comes with output goes on like one
        that was preempted behind it: its prompt's log-probabilities have been told.
        """
        prompt, output = submit.prompt_token_ids, submit.output_token_ids
        error = None
        if submit.request_id in self.requests:
            error = f"request id {submit.request_id!r} is in use"
        elif not prompt:
            error = "the prompt is empty"
        elif len(prompt) >= self.max_model_len:
            error = f"the prompt has {len(prompt)} tokens; the model's length is {self.max_model_len - self.pools}"
        if error:
            return EngineCoreOutput(submit.request_id, [], finish_reason="error", error=error)
        params = submit.params
        limit = 1 if self.pools else params.max_tokens
        request = Request(
            submit=submit,
            client=submit.client,
            request_id=submit.request_id,
            order=(submit.priority if self.config.policy == "priority" else 0, self._arrivals),
            token_ids=prompt + output,
            max_tokens=self.max_model_len if limit is None else min(self.max_model_len, len(prompt) + limit),
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids),
            num_scored_tokens=len(prompt) - 1 if output and params.prompt_logprobs is not None else 0,
            grammar=grammar,
        )
        if len(request.token_ids) >= request.max_tokens:
            return EngineCoreOutput(submit.request_id, [], finish_reason="length")
        if grammar is not None and (end := self.structured_output.begin(request)) is not None:
            return end
        self._arrivals += 1
        self.requests[submit.request_id] = request
        self.waiting.push(request)
        return None

    def abort(self, request_id: str) -> tuple[Request, EngineCoreOutput] | None:
        """End a request now; its blocks are free before the next plan is made. None if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return request, self._end(request, "abort")

    def _end(self, request: Request, reason: FinishReason) -> EngineCoreOutput:
        """End a request without another token; returns its terminal output."""
        self._finish(request, reason)
        return EngineCoreOutput(
            request.request_id, [], finish_reason=reason, num_cached_tokens=request.num_cached_tokens or 0
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self.requests[request.request_id]
        if request.slot is None:
            self.waiting.end_one()
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take a running request off the workers: nothing of it stays but its tokens."""
        assert request.slot is not None
        self._publish(request)
        discard(self.running, request)
        discard(self.prefilling, request)
        self.structured_output.leave(request)
        self._end_decode(request)
        self.kv.release(self.kv.held(request.block_ids))
        self._released.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = None
        request.block_ids = []
        request.num_computed_tokens = request.num_published = request.decode_until = 0

    # --- a plan goes out --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next plan, or None when nothing can run before a plan in flight comes back."""
        plan = SchedulerOutput(step=self._step, released=[], new=[], scheduled=[])
        max_rows, tokens_left = self.token_budget.share(self.running, self.waiting, self._tokens_in_flight)
        preemptions = self.stats.preemptions
        self._held = None
        while self._outgrown:
            self._give_back(self._outgrown.pop())

        rows = self._plan_decodes(plan, min(max_rows, tokens_left))
        num_plain, context = len(rows), self._context_of(len(rows))
        tokens_left = self._plan_chunks(plan, rows, self.structured_output.ready, max_rows, tokens_left - num_plain)
        num_decodes = len(rows)
        context += sum(request.num_computed_tokens for request in rows[num_plain:])
        most = self.token_budget.prompt_tokens(
            num_decodes,
            context,
            self.prefilling,
            self.waiting,
            is_latency_bound=bool(self.decoding or self.structured_output),
        )
        tokens_left = min(tokens_left, most)
        tokens_left = self._plan_chunks(plan, rows, self.prefilling, max_rows, tokens_left)

        # Whoever was thrown out in this turn, or is about to be, would only come back to be thrown out again.
        while len(rows) < max_rows and tokens_left and self.stats.preemptions == preemptions and self._held is None:
            admitted = self._admit(tokens_left)
            if admitted is None:
                break
            request, count = admitted
            plan.new.append(self._introduce(request))
            self._plan_chunk(plan, request, count, self._needed(request, count))
            rows.append(request)
            tokens_left -= count

        if rows:
            self.token_budget.on_scheduled(plan, rows, num_decodes, context)
            return self._on_scheduled(plan, rows)
        if self._rows and len(self.requests) >= self.stages:
            self.stats.idle_stage_steps += max(0, self.stages - len(self._rows))
        return None

    def heartbeat(self) -> SchedulerOutput:
        """A plan without rows, which every rank answers."""
        return self._on_scheduled(SchedulerOutput(step=self._step, released=[], new=[], scheduled=[]), [])

    def _on_scheduled(self, plan: SchedulerOutput, rows: list[Request]) -> SchedulerOutput:
        plan.released, self._released = self._released, []
        plan.resumes, self._resumes = self._resumes, False
        self._rows[plan.step] = rows
        self._tokens_in_flight += plan.num_tokens
        self._step += 1
        self.stats.steps += 1
        return plan

    def _context_of(self, decodes: int) -> int:
        """KV tokens that so many of the decodes read."""
        return self._decode_context * decodes // max(1, len(self.decoding))

    def _plan_decodes(self, plan: SchedulerOutput, limit: int) -> list[Request]:
        """One more token for each decode: a bare slot unless it needs a block. Returns the rows."""
        steady: list[Request] = []
        grown: list[Request] = []
        ready = self.decoding if self.workers_keep else [r for r in self.decoding if r.last_step <= self._done]
        for request in ready[:limit]:
            computed = request.num_computed_tokens
            if computed < request.decode_until:
                request.num_computed_tokens = computed + 1
                request.last_step = plan.step
                steady.append(request)
            elif (row := self._grow(request)) is not None:
                plan.scheduled.append(row)
                grown.append(request)
        self._decode_context += len(steady)
        plan.decodes = [request.slot for request in steady]  # type: ignore[misc]  # who decodes has a slot
        if not self.workers_keep:
            plan.token_ids = [request.token_ids[-1] for request in steady]
        return steady + grown

    def _grow(self, request: Request) -> CachedRequestData | None:
        """The row of a decode at the end of its blocks, or None if it can not go on now."""
        if request.slot is None or request is self._held:
            return None
        if request.num_computed_tokens >= request.max_tokens - 1:
            self._end_decode(request)
            return None
        needed = self._make_room(request, 1)
        if needed is None:
            return None
        new_blocks = self._advance(request, 1, needed)
        self._decode_context += 1
        request.decode_until = self._decode_until(request)
        return CachedRequestData(request.slot, 1, [] if self.workers_keep else request.token_ids[-1:], new_blocks)

    def _plan_chunks(
        self, plan: SchedulerOutput, rows: list[Request], queue: list[Request], max_rows: int, tokens_left: int
    ) -> int:
        """Rows for those of a queue that fit; returns the tokens that are left."""
        for request in queue[:]:
            if len(rows) == max_rows or not tokens_left:
                break
            count = self._chunk(request, tokens_left)
            # A request without a slot was preempted by a row before it.
            if not count or request.slot is None or request is self._held:
                continue
            needed = self._make_room(request, count)
            if needed is not None:
                self._plan_chunk(plan, request, count, needed)
                rows.append(request)
                tokens_left -= count
        return tokens_left

    def _plan_chunk(self, plan: SchedulerOutput, request: Request, count: int, needed: int) -> None:
        """A row of a request with pending tokens; with its last chunk it becomes a decode, or takes its mask along."""
        assert request.slot is not None
        new_blocks = self._advance(request, count, needed)
        plan.scheduled.append(CachedRequestData(request.slot, count, request.unsent_to_workers, new_blocks))
        if self.kv.windows:
            self._outgrown.append(request)
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
        """How many of its pending tokens fit; without chunked prefill all or none."""
        pending = request.num_pending_tokens
        if pending <= tokens_left or self.config.enable_chunked_prefill:
            return min(pending, tokens_left)
        return 0

    def _needed(self, request: Request, count: int) -> int:
        """Blocks that `count` more tokens need beyond those it holds."""
        return self.kv.blocks_for(request.num_computed_tokens + count) - len(request.block_ids)

    def _make_room(self, request: Request, count: int) -> int | None:
        """Preempt until `count` more tokens fit: the blocks that they need, which are free then.

        None if those that go after this request do not suffice.
        """
        if self.kv.windows:
            self._give_back(request)
        needed = self._needed(request, count)
        while needed > self.kv.num_free:
            if not self._preempt_below(request):
                return None
        return needed

    def _give_back(self, request: Request) -> None:
        """Release what lies behind its windows. It must not have a row in the plan that is being made.

        For all rows of a step write before any of them attends: a later row could write what this one still reads.
        """
        self._publish(request)
        self.kv.give_back_behind(request.block_ids, request.num_computed_tokens)

    def _advance(self, request: Request, count: int, needed: int) -> list[int]:
        """Move a request forward by `count` tokens; returns the `needed` blocks that it gets for them."""
        new_blocks = self.kv.take(needed)
        request.block_ids += new_blocks
        request.num_computed_tokens += count
        request.last_step = self._step
        self._publish(request)
        return new_blocks

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that are full of known tokens, once a plan computes them."""
        kv = self.kv
        if not kv.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // kv.block_size * kv.num_groups
        if full > request.num_published:
            extend_hashes(request.hashes, request.token_ids, kv.block_size, request.submit.cache_salt, kv.num_groups)
            step = request.last_step if request.last_step > self._done else None
            for index in range(request.num_published, full):
                if (block := request.block_ids[index]) >= 0:
                    kv.publish(block, request.hashes[index], step)
            request.num_published = full

    def _admit(self, tokens_left: int) -> tuple[Request, int] | None:
        """Give the first waiting request a slot and its cached prefix; returns it and the size of its first chunk.

        It is let in only if all its known tokens fit beside those that run, so that it is not thrown out at once.
        """
        request = self.waiting.first()
        if request is None or not self._free_slots:
            return None
        kv = self.kv
        if kv.enable_prefix_caching:
            extend_hashes(request.hashes, request.token_ids, kv.block_size, request.submit.cache_salt, kv.num_groups)
        # At least one token is computed: the logits of the last one are not in the cache.
        cached = kv.match(request.hashes[: kv.full_blocks(request.num_reusable_tokens)])
        held = kv.held(cached)
        needed = kv.blocks_at_once(len(request.token_ids), self.config.max_num_batched_tokens, cached)
        if not kv.can_take(needed, beside=held):
            return None
        request.num_computed_tokens = kv.tokens_in(len(cached))
        count = self._chunk(request, tokens_left)
        if not count:
            request.num_computed_tokens = 0
            return None
        self.waiting.pop()
        kv.hold(held)
        request.block_ids = cached
        request.num_published = len(cached)
        request.slot = self._free_slots.pop()
        insert(self.running, request)
        insert(self.prefilling, request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.stats.prefix_queried_tokens += request.num_prompt_tokens
            self.stats.prefix_hit_tokens += request.num_cached_tokens
            self.stats.prompt_tokens += request.num_prompt_tokens
        return request, count

    def _introduce(self, request: Request) -> NewRequestData:
        assert request.slot is not None
        request.unsent_to_workers = []
        return NewRequestData(
            slot=request.slot,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=self.kv.table(request.block_ids),
            params=request.submit.params,
            num_scored_tokens=request.num_scored_tokens,
        )

    def _preempt_below(self, request: Request) -> bool:
        """Send the last request that goes after this one, and is not in flight, back to the queue.

        It will compute its tokens again, mostly from the prefix cache; its answer does not change. If all are in
        flight, the last one is held back, to be preempted when it has come back.
        """
        for victim in reversed(self.running):
            if victim is request:
                break
            if victim.last_step <= self._done:
                self._leave(victim)
                self.waiting.push(victim)
                self.stats.preemptions += 1
                return True
        if self.running[-1] is not request:
            self._held = self.running[-1]
            self._held.decode_until = 0
        return False

    # --- a result comes back ----------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take in the sampled tokens of a plan; returns what is new for each API process."""
        assert plan.step == result.step, f"result of step {result.step} for plan {plan.step}"
        rows = self._rows.pop(plan.step)
        news: dict[int, EngineCoreOutputs] = {}
        if result.failure and plan.step > self._skipped_until:
            self._fail(rows, result.failure, news)
        self._done = plan.step
        self.kv.written(plan.step)
        self._tokens_in_flight -= plan.num_tokens
        if result.prompt_logprobs:
            self._tell_prompts(rows, result.prompt_logprobs, news)
        if result.vectors:
            self._tell_vectors(rows, result.vectors, news)
        structured_output: list[tuple[Request, EngineCoreOutput]] = []
        client, mine = -1, EngineCoreOutputs()
        columns = zip(rows, result.token_ids, result.logprobs or repeat(None), strict=False)  # the last may be endless
        for request, token_id, logprobs in columns:
            if token_id < 0 or request.finish_reason is not None:
                continue
            if request.client != client:
                client = request.client
                mine = news.setdefault(client, EngineCoreOutputs())
            tokens = request.token_ids
            tokens.append(token_id)
            if request.is_plain and len(tokens) < request.max_tokens and token_id not in request.stops:
                mine.request_ids.append(request.request_id)
                mine.token_ids.append(token_id)
            else:
                output = self._tell(request, token_id, logprobs)
                mine.outputs.append(output)
                if request.grammar is not None and output.finish_reason is None:
                    structured_output.append((request, output))
        if structured_output:
            self._go_on(structured_output)
        self.stats.generated_tokens += sum(
            len(each.token_ids) + sum(len(output.token_ids) for output in each.outputs) for each in news.values()
        )
        return news

    def _fail(self, rows: list[Request], reason: str, news: dict[int, EngineCoreOutputs]) -> None:
        """End the requests of a plan that was not carried out. The plans behind it are not carried out either.

        Whoever has rows in those alone is sent back to the queue, and computes its tokens again. Nobody else can have
        found what the plans have published: whoever is admitted has a row in the plan that admits it.
        """
        self._skipped_until, self._resumes = self._step - 1, True
        for request in rows:
            if request.finish_reason is None:
                output = self._end(request, "error")
                output.error = reason
                news.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)
        for request in {id(request): request for later in self._rows.values() for request in later}.values():
            if request.slot is not None:
                self._leave(request)
                self.waiting.push(request)
                self.stats.preemptions += 1
        self.kv.unpublish_unwritten()

    def _tell_prompts(
        self, rows: list[Request], scores: dict[int, PromptLogprobs], news: dict[int, EngineCoreOutputs]
    ) -> None:
        """Pass on what a plan has scored of prompts; what has been told is not computed again."""
        for row, scored in scores.items():
            request = rows[row]
            if request.finish_reason is None:
                request.num_scored_tokens += len(scored)
                output = EngineCoreOutput(request.request_id, [], prompt_logprobs=scored)
                news.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)

    def _tell_vectors(self, rows: list[Request], vectors: dict[int, bytes], news: dict[int, EngineCoreOutputs]) -> None:
        """End the requests whose prompts a plan has pooled."""
        for row, vector in vectors.items():
            request = rows[row]
            if request.finish_reason is None:
                output = self._end(request, "stop")
                output.vector = vector
                news.setdefault(request.client, EngineCoreOutputs()).outputs.append(output)

    def _tell(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> EngineCoreOutput:
        """The output of a request that has more to tell than a token; ends it if the token does."""
        reason: FinishReason | None = None
        error: str | None = None
        reported = [*request.unsent_to_client, token_id]
        if token_id in request.stops:
            reason = "stop"
        elif request.grammar is not None:
            reason, error = self.structured_output.follow(request, token_id, reported)
        elif len(request.token_ids) >= request.max_tokens:
            reason = "length"
        if reason is not None:
            self._finish(request, reason)
        request.unsent_to_client = []
        request.is_plain = request.submit.params.logprobs is None and request.grammar is None
        return EngineCoreOutput(
            request_id=request.request_id,
            token_ids=reported,
            logprobs=None if logprobs is None else [logprobs],
            finish_reason=reason,
            stop_token_id=token_id if token_id in request.stops else None,
            error=error,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    def _go_on(self, structured_output: list[tuple[Request, EngineCoreOutput]]) -> None:
        """Let structured outputs go on, or end those that cannot."""
        errors = self.structured_output.go_on([request for request, _ in structured_output])
        for (request, output), error in zip(structured_output, errors, strict=True):
            if error is not None:
                output.finish_reason, output.error = "error", error
                self._finish(request, "error")

    # --- from outside -----------------------------------------------------------------------------------------

    def snapshot(self) -> EngineStats:
        """The gauges brought up to date, with the counters."""
        self.stats.running = len(self.running)
        self.stats.waiting = len(self.waiting)
        self.stats.kv_blocks_used = self.kv.num_blocks - self.kv.num_free
        return self.stats

    def check_integrity(self) -> None:
        """Assert that requests, slots, blocks and queues agree. Called by tests after every step."""
        self.kv.check_integrity(self.kv.held(request.block_ids) for request in self.running)
        self.structured_output.check_integrity(self._done)
        waiting = self.waiting.check_integrity()
        assert {id(r) for r in (*self.running, *waiting)} == {id(r) for r in self.requests.values()}
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots, key=lambda s: -1 if s is None else s) == list(range(self.config.max_num_seqs))
        for queue in (self.running, self.prefilling, self.decoding, self.structured_output.ready):
            assert queue == sorted(queue, key=order)
        queued = self.prefilling + self.decoding + self.structured_output.ready
        last_under_way = [r for r in self.running if r not in queued and r.grammar is None]
        assert len(self.prefilling + self.decoding + last_under_way) + len(self.structured_output) == len(self.running)
        assert all(r.num_pending_tokens for r in self.prefilling)
        assert self._decode_context == sum(r.num_computed_tokens for r in self.decoding)
        assert all(r.num_computed_tokens == r.max_tokens - 1 for r in last_under_way)
        for request in self.running:
            self.kv.check_windows(request.block_ids, request.num_computed_tokens, self.config.max_num_batched_tokens)
            assert request.num_computed_tokens < len(request.token_ids) + self.config.depth
            assert max(request.num_computed_tokens + 1, len(request.token_ids)) <= request.max_tokens
        assert all(r.num_scored_tokens < r.num_prompt_tokens for r in self.requests.values())
        assert all(r.slot is None and not r.block_ids and not r.num_computed_tokens for r in waiting)
