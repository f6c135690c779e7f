"""Beam search over a made-up model, against all sequences that there are."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams
from quire.server.serving.beam_search import BeamSearch
from quire.server.serving.generation import Generation
from quire.server.text.inputs import GenerationInput
from quire.server.text.output_processor import TextDelta
from tests.fakes.api_server import run_server
from tests.fakes.tokenizers import byte_level, wrapped

TOKENS = (70, 71, 72, 2)
"""The last one ends a sequence."""
PROMPT = [80, 81]


def distribution(before: list[int]) -> dict[int, float]:
    """The log-probabilities of the next token."""
    weights = [random.Random(f"{before}/{token}").random() for token in TOKENS]
    return {token: math.log(weight / sum(weights)) for token, weight in zip(TOKENS, weights, strict=True)}


class Step:
    """A request for one token after each prompt."""

    def __init__(self, given: GenerationInput) -> None:
        self._given = given

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left."""

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        for index, prompt in enumerate(self._given.prompts):
            best = sorted(distribution(prompt).items(), key=lambda entry: -entry[1])[: self._given.params.logprobs]
            at = TokenLogprobs(best[0][1], 1, [token for token, _ in best], [logprob for _, logprob in best])
            yield [TextDelta(index, "", [best[0][0]], [at], "length")]


def sequences(most: int) -> dict[tuple[int, ...], float]:
    """All outputs, with their log-probabilities."""
    found = {}
    for length in range(1, most + 1):
        for ids in itertools.product(TOKENS, repeat=length):
            if 2 not in ids[:-1] and (length == most or ids[-1] == 2):
                found[ids] = sum(distribution([*PROMPT, *ids[:at]])[token] for at, token in enumerate(ids))
    return found


async def search(config: EngineConfig, width: int, most: int, penalty: float = 1.0, **params: Any) -> list[TextDelta]:
    model = replace(config.model, architecture=replace(config.model.architecture, vocab_size=len(TOKENS)))
    sampling = SamplingParams(n=width, max_tokens=most, logprobs=0, **params)
    given = GenerationInput(prompts=[PROMPT, PROMPT], params=sampling, length_penalty=penalty)
    generate = cast(Callable[[str, GenerationInput], Generation], lambda name, step: Step(step))
    (deltas,) = [deltas async for deltas in BeamSearch("id", given, generate, wrapped(byte_level()), model)]
    first, second = deltas[: len(deltas) // 2], deltas[len(deltas) // 2 :]
    assert [delta.token_ids for delta in first] == [delta.token_ids for delta in second]
    assert [delta.index for delta in second] == list(range(width, width + len(second)))
    return first


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
async def test_with_beams_for_all_sequences_it_finds_the_best(config: EngineConfig, penalty: float) -> None:
    every = sequences(3)

    def score(ids: tuple[int, ...]) -> float:
        return float(every[ids] / (len(PROMPT) + len(ids) - (ids[-1] == 2)) ** penalty)

    found = await search(config, width=len(every), most=3, penalty=penalty)
    assert [tuple(delta.token_ids) for delta in found] == sorted(every, key=score, reverse=True)
    for delta in found:
        assert sum(at.logprob for at in delta.logprobs or ()) == pytest.approx(every[tuple(delta.token_ids)])
        assert delta.finish_reason == ("stop" if delta.token_ids[-1] == 2 else "length")
        assert delta.text == wrapped(byte_level()).decode(delta.token_ids, skip_special_tokens=True)


async def test_one_beam_is_greedy(config: EngineConfig) -> None:
    greedy: list[int] = []
    for _ in range(5):
        likely = distribution(PROMPT + greedy)
        greedy.append(max(likely, key=likely.__getitem__))
    (found,) = await search(config, width=1, most=5, ignore_eos=True)
    assert found.token_ids == greedy


async def test_a_sequence_that_ends_takes_no_beam(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is the likeliest first token. Both others go on, and the less likely of them turns out better."""
    chances = {(): (0.3, 0.28, 0.02, 0.4), (70,): (0.25, 0.25, 0.25, 0.25), (71,): (0.97, 0.01, 0.01, 0.01)}

    def chosen(before: list[int]) -> dict[int, float]:
        return dict(zip(TOKENS, map(math.log, chances[tuple(before[len(PROMPT) :])]), strict=True))

    monkeypatch.setattr(sys.modules[__name__], "distribution", chosen)
    found = await search(config, width=2, most=2, penalty=0.0)
    assert [delta.token_ids for delta in found] == [[2], [71, 70]]


async def test_the_models_length_ends_a_beam(config: EngineConfig) -> None:
    short = replace(config, model=replace(config.model, max_model_len=len(PROMPT) + 2))
    found = await search(short, width=3, most=50)
    assert {(len(delta.token_ids), delta.finish_reason) for delta in found} <= {(1, "stop"), (2, "stop"), (2, "length")}
    assert "length" in [delta.finish_reason for delta in found]


async def test_over_http(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    beams: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True}
    async with run_server(config) as server:
        whole = await server.http.post("/v1/completions", json={"prompt": "hello", **beams})
        assert whole.status_code == 200, whole.text
        first, second = (choice["token_ids"] for choice in whole.json()["choices"])
        token = server.tokenizer.encode("hello", add_special_tokens=True)[0]
        assert first == [token] * 3  # each step is a request of its own, to which the fake core answers with its start
        assert second != first
        assert len(second) == 3
        assert whole.json()["usage"]["completion_tokens"] == 6
        chat = {"messages": [{"role": "user", "content": "hi"}], **beams, "stream": True}
        streamed = await server.http.post("/v1/chat/completions", json=chat)
        assert streamed.text.count('"finish_reason":"length"') == 2
