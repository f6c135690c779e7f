"""Faults that hit a server while it serves. Each fault is over, except for its consequences, when its function
returns."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import httpx
import psutil

from tests.chaos.adapters import KEPT, MOVING, move
from tests.chaos.client import KEY
from tests.chaos.load import Load
from tests.chaos.system import MEMORY_GROUPS, Layout, System
from tests.fakes.disk_faults import damage

_WAIT_SECONDS = 120.0
_HELD_SECONDS = (0.5, 3.0)
"""Duration of a full disk, a stop or a cut."""
_PAUSE_SECONDS = (0.2, 1.5)
"""Time from SIGSTOP to SIGCONT: well below --watchdog-seconds."""
_SLOW_SECONDS = (3.0, 8.0)
_SETTLED_SECONDS, _MEASURED_SECONDS = 2.0, 4.0
_GOAL_SHARE = 0.9
"""The throughput with a slow replica that the design asks for, as a share of the others' without it."""
LEAST_SHARE = 0.75
"""The share below which a run fails. It is lower than the goal because on a machine with few cores the slow replica and
the others share the cores, and because the mix of requests differs between measurements of some seconds."""
_MAX_MEASUREMENTS = 3
"""Measurements of which one must reach `LEAST_SHARE`."""
_RUN_SECONDS = 0.01
"""Time for which a slow process runs before it stands still for nine times as long."""
_FREE_DESCRIPTORS = 6
_FREE_BYTES = 64 << 20


T = TypeVar("T")


@dataclass
class Attack:
    """The means of a fault. Its random choices repeat with its seed."""

    system: System
    load: Load
    rng: random.Random
    told: str = ""
    """A description of the fault, for the report."""
    shares: list[float] = field(default_factory=list)
    """The throughputs measured during the fault, as shares of what the other replicas give alone."""

    def victim(self, kind: str) -> psutil.Process:
        """A process of this kind, once there are any."""
        return self.rng.choice(_until(lambda: self.system.processes(kind), f"there is no {kind}"))

    def kill(self, victim: psutil.Process) -> None:
        """Kill a process, and note whose connections that cuts."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.stop(victim)
            victim.kill()

    def stop(self, victim: psutil.Process, *, is_for_good: bool = True) -> None:
        """Stop a process. If it will not go on, note whose connections that cuts."""
        victim.suspend()
        _until(lambda: victim.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE), "it does not stop")
        if is_for_good:
            self.load.cut_ports |= _client_ports(victim)

    def hold(self) -> None:
        """Wait for some time."""
        time.sleep(self.rng.uniform(*_HELD_SECONDS))


def _until(look: Callable[[], T], problem: str) -> T:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(0.05)
    return found


def _client_ports(process: psutil.Process) -> set[int]:
    """The remote ports of a process's connections, in its own network namespace."""
    inodes = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    rows = (line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:])
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in inodes}


# --- processes ----------------------------------------------------------------------------------------------------


def _kill(kind: str) -> Callable[[Attack], None]:
    def fault(attack: Attack) -> None:
        attack.kill(victim := attack.victim(kind))
        attack.told = f"pid {victim.pid}"

    return fault


def _stop(kind: str) -> Callable[[Attack], None]:
    """Stop a process until the watchdog has killed it."""

    def fault(attack: Attack) -> None:
        attack.stop(victim := attack.victim(kind))
        _until(lambda: not _is_alive(victim), f"the watchdog has not killed process {victim.pid}")

    return fault


