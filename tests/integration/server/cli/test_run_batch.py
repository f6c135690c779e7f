"""`quire run-batch`: every line once, despite interruptions."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.protocol.errors import ConfigError
from quire.server.cli import batch_input, remote
from quire.server.cli.batch_input import BatchLine, LineError, count_lines, read_lines
from quire.server.cli.batch_output import BatchResults
from quire.server.cli.main import main
from tests.fakes.configs import TINY
from tests.fakes.fake_openai import Connection, fake_server
from tests.fakes.sentence import write_modules
from tests.integration.server.cli.test_serve import RUN


def line(custom_id: Any, body: Any = None, **more: Any) -> dict[str, Any]:
    """A request, for completions if nothing else is said."""
    body = {"prompt": "hello", "max_tokens": 20} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **more}


def write(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def command(model: Path, source: Path, target: Path, *flags: str, mode: str = "") -> list[str]:
    """run-batch with a fake core, which echoes."""
    files = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(model), "--load-format", "dummy"]
    return [sys.executable, "-c", RUN, mode, *files, "--device", "cpu", *flags]


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)


# --- lines ----------------------------------------------------------------------------------------------------


def parse(text: str | bytes) -> list[BatchLine]:
    raw = text.encode() if isinstance(text, str) else text
    return list(read_lines(io.BytesIO(raw), lambda url: url == "/v1/completions"))


@pytest.mark.parametrize(
    ("text", "custom_id", "code"),
    [
        (json.dumps(line("a")), "a", None),
        (json.dumps(line("ü\n", extra=1)), "ü\n", None),
        (json.dumps(line("a", {"stream": False})), "a", None),
        ("{", None, "invalid_json_line"),
        ("[]", None, "invalid_json_line"),
        ("nonsense", None, "invalid_json_line"),
        ("[" * 100_000, None, "invalid_json_line"),
        (json.dumps(line("a"))[:-5], None, "invalid_json_line"),
        ("{}", None, "missing_required_parameter"),
        (json.dumps(line("")), None, "missing_required_parameter"),
        (json.dumps(line(5)), None, "missing_required_parameter"),
        (json.dumps(line("a", method="GET")), "a", "invalid_method"),
        (json.dumps(line("a", url="/v1/nothing")), "a", "invalid_url"),
        (json.dumps(line("a", url=["/v1/completions"])), "a", "invalid_url"),
        (json.dumps(line("a", [])), "a", "missing_required_parameter"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "a", "missing_required_parameter"),
        (json.dumps(line("a", {"stream": True})), "a", "invalid_request"),
    ],
)
def test_a_line(text: str, custom_id: str | None, code: str | None) -> None:
    (parsed,) = parse(text)
    assert parsed.custom_id == custom_id
    assert (parsed.problem.code if parsed.problem else None) == code
    if code is None:
        assert json.loads(parsed.body) == json.loads(text)["body"]


def test_lines_are_counted_with_those_that_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 1000)
    fits = json.dumps(line("a", {"prompt": ""}))
    fits = fits.replace('""', f'"{"x" * (1000 - 1 - len(fits))}"') + "\n"
    assert len(fits) == 1000
    text = "\n".join([json.dumps(line("1")), "", "  \r"]) + "\n" + fits + fits.replace('"x', '"xx') + "x" * 5000 + "\n"
    text += json.dumps(line("7"))  # without a line feed
    assert [(each.number, each.problem is None) for each in parse(text)] == [
        (1, True),
        (4, True),
        (5, False),
        (6, False),
        (7, True),
    ]
    (tmp_path / "in").write_text(text)
    assert count_lines(str(tmp_path / "in")) == 7
    (tmp_path / "in").write_text("")
    assert count_lines(str(tmp_path / "in")) == 0


# --- records --------------------------------------------------------------------------------------------------


def test_half_a_line_is_cut_off_and_the_rest_is_known(tmp_path: Path) -> None:
    path = tmp_path / "out"
    asked = [BatchLine(1, "a"), BatchLine(2, None), BatchLine(4, "a")]  # one name twice, and one line without
    with BatchResults(str(path)) as results:
        assert not any(map(results.has, asked))
        results.answer(asked[0], 200, "r", {"text": "ü\n"})
        results.write_error(asked[1], LineError("code", "text"))
        results.answer(asked[2], 400, "r", {})
    whole = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(whole) if byte == 10)]
    assert len(starts) == 4
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        with BatchResults(str(path)) as results:
            known = [results.has(each) for each in asked]
            count = sum(start <= end for start in starts[1:])
            assert known == [at < count for at in range(3)]
            assert (results.count, results.has(BatchLine(3, "b")), results.has(BatchLine(9, "b"))) == (
                count,
                False,
                False,
            )
            for each, is_known in zip(asked, known, strict=True):
                if not is_known:
                    results.answer(each, 200, "r", {})
        assert [record["id"] for record in records(path)] == ["batch_req_1", "batch_req_2", "batch_req_4"]
    assert records(path)[0] == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "ü\n"}},
        "error": None,
    }


def test_a_file_of_others_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text in (
        "hello",
        "hello\n",
        "{}\n",
        '{"id": "vllm-1", "custom_id": "a"}\n',
        '{"id": "batch_req_0", "custom_id": "a"}\n',
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match="line 1 was not written by `quire run-batch`"):
            BatchResults(str(path))
        assert path.read_text() == text
    path.unlink()
    with BatchResults(str(path)) as results:
        results.answer(BatchLine(1, "a"), 200, "r", {})
    with BatchResults(str(path)) as results:
        for other in (BatchLine(1, "b"), BatchLine(1, None)):
            with pytest.raises(ConfigError, match="was written for another input file"):
                results.has(other)
        with pytest.raises(ConfigError, match="another run is writing"):
            BatchResults(str(path))
    with pytest.raises(ConfigError, match="-o /no/such/file: No such file"):
        BatchResults("/no/such/file")


# --- runs -----------------------------------------------------------------------------------------------------


def test_every_line_has_its_answer_or_its_error(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any server's key in the environment."""
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    message = {"messages": [{"role": "user", "content": "hi"}]}
    asked: list[dict[str, Any] | str] = [
        line("chat", message, url="/v1/chat/completions"),
        "not JSON",
        "",
        line("twice"),
        line("twice"),
        line("tokens", {"prompt": "hello"}, url="/tokenize"),
        line("new", {}, url="/v1/nothing"),
        line("wrong", {"prompt": "a", "top_p": 2}),
        line("fails", {"prompt": "a<fail>"}),
        line("model", {"prompt": "a", "model": "gpt-9"}),
        line("template", {**message, "chat_template": "{{ messages[0].content }}"}, url="/v1/chat/completions"),
        line("surrogate", {"prompt": "\ud800"}),
    ]
    names = [each["custom_id"] if isinstance(each, dict) else None for each in asked[:-1]] + [None]
    target = tmp_path / "out"
    done = run(model_folder, write(tmp_path / "in", asked), target, "--served-model-name", "echo")
    assert done.returncode == 0, done.stderr
    assert "11 lines processed" in done.stdout
    assert "7 of them with an error" in done.stdout
    by_line = {int(record["id"].removeprefix("batch_req_")): record for record in records(target)}
    assert sorted(by_line) == [1, 2, *range(4, 13)]
    status = {number: (each["response"] or {}).get("status_code") for number, each in by_line.items()}
    assert status == {1: 200, 2: None, 4: 200, 5: 200, 6: 200, 7: None, 8: 400, 9: 500, 10: 404, 11: 400, 12: None}
    for number, record in by_line.items():
        assert record.keys() == {"id", "custom_id", "response", "error"}
        assert (record["response"] is None) == (record["error"] is not None)
        assert record["custom_id"] == names[number - 1]
    assert by_line[1]["response"]["body"]["choices"][0]["message"]["content"] == "user\nhi\nassistant\n"
    assert by_line[1]["response"]["request_id"].startswith("req_")
    assert by_line[4]["response"]["body"]["choices"][0]["text"] == "hello"
    assert by_line[7]["error"]["code"] == "invalid_url"
    assert by_line[10]["response"]["body"]["error"]["code"] == "model_not_found"
    assert by_line[11]["response"]["body"]["error"]["param"] == "chat_template"
    again = run(model_folder, tmp_path / "in", target, "--served-model-name", "echo")
    assert (again.returncode, len(records(target))) == (0, 11)
    assert "all 11 lines have responses already" in again.stdout
    write(tmp_path / "in", asked[::-1])
    other = run(model_folder, tmp_path / "in", target)
    assert other.returncode == 2
    assert "was written for another input file: its line 1 does not" in other.stderr


