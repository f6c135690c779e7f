"""Refusals before a weight is read, and the plan that is printed."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import httpx
import pytest
import torch

from quire import kernels
from quire.engine.architecture.families import from_hf_config, length_key, transformers_backend
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.feed_forward_spec import MLPSpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.cluster import ray_cluster
from quire.engine.config import cuda_graph_sizes, devices, parallel_config, topology
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig, GraphConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import find_load_format, with_overrides
from quire.kernels.cache import FP8_CAPABILITY
from tests.fakes import published

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _eight_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 8 << 30)


def folder(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(tmp_path)


def options(model: str, **changes: Any) -> EngineOptions:
    return EngineOptions(**{"model": model, "load_format": "dummy", "device": "cpu", **changes})


def fetch(model: str) -> None:
    asked = options(model, load_format="auto")
    fetch_weights(asked, resolve(asked))


def write_safetensors(path: Path, *, cut: int = 0, missing: str = "") -> None:
    """The weights of `LLAMA`, which are zeros, without their last bytes or a tensor."""
    header, end = {}, 0
    for name, tensor in checkpoint_tensors(from_hf_config(LLAMA), has_head=True).items():
        start, end = end, end + 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    header.pop(missing, None)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written)
    os.truncate(path, max(4, 8 + len(written) + end - cut))


def test_the_plan_says_what_each_rank_holds(tmp_path: Path) -> None:
    model = folder(tmp_path)
    config = resolve(options(model, tensor_parallel_size=2, pipeline_parallel_size=3, max_num_seqs=4))
    assert [list(stage) for stage in config.parallel.stages] == [[0, 1], [2, 3], [4, 5]]
    assert config.parallel.executor == "mp"
    assert config.scheduler.depth == 3
    assert config.cache.num_blocks == 4 * 2048 // 16
    text = plan_text(config)
    assert "stage 2 (ranks 4-5): layers 4-5" in text
    assert "4.0 requests at the full length of 2,048" in text


@pytest.mark.parametrize(("tp", "pp", "depth"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 3, 3)])
def test_a_single_stage_of_processes_runs_one_plan_ahead(tmp_path: Path, tp: int, pp: int, depth: int) -> None:
    asked = options(folder(tmp_path), tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert resolve(asked).scheduler.depth == depth


def test_the_token_budget_is_dynamic_unless_given(tmp_path: Path) -> None:
    model = folder(tmp_path)
    tuned = resolve(options(model, itl_target_ms=50.0))
    assert (tuned.scheduler.max_num_batched_tokens, tuned.scheduler.dynamic_chunking) == (512, True)
    assert tuned.scheduler.itl_target == 0.05
    assert "up to 512 tokens a step" in plan_text(tuned)
    fixed = resolve(options(model, max_num_batched_tokens=512))
    assert (fixed.scheduler.max_num_batched_tokens, fixed.scheduler.dynamic_chunking) == (512, False)
    whole = resolve(options(model, enable_chunked_prefill=False))
    assert (whole.scheduler.max_num_batched_tokens, whole.scheduler.dynamic_chunking) == (2048, False)


def test_layers_are_partitioned_as_requested(tmp_path: Path) -> None:
    model = folder(tmp_path)
    config = resolve(options(model, pipeline_parallel_size=3, pipeline_layer_partition="3,2,1"))
    assert [len(stage) for stage in config.parallel.stages] == [3, 2, 1]
    assert [len(s) for s in resolve(options(model, pipeline_parallel_size=4)).parallel.stages] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, r"3 does not divide.*8 attention heads.*sizes that do: 1, 2, 4, 8"),
        ({"tensor_parallel_size": 0}, r"--tensor-parallel-size must be at least 1, got 0"),
        ({"pipeline_parallel_size": 7}, r"7 is more than the model's 6 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "3,2"}, r"the sum 6"),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "3;3"}, r"as in 3,2,1"),
        ({"max_model_len": 4096}, r"more than the model's 2048 positions"),
        ({"kv_cache_memory_bytes": 100_000}, r"use --max-model-len \d+ or less"),
        ({"kv_cache_memory_bytes": "50M"}, "--kv-cache-memory-bytes must be a number, got '50M'"),
        ({"kv_cache_memory_bytes": 1 << 40}, r"1.0 TiB\) does not fit: \S+ GiB per rank is available"),
        ({"gpu_memory_utilization": 1.5}, r"at most 1, got 1.5"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, r"at least the model length \(2048\)"),
        ({"itl_target_ms": 50.0, "max_num_batched_tokens": 512}, r"needs --max-num-batched-tokens auto"),
        ({"itl_target_ms": 50.0, "enable_chunked_prefill": False}, r"and chunked prefill"),
        ({"itl_target_ms": 0.0}, r"--itl-target-ms must be above 0"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, r"supports one rank, not 2"),
        ({"device": "cuda"}, r"no NVIDIA GPU is visible"),
        ({"max_model_len": 1}, r"--max-model-len 1 has no room for a prompt and an output token; use 2 or more"),
        ({"attention_backend": "triton"}, r"--attention-backend triton needs a GPU; omit it to use the CPU"),
        ({"attention_backend": "flashinfer"}, r"--attention-backend flashinfer needs a GPU"),
    ],
)
def test_unsupported_options_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ray_cluster.resolve(options(folder(tmp_path), **changes))


def describe(request: transformers_backend.DescribeRequest) -> NoReturn:
    """transformers cannot build it either."""
    raise ConfigError(f"transformers cannot build {request.path}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["CpmAntForCausalLM"]},
            r"json: CpmAntForCausalLM is not supported: it has no .*; docs/reference/models\.md lists the models",
        ),
        ({"architectures": None}, r"json: no architectures, and no model_type that .*--hf-overrides"),
        ({"hidden_act": "mish"}, "'mish' is not supported"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "'axial' is not supported"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
            "cannot choose 5 of 4 experts",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 0},
            r"config\.json: num_experts_per_tok must be a whole number of at least 1, got 0",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["linear_attention"] * 6},
            "layers of type linear_attention are not supported",
        ),
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": 0}, r"config\.json: num_hidden_layers must be a whole number of at least 1, got 0"),
        ({"head_dim": 7}, "at least 2; heads have 7"),
        ({"hidden_size": "wide"}, r'config\.json: hidden_size must be a whole number of at least 1, got "wide"'),
    ],
)
def test_unsupported_model_features_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe)
    with pytest.raises(ConfigError, match=message):
        resolve(options(folder(tmp_path, **changes)))


@pytest.mark.parametrize("dense", [{}, {"num_local_experts": 0}, {"num_experts_per_tok": None}])
def test_a_model_without_experts_may_choose_none_of_them(tmp_path: Path, dense: dict[str, Any]) -> None:
    """Granite 4's dense models have such a config.json."""
    config = resolve(options(folder(tmp_path, **{"num_experts_per_tok": 0, **dense})))
    assert isinstance(config.model.architecture, ModelSpec)
    assert {type(layer.feed_forward) for layer in config.model.architecture.layers} == {MLPSpec}


