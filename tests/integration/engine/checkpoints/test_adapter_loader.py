"""The slices of adapters that ranks read: with them, weights are those of the merged checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.checkpoints import adapter_loader
from quire.engine.checkpoints.adapter_loader import AdapterLoader, LayerChange, in_blocks
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import Dense, Pooling
from quire.engine.distributed.communicator import Parallel
from quire.engine.distributed.expert_group import ExpertCommunicator, ExpertGroup
from quire.engine.layers.linear import Linear
from quire.engine.layers.moe import ExpertMatrices
from quire.engine.layers.weight import DenseWeights
from quire.engine.models.build import load_model
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import open_adapter
from tests.fakes import families
from tests.fakes.lora import SETTINGS, merged, write_lora
from tests.fakes.model_logits import CPU, configure
from tests.fakes.ranks import on_ranks
from tests.integration.engine.checkpoints import test_gguf, test_quantized
from tests.integration.engine.models import test_encoder, test_tower_adapters
from tests.integration.engine.models.test_adapters import slow

DORA = SETTINGS | {"use_dora": True, "use_rslora": True}
QUICK = ("Phi-3", "GPT-2", "Falcon, groups", "DeepSeek V2", "Qwen3-Next", "Zamba2", "gpt-oss")
"""Fused, transposed, interleaved, latent, recurrent, shared between layers, and with stacked experts."""
TOWERS = ("Qwen3-VL", "Llama 4", "Gemma 4, clipped, standardized", "Granite Vision 4")
"""With fused parts, reordered queries and keys, parts that are clipped, and readers."""


def loaded(config: EngineConfig, parallel: Parallel, *, pack: bool = False) -> tuple[nn.Module, AdapterLoader]:
    spread = config.parallel.experts
    experts = None if spread is None else ExpertGroup(spread, parallel, ExpertCommunicator(), ExpertCommunicator())
    model = load_model(config, parallel.rank, parallel, CPU, experts=experts, pack=pack)
    return model, AdapterLoader(model, config.model, config.parallel.stages[0], 1 << 30, pins_memory=False)


def changeable(config: EngineConfig) -> list[str]:
    """The tensors of a checkpoint that adapters of requests may change."""
    _, loader = loaded(config, Parallel())
    loader._find_tensors()
    return [*loader._weights]


def check(
    base: EngineConfig, adapter: AdapterRef, whole: EngineConfig, parallel: Parallel, *, unchanged: tuple[str, ...] = ()
) -> None:
    """Check that a rank's weights with the adapter's changes, of all layers but those that are `unchanged`, are those
    of the checkpoint that it was merged into."""
    model, loader = loaded(base, parallel)
    others, _ = loaded(whole, parallel)
    changes = loader.load(adapter)
    assert changes.keys() - loader.norms.keys() == loader.layers.keys() - unchanged
    for path, change in changes.items():
        own, other = model.get_submodule(path), others.get_submodule(path)
        if isinstance(change, DenseWeights):
            named = {name: each for name, each in vars(change).items() if each is not None}
            torch.testing.assert_close(named, dict(other.named_parameters()))
            continue
        assert isinstance(change, LayerChange)
        assert isinstance(own, Linear | ExpertMatrices)
        assert isinstance(other, Linear | ExpertMatrices)
        weights, expected = (
            each.weight.detach() if isinstance(each, ExpertMatrices) else each.weight.detach().flatten(1)[None]
            for each in (own, other)
        )
        for number, (weight, spans) in enumerate(zip(weights.clone(), change.spans.tolist(), strict=True)):
            begin = 0
            for (first, rank), width in zip(spans, loader.layers[path].widths, strict=True):
                rows = slice(first, first + rank)
                weight[begin : begin + width] += change.b[rows, :width].T @ change.a[rows]
                begin += width
            weight *= 1.0 if change.scale is None else change.scale[number, :, None]
            assert begin == len(weight)
            torch.testing.assert_close(weight, expected[number], rtol=1e-4, atol=1e-4)
        before, after = (getattr(each, "bias", None) for each in (own, other))
        if before is None or after is None or not own.adds_bias:
            assert before is not None or change.bias is None or not change.bias.any()
            continue
        scale, bias = (None if each is None else each.view(before.shape) for each in (change.scale, change.bias))
        changed = before * (1.0 if scale is None else scale) + (0.0 if bias is None else bias)
        torch.testing.assert_close(changed.detach(), after.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in families.CASES]
)
def test_ranks_read_their_slices(case: str, tmp_path: Path) -> None:
    families.write(case, tmp_path / "base")
    configured = partial(configure, max_model_len=families.LENGTHS.get(case, 256))
    config = configured(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", config.model, changeable(config), settings=DORA)
    out = merged(config.model, adapter, tmp_path / "out")
    for tp in (1, 2):
        base, whole = (configured(each, tensor_parallel_size=tp) for each in (tmp_path / "base", out))
        on_ranks(tp, partial(check, base, adapter, whole))


@pytest.mark.parametrize(
    "case",
    [case if case == "modernbert" else pytest.param(case, marks=pytest.mark.slow) for case in test_encoder.CASES],
)
def test_encoders(case: str, tmp_path: Path) -> None:
    test_encoder.save(case, tmp_path / "base")
    config = configure(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", config.model, changeable(config), settings=DORA)
    folders = tmp_path / "base", merged(config.model, adapter, tmp_path / "out")
    for tp in (1, 2):
        base, whole = (configure(each, tensor_parallel_size=tp) for each in folders)
        on_ranks(tp, partial(check, base, adapter, whole))


@pytest.mark.parametrize("case", [*TOWERS, *slow(test_tower_adapters.CASES, TOWERS)])
def test_towers(case: str, tmp_path: Path) -> None:
    """Also of ranks that have all of a tower."""
    test_tower_adapters.write(case, tmp_path / "base")
    configured = partial(configure, max_model_len=64)
    config = configured(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", config.model, changeable(config), settings=DORA)
    out = merged(config.model, adapter, tmp_path / "out")
    layouts: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}]
    layouts.append({"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"})
    for layout in layouts:
        base, whole = (configured(each, **layout) for each in (tmp_path / "base", out))
        on_ranks(layout.get("tensor_parallel_size", 1), partial(check, base, adapter, whole))


@pytest.mark.parametrize("case", [*QUICK, *slow(families.CASES, QUICK)])
def test_whole_matrices(case: str, tmp_path: Path) -> None:
    families.write(case, tmp_path / "base")
    check_whole(tmp_path, families.LENGTHS.get(case, 256))


@pytest.mark.parametrize("case", [*TOWERS, *slow(test_tower_adapters.CASES, TOWERS)])
def test_whole_matrices_of_towers(case: str, tmp_path: Path) -> None:
    test_tower_adapters.write(case, tmp_path / "base")
    check_whole(tmp_path, 64, "tower.")


def check_whole(tmp_path: Path, length: int, start: str = "") -> None:
    """With their biases, and the norms of towers, beside low-rank changes of other matrices whose paths start so."""
    configured = partial(configure, max_model_len=length)
    config = configured(tmp_path / "base")
    _, loader = loaded(config, Parallel())
    base = loader._find_tensors()
    every = {name: place.path for name, (place, *_) in loader._weights.items() if name != base.head}
    names = [name for name, path in every.items() if path.startswith(start)]
    shapes = Base(config.model.architecture).shapes
    whole = {name: shapes[name] for name in names[::2]}
    whole |= {bias: shapes[bias] for name in whole if (bias := name.replace("weight", "bias")) in shapes}
    whole |= {name: shapes[name] for name in loader._of_norms}
    adapter = write_lora(tmp_path / "adapter", config.model, names[1::2], others=whole)
    out = merged(config.model, adapter, tmp_path / "out")
    unchanged = tuple(path for path in loader.layers if not path.startswith(start) or path == "head")
    for tp in (1, 2):
        whole_model, other = (configured(each, tensor_parallel_size=tp) for each in (tmp_path / "base", out))
        on_ranks(tp, partial(check, whole_model, adapter, other, unchanged=unchanged))


def test_what_adapters_cannot_change_in_a_tower(tmp_path: Path) -> None:
    """A convolution over patches that overlap, positions; and what aLoRA would change before its invocation."""
    test_tower_adapters.write("Step 3.7", tmp_path / "base")
    config = configure(tmp_path / "base", max_model_len=64)
    _, loader = loaded(config, Parallel())
    names = [*checkpoint_tensors(config.model.architecture, has_head=True)]

    def problem(name: str, **settings: Any) -> str:
        given = write_lora(tmp_path / name, config.model, [name], settings=SETTINGS | settings)
        with pytest.raises(ConfigError) as found:
            loader.load(given)
        return str(found.value)

    convolution = next(name for name in names if "vit_downsampler1" in name and name.endswith("weight"))
    assert f"changes {convolution}, which adapters of requests cannot change" in problem(convolution)
    positions = "vision_model.positional_embedding"
    whole = write(tmp_path / "positions", {f"base_model.model.{positions}": (16, 32)})
    with pytest.raises(ConfigError, match="which adapters of requests cannot change; use `quire merge`"):
        loader.load(whole)
    linear = next(name for name in names if "vision" in name and "mlp.c_fc.weight" in name)
    assert "which images are multiplied by, too: alora_" in problem(linear, alora_invocation_tokens=[3])


def test_what_no_answer_depends_on(tmp_path: Path) -> None:
    """Layers and norms of a tower behind its output are not built, but PEFT trains them with the others. Tensors that
    the checkpoint has for another purpose are refused."""
    families.write("LLaVA over Mistral", tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    other = "model.vision_tower.other.weight"
    save_file(tensors | {other: torch.zeros(8, 4)}, file, {"format": "pt"})
    _, loader = loaded(configure(tmp_path / "base", max_model_len=64), Parallel())
    start = "base_model.model.model.vision_tower"
    hidden = len(next(each for name, each in tensors.items() if "post_layernorm" in name))
    last = max(re.findall(r"encoder\.layers\.(\d+)\.", " ".join(tensors)))
    unused: dict[str, tuple[int, ...]] = {
        f"{start}.post_layernorm.weight": (hidden,),
        f"{start}.encoder.layers.{last}.self_attn.q_proj.lora_A.weight": (3, hidden),
        f"{start}.encoder.layers.{last}.self_attn.q_proj.lora_B.weight": (hidden, 3),
    }
    assert not loader.load(write(tmp_path / "unused", unused))
    low_rank: dict[str, tuple[int, ...]] = {
        f"{start}.other.lora_A.weight": (3, 4),
        f"{start}.other.lora_B.weight": (8, 3),
    }
    with pytest.raises(ConfigError, match=f"changes {other}, which adapters of requests cannot change; use `quire mer"):
        loader.load(write(tmp_path / "other", low_rank))


def test_experts_of_a_rank(tmp_path: Path) -> None:
    """Each rank has some of the experts, and reads no others."""
    families.write("Qwen3 MoE", tmp_path / "base")
    config = configure(tmp_path / "base")
    adapter = write_lora(tmp_path / "adapter", config.model, changeable(config), settings=DORA)
    folders = tmp_path / "base", merged(config.model, adapter, tmp_path / "out")
    base, whole = (configure(each, tensor_parallel_size=2, enable_expert_parallel=True) for each in folders)
    on_ranks(2, partial(check, base, adapter, whole))


def test_biases(tmp_path: Path) -> None:
    """Of B, and those of the base that were trained, of some layers also with DoRA."""
    families.write("GPT-2", tmp_path / "base")
    config = configure(tmp_path / "base")
    names = [name for name in changeable(config) if name != "lm_head.weight"]
    biases = [name.replace(".weight", ".bias") for name in names[1::3]]
    settings = SETTINGS | {"lora_bias": True, "use_dora": True}
    adapter = write_lora(tmp_path / "adapter", config.model, names, settings=settings, biases=biases)
    folders = tmp_path / "base", merged(config.model, adapter, tmp_path / "out")
    for tp in (1, 2):
        base, whole = (configure(each, tensor_parallel_size=tp) for each in folders)
        on_ranks(tp, partial(check, base, adapter, whole, unchanged=("head",)))


def test_rows_of_gguf(tmp_path: Path) -> None:
    """The rows of queries and keys are in another order than those of the adapter, which was trained with the published
    model."""
    file = tmp_path / "model.gguf"
    test_gguf.write(file, "LlamaForCausalLM", gguf.GGMLQuantizationType.Q8_0).save_pretrained(tmp_path / "published")
    published = configure(tmp_path / "published")
    adapter = write_lora(tmp_path / "adapter", published.model, changeable(published), settings=DORA)
    merged(published.model, adapter, tmp_path / "out")
    on_ranks(1, partial(check, configure(file), adapter, configure(tmp_path / "out")))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gptq, act order", "latent"),
        ("awq", "dense"),
        ("compressed-tensors, int8", "transposed"),
        ("fp8 of blocks", "dense"),
        ("nvfp4", "gpt"),
        ("bitsandbytes, nested", "dense"),
    ],
)
def test_numbers_of_quantized_bases(name: str, kind: str, tmp_path: Path) -> None:
    """DoRA needs the norms of the base's rows, and a whole matrix its difference from the base's, which are packed:
    both are of the numbers that they represent."""
    test_quantized.write(tmp_path, name, kind)
    whole = configure(tmp_path / "whole")
    names, shapes = changeable(whole), Base(whole.model.architecture).shapes
    adapters = [write_lora(tmp_path / "DoRA", whole.model, names, settings=DORA)]
    matrices = {name: shapes[name] for name in names if "head" not in name}
    adapters.append(write_lora(tmp_path / "matrices", whole.model, [], others=matrices))
    for tp in (1, 2):

        def work(parallel: Parallel, tp: int = tp) -> list[list[dict[str, Any]]]:
            loaders = [
                loaded(configure(each, tensor_parallel_size=tp), parallel, pack=True)[1]
                for each in (tmp_path, tmp_path / "whole")
            ]
            return [[loader.load(adapter) for loader in loaders] for adapter in adapters]

        for found, expected in (each for own in on_ranks(tp, work) for each in own):
            assert found.keys() == expected.keys()
            for path, change in found.items():
                for tensor, exact in zip(vars(change).values(), vars(expected[path]).values(), strict=True):
                    assert (tensor is None) == (exact is None)
                    if tensor is not None:
                        torch.testing.assert_close(tensor, exact, rtol=1e-4, atol=1e-5, check_dtype=False)


LAYER = "base_model.model.model.layers.1"
REFUSED: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "added tokens": (
        {"base_model.model.lm_head.weight": (133, 48), "base_model.model.model.embed_tokens.weight": (133, 48)},
        "has 133 tokens, and the base 131: adapters of requests cannot add tokens; use `quire merge`",
    ),
    "a norm": (
        {f"{LAYER}.input_layernorm.weight": (48,)},
        "input_layernorm.weight changes model.layers.1.input_layernorm.weight, which",
    ),
    "a whole matrix that changes further": (
        {
            f"{LAYER}.mlp.down_proj.weight": (48, 80),
            f"{LAYER}.mlp.down_proj.lora_A.weight": (3, 80),
            f"{LAYER}.mlp.down_proj.lora_B.weight": (48, 3),
        },
        "down_proj.weight changes model.layers.1.mlp.down_proj.weight, which",
    ),
    "another size": (
        {f"{LAYER}.mlp.down_proj.lora_A.weight": (3, 81), f"{LAYER}.mlp.down_proj.lora_B.weight": (48, 3)},
        "down_proj.lora_A.weight has the shape",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("llama")
    families.write("Llama", folder)
    return configure(folder)


def write(folder: Path, shapes: dict[str, tuple[int, ...]], **settings: Any) -> AdapterRef:
    """An adapter with ones."""
    folder.mkdir()
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return AdapterRef(open_adapter(folder).digest, (str(folder),))


@pytest.mark.parametrize("case", REFUSED)
def test_what_adapters_of_requests_cannot_change(case: str, llama: EngineConfig, tmp_path: Path) -> None:
    shapes, problem = REFUSED[case]
    adapter = write(tmp_path / "adapter", shapes)
    _, loader = loaded(llama, Parallel())
    with pytest.raises(ConfigError) as found:
        loader.load(adapter)
    assert problem in str(found.value)


def test_layers_that_adapters_cannot_change(tmp_path: Path) -> None:
    """Such as experts that move; the text says why."""
    families.write("Qwen3 MoE", tmp_path / "base")
    config, name = configure(tmp_path / "base"), "model.layers.1.mlp.experts.{}.down_proj.weight"
    adapter = write_lora(tmp_path / "adapter", config.model, [name.format(2)])
    model, loader = loaded(config, Parallel())
    assert loader.load(adapter)
    experts = model.get_submodule("layers.1.feed_forward.experts.down")
    assert isinstance(experts, ExpertMatrices)
    experts.fixed_by = "--a-flag"
    loader = AdapterLoader(model, config.model, config.parallel.stages[0], 1 << 30, pins_memory=False)
    with pytest.raises(ConfigError, match=r"adapters of requests cannot change with --a-flag; use `quire merge`"):
        loader.load(adapter)


def test_size_is_known_before_tensors_are_read(
    llama: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices, scales and biases, and of trained rows."""
    names = [f"model.layers.1.{name}_proj" for name in ("self_attn.q", "self_attn.v", "mlp.down")]
    adapter = write_lora(tmp_path / "lora", llama.model, [f"{name}.weight" for name in names], settings=DORA)
    embedding = write(tmp_path / "rows", {"base_model.model.model.embed_tokens.weight": (131, 48)})
    for each in (adapter, embedding):
        model, loader = loaded(llama, Parallel())
        found = loader.load(each)
        size = sum(
            tensor.nbytes
            for change in found.values()
            for name, tensor in vars(change).items()
            if tensor is not None and name != "spans"
        )
        stage = llama.parallel.stages[0]
        assert AdapterLoader(model, llama.model, stage, size, pins_memory=False).load(each).keys() == found.keys()
        with monkeypatch.context() as patched:
            patched.setattr(adapter_loader, "open_tensors", None)
            with pytest.raises(ConfigError, match=r"the adapter needs .* on each device, where .* are reserved; use a"):
                AdapterLoader(model, llama.model, stage, size - 1, pins_memory=False).load(each)


