"""The cost of a streamed token in the API process: CPU time from the engine's message to the client's socket.

.venv/bin/python benchmarks/front_end.py [--sources NAME=FOLDER …] [--json]

A real `quire serve` with the demo model's tokenizer runs in separate processes. Its engine core is a stand-in that
computes nothing: at every tick it sends one random token per stream in one message, as the real one does. The client,
in another process, only counts events. The tick is slow enough that every token is written separately (merged events
would be cheaper; `merged` counts them), so figures are the CPU time of all threads of the API processes, not wall-clock
time. Further flags, such as --api-server-count, are passed to `quire serve`. `--sources` alternates between several
checkouts and prints ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from quire.engine.process.supervisor import SupervisorConnection

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Say something."}]},
    "completions": {"prompt": "Say"},
}
_CORE = "QUIRE_BENCHMARK_CORE"
"""Set in the environment of the stand-in."""
LENGTH = 1900
"""Tokens per answer; a finished stream is followed by a new one."""


# --- the engine's side ------------------------------------------------------------------------------------------


def core() -> None:
    """Sends a token per running request at each tick of `pace` seconds per request, at least one millisecond."""
    import msgspec
    import zmq

    from quire.engine.config.options import DEMO_MODEL
    from quire.engine.process.supervisor import SupervisorConnection
    from quire.engine.protocol.engine_core import (
        AbortRequests,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        ToCore,
    )
    from quire.engine.protocol.stats import EngineStats
    from quire.engine.protocol.supervision import Ready
    from quire.server.text.tokenizer import Tokenizer

    connection = SupervisorConnection()
    pace, args = connection.receive_args()
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    tokenizer = Tokenizer.load(DEMO_MODEL)
    pieces = [i for i in range(8, tokenizer.backend.get_vocab_size()) if "\ufffd" not in tokenizer.token_text(i)]
    tokens = itertools.cycle(random.Random(0).choices(pieces, k=100_003))
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(args.endpoints.requests[0])
    outboxes = [context.socket(zmq.PUSH) for _ in args.endpoints.responses]
    for outbox, address in zip(outboxes, args.endpoints.responses, strict=True):
        outbox.connect(address)
    connection.send(Ready({}))
    decode = msgspec.msgpack.Decoder(ToCore).decode
    encode = msgspec.msgpack.Encoder().encode
    running: dict[str, tuple[int, int]] = {}
    """The API process and the number of remaining tokens, by request."""
    stats = EngineStats()
    tick = time.perf_counter()
    while True:
        while inbox.poll(0 if running else 1000):
            match decode(inbox.recv()):
                case EngineCoreRequest(client=client, request_id=request_id, params=params):
                    running[request_id] = (client, params.max_tokens or LENGTH)
                    outboxes[client].send(
                        encode(
                            EngineCoreOutputs(
                                [EngineCoreOutput(request_id, [next(tokens)])], stats, incarnation=args.incarnation
                            )
                        )
                    )
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        running.pop(request_id, None)
        tick = max(tick + max(1e-3, pace * len(running)), time.perf_counter())
        time.sleep(max(0.0, tick - time.perf_counter()))
        steps = [EngineCoreOutputs(stats=stats, incarnation=args.incarnation) for _ in outboxes]
        for request_id, (client, left) in list(running.items()):
            step = steps[client]
            if left > 1:
                running[request_id] = (client, left - 1)
                step.request_ids.append(request_id)
                step.token_ids.append(next(tokens))
            else:
                del running[request_id]
                step.outputs.append(EngineCoreOutput(request_id, [next(tokens)], finish_reason="length"))
        for outbox, step in zip(outboxes, steps, strict=True):
            if step.request_ids or step.outputs:
                outbox.send(encode(step))


def end_with(connection: SupervisorConnection) -> None:
    """Send heartbeats until the supervisor asks for the end, or has ended."""

    def beat() -> None:
        while True:
            connection.beat()
            time.sleep(1.0)

    threading.Thread(target=beat, daemon=True).start()
    with contextlib.suppress(EOFError):
        connection.receive()
    os._exit(0)


def server(pace: float, arguments: list[str]) -> int:
    """`quire serve` with the stand-in for its engine core."""
    from quire.engine.core.launch import CoreArgs
    from quire.engine.process import supervisor
    from quire.server.cli.main import main
    from quire.server.client import engine_manager

    def start_core(args: CoreArgs, folder: str) -> supervisor.Process:
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        return supervisor.start_process(Path(__file__).stem, (pace, args), env={"PYTHONPATH": path, _CORE: "1"})

    engine_manager.start_core = start_core  # type: ignore[attr-defined]
    return main(["serve", "--port", "0", "--device", "cpu", *arguments])


# --- the client's side ------------------------------------------------------------------------------------------


class Server:
    """A running server of a checkout. It runs that checkout's copy of this file: its stand-in knows its messages."""

    def __init__(self, sources: str, pace: float, arguments: list[str]) -> None:
        script = Path(sources) / "benchmarks" / Path(__file__).name
        self.process = subprocess.Popen(
            [sys.executable, script, "--pace", str(pace), "--server", *arguments],
            env=os.environ | {"PYTHONPATH": sources},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"serving .*:(\d+)$", line):
                self.port = int(found[1])
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))

    def seconds(self) -> float:
        """CPU time so far, of all threads of all API processes (proc(5), schedstat: nanoseconds)."""
        spent = 0
        for process in (first := psutil.Process(self.process.pid), *first.children()):
            if process.name().startswith("quire-api"):
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        spent += int((task / "schedstat").read_text().split()[0])
        return spent / 1e9

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Streams:
    """Runs a constant number of concurrent requests and counts the received events."""

    def __init__(self, port: int, endpoint: str, count: int) -> None:
        body = json.dumps({**PROMPTS[endpoint], "stream": True, "max_tokens": LENGTH, "ignore_eos": True}).encode()
        head = f"POST {PATHS[endpoint]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._port = port
        self._selector = selectors.EpollSelector()
        self.events = self.writes = 0
        for _ in range(count):
            self._open()

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            for key, _ in self._selector.select(left):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                received = connection.recv(1 << 16)
                self.writes += 1
                self.events += received.count(b"data: {")
                if not received or b"[DONE]" in received:
                    assert b'data: {"error"' not in received, received
                    self._selector.unregister(connection)
                    connection.close()
                    self._open()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _open(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(self._request)
        self._selector.register(connection, selectors.EVENT_READ)


def measure(server: Server, endpoint: str, count: int, seconds: float) -> dict[str, float]:
    """CPU microseconds per token, tokens per second on one core, and statistics of the measurement itself."""
    streams = Streams(server.port, endpoint, count)
    try:
        streams.run(1.0 + count / 256)
        streams.events = streams.writes = 0
        begun, client, cpu = time.perf_counter(), time.process_time(), server.seconds()
        streams.run(seconds)
        cpu, client, wall = server.seconds() - cpu, time.process_time() - client, time.perf_counter() - begun
        return {
            "us": cpu / streams.events * 1e6,
            "tokens_per_core_second": streams.events / cpu,
            "server_cores": cpu / wall,
            "client_cores": client / wall,
            "merged": 1 - streams.writes / streams.events,
        }
    finally:
        streams.close()
        time.sleep(0.3)  # the server notices the disconnects


def compare(options: argparse.Namespace, arguments: list[str]) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Every measurement: name of the sources, endpoint, streams, figures."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, folder in options.sources:
            servers[name] = Server(folder, options.pace * 1e-6, arguments)
            stack.callback(servers[name].close)
        for _ in range(options.rounds):
            for count, endpoint, name in itertools.product(options.streams, options.endpoints, servers):
                yield name, endpoint, count, measure(servers[name], endpoint, count, options.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = str(Path(__file__).resolve().parents[1])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--endpoints", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=80.0, help="tick length in microseconds per stream (default: 80)")
    parser.add_argument(
        "--sources",
        nargs="+",
        type=lambda pair: pair.partition("=")[::2],
        default=[("here", here)],
        metavar="NAME=FOLDER",
        help="checkouts to measure; the first one is the baseline",
    )
    parser.add_argument("--json", action="store_true", help="figures such as here_chat_256_us instead of tables")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    if _CORE in os.environ:
        core()
    options, arguments = parser.parse_known_args()
    if options.server:
        return server(options.pace, arguments)
    return report(options, arguments)


def report(options: argparse.Namespace, arguments: list[str]) -> int:
    results: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for name, endpoint, count, figures in compare(options, arguments):
        results.setdefault((endpoint, count, name), []).append(figures)
        if not options.json:
            print(f"{name} {endpoint} {count}:", {key: round(value, 2) for key, value in figures.items()}, flush=True)
    median = functools.partial(_median, results)
    if options.json:
        flat = {
            f"{name}_{endpoint}_{count}_{figure}": round(median((endpoint, count, name), figure), 3)
            for endpoint, count, name in results
            for figure in results[endpoint, count, name][0]
        }
        json.dump(flat, sys.stdout, indent=1)
        print()
        return 0
    first = options.sources[0][0]
    print("\n| endpoint | streams | sources | µs a token | tokens/s a core | ratio |\n|---|---|---|---|---|---|")
    for endpoint, count, name in results:
        of_first = results[endpoint, count, first]
        ratios = [b["us"] / a["us"] for a, b in zip(of_first, results[endpoint, count, name], strict=True)]
        us, rate = (median((endpoint, count, name), figure) for figure in ("us", "tokens_per_core_second"))
        print(f"| {endpoint} | {count} | {name} | {us:.1f} | {rate:,.0f} | {statistics.median(ratios):.2f} |")
    return 0


def _median(results: dict[Any, list[dict[str, float]]], key: Any, figure: str) -> float:
    return statistics.median(figures[figure] for figures in results[key])


if __name__ == "__main__":
    sys.exit(main())