def test_a_config_that_lacks_a_number_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        resolve(options(str(tmp_path)))


def test_dummy_weights_that_do_not_fit_have_a_plan_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    for load_format, stages in (("dummy", ["layers 0-39", "layers 40-79"]), ("safetensors", [])):
        with pytest.raises(ConfigError, match="Not enough memory") as error:
            resolve(options(str(tmp_path), load_format=load_format, pipeline_parallel_size=2))
        plan = "\n".join(getattr(error.value, "__notes__", ()))
        assert (
            re.findall(r"stage \d \(rank \d\): (layers \S+), per rank weights 131 GiB, no room for a", plan) == stages
        )


def test_a_sliding_window_needs_no_more_than_itself_and_a_chunk(tmp_path: Path) -> None:
    model = folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    config = resolve(options(model, **settings))
    assert config.model.max_model_len == 2048
    assert [(group.window, group.layers) for group in config.cache.groups] == [(128, (tuple(range(6)),))]
    per_request = 1 + (127 + 64 - 1 + 15) // 16
    assert config.cache.num_blocks == 4 * per_request
    text = plan_text(config)
    assert "block tables: 1 for layers that keep a window of 128 tokens" in text
    assert f"{(4 * per_request - 4) / 9:.1f} requests at the full length of 2,048" in text

    block = MemoryPlan.of(config).kv_block[0]
    resolve(options(model, kv_cache_memory_bytes=per_request * block, **settings))
    with pytest.raises(ConfigError, match=r"holds 192 tokens, .*-len 192 or less, --max-num-batched-tokens"):
        resolve(options(model, kv_cache_memory_bytes=(per_request - 1) * block, **settings))
    shorter = resolve(options(model, kv_cache_memory_bytes=(per_request - 1) * block, max_model_len=192, **settings))
    assert shorter.cache.max_blocks(192, 64) == per_request - 1


def test_a_window_that_no_request_outgrows_is_none(tmp_path: Path) -> None:
    model = folder(tmp_path, architectures=["MistralForCausalLM"], sliding_window=512)
    for length, window in ((512, None), (513, 512)):
        config = resolve(options(model, max_model_len=length))
        assert [group.window for group in config.cache.groups] == [window]
        assert ("a window of 512" in plan_text(config)) == (window is not None)
    unused = resolve(options(folder(tmp_path, sliding_window=512)))
    assert [group.window for group in unused.cache.groups] == [None]