def _pause(kind: str) -> Callable[[Attack], None]:
    def fault(attack: Attack) -> None:
        attack.stop(victim := attack.victim(kind), is_for_good=False)
        seconds = attack.rng.uniform(*_PAUSE_SECONDS)
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()
        attack.told = f"{seconds:.1f} s"

    return fault


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Within the block, let a process run for a tenth of the time."""
    is_over = threading.Event()

    def hold() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not is_over.wait(_RUN_SECONDS):
                process.suspend()
                is_over.wait(9 * _RUN_SECONDS)
                process.resume()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _slow(kind: str) -> Callable[[Attack], None]:
    def fault(attack: Attack) -> None:
        seconds = attack.rng.uniform(*_SLOW_SECONDS)
        with slowed(attack.victim(kind)):
            time.sleep(seconds)
        attack.told = f"{seconds:.1f} s"
        if _can_resize(attack.system.layout) and not attack.system.layout.embeds:
            while not attack.shares or (max(attack.shares) < LEAST_SHARE and len(attack.shares) < _MAX_MEASUREMENTS):
                attack.shares.append(_share_with_slow(attack, kind))
            attack.told += f", {describe_shares(attack.shares)} of the others' throughput"

    return fault


def describe_shares(shares: Sequence[float]) -> str:
    """Return the shares and their median, beside the goal."""
    return f"{' '.join(f'{each:.0%}' for each in shares)} (median {median(shares):.0%}, goal {_GOAL_SHARE:.0%})"


def _share_with_slow(attack: Attack, kind: str) -> float:
    """Throughput with a slow replica, before and after the throughput of the other replicas alone, divided by that."""
    rates, count = list[float](), len(_states(attack))

    def measure() -> None:
        time.sleep(_SETTLED_SECONDS)
        rates.append(attack.load.tokens_per_second(_MEASURED_SECONDS))

    for _ in range(2):
        with slowed(attack.victim(kind)):
            measure()
        if len(rates) == 1:
            _set_replicas(attack, count - 1)
            measure()
            _set_replicas(attack, count)
    before, alone, after = rates
    return (before + after) / 2 / alone


def _kill_twice(kind: str) -> Callable[[Attack], None]:
    """Kill a process, and the next one while it starts."""

    def fault(attack: Attack) -> None:
        before = {each.pid for each in attack.system.processes(kind)}
        attack.kill(attack.victim(kind))
        fresh = _until(lambda: [p for p in attack.system.processes(kind) if p.pid not in before], "no new process")
        time.sleep(attack.rng.uniform(0.0, 2.0))
        attack.kill(fresh[0])

    return fault


def _kill_all(*kinds: str) -> Callable[[Attack], None]:
    """Kill all processes of these kinds at once."""

    def fault(attack: Attack) -> None:
        victims = [each for kind in kinds for each in attack.system.processes(kind)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                attack.stop(victim)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()

    return fault


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# --- lack of resources --------------------------------------------------------------------------------------------


def _fill(folder: Callable[[System], Path], kind: str) -> Callable[[Attack], None]:
    """Fill a file system, and kill a process while it is full."""

    def fault(attack: Attack) -> None:
        filling = folder(attack.system) / "filling"
        try:
            with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            attack.kill(attack.victim(kind))
            attack.hold()
        finally:
            filling.unlink()

    return fault


def _exhaust_descriptors(attack: Attack) -> None:
    """Leave the API processes hardly any descriptors, connect more often than that, and kill a core.

    libuv closes further connections at once. Running requests go on.
    """
    processes = [(each, each.rlimit(psutil.RLIMIT_NOFILE)) for each in attack.system.processes("quire-api")]
    idle: list[socket.socket] = []
    attack.load.may_refuse = True
    try:
        for each, (_, hard) in processes:
            highest = max(int(path.name) for path in Path(f"/proc/{each.pid}/fd").iterdir())
            each.rlimit(psutil.RLIMIT_NOFILE, (highest + _FREE_DESCRIPTORS, hard))
        with attack.load.inside():
            idle += [_connect(attack.system.address) for _ in range(4 * _FREE_DESCRIPTORS * len(processes))]
        attack.hold()
        attack.kill(attack.victim("quire-core"))
        attack.hold()
    finally:
        for connection in idle:
            connection.close()
        for each, limits in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.rlimit(psutil.RLIMIT_NOFILE, limits)
        attack.load.may_refuse = False


def _connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(address)
    return connection


def _exhaust_memory(attack: Attack) -> None:
    """Let the server use up a limit of its memory: the kernel kills a process, which is a core or a rank."""
    group = attack.system.memory_group
    assert group is not None
    has_ranks = bool(attack.system.processes("quire-rank"))
    victim = attack.victim(attack.rng.choice(["quire-core", "quire-rank" if has_ranks else "quire-core"]))
    Path(f"/proc/{victim.pid}/oom_score_adj").write_text("1000")
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + _FREE_BYTES))
    code = f"import sys, time; sys.stdin.readline(); taken = b'x' * {2 * _FREE_BYTES}; time.sleep(600)"
    eater = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, text=True)
    try:
        (group / "cgroup.procs").write_text(str(eater.pid))
        assert eater.stdin is not None
        with eater.stdin:
            eater.stdin.write("\n")
        _until(lambda: not _is_alive(victim), f"the kernel has not killed process {victim.pid}")
    finally:
        eater.kill()
        eater.wait()
        (group / "memory.limit_in_bytes").write_text("-1")
    attack.told = f"pid {victim.pid}"


# --- the network between hosts ------------------------------------------------------------------------------------


def _cut(shortest: float, longest: float) -> Callable[[Attack], None]:
    """Unplug the cable of a further host for some time."""

    def fault(attack: Attack) -> None:
        other, seconds = attack.rng.choice(attack.system.hosts[1:]), attack.rng.uniform(shortest, longest)
        other.set_link(False)
        try:
            time.sleep(seconds)
        finally:
            other.set_link(True)
        attack.told = f"{other.address}, {seconds:.1f} s"

    return fault


def _slow_down(attack: Attack) -> None:
    """Delay packets: a slow cable."""
    queue = ["dev", "eth0", "root", "tbf", "rate", "256kbit", "burst", "8kbit", "latency", "1s"]
    for host in attack.system.hosts:
        subprocess.run(["tc", "-n", host.name, "qdisc", "add", *queue], check=True)
    try:
        attack.hold()
    finally:
        for host in attack.system.hosts:
            subprocess.run(["tc", "-n", host.name, "qdisc", "del", "dev", "eth0", "root"], check=True)


def _lose_host(attack: Attack) -> None:
    """Kill everything on a further host at once."""
    attack.system.lose(lost := attack.rng.choice(attack.system.hosts[1:]))
    attack.told = lost.address


def _leave(attack: Attack) -> None:
    """Let a replica leave with its hosts; it joins again."""
    (left,) = _until(lambda: attack.system.processes("quire-replicas"), "no host has joined")
    left.terminate()
    psutil.wait_procs([left], _WAIT_SECONDS)
    _until(lambda: attack.system.processes("quire-replicas"), "the host was not started again")


# --- the number of replicas ---------------------------------------------------------------------------------------


def _resize(attack: Attack) -> None:
    """Add a replica, remove two, and add one again. Requests on removed replicas may have to move."""
    for count in (3, 1, 2):
        _set_replicas(attack, count, attack.rng.choice((0.0, 0.5, 60.0)))
        attack.hold()


def _set_replicas(attack: Attack, count: int, drain_seconds: float = 0.0) -> None:
    """Change the number of replicas, and wait until they are up."""
    asked = {"data_parallel_size": count, "drain_timeout_seconds": drain_seconds}
    httpx.post(_url(attack), json=asked, headers=KEY, timeout=60).raise_for_status()
    _until(lambda: _states(attack) == ["up"] * count, f"there are no {count} replicas")


def _states(attack: Attack) -> list[str]:
    return [replica["state"] for replica in httpx.get(_url(attack), headers=KEY, timeout=60).json()["replicas"]]


def _url(attack: Attack, path: str = "/replicas") -> str:
    host, port = attack.system.address
    return f"http://{host}:{port}{path}"


def _can_resize(layout: Layout) -> bool:
    return "-dp" in layout.flags and not layout.others and not layout.has_experts


def _change_roles(attack: Attack) -> None:
    """Let replicas change their roles while they run: one more or fewer computes prompts, or none does."""
    for prefill, decode in ((2, 1), (0, 3), (1, 2)):
        asked = {"prefill_replicas": prefill, "decode_replicas": decode}
        httpx.post(_url(attack), json=asked, headers=KEY, timeout=60).raise_for_status()
        _until(lambda: _states(attack) == ["up"] * 3, "there are no 3 replicas")
        attack.hold()


# --- tiers --------------------------------------------------------------------------------------------------------


def _damage(attack: Attack) -> None:
    """Change, cut, exchange and remove files of the disk tier."""
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError):  # the server has removed it meanwhile
            damage(attack.system.kv, attack.rng)
        time.sleep(attack.rng.uniform(0.0, 0.3))


def _lose_files(attack: Attack) -> None:
    """Remove the folder of the disk tier, as somebody does who needs the room."""
    for folder in attack.system.kv.iterdir():
        shutil.rmtree(folder, ignore_errors=True)


# --- adapters -----------------------------------------------------------------------------------------------------


def _reload(attack: Attack) -> None:
    """Load other weights under a name and from a path that are in use."""
    (old,) = attack.load.meanings
    new = attack.rng.choice([name for name in KEPT if name != old])
    attack.load.may_mean({old, new})
    move(attack.system.adapters, new)
    _ask(attack, "/v1/load_lora_adapter", lora_path=str(attack.system.adapters / MOVING), load_inplace=True)
    attack.load.may_mean({new})


def _reload_often(attack: Attack) -> None:
    for _ in range(8):
        _reload(attack)
        time.sleep(attack.rng.uniform(0.0, 0.5))


def _unload(attack: Attack) -> None:
    """Unload an adapter, and load it again after some time."""
    meanings = attack.load.meanings
    attack.load.may_mean(meanings, is_gone=True)
    _ask(attack, "/v1/unload_lora_adapter")
    attack.hold()
    _ask(attack, "/v1/load_lora_adapter", lora_path=str(attack.system.adapters / MOVING))
    attack.load.may_mean(meanings)


def _reload_and_kill(kind: str) -> Callable[[Attack], None]:
    """Kill a process while an adapter is loaded."""

    def fault(attack: Attack) -> None:
        victim = attack.victim(kind)
        killer = threading.Timer(attack.rng.uniform(0.0, 0.1), attack.kill, [victim])
        killer.start()
        try:
            _reload(attack)
        finally:
            killer.join()
        attack.told = f"pid {victim.pid}"

    return fault


def _ask(attack: Attack, path: str, **body: Any) -> None:
    """Ask for a change of the adapter until the server has answered, whose process may be killed meanwhile."""

    def is_done() -> bool:
        try:
            answer = httpx.post(
                _url(attack, path), json={"lora_name": MOVING, **body}, headers=KEY, timeout=_WAIT_SECONDS
            )
        except httpx.TransportError:
            return False
        # An earlier attempt may have done it.
        is_known = "already been loaded" in answer.text or (path.startswith("/v1/unload") and answer.status_code == 404)
        if answer.status_code != 503 and not is_known:
            answer.raise_for_status()
        return answer.status_code != 503

    _until(is_done, f"{path} is not answered")


FAULTS: dict[str, Callable[[Attack], None]] = {
    "kill core": _kill("quire-core"),
    "stop core": _stop("quire-core"),
    "pause core": _pause("quire-core"),
    "slow core": _slow("quire-core"),
    "kill api": _kill("quire-api"),
    "stop api": _stop("quire-api"),
    "pause api": _pause("quire-api"),
    "kill core twice": _kill_twice("quire-core"),
    "kill api twice": _kill_twice("quire-api"),
    "kill core and api": _kill_all("quire-core", "quire-api"),
    "pause parent": _pause("quire-serve"),
    "full disk": _fill(lambda system: system.tmp, "quire-core"),
    "descriptors": _exhaust_descriptors,
    "memory": _exhaust_memory,
    "kill rank": _kill("quire-rank"),
    "stop rank": _stop("quire-rank"),
    "pause rank": _pause("quire-rank"),
    "slow rank": _slow("quire-rank"),
    "kill fork server": _kill("fork-server"),
    "full shm": _fill(lambda system: system.shm, "quire-rank"),
    "kill cores": _kill_all("quire-core"),
    "kill media": _kill("quire-media"),
    "stop media": _stop("quire-media"),
    "kill media twice": _kill_twice("quire-media"),
    "kill decoder": _kill("quire-decoder"),
    "kill decoders": _kill_all("quire-decoder"),
    "kill fetcher": _kill("quire-fetcher"),
    "kill core and media": _kill_all("quire-core", "quire-media"),
    "kill api and media": _kill_all("quire-api", "quire-media"),
    "cut": _cut(0.3, 3.0),
    "long cut": _cut(6.0, 9.0),
    "slow cable": _slow_down,
    "lose host": _lose_host,
    "leave": _leave,
    "resize": _resize,
    "change roles": _change_roles,
    "kill kv store": _kill("quire-kv-store"),
    "stop kv store": _stop("quire-kv-store"),
    "pause kv store": _pause("quire-kv-store"),
    "kill core and kv store": _kill_all("quire-core", "quire-kv-store"),
    "full kv disk": _fill(lambda system: system.kv, "quire-kv-store"),
    "damage kv files": _damage,
    "lose kv files": _lose_files,
    "reload adapter": _reload_often,
    "unload adapter": _unload,
    "reload and kill core": _reload_and_kill("quire-core"),
    "reload and kill api": _reload_and_kill("quire-api"),
}
_OF_RANKS = {"kill rank", "stop rank", "pause rank", "slow rank", "kill fork server", "full shm"}
_OF_REPLICAS = {"kill cores"}
_OF_MEDIA = {name for name in FAULTS if name.endswith(("media", "media twice", "decoder", "decoders", "fetcher"))}
_OF_ADAPTERS = {name for name in FAULTS if name.startswith(("reload", "unload"))}
_OF_TIERS = {name for name in FAULTS if " kv " in name}
_OF_HOSTS = {"cut", "long cut", "slow cable", "lose host", "leave"}


def applicable(system: System) -> tuple[list[str], list[str]]:
    """The faults that a layout can have, and the faults that this machine cannot make, with the reason."""
    flags, missing = system.layout.flags, []
    has_roles = system.layout.has_roles
    left_out = set() if {"-tp", "-pp"} & {*flags} or has_roles else set(_OF_RANKS)
    left_out |= set() if "-dp" in flags or has_roles else _OF_REPLICAS
    left_out |= set() if has_roles else {"change roles"}
    left_out |= {"full shm"} if system.layout.sees else _OF_MEDIA
    left_out |= set() if system.layout.adapts else _OF_ADAPTERS
    left_out |= set() if system.layout.has_tiers else _OF_TIERS
    left_out |= {"memory"} if system.hosts else _OF_HOSTS
    left_out |= set() if "-dp" in flags else {"leave"}
    left_out |= set() if _can_resize(system.layout) else {"resize"}
    if "memory" not in left_out and system.memory_group is None:
        left_out.add("memory")
        missing.append(f"memory: there is no memory controller of cgroup version 1 at {MEMORY_GROUPS}")
    return [name for name in FAULTS if name not in left_out], missing


def schedule(names: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    """Yield faults without end, each with a seed of its own: all of them in a random order, then in another one."""
    rng = random.Random(seed)
    while True:
        for name in rng.sample(names, len(names)):
            yield name, rng.randrange(1 << 30)
