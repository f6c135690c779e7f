"""What the names of adapters mean, for all API processes: their parent decides the order of changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.engine.process.supervisor import SupervisedProcess
from quire.engine.protocol.supervision import AdapterChanged, AdapterReply, ChangeAdapter, NamedAdapter


@dataclass
class _Pending:
    """A change that not all API processes have handled."""

    asking: SupervisedProcess
    number: int
    """Of the call."""
    waits_for: set[SupervisedProcess]


class AdapterDirectory:
    """The adapters by name."""

    def __init__(self, adapters: Iterable[NamedAdapter]) -> None:
        self._named = {each.name: each for each in adapters}
        self._version = 0
        self._pending: dict[int, _Pending] = {}
        """By version."""

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """The adapters, for an API process that starts."""
        return tuple(self._named.values())

    def change(self, asking: SupervisedProcess, asked: ChangeAdapter, processes: Sequence[SupervisedProcess]) -> None:
        """Change what a name means, unless it has changed meanwhile, and tell all of the API processes that run."""
        if self._named.get(asked.name) != asked.old:
            asking.send(AdapterReply(asked.number, has_changed=False))
            return
        if asked.new is None:
            self._named.pop(asked.name, None)
        else:
            self._named[asked.name] = asked.new
        self._version += 1
        running = {each for each in processes if each.process is not None}
        self._pending[self._version] = _Pending(asking, asked.number, running)
        for each in running:
            each.send(AdapterChanged(self._version, asked.name, asked.new))

    def seen(self, process: SupervisedProcess, version: int) -> None:
        """An API process has handled a change."""
        if (pending := self._pending.get(version)) is not None:
            pending.waits_for.discard(process)
            if not pending.waits_for:
                del self._pending[version]
                pending.asking.send(AdapterReply(pending.number, has_changed=True))

    def exited(self, process: SupervisedProcess) -> None:
        """An API process has ended, and its requests with it. What it asked for has happened, and nobody is told."""
        for version, pending in list(self._pending.items()):
            if pending.asking is process:
                del self._pending[version]
            else:
                self.seen(process, version)
