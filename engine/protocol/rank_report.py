"""What ranks report to the core beside the results of steps. No torch."""

from __future__ import annotations

from quire.engine.protocol.adapters import AdapterPrepared
from quire.engine.protocol.kv_store import KVCopied

RankReport = AdapterPrepared | KVCopied
