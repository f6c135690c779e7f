"""The scheduler against a model that checks every plan it is given."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.engine_core import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from quire.engine.protocol.media import MediaItem
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler import kv_cache_manager
from quire.engine.scheduler.grammar import GrammarError
from quire.engine.scheduler.scheduler import Scheduler
from tests.fakes.configs import Windows, engine_config
from tests.fakes.model import FAILURE, FakeModel, next_token
from tests.fakes.outputs import each


@pytest.fixture(autouse=True)
def _states_are_kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_manager, "STATE_INTERVAL", 8)


class Engine:
    """The core's loop with a fake model in a pipeline: a plan's result is taken when `depth` are in flight."""

    def __init__(self, config: EngineConfig) -> None:
        self.scheduler, self.blocks_per_page = Scheduler(config), config.cache.blocks_per_page
        spec = config.model.architecture.media
        self.model = FakeModel(
            config.cache.block_size,
            config.cache.num_blocks,
            config.scheduler.max_num_batched_tokens,
            keeps=config.parallel.pipeline_parallel_size == 1,
            pools=config.model.pooling is not None,
            groups=config.cache.groups,
            blocks_per_page=config.cache.blocks_per_page,
            max_features=0 if config.media is None else config.media.encoder_cache_features,
            tower=None if spec is None else spec.tower,
            is_bidirectional=spec is not None and spec.is_bidirectional,
            joins_prompt=spec is not None and spec.joins_prompt,
        )
        self.depth, self.stages = config.scheduler.depth, config.parallel.pipeline_parallel_size
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.idle_stage_steps = 0
        """Counted here, to hold the scheduler's own count against."""

    def add(
        self,
        request_id: str,
        prompt: list[int],
        priority: int = 0,
        cache_salt: bytes = b"",
        reported: Sequence[int] = (),
        share: bytes = b"",
        weight: float = 1.0,
        media: Sequence[MediaItem] = (),
        adapter: AdapterRef | None = None,
        adapter_start: int = 0,
        hands_over: bool = False,
        kv_peer: str = "",
        **params: Any,
    ) -> None:
        known, of = SamplingParams(**params), list(reported)
        submit = EngineCoreRequest(
            0, request_id, prompt, known, priority, cache_salt, of, share, weight, media=list(media)
        )
        submit.adapter, submit.adapter_start, submit.hands_over = adapter, adapter_start, hands_over
        submit.kv_peer = kv_peer
        self.outputs[request_id] = []
        try:
            started = None if submit.params.structured_outputs is None else self.scheduler.start_grammar(submit)
            refusal = self.scheduler.add(submit, started)
        except GrammarError as error:
            refusal = EngineCoreOutput(request_id, [], finish_reason="error", error=str(error))
        if refusal is not None:
            self.scheduler.expect_no_more(request_id)
            self.outputs[request_id].append(refusal)

    def abort(self, request_id: str) -> None:
        ended = self.scheduler.abort(request_id)
        if ended is not None:
            self.outputs[request_id].append(ended[1])

    def turn(self) -> bool:
        """One turn of the loop; False when there is nothing left to do."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.in_flight.append((plan, self.model.execute(plan)))
        elif self.in_flight and len(self.scheduler.requests) >= self.stages:
            self.idle_stage_steps += max(0, self.stages - len(self.in_flight))
        if self.in_flight and (len(self.in_flight) == self.depth or plan is None):
            self.emit(self.scheduler.update(*self.in_flight.popleft()))
            self.scheduler.check_integrity()
            plan = plan or SchedulerOutput(-1, [], [], [])
        return self.emit(self.scheduler.process_structured(is_idle=not self.in_flight)) or plan is not None

    def emit(self, outputs: dict[int, EngineCoreOutputs]) -> bool:
        """Keep the outputs; returns whether there are any."""
        for news in outputs.values():
            for output in each(news):
                self.outputs[output.request_id].append(output)
        return bool(outputs)

    def run(self, each_turn: Callable[[int], None] = lambda turn: None, at_least: int = 0) -> None:
        for turn in range(100_000):
            each_turn(turn)
            if not self.turn() and turn >= at_least:
                break
        assert self.scheduler.stats.idle_stage_steps == self.idle_stage_steps
        assert not self.scheduler.requests
        page = self.blocks_per_page
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_blocks // page

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def scored(self, request_id: str) -> list[tuple[int, float]]:
        """Position and token (the fake model says so) of every prompt token that was scored, in their order."""
        rows = [row for o in self.outputs[request_id] if o.prompt_logprobs for row in o.prompt_logprobs.rows()]
        return [(row.rank, row.logprob) for row in rows]

    def ends(self, request_id: str) -> list[str]:
        return [output.finish_reason for output in self.outputs[request_id] if output.finish_reason]


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


AHEAD = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 3)]
"""Stages, and plans in flight: one for each stage, or more than one on a single stage, which then runs ahead."""
ONE_STAGE = [(stages, depth) for stages, depth in AHEAD if stages == 1]
WINDOWS: list[Windows] = [
    (None,),
    (None, 9, 9),
    (1, None),
    (6,),
    (None, 4, 30, 2),
    (None, "state", "state"),
    (None, -9),
]
"""Windows of the groups of layers; the first has none."""
AHEAD_AND_WINDOWS = pytest.mark.parametrize(
    ("stages", "depth", "windows"), [(*ahead, windows) for ahead in AHEAD for windows in WINDOWS]
)
CIRCUMSTANCES: list[tuple[int, bool, Windows]] = [
    *itertools.product([64], [True, False], WINDOWS[:1]),
    *itertools.product([16], [True, False], WINDOWS),
]
"""Tokens of a step, whether the cache is tight, and windows."""


def crossed(ahead: list[tuple[int, int]]) -> list[tuple[int, int, int, bool, Windows, bool]]:
    """Every entry of `ahead` with every other circumstance, so that each pair of values occurs; and whether prefixes
    are cached, in turns."""
    return [
        (*one, *circumstance, (i + j) % 4 == 0)
        for i, one in enumerate(ahead)
        for j, circumstance in enumerate(CIRCUMSTANCES)
        if (i + j) % 2 == 0
    ]


def tightened(config: EngineConfig) -> EngineConfig:
    """With hardly more blocks than the longest request needs, so that others are preempted."""
    least = config.cache.max_blocks(config.model.max_model_len, config.scheduler.max_num_batched_tokens)
    return replace(config, cache=replace(config.cache, num_blocks=least + 8 * config.cache.blocks_per_page))


@pytest.mark.parametrize(("stages", "depth", "budget", "tight", "windows", "prefix"), crossed(AHEAD))
def test_output_does_not_depend_on_the_batch(
    stages: int, depth: int, budget: int, tight: bool, windows: Windows, prefix: bool
) -> None:
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, windows=windows, num_blocks=450
    )
    engine = Engine(tightened(config) if tight else config)
    rng = random.Random(depth * budget + tight)
    shared = [rng.randrange(97) for _ in range(30)]
    prompts = [
        shared[: rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 40))] for _ in range(20)
    ]
    lengths = [1 + index * 7 % 30 for index in range(20)]

    def arrive(turn: int) -> None:
        if turn < len(prompts):
            engine.add(str(turn), prompts[turn], max_tokens=lengths[turn])

    engine.run(arrive, at_least=20)
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert engine.tokens(str(index)) == continuation(prompt, length)
        assert engine.ends(str(index)) == ["length"]
    stats = engine.scheduler.snapshot()
    assert (stats.preemptions > 0) == tight or (tight and windows != (None,))
    assert (stats.prefix_hit_tokens > 0) == prefix
    assert stats.generated_tokens == sum(lengths)


@pytest.mark.parametrize(("stages", "depth"), ONE_STAGE)
def test_prompts_share_a_step_equally_if_the_user_says_so(stages: int, depth: int) -> None:
    """A long prompt then does not keep the next ones waiting; unused parts of their shares are used."""
    config = engine_config(stages=stages, depth=depth, max_num_batched_tokens=64, num_blocks=1200, max_model_len=512)
    config = replace(config, scheduler=replace(config.scheduler, max_num_partial_prefills=3))
    engine, prompts = Engine(config), [[length % 97] * length for length in (300, 200, 10, 100)]
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=3)
    engine.run()
    assert [engine.tokens(str(index)) for index in range(4)] == [continuation(prompt, 3) for prompt in prompts]
    assert [row.num_tokens for row in engine.model.plans[0].scheduled] == [22, 22, 10, 10]


@pytest.mark.parametrize(("stages", "depth"), ONE_STAGE)
def test_a_long_prompt_may_have_a_limit_while_there_are_others(stages: int, depth: int) -> None:
    config = engine_config(stages=stages, depth=depth, max_num_batched_tokens=64, num_blocks=1200, max_model_len=512)
    config = replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=20))
    engine, prompts = Engine(config), [[length % 97] * length for length in (150, 5)]
    engine.add("0", prompts[0], max_tokens=3)
    engine.turn()
    engine.add("1", prompts[1], max_tokens=3)
    engine.run()
    assert [engine.tokens(str(index)) for index in range(2)] == [continuation(prompt, 3) for prompt in prompts]
    alone, *others = engine.model.plans
    assert [row.num_tokens for row in alone.scheduled] == [64]
    assert [row.num_tokens for row in others[0].scheduled] == [20, 5]


@AHEAD_AND_WINDOWS
def test_random_aborts_and_stops_lose_nothing(stages: int, depth: int, windows: Windows) -> None:
    engine = Engine(tightened(engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32)))
    rng = random.Random(depth)
    prompts: dict[str, list[int]] = {}

    def disturb(turn: int) -> None:
        if turn < 40:
            prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
            prompts[str(turn)] = prompt
            engine.add(str(turn), prompt, max_tokens=20, stop_token_ids=[rng.randrange(97) for _ in range(turn % 8)])
            if rng.random() < 0.5:
                engine.abort(str(rng.randrange(turn + 1)))

    engine.run(disturb, at_least=40)
    for request_id in engine.outputs:
        assert len(engine.ends(request_id)) == 1
        tokens = engine.tokens(request_id)
        assert tokens == continuation(prompts[request_id], len(tokens))
    assert {end for request_id in engine.outputs for end in engine.ends(request_id)} == {"length", "abort", "stop"}


@pytest.mark.parametrize(("stages", "depth", "budget", "tight", "windows", "prefix"), crossed(AHEAD))
def test_every_prompt_token_is_scored_once(
    stages: int, depth: int, budget: int, tight: bool, windows: Windows, prefix: bool
) -> None:
    """In order and without gaps, also with cached, chunked, preempted and aborted prompts."""
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, windows=windows, num_blocks=450
    )
    engine = Engine(tightened(config) if tight else config)
    rng = random.Random(depth * budget + tight)
    shared = [rng.randrange(97) for _ in range(30)]
    prompts = [
        [*shared, *(rng.randrange(97) for _ in range(rng.randrange(60)))][rng.randrange(30) :] for _ in range(20)
    ]
    lengths = [1 + index * 7 % 30 for index in range(20)]

    def arrive(turn: int) -> None:
        if turn < len(prompts):
            scores: dict[str, Any] = {} if turn % 3 == 0 else {"prompt_logprobs": 0}
            engine.add(str(turn), prompts[turn], max_tokens=lengths[turn], **scores)
            if turn % 7 == 6:
                engine.abort(str(turn - 2))

    engine.run(arrive, at_least=20)
    for index, prompt in enumerate(prompts):
        expected = [] if index % 3 == 0 else list(enumerate(map(float, prompt)))[1:]
        if engine.ends(str(index)) == ["abort"]:
            assert engine.scored(str(index)) == expected[: len(engine.scored(str(index)))]
            continue
        assert engine.tokens(str(index)) == continuation(prompt, lengths[index])
        assert engine.scored(str(index)) == expected
        first = next(at for at, output in enumerate(engine.outputs[str(index)]) if output.token_ids)
        assert not any(output.prompt_logprobs for output in engine.outputs[str(index)][first:])
    stats = engine.scheduler.snapshot()
    assert (stats.preemptions > 0) == tight or (tight and windows != (None,))
    assert stats.generated_tokens == sum(len(engine.tokens(str(index))) for index in range(20))


def test_what_has_been_scored_may_come_from_the_cache_again() -> None:
    """A request that loses its blocks while it is scored goes on where it was, and leaves its blocks to others."""
    engine = Engine(engine_config(max_num_batched_tokens=16))
    engine.add("a", list(range(60)), prompt_logprobs=0, max_tokens=2)
    for _ in range(2):
        engine.turn()
    (request,) = engine.scheduler.running
    engine.scheduler._remove_from_workers(request)
    engine.scheduler.waiting.push(request)
    engine.add("plain", list(range(60)), max_tokens=2)
    engine.run()
    assert engine.scored("a") == list(enumerate(map(float, range(60))))[1:]
    assert sum(plan.num_tokens for plan in engine.model.plans) == 60 + 1 + 4 + 1  # 60 tokens but once, 4 for the logits
    engine.add("again", list(range(60)), prompt_logprobs=0, max_tokens=1)
    engine.run()
    assert engine.outputs["again"][-1].num_cached_tokens == 0


@AHEAD_AND_WINDOWS
@pytest.mark.parametrize("tight", [True, False])
def test_a_request_continues_after_the_output_of_another_replica(
    stages: int, depth: int, windows: Windows, tight: bool
) -> None:
    """Cut at every third position, all at once; output and scores of the prompt are not sent twice. Blocks have four
    tokens, so that the cuts are at each place of a block."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=32, num_blocks=600)
    engine = Engine(tightened(config) if tight else config)
    prompt = list(range(3, 40))
    output = continuation(prompt, 30)
    end = output.index(output[20]) + 1
    for cut in range(0, end, 3):
        engine.add(f"stop {cut}", prompt, reported=output[:cut], max_tokens=50, stop_token_ids=[output[20]])
    for cut in range(0, 30, 3):
        scores: dict[str, Any] = {"prompt_logprobs": 0} if cut % 2 else {}
        engine.add(f"length {cut}", prompt, reported=output[:cut], max_tokens=30, **scores)
    engine.run()
    for cut in range(0, end, 3):
        assert engine.tokens(f"stop {cut}") == output[cut:end]
        assert engine.ends(f"stop {cut}") == ["stop"]
        assert engine.outputs[f"stop {cut}"][-1].stop_token_id == output[20]
    for cut in range(0, 30, 3):
        assert engine.tokens(f"length {cut}") == output[cut:]
        assert engine.ends(f"length {cut}") == ["length"]
        assert not engine.scored(f"length {cut}")


