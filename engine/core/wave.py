"""When replicas that share experts step: together, in waves, and not at all while nobody has work.

Every step of one is a step of all, since each brings the tokens of the others to its experts. The cores do not wait for
one another to agree on that; each follows a rule that comes to the same everywhere, as the result of a step says to all
of them whether anybody had work in it:

- A wave begins at a core that has work, which wakes the others (`StartWave`), or with being woken.
- Its first `depth` steps are run by all. After them, step n is run if somebody had work in step n - depth: that result
  is the last one that a core has when it is about to hand out step n.
- So all end a wave after the same step. Who is woken for the next wave before it has taken the last results of this one
  begins when it has.
"""

from __future__ import annotations


class Wave:
    """Where one core stands. It hands out a step whenever `goes_on`, and takes a result once `depth` are in flight."""

    def __init__(self, depth: int) -> None:
        self.number = 0
        """Of the wave under way, or of the last one."""
        self._depth = depth
        self._is_called = False
        """Somebody has begun the wave after this one."""
        self._in_flight = 0
        """Steps handed out that have not come back."""
        self._has_ended = True

    @property
    def goes_on(self) -> bool:
        """Whether the next step is run."""
        return not self._has_ended

    @property
    def is_asleep(self) -> bool:
        """Whether nothing is under way and nobody has called."""
        return self._has_ended and not self._in_flight and not self._is_called

    def begin(self, *, has_work: bool) -> bool:
        """Begin the next wave if it is time to; whether the others are to be woken for it (as number `number`)."""
        if not self._has_ended or self._in_flight or not (has_work or self._is_called):
            return False
        wakes = not self._is_called
        self.number += 1
        self._has_ended = self._is_called = False
        return wakes

    def wake(self, number: int) -> None:
        """Somebody has begun wave `number`. It may have been joined already; it cannot lie beyond the next."""
        if number == self.number + 1:
            self._is_called = True

    def hand_out(self) -> None:
        """A step goes out."""
        assert self.goes_on
        assert self._in_flight < self._depth
        self._in_flight += 1

    def take(self, *, is_active: bool) -> None:
        """The oldest result is there: whether anybody had work in that step."""
        self._in_flight -= 1
        self._has_ended = self._has_ended or not is_active
