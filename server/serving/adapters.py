"""The adapters that requests may name as their model.

What a name means is the same in all API processes: one of them asks their parent for a change, and it counts when all
of them know it. A request has the weights that the name meant when it arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.config.engine_config import ModelConfig
from quire.engine.process.runtime_folder import RuntimeFolder
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.engine.protocol.supervision import NamedAdapter
from quire.server.client.adapter_metrics import AdapterMetrics
from quire.server.client.output_stream import EngineUnavailable
from quire.server.config.server_options import LORA_DISK_GB, AdapterOptions
from quire.server.serving.adapter_files import (
    AdapterQuestion,
    AdapterSource,
    Opened,
    OpenedAdapter,
    SharedFolder,
    is_below,
    make,
)
from quire.server.text.adapter import RequestAdapter
from quire.server.text.sandbox import Sandbox, SandboxFailed, SandboxStopped

Change = Callable[[str, NamedAdapter | None, NamedAdapter | None], Awaitable[bool]]
"""Asks for another meaning of a name, given the name, what it means now, and what it should mean. Returns whether that
is so, and not another one by now; then all API processes know."""
NOT_ENABLED = "adapters (LoRA) are not enabled; start the server with --enable-lora (in Python: enable_lora=True)"
MAX_ADAPTERS = 4096
"""Names of adapters."""
MAX_RESOLVED = 2048
"""Names beyond which requests add no further ones, so that operators always can."""
MAX_NAME = 200
"""Characters of a name."""

_OPEN_SECONDS = 600.0
"""Processor time for reading an adapter."""
_OPEN_MEMORY = 2**32
"""Address space, most of which the threads of a download only reserve."""
_NICENESS = 10
_OPENED_AT_ONCE = 2
"""Of each kind: those of requests hold up no operator, and downloads no files."""
_DOWNLOAD_SECONDS = 600.0
"""Time for downloading and reading a repository that a client has named."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/(?!\.+\Z)[\w.-]+", re.ASCII)
_MISSING_SECONDS = 30.0
"""Time for which an adapter without a name, or a repository, that cannot be used is not tried again for requests."""
_MAX_KEPT = 256
"""Adapters by path, or repositories, that are remembered."""
_SETTLED_SECONDS = 2.0
"""Age of a change of a file after which the times of the file tell every further one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSettings:
    """Where adapters may come from, and where copies of them are."""

    base_names: tuple[str, ...] = ()
    root: str | None = None
    """The folder of adapters that clients may load."""
    resolver: str = "off"
    """See `--lora-resolver`."""
    max_bytes: int = int(LORA_DISK_GB * 2**30)
    """Of all copies together."""
    folder: str = ""
    """The folder of the copies; empty: this process has one of its own."""
    download_dir: str | None = None
    uses_templates: bool = True
    """Whether adapters have their own chat templates; otherwise all have the server's (`--chat-template`)."""

    @staticmethod
    def of(
        options: AdapterOptions,
        base_names: Sequence[str],
        folder: str = "",
        download_dir: str | None = None,
        chat_template: str | None = None,
    ) -> AdapterSettings:
        """Return the settings of the command line; `chat_template` is `--chat-template`."""
        return AdapterSettings(
            tuple(base_names),
            None if options.lora_root is None else os.path.abspath(options.lora_root),
            options.lora_resolver,
            int(options.lora_disk_gb * 2**30),
            folder,
            download_dir,
            chat_template is None,
        )


