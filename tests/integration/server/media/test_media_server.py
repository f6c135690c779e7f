"""Items of requests, over the media process's socket: loaded once, kept while leased, refused with a reason."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.media import server as media_server
from quire.server.media.client import MediaClient
from quire.server.media.decoding import Decoded, DecodeOrder, DecoderReady, Refused
from quire.server.media.download import Fetched
from quire.server.media.server import MediaServer
from quire.server.media.store import Store
from quire.server.media.types import LoadedItem, LoadedMedia, MediaSettings, MediaSource, MediaUnavailable
from quire.server.media.uploads import Uploads
from tests.fakes.arrays import npy, safetensors
from tests.fakes.pdfs import pdf
from tests.fakes.processors import write_processor
from tests.fakes.waiting import until, until_async

MAX_PIXELS = 500_000


@dataclass
class Site:
    """What stands at URLs, and how often it was fetched."""

    pages: dict[str, Fetched] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    async def fetch(self, url: str, max_bytes: int | None = None) -> Fetched:
        self.fetched.append(url)
        await asyncio.sleep(3600 if "silent" in url else 0.05)
        if url not in self.pages:
            raise InvalidParameter("the server answered with 404")
        return self.pages[url]

    async def close(self) -> None:
        pass


@dataclass
class Host:
    """A media server on a loop of its own, in a thread."""

    server: MediaServer
    loop: asyncio.AbstractEventLoop
    socket: str
    site: Site
    orders: list[DecodeOrder]
    """What decoders were asked for."""

    def settle(self) -> None:
        """Check the store, on its thread."""

        async def check() -> None:
            self.server.store.check_integrity()

        asyncio.run_coroutine_threadsafe(check(), self.loop).result()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "items").mkdir()
    (folder / "uploads").mkdir()
    (folder / "model").mkdir()
    settings = MediaSettings(
        model=str(write_processor("qwen2_vl", folder / "model")),
        num_decoders=2,
        max_pixels=MAX_PIXELS,
        max_request_pixels=MAX_PIXELS * 3 // 2,
        max_bytes=2**20,
        embeds=True,
        upload_folder=str(folder / "uploads"),
    )
    ended: asyncio.Queue[None] = asyncio.Queue()
    ready, hosts = threading.Event(), list[Host]()

    async def run() -> None:
        site, orders = Site(), list[DecodeOrder]()
        server = MediaServer(settings, Store(str(folder / "items"), 2**26), site)
        decode = server.decoders.decode

        async def counted(data: bytes, order: DecodeOrder, open_target: Callable[[int], int]) -> Decoded | Refused:
            orders.append(order)
            return await decode(data, order, open_target)

        server.decoders.decode = counted  # type: ignore[method-assign]
        path = str(folder / "socket")
        async with await server.serve(path):
            hosts.append(Host(server, asyncio.get_running_loop(), path, site, orders))
            ready.set()
            await ended.get()
            await server.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait()
    yield hosts[0]
    hosts[0].loop.call_soon_threadsafe(ended.put_nowait, None)
    thread.join()


@pytest.fixture
async def client(host: Host) -> AsyncIterator[MediaClient]:
    host.orders.clear()
    host.site.fetched.clear()
    made = MediaClient(host.socket)
    yield made
    made.close()
    host.settle()


def picture(color: str | tuple[int, int, int], size: tuple[int, int] = (56, 56), form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


def source(data: bytes = b"", **others: Any) -> MediaSource:
    return MediaSource("image", "messages[0].content[1]", data=data, **others)


def arrays(item: LoadedItem) -> dict[str, np.ndarray]:
    content = Path(item.data.path).read_bytes()
    assert len(content) == item.data.num_bytes
    return {
        each.name: np.frombuffer(content, each.dtype, int(np.prod(each.shape)), each.start).reshape(each.shape)
        for each in item.data.arrays
    }


async def test_an_item_is_what_the_processor_makes_of_the_picture(client: MediaClient) -> None:
    loaded = await client.load([source(picture("red", (56, 84))), source(picture("blue"))])
    first, second = loaded.items
    assert (first.kind, first.text, first.grids) == ("image", "<|image_pad|>" * 6, ((1, 3, 2),))
    assert second.grids == ((1, 2, 2),)
    found = arrays(first)
    assert found["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert found["pixel_values"].shape == (24, 1176)
    # The mean and deviation of CLIP's pictures.
    assert np.unique(found["pixel_values"]) == pytest.approx(
        sorted([(1 - 0.48145466) / 0.26862954, -0.4578275 / 0.26130258, -0.40821073 / 0.27577711]), rel=1e-6
    )
    assert Path(first.data.path).name == f"{first.digest.hex()}.item"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
async def test_every_format_is_turned_as_exif_says(client: MediaClient, form: str) -> None:
    """Red above white; a camera that was turned writes it as red beside white."""
    image = Image.new("RGB", (112, 56), "white")
    has_exif = form in ("PNG", "JPEG", "WEBP", "TIFF")
    image.paste((255, 0, 0), (0, 0, 56, 56))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    image.save(file, form, **({"exif": exif} if has_exif else {}))
    (item,) = (await client.load([source(file.getvalue())])).items
    assert item.grids == (((1, 4, 2) if has_exif else (1, 2, 4)),)
    red_everywhere, blue = arrays(item)["pixel_values"].reshape(-1, 3, 2 * 14 * 14)[:, [0, 2]].mean(axis=2).T
    assert red_everywhere == pytest.approx(1.93, abs=0.1)
    first_half = blue[:16].mean()  # the first tokens: above if it was turned, and else above left
    assert first_half == pytest.approx(-1.48 if has_exif else (-1.48 + 2.15) / 2, abs=0.1)


@pytest.mark.parametrize("form", ["PPM", "ICO", "TGA", "PCX", "EPS", "PDF"])
async def test_other_formats_are_refused(client: MediaClient, form: str) -> None:
    with pytest.raises(InvalidParameter, match="not a supported image"):
        await client.load([source(picture("red", form=form))])


async def test_what_requests_load_at_the_same_time_or_again_is_decoded_once(host: Host, client: MediaClient) -> None:
    data = picture("green")
    first, second = await asyncio.gather(client.load([source(data), source(data)]), client.load([source(data)]))
    again = await client.load([source(data)])
    digests = {item.digest for loaded in (first, second, again) for item in loaded.items}
    assert (len(digests), len(host.orders)) == (1, 1)
    other_file = await client.load([source(picture("green", form="BMP"))])
    assert (other_file.items[0].digest, len(host.orders)) == (digests.pop(), 2)
    same_size = await client.load([source(picture("yellow"))])
    assert same_size.items[0].digest != other_file.items[0].digest


async def test_data_of_a_known_picture_is_not_sent(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be base64, or not; two are asked for at once, one of which is new."""
    asked: list[MediaSource] = []
    load = host.server.load

    async def noted(sources: Sequence[MediaSource], owner: str) -> LoadedMedia:
        asked.extend(sources)
        return await load(sources, owner)

    monkeypatch.setattr(host.server, "load", noted)
    file = picture("teal", (150, 150), "BMP")
    in_base64 = MediaSource("image", "messages[0]", data=base64.b64encode(file), is_base64=True)
    items = [(await client.load([given])).items for given in (in_base64, in_base64, source(file), source(file))]
    assert items[1:] == items[:1] * 3
    assert len(host.orders) == 1
    assert [bool(each.data) for each in asked] == [False, True, False, False, True, False]
    new = source(picture("olive", (150, 150), "BMP"))
    assert (await client.load([in_base64, new])).items[0] == items[0][0]
    assert [bool(each.data) for each in asked[-4:]] == [False, False, True, True]


