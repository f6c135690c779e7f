"""What attackers try with files, each in a confined decoder, and what each gets: docs/design/media-security.md."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import av
import msgspec
import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageDraw, PngImagePlugin, TiffImagePlugin

from quire.engine.protocol.media import MediaKind
from quire.server.media.decoders import Decoders
from quire.server.media.decoding import Decoded, DecodeOrder, Refused
from quire.server.media.types import MediaSettings
from tests.fakes.pdfs import page, pdf, pdf_file, stream
from tests.fakes.processors import write_processor

MAX_PIXELS, MAX_BYTES = 2**22, 2**26
NOT_AN_IMAGE, DAMAGED = "not a supported image", "damaged or incomplete"
TOO_MUCH, TOO_LARGE = "too much time or memory", "pixels are allowed"
ACCEPTED = ""
"""The file is decoded."""


class Attack(msgspec.Struct, frozen=True):
    data: bytes
    message: str
    kind: MediaKind = "image"
    options: dict[str, Any] = {}
    seconds: int = 10
    page: int | None = None
    """Of a document."""


def picture(width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (width, height))
    ImageDraw.Draw(image).rectangle((8, 8, 20, 20), fill=1 if mode in ("1", "P") else "red")
    return image


def saved(form: str, image: Image.Image | None = None, **options: Any) -> bytes:
    (image or picture()).save(file := io.BytesIO(), form, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, pixels: bytes, *others: bytes, depth: int = 8, color: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(others) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@cache
def bomb(size: int = 2**28) -> bytes:
    """Compressed zeros."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(size // 2**20)) + packer.flush()


def tiff(*entries: tuple[int, int, int, int], after: bytes = b"", following: int = 0) -> bytes:
    """A directory of entries: tag, type, count, value."""
    rows = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + rows + struct.pack("<I", following) + after


def plain_tiff(width: int, height: int, *others: tuple[int, int, int, int], **content: Any) -> bytes:
    described = ((256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (262, 3, 1, 1), (278, 4, 1, height))
    return tiff(*described, *others, **content)


def bmp(width: int, height: int, compression: int = 0, content: bytes = b"") -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, len(content), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(content), 0, 0, 54 + 1024) + header + bytes(1024) + content


