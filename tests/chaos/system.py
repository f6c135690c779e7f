"""The servers that are attacked: their layouts, processes, and the files and processes that they leave behind.

Each has a temporary folder and a /dev/shm of its own, small file systems, so that all files there are the server's, and
a full disk affects nobody else. Its processes are known by a variable in their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from quire.engine.config.options import DEMO_MODEL
from tests.chaos.adapters import KEPT, MOVING, write_adapters
from tests.e2e.serving import quire
from tests.fakes.families import CASES, SIZES, write_model
from tests.fakes.namespaces import Command, Host, switched_hosts

START_SECONDS = 180.0
_EXIT_SECONDS = 60.0
_MARK = "QUIRE_CHAOS"
"""Environment variable of all processes of a server."""
_TMP_MIB, _SHM_MIB, _SHM_MIB_WITH_PICTURES = 16, 256, 1152
"""The last one is what the media process wants; little of it is used."""
_PIXELS = ("--mm-processor-kwargs", '{"max_pixels": 12544}')
"""At most 16 tokens for a picture."""
_TIERS = ("--kv-cache-memory-bytes", str(8 << 20), "--kv-offloading-size", "0.04")
"""Room for some of the prompts on the devices and in memory."""
_KV_MIB, _KV_DISK_GIB = 96, 0.06
"""The file system of the disk tier, and the limit of the tier."""
_ADAPTERS = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8")
"""Room for some of the adapters at once."""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
"""The folder of cgroup version 1."""
_PREPARE = 'echo $$ > "$1"; mount --bind "$2" /dev/shm && shift 2 && exec "$@"'
_INIT = """
import contextlib, os, subprocess, sys
code = subprocess.call(sys.argv[1:])
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
"""A host's first process, with which all others end, is not the server's; it stays until they have ended."""


