"""Vectors and scores of pictures over HTTP and in the Python API, from the file to the number: transformers'."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from quire import LLM
from tests.e2e.serving import serve
from tests.fakes.processors import write_processor
from tests.fakes.vision import last_states, write_qwen2_vl

pytestmark = pytest.mark.slow
OPTIONS = ("--device", "cpu", "--dtype", "float32")
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
PAIRS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def url(image: Image.Image) -> str:
    image.save(file := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def close(found: Any, right: torch.Tensor) -> None:
    x: npt.NDArray[Any] = np.asarray(found)
    np.testing.assert_allclose(x, right.numpy(), atol=1e-4 * float(right.abs().max()))


def test_embeddings_over_http(tmp_path: Path) -> None:
    """As Qwen3-VL-Embedding is used: the last token of a conversation."""
    folder, small, large = write_qwen2_vl(tmp_path), noise(90, 60), noise(300, 200)
    expected = [
        F.normalize(last_states(folder, TURN.format(text), pictures)[-1], dim=0)
        for text, pictures in ((f"{SHOWN}what?", [small]), (SHOWN, [large]))
    ]
    with (
        serve(str(folder), "--runner", "pooling", *OPTIONS) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def post(route: str, **body: Any) -> Any:
            response = http.post(route, json={"model": str(folder), **body})
            assert response.status_code == 200, response.text
            return response.json()

        messages = [{"role": "user", "content": [part(small), {"type": "text", "text": "what?"}]}]
        answer = post("/v1/embeddings", messages=messages, add_generation_prompt=True)
        close(answer["data"][0]["embedding"], expected[0])
        counts = post("/tokenize", messages=messages)["count"], answer["usage"]["prompt_tokens"]
        assert counts[0] == counts[1]
        both = {"content": messages[0]["content"]}
        answer = post("/v1/embeddings", input=[both, {"image": url(large)}])
        for entry, right in zip(answer["data"], expected, strict=True):
            close(entry["embedding"], right)
        answer = post("/rerank", query=both, documents=[{"image": url(large)}, both])
        assert [each["index"] for each in answer["results"]] == [1, 0]
        assert answer["results"][1]["relevance_score"] == pytest.approx(float(expected[0] @ expected[1]), abs=1e-4)


def test_late_interaction_in_the_python_api(tmp_path: Path) -> None:
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, Qwen2VLForConditionalGeneration

    folder, picture = write_qwen2_vl(tmp_path), noise(90, 60)
    inner: Any = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(1)
    model: Any = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner.config.to_dict(), embedding_dim=16))
    model.vlm.load_state_dict(inner.model.state_dict())
    prompts = (
        f"Query: what?{'<|endoftext|>' * 10}\n",
        f"<|im_start|>user\n{SHOWN}Describe the image.<|im_end|><|endoftext|>",
    )
    states = last_states(folder, prompts[0], []), last_states(folder, prompts[1], [picture])
    model.save_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text()) | {"processor_class": "ColQwen2Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with torch.inference_mode():
        query, document = (F.normalize(model.embedding_proj_layer(x), dim=-1) for x in states)
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        (found,) = llm.encode("what?", pooling_task="token_embed")
        close(found.outputs.data, query)
        prompt = {"prompt": prompts[1], "multi_modal_data": {"image": picture}}
        (found,) = llm.encode([prompt])
        close(found.outputs.data, document)
        content = {"content": [{"type": "image", "image": picture}]}
        first, same = llm.score("what?", [content, "what?"])
        right = (query @ document.T).max(dim=-1).values.sum()
        assert first.outputs.score == pytest.approx(float(right), rel=1e-4)
        assert same.outputs.score == pytest.approx(len(query), rel=1e-4)


def test_late_interaction_with_all_tokens_of_a_prompt(tmp_path: Path) -> None:
    """ColPali, by its own processor; queries also without the tower."""
    from transformers import ColPaliConfig, ColPaliForRetrieval
    from transformers.models.colpali.processing_colpali import ColPaliProcessor

    folder, picture = write_processor("colpali", tmp_path), noise(90, 60)
    loader: Any = ColPaliProcessor
    processor = loader.from_pretrained(folder)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
    inner = {
        "model_type": "paligemma",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **vision},
        "text_config": {"model_type": "gemma", "vocab_size": len(processor.tokenizer), **text},
        "projection_dim": 48,
        "image_token_id": processor.tokenizer.convert_tokens_to_ids("<image>"),
    }
    torch.manual_seed(1)
    model: Any = ColPaliForRetrieval(ColPaliConfig(vlm_config=inner, embedding_dim=16)).train(False)
    model.save_pretrained(folder)
    asked = processor.process_queries(["what?"])
    with torch.inference_mode():
        (query,), (document,) = (model(**given).embeddings for given in (asked, processor.process_images([picture])))
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        (found,) = llm.encode("what?", pooling_task="token_embed")
        assert found.prompt_token_ids == asked["input_ids"][0].tolist()
        close(found.outputs.data, query)
        content = {"content": [{"type": "image", "image": picture}]}
        first, same = llm.score("what?", [content, {"content": [{"type": "text", "text": "what?"}]}])
        right = (query @ document.T).max(dim=-1).values.sum()
        assert first.outputs.score == pytest.approx(float(right), rel=1e-4)
        assert same.outputs.score == pytest.approx(len(query), rel=1e-4)
    with LLM(str(folder), device="cpu", dtype="float32", language_model_only=True) as llm:
        (found,) = llm.encode("what?")
        close(found.outputs.data, query)


def test_a_reranker_in_the_python_api(tmp_path: Path) -> None:
    """As Qwen3-VL-Reranker is used."""
    folder, picture = write_qwen2_vl(tmp_path), noise(90, 60)
    overrides = {"architectures": ["Qwen2VLForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    states = last_states(folder, f"<query>what?<document>a{SHOWN}", [picture])[-1]
    from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    no, yes = (model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)].detach() for token in "ny")
    right = torch.sigmoid((yes - no) @ states)
    with LLM(str(folder), device="cpu", dtype="float32", hf_overrides=overrides, chat_template=PAIRS) as llm:
        content = {"content": [{"type": "text", "text": "a"}, {"type": "image", "image": picture}]}
        (found,) = llm.score("what?", content)
        assert found.outputs.score == pytest.approx(float(right), abs=1e-5)
