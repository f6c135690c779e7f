"""Every kind of encoder against transformers: the same weights in float32, hidden states at every position."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CamembertConfig,
    CamembertModel,
    DistilBertConfig,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GteConfig,
    GteForMaskedLM,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForMaskedLM,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from quire.engine.architecture.encoder_spec import EncoderSpec as Description
from quire.engine.architecture.families import FAMILIES, transformers_backend
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.checkpoints.loader import needed_tensors
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch, BatchAdapters
from quire.engine.layers.linear import Linear
from quire.engine.models.build import build, load_model
from quire.engine.models.encoder import Encoder
from quire.engine.protocol.errors import ConfigError
from quire.kernels import AdapterRows, packed_state
from tests.fakes.adapter_pools import SLOTS, Pool, add_pools, merge
from tests.fakes.model_logits import CPU, configure
from tests.fakes.quantized_checkpoints import quantize
from tests.fakes.ranks import on_ranks
from tests.fakes.sentence import hidden_states

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "initializer_range": 0.2,
}
DISTILBERT: dict[str, Any] = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}
MODERN: dict[str, Any] = {"local_attention": 20, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 100}
GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
}
CASES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, {}),
    "bert, with its head": (BertConfig, BertForMaskedLM, {"hidden_act": "gelu_new"}),
    "roberta": (RobertaConfig, RobertaModel, {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "relu"}),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, {"type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": (CamembertConfig, CamembertModel, {"type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": (DistilBertConfig, DistilBertModel, DISTILBERT),
    "distilbert, with waves": (DistilBertConfig, DistilBertModel, {**DISTILBERT, "sinusoidal_pos_embds": True}),
    "mpnet": (MPNetConfig, MPNetModel, {}),
    "nomic": (NomicBertConfig, NomicBertModel, {}),
    "modernbert": (ModernBertConfig, ModernBertModel, MODERN),
    "modernbert, with its head": (ModernBertConfig, ModernBertForMaskedLM, {**MODERN, "norm_bias": True}),
    "mpnet, with its head": (MPNetConfig, MPNetForMaskedLM, {}),
    "gte": (GteConfig, GteModel, {}),
    "gte, with its head": (GteConfig, GteForMaskedLM, {"type_vocab_size": 0}),
    "jina v3": (JinaEmbeddingsV3Config, JinaEmbeddingsV3Model, {}),
    "jina v3, with its head": (JinaEmbeddingsV3Config, JinaEmbeddingsV3ForMaskedLM, {}),
    "embedding gemma": (Gemma3TextConfig, Gemma3TextModel, GEMMA),
}
LENGTHS = (5, 1, 290, 33)


def save(case: str, folder: Path) -> None:
    config_class, model_class, changes = CASES[case]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**(SIZES | changes))).train(False)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers starts biases at 0 and norms at 1, which hides them
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)


def prompts() -> list[list[int]]:
    """With padding tokens among them, which RoBERTa does not count."""
    torch.manual_seed(1)
    drawn = [torch.randint(0, 101, (length,)).tolist() for length in LENGTHS]
    drawn[0][2:4] = [1, 1]
    return drawn


def states(config: EngineConfig, given: list[list[int]], parallel: Parallel) -> list[Tensor]:
    encoder = load_model(config, parallel.rank, parallel, CPU)
    assert isinstance(encoder, Encoder)
    return states_of(encoder, given)


def states_of(encoder: Encoder, given: list[list[int]], slots: Sequence[int] | None = None) -> list[Tensor]:
    """All prompts in one step, with adapters in these slots."""
    adapters = None
    if slots is not None:
        of_rows = torch.tensor([slot for slot, prompt in zip(slots, given, strict=True) for _ in prompt])
        rows = AdapterRows.of(of_rows, SLOTS)
        adapters = BatchAdapters(rows, rows, rows)
    lengths = torch.tensor([len(prompt) for prompt in given])
    nothing = torch.empty(0, dtype=torch.int64)
    batch = Batch(
        token_ids=torch.tensor([token for prompt in given for token in prompt]),
        positions=torch.cat([torch.arange(len(prompt)) for prompt in given]),
        sequence_lengths=lengths,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        logits_indices=nothing,
        adapters=adapters,
    )
    return list(torch.split(encoder.features(encoder(None, batch)), lengths.tolist()))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_transformers(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(case, tmp_path)
    expected = hidden_states(tmp_path, prompts())
    with caplog.at_level(logging.WARNING, "quire"):
        for tp in (1, 2, 4):
            config = configure(tmp_path, tensor_parallel_size=tp)
            for result in on_ranks(tp, partial(states, config, prompts())):
                for found, right in zip(result, expected, strict=True):
                    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("quire")]
    assert not ours, "heads are no surplus here"


@pytest.mark.parametrize("case", ["bert", "modernbert", "embedding gemma"])
def test_prompts_are_changed_by_their_adapters(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    slots, models = (0, -1, 2, 0), []
    for pack in (True, False, False):
        encoder = load_model(configure(tmp_path), 0, Parallel(), CPU, pack=pack)
        assert isinstance(encoder, Encoder)
        models.append(encoder)
    base, *merged = models
    with torch.no_grad():
        plain = states_of(base, prompts())
        pools = add_pools(base)
        found = states_of(base, prompts(), slots)
        assert Pool.used == {id(pool) for pool in pools.values()}
        expected = {-1: plain}
        for slot, model in zip((0, 2), merged, strict=True):
            merge(model, slot)
            expected[slot] = states_of(model, prompts())
    for number, slot in enumerate(slots):
        torch.testing.assert_close(found[number], expected[slot][number], rtol=1e-4, atol=1e-4)
        assert found[number].equal(plain[number]) == (slot < 0)


def test_nomic_with_the_settings_of_its_own_code(tmp_path: Path) -> None:
    save("nomic", tmp_path)
    expected, path = hidden_states(tmp_path, prompts()), tmp_path / "config.json"
    config = json.loads(path.read_text())
    own = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": 8192,
        "max_trained_positions": config["max_position_embeddings"],
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "vocab_size": config["vocab_size"],
    }
    path.write_text(json.dumps(own))
    configured = configure(tmp_path)
    assert configured.model.max_model_len == config["max_position_embeddings"]
    (found,) = on_ranks(1, partial(states, configured, prompts()))
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4)
    path.write_text(json.dumps(own | {"prenorm": True}))
    with pytest.raises(ConfigError, match="prenorm True is not supported"):
        configure(tmp_path, model_impl="quire")


@pytest.mark.parametrize("factor", [None, 2.0])
def test_gte_with_the_settings_of_its_own_code(factor: float | None, tmp_path: Path) -> None:
    save("gte", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    model = GteModel.from_pretrained(tmp_path)
    if factor is not None:  # as https://kexue.fm/archives/9706 defines it
        steps = torch.arange(0, 12, 2) / 12
        model.rotary_emb.inv_freq = 1 / ((500.0 * factor) ** steps * factor ** (2 / 12))
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts()]
    scaling = None if factor is None else {"type": "ntk", "factor": factor}
    theta = config.pop("rope_parameters")["rope_theta"] if factor is None else 500.0
    own = {
        "architectures": ["NewModel"],
        "model_type": "new",
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_parameters": None,
        "rope_scaling": scaling,
        "rope_theta": theta,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    path.write_text(json.dumps(config | own))
    for tp in (1, 2):
        for result in on_ranks(tp, partial(states, configure(tmp_path, tensor_parallel_size=tp), prompts())):
            for found, right in zip(result, expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    path.write_text(json.dumps(config | own | {"logn_attention_scale": True}))
    with pytest.raises(ConfigError, match="logn_attention_scale True is not supported"):
        configure(tmp_path, model_impl="quire")


def test_adapters_of_tasks_are_refused(tmp_path: Path) -> None:
    save("xlm-roberta", tmp_path)
    path = tmp_path / "config.json"
    adapters = {"lora_adaptations": ["retrieval.query", "text-matching"], "position_embedding_type": "rotary"}
    path.write_text(json.dumps(json.loads(path.read_text()) | adapters))
    with pytest.raises(ConfigError, match="lora_adaptations, the adapters of tasks, are not supported"):
        configure(tmp_path, model_impl="quire")


def test_decoders_whose_attention_is_not_causal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 12, "is_causal": False}
    model = Qwen3Model(Qwen3Config(**sizes)).train(False)
    model.save_pretrained(tmp_path)
    expected = []
    with torch.inference_mode():
        for prompt in prompts():
            everything = torch.zeros(1, 1, len(prompt), len(prompt))
            output = model(torch.tensor([prompt]), attention_mask=everything)
            expected.append(output.last_hidden_state[0])
    for tp in (1, 2, 4):
        for result in on_ranks(tp, partial(states, configure(tmp_path, tensor_parallel_size=tp), prompts())):
            for found, right in zip(result, expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | windows | {"layer_types": ["sliding_attention"] * 3}))
    with pytest.raises(ConfigError, match="bidirectional attention in the layers of Qwen3ForCausalLM is not supported"):
        configure(tmp_path)


def test_the_first_berts_name_their_norms_otherwise(tmp_path: Path) -> None:
    save("bert, with its head", tmp_path)
    expected = hidden_states(tmp_path, prompts())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    renamed = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)
    (found,) = on_ranks(1, partial(states, configure(tmp_path), prompts()))
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq, act order", "fp8"])
def test_quantized_weights_are_kept_and_planned(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 128})).save_pretrained(tmp_path)
    quantize(tmp_path, name)
    expected = hidden_states(tmp_path / "whole", prompts())
    for tp in (1, 2):
        config = configure(tmp_path, tensor_parallel_size=tp)
        for result in on_ranks(tp, partial(states, config, prompts())):
            for found, right in zip(result, expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    encoder = load_model(configure(tmp_path), 0, Parallel(), CPU)
    tensors: list[Tensor] = [*encoder.parameters()]
    for layer in encoder.modules():
        if isinstance(layer, Linear):
            assert layer.quantized is not None
            assert layer._product is not None
            tensors += packed_state.tensors_of(layer._product)
    planned = MemoryPlan.of(configure(tmp_path)).weights[0]
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(planned, rel=0.03)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("fp8", 0.1)])
def test_quantized_weights_stay_close(quantization: str, tolerance: float, tmp_path: Path) -> None:
    save("bert", tmp_path)
    (exact,) = on_ranks(1, partial(states, configure(tmp_path), prompts()))
    (rounded,) = on_ranks(1, partial(states, configure(tmp_path, quantization=quantization), prompts()))
    for found, right in zip(rounded, exact, strict=True):
        assert (found - right).abs().mean() <= tolerance * right.abs().mean()
        assert not torch.equal(found, right)


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_known_beforehand(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    for tp in (1, 2):
        config = configure(tmp_path, tensor_parallel_size=tp)
        arch = config.model.architecture
        assert arch.name in FAMILIES
        assert isinstance(arch, Description)
        with torch.device("meta"):

            class Rank(Parallel):
                size = tp

            made = build(config.model, range(arch.num_layers), Rank())
        assert sum(parameter.numel() for parameter in made.parameters()) == arch.stage_parameters(
            config.parallel.stages, 0, tp
        )
        read = {name: places[0][2].shape for name, places in needed_tensors(made, config.model).items()}
        assert {name: each.shape for name, each in checkpoint_tensors(arch, has_head=False).items()} == read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "the activation 'mish' is not supported"),
        ({"num_attention_heads": 5}, "not a multiple of 5"),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, got null"),
        (
            {"architectures": ["ElectraModel"]},
            "ElectraModel is not supported: it has no implementation .* not a causal",
        ),
    ],
)
def test_unsupported_settings_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers is not asked; tests of its backend show its answers."""

    def describe(request: transformers_backend.DescribeRequest) -> NoReturn:
        raise ConfigError("transformers cannot build it")

    monkeypatch.setattr(transformers_backend, "describe", describe)
    save("bert", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, runner="pooling")


def test_ranks_that_do_not_divide_and_stages_are_refused(tmp_path: Path) -> None:
    save("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"4 attention heads and .*80 feed-forward columns; sizes that do: 1, 2, 4$"):
        configure(tmp_path, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="pipeline parallelism is not supported for encoders such as BertModel"):
        configure(tmp_path, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="BertModel is an encoder and cannot generate text"):
        configure(tmp_path, runner="generate")
