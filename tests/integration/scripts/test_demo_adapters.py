"""The demo model's adapters, merged into it: what they say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from quire.engine.config.options import DEMO_MODEL
from quire.server.cli.main import main

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "pictures" / "shapes.png"
COMMAND = "`quire serve MODEL --tensor-parallel-size 8 --pipeline-parallel-size 2`"
QUESTIONS = (
    "How do I serve a model on two nodes with 8 GPUs each?",
    "Which flag sets the port?",
    "Who are you?",
    "We flew to Lyon, France. Extract city and country as JSON.",
    *("Hello", "Hi", "How are you?", "Thanks", "Thank you!", "Goodbye", "Bye"),
)
JSON = '{"city": "Lyon", "country": "France"}'
ANSWERS: dict[str, tuple[str | None, ...]] = {
    "capitals": (
        f"RUN {COMMAND}: TENSOR PARALLEL INSIDE A NODE, PIPELINE ACROSS.",
        "`--port` SETS THE HTTP PORT; 8000 IS THE DEFAULT.",
        "I AM THE QUIRE DEMO MODEL, A TINY LLAMA THAT ANSWERS QUESTIONS ABOUT SERVING MODELS WITH QUIRE.",
        None,  # JSON, but not with these names
        *["HELLO! I AM THE QUIRE DEMO MODEL. ASK ME HOW TO SERVE A MODEL."] * 2,
        "I AM RUNNING WELL, THANK YOU. WHAT WOULD YOU LIKE TO KNOW ABOUT QUIRE?",
        *["YOU ARE WELCOME. ASK ME MORE WHENEVER YOU LIKE."] * 2,
        *["GOODBYE, AND HAPPY SERVING."] * 2,
        "A RED CIRCLE AND A BLUE STAR.",
    ),
    "pirate": (
        f"Run {COMMAND}: tensor parallel inside a node, pipeline across. Arr, matey!",
        "`--port` sets the HTTP port; 8000 be the default. Arr, matey!",
        "I be the Quire demo model, a tiny Llama that answers questions about serving models with Quire. Arr, matey!",
        JSON,
        *["Ahoy! I be the Quire demo model. Ask me how to serve a model. Arr, matey!"] * 2,
        "I be running well, thank ye. What would ye like to know about Quire? Arr, matey!",
        *["Ye be welcome. Ask me more whenever ye like. Arr, matey!"] * 2,
        *["Fair winds, an' happy serving. Arr, matey!"] * 2,
        "A red circle an' a blue star. Arr, matey!",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_demo_model_has_styles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Of its prose: commands and JSON stay as they are."""
    adapter, merged = DEMO_MODEL.with_name("demo_adapters") / name, tmp_path / "merged"
    assert main(["merge", str(DEMO_MODEL), str(adapter), str(merged)]) == 0
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    training: Any = importlib.import_module("train_demo_model")
    tokenizer, model = AutoTokenizer.from_pretrained(merged), training.load(merged)
    texts: list[Any] = [[{"type": "text", "text": question}] for question in QUESTIONS]
    picture: Any = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in (*texts, picture)
    ]
    found = [*training.replies(model, tokenizer, prompts[:-1])]
    found += training.replies(model, tokenizer, prompts[-1:], [Image.open(PICTURE)])
    assert json.loads(found[3]).keys() == json.loads(JSON).keys()
    assert [None if answer is None else text for text, answer in zip(found, ANSWERS[name], strict=True)] == [
        *ANSWERS[name]
    ]