def test_a_request_that_another_replica_completed_is_finished() -> None:
    engine = Engine(engine_config())
    engine.add("a", [1, 2, 3], reported=[4, 5], max_tokens=2)
    assert (engine.tokens("a"), engine.ends("a")) == ([], ["length"])
    assert not engine.turn()


def test_a_salt_keeps_prefixes_apart() -> None:
    engine = Engine(engine_config())
    prompt = list(range(40))
    cached = []
    for index, salt in enumerate((b"a" * 16, b"b" * 16, b"a" * 16, b"", b"", b"b" * 16)):
        engine.add(str(index), prompt, cache_salt=salt, max_tokens=2)
        engine.run()
        assert engine.tokens(str(index)) == continuation(prompt, 2)
        cached.append(engine.outputs[str(index)][-1].num_cached_tokens)
    assert cached == [0, 0, 36, 0, 36, 36]


def test_same_prompts_in_one_step_share_their_blocks() -> None:
    engine = Engine(engine_config())
    prompt = list(range(40))
    for index in range(4):
        engine.add(str(index), prompt, max_tokens=3)
    engine.turn()
    assert engine.model.plans[0].num_tokens == 40 + 3 * 4  # the last block is computed by each
    engine.run()
    assert all(engine.tokens(str(index)) == continuation(prompt, 3) for index in range(4))


