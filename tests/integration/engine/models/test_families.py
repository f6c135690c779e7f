"""Every family against transformers: the same weights in float32, logits at every position and greedy tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire.engine.architecture.attention_spec import AttentionSpec, MLASpec
from quire.engine.architecture.families import ENCODERS, FAMILIES, from_hf_config, of_text
from quire.engine.architecture.feed_forward_spec import MoESpec
from quire.engine.architecture.model_spec import ModelSpec
from quire.engine.architecture.recurrent_spec import KimiDeltaSpec
from quire.engine.architecture.residual_spec import SharedBlockSpec
from quire.engine.config.memory_plan import MemoryPlan, read_bytes
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers import chunked_attention
from quire.engine.layers.batch import AttentionMetadata
from quire.engine.layers.chunked_attention import by_chunks
from quire.engine.models.decoder import Decoder
from quire.engine.models.shared_block_layer import SharedBlockLayer
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes.checkpoints import likeliest
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.families import CASES, LENGTHS, MODELS, RENAMED, SIZES, table, write, write_renamed
from tests.fakes.model_logits import configure, logits
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor

STEPS = 32
WITH_OTHER_MATRICES = (
    *("Gemma 3n", "Gemma 4, experts", "Gemma 4, layer inputs, shared keys and values"),
    *("Nemotron 3", "Nemotron 3, latent experts", "Zamba2", "LFM3", "MiniMax-M3", "DeepSeek V4"),
    *("RecurrentGemma", "xLSTM", "RWKV-4", "GLM-5.3", "Qwen4-Exp"),
)
"""Cases with matrices that others do not have."""
WHATEVER_THE_BATCH: dict[str, dict[str, Any]] = {
    "Gemma 3n": {},
    "Gemma 3n, another stream": {},
    "Gemma 4, layer inputs, shared keys and values": {},
    "xLSTM": {},
    "RecurrentGemma": {"hidden_size": 64},
    "RWKV-4": {"hidden_size": 64},
}
"""Cases whose logits are the same in every batch, bit by bit, and settings for that: torch rounds the sigmoids in the
remainder of a batch after the last whole vector differently."""
QUANTIZED = (
    *WITH_OTHER_MATRICES,
    *("Qwen3-Next", "Qwen3.5 MoE", "OLMo hybrid", "Kimi Linear", "Ling hybrid", "MiniMax", "LFM2-MoE"),
    *("Mamba", "Mamba-2", "Bamba", "Falcon-H1", "Jamba", "Granite 4, experts"),
    *("DeepSeek V3.2", "GLM-5, shared selection", "A.X K2", "Hunyuan 4", "Llama 4", "Step 3.7"),
)
"""Cases that are quantized while loading, and run in all layouts: with recurrent states, sparse attention, or other
matrices."""
_DISTANCES = {"int8": 0.5, "fp8": 0.6}
"""The largest mean distance between logits and the logits of the unrounded numbers, relative to the latter, in models
of random numbers whose tokens may go to other experts, or attend to other tokens. In most models it is below 0.25."""


Written = Callable[[str], tuple[Path, Any]]
"""For a case: its checkpoint, and transformers' model."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Each is written once, and only read."""

    @cache
    def of(case: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("model")
        return folder, write(case, folder)

    return of


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, written: Written) -> None:
    """On 4 ranks, which share KV heads; and in 3 stages, the first of which has more layers, of 2 ranks each."""
    folder, model = written(case)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp, pp in ((1, 1), (4, 1), (2, 3)):
        length = LENGTHS.get(case, 256)
        config = configure(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=length)
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("case", WHATEVER_THE_BATCH)
def test_logits_do_not_depend_on_the_batch(case: str, tmp_path: Path) -> None:
    write(case, tmp_path, **WHATEVER_THE_BATCH[case])
    config = configure(tmp_path, max_model_len=LENGTHS.get(case, 256))
    generator = torch.Generator().manual_seed(1)
    one, few, others, many = (torch.randint(0, 131, (length,), generator=generator) for length in (1, 6, 25, 90))
    for tokens, besides in ((one, ([few], [many, others])), (many, ([one], [few, one, others]))):
        (alone,) = on_ranks(1, partial(logits, config, tokens))
        for beside in besides:
            (found,) = on_ranks(1, partial(logits, config, tokens, beside=beside))
            assert torch.equal(found, alone)


