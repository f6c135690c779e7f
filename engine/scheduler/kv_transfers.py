"""KV outside the device: loads from the KV store of the host, and stores to it.

Plain Python, no torch: the store is another process (`quire.engine.kv_store`), the ranks copy, and this module only
does the bookkeeping. Messages and copies are in `quire.engine.protocol.kv_store`.

`KVLoads` (`kv_loads`) decides what is loaded, `KVStores` (`kv_stores`) what is stored, and `OffersAhead`
(`kv_offers_ahead`) what is offered early. `CopiesInFlight` (`kv_copies_in_flight`) has the copies of both, and
`KVStoreConnection` (`kv_connection`) says whether there is a store. A store that has been silent for some seconds is
not used until it answers again. A store that was restarted has another arena: everything about the earlier one is
forgotten, and copies in flight end by themselves.

Invariants (`check_integrity`):
- each load and each copy holds references to its blocks, and a block of a load is not in the prefix cache before all
  ranks have copied it;
- the request of a load is in no queue, unless it computes beside the load;
- the pages held for stores are within their limit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.protocol.kv_store import (
    TIERS_HEARD,
    ClearKV,
    FoundKV,
    FromStore,
    GrantedKV,
    HeardKVTiers,
    KVCopied,
    KVCopyPlan,
    KVStoreOpened,
    KVTiersChanged,
    LoadedKV,
    ToStore,
)
from quire.engine.protocol.stats import EngineStats
from quire.engine.scheduler.kv_connection import SILENCE_SECONDS, KVStoreConnection
from quire.engine.scheduler.kv_copies_in_flight import CopiesInFlight
from quire.engine.scheduler.kv_loads import KVLoads, LoadCopy
from quire.engine.scheduler.kv_stores import KVStores
from quire.engine.scheduler.plans_in_flight import PlansInFlight
from quire.engine.scheduler.request import Request
from quire.engine.scheduler.request_blocks import RequestBlocks
from quire.engine.scheduler.running_requests import RunningRequests
from quire.engine.scheduler.token_budget import TokenBudget

logger = logging.getLogger(__name__)


class KVTransferManager:
    """Coordinates loads and stores."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: RequestBlocks,
        in_flight: PlansInFlight,
        running: RunningRequests,
        token_budget: TokenBudget,
        stats: EngineStats,
    ) -> None:
        self._kv, self._stats = blocks.kv, stats
        self._store = KVStoreConnection(() if config.kv_store is None else kv_layout(config).kinds)
        if self._kv.listener is not None:
            self._kv.listener.groups_of = [kind.groups for kind in self._store.kinds]
        self._copies = CopiesInFlight(in_flight, config.parallel.world_size)
        self.loads = KVLoads(config, self._store, self._copies, blocks, in_flight, running, token_budget, stats)
        self.stores = KVStores(config, self._store, self._copies, blocks, in_flight, stats)
        parallel = config.parallel
        self._spans_hosts = len(parallel.ranks_of(parallel.first_node)) < parallel.world_size
        """Whether some ranks are not on the store's host."""

    @property
    def is_open(self) -> bool:
        """Whether there is a store that answers."""
        return self._store.is_open

    @property
    def arena(self) -> str:
        """The path of the store's arena, which identifies the store."""
        return self._store.arena

    def connect(self, send: Callable[[ToStore], None], replica: int, incarnation: int) -> None:
        """Use a store. `send` must not block."""
        self._store.connect(send, replica, incarnation, has_events=self._kv.listener is not None)

    # --- requests ---------------------------------------------------------------------------------------------

    def offer_ahead(self, request: Request) -> None:
        """Offer the first blocks of a request that will start soon, if it hands over."""
        if self._store.kinds:
            self.stores.offer_ahead(request)

    def start(self, request: Request, length: int) -> None:
        """Note that a request starts, with `length` cached blocks of each group."""
        if self._store.kinds:
            self.stores.start(request, self.loads.start(request, length), length)

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and does not run."""
        if self._store.kinds:
            self.loads.finish(request)
            self.stores.finish(request)

    def withdraw(self, request: Request) -> None:
        """Store nothing that the steps in flight compute for a request."""
        self.stores.withdraw(request)

    def on_finished(self) -> None:
        """Report the copies of steps whose results have come as stored."""
        self.stores.on_finished()

    def on_failed(self, step: int) -> None:
        """Store nothing that this step and later ones in flight should have computed."""
        self.stores.on_failed(step)

    # --- messages ---------------------------------------------------------------------------------------------

    def on_message(self, message: FromStore) -> None:
        """Process a message of the store."""
        self._store.hear()
        match message:
            case KVStoreOpened():
                self._on_opened(message)
            case FoundKV():
                self.loads.on_found(message)
            case LoadedKV():
                self.loads.on_loaded(message)
            case GrantedKV():
                self.stores.on_granted(message)
            case KVTiersChanged() if self._store.is_open and self._kv.listener is not None:
                self._kv.listener.on_tiers_changed(message)
                if message.number % TIERS_HEARD == TIERS_HEARD - 1:
                    self._store.send(HeardKVTiers(message.number))

    def _on_opened(self, message: KVStoreOpened) -> None:
        """Use the store once it has announced this arena twice: the first time, it may not know this core. A store that
        some ranks cannot reach is not used."""
        if self._spans_hosts and not message.address:
            return
        if message.path == self._store.arena:
            self._store.is_open = True
            return
        self._store.use(message)
        self._close()
        self.stores.change_arena()
        self._store.open(time.monotonic())

    def _close(self) -> None:
        """Do without the store until it answers again. It may have ended, so ranks unmap its memory."""
        self._store.is_open = False
        if self._kv.listener is not None:
            self._kv.listener.on_tiers_lost()
        self._copies.forget_arena()
        self.loads.close()
        self.stores.close()

    def reset(self) -> None:
        """Forget all loads and stores in progress, because the prefix cache is being reset."""
        self.loads.reset()
        for copy in self._copies.by_number.values():
            copy.has_failed = True
        self.stores.reset()

    def clear(self, call_id: int) -> None:
        """Make the store forget everything; its answer, if there is one, is `KVCleared`."""
        self._store.send(ClearKV(call_id))

    def on_copied(self, message: KVCopied) -> None:
        """Process a rank's answer."""
        self._stats.kv_failed_copies += len(message.failed)
        ended = [*self._copies.on_copied(message)]
        self.loads.on_copied([copy for copy in ended if isinstance(copy, LoadCopy)])
        self.stores.on_copied([copy for copy in ended if not isinstance(copy, LoadCopy)])
        self.stores.copy_granted()

    # --- time and plans ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Do what is due. Must be called before each plan, and after `seconds_left` without one."""
        if not self._store.has_store:
            return
        now = time.monotonic()
        self.loads.begin_turn(now)
        if not self._store.is_open:
            return self._store.open_again(now)
        if self._store.is_silent(now):
            logger.warning(
                "the KV store has been silent for %g s; requests compute their prefixes until it answers",
                SILENCE_SECONDS,
            )
            return self._close()
        if self._kv.listener is not None and self._kv.listener.has_loaded:
            self._store.send(self._kv.listener.description(()))
        self.loads.end_late(now)
        self.stores.offer_due(now)

    def hung_ranks(self, seconds: float) -> list[int]:
        """Return the ranks that have finished no copy for `seconds`, see `CopiesInFlight.hung_ranks`."""
        return self._copies.hung_ranks(seconds)

    def seconds_left(self) -> float:
        """Seconds until something is due; infinite without a store."""
        if not self._store.has_store:
            return math.inf
        return max(0.0, min(self._store.due, self.loads.due, self.stores.due) - time.monotonic())

    @property
    def has_changes(self) -> bool:
        """Whether the ranks have something to copy or to unmap."""
        return self._copies.has_changes

    @property
    def has_startable(self) -> bool:
        """Whether requests may be in the queue again."""
        return self.loads.has_startable

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are held, or kept free for waiting requests, until the store or ranks have answered."""
        return bool(self._copies.by_number) or self.loads.are_under_way or self.stores.keeps_blocks

    @property
    def is_busy(self) -> bool:
        """Whether anything is in progress, or will be without another request."""
        return self.loads.num_waiting > 0 or self.is_storing

    @property
    def is_storing(self) -> bool:
        """Whether anything is to be offered or copied, or is being copied."""
        return bool(self._copies.by_number) or self.stores.are_under_way

    @property
    def num_returning(self) -> int:
        """Pages that only copies hold; they are free as soon as the ranks have answered."""
        returning = (copy.planned.blocks for copy in self._copies.by_number.values() if copy.returns)
        return self._kv.num_pages_only_in(chain.from_iterable(returning))

    def take_plan(self) -> KVCopyPlan | None:
        """Return the copies for the current plan; None: there are none."""
        return self._copies.take_plan(self._store.arena, self._store.remote)

    def count(self) -> None:
        """Set the gauges."""
        self._stats.kv_loading = self.loads.num_waiting

    def block_lists(self) -> Iterator[list[int]]:
        """The blocks of look-ups, loads and copies."""
        yield from self.loads.block_lists()
        yield from self.stores.block_lists()
        yield from (copy.planned.blocks for copy in self._copies.by_number.values())

    def check_integrity(self, requests: Collection[Request]) -> Collection[Request]:
        """Assert the invariants between two plans; returns the requests that are in no queue."""
        self._copies.check_integrity()
        self.stores.check_integrity()
        return self.loads.check_integrity(requests)
