"""Images through clients that people use, each in an environment of its own, against one live server of a tiny model:
every documented form of an image gets transformers' answer.

Their programs are in tests/e2e/clients. Environments are kept in ~/.cache/quire/clients, one for each requirement.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from quire.server.text.tokenizer import Tokenizer
from tests.e2e.environments import environment, made_once, run
from tests.e2e.serving import serve
from tests.fakes.pdfs import pdf
from tests.fakes.vision import QWEN_TEMPLATE, answer, write_qwen2_vl

SCRIPTS = Path(__file__).parent / "clients"
KEYS = ("alice", "bob")
QUESTION = {"type": "text", "text": "What is in this image?"}
COUNT = 16
"""Tokens of answers."""
CLIENTS = {
    "openai_images.py": (),  # in the tests' environment
    "anthropic_images.py": (),
    "litellm_images.py": ("litellm>=1.100,<2",),
    "langchain_images.py": ("langchain-openai>=1,<2", "langchain-anthropic>=1,<2"),
}
NODE_PACKAGES = (
    *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Site(SimpleHTTPRequestHandler):
    """A folder's files."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The environment of clients: the server, its first key, a folder with two pictures and a PDF of two pages, which
    is also a site, and transformers' answers about the first picture, and about both.
    """
    folder = write_qwen2_vl(tmp_path_factory.mktemp("vision"))
    pictures = tmp_path_factory.mktemp("pictures")
    paths = [pictures / "first.png", pictures / "second.jpg"]
    for path, size in zip(paths, [(90, 60), (120, 120)], strict=True):
        noise = np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    (pictures / "pages.pdf").write_bytes(pdf("one", "two"))
    images = [Image.open(path).convert("RGB") for path in paths]
    answers = []
    for shown in (images[:1], images):
        content: list[dict[str, Any]] = [QUESTION, *({"type": "image"} for _ in shown)]
        made = answer(folder, [{"role": "user", "content": content}], shown, COUNT)
        answers.append(Tokenizer.load(folder).decode(made, skip_special_tokens=True))
    assert len(set(answers)) == 2
    template = folder / "with_tools.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}\n{% endif %}" + QWEN_TEMPLATE)
    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(pictures)))
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        options = ("--chat-template", str(template), "--tool-call-parser", "hermes")
        with serve(
            *(str(folder), "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32"),
            *("--api-key", *KEYS, "--allowed-media-networks", "127.0.0.0/8", *options),
        ) as server:
            yield {
                "QUIRE_URL": f"{server.url}/v1",
                "QUIRE_KEY": KEYS[0],
                "QUIRE_SITE": f"http://127.0.0.1:{site.server_port}",
                "QUIRE_PICTURES": str(pictures),
                "QUIRE_ANSWERS": json.dumps(answers),
            }
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


@pytest.mark.parametrize(("script", "requirements"), CLIENTS.items(), ids=list(CLIENTS))
def test_python_clients(
    variables: dict[str, Any], script: str, requirements: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    python = environment(capfd, *requirements) if requirements else Path(sys.executable)
    print(run([str(python), "-P", "-W", "ignore", str(SCRIPTS / script)], f"{script} failed", **variables))


def test_the_ai_sdk_of_vercel(variables: dict[str, Any]) -> None:
    def install(folder: Path) -> None:
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *NODE_PACKAGES]
        run(command, "the AI SDK cannot be installed; this test needs npm and its registry")

    folder = made_once("vercel-ai", *NODE_PACKAGES, make=install)
    print(run(["node", str(SCRIPTS / "vercel_images.mjs")], "vercel_images.mjs failed", cwd=folder, **variables))


def test_a_uuid_names_an_image_for_its_key_only(variables: dict[str, Any]) -> None:
    named = {"type": "image_url", "image_url": {"url": f"{variables['QUIRE_SITE']}/first.png"}, "uuid": "logo"}
    alone = {"type": "image_url", "image_url": None, "uuid": "logo"}

    def ask(key: str, part: dict[str, Any]) -> Any:
        body = {"messages": [{"role": "user", "content": [QUESTION, part]}], "temperature": 0, "max_tokens": COUNT}
        url, headers = f"{variables['QUIRE_URL']}/chat/completions", {"Authorization": f"Bearer {key}"}
        return httpx.post(url, json=body, headers=headers, timeout=60).json()

    def refusal(key: str, part: dict[str, Any]) -> Any:
        error = ask(key, part)["error"]
        assert "there is no image with this uuid" in error["message"]
        return error["param"]

    alice, bob = KEYS
    assert refusal(alice, alone) == "messages[0].content[1].image_url"
    about_one = json.loads(variables["QUIRE_ANSWERS"])[0]
    for part in (named, alone):
        assert ask(alice, part)["choices"][0]["message"]["content"] == about_one
    assert refusal(bob, alone) == "messages[0].content[1].image_url"
