"""`QUIRE_CPU_ISA` makes a processor a lesser one: in what Quire chooses, and in what it compiles."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from quire import kernels
from quire.kernels import isa, linear
from quire.kernels.cpu import build

needs_avx2 = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="needs AVX2")


def test_without_it_the_processor_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "native"):
        monkeypatch.setenv("QUIRE_CPU_ISA", value)
        assert isa.has("avx512") == torch.cpu._is_avx512_supported()
        assert isa.has("avx512_bf16") == torch.cpu._is_avx512_bf16_supported()
        assert isa.compiler_flag() == "-march=native"
        assert isa.has("avx_vnni") == torch.cpu.get_capabilities()["avx_vnni"]


@needs_avx2
def test_avx2_is_all_there_is(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "native")
    native = build._key("c++")
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    assert [feature for feature in get_args(isa.Feature) if isa.has(feature)] == ["avx2"]
    assert isa.compiler_flag() == "-march=x86-64-v3"
    assert build._key("c++") != native
    if implementation == "cpu":  # the same forms as elsewhere, for all but AMX
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert type(kernels.pack_linear(torch.zeros(2, 4, dtype=dtype))) is linear.TiledLinear
    else:  # oneDNN takes no bfloat16 there
        assert type(kernels.pack_linear(torch.zeros(2, 4, dtype=torch.bfloat16))) is linear.PlainLinear
    assert type(kernels.pack_linear(torch.zeros(2, 4), "int8")) is linear.Int8Linear
    assert type(kernels.pack_linear(torch.zeros(2, 32), "int4")) is linear.Int4Linear


@pytest.mark.skipif(not isa._is_supported("avx_vnni"), reason="needs AVX-VNNI")
def test_avx_vnni_comes_on_top_of_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx_vnni")
    assert [feature for feature in get_args(isa.Feature) if isa.has(feature)] == ["avx2", "avx_vnni"]
    assert isa.compiler_flag() == "-march=x86-64-v3 -mavxvnni"


def test_what_is_not_known_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="QUIRE_CPU_ISA is 'sse9'; it must be native, avx2, avx_vnni"):
        isa.has("avx2")
    monkeypatch.setattr(isa, "_is_supported", lambda feature: False)
    for name in ("avx2", "avx_vnni"):
        monkeypatch.setenv("QUIRE_CPU_ISA", name)
        with pytest.raises(ValueError, match=f"QUIRE_CPU_ISA is {name}, which this processor does not have"):
            isa.has("avx2")