@dataclass(frozen=True)
class Layout:
    """The flags of a server, and its parts that can be attacked."""

    name: str
    flags: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    """Further flags of the command of each further host."""
    address_flag: str = ""
    """The flag by which all hosts are told the address of the first."""
    has_experts: bool = False
    embeds: bool = False
    sees: bool = False
    adapts: bool = False
    has_tiers: bool = False
    has_roles: bool = False
    """Replica 0 computes prompts for the others."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one"),
        Layout("dp2", ("-dp", "2")),
        Layout("dp2-api2", ("-dp", "2", "--api-server-count", "2")),
        Layout("tp2-pp2", ("-tp", "2", "-pp", "2")),
        Layout("dp2-tp2-ep", ("-dp", "2", "-tp", "2", "--enable-expert-parallel"), has_experts=True),
        Layout(
            "hosts",
            ("-dp", "2", "-dpl", "1", "--cluster-timeout-seconds", "5"),
            (("-dpr", "1", "--headless"),),
            "--data-parallel-address",
        ),
        Layout(
            "hosts-ep",
            ("-dp", "2", "-dpl", "1", "--enable-expert-parallel", "--cluster-timeout-seconds", "5"),
            (("-dpr", "1", "--headless"),),
            "--data-parallel-address",
            has_experts=True,
        ),
        Layout(
            "nodes",
            ("-tp", "2", "-pp", "2", "--nnodes", "2", "--cluster-timeout-seconds", "5"),
            (("--node-rank", "1", "--headless"),),
            "--master-addr",
            has_tiers=True,
        ),
        Layout(
            "nodes-dp2",
            ("-pp", "2", "-dp", "2", "--nnodes", "4", "--cluster-timeout-seconds", "5"),
            tuple(("--node-rank", str(node), "--headless") for node in (1, 2, 3)),
            "--master-addr",
            has_tiers=True,
        ),
        Layout(
            "pictures",
            ("-tp", "2", "--api-server-count", "2", "--allowed-media-networks", "127.0.0.0/8", *_PIXELS),
            sees=True,
        ),
        Layout("adapters", ("-dp", "2", "--api-server-count", "2", *_ADAPTERS), adapts=True),
        Layout("tiers", ("-dp", "2", "-tp", "2"), has_tiers=True),
        Layout(
            "prefill-decode",
            ("--prefill-replicas", "1", "--decode-replicas", "2", "--prefill-tensor-parallel-size", "2"),
            has_tiers=True,
            has_roles=True,
        ),
        Layout("embeddings", ("--runner", "pooling", "-dp", "2"), embeds=True),
    )
}
_COMMON = (
    *("--watchdog-seconds", "3", "--max-restarts", "100000", "--shutdown-timeout", "120"),
    *(
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "32",
        "--kv-cache-memory-bytes",
        str(24 << 20),
    ),
    *("--served-model-name", "quire-demo"),
)


class System:
    """A running server. `start` may be called again when its processes have ended."""

    def __init__(
        self, layout: Layout, model: Path, folder: Path, hosts: Sequence[Host], memory_group: Path | None
    ) -> None:
        self.layout = layout
        self.memory_group = memory_group
        """The control group of all processes, where this machine can limit memory."""
        self.tmp, self.shm = folder / "tmp", folder / "shm"
        self.adapters, self.kv = folder / "adapters", folder / "kv"
        self.hosts = hosts
        """None for a server on this host."""
        self.address = "", 0
        self.text = ""
        """The output of ended servers."""
        self._model = model
        self._api: Command | None = None
        self._others: dict[str, Command] = {}
        """The commands of further hosts, by name."""
        self._is_ending = False

    @property
    def host(self) -> Host | None:
        """The URL of the API."""
        return self.hosts[0] if self.hosts else None

    @property
    def api(self) -> Command:
        """The command with the API."""
        assert self._api is not None
        return self._api

    def start(self) -> None:
        """Start the server and wait until it serves; raises `AssertionError` with its output if it does not."""
        self._is_ending = False
        if self.hosts:
            address = self.hosts[0].address
            where = (self.layout.address_flag, address)
            self._api = self._start_on(self.hosts[0], *where, "--host", address)
            for host, flags in zip(self.hosts[1:], self.layout.others, strict=True):
                self._keep_other(host, *where, *flags)
        else:
            environment = {**os.environ, **self._environment}
            process = subprocess.Popen(
                ["unshare", "--mount", *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            self._api = Command(process, self.layout.flags)
        found = self._api.wait_for(r"serving .* on http://(\S+):(\d+)", START_SECONDS)
        self.address = found[1], int(found[2])

    def _start_on(self, host: Host, *flags: str) -> Command:
        return host.start(sys.executable, "-S", "-c", _INIT, *self._command(*flags), **self._environment)

    def _keep_other(self, host: Host, *flags: str) -> None:
        """Run a further host's command, again whenever it ends, as a service manager does."""

        def keep() -> None:
            while not self._is_ending:
                self._others[host.name] = self._start_on(host, *flags)
                self._others[host.name].process.wait()

        threading.Thread(target=keep, daemon=True).start()

    @property
    def _environment(self) -> dict[str, str]:
        return {
            _MARK: str(self.tmp),
            "QUIRE_CLUSTER_TOKEN": "a token for tests only",
            "QUIRE_ADMIN_KEY": "chaos",
            "TMPDIR": str(self.tmp),
            "OMP_NUM_THREADS": "1",
        }

    def _command(self, *flags: str) -> list[str]:
        if self.layout.adapts:
            modules = [f"{name}={self.adapters / name}" for name in (*KEPT, MOVING)]
            flags += ("--lora-root", str(self.adapters), "--lora-modules", *modules)
        if self.layout.has_tiers:
            flags += (*_TIERS, "--kv-disk", f"{self.kv}:{_KV_DISK_GIB}")
        command = quire("serve", str(self._model), *self.layout.flags, *_COMMON, *flags, "--port", "0")
        group = "/dev/null" if self.memory_group is None else str(self.memory_group / "cgroup.procs")
        return ["sh", "-c", _PREPARE, "sh", group, str(self.shm), *command]

    # --- processes ----------------------------------------------------------------------------------------------

    def processes(self, prefix: str = "") -> list[psutil.Process]:
        """Its living processes with such names, or all, in a fixed order. Decoders and fetchers do not inherit the
        environment: their parents have the mark."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_own = any(own.environ().get(_MARK) == str(self.tmp) for own in (each, *each.parents()))
                if is_own and (name := _name(each)).startswith(prefix):
                    found.append((name, each.pid, each))
        return [each for _, _, each in sorted(found)]

    @property
    def parent(self) -> psutil.Process:
        """The parent process of the server with the API."""
        (found,) = self.processes("quire-serve")
        return found

    def lose(self, host: Host) -> None:
        """Kill everything on a further host at once; its command is run again."""
        self._others[host.name].kill_all()

    def expect_exit(self) -> int:
        """Wait until the server with the API has exited, then end the other hosts'; returns the exit code."""
        self._is_ending = True
        try:
            return self.api.wait(_EXIT_SECONDS + 120)
        finally:
            self._end_others()

    def _end_others(self) -> None:
        """End the other hosts' commands, which would wait for the API to come back, also one that has just begun."""
        terminated, deadline = set[int](), time.monotonic() + _EXIT_SECONDS
        while left := [other for other in self._others.values() if other.process.poll() is None]:
            for each in [*self.processes("quire-replicas"), *self.processes("quire-node")]:
                if each.pid not in terminated:
                    terminated.add(each.pid)
                    each.terminate()
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(left[0].process.args, _EXIT_SECONDS)
            time.sleep(0.05)

    def leftovers(self) -> list[str]:
        """Processes (after some time), files and shared memory that remain after the server has exited."""
        left = [f"process {each.pid}" for each in psutil.wait_procs(self.processes(), _EXIT_SECONDS)[1]]
        left += [f"/dev/shm/{path.name}" for path in self.shm.iterdir()]
        left += [f"$TMPDIR/{path.relative_to(self.tmp)}" for path in self.tmp.iterdir()]
        self._join()
        return left

    def close(self) -> None:
        """End everything."""
        self._is_ending = True
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._join()

    def _join(self) -> None:
        """Keep the server's output. Hosts end their commands themselves."""
        if self._api is None:
            return
        if not self.hosts:
            self._api.join()
        self.text += self._api.text
        self._api = None


