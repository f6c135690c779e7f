"""`quire plan` prints layouts, and `quire serve --auto` takes the first."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.engine.cluster import ray_cluster
from quire.engine.config import devices
from quire.engine.config.devices import Devices
from quire.engine.config.machine import Machine, describe
from quire.engine.config.memory_plan import MemoryPlan, format_bytes, tokens_in_cache
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.config.topology import LinkType
from quire.engine.process import current_process, log
from quire.server.cli import plan, serve
from quire.server.cli.main import build_parser, main
from quire.server.cli.serve_options import read_options
from tests.fakes import published
from tests.fakes.model_configs import write_config


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(["plan", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.fixture(name="eight")
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine has eight GPUs."""
    machine = describe("8xH100", 1, 50.0)
    links = ((LinkType.NVLINK,) * 8,) * 8
    monkeypatch.setattr(devices, "free_gpu_memory", lambda: [machine.device.memory] * 8)
    monkeypatch.setattr(ray_cluster, "find", lambda options: None)
    monkeypatch.setattr(devices, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 8)

    def find(kind: str, groups: tuple[int, ...]) -> Devices:
        order = tuple(range(sum(groups))) if sum(groups) <= 8 else ()
        return Devices("cuda", 8, machine.device.memory, order, links)

    monkeypatch.setattr(devices, "find", find)
    return machine


def test_it_prints_the_layouts_and_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, eight: Machine
) -> None:
    """With the sizes of `serve`, whose flags it takes."""
    model = write_config(tmp_path, "Llama 3 70B")
    out, _ = run(capsys, model, "--max-model-len", "4096", "--gpu-memory-utilization", "0.85", "--input-len", "512")
    lines = out.splitlines()
    assert lines[0] == f"LlamaForCausalLM from {model}, bfloat16, on"
    assert lines[1].startswith("8 × H100-80G: 79.1 GiB free at 3,350 GB/s, ")
    assert "upper bounds" in out
    assert "a prompt of 512 tokens" in " ".join(out.split())
    row = next(line.split() for line in lines if line.split()[:3] == ["8", "1", "1"])
    config = resolve(
        EngineOptions(model=model, max_model_len=4096, gpu_memory_utilization=0.85, tensor_parallel_size=8)
    )
    assert " ".join(row[3:5]) == format_bytes(MemoryPlan.of(config).weights[0])
    assert row[5] == f"{tokens_in_cache(config):,}"
    assert {"bandwidth", "compute"} <= set(row)
    assert any(line.startswith("  -tp 1 -pp 1 -dp 8: Not enough memory: needs 13") for line in lines)
    assert lines[-1] == (f"  quire serve {model} -tp 4 -dp 2 --max-model-len 4096 --gpu-memory-utilization 0.85")


