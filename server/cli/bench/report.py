"""Reports of the results: a printed table, and a JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.server.cli.bench.metrics import percentile_name
from quire.server.cli.bench.stream import RequestRecord

_SHOWN_ERRORS = 5
_NOTABLE_LAG_MS = 10.0
"""Above this, the client itself limits the results; timers alone may be up to 2 ms late."""


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The results of `summarize` as an aligned table."""
    num_all = result["completed"] + result["failed"]
    within = result["request_goodput"]
    lines = [
        _row(
            "completed", f"{result['completed']:,}", note=f"of {num_all:,}, {result['max_concurrent_requests']} at once"
        ),
        _row(
            "seconds", f"{result['duration']:.2f}", note=f"this client took {result['client_cpu_share']:.0%} of a core"
        ),
        _row("input tokens", f"{result['total_input_tokens']:,}"),
        _row("output tokens", f"{result['total_output_tokens']:,}"),
        _row(
            "requests/s",
            f"{result['request_throughput']:.2f}",
            note="" if within is None else f"{within:.2f} within the limits of --goodput",
        ),
        _row(
            "output tokens/s",
            f"{result['output_throughput']:.1f}",
            note=f"{result['max_output_tokens_per_s']:.0f} in the best second",
        ),
        _row("all tokens/s", f"{result['total_token_throughput']:.1f}"),
    ]
    if "spec_decode_num_drafts" in result:
        note = f"{result['spec_decode_acceptance_length']:.2f} tokens a row with drafts"
        lines.append(_row("drafts accepted", f"{result['spec_decode_acceptance_rate']:.1f} %", note=note))
    lines.append("")
    columns = ["mean", "median", "std", *map(percentile_name, percentiles)]
    lines.append(_row("milliseconds", *columns))
    for name in metrics:
        label = name.upper() if len(name) <= 4 else name.replace("_", " ")
        lines.append(_row(label, *(f"{result[f'{column}_{name}_ms']:,.2f}" for column in columns)))
    return "\n".join(lines)


def _row(label: str, *cells: str, note: str = "") -> str:
    return f"{label:<18}{''.join(f'{cell:>12}' for cell in cells)}{f'  ({note})' if note else ''}"


def warnings(result: Mapping[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """Warnings about the validity of the results."""
    lines = []
    errors = Counter(record.error for record in records if not record.ok)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        lines.append(f"failed {count} ×: {error}")
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"and {len(errors) - _SHOWN_ERRORS} other errors")
    if result["max_client_lag_ms"] > _NOTABLE_LAG_MS:
        lines.append(
            f"this client was too slow: it sent a request {result['max_client_lag_ms']:.0f} ms late. "
            "The times above count from the scheduled time"
        )
    return lines


def check_writable(name: str | Path, flag: str) -> None:
    """Raise `ConfigError` if a file cannot be written there; called before the run."""
    path = Path(name)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot write the file: {error.strerror}") from None


def write_json(name: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result, and print the path."""
    Path(name).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {name}")