def _name(process: psutil.Process) -> str:
    """quire-serve, quire-core-0, quire-rank-1, …; and fork-server, which has no such name."""
    name = process.name()
    is_fork_server = not name.startswith("quire-") and "multiprocessing.forkserver" in " ".join(process.cmdline())
    return "fork-server" if is_fork_server else name


@contextlib.contextmanager
def system(layout: Layout) -> Iterator[System]:
    """A server of this layout that has not been started; all of it is gone afterwards. Only root may do this."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # the path must be short, for Unix sockets
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        shm_size = _SHM_MIB_WITH_PICTURES if layout.sees else _SHM_MIB
        mounts = [("tmp", _TMP_MIB, "1777"), ("shm", shm_size, "1777"), ("kv", _KV_MIB, "0700")]
        for name, size, mode in mounts if layout.has_tiers else mounts[:2]:
            (folder / name).mkdir()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}m,mode={mode}", "chaos", folder / name], check=True
            )
            stack.callback(subprocess.check_call, ["umount", "--lazy", folder / name])
        model = DEMO_MODEL
        if layout.has_experts:
            model = _write_experts(folder / "model")
        elif layout.sees:
            from tests.fakes.vision import write_qwen2_vl  # transformers takes seconds

            model = write_qwen2_vl(folder / "model")
        if layout.adapts:
            write_adapters(folder / "adapters")
        hosts = stack.enter_context(switched_hosts(1 + len(layout.others))) if layout.others else []
        group = None if hosts else stack.enter_context(_memory_group(folder.name))  # hosts do not see the groups
        started = System(layout, model, folder, hosts, group)
        stack.callback(started.close)
        yield started


@contextlib.contextmanager
def _memory_group(name: str) -> Iterator[Path | None]:
    if not os.access(MEMORY_GROUPS / "cgroup.procs", os.W_OK):
        yield None
        return
    group = MEMORY_GROUPS / name
    group.mkdir()
    try:
        yield group
    finally:
        for _ in range(100):  # the kernel needs a moment after the last process has ended
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def _write_experts(folder: Path) -> Path:
    """A small random mixture of experts, with the demo model's tokenizer."""
    architecture, changes = CASES["Mixtral"]
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]["vocab_size"]
    sizes = {"num_local_experts": 8, "vocab_size": vocabulary, "max_position_embeddings": 1024, "sliding_window": None}
    write_model(architecture, SIZES | changes | sizes, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder
