"""The values of the chart: each has its effect, what could not work is refused, and the examples are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from tests.fakes import kubernetes_schemas
from tests.fakes.manifests import (
    CHART,
    DEPLOY,
    EXAMPLES,
    NAMESPACE,
    VARIANTS,
    Manifest,
    all_pod_templates,
    arguments,
    component,
    environment,
    find,
    flags,
    helm,
    helm_python,
    pod_templates,
    quire_container,
    render,
)

OTHERS = sorted(set(EXAMPLES) - set(VARIANTS))
"""The examples that no overlay is compared with."""
WORKLOADS = ("deployment", "leaderWorkerSet", "statefulSet", "ray", "replicas")
RELEASE = "llama"
NAME = f"{RELEASE}-quire"


def errors(manifests: Iterable[Manifest]) -> list[str]:
    return [
        each
        for one in manifests
        for version in kubernetes_schemas.VERSIONS
        for each in kubernetes_schemas.errors(one, version)
    ]


def named(manifests: Iterable[Manifest], kind: str) -> dict[str, Manifest]:
    """The manifests of a kind, by name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def server(manifests: Iterable[Manifest]) -> Manifest:
    """The container with the API."""
    (found,) = (quire_container(each) for each in all_pod_templates(manifests) if component(each) == "server")
    return found


@pytest.mark.parametrize("example", OTHERS)
def test_an_example_is_valid_and_refers_to_what_there_is(example: str) -> None:
    manifests = render(yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text()), RELEASE)
    assert errors(manifests) == []
    labels = [template["metadata"]["labels"] for template in all_pod_templates(manifests)]
    services = named(manifests, "Service")
    for template in all_pod_templates(manifests):
        volumes = template["spec"].get("volumes", [])
        for volume in volumes:
            match volume:
                case {"configMap": {"name": name}}:
                    assert name in named(manifests, "ConfigMap")
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert name in named(manifests, "PersistentVolumeClaim")
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= {each["name"] for each in volumes}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                assert any(spec["selector"].items() <= each.items() for each in labels)
            case "Ingress":
                backends = [path["backend"]["service"] for rule in spec["rules"] for path in rule["http"]["paths"]]
                assert backends
                for backend in backends:
                    assert backend["port"]["name"] in [
                        port["name"] for port in services[backend["name"]]["spec"]["ports"]
                    ]
            case "ScaledObject":
                target = named(manifests, spec["scaleTargetRef"]["kind"])[spec["scaleTargetRef"]["name"]]
                assert "replicas" not in target["spec"]
            case "InterceptorRoute":
                assert spec["target"]["service"] in services


@pytest.mark.parametrize("example", OTHERS)
def test_quire_takes_the_flags_of_an_example(example: str, tmp_path: Path) -> None:
    manifests = helm(example)
    configs = named(manifests, "ConfigMap")
    seen = 0
    for template in all_pod_templates(manifests):
        if component(template) == "server":
            container = quire_container(template)
            (name,) = (each["configMap"]["name"] for each in template["spec"]["volumes"] if each["name"] == "config")
            (tmp_path / "quire.yaml").write_text(configs[name]["data"]["quire.yaml"])
            command = arguments(
                container, environment(container, {}, {"metrics-key": "k", "hf-token": "t"}), {"config": tmp_path}
            )
            _, options = read_options(build_parser().parse_args(command))
            assert options.port == container["ports"][0]["containerPort"]
            assert options.host == "0.0.0.0"
            seen += 1
    assert seen


