"""Packers of published quantized formats, written from their layouts: independent of the readers that they test.

A packer takes a weight `[out, in]` and returns its tensors, by the suffix of the module's name, and the numbers that
they represent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
GROUP = 32
INPUT_SCALE = torch.tensor(8 / (6 * 448))
"""NVFP4's scale of inputs: for inputs of up to 8."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _asymmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integer codes `[out, in]`, float16 scales and integer zeros `[out, groups]`."""
    grouped = weight.unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def _symmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Signed codes `[out, in]` and float16 scales `[out, groups]`."""
    grouped = weight.unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
    scales = (grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)).half().float()
    return (grouped / scales[..., None]).round().flatten(1), scales


def _spread(factors: Tensor, columns: int) -> Tensor:
    return factors.repeat_interleave(columns // factors.shape[1], dim=1)


def _words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Consecutive codes along a dimension as the bits of int32 words, the first one lowest."""
    numbers = [int(each) for each in codes.movedim(dim, -1).flatten().tolist()]
    per_word = 32 // bits
    words = [
        sum(code << bits * place for place, code in enumerate(numbers[first : first + per_word]))
        for first in range(0, len(numbers), per_word)
    ]
    shape = [*codes.movedim(dim, -1).shape[:-1], -1]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(shape).movedim(-1, dim).contiguous()


def gptq(weight: Tensor, bits: int = 4, ordered: bool = False, v2: bool = False) -> Packed:
    columns = weight.shape[1]
    order = torch.arange(columns) // GROUP
    if ordered:
        order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    by_group = order.argsort(stable=True)
    sorted_codes, scales, zeros = _asymmetric(weight[:, by_group], bits, GROUP)
    codes = torch.empty_like(sorted_codes)
    codes[:, by_group] = sorted_codes
    tensors = {
        ".qweight": _words(codes.T, bits, 0),
        ".qzeros": _words((zeros if v2 else zeros - 1).T, bits, 1),
        ".scales": scales.T.half().contiguous(),
        ".g_idx": order.int(),
    }
    return tensors, (codes - zeros[:, order]) * scales[:, order]