@pytest.mark.parametrize("case", RENAMED)
def test_models_that_transformers_lacks_are_those_that_it_has_by_other_names(case: str, tmp_path: Path) -> None:
    model = write_renamed(case, tmp_path)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        config = configure(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=256)
        for result in on_ranks(tp, partial(logits, config, tokens)):
            assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_layers_with_chunked_attention_share_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("Llama 4", tmp_path)
    config = configure(tmp_path, max_model_len=256)
    mixers = [layer.attention for layer in config.model.architecture.layers]
    assert sum(isinstance(mixer, AttentionSpec) and mixer.is_chunked for mixer in mixers) > 1
    calls = []

    def counted(*arguments: Any) -> AttentionMetadata:
        calls.append(arguments)
        return by_chunks(*arguments)

    monkeypatch.setattr(chunked_attention, "by_chunks", counted)
    on_ranks(1, partial(logits, config, torch.arange(100)))
    assert len(calls) == 1


ON_RANKS = (
    *QUANTIZED,
    *("Qwen3", "Mistral, windows", "Gemma 2", "gpt-oss", "Mixtral", "Qwen2 MoE", "dots1", "EXAONE MoE", "DeepSeek V3"),
    *("Lara Mini", "LFM2", "Nemotron-H", "Zamba", "dots3-note", "GLM-5.3, decays without a bound"),
)
"""Cases that generate on ranks and stages: between them they have every kind of layer."""


def layouts() -> list[Any]:
    """In the default tier, one rank for cases that differ most, and Qwen3 in each layout."""
    default = {("Qwen3", 2, 1), ("Qwen3", 1, 2), ("Qwen3", 2, 2), *((case, 1, 1) for case in ("Qwen3", *QUANTIZED))}
    return [
        pytest.param(case, tp, pp, marks=[] if (case, tp, pp) in default else [pytest.mark.slow])
        for case in CASES
        if case not in LENGTHS
        for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2))
        if (tp, pp) == (1, 1) or case == "Qwen3" or (tp == pp and case in ON_RANKS)
    ]


def kinds_of_layers(case: str) -> frozenset[tuple[object, ...]]:
    """The kinds of layers that differ in a rank's caches, or in the data between ranks and stages."""
    name, changes = CASES[case]
    config = getattr(transformers, name).config_class(**{**SIZES, **changes}).to_dict()
    found = set()
    for layer in from_hf_config(of_text({**config, "architectures": [name]})).layers:
        mixer = layer.attention
        kept = [getattr(mixer, part, None) is not None for part in ("window", "indexer")]
        parts = [type(part).__name__ for part in (mixer, layer.state, layer.feed_forward)]
        found.add((*parts, *kept, getattr(mixer, "is_chunked", False), layer.kv_source is not None))
    return frozenset(found)


def test_each_kind_of_layers_generates_on_ranks() -> None:
    kinds = {case: kinds_of_layers(case) for case in CASES if case not in LENGTHS}
    on_ranks = {kinds[case] for case in ON_RANKS}
    assert [case for case, each in kinds.items() if each not in on_ranks] == []


@pytest.mark.parametrize(("case", "tp", "pp"), layouts())
def test_greedy_tokens_are_those_of_transformers(case: str, tp: int, pp: int, written: Written) -> None:
    """With chunked prefill, and with prefix hits where a prompt begins as one before."""
    folder, model = written(case)
    rng = random.Random(0)
    shared = [rng.randrange(3, 130) for _ in range(40)]
    prompts = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 33)]
    prompts += [[*shared, 5, 6], [*shared, 7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    config = configure(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=256)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts], max_num_batched_tokens=16)
        assert ranks.stats.prefix_hit_tokens >= 32
    assert [len(each) for each in tokens] == [STEPS] * len(prompts)
    assert tokens == likeliest(model, prompts, tokens)


@pytest.mark.parametrize("case", QUANTIZED)
def test_weights_that_are_quantized_while_loading_stay_close(case: str, written: Written) -> None:
    folder, _ = written(case)
    tokens = torch.randint(0, 101, (60,), generator=torch.Generator().manual_seed(1))
    exact = on_ranks(1, partial(logits, configure(folder, max_model_len=64), tokens))[0]
    for quantization, distance in _DISTANCES.items():
        found = []
        for tp in (1, 2):
            config = configure(folder, max_model_len=64, tensor_parallel_size=tp, quantization=quantization)
            found += on_ranks(tp, partial(logits, config, tokens))
        for rounded in found:
            assert 0 < (rounded - exact).abs().mean() <= distance * exact.abs().mean()
            if quantization == "fp8":  # scales are of whole rows, so that ranks round as one does
                assert (rounded - found[0]).abs().max() <= 1e-4 * found[0].abs().max()


