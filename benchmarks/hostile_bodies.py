"""The cost of one hostile request for the others: pauses of 16 streams, and memory of the API process.

.venv/bin/python benchmarks/hostile_bodies.py [--only WORD …] [--list]

`quire serve` runs with the demo model. 16 clients in another process stream answers, one after the other, and measure
the longest gap between two parts of an answer. Before each body comes an undisturbed phase, whose longest gap is
subtracted. Other work on the machine makes pauses too, so the shortest gap of several rounds counts, in both phases. A
body is handled when its answer is complete; then, or after `--patience` seconds, the next phase begins. Memory is the
first API process's (VmRSS), sampled every 10 ms: its peak, and the level at which it settles. Further flags are passed
to `quire serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving import serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TOKENIZE, EMBEDDINGS = "/v1/messages", "/tokenize", "/v1/embeddings"
STREAMS = 16
MIB = 2**20
Body = bytes | list[bytes]
"""A list: chunks that are sent slowly, with chunked encoding."""


@dataclass(frozen=True)
class Case:
    """A hostile request, sent `count` times at once."""

    name: str
    path: str
    make: Callable[[], Body]
    count: int = 1
    headers: str = ""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages) or [user("Hi")], "max_tokens": 4, **fields}).encode()


def prompt(given: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": given, "max_tokens": 4, **fields}).encode()


def tool(at: int, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{at}", "parameters": parameters, **fields}}


def properties(count: int, size: int = 0) -> dict[str, Any]:
    described = {"type": "string", "description": "d" * size}
    return {"type": "object", "properties": {f"p{at}": described for at in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def in_braces(text: str) -> bytes:
    return b'{"messages":' + text.encode() + b"}"


WORDS = "word " * 800_000
AMBIGUOUS = 'start: s\ns: s s s | s s | /[a-z ]/ | ""'
CASES = [
    Case("800,000 words in a message", CHAT, lambda: chat(user(WORDS))),
    Case("800,000 words in a prompt", COMPLETIONS, lambda: prompt(WORDS)),
    Case("800,000 words, truncated", COMPLETIONS, lambda: prompt(WORDS, truncate_prompt_tokens=64)),
    Case("800,000 words to tokenize", TOKENIZE, lambda: prompt(WORDS).replace(b', "max_tokens": 4', b"")),
    Case("4 MB without a space", COMPLETIONS, lambda: prompt("x" * 4_000_000)),
    Case("4 MB of spaces", COMPLETIONS, lambda: prompt(" " * 4_000_000)),
    Case("60 MB prompt", COMPLETIONS, lambda: prompt("word " * 12_000_000)),
    Case("60 MB prompt, three at once", COMPLETIONS, lambda: prompt("word " * 12_000_000), 3),
    Case("60 MB of escaped emoji", COMPLETIONS, lambda: prompt("\U0001f600" * 5_000_000)),
    Case("10^6 messages", CHAT, lambda: chat(*[user("a")] * 1_000_000)),
    Case("10^6 messages that are numbers", CHAT, lambda: chat(*[0] * 1_000_000)),
    Case("4096 messages of 2 KB", CHAT, lambda: chat(*[user("abc " * 512)] * 4096)),
    Case("10^6 parts in a message", CHAT, lambda: chat(user([{"type": "text", "text": "a"}] * 1_000_000))),
    Case("128 tools of 100 KB", CHAT, lambda: chat(tools=[tool(at, properties(20, 5000)) for at in range(128)])),
    Case(
        "128 strict tools of 100 KB",
        CHAT,
        lambda: chat(tools=[tool(at, properties(700, 100), strict=True) for at in range(128)]),
    ),
    Case("5 MB tool schema", CHAT, lambda: chat(tools=[tool(0, properties(50_000, 50))], tool_choice="required")),
    Case("10^5 tools", CHAT, lambda: chat(tools=[tool(at, {}) for at in range(100_000)])),
    Case("20 MB of arguments in history", CHAT, lambda: chat(user("a"), call(json.dumps([0] * 7_000_000)))),
    Case(
        "5 MB schema of the answer",
        CHAT,
        lambda: chat(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": properties(50_000, 50)}}
        ),
    ),
    Case(
        "schema of 10^4 levels",
        CHAT,
        lambda: chat(structured_outputs={"json": json.dumps(nested(200))[:-600] + "}" * 600}),
    ),
    Case("10 MB regex", CHAT, lambda: chat(structured_outputs={"regex": "(a|b)*" * 1_700_000})),
    Case("10^6 choices", CHAT, lambda: chat(structured_outputs={"choice": [str(at) for at in range(1_000_000)]})),
    Case("10 MB grammar", CHAT, lambda: chat(structured_outputs={"grammar": 'start: "a"\n' * 900_000})),
    Case(
        "ambiguous grammar, 16 choices",
        COMPLETIONS,
        lambda: prompt("Quire is", max_tokens=1900, n=16, ignore_eos=True, structured_outputs={"grammar": AMBIGUOUS}),
    ),
    Case("10^6 stop strings", CHAT, lambda: chat(stop=["a"] * 1_000_000)),
    Case("10^6 bad words", CHAT, lambda: chat(bad_words=["a"] * 1_000_000)),
    Case("logit_bias of 10^6 tokens", CHAT, lambda: chat(logit_bias={str(at): 1.0 for at in range(1_000_000)})),
    Case("10^6 allowed token ids", CHAT, lambda: chat(allowed_token_ids=[1] * 1_000_000)),
    Case("10^6 token ids", COMPLETIONS, lambda: prompt([7] * 1_000_000)),
    Case("10^6 prompts", COMPLETIONS, lambda: prompt(["a"] * 1_000_000)),
    Case("2048 prompts of 25 KB", COMPLETIONS, lambda: prompt(["word " * 5000] * 2048)),
    Case("n of 10^9", CHAT, lambda: chat(n=10**9)),
    Case("10^6 opening brackets", CHAT, lambda: in_braces("[" * 1_000_000)),
    Case("10^7 empty lists", CHAT, lambda: in_braces("[" + "[]," * 10_000_000 + "[]]")),
    Case("10^6 keys", CHAT, lambda: in_braces("{" + ",".join(f'"k{at}":0' for at in range(1_000_000)) + "}")),
    Case("10^6 unknown parameters", CHAT, lambda: chat(**{f"k{at}": 0 for at in range(1_000_000)})),
    Case("number of 10^7 digits", CHAT, lambda: in_braces("1" * 10_000_000)),
    Case("10^6 numbers of 20 digits", CHAT, lambda: in_braces("[" + ",".join(["9" * 20] * 1_000_000) + "]")),
    Case("10 MB that are not UTF-8", CHAT, lambda: in_braces('"') + b"\xff" * 10_000_000),
    Case("10^6 lone surrogates", CHAT, lambda: chat(user("\ud800" * 1_000_000))),
    Case(
        "20 MB base64 data URL",
        CHAT,
        lambda: chat(user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000_000}}])),
    ),
    Case("60 MB of metadata", CHAT, lambda: chat(metadata={f"k{at}": "v" * 50 for at in range(1_000_000)})),
    Case("60 MB user", CHAT, lambda: chat(user="u" * 60_000_000)),
    Case("1 MB model name", CHAT, lambda: chat(model="m" * 1_000_000)),
    Case(
        "100 MB gzip bomb",
        CHAT,
        lambda: gzip.compress(chat(user("a" * 100_000_000))),
        headers="Content-Encoding: gzip\r\n",
    ),
    Case(
        "slow chunked body of 8 MB",
        COMPLETIONS,
        lambda: (
            [part := prompt("word " * 1_600_000)][:0] + [part[at : at + 80_000] for at in range(0, len(part), 80_000)]
        ),
    ),
    Case("10^5 inputs to embed", EMBEDDINGS, lambda: json.dumps({"input": ["a"] * 100_000}).encode()),
    Case("template that repeats a letter", CHAT, lambda: chat(chat_template="{{ 'a' * 10**10 }}")),
    Case(
        "template that never ends",
        CHAT,
        lambda: chat(chat_template="{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ),
    Case("Responses: 10^6 items", RESPONSES, lambda: json.dumps({"input": [user("a")] * 1_000_000}).encode()),
    Case(
        "Responses: 20 MB instructions",
        RESPONSES,
        lambda: json.dumps({"input": "a", "instructions": WORDS * 5}).encode(),
    ),
    Case(
        "Responses: 20 MB user",
        RESPONSES,
        lambda: json.dumps({"input": "a", "max_output_tokens": 4, "user": WORDS * 5}).encode(),
    ),
    Case(
        "Messages: 10^6 messages",
        MESSAGES,
        lambda: json.dumps({"model": "quire-demo", "max_tokens": 4, "messages": [user("a")] * 1_000_000}).encode(),
    ),
    Case(
        "Messages: 10^6 blocks",
        MESSAGES,
        lambda: json.dumps(
            {"model": "quire-demo", "max_tokens": 4, "messages": [user([{"type": "text", "text": "a"}] * 1_000_000)]}
        ).encode(),
    ),
    Case("64 chats of 60 KB at once", CHAT, lambda: chat(user("word " * 12_000)), 64),
    Case("64 lists of 60 KB at once", CHAT, lambda: chat(*[0] * 20_000), 64),
]


# --- the steady streams, in a process of their own --------------------------------------------------------------


def stream(port: int, control: Connection) -> None:
    """Keep the streams running. Each message on `control` is answered with the longest gap since the last one."""
    body = json.dumps({"messages": [user("Tell me a story.")], "stream": True, "max_tokens": 1900, "ignore_eos": True})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    last: dict[socket.socket, float] = {}

    def begin() -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall((head + body).encode())
        selector.register(connection, selectors.EVENT_READ)

    for _ in range(STREAMS):
        begin()
    longest, events, begun = 0.0, 0, time.perf_counter()
    while True:
        for key, _ in selector.select(0.01):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            received, now = connection.recv(1 << 16), time.perf_counter()
            if connection in last:  # the time to the first token is not a gap
                longest = max(longest, now - max(last[connection], begun))
            last[connection] = now
            events += received.count(b"data: {")
            if not received or b"[DONE]" in received:
                assert b'data: {"error"' not in received, received
                selector.unregister(connection)
                connection.close()
                del last[connection]
                begin()
        if control.poll():
            if control.recv() is None:
                return
            now = time.perf_counter()  # a pause that has not ended yet counts too
            longest = max([longest, *(now - max(at, begun) for at in last.values())])
            control.send((longest, events))
            longest, events, begun = 0.0, 0, now


@contextlib.contextmanager
def streaming(port: int) -> Iterator[Connection]:
    """Run `stream` in a process; yields the other end of its `control`."""
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=stream, args=(port, theirs), daemon=True)
    process.start()
    try:
        yield control
    finally:
        process.kill()
        process.join()


# --- the hostile client --------------------------------------------------------------------------


class Memory(threading.Thread):
    """Samples the resident memory of a process, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._statm = Path(f"/proc/{pid}/statm")
        self.peak = 0
        self.start()

    def now(self) -> int:
        return int(self._statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(self) -> None:
        while True:
            try:
                self.peak = max(self.peak, self.now())
            except (FileNotFoundError, ProcessLookupError):
                return
            time.sleep(0.01)


def send(port: int, case: Case, body: Body, patience: float) -> str:
    """Send the request; returns the status of its answer."""
    head = (
        f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n{case.headers}"
    )
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
            if isinstance(body, list):
                connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                for part in body:
                    connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
                    time.sleep(0.01)
                connection.sendall(b"0\r\n\r\n")
            else:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
                connection.sendall(body)
            status = connection.recv(1 << 16)[9:12].decode()
            while connection.recv(1 << 16):
                pass
            return status
    except TimeoutError:
        return "none"
    except OSError:
        return "cut"


def measure(port: int, case: Case, memory: Memory, streams: Connection, options: argparse.Namespace) -> dict[str, Any]:
    """Status, seconds, gaps in seconds, and memory in bytes."""
    body = case.make()

    def gap() -> float:
        streams.send(True)
        longest: float = streams.recv()[0]
        return longest

    gap()
    time.sleep(options.quiet)
    quiet, memory.peak, begun = gap(), memory.now(), time.perf_counter()
    statuses: list[str] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(send(port, case, body, options.patience)))
        for _ in range(case.count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    time.sleep(max(0.0, 1.0 - seconds))
    during = gap()
    time.sleep(0.5)
    return {
        "name": case.name,
        "status": "/".join(sorted(set(statuses))),
        "seconds": seconds,
        "quiet": quiet,
        "during": max(during, gap()),
        "peak": memory.peak,
        "settled": memory.now(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of bodies")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds of each undisturbed phase")
    parser.add_argument("--rounds", type=int, default=3, help="of each body; the shortest gaps count")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for an answer")
    parser.add_argument("--list", action="store_true", help="print the names of the bodies")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options, arguments = parser.parse_known_args()
    cases = [case for case in CASES if any(word in case.name for word in options.only)]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    with serving("--trust-request-chat-template", *arguments) as server, streaming(server.port) as control:
        time.sleep(3.0)
        memory = Memory(server.api_process.pid)
        idle = memory.now()
        results = []
        if not options.json:
            print("| body | status | seconds | gap before, ms | gap during, ms | peak, MiB | settled, MiB |")
            print("|---|---|---|---|---|---|---|")
        for case in cases:
            rounds = [measure(server.port, case, memory, control, options) for _ in range(options.rounds)]
            found = rounds[-1]
            for name, choose in (("quiet", min), ("during", min), ("seconds", min), ("peak", max)):
                found[name] = choose(one[name] for one in rounds)
            found["peak"], found["settled"] = (max(0, found[name] - idle) / MIB for name in ("peak", "settled"))
            results.append(found)
            if not options.json:
                print(
                    f"| {found['name']} | {found['status']} | {found['seconds']:.2f} | {found['quiet'] * 1e3:.0f} "
                    f"| {found['during'] * 1e3:.0f} | {found['peak']:.0f} | {found['settled']:.0f} |",
                    flush=True,
                )
        if options.json:
            json.dump(results, sys.stdout, indent=1)
            print()
        worst = max(results, key=lambda found: float(found["during"] - found["quiet"]))
        most = max(results, key=lambda found: float(found["peak"]))
        print(
            f"\n{len(results)} bodies; idle {idle / MIB:.0f} MiB. Longest gap above the undisturbed one: "
            f"{(worst['during'] - worst['quiet']) * 1e3:.0f} ms ({worst['name']}; wanted: at most 100). "
            f"Peak above idle: {most['peak']:.0f} MiB ({most['name']}; wanted: at most 512).",
            file=sys.stderr if options.json else sys.stdout,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
