"""Heads that draft against the forward passes of `tests.fakes.draft_heads`: the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import kernels
from quire.engine.architecture.attention_spec import CompressedAttentionSpec
from quire.engine.architecture.draft_head_spec import DraftHeadSpec
from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.families.draft_heads import mtp_head
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.config import draft_heads
from quire.engine.config.engine_config import EngineConfig, ModelConfig, SpeculativeConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.config.options import EngineOptions
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch
from quire.engine.layers.kv_cache import LayerCache
from quire.engine.models.build import load, load_draft_head
from quire.engine.models.decoder import Decoder
from quire.engine.models.draft_head import DraftHead
from quire.engine.protocol.errors import ConfigError
from tests.fakes.draft_heads import HEAD, MTP_CASES, Reference, write_eagle, write_eagle3, write_mtp, write_v4_mtp
from tests.fakes.families import write
from tests.fakes.model_logits import CPU, blocks_per_page, configure, in_pages, layer_cache
from tests.fakes.published import FOLDER
from tests.fakes.quantized_checkpoints import quantize, write_deepseek_v4
from tests.fakes.ranks import on_ranks

Write = Callable[[Path], Reference]
COUNT = 23
CASES: dict[str, Write] = {
    "EAGLE": partial(write_eagle, "Llama"),
    "EAGLE-3": partial(write_eagle3, "Llama"),
    "EAGLE-3, norm before the residual": partial(write_eagle3, "Qwen3", norm_before_residual=True),
    "EAGLE-3, the last layers": partial(
        write_eagle3, "Llama", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, reads=[0, 3, 4]
    ),
    "EAGLE-3, another width": partial(write_eagle3, "Llama", hidden_size=32, target_hidden_size=48),
    "EAGLE-3, a target with layer inputs": partial(write_eagle3, "Gemma 4, layer inputs, shared keys and values"),
    **{f"MTP, {case}": partial(write_mtp, case) for case in MTP_CASES},
    "MTP, DeepSeek V4": write_v4_mtp,
    "MTP, DeepSeek V4, entries": partial(write_v4_mtp, kind="compressed_sparse_attention"),
}


def head_of(case: str, folder: Path, model: ModelConfig) -> ModelConfig:
    if case.startswith("MTP"):
        return draft_heads.mtp(model)
    return draft_heads.eagle("eagle3" if "EAGLE-3" in case else "eagle", folder / HEAD, "safetensors", model)


def with_head(case: str, folder: Path, **options: Any) -> tuple[EngineConfig, ModelConfig]:
    config = configure(folder, max_model_len=64, **options)
    head = head_of(case, folder, config.model)
    return replace(config, model=draft_heads.with_aux_layers(config.model, head)), head


def a_batch(token_ids: Tensor, start: int, page: int) -> Batch:
    """One request's tokens from position `start` on. There are as many blocks to a page."""
    count = len(token_ids)
    positions = torch.arange(start, start + count)
    segments = kernels.StateSegments(*map(torch.tensor, ([0, count], [0, 1], [0 if start else -1], [0])))
    blocks = in_pages(torch.arange(16)[None], torch.zeros_like(positions), positions, page)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        sequence_lengths=torch.tensor([start + count]),
        query_starts=torch.tensor([0, count]),
        logits_indices=positions - start,
        groups={2: segments, **blocks},
    )


class Stages:
    """A model's stages on one rank, with caches, one after the other in this process; and its head."""

    def __init__(self, config: EngineConfig, head: ModelConfig, parallel: Parallel) -> None:
        arch, dtype = config.model.architecture, torch.float32
        self.stages: list[tuple[Decoder, list[LayerCache]]] = []
        self.page = blocks_per_page(arch, "float32")
        for stage, layers in enumerate(config.parallel.stages):
            decoder = load(config, stage * parallel.size + parallel.rank, parallel, CPU)
            caches: list[LayerCache] = []
            for number in layers:
                own = layer_cache(arch.layers[number], parallel.size, 16, dtype, self.page)
                source = arch.layers[number].kv_source
                caches.append(own if source is None else own._replace(memory=caches[layers.index(source)].memory))
            self.stages.append((decoder, caches))
        self.head = load_draft_head(config, head, parallel, CPU, self.stages[-1][0])
        self.caches = [layer_cache(layer, parallel.size, 16, dtype, self.page) for layer in head.architecture.layers]

    def batch(self, token_ids: Tensor, start: int) -> Batch:
        """One request's tokens from position `start` on."""
        return a_batch(token_ids, start, self.page)

    def output(self, batch: Batch) -> Tensor:
        hidden: Tensor | None = None
        for decoder, caches in self.stages:
            hidden = decoder(hidden, batch, caches)
        assert hidden is not None
        return hidden


