"""A folder in Mistral's own layout, served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import MistralConfig, MistralForCausalLM

from tests.e2e.serving import serve
from tests.fakes.mistral_layout import PARAMS, stored, write_folder


def test_it_serves_the_model_and_names_the_template_that_is_missing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=PARAMS["dim"],
        num_hidden_layers=PARAMS["n_layers"],
        head_dim=PARAMS["head_dim"],
        intermediate_size=PARAMS["hidden_dim"],
        num_attention_heads=PARAMS["n_heads"],
        num_key_value_heads=PARAMS["n_kv_heads"],
        rms_norm_eps=PARAMS["norm_eps"],
        vocab_size=PARAMS["vocab_size"],
        rope_parameters={"rope_type": "default", "rope_theta": PARAMS["rope_theta"]},
        sliding_window=None,
        initializer_range=0.2,
    )
    model: Any = MistralForCausalLM(config).train(False)
    folder = write_folder(tmp_path / "model")
    save_file(stored(model.state_dict(), PARAMS), folder / "consolidated.safetensors")
    words = [entry["token_bytes"] for entry in json.loads((folder / "tekken.json").read_text())["vocab"]]
    prompt = [1, 40 + words.index("aGVsbG8="), 40 + words.index("IHdvcmxk")]
    with torch.inference_mode():
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kernels = os.environ.get("QUIRE_KERNEL_CACHE") or str(user / "quire" / "kernels")
    with serve(
        *(str(folder), "--device", "cpu", "--kv-cache-memory-bytes", "4194304", "--no-ui"),
        *("--tokenizer-mode", "mistral", "--config-format", "mistral", "--load-format", "mistral"),
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "QUIRE_KERNEL_CACHE": kernels},
    ) as server:
        body = {"prompt": "hello world", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60).json()
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == whole[len(prompt) :].tolist()
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
        assert refused.status_code == 400
        assert "start the server with --chat-template" in refused.json()["error"]["message"]