def test_pinned_memory_has_few_blocks(llama: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each tensor is as it was."""
    monkeypatch.setattr(adapter_loader, "_BLOCK", 1 << 15)
    config = llama
    adapter = write_lora(tmp_path / "lora", config.model, changeable(config), settings=DORA)
    _, loader = loaded(config, Parallel())
    before, blocks = loader.load(adapter), list[Tensor]()

    def allocate(size: int) -> Tensor:
        blocks.append(torch.full((size,), 255, dtype=torch.uint8))
        return blocks[-1]

    after = dict(before)
    in_blocks(after, allocate)
    count = sum(tensor is not None for change in before.values() for tensor in vars(change).values())
    assert 1 < len(blocks) < count / 4
    total = sum(change.nbytes for change in before.values())
    assert total <= sum(len(each) for each in blocks) < total + (1 << 15) * len(blocks) / 2
    owned = {each.untyped_storage().data_ptr() for each in blocks}
    for path, change in before.items():
        for name, tensor in vars(change).items():
            moved = vars(after[path])[name]
            assert (tensor is None) == (moved is None)
            if tensor is not None:
                assert moved.equal(tensor)
                assert moved.untyped_storage().data_ptr() in owned
                assert moved.data_ptr() % 4 == 0


def test_a_classifier_of_rows_of_the_head(llama: EngineConfig, tmp_path: Path) -> None:
    """It is computed from some rows, which would not be an adapter's."""
    rows = Dense(name="lm_head", in_features=48, out_features=2, bias=False, rows=(5, 7), total_rows=131)
    pooling = Pooling(modes=("lasttoken",), modules=(rows,), size=2)
    config = replace(llama, model=replace(llama.model, pooling=pooling))
    adapter = write(tmp_path / "adapter", {"base_model.model.lm_head.weight": (131, 48)})
    with pytest.raises(ConfigError, match=r"changes lm_head\.weight, which adapters of requests cannot change; use"):
        loaded(config, Parallel())[1].load(adapter)


def test_what_may_not_start_late(tmp_path: Path) -> None:
    """Latent attention multiplies earlier tokens by this matrix, too."""
    families.write("DeepSeek V2", tmp_path / "base")
    config, name = configure(tmp_path / "base"), "model.layers.1.self_attn.{}_proj.weight"
    _, loader = loaded(config, Parallel())
    late = {"alora_invocation_tokens": [3]}
    for number, (part, others) in enumerate((("kv_b", {}), ("o", late), ("kv_b", late))):
        settings = SETTINGS | others
        adapter = write_lora(tmp_path / str(number), config.model, [name.format(part)], settings=settings)
        if number < 2:
            assert loader.load(adapter)
        else:
            with pytest.raises(ConfigError, match=r"kv_b_proj.*alora_invocation_tokens is not supported for it"):
                loader.load(adapter)


def test_biases_of_keys_beside_sinks(tmp_path: Path) -> None:
    """Are refused, as the absorbed form of latent attention leaves them out: without sinks they change nothing."""
    families.write("Hunyuan 4", tmp_path / "base")
    config, name = configure(tmp_path / "base"), "model.layers.1.self_attn.kv_b_proj.weight"
    _, loader = loaded(config, Parallel())
    change = loader.load(write_lora(tmp_path / "plain", config.model, [name], settings=SETTINGS | {"use_dora": True}))
    assert change.keys() == {"layers.1.attention.up"}
    adapter = write_lora(tmp_path / "biased", config.model, [name], settings=SETTINGS | {"lora_bias": True})
    with pytest.raises(ConfigError, match=r"kv_b_proj.lora_B.bias: lora_bias is not supported for .*kv_b_proj.weight"):
        loader.load(adapter)


def test_the_first_path_with_the_adapter_is_read(llama: EngineConfig, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    one, other = (write_lora(tmp_path / str(seed), llama.model, [name], seed) for seed in (1, 2))
    _, loader = loaded(llama, Parallel())
    (expected,) = loader.load(one).values()
    paths = (str(tmp_path / "missing"), *other.paths, *one.paths)
    (found,) = loader.load(AdapterRef(one.digest, paths)).values()
    assert isinstance(found, LayerChange)
    assert isinstance(expected, LayerChange)
    assert found.a.equal(expected.a)
    with pytest.raises(ConfigError, match=r"missing: no such folder.*; .*/2 has changed since"):
        loader.load(AdapterRef(one.digest, paths[:2]))
    file = tmp_path / "1" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"][1, 2] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"lora_B\.weight has values that are NaN or infinite"):
        loader.load(AdapterRef(open_adapter(tmp_path / "1").digest, one.paths))
    save_file({each: values * 1e12 for each, values in load_file(tmp_path / "2" / file.name).items()}, file)
    (tmp_path / "1" / "adapter_config.json").write_text(json.dumps(SETTINGS | {"lora_alpha": 9e29}))
    with pytest.raises(ConfigError, match=r"the change of layers\.2\.attention\.qkv has values that are NaN or infini"):
        loader.load(AdapterRef(open_adapter(tmp_path / "1").digest, one.paths))


def test_matrices_are_narrow_if_that_is_exact() -> None:
    """Both, in the same type; whatever the type of the file."""
    large, fine, exact = torch.tensor([[2.0**100]]), torch.tensor([[1.001953125]]), torch.tensor([[-1.5, 0.0]])
    for a, b, dtype in (
        (exact, exact, torch.bfloat16),
        (exact, large, torch.bfloat16),
        (fine, exact, torch.float16),
        (fine, large, torch.float32),
        (exact, torch.tensor([[1 / 3]]), torch.float32),
        (exact, torch.tensor([[torch.nan]]), torch.float32),
        (exact.half(), exact.half(), torch.float16),  # a layer that multiplies float16 takes no other type
    ):
        narrow = adapter_loader._narrowed(a, b)
        assert all(each.dtype == dtype for each in narrow)
        for each, whole in zip(narrow, (a, b), strict=True):
            torch.testing.assert_close(each.float(), whole.float(), rtol=0, atol=0, equal_nan=True)
