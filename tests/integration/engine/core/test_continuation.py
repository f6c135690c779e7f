"""A request that goes on at another replica, after its output so far, produces the same output as without the move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.engine_core import EngineCoreOutput
from quire.engine.protocol.logprobs import TokenLogprobs
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from tests.fakes.core_with_ranks import Ranks

COUNT = 24
PROMPT = list(range(40, 90))
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.5, seed=7, max_tokens=COUNT, ignore_eos=True),
    "filtered": SamplingParams(temperature=2.0, seed=8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=COUNT),
    "penalties": SamplingParams(
        temperature=1.0,
        seed=9,
        presence_penalty=1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.3,
        logit_bias={100: 3.0},
        max_tokens=COUNT,
        ignore_eos=True,
    ),
    "min_tokens": SamplingParams(
        temperature=1.0, seed=10, logit_bias={0: 50.0, 2: 50.0}, min_tokens=9, max_tokens=COUNT
    ),
    "bad words": SamplingParams(temperature=0.0, bad_word_ids=[[100], [101, 102]], max_tokens=COUNT, ignore_eos=True),
    "logprobs": SamplingParams(temperature=1.0, seed=11, logprobs=3, max_tokens=COUNT, ignore_eos=True),
    "scored": SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0, max_tokens=COUNT, ignore_eos=True),
    "grammar": SamplingParams(
        temperature=1.0,
        seed=12,
        max_tokens=60,
        structured_outputs=StructuredOutputs(
            json={
                "type": "object",
                "properties": {"name": {"enum": ["Ada", "Grace"]}, "count": {"type": "integer", "maximum": 999}},
                "required": ["name", "count"],
                "additionalProperties": False,
            }
        ),
    ),
    "unique items": SamplingParams(
        temperature=1.0,
        seed=13,
        max_tokens=60,
        structured_outputs=StructuredOutputs(
            json={
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 5},
                "uniqueItems": True,
                "minItems": 5,
                "maxItems": 6,
            }
        ),
    ),
}


@pytest.fixture(scope="module", params=[(1, False), (2, True)], ids=["one stage", "two stages-prefix"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """So many stages, with a prefix cache or without."""
    stages, prefix = request.param
    options = EngineOptions(
        model=str(DEMO_MODEL),
        device="cpu",
        max_model_len=256,
        max_num_seqs=64,
        pipeline_parallel_size=stages,
        enable_prefix_caching=prefix,
    )
    with Ranks(resolve(options)) as loaded:
        yield loaded


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: list[EngineCoreOutput]) -> list[TokenLogprobs]:
    return [row for output in outputs for row in output.logprobs or []]


@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_every_position(ranks: Ranks, kind: str) -> None:
    params = KINDS[kind]
    (whole,) = ranks.run([(PROMPT, params)], depth=2)
    output, rows, end = tokens(whole), logprobs(whole), whole[-1]
    assert len(output) > 5
    cuts = range(len(output))
    again = ranks.run([(PROMPT, params) for _ in cuts], reported=[output[:cut] for cut in cuts], depth=2)
    for cut, outputs in zip(cuts, again, strict=True):
        assert tokens(outputs) == output[cut:]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (end.finish_reason, end.stop_token_id)
        found = logprobs(outputs)
        assert len(found) == len(rows[cut:])
        for one, other in zip(found, rows[cut:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
        scored = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
        assert bool(scored) == (params.prompt_logprobs is not None and cut == 0)


def test_a_stop_token_ends_it_at_the_same_place(ranks: Ranks) -> None:
    (whole,) = ranks.run([(PROMPT, KINDS["seeded"])])
    output = tokens(whole)
    stop = output[15]
    end = output.index(stop) + 1
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=COUNT, ignore_eos=True, stop_token_ids=[stop])
    for cut, outputs in enumerate(ranks.run([(PROMPT, params)] * end, reported=[output[:cut] for cut in range(end)])):
        assert tokens(outputs) == output[cut:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", stop)
