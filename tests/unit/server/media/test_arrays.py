"""Arrays that clients send: features of images in safetensors and npy files, frames of videos."""

from __future__ import annotations

import numpy as np
import pytest

from quire.server.media.arrays import EmbedsFormat, read_embeds, read_frames
from quire.server.media.images import MediaRefused
from tests.fakes.arrays import npy, safetensors

VALUES = np.array([[1, -2], [0.5, 3], [4, 1.25]], np.float32)
GRID = np.array([[1, 2, 6]])


FILES = {
    **{f"npy {dtype}": npy(VALUES.astype(dtype)) for dtype in ("<f2", "<f4", "<f8", ">f4")},
    "npy by columns": npy(np.asfortranarray(VALUES)),
    "npy of one image": npy(VALUES[None]),
    **{f"safetensors {kind}": safetensors(image_embeds=(kind, VALUES)) for kind in ("F16", "F32", "F64", "BF16")},
    "safetensors with another name": safetensors(x=("F32", VALUES)),
}


@pytest.mark.parametrize("name", FILES)
def test_features_are_read(name: str) -> None:
    found, grid = read_embeds(FILES[name])
    assert (found.dtype.name, found.flags.c_contiguous, grid) == ("float32", True, None)
    np.testing.assert_array_equal(found, VALUES)


OF_BOTH = safetensors(image_embeds=("F32", VALUES), image_grid_thw=("I32", GRID))
OF_TWO = safetensors(image_embeds=("F32", VALUES), x=("F32", VALUES))


@pytest.mark.parametrize("given", [OF_BOTH, npy(VALUES) + npy(GRID)])
def test_a_grid_is_read_from_the_same_file_or_from_a_second_one(given: bytes) -> None:
    found, grid = read_embeds(given)
    np.testing.assert_array_equal(found, VALUES)
    assert grid == (1, 2, 6)


def test_features_must_be_numbers_of_the_model() -> None:
    for dtype, most in (("float16", 65504.0), ("bfloat16", 3.3895e38), ("float32", 3.4028e38)):
        read_embeds(npy(np.full((2, 2), -most)), dtype)
        with pytest.raises(MediaRefused, match=f"not finite in {dtype}"):
            read_embeds(npy(np.full((2, 2), -1.001 * most)), dtype)


