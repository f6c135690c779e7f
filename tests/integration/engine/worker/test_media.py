"""One rank driven by plans made by hand: transformers' answers about pictures, however the plans bring them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor

from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.parallel_state import connect
from quire.engine.layers.batch import Batch
from quire.engine.models.tower import Tower
from quire.engine.protocol.media import EMBEDS, MediaItem
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, MediaPlan, NewRequestData, SchedulerOutput
from quire.engine.worker.encoder_cache import EncoderCache, arrays_of
from quire.engine.worker.model_runner import ModelRunner
from quire.kernels import OneAdapter
from tests.fakes import media_prompts
from tests.fakes.media_prompts import MediaPrompt, Picture, media_data, media_prompt, write_media_model
from tests.fakes.model_logits import CPU, configure
from tests.fakes.plans import Driver, Request, executing
from tests.fakes.rank_processes import Ranks
from tests.fakes.ranks import on_ranks, peers_of

COUNT = 12
PICTURE, CLIP = Picture((1, 8, 6)), Picture((2, 6, 4), "video")
LAYOUTS: list[list[int | Picture]] = [
    [3, PICTURE, 4],
    [9],
    [2, PICTURE, 2, CLIP, 3, Picture((1, 4, 4), seed=1), 1],
    [1, CLIP, 1, CLIP, 2],
]


class Written(NamedTuple):
    folder: Path
    model: Any
    prompts: list[MediaPrompt]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=media_prompts.QWEN_FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("model")
    model = write_media_model(request.param, folder)
    prompts = [
        media_prompt(model, layout, folder if seed % 2 else None, seed)  # the others' arrays are in the plans
        for seed, layout in enumerate(LAYOUTS)
    ]
    return Written(folder, model, prompts, [media_prompts.generate(model, prompt, COUNT) for prompt in prompts])


def runner_and_driver(folder: Path, **options: Any) -> tuple[ModelRunner, Driver]:
    config = configure(folder, block_size=4, max_num_seqs=8, max_model_len=128, **options)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    return runner, Driver(executing(runner), 8, config.cache.num_blocks, 4, groups=len(config.cache.groups))


def greedy(prompts: list[MediaPrompt]) -> list[Request]:
    params = SamplingParams(temperature=0.0)
    return [Request(prompt.token_ids, params, media=prompt.items) for prompt in prompts]


@pytest.mark.parametrize("budget", [1000, 7])
def test_answers_are_those_of_transformers(written: Written, budget: int) -> None:
    """In a crowd with text; 7: steps end inside pictures. Decodes are replayed."""
    runner, driver = runner_and_driver(written.folder)
    requests = greedy(written.prompts)
    driver.decode(requests, COUNT, budget)
    assert [request.output for request in requests] == written.expected
    assert runner._graphs is not None
    assert runner._graphs._replays


@pytest.mark.parametrize("written", ["Qwen3-VL"], indirect=True)
def test_answers_of_several_ranks(written: Written, tmp_path: Path) -> None:
    """The first stage's ranks share the tower; the second stage's know the positions. Steps end inside pictures. A
    picture that is not as it should be disturbs no other."""
    config = configure(
        written.folder,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline_layer_partition="2,2",
        block_size=4,
        max_num_seqs=8,
        max_model_len=128,
    )
    ranks = Ranks(config, tmp_path)
    damaged = media_prompt(written.model, [2, Picture((1, 8, 6), seed=9), 1])
    (item,) = damaged.items
    (run,) = item.runs
    damaged.items[:] = [structs.replace(item, runs=(structs.replace(run, length=run.length - 1, grid=(0, 0, 0)),))]
    requests = greedy(written.prompts)
    driver = Driver(ranks.execute, 8, config.cache.num_blocks, 4, workers_keep=False)
    driver.decode([*requests, *greedy([damaged])], COUNT, 9)
    ranks.close()
    assert [request.output for request in requests] == written.expected
    assert driver.encoding_failures.keys() == {item.digest}


def test_features_that_are_given_need_no_tower(written: Written) -> None:
    """Those of another width are refused."""
    runner, driver = runner_and_driver(written.folder)
    cache = runner._encoder_cache
    assert cache is not None
    tower, prompts = cache._tower, list[MediaPrompt]()
    with torch.inference_mode():
        for prompt in written.prompts:
            given = [{EMBEDS: tower(arrays_of(item.data), item)} for item in prompt.items if item.data is not None]
            items = zip(prompt.items, given, strict=True)
            prompts.append(
                replace(prompt, items=[structs.replace(item, data=media_data(each)) for item, each in items])
            )
    cache._tower = _Scarce(tower, *(item.digest for prompt in prompts for item in prompt.items))
    first = prompts[0].items[0]
    requests = greedy(prompts)
    driver.decode(requests, COUNT, 1000)
    assert [request.output for request in requests] == written.expected
    narrow = structs.replace(first, digest=bytes(16), data=media_data({EMBEDS: torch.zeros(first.num_features, 47)}))
    assert cache.update(MediaPlan([narrow])).keys() == {narrow.digest}


@pytest.fixture
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return write_media_model("Qwen2-VL", folder), folder


def test_a_picture_is_encoded_once_and_kept_until_it_is_freed(
    one: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks about it, wherever it is in the prompt."""
    model, folder = one
    layouts: list[list[int | Picture]] = [[2, PICTURE, 3], [5, PICTURE, 1, CLIP, 4]]
    prompts = [media_prompt(model, layout, None, 5) for layout in layouts]
    expected = [media_prompts.generate(model, prompt, 4) for prompt in prompts]
    runner, driver = runner_and_driver(folder)
    assert runner._encoder_cache is not None
    encoded: list[MediaItem] = []
    encode = runner._encoder_cache._tower.encode

    def record(arrays: Mapping[str, Tensor], item: MediaItem, adapter: None) -> Iterator[Tensor | None]:
        encoded.append(item)
        return encode(arrays, item, adapter)

    monkeypatch.setattr(runner._encoder_cache._tower, "encode", record)
    requests = greedy(prompts)
    for request in requests:
        driver.decode([request], 4, 10)
    picture, clip = prompts[1].items
    assert [item.digest for item in encoded] == [picture.digest, clip.digest]
    for request in requests:
        driver.release(request)
    driver.drop(picture)
    driver.step()
    assert [*runner._encoder_cache._features] == [clip.digest]
    again = greedy(prompts)[::-1]
    driver.decode(again, 4, 10)
    assert [item.digest for item in encoded] == [picture.digest, clip.digest, picture.digest]
    assert [request.output for request in (*requests, *again[::-1])] == expected * 2


