"""Packed weights on disk (`--packed-cache`): the next start maps them, instead of reading and packing the checkpoint.

A rank's file has the parameters and packed weights of its model, in the format of safetensors and aligned to cache
lines. It is mapped privately: processes share its pages, and one that writes to a page gets its own copy. Its name is a
hash of everything that its content depends on, so that a file is never outdated, only unused: the least recently used
files are removed when the folder would grow beyond its limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor, nn

from quire.engine.cluster import handshake
from quire.engine.config.engine_config import EngineConfig
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository import model_files
from quire.kernels import disk, dispatch, isa, packed_state

logger = logging.getLogger(__name__)

_AUTO_BYTES, _AUTO_SHARE = 32 << 30, 4
"""`--packed-cache auto`: the folder holds at most this many bytes, and at most the disk's free space divided by
this."""
_AUTO_MIN_BYTES = 64 << 20
"""With auto, smaller models are not kept: packing takes no time."""
_ALIGNMENT, _PAGE = 64, 4096
"""Alignment of tensors, and of the first tensor, in bytes."""
_NICE = 10
"""Niceness of the thread that writes."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"} | {
    torch.int32: "I32",
    torch.int64: "I64",
}
"""safetensors' names of types."""
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class PackedCache:
    """The file of a rank."""

    def __init__(self, folder: Path, key: str, limit: float | Literal["auto"], num_ranks: int) -> None:
        """`limit` is the folder's limit in GiB, for the files of `num_ranks` ranks."""
        self._folder, self._file, self._limit, self._num_ranks = folder, folder / f"{key}.safetensors", limit, num_ranks

    @staticmethod
    def of(config: EngineConfig, rank: int) -> PackedCache | None:
        """The cache of a rank; None if it must not have one."""
        model, parallel = config.model, config.parallel
        moves_experts = parallel.experts is not None and parallel.experts.enable_eplb
        if model.packed_cache == 0 or moves_experts:
            return None
        try:
            return PackedCache(disk.folder("packed"), _key(config, rank), model.packed_cache, parallel.ranks_per_node)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
            logger.warning("packed weights are not kept: %s; set QUIRE_PACKED_CACHE, or --packed-cache off", error)
            return None

    def restore(self, model: nn.Module) -> bool:
        """Give a model that has been built the weights in the file. Returns False if there is none that can be used."""
        try:
            disk.check_owner(self._folder, self._file)
            _assign(model, *_read(self._file))
        except FileNotFoundError:
            return False
        except (OSError, ConfigError, RuntimeError, ValueError, LookupError, TypeError) as error:
            logger.warning("packed weights are not used, and made again: %s: %s", self._file, error)
            return False
        with contextlib.suppress(OSError):  # as where it is read-only
            os.utime(self._file)
        return True

    def save(self, model: nn.Module) -> threading.Thread | None:
        """Write the weights of a loaded model, if the limit allows it, in the thread that is returned."""
        tensors: list[Tensor] = []
        try:
            plain = json.dumps(_to_plain(model, tensors))
        except packed_state.NotPlain:
            return None
        thread = threading.Thread(target=self._save, args=(plain, tensors), daemon=True, name="packed-cache")
        thread.start()
        return thread

    def _save(self, plain: str, tensors: list[Tensor]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        size = sum(_padded(tensor.nbytes) for tensor in tensors)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk.check_owner(self._folder)
            limit = self._max_bytes(size)
            if size * self._num_ranks > limit:
                return
            temporary = self._file.with_suffix(".tmp")
            with _locked(self._folder), _exclusive(temporary) as stream:
                if stream is not None:
                    _remove_unused(self._folder, limit - size)
                    _write(stream, plain, tensors)
                    os.replace(temporary, self._file)
        except OSError as error:
            logger.warning(
                "packed weights cannot be kept in %s: %s; set QUIRE_PACKED_CACHE to another folder, or use "
                "--packed-cache off",
                self._folder,
                error.strerror or error,
            )

    def _max_bytes(self, size: int) -> int:
        """The limit of the folder, for a file of `size` bytes that is to be added."""
        if self._limit != "auto":
            return int(self._limit * 2**30)
        if size < _AUTO_MIN_BYTES:
            return 0
        free = shutil.disk_usage(self._folder).free + sum(status.st_size for _, status in _files(self._folder))
        return min(_AUTO_BYTES, free // _AUTO_SHARE)


def _key(config: EngineConfig, rank: int) -> str:
    """A hash of the checkpoint, of the rank's part of it, and of everything that determines the layout."""
    model, parallel = config.model, config.parallel
    place = (parallel.tensor_parallel_size, parallel.tp_rank_of(rank), parallel.stages[parallel.stage_of(rank)])
    experts = (parallel.experts, parallel.replicas, parallel.replica) if parallel.experts is not None else None
    loaded = (
        model.architecture,
        model.dtype,
        model.stored_dtype,
        model.quantization,
        model.tower_quantization,
        model.quantized,
        model.load_format,
    )
    hashes = sorted(handshake.fingerprint(model.path).items())
    # In seconds, as layers of images keep them.
    times = [int((model.path / name).stat().st_mtime) for name, _ in hashes]
    digest = hashlib.sha256(repr((place, experts, loaded, model.position_len, model.pooling is None)).encode())
    digest.update(repr((hashes, times, _platform())).encode())
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _platform() -> str:
    """The properties of this machine that determine the layout of packed weights."""
    chosen = (isa.chosen().name, isa.has("amx_tile"))
    return repr((chosen, sorted(dispatch.PLATFORMS), torch.backends.mkldnn.is_available()))  # type: ignore[no-untyped-call]


def _sources() -> list[Path]:
    """The code that determines what a file contains."""
    engine = Path(__file__).parents[1]
    rooms = [engine / room for room in ("architecture", "checkpoints", "layers", "models")]
    folders = [*rooms, Path(disk.__file__).parent]
    return sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cpp"))


def _to_plain(model: nn.Module, tensors: list[Tensor]) -> Any:
    """The parameters and packed weights of a model as JSON, with the indices of their tensors, which are appended."""
    parameters = {name: packed_state.to_plain(weight.data, tensors) for name, weight in model.named_parameters()}
    packed = {
        path: {
            name: packed_state.to_plain(value, tensors)
            for name, value in vars(module).items()
            if isinstance(value, packed_state.Packed)
        }
        for path, module in model.named_modules()
    }
    return {"parameters": parameters, "packed": {path: values for path, values in packed.items() if values}}


def _assign(model: nn.Module, plain: Any, tensors: list[Tensor]) -> None:
    """Give the model the tensors. Raises `ValueError` and others, and changes nothing, if they are of another model."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    values = {name: packed_state.from_plain(value, tensors) for name, value in plain["parameters"].items()}
    if values.keys() != parameters.keys():
        raise ValueError("the parameters are those of another model")
    for name, value in values.items():
        if value.dtype != parameters[name].dtype or (value.numel() and value.shape != parameters[name].shape):
            raise ValueError(f"{name} has another shape or type")
    packed = [
        (modules[path], name, packed_state.from_plain(value, tensors))
        for path, its_values in plain["packed"].items()
        for name, value in its_values.items()
    ]
    for name, value in values.items():
        parameters[name].data = value
    for module, name, product in packed:
        setattr(module, name, product)


def _read(file: Path) -> tuple[Any, list[Tensor]]:
    """Map a file. Raises `ConfigError`, `ValueError` and others if it is damaged."""
    header = model_files.read_header(file)
    metadata = header.pop("__metadata__")
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + struct.unpack("<Q", mapped[:8])[0]
    words = torch.frombuffer(mapped, dtype=torch.int64, offset=start)
    # Reads all pages, which the first step would do otherwise.
    if metadata["checksum"] != _checksum(metadata["model"], int(words.sum())):
        raise ValueError("the content is damaged")
    tensors = []
    for number in range(int(metadata["tensors"])):
        entry = header[str(number)]
        shape, dtype = entry["shape"], _TYPES[entry["dtype"]]
        count, offset = int(np.prod(shape, dtype=np.int64)), start + entry["data_offsets"][0]
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        )
        tensors.append(flat.view(shape))
    return json.loads(metadata["model"]), tensors


def _write(stream: BinaryIO, plain: str, tensors: list[Tensor]) -> None:
    """Write a file; returns when it is on the disk."""
    arrays = [tensor.detach().contiguous().flatten().view(torch.uint8).numpy() for tensor in tensors]
    sums = [_sum(array) for array in arrays]
    metadata = {"model": plain, "tensors": str(len(tensors)), "checksum": _checksum(plain, sum(sums))}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for number, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        end = offset + len(array)
        header[str(number)] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset += _padded(len(array))
        if end < offset:  # the format has no gaps
            header[f"padding {number}"] = {"dtype": "U8", "shape": [offset - end], "data_offsets": [end, offset]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % _PAGE)
    stream.truncate(0)
    stream.write(struct.pack("<Q", len(encoded)) + encoded)
    for array in arrays:
        stream.write(array.data)
        stream.write(bytes(_padded(len(array)) - len(array)))
    stream.flush()
    os.fsync(stream.fileno())


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _sum(array: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """The sum of the bytes as 64-bit words, with zeros appended."""
    whole = len(array) - len(array) % 8
    return int(array[:whole].view(np.int64).sum()) + int.from_bytes(array[whole:].tobytes(), "little")


def _checksum(plain: str, total: int) -> str:
    return f"{(zlib.crc32(plain.encode()) + total) % 2**64:x}"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[BinaryIO | None]:
    """Open a temporary file to write, None if another process has it open; it is removed if it still exists at the end.

    A file that a process has left behind is not locked.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as stream:

        def is_own() -> bool:
            try:
                return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
            except FileNotFoundError:
                return False

        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            yield stream if is_own() else None  # the other process may have finished in this moment
        finally:
            if is_own():
                path.unlink()


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files in the folder, and their properties."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # removed in this moment
            found.append((path, path.stat()))
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes room and writes, so that the files together stay within the limit."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, however it ends
        yield
    finally:
        os.close(lock)


def _remove_unused(folder: Path, size: int) -> None:
    """Remove files that killed processes have left behind, and the least recently used files until the others have at
    most `size` bytes."""
    files = []
    for path, status in _files(folder):
        if path.suffix == ".tmp":
            with _exclusive(path):
                """Removes it, unless a process is writing it."""
        elif path.suffix == ".safetensors":
            files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, its_size, path in sorted(files):
        if total <= size:
            break
        path.unlink(missing_ok=True)
        total -= its_size