class AdapterRegistry:
    """The adapters, as an API process knows them. All methods run on its event loop."""

    def __init__(
        self,
        model: ModelConfig,
        settings: AdapterSettings,
        prepare: Callable[[AdapterRef, bool], Awaitable[str]],
        pin: Callable[[list[bytes]], None],
        *,
        is_enabled: bool,
        metrics: AdapterMetrics,
        change: Change | None = None,
    ) -> None:
        """`prepare` lets the replicas read an adapter, and keep it in memory if that is true, and returns the error;
        `pin` tells them which ones to keep. Without `change`, this process is the only one that knows the names."""
        self.is_enabled = is_enabled
        metrics.is_named = lambda name: name in self._named
        self._settings, self._prepare, self._pin, self._metrics = settings, prepare, pin, metrics
        self._pinned: list[bytes] = []
        """What replicas were told to keep."""
        self._pinning: dict[object, bytes] = {}
        """Adapters of loads that have begun, which are pinned."""
        self._change: Change = self._change_here if change is None else change
        self._loop = asyncio.get_running_loop()
        self._named: dict[str, NamedAdapter] = {}
        self.version = 0
        """Changes whenever a name means something else."""
        self._uses: Counter[tuple[str, bytes]] = Counter()
        """Objects that refer to an adapter, by its name and digest."""
        self._unused: dict[tuple[str, bytes], list[asyncio.Future[None]]] = {}
        """Who waits until there are none."""
        self._held: dict[bytes, int] = {}
        """The locks of copies that are used, or that are the only files of an adapter with a name."""
        self._own_folder: RuntimeFolder | None = None
        self._sandbox = Sandbox(make, model, _OPEN_SECONDS, _OPEN_MEMORY, _NICENESS)
        self._slots: defaultdict[tuple[bool, bool], asyncio.Semaphore]
        self._slots = defaultdict(lambda: asyncio.Semaphore(_OPENED_AT_ONCE))
        """By whether a request has named the adapters, and whether some are repositories."""
        self._reading: dict[str, asyncio.Task[NamedAdapter | None]] = {}
        """Adapters that are read for the first request that names them."""
        self._known: OrderedDict[tuple[str, _Stamp], asyncio.Task[OpenedAdapter]] = OrderedDict()
        """Adapters that were opened by their paths, and the files at that time."""
        self._snapshots: dict[str, str] = {}
        """Where repositories are that were opened by their names: the Hub is asked once."""
        self._missing: OrderedDict[str, tuple[float, InvalidParameter]] = OrderedDict()
        """Names that cannot be used, until when they are not tried again, and why."""

    @property
    def named(self) -> Mapping[str, NamedAdapter]:
        """The adapters by name."""
        return self._named

    def check_enabled(self, param: str | None = "model") -> None:
        """Raise `InvalidParameter` if requests may have no adapters."""
        if not self.is_enabled:
            raise InvalidParameter(NOT_ENABLED, param)

    # --- of requests ----------------------------------------------------------------------------------------------

    async def open(self, path: str, name: str = "") -> RequestAdapter:
        """Open the adapter at a path, which needs no name. Raises `ConfigError`.

        The files are read again if they may have changed.
        """
        if not self.is_enabled:
            raise ConfigError(NOT_ENABLED)
        source = await asyncio.to_thread(self._source, path)
        key = source.path, await asyncio.to_thread(_Stamp.of, source.path)
        if (task := self._known.get(key)) is None:
            task = asyncio.create_task(self._open(source))
            if key[1].is_settled:
                self._known[key] = task
                while len(self._known) > _MAX_KEPT:
                    self._known.popitem(last=False)
        try:
            opened = await asyncio.shield(task)
        except ConfigError:
            self._known.pop(key, None)
            self._snapshots.pop(path, None)
            raise
        if source.is_repository:
            self._snapshots[path] = opened.ref.paths[-1]
        return self._use(name or path, path, opened)

    async def find(self, name: str) -> RequestAdapter | None:
        """Return the adapter with a name for a request, reading it if this is the first one; None: there is none.

        Raises `InvalidParameter` if it cannot be read.
        """
        if not self.is_enabled:
            return None
        while (named := self._named.get(name)) is None or named.ref is None:
            if (task := self._reading.get(name)) is None:
                task = self._reading[name] = asyncio.create_task(self._read(name))
                task.add_done_callback(lambda done: self._on_read(name, done))
            if await asyncio.shield(task) is None:
                return None
        return self._use(
            name, named.path, OpenedAdapter(named.ref, named.rank, named.invocation_tokens, named.chat_template)
        )

    def _on_read(self, name: str, task: asyncio.Task[NamedAdapter | None]) -> None:
        del self._reading[name]
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _read(self, name: str) -> NamedAdapter | None:
        """Read an adapter that has a name already, or find one."""
        old = self._named.get(name)
        source = await asyncio.to_thread(self._resolved, name) if old is None else self._source(old.path)
        if source is None:
            return None
        if (missing := self._missing.get(name)) is not None and time.monotonic() < missing[0]:
            raise missing[1]
        try:
            adapter = await self._opened(name, source, is_request=old is None)
        except ConfigError as error:
            text = str(error).replace(source.path, name)
            refusal = InvalidParameter(f"the adapter {name!r} cannot be used: {text}", "model")
            if source.is_repository or old is None:
                self._missing[name] = time.monotonic() + _MISSING_SECONDS, refusal
                while len(self._missing) > _MAX_KEPT:
                    self._missing.popitem(last=False)
            raise refusal from None
        new = self._describe(name, name if old is None else old.path, adapter, old)
        new = msgspec.structs.replace(new, is_pinned=old is not None and old.is_pinned)
        await self._change(name, old, new)  # or else another process was earlier
        return self._named.get(name)

    def _resolved(self, name: str) -> AdapterSource | None:
        """Where an adapter without a name is looked for. A path has only one name, and clients learn nothing of what is
        not below the root."""
        root, resolver = self._settings.root, self._settings.resolver
        if resolver == "off" or len(self._named) >= MAX_RESOLVED or not _is_valid(name) or not _is_plain(name):
            return None
        if root is not None and os.path.exists(path := os.path.join(root, name)) and is_below(path, root):
            return AdapterSource(path, root)
        if resolver == "hub" and _is_repository(name):
            return AdapterSource(name, is_repository=True, max_download=self._settings.max_bytes)
        return None

    # --- of operators ---------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check the headers and settings of adapters whose weights have not been read. Raises `ConfigError`."""
        unread = [named for named in self._named.values() if named.ref is None]
        sources = [self._source(named.path) for named in unread]
        for named, found in zip(unread, await self._ask(sources, reads_weights=False), strict=True):
            if isinstance(found, str):
                raise ConfigError(f"--lora-modules {named.name}={named.path}: {found}")

    async def load(
        self,
        name: str,
        path: str,
        *,
        in_place: bool = False,
        upload: str | None = None,
        parent: str = "",
        is_pinned: bool = False,
    ) -> NamedAdapter:
        """Load an adapter under a name; `upload` is the file of a GGUF adapter that was uploaded. Returns when every
        replica has read it. If it `is_pinned`, they keep it until the name means another one, or none. Raises
        `InvalidParameter`, and `EngineUnavailable` if a replica cannot read it now.
        """
        self.check_enabled("lora_name")
        if not _is_valid(name):
            text = f"lora_name: expected a name of at most {MAX_NAME} characters, without commas and spaces at its ends"
            raise InvalidParameter(text, "lora_name")
        if name in self._settings.base_names:
            raise InvalidParameter(f"lora_name: {name!r} is a name of the base model", "lora_name")
        if parent and parent not in self._settings.base_names:
            names = " or ".join(self._settings.base_names)
            text = f"base_model_name: {parent!r} is not the model of this server; use {names}"
            raise InvalidParameter(text, "base_model_name")
        if upload is not None:
            source = AdapterSource(upload, is_gguf=True)
        else:
            source = await asyncio.to_thread(self._allowed, path)
        begun, load, old = time.monotonic(), object(), self._free(name, in_place=in_place)
        try:
            adapter = await self._opened(name, source, load if is_pinned else None)
            while True:
                new = msgspec.structs.replace(self._describe(name, path, adapter, old, parent), is_pinned=is_pinned)
                if await self._change(name, old, new):
                    break
                old = self._free(name, in_place=in_place)
        except ConfigError as error:
            text = str(error).replace(source.path, path)
            raise InvalidParameter(f"the adapter cannot be loaded: {text}", "lora_path") from None
        finally:
            self._pinning.pop(load, None)
            self._tell_pinned()
        self._metrics.load(time.monotonic() - begun)
        logger.info("loaded the adapter %s from %s", ascii(name), ascii(path))
        return new

    def _free(self, name: str, *, in_place: bool) -> NamedAdapter | None:
        """Return what a name means that may mean something else from now on. Raises `InvalidParameter`."""
        old = self._named.get(name)
        if old is not None and not in_place:
            text = f"the lora adapter {name!r} has already been loaded; to load other weights, set load_inplace to true"
            raise InvalidParameter(text, "lora_name")
        if old is None and len(self._named) >= MAX_ADAPTERS:
            raise InvalidParameter(f"at most {MAX_ADAPTERS} adapters are supported; unload some", "lora_name")
        return old

    async def unload(self, name: str) -> bool:
        """Take the name from an adapter, and return when no request uses it; returns False if there is none."""
        self.check_enabled("lora_name")
        while (old := self._named.get(name)) is not None:
            if await self._change(name, old, None):
                logger.info("unloaded the adapter %s", ascii(name))
                return True
        return False

    def _allowed(self, path: str) -> AdapterSource:
        """Where a client may load an adapter from. Raises `InvalidParameter`."""
        root, is_hub = self._settings.root, self._settings.resolver == "hub"
        if is_hub and _is_repository(path) and not (root is not None and os.path.exists(os.path.join(root, path))):
            return AdapterSource(path, is_repository=True, max_download=self._settings.max_bytes)
        if root is None:
            text = "lora_path: this server loads adapters only from its command line; start it with --lora-root DIR"
            raise InvalidParameter(text, "lora_path")
        if "\0" in path:
            raise InvalidParameter("lora_path: has a null character", "lora_path")
        return AdapterSource(str(Path(root, path)), root)  # an absolute path stays what it is

    def _source(self, path: str) -> AdapterSource:
        """Where an adapter is that the operator has named, or that was found."""
        place = os.path.join(os.getcwd(), os.path.expanduser(path))  # the reading process's directory may be another
        if os.path.exists(place) or not _is_repository(path):
            return AdapterSource(place)
        if os.path.exists(snapshot := self._snapshots.get(path, "")):
            return AdapterSource(snapshot)
        return AdapterSource(path, is_repository=True)

    # --- what names mean ------------------------------------------------------------------------------------------

    def set(self, name: str, adapter: NamedAdapter | None) -> asyncio.Future[list[None]] | None:
        """Let a name mean another adapter, or none. Returns what to wait for until all requests have ended whose
        adapter has no name any more, with whatever weights; None: there are none, or they need not end."""
        self.version += 1
        old = self._named.get(name)
        if adapter is None:
            self._named.pop(name, None)
        else:
            self._named[name] = adapter  # where the old one was, in the list of models
            if adapter.ref is not None and len(adapter.ref.paths) == 1:
                self._hold(adapter.ref.digest)
        self._tell_pinned()
        if old is None or old.ref is None:
            return None
        self._release_copy(old.ref.digest)
        if adapter is not None or not (keys := [key for key in self._uses if key[0] == name]):
            return None
        waiting = [self._loop.create_future() for _ in keys]
        for key, unused in zip(keys, waiting, strict=True):
            self._unused.setdefault(key, []).append(unused)
        return asyncio.gather(*waiting)

    def _tell_pinned(self) -> None:
        """Let replicas know what to keep, if that has changed."""
        named = [each.ref.digest for each in self._named.values() if each.ref is not None and each.is_pinned]
        pinned = [*dict.fromkeys((*named, *self._pinning.values()))]
        if pinned != self._pinned:
            self._pinned = pinned
            self._pin(pinned)

    async def _change_here(self, name: str, old: NamedAdapter | None, new: NamedAdapter | None) -> bool:
        """The change of a process that is the only one."""
        if self._named.get(name) != old:
            return False
        if (unused := self.set(name, new)) is not None:
            await unused
        return True

    @staticmethod
    def _describe(
        name: str, path: str, adapter: RequestAdapter, old: NamedAdapter | None, parent: str = ""
    ) -> NamedAdapter:
        created = int(time.time()) if old is None else old.created
        parent = parent or (old.parent if old is not None else "")
        facts = adapter.ref, adapter.rank, adapter.invocation_tokens, parent, adapter.chat_template
        return NamedAdapter(name, path, created, *facts)

    # --- files ----------------------------------------------------------------------------------------------------

    async def _opened(
        self, name: str, source: AdapterSource, pinning: object = None, *, is_request: bool = False
    ) -> RequestAdapter:
        """Open an adapter, and let all replicas read it. `pinning` is the load for which they keep it. Raises
        `ConfigError`, and `EngineUnavailable`."""
        path = source.path
        try:
            adapter = self._use(name, path, await self._open(source, is_request=is_request))
            path = adapter.ref.paths[-1]  # of an upload, it is a copy
            if pinning is not None:
                self._pinning[pinning] = adapter.ref.digest
                self._tell_pinned()
            if error := await self._prepare(adapter.ref, pinning is not None):
                raise ConfigError(error.replace(path, source.path))
        except ConfigError:
            self._metrics.fail()
            raise
        except EngineUnavailable as error:
            self._metrics.fail()
            text = str(error).replace(path, name).replace(source.path, name)
            raise EngineUnavailable(text, error.reason) from None
        return adapter

    async def _open(self, source: AdapterSource, *, is_request: bool = False) -> OpenedAdapter:
        (found,) = await self._ask([source], is_request=is_request)
        if isinstance(found, str):
            raise ConfigError(found)
        assert found is not None
        return found

    async def _ask(
        self, sources: Sequence[AdapterSource], *, reads_weights: bool = True, is_request: bool = False
    ) -> list[Opened]:
        """Open adapters in another process. Raises `ConfigError`."""
        if not sources:
            return []
        settings = self._settings
        question = AdapterQuestion(
            tuple(sources), str(self._copies.path), settings.max_bytes, reads_weights, settings.download_dir
        )
        limit = _DOWNLOAD_SECONDS if any(each.max_download is not None for each in sources) else None
        async with self._slots[is_request, any(each.is_repository for each in sources)]:
            try:
                async with asyncio.timeout(limit):
                    answer = await self._sandbox.ask_async(pickle.dumps(question))
            except TimeoutError:
                raise ConfigError(f"it takes more than {_DOWNLOAD_SECONDS:g} s to download it") from None
            except SandboxStopped:
                limits = f"{_OPEN_SECONDS:g} s of processor time or {_OPEN_MEMORY >> 30} GiB of memory"
                raise ConfigError(f"it takes more than {limits} to read it") from None
            except SandboxFailed as error:
                logger.error("reading an adapter failed: %s", error)
                raise ConfigError("it cannot be read because of an internal error, which is in the log") from None
            except OSError as error:
                raise ConfigError(f"it cannot be read now: {error}") from None
        found: list[Opened] = pickle.loads(answer)
        return found

    @property
    def _copies(self) -> SharedFolder:
        if not self._settings.folder and self._own_folder is None:
            self._own_folder = RuntimeFolder()
        return SharedFolder(self._settings.folder or self._own_folder.path)  # type: ignore[union-attr]

    def _use(self, name: str, path: str, opened: OpenedAdapter) -> RequestAdapter:
        """Return a new reference to an adapter, whose copy stays as long as there are some."""
        template = opened.chat_template if self._settings.uses_templates else ""
        adapter = RequestAdapter(name, opened.ref, path, opened.rank, opened.invocation_tokens, template)
        key = name, opened.ref.digest
        self._uses[key] += 1
        self._hold(opened.ref.digest)
        weakref.finalize(adapter, self._on_dropped, key).atexit = False
        return adapter

    def _on_dropped(self, key: tuple[str, bytes]) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._on_unused, key)

    def _on_unused(self, key: tuple[str, bytes]) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            for unused in self._unused.pop(key, []):
                if not unused.done():
                    unused.set_result(None)
            self._release_copy(key[1])

    def _hold(self, digest: bytes) -> None:
        if digest not in self._held and (lock := self._copies.hold(digest)) is not None:
            self._held[digest] = lock

    def _release_copy(self, digest: bytes) -> None:
        """Let a copy be removed that nothing needs, and remove it if it has no name."""
        refs = [named.ref for named in self._named.values() if named.ref is not None and named.ref.digest == digest]
        if any(used == digest for _, used in self._uses) or any(len(ref.paths) == 1 for ref in refs):
            return
        if (lock := self._held.pop(digest, None)) is not None:
            os.close(lock)
        if not refs and not any(task.done() and _has(task, digest) for task in self._known.values()):
            self._loop.run_in_executor(None, self._copies.drop, digest)

    def start(self) -> None:
        """Start the process that reads adapters, which otherwise starts with the first one. Blocks."""
        if self.is_enabled:
            self._sandbox.start()

    def close(self) -> None:
        """Stop the process that reads adapters, and remove the copies that are this process's own."""
        self._sandbox.close()
        for lock in self._held.values():
            os.close(lock)
        self._held.clear()
        if self._own_folder is not None:
            self._own_folder.remove()


@dataclass(frozen=True)
class _Stamp:
    """What tells whether files have changed: their names, inodes, sizes and times."""

    files: tuple[tuple[str, int, int, int, int], ...]
    is_settled: bool
    """Whether every change from now on would show."""

    @staticmethod
    def of(path: str) -> _Stamp:
        given = Path(path)
        found = []
        with contextlib.suppress(OSError):
            for each in sorted(given.iterdir()) if given.is_dir() else [given]:
                stat = each.stat()
                found.append((each.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        newest = max((max(times) for _, _, _, *times in found), default=0)
        return _Stamp(tuple(found), bool(found) and time.time_ns() - newest > _SETTLED_SECONDS * 1e9)


def _has(task: asyncio.Task[OpenedAdapter], digest: bytes) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().ref.digest == digest


def _is_valid(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.strip() == name and name.isprintable() and "," not in name


def _is_plain(name: str) -> bool:
    """Whether it is a relative path in its only spelling that leads downwards."""
    return name == os.path.normpath(name) and not os.path.isabs(name) and not {".", ".."} & {*name.split("/")}


def _is_repository(path: str) -> bool:
    return _REPOSITORY.fullmatch(path) is not None
