"""`quire merge`: what it writes, and what it refuses. `test_merge_by_peft.py` compares all formats with PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.architecture.families import from_hf_config
from quire.engine.architecture.families.tensors import checkpoint_tensors
from quire.engine.checkpoints import adapter_tensors, merge
from quire.engine.config.merge_request import MergeRequest
from quire.server.cli.main import main
from tests.fakes.adapters import LLAMA, SETTINGS, SHAPES, Q, write_adapter

A, B = SHAPES
_HF = "model.layers.0.self_attn.q_proj.weight"
_UNUSED = "model.layers.70.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def write_base(folder: Path, **changes: Any) -> Path:
    """A model of bfloat16 in two files, with a tensor that no model uses."""
    folder.mkdir()
    config = LLAMA | changes
    generator = torch.Generator().manual_seed(1)
    arch = from_hf_config(config)
    shapes = {name: each.shape for name, each in checkpoint_tensors(arch, has_head=True).items()} | {_UNUSED: (3, 5)}
    files: dict[str, str] = {}
    for number in range(2):
        own = [*shapes][number::2]
        tensors = {name: torch.randn(shapes[name], generator=generator).bfloat16() for name in own}
        save_file(tensors, folder / f"model-{number}.safetensors")
        files |= dict.fromkeys(own, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text("{}")
    return folder


def plain(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    if "process" not in request.node.name:
        monkeypatch.setattr(MergeRequest, "run", merge.run)


def test_only_the_changed_tensors_change(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, out = write_adapter(tmp_path / "adapter", SHAPES), tmp_path / "out"
    (adapter / "tokenizer.json").write_text('{"of": "the adapter"}')
    (adapter / "README.md").write_text("how it was trained")
    (base / "adapter_config.json").write_text("{}")
    assert main(["merge", str(base), str(adapter), str(out)]) == 0
    assert f"quire serve {out}" in capsys.readouterr().out
    before, after, own = plain(base), plain(out), load_file(adapter / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        expected = (tensor.float() + 2 * own[B] @ own[A]).bfloat16() if name == _HF else tensor
        assert after[name].dtype == torch.bfloat16
        assert after[name].equal(expected), name
    assert not after[_HF].equal(before[_HF])
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: file for file in {*index.values()} for name in load_file(out / file)} == index
    assert json.loads((out / "config.json").read_text()) == LLAMA
    assert (out / "tokenizer.json").read_text() == '{"of": "the adapter"}'
    assert (out / "generation_config.json").exists()
    assert not (out / "README.md").exists()
    assert not (out / "adapter_config.json").exists()


_FORMS = {
    "chat_template.jinja": "{}",
    "chat_template.json": '{"chat_template": "{}"}',
    "tokenizer_config.json": '{"pad_token": "{}", "chat_template": "{}"}',
    "additional_chat_templates/tool_use.jinja": "{}",
}


@pytest.mark.parametrize("name", _FORMS)
def test_the_templates_of_the_adapter_replace_all_of_the_base(base: Path, tmp_path: Path, name: str) -> None:
    adapter, out = write_adapter(tmp_path / "adapter", SHAPES), tmp_path / "out"
    for form, text in _FORMS.items():
        (base / form).parent.mkdir(exist_ok=True)
        (base / form).write_text(text.replace("{}", "of the base"))
    (adapter / name).parent.mkdir(exist_ok=True)
    (adapter / name).write_text(_FORMS[name].replace("{}", "of the adapter"))
    assert main(["merge", str(base), str(adapter), str(out)]) == 0
    found = {form: (out / form).read_text() for form in _FORMS if (out / form).exists()}
    settings = json.loads(found.pop("tokenizer_config.json"))
    if name == "tokenizer_config.json":
        assert settings == {"pad_token": "of the adapter", "chat_template": "of the adapter"}
        assert not found
    else:
        assert settings == {"pad_token": "of the base"}
        assert found == {name: _FORMS[name].replace("{}", "of the adapter")}


def test_the_tokenizer_of_the_adapter_replaces_all_of_the_base(base: Path, tmp_path: Path) -> None:
    names = ("tokenizer.model", "added_tokens.json", "chat_template.jinja", "tokenizer_config.json")
    for name in names:
        (base / name).write_text("{}")
    adapter = write_adapter(tmp_path / "adapter", SHAPES)
    (adapter / "tokenizer_config.json").write_text('{"of": "the adapter"}')
    for out, left in (("alone", ("tokenizer.json", *names)), ("whole", ("tokenizer.json", *names[2:]))):
        assert main(["merge", str(base), str(adapter), str(tmp_path / out)]) == 0
        assert {file.name for file in (tmp_path / out).iterdir()} & {"tokenizer.json", *names} == {*left}
        assert "adapter" in (tmp_path / out / "tokenizer_config.json").read_text()
        (adapter / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(("name", "is_other"), [("/elsewhere/base", False), ("owner/base-chat", True), (3, False)])
def test_another_base_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: object, *, is_other: bool
) -> None:
    adapter = write_adapter(tmp_path / "adapter", SHAPES, SETTINGS | {"base_model_name_or_path": name})
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    assert (f"note: the adapter was trained on {name!r}, and is" in capsys.readouterr().out) == is_other


def test_rows_are_changed_a_few_at_a_time(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with norms of rows and of columns, which are those of the whole matrix."""
    embedding = "base_model.model.model.embed_tokens"
    shapes = SHAPES | {f"{Q}.lora_magnitude_vector": (16,), f"{embedding}.lora_magnitude_vector": (16,)}
    shapes |= {f"{embedding}.lora_embedding_A": (4, 40), f"{embedding}.lora_embedding_B": (16, 4)}
    adapter = write_adapter(tmp_path / "adapter", shapes, SETTINGS | {"use_dora": True})
    results = []
    for size in (1 << 24, 48):
        monkeypatch.setattr(adapter_tensors, "_AT_ONCE", size)
        assert main(["merge", str(base), str(adapter), str(tmp_path / str(size))]) == 0
        results.append(plain(tmp_path / str(size)))
    own, tensor = load_file(adapter / "adapter_model.safetensors"), plain(base)["model.embed_tokens.weight"].float()
    changed = tensor + 2 * (own[f"{embedding}.lora_embedding_B"] @ own[f"{embedding}.lora_embedding_A"]).T
    expected = changed * own[f"{embedding}.lora_magnitude_vector"] / changed.norm(dim=0)
    torch.testing.assert_close(results[0]["model.embed_tokens.weight"], expected.bfloat16())
    for name, each in results[0].items():
        torch.testing.assert_close(results[1][name], each)


