"""`quire bench serve` against a scripted server."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.server.cli.bench import run
from quire.server.cli.bench.dataset import DatasetOptions
from quire.server.cli.bench.options import ServeOptions
from quire.server.cli.bench.run import BenchRun
from quire.server.cli.bench.serve import measure
from quire.server.cli.main import build_parser, main
from quire.server.config import flags
from tests.fakes.fake_openai import DONE, Connection, FakeServer, event, fake_server, text, usage

SUMMARY_KEYS = """
date backend model_id num_prompts request_rate burstiness max_concurrency random_input_len random_output_len
random_range_ratio random_prefix_len seed duration completed failed total_input_tokens total_output_tokens
request_throughput request_goodput output_throughput total_token_throughput max_output_tokens_per_s
max_concurrent_requests max_client_lag_ms mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms
std_e2el_ms p99_e2el_ms client_cpu_share
"""
DETAILED_KEYS = "input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors"

pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting the garbage of all tests takes longer than a run."""
    monkeypatch.setattr(run, "gc", Mock())


def bench(server: FakeServer, folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON of a run of `quire bench serve` on the server's clock."""
    command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--random-input-len", "6"]
    command += ["--random-output-len", "5", "--save-detailed", "--result-dir", str(folder), "--result-filename", "r"]
    parsed = build_parser().parse_args([*command, "--disable-tqdm", *arguments])
    options, wanted = flags.collect(parsed, ServeOptions), flags.collect(parsed, DatasetOptions)
    assert measure(options, wanted, server.clock) == code
    result: dict[str, Any] = json.loads((folder / "r").read_text())
    return result


async def count(connection: Connection) -> None:
    """The usual answer: a token at once, two together half a second later, and the usage."""
    connection.begin()
    await connection.send(text("one"))
    await connection.send(text(" two three"), after=0.5)
    await connection.send(usage(len(connection.body.get("prompt", "")), 3) + DONE)
    connection.end()


def test_the_names_in_the_result_are_frozen(tmp_path: Path) -> None:
    """People's scripts read them: they are `vllm bench serve`'s where they mean the same."""
    with fake_server(count) as server:
        result = bench(server, tmp_path, "--max-concurrency", "1")
    assert list(result) == [*SUMMARY_KEYS.split(), *DETAILED_KEYS.split()]


def exposition(drafts: int, tokens: int, *accepted: int) -> str:
    """Metrics of two replicas, of which the second has made one draft of one token, and other metrics."""
    name = "vllm:spec_decode_num"
    lines = ["# TYPE vllm:prompt_tokens counter", 'vllm:prompt_tokens_total{engine="0"} 7']
    for count, number in (("drafts", drafts), ("draft_tokens", tokens), ("accepted_tokens", sum(accepted))):
        lines.append(f"# TYPE {name}_{count} counter")
        lines += [f'{name}_{count}_total{{engine="0"}} {number}', f'{name}_{count}_total{{engine="1"}} 1']
    lines.append(f"# TYPE {name}_accepted_tokens_per_pos counter")
    for position, number in enumerate(accepted):
        lines.append(f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {number}')
    return "\n".join([*lines, ""])


def test_drafts_of_the_run_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(count) as server:
        server.metrics = [exposition(10, 30, 5, 2), exposition(30, 90, 20, 7)]
        result = bench(server, tmp_path)
    drafts = {name: value for name, value in result.items() if name.startswith("spec_decode")}
    assert drafts == {
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 20,
        "spec_decode_acceptance_rate": pytest.approx(100 / 3),
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.25],
    }
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("drafts accepted"))
    assert line.split() == ["drafts", "accepted", "33.3", "%", "(2.00", "tokens", "a", "row", "with", "drafts)"]


@pytest.mark.parametrize("metrics", [[None] * 2, ["{not metrics"] * 2, [exposition(3, 9, 4)] * 2])
def test_without_drafts_nothing_is_said_of_them(metrics: list[str | None], tmp_path: Path) -> None:
    with fake_server(count) as server:
        server.metrics = list(metrics)
        assert not [name for name in bench(server, tmp_path) if name.startswith("spec_decode")]


