"""The plan of published quantized models: the bytes that they are stored in, by the real shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from quire.engine.config.devices import Devices
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError
from tests.fakes import published
from tests.fakes.model_configs import MODEL_CONFIGS

GB = 10**9
_PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek R1": MODEL_CONFIGS["DeepSeek R1"],
    "gpt-oss-120b": published.config("gpt-oss-120b"),
    "Llama 3.1 405B": published.config("Meta-Llama-3.1-405B")
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PACKED, "input_activations": None}},
            "ignore": ["lm_head"],
        },
    },
}
STORED = {"DeepSeek R1": 675 * GB, "gpt-oss-120b": 65.3 * GB, "Llama 3.1 405B": 216 * GB}
"""Bytes of the published weights: R1's without the layer for multi-token prediction; 405B's 4-bit weights with a
float16 scale for 128 and a 16-bit embedding and head."""


def plan(
    folder: Path,
    name: str,
    tp: int,
    pp: int,
    memory: float = 10_000 * GB,
    device: Literal["cpu", "cuda"] = "cpu",
    capability: tuple[int, int] = (9, 0),
) -> tuple[float, str]:
    """The bytes of all ranks' weights, and the text of the plan."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    sizes: dict[str, Any] = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    options = EngineOptions(model=str(folder), device=device, dtype="bfloat16", max_model_len=4096, **sizes)
    ranks = tuple(range(tp * pp))
    links = ((LinkType.UNKNOWN,) * len(ranks),) * len(ranks)
    gpus = Devices("cuda", len(ranks), int(memory), ranks, links, capability)
    config = resolve(options, described=gpus if device == "cuda" else Devices("cpu", 1, int(memory)))
    return tp * sum(MemoryPlan.of(config).weights), plan_text(config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(8, 2), (8, 1), (4, 2), (4, 1)])
def test_weights_are_planned_as_stored(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    size, text = plan(tmp_path, name, tp, pp)
    assert size <= (1.2 if name == "gpt-oss-120b" and tp == 8 else 1.1) * STORED[name]  # 8 ranks share groups of 32
    assert size >= 0.95 * STORED[name]
    assert "widened in registers" in text


@pytest.mark.parametrize("name", CONFIGS)
def test_gpus_keep_weights_as_stored(name: str, tmp_path: Path) -> None:
    size, text = plan(tmp_path, name, 8, 2, device="cuda")
    assert 0.95 * STORED[name] <= size <= (1.25 if name == "gpt-oss-120b" else 1.1) * STORED[name]
    assert ("fp8 weights, multiplied as fp8, on cuda" in text) == (name == "DeepSeek R1")
    assert ("widened in registers" in text) == (name != "DeepSeek R1")


@pytest.mark.parametrize(("capability", "has_fp4"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_where_nvfp4_is_multiplied_by_nvfp4(
    capability: tuple[int, int], has_fp4: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of 4 bits and scales of 8 for 16; where they are widened, scales of 16."""
    for algo, is_multiplied in (("NVFP4", has_fp4), ("W4A16_NVFP4", False)):
        settings = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]}
        monkeypatch.setitem(CONFIGS, "NVFP4", MODEL_CONFIGS["Llama 3 70B"] | {"quantization_config": settings})
        size, text = plan(tmp_path, "NVFP4", 2, 1, device="cuda", capability=capability)
        how = "multiplied as e2m1" if is_multiplied else "widened in registers"
        assert f"modelopt: e2m1 weights, {how}, on cuda" in text
        outer = 2 * 128_256 * 8192 * 2
        assert size - outer == pytest.approx(68.5e9 / 2 * (1 + 1 / 8 * (1 if is_multiplied else 2)), rel=0.01)


def test_what_does_not_fit_is_refused_with_the_bytes_as_stored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights 42\.5 GiB \(fp8: fp8 weights, widened in registers"):
        plan(tmp_path, "DeepSeek R1", 8, 2, memory=300 * GB)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_is_planned_in_its_bits(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for has_head in (False, True):
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": has_head}
        config = MODEL_CONFIGS["Llama 3 70B"] | {"quantization_config": settings, "tie_word_embeddings": tied}
        monkeypatch.setitem(CONFIGS, "Llama 3 70B", config)
        sizes.append(plan(tmp_path, "Llama 3 70B", 1, 1)[0])
    head = config["vocab_size"] * config["hidden_size"]
    assert sizes[0] - sizes[1] == pytest.approx(0 if tied else head * (2 - 0.5 - 2 / 128), rel=0.01)


def test_what_sparse_attention_selects_is_planned(tmp_path: Path) -> None:
    """DeepSeek V3.2 is R1 with indexers: a slot of 8 bytes for each of 2048 tokens that each token attends to."""
    sizes = []
    for index_topk in (2048, 4096):
        config = {"index_topk": index_topk, "index_head_dim": 128, "index_n_heads": 64}
        config = MODEL_CONFIGS["DeepSeek R1"] | config | {"architectures": ["DeepseekV32ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        sizes_of_step: dict[str, Any] = {"tensor_parallel_size": 8, "max_num_batched_tokens": 4096}
        options = EngineOptions(model=str(tmp_path), device="cpu", max_model_len=8192, **sizes_of_step)
        resolved = resolve(options, described=Devices("cpu", 1, 20_000 * GB))
        sizes.append(MemoryPlan.of(resolved).workspace)
    assert sizes[1] - sizes[0] == 2 * 8 * 4096 * 2048


OUTER: dict[str, tuple[dict[str, Any], tuple[str, ...], float]] = {
    "awq": ({"bits": 4, "group_size": 128}, ("qweight", "qzeros", "scales"), 0.5 + 4 / 128),
    "gptq": ({"bits": 4, "group_size": 128, "lm_head": True}, ("qweight", "qzeros", "scales"), 0.5 + 2 / 128),
    "fp8": ({}, ("weight", "weight_scale"), 1),
    "bitsandbytes": ({"load_in_8bit": True}, ("weight", "SCB"), 1),
    "torchao": (
        {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
        ("_weight_qdata", "_weight_scale"),
        1,
    ),
}
"""Settings, the names of a quantized weight's tensors, and its bytes per weight, without the bytes per row."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", OUTER)
def test_embeddings_and_heads_are_planned_as_their_tensors_say(
    method: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, tensors, width = OUTER[method]
    config = MODEL_CONFIGS["Llama 3 70B"] | {"quantization_config": {"quant_method": method, **settings}}
    monkeypatch.setitem(CONFIGS, "Llama 3 70B", config | {"tie_word_embeddings": tied, "num_hidden_layers": 2})
    elements: int = config["vocab_size"] * config["hidden_size"]

    def size(*quantized: str) -> float:
        names = [
            f"{module}.{each}"
            for module in ("model.embed_tokens", "lm_head")
            for each in (tensors if module in quantized else ("weight",))
        ]
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return plan(tmp_path, "Llama 3 70B", 1, 1)[0] / elements

    plain, embedding, both = size(), size("model.embed_tokens"), size("model.embed_tokens", "lm_head")
    if tied:  # a head that is not quantized is packed, in addition to the embedding
        assert plain - embedding == pytest.approx(2 + 2 - width, abs=0.05)
        assert both == embedding
    else:
        assert plain - embedding == pytest.approx(2 - width, abs=0.05)
        assert embedding - both == pytest.approx(2 - width, abs=0.05)
