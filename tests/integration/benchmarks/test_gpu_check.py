"""scripts/gpu_check on a CPU at toy sizes: every part, the report of its figures, and parts that break."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.interpreter import with_scales_of_8_bit_floats

_ROOT = Path(__file__).parents[3]
_PROGRAMS = _ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set paths for this process and for the processes of the parts, which find the package of this test as
    `gpu.broken`."""
    monkeypatch.syspath_prepend(str(_PROGRAMS))
    paths = [str(_PROGRAMS), str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def module(name: str) -> Any:
    return importlib.import_module(name)


def make_lab(folder: Path, **fields: Any) -> Any:
    limits = {"cpu": "one", "threads": 1, "copy": 1e9, "read": 2e9, "large": {"f32": 1e12}, "few": {}}
    known = {"machine": module("machine").Machine(**limits), "values": {"offline": 1000.0}, "data": {"requests": 4}}
    return module("gpu.lab").Lab("cpu", True, False, folder, time.monotonic() + 120, **(known | fields))


def found(part: Any, folder: Path, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """Rows by their keys, and failed checks."""
    records = list(part(make_lab(folder, **fields)))
    wrong = [record for record in records if record.kind == "check" and not record.ok]
    return {record.key: record for record in records if record.kind == "row"}, wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are masked out
def test_every_kernel_for_gpus_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter: the calls are ones that the kernels take."""
    torch, checks = importlib.import_module("torch"), module("gpu.kernel_checks")
    triton = importlib.import_module("quire.kernels.triton")
    monkeypatch.setattr(
        checks, "_implementations", lambda operation, _: [("triton", triton)] if operation in triton.__all__ else []
    )
    with_scales_of_8_bit_floats(monkeypatch)
    torch.manual_seed(0)
    found = checks._check_type(torch.device("cpu"), torch.float32, tiny=True)
    assert {name: errors.failures for name, errors in found.items() if errors.failures} == {}
    assert set(found) == {f"triton {name}" for name in triton.__all__}


def test_attention_is_checked_by_flashinfer_where_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, kernels = importlib.import_module("torch"), importlib.import_module("quire.kernels")
    backends, fake = (
        importlib.import_module("quire.kernels.backends"),
        importlib.import_module("tests.fakes.flashinfer"),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(fake, "plans", [])
    device = torch.device("cpu")
    monkeypatch.setattr(backends, "CHOSEN", {"cpu": backends.FlashInfer(device)})
    inputs = kernels.examples.Inputs(device, torch.float16)
    example = kernels.examples.attention(inputs, [(20, 1), (0, 5)], kernels.AttentionLayer(4, 2, 64, 0.125))
    for _ in range(2):
        torch.testing.assert_close(example.call(kernels), example.expected(), rtol=0.01, atol=0.01)
    assert len(fake.plans) == 1


@pytest.mark.slow
def test_kernels_of_the_cpu_are_right_and_a_wrong_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, cpu = module("gpu.kernel_checks"), importlib.import_module("quire.kernels.cpu")
    right = cpu.act_mul
    monkeypatch.setattr(cpu, "act_mul", lambda x, activation: right(x, activation) * 1.5)
    monkeypatch.setattr(cpu, "rms_norm", lambda *_: 1 / 0)
    records = [record for record in checks.check(make_lab(tmp_path)) if record.kind == "check"]
    wrong = {record.what: record.detail for record in records if not record.ok}
    assert len(wrong) == 6  # in three types; all others are right
    assert "of the tolerance" in wrong["cpu act_mul, float16"]
    assert "ZeroDivisionError: division by zero" in wrong["cpu rms_norm, bfloat16"]
    named = {record.what for record in records}
    for dtype in ("bfloat16", "float16", "float32"):
        assert {f"cpu {name}, {dtype}" for name in ("rms_norm", "paged_attention", "rotary_write_kv")} <= named


def test_errors_are_measured_in_what_is_allowed() -> None:
    torch, compare = importlib.import_module("torch"), module("gpu.kernel_checks").compare
    ones, step = torch.ones(3), 8 * torch.finfo(torch.bfloat16).eps
    assert compare(ones, ones, step) == (0.0, 0.0)
    error, ratio = compare((ones, ones + step), (ones, ones), step)
    assert (error, ratio) == (pytest.approx(step), pytest.approx(0.5))
    assert compare(ones * torch.nan, ones, step)[1] == float("inf")
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3]), step) == (1.0, float("inf"))
    with pytest.raises(AssertionError, match=r"\[3\] instead of \[2\]"):
        compare(ones, ones[:2], step)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    assert found(module("gpu.tokens").check, tmp_path)[1] == []


@pytest.mark.slow
def test_tokens_of_two_ranks_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = module("gpu.tokens")
    start, seen = tokens.Engine, list[str]()

    def engine(options: dict[str, Any]) -> Any:
        seen.append(os.environ[tokens.SHARE])
        return start(options)

    monkeypatch.setattr(tokens, "Engine", engine)
    monkeypatch.setenv(tokens.SHARE, "0")
    records = list(tokens.ranks(make_lab(tmp_path)))
    assert [record.what for record in records] == [
        f"tokens of llama, {layout} parallel 2, on CPU" for layout in ("tensor", "pipeline")
    ]
    assert all(record.ok for record in records)
    assert seen == ["1"] * 3
    assert os.environ[tokens.SHARE] == "0"


def test_two_ranks_of_a_second_family_run_where_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = module("gpu.tokens")
    grid = SimpleNamespace(device="cpu")
    monkeypatch.setattr(tokens, "_generate", lambda lab, folder, task, *sizes: ([[1]] * len(task.prompts), grid))
    lab = make_lab(tmp_path)
    lab.tiny = False
    for left, kinds in ((1000.0, ["check"] * 4), (0.0, ["check"] * 2 + ["note"])):
        lab.deadline = time.monotonic() + left
        assert [record.kind for record in tokens.ranks(lab)] == kinds


def test_different_tokens_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = module("gpu.tokens")
    generate = tokens.checkpoints.generate
    monkeypatch.setattr(tokens.checkpoints, "generate", lambda *args: [[*one[:2], -1, -1] for one in generate(*args)])
    _, wrong = found(tokens.check, tmp_path)
    assert "2 differ, the one of 1 tokens from its token 2 on" in wrong[0].detail


def test_kernels_have_rows_beside_their_floors(tmp_path: Path) -> None:
    rows = module("gpu.kernel_rows")
    attention = found(rows.attention, tmp_path)[0]["attention"]
    assert attention.floor == 1.0  # GB/s, the copy bandwidth
    assert attention.share == attention.value
    sampler = found(rows.sampler, tmp_path)[0]["sampler"]
    assert sampler.floor == pytest.approx(4 * 1000 * 4 / 2e9 * 1e6)
    assert sampler.share == sampler.floor / sampler.value
    assert found(rows.sampler, tmp_path, machine=None)[0]["sampler"].floor is None
    assert found(rows.quantized, tmp_path)[0].keys() == {"4 bits", "fp8", "fp4"}


def test_the_model_has_rows(tmp_path: Path) -> None:
    rows, wrong = found(module("gpu.model").measure, tmp_path)
    assert set(rows) == {"decode 1", "decode 64", "idle", "prefill"}
    assert wrong == []
    assert 0 < rows["decode 1"].floor < rows["decode 64"].floor
    assert 0 <= rows["idle"].value <= 100
    assert rows["prefill"].floor == 1.0  # T operations a second


@pytest.mark.slow
def test_towers_have_checks_and_rows(tmp_path: Path) -> None:
    towers = module("gpu.towers")
    rows, wrong = found(towers.check, tmp_path)
    assert set(rows) == {"picture", "picture again", "picture beside"}
    assert wrong == []
    assert 0 < rows["picture"].floor < rows["picture"].value


@pytest.mark.slow
def test_throughput_without_http(tmp_path: Path) -> None:
    row = found(module("gpu.offline").measure, tmp_path)[0]["offline"]
    assert row.formula.startswith("8 requests of 16 in, 8 out in ")
    assert row.value > 0


def test_no_more_requests_than_there_is_time_for() -> None:
    fitting = module("gpu.offline").fitting
    assert fitting(1000, 256, expected=10.0, left=100.0) == 1000
    assert fitting(1000, 256, expected=40.0, left=100.0) == 512
    assert fitting(1000, 256, expected=400.0, left=100.0) == 256


@pytest.mark.slow
def test_the_whole_server(tmp_path: Path) -> None:
    rows, _ = found(module("gpu.serving").measure, tmp_path)
    assert set(rows) == {"cold start", "warm start", "server"}
    assert rows["server"].floor == 1000.0
    assert "4 requests of 16 in, 8 out" in rows["server"].formula


def test_checkpoints_go_to_files_of_some_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, lab = module("gpu.checkpoint"), make_lab(tmp_path)
    torch = importlib.import_module("torch")
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 300_000)
    written = checkpoint.write_weights(lab.shape, tmp_path, torch.float32, "cpu")
    assert written == checkpoint.weight_bytes(lab.shape, 4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(module("shapes").tensor_sizes(lab.shape))
    assert len(set(index["weight_map"].values())) == len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint.forget(tmp_path.glob("*.safetensors"))
    assert checkpoint.fastest_disk(1 << 60) is None


def test_what_the_spans_cover() -> None:
    union = module("gpu.model").union
    assert union([]) == 0
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


@pytest.mark.parametrize(
    ("key", "value", "floor", "reached"),
    [
        ("decode 1", 10.0, 8.6, True),
        ("decode 1", 10.0, 8.4, False),
        ("decode 1", 10.0, None, False),  # without a floor, the aim is not reached
        ("prefill", 65.0, 100.0, True),
        ("prefill", 55.0, 100.0, False),
        ("sampler", 300.0, 1.0, True),
        ("sampler", 301.0, 1.0, False),
        ("offline", 5900.0, 9000.0, True),
        ("idle", 2.5, None, False),
    ],
)
def test_aims(key: str, value: float, floor: float | None, reached: bool) -> None:
    assert module("gpu.records").Row(key, value, floor).reached is reached


_BROKEN = """
import os, time
from gpu.records import Note, Row

def crash(lab):
    yield Row("sampler", 100.0)
    os.abort()

def hang(lab):
    yield Note("it begins", {"machine": None})
    time.sleep(600)

def fail(lab):
    raise ValueError(f"left {lab.seconds_left > 0}")
    yield

def work(lab):
    yield Row("idle", 1.0)
"""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Parts that crash, hang, raise and work, in the place of `gpu.parts.PARTS`."""
    package = tmp_path / "gpu"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__ = [{str(_PROGRAMS / 'gpu')!r}, {str(package)!r}]")
    (package / "broken.py").write_text(_BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    parts, check = module("gpu.parts"), module("gpu.check")
    names = ("crash", "hang", "fail", "work")
    monkeypatch.setattr(check, "PARTS", tuple(parts.Part(name, f"broken:{name}", 1, 30) for name in names))
    return check


def test_a_part_that_breaks_takes_no_other_along(broken: Any, tmp_path: Path) -> None:
    parts, lab = module("gpu.parts"), make_lab(tmp_path, machine=None)
    part = parts.Part("hang", "broken:hang", 1, 30)
    heard: list[Any] = []

    def give_up(record: Any) -> None:
        heard.append(record)
        lab.deadline = time.monotonic()  # as if its time were over

    outcome = parts.run(part, lab, 10_000, give_up)  # which nobody waits for
    assert outcome.error.startswith("terminated after 10000 s")
    assert [record.text for record in heard] == ["it begins"]

    outcomes = broken.Run(lab, ["crash", "fail", "work"], 300)()
    crash, fail, work = outcomes
    assert crash.error.startswith("exit code -6")
    assert [record.key for record in crash.records] == ["sampler"]  # its earlier results
    assert "ValueError: left True" in fail.error
    assert work.error is None
    assert lab.values["idle"] == 1.0
    assert broken.verdict(outcomes, lab, is_whole=False) == 1


def test_a_part_without_time_left_is_not_begun(broken: Any, tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    lab.tiny = False
    (outcome,) = broken.Run(lab, ["work"], 0)()
    assert outcome.error == "not started: it needs 1 s, 0 s left (--budget)"


def test_a_part_that_is_asked_for_by_name_has_time_of_its_own(
    broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(tmp_path)
    lab.tiny = False
    apart = module("gpu.parts").Part("work", "broken:work", 150, 900, by_default=False)
    monkeypatch.setattr(broken, "PARTS", (apart,))
    (outcome,) = broken.Run(lab, ["work"], 0)()
    assert outcome.error is None
    assert "memory" not in [part.name for part in module("gpu.parts").PARTS if part.by_default]


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check, records, parts = module("gpu.check"), module("gpu.records"), module("gpu.parts")
    lab = make_lab(tmp_path)
    lab.tiny = False
    good = parts.Outcome("sampler", records=[records.Row("sampler", 100.0)])
    slow = parts.Outcome("sampler", records=[records.Row("sampler", 400.0)])
    wrong = parts.Outcome("kernels", records=[records.Check("act_mul", False, "")])
    assert check.verdict([good], lab, is_whole=False) == 0
    assert check.verdict([slow], lab, is_whole=False) == 3
    assert check.verdict([good], lab, is_whole=True) == 3  # the others have no figure
    assert check.verdict([good, wrong], lab, is_whole=False) == 1
    assert "FAILED: kernels" in capsys.readouterr().out


def test_the_page_between_its_markers(tmp_path: Path) -> None:
    report, records, parts = module("gpu.report"), module("gpu.records"), module("gpu.parts")
    outcomes = [
        parts.Outcome("device", 1.0, None, [records.Note("H100", {"device": {"name": "H100", "driver": "580"}})]),
        parts.Outcome("kernels", 1.0, None, [records.Check("triton act_mul", False, "1 | 2")]),
        parts.Outcome("sampler", 1.0, None, [records.Row("sampler", 200.0, 50.0, "logits / bandwidth")]),
        parts.Outcome("model", 1.0, "exit code 1\nand more"),
    ]
    results = report.to_results(outcomes, {"date": "2026-01-01", "commit": "c", "command": "gpu_check", "tiny": False})
    again = report.from_results(json.loads(json.dumps(results)))
    assert [each.records for each in again] == [each.records for each in outcomes]
    page = tmp_path / "cuda.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(page, results)
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\nH100, 2026-01-01, Quire c (driver 580).")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| sampler, 256 × 128k vocabulary, top-p | 50.0 µs | 200 µs | 25% | ≤ 300 µs | yes |" in text
    assert "| GPU idle between steps, batch 64 | – | no figure | – | < 2 % | no |" in text
    assert r"| triton act_mul | **no** | 1 \| 2 |" in text
    assert "- model: exit code 1\n" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no lines"):
        report.write(page, results)


def test_the_docs_have_the_markers() -> None:
    report = module("gpu.report")
    text = (_ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert 0 < text.index(report.BEGIN) < text.index(report.END)


def test_the_command(tmp_path: Path) -> None:
    """From a clone in which only Quire's requirements are installed; it needs a GPU unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHON"] = sys.executable
    file = tmp_path / "found.json"
    command = [str(_ROOT / "scripts" / "gpu_check"), "--device", "cpu", "--tiny", "--only", "device", "sampler"]
    done = subprocess.run([*command, "--json", str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed (aims are not judged at toy sizes)" in done.stdout
    results = json.loads(file.read_text())
    row = results["parts"][1]["records"][0]
    assert (row["key"], row["reached"], row["aim"]) == ("sampler", None, "≤ 300 µs")
    refused = subprocess.run([*command[:1], "--device", "cpu"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--device cpu needs --tiny" in refused.stderr


@pytest.mark.slow
def test_every_part_at_toy_sizes(tmp_path: Path) -> None:
    """The rehearsal: after it, only the GPU itself can cause failures."""
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    report, records = module("gpu.report"), module("gpu.records")
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    command = [str(_ROOT / "scripts" / "gpu_check"), "--device", "cpu", "--tiny", "--json", str(file)]
    done = subprocess.run([*command, "--write", str(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = report.from_results(json.loads(file.read_text()))
    assert [each.name for each in outcomes] == [part.name for part in module("gpu.parts").PARTS if part.by_default]
    assert {row.key for row in report.rows_of(outcomes)} == set(records.AIMS)
    assert "no figure" not in page.read_text()