@pytest.mark.parametrize("is_tied", [False, True])
def test_added_tokens(tmp_path: Path, *, is_tied: bool) -> None:
    base = write_base(tmp_path / "base", tie_word_embeddings=is_tied, text_config={"vocab_size": 40})
    names = [f"base_model.model.{each}.weight" for each in ("model.embed_tokens", "lm_head")]
    adapter = write_adapter(tmp_path / "adapter", dict.fromkeys(names, (42, 16)))
    file = adapter / "adapter_model.safetensors"
    if is_tied:
        own = load_file(file)
        save_file({name: own[names[0]].clone() for name in names}, file)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    config, own = (
        json.loads((tmp_path / "out" / "config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    assert config == LLAMA | {"vocab_size": 42, "tie_word_embeddings": is_tied, "text_config": {"vocab_size": 42}}
    tensors = plain(tmp_path / "out")
    assert tensors["model.embed_tokens.weight"].equal(own[names[0]].bfloat16())
    assert ("lm_head.weight" in tensors) != is_tied


_LFM = {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"], "tie_embedding": True}


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, _LFM])
def test_a_tied_head_that_the_adapter_does_not_change_is_written(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    base, name = write_base(tmp_path / "base", **changes), "model.embed_tokens.weight"
    adapter = write_adapter(tmp_path / "adapter", {f"base_model.model.{name}": (40, 16)})
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not from_hf_config(config).tie_embeddings
    assert config["tie_word_embeddings"] is False
    tensors = plain(tmp_path / "out")
    assert tensors["lm_head.weight"].equal(plain(base)[name])
    assert not tensors[name].equal(tensors["lm_head.weight"])


def _with_nan(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[B][3, 2] = math.nan
    save_file(tensors, folder / "adapter_model.safetensors")


def _with_large(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: each * 1e30 for name, each in tensors.items()}, folder / "adapter_model.safetensors")


_REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "numbers": ({}, f"{B} has values that are NaN"),
    "large numbers": ({}, f"{_HF} would have values that are NaN or infinite"),
    "an invocation": ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens: the adapter is active only behind"),
    "a bias": ({"lora_bias": True}, "lora_B.bias: the base has no model.layers.0.self_attn.q_proj.bias to merge"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_adapters_that_cannot_be_merged(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    settings, problem = _REFUSED[case]
    adapter = write_adapter(
        tmp_path / "adapter",
        SHAPES | ({f"{Q}.lora_B.bias": (16,)} if case == "a bias" else {}),
        SETTINGS | dict(settings),
    )
    if case == "numbers":
        _with_nan(adapter)
    elif case == "large numbers":
        _with_large(adapter)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_bases_and_folders_that_are_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, out = write_adapter(tmp_path / "adapter", SHAPES), tmp_path / "out"

    def refused(*arguments: object) -> str:
        assert main(["merge", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "needs BASE, ADAPTER and OUT" in refused(base, adapter)
    assert "exists; use another folder" in refused(base, adapter, adapter)
    assert "is no folder; create it" in refused(base, adapter, out / "below")
    assert "is inside of the base's folder" in refused(base, adapter, base / "merged")
    assert "GGUF bases are not supported" in refused(tmp_path / "model.gguf", adapter, out)
    for length in (252, 300, 5000):  # 255 with .part is too long, too
        assert "cannot be written: File name too long" in refused(base, adapter, out.with_name("n" * length))
    (tmp_path / "out.part").mkdir()
    assert "out.part exists: another `quire merge` writes it" in refused(base, adapter, out)
    config = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}
    (base / "config.json").write_text(json.dumps(config))
    assert "is quantized, with awq" in refused(base, adapter, out)


@pytest.mark.slow
def test_weights_are_read_in_a_process_of_their_own(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", SHAPES)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    assert not plain(tmp_path / "out")[_HF].equal(plain(base)[_HF])
    _with_nan(adapter)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "other")]) == 2
    assert f"{B} has values that are NaN" in capfd.readouterr().err