@pytest.mark.parametrize("steps", [1, 5])
def test_a_picture_is_encoded_by_several_plans(written: Written, steps: int) -> None:
    """Also without rows, and beside others; one that is freed is begun again."""
    runner, driver = runner_and_driver(written.folder)
    requests = greedy(written.prompts)
    (picture,), clip = written.prompts[0].items, written.prompts[3].items[0]
    runner.launch(SchedulerOutput(0, [], [], [], media=MediaPlan([clip], [], 1))).result()
    runner.launch(SchedulerOutput(1, [], [], [], media=MediaPlan([picture], [clip.digest], steps))).result()
    begun = structs.replace(picture, data=None)
    runner.launch(SchedulerOutput(2, [], [], [], media=MediaPlan([begun, clip], [], steps))).result()
    runner.launch(SchedulerOutput(3, [], [], [], media=MediaPlan([structs.replace(clip, data=None)]))).result()
    driver._encoded |= {picture.digest, clip.digest}
    driver.decode(requests, COUNT, 1000)
    assert [request.output for request in requests] == written.expected


def test_an_item_that_cannot_be_encoded_fails_alone(one: tuple[Any, Path], tmp_path: Path) -> None:
    """Whether its file is lost, its arrays are not what the tower takes, or there is no memory for it."""
    model, folder = one
    good = media_prompt(model, [2, PICTURE, 3])
    lost, without, shorter, large = (
        media_prompt(model, [1, Picture((2, 6, 4), "video", seed), 2], tmp_path) for seed in range(1, 5)
    )
    next(path for path in tmp_path.iterdir() if str(path) == lost.items[0].data.path).unlink()  # type: ignore[union-attr]
    (item,) = without.items
    assert item.data is not None
    without.items[:] = [structs.replace(item, data=structs.replace(item.data, arrays=item.data.arrays[:1]))]
    (item,) = shorter.items
    runs = (structs.replace(item.runs[0], length=item.runs[0].length - 1, grid=(0, 0, 0)), *item.runs[1:])
    shorter.items[:] = [structs.replace(item, runs=runs)]
    runner, driver = runner_and_driver(folder)
    cache = runner._encoder_cache
    assert cache is not None
    cache._tower = _Scarce(cache._tower, large.items[0].digest)
    prompts = [lost, without, shorter, large]
    requests = greedy([good, *prompts])
    driver.decode(requests, 4, 1000)
    assert requests[0].output == media_prompts.generate(model, good, 4)
    *others, scarce = (driver.encoding_failures[prompt.items[0].digest] for prompt in prompts)
    assert others == ["the video could not be encoded; the server's log shows the error"] * 3
    assert scarce == "out of memory while encoding the video (12 features); use a smaller one"
    cache.free(MediaPlan(freed=[lost.items[0].digest]))
    assert cache.update(MediaPlan(lost.items, num_steps=1))
    assert not cache.update(MediaPlan([structs.replace(lost.items[0], data=None)]))  # planned before that was known


