"""Models that transformers builds: the same tokens as its own, in every layout that they have a plan for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.engine.architecture.families import FAMILIES, transformers_backend
from quire.engine.architecture.model_spec import TransformersModelSpec
from quire.engine.config.memory_plan import MemoryPlan
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.batch import Batch
from quire.engine.layers.linear import Linear
from quire.engine.models.build import load_model
from quire.engine.models.transformers_backend import attention, build, describe
from quire.engine.models.transformers_backend.decoder import TransformersDecoder
from quire.engine.protocol.errors import ConfigError
from quire.engine.protocol.sampling_params import SamplingParams
from tests.fakes import families
from tests.fakes.checkpoints import likeliest
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Guesser
from tests.fakes.families import write_model
from tests.fakes.model_logits import CPU, configure, logits
from tests.fakes.ranks import on_ranks
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.models import other_models as others
from tests.integration.engine.models import remote_code
from tests.integration.engine.models.test_families import STEPS


@pytest.fixture
def own_process() -> None:
    """Lets tests ask a separate process, as users do."""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Spares each description the imports of a process of its own."""
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr(transformers_backend, "describe", describe.describe)


_BY_TRANSFORMERS = {"model_impl": "transformers"}
"""Some of the architectures have a mapping, too."""


def prompts() -> list[list[int]]:
    """Two unlike ones, and two that begin alike."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 130) for _ in range(40)]
    unlike = [[rng.randrange(3, 130) for _ in range(length)] for length in (1, 33)]
    return [*unlike, [*shared, 5, 6], [*shared, 7, 8, 9]]


def served(folder: Path, **options: Any) -> list[list[int]]:
    """Greedy tokens, with chunked prefill and prefix hits."""
    config = configure(folder, **{"max_model_len": 256, **_BY_TRANSFORMERS, **options})
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        tokens = ranks.tokens([(prompt, params) for prompt in prompts()], max_num_batched_tokens=16)
        assert ranks.stats.prefix_hit_tokens >= 32
        assert [len(each) for each in tokens] == [STEPS] * len(tokens)
        return tokens


IN_ALL_LAYOUTS = ("OLMo", "OLMoE")
UNLIKE = ("EXAONE 4, windows", "ERNIE 4.5 MoE", "MiniCPM3", "Zamba", "LaraMini", "Inkling", "Inkling 2, loops", "Dory")
"""Cases with windows, experts, tied embeddings, states, and layers that run more than once."""


def layouts(largest: bool = False) -> list[Any]:
    """One rank in the default tier, and two cases in all layouts; or of the other layouts the largest alone."""
    return [
        pytest.param(name, tp, pp, marks=[] if (tp, pp) == (1, 1) or name in IN_ALL_LAYOUTS else [pytest.mark.slow])
        for name, case in others.CASES.items()
        for tp, pp in (case.layouts if not largest else sorted({case.layouts[0], case.layouts[-1]}))
    ]


@pytest.mark.parametrize(
    ("case", "tp", "pp"), [each for each in layouts(largest=True) if each.values[0] in (*IN_ALL_LAYOUTS, *UNLIKE)]
)
def test_greedy_tokens_are_those_of_transformers(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """For other models, the description compares logits of two requests in chunks."""
    model = others.write(case, tmp_path)
    tokens = served(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert tokens == likeliest(model, prompts(), tokens)


@pytest.mark.parametrize(("case", "tp", "pp"), layouts())
def test_logits_are_those_of_transformers(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    model = others.write(case, tmp_path)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = configure(tmp_path, max_model_len=256, **layout, **_BY_TRANSFORMERS)
    for result in on_ranks(tp, partial(logits, config, tokens)):
        assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "case",
    ["Zamba", "LaraMini", *(pytest.param(case, marks=pytest.mark.slow) for case in ("Zaya", "Inkling 2, loops"))],
)
def test_states_survive_preemption_and_drafts(case: str, tmp_path: Path) -> None:
    """Zamba's modules read a state only if they get one token."""
    model = others.write(case, tmp_path)
    config = configure(tmp_path, max_model_len=128, max_num_seqs=4, block_size=4, **_BY_TRANSFORMERS)
    arch = config.model.architecture
    assert isinstance(arch, TransformersModelSpec)
    assert arch.continues_by_token == (case == "Zamba")
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts()]
    texts: list[list[int]] = []

    def mostly_right(known: list[int], rng: random.Random) -> int:
        following = [text[len(known)] for text in texts if text[: len(known)] == known and len(text) > len(known)]
        return following[0] if following and rng.random() < 0.7 else rng.randrange(130)

    with Ranks(config, ThreadExecutor(config)) as ranks:
        tight = config.cache.max_blocks(128, 16) + config.cache.blocks_per_page
        assert tight < config.cache.num_blocks
        expected = ranks.tokens(requests, max_num_batched_tokens=16, num_blocks=tight)
        assert expected == likeliest(model, prompts(), expected)
        assert ranks.stats.preemptions > 0
        texts += [prompt + tokens for prompt, tokens in zip(prompts(), expected, strict=True)]
        drafts = Guesser(mostly_right, 3, 64, config.cache.block_size)
        assert ranks.tokens(requests, max_num_batched_tokens=16, speculation=drafts) == expected
        assert ranks.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("case", ["OLMo", "Dory"])
