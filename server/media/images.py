"""Image files → pixels, by Pillow. Runs in decoder processes only.

Every format but those listed here is unknown to Pillow in these processes. Width and height are checked before pixels
are decoded. Errors never contain a library's text.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import IO

import numpy as np
from PIL import Image, ImageFile, ImageOps

_FORMATS = {
    "PNG": "PngImagePlugin",
    "JPEG": "JpegImagePlugin",
    "MPO": "MpoImagePlugin",  # photographs of phones: a JPEG with further pictures behind it
    "WEBP": "WebPImagePlugin",
    "GIF": "GifImagePlugin",
    "BMP": "BmpImagePlugin",
    "DIB": "BmpImagePlugin",
    "TIFF": "TiffImagePlugin",
}
WHITE = (255, 255, 255)
_NAMES = "PNG, JPEG, WebP, GIF, BMP or TIFF"


class MediaRefused(Exception):
    """The file is not accepted; the text says why, for clients."""


def register() -> tuple[str, ...]:
    """Make Pillow know the supported formats and no others; returns their names."""
    formats = dict(_FORMATS)
    if importlib.util.find_spec("pillow_heif") is not None:  # the extra "heif"
        pillow_heif = importlib.import_module("pillow_heif")
        pillow_heif.options.DECODE_THREADS = 1
        formats |= {"AVIF": "AvifImagePlugin"}
    for module in formats.values():
        importlib.import_module(f"PIL.{module}")
    Image._initialized = 2  # or Pillow imports its other plugins when it does not recognize a file
    Image.MAX_IMAGE_PIXELS = None  # checked here, with a limit of our own
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    if "AVIF" in formats:
        pillow_heif.register_heif_opener(thumbnails=False)
    return tuple(name for name in (*formats, "HEIF") if name in Image.OPEN)  # Pillow opens MPO as JPEG


def decode_image(
    file: IO[bytes], formats: tuple[str, ...], max_pixels: int, background: tuple[int, int, int] = WHITE
) -> Image.Image:
    """Return the first frame as it is to be seen, as RGB: rotated as EXIF says, on `background` where it is
    transparent.

    Raises `MediaRefused`.
    """
    try:
        image: Image.Image = Image.open(file, formats=formats)
    except MemoryError:
        raise
    except Exception:
        extra = "" if "HEIF" in formats else "; HEIF and AVIF need the extra heif"
        raise MediaRefused(f"the file is not a supported image ({_NAMES}{extra})") from None
    check_pixels(image.width, image.height, max_pixels)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        return to_rgb(image, background)
    except MemoryError:
        raise
    except Exception:
        raise MediaRefused("the image is damaged or incomplete") from None


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise `MediaRefused` if a picture is too large."""
    if width * height > max_pixels:
        raise MediaRefused(f"the picture has {width} × {height} pixels; at most {max_pixels:,} pixels are allowed")


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Return the picture as 8-bit RGB, on `background` where it is transparent."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # Pillow would cut values off at 255
        values = np.asarray(image, dtype=np.float32)
        highest = values.max(initial=0.0)
        if image.mode.startswith("I;16") or highest > 255:
            values = values / 257.0 if highest <= 65535 else values * (255.0 / highest)
        elif image.mode == "F" and highest <= 1.0:
            values = values * 255.0
        image = Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8), "L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return image.convert("RGB")
