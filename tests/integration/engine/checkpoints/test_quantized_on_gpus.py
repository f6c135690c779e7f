"""Quantized checkpoints with their layers packed as for GPUs, on tensors of the CPU: logits, and the planned bytes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families import transformers_backend
from quire.engine.checkpoints import loader
from quire.engine.config.devices import Devices
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import resolve
from quire.engine.config.topology import LinkType
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.layers.embedding import VocabParallelEmbedding
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import Experts
from quire.engine.layers.quantized import _ordered, quantized_formats
from quire.engine.models import build
from quire.engine.models.build import load
from quire.engine.models.transformers_backend import describe
from quire.engine.protocol.errors import ConfigError
from quire.kernels import coded_words, experts, fp4, linear, packed_state
from quire.kernels.quantized import QuantizedFormat, QuantizedWeight
from tests.fakes.families import write_model
from tests.fakes.model_logits import CPU, check_logits, logits
from tests.fakes.quantized_checkpoints import E2M1, FORMATS, INPUT_SCALE, Format, fp8
from tests.fakes.ranks import on_ranks
from tests.integration.engine.checkpoints import test_online, test_quantized
from tests.integration.engine.checkpoints.test_quantized import _SIZES, write

_BLOCKS_OF_128 = Format(
    FORMATS["fp8 of blocks"].settings | {"weight_block_size": [128, 128]},
    lambda weight: fp8(weight, (128, 128), ".weight_scale_inv"),
    8.25,
)
NAMES = [*(name for name in FORMATS if name != "mxfp4"), "fp8 of 128"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "gpu_capability", lambda device: (9, 0))
    monkeypatch.setattr(experts, "ExpertByExpert", None)  # the experts of a layer run in one call
    monkeypatch.setattr(linear, "_of_numbers", lambda *_: iter([(linear.PlainLinear, True)]))
    monkeypatch.setitem(FORMATS, "fp8 of 128", _BLOCKS_OF_128)


def configure(folder: Path, capability: tuple[int, int] = (9, 0), **options: Any) -> EngineConfig:
    described = Devices("cuda", 2, 1 << 34, (0, 1), ((LinkType.UNKNOWN,) * 2,) * 2, capability)
    options = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22, **options}
    given = EngineOptions(model=str(folder), device="cuda", packed_cache="off", **options)
    return resolve(given, described=described)


def packed_bytes(config: EngineConfig) -> int:
    """Bytes of the first rank's weights as loaded."""
    parallel, spread = Parallel(), config.parallel.experts
    parallel.size = config.parallel.tensor_parallel_size
    group = None if spread is None else ExpertGroup(spread, parallel, ExpertCommunicator(), ExpertCommunicator())
    decoder, count = load(config, 0, parallel, CPU, experts=group), 4 // (parallel.size if spread else 1)
    total = sum(weight.nbytes for weight in decoder.parameters())
    for layer in decoder.modules():
        if isinstance(layer, Linear) and layer._product is not None:
            total += sum(each.nbytes for each in packed_state.tensors_of(layer._product))
        if isinstance(layer, VocabParallelEmbedding) and layer.packed is not None:
            total += sum(each.nbytes for each in packed_state.tensors_of(layer.packed))
        if isinstance(layer, Experts):
            total += sum(each.nbytes for place in range(count) for each in layer.state(place))
            # Packed experts share their biases with the parameters.
            total -= sum(each.nbytes for name, each in layer.named_parameters() if name.endswith("bias"))
    return total


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "dense") for name in NAMES),
        *(
            (name, "experts")
            for name in ("gptq, act order", "awq", "bitsandbytes, nf4", "nvfp4", "fp8", "compressed-tensors, int8")
        ),
        ("fp8 of blocks", "latent"),
        ("fp8 of 128", "latent"),
        ("mxfp4", "stacked"),
    ],
)
def test_logits_and_bytes(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits equal the logits of the numbers, except for the rounding of inputs, and the bytes equal the plan's."""
    monkeypatch.setattr(coded_words, "round_rows", lambda x, dtype, groups: (x.float(), torch.ones(len(x), groups)))
    model = write(tmp_path, name, kind)
    for tp, ep in ((1, False), (2, False), (2, True))[: 2 if kind == "dense" else 3]:
        config = configure(tmp_path, tensor_parallel_size=tp, enable_expert_parallel=ep)
        check_logits(model, [config], tolerance=1e-5, num_tokens=20)
        loaded, planned = packed_bytes(config), MemoryPlan.of(config).weights[0]
        if "order" in name:  # a rank pads its part of each group, and knows the order of its columns
            assert planned <= loaded <= (1.35 if tp > 1 else 1.03) * planned
        else:
            assert loaded == planned


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [(each, kind) for each in ("int8", "int4") for kind in ("dense", "experts", "latent", "stacked")],
)
def test_quantized_while_loading(quantization: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layout, logits equal the logits of numbers that are rounded as a whole, and the bytes equal the
    plan's."""
    monkeypatch.setattr(coded_words, "round_rows", lambda x, dtype, groups: (x.float(), torch.ones(len(x), groups)))
    model = test_online.write(tmp_path, kind, quantization)
    for tp, pp, ep in ((1, 1, False), (2, 1, False), (1, 2, False), (2, 1, True))[: 3 if kind == "dense" else 4]:
        parallel: dict[str, Any] = {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "enable_expert_parallel": ep,
        }
        config = configure(tmp_path, quantization=quantization, **parallel)
        check_logits(model, [config], tolerance=1e-3, num_tokens=20)
        if pp == 1:
            assert packed_bytes(config) == MemoryPlan.of(config).weights[0]


@pytest.mark.parametrize("name", ["gptq, act order", "compressed-tensors, zero points"])
def test_quantized_checkpoints_are_quantized_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_words, "round_rows", lambda x, dtype, groups: (x.float(), torch.ones(len(x), groups)))
    model = write(tmp_path, name, "dense")
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = test_online.int8(layer.weight.data)
    for tp in (1, 2):
        config = configure(tmp_path, tensor_parallel_size=tp, quantization="int8")
        check_logits(model, [config], tolerance=1e-3, num_tokens=20)
        assert packed_bytes(config) == MemoryPlan.of(config).weights[0]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_memory_while_loading(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters have no memory before they are read, as all of them would be larger than the packed weights."""
    sizes = {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512}
    write_model("LlamaForCausalLM", _SIZES | sizes, tmp_path)
    config, decoders, seen = configure(tmp_path, quantization=quantization), list[Any](), list[int]()
    make, put = build.build, loader._put

    def built(*args: Any) -> Any:
        decoders.append(make(*args))
        return decoders[0]

    def counted(*args: Any) -> None:
        tensors = list(decoders[0].parameters())
        for layer in decoders[0].modules():
            if isinstance(layer, Linear) and layer._product is not None:
                tensors += packed_state.tensors_of(layer._product)
        seen.append(sum({each.data_ptr(): each.untyped_storage().size() for each in tensors}.values()))
        put(*args)

    monkeypatch.setattr(build, "build", built)
    monkeypatch.setattr(loader, "_put", counted)
    load(config, 0, Parallel(), CPU)
    assert max(seen) <= 1.1 * MemoryPlan.of(config).weights[0]


def test_transformers_implementation_is_quantized_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_backend, "describe", describe.describe)
    monkeypatch.setattr(coded_words, "round_rows", lambda x, dtype, groups: (x.float(), torch.ones(len(x), groups)))
    model = test_online.write(tmp_path, "experts", "int4")
    config = configure(tmp_path, quantization="int4", model_impl="transformers")
    check_logits(model, [config], tolerance=1e-3, num_tokens=20)


@pytest.mark.parametrize(("name", "tied"), [("awq", False), ("nvfp4", True), ("bitsandbytes, int8", True)])
def test_embeddings_and_heads_stay_quantized(name: str, tied: bool, tmp_path: Path) -> None:
    model = write(tmp_path, name, "dense", outer=True, tie_word_embeddings=tied)
    for tp in (1, 2):
        config = configure(tmp_path, tensor_parallel_size=tp)
        check_logits(model, [config], tolerance=1e-5, num_tokens=20, vocabulary=192)
        assert packed_bytes(config) == MemoryPlan.of(config).weights[0]
    own = {QuantizedFormat(each.values, each.group, each.has_offsets, wide=True) for each in quantized_formats(config)}
    assert bool(own & set(quantized_formats(config))) == (name == "nvfp4"), "that of the tied head"


def rounded(dtype: torch.dtype, module: torch.nn.Linear, inputs: tuple[Tensor]) -> Tensor:
    (x,) = inputs
    groups = 2 if module.in_features == 256 and dtype == torch.float8_e4m3fn else 1
    codes, scales = coded_words.round_rows(x.flatten(0, -2), dtype, groups)
    return (codes.float().view(*scales.shape, -1) * scales[..., None]).view(x.shape)


@pytest.mark.parametrize(
    ("name", "dtype"), [("compressed-tensors, int8", torch.int8), ("fp8 of 128", torch.float8_e4m3fn)]
)
def test_inputs_are_rounded_as_the_publisher_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write(tmp_path, name, "dense")
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            layer.register_forward_pre_hook(partial(rounded, dtype))
    tokens = torch.randint(0, 131, (8,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        result = logits(configure(tmp_path), tokens, Parallel())
    assert (result - expected).norm() <= 0.02 * expected.norm()  # a number in the middle may be rounded either way


def fp4_as_published(x: Tensor) -> Tensor:
    """The inputs of a product as ModelOpt rounds them to NVFP4, by `INPUT_SCALE`."""
    grouped = x.unflatten(-1, (-1, 16))  # type: ignore[no-untyped-call]
    scales = (grouped.abs().amax(-1, keepdim=True) / (6 * INPUT_SCALE)).to(torch.float8_e4m3fn).float() * INPUT_SCALE
    numbers = E2M1[:8].sort().values
    nearest = (grouped.abs() / scales.clamp(min=1e-30))[..., None].sub(numbers).abs().argmin(-1)
    rounded: Tensor = numbers[nearest] * scales * grouped.sign()
    return rounded.flatten(-2)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_inputs_are_rounded_to_4_bits_as_the_publisher_does(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "gpu_capability", lambda device: capability)
    model = write(tmp_path, "nvfp4", "dense")
    tokens = torch.randint(0, 131, (8,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(tokens[None]).logits[0]
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and path != "lm_head":
                layer.register_forward_pre_hook(lambda _, inputs: fp4_as_published(inputs[0]))
        expected = model(tokens[None]).logits[0]
        results = on_ranks(2, partial(logits, configure(tmp_path, capability, tensor_parallel_size=2), tokens))
        results.append(logits(configure(tmp_path, capability), tokens, Parallel()))
    assert (plain - expected).norm() > 0.05 * expected.norm()
    for result in results:  # a number in the middle may be rounded either way
        assert (result - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize("kind", ["dense", "experts", "latent"])
def test_fp4_products_are_by_the_numbers_and_take_the_planned_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding of inputs."""
    monkeypatch.setattr(linear, "gpu_capability", lambda device: (10, 0))
    widen, inputs = fp4.widen_fp4, torch.full((), torch.nan)
    monkeypatch.setattr(fp4, "round_fp4", lambda x, global_scale: (x.float() * global_scale, inputs))
    monkeypatch.setattr(fp4, "widen_fp4", lambda codes, scales: codes if scales is inputs else widen(codes, scales))
    model = write(tmp_path, "nvfp4", kind)
    for tp, ep in ((1, False), (2, False), (2, True))[: 2 if kind == "dense" else 3]:
        config = configure(tmp_path, (10, 0), tensor_parallel_size=tp, enable_expert_parallel=ep)
        check_logits(model, [config], tolerance=1e-5, num_tokens=20)
        assert packed_bytes(config) == MemoryPlan.of(config).weights[0]
        assert QuantizedFormat("e2m1", 16, rounds_inputs=True) in quantized_formats(config)


def test_without_scales_of_inputs_weights_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with one that is no positive number."""
    monkeypatch.setattr(linear, "gpu_capability", lambda device: (10, 0))
    monkeypatch.setattr(linear, "_fp4_matmul", None)
    model = write(tmp_path, "nvfp4", "dense")
    stored = load_file(tmp_path / "model.safetensors")
    for scale in (None, 0.0):
        tensors = {name: each for name, each in stored.items() if not name.endswith("input_scale")}
        if scale is not None:
            tensors |= {name: torch.tensor(scale) for name in stored.keys() - tensors.keys()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        check_logits(model, [configure(tmp_path, (10, 0))], tolerance=1e-5, num_tokens=8)


def test_inputs_of_an_expert_without_a_scale_are_rounded_alike_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "gpu_capability", lambda device: (10, 0))
    write(tmp_path, "nvfp4", "experts")
    tensors = load_file(tmp_path / "model.safetensors")
    unreached = [name for name in tensors if re.search(r"experts\.0\..*input_scale", name)]
    assert unreached
    save_file(tensors | {name: torch.zeros(()) for name in unreached}, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = logits(configure(tmp_path, (10, 0)), tokens, Parallel())
        config = configure(tmp_path, (10, 0), tensor_parallel_size=2, enable_expert_parallel=True)
        assert expected.isfinite().all()
        for result in on_ranks(2, partial(logits, config, tokens)):
            assert (result - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("compressed-tensors, int8", "dense"),
        ("compressed-tensors, int8", "experts"),
        ("fp8 of 128", "latent"),
        ("fp8", "latent"),
    ],
)
def test_norms_and_activations_round_for_the_next_product(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only attention's output, of each layer, is rounded in a pass of its own."""
    write(tmp_path, name, kind)
    multiply, mix, seen = linear._rounded_matmul, experts._rounded_fused_experts, list[str]()

    def watched(product: Any, passed: str, x: Tensor, *args: Any) -> Tensor:
        seen.append(passed if x.dtype in (torch.int8, torch.float8_e4m3fn) else passed.upper())
        return product(x, *args)  # type: ignore[no-any-return]

    monkeypatch.setattr(linear, "_rounded_matmul", partial(watched, multiply, "linear"))
    monkeypatch.setattr(experts, "_rounded_fused_experts", partial(watched, mix, "experts"))
    logits(configure(tmp_path), torch.arange(5), Parallel())
    if kind == "dense":
        assert seen == ["linear", "LINEAR", "linear", "linear"] * 2  # qkv, output, gate and up, down
    elif kind == "experts":
        assert seen == ["linear", "LINEAR", "experts"] * 2
    else:  # down, query, output; gate and up, down, in the shared experts of the second layer
        attention = ["linear", "linear", "LINEAR"]
        assert seen == [*attention, "linear", "linear", *attention, "linear", "linear", "experts"]


@pytest.mark.parametrize(("kind", "zero"), [("dense", -100), ("experts", 0)])
def test_inputs_are_rounded_with_the_publishers_scales(kind: str, zero: int, tmp_path: Path) -> None:
    test_quantized.test_inputs_are_rounded_with_the_publishers_scales(kind, zero, tmp_path)


def test_the_plan_says_how_weights_are_multiplied(tmp_path: Path) -> None:
    for name, kind, new, old in (
        ("fp8 of 128", "dense", "fp8: fp8 weights, multiplied as fp8,", "fp8: fp8 weights, widened in registers,"),
        ("compressed-tensors, int8", "dense", *["compressed-tensors: int8 weights, multiplied as int8,"] * 2),
        (
            *("mxfp4", "stacked"),
            *["mxfp4: e2m1 weights, widened in registers (experts); float32 weights (attention),"] * 2,
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, name, kind)
        assert new in plan_text(configure(folder))
        assert old in plan_text(configure(folder, (8, 6)))
    for kind in ("dense", "experts"):
        (tmp_path / kind).mkdir()
        write(tmp_path / kind, "nvfp4", kind)
        for capability, how in (((9, 0), "widened in registers"), ((12, 0), "multiplied as e2m1")):
            assert f"modelopt: e2m1 weights, {how}" in plan_text(configure(tmp_path / kind, capability))
        changed = {"quantization_config": {"quant_algo": "W4A16_NVFP4"}}
        text = plan_text(configure(tmp_path / kind, (12, 0), hf_overrides=changed))
        assert "modelopt: e2m1 weights, widened in registers" in text
    write_model("LlamaForCausalLM", _SIZES, tmp_path)
    text = plan_text(configure(tmp_path, quantization="int8"))
    assert "online int8: int8 weights, multiplied as int8, on cuda" in text
    text = plan_text(configure(tmp_path, quantization="int4"))
    assert (
        "online int4: int4 weights, widened in registers (attention, feed forward); int8 weights, multiplied as" in text
    )


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    write_model("LlamaForCausalLM", _SIZES | {"intermediate_size": 240}, tmp_path)
    with pytest.raises(ConfigError, match=r"int4: in feed_forward.down 240 inputs are not whole groups of 32; use fp8"):
        configure(tmp_path, quantization="int4")
    with pytest.raises(ConfigError, match=r"int8 is not supported with --load-format dummy on cuda; omit it$"):
        configure(tmp_path, quantization="int8", load_format="dummy")


@pytest.mark.parametrize(
    ("name", "kind", "formats"),
    [
        ("fp8 of 128", "dense", {QuantizedFormat("fp8", 0, rounds_inputs=True)}),
        ("awq", "dense", {QuantizedFormat("uint4", 32, has_offsets=True)}),
        ("bitsandbytes, nf4", "experts", {QuantizedFormat("nf4", group, wide=True) for group in (64, 0)}),
    ],
)
def test_a_rank_checks_its_formats(name: str, kind: str, formats: set[QuantizedFormat], tmp_path: Path) -> None:
    write(tmp_path, name, kind)
    assert set(quantized_formats(configure(tmp_path, tensor_parallel_size=2))) == formats
    assert not quantized_formats(configure(tmp_path / "whole"))


def test_columns_in_another_order_are_on_the_device_of_the_codes() -> None:
    for inputs in (64, 32):
        codes, scales = torch.zeros(4, inputs, dtype=torch.uint8, device="meta"), torch.zeros(4, 4, device="meta")
        weight = _ordered(QuantizedWeight("int4", torch.float32, codes, scales), torch.arange(64)[:inputs] % 4, 16)
        assert weight.columns is not None
        assert {each.device.type for each in (weight.columns, weight.codes, weight.scales)} == {"meta"}
