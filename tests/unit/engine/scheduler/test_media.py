"""Images in prompts: what is encoded, when, and how often. The fake model sees each feature as a token of its own, and
checks that the features are there."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from quire.engine.architecture.media_spec import MediaSpec, TowerSpec, TowerWork
from quire.engine.config.engine_config import EngineConfig, MediaConfig, SpeculativeConfig
from quire.engine.protocol.media import MediaData, MediaItem, MediaKind, MediaRun
from quire.engine.protocol.scheduler_output import SchedulerOutput
from quire.engine.scheduler.kv_cache_manager import extend_hashes
from quire.engine.scheduler.speculation import SpeculationManager
from quire.engine.scheduler.step_time import StepLoad, StepTimeModel
from quire.engine.scheduler.token_budget import TowerTime
from tests.fakes.configs import TINY, Windows, engine_config
from tests.fakes.model import DAMAGED, FAILURE, with_features
from tests.unit.engine.scheduler.test_scheduler import AHEAD, Engine, continuation, tightened
from tests.unit.engine.scheduler.test_speculation import GUESSES, request
from tests.unit.engine.scheduler.test_speculation import engine as drafting_engine

_START, _FEATURE, _BETWEEN, _END = 91, 92, 93, 94


@dataclass(frozen=True, kw_only=True)
class _Tower(TowerSpec):
    def steps(self, item: MediaItem, device: str) -> Iterator[tuple[TowerWork, int]]:
        count = 5 * -(-item.num_features // 8)
        yield TowerWork(item.num_features / count), count


Image = tuple[str, int] | tuple[str, int, int]
"""Its name, and the features of each of its runs."""


def digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def seconds(engine: Engine, plan: SchedulerOutput) -> float:
    """How long a step takes: features take longer than tokens."""
    features = engine.model.computed.get(plan.step, 0.0)
    return 0.01 + 0.001 * plan.num_prefill_tokens + 0.0005 * len(plan.decodes) + 0.004 * features


class Prompt:
    """Texts and images in order."""

    def __init__(self, *parts: Sequence[int] | Image) -> None:
        self.tokens: list[int] = []
        self.items: list[MediaItem] = []
        for part in parts:
            name, *sizes = part
            if isinstance(name, str):
                self._add_image(name, [int(size) for size in sizes])
            else:
                self.tokens += [int(token) for token in part]

    def _add_image(self, name: str, sizes: list[int]) -> None:
        offset, tokens, runs = len(self.tokens), [_START], list[MediaRun]()
        for size in sizes:
            runs.append(MediaRun(len(tokens), size))
            tokens += [*[_FEATURE] * size, _BETWEEN]
        tokens[-1] = _END
        data = MediaData((), 0, path=name)
        self.items.append(MediaItem(digest(name), "image", offset, len(tokens), tuple(runs), data=data))
        self.tokens += tokens

    def answer(self, count: int) -> list[int]:
        return continuation(with_features(self.tokens, self.items), count)


def with_media(
    config: EngineConfig, *, cache: int = 60, encoded: int = 30, two_way: bool = False, joins: bool = False
) -> EngineConfig:
    """`joins`: a prompt with images is one run."""
    tower = _Tower(hidden_size=32)
    spec = MediaSpec(tower=tower, image_token_id=_FEATURE, is_bidirectional=two_way or joins, joins_prompt=joins)
    kinds: dict[MediaKind, int] = {"image": 9, "video": 0}
    return replace(
        config,
        model=replace(config.model, architecture=replace(TINY, media=spec)),
        media=MediaConfig(
            max_items=kinds, max_encoder_features=encoded, encoder_cache_features=cache, max_item_features=cache
        ),
    )


def media_engine(*, cache: int = 60, encoded: int = 30, two_way: bool = False, **config: Any) -> Engine:
    return Engine(with_media(engine_config(**config), cache=cache, encoded=encoded, two_way=two_way))


def add(engine: Engine, request_id: str, prompt: Prompt, **params: Any) -> None:
    engine.add(request_id, prompt.tokens, media=prompt.items, **params)


def encoded(engine: Engine) -> list[list[str]]:
    """The images that each plan encodes."""
    return [
        [item.data.path for item in plan.media.encoded if item.data is not None] if plan.media is not None else []
        for plan in engine.model.plans
    ]


def chunks(engine: Engine) -> list[int]:
    """The tokens of the plans."""
    return [plan.num_tokens for plan in engine.model.plans]


def text(length: int, first: int = 0) -> list[int]:
    return [(first + at) % 90 for at in range(length)]


# --- hashes ---------------------------------------------------------------------------------------------------


def hashes(prompt: Prompt) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, prompt.tokens, 4, media=prompt.items)
    return found


def test_the_chain_of_a_text_is_that_of_its_tokens() -> None:
    tokens, link = text(10), b""
    expected = []
    for start in (0, 4):
        link = blake2b(link + array("q", tokens[start : start + 4]).tobytes(), digest_size=16).digest()
        expected.append(link)
    assert hashes(Prompt(tokens)) == expected


def test_a_chain_tells_images_and_their_places_apart() -> None:
    one = hashes(Prompt(text(6), ("cat", 7), text(8)))
    assert one == hashes(Prompt(text(6), ("cat", 7), text(8)))
    dog = hashes(Prompt(text(6), ("dog", 7), text(8)))
    assert one[0] == dog[0]  # before the image
    assert not {*one[1:]} & {*dog[1:]}
    moved = Prompt(text(6), ("cat", 7), text(8))
    moved.items[0] = msgspec.structs.replace(moved.items[0], offset=5)
    assert not {*one[1:]} & {*hashes(moved)[1:]}
    two = Prompt(("cat", 1), ("dog", 1), text(8))
    swapped = Prompt(("dog", 1), ("cat", 1), text(8))
    assert two.tokens == swapped.tokens
    assert not {*hashes(two)} & {*hashes(swapped)}


# --- the whole --------------------------------------------------------------------------------------------------

CASES = [
    (*ahead, budget, tight, windows, number % 4 != 0, number % 3 == 0, budget == 48 and number % 7 > 3, number % 5 > 1)
    for number, (ahead, budget, tight, windows) in enumerate(
        itertools.product(AHEAD, (16, 48), (True, False), ((None,), (None, 20), (None, "state")))
    )
]


@pytest.mark.parametrize(
    ("stages", "depth", "budget", "tight", "windows", "prefix", "two_way", "joins", "has_target"), CASES
)
def test_answers_do_not_depend_on_the_company(
    stages: int,
    depth: int,
    budget: int,
    tight: bool,
    windows: Windows,
    prefix: bool,
    two_way: bool,
    joins: bool,
    has_target: bool,
) -> None:
    """Images that many ask about, in several places and runs, and one that cannot be encoded, with aborts, failures,
    preemption, drafts, and a cache that holds few of them. Beside decodes, images are encoded in parts if there is a
    target."""
    config = engine_config(
        stages=stages, depth=depth, max_num_batched_tokens=budget, prefix=prefix, windows=windows, num_blocks=600
    )
    sizes = {"cache": 30, "encoded": 48} if joins else {"cache": 20, "encoded": 14}
    config = with_media(tightened(config) if tight else config, **sizes, two_way=two_way, joins=joins)
    if has_target:
        config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True, itl_target=0.04))
    engine = drafting_engine(config, GUESSES["mixed"]) if budget == 48 else Engine(config)
    rng = random.Random(f"{stages} {depth} {budget} {tight} {windows}")
    images: list[Image] = [("a", 14), ("b", 5, 9), ("c", 3), ("d", 1, 1), ("e", 12), ("f", 7), ("damaged", 10)]
    engine.model.damaged.add(digest("damaged"))
    prompts: dict[str, Prompt] = {}
    learned: list[SchedulerOutput] = []
    if stages == 1:
        engine.model.fails = lambda plan: plan.num_rows > 0 and rng.random() < 0.01

    def disturb(turn: int) -> None:
        for plan in engine.model.plans[len(learned) :]:
            learned.append(plan)
            engine.scheduler.token_budget.learn(plan, seconds(engine, plan))
        if turn < 90 and turn % 2 == 0:
            parts: list[Sequence[int] | Image] = [text(rng.choice([0, 1, 5, 24]) + 1, rng.choice([0, 0, 7]))]
            for _ in range(rng.choice([0, 1, 1, 2, 3])):
                parts += [rng.choice(images), text(rng.randrange(1, 9))]
            prompts[str(turn)] = Prompt(*parts)
            add(engine, str(turn), prompts[str(turn)], max_tokens=rng.randrange(1, 25))
        if turn % 13 == 12 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))

    engine.run(disturb, at_least=100)
    ends = set[str]()
    for request_id, prompt in prompts.items():
        (end,) = engine.ends(request_id)
        tokens = engine.tokens(request_id)
        assert tokens == prompt.answer(len(tokens))
        assert end != "length" or all(item.digest != digest("damaged") for item in prompt.items)
        ends.add(end)
    assert {"length", "abort"} <= ends <= {"length", "abort", "error"}
    stats = engine.scheduler.snapshot()
    assert 0 < stats.encoder_cache_hits < stats.encoder_cache_queries
    assert not engine.scheduler.encoder_cache.has_requests
    parts = [plan for plan in engine.model.plans if plan.media is not None and plan.media.num_steps is not None]
    assert bool(parts) == has_target


def test_an_image_that_cannot_be_encoded_ends_its_requests_alone() -> None:
    """Nothing of it stays in the prefix cache, should it be encoded later, for example when there is memory."""
    engine = media_engine(max_num_batched_tokens=64, depth=2)
    prompt, other = Prompt(text(10), ("cat", 20), text(9)), Prompt(text(10), ("dog", 8), text(5))
    engine.model.damaged.add(digest("cat"))
    add(engine, "0", prompt, max_tokens=3)
    add(engine, "1", other, max_tokens=9)
    add(engine, "2", prompt, max_tokens=3)
    engine.run()
    assert [engine.ends(each) for each in "012"] == [["error"], ["length"], ["error"]]
    assert [engine.outputs[each][-1].error for each in "02"] == [DAMAGED] * 2
    assert (engine.tokens("0"), engine.tokens("1"), engine.tokens("2")) == ([], other.answer(9), [])
    engine.model.damaged.clear()
    add(engine, "3", prompt, max_tokens=3)
    engine.run()
    assert engine.tokens("3") == prompt.answer(3)
    assert engine.model.plans[-3].new[0].num_computed_tokens == 8  # the text before it


def test_a_request_continues_after_the_output_of_another_replica() -> None:
    engine, prompt = media_engine(max_num_batched_tokens=16, depth=2), Prompt(text(5), ("cat", 9, 4), text(6))
    answer = prompt.answer(9)
    for cut in range(9):
        engine.add(str(cut), prompt.tokens, media=prompt.items, reported=answer[:cut], max_tokens=9)
    engine.run()
    assert [engine.tokens(str(cut)) for cut in range(9)] == [answer[cut:] for cut in range(9)]


# --- when an item is encoded ----------------------------------------------------------------------------------


def test_an_item_is_encoded_once_in_the_step_that_reaches_it() -> None:
    """A chunk that ends inside an item keeps its features for the next one."""
    engine = media_engine(max_num_batched_tokens=16)
    prompt = Prompt(text(15), ("cat", 20), text(20))
    add(engine, "0", prompt, max_tokens=3)
    engine.run()
    assert engine.tokens("0") == prompt.answer(3)
    assert chunks(engine) == [16, 16, 16, 9, 1, 1]
    assert encoded(engine) == [[], ["cat"], [], [], [], []]  # the first chunk ends before the first feature
    assert engine.model.plans[0].new[0].media[0].runs == (MediaRun(1, 20),)


def test_a_step_encodes_within_its_budget_and_one_item_at_least() -> None:
    engine = media_engine(max_num_batched_tokens=64, encoded=16)
    prompt = Prompt(("a", 8), ("b", 8), text(5), ("c", 17), ("d", 4))
    add(engine, "0", prompt, max_tokens=1)
    engine.run()
    assert encoded(engine) == [["a", "b"], ["c"], ["d"]]
    assert chunks(engine) == [10 + 10 + 5 + 1, 17 + 1 + 1, 5]
    assert engine.tokens("0") == prompt.answer(1)


def test_many_who_ask_about_one_image_have_it_encoded_once() -> None:
    engine = media_engine(max_num_batched_tokens=64)
    prompts = [Prompt(text(5, number), ("cat", 20), text(9, number)) for number in range(8)]
    for number, prompt in enumerate(prompts):
        add(engine, str(number), prompt, max_tokens=3)
    engine.run()
    assert [*itertools.chain(*encoded(engine))] == ["cat"]
    assert all(engine.tokens(str(number)) == prompt.answer(3) for number, prompt in enumerate(prompts))
    stats = engine.scheduler.snapshot()
    assert (stats.encoder_cache_queries, stats.encoder_cache_hits, stats.encoded_features) == (8, 7, 20)


def test_requests_with_different_salts_share_no_image() -> None:
    """Otherwise the time of an answer tells which images others have sent."""
    engine, prompt = media_engine(), Prompt(("cat", 9), text(3))
    for salt in (b"", b"one", b"two", b"one"):
        add(engine, str(len(engine.model.plans)), prompt, max_tokens=1, cache_salt=salt)
        engine.run()
    assert [*itertools.chain(*encoded(engine))] == ["cat"] * 3


def test_an_image_twice_in_a_prompt_is_encoded_once() -> None:
    engine = media_engine(max_num_batched_tokens=64)
    prompt = Prompt(("cat", 9), text(3), ("cat", 9), text(3))
    add(engine, "0", prompt, max_tokens=2)
    engine.run()
    assert [*itertools.chain(*encoded(engine))] == ["cat"]
    assert engine.tokens("0") == prompt.answer(2)


@pytest.mark.parametrize("follow_up", ["what", "else"])
def test_a_second_question_encodes_only_what_the_prefix_cache_lacks(follow_up: str) -> None:
    """The features are dropped for another image; a hit that ends inside an item needs all of them again."""
    engine = media_engine(max_num_batched_tokens=64, cache=20)
    first, other = Prompt(text(5), ("cat", 20), text(9)), Prompt(text(5, 50), ("dog", 18), text(2))
    second = Prompt(text(5), ("cat", 20), text(9), text(4, 70))
    for name, prompt in (("first", first), ("other", other)):
        add(engine, name, prompt, max_tokens=1)
        engine.run()
    if follow_up == "else":
        shared = engine.scheduler.kv.match(hashes(first))
        engine.scheduler.kv._unpublish(shared[3])  # as if its block had been needed
    add(engine, "second", second, max_tokens=3)
    engine.run()
    assert engine.tokens("second") == second.answer(3)
    cached = engine.outputs["second"][-1].num_cached_tokens
    assert cached == {"what": 36, "else": 12}[follow_up]
    assert [*itertools.chain(*encoded(engine))] == ["cat", "dog", *["cat"] * (follow_up == "else")]


def test_the_longest_unused_is_dropped_before_others_are_encoded() -> None:
    engine = media_engine(cache=25, encoded=100)
    for number, images in enumerate([[("a", 10)], [("b", 10)], [("a", 10)], [("c", 12)], [("d", 6), ("a", 10)]]):
        add(engine, str(number), Prompt(text(3, number), *images))
        engine.run()
    assert [*itertools.chain(*encoded(engine))] == ["a", "b", "c", "d"]
    freed = [plan.media.freed for plan in engine.model.plans if plan.media is not None]
    assert freed == [[], [], [digest("b")], [digest("c")]]


def test_an_image_that_needs_the_whole_cache_is_not_overtaken_for_ever() -> None:
    """Each step ends in the middle of an image of another request."""
    engine = media_engine(max_num_batched_tokens=10, cache=20, encoded=100, num_blocks=900)
    add(engine, "first", Prompt(text(5), ("first", 8)), max_tokens=1)
    large = Prompt(text(1), ("large", 20), text(3))
    add(engine, "large", large, max_tokens=3)

    def keep_busy(turn: int) -> None:
        if 0 < turn < 60:
            add(engine, str(turn), Prompt((f"image {turn}", 8)), max_tokens=1)

    engine.run(keep_busy)
    assert engine.tokens("large") == large.answer(3)
    assert encoded(engine)[:4] == [["first"], ["image 1"], [], ["large"]]


def test_decodes_make_room_for_a_run_that_must_be_in_one_row() -> None:
    engine = media_engine(max_num_batched_tokens=24, max_num_seqs=12, two_way=True, num_blocks=900)
    for number in range(11):
        engine.add(f"decode {number}", [number], max_tokens=5 + number)
    engine.turn()
    large = Prompt(text(3), ("large", 20), text(3))
    add(engine, "large", large, max_tokens=3)

    def keep_busy(turn: int) -> None:
        if turn < 90:
            engine.add(str(turn), [turn % 90], max_tokens=12)

    engine.run(keep_busy)
    assert engine.tokens("large") == large.answer(3)
    assert min(number for number, images in enumerate(encoded(engine)) if "large" in images) < 25


def test_rows_do_not_end_inside_a_run_that_needs_all_of_itself() -> None:
    """The run is longer than a chunk may be beside other requests, but fits into a step."""
    config = with_media(engine_config(max_num_batched_tokens=32), two_way=True)
    engine = Engine(replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=10)))
    engine.add("other", text(3), max_tokens=12)
    engine.turn()
    prompt = Prompt(text(6), ("cat", 20, 4), text(30))
    add(engine, "0", prompt, max_tokens=2)
    engine.run()
    assert engine.tokens("0") == prompt.answer(2)
    rows = [row.num_tokens for plan in engine.model.plans for row in plan.scheduled if row.num_tokens > 1]
    assert rows == [3, 27, 10, 10, 10, 6]


def test_a_prompt_that_is_one_run_is_one_row() -> None:
    """Only the same prompt finds it in the prefix cache."""
    config = with_media(engine_config(max_num_batched_tokens=48), joins=True)
    engine = Engine(replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=10)))
    engine.add("other", text(3), max_tokens=20)
    engine.turn()
    engine.add("text", text(30), max_tokens=1)
    prompt, longer = (Prompt(text(6), ("cat", 9), text(4), ("dog", 5), text(length)) for length in (6, 7))
    for number, each in enumerate((prompt, longer, prompt)):
        add(engine, str(number), each, max_tokens=2)
        engine.run()
        assert engine.tokens(str(number)) == each.answer(2)
    rows = [row.num_tokens for plan in engine.model.plans for row in plan.scheduled if row.num_tokens > 1]
    length = len(prompt.tokens)
    assert rows == [3, 10, length, 10, 10, length + 1, length - (length - 1) // 4 * 4]


def test_the_room_for_prompts_that_are_one_run_goes_to_the_first_one() -> None:
    """Nothing holds images that are encoded ahead. But this is done for the first waiting request only, so another one
    takes their room only if it comes before that."""
    config = with_media(engine_config(max_num_batched_tokens=48, policy="priority"), cache=20, joins=True)
    engine = Engine(replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True, itl_target=0.01)))
    engine.add("decode", text(4), max_tokens=90)
    engine.turn()
    prompts = {name: Prompt((f"{name}0", 10), text(3), (f"{name}1", 10), text(3)) for name in "abc"}
    add(engine, "a", prompts["a"], max_tokens=2)
    add(engine, "c", prompts["c"], max_tokens=2)
    while not any(encoded(engine)):
        engine.turn()
    engine.add("b", prompts["b"].tokens, priority=-1, media=prompts["b"].items, max_tokens=2)
    engine.run()
    images = [*itertools.chain(*encoded(engine))]
    assert images[-6:] == ["b0", "b1", "a0", "a1", "c0", "c1"]
    assert images[:-6] in (["a0"], ["a0", "a1"])
    for name, prompt in prompts.items():
        assert engine.tokens(name) == prompt.answer(2)


def test_prompts_of_text_may_be_runs() -> None:
    config = with_media(engine_config(max_num_batched_tokens=48), joins=True)
    media = config.model.architecture.media
    assert media is not None
    arch = replace(config.model.architecture, media=replace(media, joins_text=True))
    config = replace(config, model=replace(config.model, architecture=arch))
    engine = Engine(replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=10)))
    for number, length in enumerate((30, 20, 48, 49)):
        engine.add(str(number), text(length), max_tokens=1)
    engine.run()
    assert [row.num_tokens for plan in engine.model.plans for row in plan.scheduled] == [30, 20, 48]
    assert "the prompt has 49 tokens that must be in one step and one window; these" in str(
        engine.outputs["3"][0].error
    )


def test_images_are_not_guessed() -> None:
    """The text before an image occurs again, and the model does not repeat the image; that after it may go on."""
    speculation = SpeculationManager(SpeculativeConfig(), 64)
    known = Prompt(text(4), ("cat", 6), text(5, 20), text(4))
    for repeated, expected in (([], []), (text(3, 20), [23, 24, *text(4), *text(3, 20), 23, 24, 0, 1, 2, 3, 20])):
        asked = request([*known.tokens, *repeated])
        asked.core_request.media = known.items
        assert speculation.propose(asked)[0] == expected


# --- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1])
def test_what_a_failed_step_should_encode_is_encoded_again(step: int) -> None:
    """Features of steps that failed or were skipped are not there; those from before are."""
    engine = media_engine(depth=2, max_num_batched_tokens=16)
    engine.model.fails = lambda plan: plan.step == step
    first, second = Prompt(text(3), ("a", 8), text(30)), Prompt(text(3, 9), ("b", 8), text(2))
    add(engine, "first", first, max_tokens=2)
    engine.turn()
    add(engine, "second", second, max_tokens=2)
    engine.run()
    assert engine.outputs["first"][-1].error == FAILURE
    again = Prompt(text(4, 5), ("a", 8), ("b", 8))
    add(engine, "again", again, max_tokens=2)
    engine.run()
    assert engine.tokens("again") == again.answer(2)
    images = [*itertools.chain(*encoded(engine))]
    assert images.count("a") == (2 if step == 0 else 1)


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_a_request_that_ends_drops_the_part_of_its_image(end: str) -> None:
    """A step that has no memory for the part ends the request, too: its next step would have none, either."""
    config = engine_config(max_num_batched_tokens=64)
    config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True, itl_target=0.01))
    engine = Engine(with_media(config))
    engine.add("decode", text(4), max_tokens=50)
    engine.turn()
    prompt = Prompt(text(3), ("a", 30), text(3))
    add(engine, "0", prompt, max_tokens=2)
    while not engine.model.parts:
        engine.turn()
    if end == "abort":
        engine.abort("0")
    else:
        engine.model.fails = lambda plan: plan.media is not None and bool(plan.media.encoded)
    engine.turn()
    assert engine.ends("0") == [end if end == "abort" else "error"]
    engine.model.fails = lambda plan: False
    add(engine, "again", prompt, max_tokens=2)
    engine.run()
    assert engine.tokens("again") == prompt.answer(2)
    assert not engine.model.parts


def test_an_aborted_or_preempted_request_holds_nothing() -> None:
    engine = media_engine(max_num_batched_tokens=16, cache=20)
    add(engine, "0", Prompt(text(3), ("a", 20), text(3)), max_tokens=9)
    engine.turn()
    assert engine.scheduler.encoder_cache._num_used == 20
    engine.scheduler._requeue(engine.scheduler.running[0])
    assert engine.scheduler.encoder_cache._num_used == 0
    engine.turn()
    engine.abort("0")
    assert engine.scheduler.encoder_cache._num_used == 0
    assert not engine.scheduler.encoder_cache.has_requests
    engine.run()


# --- requests that can never run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 9}, r"image 1 of the prompt has tokens 9 to 15, which are not between 0 and 12"),
        ({"kind": "video"}, "video 1 of the prompt is not supported: the model takes no videos"),
        ({"runs": ()}, "at places that are not its own"),
        ({"runs": (MediaRun(1, 6),)}, "at places that are not its own"),
        ({"runs": (MediaRun(1, 3), MediaRun(3, 1))}, "at places that are not its own"),
        ({"runs": (MediaRun(1, 4, (1, 2, 3)),)}, "at places that are not its own"),
        ({"digest": b"short"}, "no digest of 16 bytes"),
        ({"data": None}, "no data"),
        ({"length": 40, "offset": 0, "runs": (MediaRun(0, 40),)}, "which are not between 0 and 12"),
    ],
)
def test_an_item_that_is_not_valid_is_refused(changes: dict[str, Any], message: str) -> None:
    engine, prompt = media_engine(), Prompt(text(3), ("a", 4), text(3))
    item = msgspec.structs.replace(prompt.items[0], **changes)
    engine.add("0", prompt.tokens, media=[item])
    (output,) = engine.outputs["0"]
    assert message in str(output.error)
    assert output.is_invalid
    engine.add("1", prompt.tokens, media=[*prompt.items, prompt.items[0]])
    assert "image 2 of the prompt has tokens 3 to 9, which are not between 9 and 12" in str(
        engine.outputs["1"][0].error
    )


def test_an_item_that_never_fits_is_refused() -> None:
    engine = media_engine(cache=20)
    add(engine, "0", Prompt(("a", 21)))
    assert "has 21 features, more than 20; use a smaller one, or a higher --encoder-cache-size" in str(
        engine.outputs["0"][0].error
    )
    engine = media_engine(max_num_batched_tokens=16, two_way=True)
    add(engine, "0", Prompt(("a", 15), ("b", 17)))
    assert "image 2 of the prompt has 17 features that must be in one step" in str(engine.outputs["0"][0].error)
    engine = Engine(with_media(engine_config(max_num_batched_tokens=40), cache=20, joins=True))
    add(engine, "0", Prompt(("a", 15), text(24)))
    assert "the prompt has 41 tokens that must be in one step" in str(engine.outputs["0"][0].error)
    add(engine, "1", Prompt(("a", 15), ("b", 6)))
    assert "the images have 21 features, more than 20" in str(engine.outputs["1"][0].error)
    engine = Engine(engine_config())
    add(engine, "0", Prompt(("a", 5)))
    assert "image 1 of the prompt is not supported: the model takes no images" in str(engine.outputs["0"][0].error)


# --- step time --------------------------------------------------------------------------------------------------


def test_the_costs_of_a_tower_are_learned_apart() -> None:
    """A kind of work that has not been measured has no known cost, whatever the other one costs."""
    model, rng = StepTimeModel(), random.Random(3)

    def seconds(load: StepLoad) -> float:
        tower = 4e-12 * load.tower_linear + 9e-12 * load.tower_attention
        return 0.01 + 1e-3 * load.prompt_tokens + 5e-4 * load.decodes + tower

    for kinds in (("linear",), ("linear", "attention")):
        assert math.isinf(model.tower_seconds(TowerWork(**{kinds[-1]: 1.0})))
        assert not model.can_predict(StepLoad(64, 4, 0, 0.0, *TowerWork(**{kinds[-1]: 1.0})))
        for _ in range(300):
            tower = TowerWork(**{rng.choice(kinds): rng.choice([0.0, 1e9, 3e9])})
            load = StepLoad(rng.choice([0, 32, 64]), rng.randrange(8), 0, 0.0, *tower)
            model.learn(load, seconds(load))
    load = StepLoad(64, 4, 0, 0.0, 1e9, 2e9)
    assert model.predict(load) == pytest.approx(seconds(load), rel=0.02)
    assert model.tower_seconds(TowerWork(1e9, 2e9)) == pytest.approx(0.022, rel=0.02)
    for number in range(300):  # steps with more attention now take less time
        tower = TowerWork(1e9, number % 3 * 1e9)
        model.learn(StepLoad(64, 4, 0, 0.0, *tower), 0.1 - 0.01 * (number % 3))
    assert model.tower_seconds(TowerWork(0.0, 1e9)) == 0.0  # not infinite: it is the result of measurements


class TimedMediaEngine(Engine):
    """Learns how long steps take."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.predicted: dict[int, float | None] = {}
        """By step: how long it should take."""

    def turn(self) -> bool:
        plans = len(self.model.plans)
        went_on = super().turn()
        for plan in self.model.plans[plans:]:
            self.predicted[plan.step] = self.scheduler.token_budget.predict(plan)
            self.scheduler.token_budget.learn(plan, seconds(self, plan))
        return went_on


