"""PDF files, written by hand."""

from __future__ import annotations


def pdf_file(*objects: bytes, trailer: bytes = b"") -> bytes:
    """A file with these objects, numbered from 1, of which the first is the catalog."""
    written, places = bytearray(b"%PDF-1.7\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start, size = len(written), len(objects) + 1
    written += b"xref\n0 %d\n0000000000 65535 f \n%btrailer<</Size %d/Root 1 0 R%b>>\n" % (size, table, size, trailer)
    return bytes(written) + b"startxref\n%d\n%%%%EOF" % start


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<</Length %d%b>>stream\n%b\nendstream" % (len(content), entries, content)


def page(number: int, size: tuple[float, float] = (612, 792), resources: bytes = b"") -> bytes:
    """A page whose contents are the object of this number."""
    entries = b"/MediaBox[0 0 %g %g]/Contents %d 0 R/Resources<<%b>>" % (*size, number, resources)
    return b"<</Type/Page/Parent 2 0 R%b>>" % entries


def pdf(*texts: str, size: tuple[float, float] = (612, 792)) -> bytes:
    """A file with a page of this size in points for each text."""
    font = b"/Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>"
    numbers = range(3, 3 + 2 * len(texts), 2)
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, len(texts))]
    for number, text in zip(numbers, texts, strict=True):
        height = size[1] / 2
        written = b"BT /F %g Tf %g %g Td (%b) Tj ET" % (height, height / 2, height / 2, text.encode("ascii"))
        objects += [page(number + 1, size, font), stream(written)]
    return pdf_file(*objects)
