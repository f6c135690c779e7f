"""Quantized checkpoints against transformers with the numbers that they represent: logits, tokens, memory, refusals."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families import transformers_backend
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan, quantized_text
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.linear import Linear
from quire.engine.models.build import load, load_model
from quire.engine.models.transformers_backend import describe
from quire.engine.models.transformers_backend.experts import PlannedExperts
from quire.engine.protocol.sampling_params import SamplingParams
from quire.kernels import packed_state
from tests.fakes.checkpoints import likeliest
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import SIZES, write_model
from tests.fakes.model_logits import CPU, check_logits, configure, logits
from tests.fakes.quantized_checkpoints import FORMATS, quantize
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor

_SIZES = SIZES | {
    "vocab_size": 192,  # whole tiles on two ranks
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {}),
    "experts": ("Qwen3MoeForCausalLM", {"num_experts": 4, "head_dim": 32}),
    "latent": ("DeepseekV3ForCausalLM", _LATENT),
    "gpt": ("GPTNeoXForCausalLM", {}),
    "transposed": ("GPT2LMHeadModel", {}),
}
KINDS_OF_MXFP4 = {"stacked": ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 32})}


LAYOUTS = ((1, 1, False), (2, 2, False), (2, 1, True))
"""Tensor parallel, pipeline parallel, and whether experts are spread."""
WITH_EXPERTS = ("experts", "latent", "stacked")


def configured(folder: Path, tp: int, pp: int, ep: bool, **options: Any) -> EngineConfig:
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "enable_expert_parallel": ep}
    return configure(folder, max_model_len=64, **parallel, **options)


def write(folder: Path, name: str, kind: str, *, outer: bool = False, **more: Any) -> Any:
    """A checkpoint in a format, and transformers' model of the numbers that it represents. `outer`: embedding and head
    are quantized, too."""
    architecture, changes = (KINDS | KINDS_OF_MXFP4)[kind]
    write_model(architecture, _SIZES | changes | more, folder)
    quantize(folder, name, transposed=kind == "transposed", outer=outer)
    return whole_model(architecture, folder)


def whole_model(architecture: str, folder: Path) -> Any:
    """transformers' model of the numbers that a quantized checkpoint represents."""
    model = getattr(transformers, architecture)
    return model.from_pretrained(folder / "whole", dtype=torch.float32).train(False)


def all_layouts(folder: Path, kind: str, **options: Any) -> list[EngineConfig]:
    return [configured(folder, *layout, **options) for layout in LAYOUTS[: 3 if kind in WITH_EXPERTS else 2]]


BY_KIND = {
    "dense": "; ".join(name for name in FORMATS if name != "mxfp4"),
    "experts": "gptq, act order; gptq, 8 bits; awq; compressed-tensors, zero points; compressed-tensors, int8; "
    "fp8 of blocks; fp8; nvfp4; bitsandbytes, nf4; bitsandbytes, int8",
    "latent": "gptq, symmetric; gptq, act order; awq; compressed-tensors, 8 bits; compressed-tensors, fp8; "
    "fp8 of blocks; nvfp4; bitsandbytes, nested",
    "gpt": "gptq, v2; awq; compressed-tensors, 4 bits; fp8 of blocks; nvfp4; bitsandbytes, nested",
    "transposed": "gptq; gptq, act order; awq; compressed-tensors, int8; fp8; nvfp4; bitsandbytes, int8",
    "stacked": "mxfp4",
}
"""Every format with the plainest model, and each reader of formats with every kind of model."""


def cases() -> list[Any]:
    pairs = [(name, kind) for kind, names in BY_KIND.items() for name in names.split("; ")]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


@pytest.mark.parametrize(("name", "kind"), cases())
def test_logits_are_those_of_the_numbers(name: str, kind: str, tmp_path: Path) -> None:
    model = write(tmp_path, name, kind)
    check_logits(model, all_layouts(tmp_path, kind), tolerance=FORMATS[name].tolerance)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq, act order", "dense"),
        ("awq", "experts"),
        ("fp8 of blocks", "latent"),
        ("bitsandbytes, nested", "gpt"),
        ("mxfp4", "stacked"),
    ],
)
def test_greedy_tokens_are_those_of_the_numbers(name: str, kind: str, tmp_path: Path) -> None:
    model = write(tmp_path, name, kind)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 9, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for config in all_layouts(tmp_path, kind):
        with Ranks(config, ThreadExecutor(config)) as ranks:
            tokens = ranks.tokens([(prompt, params) for prompt in prompts], max_num_batched_tokens=16)
        assert tokens == likeliest(model, prompts, tokens), config.parallel


