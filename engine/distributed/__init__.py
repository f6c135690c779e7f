"""The PP × TP rank grid, its groups, and the communicators behind them."""

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.distributed.expert_placement import ExpertPlacement
from quire.engine.distributed.parallel_state import ParallelState, connect
from quire.engine.distributed.pipeline import Pipeline
from quire.engine.distributed.watchdog import CollectiveError

__all__ = [
    "CollectiveError",
    "ExpertCommunicator",
    "ExpertGroup",
    "ExpertPlacement",
    "Parallel",
    "ParallelState",
    "Pipeline",
    "connect",
]
