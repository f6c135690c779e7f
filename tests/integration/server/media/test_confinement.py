"""A confined process can compute, and little else. Each attempt runs in one of two processes, as it is for good."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ATTEMPTS = """
import ctypes, errno, json, os, resource, signal, socket, sys, threading
from quire.server.media.confinement import confine

inherited = open(sys.argv[3], "wb", buffering=0)
parent = os.getppid()
in_force = confine(2**28, 60, network=sys.argv[1] == "network", opens_files=sys.argv[2] == "opens", file_bytes=1000)
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def thread():
    each = threading.Thread(target=lambda: None)
    each.start()
    each.join()

def spawn(child):
    if child == 0:
        os._exit(0)

x86 = os.uname().machine == "x86_64"
attempts = {
    "internet socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "Unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
    "pair of datagram sockets": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "pair of sockets": lambda: [each.close() for each in socket.socketpair()],
    "program": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: spawn(os.fork()),
    "thread": thread,
    "signal": lambda: os.kill(parent, 0),
    "ptrace": lambda: call(101 if x86 else 117, 16, parent, 0, 0),
    "memory of others": lambda: call(310 if x86 else 270, parent, 0, 0, 0, 0, 0),
    "io_uring": lambda: call(425, 1, 0),
    "namespace": lambda: call(272 if x86 else 97, 0x10000000),
    "keyring": lambda: call(250 if x86 else 219, 0, -1, 0, 0, 0),
    "openat2": lambda: call(437, -100, b"/dev/null", 0, 0),
    "read a file": lambda: open("/etc/hostname", "rb").close(),
    "write a file": lambda: open(sys.argv[3] + ".new", "wb"),
    "append to a file": lambda: open(sys.argv[3], "ab"),
    "unnamed file": lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    "rename": lambda: os.rename(sys.argv[3], sys.argv[3] + ".x"),
    "remove": lambda: os.remove(sys.argv[3]),
    "link": lambda: os.symlink("a", sys.argv[3] + ".link"),
    "mode": lambda: os.chmod(sys.argv[3], 0o777),
    "inherited file": lambda: inherited.write(b"x" * 1000),
    "inherited file, too large": lambda: inherited.write(b"x" * 1000),
    "memory": lambda: bytes(2**27),
    "much memory": lambda: bytes(2**29),
    "higher limit": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)),
    "abort handler": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
}
told = {}
for name, attempt in attempts.items():
    try:
        attempt()
        told[name] = "done"
    except OSError as error:
        told[name] = errno.errorcode[error.errno]
    except (MemoryError, ValueError) as error:
        told[name] = type(error).__name__
os.write(1, json.dumps([in_force, told]).encode())
"""
COMPUTING = {
    "pair of sockets": "done",
    "thread": "done",
    "inherited file": "done",
    "inherited file, too large": "EFBIG",
    "memory": "done",
    "much memory": "MemoryError",
    "abort handler": "done",
}


def attempts(tmp_path: object, network: str, opens: str) -> dict[str, str]:
    command = [sys.executable, "-P", "-c", ATTEMPTS, network, opens, f"{tmp_path}/file"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    in_force, told = json.loads(done.stdout)
    if not in_force:
        pytest.skip(f"this kernel or container has no seccomp: {done.stderr}")
    return dict(told)


def test_a_decoder_has_no_network_no_processes_and_no_files(tmp_path: object) -> None:
    refused = attempts(tmp_path, "", "")
    assert {name: got for name, got in refused.items() if got != "EPERM"} == {
        **COMPUTING,
        "openat2": "ENOSYS",
        "higher limit": "ValueError",
    }


def test_a_fetcher_has_internet_sockets_and_reads_files(tmp_path: object) -> None:
    allowed = {name for name, got in attempts(tmp_path, "network", "opens").items() if got == "done"}
    assert allowed == {name for name, got in COMPUTING.items() if got == "done"} | {"internet socket", "read a file"}


def test_a_machine_without_a_filter_keeps_the_limits(tmp_path: object) -> None:
    script = (
        "import logging, platform, resource; logging.basicConfig()\n"
        "platform.machine = lambda: 'riscv64'\n"
        "from quire.server.media.confinement import confine\n"
        "print(confine(2**28), resource.getrlimit(resource.RLIMIT_AS)[1] < 2**40)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert "seccomp" in done.stderr
