"""Where an adapter with an invocation begins to work, in PEFT and here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine.protocol.adapters import AdapterRef
from quire.server.text.adapter import RequestAdapter

peft: Any = importlib.import_module("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
"""PEFT uses what transformers deprecates."""
INVOCATIONS = [(5, 6, 7), (5, 5), (6,), ()]
PROMPTS = [
    *([1, 2, 3, 4], [1, 2, 6, 7, 5], [5, 6, 1, 7], [5, 6], [7]),  # the first invocation is not there
    *([1, 5, 6, 7, 2], [5, 6, 7, 1], [1, 2, 5, 6, 7], [5, 6, 7]),
    *([5, 6, 7, 1, 5, 6, 7, 2, 5], [5, 5, 6, 7], [5, 5, 5], [1, 5, 5, 5, 2], [6, 1, 6, 6, 2]),
]


@torch.inference_mode()
@pytest.mark.parametrize("invocation", INVOCATIONS, ids=str)
def test_an_adapter_starts_where_it_does_in_peft(invocation: tuple[int, ...]) -> None:
    """At the first position whose logits differ from the base's."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=16, **sizes))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        alora_invocation_tokens=list(invocation) or None,
    )
    model = peft.get_peft_model(base, settings).eval()
    adapter = RequestAdapter("adapter", AdapterRef(bytes(32), ()), "", invocation_tokens=invocation)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        changed = model(ids).logits
        with model.disable_adapter():
            differs = (changed != model(ids).logits).any(-1)[0].tolist()
        assert adapter.start(prompt) == (differs.index(True) if any(differs) else None), prompt