def test_a_length_that_does_not_fit_is_reduced_unless_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-120b fits one H100-80G by default. The bounds have their parts and their error."""
    flags = [str(published.FOLDER / "gpt-oss-120b"), "--gpus", "H100-80G"]
    out, _ = run(capsys, *flags)
    row = next(line.split() for line in out.splitlines() if line.split()[:3] == ["1", "1", "1"])
    assert row[5:8] == ["99,920", "99,920", "1.0"]
    assert "Requests to the first have at most 99,920 tokens instead of the model's 131,072" in out
    assert re.search(r"For a single request, -tp 1 -pp 1 -dp 1: a token takes \S+ ms \(.*launches .*, at most", out)
    assert "Published rates of other engines on GPUs are 29% to 82% of these bounds." in out
    out, _ = run(capsys, *flags, "--max-model-len", "-1")
    assert out.endswith("gpt-oss-120b --max-model-len auto\n")
    _, error = run(capsys, *flags, "--max-model-len", "131072", code=2)
    assert "holds 99,712 tokens, less than one request of 131,072 (4.79 GiB); use --max-model-len 99712" in error


def test_the_command_serves_what_was_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It has the flags of the layout, on each host, and the given flags."""
    model = write_config(tmp_path, "DeepSeek R1")
    flags = ["--max-model-len", "32768", "--no-enable-prefix-caching"]
    flags += ["--override-generation-config", '{"top_k": 3}']
    out, _ = run(capsys, model, *flags, "--gpus", "8xH200", "--nodes", "2", "--network", "25", "--json")
    found = json.loads(out)
    first = found["layouts"][0]
    assert found["machine"]["network"]["bandwidth"] == 25e9
    assert [command.rpartition("# ")[2] for command in first["commands"]] == ["on host 0", "on each other host R"]
    words = shlex.split(first["commands"][0].partition("#")[0])
    options, _ = read_options(build_parser().parse_args(words[1:]))
    asked = EngineOptions(
        model=model,
        max_model_len=32768,
        enable_prefix_caching=False,
        override_generation_config={"top_k": 3},
        nnodes=2,
        master_addr="HOST_0",
        **{name: first[name] for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")},
        enable_expert_parallel=first["enable_expert_parallel"],
    )
    assert options == asked
    rates = [layout["batch"]["tokens_per_second"] for layout in found["layouts"]]
    assert rates == sorted(rates, reverse=True)
    assert {each["reason"].partition(":")[0] for each in found["not_possible"]} == {"Not enough memory"}


def test_it_takes_the_command_line_of_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file, vLLM's flags and environment; the server's options have no effect."""
    model = write_config(tmp_path, "Llama 3 70B")
    file = tmp_path / "quire.yaml"
    file.write_text("max-model-len: 4096\nport: 9000\noptimize: latency\ntensor-parallel-size: 2")
    flags = ["--config", str(file), "--enable-auto-tool-choice", "--max_num_seqs", "64", "--api-key", "x"]
    out, error = run(capsys, model, "--gpus", "8xH200", *flags, "-tp", "4")
    assert error.startswith("quire: warning: --enable-auto-tool-choice has no effect: ")
    assert out.splitlines()[-1] == f"  quire serve {model} -tp 4 -dp 2 --max-model-len 4096 --max-num-seqs 64"
    assert "(--optimize latency)" in out


def test_the_address_of_host_0_is_the_one_that_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path, "Llama 3 70B")
    flags = ["--gpus", "8xH200", "--nodes", "2", "--master-addr", "10.0.0.1", "--node-rank", "1"]
    out, _ = run(capsys, model, *flags, "--json")
    [first, second] = json.loads(out)["layouts"][0]["commands"]
    assert first.count("--master-addr") == 1
    assert first.partition("    #")[0].endswith(" --nnodes 2 --master-addr 10.0.0.1")
    assert second.partition("    #")[0].endswith(" --nnodes 2 --master-addr 10.0.0.1 --headless --node-rank R")


def test_idle_gpus_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, _ = run(capsys, write_config(tmp_path, "Qwen3 0.6B"), "--gpus", "8xH100", "-pp", "3")
    assert "With the degrees that are given 2 of 8 GPUs are idle, as 6 are used." in out
    out, _ = run(capsys, write_config(tmp_path, "Qwen3 0.6B"), "--gpus", "8xH100", "-pp", "2")
    assert "are idle" not in out


def test_it_says_so_if_nothing_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path, "Llama 3 70B")
    out, error = run(capsys, model, "--gpus", "2xL4", code=2)
    assert "Layouts that are not possible:\n  -tp 1 -pp 1 -dp 2: Not enough memory" in out
    assert "quire serve" not in out
    assert error.startswith("quire: error: -tp 1 -pp 2 -dp 1 is not possible, nor are 2 others: Not enough mem")
    assert "use more ranks" in error
    out, _ = run(capsys, model, "--gpus", "2xL4", "--json", code=2)
    assert json.loads(out)["layouts"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8xH9000"), "H9000 is not known"),
        (("--gpus", "H100", "--device", "cpu"), "--gpus with --device cpu"),
        (("--gpus", "H100", "--nodes", "0"), "--nodes 0: must be at least 1"),
        (("--gpus", "H100", "--network", "0"), "--network 0: must be above 0"),
        (("--gpus", "H100", "--input-len", "0"), "--input-len 0: must be from 1 to 40959"),
        (("--gpus", "2xH100", "--max-num-seqs", "0"), "quire: error: --max-num-seqs must be at least 1, got 0"),
        (("--gpus", "2xH100", "--max-model-len", "-3"), "quire: error: --max-model-len -3 has no room"),
        (("--gpus", "H100", "-tp", "0"), "--tensor-parallel-size must be at least 1, got 0"),
        (("--gpus", "H100", "--runner", "pooling"), "embedding models cannot be planned"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, error = run(capsys, write_config(tmp_path, "Qwen3 0.6B"), *arguments, code=2)
    assert error.startswith("quire: error: ")
    assert message in error


def auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *arguments: str
) -> tuple[int, EngineOptions | None]:
    """Run `serve --auto` as far as it starts the engine; returns its options."""
    started: list[EngineOptions] = []

    def prepared_core(options: EngineOptions) -> contextlib.AbstractContextManager[None]:
        started.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "prepared_core", prepared_core)
    monkeypatch.setattr(current_process, "set_name", lambda name: None)
    logging.getLogger("quire").propagate = True
    monkeypatch.setattr(log, "setup", lambda level, name: None)
    with caplog.at_level("INFO", "quire"):
        code = main(["serve", *arguments, "--auto"])
    return code, started[0] if started else None


def test_auto_serves_the_first_layout_and_logs_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, eight: Machine
) -> None:
    model = write_config(tmp_path, "Llama 3 70B")
    _, options = auto(monkeypatch, caplog, model)
    assert options == EngineOptions(model=model, tensor_parallel_size=4, data_parallel_size=2)
    assert "--auto on 8 × H100-80G" in caplog.messages[0]
    assert "-tp 4 -pp 1 -dp 2, at most " in caplog.messages[0]
    assert [message[:15] for message in caplog.messages[1:4]] == ["--auto: or give"] * 3
    _, options = auto(monkeypatch, caplog, model, "--optimize", "latency")
    assert options == EngineOptions(model=model, tensor_parallel_size=8)


def test_what_is_given_wins_over_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, eight: Machine
) -> None:
    """A default that is given, too, in a file or on the command line."""
    model = write_config(tmp_path, "Llama 3 70B")
    file = tmp_path / "quire.yaml"
    file.write_text("tensor-parallel-size: 2")
    _, options = auto(monkeypatch, caplog, model, "--config", str(file), "-dp", "1")
    assert options == EngineOptions(model=model, tensor_parallel_size=2, pipeline_parallel_size=4)


def test_auto_needs_no_figures_for_the_only_layout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """On a CPU there is one rank, whose bandwidth is not measured."""

    def not_called(*_: Any) -> Machine:
        raise AssertionError

    monkeypatch.setattr(plan, "this_machine", not_called)
    model = write_config(tmp_path, "Mixtral 8x7B")
    _, options = auto(monkeypatch, caplog, model, "--device", "cpu")
    assert options == EngineOptions(model=model, device="cpu")
    assert caplog.messages[0] == "--auto: -tp 1 -pp 1 -dp 1, the only layout"


def test_auto_works_for_a_gpu_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, eight: Machine
) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["NVIDIA X"] * 8)
    model = write_config(tmp_path, "Llama 3 70B")
    _, options = auto(monkeypatch, caplog, model, "-pp", "1")
    assert options == EngineOptions(model=model, tensor_parallel_size=4, data_parallel_size=2)
    assert caplog.messages[0].startswith("the bandwidth and FLOPS of the GPU NVIDIA X are not known")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-tp", "3", "-pp", "1", "-dp", "1"), "--auto: -tp 3 -pp 1 -dp 1 is not possible: --tensor-parallel-size 3"),
        (("-tp", "16"), "--auto: -tp 16 -pp 1 -dp 1 is not possible: .*needs 16 GPUs on this host, but 8 are visible"),
        (("--nnodes", "2"), "--auto with --nnodes 2: all hosts need the same layout"),
        (("--headless", "-dpr", "1"), "--auto with --headless: all hosts need the same layout"),
        (("--distributed-executor-backend", "ray"), "--auto chooses for this host, not for a Ray cluster"),
    ],
)
def test_auto_rejects_what_contradicts_it(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    eight: Machine,
) -> None:
    code, options = auto(monkeypatch, caplog, write_config(tmp_path, "Llama 3 70B"), *arguments)
    assert (code, options) == (2, None)
    assert re.search(message, capsys.readouterr().err)


def test_secrets_are_not_printed() -> None:
    options = EngineOptions(cluster_token="a secret of many characters", kv_cache_dtype="int8")
    layout: Any = argparse.Namespace(
        options={
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
        }
    )
    assert plan.commands(options, layout) == ["quire serve --kv-cache-dtype int8"]
