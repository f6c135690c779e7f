"""The folder of a GGUF file's model: its metadata, as config.json, tokenizer.json and so on. No torch.

Everything that reads a model folder works with it. The weights stay in the file, which config.json names.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import gguf
from quire.engine.repository.gguf_architectures import hf_config, hf_tensors
from quire.engine.repository.gguf_tokenizer import adds, special_tokens, tokenizer_json
from quire.engine.repository.model_files import TensorInfo, read_json

_VERSION = 1
"""Version of the folders' content; another version has another folder."""
_ENDS = "<|eot_id|> <|eom_id|> <|end_of_text|> <|im_end|> <|endoftext|> <|end|> <end_of_turn> <EOT>"
"""Tokens that end an answer where they exist, whatever the file names as EOS: llama.cpp stops at them, too."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names in generation_config.json, by the names of general.sampling.… settings."""


def folder_of(file: Path, cache: Path, *, has_tokenizer: bool = True) -> Path:
    """The folder of a file in `cache`, by the file's path, size and time of change; written if it is not there."""
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    key = f"{_VERSION} {file.absolute()} {status.st_size} {status.st_mtime_ns} {has_tokenizer}"
    return written_once(cache, file.stem, key, lambda folder: write(file, folder, has_tokenizer=has_tokenizer))


def written_once(cache: Path, name: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder in `cache` that is named after a name and a key, made by `write` if it is not there."""
    folder = cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=cache) as whole:
                write(written := Path(whole, "model"))
                written.rename(folder)
        except OSError as error:
            if not folder.exists():  # unless another process was faster
                raise ConfigError(f"{cache}: cannot be written: {error.strerror}; check its permissions") from None
    return folder


def write(file: Path, folder: Path, *, has_tokenizer: bool = True) -> None:
    """Write the folder of a file, without a tokenizer if another one is used.

    Raises `ConfigError` for files that are damaged, and for models and tokenizers that are not supported.
    """
    model = gguf.read(file)
    config = hf_config(model)
    config["quantization_config"]["file"] = str(file.absolute())  # a link's own name tells the files of a split model
    content = {"config.json": config, "generation_config.json": _generation_config(model.metadata)}
    if has_tokenizer:
        try:
            content["tokenizer.json"] = tokenizer_json(model.metadata)
            content["tokenizer_config.json"] = _tokenizer_config(model.metadata)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: damaged: its tokenizer is not complete ({error}); download it again") from None
    folder.mkdir(exist_ok=True)
    for name, each in content.items():
        (folder / name).write_text(json.dumps(each, ensure_ascii=False), encoding="utf-8")


def file_of(folder: Path) -> Path:
    """The GGUF file that a folder was written for."""
    return Path(read_json(folder / "config.json")["quantization_config"]["file"])


def headers(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of the file that a folder was written for, by the names of the model's published form."""
    tensors = hf_tensors(gguf.read(file_of(folder)), read_json(folder / "config.json"))
    return {name: TensorInfo(each.file, each.dtype, each.shape, name) for name, each in tensors.items()}


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    named = [metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ends = [
        *(each for each in named if each is not None),
        *(tokens.index(each) for each in _ENDS.split() if each in tokens),
    ]
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {"eos_token_id": list(dict.fromkeys(ends)), **{n: value for n, value in given.items() if value is not None}}


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens, default = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.chat_template")
    config = {name: tokens[number] for name, number in special_tokens(metadata).items()}
    config |= {"add_bos_token": adds(metadata, "bos"), "add_eos_token": adds(metadata, "eos")}
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in metadata.get("tokenizer.chat_templates", [])}
    if default is not None and named:
        templates = {"default": default, **named}.items()
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates]
    elif default is not None:
        config["chat_template"] = default
    return config
