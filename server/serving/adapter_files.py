"""The files of adapters: found, copied, digested and checked in a process of their own, which nothing waits for.

The copy of an adapter is a folder with its digest as the name, below one that all processes of a server share. What is
written to the adapter's own path later cannot reach requests that use it. A process that needs a copy holds a shared
lock on it, so that copies without one can be removed when the disk budget is spent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.engine.architecture.adapter_spec import AdapterSpec
from quire.engine.architecture.adapters.base import Base
from quire.engine.config.adapter_base import adapter_base
from quire.engine.config.engine_config import ModelConfig
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError, reason_of
from quire.engine.repository import adapter_folder, tokenizer_files
from quire.engine.repository.adapter_folder import CONFIG, WEIGHTS, AdapterFolder
from quire.engine.repository.model_files import check_regular, read_json
from quire.server.text.chat_template import ADDITIONAL_TEMPLATES, ChatTemplate, find_templates

_SETTINGS = "tokenizer_config.json"
_OF_TEXT = ("chat_template.jinja", "chat_template.json", _SETTINGS)
_OF_TOKENS = (_SETTINGS, "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
_MAX_BYTES = 2**26
"""Of a file of a tokenizer, which may have a large vocabulary."""
MAX_TEMPLATE_CHARACTERS = 2**17
"""Of an adapter's chat template, which all API processes keep."""
_LOCK, _UNFINISHED, _GGUF = "lock", "part-", "adapter.gguf"


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter comes from."""

    path: str
    """A folder or a GGUF file, or a Hugging Face repository."""
    root: str | None = None
    """The folder that all files must be in; None: they may be anywhere."""
    is_repository: bool = False
    """It is a Hugging Face repository."""
    max_download: int | None = None
    """Bytes of a repository that a client has named; None: the operator has named it."""
    is_gguf: bool = False
    """It is a GGUF file, whatever its name."""


@dataclass(frozen=True)
class OpenedAdapter:
    """What is known of an adapter after all of its bytes have been read."""

    ref: AdapterRef
    rank: int
    invocation_tokens: tuple[int, ...]
    chat_template: str
    """Its own; empty: the base's."""


@dataclass(frozen=True)
class AdapterQuestion:
    """Open these adapters; without `reads_weights`, only check their headers and settings."""

    sources: tuple[AdapterSource, ...]
    folder: str
    """For copies."""
    max_bytes: int
    """Of all copies together."""
    reads_weights: bool = True
    download_dir: str | None = None


Opened = OpenedAdapter | None | str
"""What the answer has for each source; None: it was only checked; a text: the error."""


def make(model: ModelConfig) -> Callable[[bytes], bytes]:
    """Return the function that answers an `AdapterQuestion`, pickled, with a list of `Opened`."""
    base, architecture = adapter_base(model), model.architecture.name
    settings = model.tokenizer / _SETTINGS
    own = find_templates(model.tokenizer, read_json(settings) if settings.exists() else {}).get("default", "")
    check_tokens = partial(_check_tokens, model.tokenizer, tokenizer_files.added_tokens(model.tokenizer))

    def answer(question: bytes) -> bytes:
        asked: AdapterQuestion = pickle.loads(question)
        copies = re.compile(re.escape(asked.folder) + r"/[^/:]+")  # users know only the original
        found: list[Opened] = []
        for source in asked.sources:
            path = Path(source.path)
            try:
                path = _located(source, asked.download_dir)
                opened = _open(path, source, asked, base, architecture, check_tokens)
                is_own = opened is not None and opened.chat_template == own
                found.append(replace(opened, chat_template="") if opened is not None and is_own else opened)
            except ConfigError as error:
                found.append(source.path.join(copies.split(str(error).replace(str(path), source.path))))
            except OSError as error:
                found.append(f"{source.path}: cannot be read: {reason_of(error)}")
        return pickle.dumps(found)

    return answer


def _located(source: AdapterSource, download_dir: str | None) -> Path:
    """Where the files of an adapter are."""
    if source.is_repository:
        if (limit := source.max_download) is not None and (size := adapter_folder.size_of(source.path, None)) > limit:
            sizes = f"{size / 2**30:.3g} GiB, more than the {limit / 2**30:g} GiB of --lora-disk-gb"
            raise ConfigError(f"{source.path}: its files have {sizes}")
        return adapter_folder.locate(source.path, None, download_dir, is_repository=True)
    return Path(source.path).expanduser().absolute()


def _open(
    path: Path,
    source: AdapterSource,
    asked: AdapterQuestion,
    base: Base,
    architecture: str,
    check_tokens: Callable[[Path, str | None], None],
) -> OpenedAdapter | None:
    """Read an adapter's copy, or the adapter itself if there is no space for a copy."""
    files = _files(path, is_gguf=source.is_gguf)
    for file in (path, *files.values()):
        if source.root is not None and not is_below(file, source.root):
            raise ConfigError(f"{source.path}: is not below --lora-root, or {file.name} in it is not")
    has_name = not source.is_gguf or path.suffix == ".gguf"
    """Whether it can be opened by its own name."""
    if has_name:  # nothing is copied for what the headers already exclude
        _spec(adapter_folder.open_adapter(path, reads_weights=False), base, architecture)
        check_tokens(path, source.root)
        if not asked.reads_weights:
            return None
    for file in files.values():
        check_regular(file)
    shared = SharedFolder(asked.folder)
    with shared.space(sum(file.stat().st_size for file in files.values()), asked.max_bytes) as copy:
        problem = f"more than the {asked.max_bytes / 2**30:g} GiB of --lora-disk-gb" if copy is None else ""
        if copy is not None:
            try:
                for name, file in files.items():
                    shutil.copyfile(file, copy / name)
            except OSError as error:
                copy, problem = None, reason_of(error)
        if copy is None and not has_name:
            raise ConfigError(f"{source.path}: cannot be copied: {problem}")
        folder = adapter_folder.open_adapter(path if copy is None else copy)
        spec = _spec(folder, base, architecture)
        paths = [] if copy is None else [str(shared.keep(copy, folder.digest))]
    return OpenedAdapter(
        AdapterRef(folder.digest, (*paths, str(path)) if has_name else tuple(paths)),
        spec.max_rank,
        spec.invocation_tokens,
        _chat_template(path, source.root),
    )


