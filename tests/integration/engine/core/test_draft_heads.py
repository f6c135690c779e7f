"""Heads that draft change no token, in any layout, and their drafts equal the drafts of a reference that computes each
from the whole text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.worker import model_runner
from quire.engine.worker.drafter import Drafts
from quire.engine.worker.head_drafter import HeadDrafter, SeveralHeadsDrafter
from quire.engine.worker.input_batch import InputBatch
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.draft_heads import HEAD, Reference, write_eagle, write_eagle3, write_mtp, write_v4_mtp
from tests.fakes.drafts import Always, Recording, RecordingMixed
from tests.fakes.families import write, write_renamed
from tests.fakes.lora import write_lora
from tests.fakes.model_logits import configure
from tests.fakes.threads import ThreadExecutor
from tests.integration.engine.core.test_draft_models import NoSizesFromData

CASES: dict[str, tuple[str, Callable[[Path], Reference]]] = {
    "EAGLE-3": ("eagle3", partial(write_eagle3, "Llama")),
    "EAGLE": ("eagle", partial(write_eagle, "Qwen3")),
    "MTP, DeepSeek V3": ("mtp", partial(write_mtp, "DeepSeek V3")),
    "MTP, MiMo": ("mtp", partial(write_mtp, "MiMo")),
    "EAGLE-3, MLA": ("eagle3", partial(write_eagle3, "DeepSeek V3")),
    "EAGLE-3, another width, windows": (
        "eagle3",
        partial(write_eagle3, "Qwen2, some windows", hidden_size=32, target_hidden_size=48),
    ),
    "EAGLE-3, gpt-oss": ("eagle3", partial(write_eagle3, "gpt-oss")),
    "MTP, GLM-4 MoE": ("mtp", partial(write_mtp, "GLM-4 MoE")),
    "MTP, DeepSeek V3.2": ("mtp", partial(write_mtp, "DeepSeek V3.2")),
    "MTP, Qwen3-Next": ("mtp", partial(write_mtp, "Qwen3-Next")),
    "MTP, Nemotron 3": ("mtp", partial(write_mtp, "Nemotron 3")),
    "MTP, ERNIE 4.5 MoE": ("mtp", partial(write_mtp, "ERNIE 4.5 MoE")),
    "MTP, EXAONE MoE": ("mtp", partial(write_mtp, "EXAONE MoE")),
    "MTP, MiMo-V2-Flash": ("mtp", partial(write_mtp, "MiMo-V2-Flash")),
    "MTP, Ling hybrid": ("mtp", partial(write_mtp, "Ling hybrid")),
    "MTP, Step 3.5": ("mtp", partial(write_mtp, "Step 3.5")),
    "EAGLE-3, recurrent states": ("eagle3", partial(write_eagle3, "OLMo hybrid")),
    "MTP, DeepSeek V4": ("mtp", write_v4_mtp),
    "MTP, DeepSeek V4, entries": ("mtp", partial(write_v4_mtp, kind="compressed_sparse_attention")),
}
PROMPTS = [[*range(40, 73)], [5, 6, 7, 8] * 3, [100]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=3, top_p=0.9, max_tokens=20, frequency_penalty=0.5, logprobs=2),
)
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in KINDS]


def configured(folder: Path, case: str, tp: int = 1, pp: int = 1, **options: Any) -> EngineConfig:
    method, _ = CASES[case]
    chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    chosen |= {} if method == "mtp" else {"model": str(folder / HEAD)}
    options = {"max_model_len": 128, "max_num_seqs": 16, "speculative_config": chosen, **options}
    return configure(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, **options)


IN_EVERY_LAYOUT = ("EAGLE", "EAGLE-3", "MTP, DeepSeek V3", "MTP, MiMo-V2-Flash", "MTP, DeepSeek V4")
"""A case of each kind of drafter; the others run on four ranks."""
DEFAULT = {
    ("EAGLE-3", 2, 2),
    ("MTP, Qwen3-Next", 1, 1),
    ("EAGLE", 1, 1),
    ("MTP, DeepSeek V3", 1, 2),
    ("MTP, MiMo", 2, 1),
    ("MTP, MiMo-V2-Flash", 1, 2),
    ("MTP, Nemotron 3", 1, 1),
    ("MTP, DeepSeek V4", 1, 2),
}
GRIDS = [
    pytest.param(case, tp, pp, marks=[] if (case, tp, pp) in DEFAULT else [pytest.mark.slow])
    for case in CASES
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2))
    if (tp, pp) == (2, 2) or case in IN_EVERY_LAYOUT or (case, tp, pp) in DEFAULT
]


@pytest.mark.parametrize(("case", "tp", "pp"), GRIDS)
def test_tokens_are_those_without_speculation(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """In chunks of prompts, with drafts always and now and then, preempted; and greedy drafts are the oracle's, also
    behind n-grams."""
    reference = CASES[case][1](tmp_path)
    config = configured(tmp_path, case, tp, pp)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        depth, blocks = max(2, pp), 14 * len(config.cache.groups)
        if any(group.fills_pages for group in config.cache.groups):
            blocks = 3 * config.cache.max_blocks(57, 24)
        states = config.cache.block_size if any(group.is_state for group in config.cache.groups) else None
        expected = ranks.tokens(REQUESTS, speculative=None)
        for speculation in (Always(3, 64, states), Always(3, 64, states, varies=True)):
            assert ranks.tokens(REQUESTS, speculation=speculation, depth=depth, max_num_batched_tokens=24) == expected
            assert ranks.stats.num_draft_tokens > 30
        assert ranks.tokens(REQUESTS, speculation=Always(3, 64, states), depth=depth, num_blocks=blocks) == expected
        assert ranks.stats.preemptions
        greedy, exact = [(prompt, GREEDY) for prompt in PROMPTS], expected[:: len(KINDS)]
        predicted = [replace(GREEDY, predicted_token_ids=[*tokens[:9], 1, 1, 1]) for tokens in exact]
        recording, mixed = Recording(3, 64, states), RecordingMixed(3, 64, states, method=CASES[case][0])
        ranks.tokens(greedy, speculation=recording, depth=depth, enable_prefix_caching=False)
        found = ranks.tokens(
            [*zip(PROMPTS, predicted, strict=True)], speculation=mixed, depth=depth, enable_prefix_caching=False
        )
        assert found == exact
        assert ranks.stats.num_accepted_tokens >= 6 * len(PROMPTS)
        assert len(recording.made) > 30
        assert len(mixed.made) > 3
        for known, made in recording.made[::2] + mixed.made:  # the oracle computes each from the whole text
            assert made == reference.drafts(known, len(made))


def test_the_heads_of_the_base_draft_for_adapters(tmp_path: Path) -> None:
    """Their tokens, and those of the base beside them, are as without drafts."""
    write_mtp("MiMo", tmp_path)
    config = configured(tmp_path, "MTP, MiMo", enable_lora=True, max_loras=2)
    tensors = checkpoint_tensors(config.model.architecture, has_head=True)
    names = [name for name in tensors if name.endswith("_proj.weight")]
    adapters = [None, *(write_lora(tmp_path / str(seed), config.model, names, seed, size=0.15) for seed in range(2))]
    requests = [(PROMPTS[0], GREEDY), (PROMPTS[1], GREEDY)] * 3
    of_requests = [each for each in adapters for _ in range(2)]
    with Ranks(config) as ranks:
        expected = ranks.tokens(requests, adapters=of_requests, speculative=None)
        assert ranks.tokens(requests, adapters=of_requests, speculation=Always(3, 64)) == expected
        assert ranks.stats.num_draft_tokens > 30
    assert len({str(each) for each in expected}) == len(requests)


@pytest.mark.parametrize(("case", "most"), [("MTP, MiMo-V2-Flash", 1), ("MTP, Step 3.5", 2)])
def test_drafts_of_some_heads_are_those_of_all(case: str, most: int, tmp_path: Path) -> None:
    """With fewer tokens than heads the others are not loaded; also after steps without the heads."""
    reference = CASES[case][1](tmp_path)
    config = configured(tmp_path, case, speculative_config={"method": "mtp", "num_speculative_tokens": most})
    greedy, recording = [(prompt, GREEDY) for prompt in PROMPTS], Recording(most, 64)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(greedy, speculative=None)
        assert ranks.tokens(greedy, speculation=recording, depth=2, enable_prefix_caching=False) == expected
        assert len(recording.made) > 30
        for known, made in recording.made:
            assert made == reference.drafts(known, len(made))
        assert ranks.tokens(greedy, speculation=Always(most, 64, varies=True), depth=2) == expected


LEARNING: dict[str, tuple[Callable[[Path], Any], Callable[..., Reference]]] = {
    "EAGLE-3": (partial(write, "Llama"), partial(write_eagle3, "Llama")),
    "MTP, Step 3.5": (partial(write_renamed, "Step 3.5"), partial(write_mtp, "Step 3.5")),
    "MTP, DeepSeek V4": (partial(write, "DeepSeek V4"), write_v4_mtp),
}
"""Cases whose heads can be fitted to texts: the function that writes the target, and both, fitted."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "tp", "pp"), [*((case, 1, 1) for case in LEARNING), ("EAGLE-3", 2, 2)])
def test_acceptance_is_that_of_the_oracle(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Heads that have learned the answers save steps, as many as a run step by step by the reference."""
    write_target, write_both = LEARNING[case]
    target = write_target(tmp_path / "target")
    texts = [continued(target, prompt, 40) for prompt in PROMPTS]
    reference = write_both(tmp_path / "both", texts=texts)
    config = configured(tmp_path / "both", case, tp, pp)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        for prompt, text in zip(PROMPTS, texts, strict=True):
            found = ranks.tokens([(prompt, params)], speculation=Always(3, 64), enable_prefix_caching=False)
            assert found == [text[len(prompt) :]]
            accepted, length = [0, 0, 0], len(prompt) + 1
            while length < len(text) - 1:
                drafts = reference.drafts(text[:length], min(3, len(text) - length - 1))
                pairs = zip(drafts, text[length:], strict=False)
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                accepted = [count + (number < right) for number, count in enumerate(accepted)]
                length += right + 1
            assert ranks.stats.accepted_per_position[:4] == [*accepted, 0]
            assert sum(accepted) > 10


@pytest.mark.parametrize("case", ["EAGLE-3", "MTP, MiMo-V2-Flash", "MTP, DeepSeek V4"])
def test_nothing_waits_for_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens in a memory of its own, as on a GPU, where the host does not know the sampled tokens."""
    drafter = SeveralHeadsDrafter if case == "MTP, MiMo-V2-Flash" else HeadDrafter
    draft = drafter.draft

    def watched(*args: Any) -> Drafts | None:
        with NoSizesFromData():  # type: ignore[no-untyped-call]
            return draft(*args)

    monkeypatch.setattr(model_runner, "InputBatch", partial(InputBatch, is_shared=False))
    monkeypatch.setattr(drafter, "draft", watched)
    reference = CASES[case][1](tmp_path)
    config, greedy, recording = configured(tmp_path, case), [(prompt, GREEDY) for prompt in PROMPTS], Recording(3, 64)
    with Ranks(config, ThreadExecutor(config)) as ranks:
        expected = ranks.tokens(REQUESTS, speculative=None)
        assert ranks.tokens(REQUESTS, speculation=Always(3, 64), depth=2) == expected
        ranks.tokens(greedy, speculation=recording, depth=2, enable_prefix_caching=False)
        for known, made in recording.made[::3]:
            assert made == reference.drafts(known, len(made))


@torch.no_grad()
def continued(target: Any, tokens: list[int], count: int) -> list[int]:
    """The tokens, followed by the likeliest ones, computed from the whole text each time."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("case", ["EAGLE-3", "MTP, MiMo-V2-Flash"])
def test_heads_beside_ranks_as_processes(case: str, tmp_path: Path) -> None:
    """With the real manager, regardless of the cost."""
    CASES[case][1](tmp_path)
    config = configured(tmp_path, case, tp=2)
    with Ranks(config) as ranks:
        expected = ranks.tokens(REQUESTS, speculative=None)
        assert ranks.tokens(REQUESTS) == expected
        assert ranks.tokens(REQUESTS, speculation=Always(3, 64)) == expected
        assert ranks.stats.num_draft_tokens > 30
