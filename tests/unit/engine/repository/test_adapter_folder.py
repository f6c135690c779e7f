"""An adapter's files: what is read, by which digest it is known, and what is refused, by name."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.engine.architecture.adapter_spec import AdapterSpec
from quire.engine.architecture.adapters.base import Base
from quire.engine.architecture.families import from_hf_config
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files
from quire.engine.repository.adapter_folder import locate, open_adapter
from tests.fakes.adapters import LLAMA, SETTINGS, SHAPES, Q, content, safetensors, write_adapter

A, B = SHAPES
K = Q.replace("q_proj", "k_proj")
_EMBEDDING, _HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
_TOKENS = f"{_EMBEDDING}.token_adapter.trainable_tokens_delta"
Shapes = Mapping[str, tuple[int, ...]]
Write = Callable[[Path], object]


def spec_of(path: Path) -> AdapterSpec:
    return open_adapter(path).spec(Base(from_hf_config(LLAMA)), "LlamaForCausalLM")


def _shapes(changes: Shapes, *without: str, **settings: Any) -> Write:
    shapes = {name: shape for name, shape in SHAPES.items() if name not in without}
    return lambda path: write_adapter(path, shapes | dict(changes), SETTINGS | settings)


def _settings(**settings: Any) -> Write:
    return _shapes({}, **settings)


def _file(name: str, content: bytes | str | None) -> Write:
    """An adapter with a file of this content; None: without it."""

    def write(path: Path) -> None:
        write_adapter(path, SHAPES)
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _weights(change: Callable[[bytes], bytes]) -> Write:
    def write(path: Path) -> None:
        file = write_adapter(path, SHAPES) / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return write


def _offsets(first: tuple[int, int], second: tuple[int, int], size: int) -> bytes:
    """A file of safetensors whose two tensors of 64 numbers have these places in the data."""
    places = {A: (first, (4, 16)), B: (second, (16, 4))}
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (at, shape) in places.items()}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(size)


def _pickle(path: Path) -> None:
    write_adapter(path, SHAPES)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def _fifo(path: Path) -> None:
    write_adapter(path, SHAPES)
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")


def _gguf(shapes: Shapes, kind: str = "adapter", architecture: str = "llama", **metadata: Any) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        writer = gguf.GGUFWriter(path / "adapter.gguf", architecture)
        writer.add_type("adapter" if kind == "array" else kind)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 8.0)
        if kind == "array":
            writer.kv_data[0]["general.architecture"] = gguf.GGUFValue([architecture], gguf.GGUFValueType.ARRAY)
        for name, value in metadata.items():
            add = writer.add_array if isinstance(value, list) else writer.add_float32
            add(f"adapter.{name}", value)
        for name, shape in shapes.items():
            writer.add_tensor(name, np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


_GA, _GB = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
BAD: dict[str, tuple[Write, str]] = {
    "no folder": (lambda path: None, "no such folder"),
    "an empty folder": (lambda path: path.mkdir(), r"no adapter_model\.safetensors"),
    "a pickle": (_pickle, r"adapter_model\.bin is a pickle"),
    "a FIFO": (_fifo, "a FIFO"),
    "no settings": (_file("adapter_config.json", None), r"no adapter_config\.json"),
    "settings that are no JSON": (_file("adapter_config.json", "{"), "not valid JSON"),
    "settings that are a list": (_file("adapter_config.json", "[]"), "expected a JSON object"),
    "a setting twice": (_file("adapter_config.json", '{"r": 1, "r": 2}'), "r occurs twice"),
    "settings without an end": (_file("adapter_config.json", "[" * 100_000), "nested too deeply"),
    "large settings": (_file("adapter_config.json", " " * (1 << 21)), "larger than 1 MiB"),
    "no safetensors": (_file("adapter_model.safetensors", b"PK\3\4" + bytes(64)), r"adapter_model\.safetensors"),
    "a truncated file": (_weights(lambda data: data[:-1]), "truncated"),
    "a file with a tail": (_weights(lambda data: data + b"x"), "longer than its header says"),
    "a header without an end": (_weights(lambda data: struct.pack("<Q", 1 << 40) + data), "truncated"),
    "tensors at one place": (_file("adapter_model.safetensors", _offsets((0, 256), (0, 256), 256)), "does not begin"),
    "bytes of no tensor": (_file("adapter_model.safetensors", _offsets((0, 256), (260, 516), 516)), "does not begin"),
    "no tensors": (_file("adapter_model.safetensors", safetensors({})), "no tensors"),
    "integers": (_file("adapter_model.safetensors", safetensors({A: ("I64", (4, 16), bytes(512))})), f"{A} is of type"),
    "8 bits": (_file("adapter_model.safetensors", safetensors({A: ("F8_E4M3", (4, 16), bytes(64))})), "F8_E4M3"),
    "another method": (_settings(peft_type="LOHA"), "peft_type 'LOHA' is not supported"),
    "no method": (_settings(peft_type=None), "peft_type None"),
    "QALoRA": (_settings(use_qalora=True), "use_qalora True is not supported"),
    "replicated layers": (_settings(layer_replication=[[0, 2]]), "layer_replication"),
    "KaSA": (_settings(kasa_config={"beta": 1}), "kasa_config"),
    "a setting of the future": (_settings(use_xlora_3=True), "use_xlora_3 True is not supported"),
    "PiSSA": (_settings(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4' has changed the base"),
    "LoftQ": (_settings(init_lora_weights="loftq"), "init_lora_weights 'loftq'"),
    "an unknown start": (_settings(init_lora_weights=2), "init_lora_weights 2 is not supported"),
    "a rank of 0": (_settings(r=0), "r 0 is not a rank"),
    "a rank in words": (_settings(r="4"), "r '4' is not a rank"),
    "a rank that is true": (_settings(rank_pattern={"q_proj": True}), r"rank_pattern\['q_proj'\] True is not a rank"),
    "alpha is not a number": (_settings(lora_alpha=float("nan")), "lora_alpha nan"),
    "alpha is infinite": (_settings(alpha_pattern={"q_proj": float("inf")}), r"alpha_pattern\['q_proj'\] inf"),
    "a huge alpha": (_settings(lora_alpha=10**400), "lora_alpha 1000"),
    "a broken pattern": (_settings(rank_pattern={"(": 4}), r"rank_pattern: '\(' is not a regular expression"),
    "an endless pattern": (_settings(alpha_pattern={"(a+)+": 4}), "is too complex"),
    "a deep pattern": (_settings(rank_pattern={"(" * 900 + ")" * 900: 4}), "is not a regular expression"),
    "a pattern with a flag": (_settings(rank_pattern={"(?i)q_proj": 4}), "is not a regular expression: global flags"),
    "a huge repetition": (_settings(rank_pattern={"a{99999999999}": 4}), "is not a regular expression"),
    "many patterns": (_settings(rank_pattern={f"a{each}": 4 for each in range(4097)}), "has 4097 patterns"),
    "many alternatives": (_settings(rank_pattern={"(.|.)" * 30: 4}), "too complex for so many modules"),
    "a slow pattern on a long name": (
        _shapes(
            {name.replace("model.", "model." * 60, 1): shape for name, shape in SHAPES.items()},
            *SHAPES,
            rank_pattern={".*.*.*[a-z]x": 4, ".*.*.*[a-z]y": 4, ".*.*.*[a-z]z": 4},
        ),
        "or such long names",
    ),
    "tokens that are true": (_settings(trainable_token_indices=[True]), "trainable_token_indices must be a list of"),
    "a flag in words": (_settings(use_dora="maybe"), "use_dora 'maybe'"),
    "no B": (_shapes({}, B), f"{A}: the B of .* is missing"),
    "no A": (_shapes({}, A), f"{B}: the A of .* is missing"),
    "A of another size": (_shapes({A: (4, 17)}), rf"{A} has the shape \[4, 17\]"),
    "B of another size": (_shapes({B: (15, 4)}), rf"{B} has the shape \[15, 4\]"),
    "B of another rank": (_shapes({B: (16, 5)}), rf"{B} has the shape \[16, 5\]"),
    "ranks unlike the settings": (_settings(r=5), f"{A} has the rank 4, but adapter_config.json says 5"),
    "a huge rank": (_shapes({A: (90, 16), B: (16, 90)}, r=90), f"{A} has the rank 90"),
    "no rank": (_shapes({A: (0, 16), B: (16, 0)}), f"{A} has the rank 0"),
    "a vector": (_shapes({A: (4,)}), rf"{A} has the shape \[4\]"),
    "no such module": (
        _shapes({f"{Q}s.lora_A.weight": (4, 16), f"{Q}s.lora_B.weight": (16, 4)}),
        "no module .*q_projs",
    ),
    "no such layer": (
        _shapes({name.replace("layers.0", "layers.2"): shape for name, shape in SHAPES.items()}),
        r"no module model\.layers\.2\.self_attn\.q_proj",
    ),
    "a path": (_shapes({"../../etc/passwd": (4, 16)}), r"\.\./\.\./etc/passwd: the base has no tensor"),
    "one tensor by two names": (_shapes({A.removeprefix("base_model.model."): (4, 16)}), "are the same tensor"),
    "one module by two names": (
        _shapes({f"{Q[:-6]}qkv_proj.lora_A.weight": (4, 16), f"{Q[:-6]}qkv_proj.lora_B.weight": (32, 4)}),
        "change the same rows",
    ),
    "a tensor of another method": (_shapes({f"{Q}.lora_E": (4, 1)}), r"lora_E is no tensor of a LoRA"),
    "an original module": (
        _shapes({f"{_HEAD}.original_module.weight": (40, 16)}),
        "original_module.weight is no tensor",
    ),
    "DoRA without norms": (_settings(use_dora=True), "the magnitude of .* is missing"),
    "norms without DoRA": (_shapes({f"{Q}.lora_magnitude_vector": (16,)}), "use_dora is not true"),
    "norms of another size": (
        _shapes({f"{Q}.lora_magnitude_vector": (15,)}, use_dora=True),
        "lora_magnitude_vector has 15 numbers, expected 16",
    ),
    "a bias that the settings miss": (_shapes({f"{Q}.lora_B.bias": (16,)}), "lora_bias is not true"),
    "a wrapper too much": (
        _shapes({name.replace(".lora", ".base_layer.lora"): shape for name, shape in SHAPES.items()}, A, B),
        r"lora_A\.weight: the base has no module",
    ),
    "a whole tensor of another size": (
        _shapes({"base_model.model.model.norm.weight": (17,)}),
        r"norm\.weight has the shape \[17\]",
    ),
    "a whole module that is missing": (_settings(modules_to_save=["score", "lm_head"]), "modules_to_save has lm_head"),
    "more tokens than the head": (_shapes({f"{_EMBEDDING}.weight": (42, 16)}), "lm_head.weight has 40 tokens"),
    "new tokens without a place": (
        _shapes({_TOKENS: (2, 16)}, trainable_token_indices=[3, 40]),
        "trainable_token_indices has 40",
    ),
    "fewer new tokens": (_shapes({_TOKENS: (1, 16)}, trainable_token_indices=[3, 4]), rf"{_TOKENS} has the shape"),
    "no new tokens": (_settings(trainable_token_indices=[3, 4]), "there are no trainable_tokens_delta"),
    "an invocation in words": (_settings(alora_invocation_tokens="hi"), "alora_invocation_tokens must be"),
    "a GGUF model": (_gguf({_GA: (4, 16)}, kind="model"), r"general\.type"),
    "GGUF of another model": (
        _gguf({_GA: (4, 16), _GB: (16, 4)}, architecture="qwen3"),
        "general.architecture 'qwen3'",
    ),
    "GGUF of a list of models": (_gguf({_GA: (4, 16), _GB: (16, 4)}, kind="array"), r"architecture \['llama'\] is not"),
    "GGUF without B": (_gguf({_GA: (4, 16)}), f"{_GB} is missing"),
    "GGUF with a norm": (_gguf({"blk.0.attn_norm.weight": (16,)}), "attn_norm.weight is no tensor of a low-rank"),
    "GGUF with another setting": (_gguf({_GA: (4, 16), _GB: (16, 4)}, scale=2.0), r"adapter\.scale is not supported"),
    "GGUF with an invocation of no token": (
        _gguf({_GA: (4, 16), _GB: (16, 4)}, **{"alora.invocation_tokens": [39, 40]}),  # type: ignore[arg-type]
        r"adapter\.alora\.invocation_tokens has 40, but the vocabulary has 40 tokens",
    ),
    "GGUF of another size": (_gguf({_GA: (4, 15), _GB: (16, 4)}), rf"{_GA} has the shape \[4, 15\]"),
    "GGUF of another rank": (_gguf({_GA: (1, 16), _GB: (16, 2)}), f"{_GB} has the shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write, problem = BAD[name]
    write(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=problem):
        spec_of(tmp_path / "adapter")


def test_the_digest_is_of_weights_and_settings_alone(tmp_path: Path) -> None:
    first = open_adapter(write_adapter(tmp_path / "first", SHAPES))
    other = dict(reversed(SETTINGS.items())) | {
        "base_model_name_or_path": "elsewhere",
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": "gaussian",
        "lora_alpha": 8.0,
    }
    tensors = {name: ("F32", SHAPES[name], content(SHAPES[name], seed=len(name))) for name in (B, A)}
    second = write_adapter(tmp_path / "second", SHAPES, other)
    (second / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    assert open_adapter(second).digest == first.digest

    digests = {first.digest}
    file = write_adapter(tmp_path / "third", SHAPES) / "adapter_model.safetensors"
    whole = file.read_bytes()
    for at in (len(whole) - 1, len(whole) - 256):  # a bit of each tensor
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        digests.add(open_adapter(file.parent).digest)
    others: list[dict[str, Any]] = [{"lora_alpha": 0}, {"lora_alpha": 9}, {"use_rslora": True}]
    others += [{"rank_pattern": {"q_proj": 4}}, {"peft_version": "0.18.1"}]
    for number, changes in enumerate(others):
        digests.add(open_adapter(write_adapter(tmp_path / f"settings {number}", SHAPES, SETTINGS | changes)).digest)
    digests.add(open_adapter(write_adapter(tmp_path / "names", {f"{K}.lora_A.weight": (4, 16), B: (16, 4)})).digest)
    digests.add(open_adapter(write_adapter(tmp_path / "types", SHAPES, dtype="F16")).digest)
    patterns = {"q_proj": 4, r".*\.q_proj": 8}
    for number, order in enumerate((patterns, dict(reversed(patterns.items())))):  # the first that matches counts
        path = write_adapter(tmp_path / f"order {number}", SHAPES, SETTINGS | {"alpha_pattern": order})
        digests.add(open_adapter(path).digest)
    assert len(digests) == 12
    del other["lora_alpha"]  # 8
    assert open_adapter(write_adapter(tmp_path / "defaults", SHAPES, other)).digest == first.digest


def test_repositories_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = ["README.md", "adapter_model.bin"], list[list[str]]()

    def download(repository: str, revision: str | None, folder: str | None, patterns: Sequence[str]) -> Path:
        asked.append([name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)])
        return tmp_path

    monkeypatch.setattr(model_files, "download", download)
    monkeypatch.setattr(model_files, "list_repository", lambda *_: names)
    with pytest.raises(ConfigError, match=r"owner/name: adapter_model\.bin is a pickle"):
        locate("owner/name", None, None)
    names[:] = ["lora.gguf"]
    assert locate("owner/name", None, None) == tmp_path
    assert asked == [[], [], ["lora.gguf"]]


def test_bytes_that_were_not_digested_are_never_read(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", SHAPES)
    adapter, file = open_adapter(path), path / "adapter_model.safetensors"
    with adapter.reading() as read:
        assert read(A) == content((4, 16), seed=len(A))
        shutil.copy(file, path / "other")
        (path / "other").rename(file)  # another file of the same content by the same name
        assert read(B) == content((16, 4), seed=len(B))
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    with adapter.reading() as read:
        assert read(A) == content((4, 16), seed=len(A))
        with pytest.raises(ConfigError, match=rf"{B} has changed since the adapter was opened"):
            read(B)
        file.write_bytes(b"")
        with pytest.raises(ConfigError, match=rf"{B} has changed"):
            read(B)