POD: Manifest = {
    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "envFrom": [{"secretRef": {"name": "proxies"}}],
    "extraArgs": ["--max-num-seqs", "8"],
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "certificates"}}],
    "extraVolumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
    "serviceAccount": {"create": True, "annotations": {"role": "reader"}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "initContainers": [{"name": "fetch", "image": "busybox"}],
    "extraContainers": [{"name": "sidecar", "image": "busybox"}],
    "podSpec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
    "podSecurityContext": {"runAsUser": 1000},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_pod_of_a_server_gets_the_values_of_pods(workload: str) -> None:
    manifests = render({"workload": workload, **POD}, RELEASE)
    assert errors(manifests) == []
    templates = all_pod_templates(manifests)
    assert {component(each) for each in templates} >= {"server"}
    for template in templates:
        pod = template["spec"]
        for key in ("runtimeClassName", "priorityClassName", "initContainers"):
            assert pod[key] == POD[key]
        assert (pod["serviceAccountName"], pod["hostNetwork"]) == (NAME, True)
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["runAsNonRoot"]
        *ours, sidecar = pod["containers"]
        assert sidecar["name"] == "sidecar"
        assert POD["extraVolumes"][0] in pod["volumes"]
        for container in ours:
            assert POD["env"][0] in container["env"]
            assert container["envFrom"] == POD["envFrom"]
            assert POD["extraVolumeMounts"][0] in container["volumeMounts"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            if container["name"] == "quire":
                assert container["args"][-2:] == POD["extraArgs"]
    assert find(manifests, "ServiceAccount", NAME)["metadata"]["annotations"] == {"role": "reader"}


def test_a_download_gets_the_environment() -> None:
    manifests = render({"download": {"enabled": True}, **POD}, RELEASE)
    (template,) = pod_templates(find(manifests, "Job", f"{NAME}-download"))
    (container,) = template["spec"]["containers"]
    assert POD["env"][0] in container["env"]
    assert container["envFrom"] == POD["envFrom"]


def test_probes_and_services_follow_the_port_and_tls() -> None:
    config = {"port": 8443, "ssl_certfile": "/c", "ssl_keyfile": "/k"}
    manifests = render({"config": config, "monitoring": {"enabled": True}, "service": {"port": 443}})
    assert errors(manifests) == []
    container = server(manifests)
    assert container["ports"] == [{"name": "http", "containerPort": 8443}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (container[probe]["httpGet"]["port"], container[probe]["httpGet"]["scheme"]) == ("http", "HTTPS")
    (port,) = find(manifests, "Service")["spec"]["ports"]
    assert port == {"name": "http", "port": 443, "targetPort": "http", "appProtocol": "https"}
    (endpoint,) = find(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    assert find(render({"config": {"port": 81}, "gateway": {"enabled": True}}), "InferencePool")["spec"][
        "targetPorts"
    ] == [{"number": 81}]


def test_a_drain_has_the_servers_default() -> None:
    (template,) = all_pod_templates(render({"config": {"shutdown-timeout": None}}))
    assert template["spec"]["terminationGracePeriodSeconds"] == 10 + 30 + 30


MODELS = {"a": {"config": {"model": "org/a"}}, "b": {"config": {"model": "org/b"}}}


def events(kv_events_config: Any, **config: Any) -> Manifest:
    """Values with KV events to which all may subscribe."""
    config = {"kv-events-config": kv_events_config, **config}
    return {"config": config, "networkPolicy": {"kvEvents": {"from": [{"podSelector": {}}]}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": {"host": "127.0.0.1"}}, "config.host: 127.0.0.1 can be reached only from inside the pod"),
        ({"config": {"host": "localhost"}}, "use 0.0.0.0"),
        ({"config": {"port": 0}}, "config/port"),
        ({"config": {"uds": "/tmp/quire"}}, "config.uds: the pods would have no port"),
        ({"config": {"headless": True}}, "config.headless: the pods would have no port"),
        ({"config": {"ssl-cert-reqs": 2}}, "probes have no client certificate"),
        ({"config": {"ssl-keyfile": "/k"}}, "config.ssl-certfile and config.ssl-keyfile: set both"),
        ({"config": {"ssl-certfile": "/c"}}, "config.ssl-certfile and config.ssl-keyfile: set both"),
        (
            {"config": {"api-key": "x"}},
            r"config.api-key would be readable in a ConfigMap; put it into the Secret .*\(quire\)",
        ),
        ({"config": {"api_key": ["x"]}, "secret": "keys"}, r"\(keys\)"),
        ({"config": {"cluster-token": "x"}}, "config.cluster-token"),
        ({"config": {"api-key.0": "x"}}, r"config.api-key.0 would be readable in a ConfigMap"),
        ({"config": {"api_key.x": "x"}}, r"config.api_key.x would be readable in a ConfigMap"),
        ({"config": {"api-key-file": "/k"}}, "config.api-key-file: the chart sets it to the file of the Secret"),
        ({"env": [{"name": "QUIRE_ADMIN_KEY", "value": "x"}]}, "env: QUIRE_ADMIN_KEY would be readable in the pods"),
        ({"env": [{"name": "VLLM_API_KEY", "value": "x"}]}, "use valueFrom with a secretKeyRef"),
        ({"env": [{"name": "QUIRE_CLUSTER_TOKEN", "value": "x"}]}, "env: QUIRE_CLUSTER_TOKEN would be readable"),
        ({"env": [{"name": "QUIRE_METRICS_KEY", "valueFrom": {}}]}, "env: the name QUIRE_METRICS_KEY is taken"),
        ({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "env: the name A is taken"),
        ({"download": {"enabled": True}, "env": [{"name": "MODEL", "value": "a"}]}, "env: the name MODEL is taken"),
        ({"extraVolumes": [{"name": "cache", "emptyDir": {}}]}, "extraVolumes: the name cache is taken"),
        ({"extraArgs": ["--api-key=x"]}, "extraArgs: --api-key would be readable"),
        ({"extraArgs": ["--port", "81"]}, "extraArgs: --port: set config.port"),
        ({"extraArgs": ["--config", "/c"]}, "extraArgs: --config would replace the file"),
        (
            {"gateway": {"enabled": True}, "config": {"ssl-certfile": "/c", "ssl-keyfile": "/k"}},
            "omit config.ssl-certfile",
        ),
        ({"gateway": {"enabled": True}, "modelSpec": MODELS}, "one release for each model"),
        ({"autoscaling": {"by": "keda", "minReplicas": 0}}, "minReplicas: 0 needs .* modelSpec"),
        ({"autoscaling": {"by": "hpa", "minReplicas": 0}, "modelSpec": MODELS}, "autoscaling.by: keda"),
        ({"autoscaling": {"by": "hpa", "minReplicas": 5}}, "maxReplicas: 4 is below autoscaling.minReplicas: 5"),
        (events(None), "kvEvents.from: there are no ports to open"),
        (events({"enable_kv_cache_events": False}), "kvEvents.from: there are no ports to open"),
        (events({"enable_kv_cache_events": True, "publisher": "null"}), "kvEvents.from: there are no ports to open"),
        (events("/etc/events.json"), "kv-events-config: networkPolicy.kvEvents needs its fields"),
        (events({"enable_kv_cache_events": True}, port=5560), "config.port: 5560 is one of the ports"),
        (events({"enable_kv_cache_events": True}, **{"kv-peer-port": 5564}), "config.kv-peer-port: 5564 is one of"),
        ({"ingress": {"enabled": True}}, "ingress.enabled: name a host in ingress.hosts"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.enabled: name a Gateway in httpRoute.parentRefs"),
        ({"modelSpec": {"a": {"model": "org/a"}}}, "modelSpec/a"),
        ({"modelSpec": {"v1": {}}}, "modelSpec.v1: the API has paths of this name"),
        ({"modelSpec": {"router": {}}}, "modelSpec.router: the release has objects of this name"),
        ({"modelSpec": {"dashboard-gpus": {}}}, "modelSpec.dashboard-gpus: the release has objects of this name"),
        ({"modelSpec": {**MODELS, "a-hosts": {}}}, "modelSpec.a-hosts: the release has objects of this name"),
        ({"modelSpec": {"Chat": {}}}, "invalid propertyName 'Chat'"),
        ({"modelSpec": {"a": {"ingress": {"enabled": True}}}}, "modelSpec.a.ingress: set it for the release"),
        ({"modelSpec": {"a": {"monitoring": {"dashboards": {}}}}}, "modelSpec.a.monitoring.dashboards: set it for the"),
        ({"modelSpec": {"a": {}, "b": {}}}, "two models are called quire-demo"),
    ],
)
def test_what_cannot_work_is_refused(values: Manifest, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_what_has_no_effect_is_not_refused() -> None:
    config = {"uds": None, "headless": False, "api-key": None}
    assert flags(render({"config": config, "extraVolumes": None, "env": None}))["headless"] is False
    assert render({"env": [{"name": "QUIRE_ADMIN_KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]})


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [
        ("http://collector:4317", [4317]),
        ("collector.tracing:14317", [14317]),
        ("http://collector/v1/traces", [4317, 4318]),
        ("http://[fd00::1]:4317", [4317]),
        ("http://[fd00::1]/v1/traces", [4317, 4318]),
        ("http://user:123@collector:4318/v1/traces", [4318]),
        (None, []),
    ],
)
def test_traces_may_leave(endpoint: str | None, ports: list[int]) -> None:
    rules = find(render({"config": {"otlp-traces-endpoint": endpoint}}), "NetworkPolicy")["spec"]["egress"]
    opened = [port["port"] for rule in rules if "to" not in rule for port in rule["ports"]]
    assert opened == [53, 53, 443, *ports]


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        ({"kv-events-config": '{"enable_kv_cache_events": true}'}, [(5557, 5560)]),
        (
            {
                "kv_events_config": {"endpoint": "tcp://[::]:7000", "replay_endpoint": "tcp://*:65533"},
                "kv-events-config.enable_kv_cache_events": True,
                "port": 5557,
            },
            [(7000, 7003), (65533, 65535)],
        ),
        (
            {
                "kv-events-config": {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/x"},
                "kv-events-config.replay_endpoint": "tcp://*:9",
            },
            [(9, 12)],
        ),
    ],
)
def test_routers_may_subscribe_to_kv_events(config: Manifest, ports: list[tuple[int, int]]) -> None:
    routers = [{"podSelector": {"matchLabels": {"app": "router"}}}]
    values = {"config": config, "networkPolicy": {"kvEvents": {"from": routers, "replicas": 4}}}
    manifests = render(values)
    assert errors(manifests) == []
    opened = [{"port": first, "endPort": last, "protocol": "TCP"} for first, last in ports]
    rules = find(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert {"from": routers, "ports": opened} in rules
    closed = find(render({"config": config}), "NetworkPolicy")["spec"]["ingress"]
    assert len(closed) == len(rules) - 1


def test_network_policies_take_rules() -> None:
    rule = {"ports": [{"port": 9000, "protocol": "TCP"}]}
    values: Manifest = {"networkPolicy": {"extraEgress": [rule], "extraIngress": [rule]}, "modelSpec": MODELS}
    manifests = render(values)
    assert errors(manifests) == []
    for policy in named(manifests, "NetworkPolicy").values():
        assert rule in policy["spec"]["ingress"]
    assert rule in find(manifests, "NetworkPolicy", "quire-a")["spec"]["egress"]


def test_alerts_and_dashboards_are_those_of_deploy_and_select_every_release() -> None:
    on = {"enabled": True}
    values = {"monitoring": {**on, "prometheusRule": {**on, "labels": {"release": "prometheus"}}, "dashboards": on}}
    manifests = render(values, RELEASE)
    rules = find(manifests, "PrometheusRule", NAME)
    assert rules["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    dashboards = list((DEPLOY / "grafana/dashboards").iterdir())
    assert len(dashboards) == 3
    for path in dashboards:
        config = find(manifests, "ConfigMap", f"{NAME}-dashboard-{path.stem}")
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(config["data"][path.name]) == json.loads(path.read_text())
    # The operator takes the job's name from this label of the Service.
    label = find(manifests, "ServiceMonitor", NAME)["spec"]["jobLabel"]
    job = find(manifests, "Service", NAME)["metadata"]["labels"][label]
    texts = [path.read_text() for path in (*dashboards, DEPLOY / "prometheus/rules.yml")]
    assert {job} == {found for text in texts for found in re.findall(r'job=\\?"(\w+)\\?"', text)}
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scrape["job_name"] == job


def test_ingress_and_route_lead_to_the_service() -> None:
    paths = [{"path": "/", "pathType": "Prefix"}]
    tls = [{"secretName": "tls", "hosts": ["llm.example"]}]
    values = {
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"internal": "true"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": [{"host": "llm.example", "paths": paths}],
            "tls": tls,
        },
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example"]},
    }
    for more in ({}, {"modelSpec": MODELS}):
        manifests = render(values | more, RELEASE)
        assert errors(manifests) == []
        service = find(manifests, "Service", NAME)
        assert (service["spec"]["type"], service["metadata"]["annotations"]) == ("LoadBalancer", {"internal": "true"})
        ingress = find(manifests, "Ingress", NAME)["spec"]
        assert (ingress["ingressClassName"], ingress["tls"]) == ("nginx", tls)
        (rule,) = ingress["rules"]
        assert rule["http"]["paths"][0]["backend"] == {"service": {"name": NAME, "port": {"name": "http"}}}
        route = find(manifests, "HTTPRoute", f"{NAME}-service")["spec"]
        assert route["rules"][0]["backendRefs"] == [{"name": NAME, "port": 80}]
        assert (route["parentRefs"], route["hostnames"]) == ([{"name": "gateway"}], ["llm.example"])


def test_the_cache_may_be_a_claim() -> None:
    def volume(manifests: list[Manifest]) -> Manifest:
        (template,) = all_pod_templates(manifests)
        (found,) = (each for each in template["spec"]["volumes"] if each["name"] == "cache")
        return dict(found)

    made = render({"cache": {"size": "50Gi", "storageClassName": "nfs"}}, RELEASE)
    claim = find(made, "PersistentVolumeClaim", f"{NAME}-cache")["spec"]
    assert (claim["resources"], claim["storageClassName"]) == ({"requests": {"storage": "50Gi"}}, "nfs")
    assert volume(made) == {"name": "cache", "persistentVolumeClaim": {"claimName": f"{NAME}-cache"}}
    given = render({"cache": {"existingClaim": "weights"}}, RELEASE)
    assert list(named(given, "PersistentVolumeClaim")) == [f"{NAME}-models"]
    assert volume(given) == {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}}
    assert volume(render({})) == {"name": "cache", "emptyDir": {}}


def test_more_objects_are_templates() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text"
    value = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-value"}}
    assert named(render({"extraObjects": [text, value]}, RELEASE), "ConfigMap").keys() >= {"llama-text", "llama-value"}


# --- several models -------------------------------------------------------------------------------------------


def test_models_of_a_release_differ_in_their_values() -> None:
    values = {
        "gpus": 1,
        "config": {"max-num-seqs": 8},
        "modelSpec": {**MODELS, "b": {"gpus": 2, "config": {"model": "org/b"}}},
    }
    manifests = render(values, RELEASE)
    assert errors(manifests) == []
    for name, gpus in (("a", "1"), ("b", "2")):
        (template,) = pod_templates(find(manifests, "Deployment", f"{NAME}-{name}"))
        assert quire_container(template)["resources"]["limits"]["nvidia.com/gpu"] == gpus
        config = yaml.safe_load(find(manifests, "ConfigMap", f"{NAME}-{name}")["data"]["quire.yaml"])
        assert config == {"host": "0.0.0.0", "shutdown-timeout": 60, "max-num-seqs": 8, "model": f"org/{name}"}
        (claim,) = (each for each in template["spec"]["volumes"] if each["name"] == "models")
        assert claim["persistentVolumeClaim"] == {"claimName": f"{NAME}-models"}
        assert find(manifests, "Service", f"{NAME}-{name}")["spec"]["clusterIP"] == "None"
    assert list(named(manifests, "PersistentVolumeClaim")) == [f"{NAME}-models"]


@pytest.mark.parametrize(
    "values", [*EXAMPLES, *({"workload": each, "modelSpec": MODELS} for each in WORKLOADS)], ids=str
)
def test_no_object_is_rendered_twice(values: str | Manifest) -> None:
    manifests = helm(values) if isinstance(values, str) else render(values)
    identities = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(identities) == len(set(identities))


def envoy(manifests: Iterable[Manifest], name: str = "quire") -> Any:
    return yaml.safe_load(find(manifests, "ConfigMap", f"{name}-router")["data"]["envoy.yaml"])["static_resources"]


def test_the_router_knows_every_model_by_its_names() -> None:
    spec = {"a": {"config": {"served-model-name": ["one", "another"]}}, "b": {"config": {"model": "org/b", "port": 81}}}
    config = envoy(render({"modelSpec": spec}))
    manager = config["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    found = {
        match["dynamic_metadata"][0]["value"]["string_match"]["exact"]: route["route"]["cluster"]
        for route in routes
        if "dynamic_metadata" in (match := route["match"])
    }
    assert found == {"one": "a", "another": "a", "org/b": "b"}
    (listing,) = (route["direct_response"] for route in routes if route["match"].get("path") == "/v1/models")
    assert [each["id"] for each in json.loads(listing["body"]["inline_string"])["data"]] == ["one", "another", "org/b"]
    addresses = {
        cluster["name"]: cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"][
            "socket_address"
        ]
        for cluster in config["clusters"]
    }
    assert addresses == {"a": {"address": "quire-a", "port_value": 8000}, "b": {"address": "quire-b", "port_value": 81}}


def test_the_router_may_list_many_models() -> None:
    names = [f"organization/model-with-a-long-name-{index}" for index in range(99)]
    spec = {"a": {"config": {"served-model-name": names}}, "b": MODELS["b"]}
    for models in (spec, MODELS):
        manager = envoy(render({"modelSpec": models}))["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        (host,) = manager["route_config"]["virtual_hosts"]
        bodies = [each.get("direct_response", {}).get("body", {}).get("inline_string", "") for each in host["routes"]]
        # Envoy's default is 4096.
        assert manager["route_config"]["max_direct_response_body_size_bytes"] == max(4096, *map(len, bodies))


def test_the_router_reaches_a_model_with_tls() -> None:
    spec = {"a": {"config": {"ssl-certfile": "/c", "ssl-keyfile": "/k"}}, "b": {"config": {"model": "org/b"}}}
    assert ["transport_socket" in cluster for cluster in envoy(render({"modelSpec": spec}))["clusters"]] == [
        True,
        False,
    ]


def test_the_router_outlasts_the_drains() -> None:
    manifests = render({"modelSpec": {**MODELS, "b": {"config": {"model": "org/b", "shutdown-timeout": 600}}}})
    (template,) = pod_templates(find(manifests, "Deployment", "quire-router"))
    (container,) = template["spec"]["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 610
    assert template["spec"]["terminationGracePeriodSeconds"] == 640


def test_a_model_scales_to_zero_behind_kedas_interceptor() -> None:
    zero = {"autoscaling": {"by": "keda", "minReplicas": 0, "interceptor": "proxy.autoscaler:8081"}}
    manifests = render({"modelSpec": {**MODELS, "b": {**MODELS["b"], **zero}}})
    assert errors(manifests) == []
    route = find(manifests, "InterceptorRoute", "quire-b")["spec"]
    assert route["target"] == {"service": "quire-b", "portName": "http"}
    scaled = find(manifests, "ScaledObject", "quire-b")["spec"]
    assert (scaled["minReplicaCount"], scaled["cooldownPeriod"]) == (0, 900)
    (trigger,) = (each["metadata"] for each in scaled["triggers"] if each["type"] == "external-push")
    assert trigger["interceptorRoute"] == "quire-b"
    config = envoy(manifests)
    one, other = config["clusters"]
    assert "health_checks" in one
    assert "health_checks" not in other  # they would be requests that keep it running
    assert "address: proxy.autoscaler, port_value: 8081" in str(yaml.safe_dump(other, default_flow_style=True))
    (host,) = route["rules"][0]["hosts"]
    manager = config["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for each in manager["route_config"]["virtual_hosts"][0]["routes"]:
        assert each.get("route", {}).get("host_rewrite_literal") == (
            host if each.get("route", {}).get("cluster") == "b" else None
        )
    interceptor = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "autoscaler"}}}
    assert [interceptor] in [
        rule.get("from") for rule in find(manifests, "NetworkPolicy", "quire-b")["spec"]["ingress"]
    ]
    assert [interceptor] in [
        rule.get("to") for rule in find(manifests, "NetworkPolicy", "quire-router")["spec"]["egress"]
    ]


def test_names_stay_short() -> None:
    manifests = render({"modelSpec": {"a" * 20: {"workload": "replicas"}}, "download": {"enabled": True}}, "r" * 53)
    assert max(len(each["metadata"]["name"]) for each in manifests) <= 52  # a Job and a StatefulSet append to theirs


def test_a_flag_may_be_written_with_underscores() -> None:
    assert (
        flags(render({"config": {"served_model_name": "x", "hf-overrides.rope_theta": 1}}))["served-model-name"] == "x"
    )


def test_the_namespace_of_queries_is_the_releases() -> None:
    manifests = render({"autoscaling": {"by": "keda"}}, RELEASE)
    for trigger in find(manifests, "ScaledObject", NAME)["spec"]["triggers"]:
        assert f'namespace="{NAMESPACE}",service="{NAME}"' in trigger["metadata"]["query"]
