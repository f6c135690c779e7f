"""The demo model sees: the pictures that it was scored with, in the Python API, beside chats without pictures."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PICTURE = "docs/pictures/shapes.png"
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu") as running:
        yield running


def ask(llm: LLM, chats: list[list[dict[str, Any]]]) -> list[str]:
    return [result.outputs[0].text for result in llm.chat(chats, GREEDY)]


def test_it_sees_and_still_reads(llm: LLM) -> None:
    """Pictures and texts in one batch. Pictures are graded by their first question."""
    pictures = runpy.run_path(str(ROOT / "scripts/demo_pictures.py"))["held_out"](50)
    parts = [[{"type": "image", "image": each.image}, {"type": "text", "text": each.turns[0][0]}] for each in pictures]
    texts = {
        "How do I serve a model on two nodes with 8 GPUs each?": "Run `quire serve MODEL --tensor-parallel-size 8 "
        "--pipeline-parallel-size 2`: tensor parallel inside a node, pipeline across.",
        "Which flag sets the port?": "`--port` sets the HTTP port; 8000 is the default.",
    }
    found = ask(llm, [[{"role": "user", "content": content}] for content in [*parts, *texts]])
    right = [answer == each.turns[0][1] for answer, each in zip(found, pictures, strict=False)]
    assert sum(right) >= 45
    assert found[len(parts) :] == [*texts.values()]


@pytest.mark.parametrize(
    ("page", "promise", "answer"),
    [
        ("README.md", "The answer is `{}`", "A red circle and a blue star."),
        ("docs/quickstart.md", "The demo model answers `{}`", "A red circle."),
    ],
)
def test_commands_with_pictures(llm: LLM, page: str, promise: str, answer: str, tmp_path: Path) -> None:
    """A page's command sends the picture, and another file that is longer than an argument of a program may be."""
    text = (ROOT / page).read_text()
    (command,) = re.findall(r"^\$ (\{\n(?:  .*\n)+)", text, flags=re.M)
    assert promise.format(answer) in text
    Image.open(ROOT / PICTURE).save(tmp_path / "large.bmp")
    curl = tmp_path / "curl"
    curl.write_text("#!/bin/sh\nexec cat\n")
    curl.chmod(0o755)
    bodies = [
        subprocess.run(
            ["bash", "-c", command.replace(PICTURE, str(file))],
            cwd=ROOT,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        ).stdout
        for file in (PICTURE, tmp_path / "large.bmp")
    ]
    assert len(bodies[1]) > 2**17
    assert ask(llm, [json.loads(body)["messages"] for body in bodies]) == [answer, answer]