def test_layers_are_reported_when_their_caches_are_complete(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers of Dory run several times, with caches of their own."""
    others.write(case, tmp_path)
    forward, reported = TransformersDecoder.forward, list[tuple[int, list[torch.Tensor]]]()
    end: list[torch.Tensor] = []

    def watched(self: Any, x: torch.Tensor | None, batch: Batch, caches: Sequence[Any]) -> torch.Tensor:
        def memory() -> list[torch.Tensor]:
            return [each.memory.clone() for each in caches]

        out = forward(self, x, replace(batch, on_layer=lambda number: reported.append((number, memory()))), caches)
        end.extend(memory())
        return out

    monkeypatch.setattr(TransformersDecoder, "forward", watched)
    config = configure(tmp_path, max_model_len=64, **_BY_TRANSFORMERS)
    end.clear()
    reported.clear()
    logits(config, torch.arange(3, 40), Parallel())
    assert [number for number, _ in reported] == list(range(len(end)))
    assert all(torch.equal(memory[number], end[number]) for number, memory in reported)
    assert not reported[0][1][-1].any(), "the last layer has run"


def test_enough_architectures_have_no_mapping_of_ours() -> None:
    cases = others.CASES.values()
    assert len({case.architecture for case in cases if (2, 1) in case.layouts} - FAMILIES.keys()) >= 7


@pytest.mark.parametrize("case", ["Llama", "Gemma 2", "Phi-3, longrope", "Qwen3 MoE", "GPT-NeoX", "Mistral, windows"])
def test_transformers_implementation_runs_models_that_have_a_mapping(case: str, tmp_path: Path) -> None:
    model = families.write(case, tmp_path)
    for tp in (1, 2):
        tokens = served(tmp_path, tensor_parallel_size=tp)
        assert tokens == likeliest(model, prompts(), tokens)


@pytest.mark.usefixtures("own_process")
def test_what_has_no_mapping_goes_to_transformers_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others.write("OLMo", tmp_path)
    config = configure(tmp_path)
    assert isinstance(config.model.architecture, TransformersModelSpec)
    assert "OlmoForCausalLM has no implementation of Quire's own; using transformers' implementation" in caplog.text
    with pytest.raises(ConfigError, match="OlmoForCausalLM has no implementation of Quire's own; omit --model-impl"):
        configure(tmp_path, model_impl="quire")


def write_remote(folder: Path) -> Any:
    """A model of code that is in its folder; returns it."""
    remote_code.write_code(folder)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model: Any = build.from_config(config, trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return model.train(False)


def test_code_in_the_folder_runs_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "pebble"
    folder.mkdir()
    model = write_remote(folder)
    for tp in (1, 2):
        tokens = served(folder, tensor_parallel_size=tp, trust_remote_code=True)
        assert tokens == likeliest(model, prompts(), tokens)
    with pytest.raises(ConfigError, match="requires its own Python code, which needs --trust-remote-code"):
        configure(folder)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("RwkvForCausalLM", {}, "keeps a recurrent state outside of transformers' cache"),
        (
            "DoryForCausalLM",
            {"recurrent_kv_cache_mode": "last_loop"},
            "recurrent_kv_cache_mode 'last_loop' is not supported; use 'per_loop'",
        ),
        ("BloomForCausalLM", {}, "does not use transformers' attention interface"),
        ("BertLMHeadModel", {}, "its attention sees later tokens"),
        ("BltForCausalLM", {}, "its attention takes a mask of its own"),
        ("T5ForConditionalGeneration", {}, "not a causal language model of text"),
        (
            "NobodysForCausalLM",
            {"model_type": "nobodys"},
            "is not supported.*: this version of transformers does not know it",
        ),
        ("OlmoForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("OlmoModel", {"model_type": "olmo"}, "not a causal language model"),
    ],
)
def test_unsupported_models_are_rejected_by_name(
    architecture: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"model_type": "olmo"}
    if (kind := getattr(transformers, architecture, None)) is not None:
        config = kind.config_class(**others.small_sizes(kind.config_class)).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]} | changes))
    with pytest.raises(ConfigError, match=reason):
        configure(tmp_path, load_format="dummy", **_BY_TRANSFORMERS)


def test_values_of_config_json_can_be_overridden(tmp_path: Path) -> None:
    """In the description, and on the ranks; also the type, by which transformers chooses the model's class."""
    model = write_model("LlamaForCausalLM", families.SIZES | {"num_hidden_layers": 2}, tmp_path)
    file, tokens = tmp_path / "config.json", torch.arange(3, 40)
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 4, "rms_norm_eps": 0.5, "model_type": None}))
    overrides = {"num_hidden_layers": 2, "rms_norm_eps": config["rms_norm_eps"], "model_type": "llama"}
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    resolved = configure(tmp_path, model_impl="transformers", hf_overrides=overrides, max_model_len=64)
    assert isinstance(resolved.model.architecture, TransformersModelSpec)
    (result,) = on_ranks(1, partial(logits, resolved, tokens))
    assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("case", "layout", "reason"),
    [
        ("StableLM", {"tensor_parallel_size": 2}, "--tensor-parallel-size 2: transformers has no tensor-parallel plan"),
        ("StableLM", {"pipeline_parallel_size": 2}, "transformers has no pipeline plan"),
        ("OLMo", {"tensor_parallel_size": 4}, "--tensor-parallel-size 4 does not divide its 2 KV heads"),
    ],
)
def test_layouts_without_a_plan_are_refused(case: str, layout: dict[str, int], reason: str, tmp_path: Path) -> None:
    others.write(case, tmp_path)
    with pytest.raises(ConfigError, match=reason):
        configure(tmp_path, **layout, **_BY_TRANSFORMERS)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_biases_among_the_features_of_keys_are_not_quantized(dtype: str, tmp_path: Path) -> None:
    others.write("Doge", tmp_path)
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {dtype} is not supported for DogeForCausalLM"):
        configure(tmp_path, max_model_len=64, kv_cache_dtype=dtype)


