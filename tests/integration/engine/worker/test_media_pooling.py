"""Vectors and scores of prompts with pictures equal transformers', however prompts are divided."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.media_prompts import IMAGE, VIDEO, MediaPrompt, Picture, media_prompt, write_media_model
from tests.fakes.tokenizers import byte_level

PARTS: list[list[int | Picture]] = [
    [5, Picture((1, 8, 6)), 30],
    [2, Picture((1, 4, 4)), 1],
    [9],
    [1, Picture((1, 4, 6), seed=2), 5, Picture((1, 8, 4), seed=3), 2],
]


def configure(folder: Path, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(model=str(folder), device="cpu", dtype="float32", max_num_seqs=4, **options))


def vectors(config: EngineConfig, prompts: Sequence[MediaPrompt], budget: int = 512) -> list[Tensor]:
    """By real ranks, all asked at once, and before they are normalized in the end."""
    with Ranks(config) as ranks:
        requests = [(prompt.token_ids, SamplingParams()) for prompt in prompts]
        outputs = ranks.run(requests, media=[prompt.items for prompt in prompts], max_num_batched_tokens=budget)
    return [torch.from_numpy(np.frombuffer(output.vector or b"", np.float32).copy()) for (output,) in outputs]


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@torch.inference_mode()
def states(model: Any, prompt: MediaPrompt) -> Tensor:
    found: Tensor = model(torch.tensor([prompt.token_ids]), **prompt.inputs).last_hidden_state[0]
    return found


def write_colqwen2(folder: Path) -> Any:
    """The model in `folder`; returns transformers' model. Its own `forward` in 5.24 forgets the positions along height
    and width, which earlier versions and the training have."""
    from transformers import ColQwen2Config, ColQwen2ForRetrieval

    inner = write_media_model("Qwen2-VL", folder)
    settings: Any = inner.config.to_dict() | {"image_token_id": IMAGE, "video_token_id": VIDEO}
    torch.manual_seed(1)
    model: Any = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=settings, embedding_dim=16)).train(False)
    model.vlm.load_state_dict(inner.model.state_dict())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("budget", "tp", "pp"), [(7, 1, 1), pytest.param(64, 2, 2, marks=pytest.mark.slow)])
def test_each_token_has_a_vector(tmp_path: Path, budget: int, tp: int, pp: int) -> None:
    model = write_colqwen2(tmp_path)
    prompts = [media_prompt(model.vlm, parts, None, seed) for seed, parts in enumerate(PARTS)]
    config = configure(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    for prompt, found in zip(prompts, vectors(config, prompts, budget), strict=True):
        with torch.inference_mode():
            right = model.embedding_proj_layer(states(model.vlm, prompt))
        close(found.reshape(len(prompt.token_ids), 16), right)


def test_older_names_of_a_model_with_a_vector_of_each_token(tmp_path: Path) -> None:
    write_colqwen2(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("vlm.model.", "vlm.model.language_model."):
        renamed = {name.replace("vlm.language_model.", part): tensor for name, tensor in tensors.items()}
        renamed = {name.replace("vlm.visual.", "vlm.model.visual."): tensor for name, tensor in renamed.items()}
        save_file(renamed | {"vlm.lm_head.weight": torch.zeros(131, 48)}, tmp_path / "model.safetensors")
        config = configure(tmp_path)
        prompt = MediaPrompt([1, 2, 3], [], {})
        assert [len(vector) for vector in vectors(config, [prompt])] == [3 * 16]
    with pytest.raises(ConfigError, match="has no head to generate text"):
        configure(tmp_path, runner="generate")


def write_colpali(folder: Path) -> Any:
    """The model in `folder`; returns transformers' model."""
    from transformers import ColPaliConfig, ColPaliForRetrieval

    inner = write_media_model("PaliGemma 2", folder)
    torch.manual_seed(1)
    model: Any = ColPaliForRetrieval(ColPaliConfig(vlm_config=inner.config.to_dict(), embedding_dim=16)).train(False)
    model.vlm.load_state_dict(inner.model.state_dict())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_all_tokens_of_a_prompt_see_each_other(tmp_path: Path, tp: int, pp: int) -> None:
    """ColPali's: of pages, and of queries of text, each in one step."""
    model = write_colpali(tmp_path)
    shapes: list[list[int | Picture]] = [[Picture((1, 1, 1)), 5], [9], [Picture((1, 1, 1), seed=1), 2], [12], [1]]
    prompts = [media_prompt(model.vlm, parts, None, seed) for seed, parts in enumerate(shapes)]
    config = configure(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    for prompt, found in zip(prompts, vectors(config, prompts, 24), strict=True):
        ids = torch.tensor([prompt.token_ids])
        inputs = {"token_type_ids": torch.zeros_like(ids)} | prompt.inputs  # as its processor makes them
        with torch.inference_mode():
            right = model(ids, **inputs).embeddings[0]
        close(F.normalize(found.reshape(len(prompt.token_ids), 16), dim=-1), right)


def test_other_names_of_colpali(tmp_path: Path) -> None:
    """transformers 5.24 writes the text part as a whole model."""
    write_colpali(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    part = "vlm.language_model.model."
    assert sum(name.startswith(part) for name in tensors) > 9
    for text, tower in (
        ("vlm.language_model.", "vlm.vision_tower.vision_model."),
        ("vlm.model.language_model.", "vlm.model.vision_tower."),
    ):
        renamed = {
            name.replace(part, text).replace("vlm.vision_tower.", tower): tensor for name, tensor in tensors.items()
        }
        save_file(renamed, tmp_path / "model.safetensors")
        assert [len(each) for each in vectors(configure(tmp_path), [MediaPrompt([1, 2, 3], [], {})])] == [3 * 16]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [512, 7])
def test_tokens_of_pictures_alone_are_pooled(tmp_path: Path, budget: int) -> None:
    """Jina's embeddings v4: the mean of the picture's tokens and of the marks around them, or of a text."""
    model = write_media_model("Qwen2.5-VL", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"single_vector_pool_strategy": "mean", "matryoshka_dims": [16, 48]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    prompts = [media_prompt(model, parts, None, seed) for seed, parts in enumerate(PARTS[:3])]
    config = configure(tmp_path)
    assert config.model.pooling is not None
    assert config.model.pooling.dimensions == (16, 48)
    for prompt, found in zip(prompts, vectors(config, prompts, budget), strict=True):
        x = states(model.model, prompt)
        for item in prompt.items:
            x = x[item.offset - 1 : item.offset + item.length + 1]
        close(found, x.mean(dim=0))


@pytest.mark.slow
def test_a_reranker_reads_pictures(tmp_path: Path) -> None:
    """As Qwen3-VL-Reranker is used: the difference of two logits."""
    model = write_media_model("Qwen3-VL", tmp_path)
    backend = byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    labels = ["a", "b"]
    config = configure(
        tmp_path,
        hf_overrides={"architectures": ["Qwen3VLForSequenceClassification"], "classifier_from_token": labels},
    )
    prompts = [media_prompt(model, parts, None, seed) for seed, parts in enumerate(PARTS)]
    no, yes = (backend.token_to_id(label) for label in labels)
    for prompt, found in zip(prompts, vectors(config, prompts, 7), strict=True):
        logits = F.linear(states(model.model, prompt)[-1], model.lm_head.weight.detach())
        close(found, (logits[yes] - logits[no])[None])
