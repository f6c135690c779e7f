"""The API page and the table of limits agree with the code; tests/unit/test_docs.py has the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema
from pydantic import BaseModel

from quire.server.app import create_app
from quire.server.http.state import AppState
from quire.server.serving.frontend import Frontend
from tests.fakes.api_server import Server

ROOT = Path(__file__).parents[4]
AS_JSON = {"Content-Type": "application/json"}
LIMIT = re.compile(r"^(MAX_[A-Z_]+|COMPILE_SECONDS)(?:: \w+)? = (.+)$", re.MULTILINE)


def test_every_limit_stands_in_the_table() -> None:
    page = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    found = 0
    for path in [ROOT / "engine" / "protocol" / "sampling_params.py", *(ROOT / "server").rglob("*.py")]:
        for name, value in LIMIT.findall(path.read_text()):
            number = eval(value)
            sizes = {f"{number:,}", f"{number:g}", f"{number / 2**10:g} KiB", f"{number / 2**20:g} MiB"}
            rows = [line for line in page.splitlines() if f"`{name}` (" in line]
            assert len(rows) == 1, f"{name} of {path.relative_to(ROOT)} is not in docs/guides/deployment.md"
            assert any(f"`{name}` ({size})" in rows[0] for size in (*sizes, f"{number / 2**30:g} GiB")), rows
            found += 1
    assert found >= 20


def shapes(base: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for shape in base.__subclasses__():
        if shape.__module__.startswith(("quire.server.openai.", "quire.server.anthropic.")):
            yield shape
        yield from shapes(shape)


def test_the_page_has_the_docstrings_of_all_fields() -> None:
    """All shapes that `create_app` imports."""
    deaf = [shape.__qualname__ for shape in shapes() if not shape.model_config.get("use_attribute_docstrings")]
    assert not deaf, "give these `use_attribute_docstrings=True`, for docs/reference/api.md"


async def test_the_document_declares_the_errors_that_are_answered(server: Server) -> None:
    document = create_app(AppState(cast(Frontend, None), ("",))).openapi()
    assert "ValidationError" not in document["components"]["schemas"]
    checked = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            declared: dict[str, Any] = operation["responses"]
            assert "422" not in declared
            if "requestBody" in operation:
                response = await server.http.request(method, path, content=b"{", headers=AS_JSON)
                assert response.status_code == 400
                said = declared["400"]["content"]["application/json"]["schema"]
                schema = {**said, "components": document["components"]}
                jsonschema.validate(json.loads(response.content), schema)
                checked += 1
    assert checked >= 8
