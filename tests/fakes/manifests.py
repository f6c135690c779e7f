"""The Kubernetes manifests of `deploy/`, rendered by kustomize and by Helm, and the commands of their pods in a
cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="scripts/setup ci installs it")
DEPLOY = Path(__file__).parents[2] / "deploy"
CHART, OVERLAYS = DEPLOY / "helm/quire", DEPLOY / "kubernetes/overlays"
VARIANTS = sorted(path.name for path in OVERLAYS.iterdir())
EXAMPLES = sorted(path.stem for path in (CHART / "examples").iterdir())
"""Files of values, one for each overlay and more."""
NAMESPACE = "quire"

Manifest = dict[str, Any]


@cache
def kustomize(variant: str) -> list[Manifest]:
    """Build an overlay."""
    return build(OVERLAYS / variant)


def build(folder: Path) -> list[Manifest]:
    """Build a kustomization."""
    command = [str(Path(sys.executable).parent / "kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def helm(variant: str) -> list[Manifest]:
    """Render the chart with the values of an example."""
    return render(yaml.safe_load((CHART / "examples" / f"{variant}.yaml").read_text()))


def render(values: Manifest, name: str = "quire") -> list[Manifest]:
    """Render the chart; raises `helm_python.HelmError`."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=name, namespace=NAMESPACE)
    texts = (text for path, text in files.items() if not path.endswith("NOTES.txt"))
    return [manifest for text in texts for manifest in yaml.load_all(text, _StrictLoader) if manifest]


class _StrictLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (keys, node.start_mark)
        return super().construct_mapping(node, deep)


def pod_templates(manifest: Manifest) -> Iterator[Manifest]:
    """The pod templates of a workload of any kind."""
    match manifest["kind"]:
        case "Deployment" | "StatefulSet" | "Job":
            yield manifest["spec"]["template"]
        case "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            yield from (group["leaderTemplate"], group["workerTemplate"])
        case "RayCluster":
            yield manifest["spec"]["headGroupSpec"]["template"]
            yield from (group["template"] for group in manifest["spec"]["workerGroupSpecs"])


def all_pod_templates(manifests: Iterable[Manifest]) -> list[Manifest]:
    return [template for manifest in manifests for template in pod_templates(manifest)]


def find(manifests: Iterable[Manifest], kind: str, name: str = "quire") -> Manifest:
    """The manifest of this name; the name of a generated ConfigMap ends in a hash."""
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and re.fullmatch(rf"{name}(-[0-9a-z]{{10}})?", manifest["metadata"]["name"])
    )
    return found


def component(template: Manifest) -> str:
    return str(template["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def quire_container(template: Manifest) -> Manifest:
    found: list[Manifest] = [each for each in template["spec"]["containers"] if each["name"] == "quire"]
    (container,) = found
    return container


def flags(manifests: Iterable[Manifest]) -> Manifest:
    """The content of quire.yaml."""
    content = yaml.safe_load(find(manifests, "ConfigMap")["data"]["quire.yaml"])
    assert isinstance(content, dict)
    return content


def environment(container: Manifest, fields: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Its variables as the kubelet sets them: `fields` are of the pod, by path; `secrets` by key."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        match variable:
            case {"value": value}:
                found[variable["name"]] = _expand(value, found)
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                found[variable["name"]] = fields[path]
            case {"valueFrom": {"secretKeyRef": {"key": key}}}:
                found[variable["name"]] = secrets[key]
    return found


def arguments(container: Manifest, variables: Mapping[str, str], mounts: Mapping[str, Path]) -> list[str]:
    """Its arguments, with variables expanded. Paths on a volume point to the volume's folder on this machine."""
    expanded = [_expand(argument, variables) for argument in container["args"]]
    for mount in container["volumeMounts"]:
        if folder := mounts.get(mount["name"]):
            expanded = [
                str(folder / Path(argument).relative_to(mount["mountPath"]))
                if argument.startswith(f"{mount['mountPath']}/")
                else argument
                for argument in expanded
            ]
    return expanded


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME), which stays as it is if there is no such variable."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)