_LARGE = {"initializer_range": 0.1}
"""Experts that show in the logits."""
OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "matrices of experts": ("awq", "OlmoeForCausalLM", _LARGE | {"num_experts": 4}, (1, 2)),
    "act order": ("gptq, act order", "OlmoeForCausalLM", _LARGE | {"num_experts": 4}, (1, 2)),
    "transposed stacks, another gate": ("mxfp4", "GptOssForCausalLM", _LARGE | KINDS_OF_MXFP4["stacked"][1], (1, 2)),
    "Conv1D": ("gptq", "GPT2LMHeadModel", _LARGE, (1,)),
    "embedding and head": ("awq", "LlamaForCausalLM", {}, (1, 2)),
    "tied embedding": ("fp8 of blocks", "LlamaForCausalLM", {"tie_word_embeddings": True}, (1, 2)),
}
"""Format, architecture, changes and numbers of ranks."""


@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_transformers_implementation_keeps_codes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)
    name, architecture, changes, ranks = OF_TRANSFORMERS[case]
    write_model(architecture, _SIZES | changes, tmp_path)
    quantize(tmp_path, name, transposed=case == "Conv1D", outer=architecture == "LlamaForCausalLM")
    configs = [configured(tmp_path, tp, 1, False, model_impl="transformers") for tp in ranks]
    check_logits(whole_model(architecture, tmp_path), configs, tolerance=1e-3)
    loaded, planned, _ = packed_bytes(tmp_path, model_impl="transformers")
    assert abs(loaded - planned) <= 0.05 * planned


def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Inputs as W8A8 rounds them: to 8 bits, with a scale for each row."""
    scales = inputs[0].abs().amax(-1, keepdim=True) / 127
    return (inputs[0] / scales).round() * scales


def test_inputs_are_rounded_as_the_publisher_does(tmp_path: Path) -> None:
    model = write(tmp_path, "compressed-tensors, int8", "dense")
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            layer.register_forward_pre_hook(rounded)
    tokens = torch.randint(0, 131, (8,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        result = logits(configure(tmp_path, max_model_len=64), tokens, Parallel())
    assert (result - expected).norm() <= 0.01 * expected.norm()  # a number in the middle may be rounded either way


@pytest.mark.parametrize(("kind", "zero"), [("dense", 0), ("dense", -100), ("experts", 0)])
def test_inputs_are_rounded_with_the_publishers_scales(kind: str, zero: int, tmp_path: Path) -> None:
    """Scales that are so small that inputs are cut off, which scales of rows would not do."""
    model = write(tmp_path, "compressed-tensors, int8", kind)
    model.set_experts_implementation("eager")
    config = json.loads((tmp_path / "config.json").read_text())
    inputs = {"num_bits": 8, "type": "int", "symmetric": not zero, "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for module in [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]:
        tensors[f"{module.removesuffix('.weight')}.input_scale"] = torch.tensor([1 / 128])
        if zero:
            tensors[f"{module.removesuffix('.weight')}.input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")

    plain = torch.nn.functional.linear

    def cut_off(x: Tensor) -> Tensor:
        return ((x * 128 + zero).round().clamp(-128, 127) - zero) / 128

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_quantized = len(weight) not in (192, 4)  # the head and the router
        return plain(cut_off(x) if is_quantized else x, weight, bias)

    tokens = torch.randint(0, 131, (8,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        expected = model(tokens[None]).logits[0]
    for tp in (1, 2):
        for result in on_ranks(tp, partial(logits, configured(tmp_path, tp, 1, False), tokens)):
            assert (result - expected).norm() <= 0.01 * expected.norm()


def packed_bytes(folder: Path, **options: Any) -> tuple[int, int, int]:
    """Bytes of the first rank's weights: as loaded, as planned, and of its layers that are not as stored."""
    config = configure(folder, max_model_len=64, **options)
    tp = config.parallel.tensor_parallel_size
    parallel = Parallel()
    parallel.size = tp
    decoder = load_model(config, 0, parallel, CPU)
    total = sum(weight.nbytes for weight in decoder.parameters())
    whole = 0
    for layer in decoder.modules():
        if isinstance(layer, Linear) and layer._product is not None:
            total += sum(each.nbytes for each in packed_state.tensors_of(layer._product))
            whole += layer.quantized is None
        elif isinstance(layer, VocabParallelEmbedding):
            total += (
                sum(each.nbytes for each in packed_state.tensors_of(layer.packed)) if layer.packed is not None else 0
            )
        elif isinstance(layer, PlannedExperts):
            products = [each for products in layer._products for each in products]
            states = [packed_state.tensors_of(each) for each in products]
            if layer._product is not None:
                states = [layer._product.state(expert) for expert in range(layer._num_experts)]
            total += sum(each.nbytes for state in states for each in state)
    return total, MemoryPlan.of(config).weights[0], whole


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4"])
def test_weights_take_the_bytes_that_are_planned(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "dense")
    for tp in (1, 2):
        loaded, planned, whole = packed_bytes(tmp_path, tensor_parallel_size=tp)
        assert whole == 1, "only the head is not quantized"
        assert abs(loaded - planned) <= 0.03 * planned