def test_decodes_do_not_wait_for_many_images_at_once() -> None:
    """Without decodes, a step encodes as many as the limit allows; with some, as many as its target time allows."""
    config = engine_config(max_num_batched_tokens=512, max_model_len=2000, num_blocks=4000)
    config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True, itl_target=0.2))
    engine = TimedMediaEngine(with_media(config, cache=2000, encoded=200))
    for number in range(6):
        add(engine, f"learn {number}", Prompt(text(9), (f"image {number}", 20 + number)), max_tokens=4)
        engine.run()
    images: list[Image] = [(f"new {number}", 20) for number in range(30)]
    add(engine, "alone", Prompt(*images[:15]), max_tokens=2)
    first = len(engine.model.plans)
    engine.run()
    assert max(engine.model.computed[plan.step] for plan in engine.model.plans[first:] if plan.media) == 200
    for number in range(4):
        engine.add(f"decode {number}", text(4), max_tokens=100)
    for _ in range(3):
        engine.turn()
    add(engine, "beside", Prompt(*images[15:29], ("large", 300)), max_tokens=2)
    first = len(engine.model.plans)
    engine.run()
    beside = engine.model.plans[first:]
    assert len(engine.outputs["beside"]) == 2
    assert 30 < max(engine.model.computed.get(plan.step, 0.0) for plan in beside) <= 40  # 0.8 * 0.2 s allow 37
    taken = [seconds(engine, plan) for plan in beside if len(plan.decodes) >= 4]
    assert max(taken) < 0.3
    large = [plan for plan in beside if plan.media and plan.media.encoded[-1].digest == digest("large")]
    assert [plan.media.encoded[-1].data is None for plan in large if plan.media] == [False, *[True] * (len(large) - 1)]


