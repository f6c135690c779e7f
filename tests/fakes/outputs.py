"""Reading and writing the messages of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs
from quire.engine.protocol.logprobs import PromptLogprobs


def each(message: EngineCoreOutputs) -> list[EngineCoreOutput]:
    """An output for every request that the message tells of."""
    columns = zip(message.request_ids, message.token_ids, strict=True)
    return [EngineCoreOutput(request_id, [token_id]) for request_id, token_id in columns] + message.outputs


def prompt_logprobs(rows: Sequence[tuple[float, int, list[int], list[float]]], num_top: int) -> PromptLogprobs:
    """Scores from (log-probability, rank, likeliest ids, their log-probabilities) of each token."""
    assert all(len(ids) == len(values) == num_top for _, _, ids, values in rows)
    return PromptLogprobs(
        num_top,
        array("f", [row[0] for row in rows]).tobytes(),
        array("i", [row[1] for row in rows]).tobytes(),
        array("i", [token_id for row in rows for token_id in row[2]]).tobytes(),
        array("f", [value for row in rows for value in row[3]]).tobytes(),
    )