def test_4_bit_weights_are_multiplied_by_rounded_inputs(tmp_path: Path) -> None:
    """W4A8: as the publisher does or finer, in the bytes that are planned."""
    model = write(tmp_path, "compressed-tensors, zero points", "dense")
    config = json.loads((tmp_path / "config.json").read_text())
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(0, 131, (8,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp in (1, 2):
        for result in on_ranks(tp, partial(logits, configured(tmp_path, tp, 1, False), tokens)):
            assert 1e-3 * expected.norm() <= (result - expected).norm() <= 0.05 * expected.norm()
        loaded, planned, _ = packed_bytes(tmp_path, tensor_parallel_size=tp)
        assert abs(loaded - planned) <= 0.03 * planned
    text = quantized_text(configure(tmp_path, max_model_len=64))
    assert "int4 weights, multiplied as int4, by inputs rounded to int8" in text


OUTER = ("gptq, act order", "awq", "compressed-tensors, int8", "fp8 of blocks", "bitsandbytes, nested")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", OUTER)
def test_embeddings_and_heads_stay_quantized(name: str, tied: bool, tmp_path: Path) -> None:
    model = write(tmp_path, name, "dense", outer=True, tie_word_embeddings=tied)
    check_logits(model, all_layouts(tmp_path, "dense"), tolerance=FORMATS[name].tolerance, vocabulary=192)
    for tp in (1, 2):
        loaded, planned, whole = packed_bytes(tmp_path, tensor_parallel_size=tp)
        assert whole == 0
        assert abs(loaded - planned) <= 0.03 * planned


@pytest.mark.parametrize("name", OUTER)
def test_vectors_of_tokens_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    """They equal, to the last bit, the vectors of weights that are dequantized while they are loaded."""
    write(tmp_path, name, "dense", outer=True)
    config, tokens = configured(tmp_path, 2, 1, False), torch.arange(192)
    embedding = load(configured(tmp_path, 1, 1, False), 0, Parallel(), CPU, pack=False).embedding
    assert embedding is not None
    for result in on_ranks(2, lambda parallel: vectors(config, tokens, parallel)):
        assert result.equal(embedding(tokens))


def vectors(config: EngineConfig, tokens: Tensor, parallel: Parallel) -> Tensor:
    embedding = load(config, parallel.rank, parallel, CPU).embedding
    assert embedding is not None
    assert embedding.packed is not None
    out: Tensor = embedding(tokens)
    return out


_CACHE_SCALES = "k_scale attn.v_scale kv_scale q_scale k_proj.k_scale v_proj.output_scale k_proj.output_zero_point"
CACHE_SCALES = [f"self_attn.{name}" for name in _CACHE_SCALES.split()]


@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
def test_scales_of_inputs_and_of_a_kv_cache_are_known(
    model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)
    write(tmp_path, "compressed-tensors, fp8", "dense")
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in (*CACHE_SCALES, "mlp.up_proj.input_scale", "mlp.up_proj.odd_scale"):
        tensors[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        config = configure(tmp_path, max_model_len=64, kv_cache_dtype="fp8", model_impl=model_impl)
        load_model(config, 0, Parallel(), CPU)
    (warning,) = [record.getMessage() for record in caplog.records if "does not use" in record.getMessage()]
    assert warning.endswith("does not use (1): model.layers.0.mlp.up_proj.odd_scale")
    (known,) = [record.getMessage() for record in caplog.records if "scales of keys and values" in record.getMessage()]
    assert all(f"model.layers.0.{name}" in known for name in CACHE_SCALES)


def test_a_rank_may_have_an_expert_twice(tmp_path: Path) -> None:
    """Its tensors are then read for both, though other experts' lie between them."""
    model = write(tmp_path, "awq", "experts")
    options = {"enable_eplb": True, "num_redundant_experts": 2, "expert_placement_strategy": "round_robin"}
    check_logits(model, [configured(tmp_path, 2, 1, True, **options)], tolerance=1e-3)
