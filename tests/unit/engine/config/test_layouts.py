"""Layouts: their sizes equal `serve`'s, their order follows from floors, and refusals give the reason."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.engine.architecture.attention_spec import AttentionSpec
from quire.engine.architecture.families.tensors import weight_names
from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.config import cuda_graph_sizes, devices, engine_config, floors
from quire.engine.config.achieved import GPU, Latency
from quire.engine.config.devices import Devices
from quire.engine.config.floors import estimate
from quire.engine.config.layouts import Layout, RefusedLayout, best_layout, layouts
from quire.engine.config.machine import Device, Link, Machine, describe
from quire.engine.config.memory_plan import MemoryPlan, read_bytes, tokens_in_cache
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.config.topology import LinkType
from quire.engine.protocol.errors import ConfigError
from tests.fakes import published
from tests.fakes.model_configs import MODEL_CONFIGS, write_config

GPUS = {"Llama 3 70B": "8xH100", "Mixtral 8x7B": "4xA100-40G", "DeepSeek R1": "16xH200", "Qwen3 0.6B": "2xA10G"}


def options(model: str, **changes: Any) -> EngineOptions:
    return EngineOptions(model=model, **{"max_model_len": 4096, **changes})


def find(
    folder: Path, name: str, gpus: str = "", **keywords: Any
) -> tuple[EngineOptions, Machine, list[Layout], list[RefusedLayout]]:
    asked = options(write_config(folder, name), **keywords.pop("options", {}))
    machine = describe(gpus or GPUS[name], keywords.pop("nodes", 1), 50.0)
    return asked, machine, *layouts(asked, machine, **keywords)


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_sizes_are_those_that_serve_resolves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that serve rejects is refused with the same error."""
    asked, machine, fits, refused = find(tmp_path, name)
    memory, links = machine.device.memory, ((LinkType.NVLINK,) * machine.count,) * machine.count
    monkeypatch.setattr(
        devices, "find", lambda kind, groups: Devices("cuda", machine.count, memory, tuple(range(sum(groups))), links)
    )
    assert fits
    for layout in fits:
        config = resolve(replace(asked, **layout.options))
        assert MemoryPlan.of(config) == MemoryPlan.of(layout.config)
        assert config.cache == layout.config.cache
        assert tokens_in_cache(config) == tokens_in_cache(layout.config)
        assert config.parallel.stages == layout.config.parallel.stages
    for each in refused:
        with pytest.raises(ConfigError) as error:
            resolve(replace(asked, **each.options))
        assert str(error.value) == str(each.error)
    both: list[Layout | RefusedLayout] = [*fits, *refused]
    degrees = [tuple(each.options.values()) for each in both]
    assert len(set(degrees)) == len(degrees)
    assert all(math.prod(sizes[:3]) == machine.count for sizes in degrees)


def test_this_machine_has_the_memory_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 8 << 30)
    asked = options(write_config(tmp_path, "Qwen3 0.6B"), device="cpu", quantization="int8")
    layout, others = best_layout(asked, cpu())
    assert not others
    config = resolve(asked)
    assert (MemoryPlan.of(config), config.cache) == (MemoryPlan.of(layout.config), layout.config.cache)


def cpu() -> Machine:
    peak = {32: 1e12, 16: 1e12, 8: 4e12}
    device = Device(
        name="CPU", memory=8 << 30, bandwidth=2e10, flops=peak, link=Link("shared memory", 2e10, Latency(2e-6, 0.0))
    )
    return Machine(device=device, count=1, kind="cpu")


def test_the_order_is_that_of_the_goal(tmp_path: Path) -> None:
    for name in ("Mixtral 8x7B", "Qwen3 0.6B"):
        for goal, rate in (("throughput", "tokens_per_second"), ("latency", "tokens_per_second_one")):
            *_, fits, _ = find(tmp_path, name, goal=goal)
            rates = [getattr(layout.estimate, rate) for layout in fits]
            assert rates == sorted(rates, reverse=True)


