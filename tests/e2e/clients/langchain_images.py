"""langchain-openai and langchain-anthropic with images, as LangChain's guide to messages shows it. See
test_media_clients.py for the variables of the environment.
"""

from __future__ import annotations

import base64
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

URL, KEY, SITE = (os.environ[name] for name in ("QUIRE_URL", "QUIRE_KEY", "QUIRE_SITE"))
FILES = [Path(os.environ["QUIRE_PICTURES"], name) for name in ("first.png", "second.jpg")]
QUESTION = {"type": "text", "text": "What is in this image?"}
ABOUT_ONE, ABOUT_TWO = json.loads(os.environ["QUIRE_ANSWERS"])
FIRST, SECOND = (base64.b64encode(file.read_bytes()).decode() for file in FILES)
PDF = base64.b64encode(FILES[0].with_name("pages.pdf").read_bytes()).decode()
OPTIONS: Any = {"model": "tiny", "api_key": KEY, "max_retries": 0}
BLOCKS: list[dict[str, Any]] = [
    {"type": "image", "base64": FIRST, "mime_type": "image/png"},
    {"type": "image", "url": f"{SITE}/first.png"},
    {"type": "image", "source_type": "base64", "data": FIRST, "mime_type": "image/png"},  # of langchain 0.3
    {"type": "image", "source_type": "url", "url": f"{SITE}/first.png"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{FIRST}"}},
]


def asks(llm: Any, *blocks: dict[str, Any]) -> None:
    for block in blocks:
        assert llm.invoke([HumanMessage([QUESTION, block])]).text == ABOUT_ONE, (llm, block)
    second = {"type": "image", "base64": SECOND, "mime_type": "image/jpeg"}
    pdf = {"type": "file", "base64": PDF, "mime_type": "application/pdf", "filename": "pages.pdf"}
    assert llm.invoke([HumanMessage([QUESTION, pdf])]).usage_metadata["input_tokens"] > 2 * 63, llm
    chunks = llm.stream([HumanMessage([QUESTION, blocks[0], second])])
    assert "".join(chunk.text for chunk in chunks) == ABOUT_TWO, llm


if __name__ == "__main__":
    asks(ChatOpenAI(base_url=URL, temperature=0, max_tokens=16, **OPTIONS), *BLOCKS)
    asks(ChatOpenAI(base_url=URL, temperature=0, max_tokens=16, use_responses_api=True, **OPTIONS), *BLOCKS)
    native = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FIRST}}
    claude: Any = ChatAnthropic
    asks(
        claude(
            base_url=URL.removesuffix("/v1"), max_tokens=16, model_kwargs={"extra_body": {"temperature": 0}}, **OPTIONS
        ),
        *BLOCKS,
        native,
    )
    print("langchain-openai", version("langchain-openai"), "langchain-anthropic", version("langchain-anthropic"))