@pytest.mark.parametrize("case", WITH_OTHER_MATRICES)
def test_stages_have_the_parameters_that_are_planned(case: str, written: Written) -> None:
    folder, _ = written(case)
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3)):
        config = configure(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=64)
        arch, stages = config.model.architecture, config.parallel.stages
        parallel = Parallel()
        parallel.size = tp
        for stage, layers in enumerate(stages):
            with torch.device("meta"):
                decoder = Decoder(arch, layers, 64, parallel)
            assert sum(weight.numel() for weight in decoder.parameters()) == arch.stage_parameters(stages, stage, tp)


def test_a_step_reads_a_shared_block_once_for_each_of_its_layers(tmp_path: Path) -> None:
    write("Zamba2", tmp_path)
    config = configure(tmp_path, max_model_len=64)
    arch, weights = config.model.architecture, MemoryPlan.of(config).weights[0]
    uses = Counter(layer.residual.source for layer in arch.layers if isinstance(layer.residual, SharedBlockSpec))
    assert max(uses.values()) > 1
    with torch.device("meta"):
        made = Decoder(arch, range(arch.num_layers), 64, Parallel())
    again = 0
    for source, count in uses.items():
        layer = made.layers[str(source)]
        assert isinstance(layer, SharedBlockLayer)
        again += 4 * (count - 1) * sum(each.numel() for each in layer.block.parameters() if each.ndim == 2)
    embedding, _ = arch.outer_matrices(1)
    assert read_bytes(config, arch, 0, weights, 1) == weights - 4 * embedding.elements + again


