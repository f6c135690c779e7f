"""Counts of adapters in the table of all API processes."""

from __future__ import annotations

from array import array

from quire.server.client import adapter_metrics
from quire.server.client.adapter_metrics import AdapterMetrics


def test_names_that_no_adapter_has_any_more_make_room_for_others() -> None:
    metrics = AdapterMetrics(memoryview(array("d", [0.0] * adapter_metrics.CELLS)))
    named = {str(number) for number in range(200)}
    metrics.is_named = named.__contains__

    def finish(name: str) -> None:
        metrics.finish(name, 1, 2, has_started=False)

    for name in sorted(named, key=int):
        metrics.add(name)
        finish(name)
    assert AdapterMetrics.totals([metrics]).counts["others"] == [200 - 127, 200 - 127, 2 * (200 - 127)]
    metrics.add("0")
    named ^= {"0", "1", "new", "newer", "newest"}
    for name in ("new", "newer"):
        metrics.add(name)
        finish(name)
    counts = AdapterMetrics.totals([metrics]).counts
    assert "1" not in counts
    assert (counts["new"], counts["2"], counts["others"][0]) == ([1, 1, 2], [1, 1, 2], 200 - 127 + 1)
    assert AdapterMetrics.totals([metrics]).waiting["0"] == 1  # it still has a request
    finish("0")
    metrics.add("newest")
    assert AdapterMetrics.totals([metrics]).waiting["newest"] == 1
    assert len(AdapterMetrics.totals([metrics]).counts) == 128
