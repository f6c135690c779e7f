"""docs/reference/helm.md: the values of the Helm chart; `scripts/docs` writes it.

The names, defaults and descriptions are those of values.yaml, the structure is that of values.schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from markdown_table import code, table

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "quire"
INTRODUCTION = """# Helm chart

The values of the chart in `deploy/helm/quire`. [Kubernetes](../guides/kubernetes.md) explains how to use it, and
`deploy/helm/quire/examples` has values for common layouts. Unknown values are refused.

"""


def render() -> str:
    """The page as Markdown."""
    rows = ((code(name), code(json.dumps(default)), text) for name, default, text in values())
    return INTRODUCTION + table(("value", "default", "meaning"), rows)


def values() -> Iterator[tuple[str, Any, str]]:
    """(dotted name, default, description) of each value. The description is the comment above it.

    Raises `ValueError` for a value without a description, and for one that the schema does not have, or that only the
    schema has.
    """
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _values(root, schema, text.splitlines(), "")


def _values(
    node: yaml.MappingNode, schema: dict[str, Any], lines: list[str], prefix: str
) -> Iterator[tuple[str, Any, str]]:
    names = [key.value for key, _ in node.value]
    if unlike := set(names) ^ schema["properties"].keys():
        raise ValueError(f"{prefix or 'the root'}: only in values.yaml or in values.schema.json: {sorted(unlike)}")
    for key, value in node.value:
        name, above = f"{prefix}{key.value}", key.start_mark.line
        while lines[above - 1].lstrip().startswith("#"):
            above -= 1
        text = " ".join(line.strip().removeprefix("# ") for line in lines[above : key.start_mark.line])
        inner = schema["properties"][key.value]
        if inner.get("additionalProperties") is False:
            assert isinstance(value, yaml.MappingNode)
            yield from _values(value, inner, lines, f"{name}.")
        elif text:
            yield name, yaml.safe_load(yaml.serialize(value)), text
        else:
            raise ValueError(f"values.yaml: {name} has no comment")