def test_tokens_and_times_are_those_of_the_script(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        connection.begin()
        await connection.send(text("one")[:9], after=0.25)  # cut inside an event: no token yet
        await connection.send(text("one")[9:], after=0.75)
        await connection.send(text(" two three"), after=0.5)
        await connection.send(usage(6, 3) + DONE)
        connection.end()

    with fake_server(script) as server:
        result = bench(server, tmp_path, "--max-concurrency", "1", "--goodput", "ttft:1000", "tpot:249")
    assert result["ttfts"] == pytest.approx([1.0] * 3)
    assert [result["itls"], result["latencies"]] == [[pytest.approx([0.5])] * 3, pytest.approx([1.5] * 3)]
    assert result["start_times"] == pytest.approx([0.0, 1.5, 3.0])
    assert result["mean_tpot_ms"] == pytest.approx(250)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (3, 18, 9)
    assert result["output_throughput"] == pytest.approx(9 / 4.5)
    assert result["request_goodput"] == 0
    assert result["generated_texts"] == ["one two three"] * 3
    prompts = [asked.body["prompt"] for asked in server.asked[1:]]  # the first was to see whether ids are taken
    assert [len(prompt) for prompt in prompts] == [6, 6, 6]
    body = server.asked[1].body | {"prompt": None}
    assert body == {
        "model": "fake/model",
        "prompt": None,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert server.num_connections == 1


def test_what_is_asked_can_be_changed(tmp_path: Path) -> None:
    with fake_server(count) as server:
        more = ("--no-ignore-eos", "--temperature", "0", "--extra-body", '{"top_p": 0.5, "max_tokens": 9}')
        bench(server, tmp_path, *more, "--model", "other", "--api-key", "secret", "--num-warmups", "2")
    assert len(server.asked) == 1 + 2 + 3
    assert len({tuple(asked.body["prompt"]) for asked in server.asked}) == 6
    asked = server.asked[-1]
    assert asked.headers["authorization"] == "Bearer secret"
    assert "ignore_eos" not in asked.body
    assert (asked.body["model"], asked.body["temperature"], asked.body["top_p"]) == ("other", 0, 0.5)
    assert asked.body["max_tokens"] == 9


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("/", "/v1/completions"),
        ("/v1", "/v1/completions"),
        ("/v1/", "/v1/completions"),
        ("/a/b", "/a/b/v1/completions"),
    ],
)
def test_a_base_url_may_end_as_openai_clients_have_it(tmp_path: Path, base: str, path: str) -> None:
    with fake_server(count) as server:
        server.url += base
        bench(server, tmp_path)
    assert {asked.path for asked in server.asked} == {path}


