"""A pytest plugin under which the black-box tests of vLLM's sources run against `quire serve` with the demo model.

They import a helper that starts `vllm serve`, and some of vLLM's modules. The helper here starts Quire, with the same
flags; the modules have what a client needs (a tokenizer, a version), and anything else of them is a class that raises
`NotImplementedError` when it is used, except that it holds a parsed response.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

import quire
from quire.engine import models

_found = importlib.util.spec_from_file_location("serving", Path(__file__).parents[1] / "serving.py")
assert _found is not None
assert _found.loader is not None
serving = importlib.util.module_from_spec(_found)  # vLLM's tests are the package `tests` here
sys.modules["serving"] = serving  # for its dataclass
_found.loader.exec_module(serving)
DEMO = Path(models.__file__).parent / "demo"
_LENGTH = 2048
"""The longest context of the demo model, in tokens."""
ADAPTER = DEMO.parent / "demo_adapters" / "capitals"


class RemoteOpenAIServer:
    """Stands in for vLLM's class of this name: a server of the demo model, under the name of the model it is for."""

    DUMMY_API_KEY = "token"

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        self.resources = contextlib.ExitStack()
        names, flags = [model], []
        # A feature that Quire does not have.
        variables = {name: value for name, value in (env_dict or {}).items() if name != "VLLM_SYSTEM_START_DATE"}
        given = iter(chain.from_iterable(each.split("=", each.startswith("--")) for each in vllm_serve_args))
        for argument in given:
            flag = argument.replace("_", "-") if argument.startswith("--") else argument
            if flag == "--served-model-name":
                names = [next(given)]
            elif flag == "--max-model-len":
                flags += [flag, str(min(int(next(given)), _LENGTH))]
            else:
                flags.append(flag)
        server = self.resources.enter_context(
            serving.serve(*flags, "--served-model-name", *names, env=os.environ | variables)
        )
        self.url_root = server.url
        self.host, port = server.url.removeprefix("http://").split(":")
        self.port = int(port)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.resources.close()

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


class Absent(type):
    """The type of vLLM's classes that are not here."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"vLLM's {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name in ("model_validate", "model_validate_json"):
            return lambda body: parsed(json.loads(body) if isinstance(body, str | bytes) else body)
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"vLLM's {cls.__name__}.{name}")


def parsed(body: Any) -> Any:
    """A response whose fields are attributes."""
    return json.loads(json.dumps(body), object_hook=lambda fields: SimpleNamespace(**fields))


class Peer(ModuleType):
    """A module of vLLM."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name) or Absent(name, (Exception,) if name.endswith("Error") else (), {})


KNOWN: dict[str, Any] = {
    "__version__": quire.__version__,
    "current_platform": SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False, is_xpu=lambda: False),
    "get_tokenizer": lambda *_, **__: AutoTokenizer.from_pretrained(DEMO),
    "hf_api": lambda: SimpleNamespace(snapshot_download=lambda **_: str(ADAPTER)),
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of vLLM."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = Peer(spec.name)
        module.__dict__.update(__version__=quire.__version__, __path__=[])
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())
helper = ModuleType("tests.utils")
helper.__dict__.update(RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[])
sys.modules |= {"tests.utils": helper, "tests.conftest": Peer("tests.conftest")}


class Outcomes:
    """Writes a line of JSON for each test: its name, how it ended, and the last line of the reason."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w")  # noqa: SIM115 -- until the process ends

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or str(report.longrepr or "")
            print(json.dumps([report.nodeid, report.outcome, reason[:400]]), file=self.file, flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(json.dumps([report.nodeid, "failed", str(report.longrepr)[-400:]]), file=self.file, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(os.environ["OUTCOMES"]))
