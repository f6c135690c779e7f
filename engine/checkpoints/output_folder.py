"""The folder of a model that is made of another one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.engine.process.tool import part_of
from quire.engine.protocol.errors import ConfigError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)$|.*\.index\.json$|\..*")


@contextmanager
def output_folder(out: Path, source: Path, command: str) -> Iterator[Path]:
    """A folder with the files of `source`, except its weights and config.json, that gets its name `out` when the block
    ends, and is removed if the block fails. Raises `ConfigError` if it cannot be written."""
    part = part_of(out)
    try:
        part.mkdir()
    except FileExistsError:
        raise ConfigError(f"{part} exists: another `{command}` writes it, or was killed; delete it then") from None
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        shutil.copytree(
            source, part, ignore=lambda folder, names: _left_out(Path(folder) == source, names), dirs_exist_ok=True
        )
        yield part
        part.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{out}: cannot be written: {error.strerror or error}")


def _left_out(is_top: bool, names: list[str]) -> list[str]:
    if not is_top and "config.json" in names:
        return []  # a module of its own, such as a projection after pooling
    return [name for name in names if _WEIGHTS.match(name) or name in ("config.json", "adapter_config.json")]
