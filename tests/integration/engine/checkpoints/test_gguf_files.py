"""The tensors of GGUF files, as the loader reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from quire.engine.architecture.quantization.gguf import SCHEMES
from quire.engine.checkpoints.gguf_files import GgufFiles
from quire.engine.checkpoints.quantized_tensors.gguf import GgufReader
from quire.engine.repository.gguf_folder import write
from tests.fakes.gguf_models import add_tensors, close, config_of, tensors_of, writer


def test_plain_tensors_are_the_published_ones(tmp_path: Path) -> None:
    """Also tensors that llama.cpp changes: norms of Gemma are stored plus 1."""
    config = config_of("Gemma3ForCausalLM")
    generator = np.random.default_rng(0)
    tensors = {name: generator.normal(size=shape).astype(np.float32) for name, shape in tensors_of(config).items()}
    made = writer(tmp_path / "m.gguf", config)
    add_tensors(made, config, {name: each + 1 if "norm" in name else each for name, each in tensors.items()})
    close(made)
    write(tmp_path / "m.gguf", tmp_path / "model", has_tokenizer=False)
    files = GgufFiles(tmp_path / "model")
    assert files.headers.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert files.headers[name].dtype == "F32"
        torch.testing.assert_close(files.view(files.headers[name]), torch.from_numpy(expected))


def test_quantized_experts_and_numbers_of_16_bits(tmp_path: Path) -> None:
    config, kind = config_of("Qwen3MoeForCausalLM"), gguf.GGMLQuantizationType.Q8_0
    stack = np.random.default_rng(0).normal(size=(4, 32, 64)).astype(np.float32)
    embedding = np.random.default_rng(1).normal(size=(320, 64)).astype(np.float32)
    made = writer(tmp_path / "m.gguf", config)
    made.add_tensor("token_embd.weight", embedding.astype(np.float16))
    half = gguf.GGMLQuantizationType.BF16
    made.add_tensor("output.weight", gguf.quants.quantize(embedding, half), raw_dtype=half)
    made.add_tensor("blk.0.ffn_gate_exps.weight", gguf.quants.quantize(stack, kind), raw_dtype=kind)
    close(made)
    write(tmp_path / "m.gguf", tmp_path / "model", has_tokenizer=False)
    files = GgufFiles(tmp_path / "model")
    found = files.view(files.headers["model.embed_tokens.weight"])
    assert torch.equal(found, torch.from_numpy(embedding).half())
    found = files.view(files.headers["lm_head.weight"])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), torch.from_numpy(embedding), rtol=2**-8, atol=0)
    module = "model.layers.0.mlp.experts.2.gate_proj"
    info = files.headers[f"{module}.weight"]
    assert (info.dtype, info.shape) == ("Q8_0", (32, 64))
    reader = GgufReader(SCHEMES["Q8_0"], module, info.shape, {info.name: files.view(info)})
    expected = gguf.quants.dequantize(gguf.quants.quantize(stack[2], kind), kind)
    torch.testing.assert_close(reader[slice(0, 32), slice(0, 64)], torch.from_numpy(expected))
