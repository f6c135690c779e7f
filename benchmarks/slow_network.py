"""The cost of a slow or interrupted network between two hosts: time per token, and the pause of a stream.

.venv/bin/python -m benchmarks.slow_network [--delays 0 50] [--cuts 1 3 6 10] [flags of quire serve]

Needs root. Two hosts are two network namespaces. Their network interfaces (TAP) are connected by this program, which
holds each packet for the one-way delay, and drops all packets during a cut. `quire serve --nnodes 2` runs the demo
model there, by default with one pipeline stage on each host. The time per token is measured with one stream. A stream
that a cut interrupts is compared with an undisturbed one; its pause is the longest time between two tokens.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import itertools
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from quire.engine.config.options import DEMO_MODEL
from tests.e2e.serving import quire
from tests.fakes.namespaces import Host, two_hosts

PORT = 8000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
"""linux/if_tun.h"""
PACKET_BYTES = 1 << 16


class Cable(threading.Thread):
    """Carries packets between two TAP devices."""

    def __init__(self, ends: tuple[int, int], delay: float) -> None:
        """`delay` is the delay of each packet, in seconds."""
        super().__init__(daemon=True)
        self._ends, self._delay = ends, delay
        self.is_cut = False
        self.start()

    def run(self) -> None:
        waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        """Time of arrival, the other end, and the packet."""
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for end in select.select(self._ends, (), (), timeout)[0]:
                packet = os.read(end, PACKET_BYTES)
                if not self.is_cut:
                    waiting.append((time.monotonic() + self._delay, others[end], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # the device is not up
                    os.write(end, packet)


def tap(host: Host) -> int:
    """Replace the network interface of a host by a TAP device; returns its file descriptor."""
    subprocess.run(["ip", "-n", host.name, "link", "delete", "eth0"], check=False, capture_output=True)
    with host.inside():
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0"], check=True)
    host.set_link(True)
    return device


@contextlib.contextmanager
def serving(delay: float, flags: list[str]) -> Iterator[tuple[Host, Cable]]:
    """A server on two hosts, and the cable between them."""
    with contextlib.ExitStack() as stack:
        hosts = first, second = stack.enter_context(two_hosts())
        cable = Cable((tap(first), tap(second)), delay)
        common = ["serve", str(DEMO_MODEL), "--nnodes", "2", "--master-addr", first.address, *flags]
        roles = [["--node-rank", "0", "--port", str(PORT)], ["--node-rank", "1", "--headless"]]
        for host, role in zip(hosts, roles, strict=True):
            host.start(*quire(*common, *role), QUIRE_CLUSTER_TOKEN="a token for benchmarks")
        first.commands[0].wait_for("serving .* on http")
        try:
            yield first, cable
        finally:
            with contextlib.redirect_stdout(sys.stderr):  # the output of the hosts
                stack.close()


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    tokens: list[int]
    times: list[float]
    """Arrival time of each token, in seconds."""

    @property
    def pauses(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


def stream(host: Host, max_tokens: int) -> Answer:
    """Stream a completion on a host; raises `RuntimeError` if it ends with an error."""
    body = {"prompt": "Quire is", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    answer = Answer([], [])
    with (
        host.inside(),
        httpx.stream(
            "POST",
            f"http://127.0.0.1:{PORT}/v1/completions",
            json={**body, "stream": True, "return_token_ids": True},
            timeout=600,
        ) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                tokens = event["choices"][0]["token_ids"]
                answer.tokens.extend(tokens)
                answer.times.extend([time.monotonic()] * len(tokens))
    return answer


def interrupt(host: Host, cable: Cable, seconds: float, max_tokens: int) -> Answer:
    """Stream a completion, and cut the cable for some time while it comes."""

    def cut() -> None:
        cable.is_cut = True
        time.sleep(seconds)
        cable.is_cut = False

    timer = threading.Timer(0.3, cut)
    timer.start()
    try:
        return stream(host, max_tokens)
    finally:
        timer.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="*", default=[0, 50], help="one way, in ms")
    parser.add_argument("--cuts", type=float, nargs="*", default=[1, 3, 6, 10], help="in seconds, at the first delay")
    parser.add_argument("--tokens", type=int, default=400, help="length of an answer that is interrupted")
    options, flags = parser.parse_known_args()
    for number, delay in enumerate(options.delays):
        with serving(delay / 1e3, flags or ["-pp", "2"]) as (host, cable):
            stream(host, 8)
            pauses = stream(host, 40).pauses
            print(f"{delay:g} ms one way: {statistics.median(pauses) * 1e3:.1f} ms a token", flush=True)
            for cut in options.cuts * (number == 0):
                expected = stream(host, options.tokens).tokens
                found = interrupt(host, cable, cut, options.tokens)
                same = "the same tokens" if found.tokens == expected else "OTHER TOKENS"
                print(f"cut for {cut:g} s: a pause of {max(found.pauses):.1f} s, {same}", flush=True)


if __name__ == "__main__":
    main()
