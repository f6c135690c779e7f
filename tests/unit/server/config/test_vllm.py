"""vLLM's command lines: common flags and variables are accepted, ignored with a note, or refused in one line.

vllm_0_32.json has the facts of version 0.32.0 on these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config.options import EngineOptions
from quire.engine.protocol.errors import ConfigError
from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from quire.server.config import vllm, vllm_flags
from quire.server.config.engine_args import AsyncEngineArgs, EngineArgs
from quire.server.config.server_options import ServerOptions

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_0_32.json").read_text())
FLAGS: dict[str, dict[str, Any]] = FACTS["flags"]
VALUES = {"flag": "", "on/off": "", "one": "=", "several": "+", "optional": "?"}
OWN = build_parser().parse_args(["serve"]).parser._option_string_actions
UNSUPPORTED_VALUES = {
    "--kv-cache-dtype": {
        *("fp8_ds_mla", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla"),
        *("turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4", "ultraquant_4bit"),
    },
    "--runner": {"draft"},
    "--reasoning-parser": set(FLAGS["--reasoning-parser"]["choices"])
    - {
        *("deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3"),
        *("gemma4", "kimi_k2", "mimo", "minimax_m2", "mistral", "nemotron_v3", "olmo3", "openai_gptoss"),
        *("qwen3", "seed_oss", "step3", "step3p5"),
    },
    "--tool-call-parser": set(FLAGS["--tool-call-parser"]["choices"])
    - {
        *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm45", "glm47", "granite", "granite4"),
        *(
            "functiongemma",
            "gemma4",
            "hermes",
            "hunyuan_a13b",
            "hy_v3",
            "internlm",
            "kimi_k2",
            "lfm2",
            "llama3_json",
            "llama4_json",
        ),
        *("llama4_pythonic", "minimax_m2", "mistral", "olmo3", "openai", "phi4_mini_json", "pythonic"),
        *("qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5"),
    },
}
"""Choices of vLLM that Quire refuses, of flags that it has."""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "QUIRE_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


def read(*arguments: str) -> tuple[EngineOptions, ServerOptions, list[str]]:
    """The options, and the notes on flags without effect."""
    parsed = build_parser().parse_args(["serve", "some/model", *arguments])
    return *read_options(parsed), parsed.notes


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refusal, after the usage."""
    with pytest.raises(SystemExit) as ended:
        read(*arguments)
    assert ended.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    return line.removeprefix("quire serve: error: ")


def sample(flag: str) -> list[str]:
    """Values as vLLM takes them."""
    fact = FLAGS[flag]
    if VALUES[fact["values"]] == "":
        return []
    choices = [each for each in fact.get("choices", ["x"]) if each not in UNSUPPORTED_VALUES.get(flag, ())]
    return [fact.get("sample") or choices[-1]]


def value_of(name: str, text: str) -> Any:
    """The conversion of a value that vLLM has, too, by Quire's own flag, without the command line's parser."""
    if name in vllm_flags.SAME:
        text = vllm_flags.SAME[name][1](text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_the_table_agrees_with_vllm() -> None:
    """Flags take as many values as there, and none stays in the table when Quire gets it."""
    table = vllm.flags()
    names = {name: fact for flag, fact in FLAGS.items() for name in (flag, *fact.get("also", ()))}
    found = {name: flag.values for name, flag in table.items() if name in names}
    assert found == {name: VALUES[names[name]["values"]] for name in found}
    assert names.keys() <= table.keys() | OWN.keys()
    assert not table.keys() & OWN.keys()
    assert vllm_flags.SAME.keys() <= OWN.keys() & names.keys()
    lines = [*vllm_flags.IGNORED.values(), *vllm_flags.REFUSED.values(), *vllm_flags.RENAMED]
    written = [name for spec in " ".join(lines).split() for name in re.split(r"[=?+]", spec)[0].split("|")]
    assert len(written) == len(set(written))


@pytest.mark.parametrize("flag", sorted(FLAGS.keys() - {"--config", "--model"}))
def test_each_flag_is_taken_ignored_with_a_note_or_refused_in_one_line(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values, found = sample(flag), vllm.flags().get(flag)
    for name in (flag, *FLAGS[flag].get("also", ())):
        written = vllm.flags().get(name)
        if written is None:
            engine, server, notes = read(name, *values)
            assert len(notes) == (values[:1] != [] and values[0] in vllm_flags.REPLACED.get(flag, ()))
            found_value = (vars(engine) | vars(server))[OWN[name].dest]
            if not values:
                assert found_value is True
            elif name in vllm_flags.LISTS:
                assert found_value == tuple(json.loads(values[0]))
            elif FLAGS[flag]["values"] == "several":
                assert found_value == (values[0],)
            else:
                assert found_value == value_of(name, values[0])
        elif written.verdict in ("renamed", "parts"):
            assert read(name, *values)[2] == []
        elif written.verdict == "ignored":
            note = f"{written.names[0]} has no effect: {written.text}"
            assert read(name, *values) == (*read()[:2], [note])
        elif written.harmless:
            assert read(name, *written.harmless[:1]) == read()
            assert refusal(capsys, name, "another") == f"argument {name}: {written.text}"
        else:
            values = values or ["x"] * (written.values == "?")
            assert refusal(capsys, name, *values) == f"argument {name}: {written.text}"
    if FLAGS[flag]["values"] == "on/off" and found is not None:
        assert read(f"--no-{flag[2:]}")[:2] == read()[:2]


def test_the_choices_of_vllm_are_taken_where_quire_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (
        *("--dtype", "--runner", "--convert", "--kv-cache-dtype", "--scheduling-policy", "--log-level"),
        *("--reasoning-parser", "--tool-call-parser"),
    ):
        for choice in FLAGS[flag]["choices"]:
            if choice in UNSUPPORTED_VALUES.get(flag, ()):
                said = refusal(capsys, flag, choice)
                assert choice in said
                assert "parser" not in flag or "this format of" in said
            else:
                read(flag, choice)


@pytest.mark.parametrize("form", ["--max-model-len -1", "--max_model_len=-1", "--max-model-len auto"])
def test_the_length_may_be_what_fits(form: str) -> None:
    engine, _, _ = read(*form.split())
    assert engine.max_model_len == "auto"


def test_a_command_line_of_vllm() -> None:
    line = """--tensor_parallel_size 4 -pp 2 --host 0.0.0.0 --dtype half --max-model-len 16K --swap-space 16 -O3
    --enable-auto-tool-choice --tool-call-parser hermes --served-model-name a b --disable-log-requests
    --cudagraph-capture-sizes 1 2 4 -ep --no-enable-prefix-caching --model other/model --download-dir /models
    --generation-config vllm --override-generation-config '{"temperature": 0.5}' --max-num-partial-prefills 2
    --hf-overrides '{"a": 1}' --hf-overrides.rope_scaling.factor 4.0 --hf-overrides.architectures+ LlamaForCausalLM
    --rope-theta 5000 --eplb-config.step_interval=7 --compilation-config.mode 3 --attention-backend FLASH_ATTN
    --uvicorn-log-level warning --enable-log-requests"""
    parsed = build_parser().parse_args(["serve", *shlex.split(line)])
    engine, server = read_options(parsed)
    assert engine == EngineOptions(
        model="other/model",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        dtype="float16",
        max_model_len=16384,
        cuda_graph_sizes="1,2,4",
        enable_expert_parallel=True,
        enable_prefix_caching=False,
        download_dir="/models",
        generation_config="vllm",
        override_generation_config={"temperature": 0.5},
        max_num_partial_prefills=2,
        hf_overrides={
            "a": 1,
            "rope_theta": 5000.0,
            "rope_scaling": {"factor": 4.0},
            "architectures": ["LlamaForCausalLM"],
        },
        eplb_step_interval=7,
    )
    assert server == ServerOptions(
        host="0.0.0.0", served_model_name=("a", "b"), tool_call_parser="hermes", access_log=True
    )
    assert [note.split(" has no effect: ")[0] for note in parsed.notes if "instead" not in note] == [
        "--swap-space",
        "--optimization-level",
        "--enable-auto-tool-choice",
        "--disable-log-requests",
        "--uvicorn-log-level",
        "--compilation-config",
    ]
    assert "--attention-backend FLASH_ATTN: Quire uses auto instead" in parsed.notes


@pytest.mark.parametrize("form", ["-O3", "-O 3", "-O=3", "-O.mode 3", "-O.mode=3", '-O {"mode":3}', "-cc.mode 3"])
def test_levels_of_optimization_have_no_effect(form: str) -> None:
    engine, _, notes = read(*form.split(), "--seed", "7")
    assert (engine.seed, len(notes)) == (7, 1)


def test_values_that_cannot_be_converted_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--eplb-config: x: expected a JSON object" in refusal(capsys, "--eplb-config", "x")
    assert refusal(capsys, "--eplb-config.step_intervall", "1").endswith("step_intervall is not supported; omit it")
    assert refusal(capsys, "--convert", "reward") == "--convert reward is not supported; use embed"
    assert refusal(capsys, "--task", "draft") == "--task draft is not supported; use generate or embed"
    for flag in ("-qmoe_wna16", "--quantization=moe_wna16"):
        assert "--quantization: moe_wna16 is not supported; omit it, as the method" in refusal(capsys, flag)
    assert "invalid choice: 'FLASH_ATN'" in refusal(capsys, "--attention-backend", "FLASH_ATN")
    assert "invalid choice: 'deep_ep'" in refusal(capsys, "--all2all-backend", "deep_ep")
    assert "invalid number (GIB) value: '64G'" in refusal(capsys, "--kv-offloading-size", "64G")
    assert "invalid int value: 'infG'" in refusal(capsys, "--kv-cache-memory-bytes", "infG")
    for then in (("--hf-overrides.a.b", "2"), ("--hf-overrides.a+", "2")):
        assert "--hf-overrides has another kind of value there" in refusal(capsys, "--hf-overrides.a", "1", *then)
    assert "disable_any_whitespace is not supported" in refusal(
        capsys, "--structured-outputs-config", '{"disable_any_whitespace": true}'
    )
    assert refusal(capsys, "--swap-space") == "argument --swap-space: expected a value"
    assert "--hf-overrides.a: expected a value" in refusal(capsys, "--hf-overrides.a")
    assert "--hf-overrides: invalid JSON object value: '[]'" in refusal(capsys, "--hf-overrides", "[]")
    assert refusal(capsys, "--no-such-flag", "--x").startswith("unrecognized arguments: --no-such-flag --x; docs/")


def test_parts_of_json_flags_are_taken_or_named() -> None:
    _, server, notes = read(
        "--structured-outputs-config",
        '{"backend": "xgrammar", "reasoning_parser": "qwen3", "enable_in_reasoning": false}',
    )
    assert server.reasoning_parser == "qwen3"
    assert notes == ["--structured-outputs-config.backend has no effect: llguidance is the only backend"]
    engine, _, notes = read("-ac.backend", "FLASHINFER", "-ac.flash_attn_version=3", "--eplb-config.window_size", "9")
    assert engine.attention_backend == "flashinfer"
    assert [note.split()[0] for note in notes] == ["--attention-config.flash_attn_version", "--eplb-config.window_size"]


def test_a_profiler_is_torchs_or_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, server, notes = read("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}')
    assert (server.torch_profiler_dir, notes) == ("/tmp", [])
    assert read("--profiler-config.profiler", "null")[2] == []
    for other in ("cuda", "proton"):
        assert refusal(capsys, "--profiler-config.profiler", other) == (
            f"argument --profiler-config: profiler {other} is not supported; use torch"
        )
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/tmp")
    _, server, notes = read()
    assert server.torch_profiler_dir == "/tmp"
    assert notes == ["environment variable VLLM_TORCH_PROFILER_DIR=/tmp is the default of --torch-profiler-dir"]


def test_flags_of_earlier_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("--speculative-model", "m")[0].spec_model == "m"
    assert "use --spec-tokens" in refusal(capsys, "--num-speculative-tokens", "5")
    assert "modules.json" in refusal(capsys, "--override-pooler-config", "{}")
    assert len(read("--calculate-kv-scales", "--num-scheduler-steps", "9", "--use-v2-block-manager")[2]) == 3
    engine, *_ = read("--cuda-graph-sizes", "1", "2", "4", "--seed", "7")
    assert (engine.cuda_graph_sizes, engine.seed) == ("1,2,4", 7)


def test_a_value_that_is_replaced_is_named() -> None:
    engine, _, notes = read("--attention-backend", "flash_attn", "--all2all-backend=deepep_low_latency")
    assert (engine.attention_backend, engine.all2all_backend) == ("auto", "all_to_all")
    assert notes == [
        "--attention-backend flash_attn: Quire uses auto instead",
        "--all2all-backend deepep_low_latency: Quire uses all_to_all instead",
    ]


def test_objects_of_repeated_flags_are_merged() -> None:
    engine, *_ = read("--hf-overrides", '{"a": {"b": 1, "c": [1]}}', "--hf-overrides.a.d", "2", "-qfp8")
    assert engine.hf_overrides == {"a": {"b": 1, "c": [1], "d": 2}}
    assert engine.quantization == "fp8"


def test_keys_of_json_flags_keep_their_underscores_in_files(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("hf_overrides.rope_theta: 5000\nhf-overrides.use_cache: false\nhf-overrides.a_b: '1'")
    assert read("--config", str(file))[0].hf_overrides == {"rope_theta": 5000, "use_cache": False, "a_b": "1"}


def test_a_config_file_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: some/model\nport: 12323\ntensor_parallel_size: 4\nenable-auto-tool-choice: true\nenable-lora: false\n"
        "enable-prefix-caching: false\ncudagraph-capture-sizes: [1, 2]\nallowed-media-domains: []\nswap-space: 4\n"
        "compilation-config:\n  pass_config:\n    fuse_allreduce_rms: true\n"
        "hf-overrides:\n  rope_scaling: {factor: 2.0}\nhf-overrides.a: 1\n"
    )
    parsed = build_parser().parse_args(["serve", "--config", str(file), "--hf-overrides", '{"b": 2}', "-tp", "2"])
    engine, server = read_options(parsed)
    assert engine == EngineOptions(
        model="some/model",
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        cuda_graph_sizes="1,2",
        hf_overrides={"b": 2},
    )
    assert server.port == 12323
    assert [note.split()[0] for note in parsed.notes] == [
        "--enable-auto-tool-choice",
        "--swap-space",
        "--compilation-config",
    ]
    file.write_text("lora-dtype: float16")
    with pytest.raises(SystemExit):
        read("--config", str(file))


@pytest.mark.parametrize("name", FACTS["variables"])
def test_each_variable_is_taken_ignored_with_a_note_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    refused = {spec.partition("=")[0]: spec.partition("=")[2] for spec in vllm_flags.VARIABLES_REFUSED}
    if name in refused:
        harmless = (refused[name] or "0,False").split(",")
        wrong = "0" if "1" in harmless else "2"
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigError, match=rf"^environment variable {name}={wrong}: \w+"):
            read("--device", "cpu")
        for value in (*harmless, ""):
            monkeypatch.setenv(name, value)
            assert read("--device", "cpu")[2] == []
        return
    value = {"VLLM_LOGGING_LEVEL": "DEBUG"}.get(name, "1")
    monkeypatch.setenv(name, value)
    notes = [f"environment variables of vLLM have no effect: {name}"]
    if name in vllm_flags.VARIABLES:
        notes = []
        assert read()[2] == notes
        assert os.environ[vllm_flags.VARIABLES[name]] == "1"
    elif name in vllm_flags.VARIABLES_OF_FLAGS:
        flag = vllm_flags.VARIABLES_OF_FLAGS[name][0]
        notes = [f"environment variable {name}={value} is the default of {flag}"]
    assert read("--device", "cpu")[2] == notes


def test_variables_of_vllm_are_weaker_than_everything_of_quires(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "VLLM_API_KEY": "theirs",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1.5",
        "VLLM_PP_LAYER_PARTITION": "3,2",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "9",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QUIRE_HOST_IP", "10.0.0.2")
    file = tmp_path / "quire.yaml"
    file.write_text("timeout-keep-alive: 10")
    engine, server, notes = read("--pipeline-layer-partition", "1,4", "--config", str(file), "--device", "cpu")
    assert (engine.kv_cache_memory_bytes, engine.pipeline_layer_partition) == (3 << 29, "1,4")
    assert (server.log_level, server.timeout_keep_alive, len(notes)) == ("warning", 10, 4)
    assert (os.environ["QUIRE_API_KEY"], os.environ["QUIRE_HOST_IP"]) == ("theirs", "10.0.0.2")
    assert read("--device", "cuda")[0].kv_cache_memory_bytes is None
    for value in ("much", "inf"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
        with pytest.raises(ConfigError, match=f"VLLM_CPU_KVCACHE_SPACE={value}: expected a value for --kv-cache-mem"):
            read("--device", "cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert read("--device", "cpu")[0].kv_cache_memory_bytes is None
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "long")
    with pytest.raises(ConfigError, match=r"^environment variable VLLM_HTTP_TIMEOUT_KEEP_ALIVE=long: invalid"):
        read()


def test_an_empty_key_of_quires_does_not_hide_that_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    read()
    assert os.environ["QUIRE_API_KEY"] == "theirs"


def test_engine_args_are_read_changed_and_taken_from_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,2")
    args = EngineArgs("some/model", tensor_parallel_size=2, dtype="half", swap_space=4)
    assert (args.model, args.tensor_parallel_size, args.dtype) == ("some/model", 2, "float16")
    args.max_model_len = 64
    assert args.options == EngineOptions(
        model="some/model",
        tensor_parallel_size=2,
        dtype="float16",
        max_model_len=64,
        pipeline_layer_partition="3,2",
    )
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--own")
    parsed = parser.parse_args(["--model", "other/model", "-tp", "2", "--own", "x", "--no-enable-prefix-caching"])
    assert (parsed.own, parsed.pipeline_parallel_size) == ("x", 1)
    assert AsyncEngineArgs.from_cli_args(parsed).options == EngineOptions(
        model="other/model", tensor_parallel_size=2, enable_prefix_caching=False, pipeline_layer_partition="3,2"
    )


@pytest.mark.parametrize(
    ("config", "memory", "disk"),
    [
        ({}, None, None),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            | {
                "kv_connector_extra_config": {
                    "spec_name": "CPUOffloadingSpec",
                    "cpu_bytes_to_use": 3 << 29,
                    "block_size": 64,
                }
            },
            1.5,
            None,
        ),
        (
            {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_extra_config": {"kv_offload_backend": "cpu", "cpu_bytes_to_use": 1 << 30},
            },
            1,
            None,
        ),
        (
            {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_extra_config": {
                    "kv_offload_backend": "disk",
                    "cpu_bytes_to_use": 1 << 30,
                    "disk_path": "/var/kv",
                    "disk_capacity_bytes": 5 << 29,
                },
            },
            1,
            "/var/kv:2.5",
        ),
        (
            {
                "kv_connector": "LMCacheConnectorV1",
                "kv_connector_extra_config": {
                    "lmcache.max_local_cpu_size": 20,
                    "lmcache.local_disk": "file:///var/kv",
                    "lmcache.max_local_disk_size": 200.5,
                },
            },
            20,
            "/var/kv:200.5",
        ),
    ],
)
def test_connectors_to_the_own_host_are_tiers(config: dict[str, Any], memory: float | None, disk: str | None) -> None:
    expected = EngineOptions(model="some/model", kv_offloading_size=memory, kv_disk=disk)
    assert EngineArgs("some/model", kv_transfer_config=config).options == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_connector": "NixlConnector"}, "kv_connector NixlConnector is not supported; use --kv-offloading-size"),
        ({"kv_connector": []}, "kv_connector [] is not supported; use --kv-offloading-size"),
        ({"kv_connector_extra_config": 3}, "kv_connector_extra_config must be a JSON object, got 3"),
        ({"kv_role": "kv_producer"}, "kv_role kv_producer is not supported; use kv_both"),
        ({"kv_load_failure_policy": "fail"}, "what cannot be loaded is computed"),
        ({"kv_connector_module_path": "mine"}, "kv_connector_module_path is not supported"),
        ({"kv_connector_extra_config": {}}, "OffloadingConnector has no size; set cpu_bytes_to_use, or use --kv-offl"),
        (
            {"kv_connector_extra_config": {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs"}]}},
            "secondary_tiers is not supported, as Quire has tiers of its own; omit it, and use --kv-offloading-size",
        ),
        (
            {"kv_connector_extra_config": {"cpu_bytes_to_use": 1, "spec_name": "TieringOffloadingSpec"}},
            "spec_name TieringOffloadingSpec is not supported, as Quire has tiers of its own; use CPUOffloadingSpec",
        ),
        (
            {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "disk_path": "/var/kv"},
            },
            "disk_path has no size; set disk_capacity_bytes, or use --kv-disk",
        ),
        ({"kv_connector_extra_config": {"cpu_bytes_to_use": "much"}}, "expected a value for"),
    ],
)
def test_other_connectors_are_refused_by_key(changes: dict[str, Any], text: str) -> None:
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    with pytest.raises(ConfigError, match=f"^argument --kv-transfer-config: .*{re.escape(text)}"):
        EngineArgs("some/model", kv_transfer_config=config | changes)


@pytest.mark.parametrize("text", ["{kv_connector", "5"])
def test_a_connector_is_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^argument --kv-transfer-config: invalid JSON object value: '{text}'$"):
        vllm.translate(["--kv-transfer-config", text], set())


@pytest.mark.parametrize("own", [{"kv_offloading_size": 2}, {"kv_disk": "/var/kv:1"}])
def test_tiers_are_given_once(own: dict[str, Any]) -> None:
    """Which size would be meant? Values of other flags do not matter."""
    more = {"cpu_bytes_to_use": 1 << 30, "disk_path": "/var/kv", "disk_capacity_bytes": 1 << 30}
    config = {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": more}
    (flag,) = (f"--{name.replace('_', '-')}" for name in own)
    text = f"^argument --kv-transfer-config is the same as --kv-offloading-size and --kv-disk; omit it, or {flag}"
    with pytest.raises(ConfigError, match=text):
        EngineArgs("some/model", kv_transfer_config=config, **own)
    with pytest.raises(ConfigError, match=text):
        vllm.translate([flag, "1", "-tp", "1", "--kv-transfer-config", json.dumps(config)], {flag})
    vllm.translate(["-tp", "1", "--kv-transfer-config", json.dumps(config)], {flag})


def test_what_llm_takes_in_vllm_is_taken_or_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    args = EngineArgs(
        "some/model",
        swap_space=4,
        disable_log_stats=True,
        tokenizer_mode="auto",
        task="generate",
        cpu_offload_gb=0,
        enable_lora=False,
        skip_mm_profiling=True,
        compilation_config={"level": 3},
        max_seq_len_to_capture=8192,
        skip_tokenizer_init=False,
        disable_async_output_proc=True,
        additional_config={},
        offload_params=set(),
        dtype="torch.half",
        hf_token=True,
        quantization=None,
        allowed_media_domains={"example.org"},
    )
    assert args.options == EngineOptions(model="some/model", runner="generate", dtype="float16")
    assert {record.getMessage().split()[0] for record in caplog.records} == {
        *("--swap-space", "--disable-log-stats", "--skip-mm-profiling", "--compilation-config"),
        *("--max-seq-len-to-capture", "--disable-async-output-proc"),
    }
    assert args.server_options.allowed_media_domains == ("example.org",)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"skip_tokenizer_init": True}, "argument --skip-tokenizer-init: the tokenizer is the model's own"),
        ({"cpu_offload_gb": 4}, "argument --cpu-offload-gb: it is not supported; use more ranks"),
        ({"lora_dtype": "float16"}, "argument --lora-dtype: it is not supported; omit it"),
        ({"tensor_parallel": 2}, "--tensor-parallel: did you mean --tensor-parallel-size?"),
        ({"no_such_option": 1}, "unrecognized arguments: --no-such-option=1; docs/reference/vllm.md lists"),
        ({"hf_overrides": len}, "argument --hf-overrides: functions and classes are not supported"),
        ({"hf_overrides": {"a": {1}}}, "argument --hf-overrides: expected a JSON object"),
        ({"dtype": "float8"}, "argument --dtype: invalid choice: 'float8'"),
    ],
)
def test_options_of_programs_have_the_errors_of_the_command_line(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs("some/model", **option)
    assert message in str(refused.value)


def test_programs_have_the_chat_format_too(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(
        chat_template="{{ messages }}", structured_outputs_config={"reasoning_parser": "qwen3"}, log_level="INFO"
    )
    options = args.server_options
    assert (options.chat_template, options.reasoning_parser, options.log_level) == ("{{ messages }}", "qwen3", "info")
    assert EngineArgs().log_level == "warning"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert EngineArgs(profiler_config={"torch_profiler_dir": "/traces"}).server_options == ServerOptions(
        torch_profiler_dir="/traces", log_level="debug"
    )


def test_all_options_of_an_engine_are_the_same_as_options_of_a_program() -> None:
    options = EngineOptions(
        model="some/model",
        tensor_parallel_size=2,
        pipeline_layer_partition="3,2",
        dtype="float16",
        max_model_len="auto",
        hf_overrides={"rope_scaling": {"factor": 4.0}, "a_b": None},
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        cluster_token="-a secret = of many characters",
        cuda_graph_sizes="1,2",
        seed=-1,
    )
    assert EngineArgs(**vars(options)).options == options