@pytest.mark.parametrize(
    ("length", "scaling", "expected"),
    [
        (4096, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        (1024, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 1024),
    ],
)
def test_scaled_positions_reach_as_far_as_they_are_stretched(
    length: int, scaling: dict[str, Any], expected: int
) -> None:
    """As model cards tell people to add yarn, by a line in config.json, its length left as it is."""
    config = {**LLAMA_70B, "max_position_embeddings": length, "rope_scaling": scaling}
    assert from_hf_config(config).max_position == expected


def test_a_refused_length_names_the_keys_that_extend_it(tmp_path: Path) -> None:
    """As config.json has them: elsewhere they would have no effect."""
    name = ["Mistral3ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": name, "text_config": LLAMA}))
    keys = r"set --hf-overrides\.text_config\.max_position.* 4096 and --hf-overrides\.text_config\.rope_scaling$"
    with pytest.raises(ConfigError, match=keys):
        resolve(options(str(tmp_path), max_model_len=4096))
    longer = {"text_config": {"max_position_embeddings": 4096}}
    assert resolve(options(str(tmp_path), max_model_len=4096, hf_overrides=longer)).model.max_model_len == 4096
    with pytest.raises(ConfigError, match=r"set --hf-overrides\.max_position.* 4096 and --hf-overrides\.rope_scaling$"):
        resolve(options(folder(tmp_path), max_model_len=4096))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"max_position_embeddings": None, "n_positions": 64}, "n_positions"),
        ({"language_config": {"model_max_length": 64}, "model_max_length": 9}, "language_config.model_max_length"),
        ({"vlm_config": {"text_config": {}}}, "vlm_config.text_config.max_position_embeddings"),  # a family's default
        ({"text_config": {}, "n_positions": 64}, "n_positions"),
    ],
)
def test_the_key_of_the_length_is_found_where_it_stands(config: dict[str, Any], key: str) -> None:
    assert length_key(config) == key


