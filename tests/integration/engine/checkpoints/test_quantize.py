"""`quire quantize`: its checkpoints load as the numbers that weights are rounded to, and nothing half-written stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.engine.architecture.families import FAMILIES
from quire.engine.architecture.quantization import recipes
from quire.engine.architecture.quantization.recipes import RECIPES
from quire.engine.checkpoints import gptq, quantize
from quire.engine.config.quantize_request import QuantizeRequest
from quire.engine.distributed.communicator import Parallel
from quire.engine.models.quantize import load_stage
from quire.kernels import quantized
from quire.kernels.quantized import Rounding
from quire.server.cli import quantize as server_quantize
from quire.server.cli.main import main
from tests.fakes import families
from tests.fakes.families import SIZES, write_model
from tests.fakes.model_logits import configure, logits
from tests.fakes.quantized_checkpoints import _LINEAR
from tests.fakes.ranks import on_ranks
from tests.integration.engine.checkpoints.test_quantized import _SIZES, KINDS

_EXPERTS = KINDS["experts"][1] | {"moe_intermediate_size": 128, "hidden_size": 256}
_OF_GPTQ = {"num_experts": 4, "head_dim": 32, "moe_intermediate_size": 64, "num_hidden_layers": 2}
_ROUNDINGS = {
    "w4a16": Rounding("int4", 128),
    "w4a16_asym": Rounding("int4", 128, has_offsets=True),
    "w8a16": Rounding("int8", 128),
    "w8a8": Rounding("int8"),
    "fp8_dynamic": Rounding("fp8"),
    "fp8_block": Rounding("fp8", 128, rows=128),
    "mxfp4a16": Rounding("e2m1", 32, scales="e8m0"),
    "nvfp4a16": Rounding("e2m1", 16, scales="e4m3"),
}
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "killed" not in request.node.name:
        monkeypatch.setattr(QuantizeRequest, "run", lambda self: quantize.run(self, load_stage))


def write(folder: Path, architecture: str = "LlamaForCausalLM", **changes: object) -> Path:
    """A model of bfloat16 in two files, with a tensor that no model uses."""
    folder.mkdir()
    write_model(architecture, _SIZES | {"dtype": "bfloat16"} | changes, folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.70.mlp.up_proj.weight"] = torch.ones(3, 5)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def plain(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [*((scheme, "dense") for scheme in RECIPES), ("w4a16_asym", "experts"), ("nvfp4a16", "experts")],
)
def test_what_is_written_stands_for_the_rounded_weights(scheme: str, kind: str, tmp_path: Path) -> None:
    changes = _EXPERTS if kind == "experts" else {}
    folder = write(tmp_path / "plain", KINDS[kind][0], **changes)
    out, numbers = tmp_path / "out", plain(folder)
    assert main(["quantize", str(folder), str(out), "--scheme", scheme]) == 0
    for name, weight in list(numbers.items()):
        if not _LINEAR.search(name) or ".layers.70." in name:
            continue
        module = name.split(".")[-2]
        fused = next((each for each in _FUSED if module in each), {module})
        siblings = [numbers[name.replace(module, each)] for each in fused] if scheme == "nvfp4a16" else [weight]
        largest = torch.stack([each.abs().max() for each in siblings]).max().float().view(1, 1)
        rounded = quantized.quantize(weight, _ROUNDINGS[scheme], largest, search=True)
        numbers[f"rounded {name}"] = replace(rounded, dtype=torch.float32).dequantize()
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text((folder / "config.json").read_text())
    names = [name for name in numbers if not name.startswith("rounded ")]
    save_file({name: numbers.get(f"rounded {name}", numbers[name]) for name in names}, whole / "model.safetensors")
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(1))
    expected, found = (logits(configure(each, max_model_len=64), tokens, Parallel()) for each in (whole, out))
    tolerance = 0.1 if scheme == "w8a8" else 1e-3  # its inputs are rounded, too
    assert (found - expected).norm() <= tolerance * expected.norm()
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (out / "tokenizer.json").read_text() == "{}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(plain(out))
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.70.mlp.up_proj"} <= set(settings["ignore"])
    if kind == "experts":
        assert r"re:model\.layers\.[0-9]+\.mlp\.gate$" in settings["ignore"]


_STACKS = {
    "GptOssForCausalLM": ("experts.gate_up_proj", "experts.down_proj"),
    "GraniteMoeForCausalLM": ("input_linear.weight", "output_linear.weight"),
}


def round_stacks(tensors: dict[str, torch.Tensor], architecture: str, scheme: str) -> dict[str, torch.Tensor]:
    """The tensors with each matrix of each expert rounded by itself; NVFP4's gate and up share a scale."""
    is_transposed = architecture == "GptOssForCausalLM"  # whose gate and up alternate
    gate_up, down = _STACKS[architecture]
    for name, stack in list(tensors.items()):
        if not name.endswith((gate_up, down)):
            continue
        rounded = (stack.transpose(1, 2) if is_transposed else stack).float()
        for expert in rounded:
            parts = [expert[::2], expert[1::2]] if is_transposed else list(expert.chunk(2))
            parts = [expert] if name.endswith(down) else parts
            largest = torch.stack([part.abs().max() for part in parts]).max().float().view(1, 1)
            for part in parts:
                codes = quantized.quantize(part.to(stack.dtype), _ROUNDINGS[scheme], largest, search=True)
                part.copy_(replace(codes, dtype=torch.float32).dequantize())
        tensors[name] = (rounded.transpose(1, 2) if is_transposed else rounded).contiguous()
    return tensors


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [*(("GptOssForCausalLM", scheme) for scheme in RECIPES if scheme != "w8a8"), ("GraniteMoeForCausalLM", "w4a16")],
)
def test_stacks_of_experts_are_written_one_by_one(architecture: str, scheme: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "plain", architecture, num_local_experts=4, head_dim=32)
    out, whole = tmp_path / "out", tmp_path / "whole"
    others = r"re:(?!.*\.experts\.\d)"
    assert main(["quantize", str(folder), str(out), "--scheme", scheme, "--ignore", others]) == 0
    names = {each for each in plain(out) if ".experts." in each}
    assert len({name.rpartition(".")[0] for name in names}) == 2 * 4 * 3
    whole.mkdir()
    (whole / "config.json").write_text((folder / "config.json").read_text())
    save_file(round_stacks(plain(folder), architecture, scheme), whole / "model.safetensors")
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(1))
    expected = logits(configure(whole, max_model_len=64), tokens, Parallel())
    for tp, ep in ((1, False), (2, False), (2, True)):
        config = configure(out, max_model_len=64, tensor_parallel_size=tp, enable_expert_parallel=ep)
        for found in on_ranks(tp, partial(logits, config, tokens)):
            assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_plain_experts_are_read_one_by_one_where_others_stack_them(tmp_path: Path) -> None:
    """As transformers writes Qwen3.5's, and its publisher does not."""
    case = "Qwen3.5 MoE with a vision part, stacked experts"
    stacked, separate = tmp_path / "stacked", tmp_path / "separate"
    architecture, changes = families.CASES[case]
    families.write(case, stacked)
    write_model(architecture, SIZES | changes, separate)
    assert any(".experts.0." in name for name in plain(separate))
    tokens = torch.arange(20)
    expected, found = (logits(configure(each, max_model_len=64), tokens, Parallel()) for each in (stacked, separate))
    assert torch.equal(expected, found)


