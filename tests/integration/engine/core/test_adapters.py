"""Requests with adapters through the core: each has the tokens of its merged checkpoint, whatever the others."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.engine_config import EngineConfig, LoraConfig
from quire.engine.config.options import DEMO_MODEL
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.sampling_params import SamplingParams, StructuredOutputs
from quire.engine.repository.adapter_folder import open_adapter
from tests.fakes.checkpoints import generate, score, write_checkpoint
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.drafts import Always, Guesser
from tests.fakes.lora import SETTINGS, merged, write_adapter, write_lora
from tests.fakes.model_logits import configure
from tests.integration.engine.checkpoints import test_gguf, test_quantized
from tests.integration.engine.core.test_draft_models import DEMO_DRAFT, QUESTION
from tests.integration.engine.models import test_encoder

COUNT = 10
PLAIN = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
QWEN3: dict[str, Any] = {"head_dim": 16, "num_key_value_heads": 2, "pad_token_id": 99, "num_labels": 3}
SCORED = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, prompt_logprobs=2)


class Case(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    adapters: list[AdapterRef | None]
    """None: the base."""
    expected: list[list[list[int]]]
    """transformers' answers of each adapter to all prompts."""
    scores: list[list[Tensor]]
    """Likewise, of the tokens after each token of the prompts."""

    @property
    def requests(self) -> list[tuple[int, int]]:
        """Numbers of adapters and prompts: those of one prompt one after another."""
        return [(adapter, prompt) for prompt in range(len(self.prompts)) for adapter in range(len(self.adapters))]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Three adapters of one base, one with DoRA, one of 16 bits. Prompts of mixed lengths; two start alike."""
    folder, rng = tmp_path_factory.mktemp("adapters"), random.Random(0)
    base = write_checkpoint("qwen3", folder / "base", num_hidden_layers=4)
    model = configure(base).model
    names = [name for name in checkpoint_tensors(model.architecture, has_head=True) if "_proj.weight" in name]
    kinds: list[dict[str, Any]] = [SETTINGS, SETTINGS | {"use_dora": True}, SETTINGS | {"r": 6}]
    types = (torch.float32, torch.float32, torch.bfloat16)
    adapters = [
        write_lora(folder / str(seed), model, names[:: seed + 1], seed, settings=settings, size=0.15, dtype=dtype)
        for seed, (settings, dtype) in enumerate(zip(kinds, types, strict=True))
    ]
    shared = rng.choices(range(3, 130), k=40)
    prompts = [rng.choices(range(3, 130), k=length) for length in (1, 30)] + [[*shared, 5, 6], [*shared, 7, 8, 9]]
    folders = [base, *(merged(model, each, folder / f"merged{number}") for number, each in enumerate(adapters))]
    expected = [generate(each, prompts, COUNT) for each in folders]
    assert len({str(each) for each in expected}) == len(expected)
    return Case(base, prompts, [None, *adapters], expected, [score(each, prompts) for each in folders])


def configured(case: Case, num_slots: int = 4, **options: Any) -> EngineConfig:
    settings = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 16, "max_model_len": 128, "block_size": 8}
    config = configure(case.folder, **settings, **options)
    assert config.lora is not None
    return replace(config, lora=replace(config.lora, num_slots=num_slots))


def check(case: Case, ranks: Ranks, params: SamplingParams = PLAIN, **settings: Any) -> None:
    """Serve all pairs of adapters and prompts at once."""
    outputs = ranks.run(
        [(case.prompts[prompt], params) for _, prompt in case.requests],
        adapters=[case.adapters[adapter] for adapter, _ in case.requests],
        **settings,
    )
    for (adapter, prompt), own in zip(case.requests, outputs, strict=True):
        assert [token for output in own for token in output.token_ids] == case.expected[adapter][prompt]
        rows = [row for output in own if output.prompt_logprobs for row in output.prompt_logprobs.rows()]
        assert len(rows) == (len(case.prompts[prompt]) - 1 if params is SCORED else 0)
        for at, (token, row) in enumerate(zip(case.prompts[prompt][1:], rows, strict=bool(rows))):
            assert row.logprob == pytest.approx(case.scores[adapter][prompt][at, token].item(), abs=1e-4)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_one_rank(case: Case, num_slots: int) -> None:
    """Also with fewer slots than adapters, chunks, preemption, cached prefixes, drafts and scored prompts."""
    with Ranks(configured(case, num_slots)) as ranks:
        check(case, ranks)
        check(case, ranks, max_num_batched_tokens=16)
        check(case, ranks, num_blocks=12)  # too few for the base's requests alone, which wait for no adapter
        assert ranks.stats.preemptions > 0
        check(case, ranks, SCORED, max_num_batched_tokens=24)
        answers = [answer for of_adapter in case.expected for answer in of_adapter]

        def often_right(known: list[int], rng: random.Random) -> int:
            """The next token of an answer that has gone so far as this one."""
            for answer in answers:
                for end in range(1, COUNT):
                    if known[-end:] == answer[:end]:
                        return answer[end]
            return rng.randrange(3, 130)

        check(case, ranks, speculation=Guesser(often_right, 3, 64))
        assert ranks.stats.num_accepted_tokens > 0


EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
KINDS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "low-rank": (
        {
            f"{EMBEDDING}.lora_embedding_A": (3, 131),
            f"{EMBEDDING}.lora_embedding_B": (64, 3),
            f"{HEAD}.lora_A.weight": (3, 64),
            f"{HEAD}.lora_B.weight": (131, 3),
        },
        {},
    ),
    "DoRA of the head": (
        {f"{HEAD}.lora_A.weight": (3, 64), f"{HEAD}.lora_B.weight": (131, 3), f"{HEAD}.lora_magnitude_vector": (131,)},
        {"use_dora": True},
    ),
    "DoRA of the embedding": (
        {
            f"{EMBEDDING}.lora_embedding_A": (3, 131),
            f"{EMBEDDING}.lora_embedding_B": (64, 3),
            f"{EMBEDDING}.lora_magnitude_vector": (64,),
        },
        {"use_dora": True},
    ),
    "trained tokens": (
        {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (50, 64)},
        {"trainable_token_indices": [*range(100, 20, -2), *range(121, 131)]},
    ),
    "an embedding": ({f"{EMBEDDING}.weight": (131, 64)}, {"modules_to_save": ["embed_tokens"]}),
    "a head": ({f"{HEAD}.weight": (131, 64)}, {"modules_to_save": ["lm_head"]}),
    "whole matrices": (
        {
            "base_model.model.model.layers.0.self_attn.q_proj.weight": (64, 64),
            "base_model.model.model.layers.1.mlp.down_proj.weight": (64, 96),
        },
        {"modules_to_save": ["q_proj", "down_proj"]},
    ),
}
"""Shapes of tensors, and settings."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def outer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Adapters of embeddings and heads, and of whole matrices."""
    folder, rng = tmp_path_factory.mktemp("outer"), random.Random(1)
    base = write_checkpoint("llama", folder / "base", num_hidden_layers=2, tie_word_embeddings=request.param)
    model, generator = configure(base).model, torch.Generator().manual_seed(3)
    adapters = [
        write_adapter(
            folder / str(number),
            {name: torch.randn(shape, generator=generator).abs() ** 0.5 * 0.2 for name, shape in shapes.items()},
            SETTINGS | settings,
        )
        for number, (shapes, settings) in enumerate(KINDS.values())
    ]
    prompts = [rng.choices(range(3, 130), k=length) for length in (1, 20)]
    folders = [base, *(merged(model, each, folder / f"merged{number}") for number, each in enumerate(adapters))]
    expected = [generate(each, prompts, COUNT) for each in folders]
    assert len({str(each) for each in expected}) == len(expected)
    return Case(base, prompts, [None, *adapters], expected, [score(each, prompts) for each in folders])


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(1, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (1, 2), (2, 2)))],
)
def test_embeddings_and_heads(outer: Case, tp: int, pp: int) -> None:
    with Ranks(configured(outer, 4, tensor_parallel_size=tp, pipeline_parallel_size=pp)) as ranks:
        check(outer, ranks)
        check(outer, ranks, SCORED, max_num_batched_tokens=16)