def test_whole_weights_are_accepted_and_garbage_is_not(tmp_path: Path) -> None:
    model, file = folder(tmp_path), tmp_path / "model.safetensors"
    write_safetensors(file)
    fetch(model)
    missing = "model.layers.5.mlp.gate_proj.weight"
    for wrong, message in (
        ({"cut": 1}, r"model\.safetensors: truncated"),
        ({"cut": 16}, r"model\.safetensors: truncated"),
        ({"cut": 1 << 30}, r"model\.safetensors: truncated"),
        ({"cut": -5}, r"longer than its header says: [\d,]+ bytes instead of"),
        ({"missing": missing}, rf"match config.json: {re.escape(missing)} is missing$"),
    ):
        write_safetensors(file, **wrong)
        with pytest.raises(ConfigError, match=message):
            fetch(model)
    file.write_bytes(struct.pack("<Q", 4) + b"oops")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        fetch(model)
    file.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors found"):
        fetch(model)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    model = folder(tmp_path)
    write_safetensors(tmp_path / "model-00001.safetensors")
    index = {"weight_map": {"w": "model-00001.safetensors", "v": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00002\.safetensors: cannot be read: No such file"):
        fetch(model)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(options(str(tmp_path)))


def test_values_of_config_json_can_be_overridden(tmp_path: Path) -> None:
    """Values are overridden as a whole, values of parts one by one."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    changes = {"max_position_embeddings": 512, "rope_scaling": scaling, "architectures": ["MistralForCausalLM"]}
    model = resolve(options(folder(tmp_path), hf_overrides=changes)).model
    assert (model.max_model_len, model.architecture.name) == (2048, "MistralForCausalLM")
    assert model.architecture != resolve(options(folder(tmp_path, max_position_embeddings=512))).model.architecture
    assert model.architecture == resolve(options(folder(tmp_path, **changes))).model.architecture
    config = {"a_config": {"b": 1, "c": 2}, "scaling": {"b": 1}}
    changed = with_overrides(config, {"a_config": {"c": 3}, "scaling": {"c": 3}})
    assert changed == {"a_config": {"b": 1, "c": 3}, "scaling": {"c": 3}}
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        resolve(options(folder(tmp_path), hf_overrides={"num_hidden_layers": "many"}))


def test_older_names_override_the_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 7000.0}
    scaling = {"type": "linear", "factor": 4.0}
    assert with_overrides({"rope_parameters": rope}, {"rope_theta": 5.0}) == {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}
    }
    assert with_overrides({"rope_parameters": rope}, {"rope_scaling": scaling}) == {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 7000.0, **scaling}
    }
    assert with_overrides({"rope_parameters": {**rope, **scaling}}, {"rope_scaling": None}) == {"rope_parameters": rope}
    assert with_overrides({"text_config": {"rope_parameters": rope}}, {"text_config": {"rope_theta": 5.0}}) == {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    }
    changes = {"rope_theta": 5.0, "rope_scaling": scaling}
    found = resolve(options(folder(tmp_path, rope_parameters=rope), hf_overrides=changes)).model.architecture
    assert found == resolve(options(folder(tmp_path, **changes))).model.architecture
    each = {"full_attention": rope, "sliding_attention": rope}
    for changed, value in ((each, 5.0), (rope, 5)):
        name = "rope_theta" if changed is each else "rope_scaling"
        with pytest.raises(ConfigError, match=rf"--hf-overrides {name}: this config.json has rope_parameters"):
            with_overrides({"rope_parameters": changed}, {name: value})


def test_the_method_of_a_quantized_checkpoint_may_be_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    model = resolve(options(folder(tmp_path, **fp8), quantization="fp8")).model
    assert model.quantization is None
    assert model.quantized is None or model.quantized.name == "fp8"
    assert "--quantization fp8 has no effect: the checkpoint is quantized with it" in caplog.messages
    with pytest.raises(ConfigError, match="--quantization mxfp4: the checkpoint is quantized with fp8; omit the flag"):
        resolve(options(str(tmp_path), quantization="mxfp4"))
    with pytest.raises(ConfigError, match="--quantization gptq: the checkpoint is not quantized; omit the flag"):
        resolve(options(folder(tmp_path), quantization="gptq"))


def test_default_sampling_parameters_come_from_where_the_user_says(tmp_path: Path) -> None:
    """The end-of-sequence tokens remain the model's unless they are overridden."""
    model, other = folder(tmp_path), tmp_path / "other"
    other.mkdir()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 5, "eos_token_id": 7}')
    (other / "generation_config.json").write_text('{"top_p": 0.5, "presence_penalty": 1.0, "max_length": 20}')

    def found(**changes: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
        resolved = resolve(options(model, **changes)).model
        return resolved.sampling_defaults, resolved.eos_token_ids

    assert found() == ({"temperature": 0.25, "top_k": 5}, (7,))
    assert found(generation_config="vllm") == ({}, (7,))
    assert found(generation_config=str(other)) == ({"top_p": 0.5, "presence_penalty": 1.0}, (2,))
    changes = {"temperature": 0.5, "eos_token_id": [8, 9]}
    assert found(override_generation_config=changes) == ({"temperature": 0.5, "top_k": 5}, (8, 9))
    assert found(generation_config="vllm", override_generation_config={"top_p": 1}) == ({"top_p": 1}, (7,))
    for wrong, complaint in (
        ({"override_generation_config": {"max_length": 5}}, "max_length is not supported; the defaults that"),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1, got 0"),
        ({"override_generation_config": {"temperature": -1.0}}, "--override-generation-config: temperature must be"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature must be of type `float`, got `str`"),
        ({"generation_config": str(tmp_path / "none")}, "expected a folder with generation_config.json"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            found(**wrong)


def test_max_new_tokens_is_a_default_and_where_the_user_sets_it_also_a_limit(tmp_path: Path) -> None:
    model = folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9}')

    def found(**changes: Any) -> tuple[dict[str, Any], int | None]:
        resolved = resolve(options(model, **changes)).model
        return resolved.sampling_defaults, resolved.max_output_tokens

    assert found() == ({"max_tokens": 9}, None)
    assert found(generation_config="vllm") == ({}, None)
    assert found(generation_config=str(tmp_path)) == ({"max_tokens": 9}, 9)
    assert found(override_generation_config={"max_new_tokens": 5}) == ({"max_tokens": 5}, 5)


def test_prompts_share_steps_only_with_chunked_prefill(tmp_path: Path) -> None:
    flags = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 64}
    scheduler = resolve(options(folder(tmp_path), **flags)).scheduler
    assert (scheduler.max_num_partial_prefills, scheduler.long_prefill_token_threshold) == (2, 64)
    for name, value in flags.items():
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} needs chunked prefill"):
            resolve(options(folder(tmp_path), **{name: value}, **whole))


def test_a_folder_without_config_and_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json found"):
        resolve(options(str(tmp_path)))
    with pytest.raises(ConfigError, match="no such model folder"):
        resolve(options(str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="no such model folder"):
        resolve(options("no/where/else"))


def test_an_unreachable_repository_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="Qwen/Qwen3-8B: cannot be downloaded and is not in the local cache"):
        resolve(options("Qwen/Qwen3-8B"))
    with pytest.raises(ConfigError, match="gpt2: cannot be downloaded and is not in the local cache"):
        resolve(options("gpt2"))


def cache(folder: Path, repository: str, *files: str) -> None:
    """A repository of `LLAMA` as Hugging Face's cache lays it out; the files are empty."""
    place = folder / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / "12ab"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("12ab")
    for name in files:
        (snapshot / name).touch()
    (snapshot / "config.json").write_text(json.dumps(LLAMA))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("pytorch_model.bin",), "pt"),
        (("pytorch_model.bin.index.json",), "pt"),
        (("pytorch_model.bin", "model.safetensors"), "safetensors"),
        (("pytorch_model.bin.index.json", "model.safetensors.index.json"), "safetensors"),
        (("training_args.bin",), "safetensors"),
    ],
)
def test_weights_of_torch_are_read_where_there_are_no_others(
    files: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a folder, in a cached repository whose id has no owner, and in one that is yet to be downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache(tmp_path, "gpt2", *files)
    cache(tmp_path, "facebook/opt-13b")
    ids = ["gpt2", str(tmp_path / "models--gpt2" / "snapshots" / "12ab")]
    found = [options(each, load_format="auto", download_dir=str(tmp_path)) for each in ids]
    assert [resolve(each).model.load_format for each in found] == [expected, expected]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, *, revision: list(files))
    opt = options("facebook/opt-13b", load_format="auto", download_dir=str(tmp_path))
    assert resolve(opt).model.load_format == expected
    for complaint in (httpx.ConnectError("refused"), ConnectionError("refused")):
        list_files = Mock(side_effect=complaint)
        monkeypatch.setattr("huggingface_hub.list_repo_files", list_files)
        assert [find_load_format(each.model, None, resolve(each).model.path) for each in found] == [expected] * 2
        assert list_files.called == (files == ("training_args.bin",))
    warnings = list(dict.fromkeys(record.getMessage() for record in caplog.records if record.levelname == "WARNING"))
    assert [text.split(" has its weights only as")[0] for text in warnings] == [*ids, opt.model] * (expected == "pt")


