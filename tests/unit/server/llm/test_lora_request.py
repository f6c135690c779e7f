"""Adapters in the Python API, over a fake core that tells which one a request has."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, ConfigError, LoRARequest, SamplingParams
from quire.engine.cluster import ray_cluster
from quire.engine.config.engine_config import LoraConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.repository.adapter_folder import open_adapter
from quire.server.serving import adapters
from tests.fakes import fake_core
from tests.fakes.adapters import SETTINGS, Q, write_adapter
from tests.fakes.sandbox import InProcessSandbox

INVOCATION = [72, 73]


@pytest.fixture
def options(model_folder: Path, core_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a model that takes adapters."""
    resolve = ray_cluster.resolve
    lora = LoraConfig(num_slots=2, device_bytes=1, host_bytes=1)
    monkeypatch.setattr(ray_cluster, "resolve", lambda asked: replace(resolve(asked), lora=lora))
    monkeypatch.setattr(adapters, "Sandbox", InProcessSandbox)
    return {"model": str(model_folder), "load_format": "dummy", "device": "cpu"}


@pytest.fixture
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**options) as running:
        yield running


def write(folder: Path, **settings: Any) -> Path:
    """An adapter, another one with other settings."""
    shapes = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)}
    return write_adapter(folder, shapes, SETTINGS | settings)


def mark(folder: Path) -> int:
    """The token with which answers by the adapter begin."""
    return fake_core.adapter_token(AdapterRef(open_adapter(folder).digest, ()))


def first_tokens(results: Any) -> list[int]:
    return [result.outputs[0].token_ids[0] for result in results]


def test_each_prompt_has_its_own_adapter(llm: LLM, tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", lora_alpha=16)
    requests = [LoRARequest("a", 1, str(one)), None, LoRARequest("a", 1, two)]
    params = SamplingParams(temperature=0.0, max_tokens=3)
    prompts = [[70, 71]] * 3
    found = llm.generate(prompt_token_ids=prompts, sampling_params=params, lora_request=requests, use_tqdm=False)
    assert first_tokens(found) == [mark(one), 70, mark(two)]
    chats = [[{"role": "user", "content": "hi"}]] * 2
    assert first_tokens(llm.chat(chats, params, lora_request=requests[0])) == [mark(one)] * 2
    (one / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (own,) = llm.chat(chats[0], params, lora_request=LoRARequest("a", lora_path=one), use_tqdm=False)
    assert own.prompt_token_ids == llm.get_tokenizer().encode("hi!")
    (beams,) = llm.beam_search([{"prompt_token_ids": [70]}], BeamSearchParams(2, 1), requests[2])
    assert beams.sequences[0].tokens[-1] == mark(two)
    with pytest.raises(ValueError, match=r"^lora_request: 3 for 1 prompts"):
        llm.generate("a", params, lora_request=requests)


def test_files_decide_which_adapter_it_is(llm: LLM, tmp_path: Path) -> None:
    """Neither a name nor an id nor a path with other files stands for an earlier adapter."""
    path, other = write(tmp_path / "path"), write(tmp_path / "other", lora_alpha=16)
    first, second = mark(path), mark(other)
    request, params = LoRARequest("a", lora_path=path), SamplingParams(temperature=0.0, max_tokens=3)
    assert first_tokens(llm.generate([[70]], params, lora_request=request)) == [first]
    shutil.copy(other / "adapter_config.json", path)
    assert first_tokens(llm.generate([[70]], params, lora_request=request)) == [second]
    llm.llm_engine.add_request("1", [70], params, lora_request=request)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"path: no adapter_model\.safetensors found"):
        llm.llm_engine.add_request("2", [70], params, lora_request=request)
    assert first_tokens(llm.llm_engine.step()) == [second]


async def test_an_activated_adapter_starts_at_its_invocation(options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a", alora_invocation_tokens=INVOCATION)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    async with AsyncLLM(**options) as llm:

        async def first(prompt: list[int]) -> list[int]:
            found = [each async for each in llm.generate(prompt, params, lora_request=LoRARequest("a", 1, path))]
            return list(found[-1].outputs[0].token_ids)

        assert (await first([70, *INVOCATION, 75, *INVOCATION, 80]))[:2] == [mark(path), INVOCATION[0]]
        assert (await first([70, 72, 71]))[0] == 70


def test_without_enable_lora_adapters_are_refused(
    model_folder: Path, core_mode: Callable[[str], None], tmp_path: Path
) -> None:
    with (
        LLM(str(model_folder), load_format="dummy", device="cpu") as llm,
        pytest.raises(ConfigError, match=r"enable_lora=True"),
    ):
        llm.generate("a", lora_request=LoRARequest("a", lora_path=write(tmp_path / "a")))
