"""Pixels of all kinds → 8-bit RGB."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from quire.server.media.images import to_rgb

GRAY16 = np.array([[0, 257, 25700, 65535]], np.uint16)


def palette(transparency: int | None) -> Image.Image:
    image = Image.new("P", (1, 1), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGB", (1, 1), (1, 2, 3)), [(1, 2, 3)]),
        (Image.new("RGBA", (1, 1), (0, 100, 200, 0)), [(255, 255, 255)]),
        (Image.new("RGBA", (1, 1), (0, 100, 255, 51)), [(204, 224, 255)]),  # a fifth of it
        (Image.new("LA", (1, 1), (0, 0)), [(255, 255, 255)]),
        (Image.new("L", (1, 1), 7), [(7, 7, 7)]),
        (Image.new("1", (1, 1), 1), [(255, 255, 255)]),
        (Image.new("CMYK", (1, 1), (255, 0, 0, 0)), [(0, 255, 255)]),
        (palette(None), [(10, 20, 30)]),
        (palette(1), [(255, 255, 255)]),
        (Image.fromarray(GRAY16), [(value,) * 3 for value in (0, 1, 100, 255)]),
        (Image.fromarray(GRAY16.astype(np.int32)), [(value,) * 3 for value in (0, 1, 100, 255)]),
        (Image.fromarray(np.array([[0, 0.2, 1]], np.float32)), [(value,) * 3 for value in (0, 51, 255)]),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_every_mode_becomes_rgb_on_white(image: Image.Image, expected: list[tuple[int, ...]]) -> None:
    found = to_rgb(image)
    assert found.mode == "RGB"
    assert list(map(tuple, np.asarray(found)[0].tolist())) == expected


def test_the_operator_chooses_the_color_under_transparent_pictures() -> None:
    assert to_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0)), (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)
