"""JSON schemas of Kubernetes manifests, strict about unknown fields: the schemas of `kubernetes-validate`, and schemas
of the custom resources in `deploy/`, with the documented fields that it uses.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

_published = pytest.importorskip("kubernetes_validate.utils", reason="scripts/setup ci installs it")
VERSIONS: list[str] = list(dict.fromkeys(_published.all_versions()))[-2:]
"""The newest two."""

_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_DEFS = f"{_DEFINITIONS}#/$defs/io.k8s."
_METADATA = {"$ref": f"{_DEFS}apimachinery.pkg.apis.meta.v1.ObjectMeta"}
_POD_TEMPLATE = {"$ref": f"{_DEFS}api.core.v1.PodTemplateSpec"}
_BEHAVIOR = {"$ref": f"{_DEFS}api.autoscaling.v2.HorizontalPodAutoscalerBehavior"}
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
_NUMBER = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
_ADDRESS = {"type": "string", "pattern": r"^[\w.-]+:\d+$"}
_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    fixed = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _object({**fixed, "metadata": _METADATA, "spec": spec})


_RAY_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
CUSTOM: dict[str, dict[str, Any]] = {
    # sigs.k8s.io/lws/api/leaderworkerset/v1
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        _object(
            {
                "leaderWorkerTemplate": _object(
                    {"workerTemplate": _POD_TEMPLATE},
                    leaderTemplate=_POD_TEMPLATE,
                    size={"type": "integer", "minimum": 1},
                    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                )
            },
            replicas=_COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        ),
    ),
    # docs.ray.io: the RayCluster of KubeRay's API ray.io/v1
    "RayCluster": _resource(
        "ray.io/v1",
        "RayCluster",
        _object(
            {"headGroupSpec": _object({"template": _POD_TEMPLATE}, rayStartParams=_RAY_PARAMS)},
            rayVersion=_TEXT,
            upgradeStrategy=_object({"type": {"enum": ["Recreate", "None"]}}),
            workerGroupSpecs=_list(
                _object(
                    {"groupName": _NAME, "template": _POD_TEMPLATE},
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), _COUNT),
                    rayStartParams=_RAY_PARAMS,
                )
            ),
        ),
    ),
    # prometheus-operator.dev: monitoring.coreos.com/v1
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _object(
            {
                "selector": _object({"matchLabels": _LABELS}),
                "endpoints": _list(
                    _object(
                        {"port": _TEXT},
                        path=_TEXT,
                        interval=_DURATION,
                        scheme={"enum": ["http", "https"]},
                        tlsConfig=_object({}, insecureSkipVerify={"type": "boolean"}, serverName=_TEXT),
                        authorization=_object({"credentials": _object({"name": _NAME, "key": _TEXT})}, type=_TEXT),
                    )
                ),
            },
            jobLabel=_TEXT,
        ),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _object(
            {
                "groups": _list(
                    _object(
                        {
                            "name": _TEXT,
                            "rules": _list(
                                _object(
                                    {"alert": _TEXT, "expr": _TEXT, "labels": _LABELS, "annotations": _LABELS},
                                    **{"for": _DURATION},
                                )
                            ),
                        }
                    )
                )
            }
        ),
    ),
    # keda.sh: the ScaledObject, and the scaler for Prometheus
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            {
                "scaleTargetRef": _object({"name": _NAME}, apiVersion=_TEXT, kind=_TEXT),
                "triggers": _list(
                    {
                        "oneOf": [
                            _object(
                                {
                                    "type": {"const": "prometheus"},
                                    "metadata": _object(
                                        {
                                            "serverAddress": {"type": "string", "pattern": "^https?://"},
                                            "query": _TEXT,
                                            "threshold": _NUMBER,
                                        },
                                        activationThreshold=_NUMBER,
                                    ),
                                }
                            ),
                            # of the HTTP add-on
                            _object(
                                {
                                    "type": {"const": "external-push"},
                                    "metadata": _object({"scalerAddress": _ADDRESS, "interceptorRoute": _NAME}),
                                }
                            ),
                        ]
                    }
                ),
            },
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            pollingInterval=_COUNT,
            cooldownPeriod=_COUNT,
            advanced=_object({"horizontalPodAutoscalerConfig": _object({"behavior": _BEHAVIOR})}),
        ),
    ),
    # keda.sh/http-add-on: http.keda.sh/v1beta1
    "InterceptorRoute": _resource(
        "http.keda.sh/v1beta1",
        "InterceptorRoute",
        _object(
            {
                "target": {
                    "oneOf": [
                        _object({"service": _NAME, "port": _PORT}),
                        _object({"service": _NAME, "portName": _NAME}),
                    ]
                },
                "scalingMetric": _object({"concurrency": _object({"targetValue": {"type": "integer", "minimum": 1}})}),
            },
            rules=_list(_object({"hosts": _list(_TEXT)})),
            timeouts=_object({}, **dict.fromkeys(("readiness", "request", "responseHeader"), _DURATION)),
        ),
    ),
    # gateway-api-inference-extension.sigs.k8s.io: inference.networking.k8s.io/v1
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _object(
            {
                "selector": _object({"matchLabels": _LABELS}),
                "targetPorts": {**_list(_object({"number": _PORT})), "maxItems": 8},
                "endpointPickerRef": _object(
                    {"name": _NAME, "port": _object({"number": _PORT})},
                    failureMode={"enum": ["FailOpen", "FailClose"]},
                ),
            }
        ),
    ),
    # gateway-api.sigs.k8s.io: gateway.networking.k8s.io/v1
    "HTTPRoute": _resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _object(
            {
                "parentRefs": _list(_object({"name": _NAME}, namespace=_NAME)),
                "rules": _list(
                    _object(
                        {"backendRefs": _list(_object({"name": _NAME}, group=_TEXT, kind=_TEXT, port=_PORT))},
                        matches=_list(
                            _object(
                                {
                                    "path": _object(
                                        {
                                            "type": {"enum": ["Exact", "PathPrefix"]},
                                            "value": {"type": "string", "pattern": "^/"},
                                        }
                                    )
                                }
                            )
                        ),
                        timeouts=_object({"request": _DURATION}),
                    )
                ),
            },
            hostnames=_list(_TEXT),
        ),
    ),
}


@cache
def _registry(version: str) -> Registry[Any]:
    definitions = _published.schema_contents(
        f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version
    )
    registry: Registry[Any] = Registry().with_resource(_DEFINITIONS, Resource.from_contents(definitions))
    return registry


@cache
def _validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    schema = CUSTOM.get(kind)
    if schema is None:
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        name = f"kubernetes-json-schema/v{version}-local-strict/{kind.lower()}-{group}.json"
        schema = _published.schema_contents(name, version)
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


def errors(manifest: dict[str, Any], version: str) -> list[str]:
    """The errors that a Kubernetes version finds in a manifest. Raises `FileNotFoundError` for an unknown kind."""
    found = _validator(version, manifest["kind"], manifest["apiVersion"]).iter_errors(manifest)
    return [f"{manifest['kind']} {error.json_path}: {error.message[:300]}" for error in found]
