"""Models with towers that transformers builds: its logits and tokens, in every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.architecture.families import transformers_backend
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.build import load_model
from quire.engine.models.transformers_backend import describe
from quire.engine.models.transformers_backend.shrink import shrink_tower
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.media_prompts import generate
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.quantized_checkpoints import FORMATS
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.models import other_towers
from tests.integration.engine.models.other_towers import Photo

DEFAULT = "ViP-LLaVA"
"""In the default tier."""
SLOW = pytest.mark.slow
COUNT = 24


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares each description the imports of a process of its own."""
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)


def cases() -> list[Any]:
    names = [name for name in other_towers.CASES if name not in other_towers.REFUSED]
    return [pytest.param(name, marks=[] if name == DEFAULT else [SLOW]) for name in names]


@pytest.mark.parametrize("case", cases())
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Of one rank, and of two stages of two ranks."""
    model = other_towers.write(case, tmp_path)
    prompt = other_towers.prompt(tmp_path, model, [5, Photo(96, 64), 3, Photo(80, 200, 1), 4])
    tokens = torch.tensor(prompt.token_ids)
    with torch.inference_mode():
        expected = model(tokens[None], **prompt.inputs).logits[0]
    pictures = [other_towers.prompt(tmp_path, model, [photo]) for photo in (Photo(96, 64), Photo(80, 200, 1))]
    kinds = {"mm_token_type_ids"}
    arrays = [{name: each for name, each in own.inputs.items() if name not in kinds} for own in pictures]
    for layout in ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        config = configure(tmp_path, max_model_len=2 * len(tokens), model_impl="transformers", **layout)
        media = list(zip(arrays, prompt.items, strict=True))
        for found in on_ranks(config.parallel.tensor_parallel_size, partial(logits, config, tokens, media=media)):
            assert (found - expected).norm() <= 1e-4 * expected.norm(), config.parallel


@pytest.mark.parametrize("case", cases())
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """By two ranks, with chunks that end in pictures, and prefix hits that end there."""
    model = other_towers.write(case, tmp_path)
    layouts: list[tuple[int, list[int | Photo]]] = [
        (0, [5, Photo(96, 64), 30]),
        (0, [5, Photo(96, 64), 3]),
        (0, [5, Photo(96, 64, 1), 3]),  # the same tokens
        (1, [9]),
        (2, [Photo(64, 96, 2), 2, Photo(96, 64), 4]),
    ]
    prompts = [other_towers.prompt(tmp_path, model, parts, seed) for seed, parts in layouts]
    length = max(len(each.token_ids) for each in prompts) + COUNT
    config = configure(tmp_path, max_model_len=length, block_size=4, model_impl="transformers", tensor_parallel_size=2)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        requests = [(prompt.token_ids, params) for prompt in prompts]
        found = ranks.tokens(requests, media=[prompt.items for prompt in prompts], max_num_batched_tokens=7)
        assert ranks.stats.prefix_hit_tokens > 5
    assert found == [generate(model, prompt, COUNT) for prompt in prompts]


def test_a_quantized_tower_is_dequantized(tmp_path: Path) -> None:
    model = other_towers.write(DEFAULT, tmp_path)
    form, tensors, count = FORMATS["bitsandbytes, int8"], load_file(tmp_path / "model.safetensors"), 0
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".vision_tower." in path:
            end = f".{path[path.index('layers.') :]}.weight"
            (name,) = [each for each in tensors if each.endswith(end) and "vision_tower" in each]
            own, module.weight.data = form.pack(tensors.pop(name).float())
            tensors |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in own.items()}
            count += 1
    assert count
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": form.settings}))
    prompt = other_towers.prompt(tmp_path, model, [5, Photo(96, 64), 3])
    tokens = torch.tensor(prompt.token_ids)
    with torch.inference_mode():
        expected = model(tokens[None], **prompt.inputs).logits[0]
    arrays = {name: each for name, each in prompt.inputs.items() if name != "mm_token_type_ids"}
    config = configure(tmp_path, max_model_len=2 * len(tokens), model_impl="transformers")
    found = logits(config, tokens, Parallel(), media=[(arrays, prompt.items[0])])
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_a_small_tower_has_the_same_pictures_and_layers() -> None:
    """GOT-OCR 2 has pictures of as many pixels as features of a vector."""
    values = {
        "image_size": 1024,
        "patch_size": 16,
        "num_hidden_layers": 12,
        "out_hidden_size": 1024,
        "hidden_size": 768,
    }
    small = shrink_tower(values, hidden_size=1024)
    assert {name for name, value in small.items() if value != values[name]} == {"hidden_size", "out_hidden_size"}
    assert small["hidden_size"] == small["out_hidden_size"]


@pytest.mark.parametrize(("case", "reason"), list(other_towers.REFUSED.items()))
def test_what_is_not_in_features_is_refused(case: str, reason: str, tmp_path: Path) -> None:
    other_towers.write(case, tmp_path)
    with pytest.raises(ConfigError, match=reason):
        configure(tmp_path, model_impl="transformers")


def test_weights_of_the_tower_are_in_the_plan_and_left_out_on_request(tmp_path: Path) -> None:
    other_towers.write(DEFAULT, tmp_path)
    whole, text = (
        configure(tmp_path, max_model_len=256, model_impl="transformers", language_model_only=each)
        for each in (False, True)
    )
    assert text.model.architecture.media is None
    decoders = [load_model(config, 0, Parallel(), CPU) for config in (whole, text)]
    counts = [sum(parameter.numel() for parameter in decoder.parameters()) for decoder in decoders]
    weights = [MemoryPlan.of(config).weights[0] for config in (whole, text)]
    assert weights[0] - weights[1] == 4 * (counts[0] - counts[1]) > 0