def gptq_symmetric(weight: Tensor) -> Packed:
    codes, scales = _symmetric(weight, 4, GROUP)
    zeros = torch.full_like(scales, 8.0)
    tensors = {
        ".qweight": _words((codes + 8).T, 4, 0),
        ".qzeros": _words((zeros - 1).T, 4, 1),
        ".scales": scales.T.half().contiguous(),
        ".g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return tensors, codes * _spread(scales, weight.shape[1])


def awq(weight: Tensor) -> Packed:
    codes, scales, zeros = _asymmetric(weight, 4, GROUP)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(numbers: Tensor) -> Tensor:
        return _words(numbers.T.unflatten(1, (-1, 8))[..., places].flatten(1), 4, 1)  # type: ignore[no-untyped-call]

    tensors = {
        ".qweight": interleaved(codes),
        ".qzeros": interleaved(zeros),
        ".scales": scales.T.half().contiguous(),
    }
    return tensors, (codes - _spread(zeros, weight.shape[1])) * _spread(scales, weight.shape[1])


def packed_ints(weight: Tensor, bits: int = 4, symmetric: bool = True) -> Packed:
    columns = weight.shape[1]
    shape = torch.tensor(weight.shape)
    if symmetric:
        codes, scales = _symmetric(weight, bits, GROUP)
        tensors = {".weight_packed": _words(codes + 2 ** (bits - 1), bits, 1)}
        numbers = codes * _spread(scales, columns)
    else:
        codes, scales, zeros = _asymmetric(weight, bits, GROUP)
        tensors = {".weight_packed": _words(codes, bits, 1), ".weight_zero_point": _words(zeros, bits, 0)}
        numbers = (codes - _spread(zeros, columns)) * _spread(scales, columns)
    return {**tensors, ".weight_scale": scales.half(), ".weight_shape": shape}, numbers


def int8_rows(weight: Tensor) -> Packed:
    codes, scales = _symmetric(weight, 8, weight.shape[1])
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales


def int8_of_bitsandbytes(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    return {".weight": codes.to(torch.int8), ".SCB": largest}, codes * (largest / 127)[:, None]


def nf4(weight: Tensor, nested: bool = False) -> Packed:
    table = torch.tensor(
        (
            *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
            *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
        )
    )
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {}
    if nested:
        levels = torch.linspace(-1, 1, 256)
        offset = largest.mean()
        padded = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
        most = padded.abs().amax(1)
        indices = (padded[..., None] / most[:, None, None] - levels).abs().argmin(-1)
        largest = (levels[indices] * most[:, None]).flatten()[: len(largest)] + offset
        tensors = {".weight.absmax": indices.flatten()[: len(largest)].to(torch.uint8)}
        tensors |= {".weight.nested_absmax": most, ".weight.nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
    else:
        tensors = {".weight.absmax": largest}
    codes = (blocks[..., None] / largest[:, None, None] - table).abs().argmin(-1)
    pairs = codes.flatten()[: weight.numel()].view(-1, 2)
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {
        ".weight": (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None],
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": text,
    }
    return tensors, (table[codes] * largest[:, None]).flatten()[: weight.numel()].view(weight.shape)


def fp8(weight: Tensor, block: tuple[int, int] | None = None, scale: str = ".weight_scale") -> Packed:
    """A scale for each block; None: for the whole weight."""
    rows, columns = block or weight.shape
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    grid = padded.view(len(padded) // rows, rows, -1, columns)
    scales = grid.abs().amax((1, 3)) / 448
    codes = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scales[:, None, :, None]).view(padded.shape)[: len(weight), : weight.shape[1]]
    values = codes.view(padded.shape)[: len(weight), : weight.shape[1]].contiguous()
    return {".weight": values, scale: scales if block else scales.view(1)}, numbers


def _e2m1(weight: Tensor) -> Tensor:
    return (weight[..., None] - E2M1).abs().argmin(-1)


def nvfp4(weight: Tensor) -> Packed:
    grouped = weight.unflatten(1, (-1, 16))  # type: ignore[no-untyped-call]
    whole = weight.abs().max() / (6 * 448)
    scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    wide = scales.float() * whole
    codes = _e2m1(grouped / wide[..., None])
    pairs = codes.flatten(1).unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    tensors = {
        ".weight": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        ".weight_scale": scales,
        ".weight_scale_2": whole,
        ".input_scale": INPUT_SCALE.clone(),
    }
    return tensors, (E2M1[codes] * wide[..., None]).flatten(1)


def mxfp4(weight: Tensor) -> Packed:
    """The packer of gpt-oss, from `[experts, in, out]`, as it is stored unquantized."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))  # type: ignore[no-untyped-call]
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    codes = _e2m1(grouped / exponents.exp2()[..., None])
    pairs = codes.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    tensors = {
        "_blocks": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return tensors, (E2M1[codes] * exponents.exp2()[..., None]).flatten(2).transpose(1, 2).contiguous()


def write_deepseek_v4(plain: Path, stored: Path) -> None:
    """Write the checkpoint in the folder `plain` to `stored` as DeepSeek publishes V4: in FP8, with experts in MXFP4.
    The numbers that it stands for are written to `plain`."""
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    packed, numbers = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            parts, (rounded,) = mxfp4(weight.T[None])
            codes, scales = parts.values()
            packed[name], rounded = codes[0].flatten(1).view(torch.int8), rounded.T.contiguous()
            packed[f"{module}.scale"] = scales[0].view(torch.float8_e8m0fnu)
        elif re.search(r"attn\.(indexer\.)?w(q_[ab]|kv|o_[ab])\.|shared_experts|\.[eh]_proj\.", name):
            packed[name], packed[f"{module}.scale"], rounded = _fp8_by_powers(weight)
        else:
            continue
        numbers[name] = rounded
    stored.mkdir()
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": settings, "expert_dtype": "fp4"}))


def _fp8_by_powers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks of 32 by 32, which are powers of two, and the numbers."""
    exponents = fp8(weight, (32, 32), ".scale")[0][".scale"].log2().ceil()
    rows, columns = (torch.arange(size) // 32 for size in weight.shape)
    scales = exponents.exp2()[rows[:, None], columns]
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return codes, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu), codes.float() * scales


@dataclass(frozen=True)
class Format:
    """A published format: its settings in config.json, and the packer of a weight."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    bits: float
    """Bits of a weight, with its factors."""
    tolerance: float = 1e-3
    """Relative tolerance of logits: rounded inputs need more."""


def _group(bits: int, kind: str, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": GROUP, **changes}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


def _compressed(name: str, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_INT8 = _group(8, "int", strategy="channel", group_size=None) | {
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]}
FORMATS = {
    "gptq": Format(_GPTQ, gptq, 5),
    "gptq, symmetric": Format(_GPTQ | {"sym": True}, gptq_symmetric, 5),
    "gptq, act order": Format(_GPTQ | {"desc_act": True}, lambda weight: gptq(weight, ordered=True), 5),
    "gptq, v2": Format(_GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, v2=True), 5),
    "gptq, 8 bits": Format(_GPTQ | {"bits": 8}, lambda weight: gptq(weight, bits=8), 9),
    "gptq, 2 bits": Format(_GPTQ | {"bits": 2}, lambda weight: gptq(weight, bits=2), 5),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["gate"]},
        awq,
        5,
    ),
    "compressed-tensors, 4 bits": Format(_compressed("pack-quantized", _group(4, "int")), packed_ints, 5),
    "compressed-tensors, zero points": Format(
        _compressed("pack-quantized", _group(4, "int", symmetric=False)),
        lambda weight: packed_ints(weight, symmetric=False),
        5,
    ),
    "compressed-tensors, 8 bits": Format(
        _compressed("pack-quantized", _group(8, "int")), lambda weight: packed_ints(weight, bits=8), 9
    ),
    "compressed-tensors, int8": Format(_compressed("int-quantized", _INT8), int8_rows, 8, tolerance=0.1),
    "compressed-tensors, fp8": Format(
        _compressed("float-quantized", _group(8, "float", strategy="tensor", group_size=None)), fp8, 8
    ),
    "fp8 of blocks": Format(_BLOCKS, lambda weight: fp8(weight, (64, 64), ".weight_scale_inv"), 8.5),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8, 8),
    "nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*gate"]},
        nvfp4,
        4.5,
    ),
    "bitsandbytes, nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4, 4.5
    ),
    "bitsandbytes, nested": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        | {"bnb_4bit_use_double_quant": True},
        lambda weight: nf4(weight, nested=True),
        4.5,
    ),
    "bitsandbytes, int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_of_bitsandbytes, 8),
    "mxfp4": Format({"quant_method": "mxfp4"}, mxfp4, 4.25),
}

_LINEAR = re.compile(
    r"\.(\w*proj|w[123]|c_attn|c_fc|query_key_value|\w*dense\w*|query|key|value|kv_a_proj_with_mqa)\.weight$"
)
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def quantize(folder: Path, name: str, transposed: bool = False, outer: bool = False, skipped: str = "") -> None:
    """Quantize a checkpoint: the numbers that it stands for are written to `folder / "whole"`.

    `transposed`: its weights are `[in, out]`, which quantized ones never are. `outer`: embedding and head, too.
    `skipped` is a module that is left as it is, of a format with `modules_to_not_convert`.
    """
    form, tensors, numbers = FORMATS[name], {}, {}
    settings = form.settings
    if outer and settings["quant_method"] == "gptq":
        settings = settings | {"lm_head": True}
    elif outer:
        lists = {key: each for key, each in settings.items() if isinstance(each, list) and "lm_head" in each}
        settings = settings | {key: [one for one in each if one != "lm_head"] for key, each in lists.items()}
    if skipped:
        settings = settings | {"modules_to_not_convert": [skipped]}
    for key, tensor in load_file(folder / "model.safetensors").items():
        pattern = _EXPERTS if name == "mxfp4" else _LINEAR
        is_skipped = bool(skipped) and skipped in key
        if is_skipped or (
            not pattern.search(key) and not (outer and re.search(r"(lm_head|embed_tokens)\.weight$", key))
        ):
            tensors[key] = numbers[key] = tensor
            continue
        own, dequantized = form.pack((tensor.T.contiguous() if transposed else tensor).float())
        numbers[key] = dequantized.T.contiguous() if transposed else dequantized.contiguous()
        tensors |= {key.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in own.items()}
    assert len(tensors) > len(numbers)
    config = json.loads((folder / "config.json").read_text())
    whole = folder / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    save_file(numbers, whole / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors")