def test_known_answers(tmp_path: Path) -> None:
    """Tensor parallelism answers one request first; replicas of a small model answer most."""
    *_, fits, _ = find(tmp_path, "Qwen3 0.6B", "8xH100", goal="throughput")
    assert fits[0].flags == "-tp 1 -pp 1 -dp 8"
    *_, fits, _ = find(tmp_path, "Llama 3 70B", goal="latency")
    assert fits[0].flags == "-tp 8 -pp 1 -dp 1"
    *_, fits, refused = find(tmp_path, "DeepSeek R1", "8xH200", nodes=2)
    assert fits[0].options["enable_expert_parallel"]
    assert any(each.reason.startswith("Not enough memory: needs 652 GiB per rank, ") for each in refused)
    slow = describe("8xH200", 2, 0.01)
    *_, fits = layouts(options(write_config(tmp_path, "Llama 3 70B")), slow, given=())[:1]
    worst = min(fits, key=lambda layout: layout.estimate.tokens_per_second_one)
    assert worst.options["tensor_parallel_size"] == 16
    assert worst.estimate.decode_one.limit == "communication"


@pytest.mark.parametrize(
    ("name", "gpus", "layout", "reason"),
    [
        ("Llama 3 70B", "6xH100", "-tp 3 -pp 1 -dp 2", "does not divide this model's 64 attention heads"),
        ("Llama 3 70B", "A10G", "-tp 1 -pp 1 -dp 1", "Not enough memory: needs "),
        ("Qwen3 0.6B", "29xH100", "-tp 1 -pp 29 -dp 1", "29 is more than the model's 28 layers"),
        (
            "Mixtral 8x7B",
            "3xH100",
            "-tp 1 -pp 1 -dp 3 --enable-expert-parallel",
            "8 experts cannot be distributed evenly over 3 ranks",
        ),
    ],
)
def test_a_refusal_says_why(name: str, gpus: str, layout: str, reason: str, tmp_path: Path) -> None:
    refused = find(tmp_path, name, gpus)[-1]
    reasons = {each.flags: each.reason for each in refused}
    assert reason in reasons[layout]
    assert ";" not in reasons[layout]


def test_degrees_that_are_given_stay(tmp_path: Path) -> None:
    changes = {"tensor_parallel_size": 2}
    _, _, fits, refused = find(tmp_path, "Mixtral 8x7B", "8xH100", options=changes, given=changes)
    found: list[Layout | RefusedLayout] = [*fits, *refused]
    both = [each.options for each in found]
    assert {each["tensor_parallel_size"] for each in both} == {2}
    assert {math.prod(list(each.values())[:3]) for each in both} == {8}
    assert {each["enable_expert_parallel"] for each in both} == {False, True}
    changes = {"pipeline_parallel_size": 2, "data_parallel_size": 1, "enable_expert_parallel": True}
    _, _, fits, refused = find(tmp_path, "Mixtral 8x7B", "8xH100", options=changes, given=changes)
    assert [each.flags for each in fits] == ["-tp 4 -pp 2 -dp 1 --enable-expert-parallel"]
    assert not refused
    changes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 4)
    asked = options(write_config(tmp_path, "Qwen3 0.6B"), **changes)
    with pytest.raises(ConfigError, match=r"-tp 4 -pp 4 -dp 4 .*but 8 are visible"):
        best_layout(asked, describe("8xH100", 1, 50.0), given=changes)


