"""A server with a fake core behind it, in one process."""

from __future__ import annotations

import pytest

from quire.server.http import large_bodies
from quire.server.text import structured_outputs, template_renderer
from tests.fakes.api_server import config, core_mode, model_folder, server
from tests.fakes.sandbox import InProcessSandbox

__all__ = ["config", "core_mode", "model_folder", "server"]


@pytest.fixture(autouse=True)
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_outputs, "Sandbox", InProcessSandbox)
    monkeypatch.setattr(large_bodies, "Sandbox", InProcessSandbox)
    monkeypatch.setattr(template_renderer, "Sandbox", InProcessSandbox)