def test_how_the_model_chats_may_be_said(model_folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 20, "chat_template": "<think>{{ messages[0].content | upper }}"}
    source = write(tmp_path / "in", [line("a", body, url="/v1/chat/completions")])
    flags = ("--trust-request-chat-template", "--reasoning-parser", "deepseek_r1")
    done = run(model_folder, source, target := tmp_path / "out", *flags)
    assert done.returncode == 0, done.stderr
    assert "HI" in records(target)[0]["response"]["body"]["choices"][0]["message"]["reasoning"]


@pytest.mark.slow
def test_killed_and_gone_on_with(model_folder: Path, tmp_path: Path) -> None:
    """By SIGKILL, as by SIGTERM, which has no handler; and then by Ctrl-C."""
    count = 200
    source = write(tmp_path / "in", [line(f"id-{number}", {"prompt": f"hello {number}"}) for number in range(count)])
    target = tmp_path / "out"
    target.touch()
    flags = ("--max-num-seqs", "4", "--max-concurrency", "4")
    for how in (signal.SIGKILL, signal.SIGINT):
        before = target.stat().st_size
        arguments = command(model_folder, source, target, *flags, mode="slow")  # so that it is not done before
        with subprocess.Popen(arguments, stdout=-3, stderr=-3) as process:
            while target.stat().st_size < before + 8_000 and process.poll() is None:
                time.sleep(0.001)
            assert process.poll() is None, "it was to be stopped on its way"
            process.send_signal(how)
            assert process.wait(60) in (-how, 130)
        with target.open("ab") as file:  # as if it had been in the middle of a write
            file.write(b'{"id":"batch_req_199","custom_id":"id-1')
    assert 20 < len(target.read_bytes().splitlines()) < count
    done = run(model_folder, source, target)
    assert done.returncode == 0, done.stderr
    counted = Counter(record["custom_id"] for record in records(target))
    assert counted == {f"id-{number}": 1 for number in range(count)}
    for record in records(target):
        assert record["response"]["body"]["choices"][0]["text"] == f"hello {record['custom_id'][3:]}"


