"""The engine on the device: greedy float32 tokens equal transformers', with any backend and any way of running
steps."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import pytest

import quire
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.config.devices import SHARE
from quire.engine.config.options import DEMO_MODEL, EngineOptions
from quire.engine.config.resolve import resolve
from quire.engine.process.trace import TraceWriter
from quire.engine.protocol.profile import ProfileOptions, StartProfile, StopProfile, TracePiece
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import SchedulerOutput
from tests.fakes import media_prompts
from tests.fakes.checkpoints import generate
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.draft_heads import HEAD, write_eagle3, write_mtp
from tests.fakes.drafts import Always, Recording
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.lora import merged, write_lora
from tests.fakes.media_prompts import MediaPrompt, Picture, media_prompt, write_media_model
from tests.gpu.conftest import DEVICE
from tests.integration.engine.core.test_chained_rows import num_chained, watch

COUNT = 16
TRITON = "auto" if DEVICE.type == "cpu" else "triton"
FAMILIES = ["Llama", "Mistral, windows", "Qwen3", "Gemma 2", "Gemma 3", "GPT-2", "gpt-oss", "Mixtral", "DeepSeek V3"]
_random = random.Random(0)
PROMPTS = [[_random.randrange(3, 130) for _ in range(length)] for length in (1, 7, 33, 70, 3, 64)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            architecture, changes = CASES[family]
            made[family] = tmp_path_factory.mktemp("model")
            write_model(architecture, SIZES | changes, made[family])
        return made[family]

    return folder


def serve(
    folder: Path, depth: int | None = None, prompts: Sequence[MediaPrompt] = (), **changes: Any
) -> list[list[int]]:
    options = {
        "model": str(folder),
        "device": DEVICE.type,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 1 << 24,
        **changes,
    }
    config = resolve(EngineOptions(**options))
    if depth is not None:
        config = replace(config, scheduler=replace(config.scheduler, depth=depth))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Ranks(config) as ranks:
        if prompts:
            media = [prompt.items for prompt in prompts]
            return ranks.tokens([(prompt.token_ids, params) for prompt in prompts], media=media)
        return ranks.tokens([(prompt, params) for prompt in PROMPTS])


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "Qwen3-VL", "Gemma 3"])
def test_answers_about_pictures_are_those_of_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Positions along three axes in CUDA graphs, features for several layers, and pictures that attend to themselves in
    both directions. Layers of the tower are captured, or all runs kernel by kernel."""
    model = write_media_model(family, tmp_path, **{"sliding_window": 24} if family == "Gemma 3" else {})
    parts: list[list[int | Picture]] = [
        [5, Picture((1, 8, 6)), 30],
        [9],
        [2, Picture((1, 4, 4)), 3, Picture((1, 6, 6)), 1],
    ]
    prompts = [media_prompt(model, each, tmp_path, seed) for seed, each in enumerate(parts)]
    expected = [media_prompts.generate(model, prompt, COUNT) for prompt in prompts]
    with caplog.at_level("INFO"):
        assert serve(tmp_path, prompts=prompts) == expected
    assert ("CUDA graphs for images of up to 2,048 patches" in caplog.text) == (DEVICE.type == "cuda")
    assert serve(tmp_path, prompts=prompts, enforce_eager=True) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, folders: Callable[[str], Path]) -> None:
    assert serve(folders(family)) == generate(folders(family), PROMPTS, COUNT)


@pytest.mark.parametrize(
    "changes",
    [{"attention_backend": "reference"}, {"attention_backend": TRITON}, {"enforce_eager": True}, {"depth": 1}],
    ids=str,
)
@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "Mixtral"])
def test_execution_mode_does_not_change_tokens(
    family: str, changes: dict[str, Any], folders: Callable[[str], Path]
) -> None:
    assert serve(folders(family), **changes) == serve(folders(family))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["Llama", "DeepSeek V3"])
