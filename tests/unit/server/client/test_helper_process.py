"""When a process beside the engine cores is started again."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from quire.engine.process.supervisor import Process
from quire.engine.protocol.supervision import Failed, Ready
from quire.server.client.helper_process import HelperProcess


class Host:
    def __init__(self) -> None:
        self.is_started = False
        self.failed: list[tuple[str, bool]] = []

    def fail(self, reason: str, *, user_error: bool = False) -> None:
        self.failed.append((reason, user_error))


class Helper(HelperProcess):
    def __init__(self, host: Host) -> None:
        super().__init__("the helper", host, "Nothing happens")
        self.states: list[str] = []

    def start(self) -> Process:
        raise AssertionError

    def on_state(self, state: Literal["up", "down", "failed"]) -> None:
        self.states.append(state)

    def dies(self, *, is_ready: bool, **failure: Any) -> float | None:
        self.is_ready = is_ready
        if is_ready:
            self.on_ready(Ready({}))
        return self.on_exit(Failed("it died", **failure))


def test_one_that_dies_again_and_again_is_started_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it dies soon after it was ready."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    host = Host()
    helper = Helper(host)
    assert [helper.dies(is_ready=True) for _ in range(8)] == [1, 3, 7, 15, 31, 60, 60, 60]
    assert helper.dies(is_ready=False) == 60
    assert helper.states[-3:] == ["up", "down", "failed"]
    helper.is_ready = True
    helper.on_ready(Ready({}))
    now = 111.0
    assert helper.on_exit(Failed("it died")) == 0
    assert helper.dies(is_ready=False) == 1
    assert not host.failed


@pytest.mark.parametrize(("user_error", "num_starts"), [(False, 3), (True, 1)])
def test_one_that_cannot_start_with_the_server_ends_it(user_error: bool, num_starts: int) -> None:
    host = Host()
    helper = Helper(host)
    found = [helper.dies(is_ready=False, user_error=user_error) for _ in range(num_starts)]
    assert found == [1, 3, None][-num_starts:]
    assert host.failed == [("it died", user_error)]
    host.is_started = True
    assert helper.dies(is_ready=False, user_error=user_error) is not None