@pytest.mark.slow
def test_a_line_that_kills_the_engine_gets_an_error_and_the_others_go_on(model_folder: Path, tmp_path: Path) -> None:
    asked = [line("a"), line("b"), line("dies", {"prompt": "<vanish>"}), line("c")]
    done = run(model_folder, write(tmp_path / "in", asked), tmp_path / "out", "--max-concurrency", "1")
    assert done.returncode == 0
    assert "the engine core exited with code 3; restarting it" in done.stderr
    assert "Traceback" not in done.stderr
    found = {record["custom_id"]: record["response"] for record in records(tmp_path / "out")}
    assert {name: response["status_code"] for name, response in found.items()} == {
        "a": 200,
        "b": 200,
        "dies": 500,
        "c": 200,
    }
    assert "times while it ran this request, which is given up" in found["dies"]["body"]["error"]["message"]


def test_what_cannot_begin_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = str(write(tmp_path / "in", [line("a")]))
    target = str(tmp_path / "out")
    for arguments, complaint in (
        ((), "-i FILE -o FILE"),
        (("-i", source), "-i FILE -o FILE"),
        (("-i", str(tmp_path / "none"), "-o", target), "not a readable file"),
        (("-i", source, "-o", source), "the same file"),
        (("-i", source, "-o", str(tmp_path)), f"-o {tmp_path}"),
        (("-i", source, "-o", target, "--max-concurrency", "0"), "--max-concurrency 0"),
        (("-i", source, "-o", target, "--url", "localhost"), "--url localhost: expected a URL"),
        (("-i", source, "-o", target, "--url", "http://a:b"), "--url http://a:b: "),
        (("-i", source, "-o", target, "--url", "http://a", "-tp", "2"), "--tensor-parallel-size has no effect"),
        (
            ("-i", source, "-o", target, "--url", "http://a", "--tool-call-parser", "none"),
            "--tool-call-parser has no effect",
        ),
        (("-i", source, "-o", target, "--url", "http://a", "--model", "m"), "--model has no effect"),
        (("-i", source, "-o", target, str(tmp_path / "none")), "no such model folder"),
    ):
        assert main(["run-batch", *arguments]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1


# --- memory ---------------------------------------------------------------------------------------------------

MEMORY = """
import asyncio, json, sys
import psutil
from tqdm import tqdm
from quire.server.cli.batch_input import read_lines
from quire.server.cli.batch_output import BatchResults
from quire.server.cli.run_batch import BatchRun, InProcess

ANSWER = json.dumps({"text": "y" * 1000, "usage": {"completion_tokens": 1}}).encode()
seen = []
async def app(scope, receive, send):
    body = (await receive())["body"]
    assert len(body) > 2000
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER})
    counts[0] += 1
    if counts[0] % 1000 == 0:
        seen.append(psutil.Process().memory_info().rss)

counts = [0]
with open(sys.argv[1], "rb") as file, BatchResults(sys.argv[2]) as results:
    backend = InProcess(app)
    backend.serves = lambda url: True
    asyncio.run(BatchRun(read_lines(file, backend.serves), results, backend, tqdm(disable=True)).run(512))
print(json.dumps([counts[0], seen]))
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """10,000 lines make 21 MB in and 11 MB out; a second run reads the first run's output."""
    count, source, target = 10_000, tmp_path / "in", tmp_path / "out"
    with source.open("w") as file:
        for number in range(count):
            file.write(json.dumps(line(f"id-{number}", {"prompt": "x" * 2000})) + "\n")
    assert source.stat().st_size > 20e6

    def measure() -> tuple[int, list[int]]:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, source, target], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        answered, seen = json.loads(done.stdout.splitlines()[-1])
        return answered, seen

    answered, seen = measure()
    assert answered == count
    assert max(seen) - seen[2] < 1e6, "so much more than after 3,000 lines"
    text = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(text[: count - 3000]))
    answered, again = measure()
    assert answered == 3000
    assert max(again) - seen[2] < 1e6
    assert len({record["id"] for record in records(target)}) == count


