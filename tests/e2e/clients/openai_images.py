"""OpenAI's official client with images, as OpenAI's guide to them shows it. See test_media_clients.py for the variables
of the environment.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import openai

URL, KEY, SITE = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_KEY", "QUIRE_SITE"))
FILES = [Path(os.environ["QUIRE_PICTURES"], name) for name in ("first.png", "second.jpg")]
PDF = FILES[0].with_name("pages.pdf")
QUESTION = "What is in this image?"
ABOUT_ONE, ABOUT_TWO = json.loads(os.environ["QUIRE_ANSWERS"])
OPTIONS: Any = {"model": "tiny", "temperature": 0}


def data_url(file: Path) -> str:
    kind = {".png": "image/png", ".jpg": "image/jpeg"}[file.suffix]
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


URLS = [data_url(file) for file in FILES]
WEB = [f"{SITE}/{file.name}" for file in FILES]


def chats(client: openai.OpenAI) -> None:
    def ask(*urls: dict[str, Any], **more: Any) -> Any:
        content: list[Any] = [
            {"type": "text", "text": QUESTION},
            *({"type": "image_url", "image_url": url} for url in urls),
        ]
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(messages=messages, max_tokens=16, **OPTIONS, **more)

    for url in ({"url": URLS[0]}, {"url": URLS[0], "detail": "high"}, {"url": WEB[0], "detail": "low"}):
        answer = ask(url)
        assert answer.choices[0].message.content == ABOUT_ONE, url
    assert answer.usage.prompt_tokens_details.image_tokens == 6
    assert ask({"url": URLS[0]}, {"url": WEB[1]}).choices[0].message.content == ABOUT_TWO
    chunks = list(ask({"url": WEB[0]}, {"url": URLS[1]}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ABOUT_TWO


def responds(client: openai.OpenAI) -> None:
    def content(*images: dict[str, Any]) -> Any:
        parts = [{"type": "input_text", "text": QUESTION}, *({"type": "input_image", **image} for image in images)]
        return [{"role": "user", "content": parts}]

    def ask(*images: dict[str, Any]) -> Any:
        return client.responses.create(input=content(*images), max_output_tokens=16, **OPTIONS)

    for image in ({"image_url": URLS[0]}, {"image_url": WEB[0], "detail": "high"}):
        answer = ask(image)
        assert answer.output_text == ABOUT_ONE, image
    assert answer.usage.input_tokens_details.image_tokens == 6
    given = content({"image_url": URLS[0]}, {"image_url": URLS[1]})
    with client.responses.stream(input=given, max_output_tokens=16, **OPTIONS) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == ABOUT_TWO
    counted = client.responses.input_tokens.count(model="tiny", input=given)
    assert counted.input_tokens > answer.usage.input_tokens
    try:
        ask({"file_id": "file-1"})
    except openai.BadRequestError as error:
        assert error.param == "input[0].content[1].file_id"
    else:
        raise AssertionError("file_id was accepted")


def reads_files(client: openai.OpenAI) -> None:
    """A document of two pages has twice the tokens of one image as large as the model takes them."""
    pdf = f"data:application/pdf;base64,{base64.b64encode(PDF.read_bytes()).decode()}"
    texts = "data:text/plain;base64," + base64.b64encode(b"hello").decode()
    for file, tokens in (
        ({"filename": "pages.pdf", "file_data": pdf}, 2 * 63),
        ({"file_url": f"{SITE}/pages.pdf"}, 2 * 63),
        ({"filename": "first.png", "file_data": URLS[0]}, 6),
        ({"filename": "a.txt", "file_data": texts}, None),
    ):
        content: Any = [{"type": "input_file", **file}, {"type": "input_text", "text": QUESTION}]
        answer = client.responses.create(input=[{"role": "user", "content": content}], max_output_tokens=16, **OPTIONS)
        assert answer.usage is not None
        assert getattr(answer.usage.input_tokens_details, "image_tokens", None) == tokens, file
    parts: Any = [{"type": "file", "file": {"filename": "pages.pdf", "file_data": pdf}}, {"type": "text", "text": "Hi"}]
    chat = client.chat.completions.create(messages=[{"role": "user", "content": parts}], max_tokens=16, **OPTIONS)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.image_tokens == 2 * 63


if __name__ == "__main__":
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        chats(client)
        responds(client)
        reads_files(client)
    print("openai", openai.__version__)
