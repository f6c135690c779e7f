"""The records as text, as JSON, and as a section of docs/benchmarks/gpu.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu.parts import Outcome
from gpu.records import AIMS, Check, Note, Record, Row, from_json, to_json

BEGIN, END = "<!-- gpu_check: begin -->", "<!-- gpu_check: end -->"
"""The program writes the page between these markers."""
_HEADS = ("what", "floor", "result", "of the floor", "aim", "reached")


def to_results(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> dict[str, Any]:
    """The contents of the JSON file: rows with their shares and whether their targets are reached."""
    parts = []
    for outcome in outcomes:
        records = []
        for record in outcome.records:
            fields = to_json(record)
            if isinstance(record, Row):
                aim = AIMS[record.key]
                judged = None if facts["tiny"] else record.reached
                fields |= {"what": aim.what, "unit": aim.unit, "aim": aim.text}
                fields |= {"share": record.share, "reached": judged}
            records.append(fields)
        parts.append({"name": outcome.name, "seconds": outcome.seconds, "error": outcome.error, "records": records})
    return facts | {"parts": parts}


def from_results(results: dict[str, Any]) -> list[Outcome]:
    """The inverse of `to_results`."""
    extra = ("what", "unit", "aim", "share", "reached")
    found = []
    for part in results["parts"]:
        plain = [
            {name: value for name, value in fields.items() if fields["kind"] != "row" or name not in extra}
            for fields in part["records"]
        ]
        found.append(Outcome(part["name"], part["seconds"], part["error"], [from_json(fields) for fields in plain]))
    return found


def cells(row: Row, *, judged: bool = True) -> list[str]:
    """A line of the table."""
    aim = AIMS[row.key]
    floor = f"{_number(row.floor)} {aim.unit}" if row.floor is not None else "–"
    share = f"{row.share:.0%}" if row.share is not None else "–"
    verdict = ("yes" if row.reached else "no") if judged else "not judged"
    return [aim.what, floor, f"{_number(row.value)} {aim.unit}", share, aim.text, verdict]


def line(record: Record, *, judged: bool = True) -> str:
    """The text printed for a record as it arrives."""
    match record:
        case Row():
            what, floor, result, share, aim, verdict = cells(record, judged=judged)
            text = f"{what}: {result}, floor {floor} ({share}); aim {aim}: {verdict}"
            return f"{text}\n      {record.formula}" if record.formula else text
        case Check():
            return f"{'ok   ' if record.ok else 'WRONG'} {record.what}: {record.detail}"
        case Note():
            return record.text


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """The rows in the order of the targets."""
    found = {record.key: record for outcome in outcomes for record in outcome.records if isinstance(record, Row)}
    return [found[key] for key in AIMS if key in found]


def missing(outcomes: Iterable[Outcome]) -> list[str]:
    """The targets without a figure, except for features that not every card has."""
    found = {row.key for row in rows_of(outcomes)}
    return [key for key, aim in AIMS.items() if key not in found and not aim.is_optional]


def table(outcomes: Sequence[Outcome], *, judged: bool) -> list[list[str]]:
    """A line for each target, including those without a figure."""
    none = "no" if judged else "not judged"
    lines = [cells(row, judged=judged) for row in rows_of(outcomes)]
    return lines + [[AIMS[key].what, "–", "no figure", "–", AIMS[key].text, none] for key in missing(outcomes)]


def text_table(outcomes: Sequence[Outcome], *, judged: bool, is_whole: bool) -> str:
    """The table for a terminal, without targets that have no figure if only some parts ran."""
    lines = [list(_HEADS), *table(outcomes, judged=judged)[: None if is_whole else len(rows_of(outcomes))]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def section(results: dict[str, Any]) -> str:
    """The table with card, date and command, in Markdown."""
    outcomes = from_results(results)
    records = [record for outcome in outcomes for record in outcome.records]
    checks = [record for record in records if isinstance(record, Check)]
    notes = [record for record in records if isinstance(record, Note)]
    device: dict[str, Any] = next((note.data["device"] for note in notes if note.data and "device" in note.data), {})
    limits = next((note.text for note in notes if note.data and "machine" in note.data), "not known")
    facts = ", ".join(f"{name} {value}" for name, value in device.items() if name != "name")
    failed = [f"- {each.name}: {each.error.splitlines()[0]}" for each in outcomes if each.error is not None]
    others = [note.text for note in notes if not note.data]
    parts = [
        f"{device.get('name', 'unknown card')}, {results['date']}, Quire {results['commit']} ({facts}).",
        f"    {results['command']}",
        f"Ceilings, measured in the same run: {limits}.",
        _markdown(_HEADS, table(outcomes, judged=not results["tiny"])),
        "\n".join(f"- {AIMS[row.key].what}: {row.formula}." for row in rows_of(outcomes) if row.formula),
        _markdown(("check", "right", "errors"), [[c.what, "yes" if c.ok else "**no**", c.detail] for c in checks]),
        "\n".join(f"- {text}" for text in others),
        "Did not run to the end:\n\n" + "\n".join(failed) if failed else "",
    ]
    return "\n\n".join(part for part in parts if part)


def write(page: Path, results: dict[str, Any]) -> None:
    """Write the section between the page's two markers; raises `ValueError` if these are missing."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END} to write between")
    page.write_text(f"{before}{BEGIN}\n{section(results)}\n{END}{after}")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = max(0, 2 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:,.{digits + (abs(value) < 100)}f}"


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")
