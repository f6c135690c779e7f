"""Images and videos in requests over HTTP: their shapes, what is refused, and how long their data is kept."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from quire.engine.config.engine_config import EngineConfig, MediaConfig
from quire.engine.protocol.engine_core import EngineCoreRequest
from quire.server.client.engine_client import EngineClient
from quire.server.http import large_bodies
from quire.server.http.large_bodies import LARGE_BODY, LargeBodies
from quire.server.media.types import MediaFormat, MediaSource
from quire.server.serving import frontend
from quire.server.text import input_processor
from quire.server.text.tokenizer import Tokenizer
from tests.fakes import fake_core
from tests.fakes.api_server import Server, run_server
from tests.fakes.configs import TINY, engine_config
from tests.fakes.media import FakeLoader, Made, media_spec
from tests.fakes.tokenizers import CHATML, byte_level, write_model
from tests.fakes.waiting import until_async

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
TEMPLATE = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text or '<|' + part.type + '_pad|>' }}{% endfor %}{% endif %}",
)
PNG = f"data:image/png;base64,{base64.b64encode(b'png').decode()}"
PDF = f"data:application/pdf;base64,{base64.b64encode(b'%PDF-').decode()}"
LARGE = f"data:image/png;base64,{base64.b64encode(bytes(LARGE_BODY)).decode()}"


def user(*content: Any) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [{"role": "user", "content": texts}]


def file(**fields: str) -> dict[str, Any]:
    return {"type": "file", "file": fields}


def image(url: str = PNG, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def embeds(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": content, **more}


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """A model that takes images and videos, three tokens each."""
    folder, backend = write_model(tmp_path), byte_level()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (IMAGE, VIDEO)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "processor_config.json").touch()
    spec = media_spec(backend.token_to_id(IMAGE), backend.token_to_id(VIDEO))
    config = engine_config(
        max_model_len=fake_core.MAX_MODEL_LEN,
        path=folder,
        tokenizer=folder,
        architecture=replace(TINY, vocab_size=330, media=spec),
        eos=(fake_core.EOS,),
    )
    limits = MediaConfig(
        max_items={"image": 3, "video": 1}, max_encoder_features=64, encoder_cache_features=64, max_item_features=64
    )
    return replace(config, media=limits)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    """The only one, of all processes: their leases are the media process's."""
    made = FakeLoader(MediaFormat(IMAGE, VIDEO), lambda source: ((IMAGE, VIDEO)[source.kind == "video"] * 3, ()))
    monkeypatch.setattr(input_processor, "MediaClient", lambda path: made)
    monkeypatch.setattr(frontend, "MediaService", lambda manager, settings: SimpleNamespace(path="fake"))
    return made


@pytest.fixture
async def server(config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader) -> AsyncIterator[Server]:
    async with run_server(config) as running:
        yield running


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[EngineCoreRequest]:
    """What the engine gets."""
    found: list[EngineCoreRequest] = []
    send = EngineClient._send

    def note(client: EngineClient, message: Any, replica: int) -> None:
        found.extend([message] if isinstance(message, EngineCoreRequest) else [])
        send(client, message, replica)

    monkeypatch.setattr(EngineClient, "_send", note)
    return found


