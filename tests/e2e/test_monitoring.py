"""Debian's Prometheus scrapes live servers: every query of the dashboards and of the rules has data."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from quire.engine.protocol.stats import GpuUsage, RankStats, RankUsage
from quire.server.client.media_metrics import MediaMetrics
from quire.server.client.metrics import Metrics
from tests.e2e.environments import run
from tests.e2e.serving import Server, serve
from tests.e2e.test_replicas import write_mixture
from tests.fakes import vllm_dashboards

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "monitored"
VARIABLES = {
    "${datasource}": "Prometheus",
    "$model_name": NAME,
    "$Deployment_id": NAME,
    "$__rate_interval": "1m",
    "$__range": "5m",
}

pytestmark = pytest.mark.slow


def queries(instance: str = ".+") -> dict[str, str]:
    """All queries by where they are, with Grafana's variables replaced."""
    found = {f"vLLM's {query}": query for query in vllm_dashboards.QUERIES}
    for path in (DEPLOY / "grafana" / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    for rule in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]:
        # Without the threshold, which is not reached.
        found[rule["alert"]], comparisons = re.subn(r" (?:==|>) [\d.]+$", "", rule["expr"])
        assert comparisons == 1, rule["expr"]
    for name, query in found.items():
        for variable, value in (VARIABLES | {"$instance": instance}).items():
            query = query.replace(variable, value)
        assert "$" not in query, query
        found[name] = query
    return found


class Prometheus:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(path, params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        """The values of a query that are numbers."""
        values = [float(each["value"][1]) for each in self.get("/api/v1/query", query=query)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[Prometheus]:
    """Prometheus with the configuration and the rules of deploy, for other servers and with shorter intervals."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = targets
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus" / "rules.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen([*command, f"--web.listen-address={address}", "--log.level=warn"]) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://{address}/-/ready").status_code == 200:
                        break
                time.sleep(0.1)
            assert process.poll() is None
            with httpx.Client(base_url=f"http://{address}", timeout=30) as http:
                yield Prometheus(http)
        finally:
            process.terminate()


@contextlib.contextmanager
def server_with_gpu() -> Iterator[str]:
    """The address of an exporter with the metrics of a rank on a GPU, as tests have no GPU, and of images."""
    metrics = Metrics(NAME, vllm_names=False)
    metrics.state(0, "up")
    media = metrics.media = MediaMetrics()
    gpu = GpuUsage(1 << 30, 80 << 30, 0.5, 300.0, 1000, 1000, 1 << 20, 1 << 20)
    metrics.rank_stats = {0: [RankStats(usage=RankUsage(1.0, 1 << 30, 1 << 20, gpu))]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            media.count("image", "loaded", 0.1)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics.exposition())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def load(servers: list[Server]) -> Iterator[None]:
    """Clients that send requests until the end; later ones wait in the queue. The last server gets long prompts."""
    ended, rng = threading.Event(), random.Random(0)

    def ask(server: Server) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            while not ended.is_set():
                prompt = rng.choices(range(300, 1500), k=300) if server is servers[-1] else "The KV cache"
                body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "n": 2}
                client.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=ask, args=[server]) for server in (*servers[:-1] * 3, servers[-1])]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_the_rules_pass_their_tests() -> None:
    assert "SUCCESS" in run(
        ["promtool", "test", "rules", "rules_test.yml"], "the alert rules are wrong", cwd=DEPLOY / "prometheus"
    )
    run(["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")], "the configuration is wrong")


def test_every_query_of_every_dashboard_and_rule_has_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_mixture(tmp_path / "mixture")
    common = ("--served-model-name", NAME, "--max-model-len", "256", "--max-num-seqs", "4")
    roles = ("--prefill-replicas", "1", "--decode-replicas", "1", "--max-model-len", "512")
    experts = ("-dp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-step-interval", "20")
    tiers = ("--kv-offloading-size", "0.1", "--kv-disk", f"{tmp_path}/kv:0.1")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serve("-tp", "2", "-pp", "2", *common)),
            stack.enter_context(serve(str(tmp_path / "mixture"), *experts, *tiers, *common)),
            stack.enter_context(serve(*common, *roles)),
        ]
        targets = [*(urlsplit(server.url).netloc for server in servers), stack.enter_context(server_with_gpu())]
        (tmp_path / "prometheus").mkdir()
        database = stack.enter_context(prometheus(tmp_path / "prometheus", targets))
        stack.enter_context(load(servers))
        missing, deadline = queries(), time.monotonic() + 240
        while missing and time.monotonic() < deadline:
            missing = {name: query for name, query in missing.items() if not database.values(query)}
            time.sleep(1)
        assert not missing
        assert database.values("sum(up)") == [4]
        (group,) = database.get("/api/v1/rules")["groups"]
        assert {(rule["health"], rule.get("lastError", "")) for rule in group["rules"]} == {("ok", "")}
        check_series(database, targets)
        check_panels_tell_servers_apart(database, targets)


def check_series(database: Prometheus, targets: list[str]) -> None:
    """The metrics of the servers match their layouts, and the aliases have the same values."""
    one, two, *_ = targets
    groups = 'count by (group) (quire:rank_communication_seconds_total{instance="%s"} > 0)'
    with_time = {
        instance: {each["metric"]["group"] for each in database.get("/api/v1/query", query=groups % instance)["result"]}
        for instance in (one, two)
    }
    assert with_time == {one: {"tp", "pp"}, two: {"ep"}}
    assert database.values(f'count(quire:rank_cpu_seconds_total{{instance="{one}",stage="1"}} > 0)') == [2]
    assert database.values(f'count(quire:rank_resident_memory_bytes{{instance="{one}"}} > 1e7)') == [4]
    assert database.values(f'count(quire:kv_cache_usage_perc{{instance="{two}"}})') == [2]
    for name in ("generation_tokens_total", "request_queue_time_seconds_count", "iteration_tokens_total_sum"):
        same = f"count(quire:{name} == on (instance, engine) vllm:{name}) / count(vllm:{name})"
        assert database.values(same) == [1]


def check_panels_tell_servers_apart(database: Prometheus, targets: list[str]) -> None:
    """A panel's values for the ranks of one server do not depend on the other servers."""
    moment = time.time()
    while min(database.values("timestamp(up)")) <= moment:  # until all samples of that moment are stored
        time.sleep(0.1)

    def values(query: str) -> dict[frozenset[tuple[str, str]], float]:
        found = database.get("/api/v1/query", query=query, time=str(moment))["result"]
        return {frozenset(each["metric"].items()): float(each["value"][1]) for each in found}

    alone = [queries(target) for target in targets]
    panels = {name: query for name, query in queries().items() if name.startswith("ranks: ")}
    for name, query in panels.items():
        of_each: dict[frozenset[tuple[str, str]], float] = {}
        for each in alone:
            of_each |= values(each[name])
        assert values(query) == pytest.approx(of_each, nan_ok=True), name
    steps = values(panels["ranks: Step time of each stage A"])
    assert {tuple(sorted(series)) for series in steps} == {
        (("engine", engine), ("instance", instance), ("stage", stage))
        for instance, engine, stage in (
            (targets[0], "0", "0"),
            (targets[0], "0", "1"),
            *((target, e, "0") for target in targets[1:3] for e in "01"),
        )
    }
