"""Builds the tower that a spec describes."""

from __future__ import annotations

from quire.engine.architecture.media_spec import TowerSpec
from quire.engine.architecture.sam_spec import SamTowerSpec
from quire.engine.architecture.tower_spec import GridTowerSpec
from quire.engine.architecture.vit_spec import ViTSpec
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.sam_tower import SamTower
from quire.engine.models.tower import GridTower, Tower
from quire.engine.models.vit_tower import ViTTower


def make_tower(spec: TowerSpec, parallel: Parallel) -> Tower:
    """The tower, uninitialized."""
    if isinstance(spec, GridTowerSpec):
        return GridTower(spec, parallel)
    if isinstance(spec, SamTowerSpec):
        return SamTower(spec, parallel)
    assert isinstance(spec, ViTSpec)
    return ViTTower(spec, parallel)