def run(config: EngineConfig, head: ModelConfig, tokens: Tensor, cuts: list[int], parallel: Parallel) -> list[Tensor]:
    """The target's logits, the head's input, the states that it feeds back, and its logits, at all positions but the
    last, of steps that end at `cuts`."""
    model, found = Stages(config, head, parallel), []
    for start, end in zip((0, *cuts), cuts, strict=False):
        batch = model.batch(tokens[start:end], start)
        output = model.output(batch)
        states = model.head.hidden_states(output)
        out = model.head(tokens[start + 1 : end + 1], states, batch, model.caches)
        target = model.stages[-1][0]
        found.append((target.logits(output), states, model.head.fed_back(out), model.head.logits(out)))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_heads_compute_what_the_papers_say(case: str, tmp_path: Path) -> None:
    """At once, in parts, and token by token."""
    reference = CASES[case](tmp_path)
    tokens = torch.randint(0, 131, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = reference.target(tokens[None]).logits[0, :-1]
        states = reference.states(tokens)[:-1]
        expected = [logits, states, *reference.step(tokens[1:], states)]
    for tp, pp, cuts in ((1, 1, [COUNT]), (1, 2, [5, 6, COUNT]), (2, 1, [*range(1, COUNT + 1)]), (2, 2, [7, COUNT])):
        config, head = with_head(case, tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
        for results in on_ranks(tp, partial(run, config, head, tokens, cuts)):
            for result, right in zip(results, expected, strict=True):
                assert (result == -torch.inf).equal(right == -torch.inf)
                is_known = right > -torch.inf
                assert (result - right)[is_known].abs().max() <= 1e-4 * right[is_known].abs().max()


@pytest.mark.parametrize("case", ["MiMo-V2-Flash", "Step 3.5"])
def test_several_heads_read_tokens_further_ahead(case: str, tmp_path: Path) -> None:
    reference = write_mtp(case, tmp_path)
    tokens = torch.randint(0, 131, (COUNT + 3,), generator=torch.Generator().manual_seed(1))
    states = reference.states(tokens)[:COUNT]

    def logits_of_heads(config: EngineConfig, head: ModelConfig, parallel: Parallel) -> list[Tensor]:
        model, found = Stages(config, head, parallel), [list[Tensor](), list[Tensor](), list[Tensor]()]
        for start, end in ((0, 9), (9, 10), (10, COUNT)):
            batch = model.batch(tokens[start:end], start)
            read = model.head.hidden_states(model.output(batch))
            for number, logits in enumerate(found):
                ahead = slice(start + number + 1, end + number + 1)
                out = model.head(tokens[ahead], read, batch, model.caches, number)
                logits.append(model.head.logits(out, number))
                read = out if reference.is_chained else read
        return [torch.cat(logits) for logits in found]

    for tp in (1, 2):
        for results in on_ranks(tp, partial(logits_of_heads, *with_head("MTP", tmp_path, tensor_parallel_size=tp))):
            read = states
            for number, (result, step) in enumerate(zip(results, (reference.step, *reference.further), strict=True)):
                fed_back, right = step(tokens[number + 1 : COUNT + number + 1], read)
                read = fed_back if reference.is_chained else read
                assert (result - right).abs().max() <= 1e-4 * right.abs().max()


@pytest.mark.parametrize(
    "case", ["EAGLE-3", "MTP, DeepSeek V3", "MTP, Qwen3-Next", "MTP, Nemotron 3", "MTP, DeepSeek V4"]
)
def test_drafts_after_drafts_read_what_the_head_feeds_back(case: str, tmp_path: Path) -> None:
    reference = CASES[case](tmp_path)
    tokens = torch.randint(0, 131, (COUNT,), generator=torch.Generator().manual_seed(1)).tolist()
    config, head = with_head(case, tmp_path)

    def drafts(parallel: Parallel) -> list[int]:
        model = Stages(config, head, parallel)
        known = list(tokens)
        batch = model.batch(torch.tensor(known[:-1]), 0)
        out = model.head(torch.tensor(known[1:]), model.head.hidden_states(model.output(batch)), batch, model.caches)
        for _ in range(3):
            known.append(int(model.head.logits(out[-1:]).argmax()))
            batch = model.batch(torch.tensor(known[-2:-1]), len(known) - 2)
            out = model.head(torch.tensor(known[-1:]), model.head.fed_back(out[-1:]), batch, model.caches)
        return known[len(tokens) :]

    assert on_ranks(1, drafts) == [reference.drafts(tokens, 3)]


@pytest.mark.parametrize(
    "case",
    [
        *("EAGLE", "EAGLE-3", "EAGLE-3, another width", "MTP, GLM-4 MoE"),
        *("MTP, MiMo-V2-Flash", "MTP, Step 3.5", "MTP, DeepSeek V4, entries"),
    ],
)
def test_heads_have_the_parameters_that_are_planned(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
    for tp in (1, 2, 4):
        config, head = with_head(case, tmp_path, tensor_parallel_size=tp)
        arch, checkpoint = head.architecture, replace(head, load_format="dummy")
        assert isinstance(arch, DraftHeadSpec)

        def count(parallel: Parallel, config: EngineConfig = config, head: ModelConfig = checkpoint) -> int:
            target = load(config, parallel.rank, parallel, CPU)
            module: DraftHead = load_draft_head(config, head, parallel, CPU, target, pack=False)
            return sum(weight.numel() for weight in module.parameters())

        assert on_ranks(tp, count) == [arch.stage_parameters([range(1)], 0, tp)] * tp
        speculative = SpeculativeConfig(method=arch.method, model=head, tensor_parallel_size=tp)
        drafting = replace(config, scheduler=replace(config.scheduler, speculative=speculative))
        (before,), (after,) = MemoryPlan.of(config).weights, MemoryPlan.of(drafting).weights
        assert after - before == 4 * arch.stage_parameters([range(1)], 0, tp)


def test_weights_are_quantized_while_loading(tmp_path: Path) -> None:
    write_eagle3("Llama", tmp_path)
    tokens = torch.randint(0, 131, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    exact, rounded = (
        on_ranks(1, partial(run, *with_head("EAGLE-3", tmp_path, quantization=quantization), tokens, [COUNT]))[0][-1]
        for quantization in (None, "int8")
    )
    known = exact > -torch.inf
    assert 0 < (exact - rounded)[known].abs().mean() <= 0.2 * exact[known].abs().mean()


@pytest.mark.parametrize("name", ["compressed-tensors, 4 bits", "fp8 of blocks"])
def test_heads_in_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    write_mtp("MiMo", tmp_path, hidden_size=64, intermediate_size=128)
    quantize(tmp_path, name)
    tokens = torch.randint(0, 131, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    kept, whole = (
        on_ranks(1, partial(run, *with_head("MTP", folder), tokens, [COUNT]))[0]
        for folder in (tmp_path, tmp_path / "whole")
    )
    assert with_head("MTP", tmp_path)[1].keeps_quantized()
    for result, right in zip(kept, whole, strict=True):
        assert (result - right).abs().max() <= 1e-3 * right.abs().max()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_head_of_deepseek_v4_as_published(tp: int, tmp_path: Path) -> None:
    """In FP8, and its experts in MXFP4."""
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "o_lora_rank": 16, "head_dim": 32}
    settings: dict[str, Any] = {**sizes, "partial_rotary_factor": 0.25}
    write_v4_mtp(plain, **settings)
    write_deepseek_v4(plain, stored)
    assert load_file(stored / "model.safetensors")["mtp.0.e_proj.weight"].dtype == torch.float8_e4m3fn
    tokens = torch.randint(0, 131, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    (expected,) = on_ranks(1, partial(run, *with_head("MTP", plain), tokens, [COUNT]))
    for found in on_ranks(tp, partial(run, *with_head("MTP", stored, tensor_parallel_size=tp), tokens, [COUNT])):
        for result, right in zip(found, expected, strict=True):
            assert (result - right).abs().max() <= 1e-3 * right.abs().max()


def test_the_layer_of_deepseek_v4_s_head_is_the_one_behind_the_model_s() -> None:
    config = json.loads((FOLDER / "DeepSeek-V4-Flash" / "config.json").read_text())
    target = from_hf_config(config)

    def ratio(ratios: list[int]) -> int:
        head = mtp_head(config | {"compress_ratios": ratios}, target, None)
        (layer,) = head.layers
        assert isinstance(layer.attention, CompressedAttentionSpec)
        assert isinstance(layer.feed_forward, MoESpec)
        assert (layer.attention.window, layer.feed_forward.table_size) == (128, 0)
        return layer.attention.compressor_ratio

    stated = config["compress_ratios"]
    assert len(stated) == target.num_layers + 1
    assert [ratio(stated), ratio(stated[:-1]), ratio([*stated[:-1], 4])] == [0, 0, 4]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_several_residual_streams_have_no_heads_of_eagle(method: str, tmp_path: Path) -> None:
    write("DeepSeek V4", tmp_path)
    write_eagle3("Llama", tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{method} is not supported for DeepseekV4ForCausalLM, which has several"):
        configure(tmp_path, spec_method=method, spec_model=str(tmp_path / "other" / HEAD))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 140}, "head is for a vocabulary of 140 tokens, not 131"),
        ({"target_hidden_size": 64}, "head is for a model of hidden size 64, not 48"),
        ({"hidden_size": 32, "target_hidden_size": 48}, "no embedding of its own hidden size 32"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm False is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, r"reads layers \(2, 3, 5\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported"),
        ({"draft_vocab_size": 140}, "logits of 140 tokens, the model 131"),
        ({"draft_vocab_size": "many"}, "a value that eagle3 cannot use: .*many"),
        ({"hidden_size": None}, "a value that LlamaForCausalLM cannot use"),
    ],
)
def test_eagle_heads_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_eagle3("Llama", tmp_path)
    file = tmp_path / HEAD / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        with_head("EAGLE-3", tmp_path)


def test_heads_as_their_publishers_write_them(tmp_path: Path) -> None:
    """Pickled, as the paper's authors do, or with the settings of the layer apart, as vLLM's speculators."""
    write_eagle3("Llama", tmp_path, norm_before_residual=True)
    _, expected = with_head("EAGLE-3", tmp_path)
    folder, file = tmp_path / HEAD, tmp_path / HEAD / "config.json"
    config, tensors = json.loads(file.read_text()), load_file(folder / "model.safetensors")
    layer = {name: value for name, value in config.items() if name not in ("draft_vocab_size", "architectures")}
    del layer["norm_before_residual"]  # it is their default
    outer = {"draft_vocab_size": config["draft_vocab_size"], "architectures": ["Eagle3Speculator"]}
    file.write_text(json.dumps(outer | {"transformer_layer_config": layer}))
    save_file(
        {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}, folder / "model.safetensors"
    )
    loaded, head = with_head("EAGLE-3", tmp_path)
    arch = head.architecture
    assert isinstance(arch, DraftHeadSpec)
    assert replace(arch, stored_layer="model.midlayer") == expected.architecture
    tokens = torch.randint(0, 131, (COUNT + 1,), generator=torch.Generator().manual_seed(1))
    before = on_ranks(1, partial(run, loaded, head, tokens, [COUNT]))[0]

    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    file.write_text(json.dumps(config))
    pickled = draft_heads.eagle("eagle3", folder, "pt", configure(tmp_path, max_model_len=64).model)
    assert pickled.architecture == expected.architecture
    for result, right in zip(on_ranks(1, partial(run, loaded, pickled, tokens, [COUNT]))[0], before, strict=True):
        assert result.equal(right)


def test_names_of_a_part_of_a_model_with_images(tmp_path: Path) -> None:
    write("Qwen3.5 with a vision part", tmp_path)
    head = draft_heads.mtp(replace(configure(tmp_path).model, load_format="dummy"))
    names = checkpoint_tensors(head.architecture, has_head=True)
    needed = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "model.language_model.embed_tokens.weight")
    assert {*needed} <= {*names}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, (2, 2, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, (2, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 2, 1)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_layers_that_are_read(stated: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    write_eagle3("Llama", tmp_path)
    file = tmp_path / HEAD / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    config, _ = with_head("EAGLE-3", tmp_path)
    assert config.model.architecture.aux_layers == expected


def test_tensors_of_eagle_heads_are_checked(tmp_path: Path) -> None:
    write_eagle3("Llama", tmp_path)
    file = tmp_path / HEAD / "model.safetensors"
    whole = load_file(file)
    save_file({name: each for name, each in whole.items() if name not in ("fc.weight", "norm.weight")}, file)
    options = EngineOptions(
        model=str(tmp_path), device="cpu", spec_method="eagle3", spec_model=str(file.parent), max_model_len=64
    )
    with pytest.raises(ConfigError, match=r"model.fc.weight is missing; model.norm.weight is missing"):
        fetch_weights(options, resolve(options))
    save_file(whole | {"d2t": whole["d2t"] * 0 - 1}, file)
    config, head = with_head("EAGLE-3", tmp_path)
    with pytest.raises(ConfigError, match=r"d2t, of shape .60., does not give 60 different tokens below 131"):
        on_ranks(1, partial(Stages, config, head))
    save_file({name: each for name, each in whole.items() if name != "d2t"}, file)
    with pytest.raises(ConfigError, match=r"logits of 60 tokens, the model 131, .* does not say which they are"):
        with_head("EAGLE-3", tmp_path)


def test_models_whose_heads_are_not_known_are_refused(tmp_path: Path) -> None:
    write("Llama", tmp_path)
    with pytest.raises(
        ConfigError, match=r"mtp is not supported for LlamaForCausalLM; supported: .*DeepseekV3ForCausalLM"
    ):
        draft_heads.mtp(configure(tmp_path).model)


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    """Before a rank starts."""
    write("DeepSeek V3", tmp_path)
    options = EngineOptions(model=str(tmp_path), device="cpu", spec_method="mtp")
    with pytest.raises(ConfigError, match=r"this checkpoint has no head; omit --spec-method mtp"):
        resolve(options)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"no head for multi-token prediction .num_nextn_predict_layers is 0."):
        draft_heads.mtp(configure(tmp_path).model)