async def test_base64_is_a_file_only_where_it_is_said_to_be(client: MediaClient) -> None:
    """The answer is the same whatever was sent before."""
    encoded = base64.b64encode(picture("navy", (150, 150), "BMP"))
    await client.load([MediaSource("image", "p", data=encoded, is_base64=True)])
    with pytest.raises(InvalidParameter, match="not a supported image"):
        await client.load([MediaSource("image", "p", data=encoded)])


def test_names_of_an_owner_do_not_displace_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_server, "_MAX_NAMES", 4)
    names = media_server._Names[int]()
    names.set(("logo",), 0, owner="me")
    for number in range(10):
        names.set((f"{number}",), number, owner="you")
    assert names.get(("logo",), "me") == 0
    assert [names.get((f"{number}",), "you") for number in range(10)] == [None] * 7 + [7, 8, 9]


async def test_urls_of_a_silent_host_leave_turns_for_others(host: Host, client: MediaClient) -> None:
    host.site.pages = {"http://site/other": Fetched(picture("blue"), None)}
    silent = asyncio.create_task(client.load([source(url=f"http://silent/{number}") for number in range(100)]))
    await until_async(lambda: len(host.site.fetched) == 32)
    await client.load([source(url="http://site/other")])
    silent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await silent
    assert len(host.site.fetched) == 33


