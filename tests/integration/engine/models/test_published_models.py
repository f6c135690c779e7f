"""The config.json of every published model, with small sizes, against transformers: the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.architecture.families import ENCODERS
from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.checkpoints import likeliest, text_of
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import name_as_published, stack_experts
from tests.fakes.model_logits import configure, logits
from tests.fakes.published import MODELS, config, tiny
from tests.fakes.threads import ThreadExecutor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")]
_ENCODERS = {*ENCODERS, "Gemma3TextModel"}
_OTHERS = {"DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration"}
"""Whose config.json transformers does not read as published: see test_deepseek_ocr.py and test_families.py."""
DECODERS = [name for name in MODELS if config(name)["architectures"][0] not in _ENCODERS | _OTHERS]
STEPS = 16


def write(name: str, folder: Path) -> Any:
    """The model in `folder`, with its config.json as published but for sizes; and as transformers has it."""
    settings = tiny(name)
    (architecture,) = settings["architectures"]
    known = architecture if hasattr(transformers, architecture) else None
    kind: Any = getattr(transformers, known or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the matrices are too small to be shared
    kept = kind.config_class.from_dict({**settings, "model_type": kind.config_class.model_type})
    for part in filter(None, (getattr(kept, each, None) for each in kept.sub_configs)):
        part.dtype = torch.float32
    model = kind(kept).train(False)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1, which hides them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(std=0.2)  # of zeros, scores are all equal
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # of transformers' own
    (folder / "config.json").write_text(json.dumps(settings))
    if architecture == "Qwen3_5MoeForConditionalGeneration":
        stack_experts(folder)
    name_as_published(architecture, folder, model)
    return text_of(model)


@pytest.mark.parametrize("name", DECODERS)
def test_a_small_model_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Logits at all positions, and greedy tokens with chunks of the prompt."""
    model = write(name, tmp_path)
    prompt = torch.randint(4, 128, (60,), generator=torch.Generator().manual_seed(1))
    # Their towers, which are not made small, have tests of their own.
    options = {"max_model_len": 96, "dtype": "float32", "model_impl": "quire", "language_model_only": True}
    with torch.inference_mode():
        expected = model(prompt[None], use_cache=False).logits[0]
    engine = configure(tmp_path, **options)
    with torch.no_grad():
        found = logits(engine, prompt, Parallel())
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Ranks(engine, ThreadExecutor(engine)) as ranks:
        (answer,) = ranks.tokens([(prompt.tolist(), params)], max_num_batched_tokens=16)
    assert len(answer) == STEPS
    assert [answer] == likeliest(model, [prompt.tolist()], [answer])
