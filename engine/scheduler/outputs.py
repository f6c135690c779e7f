"""The outputs of a step, sorted by the API process that they are for."""

from __future__ import annotations

from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs
from quire.engine.scheduler.request import Request


class OutputsByClient(dict[int, EngineCoreOutputs]):
    """By API process."""

    def of(self, request: Request) -> EngineCoreOutputs:
        """Return the outputs for the API process of a request."""
        return self.setdefault(request.client, EngineCoreOutputs())

    def add(self, request: Request, output: EngineCoreOutput) -> None:
        self.of(request).outputs.append(output)

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(
            len(each.token_ids) + sum(len(output.token_ids) for output in each.outputs) for each in self.values()
        )
