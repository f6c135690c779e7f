"""Write the generated files: the pages of docs/reference that the code decides, the pictures, and the dashboards.

`scripts/docs` runs this; with `--check` it writes nothing and names the files that are out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import api_docs
import chart_docs
import cli_docs
import dashboards
import draw_docs
import environment_docs
import metrics_docs
import python_docs
import vllm_docs

ROOT = Path(__file__).parent.parent
FILES: dict[str, Callable[[], str]] = {
    "docs/reference/api.md": api_docs.render,
    "docs/reference/cli.md": cli_docs.render,
    "docs/reference/metrics.md": metrics_docs.render,
    "docs/reference/python.md": python_docs.render,
    "docs/reference/environment.md": environment_docs.render,
    "docs/reference/helm.md": chart_docs.render,
    "docs/reference/vllm.md": vllm_docs.render,
    **{f"docs/pictures/{name}.svg": draw for name, draw in draw_docs.PICTURES.items()},
    **{f"deploy/grafana/dashboards/{name}.json": render for name, render in dashboards.DASHBOARDS.items()},
}
"""The function that makes each generated file."""


def stale() -> list[str]:
    """The generated files that differ from the present code."""
    return [
        name for name, render in FILES.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != render()
    ]


def main() -> int:
    """Write the files, or with `--check` name the files that are out of date."""
    names = stale()
    if "--check" in sys.argv[1:]:
        for name in names:
            print(f"{name} is out of date; run scripts/docs", file=sys.stderr)
        return 1 if names else 0
    for name in names:
        (ROOT / name).write_text(FILES[name]())
        print(f"{name} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
