"""Vectors of real ranks equal transformers' with sentence-transformers' pooling, however prompts are divided."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel

from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.pooling import MODES
from quire.engine.distributed.parallel_state import connect
from quire.engine.protocol.runner_output import ModelRunnerOutput
from quire.engine.protocol.sampling_params import SamplingParams
from quire.engine.protocol.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from quire.engine.worker.model_runner import ModelRunner
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.core_with_ranks import Ranks
from tests.fakes.model_logits import CPU, configure
from tests.fakes.sentence import dense, hidden_states, pooled, write_modules

WIDTH = 64
LENGTHS = (1, 5, 16, 33, 64, 100)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some of which begin alike."""
    rng = random.Random(1)
    drawn = [[rng.randrange(130) for _ in range(length)] for length in LENGTHS]
    return [*drawn, [*drawn[4][:50], 7, 8], [*drawn[4][:50], 9]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def states(qwen3: Path, prompts: list[list[int]]) -> list[Tensor]:
    return hidden_states(qwen3, prompts)


def vectors(config: EngineConfig, prompts: Sequence[list[int]], **settings: Any) -> tuple[list[Tensor], Ranks]:
    """By real ranks, all asked at once, and before they are normalized in the end."""
    with Ranks(config) as ranks:
        outputs = ranks.run([(prompt, SamplingParams()) for prompt in prompts], **settings)
    found = []
    for (output,) in outputs:
        assert output.vector is not None
        found.append(torch.from_numpy(np.frombuffer(output.vector, np.float32).copy()))
    return found, ranks


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for vector, right in zip(found, expected, strict=True):
        torch.testing.assert_close(vector, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [7, 512])
def test_every_mode_however_prompts_are_cut(
    qwen3: Path, prompts: list[list[int]], states: list[Tensor], tmp_path: Path, mode: str, budget: int
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(qwen3 / name)
    config = configure(write_modules(tmp_path, mode, {}), max_num_seqs=4)
    found, ranks = vectors(config, prompts, max_num_batched_tokens=budget)
    check(found, [pooled(mode, x) for x in states])
    assert (ranks.stats.prefix_hit_tokens > 0) == (mode == "lasttoken")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_layouts(
    qwen3: Path, prompts: list[list[int]], states: list[Tensor], tmp_path: Path, mode: str, tp: int, pp: int
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(qwen3 / name)
    config = configure(
        write_modules(tmp_path, mode), tensor_parallel_size=tp, pipeline_parallel_size=pp, max_num_seqs=8
    )
    found, _ = vectors(config, prompts, max_num_batched_tokens=24)
    check(found, [pooled(mode, x) for x in states])


def test_preemption(qwen3: Path, prompts: list[list[int]], states: list[Tensor], tmp_path: Path) -> None:
    """A prompt that loses its blocks begins again, and so do its sums."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(qwen3 / name)
    config = configure(write_modules(tmp_path, "mean"), block_size=8, max_num_seqs=8, max_model_len=128)
    runner = ModelRunner(config, 0, connect(config.parallel, 0, None, CPU), CPU)
    prompt, params, blocks = prompts[4], SamplingParams(), list(range(8))
    begin = NewRequestData(3, prompt, len(prompt), 0, blocks, params)
    again = NewRequestData(3, prompt, len(prompt), 0, blocks[::-1], params)
    plans = (
        SchedulerOutput(0, [], [begin], [CachedRequestData(3, 20, [], [])]),
        SchedulerOutput(1, [], [], [CachedRequestData(3, 20, [], [])]),
        SchedulerOutput(2, [3], [again], [CachedRequestData(3, 30, [], [])]),
        SchedulerOutput(3, [], [], [CachedRequestData(3, 34, [], [])]),
    )
    results = [runner.launch(plan).result() for plan in plans]
    found = [
        vector for result in results if isinstance(result, ModelRunnerOutput) for vector in result.vectors.values()
    ]
    assert len(found) == 1
    check([torch.from_numpy(np.frombuffer(found[0], np.float32).copy())], [pooled("mean", states[4])])


def test_embedding_with_a_decoder_and_with_a_headless_model(
    qwen3: Path, prompts: list[list[int]], states: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [x[-1] for x in states]
    check(vectors(configure(qwen3, runner="pooling"), prompts)[0], expected)
    # As Qwen3-Embedding is published: the architecture of a whole model, the names of one without its head.
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    tensors = load_file(qwen3 / "model.safetensors")
    assert "lm_head.weight" in tensors
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    check(vectors(configure(write_modules(tmp_path, "lasttoken", {})), prompts)[0], expected)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("Qwen3ForCausalLM", "Qwen3Model"))
    (tmp_path / "modules.json").unlink()
    check(vectors(configure(tmp_path), prompts)[0], expected)
    assert not [record for record in caplog.records if record.name.startswith("quire")]


def test_several_modes_and_dense_modules(
    qwen3: Path, prompts: list[list[int]], states: list[Tensor], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(qwen3 / name)
    first, second = dense(2 * WIDTH, 24), dense(24, 8, bias=False, activation="GELU")
    folder = write_modules(tmp_path, "mean", first, {}, second, {})
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["mean", "cls"]}')
    config = configure(folder)
    assert config.model.pooling is not None
    assert config.model.pooling.size == 8
    expected = []
    for x in states:
        vector = torch.cat((pooled("cls", x), pooled("mean", x)))
        vector = F.linear(vector, first["weights"]["linear.weight"], first["weights"]["linear.bias"]).tanh()
        expected.append(F.gelu(F.linear(F.normalize(vector, dim=-1), second["weights"]["linear.weight"])))
    check(vectors(config, prompts, max_num_batched_tokens=20)[0], expected)


def test_wrong_weights_of_a_dense_module_are_named(qwen3: Path, tmp_path: Path) -> None:
    from quire.engine.protocol.errors import ConfigError

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(qwen3 / name)
    module = dense(WIDTH, 8)
    module["weights"]["linear.weight"] = module["weights"]["linear.weight"].T.contiguous()
    with pytest.raises(ConfigError, match=r"linear.weight has the shape \[64, 8\], expected \[8, 64\]"):
        vectors(configure(write_modules(tmp_path, "mean", module)), [[1]])


@pytest.mark.parametrize("tp", [1, 2])
def test_an_encoder_takes_whole_prompts_in_batches(prompts: list[list[int]], tmp_path: Path, tp: int) -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=131, max_position_embeddings=100, **sizes)).save_pretrained(tmp_path)
    expected = [pooled("mean", x) for x in hidden_states(tmp_path, prompts)]
    config = configure(write_modules(tmp_path, "mean", {}), tensor_parallel_size=tp)
    for settings in ({}, {"max_num_batched_tokens": 100}, {"max_num_seqs": 2}):
        found, ranks = vectors(config, prompts, **settings)
        check(found, expected)
        assert ranks.stats.kv_blocks == 0
    if tp == 1:  # the same alone and in a batch, to the bit
        alone = [vectors(config, [prompt])[0][0] for prompt in prompts[:3]]
        assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=False))
