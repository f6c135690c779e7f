"""The prompt tokens that the turns of Claude Code find in the prefix cache, with and without its billing header.

.venv/bin/python -m benchmarks.claude_code [--version 2.1.120] [--turns 3]

npm installs Claude Code into a temporary folder, which is also its home. For each row, `claude -p` asks the first
question, and `claude -p -c` the others, with a system prompt of 60 short sentences and without tools. The model is the
demo model at temperature 0. The figures are those that Claude Code reports: of all the prompt tokens of a turn, those
that were in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.serving import serve

QUESTIONS = ("What is Quire?", "How do I start it?", "Which flag sets the port?", "What is a token?")
SYSTEM = " ".join(f"Rule {number}: answer in short sentences." for number in range(60))
LENGTH = 32768
"""Of the model's context: Claude Code wants room for long answers."""


def install(version: str, folder: Path) -> list[str]:
    """Install Claude Code into a folder, and return its command."""
    package = f"@anthropic-ai/claude-code@{version}"
    subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), package], check=True)
    return ["node", str(folder / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs")]


def turns(claude: list[str], url: str, count: int, home: Path) -> Iterator[tuple[int, int]]:
    """Yield the cached prompt tokens and all prompt tokens of each turn."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "quire-demo",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "quire-demo",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    options = ["--output-format", "json", "--tools", "", "--system-prompt", SYSTEM]
    for number in range(count):
        question = QUESTIONS[number % len(QUESTIONS)]
        command = [*claude, "-p", *["-c"] * (number > 0), *options, question]
        done = subprocess.run(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
        )
        usage = json.loads(done.stdout)["usage"]
        yield usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="2.1.120", help="of Claude Code")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    overrides = ("--hf-overrides", json.dumps({"max_position_embeddings": LENGTH}))
    greedy = ("--override-generation-config", json.dumps({"temperature": 0}))
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        claude = install(arguments.version, Path(folder) / "npm")
        for flags in (["--keep-billing-header"], []):
            home = Path(folder) / f"home{len(flags)}"
            home.mkdir()
            with serve("--max-model-len", str(LENGTH), *overrides, *greedy, *flags) as server:
                columns.append([*turns(claude, server.url, arguments.turns, home)])
    print("| turn | with `--keep-billing-header` | by default |\n|---|---|---|")
    for number, (kept, removed) in enumerate(zip(*columns, strict=True), 1):
        print(f"| {number} | {kept[0]} of {kept[1]} | {removed[0]} of {removed[1]} |")


if __name__ == "__main__":
    main()
