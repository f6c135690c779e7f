"""Waves: replicas that share experts run their steps together, and run none while no replica has work.

Every step of one replica is a step of all, because each brings the tokens of the others to its experts. The cores do
not synchronize to agree on this. Each follows a rule with the same outcome everywhere, because the result of a step
tells all of them whether any replica had work in it:

- A core with work starts a wave and wakes the others (`StartWave`), which join it.
- All cores run its first `depth` steps. After them, step n is run if any replica had work in step n - depth: that is
  the last result that a core has when it submits step n.
- All cores therefore end a wave after the same step. A core that is woken for the next wave before it has the last
  results of the current one starts the next wave after it has them.
"""

from __future__ import annotations


class Wave:
    """The wave state of one core, which submits steps while `is_running`, and takes a result when `depth` are in
    flight."""

    def __init__(self, depth: int) -> None:
        self.number = 0
        """Number of the running wave, or of the last one."""
        self._depth = depth
        self._is_next_started = False
        """Another core has started the next wave."""
        self._in_flight = 0
        """Steps submitted whose results have not arrived."""
        self._has_ended = True

    @property
    def is_running(self) -> bool:
        """Whether the next step is to be run."""
        return not self._has_ended

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight and no wave is about to start."""
        return self._has_ended and not self._in_flight and not self._is_next_started

    def start(self, *, has_work: bool) -> bool:
        """Start the next wave if needed; returns whether to wake the other cores for it (with `number`)."""
        if not self._has_ended or self._in_flight or not (has_work or self._is_next_started):
            return False
        is_first = not self._is_next_started
        self.number += 1
        self._has_ended = self._is_next_started = False
        return is_first

    def wake(self, number: int) -> None:
        """Record that another core has started wave `number`, which is the next one or one already joined."""
        if number == self.number + 1:
            self._is_next_started = True

    def on_submit(self) -> None:
        """Record that a step is submitted."""
        assert self.is_running
        assert self._in_flight < self._depth
        self._in_flight += 1

    def on_result(self, *, is_active: bool) -> None:
        """Record the oldest result; `is_active`: whether any replica had work in that step."""
        self._in_flight -= 1
        self._has_ended = self._has_ended or not is_active
