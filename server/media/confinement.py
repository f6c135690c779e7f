"""Takes from this process what decoding and fetching files do not need: limits of resources and of system calls.

The filter of system calls (seccomp(2)) lists what is allowed. Everything else fails with EPERM, so that libraries
report an error instead of dying. A process that decodes has no network, starts no programs or processes, signals
nobody, and opens no files for writing; what it inherits it may read and write.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SECCOMP_SET_MODE_FILTER, _FILTER_FLAG_TSYNC = 1, 1
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
"""Instructions of classic BPF: a word of the call's data, arithmetic, jumps."""
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Where the call's data has its number, its architecture and the arguments, of 8 bytes each."""
_X32 = 0x40000000
_MAX_OPEN_FILES = 256


@dataclass(frozen=True)
class _Machine:
    arch: int
    """AUDIT_ARCH of linux/audit.h"""
    column: int
    """Of the numbers below."""
    seccomp: int
    """Number of seccomp(2)."""


_MACHINES = {"x86_64": _Machine(0xC000003E, 0, 317), "aarch64": _Machine(0xC00000B7, 1, 277)}

_Numbers = list[tuple[int, int]]
"""Of some system calls: on x86_64 and aarch64; -1: there is none."""


def _numbers(table: str) -> _Numbers:
    """From names with both numbers, or a dash."""
    rows = (each.split() for each in table.split(","))
    return [tuple(-1 if number == "-" else int(number) for number in row[1:]) for row in rows]  # type: ignore[misc]


# With the numbers on x86_64 and aarch64. The frequent ones come first.
_CALLS = _numbers(
    """
    read 0 63, write 1 64, futex 202 98, mmap 9 222, munmap 11 215, brk 12 214, madvise 28 233, mprotect 10 226,
    mremap 25 216, msync 26 227, mincore 27 232, close 3 57, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65,
    writev 20 66, fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291, access 21 -, faccessat 269 48,
    faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, statfs 137 43, fstatfs 138
    44, fadvise64 221 223, ftruncate 77 46, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59,
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, eventfd2 290 19, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48
    210, getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209, clock_gettime 228 113,
    clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -, times 100 153,
    getrusage 98 165, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -, rt_sigaction 13 134, rt_sigprocmask
    14 135, rt_sigreturn 15 139, sigaltstack 131 132, rt_sigtimedwait 128 137, restart_syscall 219 128, sched_yield 24
    124, sched_getaffinity 204 123, getcpu 309 168, membarrier 324 283, set_tid_address 218 96, set_robust_list 273
    99, rseq 334 293, arch_prctl 158 -, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107
    175, getgid 104 176, getegid 108 177, uname 63 160, sysinfo 99 179, getrandom 318 278, getrlimit 97 163, exit 60
    93, exit_group 231 94
    """
)
_NETWORK_CALLS = _numbers("connect 42 203, bind 49 200, sendmmsg 307 269, recvmmsg 299 243")
_ABSENT_CALLS = _numbers("clone3 435 435, openat2 437 437")
"""Libraries then use the older calls, whose arguments a filter can see."""
_OPEN = _numbers("open 2 -")
_OPENAT = _numbers("openat 257 56")
_CLONE = _numbers("clone 56 220")
_PRCTL = _numbers("prctl 157 167")
_IOCTL = _numbers("ioctl 16 29")
_FCNTL = _numbers("fcntl 72 25")
_TGKILL = _numbers("tgkill 234 131")
_PRLIMIT = _numbers("prlimit64 302 261")
_SOCKET = _numbers("socket 41 198")
_SOCKETPAIR = _numbers("socketpair 53 199")

