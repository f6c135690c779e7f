"""Drafts of speculative decoding during a run, from the server's metrics before and after it.

The counters have vLLM's names, which Quire also exports; the results have the names of `vllm bench serve`'s JSON.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIX, _SUFFIX = "vllm:spec_decode_num_", "_total"
_PER_POSITION = "accepted_tokens_per_pos"


def read(exposition: str) -> Counter[str]:
    """The counters of drafts in the text of `/metrics`, summed over replicas; empty if the server has none.

    Raises `ValueError` if it is not such a text.
    """
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and sample.name.endswith(_SUFFIX):
                name = sample.name[len(_PREFIX) : -len(_SUFFIX)]
                position = sample.labels.get("position")
                found[name if position is None else f"{name} {position}"] += int(sample.value)
    return found


def summarize(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """The drafts between two readings; empty if there were none. The acceptance rate is in percent; its length is the
    mean number of tokens of a row with drafts."""
    drafts, tokens, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or tokens <= 0:
        return {}
    positions = sorted(int(name.split()[1]) for name in after if name.startswith(f"{_PER_POSITION} "))
    counts = [after[name] - before[name] for name in (f"{_PER_POSITION} {position}" for position in positions)]
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_per_position_acceptance_rates": [count / drafts for count in counts],
    }
