"""The command line: its flags, its errors, and a server from start to stop in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

import quire
from quire.engine.config.options import EngineOptions
from quire.engine.protocol.adapters import AdapterRef
from quire.engine.protocol.errors import ConfigError
from quire.engine.repository.adapter_folder import open_adapter
from quire.server.cli.main import build_parser, main
from quire.server.cli.serve_options import read_options
from quire.server.config.flags import add_flags
from quire.server.config.server_options import ServerOptions
from tests.fakes.adapters import Q, write_adapter
from tests.fakes.api_server import TLS
from tests.fakes.fake_core import adapter_token
from tests.fakes.tokenizers import write_slow_files
from tests.fakes.waiting import until

FLAGS = """
--access-log --admin-key --all2all-backend --allow-credentials --allowed-headers --allowed-local-media-path
--allowed-media-domains --allowed-media-networks --allowed-methods --allowed-origins --api-key --api-key-file
--api-server-count --attention-backend --auto --block-size --chat-template --client-body-timeout --client-header-timeout
--cluster-timeout-seconds --cluster-token --cluster-token-file --config --cuda-graph-sizes --data-parallel-address
--data-parallel-rpc-port --data-parallel-size --data-parallel-size-local --data-parallel-start-rank
--decode-context-parallel-size --decode-replicas
--default-chat-template-kwargs --device --disable-access-log-for-endpoints --disable-custom-all-reduce
--distributed-executor-backend --distributed-timeout-seconds --download-dir --dtype --enable-chunked-prefill
--enable-eplb --enable-expert-parallel --enable-force-include-usage --enable-lora --enable-mm-embeds
--enable-per-request-metrics --enable-prefix-caching --encoder-cache-size --enforce-eager --eplb-step-interval
--expert-placement-strategy --fair-share --fair-share-weights --file-storage-gb --file-storage-path --generation-config
--gpu-memory-utilization --headless --help --hf-overrides --host --itl-target-ms --keep-billing-header --kv-cache-dtype
--kv-cache-memory-bytes --kv-disk
--kv-disk-bandwidth --kv-events-config --kv-offloading-size --kv-peer-bandwidth --kv-peer-port --kv-peers
--language-model-only --limit-mm-per-prompt
--load-format --log-config-file --log-format --log-level --log-prompts --long-prefill-token-threshold --lora-disk-gb
--lora-memory --lora-modules --lora-resolver --lora-root --master-addr --master-port --max-body-mib
--max-connections-per-client --max-log-len --max-logprobs --max-lora-rank --max-loras --max-media-bytes --max-model-len
--max-num-batched-tokens --max-num-partial-prefills --max-num-seqs --max-queue --max-restarts --media-fetch
--media-fetch-timeout --media-io-kwargs --metrics-key --mm-encoder-quantization --mm-encoder-tp-mode
--mm-processor-cache-gb --mm-processor-kwargs --model-impl --nnodes --no-access-log --no-allow-credentials --no-auto
--no-disable-custom-all-reduce --no-enable-chunked-prefill --no-enable-eplb --no-enable-expert-parallel
--no-enable-force-include-usage --no-enable-lora --no-enable-mm-embeds --no-enable-per-request-metrics
--no-enable-prefix-caching --no-enforce-eager --no-headless --no-keep-billing-header --no-language-model-only
--no-log-prompts --no-media-fetch --no-public-metrics --no-restart --no-return-tokens-as-token-ids
--no-strict-parameters --no-takeover --no-trust-remote-code --no-trust-request-chat-template --no-trust-weights --no-ui
--no-vllm-metrics --node-rank --num-redundant-experts --optimize --otlp-traces-endpoint --override-generation-config
--packed-cache --pipeline-layer-partition --pipeline-parallel-size --port --prefill-context-parallel-size
--prefill-pipeline-parallel-size
--prefill-replicas --prefill-tensor-parallel-size --public-metrics --quantization --reasoning-parser --request-timeout
--restart --return-tokens-as-token-ids --revision --root-path --runner --scheduling-policy --seed --served-model-name
--shutdown-timeout --spec-method --spec-model --spec-tokens --speculative-config --ssl-ca-certs --ssl-cert-reqs
--ssl-certfile --ssl-keyfile --strict-parameters --structured-outputs-fallback --takeover --tensor-parallel-size
--timeout-keep-alive --tokenizer --tool-call-parser --torch-profiler-dir --trust-remote-code
--trust-request-chat-template --trust-weights --uds --ui --vllm-metrics --watchdog-seconds -asc -dcp -dp -dpa -dpl -dpp
-dpr -h -pcp -pp -q -sc -tp
"""

RUN = """
import sys
from quire.server.client import engine_manager
from quire.server.cli.main import main
from tests.fakes import fake_core
mode = sys.argv.pop(1)
engine_manager.start_core = lambda args, folder: fake_core.start_process(args, folder, mode)
code = main()
assert sys.modules.get("torch") is None
large = {"transformers", "uvicorn", "fastapi", "tokenizers"} if sys.argv[1] == "serve" else set()
assert not large & set(sys.modules), "the parent stays small"
sys.exit(code)
"""


def test_the_flag_list_is_frozen() -> None:
    """A flag more or less is a decision: change the list above with it."""
    parser = build_parser().parse_args(["serve"]).parser
    assert sorted(parser._option_string_actions) == FLAGS.split()


CLIENT_FLAGS = {
    "chat": """
