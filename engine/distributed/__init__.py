"""The PP × TP rank grid, its groups, and the communicators behind them."""

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertGroup, Peers
from quire.engine.distributed.expert_placement import Placement
from quire.engine.distributed.parallel_state import Links, connect
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.distributed.watchdog import ExchangeError

__all__ = ["ExchangeError", "ExpertGroup", "Links", "Parallel", "Peers", "Pipeline", "Placement", "connect"]
