"""GPTQ against weights that are packed here, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization.gptq import read
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.checkpoints.quantized_tensors.gptq import GptqReader
from quire.engine.checkpoints.quantized_tensors.reader import Reader
from quire.engine.protocol.errors import ConfigError
from quire.kernels.quantized import VALUES
from tests.integration.engine.checkpoints.quantized_tensors.layouts import check, open_reader

OUT, IN = 64, 128
ALL = (slice(0, OUT), slice(0, IN))


def pack(codes: Tensor, width: int) -> Tensor:
    """The last dimension in words: all bits in a row."""
    bits = codes.numpy()[..., None] >> np.arange(width) & 1
    octets = np.packbits(bits.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(octets.view(np.int32))


class Checkpoint:
    """A random weight, and the tensors that stand for it."""

    def __init__(self, bits: int, group: int = 32, sym: bool = False, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(bits)
        group_size = group if group > 0 else IN
        groups, order = IN // group_size, torch.arange(IN) // group_size
        if settings.get("desc_act"):
            order = order[torch.randperm(IN, generator=generator)]
        codes = torch.randint(2**bits, (OUT, IN), generator=generator)
        zeros = torch.randint(1, 2**bits, (OUT, groups), generator=generator)
        if sym:
            zeros.fill_(2 ** (bits - 1))
        scales = (torch.rand(OUT, groups, generator=generator) + 0.5).half()
        self.weight = (codes - zeros[:, order]) * scales.float()[:, order]
        stored = zeros if settings.get("checkpoint_format") == "gptq_v2" else zeros - 1
        self.tensors = {
            ".qweight": pack(codes, bits).T.contiguous(),
            ".qzeros": pack(stored.T.contiguous(), bits),
            ".scales": scales.T.contiguous(),
            ".g_idx": order.int(),
        }
        self.settings = {"bits": bits, "group_size": group, "sym": sym, **settings}

    @property
    def scheme(self) -> Scheme:
        return read(self.settings).default

    def reader(self) -> Reader[Any]:
        return open_reader(self.scheme, (OUT, IN), self.tensors)

    def check(self) -> None:
        check(self.scheme, self.weight, self.tensors)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_slices(bits: int, sym: bool) -> None:
    Checkpoint(bits, sym=sym).check()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "settings", [{"checkpoint_format": "gptq_v2"}, {"group": -1}, {"group": -1, "desc_act": True}, {"desc_act": True}]
)
def test_layouts(bits: int, settings: dict[str, Any]) -> None:
    Checkpoint(bits, **settings).check()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_codes_are_indices_of_values(bits: int, sym: bool) -> None:
    reader = Checkpoint(bits, sym=sym).reader()
    codes = reader.codes(ALL)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < len(VALUES[reader.scheme.values])
    assert (reader.offsets((slice(0, OUT), slice(0, 4))) is None) == sym


def test_factors_of_rows_and_groups() -> None:
    checkpoint = Checkpoint(4)
    cut = (slice(1, 40, 3), slice(1, 3))
    scales, offsets = checkpoint.reader().scales(cut), checkpoint.reader().offsets(cut)
    assert offsets is not None
    assert torch.equal(scales, checkpoint.tensors[".scales"][1:3, 1:40:3].T.float())
    first = (checkpoint.weight[1, 32] / scales[0, 0]).round() - checkpoint.reader().codes(ALL)[1, 32]
    assert first == offsets[0, 0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_zero_borrow_in_their_word(bits: int) -> None:
    checkpoint = Checkpoint(bits, checkpoint_format="gptq_v2")
    zeros = torch.arange(OUT).remainder(2).expand(4, OUT)
    checkpoint.tensors[".qzeros"] = pack(zeros, bits) - pack(torch.ones_like(zeros), bits)
    checkpoint.settings["checkpoint_format"] = "gptq"
    offsets = checkpoint.reader().offsets((slice(0, OUT), slice(0, 4)))
    assert offsets is not None
    assert torch.equal(offsets, -zeros.T.float())


def test_zero_points_of_zero_wrap_with_3_bits() -> None:
    checkpoint = Checkpoint(3)
    zeros = torch.arange(OUT).remainder(2).expand(4, OUT)
    checkpoint.tensors[".qzeros"] = pack((zeros - 1) & 7, 3)
    offsets = checkpoint.reader().offsets((slice(0, OUT), slice(0, 4)))
    assert offsets is not None
    assert torch.equal(offsets, -zeros.T.float())


def test_symmetric_zero_points_need_not_be_stored() -> None:
    checkpoint = Checkpoint(4, sym=True)
    del checkpoint.tensors[".qzeros"], checkpoint.tensors[".g_idx"]
    checkpoint.check()


def test_zero_points_that_are_not_symmetric() -> None:
    checkpoint = Checkpoint(4)
    checkpoint.settings["sym"] = True
    with pytest.raises(ConfigError, match=r"\.qzeros: not all zero points are 8.* set sym to false"):
        checkpoint.reader()[ALL]
    mislabelled = Checkpoint(4, sym=True)
    mislabelled.settings["checkpoint_format"] = "gptq_v2"
    with pytest.raises(ConfigError, match="not all zero points are 8"):
        mislabelled.reader()[ALL]


def test_columns_that_are_not_in_order() -> None:
    checkpoint = Checkpoint(4, desc_act=True)
    assert torch.equal(checkpoint.reader().order(), checkpoint.tensors[".g_idx"].long())  # type: ignore[arg-type]
    checkpoint.settings["desc_act"] = False
    with pytest.raises(ConfigError, match=r"\.g_idx: the columns are not in order.* set desc_act to true"):
        checkpoint.reader()


def test_zeros_in_place_of_the_order() -> None:
    checkpoint = Checkpoint(4)
    checkpoint.tensors[".g_idx"].zero_()
    assert checkpoint.reader().order() is None
    checkpoint.check()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_only_words_of_the_slice_are_unpacked(bits: int) -> None:
    """The weight would need terabytes; all its words are one in memory."""
    size = 2**20
    scheme = read({"bits": bits, "group_size": 32, "sym": False}).default
    tensors = {
        name: torch.zeros((1, 1), dtype=torch.float16 if name == "q.scales" else torch.int32).expand(stored.shapes[0])
        for name, stored in scheme.tensors("q", (size, size)).items()
        if name != "q.g_idx"
    }
    reader = GptqReader(scheme, "q", (size, size), tensors)
    some = slice(size // 2 + 1, size // 2 + 50)
    assert reader[some, some].shape == (49, 49)
