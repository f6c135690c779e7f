"""Anthropic's official client with images, as Anthropic's guide to them shows it. See test_media_clients.py for the
variables of the environment.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import anthropic

URL, KEY, SITE = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_KEY", "QUIRE_SITE"))
FILES = [Path(os.environ["QUIRE_PICTURES"], name) for name in ("first.png", "second.jpg")]
PDF = FILES[0].with_name("pages.pdf")
QUESTION = {"type": "text", "text": "What is in this image?"}
ABOUT_ONE, ABOUT_TWO = json.loads(os.environ["QUIRE_ANSWERS"])
OPTIONS: Any = {"model": "tiny", "max_tokens": 16, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "screenshot", "description": "Take one.", "input_schema": {"type": "object", "properties": {}}}


def image(file: Path) -> dict[str, Any]:
    kind = {".png": "image/png", ".jpg": "image/jpeg"}[file.suffix]
    data = base64.standard_b64encode(file.read_bytes()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def by_url(file: Path) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": f"{SITE}/{file.name}"}}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def talks(client: anthropic.Anthropic) -> None:
    def messages(*images: dict[str, Any]) -> Any:
        return [{"role": "user", "content": [QUESTION, *images]}]

    for picture in (image(FILES[0]), by_url(FILES[0])):
        assert text_of(client.messages.create(messages=messages(picture), **OPTIONS)) == ABOUT_ONE
    both = messages(image(FILES[0]), by_url(FILES[1]))
    with client.messages.stream(messages=both, **OPTIONS) as stream:
        assert "".join(stream.text_stream) == ABOUT_TWO
        usage = stream.get_final_message().usage
    counted = client.messages.count_tokens(model="tiny", messages=both)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def shows_results_of_tools(client: anthropic.Anthropic) -> None:
    def ask(*content: dict[str, Any]) -> Any:
        turns: Any = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "screenshot", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": list(content)}]},
        ]
        message = client.messages.create(messages=turns, tools=[TOOL], **OPTIONS)
        usage = message.usage
        return message.content, usage.input_tokens + (usage.cache_read_input_tokens or 0)

    (blind, without), (first, tokens), (second, _) = (
        ask(QUESTION),
        ask(QUESTION, image(FILES[0])),
        ask(QUESTION, image(FILES[1])),
    )
    assert tokens - without == 6 + 2  # between marks
    assert blind != first != second
    assert ask(QUESTION, by_url(FILES[0]))[0] == first


def reads_documents(client: anthropic.Anthropic) -> None:
    def tokens(*content: dict[str, Any]) -> int:
        turns: Any = [{"role": "user", "content": [*content, QUESTION]}]
        return client.messages.count_tokens(model="tiny", messages=turns).input_tokens

    data = base64.standard_b64encode(PDF.read_bytes()).decode()
    encoded = {"type": "base64", "media_type": "application/pdf", "data": data}
    found = [
        tokens({"type": "document", "source": source, "title": "Pages", "cache_control": {"type": "ephemeral"}})
        for source in (encoded, {"type": "url", "url": f"{SITE}/pages.pdf"})
    ]
    text = {"type": "text", "media_type": "text/plain", "data": ""}
    assert set(found) == {tokens({"type": "document", "source": text, "title": "Pages"}) + 2 * (63 + 2) - 2}


def raises(client: anthropic.Anthropic) -> None:
    damaged = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"no picture").decode()}
    for source in ({"type": "file", "file_id": "file_1"}, damaged):
        try:
            content: Any = [{"type": "image", "source": source}]
            client.messages.create(messages=[{"role": "user", "content": content}], **OPTIONS)
        except anthropic.BadRequestError as error:
            assert "messages[0].content[0].source" in error.message
        else:
            raise AssertionError(f"{source} was accepted")


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        for part in (talks, shows_results_of_tools, reads_documents, raises):
            part(client)
    print("anthropic", anthropic.__version__)