POOLED: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "decoder": ("Qwen3Model", QWEN3, {}),
    "decoder, classifier": ("Qwen3ForSequenceClassification", QWEN3, {"score.weight": (3, 48)}),
    "encoder": (
        "BertModel",
        {},
        {
            "embeddings.word_embeddings.lora_embedding_A": (3, 101),
            "embeddings.word_embeddings.lora_embedding_B": (48, 3),
        },
    ),
    "encoder, classifier": (
        "BertForSequenceClassification",
        {"num_labels": 3},
        {
            "bert.pooler.dense.lora_A.weight": (3, 48),
            "bert.pooler.dense.lora_B.weight": (48, 3),
            "classifier.modules_to_save.weight": (3, 48),
            "classifier.modules_to_save.bias": (3,),
        },
    ),
}
"""Classes, settings, and shapes of tensors that adapters change besides the layers."""


def test_sampled_and_structured_with_the_drafts_of_a_model(tmp_path: Path) -> None:
    """Of the demo model, whose draft model knows of no adapters; as each alone, without drafts."""
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8}
    config = configure(DEMO_MODEL, enable_lora=True, spec_model=str(DEMO_DRAFT), **options)
    needed = checkpoint_tensors(config.model.architecture, has_head=True)
    names = [name for name in needed if "language_model" in name and "_proj.weight" in name]
    pirate = DEMO_MODEL.with_name("demo_adapters") / "pirate"
    adapters = [
        AdapterRef(open_adapter(pirate).digest, (str(pirate),)),
        write_lora(tmp_path / "a", config.model, names),
    ]
    city = StructuredOutputs(regex=r'\{"city": "[A-Z][a-z]{1,9}"\}')
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=5, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=6, max_tokens=24, structured_outputs=city),
    ]
    requests = [(QUESTION, each) for each in params]
    of_requests = [each for each in (None, *adapters) for _ in requests]
    with Ranks(config) as ranks:
        expected = list[list[int]]()
        for request, adapter in zip(requests * 3, of_requests, strict=True):
            expected += ranks.tokens([request], adapters=[adapter], speculative=None)
        assert len({str(each) for each in expected}) == len(expected)
        for most in (1, 3):
            found = ranks.tokens(requests * 3, adapters=of_requests, speculation=Always(most, 64))
            assert found == expected
            assert 0 < ranks.stats.num_accepted_tokens < ranks.stats.num_draft_tokens


