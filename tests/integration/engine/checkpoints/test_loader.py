"""The tensors that a rank reads, and its errors about checkpoints that do not fit."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.feed_forward_spec import MLPSpec, MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.spec_parts import NormSpec
from quire.engine.checkpoints import loader
from quire.engine.checkpoints.checkpoint import StoredSlice
from quire.engine.checkpoints.loader import Place
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import DEMO_MODEL
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers import moe
from quire.engine.layers.linear import Linear
from quire.engine.layers.weight import Shard, Weight, whole
from quire.engine.models.build import load
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.errors import ConfigError
from quire.kernels import Quantization, linear
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.configs import NORM, TINY, TINY_ATTENTION, TINY_FEED_FORWARD, TINY_LAYER, engine_config
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.ranks import on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint("llama", tmp_path)


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of the checkpoint (None: remove); dots are written as __."""
    file = folder / "model.safetensors"
    found = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file, {"format": "pt"})


def read(folder: Path) -> Decoder:
    return load(configure(folder), 0, Parallel(), CPU)


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    change(folder, model__norm__weight=None, model__layers__1__mlp__up_proj__weight=torch.zeros(7, 64))
    with pytest.raises(ConfigError) as error:
        read(folder)
    assert "model.norm.weight is missing" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight has the shape [7, 64], expected [96, 64]" in str(error.value)


def test_surplus_tensors_are_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(
        folder,
        model__layers__0__extra__weight=torch.zeros(3),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4),
    )
    config = configure(folder, tensor_parallel_size=2, pipeline_parallel_size=2)
    for rank in range(4):
        parallel = Parallel()
        parallel.rank, parallel.size = rank % 2, 2
        load(config, rank, parallel, CPU)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: tensors that LlamaForCausalLM does not use (1): model.layers.0.extra.weight"
    ]


def test_tied_checkpoint_may_carry_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint("qwen2", tmp_path)
    change(folder, lm_head__weight=torch.zeros(131, 64))
    decoder = read(folder)
    assert decoder.embedding is not None
    assert decoder.head.weight is decoder.embedding.weight
    assert not caplog.records