def test_gpus_are_those_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the GPUs of the host that plans."""
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [(8, 0)] * 8)
    changes = {"kv_cache_dtype": "fp8"}
    assert find(tmp_path, "Qwen3 0.6B", "H100", options=changes)[2]
    *_, refused = find(tmp_path, "Qwen3 0.6B", "A100", options=changes)
    assert "compute capability 8.9" in refused[0].reason
    assert find(tmp_path, "Qwen3 0.6B", "X:80,2000,300", options=changes)[2]


def test_what_cannot_be_planned_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--input-len 4096: must be from 1 to 4095"):
        find(tmp_path, "Qwen3 0.6B", input_len=4096)
    with pytest.raises(ConfigError, match="--data-parallel-start-rank: only layouts of all replicas"):
        find(tmp_path, "Qwen3 0.6B", options={"data_parallel_start_rank": 0})


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_a_better_machine_is_never_slower(name: str, tmp_path: Path) -> None:
    _, machine, fits, _ = find(tmp_path, name, "4xH200" if name != "DeepSeek R1" else "8xH200", nodes=2)
    device, network, step = machine.device, machine.network, max(1, len(fits) // 8)
    for better in (
        replace(machine, device=replace(device, bandwidth=2 * device.bandwidth)),
        replace(machine, device=replace(device, flops={bits: 2 * peak for bits, peak in device.flops.items()})),
        replace(machine, device=replace(device, link=replace(device.link, bandwidth=2 * device.link.bandwidth))),
        replace(machine, network=replace(network, bandwidth=2 * network.bandwidth, latency=Latency(0.0, 0.0))),
    ):
        faster = 0
        for layout in fits[::step]:
            before, after = layout.estimate, estimate(layout.config, better, layout.estimate.input_len)
            assert after.tokens_per_second >= before.tokens_per_second
            assert after.tokens_per_second_one >= before.tokens_per_second_one
            assert after.ttft.seconds <= before.ttft.seconds
            faster += after != before
        assert faster or name == "DeepSeek R1"  # whose steps read so much that none is limited by compute


def test_a_floor_is_what_its_formula_says(tmp_path: Path) -> None:
    """With a dense model: bytes over bandwidth in decodes, operations over the rate in prefills, kernels, and
    all-reduces."""
    _, machine, [layout], _ = find(tmp_path, "Qwen3 0.6B", "H100")
    config, found, device = layout.config, layout.estimate, machine.device
    sizes, arch = MemoryPlan.of(config), config.model.architecture
    read = sizes.weights[0] + math.ceil((found.input_len + 1) / 16) * sizes.kv_block[0]  # the embedding is the head
    kernels = (28 * (4 + 3 + 2) + 3) * GPU.kernel_seconds  # products, attention's, the MLP's, and the last
    assert found.decode_one.seconds == pytest.approx(read / (device.bandwidth * GPU.bandwidth) + kernels)
    assert found.decode_one.limit == "launches"
    parameters = sum(each.elements for layer in arch.layers for each in layer.matrices(arch.hidden_size, 1))
    pairs = found.input_len * (found.input_len + 1) / 2
    operations = 2 * (parameters * found.input_len + 28 * pairs * 16 * 2 * 128 + arch.vocab_size * arch.hidden_size)
    assert found.ttft.seconds == pytest.approx(operations / (device.flops[16] * GPU.flops) + kernels)
    assert found.ttft.limit == "compute"

    given = {"tensor_parallel_size": 2}
    _, machine, [layout], _ = find(tmp_path, "Qwen3 0.6B", "2xH100", options=given, given=given)
    link = machine.device.link
    far = replace(
        machine,
        device=replace(machine.device, link=replace(link, latency=Latency(link.latency.base + 1.0, link.latency.each))),
    )
    after = estimate(layout.config, far, layout.estimate.input_len)
    assert after.decode_one.seconds - layout.estimate.decode_one.seconds == pytest.approx(2 * 28 + 1)

    given = {"prefill_context_parallel_size": 2}
    _, _, [layout], _ = find(tmp_path, "Qwen3 0.6B", "2xH100", options=given, given=given)
    after = estimate(layout.config, far, found.input_len)
    assert layout.estimate.decode_one.parts == found.decode_one.parts
    assert after.ttft.seconds - layout.estimate.ttft.seconds == pytest.approx(28)  # keys and values of each layer
    last = found.input_len / 2  # half of the tokens, which attend to the most keys
    pairs = last * (found.input_len + last + 1) / 2
    operations = 2 * (parameters * last + 28 * pairs * 16 * 2 * 128 + arch.vocab_size * arch.hidden_size)
    assert layout.estimate.ttft.parts["compute"] == pytest.approx(operations / (device.flops[16] * GPU.flops))


@pytest.mark.parametrize(
    ("name", "gpus", "bits"),
    [
        ("Qwen3-32B-FP8", "H100", 8),
        ("Qwen3-32B-FP8", "A100", None),
        ("Qwen3-235B-A22B-NVFP4", "4xB200", 4),
        ("Qwen3-235B-A22B-NVFP4", "4xH200", None),
    ],
)
def test_products_of_quantized_weights_have_the_rate_of_their_numbers(name: str, gpus: str, bits: int | None) -> None:
    """As far as the GPU multiplies such numbers; otherwise, weights are widened."""
    given = {"tensor_parallel_size": int(gpus[0]) if "x" in gpus else 1, "enable_expert_parallel": False}
    machine = describe(gpus, 1, 50.0)
    [layout], _ = layouts(options(str(published.FOLDER / name), **given), machine, given=given, input_len=4000)
    device, before = machine.device, layout.estimate.ttft.parts["compute"]
    for rate in (8, 4):
        faster = replace(device, flops={**device.flops, rate: 2 * device.flops.get(rate, 1e15)})
        after = estimate(layout.config, replace(machine, device=faster), 4000).ttft.parts["compute"]
        assert after == pytest.approx(before) if rate != bits else before / 2 < after < 0.7 * before


def test_experts_would_take_these_layouts_for_deepseek_r1() -> None:
    """On two hosts with eight H100: replicas that share experts for many requests, and for one, tensor parallelism
    inside of each host and a pipeline between them. Their steps fit, because they divide the tokens of one step."""
    asked = EngineOptions(model=str(published.FOLDER / "DeepSeek-R1"))
    machine = describe("8xH100-80G", 2, 50.0)
    first = {goal: layouts(asked, machine, goal=goal)[0][0] for goal in ("throughput", "latency")}
    assert first["throughput"].flags == "-tp 1 -pp 1 -dp 16 --enable-expert-parallel"
    assert first["throughput"].config.scheduler.max_num_batched_tokens == 8192 // 16
    assert first["latency"].flags == "-tp 8 -pp 2 -dp 1"


def test_one_request_waits_for_kernels_and_collectives() -> None:
    """DeepSeek-R1 on 8 H200 has a bound of the right size: published engines are below 150 tokens/s without MTP."""
    given = {"tensor_parallel_size": 8, "enable_expert_parallel": False}
    asked = options(str(published.FOLDER / "DeepSeek-R1"), **given)
    [layout], _ = layouts(asked, describe("8xH200", 1, 50.0), given=given)
    assert layout.estimate.decode_one.limit == "launches"
    assert 150 < layout.estimate.tokens_per_second_one < 250


def test_a_context_that_a_cache_does_not_hold_is_refused() -> None:
    asked = EngineOptions(model=str(published.FOLDER / "gpt-oss-120b"))
    fits, [refused] = layouts(asked, describe("H100-80G", 1, 50.0), input_len=100_000)
    assert not fits
    assert refused.reason == "the KV cache holds 99,920 tokens, too few for --input-len 100000"


def test_stages_take_turns(tmp_path: Path) -> None:
    """One request waits for all stages; many keep all of them busy, with a plan each."""
    given = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    _, _, [layout], _ = find(tmp_path, "Llama 3 70B", "4xH200", options=given, given=given)
    found, weights = layout.estimate, MemoryPlan.of(layout.config).weights
    assert found.decode_one.seconds > (sum(weights) - 128256 * 8192 * 2) / 4.8e12
    # Each of four plans has a quarter of the rows, and takes the time of the slowest stage.
    assert 4 * max(weights) / 4.8e12 < found.decode.seconds < 8 * max(weights) / 4.8e12
    assert found.rows == 256


def test_a_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    given = {"tensor_parallel_size": 4, "enable_expert_parallel": False}
    _, _, [layout], _ = find(tmp_path, "Mixtral 8x7B", options=given, given=given)
    weights, arch = MemoryPlan.of(layout.config).weights[0], layout.config.model.architecture
    embedding = 32000 * 4096 * 2 // 4
    experts = 32 * 8 * 3 * 4096 * 14336 * 2 // 4
    assert read_bytes(layout.config, arch, 0, weights, 1) == pytest.approx(weights - embedding - experts * 6 / 8)
    assert read_bytes(layout.config, arch, 0, weights, 10_000) == pytest.approx(weights - embedding)


@pytest.mark.parametrize(("length", "chunks"), [(400, [256, 144]), (4000, [1000] * 4), (9000, [2048] * 4 + [808])])
def test_the_chunks_of_a_prompt_overlap(
    length: int, chunks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the scheduler's chunks (see test_scheduler)."""
    given = {"pipeline_parallel_size": 4, "max_num_batched_tokens": 2048, "max_model_len": 10_000}
    _, machine, [layout], _ = find(tmp_path, "Qwen3 0.6B", "4xH200", options=given, given=given)
    steps: list[tuple[int, int]] = []

    def stage(self: Any, stage: int, requests: int, tokens: int, context: int, busy: int) -> Counter[str]:
        steps.append((stage, tokens))
        return Counter({"compute": 1.0})

    monkeypatch.setattr(floors._Floors, "stage", stage)
    ttft = estimate(layout.config, machine, length).ttft
    for number in range(4):
        assert [tokens for where, tokens in steps if where == number and tokens > 1] == chunks
    assert ttft.seconds == len(chunks) + 3