@pytest.mark.parametrize(("divides_items", "work"), [(False, [24, 20]), (True, [16, 17])])
def test_a_step_takes_as_long_as_the_rank_with_the_most_work(divides_items: bool, work: list[int]) -> None:
    """If ranks divide items, each encodes its own beside the others."""
    config = with_media(engine_config(max_num_batched_tokens=64))
    media = config.model.architecture.media
    assert media is not None
    media = replace(media, tower=replace(media.tower, divides_items=divides_items))
    config = replace(
        config,
        model=replace(config.model, architecture=replace(config.model.architecture, media=media)),
        parallel=replace(config.parallel, tensor_parallel_size=2, executor="mp"),
        scheduler=replace(config.scheduler, dynamic_chunking=True),
    )
    engine = Engine(config)
    images = [("a", 6), ("d", 10), ("b", 8)], [("c", 17), ("e", 3)]
    assert [[digest(name)[0] % 2 for name, _ in each] for each in images] == [[1, 1, 0], [0, 1]]
    for number, own in enumerate(images):
        add(engine, str(number), Prompt(text(3), *own), max_tokens=1)
        engine.run()
    loads = engine.scheduler.token_budget._loads
    assert [loads[plan.step].tower_linear for plan in engine.model.plans if plan.media] == pytest.approx(work)


