"""Plots a run: the phases of each request, concurrency, token rate, and distributions of times.

matplotlib is imported only if a plot is requested.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench.metrics import concurrency, samples, token_times
from quire.server.cli.bench.stream import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg", ".pdf")
_WAITING, _ANSWERING, _FAILED, _INK, _FAINT = "#e3a857", "#3d6f8e", "#b5382a", "#2b2b2b", "#d9d9d9"
_MARKS = ((50, "-"), (90, "--"), (99, ":"))
"""Percentiles that are marked in a distribution."""
_NUM_BINS = 50
_SHORTEST_SECONDS = 1e-3
"""Minimum length of the time axis."""
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eeeeee",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "legend.frameon": False,
}


def check(file: str) -> None:
    """Raise `ConfigError` if the run cannot be plotted to this file."""
    if Path(file).suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {file}: the name must end in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('--plot requires matplotlib: pip install "quire-llm[bench]"')


def draw(file: str, records: Sequence[RequestRecord], title: str) -> None:
    """Plot a run to a file, whose suffix selects the format."""
    import matplotlib
    from matplotlib.figure import Figure

    begun = min(record.moments.start for record in records)
    span = max(max(record.end for record in records) - begun, _SHORTEST_SECONDS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 10), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        grid = figure.add_gridspec(4, 2, height_ratios=(2.4, 1, 1, 1.5))
        requests = figure.add_subplot(grid[0, :])
        _requests(requests, records, begun)
        running = figure.add_subplot(grid[1, :], sharex=requests)
        _running(running, records, begun)
        tokens = figure.add_subplot(grid[2, :], sharex=requests)
        _tokens(tokens, records, begun, span)
        requests.set_xlim(0, span)
        values = samples(records)
        _distribution(figure.add_subplot(grid[3, 0]), values["ttft"], "Time to first token", "requests")
        _distribution(figure.add_subplot(grid[3, 1]), values["itl"], "Inter-token latency", "tokens")
        figure.savefig(file, dpi=150)


def _requests(axes: Axes, records: Sequence[RequestRecord], begun: float) -> None:
    """One line for each request, in order of arrival."""
    ordered = sorted(records, key=lambda record: record.moments.start)
    rows = {"waiting for the first token": _WAITING, "answering": _ANSWERING, "failed": _FAILED}
    lines: dict[str, list[tuple[int, float, float]]] = {name: [] for name in rows}
    for row, record in enumerate(ordered):
        first = record.arrivals[0] if record.ok else record.end
        lines["waiting for the first token" if record.ok else "failed"].append((row, record.moments.start, first))
        if record.ok:
            lines["answering"].append((row, first, record.end))
    width = min(6.0, 260 / len(records))
    for name, color in rows.items():
        if lines[name]:
            at, starts, ends = np.asarray(lines[name]).T
            axes.hlines(at, starts - begun, ends - begun, colors=color, linewidth=width, label=name)
    axes.invert_yaxis()
    axes.set(title="Requests, in the order of arrival", ylabel="request")
    axes.grid(axis="y", visible=False)
    legend = axes.legend(loc="lower right", ncols=3, bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
    for line in legend.get_lines():
        line.set_linewidth(5)
    axes.tick_params(labelbottom=False)


def _running(axes: Axes, records: Sequence[RequestRecord], begun: float) -> None:
    moments, counts = concurrency(records)
    axes.fill_between(np.asarray(moments) - begun, counts, step="post", color=_ANSWERING, alpha=0.25, linewidth=0)
    axes.step(np.asarray(moments) - begun, counts, where="post", color=_ANSWERING, linewidth=1)
    axes.set(title="Requests at once", ylim=(0, None))
    axes.tick_params(labelbottom=False)


def _tokens(axes: Axes, records: Sequence[RequestRecord], begun: float, span: float) -> None:
    moments, tokens = token_times(record for record in records if record.ok)
    edges = np.linspace(0, span, min(100, max(10, round(span * 4))) + 1)
    counts, _ = np.histogram(np.asarray(moments) - begun, edges, weights=tokens)
    axes.stairs(counts / np.diff(edges), edges, fill=True, color=_ANSWERING, alpha=0.25)
    axes.stairs(counts / np.diff(edges), edges, color=_ANSWERING, linewidth=1)
    axes.set(title="Output tokens per second", xlabel="seconds", ylim=(0, None))


def _distribution(axes: Axes, seconds: Sequence[float], title: str, what: str) -> None:
    """A histogram with its percentiles. The time axis is logarithmic, as times span orders of magnitude."""
    axes.set(title=title, xlabel="milliseconds", ylabel=what)
    values = np.asarray(seconds) * 1000
    values = values[values > 0]
    if not len(values):
        axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
        return
    low, high = values.min(), values.max()
    is_wide = high > 20 * low
    edges = (
        np.geomspace(low, high, _NUM_BINS + 1) if is_wide else np.linspace(low, max(high, low + 1e-3), _NUM_BINS + 1)
    )
    axes.hist(values, edges.tolist(), color=_ANSWERING, alpha=0.75)
    axes.set_xscale("log" if is_wide else "linear")
    axes.xaxis.set_major_formatter(_number)
    for percentile, style in _MARKS:
        value = float(np.percentile(values, percentile))
        axes.axvline(value, color=_FAILED, linestyle=style, linewidth=1.2, label=f"p{percentile} {_number(value)}")
    axes.legend(loc="lower right", ncols=3, bbox_to_anchor=(1.0, 1.0), fontsize=8, handlelength=1.5, columnspacing=1)


def _number(milliseconds: float, _: float = 0) -> str:
    """Format with three or four digits, without an exponent."""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
