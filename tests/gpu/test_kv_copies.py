"""Copies between the KV cache of a GPU and the KV store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import torch

from quire.engine.config.engine_config import KVStoreConfig
from quire.engine.config.kv_layout import kv_layout
from quire.engine.protocol.kv_store import KVCopied, KVCopy, KVCopyPlan
from quire.engine.worker.kv_caches import KVCaches
from quire.engine.worker.kv_copies import KVCopies, KVStaging
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.model_logits import configure
from tests.gpu.conftest import DEVICE


def test_entries_come_back(tmp_path: Path) -> None:
    """To other blocks, after the kernels that have been launched."""
    write_checkpoint("qwen2", tmp_path)
    config = replace(configure(tmp_path, max_model_len=64).with_blocks(8), kv_store=KVStoreConfig(memory_bytes=1))
    ends = SimpleQueue[KVCopied]()
    size, arena = kv_layout(config).kinds[0].size, tmp_path / "arena"
    arena.write_bytes(bytes(2 * size))
    planes = KVCaches(config, 0, DEVICE).memory
    staging = KVStaging.of(config, 0, DEVICE)
    copies, (memory,) = KVCopies(config, 0, planes, DEVICE, staging, ends.put), planes.values()
    blocks = memory.view(-1, 8, memory.numel() // 8 // config.model.architecture.num_layers)
    blocks.random_(0, 256)
    copies.begin(KVCopyPlan(str(arena), stores=[KVCopy(0, 0, size, [3]), KVCopy(1, 0, 0, [6])]))
    assert ends.get(timeout=60) == KVCopied(0, [0, 1])
    expected = blocks[:, [3, 6]].clone()
    for _ in range(100):
        blocks[:, [1, 2]] = blocks[:, [1, 2]] + 1
    copies.begin(KVCopyPlan(str(arena), loads=[KVCopy(2, 0, size, [1]), KVCopy(3, 0, 0, [2])]))
    assert ends.get(timeout=60) == KVCopied(0, [2, 3])
    assert torch.equal(blocks[:, [1, 2]], expected)
    copies.close()
