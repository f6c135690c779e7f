"""What names of adapters mean in several API processes, as their parent decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.options import EngineOptions
from quire.engine.process.supervisor import Process, SupervisedProcess
from quire.engine.protocol.supervision import (
    AdapterChanged,
    AdapterReply,
    ChangeAdapter,
    Failed,
    NamedAdapter,
    Ready,
    ToProcess,
)
from quire.server.cli.adapters import AdapterDirectory
from quire.server.cli.serve import first_adapters
from quire.server.config.server_options import AdapterOptions

A, OTHER = (NamedAdapter("a", path, 0) for path in ("/a", "/other"))


class Api(SupervisedProcess):
    """An API process that keeps what it is sent."""

    def __init__(self, name: str, *, is_running: bool = True) -> None:
        super().__init__(name)
        self.process = object() if is_running else None  # type: ignore[assignment]
        self.sent: list[ToProcess] = []

    def start(self) -> Process:
        raise AssertionError

    def on_ready(self, ready: Ready) -> None:
        raise AssertionError

    def on_exit(self, failure: Failed) -> float | None:
        raise AssertionError

    def send(self, message: ToProcess) -> None:
        self.sent.append(message)

    def take(self) -> list[ToProcess]:
        taken, self.sent = self.sent, []
        return taken


def test_a_change_is_answered_when_all_processes_that_run_have_seen_it() -> None:
    first, second, _ = processes = [Api("0"), Api("1"), Api("2", is_running=False)]
    directory = AdapterDirectory([])
    directory.change(first, ChangeAdapter(7, "a", None, A), processes)
    assert [each.take() for each in processes] == [[AdapterChanged(1, "a", A)], [AdapterChanged(1, "a", A)], []]
    assert directory.adapters == (A,)  # for a process that starts now
    directory.seen(second, 1)
    assert not first.take()
    directory.seen(first, 1)
    assert first.take() == [AdapterReply(7, has_changed=True)]
    # Of two that change the same, the second one fails.
    directory.change(second, ChangeAdapter(1, "a", A, None), processes)
    directory.change(first, ChangeAdapter(8, "a", A, OTHER), processes)
    assert first.take() == [AdapterChanged(2, "a", None), AdapterReply(8, has_changed=False)]
    assert not directory.adapters


@pytest.mark.parametrize("asks", [False, True], ids=["another", "the one that asks"])
def test_nobody_waits_for_a_process_that_has_ended(asks: bool) -> None:
    first, second = processes = [Api("0"), Api("1")]
    directory = AdapterDirectory([A])
    directory.change(first, ChangeAdapter(7, "a", A, None), processes)
    directory.seen(second if asks else first, 1)
    first.take()
    directory.exited(first if asks else second)
    assert first.take() == ([] if asks else [AdapterReply(7, has_changed=True)])
    directory.seen(first, 1)  # it has been answered
    assert not first.take()


def test_the_bundled_model_has_its_adapters(tmp_path: Path) -> None:
    """In `quire serve` and `quire run-batch`, unless their names mean something else."""

    def names(model: str = EngineOptions.model, base: str = "base", *, is_enabled: bool = True, **options: Any) -> Any:
        found = first_adapters(AdapterOptions(**options), EngineOptions(model=model), [base], is_enabled=is_enabled)
        return [(each.name, (Path(each.path) / "adapter_config.json").exists()) for each in found]

    assert names() == [("capitals", True), ("pirate", True)]
    assert names(lora_modules=(f"pirate={tmp_path}",)) == [("pirate", False), ("capitals", True)]
    assert names(base="pirate") == [("capitals", True)]
    assert names(str(tmp_path)) == names(is_enabled=False) == []