# --- a server that runs ---------------------------------------------------------------------------------------


def test_a_running_server_is_asked_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "k, l")
    busy = Counter[str]()

    async def script(connection: Connection) -> None:
        prompt = connection.body["prompt"]
        busy[prompt] += 1
        if prompt == "busy" and busy[prompt] < 3:
            connection.reply(429, {"error": {"message": "later"}}, "Retry-After: 0\r\n")
        elif prompt == "down" and busy[prompt] < 2:
            connection.reply(503, {"error": {"message": "the model is still loading"}})
        elif prompt == "bad":
            connection.reply(400, {"error": {"message": "no"}})
        else:
            connection.reply(200, {"usage": {"completion_tokens": 2}}, "X-Request-Id: theirs\r\n")

    source = write(tmp_path / "in", [line(name, {"prompt": name}) for name in ("a", "busy", "bad", "down", "b")])
    target = tmp_path / "out"
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--max-concurrency", "1", "--url"]
    with fake_server(script) as server:
        assert main([*arguments, f"{server.url}/v1/"]) == 1
        captured = capsys.readouterr()
        assert "HTTP 503: the model is still loading" in captured.err
        assert main([*arguments, server.url]) == 0
        assert "2 lines processed" in capsys.readouterr().out
        assert {connection.headers["authorization"] for connection in server.asked} == {"Bearer k"}
    assert [(record["custom_id"], record["response"]["status_code"]) for record in records(target)] == [
        ("a", 200),
        ("busy", 200),
        ("bad", 400),
        ("down", 200),
        ("b", 200),
    ]
    assert records(target)[0]["response"]["request_id"] == "theirs"
    write(source, [line(name, {"prompt": name}) for name in ("a", "busy", "bad", "down", "b", "c")])
    assert main([*arguments, server.url]) == 1  # it has gone
    assert "no server answers at" in capsys.readouterr().err


FULL = """
import resource, sys
from quire.server.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def test_a_full_disk_ends_the_run_in_one_line_and_it_can_go_on(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        await asyncio.sleep(0)
        connection.reply(200, {"text": "x" * 1000})

    source, target = write(tmp_path / "in", map(line, range_of_names := [str(n) for n in range(40)])), tmp_path / "out"
    with fake_server(script) as server:
        arguments = ["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--max-concurrency", "8"]
        room = (5_000, 12_345)
        for size in room:
            command = [sys.executable, "-c", FULL, str(size), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1, done.stderr
            assert target.stat().st_size == size
            complaint, hint = done.stderr.splitlines()[-2:]
            assert complaint == f"quire: error: -o {target}: File too large"  # as of a disk that is full, but its own
            assert "again to resume" in hint
            assert "Traceback" not in done.stderr
        assert main(arguments) == 0
    assert sorted(record["custom_id"] for record in records(target)) == sorted(range_of_names)


def test_a_server_that_refuses_the_key_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(connection: Connection) -> None:
        await asyncio.sleep(0)
        connection.reply(401, {"error": {"message": "no"}})

    source = write(tmp_path / "in", [line("a"), line("b")])
    with fake_server(script) as server:
        assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--url", server.url]) == 1
    assert "rejected the API key" in capsys.readouterr().err
    assert records(tmp_path / "out") == []
    assert remote.error_text(b"<h1>Bad\nGateway</h1>") == "<h1>Bad Gateway</h1>"


def test_a_file_of_requests_for_embeddings(model_folder: Path, tmp_path: Path) -> None:
    for path in model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    folder = write_modules(tmp_path, "lasttoken", {})
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": [f"text {n}", "b"]}}
        for n in range(5)
    ]
    wrong = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hello"}]},
    }
    source, target = write(tmp_path / "in.jsonl", [*asked, wrong]), tmp_path / "out.jsonl"
    done = run(folder, source, target)
    assert done.returncode == 0, done.stderr
    found = {record["custom_id"]: record["response"] for record in records(target)}
    assert len(found) == 6
    for n in range(5):
        body = found[f"r{n}"]["body"]
        assert found[f"r{n}"]["status_code"] == 200
        assert [entry["index"] for entry in body["data"]] == [0, 1]
        assert len(body["data"][0]["embedding"]) == TINY.hidden_size
    assert found["chat"]["status_code"] == 400
    assert "/v1/embeddings" in json.dumps(found["chat"])
