"""`--help` of commands: groups, words, everything."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from quire.engine.config.options import EngineOptions
from quire.server.cli.main import build_parser, main
from quire.server.config.help import find_groups
from quire.server.config.server_options import ServerOptions

Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Run a command line that prints help, and return the text."""

    def show(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit, match=f"^{code}$"):
            main(arguments)
        text = capsys.readouterr()
        return text.err if code else text.out

    return show


def flags(text: str) -> set[str]:
    """The flags with a line of their own."""
    return {name for line in re.findall(r"^  -.*", text, flags=re.M) for name in re.findall(r"--[\w-]+", line)}


def test_help_shows_the_common_flags_and_where_the_others_are(show: Show) -> None:
    text = show("serve", "--help")
    assert {"--port", "--tensor-parallel-size", "--max-model-len", "--api-key"} < flags(text)
    assert "--block-size" not in text
    assert len(flags(text)) < 20
    assert "parallel (12)" in text
    assert "quire serve --help=GROUP" in text
    found = find_groups(build_parser().parse_args(["serve"]).parser)
    counted = {title: int(count) for title, count in re.findall(r"^  ([\w-]+) \((\d+)\)", text, flags=re.M)}
    assert counted == {title: len(group._group_actions) for title, group in found.items()}
    options = {**EngineOptions.__dataclass_fields__, **ServerOptions.__dataclass_fields__}
    assert sum(counted.values()) == len(options) - 1  # the model is a positional argument


def test_help_of_a_word(show: Show) -> None:
    cache = show("serve", "--help=cache")
    assert "--block-size" in flags(cache)
    assert "--port" not in cache
    assert show("serve", "--help", "cache") == show("serve", "--help=CacheConfig") == cache
    assert show("serve", "model", "-tp", "2", "-h", "cache") == cache
    assert flags(show("serve", "--help=max-model-len")) == {"--max-model-len"}
    assert flags(show("serve", "--help=--max_model_len")) == {"--max-model-len"}
    assert flags(show("serve", "--help=max-num")) == {
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-num-partial-prefills",
    }


def test_help_of_vllms_groups(show: Show) -> None:
    for name, groups in {
        "ModelConfig": ["model"],
        "frontend": ["chat", "http", "access", "browser", "tls"],
        "ObservabilityConfig": ["monitoring"],
        "DeviceConfig": ["execution"],
        "AttentionConfig": ["execution"],
        "CompilationConfig": ["execution"],
        "LoRAConfig": ["lora"],
    }.items():
        assert re.findall(r"^(\S+):$", show("serve", f"--help={name}"), flags=re.M) == groups
    assert "--device" in flags(show("serve", "--help=device"))
    assert "--port" not in show("serve", "--help=device")
    assert "no group or flag is named KVTransferConfig" in show("serve", "--help=KVTransferConfig", code=2)


def test_another_argument_after_help_is_no_word(show: Show) -> None:
    overview = show("serve", "--help")
    assert show("serve", "--help", "Qwen/Qwen3-8B") == show("serve", "-h", "Qwen/Qwen3-8B", "-tp", "2") == overview
    assert "no group or flag is named Qwen/Qwen3-8B" in show("serve", "--help=Qwen/Qwen3-8B", code=2)


def test_help_of_everything(show: Show) -> None:
    text = show("serve", "--help=all")
    assert text == show("serve", "--help=page")
    assert text.index("http:") < text.index("--port") < text.index("model:") < text.index("--dtype {")
    assert "(default: 8000)" in text
    assert "(default: on)" in text
    assert "None" not in text
    parser = build_parser().parse_args(["serve"]).parser
    assert flags(text) == {name for name in parser._option_string_actions if name.startswith("--")}


def test_help_of_an_unknown_word_names_the_nearest(show: Show) -> None:
    assert "did you mean scheduler?" in show("serve", "--help=shceduler", code=2)
    assert "did you mean max-model-len" in show("serve", "--help=maxx-model-len", code=2)
    assert "groups: chat, http" in show("serve", "--help=zzz", code=2)


def test_commands_with_few_flags_show_all(show: Show) -> None:
    assert "--goodput" in flags(show("bench", "serve", "--help"))
    assert "BENCHMARK" in show("bench", "--help", "serve")


def test_commands_with_the_engines_flags_show_their_groups(show: Show) -> None:
    for command in ("plan", "run-batch", "bench latency", "bench throughput", "bench startup"):
        text = show(*command.split(), "--help")
        assert "scheduler (7)" in text
        assert "--block-size" not in text


@pytest.mark.parametrize("columns", [60, 200])
def test_the_width_follows_the_terminal(columns: int, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = max(len(line) for line in show("serve", "--help=chat").splitlines() if not line.startswith("  --"))
    assert columns - 20 < longest <= columns
