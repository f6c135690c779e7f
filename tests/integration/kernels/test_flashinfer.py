"""FlashInfer behind the operation, and the choice of a backend, with a library that the reference computes.

The library's own kernels are compared with the reference when a rank starts, and by tests/gpu.
"""

from __future__ import annotations

import ast
import inspect
import logging
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.kernels import backends, dispatch, reference
from quire.kernels import flashinfer as ours
from quire.kernels.attention_config import AttentionConfig, AttentionLayer, HostMetadata
from quire.kernels.backends import BackendUnavailable
from quire.kernels.flashinfer import FlashInfer
from tests.fakes import flashinfer as fake
from tests.integration.kernels import test_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYER = AttentionLayer(heads=4, kv_heads=2, head_dim=64, scale=0.125)
NEEDS = AttentionConfig((LAYER,), 16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def implementation() -> Any:
    """The reference runs calls that the backend does not take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "PLATFORMS", {})
        yield "reference"


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(backends, "CHOSEN", {})
    monkeypatch.setattr(backends, "TIMED_PROMPTS", [(20, 20)])
    monkeypatch.setattr(backends, "TIMED_DECODES", [(20, 1)] * 3)
    fake.plans.clear()
    yield
    fake.plans.clear()


def host_of(case: test_attention.Case) -> HostMetadata:
    return HostMetadata(np.array(case.counts), np.array(case.lengths), {})


def halved(case: test_attention.Case) -> test_attention.Case:
    return case._replace(query=case.query.half(), cache=case.cache.half())


REQUESTS = [(0, 1), (0, 17), (40, 1), (5, 3), (7, 1), (16, 16), (100, 1)]


@pytest.mark.parametrize("requests", [REQUESTS, [(n, 1) for n in (0, 15, 16, 47, 200)], [(0, 33)]])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 128), (3, 3, 64)])
@pytest.mark.parametrize(("window", "names"), [(0, ()), (10, ("window", "softcap"))])
def test_mixed_batches_are_the_references(
    requests: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, window: int, names: tuple[str, ...]
) -> None:
    options = test_attention.of_heads(heads, *names, window=window)
    case = halved(test_attention.build(requests, heads, kv_heads, head_dim, 16, **options))
    backends.CHOSEN["cpu"] = FlashInfer(CPU)
    host = host_of(case)

    def with_host(*args: Any, **options: Any) -> Tensor:
        return kernels.paged_attention(*args, host=host, **options)

    first, second = case.run(with_host), case.run(with_host)
    assert fake.plans == ["prompts" if max(case.counts) > 1 else "decodes"]  # once for both layers
    torch.testing.assert_close(first, case.run(reference.paged_attention))
    assert torch.equal(first, second)


def test_what_it_lacks_is_left_to_others() -> None:
    backend = backends.CHOSEN["cpu"] = FlashInfer(CPU)
    case = halved(test_attention.build([(0, 5), (20, 1)], 4, 2, 64, 16))
    host = host_of(case)
    narrow = halved(test_attention.build([(0, 5), (20, 1)], 4, 2, 32, 16))
    cases = [
        case._replace(options={"sinks": torch.zeros(4)}),
        case._replace(options={"slopes": torch.zeros(4)}),
        case._replace(query=case.query.float()),
        case._replace(cache=case.cache.float()),
        narrow,
    ]
    for each in cases:

        def with_host(*args: Any, **options: Any) -> Tensor:
            return kernels.paged_attention(*args, host=host, **options)

        torch.testing.assert_close(each.run(with_host), each.run(reference.paged_attention))
    case.run()  # a step that is cut in two: nothing is known on the host
    bounds = HostMetadata(host.counts, host.lengths + 100)  # a CUDA graph's
    case.run(lambda *args, **options: kernels.paged_attention(*args, host=bounds, **options))
    assert not fake.plans
    for backend.handles_prefill, plans in ((False, []), (True, ["prompts"])):
        case.run(with_host)
        assert fake.plans == plans


def test_steps_ahead_and_groups_of_layers_have_plans_of_their_own() -> None:
    backend = FlashInfer(CPU)
    case = halved(test_attention.build(REQUESTS, 4, 2, 64, 16))
    other = case._replace(tables=case.tables.flip(1).contiguous())  # of another group of layers: other blocks
    hosts = [host_of(case) for _ in range(3)]
    for host in hosts:
        for _ in range(2):
            for each in (case, other):

                def with_host(*args: Any, host: HostMetadata = host, **options: Any) -> Any:
                    return backend(*args, host=host, **options)

                torch.testing.assert_close(each.run(with_host), each.run(reference.paged_attention))
    assert fake.plans == ["prompts"] * 6
    wrappers = [set(map(id, (host.plans or {}).values())) for host in hosts]
    assert all(len(each) == 2 for each in wrappers)


def test_a_plan_that_is_still_being_sent_is_not_written_over() -> None:
    class Sent:
        done = False

        def query(self) -> bool:
            return self.done

        def record(self) -> None:
            pass

    backend = FlashInfer(CPU)
    case = halved(test_attention.build([(20, 1)], 4, 2, 64, 16))

    def launch() -> object:
        host = host_of(case)
        case.run(lambda *args, **options: backend(*args, host=host, **options))  # type: ignore[arg-type]
        (wrapper,) = (host.plans or {}).values()
        for each in backend._wrappers[next(iter(backend._wrappers))]:
            each._sent = each._sent or Sent()
        return wrapper

    used = [launch() for _ in range(5)]
    assert len(set(map(id, used[1:]))) == 4  # the first had no event yet
    for each in backend._wrappers[next(iter(backend._wrappers))]:
        each._sent.done = True
    assert launch() in used


def test_a_step_that_cannot_be_planned_uses_another_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def overflows(*_: Any, **__: Any) -> None:
        raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")

    monkeypatch.setattr(fake.BatchPrefillWithPagedKVCacheWrapper, "plan", overflows)
    backends.CHOSEN["cpu"] = FlashInfer(CPU)
    case = halved(test_attention.build([(0, 5), (20, 1)], 4, 2, 64, 16))
    for _ in range(2):
        host = host_of(case)
        found = case.run(lambda *args, host=host, **options: kernels.paged_attention(*args, host=host, **options))
        torch.testing.assert_close(found, case.run(reference.paged_attention))
    assert caplog.text.count("Buffer overflow") == 1


def choose(config: AttentionConfig, dtype: torch.dtype = torch.float16, problem: str = "") -> FlashInfer | None:
    """As on a GPU."""
    return backends._with_flashinfer(CPU, dtype, config, reference.paged_attention, problem)


@pytest.mark.parametrize(
    ("times", "serves", "said"),
    [
        ((1, 2, 4, 3), (True, False), "prefill by flashinfer (flashinfer 1.000 ms, triton 2.000 ms), decode by tri"),
        ((2, 1, 3, 4), (False, True), "decode by flashinfer (flashinfer 3.000 ms, triton 4.000 ms)"),
        ((2, 1, 4, 3), None, "prefill by triton (flashinfer 2.000 ms, triton 1.000 ms), decode by triton"),
    ],
)
def test_prefill_and_decode_each_take_the_faster_backend(
    times: tuple[int, ...],
    serves: tuple[bool, bool] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    taken = iter(times)
    monkeypatch.setattr(backends, "seconds", lambda *_: next(taken) / 1000)
    found = choose(NEEDS)
    assert (found and (found.handles_prefill, found.handles_decode)) == serves
    assert said in caplog.text
    assert len(caplog.records) == 1


def test_a_requested_backend_is_used_where_supported_and_the_log_names_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    layers = (LAYER, AttentionLayer(4, 2, 64, 0.1, window=9, has_sinks=True), AttentionLayer(4, 2, 80, 0.1))
    found = choose(AttentionConfig(layers, 16, torch.float16, "flashinfer"))
    assert found is not None
    assert found.handles_prefill
    assert found.handles_decode
    assert "as requested; triton for what flashinfer does not support: heads of 80, sinks" in caplog.text


@pytest.mark.parametrize(
    ("layer", "dtypes", "reason"),
    [
        (AttentionLayer(4, 1, 576, 0.1, is_mla=True), (torch.float16,) * 2, "latent attention"),
        (AttentionLayer(4, 2, 64, 0.1, has_alibi=True), (torch.float16,) * 2, "ALiBi"),
        (AttentionLayer(4, 2, 64, 0.1, is_partial=True), (torch.float16,) * 2, "a part of the keys"),
        (LAYER, (torch.float32,) * 2, "float32"),
        (LAYER, (torch.bfloat16, torch.int8), "a cache of int8"),
    ],
)
def test_a_requested_backend_that_supports_no_layer_is_refused(
    layer: AttentionLayer, dtypes: tuple[torch.dtype, torch.dtype], reason: str
) -> None:
    config = AttentionConfig((layer,), 16, dtypes[1], "flashinfer")
    with pytest.raises(BackendUnavailable, match=f"--attention-backend flashinfer: {reason} not supported; use triton"):
        backends.choose(CUDA, dtypes[0], config, reference.paged_attention)


def test_a_backend_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = fake._Planned.compute

    def wrong(self: Any, q: Tensor, paged_kv_cache: Any, out: Tensor) -> Tensor:
        return compute(self, q, paged_kv_cache, out).add_(0.1)

    monkeypatch.setattr(fake._Planned, "compute", wrong)
    with pytest.raises(ours.FlashInferWrong, match="self-check failed: AssertionError: Tensor-likes are not close"):
        choose(NEEDS)
    tried = backends._with_flashinfer
    monkeypatch.setattr(backends, "_with_flashinfer", lambda device, *rest: tried(CPU, *rest))
    assert backends.choose(CUDA, torch.float16, NEEDS, reference.paged_attention) is None
    assert "attention on cuda: triton (flashinfer is not used: self-check failed" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_backend_that_fails_at_the_sizes_that_are_timed_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = fake._Planned.compute

    def fails(self: Any, q: Tensor, paged_kv_cache: Any, out: Tensor) -> Tensor:
        if len(q) == 20:  # as the timed prompt
            raise RuntimeError("no such kernel")
        return compute(self, q, paged_kv_cache, out)

    monkeypatch.setattr(fake._Planned, "compute", fails)
    with pytest.raises(ours.FlashInferWrong, match="timing failed: RuntimeError: no such kernel"):
        choose(NEEDS)
    monkeypatch.setattr(FlashInfer, "_plan", lambda *_: None)
    monkeypatch.setattr(FlashInfer, "compare", lambda *_: "")
    with pytest.raises(ours.FlashInferWrong, match="timing failed: AssertionError: it declines the call"):
        choose(NEEDS)


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert backends.choose(CUDA, torch.float16, NEEDS, reference.paged_attention) is None
    assert "attention on cuda: triton (flashinfer is not used: cannot be imported" in caplog.text
    named = AttentionConfig((LAYER,), 16, torch.float16, "flashinfer")
    with pytest.raises(BackendUnavailable, match=r"pip install 'quire-llm\[flashinfer\]'; use triton or omit the flag"):
        backends.choose(CUDA, torch.float16, named, reference.paged_attention)


def test_triton_by_name_must_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    named = AttentionConfig((LAYER,), backend="triton")
    assert backends.choose(CUDA, torch.float16, named, reference.paged_attention) is None
    assert "attention on cuda: triton, as requested" in caplog.text
    with pytest.raises(BackendUnavailable, match="the kernel does not work on cuda: wrong PTX; use auto or reference"):
        backends.choose(CUDA, torch.float16, named, reference.paged_attention, "wrong PTX")


def test_prepare_chooses_for_the_cpu_and_raises_where_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PLATFORMS", dict(dispatch.PLATFORMS) | {"cpu": object()})
    calls: list[str] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append("reference")
        return attend(*args, **options)

    attend = reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", counted)
    case = test_attention.build([(3, 2)], 2, 1, 8, 4)
    kernels.prepare("cpu", torch.float32, AttentionConfig(backend="reference"))()
    assert torch.equal(case.run(), case.run(attend))
    assert calls == ["reference"]
    kernels.prepare("cpu")()
    assert not backends.CHOSEN
    ready = kernels.prepare("cpu", torch.float32, AttentionConfig(backend="triton"))
    with pytest.raises(
        BackendUnavailable, match="--attention-backend triton needs a GPU; omit the flag or use reference"
    ):
        ready()


def test_what_goes_wrong_is_raised_where_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel at all")

    monkeypatch.setattr(dispatch, "_load_cpu", fail)
    with pytest.raises(RuntimeError, match="no kernel at all"):
        kernels.prepare("cpu")()


def test_kernels_are_prepared_on_the_device_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes no `cuda` without a number for a thread's device, and a thread begins with the first one."""
    chosen: list[tuple[str, object]] = []

    def current(_: int, *, device: torch.device) -> Any:
        return types.SimpleNamespace(device=torch.device(device.type, 1))

    monkeypatch.setattr(torch, "empty", current)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(dispatch, "_load_triton", lambda device, config, **_: chosen.append(("load", device)))
    kernels.prepare("cuda")()
    assert chosen == [("prepare-kernels", torch.device("cuda", 1)), ("load", torch.device("cuda", 1))]


def parameters(function: ast.FunctionDef) -> dict[str, tuple[str, str]]:
    """Name → where it may stand (its place, or by name only), and its default as it is written."""
    args = function.args
    positional = args.posonlyargs + args.args
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = {
        each.arg: (str(place), "" if default is None else ast.unparse(default))
        for place, (each, default) in enumerate(zip(positional, defaults, strict=True))
    }
    for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found[each.arg] = ("named", "" if value is None else ast.unparse(value))
    return found


def methods(source: str, name: str) -> dict[str, dict[str, tuple[str, str]]]:
    (found,) = (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == name)
    return {each.name: parameters(each) for each in found.body if isinstance(each, ast.FunctionDef)}


@pytest.mark.slow
def test_the_fake_has_the_librarys_interface(tmp_path: Path) -> None:
    """Without installing it: it is large and requires CUDA, and its sources have the functions that we call."""
    wheel = "flashinfer-python==0.7.2.post1"
    asked = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), wheel]
    subprocess.run(asked, check=True)
    (archive,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(archive) as inside:
        sources = {name: inside.read(f"flashinfer/{name}.py").decode() for name in ("prefill", "decode")}
    for file, name in (("prefill", "BatchPrefill"), ("decode", "BatchDecode")):
        name += "WithPagedKVCacheWrapper"
        real, mine = methods(sources[file], name), methods(inspect.getsource(fake), name)
        for method, called in mine.items():
            for parameter, (place, default) in called.items():
                assert parameter in real[method], f"{name}.{method} has no {parameter}"
                its_place, its_default = real[method][parameter]
                assert place in ("named", its_place), f"{name}.{method}: {parameter}"
                if place == "named":
                    assert default == its_default, f"{name}.{method}: {parameter}"