def test_an_item_whose_adapter_was_not_placed_fails(one: tuple[Any, Path]) -> None:
    """Also its next steps, which were planned before that was known; without the adapter it is another item. One whose
    adapter has lost its slot between two steps fails, too."""
    model, folder = one
    (item,), (other,) = (media_prompt(model, [1, Picture((1, 4, 4), seed=seed), 2]).items for seed in range(2))
    runner, _ = runner_and_driver(folder, enable_lora=True)
    cache = runner._encoder_cache
    assert cache is not None
    slots = {item.digest: 0}
    assert [*cache.update(MediaPlan([other, item], num_steps=1, adapter_slots=slots))] == [item.digest]
    assert not cache.update(MediaPlan([structs.replace(item, data=None)]))
    assert not cache._features[item.digest].any()
    assert cache._features[other.digest].any()
    cache.free(MediaPlan(freed=[item.digest]))
    adapters = runner._adapters
    assert adapters is not None
    adapters._contents[0] = b"first", ()
    assert not cache.update(MediaPlan([item], num_steps=1, adapter_slots=slots))
    adapters._contents[0] = b"second", ()
    assert [*cache.update(MediaPlan([structs.replace(item, data=None)]))] == [item.digest]
    runner.close()


def test_ranks_agree_on_what_one_of_them_cannot_read(one: tuple[Any, Path], tmp_path: Path) -> None:
    """And go on. A rank that has no memory in the tower ends: the others may wait for it there."""
    model, folder = one
    lost, large, good = (media_prompt(model, [1, Picture((1, 4, 4), seed=seed), 2], tmp_path) for seed in range(3))
    runner, _ = runner_and_driver(folder)
    cache = runner._encoder_cache
    assert cache is not None
    tower = _Scarce(cache._tower, large.items[0].digest)
    item, plan = lost.items[0], MediaPlan([*lost.items, *good.items])
    assert item.data is not None
    gone = structs.replace(item, data=structs.replace(item.data, path=item.data.path + ".gone"))

    def work(parallel: Parallel) -> list[bytes]:
        of_rank = EncoderCache(tower, cache._spec, torch.float32, CPU, parallel)
        failures = of_rank.update(MediaPlan([gone, *good.items]) if parallel.rank else plan)
        assert of_rank._features[good.items[0].digest].any()
        with pytest.raises(torch.OutOfMemoryError):
            of_rank.update(MediaPlan(large.items))
        return [*failures]

    assert on_ranks(2, work) == [[item.digest]] * 2


@pytest.mark.parametrize(("tp", "divides_items"), [(1, False), (2, True)])
def test_groups_that_divide_tokens_agree_on_what_one_cannot_encode(
    one: tuple[Any, Path], tmp_path: Path, tp: int, *, divides_items: bool
) -> None:
    """And drop what the others have encoded, or begun."""
    model, folder = one
    prompts = [media_prompt(model, [1, Picture((1, 4, 4), seed=seed), 2], tmp_path) for seed in range(3)]
    lost, good, large = (prompt.items[0] for prompt in prompts)
    runner, _ = runner_and_driver(folder)
    cache = runner._encoder_cache
    assert cache is not None
    assert lost.data is not None
    gone = structs.replace(lost, data=structs.replace(lost.data, path=lost.data.path + ".gone"))
    spec = replace(cache._spec, divides_items=divides_items)
    groups, columns = [peers_of(tp) for _ in range(2)], [peers_of(2) for _ in range(tp)]

    def work(parallel: Parallel) -> list[list[bytes]]:
        assert cache is not None
        group, rank = divmod(parallel.rank, tp)
        tower = _Scarce(cache._tower, large.digest) if group else cache._tower
        peers = groups[group][rank], None, columns[rank][group]
        of_rank = EncoderCache(tower, spec, torch.float32, CPU, *peers)
        failures = [of_rank.update(MediaPlan([gone if group else lost, good, large], num_steps=1))]
        assert not of_rank._begun
        assert [of_rank._features[item.digest].any().item() for item in (lost, good, large)] == [False, True, False]
        failures += [of_rank.update(MediaPlan([structs.replace(large, data=None)]))]  # planned before that was known
        failures += [of_rank.update(MediaPlan([lost], [lost.digest]))]
        assert of_rank._features[lost.digest].any()
        return [[*each] for each in failures]

    assert on_ranks(2 * tp, work) == [[[lost.digest, large.digest], [], []]] * 2 * tp