def test_chunks_that_overlap_cost_little_more_than_one_stage(tmp_path: Path) -> None:
    """With stages that compute for the same time, a pipeline of P takes (2 P - 1) / P of one stage's share."""
    times = {}
    for stages in (2, 4, 8):
        given = {"pipeline_parallel_size": stages, "max_model_len": 8192}
        _, _, [layout, *_], _ = find(
            tmp_path, "Llama 3 70B", "8xH200", options=given, given={**given, "data_parallel_size": 1}, input_len=4096
        )
        times[stages] = layout.estimate.ttft.seconds
    assert max(times.values()) < 2 * min(times.values())


def test_sparse_attention_bounds_the_keys_of_a_token(tmp_path: Path) -> None:
    """A decode of one request reads 2048 vectors of a layer, and the keys of the indexer for all tokens."""
    given = {"tensor_parallel_size": 8, "max_model_len": 131_072}
    machine, seconds = describe("8xH200", 1, 50.0), {}
    for architecture in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"):
        folder = write_config(tmp_path, "DeepSeek R1", architectures=[architecture])
        found, _ = layouts(options(folder, **given), machine, given=given)
        layout = next(each for each in found if each.config.parallel.experts is None)
        seconds[architecture] = [estimate(layout.config, machine, n).decode_one.seconds for n in (4095, 65535, 131_071)]
    (_, near, far), (_, indexed_near, indexed_far) = seconds.values()
    assert indexed_far - indexed_near == pytest.approx((far - near) * 128 / 576, rel=1e-3)


