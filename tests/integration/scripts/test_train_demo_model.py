"""Training the demo model, in small; and what the bundled model knows of texts."""

from __future__ import annotations

import importlib
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaModel

SCRIPTS = Path(__file__).parents[3] / "scripts"


def script(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of the scripts, which are no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


def test_protection_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither hooks nor frozen weights stay behind, whether texts or training fail."""
    eyes, training = (script(monkeypatch, name) for name in ("demo_eyes", "train_demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(training.DEMO)
    language: Any = LlamaModel(
        LlamaConfig(
            vocab_size=training.VOCABULARY,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=4,
        )
    )
    moved = language.layers[0].mlp.down_proj

    def fail() -> None:
        assert not language.norm.weight.requires_grad
        raise RuntimeError("training")

    with pytest.raises(RuntimeError, match="training"), eyes.protected(language, tokenizer, ["one"]):
        fail()
    with pytest.raises(ValueError, match="text input"), eyes.protected(language, tokenizer, ["one", None]):
        pass
    assert all(weight.requires_grad for weight in language.parameters())
    assert not any(module._forward_hooks for module in language.modules())
    language(input_ids=torch.tensor([tokenizer.encode("one")])).last_hidden_state.sum().backward()
    assert moved.weight.grad.abs().sum() > 0
    assert not moved.weight._backward_hooks


def test_a_text_model_needs_a_token_for_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    training = script(monkeypatch, "train_demo_model")
    for file in training.DEMO.glob("*.json"):
        shutil.copy(file, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((training.DEMO / name).read_text().replace("<|image|>", "<|other|>"))
    with pytest.raises(SystemExit, match=r"the tokenizer has no <\|image\|>"):
        training.train_eyes(Namespace(output=tmp_path))


@pytest.mark.slow
def test_eyes_are_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All parts of the training, a few steps each. The texts of the model before are still answered."""
    training = script(monkeypatch, "train_demo_model")
    monkeypatch.setattr("demo_training.THREADS", 1)
    for file in training.DEMO.iterdir():
        shutil.copy(file, tmp_path)
    training.train_eyes(Namespace(output=tmp_path, minutes=None, steps=4, seed=1))
    before, after = training.load(training.DEMO), training.load(tmp_path)
    changed = {
        name.split(".")[1]
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert changed == {"vision_tower", "multi_modal_projector", "language_model"}
    question = "Which flag sets the port?"
    assert training.ask(tmp_path, question) == training.ask(training.DEMO, question)


@pytest.mark.slow
@torch.inference_mode()
def test_the_bundled_model_knows_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out replies of which each token is the model's most likely one: 292 of 350 when this was written."""
    training = script(monkeypatch, "train_demo_model")
    tokenizer, model = AutoTokenizer.from_pretrained(training.DEMO), training.load(training.DEMO)
    opening, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.eos_token_id
    chats = [chat for chat in training.held_out() if chat.kind != training.NEW_CITIES]
    right = 0
    for chat in chats:
        prompt = tokenizer.encode(training.render(tokenizer, chat, len(chat.messages) - 1, prompt=True))
        ids = tokenizer.encode(training.render(tokenizer, chat, len(chat.messages)))
        wanted = training.targets(ids, opening, end)
        wanted[: len(prompt)] = [False] * len(prompt)
        found = model(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        right += bool((found == torch.tensor(ids[1:]))[torch.tensor(wanted[1:])].all())
    assert len(chats) == 350
    assert right >= 285