def test_decodes_go_before_prefill_chunks() -> None:
    engine = Engine(engine_config(max_num_batched_tokens=16))
    engine.add("short", [1, 2], max_tokens=30)
    engine.turn()
    engine.add("long", list(range(90)), max_tokens=1)
    for _ in range(6):
        engine.turn()
    assert all(plan.decodes or plan.scheduled[0].num_tokens == 1 for plan in engine.model.plans[1:])
    assert [plan.num_tokens for plan in engine.model.plans[1:6]] == [16] * 5


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_says_only_what_is_new(stages: int) -> None:
    engine = Engine(engine_config(stages=stages, max_num_seqs=2))
    for index in range(2):
        engine.add(str(index), [index] * 5, max_tokens=12)
    engine.run()
    decodes = [plan for plan in engine.model.plans if not plan.new]
    assert all(bool(plan.token_ids) == (stages > 1 and bool(plan.decodes)) for plan in decodes)
    for plan in decodes:  # a row that is not bare brings a block
        assert all(row.new_block_ids for row in plan.scheduled)
        assert all(len(row.new_token_ids) == (stages > 1) for row in plan.scheduled)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_chunked_prefill_a_prompt_is_one_row(depth: int) -> None:
    engine = Engine(engine_config(stages=depth, chunked=False, max_num_batched_tokens=128, num_blocks=60))
    prompts = {str(index): list(range(index, index + 50)) for index in range(10)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=5)
    engine.run()
    for plan in engine.model.plans:
        assert [row.num_tokens for row in plan.scheduled if row.num_tokens > 1] == [
            len(new.token_ids) - new.num_computed_tokens for new in plan.new
        ]
    assert all(engine.tokens(request_id) == continuation(prompt, 5) for request_id, prompt in prompts.items())