def test_compressed_attention_bounds_the_entries_of_a_token(tmp_path: Path) -> None:
    """Beyond a selection, a decode of one request reads the keys of an entry for 4 tokens, and an entry for 128."""
    folder = tmp_path / "v4"
    folder.mkdir()
    settings = published.config("DeepSeek-V4-Flash")
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    given = {"tensor_parallel_size": 8, "max_model_len": 1_048_576}
    machine = describe("8xH200", 1, 50.0)
    found, _ = layouts(options(str(folder), **given), machine, given=given)
    layout = next(each for each in found if each.config.parallel.experts is None)
    near, far = (estimate(layout.config, machine, n).decode_one.seconds for n in (65_535, 1_048_575))
    read = (far - near) * machine.device.bandwidth * GPU.bandwidth
    assert read == pytest.approx((1_048_576 - 65_536) * (21 * 2 * 128 / 4 + 20 * 2 * 512 / 128), rel=0.01)


def links_of(tmp_path: Path, name: str, machine: Machine, given: dict[str, Any], changes: dict[str, float]) -> float:
    """Seconds by which a decode of one request takes longer if these bandwidths of the machine are halved."""
    [layout], _ = layouts(options(write_config(tmp_path, name), **given), machine, given=given)
    link, network = machine.device.link, machine.network
    slower = replace(
        machine,
        device=replace(machine.device, link=replace(link, bandwidth=link.bandwidth / changes.get("link", 1))),
        network=replace(network, bandwidth=network.bandwidth / changes.get("network", 1)),
    )
    after = estimate(layout.config, slower, layout.estimate.input_len)
    return after.decode_one.seconds - layout.estimate.decode_one.seconds


def test_every_device_sends_its_part_to_other_hosts(tmp_path: Path) -> None:
    """In an all-reduce among 16 GPUs on two hosts, each of the 8 GPUs of a host sends an eighth."""
    given = {"tensor_parallel_size": 16, "data_parallel_size": 1}
    machine = describe("8xH200", 2, 1.0)  # slow, so that it takes longest
    size, number = 8192 * 2, 2 * 80 + 1
    assert links_of(tmp_path, "Llama 3 70B", machine, given, {"network": 2}) == pytest.approx(number * size / 8e9)
    assert links_of(tmp_path, "Llama 3 70B", machine, given, {"link": 2}) == 0


