"""The PP × TP rank grid, its groups, and the communicators behind them."""

from quire.engine.parallel.experts import ExpertGroup, Peers
from quire.engine.parallel.links import Links, connect
from quire.engine.parallel.pipeline import Pipeline
from quire.engine.parallel.placement import Placement
from quire.engine.parallel.tensor import Parallel
from quire.engine.parallel.trouble import ExchangeError

__all__ = ["ExchangeError", "ExpertGroup", "Links", "Parallel", "Peers", "Pipeline", "Placement", "connect"]