def test_a_model_that_would_answer_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would be whose attention does more than its interface tells: here the scale is lost on the way."""
    others.write("Arcee", tmp_path)
    exact = attention.AttentionSettings

    def other(scale: float, window: int, softcap: float) -> attention.AttentionSettings:
        return exact(2 * scale, window, softcap)

    monkeypatch.setattr(attention, "AttentionSettings", other)
    with pytest.raises(ConfigError, match="gives different logits here than in transformers"):
        configure(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    others.write("OLMoE", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.extra.weight": torch.zeros(3)}, file, {"format": "pt"})
    load_model(configure(tmp_path, **_BY_TRANSFORMERS), 0, Parallel(), CPU)
    assert "tensors that OlmoeForCausalLM does not use (1): model.extra.weight" in caplog.text
    del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError) as error:
        load_model(configure(tmp_path, **_BY_TRANSFORMERS), 0, Parallel(), CPU)
    assert "model.layers.1.mlp.experts.gate_up_proj" in str(error.value)
    assert "up_proj" in str(error.value)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_take_the_memory_that_the_plan_says(quantization: str | None, tp: int, tmp_path: Path) -> None:
    write_model("ArceeForCausalLM", families.SIZES | {"hidden_size": 256, "intermediate_size": 512}, tmp_path)
    config = configure(tmp_path, quantization=quantization, tensor_parallel_size=tp)
    parallel = Parallel()
    parallel.size = tp
    decoder = load_model(config, 0, parallel, CPU)
    layers = [module for module in decoder.modules() if isinstance(module, Linear)]
    tensors = [*decoder.parameters(), *(t for layer in layers for t in vars(layer._product).values())]
    held = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    planned = MemoryPlan.of(config).weights[0]
    assert held == pytest.approx(planned, rel=0.1)


def test_ranks_hold_the_same_dummy_weights(tmp_path: Path) -> None:
    others.write("ERNIE 4.5 MoE", tmp_path)
    tokens, options = torch.arange(20), {"load_format": "dummy", **_BY_TRANSFORMERS}
    whole = on_ranks(1, partial(logits, configure(tmp_path, **options), tokens))[0]
    for part in on_ranks(2, partial(logits, configure(tmp_path, tensor_parallel_size=2, **options), tokens)):
        assert torch.allclose(part, whole, atol=1e-4 * float(whole.abs().max()))


def test_workers_of_our_own_models_do_without_transformers() -> None:
    code = (
        "import sys\n"
        "from quire.engine.config.options import EngineOptions\n"
        "from quire.engine.models.build import load_model\n"
        "from quire.engine.distributed.communicator import Parallel\n"
        "from quire.engine.config.resolve import resolve\n"
        "import torch\n"
        "assert 'transformers' not in sys.modules\n"
        "load_model(resolve(EngineOptions(device='cpu', max_model_len=256)), 0, Parallel(), torch.device('cpu'))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