def test_replicas_that_share_experts_use_both_links(tmp_path: Path) -> None:
    """Half of the tokens come from the other of two hosts."""
    given = {"data_parallel_size": 8, "tensor_parallel_size": 1, "enable_expert_parallel": True}
    size = 2 * 32 * 4096 * 2
    slow = describe("4xH200", 2, 1.0)
    fast = describe("4xH200", 2, 1e6)
    assert links_of(tmp_path, "Mixtral 8x7B", slow, given, {"network": 2}) == pytest.approx(size / 2 / 1e9)
    assert links_of(tmp_path, "Mixtral 8x7B", fast, given, {"link": 2}) == pytest.approx(size * 3 / 8 / 450e9)


@pytest.mark.parametrize(("gpus", "factor"), [("8xH200", 1 + 1 / 8), ("8xA100-80G", 2 * 7 / 8), ("2xH200", 1.0)])
def test_an_all_reduce_sends_what_its_algorithm_needs(gpus: str, factor: float, tmp_path: Path) -> None:
    """NVSwitch sums and copies from compute capability 9.0 on."""
    machine = describe(gpus, 1, 50.0)
    given = {"tensor_parallel_size": machine.count, "data_parallel_size": 1}
    number, name = (2 * 28 + 1, "Qwen3 0.6B") if machine.count == 2 else (2 * 80 + 1, "Llama 3 70B")
    size = 2 * (1024 if machine.count == 2 else 8192)
    expected = number * factor * size / machine.device.link.bandwidth
    assert links_of(tmp_path, name, machine, given, {"link": 2}) == pytest.approx(expected)


def test_tokens_within_a_window_have_fewer_keys(tmp_path: Path) -> None:
    """The operations of attention are counted over the keys of every token."""
    _, machine, [layout], _ = find(tmp_path, "Qwen3 0.6B", "H100")
    arch, parts = layout.config.model.architecture, floors._Floors(layout.config, machine)
    layer = arch.layers[0]
    whole = layer.attention
    assert isinstance(whole, AttentionSpec)

    def operations(window: int | None, tokens: int, context: int) -> float:
        attention = replace(whole, window=window)
        return parts._operations(replace(layer, attention=attention), 1, tokens, context)

    for window, tokens, context in [(8, 10, 10), (8, 4, 10), (8, 4, 4), (8, 6, 9), (1, 3, 9)]:
        fewer = operations(None, tokens, context) - operations(window, tokens, context)
        missing = sum(max(0, keys - window) for keys in range(context - tokens + 1, context + 1))
        assert fewer == pytest.approx(2 * missing * 2 * 128 * 16)


def test_graphs_have_room_for_the_largest_layers(tmp_path: Path) -> None:
    """Streams, inputs and results of the attention's products, and gates, ups and their products."""
    _, _, [layout], _ = find(tmp_path, "Qwen3 0.6B", "H100")
    arch = layout.config.model.architecture
    attention, inner = (1024 + 4096) + (2048 + 1024), 3 * 3072
    assert cuda_graph_sizes._activations(arch, 1) == 4 * 1024 + attention + inner
    layer = arch.layers[0]
    assert isinstance(layer.feed_forward, MLPSpec)
    sparse = replace(layer, feed_forward=replace(layer.feed_forward, sparsity=0.95))
    assert cuda_graph_sizes._activations(replace(arch, layers=(layer, sparse)), 1) == 4 * 1024 + attention + 3 * inner
    experts = MoESpec(num_experts=8, top_k=4, intermediate_size=1024, shared=layer.feed_forward)
    mixed = replace(arch, layers=(replace(layer, feed_forward=experts),))
    assert cuda_graph_sizes._activations(mixed, 1) == 4 * 1024 + attention + 3 * 4 * 1024 + inner


def test_names_of_weights_are_made_once_for_all_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Mock(wraps=weight_names)
    monkeypatch.setattr(engine_config, "weight_names", names)
    _, _, fits, _ = find(tmp_path, "DeepSeek R1", "8xH200")
    assert len(fits) > 1
    names.assert_called_once()
