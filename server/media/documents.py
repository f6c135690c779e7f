"""PDF files → pictures of their pages, by PDFium (the extra "pdf"). Runs in decoder processes only."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
from typing import Any

from PIL import Image

from quire.server.media.images import MediaRefused, check_pixels

BEGINNING = b"%PDF-"
"""Of each PDF file. Some have bytes before it; they are refused, so that each file has one reading."""
_LONG_SIDE = 1568
"""Pixels of a page's longer side: 12-point text of a letter is about 24 pixels high."""


def register() -> Any:
    """Load PDFium, when it is installed, with what it loads when it is first used."""
    if importlib.util.find_spec("pypdfium2") is None:
        return None
    pdfium: Any = importlib.import_module("pypdfium2")
    document = pdfium.PdfDocument.new()
    document.new_page(72, 72)
    file = io.BytesIO()
    document.save(file)
    render_page(pdfium, file.getvalue(), 0, 2**24)
    return pdfium


def render_page(pdfium: Any, data: bytes, page: int, max_pixels: int) -> tuple[Image.Image, int]:
    """Return a page as it is to be seen, with annotations and filled forms, on at most so many pixels, and the number
    of pages. `pdfium` is what `register` returned. Raises `MediaRefused`.
    """
    if pdfium is None:
        raise MediaRefused("PDF files need the extra pdf on the server")
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError:
        raise MediaRefused("the PDF file is damaged, or needs a password") from None
    try:
        if "V8" not in pdfium.PDFIUM_INFO.flags:  # otherwise forms could run programs
            document.init_forms()
        num_pages, shown = len(document), document[page]
        width, height = shown.get_size()
        scale = min(_LONG_SIDE / max(width, height), 0.99 * math.sqrt(max_pixels / (width * height)))
        check_pixels(math.ceil(width * scale), math.ceil(height * scale), max_pixels)
        return shown.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB"), num_pages
    except (MediaRefused, MemoryError):
        raise
    except Exception:
        raise MediaRefused(f"page {page + 1} of the PDF file is damaged") from None
