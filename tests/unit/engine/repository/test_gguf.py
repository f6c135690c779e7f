"""GGUF files: the data that is read from them, and the model folder that is derived."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.engine.architecture.families import from_hf_config
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.gguf import read
from quire.engine.repository.gguf_architectures import hf_config, hf_tensors
from quire.engine.repository.gguf_folder import file_of, folder_of, write
from tests.fakes.gguf_models import ARCHITECTURES, add_byte_level, add_tensors, close, config_of, tensors_of, writer
from tests.fakes.tokenizers import CHATML, SPECIAL, byte_level

GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


def model_file(path: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    """A tiny model of zeros."""
    config = config_of(architecture) | changes
    made = writer(path, config)
    add_tensors(made, config, {name: np.zeros(shape, np.float32) for name, shape in tensors_of(config).items()})
    close(made)
    return path


def file_with(path: Path, **metadata: Any) -> Path:
    """A Llama with one more setting, of any name."""
    config = config_of("LlamaForCausalLM")
    made = writer(path, config)
    for key, value in metadata.items():
        made.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    close(made)
    return path


def test_metadata_and_tensors(tmp_path: Path) -> None:
    made = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    made.add_string("a.text", "caf\u00e9")
    made.add_float32("a.number", 1e-5)
    made.add_bool("a.flag", True)
    made.add_array("a.texts", ["x", "", "yz"])
    made.add_array("a.numbers", [3, -1])
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    made.add_tensor("plain", values)
    made.add_tensor(
        "coded", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    close(made)
    found = read(tmp_path / "m.gguf")
    assert {name: value for name, value in found.metadata.items() if name.startswith("a.")} == {
        "a.text": "caf\u00e9",
        "a.number": 1e-5,
        "a.flag": True,
        "a.texts": ["x", "", "yz"],
        "a.numbers": [3, -1],
    }
    assert (found.tensors["plain"].dtype, found.tensors["plain"].shape) == ("F32", (2, 32))
    assert found.tensors["plain"].numbers() == values.ravel().tolist()
    assert (found.tensors["coded"].dtype, found.tensors["coded"].shape) == ("Q8_0", (2, 32))
    assert (found.tensors["coded"].row_bytes, found.tensors["coded"].bytes) == (34, 68)
    assert found.tensors["coded"].start + 68 <= (tmp_path / "m.gguf").stat().st_size


def test_files_cut_anywhere_are_refused_by_name(tmp_path: Path) -> None:
    content = model_file(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 5, 20, 40, 200, 700, 2000, len(content) - 100_000):
        cut.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf: (truncated|not a GGUF file).*download it again"):
            read(cut)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, which is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian machines, which is not supported"),
        (GGUF + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 99) + bytes(64), "damaged"),
        (GGUF + struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 0) + bytes(64), "damaged"),
        (GGUF + struct.pack("<Q", 1 << 60) + bytes(64), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "damaged"),
    ],
)
def test_other_content_is_refused_by_name(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.gguf: .*{problem}"):
        read(path)


def test_types_with_codebooks_are_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    made = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    made.add_tensor("blk.0.attn_q.weight", np.zeros((2, 66), np.uint8), raw_dtype=kind)
    close(made)
    with pytest.raises(ConfigError, match=r"attn_q\.weight has the type IQ2_XXS, which is not supported; .*Q4_K"):
        read(tmp_path / "m.gguf")


def test_split_models_are_read_from_all_files(tmp_path: Path) -> None:
    for number in (1, 2):
        made = gguf.GGUFWriter(tmp_path / f"m-{number:05}-of-00002.gguf", "llama")
        made.add_uint16("split.count", 2)
        made.add_tensor(f"part{number}", np.full(3, number, np.float32))
        close(made)
    found = read(tmp_path / "m-00001-of-00002.gguf")
    assert {name: tensor.numbers() for name, tensor in found.tensors.items()} == {"part1": [1] * 3, "part2": [2] * 3}
    assert [file.name for file in found.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with pytest.raises(ConfigError, match=r"one of the 2 files of a split model; .* pass the first one"):
        read(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf: cannot be read: No such file"):
        read(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_and_tensors_are_the_published_ones(architecture: str, tmp_path: Path) -> None:
    """Names by llama.cpp's own package; the family says which tensors it needs of this config.json."""
    expected = config_of(architecture)
    model = read(model_file(tmp_path / "m.gguf", architecture))
    found = hf_config(model)
    assert {name: found[name] for name in expected} == expected
    assert found.pop("quantization_config") == {"quant_method": "gguf", "types": {}}
    assert {name: tensor.shape for name, tensor in hf_tensors(model, found).items()} == tensors_of(expected)
    assert tensors_of(found) == tensors_of(expected)
    assert from_hf_config({**found, "rope_interleave": False}) == from_hf_config(expected)


def test_rows_of_queries_are_permuted_in_llama_only(tmp_path: Path) -> None:
    assert hf_config(read(model_file(tmp_path / "llama.gguf")))["rope_interleave"] is True
    assert "rope_interleave" not in hf_config(read(model_file(tmp_path / "qwen.gguf", "Qwen2ForCausalLM")))