def test_sharded_checkpoint_in_another_type(folder: Path) -> None:
    tokens = torch.arange(20)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(folder, **{name: tensor.float() for name, tensor in tensors.items()})
    expected = logits(configure(folder), tokens, Parallel())
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(configure(folder, dtype="float32"), tokens, Parallel()), expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_reads_its_share_only(folder: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    put = loader._put

    def counted(weight: Weight, shard: Shard, values: Tensor, *staging: None) -> None:
        copied.append(values.numel())
        put(weight, shard, values, *staging)

    monkeypatch.setattr(loader, "_put", counted)
    parallel = Parallel()
    parallel.rank, parallel.size = tp - 1, tp
    decoder = load(configure(folder, tensor_parallel_size=tp), tp - 1, parallel, CPU, pack=False)
    padding = sum(131 % tp > 0 for _ in ("embedding", "head")) * (-131 % tp) * 64
    assert sum(copied) == sum(weight.numel() for weight in decoder.parameters()) - padding
    assert decoder.embedding is not None
    assert not decoder.embedding.weight[131 - (tp - 1) * -(-131 // tp) :].any()


MIXTURE = MoESpec(num_experts=6, top_k=2, intermediate_size=24, shared=MLPSpec(intermediate_size=16), shared_gate=True)
BIASED_MIXTURE = replace(MIXTURE, bias=True, router_bias=True, correction_bias=True, shared_gate=False)
MOE = replace(TINY, name="Qwen2MoeForCausalLM", layers=(TINY_LAYER, *[replace(TINY_LAYER, feed_forward=MIXTURE)] * 5))


def test_experts_are_packed_once_they_are_whole() -> None:
    config, tokens = engine_config(architecture=MOE), torch.arange(20)
    decoder = load(config, 0, Parallel(), CPU)
    mixtures = [module for module in decoder.modules() if isinstance(module, moe.Experts)]
    assert len(mixtures) == 5
    assert not any(weight.numel() for mixture in mixtures for weight in mixture.parameters())
    expected = logits(config, tokens, Parallel())
    halved = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    for result in on_ranks(2, lambda parallel: logits(halved, tokens, parallel)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def variant(attention: dict[str, Any], feed_forward: dict[str, Any], **model: Any) -> ModelSpec:
    layer = replace(
        TINY_LAYER,
        attention=replace(TINY_ATTENTION, **attention),
        feed_forward=replace(TINY_FEED_FORWARD, **feed_forward),
        attention_post_norm=NORM if attention else None,
    )
    return replace(TINY, layers=(layer, *[TINY_LAYER] * 5), **model)


VARIANTS = [
    TINY,
    replace(TINY, tie_embeddings=True, vocab_size=101),
    variant({"num_kv_heads": 1, "qkv_bias": True, "qk_norm": NORM}, {}),
    variant({"num_kv_heads": 2, "output_bias": True, "head_dim": 6}, {"bias": True}),
    variant({"qk_norm": NORM, "qk_norm_over": "all heads", "has_sinks": True}, {"is_gated": False, "bias": True}),
    variant({"num_kv_heads": 2, "qk_norm": NormSpec(eps=0.1, kind="layer"), "qk_norm_over": "each head"}, {}),
    MOE,
    replace(TINY, layers=(replace(TINY_LAYER, feed_forward=BIASED_MIXTURE),) * 6),
    replace(TINY, position_embeddings=70, head_bias=True, norm=NormSpec(eps=0.1, kind="layer", bias=True)),
]


@pytest.mark.parametrize("arch", VARIANTS)
def test_parameters_are_as_many_as_the_plan_says(arch: ModelSpec) -> None:
    cuts = ((range(6),), (range(1), range(1, 4), range(4, 6)))
    for tp, stages in itertools.product((1, 2, 4, 8), cuts):
        parallel = Parallel()
        parallel.size = tp
        for number, layers in enumerate(stages):
            with torch.device("meta"):
                decoder = Decoder(arch, layers, 100, parallel)
            held = sum(weight.numel() for weight in decoder.parameters())
            assert held == arch.stage_parameters(stages, number, tp)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_take_the_memory_that_the_plan_says(folder: Path, quantization: str | None, dtype: str) -> None:
    config = configure(folder, dtype=dtype, quantization=quantization)
    decoder = load(config, 0, Parallel(), CPU)
    products = [module._product for module in decoder.modules() if isinstance(module, Linear)]
    products = [product._product if isinstance(product, linear.PackedGatedLinear) else product for product in products]
    tensors = [*decoder.parameters(), *(t for product in products for t in vars(product).values())]
    held = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    planned = MemoryPlan.of(config).weights[0]
    assert held == pytest.approx(planned, rel=0.1)  # panels and oneDNN's blocks are padded


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.03), ("int4", 0.2)])
def test_quantized_logits_of_the_demo_model_are_near(quantization: str, tolerance: float) -> None:
    tokens = torch.arange(300, 380)
    exact = logits(configure(DEMO_MODEL, max_model_len=128, dtype="float32"), tokens, Parallel())
    rounded = logits(
        configure(DEMO_MODEL, max_model_len=128, dtype="float32", quantization=quantization), tokens, Parallel()
    )
    assert 0 < (rounded - exact).norm() <= tolerance * exact.norm()


def test_several_readers_go_ahead_within_bounds() -> None:
    """Four at once; weights that are filled and not yet packed stay within 1/32 of all, or one layer."""
    together, lock = threading.Barrier(4, timeout=30), threading.Lock()
    held, most = 0, 0
    weight = Weight((8, 32), whole(8, 32))  # 1 KiB

    def fill(place: Place) -> None:
        nonlocal held, most
        together.wait()
        with lock:
            held += weight.nbytes
            most = max(most, held)

    def pack() -> None:
        nonlocal held
        with lock:
            held -= weight.nbytes

    place = (weight, weight.shards[0], StoredSlice("weight", (8, 32)))
    loader._fill([loader._Unit([place], weight.nbytes, pack) for _ in range(256)], fill, readers=4, bar=False)
    assert held == 0
    assert 4 * weight.nbytes <= most <= 8 * weight.nbytes


def test_what_a_reader_meets_ends_loading() -> None:
    weight = Weight((2, 2), whole(2, 2))
    place = (weight, weight.shards[0], StoredSlice("weight", (2, 2)))

    def fail(place: Place) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        loader._fill([loader._Unit([place], weight.nbytes)] * 40, fail, readers=4, bar=False)


def test_a_layer_is_packed_as_soon_as_it_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than a few layers stand in memory in both forms."""
    unpacked: list[int] = []
    put, pack = loader._put, Linear.pack

    def count_put(weight: Weight, shard: Shard, values: Tensor, *staging: None) -> None:
        unpacked[-1] += 1
        put(weight, shard, values, *staging)

    def count_pack(layer: Linear, quantization: Quantization | None) -> None:
        unpacked.append(0)
        pack(layer, quantization)

    monkeypatch.setattr(loader, "_put", count_put)
    monkeypatch.setattr(Linear, "pack", count_pack)
    unpacked.append(0)
    decoder = read(folder)
    assert len(unpacked) == 1 + sum(isinstance(module, Linear) for module in decoder.modules())
    assert max(unpacked) <= 16  # tensors of a layer, not of the model
