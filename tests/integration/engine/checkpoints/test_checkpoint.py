"""The forms that checkpoints come in: torch's files, old layouts, quantized tensors; and dummy weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.checkpoints.loader import needed_tensors
from quire.engine.config.engine_config import EngineConfig
from quire.engine.config.options import EngineOptions
from quire.engine.config.plan_text import plan_text
from quire.engine.config.resolve import fetch_weights, resolve
from quire.engine.distributed.communicator import Parallel
from quire.engine.layers.weight import Weight
from quire.engine.models.build import build, load
from quire.engine.models.decoder import Decoder
from quire.engine.protocol.errors import ConfigError
from tests.fakes.families import CASES, SIZES
from tests.fakes.model_logits import CPU, configure, logits


def write_config(case: str, folder: Path, **changes: Any) -> None:
    """config.json alone, as transformers writes it."""
    architecture, differences = CASES[case]
    config = getattr(transformers, architecture).config_class(**(SIZES | differences | changes))
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))


def write(case: str, folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A checkpoint of random numbers."""
    write_config(case, folder, **changes)
    config, generator = configure(folder), torch.Generator().manual_seed(0)
    with torch.device("meta"):
        arch = config.model.architecture
        decoder = Decoder(arch, range(arch.num_layers), 64, Parallel())
    needed = needed_tensors(decoder, config.model)
    tensors = {name: torch.randn(places[0][2].shape, generator=generator) for name, places in needed.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_that_are_checked_are_those_that_are_read(case: str, tmp_path: Path) -> None:
    write_config(case, tmp_path)
    arch = configure(tmp_path, load_format="dummy").model.architecture
    expected = {name: each.shape for name, each in checkpoint_tensors(arch, has_head=True).items()}
    assert expected == read_tensors(tmp_path)


def read_tensors(folder: Path, **options: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the parameters of the complete model are read from."""
    model = configure(folder, load_format="dummy", **options).model
    with torch.device("meta"):
        decoder = build(model, range(model.architecture.num_layers), Parallel())
    return {name: places[0][2].shape for name, places in needed_tensors(decoder, model).items()}


def read(folder: Path, tp: int = 1, rank: int = 0, **options: Any) -> dict[str, Tensor]:
    """The contents of a rank's parameters."""
    config = configure(folder, tensor_parallel_size=tp, **options)
    decoder = load(config, rank, of(rank, tp), CPU, pack=False)
    return {name: weight.data for name, weight in decoder.named_parameters()}


def of(rank: int, tp: int) -> Parallel:
    parallel = Parallel()
    parallel.rank, parallel.size = rank, tp
    return parallel


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def pickle(folder: Path, tensors: Mapping[str, Any], *, files: int = 1, **options: Any) -> None:
    """The tensors as pytorch_model*.bin, instead of safetensors."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return
    of_file = {name: f"pytorch_model-{number % files:05}.bin" for number, name in enumerate(tensors)}
    for file in set(of_file.values()):
        part = {name: tensor for name, tensor in tensors.items() if of_file[name] == file}
        torch.save(part, folder / file, **options)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": of_file}))


@pytest.mark.parametrize(("files", "is_new"), [(1, True), (3, True), (1, False)])
def test_files_of_torch_are_read_as_safetensors_are(files: int, is_new: bool, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in write("Llama", tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = [read(tmp_path, 2, rank) for rank in range(2)]
    pickle(tmp_path, tensors, files=files, _use_new_zipfile_serialization=is_new)
    for rank in range(2):
        assert_equal(read(tmp_path, 2, rank, load_format="pt"), expected[rank])


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("quire")]


def fetch(folder: Path, **options: Any) -> None:
    asked = EngineOptions(model=str(folder), device="cpu", **options)
    fetch_weights(asked, resolve(asked))


def test_files_of_torch_are_read_where_there_are_no_safetensors(tmp_path: Path) -> None:
    tensors = write("Llama", tmp_path)
    with pytest.raises(ConfigError, match=r"no pytorch_model\*\.bin found"):
        fetch(tmp_path, load_format="pt")
    fetch(tmp_path)
    pickle(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors found, only pytorch_model\.bin"):
        fetch(tmp_path, load_format="safetensors")
    fetch(tmp_path)


class Code:
    """Code that a pickle runs when it is read carelessly."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('run')",)


def test_no_code_in_them_is_run(tmp_path: Path) -> None:
    tensors = write("Llama", tmp_path)
    pickle(tmp_path, tensors | {"code": Code()})
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: holds other things than tensors"):
        read(tmp_path, load_format="pt")


def test_broken_files_of_torch_are_named(tmp_path: Path) -> None:
    pickle(tmp_path, write("Llama", tmp_path))
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: truncated, or not saved by torch"):
        fetch(tmp_path, load_format="pt")
    torch.save([torch.zeros(3)], file)
    with pytest.raises(ConfigError, match="tensors by name are expected"):
        read(tmp_path, load_format="pt")


OLD = {
    "GPT-2": ("transformer.", {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}),
    "OPT": ("model.", {}),
    "GPT-NeoX": ("gpt_neox.", {"layers.0.attention.bias": torch.ones(1, 1, 4, 4)}),
    "Llama": ("model.", {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
}


@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
@pytest.mark.parametrize("case", OLD)
def test_checkpoints_of_models_without_a_head_lack_their_prefix(
    case: str, load_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers that were saved with them are no surplus."""
    prefix, buffers = OLD[case]
    tensors = write(case, tmp_path)
    expected = [read(tmp_path, 2, rank) for rank in range(2)]
    old = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()} | buffers
    assert old.keys() - buffers.keys() != tensors.keys()
    save_file(old, tmp_path / "model.safetensors")
    if load_format == "pt":
        pickle(tmp_path, old)
    for rank in range(2):
        assert_equal(read(tmp_path, 2, rank, load_format=load_format), expected[rank])
    assert not said(caplog)


@pytest.mark.parametrize("case", ["Gemma 3 with a vision part", "Mistral Small 3 with a vision part"])
def test_older_checkpoints_of_models_that_take_images_have_other_prefixes(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tied head is no surplus."""
    tensors = write(case, tmp_path)
    expected = read(tmp_path)
    old = {
        f"language_model.{name.replace('model.language_model.', 'model.', 1)}"
        if name.startswith(("model.language_model.", "lm_head."))
        else name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }
    save_file({"language_model.lm_head.weight": torch.zeros(3)} | old, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), expected)
    assert not said(caplog)


def to_fp8(tensor: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit floats, their blocks' scales, and their products."""
    rows, columns = tensor.shape
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    stored, whole = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for row, column in product(range(scales.shape[0]), range(scales.shape[1])):
        part = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
        scales[row, column] = tensor[part].abs().max() / 448
        stored[part] = (tensor[part] / scales[row, column]).to(torch.float8_e4m3fn).float()
        whole[part] = stored[part] * scales[row, column]
    return stored.to(torch.float8_e4m3fn), scales, whole


BLOCK = (16, 32)
"""Divides neither sizes nor slices."""


def write_fp8(folder: Path, plain: Path, case: str = "DeepSeek V3") -> None:
    """DeepSeek-V3 or V3.2 as it is published, in `folder`, and dequantized in `plain`."""
    tensors = write(case, plain)
    write_config(case, folder)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and re.search(r"(?<!weights)_proj|\.w(q_b|k)\.", name) and ".layers.2." not in name:
            stored[name], stored[f"{name}_scale_inv"], tensors[name] = to_fp8(tensor, BLOCK)
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("stored", "plain"):
        (tmp_path / name).mkdir()
    return tmp_path / "stored", tmp_path / "plain"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["DeepSeek V3", "DeepSeek V3.2, yarn rope", "GLM-5", "gpt-oss"])
def test_tensors_are_dequantized_while_they_are_read(
    case: str, dtype: str, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    if case == "gpt-oss":
        write_mxfp4(*folders)
    else:
        write_fp8(*folders, case)
    for tp, rank in ((1, 0), (2, 0), (2, 1), (4, 3)):
        expected = read(folders[1], tp, rank, dtype=dtype)
        assert_equal(read(folders[0], tp, rank, dtype=dtype), expected)
    assert not said(caplog)
    indexer = "" if case == "DeepSeek V3" else "indexer, "
    kept = f"fp8 weights, widened in registers (attention, {indexer}feed forward, shared)"
    text = f"{dtype}, fp8: {dtype} weights (attention, {indexer}experts); {kept},"
    text = "mxfp4: e2m1 weights, widened in registers" if case == "gpt-oss" else text
    assert text in plan_text(configure(folders[0], dtype=dtype))


def test_fp8_without_scales_that_fit_is_named(folders: tuple[Path, Path]) -> None:
    write_fp8(*folders)
    file = folders[0] / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts.0.up_proj"):
        tensors[f"{name}.weight_scale_inv"] = torch.ones(7, 7)
    save_file(tensors, file)
    with pytest.raises(ConfigError) as error:
        read(folders[0])
    name = "model.layers.0.self_attn.o_proj.weight"
    assert f"{name}_scale_inv has the shape [7, 7], expected [3, 2]" in str(error.value)
    assert "experts.0.up_proj.weight" in str(error.value)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def write_mxfp4(folder: Path, plain: Path) -> None:
    """gpt-oss as it is published, in `folder`, and dequantized in `plain`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}  # of a group, half is another rank's
    tensors = write("gpt-oss", plain, **sizes)
    write_config("gpt-oss", folder, **sizes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
            values = torch.tensor(E2M1)[halves] * 2.0 ** (scales.float() - 127)[..., None]
            tensors[name] = values.flatten(2).transpose(1, 2).contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")


def test_what_was_dequantized_may_be_quantized_again(folders: tuple[Path, Path]) -> None:
    write_mxfp4(*folders)
    stored, plain = (
        logits(configure(folder, quantization="int8", max_model_len=24), torch.arange(20), Parallel())
        for folder in folders
    )
    assert torch.equal(stored, plain)
    assert plain.std() > 0


def test_mxfp4_without_scales_is_missing(folders: tuple[Path, Path]) -> None:
    write_mxfp4(*folders)
    file = folders[0] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        read(folders[0])


def test_layers_for_prediction_are_named_as_information(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write("DeepSeek V3", tmp_path)
    extra = {f"model.layers.4.{name}": torch.zeros(3) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        for rank in range(2):
            read(tmp_path, 2, rank)
    (record,) = said(caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"{tmp_path}: the checkpoint's multi-token prediction is not used (2): "
        "model.layers.4.eh_proj.weight, model.layers.4.enorm.weight"
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_scales_for_a_kv_cache_are_named_as_information(
    kv_cache_dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = write("Llama", tmp_path)
    expected = read(tmp_path)
    extra = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        assert_equal(read(tmp_path, kv_cache_dtype=kv_cache_dtype), expected)
    (record,) = said(caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"{tmp_path}: the checkpoint's scales of keys and values are not used, since a quantized KV cache has "
        "a scale for each token and head (2): model.layers.0.self_attn.k_scale, model.layers.0.self_attn.v_scale"
    )


@pytest.mark.parametrize("case", ["GPT-2", "Mixtral", "gpt-oss", "Falcon, groups", "Command R+", "DeepSeek V3"])
def test_misshapen_tensors_are_named_as_they_are_stored(case: str, tmp_path: Path) -> None:
    """Stacked, fused and transposed ones too."""
    tensors = write(case, tmp_path)
    for name, tensor in tensors.items():
        wrong = {other: torch.zeros(3, 5) if other == name else value for other, value in tensors.items()}
        if not any(part in name for part in (".1.", ".0.w", ".0.mlp.experts.0.")):
            continue
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError) as error:
            read(tmp_path)
        assert f"{name} has the shape [3, 5], expected {list(tensor.shape)}" in str(error.value)
        break
    else:
        pytest.fail("no tensor was tried")


def dummy(config: EngineConfig, rank: int, tp: int) -> dict[tuple[str, str, int | None], tuple[Tensor, slice, int]]:
    """A rank's slice of each checkpoint tensor, and its place in the tensor."""
    decoder = load(config, rank, of(rank, tp), CPU, pack=False)
    made = {}
    for name, places in needed_tensors(decoder, config.model).items():
        for weight, shard, _ in places:
            cut = slice(shard.start, shard.start + shard.length)
            made[name, shard.part, shard.expert] = weight.data[shard.target], cut, shard.dim
    return made


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_dummy_weights_that_do_not_depend_on_the_ranks(case: str, tmp_path: Path) -> None:
    write_config(case, tmp_path)
    config = configure(tmp_path, load_format="dummy", max_model_len=24)
    whole = dummy(config, 0, 1)
    for name, (tensor, _, _) in whole.items():
        is_norm = tensor.ndim == 1 and name[0].endswith("weight")
        if is_norm:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif not tensor.is_floating_point():
            assert all(len(set(row)) == len(row) for row in tensor.tolist()), name
        else:
            is_embedded = "embed_vision.embedding" in name[0]  # replaced by its embeddings (`Tower.complete`)
            assert tensor.numel() == 1 or is_embedded or 0 < tensor.std() < 0.04, name
    halved = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    for rank in range(2):
        for key, (tensor, cut, dim) in dummy(halved, rank, 2).items():
            index = (slice(None),) * dim + (cut,)
            assert torch.equal(tensor, whole[key][0][index]), key
    assert isinstance(next(load(config, 0, Parallel(), CPU).parameters()), Weight)
    other = dummy(configure(tmp_path, load_format="dummy", max_model_len=24, seed=1), 0, 1)
    assert any(not torch.equal(tensor, whole[key][0]) for key, (tensor, _, _) in other.items())
