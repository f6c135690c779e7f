"""The Kubernetes manifests are valid, the same from kustomize and from the chart, and meet the needs of Quire and the
cluster."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.engine.config.options import EngineOptions
from quire.server.cli.main import build_parser
from quire.server.cli.serve_options import read_options
from quire.server.config.server_options import ServerOptions
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
    build,
    component,
    environment,
    find,
    flags,
    helm,
    helm_python,
    kustomize,
    pod_templates,
    quire_container,
    render,
)

SOURCES = (kustomize, helm)
SECRET_KEYS = {"api-keys", "metrics-key", "cluster-token", "hf-token"}
SECONDS_TO_END = 30
"""The time after --shutdown-timeout that docs/guides/deployment.md asks for."""
ROOT = DEPLOY.parent


def without(value: Any, is_superfluous: Callable[[str], bool]) -> Any:
    """A copy without empty parts, and without mapping keys of some names."""
    if isinstance(value, dict):
        kept = {key: without(part, is_superfluous) for key, part in value.items() if not is_superfluous(key)}
        return {key: part for key, part in kept.items() if part not in ({}, [], None)}
    return [without(part, is_superfluous) for part in value] if isinstance(value, list) else value


def normalized(manifests: list[Manifest]) -> list[Manifest]:
    """The manifests as a cluster gets them, sorted, without a generator's marks."""
    manifests = [
        without(manifest, lambda key: key in ("helm.sh/chart", "app.kubernetes.io/managed-by", "checksum/config"))
        for manifest in manifests
    ]
    text = yaml.safe_dump_all(manifests, width=10_000).replace(f'namespace="{NAMESPACE}",', "")
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap":
            text = text.replace(name := manifest["metadata"]["name"], re.sub("-[0-9a-z]{10}$", "", name))
    manifests = list(yaml.safe_load_all(text))
    for manifest in manifests:
        metadata = manifest["metadata"]
        metadata.pop("namespace", None)
        metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
        if manifest["kind"] == "ConfigMap":
            metadata.pop("labels", None)
            manifest["data"] = {key: yaml.safe_load(content) for key, content in manifest["data"].items()}
    manifests = without(manifests, lambda key: False)
    return sorted(manifests, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", kubernetes_schemas.VERSIONS)
def test_manifests_are_valid(variant: str, source: Callable[[str], list[Manifest]], version: str) -> None:
    manifests = source(variant)
    assert manifests
    assert [error for manifest in manifests for error in kubernetes_schemas.errors(manifest, version)] == []


@pytest.mark.parametrize("version", kubernetes_schemas.VERSIONS)
@pytest.mark.parametrize(
    ("variant", "kind", "path"),
    [
        ("cpu", "Deployment", "spec.template.spec.containers.0.readinesProbe"),
        ("cpu", "Service", "spec.selectr"),
        ("leader-worker-set", "LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.arg"),
        ("leader-worker-set", "LeaderWorkerSet", "spec.leaderWorkerTemplate.sice"),
        ("ray", "RayCluster", "spec.headGroupSpec.template.spec.hostNetworks"),
        ("gpu-keda", "ServiceMonitor", "spec.endpoints.0.authorisation"),
        ("gpu-keda", "ScaledObject", "spec.triggers.0.metadata.treshold"),
        ("gpu-hpa", "HorizontalPodAutoscaler", "spec.minReplica"),
        ("gateway", "InferencePool", "spec.targetPort"),
        ("gateway", "HTTPRoute", "spec.rules.0.backendRef"),
    ],
)
def test_an_unknown_field_is_found(variant: str, kind: str, path: str, version: str) -> None:
    (manifest,) = (copy.deepcopy(each) for each in kustomize(variant) if each["kind"] == kind)
    *parents, name = path.split(".")
    parent: Any = manifest
    for key in parents:
        parent = parent[int(key) if key.isdigit() else key]
    parent[name] = "x"
    (error,) = kubernetes_schemas.errors(manifest, version)
    assert name in error


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_has_the_content_of_the_overlay(variant: str) -> None:
    ours, charts = normalized(kustomize(variant)), normalized(helm(variant))
    names = [[(manifest["kind"], manifest["metadata"]["name"]) for manifest in each] for each in (ours, charts)]
    assert names[0] == names[1]
    for one, other in zip(ours, charts, strict=True):
        assert one == other


def test_each_overlay_and_each_example_is_in_the_guide() -> None:
    assert set(VARIANTS) < set(EXAMPLES)
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert [name for name in EXAMPLES if f"`{name}`" not in guide] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_have_few_rights(variant: str) -> None:
    for template in all_pod_templates(kustomize(variant)):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.get("automountServiceAccountToken") is False or pod["serviceAccountName"] == "quire-endpoint-picker"
        assert pod["enableServiceLinks"] is False  # they would set QUIRE_… variables
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            if container["name"] in ("quire", "ray"):
                assert writable == {"/tmp", "/cache", "/dev/shm"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_referred_to_exists(variant: str) -> None:
    manifests = kustomize(variant)
    maps = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
    claims = {each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"}
    services = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    templates = all_pod_templates(manifests)
    labels = [template["metadata"]["labels"] for template in templates]
    for template in templates:
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for volume in template["spec"]["volumes"]:
            match volume:
                case {"configMap": {"name": name}}:
                    assert name in maps
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert name in claims
                case {"secret": {"secretName": name}}:
                    assert name == "quire"
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            for variable in container.get("env", []):
                if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert secret["name"] == "quire"
                    assert secret["key"] in SECRET_KEYS
            ports = [port["name"] for port in container.get("ports", [])]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = container.get(probe, {}).get("httpGet", {}).get("port")
                assert port is None or port in ports
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                selector = spec["selector"]
            case "PodDisruptionBudget" | "InferencePool":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case "Deployment" | "StatefulSet":
                selector = spec["selector"]["matchLabels"]
                (template,) = pod_templates(manifest)
                assert selector.items() <= template["metadata"]["labels"].items()
                assert spec.get("serviceName", "quire") in services
            case "ScaledObject" | "HorizontalPodAutoscaler":
                target = find(manifests, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
                assert target["apiVersion"] == spec["scaleTargetRef"]["apiVersion"]
                assert "replicas" not in target["spec"]
                continue
            case _:
                continue
        assert any(selector.items() <= each.items() for each in labels)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_servers_pods_get_requests(variant: str) -> None:
    manifests = kustomize(variant)
    selector = find(manifests, "Service")["spec"]["selector"]
    for template in all_pod_templates(manifests):
        is_selected = selector.items() <= template["metadata"]["labels"].items()
        assert is_selected == (component(template) == "server")
        if is_selected:
            assert quire_container(template)["ports"] == [{"name": "http", "containerPort": 8000}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_what_they_should(variant: str) -> None:
    for template in all_pod_templates(kustomize(variant)):
        if component(template) == "server":
            server = quire_container(template)
            assert server["startupProbe"]["httpGet"]["path"] == "/health/ready"
            assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
            assert server["livenessProbe"]["httpGet"]["path"] == "/health/live"
            # A process that hangs is replaced by the server itself after --watchdog-seconds.
            patience = server["livenessProbe"]["periodSeconds"] * server["livenessProbe"]["failureThreshold"]
            assert patience > 2 * EngineOptions().watchdog_seconds


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_the_time_to_drain(variant: str, source: Callable[[str], list[Manifest]]) -> None:
    manifests = source(variant)
    drain = flags(manifests)["shutdown-timeout"]
    for template in all_pod_templates(manifests):
        grace = template["spec"].get("terminationGracePeriodSeconds")
        for container in template["spec"]["containers"]:
            wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            match component(template), container["name"]:
                case "server", "quire":
                    assert 0 < wait < drain
                    assert grace >= wait + drain + SECONDS_TO_END
                    server_needs = wait + drain
                case "replica", _:  # it drains by itself
                    assert grace >= drain + SECONDS_TO_END
                case "worker", _:
                    assert wait >= server_needs
                    assert grace >= wait + SECONDS_TO_END


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_quire_takes_the_flags(
    variant: str, source: Callable[[str], list[Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIP_HTTP_PORT", raising=False)
    manifests = source(variant)
    (tmp_path / "quire.yaml").write_text(find(manifests, "ConfigMap")["data"]["quire.yaml"])
    fields = {"status.podIP": "10.0.0.1", "metadata.labels['apps.kubernetes.io/pod-index']": "1"}
    group = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "quire-group-0.quire-group.quire"}
    seen = []
    for template in all_pod_templates(manifests):
        for container in template["spec"]["containers"]:
            if container["name"] == "quire":
                variables = group | environment(container, fields, dict.fromkeys(SECRET_KEYS, "secret"))
                command = arguments(container, variables, {"config": tmp_path})
                assert "$" not in " ".join(command)
                _, server = read_options(build_parser().parse_args(command))
                assert isinstance(server, ServerOptions)
                seen.append(component(template))
                assert server.headless == (seen[-1] in ("worker", "replica"))
                assert server.host == "0.0.0.0"
                keys = server.api_key_file is not None and "QUIRE_METRICS_KEY" in variables
                assert keys == (seen[-1] == "server" and variant != "gateway")
    assert "server" in seen


def test_a_model_is_in_its_folder_when_it_is_complete(tmp_path: Path) -> None:
    """`hf download` fails the first time."""
    (template,) = pod_templates(find(kustomize("gpu"), "Job", "quire-download"))
    (container,) = template["spec"]["containers"]
    *shell, script = container["command"]
    assert shell == ["sh", "-c"]
    fake = tmp_path / "hf"
    fake.write_text('#!/bin/sh\necho "$@" >> calls\nmkdir -p "$4"\necho "$2" >> "$4/config.json"\ntest -e ready\n')
    fake.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "org/model", "FOLDER": "model"}

    def run() -> int:
        command = [*shell, script.replace("/models", str(tmp_path / "models"))]
        return subprocess.run(command, env=variables, cwd=tmp_path).returncode

    assert run() != 0
    assert not (tmp_path / "models/model").exists()
    (tmp_path / "ready").touch()
    assert (run(), run()) == (0, 0)
    assert (tmp_path / "models/model/config.json").read_text() == "org/model\n" * 2
    folder = tmp_path / "models/.model"
    assert (tmp_path / "calls").read_text() == f"download org/model --local-dir {folder}\n" * 2


def test_the_server_loads_the_model_that_is_downloaded() -> None:
    for variant in VARIANTS:
        manifests = kustomize(variant)
        if any(manifest["kind"] == "Job" for manifest in manifests):
            (template,) = pod_templates(find(manifests, "Job", "quire-download"))
            (container,) = template["spec"]["containers"]
            folder = environment(container, {}, dict.fromkeys(SECRET_KEYS, ""))["FOLDER"]
            assert flags(manifests)["model"] == f"/models/{folder}"


def test_metrics_that_are_read_exist() -> None:
    known = set(re.findall(r"`(quire:\w+)`", (ROOT / "docs/reference/metrics.md").read_text()))
    scaled, adapted = find(kustomize("gpu-keda"), "ScaledObject"), find(kustomize("gpu-hpa"), "HorizontalPodAutoscaler")
    picker = find(kustomize("gateway"), "ConfigMap", "quire-endpoint-picker")
    (config,) = picker["data"].values()
    for text in (str(scaled), str(adapted).replace("quire_", "quire:"), config):
        used = set(re.findall(r"quire:\w+", text))
        assert used >= {"quire:num_requests_waiting", "quire:kv_cache_usage_perc"}
        assert used <= known
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert set(re.findall(r"quire:\w+", guide)) <= known


def test_the_chart_has_no_findings() -> None:
    findings = helm_python.lint(str(CHART))
    assert [each for each in findings["messages"] if each["error"] != "icon is recommended"] == []
    assert findings["errors"] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": "daemonSet"}, "workload"),
        ({"replica": 2}, "replica"),
        ({"workload": "ray", "autoscaling": {"by": "keda"}}, "keda does not scale workload: ray"),
        ({"workload": "replicas", "autoscaling": {"by": "hpa"}}, "hpa does not scale workload: replicas"),
    ],
)
def test_the_chart_refuses(values: Manifest, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


SCHEDULING = {
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "podAnnotations": {"team": "chat"},
    "podLabels": {"team": "chat"},
    "imagePullSecrets": [{"name": "registry"}],
    "image": {"pullPolicy": "Always"},
    "models": {"existingClaim": "weights"},
}


@pytest.mark.parametrize(
    "values",
    [
        *({"workload": name, **SCHEDULING} for name in ("deployment", "leaderWorkerSet", "statefulSet", "ray")),
        {"workload": "replicas", "autoscaling": {"by": "keda"}, "monitoring": {"enabled": True, "labels": {"a": "b"}}},
        {"workload": "leaderWorkerSet", "autoscaling": {"by": "hpa"}, "gateway": {"enabled": True}},
        {"workload": "statefulSet", "hosts": 5, "networkPolicy": {"namespaceLabels": None}},
        {"models": {"storageClassName": "nfs"}, "download": {"enabled": True}, "networkPolicy": {"enabled": False}},
    ],
)
def test_other_values_are_valid_too(values: Manifest) -> None:
    manifests = render(values)
    for version in kubernetes_schemas.VERSIONS:
        assert [error for manifest in manifests for error in kubernetes_schemas.errors(manifest, version)] == []
    for template in all_pod_templates(manifests):
        if "nodeSelector" in values and component(template):
            for key in ("nodeSelector", "tolerations", "topologySpreadConstraints", "imagePullSecrets"):
                assert template["spec"][key] == SCHEDULING[key]
            assert template["metadata"]["labels"]["team"] == template["metadata"]["annotations"]["team"] == "chat"
            (claim,) = [each for each in template["spec"]["volumes"] if "persistentVolumeClaim" in each]
            assert claim["persistentVolumeClaim"] == {"claimName": "weights"}
    if values.get("hosts"):
        assert flags(manifests)["nnodes"] == 5
        assert find(manifests, "StatefulSet", "quire-worker")["spec"]["replicas"] == 4


def test_the_guides_own_overlay_can_be_built(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    (text,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", guide, re.DOTALL)
    content = yaml.safe_load(text)
    (base,) = content["resources"]
    path, _, _ = base.partition("//")[2].partition("//")[2].partition("?")
    content["resources"] = [os.path.relpath(ROOT / path, tmp_path)]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "quire.yaml").write_text("model: /models/other\nshutdown-timeout: 60\n")
    manifests = build(tmp_path)
    assert flags(manifests) == {"model": "/models/other", "shutdown-timeout": 60}
    (template,) = pod_templates(find(manifests, "Deployment"))
    assert quire_container(template)["image"] == "registry.example/quire:cuda"
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"quire"}


def test_releases_of_a_chart_have_names_of_their_own() -> None:
    manifests = render({"workload": "replicas", "autoscaling": {"by": "keda"}, "download": {"enabled": True}}, "chat")
    assert {manifest["metadata"]["name"].startswith("chat-quire") for manifest in manifests} == {True}
    assert find(manifests, "ScaledObject", "chat-quire")["spec"]["scaleTargetRef"]["name"] == "chat-quire-replica"
    replica = find(manifests, "StatefulSet", "chat-quire-replica")
    (template,) = pod_templates(replica)
    assert "chat-quire-0.chat-quire-hosts" in quire_container(template)["args"]