async def answer(server: Server, messages: list[dict[str, Any]], route: str = CHAT, **body: Any) -> dict[str, Any]:
    response = await server.http.post(route, json={"messages": messages, "max_tokens": 4} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def until_released(loader: FakeLoader) -> None:
    """Return when no data is kept."""
    await until_async(lambda: not loader.leases, seen=lambda: loader.leases)


@pytest.mark.parametrize(
    ("part", "url", "data", "uuid", "options"),
    [
        (image(), "", b"png", "", {}),
        (image("https://a/b.png", uuid="mine"), "https://a/b.png", b"", "mine", {}),
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, "", b"png", "", {"detail": "low"}),
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}}, "", b"png", "", {}),
        ({"type": "image_url", "image_url": PNG}, "", b"png", "", {}),
        ({"type": "image_url", "image_url": None, "uuid": "mine"}, "", b"", "mine", {}),
        ({"type": "input_image", "image_url": PNG, "detail": "high"}, "", b"png", "", {"detail": "high"}),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, "https://a/b.mp4", b"", "", {}),
        (embeds("YWI=", uuid="mine"), "", b"ab", "mine", None),
        (embeds({"image_embeds": "YWI=", "image_grid_thw": "Yw=="}), "", b"abc", "", None),
        (embeds(None, uuid="mine"), "", b"", "mine", None),
    ],
)
async def test_shapes(
    server: Server,
    loader: FakeLoader,
    sent: list[EngineCoreRequest],
    part: dict[str, Any],
    url: str,
    data: bytes,
    uuid: str,
    options: dict[str, Any] | None,
) -> None:
    """`options` are None for features. Another server's tokens are not used: they may have no place for them."""
    more: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 9}, "kv_transfer_params": {"prompt_token_ids": [3]}}
    found = await answer(server, user("see ", part, " this"), **more)
    (source,) = loader.loaded
    assert (source.url, source.data, source.uuid) == (url, data, uuid)
    assert source.options == ({} if options is None else {"max_pixels": 9, **options})
    assert source.is_array == (options is None)
    assert source.param.startswith("messages[0].content[1]")
    (item,) = sent[0].media
    assert (item.kind, item.length) == (source.kind, 3)
    details = found["usage"]["prompt_tokens_details"]
    assert {name: count for name, count in details.items() if name != "cached_tokens"} == {f"{source.kind}_tokens": 3}
    await until_released(loader)


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    [
        (user({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].type", "'input_audio' is not"),
        (user(file()), "messages[0].content[0].file.file_data", "file_data, file_url or file_id is missing"),
        (user(file(file_id="1", file_data=PNG)), "messages[0].content[0].file.file_data", "exclude each"),
        (user(file(file_id="")), "messages[0].content[0].file.file_id", "is empty"),
        (user(file(file_data=PNG, file_url="https://a/b")), "messages[0].content[0].file.file_data", "exclude each"),
        (user(file(file_data="AAAA", filename="a.zip")), "messages[0].content[0].file.file_data", "'application/zip'"),
        (user(file(file_data="AAAA")), "messages[0].content[0].file.file_data", "type 'unknown'"),
        (user(file(file_data="data:text/csv,%ff")), "messages[0].content[0].file.file_data", "is not UTF-8"),
        (
            user(image(), image(), file(file_data=PDF)),
            "messages[0].content[2].file.file_data",
            "each page of a document",
        ),
        (user(embeds("a*")), "messages[0].content[0].image_embeds", "image_embeds: invalid base64"),
        (user(embeds("")), "messages[0].content[0].image_embeds", "image_embeds is missing"),
        (user(embeds({"image_grid_thw": "YQ=="}, uuid="a")), "messages[0].content[0].image_embeds", "is missing"),
        (
            user(embeds({"image_embeds": "YQ==", "x": ""})),
            "messages[0].content[0].image_embeds",
            "'x' is not supported",
        ),
        (user(image("ftp://a/b")), "messages[0].content[0].image_url", "scheme http"),
        (user(image("data:image/png;base64,a*")), "messages[0].content[0].image_url", "invalid base64"),
        (user({"type": "image_url"}), "messages[0].content[0].image_url", "a URL is missing"),
        (user({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url", "Field required"),
        (user(image(), image(), image(), image()), "messages[0].content[3].image_url", "at most 3 images"),
        (user(image("https://missing")), "messages[0].content[0].image_url", "cannot be fetched"),
    ],
)
async def test_refused_parts(server: Server, messages: list[dict[str, Any]], param: str, text: str) -> None:
    response = await server.http.post(CHAT, json={"messages": messages})
    error = response.json()["error"]
    assert response.status_code == 400
    assert text in error["message"]
    assert error["param"].startswith(param)


async def test_a_model_without_images(config: EngineConfig, core_mode: Callable[[str], None]) -> None:
    async with run_server(replace(config, media=None)) as server:
        response = await server.http.post(CHAT, json={"messages": user("a", image())})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith("messages[0].content[1].image_url: this server takes only text: ")
        assert "--language-model-only" in error["message"]


async def test_the_media_process_is_down(server: Server) -> None:
    response = await server.http.post(CHAT, json={"messages": user(image("https://down"))})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "media_unavailable")
    assert response.headers["retry-after"]


async def test_loading_ends_at_the_deadline(
    config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader
) -> None:
    async with run_server(config, request_timeout=0.1) as server:
        response = await server.http.post(CHAT, json={"messages": user(image("https://slow"))})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")


async def test_large_bodies_are_loaded_by_their_process(
    config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader, sent: list[EngineCoreRequest]
) -> None:
    """The API process adopts the data. The items are the key's."""
    async with run_server(config, api_key="secret") as server:
        server.http.headers["Authorization"] = "Bearer secret"
        response = await post(server, CHAT, escaped({"messages": user(image(LARGE)), "max_tokens": 4}))
        assert response.status_code == 200
        await answer(server, user(image()))
        assert loader.handed_over == loader.adopted == ["lease 1"]
        assert loader.owners == [f"sha256:{hashlib.sha256(b'secret').hexdigest()}"] * 2
        assert [len(each.media) for each in sent] == [1, 1]
        await until_released(loader)


async def test_texts_do_not_wait_behind_bodies_that_wait_for_files(
    config: EngineConfig, core_mode: Callable[[str], None], loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "_WAITING_BODIES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # two slots
    come, held, make = threading.Event(), list[MediaSource](), loader._make

    def wait(source: MediaSource) -> Made:
        held.append(source)
        assert come.wait(30)
        return make(source)

    monkeypatch.setattr(loader, "_make", wait)
    async with run_server(config) as server, asyncio.timeout(20):
        body = escaped({"messages": user(image(LARGE)), "max_tokens": 4})
        waiting = [asyncio.create_task(post(server, CHAT, body)) for _ in range(2)]
        while len(held) < 2:
            await asyncio.sleep(0.01)
        text = await post(server, CHAT, encoded({"messages": user("a" * LARGE_BODY)}))
        come.set()
        assert text.json()["error"]["code"] == "context_length_exceeded"
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [200, 200]


def escaped(body: Any) -> bytes:
    """As JSON, with slashes as PHP writes them."""
    return json.dumps(body).replace("/", "\\/").encode()


async def post(server: Server, route: str, body: bytes) -> httpx.Response:
    return await server.http.post(route, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("route", [CHAT, "/tokenize", "/v1/messages", COMPLETIONS])
async def test_a_body_that_only_its_images_make_large_is_parsed_without_them(
    server: Server, loader: FakeLoader, elsewhere: list[int], route: str
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": LARGE.partition(",")[2]}
    part, small = image(LARGE), image("https://a/b.png")
    if route == "/v1/messages":
        part, small = ({"type": "image", "source": each} for each in (source, {"type": "url", "url": "http://a"}))
    body: dict[str, Any] = {"model": "echo", "messages": user("see ", part, small, part), "max_tokens": 4}
    if route == COMPLETIONS:
        body = {"prompt": IMAGE * 3, "multi_modal_data": {"image": [LARGE, "https://a/b.png", LARGE]}, "max_tokens": 4}
    assert (await post(server, route, json.dumps(body).encode())).status_code == 200
    assert not elsewhere
    assert [(base64.b64decode(each.data), each.is_base64) for each in loader.loaded] == [
        (bytes(LARGE_BODY), True),
        (b"", False),
        (bytes(LARGE_BODY), True),
    ]
    assert server.state.bodies.num_bytes == 0
    await until_released(loader)


async def test_responses_with_large_images(
    server: Server, loader: FakeLoader, elsewhere: list[int], sent: list[EngineCoreRequest]
) -> None:
    """They are stored whole."""
    body: dict[str, Any] = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": LARGE}]}]}
    first = (await server.http.post("/v1/responses", json=body | {"max_output_tokens": 4})).json()
    assert not elsewhere
    items = (await server.http.get(f"/v1/responses/{first['id']}/input_items")).json()
    assert items["data"][0]["content"][0]["image_url"] == LARGE
    again = await server.http.post("/v1/responses", json=body | {"previous_response_id": first["id"]})
    assert again.status_code == 200, again.text
    assert elsewhere
    assert [[item.kind for item in each.media] for each in sent] == [["image"], ["image", "image"]]
    assert [source.data for source in loader.loaded if not source.is_base64] == [bytes(LARGE_BODY)] * 2
    assert server.state.bodies.num_bytes == 0
    await until_released(loader)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": user(image(LARGE)), "tools": [{"type": "function", "function": {"name": "f", "url": LARGE}}]},
        {"messages": user(image(LARGE)), "chat_template_kwargs": {"url": LARGE}},
        {"messages": user({"type": "text", "text": "hi", "url": LARGE})},
        {"messages": user(image(LARGE)), "response_format": {"type": "json_schema", "url": LARGE}},
        {"messages": user({"type": "image_url", "image_url": LARGE.replace(";base64", "")})},
        {"messages": user(image(LARGE)), "temperature": "hot"},
    ],
)
async def test_what_is_no_image_is_not_taken_for_one(
    server: Server, loader: FakeLoader, elsewhere: list[int], sent: list[EngineCoreRequest], body: dict[str, Any]
) -> None:
    found = [await post(server, CHAT, each({"max_tokens": 4, **body})) for each in (encoded, escaped)]
    assert len(elsewhere) == 2
    assert found[0].status_code == found[1].status_code
    if found[0].status_code != 200:
        assert found[0].json() == found[1].json()
    assert len({tuple(each.prompt_token_ids) for each in sent}) <= 1
    assert server.state.bodies.num_bytes == 0
    await until_released(loader)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that are processed in another process."""
    sizes: list[int] = []
    process = LargeBodies.process

    async def counted(self: LargeBodies, process_large: Any, body: memoryview, *stored: Any) -> Any:
        sizes.append(len(body))
        return await process(self, process_large, body, *stored)

    monkeypatch.setattr(LargeBodies, "process", counted)
    return sizes


async def test_data_is_kept_for_all_sequences(
    server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]
) -> None:
    body = {"messages": user(image()), "n": 2, "stream": True, "ignore_eos": True, "max_tokens": 60}
    async with server.http.stream("POST", CHAT, json=body) as response:
        async for _ in response.aiter_lines():
            assert loader.leases
            break
    await until_released(loader)  # the client has left
    assert [len(each.media) for each in sent] == [1, 1]


async def test_other_hosts_get_the_data_itself(
    server: Server, loader: FakeLoader, sent: list[EngineCoreRequest], tmp_path: Path
) -> None:
    loader.folder = tmp_path
    await answer(server, user(image()))
    server.frontend.client._has_hosts = True
    await answer(server, user(image()))
    here, there = (each.media[0] for each in sent)
    assert here.data is not None
    assert there.data is not None
    assert (Path(here.data.path).parent, here.data.content) == (tmp_path, b"")
    assert (there.data.path, there.data.content) == ("", there.digest)


async def test_beam_search(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]) -> None:
    await answer(server, user(image()), use_beam_search=True, n=2, max_tokens=3)
    assert len(sent) > 2
    assert {item.digest for each in sent for item in each.media} == {sent[0].media[0].digest}
    assert all(each.media for each in sent)
    await until_released(loader)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_completions(
    server: Server, loader: FakeLoader, sent: list[EngineCoreRequest], config: EngineConfig, as_ids: bool
) -> None:
    text = f"see {IMAGE}{VIDEO} and {IMAGE}"
    body = {
        "prompt": Tokenizer.load(config.model.tokenizer).encode(text, add_special_tokens=False) if as_ids else text,
        "multi_modal_data": {"image": [PNG, None], "video": "https://a/b.mp4"},
        "multi_modal_uuids": {"image": [None, "mine"]},
        "mm_processor_kwargs": {"max_pixels": 9},
        "echo": True,
        "logprobs": 0,
        "max_tokens": 1,
    }
    response = await server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    assert [(each.kind, each.data, each.url, each.uuid, each.options) for each in loader.loaded] == [
        ("image", b"png", "", "", {"max_pixels": 9}),
        ("image", b"", "", "mine", {"max_pixels": 9}),
        ("video", b"", "https://a/b.mp4", "", {"max_pixels": 9}),
    ]
    assert [item.kind for item in sent[0].media] == ["image", "video", "image"]
    found = response.json()
    details = found["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["video_tokens"]) == (6, 3)
    (choice,) = found["choices"]
    assert choice["text"].startswith(f"see {IMAGE * 3}{VIDEO * 3} and {IMAGE * 3}")  # as the tokens are
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["total_tokens"]
    await until_released(loader)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": ["a", IMAGE]}, "prompt", "need a single prompt"),
        ({"prompt": IMAGE * 2}, "prompt", f"it must have '{IMAGE}' or '{VIDEO}' once for each item"),
        ({"multi_modal_data": {"audio": PNG}}, "multi_modal_data.audio", "is not a parameter"),
        ({"multi_modal_data": {"image": "/etc/passwd"}}, "multi_modal_data.image[0]", "expected a URL of the scheme"),
        ({"multi_modal_data": {"image": [None]}}, "multi_modal_data.image[0]", "a URL is missing"),
        (
            {"multi_modal_uuids": {"image": ["a", "b"]}},
            "multi_modal_uuids.image",
            "2 for 1 items of multi_modal",
        ),
        ({"prompt": IMAGE * 4, "multi_modal_data": {"image": [PNG] * 4}}, "multi_modal_data.image[3]", "at most 3"),
    ],
)
async def test_refused_completions(server: Server, fields: dict[str, Any], param: str, text: str) -> None:
    body = {"prompt": IMAGE, "multi_modal_data": {"image": PNG}} | fields
    error = (await server.http.post(COMPLETIONS, json=body)).json()["error"]
    assert error["param"] == param
    assert text in error["message"]


async def test_tokenize_counts_items(server: Server, loader: FakeLoader) -> None:
    counts = [(await answer(server, messages, "/tokenize"))["count"] for messages in (user("a"), user("a", image()))]
    assert counts[1] == counts[0] + 3
    await until_released(loader)


async def test_responses(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]) -> None:
    """Images of earlier responses stay in the conversation; with the turns that are left out, their images are."""
    picture: dict[str, Any] = {"type": "input_image", "image_url": PNG, "detail": "low"}
    said = {"type": "input_text", "text": "hi"}
    call: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "output": [said, picture]}
    given = [{"role": "user", "content": [said, picture, said]}, call, result]
    body: dict[str, Any] = {"input": given, "max_output_tokens": 4}
    first = (await server.http.post("/v1/responses", json=body)).json()
    assert first["usage"]["input_tokens_details"]["image_tokens"] == 6
    assert [source.param for source in loader.loaded] == [
        *("input[0].content[1].image_url", "input[2].output[1].image_url")
    ]
    again = {"input": [{"role": "user", "content": [picture]}], "previous_response_id": first["id"]}
    await server.http.post("/v1/responses", json=again)
    assert [len(each.media) for each in sent] == [2, 3]
    long = {"type": "input_text", "text": "hello" * 30}
    turns = [{"role": "user", "content": parts} for parts in ([long, picture], [long, picture, picture])]
    await server.http.post("/v1/responses", json={"input": turns, "truncation": "auto"})
    assert [len(each.media) for each in sent] == [2, 3, 2]
    counted = await server.http.post("/v1/responses/input_tokens", json={"input": given})
    assert counted.json()["input_tokens"] == first["usage"]["input_tokens"]
    await until_released(loader)


async def test_files(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]) -> None:
    """Documents are between tags; each page is an image, wherever the conversation goes on."""
    text, picture = {"file_data": "aGk=", "filename": "a.md"}, {"file_data": PNG.partition(",")[2], "filename": "b.png"}
    pdf, web = {"file_data": PDF, "filename": "c<.pdf"}, {"file_url": "https://a/d"}
    await answer(server, user(file(**text), file(**picture), file(**web), "then"))
    await answer(server, [*user(file(**pdf)), *user("and", image())])
    given = [{"type": "input_file", **each} for each in (text, web)]
    response = await server.http.post("/v1/responses", json={"input": [{"role": "user", "content": given}]})
    assert response.status_code == 200, response.text
    sources = (
        {"type": "base64", "media_type": "application/pdf", "data": PDF.partition(",")[2]},
        {"type": "url", "url": "https://a/d"},
    )
    blocks = [{"type": "document", "source": each, "title": "e", "context": "f"} for each in sources]
    for content in (blocks[:1], [{"type": "tool_result", "tool_use_id": "1", "content": blocks[1:]}]):
        body = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        assert (await server.http.post("/v1/messages", json=body)).status_code == 200
    found = [(each.is_document, each.url, each.data, each.param) for each in loader.loaded]
    assert found == [
        (False, "", b"png", "messages[0].content[1].file.file_data"),
        (True, "https://a/d", b"", "messages[0].content[2].file.file_url"),
        (True, "", b"%PDF-", "messages[0].content[0].file.file_data"),
        (False, "", b"png", "messages[1].content[1].image_url"),
        (True, "https://a/d", b"", "input[0].content[1].file_url"),
        (True, "", b"%PDF-", "messages[0].content[0].source.data"),
        (True, "https://a/d", b"", "messages[0].content[0].content[0].source.url"),
    ]
    assert [len(each.media) for each in sent] == [3, 3, 2, 2, 2]
    prompts = [server.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in sent]
    one, two, told = IMAGE * 3, IMAGE * 6, '<document title="a.md">\nhi\n</document>'
    assert f"{told}{one}<document>{two}</document>then" in prompts[0]
    assert f'<document title="c&lt;.pdf">{two}</document>' in prompts[1]
    assert f"and{one}" in prompts[1]
    assert f"{told}\n<document>{two}</document>" in prompts[2]
    assert all(f'<document title="e" context="f">{two}</document>' in prompt for prompt in prompts[3:])
    await until_released(loader)


async def test_an_uploaded_text_is_shown_as_one_in_the_request(server: Server, sent: list[EngineCoreRequest]) -> None:
    for beside in ([], [image()]):
        for given in ({"file_data": "aGk="}, {"file_id": "text"}):
            await answer(server, user("see", file(**given, filename="a.md"), "then", *beside))
        inline, uploaded = sent[-2:]
        assert uploaded.prompt_token_ids == inline.prompt_token_ids
        assert len(uploaded.media) == len(inline.media) == len(beside)


async def test_messages(server: Server, loader: FakeLoader, sent: list[EngineCoreRequest]) -> None:
    source: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}
    url = {"type": "image", "source": {"type": "url", "url": "https://a/b"}}
    use: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [url], "is_error": True}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "echo", "max_tokens": 4, "messages": messages}
    await server.http.post("/v1/messages", json=body)
    assert [(each.data, each.url, each.param) for each in loader.loaded] == [
        (b"png", "", "messages[0].content[0].source.data"),
        (b"", "https://a/b", "messages[2].content[0].content[0].source.url"),
    ]
    assert len(sent[0].media) == 2
    prompt = server.tokenizer.decode(sent[0].prompt_token_ids, skip_special_tokens=False)
    assert f"{IMAGE * 3}hi" in prompt
    assert f"Error: {IMAGE * 3}" in prompt
    counted = await server.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["input_tokens"] == len(sent[0].prompt_token_ids)
    source = {"type": "file", "file_id": "1"}
    body["messages"] = [
        {"role": "user", "content": [{"type": kind, "source": source} for kind in ("image", "document")]}
    ]
    await server.http.post("/v1/messages/count_tokens", json=body)
    assert [(each.file_id, each.is_document) for each in loader.loaded[-2:]] == [("1", False), ("1", True)]
    await until_released(loader)