--api-key --help --max-tokens --model --model-name --quick --system-prompt --temperature --url -h -q
""",
    "complete": """
--api-key --help --max-tokens --model --model-name --quick --temperature --url -h -q
""",
    "doctor": """
--cluster-token --cluster-token-file --data-parallel-rpc-port --device --distributed-timeout-seconds --download-dir
--help --host --json --master-addr --master-port --nnodes --no-json --node-rank --port -h
""",
    "plan": """
--gpus --input-len --json --network --no-json --nodes
""",
    "profile": """
--api-key --help --no-profile-memory --no-record-shapes --no-with-stack --output --profile-memory --record-shapes
--seconds --url --with-stack -h -o
""",
    "quantize": """
--calibration --download-dir --group-size --help --ignore --method --revision --scheme -h
""",
    "run-batch": """
--allowed-local-media-path --allowed-media-domains --allowed-media-networks --api-key --chat-template
--default-chat-template-kwargs --disable-tqdm --enable-mm-embeds --file-storage-gb --file-storage-path --input-file
--keep-billing-header --log-level --lora-disk-gb --lora-modules --lora-resolver --lora-root --max-concurrency
--max-media-bytes --media-fetch --media-fetch-timeout --media-io-kwargs --mm-processor-cache-gb --mm-processor-kwargs
--model --no-disable-tqdm --no-enable-mm-embeds --no-keep-billing-header --no-media-fetch --no-strict-parameters
--no-trust-request-chat-template --output-file --reasoning-parser --served-model-name --strict-parameters
--structured-outputs-fallback --tool-call-parser --trust-request-chat-template --url -i -o
""",
}


@pytest.mark.parametrize("command", CLIENT_FLAGS)
def test_the_flag_lists_of_the_others_are_frozen_too(command: str) -> None:
    """The engine's flags are `quire serve`'s; `quire plan` takes its server flags, too."""
    flags = set(build_parser().parse_args([command]).parser._option_string_actions)
    if command == "plan":
        assert flags > set(FLAGS.split())
        flags -= set(FLAGS.split())
    if command == "run-batch":
        engine = argparse.ArgumentParser()
        add_flags(engine, EngineOptions)
        assert flags > set(engine._option_string_actions)
        flags -= set(engine._option_string_actions)
    assert sorted(flags) == CLIENT_FLAGS[command].split()


def test_the_version_has_the_commit_if_it_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, shown in (("0123abc-dirty", " (0123abc-dirty)"), ("", "")):
        monkeypatch.setattr("quire.server.cli.main.commit", lambda found=found: found)
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["--version"])
        assert capsys.readouterr().out == f"quire {quire.__version__}{shown}\n"


def serve(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a refusal, which is not a traceback."""
    try:
        code: int | str | None = main(["serve", *arguments])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_the_users_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (str(model_folder), "--load-format", "dummy", "--device", "cpu")
    assert serve(capsys, str(tmp_path / "none")).startswith(f"quire: error: {tmp_path}/none: no such model folder")
    assert "no config.json" in serve(capsys, str(tmp_path))
    assert "sizes that do: 1, 2, 4" in serve(capsys, *model, "-tp", "3")
    assert "or use int8, int4, fp8 or mxfp4" in serve(capsys, *model, "-q", "int3")
    assert "invalid choice: 'float8'" in serve(capsys, *model, "--dtype", "float8")
    assert "--api-key is empty" in serve(capsys, *model, "--api-key", "")
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "")  # an open server would be the result
            assert f"environment variable {name}" in serve(capsys, *model)
    assert "--log-prompts requires --access-log" in serve(capsys, *model, "--log-prompts")
    assert "--log-config-file" in serve(capsys, *model, "--log-config-file", str(tmp_path / "none"))
    assert "--ssl-certfile requires --ssl-keyfile" in serve(capsys, *model, "--ssl-certfile", "cert.pem")
    assert "--api-key-file" in serve(capsys, *model, "--api-key-file", str(tmp_path / "none"))
    assert "--tens" in serve(capsys, *model, "--tens", "2")
    assert "invalid int or auto value: 'many'" in serve(capsys, *model, "--max-num-batched-tokens", "many")
    assert "--itl-target-ms needs --max-num-batched-tokens auto" in serve(
        capsys, *model, "--itl-target-ms", "50", "--max-num-batched-tokens", "512"
    )
    assert "--api-server-count 0" in serve(capsys, *model, "--api-server-count", "0")
    assert "--port 70000" in serve(capsys, *model, "--port", "70000")
    assert "--host" in serve(capsys, *model, "--host", "no.such.host.invalid")
    assert "--uds" in serve(capsys, *model, "--uds", str(tmp_path / "no" / "socket"))
    two = (*model, "-pp", "2", "--nnodes", "2")
    assert "--node-rank 0: node 0 runs the API; omit" in serve(capsys, *two, "--headless")
    assert "--node-rank 1: only node 0 runs the API; start this node with --headless" in serve(
        capsys, *two, "--node-rank", "1"
    )
    assert "with --nnodes 2 it must be from 0 to 1" in serve(capsys, *two, "--node-rank", "2", "--headless")
    assert "--nnodes 3: 2 ranks" in serve(capsys, *two[:-1], "3")
    assert "--headless: say which replicas this host has" in serve(capsys, *model, "--headless")
    assert "--distributed-timeout-seconds must be above 0" in serve(capsys, *two, "--distributed-timeout-seconds", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in serve(
            capsys, *model, "--port", str(port)
        )
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert "the path in TMPDIR is too long" in serve(capsys, *model, "--port", "0")
    assert not list(folder.iterdir())


def test_the_environment_may_name_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def port(*arguments: str) -> int:
        return read_options(build_parser().parse_args(["serve", *arguments]))[1].port

    monkeypatch.setenv("AIP_HTTP_PORT", "8080")
    assert port() == 8080
    assert port("--port", "1") == 1
    file = tmp_path / "quire.yaml"
    file.write_text("port: 2")
    assert port("--config", str(file)) == 2
    monkeypatch.setenv("AIP_HTTP_PORT", "many")
    with pytest.raises(ConfigError, match="AIP_HTTP_PORT=many"):
        port()


def test_errors_in_options_have_the_format_of_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def message(*arguments: str, **environment: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", os.environ | environment)
            with pytest.raises(SystemExit, match=r"^2$"):
                sys.exit(main(arguments))
            return str(json.loads(capsys.readouterr().err)["message"])

    file = tmp_path / "quire.yaml"
    file.write_text("log-format: json\nports: 1")
    assert "AIP_HTTP_PORT=many" in message("serve", "--log-format", "json", AIP_HTTP_PORT="many")
    assert "quire serve: argument --port: invalid int" in message("serve", "--port", "many", "--log_format=json")
    assert "did you mean --port" in message("serve", "--portt", "1", QUIRE_LOG_FORMAT="json")
    assert "unrecognized arguments: --tp;" in message("serve", "--config", str(file), "--tp", "many")
    assert "unknown flag ports; did you mean port?" in message("serve", "--config", str(file))
    assert "invalid choice: 'srve'" in message("srve", "--log-format", "json")
    assert "quire chat: unrecognized arguments: --urll" in message("chat", "--urll", QUIRE_LOG_FORMAT="json")


def test_the_environment_may_name_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def host(*arguments: str) -> str:
        return read_options(build_parser().parse_args(["serve", *arguments]))[1].host

    assert host() == "127.0.0.1"
    monkeypatch.setenv("QUIRE_HOST", "0.0.0.0")
    assert host() == "0.0.0.0"
    assert host("--host", "::1") == "::1"
    file = tmp_path / "quire.yaml"
    file.write_text("host: 10.0.0.1")
    assert host("--config", str(file)) == "10.0.0.1"


def test_a_config_file_gives_defaults_that_the_command_line_overrides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(
        "model: some/model\ntensor-parallel-size: 2\nenable_prefix_caching: false\nserved-model-name: [a, b]\n"
        "gpu-memory-utilization: 0.5\npipeline-layer-partition: 3,2,1\napi-key: null\nseed: -1\n"
    )
    parsed = build_parser().parse_args(["serve", "--config", str(file), "-tp", "4", "--port", "1"])
    engine, server = read_options(parsed)
    assert engine == EngineOptions(
        model="some/model",
        tensor_parallel_size=4,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        pipeline_layer_partition="3,2,1",
        seed=-1,
    )
    assert server == ServerOptions(served_model_name=("a", "b"), port=1)
    for text, complaint in (
        ("no-such-flag: 1", "unknown flag no-such-flag"),
        ("config: x.yaml", "unknown flag config"),
        ("- a", "expected a mapping of flags"),
        ("a: [", "cannot read the file"),
        ("port: many", "argument --port: invalid int value"),
    ):
        file.write_text(text)
        assert complaint in serve(capsys, "--config", str(file))
    assert "cannot read the file" in serve(capsys, "--config", str(tmp_path / "none.yaml"))


def test_every_option_is_a_flag() -> None:
    for options in (EngineOptions, ServerOptions):
        for name, field in options.__dataclass_fields__.items():
            assert "help" in field.metadata or name == "model"


@contextlib.contextmanager
def running(model: Path, *arguments: str, mode: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a fake core, and its address once it has logged it (empty if it ends before)."""
    command = [sys.executable, "-c", RUN, mode, "serve", str(model), "--load-format", "dummy", "--device", "cpu"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = ""
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on (\S+)", line):
                address = found[1]
                break
        try:
            yield process, address or "".join(lines)
        finally:
            process.terminate()


def until_logged(process: subprocess.Popen[str], text: str) -> None:
    """Read the log of a server, up to a line with this text."""
    lines = list[str]()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if text in line:
                break

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(120)
    assert text in "".join(lines), lines


def test_auto_serves_what_plan_prints(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the processors of this machine, whose bandwidth both measure."""
    assert main(["plan", str(model_folder), "--load-format", "dummy", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "TFLOPS in 32 / 16 / 8 bits" in printed
    assert f"quire serve {model_folder} --load-format dummy --device cpu" in printed
    with running(model_folder, "--port", "0", "--auto") as (process, url):
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == 0, err
    tokens = re.search(r"KV cache holds ([\d,]+) tokens", out)
    assert tokens is not None
    assert f"  {tokens[1]}  " in printed


def test_serve_answers_and_stops_on_a_signal(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And removes its folder. After SIGKILL: tests/e2e/test_failures.py."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    flags = ("--port", "0", "--shutdown-timeout", "0.2", "--served-model-name", "echo", "alias")
    with running(model_folder, *flags) as (process, url):
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["echo", "alias"]
        assert len(list(folder.iterdir())) == 1
        body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a<hang>", "stream": True}, timeout=60
        ) as response:
            process.send_signal(signal.SIGTERM)
            assert "the server is shutting down" in response.read().decode()
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "requests at the full length of 128" in out
    assert "Traceback" not in err
    assert not list(folder.iterdir())


def test_running_requests_finish_after_sigterm(model_folder: Path, tmp_path: Path) -> None:
    """New ones are sent elsewhere meanwhile."""
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}
    (gate := tmp_path / "gate").touch()
    with running(model_folder, "--port", "0", mode=f"held until {gate}") as (process, url):
        assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        gate.unlink()
        with (
            httpx.Client(base_url=url, timeout=60) as other,
            httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response,
        ):
            lines = response.iter_lines()
            events = [next(lines)]
            assert other.get("/health/live").status_code == 200
            process.send_signal(signal.SIGTERM)
            until(lambda: other.get("/health/ready").status_code != 200)
            refused = other.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "retry-after" in refused.headers
            assert other.get("/health/live").status_code == 200
            gate.touch()
            events += lines
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in events if line.startswith("data: {")]
        assert "".join(texts) == whole
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_serve_ends_when_its_core_dies_and_is_not_restarted(model_folder: Path) -> None:
    with running(model_folder, "--port", "0", "--no-restart") as (process, url):
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a<vanish>"}, timeout=60)
        assert response.status_code == 503
        assert "exited with code 3" in response.json()["error"]["message"]
        _, err = process.communicate()
    assert process.returncode == 1
    assert "exited with code 3" in err


def test_serve_that_cannot_start_says_why(model_folder: Path) -> None:
    with running(model_folder, "--port", "0", mode="dead") as (process, err):
        assert process.wait() == 1
    assert "quire: error: the weights do not fit" in err
    assert "Traceback" not in err


def test_health_answers_while_loading(model_folder: Path, free_port: int) -> None:
    command = [sys.executable, "-c", RUN, "loading", "serve", str(model_folder), "--load-format", "dummy"]
    with subprocess.Popen([*command, "--port", str(free_port)], stdout=subprocess.DEVNULL) as process:

        def health() -> list[httpx.Response]:
            with contextlib.suppress(httpx.TransportError):
                return [httpx.get(f"http://127.0.0.1:{free_port}/health", timeout=60)]
            return []

        (response,) = until(health, seen=process.poll)
        assert (response.status_code, response.json()["reason"]) == (503, "the model is still loading")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_second_signal_ends_it_at_once(model_folder: Path) -> None:
    """Neither requests nor processes that do not stop are waited for."""
    with running(model_folder, "--port", "0", "--shutdown-timeout", "600", mode="stubborn") as (process, url):
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            until_logged(process, "shutting down")
            process.send_signal(signal.SIGINT)
            assert "the server is shutting down" in response.read().decode()
        assert process.wait() == 0
    assert not psutil.wait_procs(family, 120)[1]


def test_a_bad_chat_template_does_not_wait_for_the_model(model_folder: Path) -> None:
    with running(model_folder, "--port", "0", "--chat-template", "{% if %}", mode="loading") as (process, err):
        assert process.wait() == 2
    assert "quire: error: --chat-template: the chat template is invalid: line 1" in err
    assert "Traceback" not in err


def test_torch_stays_out_where_transformers_comes_in(model_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, tmp_path)
    write_slow_files(tmp_path)
    with running(tmp_path, "--port", "0", mode="transformers") as (process, url):
        body = {"prompt": "hello", "max_tokens": 20}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == "hello"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 0, err


def certify(folder: Path) -> tuple[trustme.CA, list[str]]:
    """An authority whose certificate is `ca.pem` in the folder, and the flags of a server that it knows."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    mine = authority.issue_cert("127.0.0.1")
    mine.private_key_pem.write_to_path(str(folder / "key"))
    mine.private_key_and_cert_chain_pem.write_to_path(str(folder / "cert"))
    return authority, ["--ssl-keyfile", str(folder / "key"), "--ssl-certfile", str(folder / "cert")]


def test_tls(model_folder: Path, tmp_path: Path) -> None:
    """With certificates of clients; without, in `test_every_api_process_has_the_same_front_and_the_metrics_of_all`."""
    authority, flags = certify(tmp_path)
    flags += ["--port", "0", "--ssl-ca-certs", str(tmp_path / "ca.pem"), "--ssl-cert-reqs", "2"]
    stranger, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (stranger, known):
        authority.configure_trust(context)
    authority.issue_cert("client@example.com").configure_cert(known)
    with running(model_folder, *flags) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=known, timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 20, "stream": True}
            assert "[DONE]" in client.post(f"{url}/v1/completions", json=body).text
        with httpx.Client(verify=stranger, timeout=60) as client, pytest.raises(httpx.TransportError):
            client.get(f"{url}/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", timeout=60)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 0, err


def test_sighup_reads_files_again_and_sigusr1_does_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And systemd hears of it."""
    told, systemd = list[str](), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.settimeout(120)
    systemd.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    _, flags = certify(tmp_path)
    config, keys = tmp_path / "logging.json", tmp_path / "keys"
    flags += ["--port", "0", "--api-key-file", str(keys), "--log-config-file", str(config)]

    def log_to(name: str) -> None:
        file = {"class": "logging.FileHandler", "filename": str(tmp_path / name), "formatter": "own"}
        handlers = {"file": file, "stderr": {"class": "logging.StreamHandler"}}
        settings = {"formatters": {"own": {"format": "%(processName)s: %(message)s"}}, "handlers": handlers}
        quire = {"handlers": list(handlers), "propagate": False}
        config.write_text(json.dumps({"version": 1, **settings, "loggers": {"quire": quire}}))

    def has(name: str, *texts: str) -> bool:
        file = tmp_path / name
        return file.exists() and all(text in file.read_text() for text in texts)

    log_to("first.log")
    keys.write_text("one\n")
    with running(model_folder, *flags) as (process, url):
        _, port = url.rsplit(":", 1)
        certificate = ssl.get_server_certificate(("127.0.0.1", int(port)))
        log_to("second.log")
        keys.write_text(" weight=2\n")
        certify(tmp_path)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGHUP)
        read = f"api: read {tmp_path / 'cert'}, {tmp_path / 'key'} again"
        until(lambda: has("second.log", "serve: SIGHUP", read), seen=lambda: (process.poll(), [*tmp_path.iterdir()]))
        assert has("second.log", f"api: {keys}: invalid; the previous content stays valid: line 1")
        assert not has("first.log", "SIGHUP")
        assert ssl.get_server_certificate(("127.0.0.1", int(port))) != certificate
        with httpx.Client(verify=False, headers={"Authorization": "Bearer one"}, timeout=60) as client:
            assert client.get(f"{url}/v1/models").status_code == 200
        while told.count("READY=1") < 2:
            told.append(systemd.recv(1000).decode().split("\n")[0])
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 0, err
    with systemd:
        told.append(systemd.recv(1000).decode().split("\n")[0])
    assert told == ["STATUS=loading " + str(model_folder), "READY=1", "RELOADING=1", "READY=1", "STOPPING=1"]


def test_unix_socket(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as left:  # as a server that was killed leaves it behind
        left.bind(str(path))
    with running(model_folder, "--uds", str(path)) as (process, url):
        assert url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
            assert client.get("http://quire/health").json() == {"status": "ok"}
        process.kill()
    assert path.exists()


def test_takeover_leaves_no_gap(model_folder: Path, free_port: int) -> None:
    """For new connections, streams, and a connection that stays; a successor that fails disturbs none of them."""
    url, flags = f"http://127.0.0.1:{free_port}", ("--port", str(free_port), "--takeover", "--served-model-name")
    body = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True, "stream": True}
    answers: list[list[str]] = [[], []]
    is_over = threading.Event()

    def ask(answers: list[str]) -> None:
        while not is_over.is_set():
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=TLS)
            assert response.text.endswith("data: [DONE]\n\n"), response.text
            answers.append(json.loads(response.text.split("\n")[0].removeprefix("data: "))["model"])

    with (
        running(model_folder, *flags, "old", mode="slow") as (old, address),
        ThreadPoolExecutor(2) as pool,
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(keepalive_expiry=None)) as lasting,
    ):
        assert address == url
        asking = [pool.submit(ask, each) for each in answers]
        try:
            with running(model_folder, *flags, "failing", mode="dead") as (failing, err):
                assert failing.wait() == 1
            assert "the weights do not fit" in err
            seen = [(lasting.get("/v1/models").json()["data"][0]["id"], "")]
            with running(model_folder, *flags, "new") as (_, address):
                assert address == url
                while seen[-1][0] != "new":
                    response = lasting.get("/v1/models")
                    seen.append((response.json()["data"][0]["id"], response.headers.get("connection", "")))
                assert old.wait(60) == 0
                while not all(each[-2:] == ["new"] * 2 for each in answers) and not any(each.done() for each in asking):
                    lasting.get("/health")
                is_over.set()
                for each in asking:
                    each.result()
        finally:
            is_over.set()
    assert seen[-2:] == [("old", "close"), ("new", "")], "the old server has said that this answer is its last"
    for given in answers:
        assert given == sorted(given, reverse=True), "old ones, and then new ones"
    assert any("old" in given for given in answers)


