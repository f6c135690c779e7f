"""Layers cut into groups, and the planes of memory that groups share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.config.engine_config import CacheConfig, KVCacheGroup
from quire.engine.config.kv_cache_groups import (
    KVCacheShape,
    KVCacheSpec,
    count_blocks_per_page,
    count_planes,
    group_layers,
    place_layers,
)

SHAPE = KVCacheShape(num_tensors=2, num_heads=2, head_dim=64)
LATENT = KVCacheShape(num_tensors=1, num_heads=1, head_dim=576)
INDEX = KVCacheShape(1, 1, 128)


def cut(
    windows: list[int | None], stages: list[range] | None = None, length: int = 32768, shape: KVCacheShape = SHAPE
) -> tuple[KVCacheGroup, ...]:
    specs = [[KVCacheSpec(shape, window)] for window in windows]
    return group_layers(
        specs, stages or [range(len(windows))], lambda group: group.max_blocks(length, min(length, 512), 16)
    )


def kinds(groups: tuple[KVCacheGroup, ...]) -> dict[int | None, int]:
    return dict(Counter(group.window for group in groups))


@pytest.mark.parametrize("window", [None, 512])
def test_layers_of_one_kind_are_one_group(window: int | None) -> None:
    (group,) = cut([window] * 30)
    assert group == KVCacheGroup(window=window, layers=(tuple(range(30)),))


def test_a_few_full_layers_give_the_size_of_all_groups() -> None:
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]  # 4 full, 22 with a window
    groups = cut(windows)
    assert kinds(groups) == {None: 1, 512: 6}
    assert groups[0].layers == ((5, 11, 17, 23),)
    assert [len(group.layers[0]) for group in groups[1:]] == [3, 4, 4, 3, 4, 4]
    assert count_planes([[KVCacheSpec(SHAPE, window)] for window in windows], groups, 0) == {SHAPE: 4}


@pytest.mark.parametrize(("full", "windowed", "expected"), [(18, 18, (1, 1)), (17, 18, (1, 1)), (1, 3, (1, 3))])
def test_groups_are_as_few_as_memory_allows(full: int, windowed: int, expected: tuple[int, int]) -> None:
    groups = cut([None] * full + [128] * windowed)
    assert kinds(groups) == {None: expected[0], 128: expected[1]}


def test_windows_of_several_sizes() -> None:
    groups = cut([None, 128, 4096] * 4)
    assert kinds(groups) == {None: 1, 128: 1, 4096: 1}


def test_stages_have_the_same_groups() -> None:
    windows: list[int | None] = [None if layer % 6 == 5 else 512 for layer in range(26)]
    groups = cut(windows, [range(13), range(13, 26)])
    assert all(len(group.layers) == 2 for group in groups)
    assert [len(group.layers[stage]) for stage in (0, 1) for group in groups if group.window is None] == [2, 2]
    specs = [[KVCacheSpec(SHAPE, window)] for window in windows]
    assert [count_planes(specs, groups, stage)[SHAPE] for stage in (0, 1)] == [2, 2]


STATE = KVCacheSpec(SHAPE, None, 5000)
KEPT = [[KVCacheSpec(*each)] for each in ((SHAPE, None), (SHAPE, 100), (LATENT, None), (LATENT, 7))]
KEPT += [[KVCacheSpec(shape, None, index_shape=INDEX)] for shape in (LATENT, INDEX)]
KEPT += [[STATE], [KVCacheSpec(SHAPE, None), STATE], []]
"""The kinds of data that a layer may keep: keys and values, a state, both or nothing."""


@given(st.lists(st.sampled_from(KEPT), min_size=1, max_size=20).filter(any), st.integers(1, 20))
def test_all_that_layers_keep_has_a_place_of_its_own(specs: list[list[KVCacheSpec]], first: int) -> None:
    cut = min(first, len(specs))
    stages = [stage for stage in (range(cut), range(cut, len(specs))) if stage]
    groups = group_layers(specs, stages, lambda group: group.max_blocks(1000, 50, 16))
    for stage, layers in enumerate(stages):
        places, planes = place_layers(specs, groups, stage), count_planes(specs, groups, stage)
        kept = {(layer, spec.state_bytes > 0): spec for layer in layers for spec in specs[layer]}
        assert places.keys() == kept.keys()
        used = [
            (shape, place.group, plane)
            for key, place in places.items()
            for shape, plane in zip(kept[key].shapes, (place.plane, place.index_plane), strict=False)
        ]
        assert len(set(used)) == len(used) == sum(len(spec.shapes) for spec in kept.values())
        assert all(plane is not None and 0 <= plane < planes[shape] for shape, _, plane in used)
        for key, place in places.items():
            assert (groups[place.group].window, groups[place.group].is_state) == (kept[key].window, key[1])
            assert place.shape == kept[key].shape
            assert place.index_shape == kept[key].index_shape


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_blocks_at_once_are_exact(window: int, row: int, size: int) -> None:
    """Against every place at which a row may begin."""
    tokens = 400
    touched = (
        (min(tokens, begin + row) - 1) // size - max(0, begin + 1 - window) // size + 1 for begin in range(tokens - row)
    )
    assert KVCacheGroup(window=window).max_blocks(tokens, row, size) == max(touched)
    assert KVCacheGroup().max_blocks(tokens, row, size) == -(-tokens // size)


def test_a_request_needs_blocks_in_all_groups() -> None:
    cache = CacheConfig(
        block_size=4,
        num_blocks=0,
        dtype="float32",
        enable_prefix_caching=True,
        groups=(KVCacheGroup(), KVCacheGroup(window=9), KVCacheGroup(window=9)),
    )
    assert cache.max_blocks(100, 1) == 25 + 3 + 3


ENTRY = KVCacheShape(1, 1, 512, tokens_per_row=4)
ENTRY_KEYS = KVCacheShape(1, 1, 128, tokens_per_row=4)


def test_layers_with_entries_use_one_plane_for_them_and_their_tokens() -> None:
    window = KVCacheSpec(ENTRY, 128, page_row=3072)
    kept = [[window], [window, KVCacheSpec(ENTRY, None, index_shape=ENTRY_KEYS)], [window, KVCacheSpec(ENTRY, None)]]
    specs, stages = kept * 3, [range(4), range(4, 9)]
    page = count_blocks_per_page(specs, 16, "bfloat16")
    assert page == 16 * 3072 // (4 * 512)
    groups = group_layers(specs, stages, lambda group: group.max_pages(100_000, 512, 16, page))
    assert [(group.window, group.fills_pages) for group in groups] == [(None, False), (128, True)]
    for stage, layers in enumerate(stages):
        places, planes = place_layers(specs, groups, stage), count_planes(specs, groups, stage)
        assert planes[ENTRY] == len(layers)
        assert [places[layer, True].plane for layer in layers] == [*range(len(layers))]
        for layer in layers:
            if layer % 3:
                assert places[layer, False].plane == places[layer, True].plane
                assert places[layer, False].group != places[layer, True].group
        indexed = [places[layer, False].index_plane for layer in layers if layer % 3 == 1]
        assert indexed == [*range(planes[ENTRY_KEYS])]


def test_layers_of_other_models_are_in_planes_that_entries_leave() -> None:
    """A draft model's, beside entries of one for each token, whose rows are like its own."""
    shape = KVCacheShape(1, 1, 512)
    window = KVCacheSpec(shape, 128, page_row=3072)
    specs = [[window], [window, KVCacheSpec(shape, None)], [window], *[[KVCacheSpec(shape, None)]] * 3]
    groups = group_layers(specs, [range(6)], lambda group: group.max_pages(100_000, 512, 16, 6))
    places = place_layers(specs, groups, 0)
    assert count_planes(specs, groups, 0) == {shape: 4}
    assert [places[layer, True].plane for layer in range(3)] == [0, 1, 2]
    assert [places[layer, False].plane for layer in (1, 3, 4, 5)] == [1, 0, 2, 3]


def test_blocks_that_fill_pages_count_as_pages() -> None:
    groups = KVCacheGroup(window=9, fills_pages=True), KVCacheGroup()
    cache = CacheConfig(
        block_size=4, num_blocks=0, dtype="float32", enable_prefix_caching=True, groups=groups, blocks_per_page=5
    )
    windows, entries = 1 + -(-(8 + 16 - 1) // 4), 1 + -(-25 // 5)
    assert cache.max_blocks(100, 16) == 5 * (windows + entries)
    assert cache.blocks_moved(100, 16) == 5 * windows + 25