def gif(width: int, height: int, content: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + content


def with_scans(count: int) -> bytes:
    """A progressive JPEG that repeats a scan of all its blocks, which takes time and hardly any bytes."""
    data = saved("JPEG", Image.new("L", (2040, 2040)), progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * count + data[-2:]


def exif_in_a_circle() -> bytes:
    """Its subdirectories name each other."""
    rows = struct.pack("<HHHII", 1, 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    return b"Exif\0\0II*\0\x08\0\0\0" + rows


def archive() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as packed:
        packed.writestr("a.png", saved("PNG"))
    return file.getvalue()


def of_webp(width: int, height: int) -> bytes:
    """Only the header of a lossless picture."""
    bits = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    return (
        b"RIFF" + struct.pack("<I", 4 + 8 + len(bits) + 1) + b"WEBPVP8L" + struct.pack("<I", len(bits)) + bits + b"\0"
    )


def animation(form: str, count: int) -> bytes:
    frames = [Image.new("L", (32, 32), each % 250) for each in range(count)]
    return saved(form, frames[0], save_all=True, append_images=frames[1:])


def images() -> dict[str, Attack]:
    png_info, tags = PngImagePlugin.PngInfo(), TiffImagePlugin.ImageFileDirectory_v2()
    for each in range(300):
        png_info.add_text(f"k{each}", "v" * 10_000, zip=True)
    tags[270] = "x" * 10_000_000
    one = zlib.compress(b"\0" + bytes(8))
    jpeg, small = saved("JPEG"), saved("PNG")
    sof = jpeg.index(b"\xff\xc0")
    huge = jpeg[: sof + 5] + b"\xff\xff\xff\xff" + jpeg[sof + 9 :]
    script = b"*/=alert(1)/*"
    rows = {
        "PNG of many pixels": Attack(png(60_000, 60_000, bomb(2**20), depth=1), TOO_LARGE),
        "PNG of 2³¹ pixels a side": Attack(png(2**31 - 1, 2**31 - 1, b""), TOO_LARGE),
        "PNG with more data than pixels": Attack(png(8, 1, bomb()), ACCEPTED),
        "PNG with a bomb as profile": Attack(png(8, 1, one, chunk(b"iCCP", b"a\0\0" + bomb())), NOT_AN_IMAGE),
        "PNG with a bomb as text": Attack(png(8, 1, one, chunk(b"zTXt", b"a\0\0" + bomb())), NOT_AN_IMAGE),
        "PNG with a bomb as international text": Attack(
            png(8, 1, one, chunk(b"iTXt", b"a\0\1\0\0\0" + bomb())), NOT_AN_IMAGE
        ),
        "PNG with a bomb behind the pixels": Attack(
            png(64, 64, zlib.compress(bytes(65 * 64)))[:-12] + chunk(b"zTXt", b"a\0\0" + bomb()) + chunk(b"IEND", b""),
            DAMAGED,
        ),
        "PNG with many texts": Attack(saved("PNG", pnginfo=png_info), ACCEPTED),
        "PNG with 100,000 empty parts": Attack(
            png(64, 64, zlib.compress(bytes(65 * 64)), chunk(b"teSt", b"") * 100_000), ""
        ),
        "PNG with a wrong checksum": Attack(small[:-20] + b"x" + small[-19:], DAMAGED),
        "PNG without an end": Attack(small[:-30], DAMAGED),
        "PNG with garbage as EXIF": Attack(
            png(64, 64, zlib.compress(bytes(65 * 64)), chunk(b"eXIf", b"x" * 99)), DAMAGED
        ),
        "PNG with EXIF in a circle": Attack(
            png(64, 64, zlib.compress(bytes(65 * 64)), chunk(b"eXIf", exif_in_a_circle()[6:])), ACCEPTED
        ),
        "PNG without pixels": Attack(png(0, 0, b""), NOT_AN_IMAGE),
        "APNG of many frames": Attack(animation("PNG", 500), ACCEPTED),
        "JPEG of many pixels": Attack(huge, TOO_LARGE),
        "JPEG of many scans": Attack(with_scans(20_000), TOO_MUCH, seconds=1),
        "JPEG that ends early": Attack(jpeg[:-40], DAMAGED),
        "JPEG with 255 profiles": Attack(
            jpeg[:2]
            + b"".join(b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes([n, 255]) + bytes(65_519) for n in range(1, 256))
            + jpeg[2:],
            ACCEPTED,
        ),
        "JPEG with EXIF in a circle": Attack(
            jpeg[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif_in_a_circle())) + exif_in_a_circle() + jpeg[2:],
            ACCEPTED,
        ),
        "JPEG in CMYK": Attack(saved("JPEG", picture(mode="CMYK")), ACCEPTED),
        "WebP of many pixels": Attack(of_webp(16_383, 16_383), TOO_LARGE),
        "WebP that ends early": Attack(saved("WEBP", Image.effect_noise((64, 64), 90))[:-100], NOT_AN_IMAGE),
        "WebP of many frames": Attack(animation("WEBP", 300), ACCEPTED),
        "GIF of many pixels": Attack(gif(65_535, 65_535, b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;"), TOO_LARGE),
        "GIF with a frame outside": Attack(gif(4, 4, b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;"), TOO_LARGE),
        "GIF without pixels": Attack(gif(0, 0, b";"), NOT_AN_IMAGE),
        "GIF of damaged codes": Attack(
            gif(64, 64, b",\0\0\0\0\x40\0\x40\0\0\x0c\xff" + b"\xaa" * 255 + b"\0;"), DAMAGED
        ),
        "GIF of many frames": Attack(animation("GIF", 2000), ACCEPTED),
        "TIFF of many pixels": Attack(plain_tiff(2**31, 2**31, (259, 3, 1, 1), (273, 4, 1, 8)), TOO_LARGE),
        "TIFF with a bomb": Attack(
            plain_tiff(2000, 2000, (259, 3, 1, 8), (273, 4, 1, 98), (279, 4, 1, 2**19), after=bomb()), DAMAGED
        ),
        "TIFF with its pixels behind its end": Attack(
            plain_tiff(2000, 2000, (259, 3, 1, 1), (273, 4, 1, 2**31), (279, 4, 1, 2**22)), DAMAGED
        ),
        "TIFF with directories in a circle": Attack(
            plain_tiff(8, 1, (259, 3, 1, 1), (273, 4, 1, 8), (279, 4, 1, 8), following=8), ACCEPTED
        ),
        "TIFF of many values": Attack(tiff((256, 4, 2**30, 8), (257, 4, 1, 8), (258, 3, 2**31, 8)), NOT_AN_IMAGE),
        "TIFF with a long text": Attack(saved("TIFF", tiffinfo=tags), ACCEPTED),
        "TIFF in a JPEG's compression, damaged": Attack(
            plain_tiff(64, 64, (259, 3, 1, 7), (273, 4, 1, 98), (279, 4, 1, 64), after=b"\xff\xd8" + b"\xff" * 62),
            DAMAGED,
        ),
        "BMP of many pixels": Attack(bmp(2**30, 2**30), TOO_LARGE),
        "BMP of negative height": Attack(bmp(100_000, -100_000), TOO_LARGE),
        "BMP with few bytes for many pixels": Attack(bmp(2000, 2000, 1, b"\xff\0" * 10), DAMAGED),
        "BMP that ends early": Attack(saved("BMP")[:-100], DAMAGED),
        "very wide": Attack(saved("PNG", picture(20_000, 8)), "does not accept a picture of 20000 × 8 pixels"),
        "one pixel": Attack(saved("PNG", Image.new("L", (1, 1))), ACCEPTED),
        "floating point": Attack(saved("TIFF", Image.fromarray(np.full((64, 64), np.nan, np.float32))), ACCEPTED),
        "SVG": Attack(
            b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', NOT_AN_IMAGE
        ),
        "EPS": Attack(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n%%EOF", NOT_AN_IMAGE),
        "PDF": Attack(b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\n%%EOF", NOT_AN_IMAGE),
        **{
            f"{form} (by a rare decoder)": Attack(saved(form, picture()), NOT_AN_IMAGE)
            for form in ("PCX", "TGA", "SGI", "PPM", "ICO")
        },
        "PSD": Attack(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3) + bytes(30), NOT_AN_IMAGE),
        "JPEG 2000": Attack(b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), NOT_AN_IMAGE),
        "FLI": Attack(bytes(4) + b"\x12\xaf" + bytes(200), NOT_AN_IMAGE),
        "XBM": Attack(b"#define a_width 9\n#define a_height 9\nstatic char a[] = {0x00};", NOT_AN_IMAGE),
        "HTML": Attack(b"<html><script>alert(1)</script></html>", NOT_AN_IMAGE),
        "gzip of a picture": Attack(gzip.compress(small), NOT_AN_IMAGE),
        "archive": Attack(archive(), NOT_AN_IMAGE),
        "pickle": Attack(b"\x80\x04cposix\nsystem\n(S'id'\ntR.", NOT_AN_IMAGE),
        "GIF that is a script": Attack(saved("GIF") + script, ACCEPTED),
        "JPEG that is an archive": Attack(jpeg + archive(), ACCEPTED),
        "PNG that is HTML": Attack(
            png(64, 64, zlib.compress(bytes(65 * 64)), chunk(b"tEXt", b"a\0<script>")), ACCEPTED
        ),
        "nothing": Attack(b"", NOT_AN_IMAGE),
        "one byte": Attack(b"\x89", NOT_AN_IMAGE),
        "only a signature": Attack(b"\x89PNG\r\n\x1a\n", NOT_AN_IMAGE),
        "noise": Attack(np.random.default_rng(1).bytes(10_000), NOT_AN_IMAGE),
        "unknown option": Attack(small, "argument of", options={"__class__": 1}),
        "the least pixels that make it large": Attack(small, "must be at most", options={"min_pixels": 32_022_222}),
        "a size that makes it large": Attack(
            small, "must be at most", options={"size": {"shortest_edge": 2**40, "longest_edge": 2**41}}
        ),
        "options that leave it large": Attack(
            saved("PNG", picture(1950, 2000)), "item would have", options={"max_pixels": 2**40}
        ),
        "an option of a wrong type": Attack(small, "with these options", options={"size": "x"}),
    }
    heif = heif_file()
    rows |= {
        "HEIF that ends early": Attack(heif[: len(heif) // 2], NOT_AN_IMAGE),
        "HEIF of many pixels": Attack(
            heif.replace(b"ispe" + bytes(4) + struct.pack(">I", 64), b"ispe" + bytes(4) + struct.pack(">I", 2**30)),
            DAMAGED,
        ),
        "HEIF, whole": Attack(heif, ACCEPTED),
    }
    return rows


def heif_file() -> bytes:
    pillow_heif.from_pillow(picture()).save(file := io.BytesIO(), quality=50)
    return file.getvalue()


NOT_A_VIDEO = "not a supported video"


def video(form: str, codec: str, count: int = 8, width: int = 64, height: int = 48, rate: int = 4) -> bytes:
    with av.open(file := io.BytesIO(), "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for each in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), each % 250, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def videos() -> dict[str, Attack]:
    mp4 = video("mp4", "mpeg4")
    track = mp4.index(b"stsd")
    sizes = struct.pack(">HH", 64, 48)
    wide = mp4[:track] + mp4[track:].replace(sizes, struct.pack(">HH", 65_535, 65_535), 1)
    counts = mp4.index(b"stsz") + 12
    many = mp4[:counts] + struct.pack(">I", 2**31) + mp4[counts + 4 :]
    slow = [Image.new("L", (32, 32), each) for each in range(80)]
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    description = (
        b'<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>file:///etc/passwd</BaseURL>'
    )
    rows = {
        "MP4, whole": Attack(mp4, ACCEPTED),
        "WebM, whose number of frames is not known": Attack(video("webm", "libvpx-vp9"), ACCEPTED),
        "GIF, moving": Attack(animation("GIF", 8), ACCEPTED),
        "MP4 of many pixels": Attack(video("mp4", "mpeg4", 4, 4096, 1088), TOO_LARGE),
        "MP4 whose header claims many pixels": Attack(wide, ACCEPTED),
        "MP4 of 2³¹ frames": Attack(many, DAMAGED),
        "MP4 that ends early": Attack(mp4[: len(mp4) // 2], NOT_A_VIDEO),
        "MP4 whose frames are damaged": Attack(mp4.replace(b"\0\0\1\xb6", b"\xff\xff\xff\xff"), DAMAGED),
        "hours in one file": Attack(
            saved("GIF", slow[0], save_all=True, append_images=slow[1:], duration=60_000), "seconds are"
        ),
        "one frame": Attack(video("mp4", "mpeg4", 1), "too few"),
        "many frames": Attack(video("mp4", "mpeg4", 200), "use fewer frames", options={"num_frames": 200}),
        "more frames than a plan has": Attack(mp4, "too few", options={"num_frames": 2**39}),
        "a rate that is no number": Attack(mp4, "invalid value of fps", options={"fps": float("nan")}),
        "a rate of 0": Attack(mp4, "invalid value of fps", options={"fps": 0}),
        "a size of a text": Attack(mp4, "invalid value of size", options={"size": {"shortest_edge": "9" * 99}}),
        "a size of many pixels": Attack(
            mp4, "at most", options={"size": {"shortest_edge": 2**35, "longest_edge": 2**36}}
        ),
        "another option": Attack(mp4, "argument of", options={"return_metadata": 1}),
        "HLS playlist of a file": Attack(playlist, NOT_A_VIDEO),
        "HLS playlist of a URL": Attack(
            playlist.replace(b"file:///etc/passwd", b"http://169.254.169.254/a.ts"), NOT_A_VIDEO
        ),
        "concat list": Attack(b"ffconcat version 1.0\nfile '/etc/passwd'\nduration 5\n", NOT_A_VIDEO),
        "DASH": Attack(description, NOT_A_VIDEO),
        "SDP": Attack(b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n", NOT_A_VIDEO),
        "another codec": Attack(video("matroska", "ffv1"), NOT_A_VIDEO),
        "another container": Attack(video("flv", "flv"), NOT_A_VIDEO),
        "picture as a video": Attack(saved("JPEG"), NOT_A_VIDEO),
        "sound alone": Attack(
            b"RIFF\x24\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8), NOT_A_VIDEO
        ),
        "noise": Attack(np.random.default_rng(2).bytes(10_000), NOT_A_VIDEO),
        "nothing": Attack(b"", NOT_A_VIDEO),
    }
    found = {f"video: {name}": msgspec.structs.replace(row, kind="video") for name, row in rows.items()}
    return {**found, "video as a picture": Attack(mp4, NOT_AN_IMAGE)}


NOT_A_PDF = "damaged, or needs a password"


def documents() -> dict[str, Attack]:
    root, pages = b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>"
    image = b"/Subtype/Image/Width 16384/Height 16384/BitsPerComponent 8/ColorSpace/DeviceGray/Filter/FlateDecode"
    shown, box = b"/XObject<</X 5 0 R>>", b"/Subtype/Form/BBox[0 0 99 99]/Resources<</XObject<</X 5 0 R>>>>"
    draw, whole = stream(b"99 0 0 99 0 0 cm /X Do"), pdf("Hello", "again")
    script = b"<</Type/Catalog/Pages 2 0 R/OpenAction<</S/JavaScript/JS(while(1);)>>>>"
    locked = b"/Encrypt<</Filter/Standard/V 1/R 2/P 4/O(%b)/U(%b)>>/ID[(a)(a)]" % (b"a" * 32, b"b" * 32)
    rows = {
        "whole": Attack(whole, ACCEPTED),
        "picture instead": Attack(saved("PNG"), ACCEPTED),
        "archive instead": Attack(archive(), NOT_AN_IMAGE),
        "bytes before it": Attack(b"\n" + whole, NOT_AN_IMAGE),
        "that ends early": Attack(whole[:60], NOT_A_PDF),
        "noise": Attack(b"%PDF-1.7\n" + np.random.default_rng(3).bytes(10_000), NOT_A_PDF),
        "with a password": Attack(pdf_file(root, pages, page(4), stream(b""), trailer=locked), NOT_A_PDF),
        "without pages": Attack(pdf_file(root, b"<</Type/Pages/Kids[]/Count 0>>"), NOT_A_PDF),
        "of 2³⁰ pages that are not there": Attack(
            pdf_file(root, b"<</Type/Pages/Kids[]/Count 1073741824>>"), "the PDF file is damaged"
        ),
        "whose pages are in a circle": Attack(
            pdf_file(root, b"<</Type/Pages/Kids[2 0 R]/Count 9>>"), "the PDF file is damaged"
        ),
        "of a large page": Attack(pdf_file(root, pages, page(4, (1e9, 1e9)), stream(b"")), ACCEPTED),
        "of a page without area": Attack(pdf_file(root, pages, page(4, (0, 0)), stream(b"")), ACCEPTED),
        "with a compressed picture of zeros": Attack(
            pdf_file(root, pages, page(4, resources=shown), draw, stream(bomb(), image)), ACCEPTED
        ),
        "with a drawing that contains itself": Attack(
            pdf_file(root, pages, page(4, resources=shown), draw, stream(b"/X Do /X Do", box)), TOO_MUCH, seconds=1
        ),
        "with a script": Attack(pdf_file(script, pages, page(4), stream(b"")), ACCEPTED),
        "with a stream of another file": Attack(
            pdf_file(root, pages, page(4), stream(b"", b"/F(/etc/passwd)")), ACCEPTED
        ),
    }
    return {f"PDF {name}": msgspec.structs.replace(row, page=0) for name, row in rows.items()}


ATTACKS: dict[str, Attack] = {**images(), **videos(), **documents()}


def at(target: int) -> Callable[[int], int]:
    """A file that is open already."""
    return lambda num_bytes: target


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoded | Refused]:
    """What became of each file. All are decoded by forks of the same process, which outlives them."""
    folder = write_processor("qwen2_vl", tmp_path_factory.mktemp("model"))

    async def decode() -> dict[str, Decoded | Refused]:
        decoders = Decoders(MediaSettings(model=str(folder)))
        await decoders.ready()
        found, process = {}, decoders._popen
        for name, attack in ATTACKS.items():
            target = os.memfd_create("result")
            order = DecodeOrder(attack.kind, attack.options, attack.seconds, MAX_PIXELS, MAX_BYTES, attack.page)
            found[name] = await decoders.decode(attack.data, order, at(target))
            assert os.fstat(target).st_size <= MAX_BYTES
            os.close(target)
        assert decoders._popen is process
        decoders.close()
        return found

    return asyncio.run(decode())


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_file_gets(results: dict[str, Decoded | Refused], name: str) -> None:
    result, message = results[name], ATTACKS[name].message
    if message == ACCEPTED:
        assert isinstance(result, Decoded), result.reason
    else:
        assert isinstance(result, Refused)
        assert message in result.reason
    assert not any(word in str(result) for word in ("Error", "libpng", "PIL", "0x", "/tmp"))