def test_ranks_divide_items(one: tuple[Any, Path], caplog: pytest.LogCaptureFixture) -> None:
    """One rank encodes an item, also by several plans, and all get its features, or learn that there are none. Items
    that come one by one are divided, too."""
    model, folder = one
    items = [media_prompt(model, [1, Picture((1, 4, 4), seed=seed), 2]).items[0] for seed in range(5)]
    *good, large = (
        structs.replace(item, digest=bytes([first]) + item.digest[1:])
        for item, first in zip(items, (2, 5, 1, 3, 4), strict=True)
    )
    runner, _ = runner_and_driver(folder)
    cache = runner._encoder_cache
    assert cache is not None
    with torch.inference_mode():
        expected = [cache._tower(arrays_of(item.data), item) for item in good if item.data is not None]
    spec = replace(cache._spec, divides_items=True)

    def work(parallel: Parallel) -> tuple[list[bytes], list[dict[bytes, str]]]:
        assert cache is not None
        tower = _Scarce(cache._tower, large.digest)
        of_rank = EncoderCache(tower, spec, torch.float32, CPU, parallel)
        plans = [
            MediaPlan([*good[:2], large, good[2]], num_steps=3),
            MediaPlan([structs.replace(good[2], data=None)]),
            MediaPlan([good[3]]),
            MediaPlan([structs.replace(good[0], data=None, digest=bytes(16))]),  # never begun
        ]
        failures = [of_rank.update(plan) for plan in plans]
        for item, features in zip(good, expected, strict=True):
            assert torch.equal(of_rank._features[item.digest], features)
        return tower.asked, failures

    (first, failures), (second, others) = on_ranks(2, work)
    assert failures == others
    assert [[*each] for each in failures] == [[large.digest], [], [], [bytes(16)]]
    assert failures[0][large.digest].startswith("out of memory")
    assert (first, second) == ([good[0].digest, large.digest], [each.digest for each in good[1:]])
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "no plan has begun the item" in caplog.messages[-1]


def test_pictures_whose_features_attend_to_each_other(tmp_path: Path) -> None:
    """In both directions, also where they are longer than the window of a layer: Gemma 3's. Steps may end between
    them."""
    model = write_media_model("Gemma 3", tmp_path)
    layouts: list[list[int | Picture]] = [[3, PICTURE, 4], [9], [2, PICTURE, 1, Picture((1, 1, 1)), 12, PICTURE]]
    prompts = [media_prompt(model, layout, None, seed) for seed, layout in enumerate(layouts)]
    expected = [media_prompts.generate(model, prompt, COUNT) for prompt in prompts]
    _, driver = runner_and_driver(tmp_path)
    crowd, apart = greedy(prompts), greedy(prompts)
    driver.decode(crowd, COUNT, 1000)
    for request in crowd:
        driver.release(request)
    driver.step((apart[0], 3), (apart[1], 2), (apart[2], 18))
    driver.step((apart[0], 20), (apart[1], 1), (apart[2], 17))
    driver.decode(apart, COUNT, 1000)
    assert [request.output for request in crowd] == expected
    assert [request.output for request in apart] == expected


class _Scarce(Tower):
    """Has no memory for some items."""

    def __init__(self, tower: Tower, *digests: bytes) -> None:
        super().__init__()
        self._tower, self._digests = tower, digests
        self.asked: list[bytes] = []

    def encode(
        self, arrays: Mapping[str, Tensor], item: MediaItem, adapter: OneAdapter | None = None
    ) -> Iterator[Tensor | None]:
        self.asked.append(item.digest)
        if item.digest in self._digests:
            raise torch.OutOfMemoryError
        return self._tower.encode(arrays, item, adapter)


def test_skipped_plans_free_features(one: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind a step that has no memory, which has encoded, too."""
    model, folder = one
    prompt, other = (media_prompt(model, [2, each, 3]) for each in (PICTURE, CLIP))
    runner, driver = runner_and_driver(folder)
    driver.decode(greedy([prompt]), 1, 100)
    cache, (picture,), (clip,) = runner._encoder_cache, prompt.items, other.items
    assert cache is not None
    blocks, params = [*range(8)], SamplingParams(temperature=0.0)
    row = NewRequestData(0, other.token_ids, len(other.token_ids), 0, blocks, params, media=other.items)
    scheduled = CachedRequestData(0, len(other.token_ids), [], [])
    failing = SchedulerOutput(1, [], [row], [scheduled], media=MediaPlan([clip]))
    skipped = SchedulerOutput(2, [0], [], [], media=MediaPlan([], [picture.digest, clip.digest]))
    with monkeypatch.context() as context:
        context.setattr(runner, "execute_model", _no_memory)
        for plan in (failing, skipped):
            result = executing(runner)(plan)
            assert result is not None
            assert "out of memory" in result.failure
    assert not cache._features
    again = SchedulerOutput(3, [], [row], [scheduled], clears_failure=True, media=MediaPlan([clip]))
    result = executing(runner)(again)
    assert result is not None
    assert result.token_ids == media_prompts.generate(model, other, 1)


def _no_memory(received: Tensor | None, batch: Batch) -> Tensor:
    raise torch.OutOfMemoryError
