"""Adapters of towers and projectors as PEFT saves them: weights with their changes are those that PEFT merges."""

from __future__ import annotations

import importlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from quire.engine.distributed.communicator import Parallel
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.repository.adapter_folder import open_adapter
from tests.fakes import families
from tests.fakes.model_logits import configure
from tests.integration.engine.checkpoints.test_adapter_loader import check, loaded

peft: Any = importlib.import_module("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
"""PEFT warns of much, also of its own use of transformers."""


class Trained(NamedTuple):
    family: str
    modules: tuple[str, ...]
    """Parts of the names of linear layers and convolutions that have low-rank changes; empty: all of the tower."""
    settings: dict[str, Any]


_TOWER = ("visual", "vision", "projector", "connector", "resampler")
CASES = {
    "convolutions over patches": Trained("Qwen2.5-VL", (), {}),
    "DoRA": Trained("InternVL over Qwen3", (), {"use_dora": True}),
    "biases of B": Trained("Idefics3", ("vision_model",), {"lora_bias": True}),
    "all biases": Trained("LLaVA-OneVision", (".self_attn.", ".mlp."), {"bias": "all"}),
    "biases of changed layers": Trained("Llama 4 with a vision part", (), {"bias": "lora_only", "use_rslora": True}),
    "layers behind the output": Trained("LLaVA over Mistral", ("q_proj", "v_proj"), {}),
    "a whole norm behind it": Trained("LLaVA over Mistral", ("fc1",), {"modules_to_save": ["post_layernorm"]}),
    "a resampler": Trained("ERNIE 4.5 VL", (), {"bias": "all"}),
    "a projector of transformers": Trained("Kimi K2.5", ("mm_projector", "patch_embed"), {}),
    "a projector without a name": Trained("DeepSeek-OCR 2", ("multi_modal_projector", "patch_embed"), {}),
    "a first norm": Trained(
        "Step 3.7", ("multi_modal_projector", "patch_embedding"), {"modules_to_save": ["pre_layernorm"]}
    ),
    "two projectors": Trained("MiniMax-M3 with a vision part", (), {"bias": "all"}),
}


def _is_trained(name: str, module: nn.Module, parts: tuple[str, ...]) -> bool:
    is_layer = isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d) and ".head." not in name
    return is_layer and any(part in name for part in parts or _TOWER)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_peft_merges(case: str, tmp_path: Path) -> None:
    trained = CASES[case]
    families.write(trained.family, tmp_path / "base")
    kind = getattr(transformers, families.CASES[trained.family][0])
    base = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
    names = [name for name, module in base.named_modules() if _is_trained(name, module, trained.modules)]
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, **trained.settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")
    whole = adapted.merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "base/config.json", tmp_path / "whole")
    families.name_as_published(kind.__name__, tmp_path / "whole", whole)
    adapter = AdapterRef(open_adapter(tmp_path / "adapter").digest, (str(tmp_path / "adapter"),))
    configured = partial(configure, max_model_len=64)
    model, loader = loaded(configured(tmp_path / "base"), Parallel())
    other, _ = loaded(configured(tmp_path / "whole"), Parallel())
    changes = loader.load(adapter)
    assert changes
    unchanged = tuple(loader.layers.keys() - changes.keys())
    check(configured(tmp_path / "base"), adapter, configured(tmp_path / "whole"), Parallel(), unchanged=unchanged)
    for path, parameter in other.named_parameters():
        if path.rpartition(".")[0] not in changes:
            assert parameter.equal(model.get_parameter(path)), path
