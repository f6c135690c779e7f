"""`quire chat` and `quire complete`: a terminal's end of a running server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

from quire.server.cli.main import main
from tests.fakes.api_server import Server
from tests.fakes.fake_openai import DONE, Connection, event, fake_server

QUIRE = [sys.executable, "-c", "import sys; from quire.server.cli.main import main; sys.exit(main())"]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def send(connection: Connection, *events: bytes) -> None:
    """Events of a stream, all at once."""
    data = b"".join(events)
    connection.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def parrot(connection: Connection) -> None:
    """Answers with the number of messages, and the last one."""
    connection.begin()
    if "messages" in connection.body:
        messages = connection.body["messages"]
        answer = f"{len(messages)}:{messages[-1]['content']}"
        pieces = [chunk(content=piece) for piece in re.findall("..?", answer)]
        send(connection, chunk(role="assistant", content=""), *pieces, event({"choices": []}), DONE)
    else:
        text = connection.body["prompt"][::-1]
        send(connection, *(event({"choices": [{"index": 0, "text": piece}]}) for piece in text), DONE)
    connection.end()


def test_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(parrot) as server:
        assert main(["chat", "--url", server.url, "-q", "hello"]) == 0
        assert capsys.readouterr().out == "1:hello\n"
        more = ["--url", f"{server.url}/v1/", "--api-key", "k", "--system-prompt", "be brief", "--model", "mine"]
        assert main(["chat", *more, "--max-tokens", "5", "--temperature", "0", "--quick", "hello"]) == 0
        assert capsys.readouterr().out == "2:hello\n"
        assert main(["complete", "--url", server.url, "-q", "hello"]) == 0
        assert capsys.readouterr().out == "olleh\n"
        first, second, third = server.asked
    assert (first.path, third.path) == ("/v1/chat/completions", "/v1/completions")
    assert first.body == {"model": "fake/model", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    assert "authorization" not in first.headers
    assert second.headers["authorization"] == "Bearer k"
    assert second.body == {
        "model": "mine",
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.0,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    }
    assert third.body == {"model": "fake/model", "stream": True, "prompt": "hello"}


def test_a_conversation_from_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(parrot) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\nb\n/help\n/clear\nc\n/exit\nd\n"))
        assert main(["chat", "--url", server.url, "--system-prompt", "s"]) == 0
        assert capsys.readouterr().out == "2:a\n4:b\n2:c\n"
        assert server.asked[1].body["messages"][1:] == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "2:a"},
            {"role": "user", "content": "b"},
        ]
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n/clear\nend"))
        assert main(["complete", "--url", server.url]) == 0
        assert capsys.readouterr().out == "cba\nraelc/\ndne\n"


def test_what_goes_wrong_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(connection: Connection) -> None:
        question = connection.body["messages"][-1]["content"]
        if question.isdigit():
            connection.reply(int(question), {"error": {"message": "so\nit is"}})
        elif question == "html":
            data = b"<h1>Bad gateway</h1>"
            connection.writer.write(b"HTTP/1.1 502 X\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        else:
            connection.begin()
            send(connection, chunk(content="well, "))
            if question == "event":
                send(connection, event({"error": {"message": "the engine died"}}), DONE)
                connection.end()
            else:
                await connection.writer.drain()
                connection.writer.close()

    def failure(*arguments: str) -> str:
        assert main(["chat", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    with fake_server(broken) as server:
        url = ("--url", server.url, "-q")
        assert "rejected the API key; set it with --api-key" in failure(*url, "401")
        assert "HTTP 503: so it is" in failure(*url, "503")
        assert "HTTP 502: <h1>Bad gateway</h1>" in failure(*url, "html")
        assert "the engine died" in failure(*url, "event")
        assert "was interrupted" in failure(*url, "gone")
        # In a conversation it goes on.
        monkeypatch.setattr(sys, "stdin", io.StringIO("event\n503\n"))
        assert main(["chat", "--url", server.url]) == 0
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [
            "quire: error: the engine died",
            f"quire: error: {server.url} returned HTTP 503: so it is",
        ]
        assert len(server.asked[-1].body["messages"]) == 1
    gone = failure("--url", server.url, "-q", "x")
    assert "no server answers at" in gone
    assert "start one with `quire serve`" in gone
    assert "expected a URL such as http://localhost:8000" in failure("--url", "localhost:8000")
    for wrong in ("http://", "http://a:b", "http://a:99999", "http://[::1", "ftp://a", "http://a?b=c"):
        assert f"--url {wrong}: expected a URL such as http://localhost:8000" in failure("--url", wrong)
    assert r"--url 'http://a\n': expected a URL" in failure("--url", "http://a\n")
    assert "API key contains characters" in failure("--url", "http://a", "--api-key", "ключ")


def test_ctrl_c_gives_a_line_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str | type[BaseException]] = ["a", KeyboardInterrupt, "b", EOFError]

    def next_line(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", next_line)
    with fake_server(parrot) as server:
        assert main(["complete", "--url", server.url]) == 0
    assert capsys.readouterr().out == "a\n\nb\n"
    assert not lines


class Terminal:
    """`quire` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._end, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHON_BASIC_REPL": "1"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*QUIRE, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_the_terminal,
        )
        os.close(other)
        self.seen = ""

    def until(self, text: str) -> str:
        """The output since the last call, up to this text."""
        while text not in self.seen:
            more = os.read(self._end, 65536)
            assert more
            self.seen += more.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def _own_the_terminal() -> None:
    """Ctrl-C is a signal to the process that owns the terminal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_in_a_terminal() -> None:
    """Ctrl-C stops the answer, which stays in the conversation; Ctrl-D ends it. Thoughts are dimmed."""
    gone = threading.Event()

    async def script(connection: Connection) -> None:
        match connection.body["messages"][-1]["content"]:
            case "long":
                connection.begin()
                send(connection, chunk(content="one two"))
                for _ in range(10_000):
                    await asyncio.sleep(0.01)
                    if connection.writer.transport.is_closing():
                        gone.set()
                        return
                    send(connection, b": still there\n\n")
            case "think":
                connection.begin()
                send(connection, chunk(reasoning_content="hm"), chunk(content="\x1b[31mred\x07"), DONE)
                connection.end()
            case _:
                await parrot(connection)

    with fake_server(script) as server, Terminal("chat", "--url", server.url) as terminal:
        assert "fake/model" in terminal.until("> ")
        terminal.type("long\n")
        terminal.until("one two")
        terminal.type("\x03")
        terminal.until("> ")
        terminal.type("more\n")
        terminal.until("3:more")
        terminal.until("> ")
        terminal.type("think\n")
        thought = terminal.until("> ")
        assert "\x1b[2mhm" in thought
        assert "\x1b[0m[31mred\r\n" in thought  # the escape that would colour the rest is taken out
        assert gone.wait(60)
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
        assert server.asked[1].body["messages"] == [
            {"role": "user", "content": "long"},
            {"role": "assistant", "content": "one two"},
            {"role": "user", "content": "more"},
        ]


def test_they_start_without_what_a_server_needs() -> None:
    program = """
import sys
from quire.server.cli.main import main
for command in ("chat", "complete"):
    assert main([command, "--url", "http://127.0.0.1:1", "-q", "x"]) == 2
print(sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = json.loads(done.stdout.replace("'", '"'))
    assert "httpx" in loaded
    assert not {"torch", "transformers", "tokenizers", "numpy", "fastapi", "pydantic", "zmq", "openai"} & set(loaded)


async def test_with_a_server_of_ours(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, answer in (
        (("chat", "-q", "hello"), "user\nhello\nassistant\n\n"),
        (("complete", "-q", "hello", "--max-tokens", "60"), "hello\n"),
    ):
        assert await asyncio.to_thread(main, [*arguments, "--url", server.url]) == 0
        assert capsys.readouterr().out == answer
    assert await asyncio.to_thread(main, ["chat", "-q", "x", "--url", server.url, "--model", "gpt-9"]) == 2
    assert "HTTP 404: the model 'gpt-9' does not exist; available: " in capsys.readouterr().err