def _spec(folder: AdapterFolder, base: Base, architecture: str) -> AdapterSpec:
    spec = folder.spec(base, architecture)
    if spec.vocab_size is not None:
        raise ConfigError(f"{folder.path}: it adds tokens to the vocabulary, which is not supported; use quire merge")
    return spec


def _check_tokens(tokenizer: Path, known: Mapping[str, int], folder: Path, root: str | None) -> None:
    """Refuse an adapter whose tokenizer has tokens that the base's, which has the added tokens `known`, does not have:
    an embedding often has room for them, but prompts are tokenized by the base's."""
    if not folder.is_dir() or not known:
        return
    _check_files((folder / name for name in _OF_TOKENS), root)
    for text, number in tokenizer_files.added_tokens(folder).items():
        if known.get(text) != number and tokenizer_files.token_id(tokenizer, text) != number:
            raise ConfigError(
                f"{folder}: its tokenizer has the token {text!r} with the id {number}, which the base's does not have; "
                "this is not supported; use quire merge"
            )


def _chat_template(folder: Path, root: str | None) -> str:
    """The adapter's own chat template; empty: it has none."""
    if not folder.is_dir():
        return ""
    _check_files((*(folder / name for name in _OF_TEXT), *(folder / ADDITIONAL_TEMPLATES).glob("*.jinja")), root)
    settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).exists() else {}
    template = find_templates(folder, settings).get("default", "")
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(f"{folder}: its chat template has more than {MAX_TEMPLATE_CHARACTERS} characters")
    if template:
        try:
            template.encode()
            ChatTemplate(template, {})
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        except UnicodeEncodeError as error:
            raise ConfigError(f"{folder}: the chat template is not valid Unicode: {error}") from None
    return template


def is_below(path: str | Path, root: str) -> bool:
    """Whether a path leads to a place below a folder, through whatever links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _check_files(files: Iterable[Path], root: str | None) -> None:
    for file in files:
        if file.exists():
            check_regular(file)
            if file.stat().st_size > _MAX_BYTES:
                raise ConfigError(f"{file}: larger than {_MAX_BYTES >> 20} MiB")
            if root is not None and not is_below(file, root):
                raise ConfigError(f"{file}: is not below --lora-root")


def _files(path: Path, *, is_gguf: bool) -> dict[str, Path]:
    """The files of an adapter by the names of their copies. What is missing, `open_adapter` reports."""
    if is_gguf or path.suffix == ".gguf":
        return {_GGUF: path}
    if not (path / WEIGHTS).exists() and len(found := sorted(path.glob("*.gguf"))) == 1:
        return {_GGUF: found[0]}
    return {name: path / name for name in (CONFIG, WEIGHTS) if (path / name).exists()}


class SharedFolder:
    """The copies of adapters."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def of(self, digest: bytes) -> Path:
        """Where the copy of an adapter is, if there is one."""
        return self.path / digest.hex()

    def hold(self, digest: bytes) -> int | None:
        """Keep a copy until `release` gets the result; None: there is no copy."""
        with contextlib.suppress(FileNotFoundError):
            copy = os.open(self.of(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(copy, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(copy).st_nlink:
                    os.utime(copy)  # of the copies without a lock, the one that was used last is removed last
                    return copy
            os.close(copy)
        return None

    def drop(self, digest: bytes) -> None:
        """Remove a copy, unless a process holds it."""
        with contextlib.suppress(OSError), self._locked():  # not while `keep` finds it
            _remove(self.of(digest))

    @contextlib.contextmanager
    def space(self, size: int, max_bytes: int) -> Iterator[Path | None]:
        """A new folder for a copy with so many bytes, after removing others that nobody holds; None: there is no space
        for it. What is not kept is removed."""
        copy, lock = None, -1
        with self._locked():
            found = {each: _size_and_time(each) for each in self.path.iterdir()}
            used = {each: size for each, (size, _) in found.items()}
            for each in sorted(used, key=lambda each: found[each][1]):
                if sum(used.values()) + size > max_bytes and _remove(each):
                    del used[each]
            if sum(used.values()) + size <= max_bytes:
                copy = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{size}-", dir=self.path))
                lock = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield copy
        finally:
            if copy is not None:
                shutil.rmtree(copy, ignore_errors=True)
                os.close(lock)

    def keep(self, copy: Path, digest: bytes) -> Path:
        """Let a complete copy be the adapter's, unless there is one; returns its path."""
        with self._locked():
            if not (kept := self.of(digest)).exists():
                copy.rename(kept)
        return kept

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Bytes and time of the last use of a copy, which may be removed meanwhile. One that is being made has the bytes in
    its name."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if folder.name.startswith(_UNFINISHED):
            return int(folder.name.split("-")[1]), folder.stat().st_mtime
        return sum(each.stat().st_size for each in os.scandir(folder)), folder.stat().st_mtime
    return 0, 0.0


def _remove(folder: Path) -> bool:
    """Remove a copy that no process holds. Returns whether it is gone."""
    try:
        copy = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except NotADirectoryError:  # the lock
        return False
    try:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(copy)
