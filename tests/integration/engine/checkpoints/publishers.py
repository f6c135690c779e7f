"""Checkpoints as the libraries of the formats write them: `python publishers.py PLAIN OUT CASE…`.

For each case there is a folder in OUT with logits.pt: the logits of TOKENS by transformers in float32, with the numbers
that the weights represent according to the library, and inputs as it rounds them to NVFP4. Runs in an environment of
its own, which has the libraries.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

REQUIREMENTS = (
    *("accelerate==1.15.0", "auto-round==0.16.1", "bitsandbytes==0.50.2", "compressed-tensors==0.20.0"),
    "torchao==0.18.0",
)
TOKENS = torch.arange(40) * 7 % 192
COMPRESSED = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W4A8", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "NVFP4", "MXFP4A16"),
)
TORCHAO = {
    "Int8WeightOnlyConfig": {"version": 2},
    "Int8DynamicActivationInt8WeightConfig": {"version": 2},
    "Float8WeightOnlyConfig": {},
}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
AUTO_ROUND = {
    "auto_round": ("auto_round", False),
    "auto_gptq": ("auto_round:auto_gptq", True),
    "auto_awq": ("auto_round:auto_awq", False),
}
"""Format, and whether it is symmetric."""
CASES = [
    *(f"compressed-tensors {name}" for name in COMPRESSED),
    *(f"torchao {name}" for name in TORCHAO),
    *(f"bitsandbytes {name}" for name in BITSANDBYTES),
    *(f"auto-round {name}" for name in AUTO_ROUND),
]


def write(plain: Path, folder: Path, case: str) -> Tensor:
    """Write the checkpoint of a case; returns the logits of the numbers that it represents."""
    library, _, name = case.partition(" ")
    writers: dict[str, Callable[[Path, Path, str], Any]] = {
        "compressed-tensors": _compressed,
        "torchao": _torchao,
        "bitsandbytes": _bitsandbytes,
        "auto-round": _auto_round,
    }
    with torch.inference_mode(library != "bitsandbytes"):
        model = writers[library](plain, folder, name)
    with torch.inference_mode():
        logits: Tensor = model(TOKENS[None]).logits[0]
    return logits


def _load(plain: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **options).train(False)


def _compressed(plain: Path, folder: Path, name: str) -> Any:
    """A checkpoint in the layout of a compressed-tensors preset, rounded to the nearest. Inputs in NVFP4 are at most
    8."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(name, ["Linear"])
    args = scheme.weights
    args.group_size = 32 if args.group_size == 128 else args.group_size
    args.block_structure = [64, 64] if args.block_structure else None
    model, numbers = _load(plain), _load(plain)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module_name, module in model.named_modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        weight, shape = module.weight, module.weight_scale.shape
        height, width = (weight.shape[0] // shape[0], weight.shape[1] // shape[-1])
        parts = weight.reshape(shape[0], height, -1, width).transpose(1, 2).flatten(2)  # weights with a common scale
        overall = None
        if args.strategy == "tensor_group":
            overall = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
            module.weight_global_scale.copy_(overall)
        scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=overall)
        module.weight_scale.copy_(scales.reshape(shape))
        zero_point = getattr(module, "weight_zero_point", None)
        if zero_point is not None:
            zero_point.copy_(zeros.reshape(shape))
        rounded = fake_quantize(weight, module.weight_scale, zero_point, args, global_scale=overall)
        numbers.get_submodule(module_name).weight.copy_(rounded)
        if name == "NVFP4":
            module.input_global_scale.copy_(generate_gparam(torch.tensor([-8.0]), torch.tensor([8.0])))
            as_inputs = partial(forward_quantize, module, base_name="input", args=scheme.input_activations)
            numbers.get_submodule(module_name).register_forward_pre_hook(lambda _, args, f=as_inputs: f(args[0]))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return numbers


def _torchao(plain: Path, folder: Path, name: str) -> Any:
    import torchao.quantization

    config = TorchAoConfig(getattr(torchao.quantization, name)(**TORCHAO[name]))
    model = _load(plain, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)
    return _with_numbers(model, lambda module: getattr(module.weight, "dequantize", lambda: None)())


def _bitsandbytes(plain: Path, folder: Path, name: str) -> Any:
    from bitsandbytes import functional
    from bitsandbytes import nn as layers

    config = BitsAndBytesConfig(**BITSANDBYTES[name])  # type: ignore[no-untyped-call]
    model = _load(plain, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)

    def numbers(module: Any) -> Tensor | None:
        weight = module.weight
        if isinstance(module, layers.Linear4bit):
            whole: Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
            return whole
        return weight.data * weight.SCB[:, None] / 127 if isinstance(module, layers.Linear8bitLt) else None

    return _with_numbers(model, numbers)


def _with_numbers(model: Any, numbers: Callable[[Any], Tensor | None]) -> Any:
    """The model with plain linear layers of these numbers; None: the layer has none."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (weight := numbers(module)) is not None:
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight = nn.Parameter(weight.float(), requires_grad=False)
            model.set_submodule(name, linear)
    return model


def _auto_round(plain: Path, folder: Path, name: str) -> Any:
    """Rounded to the nearest."""
    from auto_round import AutoRound

    form, symmetric = AUTO_ROUND[name]
    rounding = AutoRound(
        str(plain),
        scheme="W4A16",
        group_size=32,
        sym=symmetric,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounding.quantize_and_save(str(folder / "written"), format=form)
    (config,) = (folder / "written").rglob("config.json")
    for path in config.parent.iterdir():
        shutil.move(path, folder)
    tensors = load_file(folder / "model.safetensors")

    def numbers(module: str) -> Tensor | None:
        if (scales := tensors.get(f"{module}.scales")) is None:
            return None
        words, zeros = tensors[f"{module}.qweight"], _nibbles(tensors[f"{module}.qzeros"], 1)
        codes = _nibbles(words, 1 if name == "auto_awq" else 0)
        if name == "auto_awq":  # the outputs of a word are in another order
            order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
            codes, zeros = (each.view(len(each), -1, 8)[..., order].flatten(1) for each in (codes, zeros))
        grouped = codes.view(len(scales), -1, codes.shape[1]) - zeros[:, None] - int(name == "auto_gptq")
        weight: Tensor = (grouped * scales[:, None].float()).flatten(0, 1).T
        return weight

    model = _load(plain)
    names = {module: each for each, module in model.named_modules()}
    return _with_numbers(model, lambda module: numbers(names[module]))


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """The 4-bit codes of int32 words along a dimension, the lowest bits first."""
    return torch.stack([words >> 4 * place & 15 for place in range(8)], dim + 1).flatten(dim, dim + 1)


if __name__ == "__main__":
    source, out, *cases = sys.argv[1:]
    for each in cases:
        target = Path(out) / each
        target.mkdir()
        torch.save(write(Path(source), target, each), target / "logits.pt")