@pytest.mark.parametrize("kind", POOLED)
def test_vectors(kind: str, tmp_path: Path) -> None:
    """Of embedding models and classifiers, whose prompts may come in chunks if they are decoders."""
    architecture, settings, others = POOLED[kind]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model_class(model_class.config_class(**test_encoder.SIZES | settings)).save_pretrained(tmp_path / "base")
    config = configure(tmp_path / "base", runner="pooling", max_model_len=128, max_num_seqs=8)
    needed = checkpoint_tensors(config.model.architecture, has_head=False)
    names = [name for name, tensor in needed.items() if len(tensor.shape) == 2 and "layer" in name]
    adapters = [write_lora(tmp_path / str(seed), config.model, names, seed, others=others) for seed in range(2)]
    folders = [merged(config.model, each, tmp_path / f"merged{number}") for number, each in enumerate(adapters)]
    prompts = [[5, 6, 7], [*range(3, 60)]]

    def vectors(
        config: EngineConfig, given: list[list[int]], adapters: list[AdapterRef | None] | None = None
    ) -> Tensor:
        with Ranks(config) as ranks:
            budget = 256 if "encoder" in kind else 32
            requests = [(prompt, SamplingParams()) for prompt in given]
            outputs = ranks.run(requests, adapters=adapters, max_num_batched_tokens=budget)
        return torch.stack([torch.frombuffer(bytearray(own[-1].vector or b""), dtype=torch.float32) for own in outputs])

    configs = [config, *(configure(each, runner="pooling", max_model_len=128, max_num_seqs=8) for each in folders)]
    expected = torch.stack([vectors(each, prompts) for each in configs]).flatten(0, 1)
    lora = LoraConfig(num_slots=2, device_bytes=1 << 24, host_bytes=1 << 30)
    of_requests = [each for each in (None, *adapters) for _ in prompts]
    found = vectors(replace(config, lora=lora), prompts * 3, of_requests)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected[:2] - expected[2:4]).abs().amax(1).min() > 0.1


@pytest.mark.parametrize(
    "name",
    [
        *("gptq, act order", "compressed-tensors, 4 bits", "gguf"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "fp8")),
    ],
)
def test_quantized_bases(name: str, tmp_path: Path) -> None:
    """Adapters change the product of the numbers that the base represents, whose columns may be in another order, or
    its rows."""
    base = tmp_path / "model.gguf" if name == "gguf" else tmp_path
    if name == "gguf":
        written = test_gguf.write(base, "LlamaForCausalLM", gguf.GGMLQuantizationType.Q8_0)
        written.save_pretrained(tmp_path / "whole")
    else:
        test_quantized.write(base, name, "dense")
    whole = configure(tmp_path / "whole").model
    names = [each for each in checkpoint_tensors(whole.architecture, has_head=True) if "_proj.weight" in each]
    adapter = write_lora(tmp_path / "adapter", whole, names, settings=SETTINGS | {"use_dora": True})
    prompts = [random.Random(length).choices(range(3, 130), k=length) for length in (3, 30)]
    folders = tmp_path / "whole", merged(whole, adapter, tmp_path / "out")
    expected = [answer for folder in folders for answer in generate(folder, prompts, COUNT)]
    with Ranks(configure(base, enable_lora=True, max_model_len=64, max_num_seqs=8)) as ranks:
        outputs = ranks.run([(prompt, PLAIN) for prompt in prompts * 2], adapters=[None, None, adapter, adapter])
    assert [[token for output in own for token in output.token_ids] for own in outputs] == expected
    assert expected[:2] != expected[2:]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_processes(case: Case, tp: int, pp: int) -> None:
    with Ranks(configured(case, 2, tensor_parallel_size=tp, pipeline_parallel_size=pp)) as ranks:
        check(case, ranks)
        check(case, ranks, SCORED, max_num_batched_tokens=24)
