"""The router of a release of the chart with several models: Envoy, with the configuration that the chart renders, in
front of servers."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import yaml

from tests.e2e.environments import environment
from tests.e2e.serving import serve
from tests.e2e.test_examples import ENVOY, program
from tests.e2e.test_replicas import free_port
from tests.fakes.manifests import find, render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEY = "a-key-for-tests"
MODELS = ("one", "org/another")


def test_models_have_one_address(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = {f"model-{number}": {"config": {"served-model-name": name}} for number, name in enumerate(MODELS)}
    text = find(render({"modelSpec": spec}), "ConfigMap", "quire-router")["data"]["envoy.yaml"]
    config = yaml.safe_load(text)
    front = free_port()
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = front
    command = [str(environment(capfd, ENVOY).with_name("envoy")), "--concurrency", "1", "--config-path"]
    options = ("--api-key", KEY, "--served-model-name")
    with serve(*options, MODELS[0]) as one, serve(*options, MODELS[1]) as other:
        for cluster, server in zip(config["static_resources"]["clusters"], (one, other), strict=True):
            (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            port = urlsplit(server.url).port
            endpoint["endpoint"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(config))
        url = f"http://127.0.0.1:{front}"
        with program([*command, str(tmp_path / "envoy.yaml")], f"{url}/model-1/health/ready"):
            check_clients(url)
            check_raw(url)


def check_clients(url: str) -> None:
    """OpenAI's client finds both models, and streams from both."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == list(MODELS)
        for name in MODELS:
            stream = client.completions.create(model=name, prompt="Quire is", max_tokens=8, stream=True)
            assert {chunk.model for chunk in stream} == {name}
            assert client.models.retrieve(name).owned_by == "quire"
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="Quire is")
        assert caught.value.code == "model_not_found"
        client.api_key = "another"
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model=MODELS[0], prompt="Quire is")


def check_raw(url: str) -> None:
    """The model may be at the end of a large body, of any type; other routes begin with a name of modelSpec."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = f'{{"prompt": "Quire is", "max_tokens": 1, {" " * 3_000_000} "model": "{MODELS[1]}"}}'
    typed = {**headers, "Content-Type": "application/json"}
    large = httpx.post(f"{url}/v1/completions", content=body, headers=typed, timeout=60)
    assert large.status_code == 200, large.text
    assert large.json()["model"] == MODELS[1]
    form = {**headers, "Content-Type": "application/x-www-form-urlencoded"}
    small = json.dumps({"prompt": "Quire is", "max_tokens": 1, "model": MODELS[0]})
    # It gets to the server, which says what it thinks of the type.
    assert httpx.post(f"{url}/v1/completions", content=small, headers=form, timeout=60).status_code != 404
    for number, name in enumerate(MODELS):
        metrics = httpx.get(f"{url}/model-{number}/metrics", headers=headers).text
        assert f'model_name="{name}"' in metrics
    assert httpx.get(f"{url}/v1/responses/none", headers=headers).status_code == 404