def children(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The processes that a server has started, by name."""
    return {child.name(): child for child in psutil.Process(process.pid).children()}


def held_by_each(
    stack: contextlib.ExitStack, url: str, process: subprocess.Popen[str], verify: ssl.SSLContext | bool = True
) -> list[httpx.Client]:
    """A client of the first API process and one of the second: while one is stopped, the other must accept."""
    clients = []
    family = children(process)
    for held in (family["quire-api-1"], family["quire-api-0"]):
        held.suspend()
        try:
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=verify)))
            assert clients[-1].get("/health").json() == {"status": "ok"}
        finally:
            held.resume()
    return clients


def until_metrics(client: httpx.Client, *expected: str) -> list[str]:
    """The metrics, once they have these lines. Another process counts a request after its response has been sent."""
    lines = list[str]()

    def look() -> bool:
        lines[:] = client.get("/metrics").text.splitlines()
        return {*expected} <= {*lines}

    def seen() -> str:
        missing = {*expected} - {*lines}
        instead = [line for line in lines if line.startswith(tuple(each.split("{")[0] for each in missing))]
        return "\n".join(["metrics without", *missing, "but with", *instead])

    until(look, seen=seen)
    return lines


def test_every_api_process_has_the_same_front_and_the_metrics_of_all(model_folder: Path, tmp_path: Path) -> None:
    authority, flags = certify(tmp_path)
    authority.configure_trust(trusting := ssl.create_default_context())
    flags += ["--port", "0", "--api-server-count", "2", "--api-key", "k", "--allowed-origins", "https://a.example"]
    flags += ["--max-num-seqs", "1", "--max-queue", "1", "--max-body-mib", "1", "--no-vllm-metrics"]
    flags += ["--served-model-name", "echo", "--shutdown-timeout", "0"]
    path, hanging = "/v1/completions", {"prompt": ["a<hang>", "a<hang>"], "stream": True}
    with running(model_folder, *flags) as (process, url), contextlib.ExitStack() as stack:
        busy, other = (held_by_each(stack, url, process, trusting) for _ in range(2))
        family = psutil.Process(process.pid).children(recursive=True)
        for client in busy + other:
            assert client.get("/v1/models").status_code == 401
            client.headers = {"Authorization": "Bearer k", "Origin": "https://a.example", "X-Request-Id": "mine"}
        for client in other:
            body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
            assert client.post(path, json=body).status_code == 200
        for client in other:
            lines = until_metrics(
                client,
                'quire:request_success_total{engine="0",finished_reason="length",model_name="echo"} 2.0',
                'quire:inter_token_latency_seconds_count{engine="0",model_name="echo"} 6.0',
                'quire:generation_tokens_total{engine="0",model_name="echo"} 8.0',
            )
            assert not any("vllm:" in line for line in lines)
        streams = [stack.enter_context(client.stream("POST", path, json=hanging)) for client in busy]
        for client in other:
            refused = client.post(path, json={"prompt": "hello"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert client.post(path, content=b" " * (2**20 + 1)).status_code == 413
            assert refused.headers["access-control-allow-origin"] == "https://a.example"
            assert refused.headers["x-request-id"] == "mine"
        requests = 'quire:http_requests_total{method="POST",model_name="echo",route="/v1/completions",status="%d"} %.1f'
        until_metrics(
            other[0],
            *(requests % each for each in ((200, 2), (413, 2), (429, 2))),
            'quire:http_requests_failed_total{model_name="echo",reason="queue_full"} 2.0',
            'quire:key_generation_tokens_total{key="api-1",model_name="echo"} 8.0',
        )
        process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert "the server is shutting down" in stream.read().decode()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert not psutil.wait_procs(family, 120)[1]


def test_all_api_processes_have_the_same_adapters(model_folder: Path, tmp_path: Path) -> None:
    shapes = {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)}
    paths = [write_adapter(tmp_path / f"a{seed}", shapes, seed=seed) for seed in range(2)]
    tokens = [adapter_token(AdapterRef(open_adapter(path).digest, ())) for path in paths]
    starts = [chr(token + 25) for token in tokens]  # bytes, from "!" on
    arguments = ["--port", "0", "--api-server-count", "2", "--served-model-name", "echo", "--enable-lora"]
    arguments += ["--lora-modules", f"first={paths[0]}", "--lora-root", str(tmp_path)]
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    with running(model_folder, *arguments) as (process, url), contextlib.ExitStack() as stack:

        def answers(name: str) -> list[str]:
            body = {"model": name, "prompt": "hello"}
            replies = [client.post("/v1/completions", json=body).json() for client in clients]
            return [each["choices"][0]["text"] if "choices" in each else each["error"]["code"] for each in replies]

        clients = held_by_each(stack, url, process)
        assert answers("first") == [f"{starts[0]}hello"] * 2
        for number, (client, other) in enumerate((clients, clients[::-1])):
            name = {"lora_name": f"new{number}"}
            assert client.post(load, json={**name, "lora_path": "a1"}).status_code == 200
            assert answers(f"new{number}") == [f"{starts[1]}hello"] * 2
            assert other.post(load, json={**name, "lora_path": "a0"}).status_code == 400
            assert other.post(load, json={**name, "lora_path": "a0", "load_inplace": True}).status_code == 200
            assert answers(f"new{number}") == [f"{starts[0]}hello"] * 2
        body = {"model": "new0", "prompt": "a<hang>", "stream": True}
        with ThreadPoolExecutor(1) as pool:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60):
                unloading = pool.submit(clients[0].post, unload, json={"lora_name": "new0"})
                with httpx.Client(base_url=url, timeout=60) as third:
                    body = {"model": "new0", "prompt": "a"}
                    until(lambda: third.post("/v1/completions", json=body).status_code != 200)
                assert not unloading.done()
            assert unloading.result().status_code == 200
        assert answers("new0") == ["model_not_found"] * 2
        children(process)["quire-api-1"].kill()
        until_logged(process, "API process 1 is ready again")
        clients = held_by_each(stack, url, process)
        assert answers("new1") == [f"{starts[0]}hello"] * 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_an_api_process_that_dies_is_replaced_and_each_says_why_the_engine_died(model_folder: Path) -> None:
    """Nobody else is hurt. Both at once are killed in tests/e2e/test_api_processes.py."""
    arguments = ("--port", "0", "--api-server-count", "2", "--served-model-name", "echo", "--no-restart")
    endless = {"prompt": "a<hang>", "stream": True}
    with running(model_folder, *arguments) as (process, url), contextlib.ExitStack() as stack:
        clients = held_by_each(stack, url, process)
        other, lost = (
            stack.enter_context(client.stream("POST", "/v1/completions", json=endless)) for client in clients
        )
        children(process)["quire-api-1"].kill()
        with pytest.raises(httpx.RemoteProtocolError):
            lost.read()
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "API process 1 was killed by SIGKILL; its connections are lost (requests cut: 1)" in line
        assert "API process 1 is ready again" in process.stderr.readline()
        first, second = held_by_each(stack, url, process)
        cut = 'quire:http_requests_total{method="POST",model_name="echo",route="/v1/completions",status="cut"} 1.0'
        for client in (first, second):
            assert client.post("/v1/completions", json={"prompt": "hello"}).json()["choices"][0]["text"] == "hello"
            # The dead process's requests in the engine are gone; the other stream runs on.
            until_metrics(client, cut, 'quire:num_requests_running{engine="0",model_name="echo"} 1.0')
        with second.stream("POST", "/v1/completions", json=endless) as stream:
            assert "exited with code 3" in first.post("/v1/completions", json={"prompt": "a<vanish>"}).text
            for each in (stream, other):
                assert "exited with code 3" in each.read().decode()
        _, err = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "another one" not in err
