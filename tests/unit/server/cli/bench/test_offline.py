"""`quire bench throughput` and `latency` on a stand-in for the engine, and `startup`'s reading of a log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.config.options import EngineOptions
from quire.server.cli.bench import latency, startup, throughput
from quire.server.cli.main import build_parser, main
from quire.server.cli.serve_options import read_options
from tests.unit.server.cli.bench.test_serve import refusal

ENGINE_FLAGS = {f"--{name.replace('_', '-')}" for name in EngineOptions.__dataclass_fields__ if name != "model"}

FLAGS = {
    "throughput": """
        --disable-tqdm --help --input-len --num-prompts --num-warmups --output-json --output-len --random-input-len
        --random-output-len --random-prefix-len --random-range-ratio
    """,
    "latency": """
        --batch-size --disable-tqdm --help --input-len --num-iters --num-iters-warmup --output-json --output-len
    """,
    "startup": "--disable-tqdm --help --num-iters --num-iters-warmup --output-json",
}
THROUGHPUT_KEYS = """
elapsed_time num_requests total_num_tokens requests_per_second tokens_per_second total_output_tokens
output_tokens_per_second
"""


def own_flags(name: str) -> set[str]:
    """The flags of a benchmark that are not the engine's."""
    names = set(build_parser().parse_args(["bench", name]).parser._option_string_actions)
    assert names >= ENGINE_FLAGS
    return {flag for flag in names - ENGINE_FLAGS if flag.startswith("--") and not flag.startswith("--no-")}


def test_the_flag_lists_are_frozen() -> None:
    """The rest are the engine's, all of them."""
    for name, flags in FLAGS.items():
        assert own_flags(name) == set(flags.split())


def test_throughput(
    model_folder: Path, core_mode: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "result.json"
    command = ["bench", "throughput", str(model_folder), "--load-format", "dummy", "--device", "cpu", "--num-prompts"]
    command += ["6", "--input-len", "9", "--output-len", "4", "--num-warmups", "1", "--output-json", str(file)]
    assert main(command) == 0
    result = json.loads(file.read_text())
    assert list(result) == THROUGHPUT_KEYS.split()
    assert (result["num_requests"], result["total_num_tokens"], result["total_output_tokens"]) == (6, 6 * 13, 24)
    assert "6 requests, 54 tokens in, 24 out" in capsys.readouterr().out


def test_throughput_is_tokens_over_seconds() -> None:
    result = throughput.figures(4.0, 8, 100, 60)
    assert (result["requests_per_second"], result["tokens_per_second"]) == (2, 40)
    assert result["output_tokens_per_second"] == 15


def test_latency(
    model_folder: Path, core_mode: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    command = ["bench", "latency", str(model_folder), "--load-format", "dummy", "--device", "cpu", "--input-len", "9"]
    command += ["--output-len", "4", "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3"]
    assert main([*command, "--output-json", str(file), "--disable-tqdm"]) == 0
    result = json.loads(file.read_text())
    assert list(result) == ["avg_latency", "std_latency", "latencies", "percentiles"]
    assert len(result["latencies"]) == 3
    assert "2 × (9 tokens in, 4 out), 3 times" in capsys.readouterr().out


def test_latency_is_without_the_prefix_cache_unless_asked() -> None:
    parser = build_parser()
    assert parser.parse_args(["bench", "latency"]).enable_prefix_caching is False
    assert parser.parse_args(["bench", "latency", "--enable-prefix-caching"]).enable_prefix_caching is True


def test_latency_in_figures() -> None:
    result = latency.figures([1.0, 2.0, 3.0, 6.0])
    assert result["avg_latency"] == 3
    assert result["std_latency"] == pytest.approx(3.5**0.5)
    assert result["percentiles"]["50"] == 2.5
    assert result["percentiles"]["90"] == pytest.approx(3 + 0.7 * 3)


def test_startup_tells_phases_from_the_servers_log() -> None:
    line = "12:00:00 INFO [api] ready 3.25 s after the start (imports 0.21 s, engine in all 2.50 s)"
    found = startup.READY_LINE.search(line)
    assert found
    assert startup.read_phases(found[1], found[2]) == {"imports": 0.21, "engine in all": 2.5, "ready": 3.25}


def test_startup_in_figures() -> None:
    starts = [
        startup.StartupRun(4.0, {"ready": 3.0}),
        startup.StartupRun(2.0, {"ready": 1.0}),
        startup.StartupRun(9.0, {"ready": 1.5}),
    ]
    result = startup.figures(starts)
    assert list(result) == ["avg_startup_time", "startup_times", "startup_percentiles", "phases"]
    assert (result["avg_startup_time"], result["startup_percentiles"]["50"]) == (5.0, 4.0)
    assert result["phases"] == {"ready": {"median": 1.5, "min": 1.0, "max": 3.0}}
    assert re.search(r"in all +4.00 +2.00 +9.00", startup.table(result))


def test_startup_passes_on_what_it_was_given() -> None:
    parsed = build_parser().parse_args(["bench", "startup", "some/model", "-tp", "2", "--no-enable-prefix-caching"])
    arguments = startup.serve_arguments(parsed)
    engine, _ = read_options(build_parser().parse_args(["serve", *arguments]))
    assert engine == EngineOptions(model="some/model", tensor_parallel_size=2, enable_prefix_caching=False)


def test_the_users_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path, core_mode: Callable[[str], None]
) -> None:
    model = [str(model_folder), "--load-format", "dummy", "--device", "cpu"]
    for arguments, complaint in (
        (["throughput", *model, "--input-len", "200"], "prompt and output have 328 tokens, the model's maximum is 128"),
        (["throughput", str(tmp_path / "none")], "no such model folder"),
        (["throughput", "--output-json", "/proc/none/x"], "--output-json /proc/none/x: cannot write the file"),
        (["latency", *model, "--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1"),
        (["startup", "--num-iters", "0"], "--num-iters must be at least 1"),
    ):
        assert complaint in refusal(capsys, *arguments)
    core_mode("dead")
    assert "the weights do not fit" in refusal(capsys, "throughput", *model, "--input-len", "9", "--output-len", "2")
