"""litellm with images, as its guide to them shows it, over three APIs. See test_media_clients.py for the variables
of the environment.
"""

from __future__ import annotations

import base64
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network at its import
import litellm

URL, KEY, SITE = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_KEY", "QUIRE_SITE"))
FILES = [Path(os.environ["QUIRE_PICTURES"], name) for name in ("first.png", "second.jpg")]
QUESTION = "What is in this image?"
ABOUT_ONE, ABOUT_TWO = json.loads(os.environ["QUIRE_ANSWERS"])
URLS = [
    f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    for kind, file in zip(("png", "jpeg"), FILES, strict=True)
]
ROOT = URL.removesuffix("/v1")
ROUTES = {"openai/tiny": URL, "hosted_vllm/tiny": URL, "anthropic/tiny": ROOT}


def asks(model: str, url: str) -> None:
    def ask(*urls: Any, **more: Any) -> Any:
        images = [{"type": "image_url", "image_url": each} for each in urls]
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, *images]}]
        options: Any = {"model": model, "api_base": url, "api_key": KEY, "temperature": 0, "max_tokens": 16, **more}
        return litellm.completion(messages=messages, **options)

    forms: list[Any] = [{"url": URLS[0]}, {"url": URLS[0], "format": "image/png"}, URLS[0]]
    if not model.startswith("anthropic/"):  # there, litellm fetches http: URLs itself, and only public ones
        forms += [{"url": f"{SITE}/first.png", "detail": "low"}, f"{SITE}/first.png"]
    for form in forms:
        assert ask(form).choices[0].message.content == ABOUT_ONE, (model, form)
    chunks = ask({"url": URLS[0]}, {"url": URLS[1]}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ABOUT_TWO, model


def responds() -> None:
    content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": URLS[0]}]
    given: Any = [{"role": "user", "content": content}]
    options: Any = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_output_tokens": 16}
    answer: Any = litellm.responses(model="openai/tiny", input=given, **options)
    assert answer.output[0].content[0].text == ABOUT_ONE


if __name__ == "__main__":
    for model, url in ROUTES.items():
        asks(model, url)
    responds()
    print("litellm", version("litellm"))
