"""The steps at whose ends the workers make drafts: slots for the drafts, and rows that are chained to such a step.

While a step with drafts is in flight, the core does not know where its rows end. A chained row continues there all the
same, with the drafts that are made there (`CachedRequestData.is_chained`): the workers know the place. It moves its
request forward by the maximum number of tokens, and is placed within the limits even then; the results take back the
excess.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.config.engine_config import EngineConfig
from quire.engine.scheduler.drafts_in_flight import DraftsInFlight
from quire.engine.scheduler.model_drafts import ModelSpeculationManager
from quire.engine.scheduler.plan_builder import PlanBuilder
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks


class DraftSteps:
    """Asks for drafts in plans, and knows which step in flight makes some."""

    def __init__(
        self, config: EngineConfig, blocks: RequestBlocks, in_flight: PlansInFlight, drafts: DraftsInFlight
    ) -> None:
        self._blocks, self._in_flight, self._drafts = blocks, in_flight, drafts
        drafter, num_ranks = config.drafter, config.parallel.tensor_parallel_size
        self.all_ranks_draft = drafter is None or drafter.parallel.tensor_parallel_size == num_ranks
        """Whether each rank of the last stage has the drafts, and so can continue with them."""
        self._last_step, self._last_count = -1, 0
        """The last step at whose end the workers make drafts, and how many for a row, at most."""

    @property
    def are_in_flight(self) -> bool:
        """Whether drafts are being made that the core does not have yet."""
        return self._last_step > self._in_flight.last_finished

    def ask(
        self, plan: PlanBuilder, speculation: ModelSpeculationManager, num_reserved: int, *, has_time: bool
    ) -> None:
        """Have the workers make drafts after this step, if the next plan has time for them, and give them slots.

        Where blocks are scarce, as `num_reserved` pages are for others, rows have no slots in advance, and fewer
        drafts.
        """
        rows, output, kv = plan.rows, plan.output, self._blocks.kv
        drafting = [request for request in rows if self._goes_on(request)] if has_time else []
        output.num_drafts = speculation.num_drafts(drafting, len(rows), has_prompts=output.num_prefill_tokens > 0)
        if output.num_drafts is None:
            return
        if output.num_drafts:
            self._last_step, self._last_count = output.step, output.num_drafts
            added: dict[Request, list[int]] = {}
            for request in () if kv.states else drafting:  # with states, drafts end with the block
                end = min(request.num_computed_tokens + output.num_drafts, request.max_tokens)
                if 0 < kv.pages_needed(request.block_ids, end) <= kv.num_free - num_reserved:
                    added[request] = self._blocks.extend(request, end)
            plan.add_blocks(added)
        counts = [1] * len(plan.decodes) + [row.num_tokens for row in output.scheduled]
        speculation.on_drafter_runs(output.step, zip(plan.rows, counts, strict=True))

    def _goes_on(self, request: Request) -> bool:
        """Whether a request that has a row in the current plan samples there, and can have drafts then."""
        least = request.num_computed_tokens - self._drafts.num_drafts(request)
        return request.grammar is None and not request.num_pending_tokens and least < request.max_tokens - 2

    @property
    def _num_tokens(self) -> int:
        """Maximum tokens of a row that is chained to the last step."""
        return 1 + (self._last_count if self._last_step == self._in_flight.next_step - 1 else 0)

    def can_chain(self, requests: Sequence[Request], speculation: ModelSpeculationManager) -> bool:
        """Whether all of these requests can have chained rows in the next plan, and should."""
        count, kv = self._num_tokens, self._blocks.kv
        if not self.all_ranks_draft or kv.states or len(self._in_flight) > 1 or not (self._drafts or count > 1):
            return False
        last_step = self._in_flight.next_step - 1
        if any(r.last_step != last_step or r.num_computed_tokens + count >= r.max_tokens for r in requests):
            return False
        pages = sum(max(0, self._blocks.pages_needed(request, count)) for request in requests)
        most = speculation.max_sampled_tokens
        if not 0 < len(requests) * count <= most or pages + len(requests) * kv.num_groups > kv.num_free:
            return False
        return speculation.may_chain(requests, count - 1)

    def chain(self, requests: Sequence[Request]) -> PlanBuilder:
        """Return a plan of chained rows."""
        plan, count = PlanBuilder(self._in_flight.next_step), self._num_tokens
        for request in requests:
            self._blocks.free_out_of_window(request)
            self._drafts.add(request, count - 1)
            plan.add_chained(request, count, self._blocks.advance(request, count))
        return plan