def test_every_decode_finds_room_in_a_step(tmp_path: Path) -> None:
    config = resolve(options(folder(tmp_path), max_num_batched_tokens=8))
    assert config.scheduler.max_num_seqs == 8


def test_weights_of_a_repository_are_downloaded_only_after_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only the files that the index names: some repositories hold the weights twice."""
    asked: list[list[str]] = []
    folder(tmp_path)
    write_safetensors(tmp_path / "model-00001.safetensors")
    write_safetensors(tmp_path / "consolidated.safetensors", cut=3)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001.safetensors"}}')

    def snapshot_download(
        repository: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]
    ) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match="does not divide"):
        resolve(options("Qwen/Qwen3-8B", load_format="auto", tensor_parallel_size=3))
    assert not any("safetensors" in pattern for patterns in asked for pattern in patterns if "index" not in pattern)
    fetch("Qwen/Qwen3-8B")
    assert asked[-1] == ["model-00001.safetensors"]
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "pytorch_model-1.bin"}}')
    pickled = options("Qwen/Qwen3-8B", load_format="pt")
    with pytest.raises(ConfigError, match=r"pytorch_model-1\.bin: cannot be read: No such file"):
        fetch_weights(pickled, resolve(pickled))
    assert asked[-1] == ["pytorch_model-1.bin"]


def test_on_a_cpu_one_request_at_full_length_always_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 256 << 30)
    sizes = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    long = folder(tmp_path, **sizes, max_position_embeddings=40960)
    config = resolve(options(long, tensor_parallel_size=2))
    assert config.cache.num_blocks * config.cache.block_size >= 40960


@pytest.mark.parametrize(("quantization", "size"), [(None, "263"), ("int8", "68.7"), ("int4", "40.8")])
def test_a_model_that_does_not_fit_is_refused_with_its_size(
    tmp_path: Path, quantization: str | None, size: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    numbers = rf"needs \S+ GiB per rank \(weights {size} GiB .*, 7\.2 GiB available \(0.9 of 8 GiB free\)"
    with pytest.raises(ConfigError, match=numbers):
        resolve(options(str(tmp_path), quantization=quantization))


def test_quantization_that_cannot_be_is_refused(tmp_path: Path) -> None:
    narrow = folder(tmp_path, intermediate_size=8 * 40)
    with pytest.raises(ConfigError, match=r"int4 needs .* multiple of 32; with --tensor-parallel-size 4 .* has"):
        resolve(options(narrow, quantization="int4", tensor_parallel_size=4))
    assert resolve(options(narrow, quantization="int8", tensor_parallel_size=4)).model.quantization == "int8"


@pytest.mark.parametrize(
    ("quantization", "dtype", "expected"),
    [(None, "bfloat16", "bfloat16"), ("int8", "float32", "bfloat16"), ("int4", "float16", "float16")],
)
def test_the_kv_cache_is_16_bit_with_quantized_weights(
    tmp_path: Path, quantization: str | None, dtype: str, expected: str
) -> None:
    assert resolve(options(folder(tmp_path), quantization=quantization, dtype=dtype)).cache.dtype == expected


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("auto", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
        ("fp8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("int4", "int4"),
    ],
)
def test_the_kv_cache_has_its_own_dtype(tmp_path: Path, asked: str, dtype: str) -> None:
    """And takes the memory that the plan says."""
    config = resolve(options(folder(tmp_path), kv_cache_dtype=asked, kv_cache_memory_bytes=1 << 24))
    arch, cache = config.model.architecture, config.cache
    assert cache.dtype == dtype
    assert (f"tokens in {dtype}" in plan_text(config)) == (asked != "auto")
    attention = arch.layers[0].attention
    assert attention is not None
    num_tensors, kv_heads, head_dim = attention.kv_shape(1)
    allocated = kernels.allocate_kv_cache(
        arch.num_layers,
        3,
        kv_heads,
        cache.block_size,
        head_dim,
        kernels.kv_cache_dtype(dtype),
        torch.device("cpu"),
        num_tensors,
    )
    block = MemoryPlan.of(config).kv_block[0]
    assert allocated.nbytes == 3 * block


@pytest.mark.parametrize("wrong", [{"quantization": "hqq"}, {"dtype": "float8"}, {"kv_cache_dtype": "int2"}])
def test_invalid_choices_are_rejected_from_python_too(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"must be one of .*, got {next(iter(wrong.values()))}"):
        resolve(options(folder(tmp_path), **wrong))


def test_replicas_share_the_host(tmp_path: Path) -> None:
    alone = resolve(options(folder(tmp_path)))
    config = resolve(options(folder(tmp_path), data_parallel_size=3, data_parallel_size_local=2))
    assert config.parallel.local_replicas == range(2)
    assert config.cache.num_blocks <= alone.cache.num_blocks
    assert "3 replicas, which run independently: replicas 0-1 on this host" in plan_text(config)
    second = resolve(options(folder(tmp_path), data_parallel_size=3, data_parallel_start_rank=2))
    assert "3 replicas, which run independently: replica 2 on this host" in plan_text(second)


def test_a_host_with_the_api_alone_needs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 1)
    config = resolve(options(folder(tmp_path), data_parallel_size=2, data_parallel_size_local=0))
    assert plan_text(config).splitlines()[-1] == "  2 replicas, none of them on this host"
    with pytest.raises(ConfigError, match="Not enough memory: needs"):
        resolve(options(folder(tmp_path), data_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 1025}, "--data-parallel-size 1025: at most 1024 replicas"),
        ({"data_parallel_start_rank": 2}, "there are 2 replicas"),
        ({"data_parallel_start_rank": -1}, "there are 2 replicas"),
        ({"data_parallel_size_local": 3}, "there are 2 replicas"),
        ({"data_parallel_start_rank": 0, "data_parallel_size_local": 0}, "omit one of them"),
    ],
)
def test_replica_numbers_out_of_range_are_rejected(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(options(folder(tmp_path), **{"data_parallel_size": 2, **changes}))


def test_a_headless_host_need_not_know_the_number_of_replicas(tmp_path: Path) -> None:
    """Nor agree on it with others, unless they share experts."""
    given = options(folder(tmp_path), data_parallel_start_rank=4, data_parallel_size_local=2)
    joining = resolve(parallel_config.for_headless(given))
    assert (joining.parallel.local_replicas, joining.parallel.replicas) == (range(4, 6), 6)
    assert joining.shared_settings == resolve(options(folder(tmp_path))).shared_settings
    assert "--data-parallel-size" not in joining.shared_settings
    assert parallel_config.for_headless(replace(given, data_parallel_size=8)).data_parallel_size == 8
    experts = replace(given, enable_expert_parallel=True)
    assert parallel_config.for_headless(experts) == experts
    assert not joining.parallel.accepts_hosts
    assert resolve(options(folder(tmp_path), data_parallel_address="127.0.0.1")).parallel.accepts_hosts


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, memory: int = 24 << 30) -> None:
    monkeypatch.setattr(devices, "find", lambda kind, groups: devices.Devices("cuda", sum(groups), memory))


def test_a_cache_that_the_gpus_cannot_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only used GPUs count; a capability that NVML does not report is left to the ranks."""
    model = folder(tmp_path)
    found = devices.Devices("cuda", 3, 24 << 30, (2, 1), ((LinkType.UNKNOWN,) * 3,) * 3)
    monkeypatch.setattr(devices, "find", lambda kind, groups: found)

    def asked(dtype: str, *capabilities: tuple[int, int], **more: Any) -> str:
        monkeypatch.setattr(devices, "gpu_capabilities", lambda: list(capabilities))
        changes = {"tensor_parallel_size": 2, "kv_cache_dtype": dtype, **more}
        return resolve(options(model, **{"device": "cuda", **changes})).cache.dtype

    for dtype in ("fp8", "fp8_e4m3"):
        assert asked(dtype, (8, 6), (8, 9), (9, 0)) == asked(dtype) == "fp8"
        with pytest.raises(
            ConfigError,
            match=rf"--kv-cache-dtype {dtype} needs GPUs of compute capability 8.9 or higher, but GPU 1 has 8.6; use "
            "--kv-cache-dtype int8 or auto",
        ):
            asked(dtype, (9, 0), (8, 6), (9, 0))
    old = [(7, 5)] * 3
    assert asked("int8", *old) == "int8"
    assert asked("fp8", *old, attention_backend="reference") == "fp8"
    found = devices.Devices("cpu", 3, 24 << 30)
    assert asked("fp8", *old, device="cpu") == "fp8"
    assert devices.FP8_CAPABILITY == FP8_CAPABILITY