_TMPFILE = 0o20000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _TMPFILE
_CLONE_THREAD = 0x10000
_PR_ALLOWED = (15, 16, 3, 4, 38, 23, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_READ, PR_SET_VMA"""
_IOCTL_ALLOWED = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x5413)
"""TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TIOCGWINSZ"""
_FCNTL_ALLOWED = (*range(8), 1030)
"""F_DUPFD, flags, locks, F_DUPFD_CLOEXEC: none that sends signals."""
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16
_SOCK_STREAM, _SOCK_TYPES = 1, 0xF
"""Datagrams could be sent to other sockets of the host."""
_ALL_BITS = 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_VARIABLES = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIXES = ("LC_", "LD_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_")


def environment() -> dict[str, str]:
    """Return the environment of these processes: no keys, tokens or proxies of the server's."""
    listed = (*_VARIABLES, *_CERTIFICATES)
    return {name: value for name, value in os.environ.items() if name in listed or name.startswith(_PREFIXES)}


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def confine(
    memory_bytes: int,
    cpu_seconds: int | None = None,
    *,
    network: bool = False,
    opens_files: bool = True,
    file_bytes: int | None = None,
) -> bool:
    """Confine this process and its threads, for good.

    `memory_bytes` limits its address space, in addition to what it has now, `cpu_seconds` its processor time from now
    on, and `file_bytes` the size of the files that it writes, which others have opened for it. With `network` it may
    connect sockets of the internet. Without `opens_files` it cannot open files to read them either.

    Returns whether the filter of system calls is in force: it needs Linux on x86_64 or aarch64, and a kernel and a
    container that have it. Without it the limits are, and a warning is logged.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    if cpu_seconds is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + cpu_seconds)
    if file_bytes is not None:
        _limit(resource.RLIMIT_FSIZE, file_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return _without_filter(os.strerror(ctypes.get_errno()))
    if (machine := _MACHINES.get(platform.machine())) is None:
        return _without_filter(f"there is none for {platform.machine()}")
    code = b"".join(struct.pack("=HBBI", *each) for each in _filter(machine, os.getpid(), network, opens_files))
    program = _Program(len(code) // 8, code)
    # A new list is made of it at once, so the program may go.
    if libc.syscall(machine.seccomp, _SECCOMP_SET_MODE_FILTER, _FILTER_FLAG_TSYNC, ctypes.byref(program)):
        return _without_filter(os.strerror(ctypes.get_errno()))
    return True


def _limit(which: int, value: int) -> None:
    _, most = resource.getrlimit(which)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (value, value))


def _without_filter(reason: str) -> bool:
    logger.warning("the media processes run without a filter of system calls (seccomp): %s", reason)
    return False


def _filter(machine: _Machine, pid: int, network: bool, opens_files: bool) -> list[_Instruction]:
    """The filter, which returns one of _ALLOW, _KILL and _ERRNO with a number."""

    def numbers(calls: _Numbers) -> list[int]:
        return [each[machine.column] for each in calls if each[machine.column] >= 0]

    def allow_if(calls: _Numbers, argument: int, values: Iterable[int], mask: int = _ALL_BITS) -> list[_Instruction]:
        """Allow calls where the argument's lower half, under the mask, is one of the values."""
        body: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
        for value in values:
            body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        body.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
        return [each for number in numbers(calls) for each in ((_JUMP_EQUAL, 0, len(body), number), *body)]

    def always(calls: _Numbers, result: int) -> list[_Instruction]:
        return [each for number in numbers(calls) for each in ((_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, result))]

    parts: list[Sequence[_Instruction]] = [
        [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, machine.arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)],
        [(_JUMP_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)],
        always(_CALLS, _ALLOW),
        always(_ABSENT_CALLS, _ERRNO | errno.ENOSYS),
        allow_if(_CLONE, 0, (_CLONE_THREAD,), _CLONE_THREAD),
        allow_if(_PRCTL, 0, _PR_ALLOWED),
        allow_if(_IOCTL, 1, _IOCTL_ALLOWED),
        allow_if(_FCNTL, 1, _FCNTL_ALLOWED),
        allow_if(_TGKILL, 0, (pid,)),
        allow_if(_PRLIMIT, 0, (0, pid)),
        allow_if(_SOCKETPAIR, 1, (_SOCK_STREAM,), _SOCK_TYPES),
    ]
    if opens_files:
        parts += [allow_if(_OPENAT, 2, (0,), _WRITES), allow_if(_OPEN, 1, (0,), _WRITES)]
    if network:
        parts += [always(_NETWORK_CALLS, _ALLOW), allow_if(_SOCKET, 0, (_AF_INET, _AF_INET6, _AF_NETLINK))]
    return [*(each for part in parts for each in part), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