def test_a_step_that_is_longer_than_its_time_is_the_only_one() -> None:
    """Also if it is the last one of its image, and the first one of the next image would fit alone."""
    engine = media_engine()
    add(engine, "request", Prompt(("large", 8), ("small", 4)))
    request, cache = engine.scheduler.requests["request"], engine.scheduler.encoder_cache
    planned = []
    for time in (0.0, 7.0, 1.0, 1.0):  # the 5 steps of the images take 1.6 s and 0.8 s each
        cache.start(TowerTime(time, lambda work: work.linear))
        cache.limit_chunk(request, len(request.token_ids), len(request.token_ids))
        plan = cache.take_plan()
        planned.append([] if plan is None else [(item.num_features, plan.num_steps) for item in plan.encoded])
    assert planned == [[], [(8, 4)], [(8, None)], [(4, 1)]]


def test_a_large_image_is_no_queue_of_prompts() -> None:
    """For these, steps would become longer; text streams would wait for its tokens, after its features."""
    config = engine_config(max_num_batched_tokens=512, max_model_len=2000, num_blocks=4000)
    config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True))
    engine = TimedMediaEngine(with_media(config, cache=2000, encoded=200))
    for number in range(12):
        add(engine, f"learn {number}", Prompt(text(9 + number % 3 * 20), (f"image {number}", 20)), max_tokens=4)
        engine.run()
    for number in range(4):
        engine.add(f"decode {number}", text(4), max_tokens=600)
    for _ in range(3):
        engine.turn()
    add(engine, "large", Prompt(text(9), ("large", 1500)), max_tokens=1)
    first = len(engine.model.plans)
    while not engine.outputs["large"]:
        engine.turn()
    beside = engine.model.plans[first:]
    assert all(plan.num_rows >= 4 for plan in beside)
    assert max(seconds(engine, plan) for plan in beside) < 5 * 0.012  # a step of decodes takes 12 ms