def test_decodes_are_captured_for_sizes_that_pad_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder(tmp_path)
    on_cpu = resolve(options(model, cuda_graph_sizes="1,2", max_num_seqs=12))
    assert on_cpu.graphs == GraphConfig(sizes=tuple(range(1, 18)))  # one token, and 16 drafts
    alone = resolve(options(model, max_num_seqs=12, spec_method="none"))
    assert alone.graphs == GraphConfig(sizes=tuple(range(1, 13)))
    assert resolve(options(model, enforce_eager=True)).graphs == GraphConfig(disabled_reason="--enforce-eager")
    on_a_gpu(monkeypatch)

    def sizes(**changes: Any) -> tuple[int, ...]:
        return resolve(options(model, device="cuda", **changes)).graphs.sizes

    assert sizes() == (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
    assert sizes(max_num_seqs=1) == (1,)
    assert sizes(max_num_seqs=3) == (1, 2, 3)
    assert sizes(max_num_seqs=20) == (1, 2, 4, 8, 16, 20)
    assert sizes(max_num_seqs=1200)[-3:] == (1024, 1152, 1200)
    assert sizes(cuda_graph_sizes="8, 1,8,20") == (1, 8, 20)
    assert sizes(enforce_eager=True) == ()
    for text in ("", "0", "1,,2", "-1", "a"):
        with pytest.raises(ConfigError, match="--cuda-graph-sizes must be positive numbers"):
            sizes(cuda_graph_sizes=text)
    with pytest.raises(ConfigError, match="--cuda-graph-sizes 9 is more than the 8 requests of --max-num-seqs"):
        sizes(cuda_graph_sizes="9", max_num_seqs=8)


def test_the_plan_shows_graphs_or_why_they_are_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA graph" not in plan_text(resolve(options(folder(tmp_path))))
    on_a_gpu(monkeypatch)
    asked = options(folder(tmp_path), device="cuda", max_num_seqs=16)
    config = resolve(asked)
    assert MemoryPlan.of(config).graphs > 5 * 6 * (1 << 18)
    assert "5 CUDA graphs for decodes of up to 16 requests, about" in plan_text(config)
    one = resolve(options(folder(tmp_path), device="cuda", max_num_seqs=16, cuda_graph_sizes="16"))
    assert MemoryPlan.of(one).graphs < MemoryPlan.of(config).graphs
    eager = resolve(options(folder(tmp_path), device="cuda", enforce_eager=True))
    assert MemoryPlan.of(eager).graphs == 0
    assert "no CUDA graphs: --enforce-eager" in plan_text(eager)
    pooling = resolve(options(folder(tmp_path), device="cuda", runner="pooling"))
    assert pooling.graphs.disabled_reason == "embedding models have no decode steps"
    fits = MemoryPlan.of(config).weights[0] + MemoryPlan.of(config).workspace
    on_a_gpu(monkeypatch, int(fits / 0.9) + (1 << 16))
    with pytest.raises(ConfigError, match=r"per rank \(.*workspace .* \+ CUDA graphs"):
        resolve(asked)


def test_ranks_that_share_a_gpu_have_a_part_of_it_and_no_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = devices.Devices("cuda", 1, 1 << 30, (0, 0), ((topology.LinkType.NVLINK,),))
    monkeypatch.setattr(devices, "find", lambda kind, groups: found)
    asked = {"device": "cuda", "tensor_parallel_size": 2, "max_num_seqs": 4096, "max_num_batched_tokens": 4096}
    config = resolve(options(folder(tmp_path), **asked))
    sizes = MemoryPlan.of(config)
    left = int((1 << 29) * config.cache.gpu_memory_utilization) - sizes.weights[0] - sizes.workspace
    assert config.cache.num_blocks == left // sizes.kv_block[0]
    assert "no CUDA graphs: ranks that share a GPU exchange through the host, which waits for it" in plan_text(config)
    found = replace(found, memory=1 << 24)
    with pytest.raises(ConfigError, match=r"0.9 of 16 MiB free over 2 ranks"):
        resolve(options(folder(tmp_path), **asked))


def test_graphs_have_room_for_all_parts_of_a_decodes_keys() -> None:
    pytest.importorskip("triton", reason="scripts/setup ci installs it")
    attention = importlib.import_module("quire.kernels.triton.attention")
    assert max(map(attention._most_parts, (1 << power for power in range(24)))) == cuda_graph_sizes._MAX_SPLITS


GPT_OSS = str(published.FOLDER / "gpt-oss-120b")


def on_gpu(gib: float, **changes: Any) -> EngineConfig:
    """gpt-oss-120b on a made-up GPU with so much free memory."""
    device = Devices("cuda", 1, int(gib * (1 << 30)), (0,), ((LinkType.NVLINK,),), (9, 0))
    return resolve(EngineOptions(model=GPT_OSS, **changes), described=device)


def test_the_default_length_is_reduced_to_what_the_kv_cache_holds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss-120b is accepted on one H100-80G. One log line has the numbers and the flag."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    memory = 79.15  # an H100-80G's, without the driver's part
    config = on_gpu(memory)
    length, row = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    assert (length, config.model.position_len) == (99_984, 131_072)
    assert config.cache.num_blocks == config.cache.max_blocks(length, row) < config.cache.max_blocks(length + 1, row)
    [message] = caplog.messages
    assert message.startswith("requests have at most 99,984 tokens instead of the model's 131,072: the KV cache holds")
    assert "--max-model-len sets the length" in message
    assert f"1.0 requests at the full length of {length:,}" in plan_text(config)
    # Most of the memory is used: the next block of a longer request would not fit.
    sizes = MemoryPlan.of(config)
    used = sizes.weights[0] + sizes.workspace + sizes.graphs + config.cache.num_blocks * sizes.kv_block[0]
    assert 0 <= int(memory * 0.9 * (1 << 30)) - used < 16 << 20
    assert on_gpu(90.0).model.max_model_len == 131_072


def test_auto_is_the_longest_that_fits_and_the_default_at_least_8192(tmp_path: Path) -> None:
    """A length that is set and does not fit is refused, with the number that would; and so is a default below 8192."""
    length = on_gpu(75.5, max_model_len="auto").model.max_model_len
    assert 2 < length < 8192
    for asked, least in ((None, "8,192"), (9000, "9,000")):
        with pytest.raises(ConfigError, match=rf"less than one request of {least} .*; use --max-model-len {length} or"):
            on_gpu(75.5, max_model_len=asked)
    assert on_gpu(75.5, max_model_len=length).model.max_model_len == length
    assert on_gpu(90.0, max_model_len="auto").model.max_model_len == 131_072
    model = folder(tmp_path)  # whose 2048 tokens are its minimum
    block = MemoryPlan.of(resolve(options(model))).kv_block[0]
    with pytest.raises(ConfigError, match=r"holds 2,032 tokens, less than one request of 2,048 "):
        resolve(options(model, kv_cache_memory_bytes=127 * block))
    fits = resolve(options(model, kv_cache_memory_bytes=127 * block, max_model_len="auto", max_num_seqs=8))
    assert fits.model.max_model_len == 2032
    with pytest.raises(ConfigError, match=r"holds 0 tokens, less than one request of 2 "):
        resolve(options(model, kv_cache_memory_bytes=block - 1, max_model_len="auto"))


def test_hosts_with_the_same_number_of_blocks_have_the_same_length() -> None:
    """Ranks and hosts agree on the number of blocks; the length follows from it, whatever each has planned before.
    Hosts with other memory are not refused for the length, and other flags are."""
    hosts = [on_gpu(gib) for gib in (78.0, 79.1, 90.0)]
    assert len({host.model.max_model_len for host in hosts}) == 3
    assert {host.shared_settings["--max-model-len"] for host in hosts} == {"131072"}
    for blocks in (hosts[0].cache.num_blocks, 3000, 700):
        agreed = {host.with_blocks(blocks).model.max_model_len for host in hosts}
        assert len(agreed) == 1
        assert max(agreed) <= hosts[0].model.max_model_len
    assert hosts[0].with_blocks(1).model.max_model_len == 8192
    fixed, auto = (on_gpu(90.0, max_model_len=asked) for asked in (9000, "auto"))
    assert fixed.shared_settings["--max-model-len"] == "9000"
    assert auto.shared_settings["--max-model-len"] == "auto"
    assert fixed.with_blocks(1).model.max_model_len == 9000


def test_a_reduced_length_does_not_change_scaled_positions(tmp_path: Path) -> None:
    """Otherwise answers would depend on the memory of the host."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = folder(tmp_path, max_position_embeddings=65_536, rope_parameters={**scaling, "rope_theta": 1e4})
    block = MemoryPlan.of(resolve(options(model, max_model_len=16_384))).kv_block[0]
    config = resolve(options(model, kv_cache_memory_bytes=1024 * block))
    assert config.model.max_model_len == 1024 * 16 < config.model.position_len
    assert config.model.position_len == resolve(options(model)).model.max_model_len