def test_names_without_prefix_and_weights_that_are_stored_twice(tmp_path: Path) -> None:
    """As in checkpoints of embedding models, and in torch checkpoints with tied heads."""
    folder, out = write(tmp_path / "plain", tie_word_embeddings=True), tmp_path / "out"
    tensors = {name.removeprefix("model."): each for name, each in plain(folder).items()}
    for file in folder.glob("model*"):
        file.unlink()
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    ignored = ["--ignore", "layers.1.mlp.down_proj", r"re:layers\.1\.mlp\.(gate|up)_proj"]
    assert main(["quantize", str(folder), str(out), "--scheme", "nvfp4a16", *ignored]) == 0
    found = plain(out)
    assert "layers.0.mlp.down_proj.weight_packed" in found
    assert "layers.1.mlp.down_proj.weight" in found
    assert "layers.1.mlp.up_proj.weight" in found
    written = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(set(written)) == len(written)
    for each in ("layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj", r"re:layers\.1\.mlp\.(gate|up)_proj"):
        assert each in written
    logits(configure(out, max_model_len=64), torch.arange(4), Parallel())
    q, k = (found[f"layers.0.self_attn.{each}_proj.weight_global_scale"] for each in "qk")
    assert torch.equal(q, k)


def test_modules_may_be_ignored_and_groups_chosen(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "plain"), tmp_path / "out"
    out.mkdir()
    assert main(["quantize", str(folder), str(out), "--group-size", "32", "--ignore", r"re:.*\.down_proj$"]) == 0
    tensors = plain(out)
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (256, 4)
    logits(configure(out, max_model_len=64), torch.arange(4), Parallel())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--scheme", "fp8_dynamic", "--group-size", "64"], "scheme fp8_dynamic has no groups of other sizes"),
        (["--group-size", "100"], "--group-size 100 is not supported; use 32"),
        (["--method", "gptq"], "--method gptq and --calibration FILE need each other"),
        (["--group-size", "256"], "has 128 inputs, which are not whole groups of 256"),
        (["--ignore", r"re:.*"], "nothing is left to quantize"),
        (
            ["--ignore", "model.layers.0.mlp"],
            "--ignore model.layers.0.mlp: no module has this name; modules are such as",
        ),
        (["--ignore", r"re:("], "ignore has an invalid expression"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write(tmp_path / "plain"), tmp_path / "out"
    assert main(["quantize", str(folder), str(out), *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_folders_and_models_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write(tmp_path / "plain"), tmp_path / "out"
    assert main(["quantize", str(folder), str(folder)]) == 2
    assert "exists, and is not an empty folder" in capsys.readouterr().err
    assert main(["quantize", str(folder), str(out)]) == 0
    assert main(["quantize", str(out), str(tmp_path / "again")]) == 2
    assert "is quantized already, with compressed-tensors" in capsys.readouterr().err
    (tmp_path / "third.part").mkdir()
    assert main(["quantize", str(folder), str(tmp_path / "third")]) == 2
    assert "third.part exists: another `quire quantize` writes it, or was killed" in capsys.readouterr().err
    other = write(tmp_path / "other", "GPT2LMHeadModel")
    assert main(["quantize", str(other), str(tmp_path / "none")]) == 2
    reason = "inputs before outputs, which transformers does not read quantized; use quire serve -q fp8"
    assert reason in capsys.readouterr().err
    tensors = plain(folder)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    assert main(["quantize", str(folder), str(tmp_path / "none")]) == 2
    assert "up_proj.weight has values that are NaN" in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_no_folder_that_looks_whole(number: signal.Signals, tmp_path: Path) -> None:
    """All of its processes by SIGKILL; otherwise the one that the user has started, as a supervisor would."""
    folder, out = write(tmp_path / "plain", num_hidden_layers=40), tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from quire.server.cli.main import main; main()",
        "quantize",
        str(folder),
        str(out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.part" / "0.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
    process.wait()
    assert not out.exists()
    left = tmp_path / "out.part"
    assert not (left / "config.json").exists() if number == signal.SIGKILL else not left.exists()


def test_gptq_makes_smaller_errors_of_outputs_than_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(64, 64, generator=generator)
    x = torch.randn(500, 64, generator=generator) @ mixed + torch.randn(64, generator=generator)
    weight = torch.randn(48, 64, generator=generator)
    for rounding in (Rounding("int4", 32), Rounding("int4", 32, has_offsets=True), Rounding("int8"), Rounding("fp8")):
        ours = gptq.quantize(weight, rounding, x.T @ x)
        nearest = quantized.quantize(weight, rounding)
        errors = [(x @ (weight - each.dequantize()).T).norm() for each in (ours, nearest)]
        assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("name", RECIPES)
def test_the_search_of_factors_makes_errors_smaller(name: str) -> None:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 128] *= 4
    largest = weight.float().abs().max().view(1, 1)
    whole, own = (
        replace(quantized.quantize(weight, _ROUNDINGS[name], largest, search=search), dtype=torch.float32)
        for search in (False, True)
    )
    errors = [(each.dequantize() - weight.float()).view(128, -1, 16).square().sum(-1) for each in (whole, own)]
    if name.startswith(("w8", "fp8")):
        assert torch.equal(whole.codes, own.codes)
    else:
        of_groups = [each.view(*own.scales.shape, -1).sum(-1) for each in errors]
        assert (of_groups[1] <= of_groups[0]).all()
        assert errors[1].sum() < (0.995 if name == "mxfp4a16" else 0.95) * errors[0].sum()


def test_gptq_of_inputs_that_do_not_depend_on_each_other_is_rounding() -> None:
    weight = torch.randn(24, 64)
    ours, nearest = gptq.quantize(weight, Rounding("int8"), torch.eye(64)), quantized.quantize(weight, Rounding("int8"))
    assert torch.equal(ours.codes, nearest.codes)
    assert torch.equal(ours.scales, nearest.scales)


def test_gptq_takes_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = configure(Path("engine/models/demo").resolve(), max_model_len=64).model.path
    texts = tmp_path / "texts.jsonl"
    texts.write_text('"How do I serve a model with quire?"\n{"text": "What is a KV cache? It is memory of keys."}\n')
    arguments = [str(demo), str(tmp_path / "out"), "--method", "gptq", "--calibration", str(texts)]
    assert main(["quantize", *arguments]) == 0
    assert main(["quantize", str(demo), str(tmp_path / "nearest")]) == 0
    tokens = torch.randint(3, 3000, (20,), generator=torch.Generator().manual_seed(1))
    expected, found, nearest = (
        logits(configure(each, max_model_len=64), tokens, Parallel())
        for each in (demo, tmp_path / "out", tmp_path / "nearest")
    )
    assert (found - expected).norm() <= 0.6 * expected.norm()
    assert not torch.equal(found, nearest)
    texts.write_text("[1]\n")
    assert main(["quantize", str(demo), str(tmp_path / "none"), *arguments[2:]]) == 2
    assert "each line must be a JSON string" in capsys.readouterr().err
    encoder = write(tmp_path / "encoder", "BertModel")
    assert main(["quantize", str(encoder), str(tmp_path / "none"), *arguments[2:]]) == 2
    assert "encoders such as BertModel are not supported" in capsys.readouterr().err


def test_the_language_model_of_one_that_sees(tmp_path: Path) -> None:
    """The tensors of its quantized weights have the names of its other ones."""
    folder, out = tmp_path / "plain", tmp_path / "out"
    families.write("LLaVA", folder)
    assert main(["quantize", str(folder), str(out), "--scheme", "w8a8"]) == 0
    tokens = torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(1))
    expected, found = (logits(configure(each, max_model_len=64), tokens, Parallel()) for each in (folder, out))
    assert (found - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("case", "stages"),
    [("Zamba2", 1), ("Gemma 3n", 3), ("GLM-5, shared selection", 3), ("Gemma 4, experts", 4), ("DBRX", 4)],
)
def test_gptq_rounds_every_layer_once(case: str, stages: int, tmp_path: Path) -> None:
    """Also layers that share weights, keys and values or selected tokens, which are in a stage, and stacked experts."""
    families.write(case, tmp_path)
    arch = configure(tmp_path, max_model_len=64).model.architecture
    assert server_quantize._num_stages(arch) == stages
    config = configure(tmp_path, max_model_len=64, dtype="float32", pipeline_parallel_size=stages)
    arch = replace(arch, separate_experts=FAMILIES[arch.name].stacks_experts(arch))
    config = replace(config, model=replace(config.model, architecture=arch))
    source = quantize.Source(QuantizeRequest(config, tmp_path / "out", recipes.settings("w4a16", arch, group_size=-1)))
    tokens = torch.randint(0, 131, (8, 60), generator=torch.Generator().manual_seed(1))
    found = [
        each for stage in gptq.layers(config, source.schemes, tokens.tolist(), load_stage) for each in stage.items()
    ]
    assert sorted(name for name, _ in found) == sorted(source.schemes)
    changed = [name for name, weight in found if not torch.equal(weight.codes, source.rounded(name).codes)]
    assert len(changed) > 0.7 * len(found)


@pytest.mark.parametrize("scheme", ["fp8_block", "nvfp4a16"])
def test_gptq_rounds_to_scales_that_weights_share(scheme: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "plain")
    config = configure(folder, max_model_len=64, dtype="float32", pipeline_parallel_size=2)
    source = quantize.Source(
        QuantizeRequest(config, tmp_path / "out", recipes.settings(scheme, config.model.architecture))
    )
    tokens = torch.randint(0, 131, (8, 60), generator=torch.Generator().manual_seed(1))
    for stage in gptq.layers(config, source.schemes, tokens.tolist(), load_stage, source.largest):
        for name, weight in stage.items():
            stored = source.stored(name, weight)
            scales = stored[name.removesuffix("weight") + "weight_scale"].float()
            if scheme == "nvfp4a16":
                scales = scales / stored[name.removesuffix("weight") + "weight_global_scale"]
            else:
                scales = scales.repeat_interleave(128, dim=0)[: len(weight.codes)]
            assert torch.equal(scales.to(weight.dtype), weight.scales.to(weight.dtype))


def test_gptq_rounds_experts_without_gates(tmp_path: Path) -> None:
    families.write("Nemotron 3", tmp_path)
    config = configure(tmp_path, max_model_len=64, dtype="float32", pipeline_parallel_size=2)
    tokens = torch.randint(0, 131, (4, 60), generator=torch.Generator().manual_seed(1))
    settings = recipes.settings("w4a16", config.model.architecture, group_size=-1)
    schemes = quantize.Source(QuantizeRequest(config, tmp_path / "out", settings)).schemes
    names = [name for stage in gptq.layers(config, schemes, tokens.tolist(), load_stage) for name in stage]
    assert any(".experts.0.up_proj" in name for name in names)
    assert any(".experts.0.down_proj" in name for name in names)


def test_gptq_rounds_experts_by_the_tokens_that_are_routed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "plain", KINDS["experts"][0], **_OF_GPTQ)
    config = configure(folder, max_model_len=64, dtype="float32", pipeline_parallel_size=2)
    tokens = torch.randint(0, 131, (4, 60), generator=torch.Generator().manual_seed(1))
    settings = recipes.settings("w4a16", config.model.architecture, group_size=-1)
    schemes = quantize.Source(QuantizeRequest(config, tmp_path / "out", settings)).schemes
    first, second = gptq.layers(config, schemes, tokens.tolist(), load_stage)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, inputs: routed.append(inputs[:2]))
    with torch.inference_mode():
        model(tokens)
    (x, ids), numbers = routed[0], plain(folder)

    def is_nearest(name: str, inputs: torch.Tensor) -> bool:
        """Whether it is rounded to the nearest; if not, its products with the inputs must be nearer."""
        weight, rounded = numbers[name].float(), first[name].dequantize().float()
        nearest = quantized.quantize(numbers[name], Rounding("int4", weight.shape[1]), search=True).dequantize().float()
        if rounded.equal(nearest):
            return True
        errors = [(inputs @ (weight - each).T).norm() for each in (rounded, nearest)]
        assert errors[0] < errors[1]
        return False

    outcomes = []
    for expert in range(4):
        own, name = x[(ids == expert).any(1)], f"model.layers.0.mlp.experts.{expert}"
        gate, up = (own @ numbers[f"{name}.{part}_proj.weight"].float().T for part in ("gate", "up"))
        inner = torch.nn.functional.silu(gate) * up
        for part, inputs in (("gate", own), ("up", own), ("down", inner)):
            has_few = len(own) < inputs.shape[1]
            assert is_nearest(f"{name}.{part}_proj.weight", inputs) == has_few
            outcomes.append(has_few)
    assert set(outcomes) == {True, False}
    num_nearest = re.search(r"(\d+) of (\d+) matrices are rounded to the nearest", caplog.text)
    assert num_nearest is not None
    assert sum(outcomes) <= int(num_nearest[1]) <= sum(outcomes) + 12
    assert int(num_nearest[2]) == len(first) + len(second) == 32
