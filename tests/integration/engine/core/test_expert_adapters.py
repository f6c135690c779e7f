"""Requests whose adapters change routed experts and their router: each has the tokens of its merged checkpoint."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.repository.adapter_folder import open_adapter
from tests.fakes import families
from tests.fakes.checkpoints import generate, score
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.lora import SETTINGS, merged, write_lora
from tests.fakes.model_logits import configure
from tests.integration.engine.core.test_adapters import COUNT, SCORED, Case, check, configured

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
"""PEFT warns of much, also of its own use of transformers."""


def by_peft(folder: Path, model: Any) -> AdapterRef:
    """An adapter of stacked experts, as PEFT writes it."""
    peft: Any = importlib.import_module("peft")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=stacks)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return AdapterRef(open_adapter(folder).digest, (str(folder),))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two adapters of a mixture of experts: of some experts one by one with DoRA, and of all of them stacked."""
    folder, rng = tmp_path_factory.mktemp("adapters"), random.Random(0)
    published = families.write("Qwen3 MoE", folder / "base")
    model = configure(folder / "base").model
    names = [name for name in checkpoint_tensors(model.architecture, has_head=True) if ".mlp." in name]
    settings = SETTINGS | {"use_dora": True}
    adapters = [
        write_lora(folder / "single", model, names[::2], settings=settings, size=0.3),
        by_peft(folder / "stacked", published),
    ]
    prompts = [rng.choices(range(3, 130), k=length) for length in (1, 19, 30)]
    folders = [folder / "base", *(merged(model, each, folder / f"merged{n}") for n, each in enumerate(adapters))]
    expected = [generate(each, prompts, COUNT) for each in folders]
    assert len({str(each) for each in expected}) == len(expected)
    return Case(folder / "base", prompts, [None, *adapters], expected, [score(each, prompts) for each in folders])


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["one", "slices", "experts"],
)
def test_adapters_of_experts(case: Case, options: dict[str, Any]) -> None:
    with Ranks(configured(case, 2, **options)) as ranks:
        check(case, ranks)
        check(case, ranks, SCORED, max_num_batched_tokens=24)