HEADER = b'{"x":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
ONE = safetensors(x=("F32", VALUES))
NO_ARRAYS, NOT_FEATURES = "no arrays of numbers", "must be floating-point numbers"
REFUSED = {
    "nothing": (b"", NO_ARRAYS),
    "pickle": (npy(np.array([{}], object), allow_pickle=True), NO_ARRAYS),
    "archive of torch": (b"PK\x03\x04" + bytes(100), NO_ARRAYS),
    "npy, cut off": (npy(VALUES)[:-1], NO_ARRAYS),
    "npy that promises more": (npy(VALUES).replace(b"(3, 2)", b"(9, 2)"), NO_ARRAYS),
    "npy with a negative size": (npy(VALUES).replace(b"(3, 2), ", b"(3, -2),"), NO_ARRAYS),
    "npy of an unknown version": (b"\x93NUMPY\x09" + npy(VALUES)[7:], NO_ARRAYS),
    "text": (npy(np.array([["a"]])), NO_ARRAYS),
    "records": (npy(np.zeros(3, [("a", "<f4")])), NO_ARRAYS),
    "complex numbers": (npy(VALUES.astype(complex)), NO_ARRAYS),
    "integers": (npy(VALUES.astype(np.int64)), NOT_FEATURES),
    "one dimension": (npy(VALUES[0]), NOT_FEATURES),
    "two images": (npy(np.stack([VALUES, VALUES])), NOT_FEATURES),
    "no features": (npy(VALUES[:0]), NOT_FEATURES),
    "no number": (npy(VALUES * np.nan), "not finite"),
    "beyond float32": (npy(VALUES * np.float64(1e300)), "not finite"),
    "safetensors, cut off": (ONE[:-1], NO_ARRAYS),
    "bytes behind it": (ONE + b"x", NO_ARRAYS),
    "header that is too long": ((2**40).to_bytes(8, "little") + ONE[8:], NO_ARRAYS),
    "header that is nested": ((30_000).to_bytes(8, "little") + b"[" * 30_000, NO_ARRAYS),
    "header that is a list": ((2).to_bytes(8, "little") + b"[]", NO_ARRAYS),
    "no tensors": ((2).to_bytes(8, "little") + b"{}", NO_ARRAYS),
    "a hole": (len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[0,8]", b"[4,12]") + bytes(12), NO_ARRAYS),
    "an overlap": (
        OF_TWO.replace(b"[24, 48]", b"[ 0, 24]"),
        NO_ARRAYS,
    ),
    "another type": (ONE.replace(b"F32", b"E32"), NO_ARRAYS),
    "arrays of other names": (OF_TWO, "must be image_embeds and"),
    "three files": (npy(VALUES) + npy(GRID) * 2, "one array each"),
    "four files": (npy(VALUES) + npy(GRID) * 3, NO_ARRAYS),
    "two grids": (
        OF_BOTH + npy(GRID),
        "one array each",
    ),
    "grid of fractions": (npy(VALUES) + npy(GRID + 0.5), "three positive integers"),
    "grid of zeros": (npy(VALUES) + npy(GRID * 0), "three positive integers"),
    "grid of two numbers": (npy(VALUES) + npy(GRID[:, :2]), "three positive integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(MediaRefused, match=message):
        read_embeds(data)


def test_the_text_of_features_is_that_of_pictures() -> None:
    tokens = ("<a>", "<b>", "<i>")
    of_grids = EmbedsFormat.of(["<a><i><i><b>", "<a><i><i><i><i><b>"], tokens, 2)
    assert of_grids is not None
    assert of_grids.place(6, (1, 4, 6)) == ("<a>" + "<i>" * 6 + "<b>", ((1, 2, 3),))
    of_one_size, of_any = EmbedsFormat.of(["<i><i>"] * 2, tokens, 0), EmbedsFormat.of(["<i>", "<i><i>"], tokens, 0)
    assert of_one_size is not None
    assert of_any is not None
    assert of_any.place(3, None) == ("<i><i><i>", ())
    assert of_one_size.place(2, None) == ("<i><i>", ())
    for format_, given, message in (
        (of_grids, (6, None), "needs image_grid_thw"),
        (of_grids, (6, (1, 3, 8)), "multiples of 2"),
        (of_grids, (5, (1, 4, 6)), "5 features; image_grid_thw makes 6"),
        (of_one_size, (3, None), "3 features; an image of this model has 2"),
        (of_any, (3, (1, 1, 3)), "takes no image_grid_thw"),
    ):
        with pytest.raises(MediaRefused, match=message):
            format_.place(*given)
    assert EmbedsFormat.of(["<i><i><b>", "<i><i><b><i><i><b>"], tokens, 0) is None  # a token behind each row
    assert EmbedsFormat.of(["<x>"], tokens, 0) is None


FRAMES, NUMBERS = np.zeros((2, 4, 6, 3), np.uint8), np.array([0, 9])


def test_frames_are_read() -> None:
    frames, numbers, rate, total = read_frames(npy(FRAMES) + npy(NUMBERS) + npy(np.array([2.5, 10])))
    assert (frames.shape, numbers.tolist(), rate, total) == (FRAMES.shape, [0, 9], 2.5, 10)
    for arrays, message in (
        ((FRAMES,), "must be of uint8"),
        ((FRAMES.astype(np.float32), NUMBERS, [2.5, 10]), "must be of uint8"),
        ((FRAMES[..., :1], NUMBERS, [2.5, 10]), "height, width, 3"),
        ((FRAMES, NUMBERS[:1], [2.5, 10]), "do not fit its frames"),
        ((FRAMES, NUMBERS, [np.nan, 10]), "do not fit its frames"),
        ((FRAMES, NUMBERS, [2.5, np.inf]), "do not fit its frames"),
        ((FRAMES, NUMBERS[::-1], [2.5, 10]), "ascending order"),
        ((FRAMES, NUMBERS, [2.5, 9]), "less than total_num_frames"),
    ):
        with pytest.raises(MediaRefused, match=message):
            read_frames(b"".join(npy(np.asarray(array)) for array in arrays))