def test_norms_of_gemma_are_stored_plus_one(tmp_path: Path) -> None:
    for architecture, added in (("Gemma2ForCausalLM", 1.0), ("LlamaForCausalLM", 0.0)):
        model = read(model_file(tmp_path / "m.gguf", architecture))
        tensors = hf_tensors(model, hf_config(model))
        assert {tensor.added for name, tensor in tensors.items() if "norm" in name} == {added}
        assert {tensor.added for name, tensor in tensors.items() if "norm" not in name} == {0.0}


def test_experts_are_parts_of_a_stack(tmp_path: Path) -> None:
    config = config_of("Qwen3MoeForCausalLM")
    made, kind = writer(tmp_path / "m.gguf", config), gguf.GGMLQuantizationType.Q8_0
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    stack = np.random.default_rng(0).normal(size=(4, 32, 64)).astype(np.float32)
    made.add_tensor("blk.0.ffn_gate_exps.weight", gguf.quants.quantize(stack, kind), raw_dtype=kind)
    close(made)
    model = read(tmp_path / "m.gguf")
    found = hf_config(model)
    assert found["quantization_config"]["types"] == {"model.layers.0.mlp.experts.gate_proj": "Q8_0"}
    tensors, content = hf_tensors(model, found), (tmp_path / "m.gguf").read_bytes()
    for expert in range(4):
        part = tensors[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]
        stored = np.frombuffer(content[part.start : part.start + part.bytes], np.uint8).reshape(32, part.row_bytes)
        assert np.array_equal(
            gguf.quants.dequantize(stored, kind),
            gguf.quants.dequantize(gguf.quants.quantize(stack[expert], kind), kind),
        )


def test_factors_of_llama_3_are_those_of_its_config(tmp_path: Path) -> None:
    """As convert_hf_to_gguf.py computes rope_freqs from config.json's rope_scaling."""
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    config = config_of("LlamaForCausalLM")
    made = writer(tmp_path / "m.gguf", config)
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    made.add_tensor("rope_freqs.weight", factors)
    close(made)
    scaling = hf_config(read(tmp_path / "m.gguf"))["rope_scaling"]
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.0)
    assert scaling["long_factor"] == scaling["short_factor"]
    assert np.array_equal(np.array(scaling["long_factor"], np.float32), factors)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
            | {"llama.rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], expected: object, tmp_path: Path) -> None:
    assert hf_config(read(file_with(tmp_path / "m.gguf", **metadata))).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is not supported"),
        ({"llama.rope.scaling.type": "su"}, r"rope\.scaling\.type su is not supported; supported: none"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal False is not supported; supported: True"),
    ],
)
def test_settings_that_change_answers_are_refused(metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf: {problem}"):
        hf_config(read(file_with(tmp_path / "m.gguf", **metadata)))


def test_other_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "mamba"))
    with pytest.raises(ConfigError, match=r"architecture mamba is not supported; supported: llama, .*phi3"):
        hf_config(read(tmp_path / "m.gguf"))
    config = config_of("LlamaForCausalLM")
    made = writer(tmp_path / "x.gguf", config)
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    made.add_tensor("blk.0.ssm_in.weight", np.zeros((4, 32), np.float32))
    close(made)
    with pytest.raises(ConfigError, match=r"blk\.0\.ssm_in\.weight is not a tensor of LlamaForCausalLM"):
        hf_config(read(tmp_path / "x.gguf"))


def tokenized_file(path: Path, **metadata: Any) -> Path:
    config, backend = config_of("Qwen2ForCausalLM"), byte_level()
    made = writer(path, config)
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    add_byte_level(made, backend, "gpt-2")
    made.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    made.add_bos_token_id(SPECIAL.index("<|endoftext|>"))
    made.add_chat_template(CHATML)
    for key, value in metadata.items():
        made.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    close(made)
    return path


def test_the_folder_is_written_once(tmp_path: Path) -> None:
    file = tokenized_file(tmp_path / "m.gguf")
    folder = folder_of(file, tmp_path / "cache")
    names = " ".join(sorted(path.name for path in folder.iterdir()))
    assert names == "config.json generation_config.json tokenizer.json tokenizer_config.json"
    assert file_of(folder) == file.resolve()
    (folder / "config.json").unlink()
    assert folder_of(file, tmp_path / "cache") == folder
    assert not (folder / "config.json").exists()
    tokenized_file(file, **{"general.name": "another"})
    assert folder_of(file, tmp_path / "cache") != folder
    assert {path.name[0] for path in (tmp_path / "cache").iterdir()} == {"m"}  # nothing temporary


def test_generation_config_and_tokenizer_config(tmp_path: Path) -> None:
    settings = {"general.sampling.temp": 0.75, "general.sampling.top_k": 20, "tokenizer.ggml.add_bos_token": True}
    write(tokenized_file(tmp_path / "m.gguf", **settings), folder := tmp_path / "folder")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": [2, 0],
        "temperature": 0.75,
        "top_k": 20,
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": CHATML,
    }


def test_a_tokenizer_of_unknown_kind_is_refused_unless_another_one_is_used(tmp_path: Path) -> None:
    config, backend = config_of("Qwen2ForCausalLM"), byte_level()
    made = writer(tmp_path / "m.gguf", config)
    made.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    add_byte_level(made, backend, "viking")
    close(made)
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.pre viking is not supported; .* --tokenizer"):
        write(tmp_path / "m.gguf", tmp_path / "folder")
    write(tmp_path / "m.gguf", tmp_path / "other", has_tokenizer=False)
    assert not (tmp_path / "other" / "tokenizer.json").exists()
