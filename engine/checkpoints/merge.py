"""Merges an adapter into its base and writes the result as a checkpoint, as `quire merge` asks."""

from __future__ import annotations

import json
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quire.engine.architecture.adapter_spec import LowRank
from quire.engine.architecture.families import from_hf_config, of_text
from quire.engine.checkpoints.adapter_tensors import AdapterTensors, changed, indices, open_tensors
from quire.engine.checkpoints.checkpoint_files import CheckpointFiles, open_files
from quire.engine.checkpoints.output_folder import output_folder
from quire.engine.config.merge_request import MergeRequest
from quire.engine.process import tool
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.model_files import TensorInfo, read_json

_VOCABULARY = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "vocab.txt")
_OF_TOKENIZER = (*_VOCABULARY, "tokenizer*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_SETTINGS = "tokenizer_config.json"


def run(request: MergeRequest) -> None:
    """Write the folder. It has its name only when it is complete. Raises `ConfigError` if a tensor of the adapter has
    changed, or the result has numbers that are not finite."""
    path, adapter = request.model.path, request.adapter.path
    with output_folder(request.out, path, "quire merge") as part:
        with open_tensors(request.adapter) as tensors:
            is_untied = _Merge(request, tensors).write(part)
        config = _config(read_json(path / "config.json"), request, is_untied=is_untied)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if adapter.is_dir():
            _copy_tokenizer(adapter, part)


def _copy_tokenizer(adapter: Path, out: Path) -> None:
    """Replace the base's chat templates, in whatever form, if the adapter has some, and likewise its tokenizer."""
    own = _files(adapter, _OF_TOKENIZER)
    settings = read_json(adapter / _SETTINGS) if adapter / _SETTINGS in own else {}
    if adapter / _SETTINGS in own and _files(adapter, _VOCABULARY):
        for file in _files(out, _OF_TOKENIZER):
            file.unlink()
    templates = _files(adapter, _TEMPLATES)
    if templates or settings.get("chat_template"):
        for file in _files(out, _TEMPLATES):
            file.unlink()
        if (out / _SETTINGS).exists():
            kept = {name: each for name, each in read_json(out / _SETTINGS).items() if name != "chat_template"}
            (out / _SETTINGS).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in (*own, *templates):
        target = out / file.relative_to(adapter)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [*dict.fromkeys(file for each in patterns for file in sorted(folder.glob(each)) if file.is_file())]


class _Merge:
    """The tensors of the merged checkpoint, one after another."""

    def __init__(self, request: MergeRequest, tensors: AdapterTensors) -> None:
        self._request, self._tensors = request, tensors
        self._files: CheckpointFiles = open_files(request.model.path, request.model.load_format)
        self._changes, self._biases = dict(request.spec.changes), defaultdict[str, list[LowRank]](list)
        for name, change in request.spec.changes.items():
            for each in change.low_rank:
                if each.bias is not None:
                    self._biases[request.bias_of(name)].append(each)

    def write(self, folder: Path) -> bool:
        """Write a file for each file of the base. Returns whether the head is no longer tied to the embedding."""
        request, shards = self._request, defaultdict[Path, list[tuple[str, TensorInfo]]](list)
        for needed, info in request.headers.items():
            if not request.is_tied or needed != request.head:
                shards[info.file].append((needed, info))
        is_untied = request.is_tied and not self._has_equal_head()
        if is_untied:
            embedding = request.headers[request.embedding]
            shards[embedding.file].append((request.head, request.untied_head))
        index, size = {}, 0
        with tqdm(total=len(request.headers), desc="merge", unit=" tensors", disable=None) as bar:
            for number, infos in enumerate(shards.values()):
                name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
                name = name if len(shards) > 1 else "model.safetensors"
                shapes = {info.name: (info.dtype, self._shape(needed, info)) for needed, info in infos}
                names = {info.name: needed for needed, info in infos}

                def tensor(stored: str, names: Mapping[str, str] = names) -> Tensor:
                    bar.update()
                    return self._merged(names[stored])

                size += write_tensors(folder / name, shapes, tensor)
                index.update(dict.fromkeys(shapes, name))
        if len(shards) > 1:
            content = {"metadata": {"total_size": size}, "weight_map": index}
            (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
        return is_untied

    def _has_equal_head(self) -> bool:
        """Whether a tied head stays equal to the embedding."""
        request = self._request
        if self._changes.get(request.head) == self._changes.get(request.embedding):
            return True
        return request.head in self._changes and self._merged(request.head).equal(self._merged(request.embedding))

    def _info(self, needed: str) -> TensorInfo:
        """The tensor of the base that a tensor is made of."""
        request = self._request
        return request.headers[request.embedding if request.is_tied and needed == request.head else needed]

    def _shape(self, needed: str, info: TensorInfo) -> tuple[int, ...]:
        change = self._changes.get(needed)
        return info.shape if change is None or change.replacement is None else change.shape

    def _merged(self, needed: str) -> Tensor:
        """The tensor with its changes, in the type that it is stored in."""
        info = self._info(needed)
        tensor = self._files.view(info)
        if needed in self._changes:
            tensor = changed(tensor, self._changes[needed], self._tensors).reshape(self._shape(needed, info))
        for each in self._biases.get(needed, ()):
            assert each.bias is not None
            tensor, own = tensor.clone(), indices(each.rows)
            tensor[own] = (tensor[own].float() + each.scaling * self._tensors[each.bias][:, 0].float()).to(tensor.dtype)
        if (needed in self._changes or needed in self._biases) and not tensor.isfinite().all():
            raise ConfigError(f"{self._request.adapter.path}: {needed} would have values that are NaN or infinite")
        return tensor


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], tensor: Callable[[str], Tensor]
) -> int:
    """Write a file of safetensors with tensors of these types and shapes, one after another. Returns their bytes.

    Format: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, (_, shape) in shapes.items():
            own = tensor(name)
            assert own.shape == shape
            stream.write(own.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return end


_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _config(config: dict[str, Any], request: MergeRequest, *, is_untied: bool) -> dict[str, Any]:
    """config.json of the result."""
    spec, before = request.spec, request.model.architecture.vocab_size

    def updated(part: dict[str, Any]) -> dict[str, Any]:
        own = {name: updated(each) if isinstance(each, dict) else each for name, each in part.items()}
        if spec.vocab_size is not None and own.get("vocab_size") == before:
            own["vocab_size"] = spec.vocab_size
        return own | (dict.fromkeys(own.keys() & {"tie_word_embeddings", "tie_embedding"}, False) if is_untied else {})

    own = updated(config)
    own |= {"tie_word_embeddings": False} if is_untied else {}
    if is_untied:
        text = of_text(own | {"architectures": [request.model.architecture.name]})
        assert not from_hf_config(text, media=False).tie_embeddings  # else the head that was written is not read
    return own


if __name__ == "__main__":
    tool.main(run)
