"""A repository in Hugging Face's cache, served by its id: GPT-2's shape, in several pytorch_model*.bin."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.serving import serve
from tests.fakes.checkpoints import generate
from tests.fakes.families import SIZES, write_model
from tests.fakes.tokenizers import byte_level

PROMPTS = [[70, 71, 72], list(range(20, 60))]


@pytest.mark.slow
def test_gpt2_is_served_by_its_id_from_files_of_torch(tmp_path: Path) -> None:
    """12 heads on 4 ranks in each of 2 stages; no flag says which format the weights have."""
    repository = tmp_path / "models--gpt2"
    folder = repository / "snapshots" / "12ab"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("12ab")
    write_model("GPT2LMHeadModel", SIZES | {"num_attention_heads": 12, "tie_word_embeddings": True}, folder)
    byte_level().save(str(folder / "tokenizer.json"))
    expected = generate(folder, PROMPTS, 24)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"pytorch_model-0000{number % 3 + 1}-of-00003.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))

    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    flags = ("-tp", "4", "-pp", "2", "--device", "cpu", "--kv-cache-memory-bytes", "4000000")
    with serve("gpt2", *flags, env=environment) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "gpt2"
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert any("gpt2 has its weights only as pytorch_model*.bin" in line for line in server.lines)
