"""Files of packed weights: their contents, the cases in which they are not used, and the number that is kept."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from quire.engine.checkpoints import packed_cache
from quire.engine.checkpoints.packed_cache import PackedCache
from quire.engine.layers.linear import Linear
from quire.engine.layers.weight import Weight, whole
from quire.kernels import Quantization, packed_state
from quire.kernels.linear import Int4Linear

LIMIT = 1.0


class Model(nn.Module):
    """A packed layer, whose weight is empty then, and parameters of other types and odd sizes."""

    def __init__(self, seed: int = 0, features: int = 40, quantization: Quantization | None = "int4") -> None:
        super().__init__()
        self.linear = Linear()
        self.linear.weight = Weight((features, 64), whole(features, 64))
        self.norm = Weight((7,), whole(7))
        self.norm.data = self.norm.data.bfloat16()
        self.scale = Weight((3, 5), whole(3, 5))
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.data.normal_(generator=generator)
        self.linear.pack(quantization)

    @property
    def values(self) -> list[Tensor]:
        product = self.linear._product
        assert isinstance(product, Int4Linear)
        return [*packed_state.tensors_of(product), *(weight.data for weight in self.parameters())]


def put(cache: PackedCache, model: nn.Module) -> None:
    thread = cache.save(model)
    assert thread is not None
    thread.join()


def equal(one: Model, other: Model) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", "key", LIMIT, 1)


def test_a_model_gets_the_weights_that_another_one_had(cache: PackedCache, tmp_path: Path) -> None:
    assert not cache.restore(Model())
    saved, model = Model(1), Model(2)
    put(cache, saved)
    (file,) = (tmp_path / "packed").iterdir()
    before = file.read_bytes()
    assert cache.restore(model)
    assert equal(model, saved)
    x = torch.randn(2, 64)
    assert torch.equal(model.linear.product(x), saved.linear.product(x))
    assert all(value.data_ptr() % 64 == 0 for value in model.values if value.numel())
    # Experts move between ranks: changes stay in this process.
    for value in model.values:
        value.fill_(1)
    assert file.read_bytes() == before
    with safe_open(file, framework="pt") as readable:
        assert any(torch.equal(readable.get_tensor(name), saved.norm) for name in readable.keys())  # noqa: SIM118


def damage(file: Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    match kind:
        case "cut":
            content = content[:-100]
        case "empty":
            content = bytearray()
        case "data":
            content[header + 100] ^= 1
        case "zeros":
            content[header:] = bytes(len(content) - header)
        case "header":
            at = content.index(b"_features") + 14
            content[at] ^= 1
        case "no header":
            content[8:header] = b"{}".ljust(header - 8)
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["cut", "empty", "data", "zeros", "header", "no header"])
def test_a_damaged_file_is_replaced(
    cache: PackedCache, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, Model(1))
    (file,) = (tmp_path / "packed").iterdir()
    damage(file, kind)
    model = Model(2)
    assert not cache.restore(model)
    assert equal(model, Model(2))
    assert "packed weights are not used, and made again" in caplog.text
    put(cache, model)
    assert cache.restore(found := Model(3))
    assert equal(found, model)


def test_the_weights_of_another_model_are_not_used(cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    put(cache, Model(1))
    other = Model(2)
    other.scale.data = other.scale.data[:2]
    assert not cache.restore(other)
    assert "scale has another shape or type" in caplog.text
    assert equal(other, other)
    del other.scale
    assert not cache.restore(other)


def test_what_others_may_write_is_not_used(
    cache: PackedCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, Model())
    (file,) = (tmp_path / "packed").iterdir()
    file.chmod(0o622)
    assert not cache.restore(Model())
    file.chmod(0o600)
    (tmp_path / "packed").chmod(0o777)
    assert not cache.restore(Model())
    assert caplog.text.count("can be written by others") == 2
    put(cache, Model())
    assert "packed weights cannot be kept" in caplog.text


def test_weights_in_a_format_of_onednn_are_not_kept(cache: PackedCache) -> None:
    model = Model(quantization=None)
    if model.linear._product is None or not hasattr(model.linear._product, "_weight"):
        pytest.skip("this build of torch has no oneDNN")
    assert cache.save(model) is None


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_the_files_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    put(PackedCache(tmp_path, "0", LIMIT, 1), Model(features=1024))
    size = (tmp_path / "0.safetensors").stat().st_size
    limit = 2.5 * size / 2**30
    caches = [PackedCache(tmp_path, str(number), limit, 1) for number in range(4)]
    put(caches[1], Model(features=1024))
    for at, number in enumerate((0, 1)):
        os.utime(tmp_path / f"{number}.safetensors", (at, at))
    assert caches[0].restore(Model(features=1024))
    put(caches[2], Model(features=1024))
    assert files(tmp_path) == {"0", "2"}
    # More than the limit, alone or with the other ranks of the model: nothing is removed for it.
    put(PackedCache(tmp_path, "3", limit, 1), Model(features=8192))
    put(PackedCache(tmp_path, "3", limit, 4), Model(features=1024))
    put(PackedCache(tmp_path, "3", "auto", 1), Model(features=1024))  # too small to be worth it
    assert files(tmp_path) == {"0", "2"}


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    left = tmp_path / "killed.tmp"
    left.write_text("by a process that was killed")
    with (tmp_path / "key.tmp").open("w") as stream:
        stream.write("by another process")
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        put(PackedCache(tmp_path, "key", LIMIT, 1), Model())
        assert (tmp_path / "key.tmp").read_text() == "by another process"
        put(PackedCache(tmp_path, "other", LIMIT, 1), Model())
        assert files(tmp_path) == {"key", "other"}
    put(PackedCache(tmp_path, "key", LIMIT, 1), Model())
    assert {path.name for path in tmp_path.iterdir()} == {"key.safetensors", "other.safetensors"}


def test_a_full_disk_is_a_warning(cache: PackedCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        put(cache, Model())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--packed-cache off" in caplog.text
    assert "File too large" in caplog.text
    assert not list((tmp_path / "packed").iterdir())


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("quire").propagate = True
    caplog.set_level(logging.WARNING)


def test_a_file_depends_on_all_code_that_determines_its_content() -> None:
    """Families determine names and orders of rows, and kernels the packing of layers."""
    names = {f"{path.parent.name}/{path.name}" for path in packed_cache._sources()}
    needed = {"families/llama.py", "checkpoints/loader.py", "layers/linear.py", "models/decoder.py"}
    assert needed | {"cpu/matmul.cpp", "kernels/linear.py"} <= names