def test_tokens_of_adapters_are_those_of_merged_checkpoints(
    family: str, enforce_eager: bool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Side by side with those of the base. The second round replays the steps that the first one has captured."""
    options: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
    options |= {"enable_lora": True, "max_num_seqs": 8, "max_model_len": 128, "enforce_eager": enforce_eager}
    config = resolve(EngineOptions(model=str(folders(family)), **options))
    names = [name for name in checkpoint_tensors(config.model.architecture, has_head=True) if "_proj" in name]
    names = [name for name in names if name.endswith(".weight") and ".experts." not in name]
    written = [write_lora(tmp_path / str(seed), config.model, names, seed, size=0.15) for seed in range(2)]
    expected = [generate(folders(family), PROMPTS, COUNT)]
    for number, each in enumerate(written):
        expected.append(generate(merged(config.model, each, tmp_path / f"merged{number}"), PROMPTS, COUNT))
    assert expected[0] != expected[1] != expected[2]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    adapters = [adapter for adapter in (None, *written) for _ in PROMPTS]
    with Ranks(config) as ranks:
        for _ in range(2):
            found = ranks.tokens([(prompt, params) for prompt in PROMPTS * 3], adapters=adapters)
            assert found == [answer for of_adapter in expected for answer in of_adapter]


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "DeepSeek V3"])
def test_a_model_that_drafts_for_itself_is_right(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise at temperature 1, and rows chained to the rows in flight."""
    folder = str(folders(family))
    options: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
    config = resolve(EngineOptions(model=folder, spec_model=folder, max_model_len=128, max_num_seqs=8, **options))
    requests = [
        (prompt, SamplingParams(temperature=seed % 2, seed=seed, max_tokens=26, ignore_eos=True))
        for seed, prompt in enumerate(PROMPTS)
    ]
    with Ranks(config) as ranks:
        exact, plans = ranks.tokens(requests, speculative=None), watch(ranks, monkeypatch)
        assert ranks.tokens(requests, speculation=Always(4, 64), depth=2) == exact
        assert num_chained(plans) > 0
        assert ranks.stats.num_accepted_tokens >= 0.95 * ranks.stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_change_no_token(method: Literal["eagle3", "mtp"], tmp_path: Path) -> None:
    """The heads draft as on a CPU."""
    reference = write_eagle3("Llama", tmp_path) if method == "eagle3" else write_mtp("DeepSeek V3", tmp_path)
    options = EngineOptions(
        model=str(tmp_path),
        spec_method=method,
        spec_model=str(tmp_path / HEAD) if method == "eagle3" else None,
        spec_tokens=3,
        device=DEVICE.type,  # type: ignore[arg-type]
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 24,
    )
    requests = [(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for prompt in PROMPTS]
    with Ranks(resolve(options)) as ranks:
        exact, recording = ranks.tokens(requests, speculative=None), Recording(3, 64)
        assert ranks.tokens(requests, speculation=recording, depth=2, enable_prefix_caching=False) == exact
    same = [made == reference.drafts(known, len(made)) for known, made in recording.made]
    assert sum(same) >= 0.95 * len(same) > 0


@pytest.mark.parametrize("cache", ["bfloat16", "int8", "fp8", "int4"])
def test_smaller_caches_change_few_tokens(cache: str, folders: Callable[[str], Path]) -> None:
    """As the reference does with the same cache: rounding is the same wherever attention is computed."""
    found, expected = (
        serve(folders("Llama"), kv_cache_dtype=cache, attention_backend=backend) for backend in ("auto", "reference")
    )
    alike = [a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(alike) >= 0.8 * len(alike)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_on_one_gpu_give_the_tokens_of_one(
    size: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    options: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    params = quire.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with quire.LLM(str(folders("Llama")), tokenizer=str(DEMO_MODEL), **options | {size: 2}) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == serve(folders("Llama"))


def test_profiles_of_replayed_steps_have_kernels_and_change_no_tokens(folders: Callable[[str], Path]) -> None:
    """A second profile, too: CUDA graphs must survive the end of the first one."""
    options: dict[str, Any] = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    config = resolve(EngineOptions(model=str(folders("Llama")), kv_cache_memory_bytes=1 << 24, **options))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    requests = [(prompt, params) for prompt in PROMPTS]
    with Ranks(config) as ranks:
        pieces: SimpleQueue[TracePiece] = SimpleQueue()
        ranks.executor.on_trace = pieces.put
        expected = ranks.tokens(requests)
        for call in range(2):
            for command in (StartProfile(0, call, ProfileOptions(60.0, 0)), StopProfile(0, call)):
                plan = SchedulerOutput(0, [], [], [], profile=command)
                ranks.executor.submit(plan, 60.0).result()
                assert ranks.tokens(requests) == expected
            file = io.BytesIO()
            writer = TraceWriter(file)
            while (piece := pieces.get(timeout=120)).summary is None:
                writer.add(piece.data)
            assert (piece.call_id, piece.summary.error) == (call, "")
            writer.close([piece.summary], {})
            events = json.loads(gzip.decompress(file.getvalue()))["traceEvents"]
            assert any(event.get("cat") == ("cpu_op" if DEVICE.type == "cpu" else "kernel") for event in events)


def test_half_precision_generates(folders: Callable[[str], Path]) -> None:
    for dtype in ("bfloat16", "float16"):
        tokens = serve(folders("Llama"), dtype=dtype)
        assert [len(each) for each in tokens] == [COUNT] * len(PROMPTS)