async def test_items_of_an_owner_leave_a_decoder_for_others(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, begun, ends = host.server.decoders.decode, list[bytes](), asyncio.Event()

    async def slow(data: bytes, order: DecodeOrder, open_target: Callable[[int], int]) -> Decoded | Refused:
        begun.append(data)
        if data != other:
            await until_async(ends.is_set)
        return await decode(data, order, open_target)

    monkeypatch.setattr(host.server.decoders, "decode", slow)
    other, many = picture("#010203"), [picture(f"#0405{number:02}") for number in range(10, 16)]
    loads = [asyncio.create_task(client.load([source(data)], "alice")) for data in many]
    await until_async(lambda: len(begun) == 2)
    await client.load([source(other)], "bob")
    assert [data == other for data in begun] == [False, False, True]
    ends.set()
    await asyncio.gather(*loads)


async def test_a_slow_download_is_not_taken_for_a_wait(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.site.pages = {"http://site/slow": Fetched(data := picture("maroon"), None)}
    await client.load([source(data)])
    monkeypatch.setattr(host.server, "_settings", replace(host.server._settings, wait_seconds=0.02))
    await client.load([source(url="http://site/slow")])


async def test_options_of_a_request_make_another_item(host: Host, client: MediaClient) -> None:
    data = picture("pink", (112, 112))
    plain, small, hinted = [
        (await client.load([MediaSource("image", "p", data=data, options=options)])).items[0]
        for options in ({}, {"max_pixels": 56 * 56}, {"detail": "low"})
    ]
    assert (len(plain.text), len(small.text)) == (4 * len(small.text), 4 * len("<|image_pad|>"))
    assert hinted == plain
    with pytest.raises(InvalidParameter, match="argument of this model's processor: patch_size"):
        await client.load([MediaSource("image", "p", data=data, options={"patch_size": 7})])


async def test_a_url_is_fetched_again_when_its_server_says_so(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.site.pages = {f"http://site/{age}": Fetched(picture("black"), age) for age in (None, 100.0, 0.0)}
    load, fetch, num_asked = host.server.load, host.site.fetch, 0

    async def noted(sources: Sequence[MediaSource], owner: str) -> LoadedMedia:
        nonlocal num_asked
        num_asked += 1
        return await load(sources, owner)

    async def fetch_for_all(url: str, max_bytes: int | None = None) -> Fetched:
        await until_async(lambda: num_asked % 6 == 0, seen=lambda: num_asked)  # all of them are there
        return await fetch(url, max_bytes)

    monkeypatch.setattr(host.server, "load", noted)
    monkeypatch.setattr(host.site, "fetch", fetch_for_all)
    for _ in range(2):
        await asyncio.gather(*(client.load([source(url=url)]) for url in 2 * list(host.site.pages)))
    assert sorted(host.site.fetched) == ["http://site/0.0", "http://site/0.0", "http://site/100.0", "http://site/None"]
    assert len(host.orders) == 1
    num_asked = -1
    with pytest.raises(InvalidParameter, match="404") as refused:
        await client.load([source(url="http://absent/")])
    assert refused.value.param == "messages[0].content[1]"


async def test_a_uuid_names_an_item_for_its_owner_only(host: Host, client: MediaClient) -> None:
    named = await client.load([source(picture("white"), uuid="logo")], "me")
    again = await client.load([source(uuid="logo")], "me")
    assert again.items == named.items
    for unknown in (client.load([source(uuid="logo")], "you"), client.load([source(uuid="lego")], "me")):
        with pytest.raises(InvalidParameter, match="no image with this uuid any more; send it again"):
            await unknown
    changed = await client.load([source(picture("gray"), uuid="logo")], "me")
    assert (await client.load([source(uuid="logo")], "me")).items == changed.items != named.items


async def test_each_page_of_a_document_is_an_item(host: Host, client: MediaClient) -> None:
    wide = (200.0, 20.0)
    three = MediaSource("image", "p", data=pdf("one", "two", "three", size=wide), is_document=True)
    image = MediaSource("image", "p", data=picture("red"), is_document=True)
    loaded = await client.load([image, three, source(picture("red"))])
    first, *pages, same = loaded.items
    assert loaded.num_items == (1, 3, 1)
    assert first == same
    assert [page.grids for page in pages] == [((1, 1, 12),)] * 3
    assert len({page.digest for page in pages}) == 3
    num_orders = len(host.orders)
    assert (await client.load([three, image])).items == (*pages, first)
    assert len(host.orders) == num_orders == 5
    for data, reason in (
        (pdf(*"abcd", size=wide), "more than 750000 pixels"),
        (pdf(*"a" * 101), "has 101 pages; at most 100"),
        (b"%PDF-1.7\n", "damaged, or needs a password"),
    ):
        with pytest.raises(InvalidParameter, match=reason):
            await client.load([MediaSource("image", "p", data=data, is_document=True)])


async def test_pages_are_several_images(tmp_path: Path) -> None:
    """LLaVA-OneVision cuts only a lone image into tiles."""
    (tmp_path / "model").mkdir()
    (tmp_path / "items").mkdir()
    folder = write_processor("llava_onevision", tmp_path / "model")
    server = MediaServer(MediaSettings(model=str(folder)), Store(str(tmp_path / "items"), 2**28), Site())

    async def texts(*sources: MediaSource) -> list[str]:
        loaded = await server.load(sources, "me")
        server.store.release(loaded.lease)
        return [item.text for item in loaded.items]

    def document(*pages: str) -> MediaSource:
        return MediaSource("image", "p", data=pdf(*pages), is_document=True)

    try:
        (alone,) = await texts(document("a"))
        pages = await texts(document("a", "b"))
        assert pages == (await texts(document("a"), document("b")))
        assert len({len(text) for text in pages}) == 1
        assert len(alone) > len(pages[0])
        server.store.check_integrity()
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (source(b"no picture"), "not a supported image"),
        (source(pdf("a")), "not a supported image"),
        (source(picture("red")[:60]), "damaged or incomplete"),
        (source(picture("red", (1000, 501))), r"1000 × 501 pixels; at most 500,000"),
        (source(picture("red", (3000, 10))), "processor does not accept a picture of 3000 × 10"),
        (source(os.urandom(2**20 + 1)), "more than 1048576 bytes"),
        (source(), "is empty"),
        (MediaSource("image", source().param, data=b"iVBORw*", is_base64=True), r"content\[1\]: .* invalid base64"),
    ],
)
async def test_a_bad_item_is_refused_with_its_place(client: MediaClient, bad: MediaSource, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as refused:
        await client.load([source(picture("red")), bad])
    assert refused.value.param == "messages[0].content[1]"


async def test_an_uploaded_file_is_read_for_its_owner(host: Host, client: MediaClient) -> None:
    uploads = Uploads(host.server._settings.upload_folder, 2**20)
    image = uploads.add("me", "a.png", "vision", picture("navy"))
    pages = uploads.add("me", "a.pdf", "user_data", pdf("one"))
    sources = [source(file_id=image.id), source(file_id=pages.id, is_document=True)]
    loaded = await client.load(sources, "me")
    assert loaded.num_items == (1, 1)
    assert loaded.items[0].digest == (await client.load([source(picture("navy"))])).items[0].digest
    for owner in ("you", ""):
        with pytest.raises(InvalidParameter, match=f"there is no file with the id '{image.id}'"):
            await client.load(sources[:1], owner)
    text = uploads.add("me", "a.txt", "user_data", "ü".encode() * 2000)
    loaded = await client.load([source(file_id=text.id, is_document=True), source(picture("red"))], "me")
    assert (loaded.num_items, loaded.texts) == ((0, 1), ("ü" * 2000, None))
    with pytest.raises(InvalidParameter, match="the uploaded file is a text; send it as a file"):
        await client.load([source(file_id=text.id)], "me")
    named = source(file_id=image.id, uuid="upload")
    assert (await client.load([named], "me")).items == (await client.load([source(uuid="upload")], "me")).items
    uploads.delete("me", image.id)
    with pytest.raises(InvalidParameter, match="there is no file"):
        await client.load(sources[:1], "me")


async def test_features_are_an_item(host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by their numbers, whatever file they are in; by their name; and only where the operator accepts them."""
    values, grid = np.arange(24, dtype=np.float32).reshape(6, 4), np.array([[1, 4, 6]])
    files = [npy(values) + npy(grid), safetensors(image_embeds=("F16", values), image_grid_thw=("I64", grid))]
    sources = [source(file, is_array=True, uuid="features") for file in files]
    first, second = (await client.load(sources)).items
    (third,) = (await client.load([source(is_array=True, uuid="features")])).items
    assert first.digest == second.digest == third.digest
    assert (first.kind, first.text, first.grids) == ("image", "<|image_pad|>" * 6, ((1, 2, 3),))
    np.testing.assert_array_equal(arrays(first)["image_embeds"], values)
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content\[1\]: this model needs image_grid_thw"):
        await client.load([source(npy(values), is_array=True)])
    monkeypatch.setattr(host.server, "_settings", replace(host.server._settings, embeds=False))
    with pytest.raises(InvalidParameter, match="--enable-mm-embeds"):
        await client.load(sources[:1])


async def test_a_request_has_a_budget_of_pixels(client: MediaClient) -> None:
    size = (800, 600)
    await client.load([source(picture("red", size))])
    with pytest.raises(InvalidParameter, match="of the request have more than 750000 pixels"):
        await client.load([source(picture(color, size)) for color in ("blue", "green")])


async def test_items_wait_for_the_space_that_they_need_and_others_go_on(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These have 8.4 MB."""
    monkeypatch.setattr(host.server.store, "capacity", 12 * 2**20)

    def large(color: str) -> MediaSource:
        return MediaSource("image", color, data=picture(color, (700, 504)), options={"max_pixels": 10**6})

    with pytest.raises(
        InvalidParameter, match=r"need 17 MiB when .*; --mm-processor-cache-gb allows 12 MiB"
    ) as refused:
        await client.load([large("tomato"), large("salmon")])
    assert refused.value.param in ("tomato", "salmon")
    first = await client.load([large("tomato")])
    host.orders.clear()
    second = asyncio.create_task(client.load([large("coral")]))
    await until_async(lambda: len(host.orders) == 1)
    await client.load([source(picture(color)) for color in ("plum", "peru")])
    assert not second.done()
    client.release(first.lease)
    await second
    assert host.server.store._reserved == 0


async def test_a_request_does_not_wait_for_the_space_of_its_own_known_item(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is found after the other one has begun to wait."""
    options, store, size = {"max_pixels": 10**6}, host.server.store, (700, 504)
    monkeypatch.setattr(store, "capacity", 12 * 2**20)
    leased = await client.load([source(picture("tan", size), options=options)])
    waits, reserve = threading.Event(), store.reserve

    async def reserve_and_tell(num_bytes: int) -> None:
        waits.set()
        await reserve(num_bytes)

    async def fetch_then(url: str, max_bytes: int | None = None) -> Fetched:
        await until_async(waits.is_set)
        return Fetched(picture("tan", size), None)

    monkeypatch.setattr(store, "reserve", reserve_and_tell)
    monkeypatch.setattr(host.site, "fetch", fetch_then)
    known = MediaSource("image", "known", url="https://a/tan", options=options)
    loading = client.load([source(picture("teal", size), options=options), known])
    with pytest.raises(InvalidParameter, match="need 17 MiB when they are processed"):
        await asyncio.wait_for(loading, 30)
    client.release(leased.lease)


async def test_requests_that_fill_the_space_together_do_not_wait_for_each_other(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has one item of 8.4 MB when its second one is fetched; there is space for two."""
    options, store = {"max_pixels": 10**6}, host.server.store
    monkeypatch.setattr(store, "capacity", 20 * 2**20)
    both_hold = threading.Event()

    async def fetch_then(url: str, max_bytes: int | None = None) -> Fetched:
        while not both_hold.is_set():
            if store._held_bytes > 16 * 10**6:
                both_hold.set()
            await asyncio.sleep(0.01)
        return Fetched(picture(url[-6:], (700, 504)), None)

    monkeypatch.setattr(host.site, "fetch", fetch_then)

    async def ask(first: str, second: str) -> None:
        loaded = await client.load(
            [
                source(picture(first, (700, 504)), options=options),
                source(url=f"https://a/{second}", options=options),
            ]
        )
        client.release(loaded.lease)

    await asyncio.wait_for(asyncio.gather(ask("linen", "orchid"), ask("azure", "maroon")), 30)
    assert both_hold.is_set()
    assert store._reserved == 0


@pytest.mark.parametrize("victim", ["fork", "helper"])
async def test_the_death_of_a_decoder_concerns_its_item_only(host: Host, victim: str) -> None:
    """A file may crash the fork; the helper may die of something else."""
    client, decoders = MediaClient(host.socket), host.server.decoders
    await client.format()
    helper = decoders._popen
    assert helper is not None
    if victim == "helper":
        os.kill(helper.pid, signal.SIGKILL)
        helper.wait()
        await client.load([source(picture("purple"))])
    else:
        children = Path(f"/proc/{helper.pid}/task/{helper.pid}/children")
        numbers = itertools.count()
        loads = list[asyncio.Task[LoadedMedia]]()

        async def are_killed(deaths: int) -> bool:
            loading = client.load([source(big(next(numbers)))])
            loads.append(asyncio.create_task(asyncio.wait_for(loading, 120)))
            killed = [await asyncio.to_thread(kill_busy, children, loads[-1]) for _ in range(deaths)]
            if not all(killed):  # it was done before they were found
                await asyncio.wait(loads)
            return all(killed)

        await until_async(lambda: are_killed(1), seen=lambda: loads)
        await loads[-1]  # it may not have been the file
        await until_async(lambda: are_killed(2), seen=lambda: loads)
        with pytest.raises(InvalidParameter, match="too much time or memory"):
            await loads[-1]
        await client.load([source(picture("orange"))])
    client.close()
    host.settle()


def big(number: int) -> bytes:
    """A picture that takes a while."""
    file = io.BytesIO()
    Image.effect_noise((700, 700 + number), 50).rotate(1).save(file, "PNG")
    return file.getvalue()


def kill_busy(children: Path, load: asyncio.Task[Any]) -> bool:
    """Kill a fork that is confined, as it is when it begins to decode; returns when it is gone, or the load is over."""
    while not load.done():
        for pid in children.read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text():
                    os.kill(int(pid), signal.SIGKILL)
                    until(lambda pid=pid: pid not in children.read_text().split(), seen=children.read_text)  # type: ignore[misc]
                    return True
    return False


async def test_leases_end_with_their_process_unless_another_adopts_them(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody was told of ends at once, also if the process fails before it tells anybody."""
    first, second, adopter = (MediaClient(host.socket) for _ in range(3))
    lost, waiting, kept = [await first.load([source(picture(color))]) for color in ("navy", "teal", "lime")]
    late = await second.load([source(picture("lime"))])
    for maker, handed_over in ((first, waiting), (first, kept), (second, late)):
        maker.hand_over(handed_over.lease)
    assert await adopter.adopt(kept.lease) == kept
    monkeypatch.setattr(media_server, "ORPHAN_SECONDS", 3600.0)
    first.close()
    await until_async(lambda: host.server.store.leased(lost.lease) is None)
    assert await adopter.adopt(waiting.lease) == waiting
    adopter.release(waiting.lease)
    monkeypatch.setattr(media_server, "ORPHAN_SECONDS", 0.1)
    second.close()
    await until_async(lambda: host.server.store.leased(late.lease) is None)
    assert host.server.store.leased(kept.lease) is not None
    with pytest.raises(MediaUnavailable, match="no longer there"):
        await adopter.adopt(late.lease)
    adopter.release(kept.lease)
    await until_async(lambda: host.server.store.leased(kept.lease) is None)
    adopter.close()
    host.settle()


async def test_work_that_nobody_waits_for_any_more_is_cancelled(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.site.pages = {"http://slow/": Fetched(picture("olive"), None)}
    fetch = host.site.fetch

    async def fetch_again_only(url: str, max_bytes: int | None = None) -> Fetched:
        if not host.site.fetched:
            host.site.fetched.append(url)
            await asyncio.Event().wait()
        return await fetch(url, max_bytes)

    monkeypatch.setattr(host.site, "fetch", fetch_again_only)
    waiting = [asyncio.create_task(client.load([source(url="http://slow/")])) for _ in range(2)]
    await until_async(lambda: bool(host.site.fetched))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await client.load([source(url="http://slow/")])
    assert (len(host.site.fetched), len(host.orders)) == (2, 1), "the first was not finished"


async def test_without_a_media_process_a_client_can_try_again(tmp_path: Path) -> None:
    with pytest.raises(MediaUnavailable, match="is not ready; try again"):
        await MediaClient(str(tmp_path / "absent"), patience=0.3).load([source(b"x")])


async def test_clients_are_not_told_why_the_processor_cannot_be_loaded(
    host: Host, client: MediaClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is a library's text, with paths of the server; the log has it."""

    async def ready() -> DecoderReady:
        raise ConfigError("can't load /srv/models/a")

    monkeypatch.setattr(host.server.decoders, "ready", ready)
    with pytest.raises(MediaUnavailable, match=r"^images and videos cannot be loaded at the moment$"):
        await client.format()
    with pytest.raises(MediaUnavailable, match=r"^images and videos cannot be loaded at the moment$"):
        await client.load([source(picture("tan")), source(picture("plum"))])
    assert "can't load /srv/models/a" in caplog.text


async def test_a_request_of_10_000_items_loads_none(host: Host, client: MediaClient) -> None:
    host.site.pages = {"http://many/": Fetched(picture("navy"), None)}
    before = len(host.site.fetched), len(host.orders)
    with pytest.raises(InvalidParameter, match="at most 256 images and videos"):
        await client.load([source(url="http://many/")] * 10_000)
    assert (len(host.site.fetched), len(host.orders)) == before