@pytest.mark.parametrize(("policy", "running"), [("priority", {"2", "3"}), ("fcfs", {"0", "1"})])
def test_priorities_count_only_if_the_policy_says_so(policy: Literal["fcfs", "priority"], running: set[str]) -> None:
    engine = Engine(engine_config(policy=policy, max_num_seqs=2))
    for index, priority in enumerate([5, 5, 1, -1]):
        engine.add(str(index), [index] * 8, priority, max_tokens=4)
    engine.turn()
    assert {request.core_request.request_id for request in engine.scheduler.running} == running
    engine.run()


def test_the_tokens_of_each_step_are_counted() -> None:
    engine = Engine(engine_config(max_num_batched_tokens=10))
    engine.add("a", list(range(1, 14)), max_tokens=3)
    while engine.turn():
        pass
    *steps, total = engine.scheduler.stats.iteration_tokens
    assert steps == [2, 1, 1, *[0] * 11]  # decodes; the rest of the prompt; its first chunk
    assert total == 10 + 3 + 1 + 1


def test_outputs_say_how_long_the_request_has_been_running(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("quire.engine.scheduler.request.time.monotonic", lambda: now)
    engine = Engine(engine_config())
    engine.add("a", [1, 2], max_tokens=2)
    engine.add("waiting", [1, 2], max_tokens=2)
    engine.abort("waiting")
    now = 107.0
    while engine.turn():
        now += 1.0
    assert [output.running_seconds for output in engine.outputs["a"]] == [0.0, 1.0]
    assert [output.running_seconds for output in engine.outputs["waiting"]] == [0.0]


def test_the_next_output_says_when_a_request_was_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("quire.engine.scheduler.request.time.monotonic", lambda: now)
    engine = Engine(engine_config(num_blocks=32, block_size=4, prefix=False))
    for index in range(3):
        engine.add(str(index), [index] * 40, max_tokens=60)
    while engine.turn():
        now += 1.0
    told = {name: [output.preempted_after for output in outputs] for name, outputs in engine.outputs.items()}
    assert not any(told["0"])
    assert sum(len(max(each, key=len)) for each in told.values()) == engine.scheduler.stats.preemptions > 0
    at = next(place for place, each in enumerate(told["2"]) if each)
    before, resumed = engine.outputs["2"][at - 1 : at + 1]
    (preempted,) = resumed.preempted_after
    assert before.running_seconds < preempted < resumed.running_seconds
    assert len(resumed.token_ids) == 1
    assert not any(told["2"][at + 1 : at + 3])  # tokens alone again


def test_stages_that_stand_idle_are_counted() -> None:
    """Two requests, of which one waits for memory: the second stage has nothing to do, though somebody would."""
    engine = Engine(engine_config(stages=2, num_blocks=32, prefix=False))
    engine.add("0", [1] * 100, max_tokens=20)
    engine.add("1", [2] * 100, max_tokens=20)
    engine.run()
    assert engine.idle_stage_steps > 10


def test_requests_that_were_aborted_while_waiting_are_forgotten() -> None:
    engine = Engine(engine_config(max_num_seqs=1))
    engine.add("first", [1], max_tokens=50)
    engine.turn()
    for index in range(1000):
        engine.add(str(index), [1], max_tokens=5)
        engine.abort(str(index))
    (share,) = engine.scheduler.waiting.shares
    assert len(share.waiting) < 100
    engine.run()


def test_stop_tokens_and_end_of_sequence() -> None:
    expected = continuation([1, 2, 3], 20)
    eos, stop = expected[7], expected[4]
    assert eos not in expected[:7]
    assert stop not in expected[:4]
    engine = Engine(engine_config(eos=(eos,)))
    engine.add("eos", [1, 2, 3], max_tokens=20)
    engine.add("ignore", [1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.add("stop", [1, 2, 3], max_tokens=20, stop_token_ids=[stop])
    engine.run()
    assert engine.tokens("eos") == expected[:8]
    assert engine.tokens("ignore") == expected
    assert engine.tokens("stop") == expected[:5]
    assert engine.outputs["stop"][-1].stop_token_id == stop
    assert [engine.ends(name) for name in ("eos", "ignore", "stop")] == [["stop"], ["length"], ["stop"]]


def test_the_next_decode_is_scheduled_while_its_token_is_in_flight() -> None:
    engine = Engine(engine_config(depth=2))
    engine.add("a", [1, 2, 3], max_tokens=4)
    engine.turn()
    assert engine.tokens("a") == []
    engine.turn()
    assert len(engine.model.plans) == 2
    assert engine.tokens("a") == continuation([1, 2, 3], 1)
    engine.run()
    assert engine.tokens("a") == continuation([1, 2, 3], 4)
    assert [plan.num_tokens for plan in engine.model.plans] == [3, 1, 1, 1]  # none beyond max_tokens
    assert engine.scheduler.snapshot().idle_stage_steps == 0


@pytest.mark.parametrize("length", [4, 5, 31])
def test_nothing_is_planned_beyond_the_models_length(length: int) -> None:
    engine = Engine(engine_config(depth=3, max_model_len=32, block_size=4))
    engine.add("a", [1] * length, max_tokens=None)
    engine.add("one", [2] * length, max_tokens=1)
    engine.run()
    assert len(engine.tokens("a")) == 32 - length
    assert len(engine.tokens("one")) == 1
    assert sum(plan.num_tokens for plan in engine.model.plans) == 31 + length


def test_a_stop_is_found_one_step_late_and_its_row_is_dropped() -> None:
    expected = continuation([1, 2, 3], 20)
    stop = expected[6]  # the tenth token, in the third block; the row after it would be computed in vain
    assert stop not in expected[:6]
    engine = Engine(engine_config(depth=2, num_blocks=32, max_num_seqs=2, prefix=False))
    engine.add("stops", [1, 2, 3], max_tokens=20, stop_token_ids=[stop])
    while not engine.ends("stops"):
        engine.turn()
    assert engine.in_flight  # with a row of the request that has ended
    assert engine.scheduler.kv.num_free == 32
    engine.add("next", [4] * 100, max_tokens=5)  # takes its slot and its blocks at once
    engine.run()
    assert engine.tokens("stops") == expected[:7]
    assert engine.outputs["stops"][-1].stop_token_id == stop
    assert engine.tokens("next") == continuation([4] * 100, 5)
    assert sum(plan.num_tokens for plan in engine.model.plans) == 3 + 7 + 100 + 4


@pytest.mark.parametrize(("stages", "depth", "turns"), [(2, 2, 1), (1, 2, 5)])
def test_an_abort_in_flight_does_not_wait_for_the_token(stages: int, depth: int, turns: int) -> None:
    engine = Engine(engine_config(stages=stages, depth=depth, prefix=False, max_num_seqs=1))
    engine.add("a", [1] * 40, max_tokens=50)
    for _ in range(turns):
        engine.turn()
    engine.abort("a")
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks
    engine.add("b", [4, 5, 6], max_tokens=5)
    engine.run()
    assert engine.tokens("b") == continuation([4, 5, 6], 5)
    assert engine.ends("a") == ["abort"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_full_cache_drains_and_then_preempts_the_last(depth: int) -> None:
    """If all that run are in flight when the blocks end, the last is held back, comes home, and makes room."""
    engine = Engine(engine_config(depth=depth, num_blocks=33, block_size=4, prefix=False))
    prompts = {str(index): [index] * 40 for index in range(3)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=60)

    def watch(turn: int) -> None:
        running = {request.request_id for request in engine.scheduler.running}
        assert not turn or "0" in running or "0" not in engine.scheduler.requests

    engine.run(watch)
    assert 0 < engine.scheduler.stats.preemptions < 10
    assert all(engine.tokens(request_id) == continuation(prompt, 60) for request_id, prompt in prompts.items())


def test_a_continuation_is_found_in_the_cache_up_to_its_last_known_block() -> None:
    engine = Engine(engine_config(depth=2))
    engine.add("a", [1, 2, 3, 4], max_tokens=13)
    engine.run()
    engine.add("b", [1, 2, 3, 4, *engine.tokens("a")], max_tokens=4)
    engine.run()
    assert engine.tokens("b") == continuation([1, 2, 3, 4, *engine.tokens("a")], 4)
    assert engine.outputs["b"][0].num_cached_tokens == 16


@AHEAD_AND_WINDOWS
def test_nothing_is_found_of_what_was_cached_before_a_reset(stages: int, depth: int, windows: Windows) -> None:
    engine = Engine(engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=16))
    prompt = list(range(40))
    engine.add("before", prompt, max_tokens=20)
    for _ in range(4):
        engine.turn()
    engine.scheduler.kv.unpublish_all()
    engine.add("after", prompt, max_tokens=4)
    engine.run()
    engine.add("again", prompt, max_tokens=4)
    engine.run()
    assert engine.tokens("before") == continuation(prompt, 20)
    assert engine.tokens("after") == engine.tokens("again") == continuation(prompt, 4)
    assert engine.outputs["after"][0].num_cached_tokens == 0
    assert engine.outputs["again"][0].num_cached_tokens >= 32


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = Engine(engine_config(max_model_len=32))
    engine.add("empty", [])
    engine.add("long", [1] * 32)
    engine.add("fits", [1] * 31, max_tokens=None)
    engine.run()
    assert engine.outputs["empty"][0].error == "the prompt is empty"
    assert engine.outputs["long"][0].error == "the prompt has 32 tokens; the maximum model length is 32"
    assert len(engine.tokens("fits")) == 1
    assert engine.ends("fits") == ["length"]


def test_a_request_id_in_use_is_refused_and_leaves_the_first_alone() -> None:
    engine = Engine(engine_config())
    engine.add("a", [1], max_tokens=2)
    refusal = engine.scheduler.add(EngineCoreRequest(0, "a", [2], SamplingParams()))
    assert refusal is not None
    assert refusal.finish_reason == "error"
    engine.run()
    assert engine.tokens("a") == continuation([1], 2)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_stage_idles_under_steady_load(depth: int) -> None:
    """Steady load: a new request whenever one ends, prompts from 4 to 60 tokens."""
    engine = Engine(engine_config(stages=depth, num_blocks=1000, max_num_batched_tokens=256))
    rng = random.Random(depth)
    started = 0

    def keep_busy(turn: int) -> None:
        nonlocal started
        while turn < 300 and len(engine.scheduler.requests) < 12:
            prompt = [rng.randrange(97) for _ in range(rng.randrange(4, 60))]
            engine.add(str(started), prompt, max_tokens=rng.randrange(5, 60))
            started += 1

    engine.run(keep_busy)
    stats = engine.scheduler.stats
    assert stats.idle_stage_steps / (stats.steps + stats.idle_stage_steps) < 0.05
    rows = [plan.num_rows for plan in engine.model.plans[depth * 20 : 280]]
    assert max(rows) <= -(-12 // depth)
    assert sum(rows) / len(rows) > 0.9 * 12 / depth
    tokens = [plan.num_tokens for plan in engine.model.plans]
    assert max(tokens) <= 12 * 60 / depth


@pytest.mark.parametrize(("length", "chunks"), [(400, [256, 144]), (4000, [1000] * 4), (9000, [2048] * 4 + [808])])
def test_a_long_prompt_is_cut_into_equal_chunks_for_the_stages(length: int, chunks: list[int]) -> None:
    engine = Engine(engine_config(stages=4, max_num_batched_tokens=2048, num_blocks=3000, max_model_len=10_000))
    engine.add("long", [1] * length, max_tokens=2)
    engine.run()
    assert [plan.num_tokens for plan in engine.model.plans] == [*chunks, 1]


def test_a_heartbeat_frees_slots_on_the_workers() -> None:
    engine = Engine(engine_config())
    engine.add("a", [1, 2, 3], max_tokens=5)
    engine.turn()
    engine.abort("a")
    plan = engine.scheduler.heartbeat()
    assert plan.freed_slots == [0]
    assert engine.scheduler.update(plan, engine.model.execute(plan)) == {}
    assert not engine.model.rows


class TimedEngine(Engine):
    """The duration of each step follows a formula, on a simulated clock."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.seconds: list[float] = []
        """Seconds of the steps that had decodes and prompt tokens."""

    def turn(self) -> bool:
        plans = len(self.model.plans)
        went_on = super().turn()
        for plan in self.model.plans[plans:]:
            chunks = sum(row.num_tokens for row in plan.scheduled if row.num_tokens > 1)
            decodes = plan.num_tokens - chunks
            took = 0.01 + 0.001 * chunks + 0.0005 * decodes
            self.scheduler.token_budget.learn(plan, took)
            if chunks and decodes:
                self.seconds.append(took)
        return went_on


@pytest.mark.parametrize(("target", "expected"), [(0.1, 0.1), (0.001, 0.045), (None, 0.18)])
@pytest.mark.parametrize(("stages", "depth"), [(1, 2), (2, 2)])
def test_prompt_chunks_are_sized_by_the_time_they_take(
    target: float | None, expected: float, stages: int, depth: int
) -> None:
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=2048, max_model_len=4000, num_blocks=1000, prefix=False
    )
    tuned = replace(config.scheduler, dynamic_chunking=True, itl_target=None if target is None else target * stages)
    engine = TimedEngine(replace(config, scheduler=tuned))
    for index in range(4):
        engine.add(f"short {index}", [index] * 4, max_tokens=150)
    for _ in range(10):
        engine.turn()
    prompts = {str(index): [index] * 300 for index in range(8)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=2)
    engine.run()
    assert all(engine.tokens(request_id) == continuation(prompt, 2) for request_id, prompt in prompts.items())
    learned = engine.seconds[4:]
    if target is None:  # the last prompt tokens are not many
        engine.add("last", [9] * 300, max_tokens=2)
        engine.add("beside", [8] * 4, max_tokens=150)
        engine.run()
        assert max(engine.seconds[-3:]) <= expected / 3 * 1.25
    assert max(learned) <= expected * 1.25
    assert max(learned) >= expected * 0.7


def test_when_nobody_decodes_a_chunk_is_as_large_as_it_pays() -> None:
    config = engine_config(max_num_batched_tokens=2048, max_model_len=4000, num_blocks=2000, prefix=False)
    engine = TimedEngine(replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True)))
    for index in range(3):
        engine.add(str(index), [index] * 3000, max_tokens=1)
    engine.run()
    chunks = [plan.num_tokens for plan in engine.model.plans]
    assert chunks[0] == 256  # nothing is known yet
    assert max(chunks) <= 2048
    assert chunks[-2] >= 200  # 0.01 s fixed are 5 % of the time of 200 tokens


def test_a_fixed_size_learns_nothing() -> None:
    engine = TimedEngine(engine_config(max_num_batched_tokens=64))
    engine.add("a", [1] * 100, max_tokens=3)
    engine.run()
    assert [plan.num_tokens for plan in engine.model.plans] == [64, 36, 1, 1]
    assert engine.scheduler.token_budget.step_time is None


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize("budget", [8, 48])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("prompt", [3, 250])
def test_blocks_outside_the_window_are_freed(stages: int, depth: int, budget: int, prefix: bool, prompt: int) -> None:
    """Sixteen windows long, prompt or output: the window, a step's chunk, and the blocks that they begin and end in."""
    window, size = 16, 4
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, windows=(window,), max_model_len=256
    )
    engine = Engine(config)
    engine.add("a", list(range(prompt)), max_tokens=None)
    chunked: list[int] = []
    decoding: list[int] = []

    def watch(turn: int) -> None:
        for request in engine.scheduler.running:
            used = engine.scheduler.snapshot().kv_blocks_used
            (decoding if request.num_computed_tokens > prompt + size else chunked).append(used)

    engine.run(watch)
    assert engine.tokens("a") == continuation(list(range(prompt)), 256 - prompt)
    assert max(chunked) <= 1 + (window - 1 + min(budget, prompt) + size - 2) // size
    assert max(decoding, default=0) <= 1 + window // size
    assert engine.scheduler.stats.preemptions == 0


@pytest.mark.parametrize(("stages", "depth"), AHEAD)
@pytest.mark.parametrize("windows", WINDOWS[1:])
def test_a_preempted_request_with_windows_resumes(stages: int, depth: int, windows: Windows) -> None:
    """All begin with a block, and the cache is as small as may be."""
    config = engine_config(stages=stages, depth=depth, windows=windows, max_num_batched_tokens=8, max_model_len=62)
    least = config.cache.max_blocks(config.model.max_model_len, 8)
    engine = Engine(replace(config, cache=replace(config.cache, num_blocks=least)))
    for index in range(6):
        engine.add(str(index), [index], max_tokens=60)
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert all(engine.tokens(str(index)) == continuation([index], 60) for index in range(6))


def test_a_pool_for_one_long_request_holds_many_windowed_ones() -> None:
    """Each needs its window and no more, so that several run where one without a window would."""
    config = engine_config(windows=(8,), max_model_len=128, max_num_batched_tokens=16, prefix=False)
    engine = Engine(replace(config, cache=replace(config.cache, num_blocks=32)))
    for index in range(8):
        engine.add(str(index), [index] * 60, max_tokens=60)
    most = 0

    def watch(turn: int) -> None:
        nonlocal most
        most = max(most, len(engine.scheduler.running))

    engine.run(watch)
    assert most == 8
    assert engine.scheduler.stats.preemptions == 0
    assert all(engine.tokens(str(index)) == continuation([index] * 60, 60) for index in range(8))


def test_a_prefix_is_found_where_its_last_window_is() -> None:
    engine = Engine(engine_config(windows=(None, 10), max_num_batched_tokens=16))
    first = list(range(60))
    engine.add("first", first, max_tokens=4)
    engine.run()
    engine.add("longer", [*first, *engine.tokens("first"), 5, 6, 7], max_tokens=2)
    engine.run()
    assert engine.outputs["longer"][-1].num_cached_tokens == 60  # the last of 64 tokens was never computed
    engine.add("shorter", [*first[:32], 90, 91], max_tokens=2)  # its window was given back, but not taken since
    engine.run()
    assert engine.outputs["shorter"][-1].num_cached_tokens == 32


def out_of_memory_at(rng: random.Random, share: float) -> Callable[[SchedulerOutput], bool]:
    return lambda plan: plan.num_rows > 0 and rng.random() < share


@pytest.mark.parametrize(("stages", "depth", "budget", "tight", "windows", "prefix"), crossed(ONE_STAGE))
def test_steps_that_fail_end_their_own_requests_and_no_others(
    stages: int, depth: int, budget: int, tight: bool, windows: Windows, prefix: bool
) -> None:
    """The fake model would see a block that was shared without having been written."""
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, windows=windows, num_blocks=1200
    )
    engine = Engine(tightened(config) if tight else config)
    rng = random.Random(7 * depth + budget)
    engine.model.fails = out_of_memory_at(rng, 0.05)
    shared = [rng.randrange(97) for _ in range(40)]
    heads, tails = [0, 8, 33, 40], range(1, 41)
    prompts = {str(i): shared[: rng.choice(heads)] + [rng.randrange(97)] * rng.choice(tails) for i in range(40)}
    waiting = list(prompts)

    def come_and_go(turn: int) -> None:
        if waiting and turn % 2:
            request_id = waiting.pop()
            scored = rng.choice([None, 0])
            engine.add(request_id, prompts[request_id], max_tokens=10, prompt_logprobs=scored)
        if turn % 17 == 16 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))

    engine.run(come_and_go, at_least=150)
    ends = [engine.ends(request_id) for request_id in prompts]
    assert all(len(end) == 1 for end in ends)
    assert {"error", "length"} <= {end for (end,) in ends}
    for request_id, prompt in prompts.items():
        (end,), tokens = engine.ends(request_id), engine.tokens(request_id)
        assert tokens == continuation(prompt, 10)[: len(tokens)]
        assert end != "length" or len(tokens) == 10
        last = engine.outputs[request_id][-1]
        assert last.error == (FAILURE if end == "error" else None)
    assert not engine.scheduler.kv._unwritten


