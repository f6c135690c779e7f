"""An adapter's name and path get other weights again and again, while streams use it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import LLM, SamplingParams
from quire.engine.config.options import DEMO_MODEL
from quire.server.cli.main import main
from tests.e2e.serving import serve
from tests.fakes.families import CASES, SIZES, write_model

pytestmark = pytest.mark.slow
NAME = "moving"
NUM_VARIANTS, NUM_RELOADS, STREAMS_PER_RELOAD, NUM_TOKENS = 3, 100, 2, 300
PROMPTS = [[*range(5, 5 + length)] for length in (70, 90)]
"""Long enough for some blocks of the prefix cache, the first ones of which they share."""
WEIGHTS = "adapter_model.safetensors"


def write_base(folder: Path) -> Path:
    """A small random model in float32, with the demo model's tokenizer."""
    architecture, changes = CASES["Llama"]
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    write_model(architecture, SIZES | changes | {"vocab_size": vocabulary, "max_position_embeddings": 512}, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


def write_variant(folder: Path, base: Path, seed: int) -> Path:
    config, noise = json.loads((base / "config.json").read_text()), np.random.default_rng(seed)
    hidden, inner, tensors = config["hidden_size"], config["intermediate_size"], {}
    for layer in range(config["num_hidden_layers"]):
        for module in ("mlp.gate_proj", "mlp.up_proj"):
            before = f"base_model.model.model.layers.{layer}.{module}.lora"
            tensors[f"{before}_A.weight"] = noise.normal(0, 0.3, (4, hidden)).astype(np.float32)
            tensors[f"{before}_B.weight"] = noise.normal(0, 0.3, (inner, 4)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def answers_of(model: Path) -> list[Sequence[int]]:
    """The outputs of a merged model."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model), dtype="float32", device="cpu", kv_cache_memory_bytes=16 << 20) as llm:
        return [
            result.outputs[0].token_ids for result in llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        ]


class Client:
    """Streams of the adapter, each of which must be of the weights that its name had when it began."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.streams: list[asyncio.Task[None]] = []
        self.wrong: list[str] = []

    async def begin(self, prompt: int, expected: Sequence[int], what: str) -> None:
        """Begin a stream; returns when the server has begun to answer."""
        has_begun = asyncio.Event()

        async def stream() -> None:
            body = {"model": NAME, "prompt": PROMPTS[prompt], "max_tokens": NUM_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            got: list[int] = []
            try:
                async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            got += json.loads(line[6:])["choices"][0].get("token_ids") or []
                            has_begun.set()
            finally:
                has_begun.set()
            if got != [*expected]:
                self.wrong.append(f"{what}: {got} instead of {[*expected]}")

        self.streams.append(asyncio.create_task(stream()))
        await has_begun.wait()


async def reload(http: httpx.AsyncClient, root: Path, variant: Path) -> None:
    """Give the path the weights of this variant, and load them in place of the earlier ones."""
    fresh = root / "part"
    shutil.copy(variant / WEIGHTS, fresh)
    os.replace(fresh, root / NAME / WEIGHTS)
    body: dict[str, Any] = {"lora_name": NAME, "lora_path": str(root / NAME), "load_inplace": True}
    answer = await http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


async def test_other_weights_under_the_same_name_are_exact_for_old_and_new_streams(tmp_path: Path) -> None:
    base, root, answers = write_base(tmp_path / "base"), tmp_path / "adapters", list[list[Sequence[int]]]()
    root.mkdir()
    folders = [write_variant(root / f"v{number}", base, number) for number in range(NUM_VARIANTS)]
    for folder in folders:
        merged = tmp_path / f"merged-{folder.name}"
        assert main(["merge", str(base), str(folder), str(merged)]) == 0
        answers.append(answers_of(merged))
    assert len({tuple(each[0][:20]) for each in answers}) == NUM_VARIANTS  # the first tokens tell who answers
    shutil.copytree(folders[0], root / NAME)
    flags = ("--dtype", "float32", "--device", "cpu", "--kv-cache-memory-bytes", str(32 << 20), "-dp", "2")
    adapters = ("--enable-lora", "--lora-root", str(root), "--lora-modules", f"{NAME}={root / NAME}")
    with serve(str(base), *flags, *adapters, "--api-server-count", "2", "--max-num-seqs", "64") as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            client, most = Client(http), 0
            for number in range(NUM_RELOADS):
                chosen = (number + 1) % NUM_VARIANTS
                await reload(http, root, folders[chosen])
                for stream in range(STREAMS_PER_RELOAD):
                    await client.begin(stream, answers[chosen][stream], f"reload {number}, variant {chosen}")
                most = max(most, sum(not task.done() for task in client.streams))
            await asyncio.gather(*client.streams)
    assert client.wrong == []
    assert len(client.streams) == NUM_RELOADS * STREAMS_PER_RELOAD
    assert most > STREAMS_PER_RELOAD  # streams go on over reloads
