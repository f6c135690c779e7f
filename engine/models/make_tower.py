"""Builds the tower that a spec describes."""

from __future__ import annotations

from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.architecture.mobilenet_spec import MobileNetSpec
from quire.engine.architecture.sam_spec import QueriedSamTowerSpec, TwofoldSamTowerSpec
from quire.engine.architecture.tower_spec import GridTowerSpec
from quire.engine.architecture.vit_spec import ViTSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.mobilenet_tower import MobileNetTower
from quire.engine.models.sam_tower import QueriedSamTower, TwofoldSamTower
from quire.engine.models.tower import GridTower, Tower
from quire.engine.models.vit_tower import ViTTower


def make_tower(spec: TowerSpec, parallel: Parallel) -> Tower:
    """The tower, uninitialized. `parallel` are the ranks of the stage."""
    parallel = Parallel() if spec.divides_items else parallel
    if isinstance(spec, GridTowerSpec):
        return GridTower(spec, parallel)
    if isinstance(spec, QueriedSamTowerSpec):
        return QueriedSamTower(spec, parallel)
    if isinstance(spec, TwofoldSamTowerSpec):
        return TwofoldSamTower(spec, parallel)
    if isinstance(spec, MobileNetSpec):
        return MobileNetTower(spec)
    assert isinstance(spec, ViTSpec)
    return ViTTower(spec, parallel)