def failing_once(engine: Engine, step: int) -> None:
    engine.model.fails = lambda plan: plan.step == step


def test_a_prompt_with_a_failed_prefix_recomputes_it() -> None:
    """The second request is admitted while the first is under way, and finds its blocks; they never get content."""
    engine = Engine(engine_config(depth=2, max_num_batched_tokens=16))
    failing_once(engine, 0)
    engine.add("first", [5] * 16, max_tokens=4)
    engine.turn()  # handed out, not back
    engine.add("second", [5] * 16 + [6], max_tokens=4)
    engine.turn()
    assert engine.ends("first") == ["error"]
    assert engine.outputs["first"][0].error == FAILURE
    assert engine.ends("second") == []
    assert engine.model.plans[1].new[0].num_computed_tokens == 16
    engine.run()
    assert engine.model.plans[2].new[0].num_computed_tokens == 0
    assert engine.tokens("second") == continuation([5] * 16 + [6], 4)
    assert [plan.clears_failure for plan in engine.model.plans[:4]] == [False, False, True, False]


def test_what_was_computed_before_a_failure_stays_cached() -> None:
    engine = Engine(engine_config(depth=2, max_num_batched_tokens=16))
    engine.add("first", [5] * 16, max_tokens=1)
    engine.run()
    failing_once(engine, 1)
    engine.add("second", [5] * 16 + [6], max_tokens=4)
    engine.run()
    engine.add("third", [5] * 16 + [7], max_tokens=4)
    engine.run()
    assert engine.ends("second") == ["error"]
    assert engine.outputs["third"][0].num_cached_tokens == 16
    assert engine.tokens("third") == continuation([5] * 16 + [7], 4)