def test_texts_behind_images_queue_up() -> None:
    """As others do, once the images are encoded: steps become longer, so that they are computed at a better rate."""
    config = engine_config(max_num_batched_tokens=512, max_model_len=2000, num_blocks=4000)
    config = replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True))
    engine = TimedMediaEngine(with_media(config, cache=2000, encoded=200))
    for number in range(12):
        add(engine, f"learn {number}", Prompt(text(9 + number % 3 * 120), (f"image {number}", 20)), max_tokens=4)
        engine.run()
    engine.add("decode", text(4), max_tokens=600)
    for number in range(4):
        add(engine, str(number), Prompt((f"new {number}", 20), text(1400, first=number)), max_tokens=1)
    first = len(engine.model.plans)
    while not all(engine.outputs[str(number)] for number in range(4)):
        engine.turn()
    plans = engine.model.plans[first:]
    behind = max(number for number, plan in enumerate(plans) if plan.media is not None and plan.media.encoded) + 1
    taken = [seconds(engine, plan) for plan in plans[behind:]]
    assert max(taken) > 2.5 * 0.0525  # a step without a queue takes 5 times as long as one with a decode


def test_the_time_of_an_image_is_known_from_those_of_its_size() -> None:
    """Patches attend to each other, so the time of a much larger one may be many times what its size tells."""
    config = engine_config(max_num_batched_tokens=512, max_model_len=2000, num_blocks=4000)
    engine = TimedMediaEngine(
        with_media(replace(config, scheduler=replace(config.scheduler, dynamic_chunking=True)), cache=200)
    )
    is_known = []
    for number, size in enumerate((20, 20, 20, 20, 20, 40, 90, 100)):
        add(engine, str(number), Prompt(text(9), (f"image {number}", size)), max_tokens=2)
        first = len(engine.model.plans)
        engine.run()
        is_known.append(engine.predicted[engine.model.plans[first].step] is not None)
    assert is_known[4:] == [True, True, False, True]
