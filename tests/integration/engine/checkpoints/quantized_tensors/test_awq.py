"""AWQ against weights that are packed here, code by code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.quantization.awq import read
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.checkpoints.quantized_tensors.awq import AwqReader
from quire.engine.checkpoints.quantized_tensors.reader import Reader
from quire.engine.protocol.errors import ConfigError
from tests.integration.engine.checkpoints.quantized_tensors.layouts import check, open_reader

OUT, IN, GROUP = 48, 128, 32
ALL = (slice(0, OUT), slice(0, IN))


def pack(codes: Tensor) -> Tensor:
    """`[…, features]` in words `[…, features / 8]`."""
    words = torch.zeros((*codes.shape[:-1], codes.shape[-1] // 8), dtype=torch.int64)
    for place, feature in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[..., feature::8] << 4 * place
    return words.int()


class Checkpoint:
    """A random weight, and the tensors that stand for it."""

    def __init__(self, group: int = GROUP, zero_point: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.settings = {"bits": 4, "group_size": group, "zero_point": zero_point}
        of_columns = torch.arange(IN) // (group if group > 0 else IN)
        groups = int(of_columns[-1]) + 1
        codes = torch.randint(16, (IN, OUT), generator=generator)
        zeros = torch.randint(16, (groups, OUT), generator=generator)
        if not zero_point:
            zeros.fill_(8)
        scales = (torch.rand(groups, OUT, generator=generator) + 0.5).half()
        self.weight = ((codes - zeros[of_columns]) * scales.float()[of_columns]).T
        self.tensors = {".qweight": pack(codes), ".qzeros": pack(zeros), ".scales": scales}

    @property
    def scheme(self) -> Scheme:
        return read(self.settings).default

    def reader(self) -> Reader[Any]:
        return open_reader(self.scheme, (OUT, IN), self.tensors)

    def check(self) -> None:
        check(self.scheme, self.weight, self.tensors)


@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize("group", [GROUP, -1])
def test_slices(group: int, zero_point: bool) -> None:
    Checkpoint(group, zero_point).check()


def test_order_of_a_word() -> None:
    """AutoAWQ's, written out: features 7, 5, 3, 1, 6, 4, 2, 0 from the highest bits down."""
    checkpoint = Checkpoint()
    checkpoint.tensors[".qweight"] = torch.full((IN, OUT // 8), 0x75316420, dtype=torch.int32)
    codes = checkpoint.reader().codes((slice(0, 16), slice(0, 2)))
    assert codes.T.tolist() == [[*range(8), *range(8)]] * 2


def test_factors_of_rows_and_groups() -> None:
    checkpoint, cut = Checkpoint(), (slice(1, 40, 3), slice(1, 3))
    reader = checkpoint.reader()
    offsets = reader.offsets(cut)
    assert offsets is not None
    assert (reader.scales(cut).shape, offsets.shape) == ((13, 2), (13, 2))
    assert torch.equal(reader.scales(cut), checkpoint.tensors[".scales"][1:3, 1:40:3].T.float())


def test_symmetric_zero_points_need_not_be_stored() -> None:
    checkpoint = Checkpoint(zero_point=False)
    del checkpoint.tensors[".qzeros"]
    checkpoint.check()


def test_zero_points_that_are_not_symmetric() -> None:
    checkpoint = Checkpoint()
    checkpoint.settings["zero_point"] = False
    with pytest.raises(ConfigError, match=r"\.qzeros: not all zero points are 8.* set zero_point to true"):
        checkpoint.reader()[ALL]


def test_only_words_of_the_slice_are_unpacked() -> None:
    """The weight would need terabytes; all its words are one in memory."""
    size = 2**20
    scheme = read({"bits": 4, "group_size": 32}).default
    tensors = {
        name: torch.zeros((1, 1), dtype=torch.float16 if name == "q.scales" else torch.int32).expand(stored.shapes[0])
        for name, stored in scheme.tensors("q", (size, size)).items()
    }
    some = slice(size // 2 + 1, size // 2 + 50)
    assert AwqReader(scheme, "q", (size, size), tensors)[some, some].shape == (49, 49)
