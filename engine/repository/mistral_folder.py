"""The folder of a model in Mistral's own layout: params.json as config.json, tekken.json as tokenizer.json. No torch.

Everything that reads a model folder works with it. The weights stay where they are: links lead to them, also to a
repository's weights that are yet to be downloaded.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import mistral_chat, tekken
from quire.engine.repository.gguf_folder import written_once
from quire.engine.repository.mistral_layout import hf_config
from quire.engine.repository.model_files import PARAMS, read_json, weights_among

_VERSION = 1
"""Version of the folders' content; another version has another folder."""
_WEIGHTS = "consolidated*.safetensors"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_KEPT = (
    f"{PARAMS} generation_config.json consolidated.safetensors.index.json tokenizer.json tokenizer_config.json "
    "special_tokens_map.json chat_template.jinja chat_template.json"
)
"""Files that mean the same in both layouts."""
_SENTENCEPIECE = re.compile(r"tokenizer\.model(?:\.v(\d+)\w*)?")


def is_layout(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names has only Mistral's own layout, or weights only in it."""
    return PARAMS in names and ("config.json" not in names or weights_among(names) == "mistral")


def folder_of(source: Path, names: Sequence[str], cache: Path, *, has_tokenizer: bool = True) -> Path:
    """The folder of a model in `cache`, by the path, and the size and time of change of the files that are read;
    written if it is not there. `names` are the names of all files, also of weights that are not in `source` yet.

    Raises `ConfigError` for files that are damaged, and for models and tokenizers that are not supported.
    """
    weights = sorted(fnmatch.filter(names, _WEIGHTS))
    _check_shards(source, weights)
    tokenizer = _tokenizer(source) if has_tokenizer and not (source / "tokenizer.json").exists() else None
    read = [file for file in (source / PARAMS, tokenizer) if file is not None]
    states = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in read]
    kept = [name for name in _KEPT.split() if (source / name).exists()]
    key = " ".join(map(str, (_VERSION, source.absolute(), *states, *weights, *kept)))

    def write(folder: Path) -> None:
        content = {"config.json": _config(source), **_tokenizer_files(tokenizer)}
        folder.mkdir()
        for name, each in content.items():
            if name not in kept:
                (folder / name).write_text(json.dumps(each, ensure_ascii=False), encoding="utf-8")
        if tokenizer is not None and tokenizer.suffix != ".json":
            (folder / "tokenizer.model").symlink_to(tokenizer.absolute())
        for name in (*weights, *kept):
            (folder / name).symlink_to((source / name).absolute())

    return written_once(cache, source.name, key, write)


def _config(source: Path) -> dict[str, Any]:
    try:
        return hf_config(read_json(source / PARAMS))
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source / PARAMS}: {error}") from None


def _check_shards(source: Path, weights: Sequence[str]) -> None:
    shards = [match for name in weights if (match := _SHARD.fullmatch(name))]
    for stem, count in {(match[1], int(match[3])) for match in shards}:
        found = {int(match[2]) for match in shards if match[1] == stem}
        if missing := sorted(set(range(1, count + 1)) - found):
            raise ConfigError(f"{source}: of the {count} files {stem}-….safetensors, number {missing[0]} is missing")


def _tokenizer(source: Path) -> Path:
    """tekken.json, or else SentencePiece's file of the highest version."""
    if (file := source / "tekken.json").exists():
        return file
    files = [path for path in source.iterdir() if _SENTENCEPIECE.fullmatch(path.name)]
    if not files:
        raise ConfigError(f"{source}: no tekken.json and no tokenizer.model.v3 or the like; set --tokenizer")
    return max(files, key=lambda path: (_version(path.name), path.name))


def _tokenizer_files(tokenizer: Path | None) -> dict[str, Any]:
    """The files that are written for a tokenizer, by name. SentencePiece's file is read as it is, and names its special
    tokens itself."""
    if tokenizer is None:
        return {}
    if tokenizer.suffix != ".json":
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        return {"tokenizer_config.json": _with_template(config, _version(tokenizer.name), ())}
    content = read_json(tokenizer)
    try:
        special = tekken.special_tokens(content)
        named = {"bos_token": tekken.BOS, "eos_token": tekken.EOS, "unk_token": "<unk>", "pad_token": "<pad>"}
        config = {name: text for name, text in named.items() if text in special}
        version = int(content["config"].get("version", "v3").removeprefix("v"))
        return {
            "tokenizer.json": tekken.tokenizer_json(content),
            "tokenizer_config.json": _with_template(config, version, special),
        }
    except ConfigError as error:
        raise ConfigError(f"{tokenizer}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{tokenizer}: damaged: the tokenizer is not complete ({error}); download it again") from None


def _with_template(config: dict[str, Any], version: int, special: Collection[str]) -> dict[str, Any]:
    template = mistral_chat.chat_template(version, special)
    return config if template is None else {**config, "chat_template": template}


def _version(name: str) -> int:
    match = _SENTENCEPIECE.fullmatch(name)
    assert match is not None
    return int(match[1] or 1)
