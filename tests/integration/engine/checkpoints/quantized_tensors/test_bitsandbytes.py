"""NF4, FP4 and INT8 of bitsandbytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization.bitsandbytes import BitsAndBytes4, BitsAndBytes8
from quire.engine.checkpoints.quantized_tensors.bitsandbytes import BitsAndBytes4Reader, BitsAndBytes8Reader
from quire.engine.protocol.errors import ConfigError
from tests.integration.engine.checkpoints.quantized_tensors.layouts import MODULE, check, in_bytes, random_codes

# of fp4, by sign, exponent and mantissa, in twelfths: github.com/bitsandbytes-foundation/bitsandbytes
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
SHAPE = (20, 1024)  # scales are not whole blocks of 256
OF_TWO_ROWS = (21, 1040)  # blocks begin in one row and end in the next; the last one is not full


def quant_map(values: str) -> Tensor:
    """NF4 by its definition in the paper, evenly spaced quantiles of a normal distribution; FP4 by its table."""
    if values == "fp4":
        return torch.cat((FP4, -FP4))
    offset = 0.9677083
    above, below = (torch.linspace(offset, 0.5, points).double()[:-1] for points in (9, 8))
    ordered = torch.cat((torch.special.ndtri(above), torch.zeros(1), -torch.special.ndtri(below))).sort().values
    return (ordered / ordered.max()).float()


def state(shape: tuple[int, ...] = SHAPE, **more: Any) -> Tensor:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape, **more})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def four_bits(
    values: str = "nf4", item: torch.dtype = torch.uint8, shape: tuple[int, int] = SHAPE
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The values of codes, absmax of blocks, and the tensors."""
    codes = random_codes(1, 4, *shape)
    absmax = torch.rand(-(-codes.numel() // 64), generator=torch.Generator().manual_seed(2))
    table = quant_map(values)
    tensors = {
        ".weight": in_bytes(codes, high_first=True).view(-1).view(item)[:, None],
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
        f".weight.quant_state.bitsandbytes__{values}": state(shape),
    }
    return table.double()[codes], absmax, tensors


def of_columns(absmax: Tensor, shape: tuple[int, int] = SHAPE) -> Tensor:
    return absmax.double().repeat_interleave(64)[: shape[0] * shape[1]].view(shape)


@pytest.mark.parametrize(("values", "shape"), [("nf4", SHAPE), ("fp4", SHAPE), ("nf4", OF_TWO_ROWS)])
def test_four_bits(values: str, shape: tuple[int, int]) -> None:
    numbers, absmax, tensors = four_bits(values, shape=shape)
    check(BitsAndBytes4(values=values), numbers * of_columns(absmax, shape), tensors)


def test_codes_stored_as_another_data_type() -> None:
    numbers, absmax, tensors = four_bits(item=torch.bfloat16)
    check(BitsAndBytes4(values="nf4", item=2), numbers * of_columns(absmax), tensors)


@pytest.mark.parametrize("shape", [SHAPE, OF_TWO_ROWS])
def test_quantized_scales(shape: tuple[int, int]) -> None:
    numbers, absmax, tensors = four_bits(shape=shape)
    codes = random_codes(3, 8, len(absmax))
    table = torch.linspace(-1, 1, 256)
    nested = torch.rand(2, generator=torch.Generator().manual_seed(4)) * 0.1
    tensors |= {
        ".weight.absmax": codes.to(torch.uint8),
        ".weight.nested_quant_map": table,
        ".weight.nested_absmax": nested,
        ".weight.quant_state.bitsandbytes__nf4": state(shape, nested_blocksize=256, nested_offset=0.7),
    }
    scales = table.double()[codes] * nested.double().repeat_interleave(256)[: len(codes)] + 0.7
    check(BitsAndBytes4(values="nf4", is_nested=True), numbers * of_columns(scales, shape), tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (".weight.quant_state.bitsandbytes__nf4", state(blocksize=128), "blocksize 128 is not supported; expected 64"),
        (".weight.quant_state.bitsandbytes__nf4", state((1024, 20)), r"shape \[1024, 20\]"),
        (".weight.quant_map", torch.linspace(-1, 1, 16), "quant_map is not that of nf4"),
    ],
)
def test_other_blocks_and_values_are_refused(name: str, tensor: Tensor, message: str) -> None:
    *_, tensors = four_bits()
    named = {MODULE + key: each for key, each in {**tensors, name: tensor}.items()}
    with pytest.raises(ConfigError, match=message):
        BitsAndBytes4Reader(BitsAndBytes4(values="nf4"), MODULE, SHAPE, named)


def test_eight_bits() -> None:
    numbers = random_codes(1, 8, 10, 40) - 128
    largest = torch.rand(10, generator=torch.Generator().manual_seed(2))
    tensors = {".weight": numbers.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    check(BitsAndBytes8(), numbers * largest.double()[:, None] / 127, tensors)


def test_eight_bits_in_tiles_are_refused() -> None:
    tensors = {
        f"{MODULE}.weight": torch.zeros(8, 8, dtype=torch.int8),
        f"{MODULE}.SCB": torch.ones(8),
        f"{MODULE}.weight_format": torch.tensor(1, dtype=torch.uint8),
    }
    with pytest.raises(ConfigError, match="weight_format"):
        BitsAndBytes8Reader(BitsAndBytes8(), MODULE, (8, 8), tensors)