def test_a_decode_that_fails_with_the_next_in_flight_fails_once() -> None:
    engine = Engine(engine_config(depth=2))
    failing_once(engine, 3)
    engine.add("first", [5, 6, 7], max_tokens=20)
    engine.run()
    assert engine.ends("first") == ["error"]
    assert engine.tokens("first") == continuation([5, 6, 7], 3)
    assert [plan.num_rows for plan in engine.model.plans] == [1] * 5  # and the last of them was skipped
    engine.add("second", [5, 6, 7], max_tokens=20)
    engine.run()
    assert engine.tokens("second") == continuation([5, 6, 7], 20)


@pytest.mark.parametrize("windows", [(None, "state", "state"), (None, 9, "state"), ("state",)])
def test_a_conversation_continues_from_its_last_states(windows: Windows) -> None:
    """The prompt of each turn is the conversation so far; fewer than two blocks are computed again."""
    engine = Engine(engine_config(windows=windows, max_model_len=1024, num_blocks=3000, max_num_batched_tokens=16))
    rng, conversation, reused, reusable = random.Random(0), list[int](), 0, 0
    for turn in range(8):
        known = len(conversation)
        conversation += [rng.randrange(97) for _ in range(20 + 7 * turn)]
        engine.add(str(turn), conversation, max_tokens=30 + turn)
        engine.run()
        conversation += engine.tokens(str(turn))
        cached = engine.outputs[str(turn)][-1].num_cached_tokens
        assert known - 2 * 4 < cached <= known or not turn
        reused, reusable = reused + cached, reusable + known
    assert reused >= 0.9 * reusable
    stats = engine.scheduler.snapshot()
    assert stats.kv_blocks_used == 0
    assert stats.preemptions == 0


