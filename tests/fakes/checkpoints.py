"""Random-weight checkpoints as transformers writes them, and its answers. It is imported where it is called: that takes
seconds, in each process of a rank, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 131,  # no multiple of 2 or 4: the last rank's rows are padded
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # far enough from uniform that rounding cannot change the likeliest token
    "bos_token_id": 0,
    "eos_token_id": 130,
    "pad_token_id": None,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": False}),
}
FAMILIES = tuple(_FAMILIES)


def write_checkpoint(family: str, folder: Path, **settings: Any) -> Path:
    """A tiny float32 checkpoint of `family` in `folder`, with more settings in its config; returns the folder."""
    import transformers

    architecture, changes = _FAMILIES[family]
    kind: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(_SIZES | changes | settings)))
    for name, parameter in model.named_parameters():  # transformers starts biases at zero, which would hide them
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


TEXT_PARTS = {"Gemma3nForConditionalGeneration": "Gemma3nForCausalLM"}
"""Models with parts for which transformers has no code (it takes timm's), and their text parts."""


def text_of(model: Any) -> Any:
    """The model, or its text part where transformers 5.24 cannot run it as a whole."""
    return model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model


def generate(folder: Path, prompts: list[list[int]], count: int, *, trust_remote_code: bool = False) -> list[list[int]]:
    """Greedy continuations by transformers in float32, one prompt at a time, not stopping at end of sequence."""
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(1)  # the matrices are too small to be shared
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind: Any = AutoModelForCausalLM if trust_remote_code else getattr(transformers, TEXT_PARTS.get(name, name))
    part: dict[str, Any] = {}
    if name in TEXT_PARTS:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        part = {"config": kind.config_class(**text), "key_mapping": {r"^model\.language_model\.": "model."}}
    model: Any = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        attn_implementation="eager",  # transformers 5.17 takes sdpa for Gemma 2, which forgets the soft cap
        **part,
    )
    model = text_of(model)
    settings: Any = GenerationConfig
    model.generation_config = settings(max_new_tokens=count, do_sample=False, pad_token_id=0)
    results = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens))
        results.append(output[0, len(prompt) :].tolist())
    return results


def likeliest(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """transformers' likeliest token at each place of the answers, behind the prompt and the answer up to there. The
    answers are its greedy continuations if these are the answers themselves, and one pass for each of them says so:
    `generate` runs one for each token."""
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0]
            found.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return found


def score(folder: Path, prompts: list[list[int]]) -> list[Tensor]:
    """By transformers in float32: the log-probabilities `[tokens, vocab]` of the token after each token of each
    prompt."""
    import transformers

    torch.set_num_threads(1)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]
