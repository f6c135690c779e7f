"""What images and videos mean for the tokens of a step."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine.architecture.media_spec import MediaSpec, TowerSpec
from quire.engine.protocol.media import MediaItem, MediaRun
from quire.engine.worker.media_rows import FeatureRange, MediaRows

FIRST, SECOND = b"a" * 16, b"b" * 16
ITEMS = [
    MediaItem(FIRST, "image", 2, 8, (MediaRun(1, 2, (1, 1, 2)), MediaRun(4, 4, (1, 2, 2)))),  # at 3, 4 and 6 to 9
    MediaItem(SECOND, "image", 10, 3, (MediaRun(0, 3),)),
]
LENGTH = 15


def rows(*, is_bidirectional: bool = False, joins_prompt: bool = False, has_axes: bool = False) -> MediaRows:
    spec = MediaSpec(
        tower=TowerSpec(hidden_size=8),
        image_token_id=1,
        is_bidirectional=is_bidirectional,
        joins_prompt=joins_prompt,
    )
    made = MediaRows(4, spec, 100, has_axes=has_axes)
    made.add(0, [], 9)
    made.add(2, ITEMS, LENGTH)
    return made


def test_chunks_take_their_part_of_the_features() -> None:
    """The second row's tokens follow the first one's."""
    media = rows()
    found = []
    for first, count in ((0, 4), (4, 3), (7, 4), (11, 4)):
        fields, features = media.step(np.array([0, 2]), np.array([1, first]), np.array([1, count]))
        assert fields.keys() == {"media_tokens"}
        found.append((fields["media_tokens"].tolist(), features))
    assert found == [
        ([4], [FeatureRange(FIRST, 0, 1, 4)]),
        ([1, 3], [FeatureRange(FIRST, 1, 2, 1), FeatureRange(FIRST, 2, 3, 3)]),
        ([1, 2, 3, 4], [FeatureRange(FIRST, 3, 6, 1), FeatureRange(SECOND, 0, 1, 4)]),
        ([1, 2], [FeatureRange(SECOND, 1, 3, 1)]),
    ]


def test_steps_of_text_are_as_without_media() -> None:
    media = rows(is_bidirectional=True)
    assert media.step(np.array([0, 2]), np.array([0, 5]), np.array([9, 1])) == ({}, [])
    assert media.step(np.array([2, 0]), np.array([LENGTH, 9]), np.array([1, 1])) == ({}, [])
    media.free([2])
    assert media.step(np.array([2]), np.array([0]), np.array([9])) == ({}, [])


def test_ends_of_runs() -> None:
    """A step may begin inside a run, whose first keys are in the cache, but not end there."""
    media = rows(is_bidirectional=True)
    fields, _ = media.step(np.array([2, 0]), np.array([4, 7]), np.array([6, 2]))
    assert fields["key_ends"].tolist() == [5, 6, 10, 10, 10, 10, 8, 9]
    with pytest.raises(AssertionError, match="ends inside a run"):
        media.step(np.array([2]), np.array([0]), np.array([4]))


def test_a_prompt_with_items_may_be_one_run() -> None:
    """Its tokens of text, too, in a step that begins behind its items; those that follow it are as others."""
    media = rows(is_bidirectional=True, joins_prompt=True)
    fields, _ = media.step(np.array([2, 0]), np.array([13, 7]), np.array([4, 2]))
    assert fields.keys() == {"key_ends"}
    assert fields["key_ends"].tolist() == [LENGTH, LENGTH, 16, 17, 8, 9]
    assert media.step(np.array([2, 0]), np.array([LENGTH, 0]), np.array([1, 9])) == ({}, [])
    with pytest.raises(AssertionError, match="ends inside a run"):
        media.step(np.array([2]), np.array([0]), np.array([14]))


def test_any_prompt_may_be_one_run() -> None:
    spec = MediaSpec(
        tower=TowerSpec(hidden_size=8), image_token_id=0, is_bidirectional=True, joins_prompt=True, joins_text=True
    )
    media = MediaRows(2, spec, 8, has_axes=False)
    media.add(1, [], 5)
    fields, features = media.step(np.array([1]), np.array([0]), np.array([5]))
    assert fields.keys() == {"key_ends"}
    assert fields["key_ends"].tolist() == [5] * 5
    assert features == []
    media.free([1])
    assert media.step(np.array([1]), np.array([0]), np.array([5])) == ({}, [])


def test_positions_along_the_axes() -> None:
    """Of a prompt's tokens, and, shifted as its last one, of those that follow it."""
    media = rows(has_axes=True)
    fields, _ = media.step(np.array([0, 2]), np.array([8, 2]), np.array([1, 7]))
    assert fields["rope_positions"].tolist() == [
        [8, 2, 3, 3, 5, 6, 6, 6],
        [8, 2, 3, 3, 5, 6, 6, 7],
        [8, 2, 3, 4, 5, 6, 7, 6],
    ]
    fields, _ = media.step(np.array([0, 2]), np.array([9, LENGTH - 1]), np.array([1, 1]))
    assert fields["rope_positions"].tolist() == [[9, LENGTH - 3]] * 3
    for first, count in ((LENGTH, 1), (LENGTH + 4, 2)):
        fields, features = media.step(np.array([2, 0]), np.array([first, 10]), np.array([count, 1]))
        assert fields["rope_positions"].tolist() == [*range(first - 2, first - 2 + count), 10]
        assert not features
    media.free([2])
    media.add(2, ITEMS[:1], 12)
    fields, _ = media.step(np.array([2]), np.array([20]), np.array([1]))
    assert fields["rope_positions"].tolist() == [18]