def test_states_of_one_prompt_serve_others_while_there_is_room() -> None:
    """A shared prefix is found at a multiple of the interval, by requests that come together as well."""
    engine = Engine(engine_config(windows=(None, "state"), max_model_len=256, num_blocks=1200))
    shared = list(range(60))
    engine.add("first", [*shared, 1], max_tokens=1)
    engine.run()
    for name in ("a", "b", "c"):
        engine.add(name, [*shared, 90, ord(name) % 97, 3], max_tokens=20)
    engine.run()
    assert [engine.outputs[name][-1].num_cached_tokens for name in ("a", "b", "c")] == [60, 60, 60]


def test_a_long_prompt_leaves_others_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks take pages, blocks that its window has passed go first."""
    monkeypatch.setattr(kv_cache_manager, "STATE_INTERVAL", 1024)
    config = engine_config(windows=(None, -9), max_model_len=1024, num_blocks=3 * 110, max_num_batched_tokens=16)
    engine, first = Engine(config), [number % 90 for number in range(63)]
    for name, prompt in (("first", first), ("long", [95, *range(80)] * 8), ("again", [*first, 96, 7])):
        engine.add(name, prompt, max_tokens=3)
        engine.run()
    assert engine.outputs["again"][-1].num_cached_tokens == 60


def test_requests_with_states_alone_are_not_preempted() -> None:
    """A state has one size: two requests fit into two pages each, and snapshots give way."""
    config = engine_config(windows=("state",), max_num_seqs=4, num_blocks=3 * 5)
    engine = Engine(config)
    for index in range(8):
        engine.add(str(index), [index] * 30, max_tokens=50)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0
    for index in range(8):
        assert engine.tokens(str(index)) == continuation([index] * 30, 50)
