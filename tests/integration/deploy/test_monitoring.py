"""The files in deploy for Prometheus, Grafana and compose agree with each other and with the existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from tests.fakes import vllm_dashboards

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def test_compose_mounts_what_there_is_and_starts_a_server() -> None:
    services = load("compose.yaml")["services"]
    mounts = {}
    for name, service in services.items():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            mounts[name, target] = source
            if source.startswith("."):
                assert (DEPLOY / source).is_dir(), source
    parsed = build_parser().parse_args(["serve", *services["quire"]["command"]])
    _, server = read_options(parsed)
    scrape = load("prometheus/prometheus.yml")
    assert scrape["scrape_configs"][0]["static_configs"] == [{"targets": [f"quire:{server.port}"]}]
    assert mounts["prometheus", "/etc/prometheus"] == "./prometheus"
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    (datasource,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    assert datasource["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    (provider,) = load("grafana/provisioning/dashboards/quire.yaml")["providers"]
    assert mounts["grafana", provider["options"]["path"]] == "./grafana/dashboards"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / home.removeprefix("/")).exists()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_places_of_their_own(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_there_are_three_dashboards_with_names_of_their_own() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({each["uid"] for each in dashboards}) == len({each["title"] for each in dashboards}) == 3


def test_queries_name_metrics_that_there_are() -> None:
    known = set(re.findall(r"`((?:quire|vllm):\w+)`", METRICS))
    histograms = set(re.findall(r"^\| `quire:(\w+)` \|.*\| histogram \|", METRICS, flags=re.M))
    ends = ("bucket", "sum", "count")
    known |= {f"{of}:{name}_{end}" for of in ("quire", "vllm") for name in histograms for end in ends}
    texts = {path.name: path.read_text() for path in DASHBOARDS}
    texts["rules"] = (DEPLOY / "prometheus" / "rules.yml").read_text()
    texts["vLLM's"] = " ".join(vllm_dashboards.QUERIES)
    for name, text in texts.items():
        used = set(re.findall(r"(?:quire|vllm):\w+", text))
        assert used, name
        assert used <= known, name


def test_hand_overs_can_be_watched() -> None:
    """All their metrics of the guide are in a panel."""
    guide = (ROOT / "docs" / "guides" / "prefill-decode.md").read_text()
    watched = set(re.findall(r"quire:\w*hand\w*over\w*", guide.partition("## Watch it")[2]))
    shown = " ".join(path.read_text() for path in DASHBOARDS)
    assert len(watched) >= 3
    assert [name for name in watched if name not in shown] == []


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    rules = load("prometheus/rules.yml")["groups"][0]["rules"]
    tested = [test for each in load("prometheus/rules_test.yml")["tests"] for test in each["alert_rule_test"]]
    assert {rule["alert"] for rule in rules} == {test["alertname"] for test in tested if "exp_alerts" in test}
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
