"""No architecture of transformers' list of causal language models ends in a traceback: it is served, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from quire.engine.architecture.families import ENCODERS, FAMILIES, transformers_backend
from quire.engine.models.transformers_backend import describe
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks
from tests.integration.engine.models.every_decoder import DECODERS, native_refusal, refusal, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

UNEXPLAINED = frozenset(
    ("cohere_compass_text", "dbrx", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "reformer", "xmod")
)
"""transformers' own classes do not run with the configs that they make by themselves, or without timm."""
_TEXT = {"model_impl": "transformers", "language_model_only": True}
REASONS: dict[str, str] = {}
"""The reason why each is not supported, as far as tests of this process have asked; empty: it is."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", DECODERS)
def test_every_architecture_is_supported_or_rejected_by_name(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)
    is_tiny = write(model_type, tmp_path)
    reason = REASONS[model_type] = refusal(tmp_path, 1, 1)
    if not reason and is_tiny:
        config = configure(tmp_path, load_format="dummy", max_model_len=64, **_TEXT)
        assert on_ranks(1, partial(logits, config, torch.arange(4, 24)))[0].isfinite().all()
    if reason.startswith(("transformers cannot run it", "no small model")):
        assert model_type in UNEXPLAINED, reason


@pytest.mark.parametrize("model_type", [each for each, name in DECODERS.items() if name in FAMILIES])
def test_mappings_read_the_configs_that_transformers_makes_by_itself(model_type: str, tmp_path: Path) -> None:
    write(model_type, tmp_path)
    if model_type == "mimo_v2_flash":  # a third of a tiny head is an odd number of features
        assert "even number of features" in native_refusal(tmp_path)
    elif model_type.startswith("qwen4_exp"):  # whose default is no indexer, with which transformers cannot run
        assert "config.json lacks indexer_n_heads" in native_refusal(tmp_path)
    elif DECODERS[model_type] not in ENCODERS:
        assert not native_refusal(tmp_path)


def test_most_architectures_are_supported(tmp_path: Path) -> None:
    """Including the architectures that only transformers has."""
    for model_type in DECODERS.keys() - REASONS.keys():
        folder = tmp_path / model_type
        folder.mkdir()
        write(model_type, folder)
        REASONS[model_type] = refusal(folder, 1, 1)
    assert sum(not reason for reason in REASONS.values()) >= 110
