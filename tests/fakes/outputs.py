"""Reading the messages of a step."""

from __future__ import annotations

from quire.engine.messages import Outputs, RequestOutput


def each(message: Outputs) -> list[RequestOutput]:
    """An output for every request that the message tells of."""
    columns = zip(message.request_ids, message.token_ids, strict=True)
    return [RequestOutput(request_id, [token_id]) for request_id, token_id in columns] + message.outputs