def test_chat_is_asked_with_text_of_the_right_length(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        words = connection.body["messages"][0]["content"].split()
        connection.begin()
        await connection.send(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await connection.send(event({"choices": [{"index": 0, "delta": {"content": "hi"}}]}), after=1)
        await connection.send(usage(5 + 2 * len(words), 1) + DONE)
        connection.end()

    with fake_server(script) as server:
        more = ("--backend", "openai-chat", "--random-input-len", "95", "--random-prefix-len", "10")
        result = bench(server, tmp_path, *more, "--max-concurrency", "1")
    assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}
    assert result["input_lens"] == [105] * 3
    assert result["ttfts"] == pytest.approx([1.0] * 3)
    assert result["backend"] == "openai-chat"


def test_a_server_without_token_ids_gets_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(connection: Connection) -> None:
        if not isinstance(connection.body["prompt"], str):
            return connection.reply(422, {"detail": "prompt: a string is expected"})
        connection.begin()
        await connection.send(text("hi") + usage(len(connection.body["prompt"].split()), 1) + DONE)
        connection.end()

    with fake_server(script) as server:
        assert bench(server, tmp_path)["input_lens"] == [6, 6, 6]
    assert "token ids were rejected (422: prompt: a string is expected)" in capsys.readouterr().err


def test_failures_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(connection: Connection) -> None:
        match len(server.asked):
            case 2:
                connection.reply(429, {"error": {"message": "too many requests", "type": "x"}})
            case 3:
                connection.begin()
                await connection.send(text("one"))
                connection.writer.close()
            case 4:
                connection.begin()
                await connection.send(text("one") + event({"error": {"message": "the engine is gone"}}) + DONE)
                connection.end()
            case 5:
                connection.writer.write(b"SSH-2.0-OpenSSH\r\n")
            case 6:
                connection.reply(200, {"choices": [{"text": "not streamed"}]})
            case 7:
                connection.writer.write(b"HTTP/1.1 500 X\r\n\r\n<html>broken")  # ends with its connection
                connection.writer.close()
            case _:
                await count(connection)

    with fake_server(script) as server:
        result = bench(server, tmp_path, "--num-prompts", "8", "--max-concurrency", "1")
    assert (result["completed"], result["failed"]) == (2, 6)
    assert result["errors"][0] == "429: too many requests"
    assert result["errors"][1] == "the server closed the connection before the end of its response"
    assert result["errors"][2] == "the engine is gone"
    assert result["errors"][3].startswith("the server sent an invalid HTTP response")
    assert result["errors"][4] == "the response has no tokens"
    assert result["errors"][5] == "500: <html>broken"
    assert result["errors"][6:] == ["", ""]
    assert result["output_lens"] == [0] * 6 + [3, 3]
    out = capsys.readouterr().out
    assert "failed 1 ×: 429: too many requests" in out
    assert "and 1 other errors" in out


def test_all_failed_is_a_failure_and_can_be_drawn(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        if len(server.asked) == 1:
            return await count(connection)
        connection.reply(503, {"error": "loading"})

    with fake_server(script) as server:
        assert bench(server, tmp_path, "--plot", str(tmp_path / "run.svg"), code=1)["failed"] == 3
    assert b"no values" in (tmp_path / "run.svg").read_bytes()


def test_a_connection_closed_while_idle_is_no_failure(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        await count(connection)
        connection.writer.close()  # without having said so

    with fake_server(script) as server:
        assert bench(server, tmp_path, "--max-concurrency", "1")["completed"] == 3
    assert server.num_connections >= 4


def test_it_waits_until_the_server_is_ready(tmp_path: Path) -> None:
    async def script(connection: Connection) -> None:
        if len(server.asked) < 4:
            return connection.reply(503, {"error": {"message": "the model is still loading"}})
        await count(connection)

    with fake_server(script) as server:
        assert bench(server, tmp_path, "--ready-check-timeout-sec", "60")["completed"] == 3


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot(tmp_path: Path, suffix: str) -> None:
    async def script(connection: Connection) -> None:
        if len(server.asked) == 3:
            return connection.reply(429, {})
        await count(connection)

    with fake_server(script) as server:
        bench(server, tmp_path, "--plot", str(tmp_path / f"run{suffix}"), "--request-rate", "10")
    data = (tmp_path / f"run{suffix}").read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
    else:
        assert b"fake/model: 3 requests at 10/s, Poisson" in data
        assert b"failed" in data


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a refusal, which is not a traceback."""
    try:
        code: int | str | None = main(["bench", *arguments])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_the_users_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, complaint in (
        (["--goodput", "ttft=500"], "--goodput ttft=500: expected NAME:MILLISECONDS"),
        (["--metric-percentiles", "many"], "--metric-percentiles many"),
        (["--percentile-metrics", "speed"], "unknown metric 'speed'"),
        (["--request-rate", "0"], "--request-rate 0: must be greater than 0"),
        (["--burstiness", "-1"], "--burstiness -1"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--endpoint", "v1/completions"], "--endpoint v1/completions: expected a path"),
        (["--extra-body", "[1]"], "--extra-body [1]: expected a JSON object"),
        (["--extra-body", "{"], "--extra-body {: expected a JSON object"),
        (["--random-range-ratio", "1"], "--random-range-ratio 1.0"),
        (["--base-url", "127.0.0.1:8000"], "--base-url 127.0.0.1:8000: expected a URL such as"),
        (["--base-url", "http://127.0.0.1:port"], "--base-url http://127.0.0.1:port: expected a URL such as"),
        (["--base-url", "http://[::1"], "--base-url http://[::1: expected a URL such as"),
        (["--plot", "run.gif"], "--plot run.gif: the name must end in .png"),
        (["--plot", "/proc/none/run.png"], "--plot /proc/none/run.png: cannot write the file"),
        (["--save-result", "--result-dir", "/proc/none"], "cannot write the file"),
        (["--num-prompt", "3"], "--num-prompt"),
        (["--backend", "tgi"], "invalid choice: 'tgi'"),
    ):
        assert complaint in refusal(capsys, "serve", *arguments)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "quire-llm[bench]"' in refusal(capsys, "serve", "--plot", str(tmp_path / "run.png"))


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    port = str(free_port)
    line = refusal(capsys, "serve", "--port", port)
    assert line.startswith(f"quire: error: cannot read http://127.0.0.1:{port}/v1/models: Connection refused")
    assert "failed the first request" in refusal(capsys, "serve", "--port", port, "--model", "named")


def test_a_server_that_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(connection: Connection) -> None:
        connection.reply(400, {"error": {"message": "ignore_eos is not a parameter of this API"}})

    with fake_server(script) as server:
        line = refusal(capsys, "serve", "--base-url", server.url)
    assert "failed the first request: 400: ignore_eos is not a parameter" in line


def test_the_flag_list_is_frozen() -> None:
    """A flag more or less is a decision: change the list with it."""
    parser = build_parser().parse_args(["bench", "serve"]).parser
    names = sorted(name for name in parser._option_string_actions if not name.startswith("--no-"))
    assert " ".join(names) == (
        "--api-key --backend --base-url --burstiness --disable-tqdm --endpoint --extra-body --goodput --help --host "
        "--ignore-eos --input-len --max-concurrency --metric-percentiles --model --num-prompts --num-warmups "
        "--output-len --percentile-metrics --plot --port --random-input-len --random-output-len --random-prefix-len "
        "--random-range-ratio --random-vocab-size --ready-check-timeout-sec --request-rate --result-dir "
        "--result-filename --save-detailed --save-result --seed --temperature -h"
    )


def test_cancelling_leaves_nothing_open() -> None:
    """An interrupt ends the run though the server does not answer."""

    async def script(connection: Connection) -> None:
        if len(server.asked) == 1:
            return await count(connection)
        asked.set()
        await asyncio.Event().wait()

    async def interrupt() -> None:
        options = ServeOptions(base_url=server.url, disable_tqdm=True)
        run = asyncio.create_task(BenchRun(options, DatasetOptions(num_prompts=2), server.clock).measure())
        await asyncio.to_thread(asked.wait)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asked = threading.Event()
    with fake_server(script) as server:
        asyncio.run(interrupt())
