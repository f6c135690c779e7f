"""Pictures through each API, in small bodies and in large ones, which other processes read, and in the Python API:
transformers' answer.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.server.http.large_bodies import LARGE_BODY
from quire.server.text.tokenizer import Tokenizer
from tests.e2e.serving import Server, serve
from tests.fakes.vision import answer, image_features, write_qwen2_vl

pytestmark = pytest.mark.slow
COUNT = 16
"""Tokens of answers."""
TEXTS = ["hello world, ", " what is this?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_vl(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = str(tmp_path_factory.mktemp("files"))
    with serve(str(folder), "--device", "cpu", "--dtype", "float32", "--file-storage-path", files) as server:
        yield server


def noise(width: int, height: int) -> tuple[Image.Image, str]:
    """A picture, and its file in base64."""
    image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
    image.save(file := io.BytesIO(), "PNG")
    return image, base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("size", [(90, 60), (300, 200)], ids=["small", "large"])
def test_answers_of_all_apis(server: Server, folder: Path, size: tuple[int, int]) -> None:
    image, data = noise(*size)
    assert (len(data) > LARGE_BODY) == (size == (300, 200))
    first, last = TEXTS

    def content(kind: str, picture: dict[str, Any]) -> Any:
        return [{"role": "user", "content": [{"type": kind, "text": first}, picture, {"type": kind, "text": last}]}]

    expected = answer(folder, content("text", {"type": "image"}), [image], COUNT)
    text = Tokenizer.load(folder).decode(expected, skip_special_tokens=True)
    url = f"data:image/png;base64,{data}"
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def post(route: str, **body: Any) -> Any:
            response = http.post(route, json={"model": str(folder), "temperature": 0, **body})
            assert response.status_code == 200, response.text
            return response.json()

        messages = content("text", {"type": "image_url", "image_url": {"url": url}})
        for _ in range(2):
            chat = post("/v1/chat/completions", messages=messages, max_tokens=COUNT)
            assert chat["choices"][0]["message"]["content"] == text
        assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        given = content("input_text", {"type": "input_image", "image_url": url})
        made = post("/v1/responses", input=given, max_output_tokens=COUNT)
        assert made["output"][0]["content"][0]["text"] == text
        form: dict[str, Any] = {"file": ("a.png", base64.b64decode(data)), "purpose": (None, "vision")}
        uploaded = http.post("/v1/files", files=form).json()["id"]
        given = content("input_text", {"type": "input_image", "file_id": uploaded})
        again = post("/v1/responses", input=given, max_output_tokens=COUNT)
        assert again["output"][0]["content"][0]["text"] == text
        source = {"type": "base64", "media_type": "image/png", "data": data}
        message = post("/v1/messages", messages=content("text", {"type": "image", "source": source}), max_tokens=COUNT)
        assert message["content"][0]["text"] == text
        tokens = made["usage"]["input_tokens"]
        assert post("/tokenize", messages=messages)["count"] == tokens == chat["usage"]["prompt_tokens"]


def test_answers_of_the_python_api(folder: Path) -> None:
    image, _ = noise(90, 60)
    text = {"type": "text", "text": "what?"}
    expected = answer(folder, [{"role": "user", "content": [{"type": "image"}, text]}], [image], COUNT)
    params = SamplingParams(temperature=0, max_tokens=COUNT)
    inputs, features = image_features(folder, image)
    embeds = {"image_embeds": features, "image_grid_thw": inputs["image_grid_thw"]}
    with LLM(str(folder), device="cpu", dtype="float32", enable_mm_embeds=True) as llm:
        pixels, given = np.asarray(image), {"type": "image_embeds", "image_embeds": embeds}
        for part in ({"type": "image_pil", "image_pil": image}, {"type": "image", "image": pixels}, given):
            (made,) = llm.chat([{"role": "user", "content": [part, text]}], params)
            assert made.outputs[0].token_ids == expected, part["type"]
        shown = "<|vision_start|><|image_pad|><|vision_end|>what?"
        prompt = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
        ids, data = llm.get_tokenizer().encode(prompt, add_special_tokens=False), {"image": image}
        prompts: list[Any] = [{"prompt": prompt}, {"prompt_token_ids": ids}]
        prompts = [{**each, "multi_modal_data": data} for each in prompts]
        prompts += [{"prompt": prompt, "multi_modal_data": {"image": embeds}}]
        first, second, third, _ = llm.generate([*prompts, "hello"], params)
        assert third.outputs[0].token_ids == expected
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == expected
        assert first.prompt_token_ids == second.prompt_token_ids