@pytest.mark.parametrize("name", ["swa_head_dim", "swa_v_head_dim", "swa_num_attention_heads"])
def test_windows_of_mimo_have_the_heads_of_other_layers(name: str) -> None:
    architecture, changes = CASES["MiMo-V2-Flash"]
    config = {**SIZES, **changes, "architectures": [architecture]}
    from_hf_config({**config, name: FAMILIES[architecture].complete(config)[name.removeprefix("swa_")]})
    with pytest.raises(ConfigError, match=f"{name} 48 is not supported"):
        from_hf_config({**config, name: 48})
    with pytest.raises(ConfigError, match="add_full_attention_sink_bias True is not supported"):
        from_hf_config({**config, "add_full_attention_sink_bias": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limits": [0, 0, 5.0, 0]}, "swiglu_limits: a limit of 5.0 is not supported; supported: 0, 7, 16"),
        ({"swiglu_limits_shared": [0, 7]}, "swiglu_limits_shared has 2 entries, but num_hidden_layers is 4"),
        ({"rope_theta": [1e4]}, "rope_theta has 1 entries, but num_hidden_layers is 4"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "layers of type chunked_attention are not supported"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups 4 is not supported"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"gating": False}, "gating False is not supported"),
        ({"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config of layer 1 is not supported"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types .'sliding_attention'. is not supported"),
    ],
)
def test_settings_of_step_that_would_change_answers_are_refused(changes: dict[str, Any], message: str) -> None:
    *_, config = RENAMED["Step 3.5"]
    from_hf_config({**config, "architectures": ["Step3p5ForCausalLM"]})
    with pytest.raises(ConfigError, match=message):
        from_hf_config({**config, **changes, "architectures": ["Step3p5ForCausalLM"]})


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("Hunyuan 4", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported; supported: 10.0"),
        ("Hunyuan 4", {"gated_mla": False}, "gated_mla False is not supported"),
        ("Hunyuan 4", {"gating_type": "headwise"}, "gating_type 'headwise' is not supported; supported: 'elementwise'"),
        ("Hunyuan 4", {"enable_ihc": False}, "enable_ihc False is not supported"),
        ("Hunyuan 4", {"learnable_sink": False}, "learnable_sink False is not supported"),
        ("DeepSeek V4", {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0 is not supported"),
        ("XGLM", {"pad_token_id": 2}, "pad_token_id 2 is not supported; supported: 1, 0, None"),
        ("XGLM", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("EXAONE MoE", {"swiglu_limits": [7.0] * 4}, r"swiglu_limits .7.0, 7.0, 7.0, 7.0. is not supported"),
        ("EXAONE MoE", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported"),
        ("EXAONE MoE", {"sliding_windows": [24]}, "sliding_windows has 1 entries, but num_hidden_layers is 4"),
        ("EXAONE MoE", {"sliding_windows": [24, 0, 0, 0]}, r"sliding_windows states no window for layers .2."),
        ("dots3-note", {"n_shared_experts": 0}, "n_shared_experts 0 is not supported; supported: 1 or more"),
        ("dots3-note", {"n_shared_experts": None}, "n_shared_experts None is not supported"),
        ("dots3-note", {"per_layer_config": {"0": {"index_topk": 8}}}, "differs among the layers of type indexed_att"),
        ("dots3-note", {"per_layer_config": {1: {"v_head_dim": 8}, 3: {"v_head_dim": 9}}}, "of type sliding_attention"),
        (
            "dots3-note",
            {"per_layer_config": {"1": {"n_routed_experts": 4}, "3": {"n_routed_experts": 4}}},
            "per_layer_config of layer 1: n_routed_experts is not supported",
        ),
        (
            "dots3-note",
            {"rope_parameters": {"indexed_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters has settings of indexed_attention, but not of sliding_attention",
        ),
        ("xLSTM", {"gate_soft_cap": 41.0}, "gate_soft_cap 41.0 is not supported; supported: above 0, up to 40.0"),
        ("xLSTM", {"add_out_norm": False}, "add_out_norm False is not supported"),
        ("xLSTM", {"use_bias": True}, "use_bias True is not supported"),
        ("xLSTM", {"weight_mode": "fused"}, "weight_mode 'fused' is not supported"),
        ("xLSTM", {"num_heads": 5}, "num_heads 5 does not divide 64 features of keys and 128 of values"),
        ("RecurrentGemma", {"lru_width": 50}, "50 channels of the recurrent unit cannot be divided into 4 blocks"),
        ("RecurrentGemma", {"block_types": ["recurrent", "global"]}, "layers of type global are not supported"),
        ("RecurrentGemma", {"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim False is not"),
        ("RecurrentGemma", {"head_dim": 20}, "head_dim 20 is not supported; supported: None, 12"),
        (
            "RecurrentGemma",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not supported; supported: 'default'",
        ),
        (
            "RecurrentGemma",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not",
        ),
        ("GLM-5.3", {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0 is not supported"),
        ("GLM-5.3", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported; supported: 10.0"),
        ("GLM-5.3", {"qk_rope_head_dim": 8}, "qk_rope_head_dim 8 is not supported; supported: 0"),
        ("GLM-5.3", {"index_kpool": 1}, "index_kpool 1 is not supported for index_topk 20"),
        ("GLM-5.3", {"index_kpool": 3}, "index_kpool 3 is not supported for index_topk 20"),
        ("GLM-5.3", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False is not supported"),
        ("GLM-5.3", {"index_topk_pattern": "FFFS"}, "indexer_types: 'shared' of layer 3 is not supported"),
        ("GLM-5.3", {"indexer_types": ["full"]}, "layer_types and indexer_types must be those of the 4 layers"),
        ("GLM-5.3", {"mlp_layer_types": ["dense"]}, "expected dense or sparse for each of the 4 layers"),
        ("GLM-5.3", {"q_lora_rank": None}, "sparse attention .index_topk. needs q_lora_rank"),
        ("Qwen4-Exp", {"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported; supported: 1"),
        ("Qwen4-Exp", {"indexer_budget": 21}, "indexer_budget 21 is not a multiple of indexer_compress_ratio 4"),
        ("Qwen4-Exp", {"indexer_head_dim": 4}, "index_head_dim 4 is less than the 8 rotary features"),
        ("Qwen4-Exp", {"output_gate_type": "gelu"}, "output_gate_type 'gelu' is not supported"),
        ("Qwen4-Exp", {"layer_types": ["linear_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 4"),
        ("Qwen4-Exp", {"ple_layer_ids": [2, 5]}, r"ple_layer_ids .2, 5. are not numbers of layers with linear"),
        ("Qwen4-Exp", {"ple_embed_dim": 25}, "ple_embed_dim 25 cannot be divided among 4 heads"),
        ("Qwen4-Exp", {"eos_token_id": None}, "ple_layer_ids need eos_token_id"),
        ("Qwen4-Exp", {"split_ngram_parts": 0}, "split_ngram_parts 0 is not supported; supported: 1 or more"),
        ("Qwen4-Exp", {"ple_conv_kernel_size": 1}, "ple_conv_kernel_size 1 is not supported; supported: 2 or more"),
        ("Qwen4-Exp", {"hc_count": 1}, "hc_count 1 is not supported; supported: 2 or more"),
    ],
)
def test_settings_of_families_that_would_change_answers_are_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    architecture, own = CASES[case]
    config = of_text({**SIZES, **own, "architectures": [architecture]})
    from_hf_config(config)
    with pytest.raises(ConfigError, match=message):
        from_hf_config({**config, **changes})


def spec_of(case: str, **changes: Any) -> ModelSpec:
    architecture, own = CASES[case]
    return from_hf_config(of_text({**SIZES, **own, **changes, "architectures": [architecture]}))


@pytest.mark.parametrize("window", [24, None])
def test_layers_of_exaone_may_have_windows_of_their_own(window: int | None) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    arch = spec_of("EXAONE MoE", layer_types=kinds, sliding_windows=[8, 16, 0, 24], sliding_window=window)
    mixers = [layer.attention for layer in arch.layers]
    assert all(isinstance(mixer, AttentionSpec) for mixer in mixers)
    assert [mixer and mixer.window for mixer in mixers] == [8, 16, None, 24]
    assert [mixer is not None and mixer.rope is not None for mixer in mixers] == [True, True, False, True]


def test_recurrent_gemma_has_its_window_by_either_name() -> None:
    for name in ("attention_window_size", "sliding_window"):
        mixers = [layer.attention for layer in spec_of("RecurrentGemma", **{name: 16}).layers]
        assert [mixer.window for mixer in mixers if mixer is not None] == [16]
    spec_of("RecurrentGemma", head_dim=12)


def test_layers_of_dots_have_the_sizes_of_their_kind() -> None:
    entries = {
        "0": {"index_topk": 8, "index_n_heads": 4, "v_head_dim": 6},
        "1": {"sliding_window": 16, "v_head_dim": 14},
    }
    entries |= {"2": entries["0"], "3": entries["1"]}
    indexed, sliding = (layer.attention for layer in spec_of("dots3-note", per_layer_config=entries).layers[:2])
    assert isinstance(indexed, MLASpec)
    assert isinstance(sliding, MLASpec)
    assert indexed.indexer is not None
    assert (indexed.top_k, indexed.indexer.num_heads, indexed.v_head_dim) == (8, 4, 6)
    assert (sliding.window, sliding.v_head_dim) == (16, 14)


def test_bases_of_dots_are_those_of_the_layers_kind() -> None:
    plain = {"rope_type": "default"}
    settings = {"full_attention": {**plain, "rope_theta": 5e3}, "sliding_attention": {**plain, "rope_theta": 7e3}}
    arch = spec_of("dots3-note", layer_types=["full_attention", "sliding_attention"] * 2, rope_parameters=settings)
    mixers = [layer.attention for layer in arch.layers]
    assert [mixer is not None and mixer.rope and mixer.rope.theta for mixer in mixers] == [5e3, 7e3] * 2


def test_xlstm_in_float16_has_no_sums_beyond_its_range(tmp_path: Path) -> None:
    """With input gates at their cap, of which each exponential is beyond it."""
    model = write("xLSTM", tmp_path)
    path, tokens = tmp_path / "model.safetensors", torch.arange(100)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("igate_preact.bias"):
                weight.fill_(60.0)
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, path, {"format": "pt"})
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    for dtype, distance in (("float32", 1e-4), ("float16", 0.1)):
        (found,) = on_ranks(1, partial(logits, configure(tmp_path, max_model_len=256, dtype=dtype), tokens))
        assert (found - expected).abs().max() <= distance * expected.abs().max()


def test_rwkv_in_float16_is_refused(tmp_path: Path) -> None:
    write("RWKV-4", tmp_path)
    with pytest.raises(ConfigError, match=r"float16 is not supported for RwkvForCausalLM.*use --dtype bfloat16"):
        configure(tmp_path, max_model_len=256, dtype="float16")


@pytest.mark.parametrize(("case", "is_nullable"), [("DeepSeek V3", False), ("DeepSeek V4", True)])
def test_rotary_features_may_be_null_where_the_family_says_so(case: str, is_nullable: bool, tmp_path: Path) -> None:
    write(case, tmp_path)
    changes = {"load_format": "dummy", "max_model_len": 64, "hf_overrides": {"qk_rope_head_dim": None}}
    if is_nullable:
        configure(tmp_path, **changes)
        return
    with pytest.raises(ConfigError, match="qk_rope_head_dim must be a whole number of at least 0, got null"):
        configure(tmp_path, **changes)


def test_embeddings_of_ngrams_need_a_state() -> None:
    (layer, *_) = spec_of("Qwen4-Exp").layers
    assert layer.ngrams is not None
    with pytest.raises(AssertionError):
        replace(layer, state=None)


def test_the_states_of_glm_may_have_settings_of_their_own() -> None:
    architecture, own = CASES["GLM-5.3"]
    config = of_text({**SIZES, **own, "architectures": [architecture]})
    linear = {"head_dim": 8, "num_heads": 6, "short_conv_kernel_size": 3}
    for changes, bound in (
        ({"gate_lower_bound": -3.0}, -3.0),
        ({"gate_lower_bound": None}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
    ):
        state = from_hf_config({**config, "linear_attn_config": linear | changes}).layers[0].state
        assert isinstance(state, KimiDeltaSpec)
        assert (state.value_head_dim, state.num_value_heads, state.conv_size) == (8, 6, 3)
        assert state.lower_bound == bound


def test_hunyuan_4_has_its_published_number_of_parameters() -> None:
    """770 billion, without the layer for multi-token prediction."""
    sizes = {
        "vocab_size": 120832,
        "hidden_size": 6144,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "n_routed_experts": 256,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
    }
    arch = from_hf_config({**sizes, "architectures": ["HYV4ForCausalLM"]})
    assert arch.stage_parameters([range(arch.num_layers)], 0, 1) == 769_907_408_797
    indexers = [isinstance(each.attention, MLASpec) and each.attention.indexer is not None for each in arch.layers]
    assert [number for number, has_indexer in enumerate(indexers) if has_indexer][:4] == [0, 1, 5, 9]


@pytest.mark.parametrize(
    ("architecture", "settings", "count"),
    [
        ("xLSTMForCausalLM", {}, 6_865_424_896),
        ("RecurrentGemmaForCausalLM", {"num_key_value_heads": 1, "intermediate_size": 15360}, 2_682_862_080),
        ("RwkvForCausalLM", {"hidden_size": 768, "num_hidden_layers": 12}, 169_342_464),
        ("OpenAIGPTLMHeadModel", {"n_embd": 768, "n_head": 12, "n_layer": 12}, 116_534_784),
        (
            "XGLMForCausalLM",
            {"vocab_size": 256008, "d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16},
            564_463_616,
        ),
    ],
)
def test_models_have_their_published_numbers_of_parameters(
    architecture: str, settings: dict[str, Any], count: int
) -> None:
    """xLSTM 7B, RecurrentGemma 2B, RWKV-4 169M, GPT, and XGLM 564M."""
    arch = from_hf_config({**settings, "architectures": [architecture]})
    assert arch.stage_parameters([range(arch.num_layers)], 0, 1) == count


def test_every_family_has_a_case_and_a_line_in_the_document() -> None:
    """`python -m tests.fakes.families` prints the table anew."""
    generating = {name for name, family in FAMILIES.items() if not family.token_layer} - ENCODERS.keys()
    assert {architecture for architecture, *_ in (CASES | RENAMED).values()} == generating
    assert MODELS.keys() == generating
    assert table() in (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text()


@pytest.mark.parametrize("case", CASES)
def test_configs_mean_the_same_as_people_write_them_and_as_transformers_does(case: str) -> None:
    """Files on the hub leave out settings that transformers fills in, and have older names."""
    name, changes = CASES[case]
    kind = getattr(transformers, name).config_class
    raw = {kind.attribute_map.get(key, key): value for key, value in {**SIZES, **changes}.items()}
    whole = kind(**raw).to_dict()
    raw, whole = (of_text({**each, "architectures": [name]}) for each in (raw, whole))
    assert from_hf_config(raw) == from_hf_config(whole)


@pytest.mark.parametrize("case", CASES)
def test_half_precision_stays_close(case: str, written: Written) -> None:
    folder, _ = written(case)
    tokens = torch.randint(0, 101, (60,), generator=torch.Generator().manual_seed(1))
    exact, *others = (
        on_ranks(1, partial(logits, configure(folder, dtype=name, max_model_len=LENGTHS.get(case, 256)), tokens))[0]
        for name in ("float32", "bfloat16", "float16")
        if (case, name) != ("RWKV-4", "float16")
    )
    arch = configure(folder, max_model_len=64).model.architecture
    experts = any(isinstance(layer.feed_forward, MoESpec) for layer in arch.layers)
    # A token that goes to another expert is far off; with each layer's own inputs, so is transformers, by 0.064.
    bound = 0.25 if experts else 0.06 if arch.layer_input is None else 0.1
    for rounded in others:
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - exact).abs().mean() <= bound * exact.abs().mean()
